//! Classifiers: `port_tcx`, which replaces the XDP program `port` at the entry of the network stack,
//! `request_tcx` and `hub_tcx`.
//!
//! `port_tcx` sees a frame as a socket buffer. Only its first part is linear in memory; bytes after it are
//! copied out. The kernel removes one VLAN tag; a removed tag counts as a tag, unless it is a priority tag.
//!
//! `request_tcx` completes answers that have no room in the frame of their request. XDP cannot lengthen that frame;
//! a socket buffer can be lengthened.
//!
//! `hub_tcx` sends what XDP cannot redirect: answers to ports whose device does not accept redirected frames,
//! and long answers, which the guest's device or the kernel cuts into segments. A device transmits a socket
//! buffer as usual.
//!
//! Least kernel: 6.6 (tcx links). `bpf_redirect` finds only devices of the frame's own namespace, so frames
//! of ports in other namespaces than the hub's go through a ring (`ring`).

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};
use aya_ebpf::helpers::generated::{
    bpf_redirect, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes,
};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use core::hint::black_box;
use metadata_common::answer::request::long::{AnswerRest, CONTENT_AT, SUM_AT};
use metadata_common::classify::Reader;
use metadata_common::decide::{Decision, Delivery, decide, deliver};
use metadata_common::drain;
use metadata_common::mac::Mac;
use metadata_common::maps::{Identity, LONG_RESPONSE_BYTES, MAX_STEERED, MIN_SEGMENT, Slot};
use metadata_common::stamp::stamp;
use metadata_common::trace::{FROM_GUEST, NO_SLOT, TO_GUEST};
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;

use crate::frame::{Frame, anonymous};
use crate::plain;
use crate::ring;
use crate::tables::{
    Guests, HUB_DEVICES, Ingress, count, count_index, home_device, is_behind_stubs, long_body, served_date,
};
use crate::{report_unknown, trace, worth_a_line};

/// At the entry of a VM's frames to the network stack: steers frames for the metadata service, and passes
/// other frames.
#[classifier]
pub fn port_tcx(context: TcContext) -> i32 {
    if !is_behind_stubs() && plain::passes(&context) {
        return TC_ACT_UNSPEC;
    }
    match Way::of(look(&context)) {
        Way::Is(action) => action,
        // A program may tail-call another one from its main function only.
        Way::Ring(hub) => ring::hand_in(&context, hub),
    }
}

/// The rest of [`port_tcx`]; returns the [`Way`] in one number. It is not inlined, so that saving its
/// registers costs ordinary frames nothing.
#[inline(never)]
fn look(context: &TcContext) -> u64 {
    let buffer = Buffer { context, first: Frame::first_piece(context) };
    let ingress = Ingress::of_buffer(context);
    let (verdict, action) = match decide(&buffer, &ingress) {
        // The frame continues to the next classifier, if there is one.
        Decision::Pass(verdict) => (verdict, TC_ACT_UNSPEC),
        Decision::Drop(verdict) => (verdict, TC_ACT_SHOT),
        Decision::Steer(verdict, identity, _) => {
            let watched = trace::begin(|| trace::note_buffer(context, ingress.key(), false, FROM_GUEST));
            let (verdict, way) = steer(&buffer, &ingress, verdict, identity);
            count(verdict);
            watched.end(verdict.index(), identity.slot);
            if matches!(way, Way::Ring(_)) {
                ring::note_spent(context, &ingress);
            }
            return way.number();
        }
    };
    let index = anonymous(verdict, ingress.salt());
    let nth = count_index(index);
    if index == Verdict::DropUnknownMac.index() && worth_a_line(nth) {
        report_unknown(context, &buffer, &ingress, nth);
    }
    let passes = action == TC_ACT_UNSPEC;
    trace::begin(|| trace::note_buffer(context, ingress.key(), passes, FROM_GUEST)).end(index, NO_SLOT);
    Way::Is(action).number()
}

/// What happens to a frame next.
enum Way {
    /// The program returns this action.
    Is(i32),
    /// The frame goes to the ring of this hub.
    Ring(u32),
}

impl Way {
    /// The bit that marks [`Way::Ring`] in the number.
    const RING: u64 = 1 << 32;

    #[inline(always)]
    const fn number(self) -> u64 {
        match self {
            Self::Is(action) => action as u32 as u64,
            Self::Ring(hub) => Self::RING | hub as u64,
        }
    }

    #[inline(always)]
    const fn of(number: u64) -> Self {
        if number & Self::RING == 0 { Self::Is(number as i32) } else { Self::Ring(number as u32) }
    }
}

/// Stamps the frame and selects the way to its hub.
#[inline(always)]
fn steer(buffer: &Buffer<'_>, ingress: &Ingress, verdict: Verdict, identity: Identity) -> (Verdict, Way) {
    if buffer.is_oversize() {
        return (Verdict::DropOversize, Way::Is(TC_ACT_SHOT));
    }
    let hub = drain::hub(buffer, verdict, identity, ingress);
    let Some(device) = HUB_DEVICES.get(hub).copied().filter(|ifindex| *ifindex != 0) else {
        return (Verdict::DropNoHub, Way::Is(TC_ACT_SHOT));
    };
    if buffer.context.store(ethernet::SOURCE, &stamp(identity.slot).0, 0).is_err() {
        return (Verdict::DropUnwritable, Way::Is(TC_ACT_SHOT));
    }
    if is_behind_stubs() {
        return (verdict, Way::Ring(hub));
    }
    // SAFETY: the helper takes two integers and has no precondition; a device that is gone drops the frame.
    let action = unsafe { bpf_redirect(device, 0) };
    (verdict, Way::Is(action as i32))
}

/// On the inner end of a hub's veth: completes an answer that `request` has begun, and sends it to its port.
#[classifier]
pub fn request_tcx(context: TcContext) -> i32 {
    // `request` has counted the answer. The guest repeats a request whose answer is dropped here.
    let Delivery::Deliver(slot, mac) = deliver(&Frame::first_piece(&context), &Guests) else {
        count(Verdict::DropUnwritable);
        return TC_ACT_SHOT;
    };
    let (verdict, action) = match complete(&context).map(|()| hand_over(&context, slot, mac)) {
        Some((Verdict::HubDelivered, action)) => (Verdict::AnswerRequest, action),
        _ => {
            count(Verdict::DropUnwritable);
            (Verdict::DropUnwritable, TC_ACT_SHOT)
        }
    };
    trace::begin(|| trace::note_buffer(&context, trace::NO_PORT, false, TO_GUEST)).end(verdict.index(), slot);
    action
}

/// Writes the rest of a begun answer. `None` if it was withdrawn meanwhile, or if the kernel has no memory.
#[inline(always)]
fn complete(context: &TcContext) -> Option<()> {
    let rest = AnswerRest::read(&Frame::first_piece(context))?;
    let date = served_date()?;
    let body = long_body(rest.body)?;
    let skb = context.skb.skb;
    // The verifier must see the range in the value that it follows to the helper. Linux 6.1 does not learn from a
    // comparison with 0 that a value is at least 1.
    let last = black_box((rest.length as u32).wrapping_sub(1));
    if last >= LONG_RESPONSE_BYTES as u32 {
        return None;
    }
    let length = last + 1;
    // SAFETY: the context belongs to this run; what was derived from its frame is not used after the call.
    if unsafe { bpf_skb_change_tail(skb, CONTENT_AT as u32 + length, 0) } != 0 {
        return None;
    }
    // SAFETY: the body has LONG_RESPONSE_BYTES bytes, and `length` is no more; the helper checks the range in the frame.
    if unsafe { bpf_skb_store_bytes(skb, CONTENT_AT as u32, body.cast(), length, 0) } != 0 {
        return None;
    }
    context.store(CONTENT_AT + rest.date, &date.text, 0).ok()?;
    context.store(SUM_AT, &rest.checksum(&date), 0).ok()
}

/// Behind `hub`: sends answers to ports whose device does not accept redirected frames. On the tap for long
/// answers, without `hub`: sends each answer to its port. No frame continues to the host's network stack.
#[classifier]
pub fn hub_tcx(context: TcContext) -> i32 {
    match deliver(&Frame::first_piece(&context), &Guests) {
        Delivery::Drop(verdict) => {
            count(verdict);
            TC_ACT_SHOT
        }
        Delivery::Deliver(slot, mac) => {
            let (verdict, action) = hand_over(&context, slot, mac);
            count(verdict);
            // The headers alone of a long frame are linear in memory.
            trace::begin(|| trace::note_buffer(&context, trace::NO_PORT, false, TO_GUEST))
                .end(verdict.index(), slot);
            action
        }
    }
}

/// Restores the guest's MAC and redirects the frame to its port.
#[inline(always)]
fn hand_over(context: &TcContext, slot: Slot, mac: Mac) -> (Verdict, i32) {
    let Some(device) = home_device(slot) else {
        return (Verdict::HubDropNoDevice, TC_ACT_SHOT);
    };
    if context.store(ethernet::DESTINATION, &mac.0, 0).is_err() {
        return (Verdict::HubDropTruncated, TC_ACT_SHOT);
    }
    // SAFETY: the helper takes two integers and has no precondition; a device that is gone drops the frame.
    let action = unsafe { bpf_redirect(device, 0) };
    (Verdict::HubDelivered, action as i32)
}

/// A frame in a socket buffer.
struct Buffer<'c> {
    context: &'c TcContext,
    first: Frame,
}

impl Buffer<'_> {
    /// True for a frame that is longer than the hub accepts, or that the kernel would split into very many
    /// segments although it was charged as one frame. No client sends either.
    #[inline(always)]
    fn is_oversize(&self) -> bool {
        // SAFETY: the kernel gave this pointer to a live buffer; the field is one aligned u32.
        let segment = unsafe { (*self.context.skb.skb).gso_size };
        self.context.len() > MAX_STEERED || (segment != 0 && segment < MIN_SEGMENT)
    }
}

impl Reader for Buffer<'_> {
    #[inline(always)]
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        if let Some(bytes) = self.first.read(offset) {
            return Some(bytes);
        }
        // The sender decides where the linear part ends, so bytes after it must be read too.
        self.read_afresh(offset)
    }

    #[inline(always)]
    fn read_afresh<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        // SAFETY: the destination is N bytes local to this function; the helper checks the range in the frame.
        let outcome = unsafe {
            bpf_skb_load_bytes(
                self.context.skb.skb.cast(),
                offset as u32,
                bytes.as_mut_ptr().cast(),
                N as u32,
            )
        };
        if outcome == 0 { Some(bytes) } else { None }
    }

    #[inline(always)]
    fn is_tagged(&self) -> bool {
        plain::is_tagged(self.context)
    }
}
