//! Reports the frames of the traced guest.
//!
//! A program changes a frame before its verdict is known. It therefore begins the event in this CPU's scratch
//! memory when the sender is known, and ends it with the verdict. If no trace is active, the cost is one
//! array lookup. The other functions are not inlined, because they run rarely and the verifier would check
//! them again on every path through a program.

use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_skb_load_bytes};
use aya_ebpf::programs::TcContext;
use core::hint::black_box;
use metadata_common::classify::Reader;
use metadata_common::maps::{PortKey, Slot};
use metadata_common::trace::{BYTES, FROM_GUEST, Scratch, Trace, TraceEvent};
use metadata_common::wire::ethernet;

use crate::frame::Frame;
use crate::tables::{EVENTS, TRACE, TRACED};

/// The port of events from `hub`, which does not know the port. No interface has this index.
pub(crate) const NO_PORT: PortKey = PortKey { netns: 0, ifindex: 0 };

/// Number of bytes per copy.
const CHUNK: usize = 8;

/// Whether a trace is active.
#[derive(Clone, Copy)]
pub(crate) struct Watched(u32);

/// Checks whether a trace is active, and runs `note` if so.
#[inline(always)]
pub(crate) fn begin(note: impl FnOnce()) -> Watched {
    let Some(place) = TRACE.get_ptr(0) else {
        return Watched(0);
    };
    // The field is read twice. After a comparison the verifier would know whether the value is zero, and
    // would follow the rest of the program once for each case.
    // SAFETY: the map returned this pointer to a live, aligned Trace, which exists as long as the program. Only an
    // address is taken, since user space may write to the Trace meanwhile.
    let by = unsafe { &raw const (*place).by };
    // SAFETY: as above; one aligned u32 is read at once.
    let watched = Watched(unsafe { by.read_volatile() });
    // SAFETY: as above.
    if unsafe { by.read_volatile() } != 0 {
        note();
    }
    watched
}

impl Watched {
    /// Ends an event, if one was begun, with this verdict index and slot.
    #[inline(always)]
    pub(crate) fn end(self, index: u32, slot: Slot) {
        if self.0 != 0 {
            report(index, slot);
        }
    }

    /// Runs `note` if a trace is active.
    #[inline(always)]
    pub(crate) fn again(self, note: impl FnOnce()) {
        if self.0 != 0 {
            note();
        }
    }
}

/// Begins an event for a frame of an XDP program. `passes` is true if the frame passes.
#[inline(always)]
pub(crate) fn note(frame: &Frame, port: PortKey, passes: bool, direction: u32) {
    let port = (port.netns as u64) << 32 | port.ifindex as u64;
    note_bytes(frame.start(), frame.end(), port, passes as u32, direction);
}

/// Begins an event for a frame of a classifier.
#[inline(always)]
pub(crate) fn note_buffer(context: &TcContext, port: PortKey, passes: bool, direction: u32) {
    let port = (port.netns as u64) << 32 | port.ifindex as u64;
    note_pieces(context.skb.skb as usize, port, passes as u32, direction);
}

#[inline(never)]
fn note_bytes(start: usize, end: usize, port: u64, passes: u32, direction: u32) {
    let frame = Frame::between(start, end);
    let at = if direction == FROM_GUEST { ethernet::SOURCE } else { ethernet::DESTINATION };
    let Some(mac) = frame.read(at) else {
        return;
    };
    let length = frame.len();
    let Some(scratch) = open(port, mac, passes, direction, length) else {
        return;
    };
    let bytes = &mut scratch.event.bytes;
    let mut at = 0;
    while at < BYTES {
        let Some(chunk) = frame.read::<CHUNK>(at) else {
            break;
        };
        if let Some(place) = bytes.get_mut(at..at + CHUNK) {
            place.copy_from_slice(&chunk);
        }
        at += CHUNK;
    }
    // The last bytes are copied together with bytes before them. The mask shows the verifier that they lie
    // inside.
    if length > CHUNK && length < BYTES {
        let at = black_box(length - CHUNK) & (BYTES - 1);
        if let (Some(chunk), Some(place)) = (frame.read::<CHUNK>(at), bytes.get_mut(at..at + CHUNK)) {
            place.copy_from_slice(&chunk);
        }
    }
}

#[inline(never)]
fn note_pieces(buffer: usize, port: u64, passes: u32, direction: u32) {
    let buffer = buffer as *mut aya_ebpf::bindings::__sk_buff;
    // SAFETY: the kernel gave this pointer to a live buffer; the field is one aligned u32.
    let length = unsafe { (*buffer).len } as usize;
    let at = if direction == FROM_GUEST { ethernet::SOURCE } else { ethernet::DESTINATION };
    let mut mac = [0; 6];
    // SAFETY: the destination is six bytes local to this function; the helper checks the range in the frame.
    let read =
        unsafe { bpf_skb_load_bytes(buffer.cast(), at as u32, mac.as_mut_ptr().cast(), mac.len() as u32) };
    if read != 0 {
        return;
    }
    let Some(scratch) = open(port, mac, passes, direction, length) else {
        return;
    };
    let captured = black_box(if length < BYTES { length } else { BYTES });
    // The frame has at least the MAC read above. Before Linux 6.8 the verifier does not infer from a comparison with
    // zero that a length is greater, and then refuses the helper.
    if captured < mac.len() || captured > BYTES {
        return;
    }
    let bytes = &mut scratch.event.bytes;
    // SAFETY: as above; the destination has room for all of them.
    unsafe { bpf_skb_load_bytes(buffer.cast(), 0, bytes.as_mut_ptr().cast(), captured as u32) };
}

/// Begins an event if the filter matches the frame.
#[inline(always)]
fn open(port: u64, mac: [u8; 6], passes: u32, direction: u32, length: usize) -> Option<&'static mut Scratch> {
    let place = TRACED.get_ptr_mut(0)?;
    // SAFETY: the map returned this pointer to a live, aligned Scratch of this CPU, which no other CPU writes;
    // neither XDP programs nor classifiers preempt each other on a CPU.
    let scratch = unsafe { &mut *place };
    scratch.pending = 0;
    // SAFETY: as in `begin`; any bytes are a valid Trace, and a partially updated one affects one frame
    // only.
    let trace: Trace = unsafe { TRACE.get_ptr(0)?.read_volatile() };
    let from = PortKey { netns: (port >> 32) as u32, ifindex: port as u32 };
    let matches = if from.ifindex == NO_PORT.ifindex {
        trace.hears_answers_to(mac)
    } else {
        trace.hears(from, mac, passes != 0)
    };
    if !matches {
        return None;
    }
    let event = &mut scratch.event;
    // SAFETY: the helper has no arguments and no precondition.
    event.time_ns = unsafe { bpf_ktime_get_ns() };
    event.netns = from.netns;
    event.ifindex = from.ifindex;
    event.length = length as u32;
    event.captured = if length < BYTES { length as u32 } else { BYTES as u32 };
    event.direction = direction;
    event.mac = mac;
    event.reserved = [0; 6];
    scratch.pending = 1;
    Some(scratch)
}

/// Sends the event that was begun, if any, to the ring buffer.
#[inline(never)]
fn report(verdict: u32, slot: Slot) {
    let Some(place) = TRACED.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: as in `open`.
    let scratch = unsafe { &mut *place };
    if scratch.pending == 0 {
        return;
    }
    scratch.pending = 0;
    scratch.event.verdict = verdict;
    scratch.event.slot = slot;
    if EVENTS.output::<TraceEvent>(&scratch.event, 0).is_err() {
        scratch.lost += 1;
    }
}
