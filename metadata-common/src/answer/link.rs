//! Answers ARP requests (RFC 826) and neighbour solicitations (RFC 4861 §4.3) for a served address.
//!
//! The answers equal those of the user-space stack: they carry the service's MAC and go to the sender's MAC.

use super::{Editor, Reply, put, sum};
use crate::mac::Mac;
use crate::verdict::Verdict;
use crate::wire::{arp, ethernet, ipv6, neighbour, protocol};

const ARP_LAST: usize = ethernet::HEADER + arp::LEN - 1;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;

/// Answers a request, including a probe from 0.0.0.0 (RFC 5227 §2.1.1). `None` for a reply, which user space
/// ignores.
#[inline(always)]
pub(super) fn arp(frame: &mut (impl Editor + ?Sized)) -> Option<Reply> {
    let from: [u8; 6] = frame.read(ethernet::SOURCE)?;
    let operation: [u8; 2] = frame.read(ethernet::HEADER + arp::OPERATION)?;
    let sender: [u8; 10] = frame.read(ethernet::HEADER + arp::SENDER_MAC)?;
    let target: [u8; 4] = frame.read(ethernet::HEADER + arp::TARGET_IP)?;
    if u16::from_be_bytes(operation) != REQUEST {
        return None;
    }
    frame.read::<1>(ARP_LAST)?;
    let mut at = address(frame, from, ethernet::HEADER + arp::OPERATION)?;
    at = put(frame, at, REPLY.to_be_bytes())?;
    at = put(frame, at, Mac::SERVICE.0)?;
    at = put(frame, at, target)?;
    at = put(frame, at, sender)?;
    Some(Reply::Send(Verdict::AnswerArp, at))
}

/// Length in bytes of a solicitation with one option of eight bytes, the sender's link-layer address. Every
/// stack sends this option. It leaves the room for the option of our answer.
pub(super) const SOLICITATION: usize = neighbour::LEN + 8;
const NEIGHBOUR_LAST: usize = ethernet::HEADER + ipv6::HEADER + SOLICITATION - 1;

/// Answers a solicitation (RFC 4861 §7.2.4). `None` for one from the unspecified address (duplicate address
/// detection): it carries no option, so the answer would be longer.
#[inline(always)]
pub(super) fn neighbour(frame: &mut (impl Editor + ?Sized)) -> Option<Reply> {
    const AT: usize = ethernet::HEADER;
    let from: [u8; 6] = frame.read(ethernet::SOURCE)?;
    let length: [u8; 2] = frame.read(AT + ipv6::PAYLOAD_LENGTH)?;
    let guest: [u8; 16] = frame.read(AT + ipv6::SOURCE)?;
    let target: [u8; 16] = frame.read(AT + ipv6::HEADER + neighbour::TARGET)?;
    if u16::from_be_bytes(length) as usize != SOLICITATION || !super::tcp::is_station_v6(guest) {
        return None;
    }
    frame.read::<1>(NEIGHBOUR_LAST)?;
    let [m0, m1, m2, m3, m4, m5] = Mac::SERVICE.0;
    let option = [neighbour::TARGET_LINK_ADDRESS, 1, m0, m1, m2, m3, m4, m5];
    let sum = sum::address(target) * 2
        + sum::address(guest)
        + SOLICITATION as u32
        + protocol::ICMPV6 as u32
        + ((neighbour::ADVERTISEMENT as u32) << 8)
        + sum::long(neighbour::SOLICITED_OVERRIDE)
        + sum::long(u32::from_be_bytes([neighbour::TARGET_LINK_ADDRESS, 1, m0, m1]))
        + sum::long(u32::from_be_bytes([m2, m3, m4, m5]));
    let mut at = address(frame, from, AT)?;
    at = put(frame, at, [ipv6::VERSION << 4, 0, 0, 0])?;
    at = put(frame, at, length)?;
    at = put(frame, at, [protocol::ICMPV6, neighbour::HOP_LIMIT])?;
    at = put(frame, at, target)?;
    at = put(frame, at, guest)?;
    at = put(frame, at, [neighbour::ADVERTISEMENT, 0])?;
    at = put(frame, at, sum::finish(sum))?;
    at = put(frame, at, neighbour::SOLICITED_OVERRIDE.to_be_bytes())?;
    at = put(frame, at, target)?;
    at = put(frame, at, option)?;
    Some(Reply::Send(Verdict::AnswerNeighbour, at))
}

/// Sets the Ethernet addresses, from the service to `to`. Returns `next`, the offset of the next write.
#[inline(always)]
fn address(frame: &mut (impl Editor + ?Sized), to: [u8; 6], next: usize) -> Option<usize> {
    let at = put(frame, ethernet::DESTINATION, to)?;
    put(frame, at, Mac::SERVICE.0)?;
    Some(next)
}
