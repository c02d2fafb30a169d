//! The kernel side of xdp-imds: the smallest shell that lets `metadata-common` decide in the kernel.
//!
//! Three XDP programs. `port` sits on each VM's tap, and sends what is for the metadata service to the
//! hub; `socket` sits on the inner end of the hub's veth and hands frames to the AF_XDP socket; `hub`
//! sits on the hub tap and sends answers to the guest's tap. Every frame adds one to one counter.
//!
//! Least kernel: 5.8 (ring buffer of the log; `DEVMAP_HASH` is 5.4, global constants 5.2).
#![no_std]
#![no_main]

mod frame;
mod tables;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use aya_log_ebpf::warn;
use metadata_common::classify::Reader as _;
use metadata_common::decide::{Decision, Delivery, decide, deliver};
use metadata_common::mac::Mac;
use metadata_common::maps::{Identity, Slot};
use metadata_common::stamp::stamp;
use metadata_common::verdict::Verdict;
use metadata_common::wire::ethernet;

use crate::frame::Frame;
use crate::tables::{GUEST_DEVICES, Guests, HUBS, Ingress, SOCKETS, count};

/// What a redirect answers when its map has no such entry. The frame is ours, so it must not pass.
const OR_DROP: u64 = XDP_DROP as u64;

/// On a VM's tap: steer what is for the metadata service, leave the rest alone.
#[xdp]
pub fn port(context: XdpContext) -> u32 {
    let frame = Frame::new(&context);
    let ingress = Ingress::of(&context);
    match decide(&frame, &ingress) {
        Decision::Pass(verdict) => {
            count(verdict);
            XDP_PASS
        }
        Decision::Drop(verdict) => {
            let nth = count(verdict);
            if matches!(verdict, Verdict::DropUnknownMac) && worth_a_line(nth) {
                report_unknown(&context, &frame, &ingress, nth);
            }
            XDP_DROP
        }
        Decision::Steer(verdict, identity) => steer(&context, &frame, verdict, identity),
    }
}

/// Names the sender's slot in the source MAC and sends the frame to its hub.
#[inline(always)]
fn steer(context: &XdpContext, frame: &Frame, verdict: Verdict, identity: Identity) -> u32 {
    if !frame.write(ethernet::SOURCE, stamp(identity.slot).0) {
        count(Verdict::DropUnwritable);
        return XDP_DROP;
    }
    match HUBS.redirect(identity.hub, OR_DROP) {
        Ok(action) => {
            count(verdict);
            action
        }
        Err(action) => {
            let nth = count(Verdict::DropNoHub);
            if worth_a_line(nth) {
                warn!(
                    context,
                    "hub {} of slot {} has no device: {} frames dropped", identity.hub, identity.slot, nth
                );
            }
            action
        }
    }
}

/// On the inner end of the hub's veth: into the AF_XDP socket of the queue.
#[xdp]
pub fn socket(context: XdpContext) -> u32 {
    match SOCKETS.redirect(context.rx_queue_index(), OR_DROP) {
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

/// On the hub tap: from the stamp to the guest's tap.
#[xdp]
pub fn hub(context: XdpContext) -> u32 {
    let frame = Frame::new(&context);
    match deliver(&frame, &Guests) {
        Delivery::Drop(verdict) => {
            count(verdict);
            XDP_DROP
        }
        Delivery::Deliver(slot, mac) => hand_over(&frame, slot, mac),
    }
}

/// Puts the guest's MAC back and sends the frame to its port.
#[inline(always)]
fn hand_over(frame: &Frame, slot: Slot, mac: Mac) -> u32 {
    if !frame.write(ethernet::DESTINATION, mac.0) {
        count(Verdict::HubDropTruncated);
        return XDP_DROP;
    }
    match GUEST_DEVICES.redirect(slot, OR_DROP) {
        Ok(action) => {
            count(Verdict::HubDelivered);
            action
        }
        Err(action) => {
            count(Verdict::HubDropNoDevice);
            action
        }
    }
}

/// True for the first, second, fourth, eighth… frame of a kind, so that a flood writes at most 64 lines
/// per CPU.
#[inline(always)]
const fn worth_a_line(nth: u64) -> bool {
    nth.is_power_of_two()
}

/// Tells who tried to speak without being registered.
#[inline(always)]
fn report_unknown(context: &XdpContext, frame: &Frame, ingress: &Ingress, nth: u64) {
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
