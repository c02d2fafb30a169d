//! The path of nearly all frames: a check of the addresses.
//!
//! Guests' ordinary traffic pays for each instruction here. The stubs therefore make this check before they
//! call `port_tcx`, because a tail call costs a frame more than the whole check.

use aya_ebpf::macros::map;
use aya_ebpf::maps::Array;
use aya_ebpf::programs::TcContext;
use metadata_common::classify::{Reader, is_ordinary};
use metadata_common::maps::{INSPECTED_WORDS, bit_of, word_of};

#[map]
static INSPECTED: Array<[u64; INSPECTED_WORDS]> = Array::with_max_entries(1, 0);
#[map]
static TRACE_PASSING: Array<u32> = Array::with_max_entries(1, 0);

/// Returns true for an ordinary frame, which passes. Such a frame is not counted: a counter costs guests half a
/// per cent of their traffic's CPU time, and the interface counts its frames anyway.
#[inline(always)]
pub(crate) fn passes(context: &TcContext) -> bool {
    let Some(octets) = Octets::get() else { return false };
    let is_plain = !is_tagged(context) && is_ordinary(&FirstPiece::of(context), |last| octets.contain(last));
    is_plain && !traces_passing()
}

/// True for a frame whose VLAN tag is in the buffer's metadata.
#[inline(always)]
pub(crate) fn is_tagged(context: &TcContext) -> bool {
    // SAFETY: the kernel gave this pointer to a live buffer; the field is one aligned u32.
    let present = unsafe { (*context.skb.skb).vlan_present };
    present != 0
}

/// The last octets of served addresses. Looking up an array takes a few instructions, looking up a hash takes a
/// call.
pub(crate) struct Octets(*const [u64; INSPECTED_WORDS]);

impl Octets {
    #[inline(always)]
    pub(crate) fn get() -> Option<Self> {
        INSPECTED.get_ptr(0).map(Self)
    }

    #[inline(always)]
    pub(crate) fn contain(&self, last: u8) -> bool {
        let words = self.0.cast::<u64>();
        // SAFETY: the map returned this pointer to four live words; an octet has a bit in one of them.
        let word = unsafe { words.add(word_of(last)) };
        // SAFETY: as above; the word is aligned.
        let bits = unsafe { word.read_volatile() };
        bits & bit_of(last) != 0
    }
}

#[inline(always)]
fn traces_passing() -> bool {
    let Some(entry) = TRACE_PASSING.get_ptr(0) else {
        return false;
    };
    // SAFETY: the map returned this pointer to a live, aligned u32.
    let value = unsafe { entry.read_volatile() };
    value != 0
}

/// The linear part of a frame in a socket buffer.
struct FirstPiece {
    start: usize,
    end: usize,
}

impl FirstPiece {
    #[inline(always)]
    fn of(context: &TcContext) -> Self {
        // SAFETY: the kernel gave this pointer to a live buffer; nothing writes to these fields meanwhile.
        let buffer = unsafe { &*context.skb.skb };
        // SAFETY: a reference to one aligned u32.
        let start = unsafe { (&raw const buffer.data).read_volatile() };
        // SAFETY: as above.
        let end = unsafe { (&raw const buffer.data_end).read_volatile() };
        Self { start: start as usize, end: end as usize }
    }
}

impl Reader for FirstPiece {
    #[inline(always)]
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let address = self.start + offset;
        if address + N > self.end {
            return None;
        }
        // SAFETY: all N octets lie before the end, as checked above; octets have no alignment and any value is valid.
        Some(unsafe { (address as *const [u8; N]).read() })
    }
}
