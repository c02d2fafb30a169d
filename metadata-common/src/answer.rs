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
//! - acknowledges the FIN that ends a connection user space has finished with (`tcp`).
//!
//! Any other frame is steered. User space can handle every frame, and handles all of them if the device
//! cannot send a frame back ([`Port::answers`](crate::maps::Port::answers)). An answer is never longer than
//! the frame it answers, because a tap guarantees no room behind a frame.
//!
//! The TCP or ICMPv6 checksum must be complete, or partial as a guest with checksum offload leaves it
//! (`sum`). A frame with another checksum goes to user space, which drops and counts it. Answers carry
//! complete checksums.

mod link;
mod sound;
mod sum;
mod tcp;

use crate::classify::Reader;
use crate::cookie::CookieKey;
use crate::maps::{ANSWER_LINK, ANSWER_TCP, AllSent, Slot, mtu_of};
use crate::verdict::Verdict;
use crate::wire::{ipv4, ipv6, tcp as tcp_header};

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
        Verdict::SteerNeighbour if answers & ANSWER_LINK != 0 => sound::neighbour(frame),
        Verdict::SteerIpv4Tcp if answers & ANSWER_TCP != 0 => sound::ipv4(frame),
        Verdict::SteerIpv6Tcp if answers & ANSWER_TCP != 0 => sound::ipv6(frame),
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
        Verdict::SteerArp if answers & ANSWER_LINK != 0 => link::arp(frame),
        Verdict::SteerNeighbour if answers & ANSWER_LINK != 0 => link::neighbour(frame),
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

#[cfg(test)]
mod tests;
