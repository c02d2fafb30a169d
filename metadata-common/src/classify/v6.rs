//! Classifies IPv6 to, from or through a served address, or to one that translates to a served IPv4 address.

use core::hint::black_box;

use super::{Outcome, PassReason, Reader, ServedAddresses, TRUNCATED, forget, sent_to_group};
use crate::verdict::Verdict;
use crate::wire::{ipv6, neighbour, protocol};

/// No parsed extension header starts beyond this offset, in bytes. Only jumbo frames are longer.
const REACH_MASK: usize = 0x3fff;

const ELSEWHERE: PassReason = PassReason::Now(Verdict::PassIpv6);

/// Classifies a datagram by its addresses and, for neighbour discovery, its target; without extension
/// headers.
#[inline(always)]
pub(super) fn classify(frame: &(impl Reader + ?Sized), at: usize, served: &impl ServedAddresses) -> Outcome {
    // The addresses are read one after the other, to use less stack.
    let message = at + ipv6::HEADER;
    let source = frame.read_afresh::<16>(at + ipv6::SOURCE).ok_or(TRUNCATED)?;
    let claims = served.serves_v6(source);
    let destination = frame.read_afresh::<16>(at + ipv6::DESTINATION).ok_or(TRUNCATED)?;
    let serves = served.serves_v6(destination);
    let [next_header, hop_limit] = frame.read_afresh(at + ipv6::NEXT_HEADER).ok_or(TRUNCATED)?;
    if claims {
        let kind = frame.read_afresh(message + neighbour::TYPE - 1).map(|[_, kind]| kind);
        let discovers = next_header == protocol::ICMPV6
            && kind.is_some_and(|kind| (neighbour::FIRST..=neighbour::LAST).contains(&kind));
        return Ok(if discovers { Verdict::DropNeighbourClaim } else { Verdict::DropSourceClaim });
    }
    if serves {
        let [first, _] = frame.read_afresh(at).ok_or(TRUNCATED)?;
        return Ok(to_served(frame, first, next_header));
    }
    let destination = frame.read_afresh::<16>(at + ipv6::DESTINATION).ok_or(TRUNCATED)?;
    if translated(destination).is_some_and(|v4| served.serves_v4(v4)) {
        return Ok(Verdict::DropTranslated);
    }
    match next_header {
        protocol::ICMPV6 => match discovery(frame, message, served)? {
            (neighbour::SOLICITATION, 0) if hop_limit == neighbour::HOP_LIMIT => Ok(Verdict::SteerNeighbour),
            (neighbour::SOLICITATION, _) => Ok(Verdict::DropNeighbourInvalid),
            _ => Ok(Verdict::DropNeighbourClaim),
        },
        protocol::HOP_BY_HOP
        | protocol::DESTINATION_OPTIONS
        | protocol::ROUTING
        | protocol::FRAGMENT
        | protocol::AH => Err(PassReason::LookBehind(next_header)),
        _ => Err(ELSEWHERE),
    }
}

/// Classifies a datagram to a served address.
#[inline(always)]
fn to_served(frame: &(impl Reader + ?Sized), first: u8, next_header: u8) -> Verdict {
    if first >> 4 != ipv6::VERSION {
        return Verdict::DropIpv6Malformed;
    }
    match next_header {
        protocol::FRAGMENT => Verdict::DropIpv6Fragment,
        extension if protocol::is_extension(extension) => Verdict::DropIpv6Extension,
        _ if sent_to_group(frame) => Verdict::DropGroupDestination,
        protocol::TCP => Verdict::SteerIpv6Tcp,
        protocol::ICMPV6 => Verdict::SteerIpv6Icmp,
        protocol::UDP => Verdict::DropIpv6Udp,
        _ => Verdict::DropIpv6Protocol,
    }
}

/// The type and code of a solicitation or advertisement for a served target; `Err` for any other message.
#[inline(always)]
fn discovery(
    frame: &(impl Reader + ?Sized),
    message: usize,
    served: &impl ServedAddresses,
) -> Result<(u8, u8), PassReason> {
    let [kind, code] = frame.read_afresh::<2>(message + neighbour::TYPE).ok_or(TRUNCATED)?;
    if kind != neighbour::SOLICITATION && kind != neighbour::ADVERTISEMENT {
        return Err(ELSEWHERE);
    }
    let whole: [u8; neighbour::LEN] = frame.read_afresh(message).ok_or(TRUNCATED)?;
    let [_, _, _, _, _, _, _, _, target @ ..] = whole;
    if served.serves_v6(target) { Ok((kind, code)) } else { Err(ELSEWHERE) }
}

/// The IPv4 address embedded in an IPv6 address: translated (64:ff9b::/96, RFC 6052 §2.1), mapped or
/// compatible (::ffff:0:0/96 and ::/96, RFC 4291 §2.5.5), or tunnelled (2002::/16, RFC 3056 §2). The prefix
/// of a local translator (RFC 6052 §2.2) is unknown here.
#[inline(always)]
fn translated(address: [u8; 16]) -> Option<[u8; 4]> {
    let [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, last @ ..] = address;
    let high = u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
    let middle = u32::from_be_bytes([a8, a9, a10, a11]);
    match (high, middle) {
        (0x0064_ff9b_0000_0000, 0) | (0, 0 | 0xffff) => Some(last),
        _ if high >> 48 == 0x2002 => Some([a2, a3, a4, a5]),
        _ => None,
    }
}

/// Like [`classify`], with extension headers. In a datagram to another address, it searches for a route
/// through a served address and for neighbour discovery about one.
#[inline(always)]
pub(super) fn look_behind(
    frame: &(impl Reader + ?Sized),
    at: usize,
    salt: u32,
    served: &impl ServedAddresses,
) -> Outcome {
    let mut kind = match classify(frame, at, served) {
        Err(PassReason::LookBehind(next_header)) => next_header,
        outcome => return outcome,
    };
    let mut at = forget(at + ipv6::HEADER, salt, REACH_MASK);
    let mut route = None;
    for turn in 0..=ipv6::MAX_EXTENSIONS {
        let length = match kind {
            protocol::HOP_BY_HOP | protocol::DESTINATION_OPTIONS | protocol::ROUTING => 8,
            protocol::FRAGMENT => 0,
            protocol::AH => 4,
            _ => break,
        };
        if turn == ipv6::MAX_EXTENSIONS {
            return Ok(Verdict::DropIpv6Routing);
        }
        let [next, units, o0, o1] = frame.read_afresh::<4>(at).ok_or(TRUNCATED)?;
        if kind == protocol::FRAGMENT && u16::from_be_bytes([o0, o1]) & ipv6::FRAGMENT_OFFSET != 0 {
            // The payload is a later fragment, so it has no further header.
            return Err(ELSEWHERE);
        }
        if kind == protocol::ROUTING && route.replace((at, units)).is_some() {
            // No sender needs two (RFC 8200 §4.1).
            return Ok(Verdict::DropIpv6Routing);
        }
        kind = next;
        // A header's length does not count its first eight bytes. Its unit is eight bytes, for AH four (RFC
        // 4302 §2.2).
        at = forget(at + 8 + units as usize * length, salt, REACH_MASK);
    }
    if let Some((at, units)) = route
        && routes_through(frame, at, units as usize / 2, served)?
    {
        return Ok(Verdict::DropIpv6Routing);
    }
    if kind != protocol::ICMPV6 {
        return Err(ELSEWHERE);
    }
    match discovery(frame, at, served)? {
        (neighbour::SOLICITATION, _) => Ok(Verdict::DropIpv6Extension),
        _ => Ok(Verdict::DropNeighbourClaim),
    }
}

/// True if an address in the routing header is served, or if there are more than [`ipv6::MAX_SEGMENTS`].
#[inline(always)]
fn routes_through(
    frame: &(impl Reader + ?Sized),
    at: usize,
    segments: usize,
    served: &impl ServedAddresses,
) -> Result<bool, PassReason> {
    if segments > ipv6::MAX_SEGMENTS {
        return Ok(true);
    }
    let mut segment = 0;
    while segment < ipv6::MAX_SEGMENTS {
        if segment >= segments {
            break;
        }
        let address = frame.read_afresh::<16>(at + ipv6::SEGMENTS + 16 * segment).ok_or(TRUNCATED)?;
        if served.serves_v6(address) {
            return Ok(true);
        }
        // `black_box` keeps this a loop; unrolled, it would be too much code.
        segment = black_box(segment + 1);
    }
    Ok(false)
}
