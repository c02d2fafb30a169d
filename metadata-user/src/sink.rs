//! Messages from guests to their operators.
//!
//! A guest says that it is ready, phones home, reports progress or posts its password; the VM's record names
//! where that goes. The packet path hands a message over and is done: it hears of no receiver, waits for
//! none, and a message there is no room for is counted. [`deliver()`] runs on the control side.
//!
//! Each message is one JSON object: `{"vm", "name", "kind", "time", "body"}`.

mod deliver;
mod file;
mod message;
#[cfg(test)]
mod tests;
mod unix;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::record::Sink;
use crate::record::vm::Sinks;
use message::Message;

pub use deliver::deliver;
pub use file::FILE_OCTETS as SINK_FILE_OCTETS;

/// Most messages of all VMs that wait for delivery.
pub const WAITING: usize = 1_024;
/// Most messages of one VM that wait for delivery.
pub const WAITING_PER_VM: usize = 64;

/// What a guest says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// It is ready (Azure's health report, Scaleway's state): `sinks.ready`.
    Ready,
    /// cloud-init's `phone_home`, a form (`application/x-www-form-urlencoded`): `sinks.phone_home`.
    PhoneHome,
    /// A progress event of cloud-init or MAAS: `sinks.events`.
    Event,
    /// The password it chose: `sinks.password`.
    Password,
}

impl MessageKind {
    /// Its name in the message's JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::PhoneHome => "phone_home",
            Self::Event => "event",
            Self::Password => "password",
        }
    }

    /// The largest body, in octets; a larger one is a counted drop.
    #[must_use]
    pub const fn most_octets(self) -> usize {
        match self {
            Self::PhoneHome => 16 << 10,
            Self::Ready | Self::Event | Self::Password => 64 << 10,
        }
    }

    fn sink(self, sinks: &Sinks) -> Option<&Sink> {
        match self {
            Self::Ready => sinks.ready.as_ref(),
            Self::PhoneHome => sinks.phone_home.as_ref(),
            Self::Event => sinks.events.as_ref(),
            Self::Password => sinks.password.as_ref(),
        }
    }
}

/// What became of messages, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounts {
    /// Taken by their sinks.
    pub delivered: u64,
    /// Refused by their sinks, or their sinks were not there.
    pub failed: u64,
    /// Not handed over: too large, or too many were waiting.
    pub dropped: u64,
    /// Waiting now.
    pub waiting: u64,
    /// Parked requests that were ended for a newer one of the same VM.
    pub waits_ended: u64,
}

#[derive(Debug, Default)]
struct Counters {
    delivered: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
    waits_ended: AtomicU64,
    waiting: AtomicUsize,
}

/// Where messages are handed over. Clones are the same outbox.
#[derive(Clone, Debug)]
pub struct Outbox {
    queue: UnboundedSender<Box<Message>>,
    counters: Arc<Counters>,
}

/// The other end of an [`Outbox`]. For [`deliver()`].
#[derive(Debug)]
pub struct Deliveries {
    queue: UnboundedReceiver<Box<Message>>,
    counters: Arc<Counters>,
}

/// An outbox and its other end. The queue between them is bounded by [`WAITING`] and [`WAITING_PER_VM`].
#[must_use]
pub fn outbox() -> (Outbox, Deliveries) {
    let (sender, receiver) = unbounded_channel();
    let counters = Arc::new(Counters::default());
    let outbox = Outbox { queue: sender, counters: Arc::clone(&counters) };
    (outbox, Deliveries { queue: receiver, counters })
}

impl Outbox {
    /// An outbox nobody empties, for where there is no agent: each message is a counted drop.
    #[must_use]
    pub fn detached() -> Self {
        outbox().0
    }

    /// What became of messages.
    #[must_use]
    pub fn counts(&self) -> SinkCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        SinkCounts {
            delivered: of(&counters.delivered),
            failed: of(&counters.failed),
            dropped: of(&counters.dropped),
            waiting: counters.waiting.load(Ordering::Relaxed) as u64,
            waits_ended: of(&counters.waits_ended),
        }
    }

    /// This outbox for one VM, with a bound of its own.
    #[must_use]
    pub(crate) fn for_vm(&self, vm: &str) -> VmOutbox {
        VmOutbox { outbox: self.clone(), vm: vm.into(), waiting: Arc::default() }
    }
}

/// An [`Outbox`] for one VM.
#[derive(Debug)]
pub(crate) struct VmOutbox {
    outbox: Outbox,
    vm: Arc<str>,
    waiting: Arc<AtomicUsize>,
}

impl VmOutbox {
    /// Hands over one message; without a sink for it, nothing happens.
    pub(crate) fn tell(&self, sinks: &Sinks, kind: MessageKind, name: Arc<str>, body: &[u8], now_unix: u64) {
        let Some(sink) = kind.sink(sinks) else { return };
        let counters = &self.outbox.counters;
        let place = Some(()).filter(|()| body.len() <= kind.most_octets());
        let place = place.and_then(|()| Place::take(counters, &self.waiting));
        let sent = place.map(|place| {
            let (sink, vm, body) = (sink.clone(), Arc::clone(&self.vm), Bytes::copy_from_slice(body));
            let message = Message { sink, vm, name, kind, time_unix: now_unix, body, _place: place };
            self.outbox.queue.send(Box::new(message))
        });
        if !matches!(sent, Some(Ok(()))) {
            counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn count_ended_wait(&self) {
        self.outbox.counters.waits_ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// One place among the messages that wait, free again when dropped.
#[derive(Debug)]
struct Place {
    counters: Arc<Counters>,
    of_vm: Arc<AtomicUsize>,
}

impl Place {
    fn take(counters: &Arc<Counters>, of_vm: &Arc<AtomicUsize>) -> Option<Self> {
        take_below(of_vm, WAITING_PER_VM)?;
        if take_below(&counters.waiting, WAITING).is_none() {
            of_vm.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Self { counters: Arc::clone(counters), of_vm: Arc::clone(of_vm) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of_vm.fetch_sub(1, Ordering::Relaxed);
        self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

fn take_below(count: &AtomicUsize, limit: usize) -> Option<usize> {
    let more = |n| if n < limit { Some(n + 1) } else { None };
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
}
