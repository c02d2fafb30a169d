//! What each namespace with ports has of its own: two programs that say the namespace's number and go on in `port` and
//! `port_tcx`.
//!
//! Those take the kernel a tenth of a second to check and 230 KB to keep, these next to nothing. XDP carries the number in
//! front of the frame, where only this run of the program can write; `port` takes it off again. A classifier carries it
//! in the buffer's control block, which no guest reaches; `port_tcx` clears it.
//!
//! Least kernel: as for the other object.
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
use metadata_common::maps::{NUMBER_OCTETS, NUMBER_WORD};

/// The namespace's number; the loader sets it.
#[unsafe(no_mangle)]
static NETNS: Global<u32> = Global::new(0);

#[map]
static PORT_PROGRAMS: ProgramArray = ProgramArray::with_max_entries(1, 0);

#[map]
static PORT_CLASSIFIERS: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// On a VM's tap in another namespace than the agent's.
#[xdp]
pub fn port_stub(context: XdpContext) -> u32 {
    // SAFETY: the context is that of this run; nothing has been derived from it.
    if unsafe { bpf_xdp_adjust_head(context.ctx, -(NUMBER_OCTETS as i32)) } != 0 {
        // Every driver leaves 256 octets (XDP_PACKET_HEADROOM). What is unseen must not pass.
        return XDP_ABORTED;
    }
    let start = context.data();
    if start + NUMBER_OCTETS > context.data_end() {
        return XDP_ABORTED;
    }
    let place = start as *mut u32;
    // SAFETY: the octets lie inside the frame, as just seen; the kernel does not ask for alignment there.
    unsafe { place.write_unaligned(NETNS.load()) };
    // SAFETY: the entry is an XDP program like this one, loaded by the same agent.
    unsafe { PORT_PROGRAMS.tail_call(&context, 0) };
    // No agent and no pins: the port is open, as one is that has no program.
    // SAFETY: as above; what was derived from the context is not used after this.
    if unsafe { bpf_xdp_adjust_head(context.ctx, NUMBER_OCTETS as i32) } != 0 {
        return XDP_ABORTED;
    }
    XDP_PASS
}

/// Where the frames of a VM in another namespace than the agent's enter the network stack.
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
    // No agent and no pins: the port is open, as one is that has no program.
    // SAFETY: as above.
    unsafe { place.write_volatile(0) };
    TC_ACT_UNSPEC
}

/// Never reached: the verifier refuses a program that could get here and stay.
#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel gives some helpers only to programs that say they are under a GPL-compatible licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
