//! Frames between the kernel and the stack.
//!
//! To the stack: the kernel replaces the source MAC of a redirected frame with the stamp of its sender's slot
//! ([`metadata_common::stamp`]). [`Link::receive`] reads the stamp and passes on the slot and the frame. A frame
//! without a valid stamp did not come through the program `port`; it is dropped and counted.
//!
//! To the guest: [`HubTap`] writes each frame to the hub tap, where the program `hub` finds the guest's port by the
//! stamp in the destination MAC. A frame that the kernel refuses is lost, as on any wire, and counted by reason; TCP
//! retransmits it.

mod both;

use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_common::stamp;
use rustix::io::{Errno, write};
use std::os::fd::{AsFd, OwnedFd};

use crate::GROUP;
use crate::afxdp::{Queues, Socket, SocketStats};
use crate::stack::Transmit;
pub use both::Both;

/// Octets of an Ethernet header (IEEE 802.3-2018 §3.1.1): destination, source, type.
pub const HEADER_LEN: usize = 14;
/// Longest frame sent: an MTU of 1,500 and the header. The kernel would accept a longer frame and drop it silently at
/// the guest's port (`xdp_ok_fwd_dev`, `net/core/filter.c`).
pub const MAX_FRAME: usize = 1_500 + HEADER_LEN;

/// A source of frames: [`Socket`], [`Queues`], a ring that a classifier fills (`Ring` of `metadata-steer`), [`Both`],
/// or a fake in tests.
pub trait FrameSource: AsFd {
    /// Lends up to `max` frames to `f`, oldest first, in groups of at most [`GROUP`]; returns how many. Never blocks.
    /// The descriptor is readable while there are frames.
    fn receive(&mut self, max: usize, f: impl FnMut(&[&[u8]])) -> usize;

    /// The counters; `None` if they cannot be read now.
    fn stats(&self) -> Option<SocketStats>;
}

impl FrameSource for Socket {
    fn receive(&mut self, max: usize, f: impl FnMut(&[&[u8]])) -> usize {
        Socket::receive(self, max, f)
    }

    fn stats(&self) -> Option<SocketStats> {
        Socket::stats(self).ok()
    }
}

impl FrameSource for Queues {
    fn receive(&mut self, max: usize, f: impl FnMut(&[&[u8]])) -> usize {
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
    /// The source MAC is not a stamp.
    Unstamped,
    /// The stamp's slot is not below [`MAX_SLOTS`].
    SlotOutOfRange,
}

/// The slot in a frame's stamp.
///
/// # Errors
/// [`Refusal`] if the frame did not come through `port`.
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

/// Received frames that the link dropped, by [`Refusal`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Frames shorter than an Ethernet header ([`Refusal::Runt`]).
    pub runt: u64,
    /// Frames whose source MAC is not a stamp ([`Refusal::Unstamped`]).
    pub unstamped: u64,
    /// Frames whose stamp names a slot that does not exist ([`Refusal::SlotOutOfRange`]).
    pub slot_out_of_range: u64,
    /// Frames dropped because their slot already held its share of the waiting places. The worker counts them; 0 in
    /// [`Link::stats`].
    pub over_share: u64,
}

/// The receiving side of the link.
#[derive(Debug)]
pub struct Link<S> {
    source: S,
    stats: LinkStats,
}

impl<S: FrameSource> Link<S> {
    /// Creates a link that receives from `source`.
    pub fn new(source: S) -> Self {
        Self { source, stats: LinkStats::default() }
    }

    /// Passes up to `max` frames to `f` in groups of at most [`GROUP`], each frame with its sender's slot; returns how
    /// many arrived, including dropped ones.
    pub fn receive(&mut self, max: usize, mut f: impl FnMut(&[(Slot, &[u8])])) -> usize {
        let stats = &mut self.stats;
        self.source.receive(max, |frames| {
            let mut group: [(Slot, &[u8]); GROUP] = [(0, &[]); GROUP];
            let mut count = 0;
            for frame in frames {
                match slot_of(frame) {
                    Ok(slot) => {
                        group[count] = (slot, frame);
                        count += 1;
                    }
                    Err(Refusal::Runt) => stats.runt += 1,
                    Err(Refusal::Unstamped) => stats.unstamped += 1,
                    Err(Refusal::SlotOutOfRange) => stats.slot_out_of_range += 1,
                }
            }
            f(&group[..count]);
        })
    }

    /// The frame source, which has the descriptor to wait on and its own counters.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The source, so that a test can change its content.
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

/// Frames to guests, by outcome. Each frame is counted in exactly one field other than `bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapStats {
    /// Frames the kernel accepted.
    pub frames: u64,
    /// Octets in the accepted frames.
    pub bytes: u64,
    /// Not sent: shorter than an Ethernet header, or longer than [`MAX_FRAME`].
    pub bad_length: u64,
    /// Lost: the tap's queue is full (`EAGAIN`).
    pub full: u64,
    /// Lost: the kernel has no memory for the frame (`ENOBUFS`, `ENOMEM`).
    pub no_memory: u64,
    /// Lost: the tap is down (`EIO`) or was deleted (`EBADFD`).
    pub down: u64,
    /// Lost: any other error.
    pub other: u64,
}

/// The hub tap's descriptor: non-blocking, `IFF_TAP | IFF_NO_PI`, no virtio header. One `write(2)` is one Ethernet
/// frame.
#[derive(Debug)]
pub struct HubTap {
    fd: OwnedFd,
    stats: TapStats,
}

impl HubTap {
    /// Creates a tap that sends through `fd`.
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
            // A tap takes a whole frame or nothing (`tun_get_user`, `drivers/net/tun.c`).
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
