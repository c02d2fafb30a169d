//! Carries the sender's identity in a frame between the kernel and user space.
//!
//! The `port` program looks up the source MAC on its port and finds the slot. It then overwrites the source
//! MAC with a *stamp* that encodes the slot. User space treats the stamp as an ordinary MAC and replies to
//! it. The `hub` program decodes the slot from the destination of the reply, restores the guest's MAC and
//! sends the frame to the guest's port. No header is added, so a full-sized frame still fits the MTU.

use crate::mac::Mac;
use crate::maps::Slot;

/// The first two bytes of every stamp. The prefix is locally administered, unicast and different from
/// [`Mac::SERVICE`].
pub const STAMP_PREFIX: [u8; 2] = [0x02, 0x5d];

/// Encodes a slot as a MAC address.
#[must_use]
pub const fn stamp(slot: Slot) -> Mac {
    let [a, b, c, d] = slot.to_be_bytes();
    Mac([STAMP_PREFIX[0], STAMP_PREFIX[1], a, b, c, d])
}

/// Decodes the slot from a stamp; `None` for any other address.
#[must_use]
pub const fn slot_of(mac: Mac) -> Option<Slot> {
    let [p, q, a, b, c, d] = mac.0;
    if p == STAMP_PREFIX[0] && q == STAMP_PREFIX[1] { Some(Slot::from_be_bytes([a, b, c, d])) } else { None }
}

#[cfg(test)]
mod tests {
    use super::{slot_of, stamp};
    use crate::mac::Mac;

    #[test]
    fn a_stamp_decodes_to_its_slot() {
        for slot in [0, 1, 255, 256, 65_535, 65_536, u32::MAX] {
            assert_eq!(slot_of(stamp(slot)), Some(slot));
        }
    }

    #[test]
    fn ordinary_addresses_are_not_stamps() {
        assert_eq!(slot_of(Mac::SERVICE), None);
        assert_eq!(slot_of(Mac::BROADCAST), None);
    }
}
