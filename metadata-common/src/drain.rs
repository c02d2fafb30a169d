//! Which agent a frame goes to while one hands over to the next.
//!
//! Both are at work then, each with hubs of its own. The one that is leaving has claimed the connections it still
//! serves; all else is for the one that follows. That is decided frame by frame, here, so that neither needs to
//! know what the other has.

use crate::classify::Reader;
use crate::cookie::{Flow, Key};
use crate::maps::{Identity, Slot};
use crate::verdict::Verdict;
use crate::wire::{ethernet, ipv4, ipv6};

/// What has been claimed by an agent that is leaving.
pub trait Claims {
    /// The key of handshakes, which both agents have.
    fn key(&self) -> Key;
    /// True for a connection that still belongs to the leaving agent.
    fn is_claimed(&self, flow: Flow) -> bool;
}

/// The hub a steered frame goes to.
#[inline(always)]
pub fn hub(
    frame: &(impl Reader + ?Sized),
    steered: Verdict,
    identity: Identity,
    claims: &impl Claims,
) -> u32 {
    if identity.drain == 0 {
        return identity.hub;
    }
    match flow(frame, steered, identity.slot, &claims.key()) {
        Some(flow) if claims.is_claimed(flow) => identity.drain - 1,
        _ => identity.hub,
    }
}

/// The connection a steered frame belongs to; `None` for what is not TCP. Steered frames have neither tags nor IP
/// options nor extension headers.
#[inline(always)]
pub fn flow(frame: &(impl Reader + ?Sized), steered: Verdict, slot: Slot, key: &Key) -> Option<Flow> {
    const AT: usize = ethernet::HEADER;
    match steered {
        Verdict::SteerIpv4Tcp => {
            let guest = frame.read(AT + ipv4::SOURCE)?;
            let local = frame.read(AT + ipv4::DESTINATION)?;
            let ports = frame.read(AT + ipv4::HEADER)?;
            Some(Flow::v4(key, slot, guest, local, ports))
        }
        Verdict::SteerIpv6Tcp => {
            let guest = frame.read(AT + ipv6::SOURCE)?;
            let local = frame.read(AT + ipv6::DESTINATION)?;
            let ports = frame.read(AT + ipv6::HEADER)?;
            Some(Flow::v6(key, slot, guest, local, ports))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Claims, flow, hub};
    use crate::cookie::{Flow, Key};
    use crate::maps::Identity;
    use crate::verdict::Verdict;
    use std::vec::Vec;

    const KEY: Key = Key([1, 2]);
    const LEAVING: Identity = Identity { slot: 7, hub: 33, drain: 1 + 5, reserved: 0 };

    struct Claimed(Option<Flow>);

    impl Claims for Claimed {
        fn key(&self) -> Key {
            KEY
        }

        fn is_claimed(&self, flow: Flow) -> bool {
            self.0 == Some(flow)
        }
    }

    /// A frame of 80 octets, each its own number.
    fn frame() -> Vec<u8> {
        (0..80).collect()
    }

    fn flows() -> [(Verdict, Flow); 2] {
        let six = |from: u8| core::array::from_fn(|n| from + n as u8);
        [
            (Verdict::SteerIpv4Tcp, Flow::v4(&KEY, 7, [26, 27, 28, 29], [30, 31, 32, 33], [34, 35, 36, 37])),
            (Verdict::SteerIpv6Tcp, Flow::v6(&KEY, 7, six(22), six(38), [54, 55, 56, 57])),
        ]
    }

    #[test]
    fn a_claimed_connection_goes_to_the_agent_that_is_leaving_and_every_other_to_the_next() {
        for (verdict, flow) in flows() {
            let to = |identity, claimed| hub(&frame()[..], verdict, identity, &Claimed(claimed));
            assert_eq!(to(LEAVING, Some(flow)), 5, "{verdict:?}");
            assert_eq!(to(LEAVING, None), 33, "{verdict:?}");
            let strangers = flows().into_iter().filter(|(other, _)| *other != verdict);
            for (_, stranger) in strangers {
                assert_eq!(to(LEAVING, Some(stranger)), 33, "{verdict:?}");
            }
            assert_eq!(to(Identity { drain: 0, ..LEAVING }, Some(flow)), 33, "nobody is leaving");
        }
    }

    #[test]
    fn only_tcp_can_be_claimed() {
        let other = Verdict::ALL.iter().filter(|verdict| !flows().iter().any(|(tcp, _)| tcp == *verdict));
        for verdict in other {
            assert_eq!(flow(&frame()[..], *verdict, 7, &KEY), None, "{verdict:?}");
        }
    }

    #[test]
    fn a_frame_that_ends_before_its_ports_is_the_next_agents() {
        for (verdict, flow) in flows() {
            let needed = if verdict == Verdict::SteerIpv4Tcp { 38 } else { 58 };
            let claimed = Claimed(Some(flow));
            assert_eq!(hub(&frame()[..needed], verdict, LEAVING, &claimed), 5);
            assert_eq!(hub(&frame()[..needed - 1], verdict, LEAVING, &claimed), 33);
        }
    }
}
