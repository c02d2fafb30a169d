//! The kernel side of xdp-imds: a thin layer through which `metadata-common` decides in the kernel.
//!
//! There are four XDP programs and four classifiers:
//!
//! - `port`, on each VM's tap, answers frames for the metadata service or redirects them to the hub;
//! - `request`, after `port`, answers a segment with a request, or redirects it to the hub;
//! - `socket`, on the inner end of the hub's veth, redirects frames to the AF_XDP socket;
//! - `request_tcx` (`classifier`), behind `socket`, completes answers for which `request` had no room;
//! - `hub`, on the hub tap, redirects answers to the guest's tap;
//! - `port_tcx` (`classifier`) replaces `port` where that costs a guest less;
//! - `ring` delivers frames from other namespaces for `port_tcx`;
//! - `hub_tcx` delivers long answers, and answers to ports that do not accept redirected frames.
//!
//! `port`, `port_tcx` or its stub counts every frame once. Each later program counts it once more.
//!
//! Least kernel: 5.8 (ring buffer of the log, lookups in a `DEVMAP_HASH`; `DEVMAP_HASH` needs 5.4, global
//! constants 5.2).
#![no_std]
#![no_main]

mod classifier;
mod frame;
mod plain;
mod priority;
mod ring;
mod tables;
mod trace;

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::xdp_action::{XDP_ABORTED, XDP_DROP, XDP_PASS, XDP_TX};
use aya_ebpf::helpers::generated::{bpf_xdp_adjust_head, bpf_xdp_adjust_tail};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use aya_log_ebpf::warn;
use metadata_common::answer::request::{hide_token, long, look_up, prove, show_token, write};
use metadata_common::answer::{Editor as _, Reply, answer_sound, is_sound};
use metadata_common::classify::Reader;
use metadata_common::decide::{Decision, Delivery, Tables as _, decide, deliver};
use metadata_common::drain;
use metadata_common::mac::Mac;
use metadata_common::maps::{ANSWER_REQUESTS, Identity, MAX_STEERED, Slot, socket_index};
use metadata_common::stamp::stamp;
use metadata_common::trace::{FROM_GUEST, NO_SLOT, TO_GUEST};
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;

use crate::frame::{Frame, anonymous};
use crate::tables::{
    GUEST_DEVICES, Guests, HUBS, Ingress, SOCKETS, count, count_index, counted_index, home_device, is_bare,
    own_hub,
};

/// The action of a redirect without an entry in its map. The frame is for the service, so it must not pass.
const OR_DROP: u64 = XDP_DROP as u64;

/// On a VM's tap: answers or steers frames for the metadata service, and passes other frames.
#[xdp]
pub fn port(context: XdpContext) -> u32 {
    let Some(ingress) = Ingress::of(&context) else {
        return XDP_ABORTED;
    };
    let Some(tag) = priority::take(&context, ingress.salt()) else {
        return XDP_ABORTED;
    };
    let frame = Frame::new(&context);
    let (verdict, action) = match decide(&frame, &ingress) {
        Decision::Pass(verdict) => (verdict, XDP_PASS),
        Decision::Drop(verdict) => (verdict, XDP_DROP),
        Decision::Steer(verdict, identity, answers) => {
            let answers =
                if may_be_answered(&context, verdict, answers) { answers } else { answers & ANSWER_REQUESTS };
            if answers == ANSWER_REQUESTS && matches!(verdict, Verdict::SteerIpv4Tcp) {
                tables::hand_request(&context, &ingress, &identity);
            }
            let watched =
                trace::begin(|| trace::note(&Frame::anew(&context), ingress.key(), false, FROM_GUEST));
            let (index, action) = dealt(deal_with(&context, &ingress, verdict, &identity, answers));
            if index == Verdict::DropNoHub.index() {
                report_no_hub(&context, &ingress, verdict, &identity);
            }
            watched.end(index, identity.slot);
            if action == XDP_TX {
                watched.again(|| {
                    trace::note(&Frame::anew(&context), ingress.key(), false, TO_GUEST);
                    watched.end(index, identity.slot);
                });
            }
            return action;
        }
    };
    let index = anonymous(verdict, ingress.salt());
    if tag != 0 && action == XDP_PASS && !priority::put_back(&context, tag) {
        return XDP_ABORTED;
    }
    let frame = Frame::anew(&context);
    let nth = count_index(index);
    if index == Verdict::DropUnknownMac.index() && worth_a_line(nth) {
        report_unknown(&context, &frame, &ingress, nth);
    }
    let passes = action == XDP_PASS;
    trace::begin(|| trace::note(&frame, ingress.key(), passes, FROM_GUEST)).end(index, NO_SLOT);
    action
}

/// True if the kernel may answer the frame and its checksum is valid. It is not inlined, to limit the stack.
#[inline(never)]
fn may_be_answered(context: &XdpContext, verdict: Verdict, answers: u64) -> bool {
    is_sound(&Frame::anew(context), verdict, answers)
}

/// Answers or steers a frame. Returns the verdict's index and the action in one number ([`dealt`]). It is not
/// inlined, because `decide` already uses much of the 512 bytes of stack.
#[inline(never)]
fn deal_with(
    context: &XdpContext,
    ingress: &Ingress,
    verdict: Verdict,
    identity: &Identity,
    answers: u64,
) -> u64 {
    let mut frame = Frame::anew(context);
    let (verdict, action) = match answer_sound(&mut frame, verdict, identity.slot, answers, ingress) {
        Some(Reply::Send(verdict, length)) => send_back(context, &frame, verdict, length),
        Some(Reply::Absorb(verdict)) => (counted(verdict), XDP_DROP),
        None => steer(&mut frame, ingress, verdict, *identity),
    };
    let index = anonymous(verdict, ingress.salt());
    (index as u64) << 32 | action as u64
}

/// After `port`, for a segment with data: answers a request from the published documents, or redirects it to the hub.
#[xdp]
pub fn request(context: XdpContext) -> u32 {
    let Some(handed) = tables::HANDED.get_ptr(0) else {
        return XDP_DROP;
    };
    // SAFETY: the map returned this pointer to a live, aligned value, which `port` has written on this CPU.
    let handed = unsafe { &*handed };
    let ingress = Ingress::handed(handed);
    let slot = handed.identity.slot;
    let watched = trace::begin(|| trace::note(&Frame::anew(&context), ingress.key(), false, FROM_GUEST));
    let outcome = answer_request(&context, &ingress, slot);
    if outcome == UNWRITABLE {
        watched.end(anonymous(counted(Verdict::DropUnwritable), ingress.salt()), slot);
        return XDP_DROP;
    }
    if outcome == ANSWERED || outcome == BEGUN {
        let index = anonymous(counted(Verdict::AnswerRequest), ingress.salt());
        watched.end(index, slot);
        if outcome == BEGUN {
            // The hub was there when its device was entered, and the guest repeats its request.
            return HUBS.redirect(handed.identity.hub, OR_DROP).unwrap_or_else(|action| action);
        }
        watched.again(|| {
            trace::note(&Frame::anew(&context), ingress.key(), false, TO_GUEST);
            watched.end(index, slot);
        });
        return XDP_TX;
    }
    let mut frame = Frame::anew(&context);
    let (verdict, action) = steer(&mut frame, &ingress, Verdict::SteerIpv4Tcp, handed.identity);
    let index = anonymous(verdict, ingress.salt());
    if index == Verdict::DropNoHub.index() {
        report_no_hub(&context, &ingress, Verdict::SteerIpv4Tcp, &handed.identity);
    }
    watched.end(index, slot);
    action
}

/// Results of [`answer_request`]: the frame is as it was, it is the answer, it is neither any more, or it is the begun
/// answer.
const UNANSWERED: u64 = 0;
const ANSWERED: u64 = 1;
const UNWRITABLE: u64 = 2;
const BEGUN: u64 = 3;

/// Answers a request from the published documents.
#[inline(always)]
fn answer_request(context: &XdpContext, ingress: &Ingress, slot: Slot) -> u64 {
    if prove_request(context, ingress, slot) == 0 {
        return UNANSWERED;
    }
    find_token(context, ingress);
    let surplus = find_answer(context, ingress);
    restore_token(context);
    if surplus == LONG_ANSWER {
        // `request_tcx` reaches no other device.
        return if home_device(slot).is_some() { begin_answer(context, ingress) } else { UNANSWERED };
    }
    if surplus == NO_ANSWER || surplus != 0 && !resize(context, surplus) {
        return UNANSWERED;
    }
    write_answer(context, ingress)
}

/// Returns 1 if the segment is a request that the kernel may answer, else 0. Not inlined, to limit the stack.
#[inline(never)]
fn prove_request(context: &XdpContext, ingress: &Ingress, slot: Slot) -> u64 {
    let Some(request) = tables::ANSWERING.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: the map returned this pointer to a live, aligned value of this CPU, which no other CPU writes.
    let request = unsafe { &mut *request };
    prove(&Frame::anew(context), slot, ingress.now_ns(), ingress, request).is_some().into()
}

/// Hides the token of a request that [`prove_request`] has accepted. Not inlined, to limit the stack.
#[inline(never)]
fn find_token(context: &XdpContext, ingress: &Ingress) -> u64 {
    let Some(request) = tables::ANSWERING.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: as in `prove_request`.
    let request = unsafe { &mut *request };
    hide_token(&mut Frame::anew(context), ingress, request);
    1
}

/// Restores what [`find_token`] has hidden. Not inlined, to limit the stack.
#[inline(never)]
fn restore_token(context: &XdpContext) -> u64 {
    let Some(request) = tables::ANSWERING.get_ptr(0) else {
        return 0;
    };
    // SAFETY: as in `prove_request`.
    let request = unsafe { &*request };
    show_token(&mut Frame::anew(context), request);
    1
}

/// Finds the answer to a request that [`prove_request`] has accepted. Returns by how many bytes its frame is longer than the
/// request's, or [`NO_ANSWER`] or [`LONG_ANSWER`]. Not inlined, to limit the stack.
#[inline(never)]
fn find_answer(context: &XdpContext, ingress: &Ingress) -> i32 {
    let Some(request) = tables::ANSWERING.get_ptr_mut(0) else {
        return NO_ANSWER;
    };
    // SAFETY: as in `prove_request`.
    let request = unsafe { &mut *request };
    let frame = Frame::anew(context);
    match look_up(&frame, ingress, request) {
        Some(()) if request.is_long() => LONG_ANSWER,
        Some(()) => request.frame_length() as i32 - frame.len() as i32,
        None => NO_ANSWER,
    }
}

const NO_ANSWER: i32 = i32::MIN;
const LONG_ANSWER: i32 = i32::MAX;

/// Writes the answer that [`find_answer`] has found. Not inlined, to limit the stack.
#[inline(never)]
fn write_answer(context: &XdpContext, ingress: &Ingress) -> u64 {
    let Some(request) = tables::ANSWERING.get_ptr(0) else {
        return UNWRITABLE;
    };
    // SAFETY: as in `prove_request`.
    let request = unsafe { &*request };
    // The guest repeats a request that is dropped here.
    match write(&mut Frame::anew(context), request, ingress) {
        Some(()) => ANSWERED,
        None => UNWRITABLE,
    }
}

/// Begins the answer that [`find_answer`] has found. Not inlined, to limit the stack.
#[inline(never)]
fn begin_answer(context: &XdpContext, ingress: &Ingress) -> u64 {
    let Some(request) = tables::ANSWERING.get_ptr(0) else {
        return UNWRITABLE;
    };
    // SAFETY: as in `prove_request`.
    let request = unsafe { &*request };
    match long::begin(&mut Frame::anew(context), request, ingress) {
        Some(()) => BEGUN,
        None => UNWRITABLE,
    }
}

/// Changes the length of the frame by this many bytes; its content is then undefined. If it returns false, the frame is
/// unchanged.
#[inline(always)]
fn resize(context: &XdpContext, delta: i32) -> bool {
    // SAFETY: the context belongs to this run; what is derived from it is not used after the call.
    if unsafe { bpf_xdp_adjust_tail(context.ctx, delta) } == 0 {
        return true;
    }
    let front = if delta < HEAD_ROOM { delta } else { HEAD_ROOM };
    // SAFETY: as above.
    if unsafe { bpf_xdp_adjust_head(context.ctx, -front) } != 0 {
        return false;
    }
    // SAFETY: as above.
    if delta == front || unsafe { bpf_xdp_adjust_tail(context.ctx, delta - front) } == 0 {
        return true;
    }
    // SAFETY: as above; the frame began here before.
    unsafe { bpf_xdp_adjust_head(context.ctx, front) };
    false
}

/// Bytes before a frame on a tap that a longer frame may take: what a tap leaves, less the kernel's `xdp_frame`.
const HEAD_ROOM: i32 = 320 - 40;

/// Splits the result of [`deal_with`] into verdict index and action.
#[inline(always)]
fn dealt(number: u64) -> (u32, u32) {
    ((number >> 32) as u32, number as u32)
}

/// Counts the verdict and returns it.
#[inline(always)]
fn counted(verdict: Verdict) -> Verdict {
    count(verdict);
    verdict
}

/// Truncates the frame to its answer and sends it back to the guest.
#[inline(always)]
fn send_back(context: &XdpContext, frame: &Frame, verdict: Verdict, length: usize) -> (Verdict, u32) {
    let surplus = frame.len() as i32 - length as i32;
    if surplus > 0 {
        // SAFETY: the context belongs to this run; what is derived from it is not used after the call.
        let rc = unsafe { bpf_xdp_adjust_tail(context.ctx, -surplus) };
        if rc != 0 {
            return (counted(Verdict::DropUnwritable), XDP_DROP);
        }
    }
    (counted(verdict), XDP_TX)
}

/// Stamps the frame and redirects it to its hub.
#[inline(always)]
fn steer(frame: &mut Frame, ingress: &Ingress, verdict: Verdict, identity: Identity) -> (Verdict, u32) {
    // The hub's device would drop such a frame without a count.
    if frame.len() > MAX_STEERED as usize {
        return (counted(Verdict::DropOversize), XDP_DROP);
    }
    let hub = drain::hub(frame, verdict, identity, ingress);
    if !frame.write(ethernet::SOURCE, stamp(identity.slot).0) {
        return (counted(Verdict::DropUnwritable), XDP_DROP);
    }
    match HUBS.redirect(hub, OR_DROP) {
        Ok(action) => (counted(verdict), action),
        Err(action) => {
            count(Verdict::DropNoHub);
            (Verdict::DropNoHub, action)
        }
    }
}

/// On the inner end of a hub's veth: redirects to the AF_XDP socket of the frame's queue, and passes begun answers to
/// `request_tcx` without counting them again. Without that classifier the network stack drops them, because they are addressed to
/// another host and shorter than their IP header says.
#[xdp]
pub fn socket(context: XdpContext) -> u32 {
    if long::is_begun(&Frame::new(&context)) {
        return XDP_PASS;
    }
    // SAFETY: the context belongs to this run, which the kernel keeps valid and aligned until it ends.
    let queue = unsafe { (*context.ctx).rx_queue_index };
    let Some(index) = socket_index(own_hub(), queue) else {
        count(Verdict::SocketDropAbsent);
        return XDP_DROP;
    };
    match SOCKETS.redirect(index, OR_DROP) {
        Ok(action) => {
            count(Verdict::SocketDelivered);
            action
        }
        Err(action) => {
            count(Verdict::SocketDropAbsent);
            action
        }
    }
}

/// On the hub tap: redirects an answer to the guest's tap. A frame that the tap's device would not accept
/// goes to `hub_tcx`, which counts it.
#[xdp]
pub fn hub(context: XdpContext) -> u32 {
    let mut frame = Frame::new(&context);
    match deliver(&frame, &Guests) {
        Delivery::Drop(verdict) => {
            count(verdict);
            XDP_DROP
        }
        Delivery::Deliver(slot, _) if is_bare(slot) => XDP_PASS,
        Delivery::Deliver(slot, mac) => {
            let (verdict, action) = hand_over(&mut frame, slot, mac);
            count(verdict);
            trace::begin(|| trace::note(&frame, trace::NO_PORT, false, TO_GUEST)).end(verdict.index(), slot);
            action
        }
    }
}

/// Restores the guest's MAC and redirects the frame to its port.
#[inline(always)]
fn hand_over(frame: &mut Frame, slot: Slot, mac: Mac) -> (Verdict, u32) {
    if !frame.write(ethernet::DESTINATION, mac.0) {
        return (Verdict::HubDropTruncated, XDP_DROP);
    }
    match GUEST_DEVICES.redirect(slot, OR_DROP) {
        Ok(action) => (Verdict::HubDelivered, action),
        Err(action) => (Verdict::HubDropNoDevice, action),
    }
}

/// True for the first, second, fourth, eighth… frame of a kind. A flood therefore writes at most 64 log lines
/// per CPU.
#[inline(always)]
const fn worth_a_line(nth: u64) -> bool {
    nth.is_power_of_two()
}

/// Logs an unregistered sender. It is not inlined, to limit the stack.
#[inline(never)]
fn report_unknown(context: &impl EbpfContext, frame: &impl Reader, ingress: &Ingress, nth: u64) {
    let mac: [u8; 6] = frame.read(ethernet::SOURCE).unwrap_or_default();
    let key = ingress.key();
    warn!(
        context,
        "interface {} of namespace {}: {:mac} is not registered there: {} frames dropped",
        key.ifindex,
        key.netns,
        mac,
        nth
    );
}

/// Logs that the hub of a frame has no device. To limit the stack, it is not inlined, and only the programs' main
/// functions call it.
#[inline(never)]
fn report_no_hub(context: &XdpContext, ingress: &Ingress, verdict: Verdict, identity: &Identity) -> u64 {
    let nth = counted_index(Verdict::DropNoHub.index());
    if worth_a_line(nth) {
        let hub = drain::hub(&Frame::anew(context), verdict, *identity, ingress);
        warn!(context, "hub {} of slot {} has no device: {} frames dropped", hub, identity.slot, nth);
    }
    nth
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
