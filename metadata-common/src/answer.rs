//! Answers of the kernel, so that user space handles a small request as one packet in and one packet out.
//!
//! [`decide`](crate::decide::decide) has accepted the frame: the sender is known and charged, and the frame
//! would be steered. Then the kernel
//!
//! - answers ARP and neighbour solicitations (`link`);
//! - answers a SYN to [`PORT`] with a SYN cookie ([`crate::cookie`]), unless user space holds a connection
//!   with the same index in `ALL_SENT`;
//! - consumes an acknowledgement of everything that user space has posted in `ALL_SENT`;
//! - consumes an acknowledgement that only ends a handshake, if user space holds no connection with that
//!   index;
//! - acknowledges the FIN that ends a connection user space has finished with (`tcp`);
//! - answers a request with a document that user space has published ([`request`]), if the port permits it.
//!
//! Any other frame is steered. User space can handle every frame, and handles all of them if the device
//! cannot send a frame back ([`Port::answers`](crate::maps::Port::answers)). But for the
//! answer to a request, an answer is never longer than the frame it answers, because a tap guarantees no room behind it.
//!
//! The TCP or ICMPv6 checksum must be complete, or partial as a guest with checksum offload leaves it
//! (`sum`). A frame with another checksum goes to user space, which drops and counts it. Answers carry
//! complete checksums.

pub mod request;
mod tcp;

use crate::classify::Reader;
use crate::cookie::CookieKey;
use crate::mac::Mac;
use crate::maps::{ANSWER_LINK, ANSWER_TCP, AllSent, Slot, mtu_of};
use crate::verdict::Verdict;
use crate::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol, tcp as tcp_header};
use core::hint::black_box;

/// The TCP port for HTTP. The kernel answers SYNs to this port; SYNs to other ports are steered.
pub const PORT: u16 = 80;

/// The window of a SYN-ACK in bytes, which is the room user space has for a request.
pub const WINDOW: u16 = 3072;

/// Largest TCP payload in bytes that we accept in one segment over IPv4, for an MTU of 1500.
pub const SEGMENT_V4: u16 = 1460;

/// Like [`SEGMENT_V4`], over IPv6.
pub const SEGMENT_V6: u16 = 1440;

/// Segment size in bytes over IPv4 of a guest that does not send the option (RFC 9293 §3.7.1). It is also
/// the least segment size we offer, whatever the MTU.
pub const SEGMENT_UNSAID_V4: u16 = 536;

/// Like [`SEGMENT_UNSAID_V4`], over IPv6.
pub const SEGMENT_UNSAID_V6: u16 = 1220;

/// TCP payload in bytes of one segment over IPv4 for a device with this MTU in bytes; an `mtu` of 0 means
/// unknown. The result is the MTU less both headers without options (RFC 9293 §3.7.1), at least
/// [`SEGMENT_UNSAID_V4`] and at most [`SEGMENT_V4`].
#[inline(always)]
#[must_use]
pub const fn segment_v4(mtu: u32) -> u16 {
    within(mtu, (ipv4::HEADER + tcp_header::HEADER) as u32, SEGMENT_UNSAID_V4, SEGMENT_V4)
}

/// Like [`segment_v4`] over IPv6: at least [`SEGMENT_UNSAID_V6`] and at most [`SEGMENT_V6`].
#[inline(always)]
#[must_use]
pub const fn segment_v6(mtu: u32) -> u16 {
    within(mtu, (ipv6::HEADER + tcp_header::HEADER) as u32, SEGMENT_UNSAID_V6, SEGMENT_V6)
}

#[inline(always)]
const fn within(mtu: u32, headers: u32, least: u16, most: u16) -> u16 {
    if mtu == 0 || mtu >= headers + most as u32 {
        most
    } else if mtu <= headers + least as u32 {
        least
    } else {
        (mtu - headers) as u16
    }
}

/// TTL or hop limit of an answer, in hops.
pub const HOP_LIMIT: u8 = 64;

/// Bounded reads from and writes to a frame.
pub trait Editor: Reader {
    /// Writes `N` bytes at `offset`. Returns false and writes nothing if the frame ends before that.
    fn write<const N: usize>(&mut self, offset: usize, bytes: [u8; N]) -> bool;
}

impl Editor for [u8] {
    fn write<const N: usize>(&mut self, offset: usize, bytes: [u8; N]) -> bool {
        let place = self.get_mut(offset..).and_then(<[u8]>::first_chunk_mut);
        place.map(|place| *place = bytes).is_some()
    }
}

/// The ledger: connection state that user space and the kernel share.
pub trait Ledger {
    /// One entry of `ALL_SENT`.
    type Entry: Entry;
    /// The handshake key.
    fn key(&self) -> CookieKey;
    /// The entry at an index; `None` from [`ALL_SENT`](crate::maps::ALL_SENT) on.
    fn entry(&self, index: u32) -> Option<Self::Entry>;
}

/// An entry of `ALL_SENT`, shared with user space.
pub trait Entry {
    /// The current value of the entry.
    fn load(&self) -> AllSent;
    /// Writes [`AllSent::acknowledged`].
    fn acknowledge(&self, sent: u32);
    /// Writes [`AllSent::closed`].
    fn close(&self, sent: u32);
    /// Writes [`AllSent::opened`].
    fn open(&self, mark: u16);
    /// Makes the entry the kernel's: writes every field but [`AllSent::held`], and the flow last.
    fn own(&self, posted: AllSent);
}

/// What to do with a frame that the kernel has handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Truncate the frame to this length in bytes and send it back; it now holds the answer.
    Send(Verdict, usize),
    /// Discard the frame; it needs no answer.
    Absorb(Verdict),
}

/// Handles a frame that would be steered. Returns `None` and leaves the frame unchanged if user space must
/// handle it.
///
/// `steered` and `slot` come from [`decide`](crate::decide::decide); `answers` is
/// [`Port::answers`](crate::maps::Port::answers) of the port.
#[inline(always)]
pub fn answer(
    frame: &mut (impl Editor + ?Sized),
    steered: Verdict,
    slot: Slot,
    answers: u64,
    ledger: &impl Ledger,
) -> Option<Reply> {
    if is_sound(frame, steered, answers) { answer_sound(frame, steered, slot, answers, ledger) } else { None }
}

/// True if the port permits an answer to this kind of frame and the frame's checksum is valid. A frame with a
/// wrong checksum is steered, and user space counts it when it drops it.
#[inline(always)]
pub fn is_sound(frame: &(impl Editor + ?Sized), steered: Verdict, answers: u64) -> bool {
    let sound = match steered {
        Verdict::SteerArp if answers & ANSWER_LINK != 0 => Some(true),
        Verdict::SteerNeighbour if answers & ANSWER_LINK != 0 => is_sound_neighbour(frame),
        Verdict::SteerIpv4Tcp if answers & ANSWER_TCP != 0 => is_sound_v4(frame),
        Verdict::SteerIpv6Tcp if answers & ANSWER_TCP != 0 => is_sound_v6(frame),
        _ => None,
    };
    matches!(sound, Some(true))
}

/// The second half of [`answer`], for a frame that [is sound](is_sound). The halves are separate because each
/// needs much of the kernel stack, which they share with `decide`.
#[inline(always)]
pub fn answer_sound(
    frame: &mut (impl Editor + ?Sized),
    steered: Verdict,
    slot: Slot,
    answers: u64,
    ledger: &impl Ledger,
) -> Option<Reply> {
    match steered {
        Verdict::SteerArp if answers & ANSWER_LINK != 0 => answer_arp(frame),
        Verdict::SteerNeighbour if answers & ANSWER_LINK != 0 => answer_neighbour(frame),
        Verdict::SteerIpv4Tcp if answers & ANSWER_TCP != 0 => tcp::ipv4(frame, slot, mtu_of(answers), ledger),
        Verdict::SteerIpv6Tcp if answers & ANSWER_TCP != 0 => tcp::ipv6(frame, slot, mtu_of(answers), ledger),
        _ => None,
    }
}

/// Writes bytes and returns the offset after them.
#[inline(always)]
fn put<const N: usize>(frame: &mut (impl Editor + ?Sized), at: usize, bytes: [u8; N]) -> Option<usize> {
    frame.write(at, bytes).then_some(at + N)
}

// Answers ARP requests (RFC 826) and neighbour solicitations (RFC 4861 §4.3) for a served address.
//
// The answers equal those of the user-space stack: they carry the service's MAC and go to the sender's MAC.

const ARP_LAST: usize = ethernet::HEADER + arp::LEN - 1;
const ARP_REQUEST: u16 = 1;
const ARP_REPLY: u16 = 2;

/// Answers a request, including a probe from 0.0.0.0 (RFC 5227 §2.1.1). `None` for a reply, which user space
/// ignores.
#[inline(always)]
fn answer_arp(frame: &mut (impl Editor + ?Sized)) -> Option<Reply> {
    let from: [u8; 6] = frame.read(ethernet::SOURCE)?;
    let operation: [u8; 2] = frame.read(ethernet::HEADER + arp::OPERATION)?;
    let sender: [u8; 10] = frame.read(ethernet::HEADER + arp::SENDER_MAC)?;
    let target: [u8; 4] = frame.read(ethernet::HEADER + arp::TARGET_IP)?;
    if u16::from_be_bytes(operation) != ARP_REQUEST {
        return None;
    }
    frame.read::<1>(ARP_LAST)?;
    let mut at = put_addresses(frame, from, ethernet::HEADER + arp::OPERATION)?;
    at = put(frame, at, ARP_REPLY.to_be_bytes())?;
    at = put(frame, at, Mac::SERVICE.0)?;
    at = put(frame, at, target)?;
    at = put(frame, at, sender)?;
    Some(Reply::Send(Verdict::AnswerArp, at))
}

/// Length in bytes of a solicitation with one option of eight bytes, the sender's link-layer address. Every
/// stack sends this option. It leaves the room for the option of our answer.
const SOLICITATION: usize = neighbour::LEN + 8;
const NEIGHBOUR_LAST: usize = ethernet::HEADER + ipv6::HEADER + SOLICITATION - 1;

/// Answers a solicitation (RFC 4861 §7.2.4). `None` for one from the unspecified address (duplicate address
/// detection): it carries no option, so the answer would be longer.
#[inline(always)]
fn answer_neighbour(frame: &mut (impl Editor + ?Sized)) -> Option<Reply> {
    const AT: usize = ethernet::HEADER;
    let from: [u8; 6] = frame.read(ethernet::SOURCE)?;
    let length: [u8; 2] = frame.read(AT + ipv6::PAYLOAD_LENGTH)?;
    let guest: [u8; 16] = frame.read(AT + ipv6::SOURCE)?;
    let target: [u8; 16] = frame.read(AT + ipv6::HEADER + neighbour::TARGET)?;
    if u16::from_be_bytes(length) as usize != SOLICITATION || !tcp::is_station_v6(guest) {
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
    let mut at = put_addresses(frame, from, AT)?;
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
fn put_addresses(frame: &mut (impl Editor + ?Sized), to: [u8; 6], next: usize) -> Option<usize> {
    let at = put(frame, ethernet::DESTINATION, to)?;
    put(frame, at, Mac::SERVICE.0)?;
    Some(next)
}

// Validates the checksum of a frame that the kernel might answer.
//
// Such a frame is a segment without payload or a solicitation with one option, so the checksum covers at
// most 60 bytes. For any other frame the result is not `Some(true)`, and user space validates the checksum.

/// Maximum number of 32-bit words in a TCP header.
const WORDS_MAX: usize = 15;

/// Offset of the checksum in a TCP header.
const CHECKSUM_AT: usize = 16;

/// Validates a TCP segment over IPv4.
#[inline(always)]
fn is_sound_v4(frame: &(impl Editor + ?Sized)) -> Option<bool> {
    let length: [u8; 2] = frame.read(ethernet::HEADER + ipv4::TOTAL_LENGTH)?;
    let [s0, s1, s2, s3, d0, d1, d2, d3]: [u8; 8] = frame.read(ethernet::HEADER + ipv4::SOURCE)?;
    let addresses =
        sum::long(u32::from_be_bytes([s0, s1, s2, s3])) + sum::long(u32::from_be_bytes([d0, d1, d2, d3]));
    let length = (u16::from_be_bytes(length) as usize).checked_sub(ipv4::HEADER)?;
    is_sound_segment(frame, ethernet::HEADER + ipv4::HEADER, length, addresses)
}

/// Validates a TCP segment over IPv6.
#[inline(always)]
fn is_sound_v6(frame: &(impl Editor + ?Sized)) -> Option<bool> {
    let length: [u8; 2] = frame.read(ethernet::HEADER + ipv6::PAYLOAD_LENGTH)?;
    is_sound_segment(
        frame,
        ethernet::HEADER + ipv6::HEADER,
        u16::from_be_bytes(length) as usize,
        address_sum(frame)?,
    )
}

/// Validates a neighbour solicitation (RFC 4861 §7.1.1).
#[inline(always)]
fn is_sound_neighbour(frame: &(impl Editor + ?Sized)) -> Option<bool> {
    const AT: usize = ethernet::HEADER + ipv6::HEADER;
    let field = frame.read(AT + neighbour::CHECKSUM)?;
    let pseudo = address_sum(frame)? + SOLICITATION as u32 + protocol::ICMPV6 as u32;
    Some(sum::is_sound(pseudo, sum_words(frame, AT, SOLICITATION)?, field))
}

/// Validates a TCP segment of `length` bytes at offset `at`; `None` for a segment with payload.
#[inline(always)]
fn is_sound_segment(
    frame: &(impl Editor + ?Sized),
    at: usize,
    length: usize,
    addresses: u32,
) -> Option<bool> {
    let [offset]: [u8; 1] = frame.read(at + tcp_header::FLAGS - 1)?;
    let field = frame.read(at + CHECKSUM_AT)?;
    let header = (offset >> 4) as usize * 4;
    if header < tcp_header::HEADER || header != length {
        return None;
    }
    let pseudo = addresses + protocol::TCP as u32 + length as u32;
    Some(sum::is_sound(pseudo, sum_words(frame, at, header)?, field))
}

/// The sum of the source and destination addresses.
#[inline(always)]
fn address_sum(frame: &(impl Editor + ?Sized)) -> Option<u32> {
    let guest = frame.read(ethernet::HEADER + ipv6::SOURCE)?;
    let local = frame.read(ethernet::HEADER + ipv6::DESTINATION)?;
    Some(sum::address(guest) + sum::address(local))
}

/// The sum of `length` bytes from `at` on. `length` is a multiple of 4 and at most 60. `None` if the frame
/// ends before.
#[inline(always)]
fn sum_words(frame: &(impl Editor + ?Sized), at: usize, length: usize) -> Option<u32> {
    // The offset is computed back from `end`, and `black_box` hides from the compiler that it depends on the
    // start. The verifier then sees a single loop whose state differs in two numbers only, and verifies the
    // code after it once.
    let end = at + length;
    let mut rest = black_box(length) & 0x3c;
    let mut sum = 0;
    for _ in 0..WORDS_MAX {
        if rest == 0 {
            break;
        }
        // Linux 7.3 refuses a pointer below the start of the frame, even if a larger offset is then added to it. A
        // compiler that knew where the offset comes from would subtract `rest` from the pointer.
        let at = black_box(end - rest) & 0x7f;
        sum += sum::long(u32::from_be_bytes(frame.read(at)?));
        rest = black_box(rest - 4) & 0x3c;
    }
    Some(sum)
}

/// The Internet checksum (RFC 1071), over values rather than memory.
///
/// In a frame of a guest with checksum offload, the field holds only the folded sum of the pseudo-header, not
/// complemented: a device is to complete it (virtio 1.2 §5.1.6.2, `CHECKSUM_PARTIAL` in Linux). Between a
/// guest and its host no device does, because frames in memory need no checksum.
mod sum {
    /// The sum of both halves of a 32-bit value.
    #[inline(always)]
    pub(super) const fn long(value: u32) -> u32 {
        (value >> 16) + (value & 0xffff)
    }

    /// The sum of the 16-bit words of an IPv6 address.
    #[inline(always)]
    pub(super) const fn address(bytes: [u8; 16]) -> u32 {
        let value = u128::from_be_bytes(bytes);
        long((value >> 96) as u32)
            + long((value >> 64) as u32)
            + long((value >> 32) as u32)
            + long(value as u32)
    }

    /// Folds a sum of at most 65,536 words to 16 bits by adding the carries back.
    #[inline(always)]
    pub(super) const fn fold(sum: u32) -> u16 {
        let sum = (sum & 0xffff) + (sum >> 16);
        ((sum & 0xffff) + (sum >> 16)) as u16
    }

    /// Folds a sum of 32-bit words to 16 bits.
    #[inline(always)]
    pub(super) const fn fold64(sum: u64) -> u16 {
        let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32 & 0xffff) + (sum >> 48);
        fold(sum as u32)
    }

    /// The checksum field: the complement of the folded sum.
    #[inline(always)]
    pub(super) const fn finish(sum: u32) -> [u8; 2] {
        (!fold(sum)).to_be_bytes()
    }

    /// True if the checksum is complete or partial. `pseudo` is the sum of the pseudo-header; `all` is the sum of
    /// every word after it, including `field`.
    #[inline(always)]
    pub(super) const fn is_sound(pseudo: u32, all: u32, field: [u8; 2]) -> bool {
        u16::from_be_bytes(field) == fold(pseudo) || fold(pseudo + all) == 0xffff
    }
}

#[cfg(test)]
mod tests;
