//! Frames to the stack and back.
//!
//! Towards the stack: a frame the kernel redirected carries its sender's slot as source MAC
//! ([`metadata_common::stamp`]); [`Link::receive`] reads it and hands on (slot, frame). A frame without a
//! valid stamp did not come through `port` and is dropped and counted.
//!
//! Towards the guest: [`HubTap`] writes each frame to the hub tap, where the program `hub` finds the guest's
//! port by the stamp in the destination MAC. A frame the kernel does not take is lost, as on any wire, and
//! counted by kind; TCP sends it again.

mod both;

use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_common::stamp;
use rustix::io::{Errno, write};
use std::os::fd::{AsFd, OwnedFd};

use crate::afxdp::{Queues, Socket, SocketStats};
use crate::stack::Transmit;
pub use both::Both;

/// Octets of an Ethernet header (IEEE 802.3-2018 §3.1.1): destination, source, type.
pub const HEADER_LEN: usize = 14;
/// Longest frame sent: an MTU of 1,500 and the header. The kernel would accept a longer one and drop it at
/// the guest's port without a word (`xdp_ok_fwd_dev`, `net/core/filter.c`).
pub const MAX_FRAME: usize = 1_500 + HEADER_LEN;

/// Where frames come from: [`Socket`], [`Queues`], a ring that a classifier fills (`Ring` of `metadata-steer`), [`Both`], or a pretended one in tests.
pub trait FrameSource: AsFd {
    /// Lends up to `max` frames to `f`, oldest first; returns how many. Never waits; the descriptor is
    /// readable when there is something to lend.
    fn receive(&mut self, max: usize, f: impl FnMut(&[u8])) -> usize;

    /// The counters; `None` when they cannot be read just now.
    fn stats(&self) -> Option<SocketStats>;
}

impl FrameSource for Socket {
    fn receive(&mut self, max: usize, f: impl FnMut(&[u8])) -> usize {
        Socket::receive(self, max, f)
    }

    fn stats(&self) -> Option<SocketStats> {
        Socket::stats(self).ok()
    }
}

impl FrameSource for Queues {
    fn receive(&mut self, max: usize, f: impl FnMut(&[u8])) -> usize {
        Queues::receive(self, max, f)
    }

    fn stats(&self) -> Option<SocketStats> {
        Queues::stats(self).ok()
    }
}

/// Why a received frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Shorter than an Ethernet header.
    Runt,
    /// The source MAC is no stamp.
    Unstamped,
    /// The stamp names a slot of [`MAX_SLOTS`] or above.
    SlotOutOfRange,
}

/// The slot a frame is stamped with.
///
/// # Errors
/// [`Refusal`], when the frame did not come through `port`.
pub fn slot_of(frame: &[u8]) -> Result<Slot, Refusal> {
    if frame.len() < HEADER_LEN {
        return Err(Refusal::Runt);
    }
    let source = frame[Mac::LEN..].first_chunk().ok_or(Refusal::Runt)?;
    match stamp::slot_of(Mac(*source)) {
        None => Err(Refusal::Unstamped),
        Some(slot) if slot >= MAX_SLOTS => Err(Refusal::SlotOutOfRange),
        Some(slot) => Ok(slot),
    }
}

/// Received frames dropped here, by [`Refusal`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// [`Refusal::Runt`].
    pub runt: u64,
    /// [`Refusal::Unstamped`].
    pub unstamped: u64,
    /// [`Refusal::SlotOutOfRange`].
    pub slot_out_of_range: u64,
    /// Their VM had more of them waiting than its part: counted by the worker, and 0 here.
    pub over_share: u64,
}

/// The receiving side.
#[derive(Debug)]
pub struct Link<S> {
    source: S,
    stats: LinkStats,
}

impl<S: FrameSource> Link<S> {
    /// Receives from `source`.
    pub fn new(source: S) -> Self {
        Self { source, stats: LinkStats::default() }
    }

    /// Hands up to `max` frames to `f`, each with its sender's slot; returns how many came, the dropped ones
    /// included.
    pub fn receive(&mut self, max: usize, mut f: impl FnMut(Slot, &[u8])) -> usize {
        let stats = &mut self.stats;
        self.source.receive(max, |frame| match slot_of(frame) {
            Ok(slot) => f(slot, frame),
            Err(Refusal::Runt) => stats.runt += 1,
            Err(Refusal::Unstamped) => stats.unstamped += 1,
            Err(Refusal::SlotOutOfRange) => stats.slot_out_of_range += 1,
        })
    }

    /// What to wait on, and the source's own counters.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The source, to change what a test has put in it.
    #[cfg(test)]
    pub(crate) fn source_mut(&mut self) -> &mut S {
        &mut self.source
    }

    /// Frames dropped so far.
    #[must_use]
    pub fn stats(&self) -> LinkStats {
        self.stats
    }
}

/// What became of frames towards guests. A frame is in exactly one of these but `bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapStats {
    /// Frames the kernel took.
    pub frames: u64,
    /// Octets in them.
    pub bytes: u64,
    /// Not sent: shorter than an Ethernet header, or longer than [`MAX_FRAME`].
    pub bad_length: u64,
    /// Lost: the tap's queue is full (`EAGAIN`).
    pub full: u64,
    /// Lost: no memory for it in the kernel (`ENOBUFS`, `ENOMEM`).
    pub no_memory: u64,
    /// Lost: the tap is down (`EIO`) or was deleted (`EBADFD`).
    pub down: u64,
    /// Lost: any other error.
    pub other: u64,
}

/// The hub tap's descriptor: non-blocking, `IFF_TAP | IFF_NO_PI`, no virtio header, so that one `write(2)`
/// is one Ethernet frame.
#[derive(Debug)]
pub struct HubTap {
    fd: OwnedFd,
    stats: TapStats,
}

impl HubTap {
    /// Sends by `fd`.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, stats: TapStats::default() }
    }

    /// Frames sent and lost so far.
    #[must_use]
    pub fn stats(&self) -> TapStats {
        self.stats
    }
}

impl Transmit for HubTap {
    fn send(&mut self, frame: &[u8]) {
        let stats = &mut self.stats;
        if !(HEADER_LEN..=MAX_FRAME).contains(&frame.len()) {
            stats.bad_length += 1;
            return;
        }
        match write(&self.fd, frame) {
            // A tap takes a frame whole or not at all (`tun_get_user`, `drivers/net/tun.c`).
            Ok(_) => {
                stats.frames += 1;
                stats.bytes += frame.len() as u64;
            }
            Err(Errno::AGAIN) => stats.full += 1,
            Err(Errno::NOBUFS | Errno::NOMEM) => stats.no_memory += 1,
            Err(Errno::IO | Errno::BADFD) => stats.down += 1,
            Err(_) => stats.other += 1,
        }
    }
}

#[cfg(test)]
mod tests;
