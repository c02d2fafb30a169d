//! The whole decision of each program, over tables the caller brings.
//!
//! The kernel's programs bring BPF maps, the tests bring plain ones; the order of the questions is the
//! same. `port` asks: is the frame for a served address, is the port ours, is such a frame served at
//! all, is the sender registered on this port, is there credit left. Who is asking is decided by the
//! port and the source MAC alone.

use crate::bucket;
use crate::classify::{Reader, Served, classify};
use crate::mac::Mac;
use crate::maps::{Guest, Identity, Port, Slot};
use crate::stamp;
use crate::verdict::{Fate, Verdict};
use crate::wire::ethernet;

/// A port's limits and bucket, shared with the other CPUs.
pub trait Bucket {
    /// Limits and state as they stand.
    fn load(&self) -> Port;
    /// Replaces the state.
    fn store(&self, full_at_ns: u64);
    /// Replaces the number of frames steered.
    fn tally(&self, steered: u64);
}

/// What `port` looks up about a frame's port and sender.
pub trait Tables: Served {
    /// The bucket of one port.
    type Bucket: Bucket;
    /// The port the frame came in by, if it is registered.
    fn port(&self) -> Option<Self::Bucket>;
    /// Who this MAC is on that port.
    fn identity(&self, source: Mac) -> Option<Identity>;
    /// Nanoseconds on a clock that only goes forward.
    fn now_ns(&self) -> u64;
}

/// What `port` does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Leave it alone.
    Pass(Verdict),
    /// Throw it away.
    Drop(Verdict),
    /// Answer it if [`answer`](crate::answer::answer) can, given what the port's entry lets the kernel answer
    /// ([`Port::answers`]); else stamp it with the slot and send it to the hub.
    Steer(Verdict, Identity, u64),
}

/// Decides about a frame a guest sent.
#[inline(always)]
pub fn decide(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Decision {
    let verdict = classify(frame, tables);
    if matches!(verdict.fate(), Fate::Pass) {
        return Decision::Pass(verdict);
    }
    let Some(bucket) = tables.port() else {
        return Decision::Pass(Verdict::PassForeignPort);
    };
    if matches!(verdict.fate(), Fate::Drop) {
        return Decision::Drop(verdict);
    }
    let Some(identity) = sender(frame, tables) else {
        return Decision::Drop(Verdict::DropUnknownMac);
    };
    let port = bucket.load();
    if port.frame_ns != 0 {
        match bucket::take(port, tables.now_ns()) {
            Some(full_at_ns) => bucket.store(full_at_ns),
            None => return Decision::Drop(Verdict::DropOverLimit),
        }
    }
    bucket.tally(port.steered.wrapping_add(1));
    Decision::Steer(verdict, identity, port.answers)
}

/// Who sent the frame. A group address is nobody's, even if somebody registered it.
#[inline(always)]
fn sender(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Option<Identity> {
    let source = Mac(frame.read(ethernet::SOURCE)?);
    if source.is_group() { None } else { tables.identity(source) }
}

/// What `hub` looks up about the guest a frame is for.
pub trait Guests {
    /// The guest in this slot, live or not.
    fn guest(&self, slot: Slot) -> Option<Guest>;
}

/// What `hub` does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Throw it away.
    Drop(Verdict),
    /// Put this MAC in as destination and send it to the slot's port.
    Deliver(Slot, Mac),
}

/// Decides about a frame user space wrote to the hub.
#[inline(always)]
pub fn deliver(frame: &(impl Reader + ?Sized), guests: &impl Guests) -> Delivery {
    if frame.read::<{ ethernet::HEADER }>(0).is_none() {
        return Delivery::Drop(Verdict::HubDropTruncated);
    }
    let Some(destination) = frame.read(ethernet::DESTINATION) else {
        return Delivery::Drop(Verdict::HubDropTruncated);
    };
    let Some(slot) = stamp::slot_of(Mac(destination)) else {
        return Delivery::Drop(Verdict::HubDropUnstamped);
    };
    match guests.guest(slot) {
        Some(guest) if guest.live == 1 => Delivery::Deliver(slot, Mac(guest.mac)),
        _ => Delivery::Drop(Verdict::HubDropNoGuest),
    }
}

#[cfg(test)]
mod tests;
