//! The complete decision of each program, over tables that the caller supplies.
//!
//! The kernel programs pass BPF maps, the tests pass plain tables; the order of the checks is the same.
//! `port` checks five things in turn: the frame is for a served address, the port is ours and open, the
//! service accepts this kind of frame, the sender is registered on this port, and the sender's bucket is not
//! empty. Only the port and the source MAC identify the sender.

use crate::bucket;
use crate::classify::{Reader, ServedAddresses, classify};
use crate::mac::Mac;
use crate::maps::{Guest, Identity, Port, Slot};
use crate::stamp;
use crate::verdict::{Fate, Verdict};
use crate::wire::{arp, ethernet, ipv4, ipv6, tcp};

/// The limits and buckets of one port, shared with the other CPUs.
pub trait Bucket {
    /// The current limits and state.
    fn load(&self) -> Port;
    /// Reads only [`Port::guarded`].
    fn is_guarded(&self) -> bool {
        self.load().guarded != 0
    }
    /// Sets [`Port::full_at_ns`].
    fn store(&self, full_at_ns: u64);
    /// Sets [`Port::connections_full_at_ns`].
    fn store_connections(&self, full_at_ns: u64);
    /// Sets [`Port::steered`].
    fn tally(&self, steered: u64);
}

/// What `port` looks up about a frame's port and sender.
pub trait Tables: ServedAddresses {
    /// The limits and buckets of one port.
    type Bucket: Bucket;
    /// The port on which the frame arrived, if it is registered.
    fn port(&self) -> Option<Self::Bucket>;
    /// The identity of a source MAC on that port, if it is registered.
    fn identity(&self, source: Mac) -> Option<Identity>;
    /// Nanoseconds on a monotonic clock.
    fn now_ns(&self) -> u64;
}

/// What `port` does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Leave the frame to the host's network.
    Pass(Verdict),
    /// Discard the frame.
    Drop(Verdict),
    /// Answer the frame in the kernel if [`answer`](crate::answer::answer) can; else stamp it with the slot
    /// and send it to the hub. The last field is [`Port::answers`], the kinds of frame the kernel may answer.
    Steer(Verdict, Identity, u64),
}

/// Decides what to do with a frame from a guest.
#[inline(always)]
pub fn decide(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Decision {
    let verdict = classify(frame, tables);
    if matches!(verdict.fate(), Fate::Pass) {
        return Decision::Pass(verdict);
    }
    let Some(bucket) = tables.port() else {
        return Decision::Pass(Verdict::PassForeignPort);
    };
    if bucket.is_guarded() {
        return if is_for_next_hop(frame, verdict, tables) {
            Decision::Pass(Verdict::PassArp)
        } else {
            Decision::Drop(Verdict::DropGuarded)
        };
    }
    if matches!(verdict.fate(), Fate::Drop) {
        return Decision::Drop(verdict);
    }
    let Some(identity) = sender(frame, tables) else {
        return Decision::Drop(Verdict::DropUnknownMac);
    };
    let port = bucket.load();
    if let Err(refused) = charge(frame, verdict, port, &bucket, tables) {
        return Decision::Drop(refused);
    }
    bucket.tally(port.steered.wrapping_add(1));
    Decision::Steer(verdict, identity, port.answers)
}

/// Charges the frame to both buckets, or to neither: a SYN over one limit is not charged to the other. A
/// retransmitted SYN is charged again, because the kernel does not remember the first one. The limit
/// therefore covers first attempts and retransmissions together. The guest's TCP timer repeats a refused SYN.
#[inline(always)]
fn charge<B: Bucket>(
    frame: &(impl Reader + ?Sized),
    verdict: Verdict,
    port: Port,
    bucket: &B,
    tables: &impl Tables<Bucket = B>,
) -> Result<(), Verdict> {
    let opens = opens(frame, verdict) && port.connection_ns != 0;
    if port.frame_ns == 0 && !opens {
        return Ok(());
    }
    let now_ns = tables.now_ns();
    let full_at_ns = bucket::take(port, now_ns).ok_or(Verdict::DropOverLimit)?;
    if opens {
        let full_at_ns = bucket::take_connection(port, now_ns).ok_or(Verdict::DropOverConnectionLimit)?;
        bucket.store_connections(full_at_ns);
    }
    bucket.store(full_at_ns);
    Ok(())
}

/// True for a steered frame that opens a connection.
#[inline(always)]
fn opens(frame: &(impl Reader + ?Sized), verdict: Verdict) -> bool {
    let at = match verdict {
        Verdict::SteerIpv4Tcp => ethernet::HEADER + ipv4::HEADER,
        Verdict::SteerIpv6Tcp => ethernet::HEADER + ipv6::HEADER,
        _ => return false,
    };
    let flags = frame.read_afresh(at + tcp::FLAGS - 1).map(|[_, flags]| flags);
    flags.is_some_and(|flags| flags & (tcp::SYN | tcp::ACK | tcp::RST) == tcp::SYN)
}

/// True for ARP about a next hop towards a served address. That next hop is another device, and a guest on a
/// closed port must still reach it.
#[inline(always)]
fn is_for_next_hop(frame: &(impl Reader + ?Sized), verdict: Verdict, served: &impl ServedAddresses) -> bool {
    let target = ethernet::HEADER + arp::TARGET_IP;
    matches!(verdict, Verdict::SteerArp)
        && frame.read_afresh(target).is_some_and(|target| !served.serves_v4(target))
}

/// The identity of the sender. A group address has none, even if it is registered.
#[inline(always)]
fn sender(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Option<Identity> {
    let source = Mac(frame.read_afresh(ethernet::SOURCE)?);
    if source.is_group() { None } else { tables.identity(source) }
}

/// What `hub` looks up about the guest that receives a frame.
pub trait Guests {
    /// The guest in this slot, whether or not the slot is in use.
    fn guest(&self, slot: Slot) -> Option<Guest>;
}

/// What `hub` does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Discard the frame.
    Drop(Verdict),
    /// Set the destination to this MAC and send the frame to the slot's port.
    Deliver(Slot, Mac),
}

/// Decides what to do with a frame that user space wrote to the hub.
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
