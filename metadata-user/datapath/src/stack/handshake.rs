//! The answer to a SYN, after which nothing is remembered.
//!
//! The kernel answers most SYNs itself, by the same rules: a SYN and its repetitions get the same number
//! from either, but for those whose four-tuple has a connection, which only come here.

use metadata_common::answer::{SEGMENT_UNSAID_V4, SEGMENT_UNSAID_V6, segment_v4, segment_v6};
use metadata_common::cookie::{Abilities, Flow, Key, SCALE_MAX, again, issue};

use super::config::RECEIVE_BUFFER;
use super::emit::Header;
use super::frame::Route;
use super::segment::{SYN, Segment};

const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;
const WINDOW_SCALE: u8 = 3;

/// Octets of payload that fit a packet of ours to a device with this MTU; 0 for one that is not known.
pub(super) const fn largest_segment(is_ipv4: bool, mtu: u32) -> u16 {
    if is_ipv4 { segment_v4(mtu) } else { segment_v6(mtu) }
}

/// Octets of payload that every host takes over IPv4, and every link over IPv6 (RFC 9293 §3.7.1).
pub(super) const fn safe_segment(is_ipv4: bool) -> u16 {
    if is_ipv4 { SEGMENT_UNSAID_V4 } else { SEGMENT_UNSAID_V6 }
}

/// What a SYN says about its sender, whose link takes segments of `largest` octets. Without a size, or with size 0, it
/// takes what every host does. Of two sizes the latter counts, as in the kernel.
pub(super) fn abilities(segment: &Segment<'_>, largest: u16) -> Abilities {
    let is_ipv4 = segment.tuple.remote.0.is_ipv4();
    let mut said = Abilities { segment: safe_segment(is_ipv4), scale: None };
    let mut rest = segment.options;
    // Each option is an octet at least, and there are 40.
    while let [kind, after @ ..] = rest {
        match *kind {
            END => break,
            NO_OPERATION => {
                rest = after;
                continue;
            }
            _ => {}
        }
        let Some(option) = after.first().and_then(|length| rest.get(..usize::from(*length))) else { break };
        match option {
            [MAXIMUM_SEGMENT_SIZE, 4, high, low] => {
                said.segment = match u16::from_be_bytes([*high, *low]) {
                    0 => safe_segment(is_ipv4),
                    size => size.min(largest),
                };
            }
            [WINDOW_SCALE, 3, shift] => said.scale = Some((*shift).min(SCALE_MAX)),
            // Shorter than its own header: nothing after it can be found.
            [] | [_] => break,
            _ => {}
        }
        rest = &rest[option.len()..];
    }
    said
}

/// The sequence number to answer a SYN with, whose sender and we take segments of `largest` octets at most: never
/// `taken`, that of the connection its flow has.
pub(super) fn number(key: &Key, flow: Flow, largest: u16, segment: &Segment<'_>, taken: Option<u32>) -> u32 {
    let number = issue(key, flow, segment.seq, abilities(segment, largest));
    if taken == Some(number) { again(number) } else { number }
}

/// Builds the SYN-ACK with this sequence number, which announces segments of `largest` octets (RFC 9293 §3.10.7.2).
/// Returns its length.
pub(super) fn answer(
    number: u32,
    largest: u16,
    segment: &Segment<'_>,
    route: Route,
    frame: &mut [u8],
) -> usize {
    let said = abilities(segment, largest);
    let [high, low] = largest.to_be_bytes();
    let options = [MAXIMUM_SEGMENT_SIZE, 4, high, low, NO_OPERATION, WINDOW_SCALE, 3, 0];
    let header = Header {
        seq: number,
        ack: Some(segment.seq.wrapping_add(1)),
        flags: SYN,
        window: RECEIVE_BUFFER as u16,
        // A scale only for those who offer one (RFC 7323 §2.2); ours is 0.
        options: if said.scale.is_some() { &options } else { &options[..4] },
    };
    header.emit(&segment.tuple, route, frame)
}

#[cfg(test)]
mod tests {
    use super::abilities;
    use crate::stack::segment::{SYN, Segment, Tuple};
    use metadata_common::cookie::Abilities;
    use std::net::IpAddr;

    #[test]
    fn options_are_read_as_far_as_they_make_sense() {
        let v4 = IpAddr::from([10, 0, 0, 1]);
        let v6 = IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 1]);
        type Case = (&'static str, IpAddr, &'static [u8], (u16, Option<u8>));
        let cases: [Case; 14] = [
            ("none", v4, &[], (536, None)),
            ("none over IPv6", v6, &[], (1220, None)),
            ("a size", v4, &[2, 4, 5, 180], (1460, None)),
            ("a size too large", v4, &[2, 4, 255, 255], (1460, None)),
            ("a size too large over IPv6", v6, &[2, 4, 5, 180], (1440, None)),
            ("size 0", v4, &[2, 4, 0, 0], (536, None)),
            ("two sizes", v4, &[2, 4, 5, 180, 2, 4, 4, 0], (1024, None)),
            ("a size, then size 0", v4, &[2, 4, 5, 180, 2, 4, 0, 0], (536, None)),
            ("Linux", v4, &[2, 4, 5, 180, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7], (1460, Some(7))),
            ("a shift too far", v4, &[3, 3, 200, 0], (536, Some(14))),
            ("after the end", v4, &[0, 2, 4, 5, 180, 0, 0, 0], (536, None)),
            ("length 0", v4, &[9, 0, 2, 4, 5, 180, 0, 0], (536, None)),
            ("length 1", v4, &[9, 1, 2, 4, 5, 180, 0, 0], (536, None)),
            ("cut off", v4, &[1, 1, 2, 4], (536, None)),
        ];
        for (name, guest, options, (size, scale)) in cases {
            let tuple = Tuple { remote: (guest, 1), local: (guest, 80) };
            let segment = Segment { tuple, seq: 1, ack: None, window: 1, flags: SYN, options, payload: &[] };
            let largest = super::largest_segment(guest.is_ipv4(), 0);
            assert_eq!(abilities(&segment, largest), Abilities { segment: size, scale }, "{name}");
        }
    }

    #[test]
    fn segments_fit_the_mtu_of_a_frame_of_ours() {
        assert_eq!(super::largest_segment(true, 0) as usize, crate::stack::MTU - 40);
        assert_eq!(super::largest_segment(false, 0) as usize, crate::stack::MTU - 60);
    }
}
