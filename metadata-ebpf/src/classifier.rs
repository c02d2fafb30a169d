//! The same decision behind the network stack's door: a tcx classifier in place of the XDP program `port`.
//!
//! It sees a frame as a socket buffer, which leaves large frames in pieces and takes one VLAN tag off. So
//! what is not in the first piece is copied out, and a tag taken off counts as one.
//!
//! `hub_tcx` does the other direction for ports whose device takes no redirected frames: a frame in a socket buffer is
//! sent there as any other is.
//!
//! Least kernel: 6.6 (tcx links). `bpf_redirect` finds devices of the frame's own namespace only, so frames of ports in
//! other namespaces than the hub's go by a ring (`ring`).

use aya_ebpf::bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC};
use aya_ebpf::helpers::generated::{bpf_redirect, bpf_skb_load_bytes};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use metadata_common::classify::Reader;
use metadata_common::decide::{Decision, Delivery, decide, deliver};
use metadata_common::drain;
use metadata_common::mac::Mac;
use metadata_common::maps::{Identity, MAX_STEERED, MIN_SEGMENT, Slot};
use metadata_common::stamp::stamp;
use metadata_common::trace::{NO_SLOT, TO_GUEST};
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;

use crate::frame::{Frame, anonymous};
use crate::plain::{self, count_index};
use crate::ring;
use crate::tables::{Guests, HUB_DEVICES, Ingress, bare_device, count, is_behind_stubs};
use crate::{report_unknown, trace, worth_a_line};

/// Where a VM's frames enter the network stack: steer what is for the metadata service, leave the rest alone.
#[classifier]
pub fn port_tcx(context: TcContext) -> i32 {
    if !is_behind_stubs() && plain::passes(&context) {
        return TC_ACT_UNSPEC;
    }
    match Way::of(look(&context)) {
        Way::Is(action) => action,
        // A program may end in another one, but not in the midst of one of its functions.
        Way::Ring(hub) => ring::hand_in(&context, hub),
    }
}

/// The rest of [`port_tcx`]; the [`Way`] in one number. Not inlined, so that what it keeps in registers costs ordinary
/// frames nothing.
#[inline(never)]
fn look(context: &TcContext) -> u64 {
    let buffer = Buffer { context, first: Frame::first_piece(context) };
    let ingress = Ingress::of_buffer(context);
    let (verdict, action) = match decide(&buffer, &ingress) {
        // On to the next classifier, if there is one.
        Decision::Pass(verdict) => (verdict, TC_ACT_UNSPEC),
        Decision::Drop(verdict) => (verdict, TC_ACT_SHOT),
        Decision::Steer(verdict, identity, _) => {
            let watched = trace::begin(|| trace::note_buffer(context, ingress.key(), false));
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
    trace::begin(|| trace::note_buffer(context, ingress.key(), passes)).end(index, NO_SLOT);
    Way::Is(action).number()
}

/// Where a frame goes on.
enum Way {
    /// With this action.
    Is(i32),
    /// Into the ring of this hub.
    Ring(u32),
}

impl Way {
    /// Set in the number of [`Way::Ring`].
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

/// Names the sender's slot in the source MAC and sends the frame to its hub.
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

/// Behind `hub`: to the guest's port, if its device takes no redirected frames. Nothing goes on to the host's stack.
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
            trace::begin(|| trace::note(&Frame::first_piece(&context), trace::NO_PORT, false, TO_GUEST))
                .end(verdict.index(), slot);
            action
        }
    }
}

/// Puts the guest's MAC back and sends the frame to its port.
#[inline(always)]
fn hand_over(context: &TcContext, slot: Slot, mac: Mac) -> (Verdict, i32) {
    let Some(device) = bare_device(slot) else {
        return (Verdict::HubDropNoDevice, TC_ACT_SHOT);
    };
    if context.store(ethernet::DESTINATION, &mac.0, 0).is_err() {
        return (Verdict::HubDropTruncated, TC_ACT_SHOT);
    }
    // SAFETY: the helper takes two integers and has no precondition; a device that is gone drops the frame.
    let action = unsafe { bpf_redirect(device, 0) };
    (Verdict::HubDelivered, action as i32)
}

/// A socket buffer as a frame.
struct Buffer<'c> {
    context: &'c TcContext,
    first: Frame,
}

impl Buffer<'_> {
    /// True for more than a client sends at once: the hub would refuse it, or the kernel would have to cut
    /// one frame, for which the bucket gave one token, into a flood of segments.
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
        if let Some(octets) = self.first.read(offset) {
            return Some(octets);
        }
        // The sender chooses where its first piece ends; what lies behind it counts all the same.
        self.read_afresh(offset)
    }

    #[inline(always)]
    fn read_afresh<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let mut octets = [0; N];
        // SAFETY: the destination is N octets of this function's own; the helper checks the range in the frame.
        let outcome = unsafe {
            bpf_skb_load_bytes(
                self.context.skb.skb.cast(),
                offset as u32,
                octets.as_mut_ptr().cast(),
                N as u32,
            )
        };
        if outcome == 0 { Some(octets) } else { None }
    }

    #[inline(always)]
    fn is_tagged(&self) -> bool {
        plain::is_tagged(self.context)
    }
}
