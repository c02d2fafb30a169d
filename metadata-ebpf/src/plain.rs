//! The path of nearly all frames: a check of the addresses.
//!
//! Guests' ordinary traffic pays for each instruction here. The stubs therefore make this check before they
//! call `port_tcx`, because a tail call costs a frame more than the whole check.

use aya_ebpf::Global;
use aya_ebpf::programs::TcContext;
use metadata_common::classify::{Reader, is_ordinary};
use metadata_common::wire::ethernet;

/// The bytes with which no served address ends. A data section, because a look-up in an array costs more than the
/// rest of the check.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".data.ordinary")]
static ORDINARY: Global<[u8; 256]> = Global::new([0; 256]);

/// Returns true for an ordinary frame, which passes. Such a frame is not counted: a counter costs guests half a
/// per cent of their traffic's CPU time, and the interface counts its frames anyway.
#[inline(always)]
pub(crate) fn passes(context: &TcContext) -> bool {
    is_ordinary(&FirstPiece::of(context), may_be_served) && !is_tagged(context)
}

/// False if no served address ends with this byte.
#[inline(always)]
pub(crate) fn may_be_served(last: u8) -> bool {
    let table = (&raw const ORDINARY).cast::<u8>();
    // SAFETY: the table has 256 bytes.
    let place = unsafe { table.add(last as usize) };
    // SAFETY: as above; the agent may change a byte meanwhile, and each value is valid.
    let ordinary = unsafe { place.read_volatile() };
    ordinary == 0
}

/// True for a frame whose VLAN tag is in the buffer's metadata, unless that is a priority tag.
#[inline(always)]
pub(crate) fn is_tagged(context: &TcContext) -> bool {
    // SAFETY: the kernel gave this pointer to a live buffer; the field is one aligned u32.
    let present = unsafe { (*context.skb.skb).vlan_present };
    if present == 0 {
        return false;
    }
    // SAFETY: as above.
    let content = unsafe { (*context.skb.skb).vlan_tci };
    content & ethernet::VLAN_ID as u32 != 0
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
        // SAFETY: all N bytes lie before the end, as checked above; bytes have no alignment and any value is valid.
        Some(unsafe { (address as *const [u8; N]).read() })
    }
}
