//! Delivers frames from namespaces out of which a classifier cannot redirect, through a ring that the hub's
//! worker reads.
//!
//! ```text
//!  port_tcx_stub ── PORT_CLASSIFIERS ── port_tcx ── RINGS[hub] ── ring ── RING of that hub ── worker
//! ```
//!
//! A ring buffer works across namespaces. Each hub has its own instance of `ring` with its own buffer, and
//! `port_tcx` selects the instance by the hub's number. During a takeover, each of the two agents therefore
//! gets the frames of its own connections. The frame carries its slot in a stamp, as on every other path
//! ([`metadata_common::stamp`]).

use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, TC_ACT_SHOT};
use aya_ebpf::helpers::generated::bpf_skb_load_bytes;
use aya_ebpf::macros::{classifier, map};
use aya_ebpf::maps::{ProgramArray, RingBuf};
use aya_ebpf::programs::TcContext;
use core::hint::black_box;
use metadata_common::maps::{MAX_HUBS, RING_BYTES, RING_HEADER, RING_RECORDS, SPENT_WORD};
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;

use crate::tables::{Ingress, count};

#[map]
static RINGS: ProgramArray = ProgramArray::with_max_entries(MAX_HUBS, 0);
/// The ring of one hub. It is the only map that instances do not share.
#[map]
static RING: RingBuf = RingBuf::with_byte_size(RING_BYTES, 0);

/// Writes to the control block, for `ring`, whether the port has spent its tokens.
#[inline(always)]
pub(crate) fn note_spent(context: &TcContext, ingress: &Ingress) {
    // SAFETY: the kernel gave this pointer to a live buffer; the word is inside it.
    let place = unsafe { &raw mut (*context.skb.skb).cb[SPENT_WORD] };
    // SAFETY: one aligned u32, which classifiers may write.
    unsafe { place.write_volatile(ingress.is_spent() as u32) };
}

/// Tail-calls the `ring` of a hub. Returns the action if the hub has none.
#[inline(always)]
pub(crate) fn hand_in(context: &TcContext, hub: u32) -> i32 {
    // SAFETY: the entries are classifiers like this one, loaded by the agents whose hubs these are.
    unsafe { RINGS.tail_call(context, hub) };
    count(Verdict::RingDropAbsent);
    TC_ACT_SHOT
}

/// Runs after `port_tcx`: copies the frame into the ring and drops the frame itself.
#[classifier]
pub fn ring(context: TcContext) -> i32 {
    // SAFETY: the kernel gave this pointer to a live buffer; the word is inside it.
    let place = unsafe { &raw const (*context.skb.skb).cb[SPENT_WORD] };
    // SAFETY: one aligned u32, which classifiers may read.
    let is_spent = unsafe { place.read_volatile() } != 0;
    let length = context.len() as usize;
    let [short, medium, _] = RING_RECORDS;
    let verdict = if is_spent && RING.query(BPF_RB_AVAIL_DATA as u64) > RING_BYTES as u64 / 2 {
        Verdict::RingDropFull
    } else if length <= short - RING_HEADER {
        put::<{ RING_RECORDS[0] }>(&context, length)
    } else if length <= medium - RING_HEADER {
        put::<{ RING_RECORDS[1] }>(&context, length)
    } else {
        put::<{ RING_RECORDS[2] }>(&context, length)
    };
    count(verdict);
    TC_ACT_SHOT
}

/// Copies a frame into a record of `N` bytes.
#[inline(always)]
fn put<const N: usize>(context: &TcContext, length: usize) -> Verdict {
    // `black_box` makes the compiler compare the value that is used later, from which the verifier derives
    // its range.
    let length = black_box(length);
    // No frame is shorter than its header. A comparison with zero would not do before Linux 6.8: that verifier does not
    // infer from it that the length is greater, and refuses the helper.
    if length < ethernet::HEADER || length > N - RING_HEADER {
        return Verdict::RingDropFull;
    }
    let Some(mut record) = RING.reserve_bytes(N, 0) else {
        return Verdict::RingDropFull;
    };
    let start = record.as_mut_ptr();
    // SAFETY: the record has N bytes, more than RING_HEADER, and the kernel aligns records to 8.
    unsafe { start.cast::<u64>().write(length as u64) };
    // SAFETY: as above.
    let frame = unsafe { start.add(RING_HEADER) };
    // SAFETY: there is room for N - RING_HEADER bytes, at least `length`; the helper checks the range in the frame.
    let read = unsafe { bpf_skb_load_bytes(context.skb.skb.cast(), 0, frame.cast(), length as u32) };
    if read != 0 {
        record.discard(0);
        return Verdict::RingDropFull;
    }
    record.submit(0);
    Verdict::RingDelivered
}
