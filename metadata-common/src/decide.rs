//! The whole decision of each program, over tables the caller brings.
//!
//! The kernel's programs bring BPF maps, the tests bring plain ones; the order of the questions is the
//! same. `port` asks: is the frame for a served address, is the port ours and open, is such a frame served at
//! all, is the sender registered on this port, is there credit left. Who is asking is decided by the
//! port and the source MAC alone.

use crate::bucket;
use crate::classify::{Reader, Served, classify};
use crate::mac::Mac;
use crate::maps::{Guest, Identity, Port, Slot};
use crate::stamp;
use crate::verdict::{Fate, Verdict};
use crate::wire::{arp, ethernet, ipv4, ipv6, tcp};

/// A port's limits and bucket, shared with the other CPUs.
pub trait Bucket {
    /// Limits and state as they stand.
    fn load(&self) -> Port;
    /// [`Port::guarded`], without the rest.
    fn is_guarded(&self) -> bool {
        self.load().guarded != 0
    }
    /// Replaces the state of the bucket of frames.
    fn store(&self, full_at_ns: u64);
    /// Replaces the state of the bucket of connections.
    fn store_connections(&self, full_at_ns: u64);
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
    if bucket.is_guarded() {
        return if is_next_hops(frame, verdict, tables) {
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

/// Takes from both buckets what the frame costs, or from neither: a SYN over the one limit costs nothing of the
/// other. A SYN that is sent again costs again, since nobody remembers the first; so the limit is for a guest's
/// first attempts and their repetitions together, and one that was refused comes by TCP's own timer.
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

/// True for a steered frame that asks for a new connection.
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

/// True for ARP about the next hop on the way to a served address, which is somebody else's: a guest whose port is
/// closed must still reach it.
#[inline(always)]
fn is_next_hops(frame: &(impl Reader + ?Sized), verdict: Verdict, served: &impl Served) -> bool {
    let target = ethernet::HEADER + arp::TARGET_IP;
    matches!(verdict, Verdict::SteerArp)
        && frame.read_afresh(target).is_some_and(|target| !served.serves_v4(target))
}

/// Who sent the frame. A group address is nobody's, even if somebody registered it.
#[inline(always)]
fn sender(frame: &(impl Reader + ?Sized), tables: &impl Tables) -> Option<Identity> {
    let source = Mac(frame.read_afresh(ethernet::SOURCE)?);
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
