//! Classifies IPv4 to, from or through a served address.

use core::hint::black_box;

use super::{Outcome, PassReason, Reader, ServedAddresses, TRUNCATED, sent_to_group};
use crate::verdict::Verdict;
use crate::wire::{ipv4, protocol};

/// Classifies a datagram by its addresses, without its options.
#[inline(always)]
pub(super) fn classify(frame: &(impl Reader + ?Sized), at: usize, served: &impl ServedAddresses) -> Outcome {
    // The addresses are read one after the other, to use less stack.
    let source = frame.read_afresh(at + ipv4::SOURCE).ok_or(TRUNCATED)?;
    let destination = frame.read_afresh(at + ipv4::DESTINATION).ok_or(TRUNCATED)?;
    if served.serves_v4(source) {
        return Ok(Verdict::DropSourceClaim);
    }
    let serves = served.serves_v4(destination);
    let [version_ihl, _] = frame.read_afresh(at).ok_or(TRUNCATED)?;
    if !serves {
        let options = version_ihl > ipv4::VERSION_IHL && version_ihl >> 4 == ipv4::VERSION;
        return Err(if options {
            PassReason::LookBehind(version_ihl)
        } else {
            PassReason::Now(Verdict::PassIpv4)
        });
    }
    let fragment = frame.read_afresh(at + ipv4::FRAGMENT).map(u16::from_be_bytes).ok_or(TRUNCATED)?;
    let [_, protocol] = frame.read_afresh(at + ipv4::TTL).ok_or(TRUNCATED)?;
    Ok(if version_ihl >> 4 != ipv4::VERSION || version_ihl & 0xf < ipv4::MIN_IHL {
        Verdict::DropIpv4Malformed
    } else if version_ihl != ipv4::VERSION_IHL {
        Verdict::DropIpv4Options
    } else if fragment & ipv4::FRAGMENT_BITS != 0 {
        Verdict::DropIpv4Fragment
    } else if sent_to_group(frame) {
        Verdict::DropGroupDestination
    } else {
        match protocol {
            protocol::TCP => Verdict::SteerIpv4Tcp,
            protocol::ICMP => Verdict::SteerIpv4Icmp,
            protocol::UDP => Verdict::DropIpv4Udp,
            _ => Verdict::DropIpv4Protocol,
        }
    })
}

/// Like [`classify`], with options (RFC 791 §3.1). In a datagram to another address, it searches for a served
/// address after any byte that may begin a source route. It does not parse option by option, so malformed
/// options hide nothing.
#[inline(always)]
pub(super) fn look_behind(
    frame: &(impl Reader + ?Sized),
    at: usize,
    served: &impl ServedAddresses,
) -> Outcome {
    let version_ihl = match classify(frame, at, served) {
        Err(PassReason::LookBehind(version_ihl)) => version_ihl,
        outcome => return outcome,
    };
    let header = (version_ihl & 0xf) as usize * 4;
    let mut routed = 0;
    let mut from = ipv4::HEADER;
    while from <= ipv4::MAX_HEADER - 4 {
        if from + 4 > header {
            break;
        }
        let bytes: [u8; 4] = frame.read_afresh(at + from).ok_or(TRUNCATED)?;
        if routed != 0 && served.serves_v4(bytes) {
            return Ok(Verdict::DropIpv4SourceRoute);
        }
        routed |= matches!(bytes[0], ipv4::LOOSE_ROUTE | ipv4::STRICT_ROUTE) as u32;
        // `black_box` keeps this a loop; unrolled, it would be most of the program.
        from = black_box(from + 1);
    }
    Err(PassReason::Now(Verdict::PassIpv4))
}
