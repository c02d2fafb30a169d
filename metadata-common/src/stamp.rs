//! How a frame carries its sender's identity between the kernel and user space.
//!
//! On its way to the hub the source MAC has done its work: the kernel has matched it against the port
//! and knows the slot. `port` therefore overwrites those six octets with a *stamp* that names the slot;
//! user space answers to the stamp as it would to any MAC; `hub` reads the slot from the destination of
//! the answer, puts the guest's MAC back and sends the frame to the guest's port. No header is added, so
//! a full-sized frame still fits the MTU.

use crate::mac::Mac;
use crate::maps::Slot;

/// First two octets of every stamp: locally administered, unicast, and not [`Mac::SERVICE`].
pub const STAMP_PREFIX: [u8; 2] = [0x02, 0x5d];

/// The stamp of a slot, in the shape of a MAC address.
#[must_use]
pub const fn stamp(slot: Slot) -> Mac {
    let [a, b, c, d] = slot.to_be_bytes();
    Mac([STAMP_PREFIX[0], STAMP_PREFIX[1], a, b, c, d])
}

/// The slot a stamp names, or `None` for any other address.
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
    fn every_slot_comes_back_from_its_stamp() {
        for slot in [0, 1, 255, 256, 65_535, 65_536, u32::MAX] {
            assert_eq!(slot_of(stamp(slot)), Some(slot));
        }
    }

    #[test]
    fn ordinary_addresses_are_no_stamps() {
        assert_eq!(slot_of(Mac::SERVICE), None);
        assert_eq!(slot_of(Mac::BROADCAST), None);
    }
}
