//! Selects the agent that receives a frame during a handover.
//!
//! During a handover the previous agent and the new agent run at the same time, each with its own hubs. The
//! previous agent claims the connections it still serves; every other frame goes to the new agent. The kernel
//! decides this per frame, so the agents do not need to know each other's connections.

use crate::classify::Reader;
use crate::cookie::{CookieKey, Flow};
use crate::maps::{Identity, Slot};
use crate::verdict::Verdict;
use crate::wire::{ethernet, ipv4, ipv6};

/// The connections claimed by the previous agent.
pub trait Claims {
    /// The handshake key, which both agents share.
    fn key(&self) -> CookieKey;
    /// True for a connection that the previous agent still serves.
    fn is_claimed(&self, flow: Flow) -> bool;
}

/// The number of the hub that receives a steered frame.
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

/// The connection of a steered frame; `None` if the frame is not TCP or ends before the ports. Steered frames
/// have no VLAN tags, IP options or extension headers, so the offsets are fixed.
#[inline(always)]
pub fn flow(frame: &(impl Reader + ?Sized), steered: Verdict, slot: Slot, key: &CookieKey) -> Option<Flow> {
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
    use crate::cookie::{CookieKey, Flow};
    use crate::maps::Identity;
    use crate::verdict::Verdict;
    use std::vec::Vec;

    const KEY: CookieKey = CookieKey([1, 2]);
    const HANDOVER: Identity = Identity { slot: 7, hub: 33, drain: 1 + 5, reserved: 0 };

    struct Claimed(Option<Flow>);

    impl Claims for Claimed {
        fn key(&self) -> CookieKey {
            KEY
        }

        fn is_claimed(&self, flow: Flow) -> bool {
            self.0 == Some(flow)
        }
    }

    /// A frame of 80 bytes; the value of each is its offset.
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
    fn a_claimed_connection_goes_to_the_previous_agent_others_to_the_new_one() {
        for (verdict, flow) in flows() {
            let to = |identity, claimed| hub(&frame()[..], verdict, identity, &Claimed(claimed));
            assert_eq!(to(HANDOVER, Some(flow)), 5, "{verdict:?}");
            assert_eq!(to(HANDOVER, None), 33, "{verdict:?}");
            let strangers = flows().into_iter().filter(|(other, _)| *other != verdict);
            for (_, stranger) in strangers {
                assert_eq!(to(HANDOVER, Some(stranger)), 33, "{verdict:?}");
            }
            assert_eq!(to(Identity { drain: 0, ..HANDOVER }, Some(flow)), 33, "no handover is under way");
        }
    }

    #[test]
    fn only_tcp_connections_can_be_claimed() {
        let other = Verdict::ALL.iter().filter(|verdict| !flows().iter().any(|(tcp, _)| tcp == *verdict));
        for verdict in other {
            assert_eq!(flow(&frame()[..], *verdict, 7, &KEY), None, "{verdict:?}");
        }
    }

    #[test]
    fn a_frame_that_ends_before_its_ports_goes_to_the_new_agent() {
        for (verdict, flow) in flows() {
            let needed = if verdict == Verdict::SteerIpv4Tcp { 38 } else { 58 };
            let claimed = Claimed(Some(flow));
            assert_eq!(hub(&frame()[..needed], verdict, HANDOVER, &claimed), 5);
            assert_eq!(hub(&frame()[..needed - 1], verdict, HANDOVER, &claimed), 33);
        }
    }
}
