//! What the kernel answers itself, so that user space sees a small request as one packet in and one out.
//!
//! [`decide`](crate::decide::decide) has let the frame through: the sender is known, its credit is taken, and
//! the frame would be steered. Then the kernel
//!
//! - answers ARP and neighbour solicitations (`link`);
//! - answers a SYN to [`PORT`] with a number that remembers for it ([`crate::cookie`]), unless user space holds a
//!   connection with the same place in `ALL_SENT`;
//! - swallows an acknowledgement of all that user space has posted in `ALL_SENT`, and, where user space holds no
//!   connection, one that only ends a handshake;
//! - acknowledges the FIN that ends a connection user space has finished with (`tcp`).
//!
//! Whatever is not exactly one of these is steered as if nothing here existed: user space can do all of it, and
//! does where the device cannot send a frame back ([`Port::answers`](crate::maps::Port::answers)). An answer is
//! never longer than what it answers, because a tap has no room behind a frame to count on.
//!
//! A checksum of TCP or ICMPv6 is complete, or partial as a guest that offloads it leaves it (`sum`). A frame with
//! any other is left to user space, which drops and counts it. Answers carry complete ones.

mod link;
mod sound;
mod sum;
mod tcp;

use crate::classify::Reader;
use crate::cookie::Key;
use crate::maps::{ANSWER_LINK, ANSWER_TCP, AllSent, Slot, mtu_of};
use crate::verdict::Verdict;
use crate::wire::{ipv4, ipv6, tcp as tcp_header};

/// The TCP port whose SYNs the kernel answers: HTTP. Those to other ports are steered.
pub const PORT: u16 = 80;

/// The window of a SYN-ACK, in octets: user space has this much room for a request.
pub const WINDOW: u16 = 3072;

/// Octets of TCP payload we take in one segment over IPv4: what an MTU of 1500 leaves.
pub const SEGMENT_V4: u16 = 1460;

/// The same over IPv6.
pub const SEGMENT_V6: u16 = 1440;

/// What a guest that names no segment size takes (RFC 9293 §3.7.1), in octets. No MTU makes segments smaller.
pub const SEGMENT_UNSAID_V4: u16 = 536;

/// The same over IPv6.
pub const SEGMENT_UNSAID_V6: u16 = 1220;

/// Octets of TCP payload in one segment over IPv4 to and from a device with this MTU, in octets; 0 for one that is
/// not known. From [`SEGMENT_UNSAID_V4`] to [`SEGMENT_V4`] (RFC 9293 §3.7.1: what the MTU leaves without options).
#[inline(always)]
#[must_use]
pub const fn segment_v4(mtu: u32) -> u16 {
    within(mtu, (ipv4::HEADER + tcp_header::HEADER) as u32, SEGMENT_UNSAID_V4, SEGMENT_V4)
}

/// The same over IPv6: from [`SEGMENT_UNSAID_V6`] to [`SEGMENT_V6`].
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

/// TTL or hop limit of an answer.
pub const HOP_LIMIT: u8 = 64;

/// Bounded reads from and writes to a frame.
pub trait Editor: Reader {
    /// Overwrites the `N` octets from `offset` on. False, and nothing written, if the frame ends before that.
    fn write<const N: usize>(&mut self, offset: usize, octets: [u8; N]) -> bool;
}

impl Editor for [u8] {
    fn write<const N: usize>(&mut self, offset: usize, octets: [u8; N]) -> bool {
        let place = self.get_mut(offset..).and_then(<[u8]>::first_chunk_mut);
        place.map(|place| *place = octets).is_some()
    }
}

/// What has been said on connections, as user space and the kernel tell each other.
pub trait Ledger {
    /// One entry of `ALL_SENT`.
    type Entry: Entry;
    /// The key of handshakes.
    fn key(&self) -> Key;
    /// The entry at an index below [`ALL_SENT`](crate::maps::ALL_SENT).
    fn entry(&self, index: u32) -> Option<Self::Entry>;
}

/// An entry of `ALL_SENT`, shared with user space.
pub trait Entry {
    /// The entry as it stands.
    fn load(&self) -> AllSent;
    /// Writes [`AllSent::acknowledged`].
    fn acknowledge(&self, sent: u32);
    /// Writes [`AllSent::closed`].
    fn close(&self, sent: u32);
    /// Writes [`AllSent::opened`].
    fn open(&self, mark: u16);
}

/// What becomes of a frame the kernel deals with itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The frame is the answer now, in its first so many octets: cut off the rest and send it back.
    Send(Verdict, usize),
    /// It needs no answer.
    Absorb(Verdict),
}

/// Deals with a frame that was to be steered, if it is for the kernel; `None`, and the frame as it was, if it is
/// for user space.
///
/// `steered` and `slot` are what `decide` said of the frame, `answers` what its port's entry allows.
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

/// True for a frame that may be answered: its kind is, and its checksum holds. One with a wrong checksum is steered,
/// and counted where it is dropped.
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

/// The second half of [`answer`], of a frame that [is sound](is_sound). In the kernel either half needs much of the
/// stack that both share with `decide`.
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

/// Writes octets and tells where the next go.
#[inline(always)]
fn put<const N: usize>(frame: &mut (impl Editor + ?Sized), at: usize, octets: [u8; N]) -> Option<usize> {
    frame.write(at, octets).then_some(at + N)
}

#[cfg(test)]
mod tests;
