//! The programs that each namespace with ports has for itself. They pass the namespace's number and tail-call
//! `port` and `port_tcx`.
//!
//! To load `port` and `port_tcx`, the kernel needs a tenth of a second and 230 KB; the stubs need next to
//! nothing. The XDP stub writes the number before the frame, where only this run of the program can write,
//! and `port` removes it. The classifier stub writes it to the buffer's control block, which no guest can
//! reach, and `port_tcx` clears it.
//!
//! The least kernel is that of the main object.
#![no_std]
#![no_main]

mod plain;

use aya_ebpf::Global;
use aya_ebpf::bindings::TC_ACT_UNSPEC;
use aya_ebpf::bindings::xdp_action::{XDP_ABORTED, XDP_PASS};
use aya_ebpf::helpers::generated::bpf_xdp_adjust_head;
use aya_ebpf::macros::{classifier, map, xdp};
use aya_ebpf::maps::ProgramArray;
use aya_ebpf::programs::{TcContext, XdpContext};
use metadata_common::maps::{NUMBER_BYTES, NUMBER_WORD};

/// The namespace's number; set by the loader.
#[unsafe(no_mangle)]
static NETNS: Global<u32> = Global::new(0);

#[map]
static PORT_PROGRAMS: ProgramArray = ProgramArray::with_max_entries(1, 0);

#[map]
static PORT_CLASSIFIERS: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// On a VM's tap in a namespace other than the agent's: adds the number and tail-calls `port`.
#[xdp]
pub fn port_stub(context: XdpContext) -> u32 {
    // SAFETY: the context belongs to this run; nothing has been derived from it.
    if unsafe { bpf_xdp_adjust_head(context.ctx, -(NUMBER_BYTES as i32)) } != 0 {
        // This does not happen, because every driver leaves 256 bytes (XDP_PACKET_HEADROOM). An unclassified
        // frame must not pass.
        return XDP_ABORTED;
    }
    let start = context.data();
    if start + NUMBER_BYTES > context.data_end() {
        return XDP_ABORTED;
    }
    let place = start as *mut u32;
    // SAFETY: the bytes lie inside the frame, as checked above; the kernel requires no alignment there.
    unsafe { place.write_unaligned(NETNS.load()) };
    // SAFETY: the entry is an XDP program like this one, loaded by the same agent.
    unsafe { PORT_PROGRAMS.tail_call(&context, 0) };
    // Without an agent and without pins the frame passes, as on a port without a program.
    // SAFETY: as above; what was derived from the context is not used after this.
    if unsafe { bpf_xdp_adjust_head(context.ctx, NUMBER_BYTES as i32) } != 0 {
        return XDP_ABORTED;
    }
    XDP_PASS
}

/// At the entry to the network stack in a namespace other than the agent's: passes ordinary frames, or adds
/// the number and tail-calls `port_tcx`.
#[classifier]
pub fn port_tcx_stub(context: TcContext) -> i32 {
    if plain::passes(&context) {
        return TC_ACT_UNSPEC;
    }
    // SAFETY: the kernel gave this pointer to a live buffer; the word is inside it.
    let place = unsafe { &raw mut (*context.skb.skb).cb[NUMBER_WORD] };
    // SAFETY: one aligned u32, which classifiers may write.
    unsafe { place.write_volatile(NETNS.load()) };
    // SAFETY: the entry is a classifier like this one, loaded by the same agent.
    unsafe { PORT_CLASSIFIERS.tail_call(&context, 0) };
    // Without an agent and without pins the frame passes, as on a port without a program.
    // SAFETY: as above.
    unsafe { place.write_volatile(0) };
    TC_ACT_UNSPEC
}

/// Never runs: the verifier rejects a program that could enter this loop.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel restricts some helpers to programs with a GPL-compatible licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
