//! Traces the frames of one guest through a ring buffer, each with its verdict.
//!
//! User space writes a [`Trace`] to the single entry of `TRACE` and reads [`TraceEvent`]s from `EVENTS`. While the
//! entry is all zero, nothing is reported. `port` and `port_tcx` report what the guest sends, `port` also its
//! own answers, and `hub` the answers of user space. A program never waits for the reader. An event without
//! room is lost and counted in [`Scratch::lost`].
//!
//! A frame that the kernel answers by itself causes two events with the same verdict: the frame
//! ([`FROM_GUEST`]) and its answer ([`TO_GUEST`]). Every other frame causes one event.

use crate::maps::{PortKey, Slot};

/// A bit of [`Trace::by`]: filter by port. `hub` knows only slots and MACs, so answers of user space are
/// reported only if the filter contains the MAC too.
pub const BY_PORT: u32 = 1;

/// A bit of [`Trace::by`]: filter by MAC. With [`BY_PORT`], frames must match both.
pub const BY_MAC: u32 = 2;

/// A bit of [`Trace::flags`]: also report frames that pass, the guest's other traffic.
pub const PASSING_TOO: u16 = 1;

/// [`TraceEvent::direction`]: sent by the guest.
pub const FROM_GUEST: u32 = 0;

/// [`TraceEvent::direction`]: sent to the guest.
pub const TO_GUEST: u32 = 1;

/// [`TraceEvent::slot`]: the frame passed or was dropped before its sender was looked up.
pub const NO_SLOT: Slot = Slot::MAX;

/// Maximum number of bytes of a frame in an event.
pub const BYTES: usize = 256;

/// The filter of the trace. All zero means off.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// [`BY_PORT`], [`BY_MAC`], both, or 0 for off.
    pub by: u32,
    /// Namespace number and interface index; used with [`BY_PORT`].
    pub port: [u32; 2],
    /// The guest's MAC; used with [`BY_MAC`].
    pub mac: [u8; 6],
    /// [`PASSING_TOO`] or 0.
    pub flags: u16,
}

/// One frame and its verdict.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Time in nanoseconds on the kernel's monotonic clock (`bpf_ktime_get_ns`).
    pub time_ns: u64,
    /// The number of the port's namespace; 0 from `hub`, which does not know it.
    pub netns: u32,
    /// The port's interface index; 0 from `hub`.
    pub ifindex: u32,
    /// [`Verdict::index`](crate::verdict::Verdict::index).
    pub verdict: u32,
    /// Length of the frame in bytes.
    pub length: u32,
    /// Number of captured bytes: the lesser of `length` and [`BYTES`].
    pub captured: u32,
    /// [`FROM_GUEST`] or [`TO_GUEST`].
    pub direction: u32,
    /// The slot if the frame was steered, answered or delivered, else [`NO_SLOT`].
    pub slot: Slot,
    /// The guest's MAC: the source of frames from the guest, the destination of frames to it.
    pub mac: [u8; 6],
    /// Always zero.
    pub reserved: [u8; 6],
    /// The start of the frame as the guest sends or receives it, without a VLAN tag that was removed before
    /// `port_tcx`. Bytes from `captured` on are undefined.
    pub bytes: [u8; BYTES],
}

/// The event a program builds on one CPU until the verdict is known.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Events lost on this CPU since the map was created, because the ring was full.
    pub lost: u64,
    /// 1 while `event` has no verdict yet.
    pub pending: u64,
    /// The event.
    pub event: TraceEvent,
}

impl Trace {
    /// A filter for a port, a MAC, or a MAC on a port. Without either, the trace is off.
    #[must_use]
    pub const fn of(port: Option<PortKey>, mac: Option<[u8; 6]>, flags: u16) -> Self {
        let mut trace = Self { by: 0, port: [0; 2], mac: [0; 6], flags };
        if let Some(PortKey { netns, ifindex }) = port {
            trace.by |= BY_PORT;
            trace.port = [netns, ifindex];
        }
        if let Some(mac) = mac {
            trace.by |= BY_MAC;
            trace.mac = mac;
        }
        trace
    }

    /// True if the filter reports a frame of this port that the guest with this MAC sends or receives.
    /// `passes` is true for a frame whose verdict is to pass.
    #[inline(always)]
    #[must_use]
    pub const fn hears(&self, port: PortKey, mac: [u8; 6], passes: bool) -> bool {
        if self.by & (BY_PORT | BY_MAC) == 0 {
            return false;
        }
        let [netns, ifindex] = self.port;
        let here = self.by & BY_PORT == 0 || (netns == port.netns && ifindex == port.ifindex);
        let its = self.by & BY_MAC == 0 || same(self.mac, mac);
        here && its && (!passes || self.flags & PASSING_TOO != 0)
    }

    /// True if the filter reports an answer of user space to this MAC.
    #[inline(always)]
    #[must_use]
    pub const fn hears_answers_to(&self, mac: [u8; 6]) -> bool {
        self.by & BY_MAC != 0 && same(self.mac, mac)
    }

    /// The value in the layout of the map.
    #[must_use]
    pub const fn to_words(self) -> [u32; 5] {
        let [a, b, c, d, e, f] = self.mac;
        let [x, y] = self.flags.to_ne_bytes();
        let [netns, ifindex] = self.port;
        [self.by, netns, ifindex, u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, x, y])]
    }
}

/// Compares without `memcmp`, which the kernel does not provide.
#[inline(always)]
const fn same(a: [u8; 6], b: [u8; 6]) -> bool {
    let [a0, a1, a2, a3, a4, a5] = a;
    let [b0, b1, b2, b3, b4, b5] = b;
    u64::from_ne_bytes([a0, a1, a2, a3, a4, a5, 0, 0]) == u64::from_ne_bytes([b0, b1, b2, b3, b4, b5, 0, 0])
}

impl TraceEvent {
    /// Decodes an event from the ring; `None` if the length is wrong.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != size_of::<Self>() {
            return None;
        }
        let word = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes);
        Some(Self {
            time_ns: u64::from_ne_bytes(*bytes.first_chunk()?),
            netns: word(8)?,
            ifindex: word(12)?,
            verdict: word(16)?,
            length: word(20)?,
            captured: word(24)?,
            direction: word(28)?,
            slot: word(32)?,
            mac: *bytes.get(36..)?.first_chunk()?,
            reserved: *bytes.get(42..)?.first_chunk()?,
            bytes: *bytes.get(48..)?.first_chunk()?,
        })
    }

    /// The captured bytes of the frame.
    #[must_use]
    pub fn frame(&self) -> &[u8] {
        self.bytes.get(..self.captured as usize).unwrap_or(&self.bytes)
    }
}

const _: () = {
    assert!(size_of::<Trace>() == 20);
    assert!(size_of::<TraceEvent>() == 48 + BYTES);
    assert!(size_of::<Scratch>() == 16 + size_of::<TraceEvent>());
    assert!(core::mem::offset_of!(TraceEvent, slot) == 32);
    assert!(core::mem::offset_of!(TraceEvent, mac) == 36);
    assert!(core::mem::offset_of!(TraceEvent, bytes) == 48);
};

#[cfg(test)]
mod tests {
    use super::{BYTES, PASSING_TOO, Trace, TraceEvent};
    use crate::maps::PortKey;
    use std::vec::Vec;

    const HERE: PortKey = PortKey { netns: 1, ifindex: 2 };
    const ELSEWHERE: [PortKey; 2] = [PortKey { netns: 2, ifindex: 2 }, PortKey { netns: 1, ifindex: 1 }];
    const ITS: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

    #[test]
    fn a_trace_reports_frames_of_its_guest_only() {
        let hears = |trace: Trace, port, mac| trace.hears(port, mac, false);
        let by_port = Trace::of(Some(HERE), None, 0);
        let by_mac = Trace::of(None, Some(ITS), 0);
        let both = Trace::of(Some(HERE), Some(ITS), 0);
        assert!(hears(by_port, HERE, OTHER) && hears(by_mac, ELSEWHERE[0], ITS) && hears(both, HERE, ITS));
        assert!(!hears(by_mac, HERE, OTHER) && !hears(both, HERE, OTHER));
        for elsewhere in ELSEWHERE {
            assert!(!hears(by_port, elsewhere, ITS) && !hears(both, elsewhere, ITS));
        }
        assert!(!hears(Trace::default(), PortKey { netns: 0, ifindex: 0 }, [0; 6]), "off");
    }

    #[test]
    fn passing_frames_are_reported_on_request() {
        let trace = |flags| Trace::of(Some(HERE), None, flags);
        assert!(!trace(0).hears(HERE, ITS, true));
        assert!(trace(PASSING_TOO).hears(HERE, ITS, true));
    }

    #[test]
    fn answers_of_user_space_are_filtered_by_mac_only() {
        assert!(Trace::of(None, Some(ITS), 0).hears_answers_to(ITS));
        assert!(Trace::of(Some(HERE), Some(ITS), 0).hears_answers_to(ITS));
        assert!(!Trace::of(None, Some(ITS), 0).hears_answers_to(OTHER));
        assert!(!Trace::of(Some(HERE), None, 0).hears_answers_to([0; 6]));
    }

    #[test]
    fn an_event_is_decoded_from_its_bytes() {
        let bytes: Vec<u8> = (0..48 + BYTES).map(|n| n as u8).collect();
        let event = TraceEvent::from_bytes(&bytes).expect("an event");
        assert_eq!(event.ifindex, u32::from_ne_bytes([12, 13, 14, 15]));
        assert_eq!((event.mac, event.bytes[0]), ([36, 37, 38, 39, 40, 41], 48));
        assert_eq!(event.frame().len(), BYTES, "an impossible length is limited");
        assert_eq!(TraceEvent::from_bytes(&bytes[1..]), None);
    }
}
