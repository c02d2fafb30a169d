//! Frames between the kernel and the stack.
//!
//! To the stack: the kernel replaces the source MAC of a redirected frame with the stamp of its sender's slot
//! ([`metadata_common::stamp`]). [`LinkReceiver::receive`] reads the stamp and passes on the slot and the frame. A
//! frame without a valid stamp did not come through the program `port`; it is dropped and counted.
//!
//! To the guest: [`HubTap`] writes each frame to the hub tap, where the program `hub` finds the guest's port by the
//! stamp in the destination MAC. A frame that the kernel refuses is lost, as on any wire, and counted by reason; TCP
//! retransmits it.

use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_common::stamp;
use rustix::event::epoll;
use rustix::io::{Errno, write, writev};
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::GROUP;
use crate::afxdp::{Queues, Socket, SocketStats};
use crate::stack::{Long, PIECES_PER_CONNECTION, Transmit};

/// Bytes of an Ethernet header (IEEE 802.3-2018 §3.1.1): destination, source, type.
pub const HEADER_LEN: usize = 14;
/// Longest frame sent: an MTU of 1,500 and the header. The kernel would accept a longer frame and drop it silently at
/// the guest's port (`xdp_ok_fwd_dev`, `net/core/filter.c`).
pub const MAX_FRAME: usize = 1_500 + HEADER_LEN;

/// A source of frames: [`Socket`], [`Queues`], a ring that a classifier fills (`Ring` of `metadata-steer`),
/// [`AlternatingSources`], or a fake in tests.
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
pub enum FrameError {
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
/// [`FrameError`] if the frame did not come through `port`.
pub fn slot_of(frame: &[u8]) -> Result<Slot, FrameError> {
    if frame.len() < HEADER_LEN {
        return Err(FrameError::Runt);
    }
    let source = frame[Mac::LEN..].first_chunk().ok_or(FrameError::Runt)?;
    match stamp::slot_of(Mac(*source)) {
        None => Err(FrameError::Unstamped),
        Some(slot) if slot >= MAX_SLOTS => Err(FrameError::SlotOutOfRange),
        Some(slot) => Ok(slot),
    }
}

/// Received frames that the link dropped, by [`FrameError`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Frames shorter than an Ethernet header ([`FrameError::Runt`]).
    pub runt: u64,
    /// Frames whose source MAC is not a stamp ([`FrameError::Unstamped`]).
    pub unstamped: u64,
    /// Frames whose stamp names a slot that does not exist ([`FrameError::SlotOutOfRange`]).
    pub slot_out_of_range: u64,
    /// Frames dropped because their slot already held its share of the waiting places. The worker counts them; 0 in
    /// [`LinkReceiver::stats`].
    pub over_share: u64,
}

/// The receiving side of the link.
#[derive(Debug)]
pub struct LinkReceiver<S> {
    source: S,
    stats: LinkStats,
}

impl<S: FrameSource> LinkReceiver<S> {
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
                    Err(FrameError::Runt) => stats.runt += 1,
                    Err(FrameError::Unstamped) => stats.unstamped += 1,
                    Err(FrameError::SlotOutOfRange) => stats.slot_out_of_range += 1,
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
    /// Bytes in the accepted frames.
    pub bytes: u64,
    /// Accepted frames of more than one segment; `frames` counts them as well.
    pub long: u64,
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

/// The descriptors of a hub's taps: non-blocking, `IFF_TAP | IFF_NO_PI`. One `write(2)` is one Ethernet frame. Only the
/// tap for long frames has `IFF_VNET_HDR`.
#[derive(Debug)]
pub struct HubTap {
    fd: OwnedFd,
    long: Option<OwnedFd>,
    stats: TapStats,
}

impl HubTap {
    /// Creates a tap that sends through `fd`.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, long: None, stats: TapStats::default() }
    }

    /// Sends long frames through `fd`. Without it they are counted as [`TapStats::bad_length`].
    #[must_use]
    pub fn and_long(self, fd: Option<OwnedFd>) -> Self {
        Self { long: fd, ..self }
    }

    /// Frames sent and lost so far.
    #[must_use]
    pub fn stats(&self) -> TapStats {
        self.stats
    }
}

impl Transmit for HubTap {
    fn send(&mut self, frame: &[u8]) {
        if !(HEADER_LEN..=MAX_FRAME).contains(&frame.len()) {
            self.stats.bad_length += 1;
            return;
        }
        let sent = write(&self.fd, frame);
        self.stats.note(sent);
    }

    fn send_long(&mut self, frame: &Long<'_>) {
        let Some(fd) = self.long.as_ref().filter(|_| frame.payload.len() + 2 <= LONG_PARTS) else {
            self.stats.bad_length += 1;
            return;
        };
        let preamble = virtio_net_header(frame);
        let mut parts = [IoSlice::new(&[]); LONG_PARTS];
        parts[0] = IoSlice::new(&preamble);
        parts[1] = IoSlice::new(frame.headers);
        parts[2..2 + frame.payload.len()].copy_from_slice(frame.payload);
        let sent = writev(fd, &parts[..2 + frame.payload.len()]);
        self.stats.long += u64::from(sent.is_ok());
        self.stats.note(sent.map(|bytes| bytes.saturating_sub(preamble.len())));
    }
}

/// Limit of the parts of a long frame: the virtio header, the frame's headers, and the pieces of a connection.
const LONG_PARTS: usize = 2 + PIECES_PER_CONNECTION + 1;

/// The header that tells a tap where a frame is cut into segments, and that its checksum is partial (virtio 1.2
/// §5.1.6, in the byte order of the host, as taps expect it).
fn virtio_net_header(frame: &Long<'_>) -> [u8; 10] {
    const NEEDS_CHECKSUM: u8 = 1;
    const GSO_TCPV4: u8 = 1;
    const GSO_TCPV6: u8 = 4;
    /// The offset of the checksum in a TCP header.
    const CHECKSUM: u16 = 16;
    let kind = if frame.is_ipv4 { GSO_TCPV4 } else { GSO_TCPV6 };
    let mut header = [0; 10];
    header[..2].copy_from_slice(&[NEEDS_CHECKSUM, kind]);
    let fields = [frame.headers.len() as u16, frame.segment, frame.tcp_at, CHECKSUM];
    for (place, field) in header[2..].chunks_exact_mut(2).zip(fields) {
        place.copy_from_slice(&field.to_ne_bytes());
    }
    header
}

impl TapStats {
    /// Counts the outcome of a write: the bytes of the frame, or the error.
    fn note(&mut self, outcome: Result<usize, Errno>) {
        match outcome {
            // A tap takes a whole frame or nothing (`tun_get_user`, `drivers/net/tun.c`).
            Ok(bytes) => {
                self.frames += 1;
                self.bytes += bytes as u64;
            }
            Err(Errno::AGAIN) => self.full += 1,
            Err(Errno::NOBUFS | Errno::NOMEM) => self.no_memory += 1,
            Err(Errno::IO | Errno::BADFD) => self.down += 1,
            Err(_) => self.other += 1,
        }
    }
}

// Reads two frame sources as one.

/// Two sources that alternate: each call starts with the other source, so that neither starves.
#[derive(Debug)]
pub struct AlternatingSources<A, B> {
    one: A,
    other: B,
    /// Readable while either source is.
    any: OwnedFd,
    begins_with_one: bool,
}

impl<A: FrameSource, B: FrameSource> AlternatingSources<A, B> {
    /// Joins two sources.
    ///
    /// # Errors
    /// No descriptor is free, or one of the sources cannot be polled.
    pub fn new(one: A, other: B) -> std::io::Result<Self> {
        let any = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (number, fd) in [one.as_fd(), other.as_fd()].into_iter().enumerate() {
            epoll::add(&any, fd, epoll::EventData::new_u64(number as u64), epoll::EventFlags::IN)?;
        }
        Ok(Self { one, other, any, begins_with_one: true })
    }
}

impl<A: FrameSource, B: FrameSource> FrameSource for AlternatingSources<A, B> {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let Self { one, other, begins_with_one, .. } = self;
        *begins_with_one = !*begins_with_one;
        if *begins_with_one {
            let lent = one.receive(max, &mut f);
            lent + other.receive(max - lent, f)
        } else {
            let lent = other.receive(max, &mut f);
            lent + one.receive(max - lent, f)
        }
    }

    fn stats(&self) -> Option<SocketStats> {
        Some(self.one.stats()?.plus(self.other.stats()?))
    }
}

/// For `poll(2)`: readable while either source holds frames.
impl<A, B> AsFd for AlternatingSources<A, B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.any.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;
    use metadata_common::maps::MAX_SLOTS;
    use metadata_common::stamp::stamp;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixDatagram;

    use super::{
        AlternatingSources, FrameError, FrameSource, HEADER_LEN, HubTap, LinkReceiver, LinkStats, MAX_FRAME,
        TapStats, slot_of,
    };
    use crate::afxdp::SocketStats;
    use crate::stack::Transmit as _;

    /// A frame of `len` bytes from `source`.
    fn frame(source: Mac, len: usize) -> Vec<u8> {
        let mut frame = vec![0xaa; len.max(12)];
        frame[6..12].copy_from_slice(&source.0);
        frame.truncate(len);
        frame
    }

    #[test]
    fn only_a_stamp_within_range_gives_a_slot() {
        for (name, frame, expected) in [
            ("first slot", frame(stamp(0), 60), Ok(0)),
            ("last slot", frame(stamp(MAX_SLOTS - 1), 60), Ok(MAX_SLOTS - 1)),
            ("header only", frame(stamp(7), HEADER_LEN), Ok(7)),
            ("first slot too many", frame(stamp(MAX_SLOTS), 60), Err(FrameError::SlotOutOfRange)),
            ("last slot too many", frame(stamp(u32::MAX), 60), Err(FrameError::SlotOutOfRange)),
            ("a guest's own address", frame(Mac([0x52, 0x54, 0, 1, 2, 3]), 60), Err(FrameError::Unstamped)),
            ("our own address", frame(Mac::SERVICE, 60), Err(FrameError::Unstamped)),
            ("no type", frame(stamp(7), HEADER_LEN - 1), Err(FrameError::Runt)),
            ("no source", frame(stamp(7), 6), Err(FrameError::Runt)),
            ("nothing", vec![], Err(FrameError::Runt)),
        ] {
            assert_eq!(slot_of(&frame), expected, "{name}");
        }
    }

    /// Lends the given frames.
    struct Queue(Vec<Vec<u8>>, UnixDatagram);

    impl AsFd for Queue {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.1.as_fd()
        }
    }

    impl FrameSource for Queue {
        fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
            let batch: Vec<_> = self.0.drain(..max.min(self.0.len())).collect();
            batch.iter().for_each(|frame| f(&[frame]));
            batch.len()
        }

        fn stats(&self) -> Option<SocketStats> {
            None
        }
    }

    #[test]
    fn two_sources_alternate_and_neither_starves() {
        let queue = |byte: u8, count: usize| {
            let (end, _) = UnixDatagram::pair().expect("a pair of sockets");
            Queue(vec![vec![byte]; count], end)
        };
        let mut both = AlternatingSources::new(queue(1, 6), queue(2, 100)).expect("two descriptors");
        let mut turn = |max| {
            let mut got = Vec::new();
            let lent = both.receive(max, |group| got.extend(group.iter().map(|frame| frame[0])));
            assert_eq!(lent, got.len());
            got
        };
        assert_eq!(turn(4), [2; 4]);
        assert_eq!(turn(4), [1; 4]);
        assert_eq!(turn(4), [2; 4], "the second source always has more");
        assert_eq!(turn(4), [1, 1, 2, 2], "the other source gets the rest");
        assert!(turn(0).is_empty());
    }

    #[test]
    fn refused_frames_are_counted_by_reason_and_the_rest_pass_in_order() {
        let frames = vec![
            frame(stamp(3), 60),
            frame(Mac::SERVICE, 60),
            frame(stamp(MAX_SLOTS), 60),
            frame(stamp(4), 61),
            frame(stamp(5), 13),
        ];
        let mut link = LinkReceiver::new(Queue(frames, UnixDatagram::unbound().expect("a socket")));
        let mut seen = Vec::new();
        let mut receive = |max| {
            link.receive(max, |group| seen.extend(group.iter().map(|(slot, frame)| (*slot, frame.len()))))
        };
        assert_eq!((receive(4), receive(4)), (4, 1));
        assert_eq!(seen, [(3, 60), (4, 61)]);
        assert_eq!(link.stats(), LinkStats { runt: 1, unstamped: 1, slot_out_of_range: 1, over_share: 0 });
    }

    /// A tap, and the socket where its frames arrive as datagrams.
    fn tap() -> (HubTap, UnixDatagram) {
        let (ours, theirs) = UnixDatagram::pair().expect("a pair of sockets");
        ours.set_nonblocking(true).expect("a flag");
        (HubTap::new(ours.into()), theirs)
    }

    #[test]
    fn each_frame_is_one_write() {
        let (mut tap, wire) = tap();
        for len in [HEADER_LEN, 60, MAX_FRAME] {
            let sent = frame(stamp(1), len);
            tap.send(&sent);
            let mut arrived = [0; 2_000];
            let received = wire.recv(&mut arrived).expect("a datagram");
            assert_eq!(arrived[..received], sent);
        }
        let bytes = (HEADER_LEN + 60 + MAX_FRAME) as u64;
        assert_eq!(tap.stats(), TapStats { frames: 3, bytes, ..TapStats::default() });
    }

    #[test]
    fn frames_of_invalid_length_are_not_sent() {
        let (mut tap, wire) = tap();
        for len in [0, HEADER_LEN - 1, MAX_FRAME + 1] {
            tap.send(&vec![0; len]);
        }
        assert_eq!(tap.stats(), TapStats { bad_length: 3, ..TapStats::default() });
        wire.set_nonblocking(true).expect("a flag");
        assert!(wire.recv(&mut [0; 16]).is_err());
    }

    #[test]
    fn frames_lost_to_a_full_queue_are_counted() {
        let (mut tap, _wire) = tap();
        let frame = frame(stamp(1), 1_000);
        for _ in 0..5_000 {
            tap.send(&frame);
        }
        let stats = tap.stats();
        assert!(stats.full > 0, "{stats:?}");
        assert_eq!(stats.frames + stats.full, 5_000, "{stats:?}");
    }

    #[test]
    fn other_failures_are_counted_too() {
        let (mut tap, wire) = tap();
        drop(wire);
        tap.send(&frame(stamp(1), 60));
        assert_eq!(tap.stats(), TapStats { other: 1, ..TapStats::default() });
    }
}
