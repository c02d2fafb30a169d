//! Messages from guests to their operators.
//!
//! A guest reports readiness or progress, phones home, or posts its password. The VM's record names the sink of each
//! kind. The packet path hands a message over without waiting. If there is no room, it drops and counts the message.
//! The agent's module `delivery` sends the messages.
//!
//! Each message is one JSON object: `{"vm", "name", "kind", "time", "body"}`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use metadata_common::share::{FairShare, Tenant};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::parser;
use crate::record::Sink;
use crate::record::event::EventJournal;
use crate::record::vm::Sinks;

/// Maximum number of messages of all VMs that wait for delivery. Tenants share it.
pub const WAITING: usize = 1_024;
/// Maximum number of messages of one VM that wait for delivery. A tenant that has fewer gets a place while one is left.
pub const WAITING_PER_VM: usize = 64;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// Readiness report (Azure's health report, Scaleway's state), for `sinks.ready`.
    Ready,
    /// cloud-init's `phone_home`, an `application/x-www-form-urlencoded` form, for `sinks.phone_home`.
    PhoneHome,
    /// Progress event of cloud-init or MAAS, for `sinks.events`.
    Event,
    /// Password that the guest chose, for `sinks.password`.
    Password,
}

impl MessageKind {
    /// Returns the name in the message's JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::PhoneHome => "phone_home",
            Self::Event => "event",
            Self::Password => "password",
        }
    }

    /// Returns the maximum length of a body, in bytes. Messages with a longer body are dropped and counted.
    #[must_use]
    pub const fn most_bytes(self) -> usize {
        match self {
            Self::PhoneHome => 16 << 10,
            Self::Ready | Self::Event | Self::Password => 64 << 10,
        }
    }

    fn sink(self, sinks: &Sinks) -> Option<&Sink> {
        match self {
            Self::Ready => sinks.ready.as_deref(),
            Self::PhoneHome => sinks.phone_home.as_deref(),
            Self::Event => sinks.events.as_deref(),
            Self::Password => sinks.password.as_deref(),
        }
    }
}

/// Counts of messages since the start of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounts {
    /// Messages that their sinks accepted.
    pub delivered: u64,
    /// Messages that their sinks refused or that did not reach them.
    pub failed: u64,
    /// Messages dropped because they were too large or too many were waiting.
    pub dropped: u64,
    /// Messages that wait for delivery now.
    pub waiting: u64,
    /// Parked requests that a newer request of the same VM displaced.
    pub waits_ended: u64,
}

/// The loss of a message.
#[derive(Clone, Debug)]
pub struct MessageLoss {
    /// The time of the loss.
    pub at: Instant,
    /// Why it was lost, with the sink if that refused it.
    pub reason: Cow<'static, str>,
}

/// The reasons why a message is dropped before its sink is asked.
const TOO_LARGE: &str = "the guest's message was larger than the limit of its kind";
const NO_PLACE: &str = "too many messages were waiting; see whether their receivers are slow";

#[derive(Debug, Default)]
struct Counters {
    delivered: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
    waits_ended: AtomicU64,
    waiting: WaitingShares,
    last_loss: Mutex<Option<MessageLoss>>,
}

/// How tenants share the messages that wait.
#[derive(Debug)]
struct WaitingShares(Mutex<FairShare>);

impl Default for WaitingShares {
    fn default() -> Self {
        Self(Mutex::new(FairShare::new(WAITING, WAITING_PER_VM)))
    }
}

impl WaitingShares {
    fn share(&self) -> MutexGuard<'_, FairShare> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counters {
    fn drop_message(&self, reason: &'static str) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
        // The packet path does not wait: a thread that holds the lock notes a loss of the same moment, or reads it.
        if let Ok(mut last) = self.last_loss.try_lock() {
            *last = Some(MessageLoss { at: Instant::now(), reason: reason.into() });
        }
    }
}

type HandOver = dyn Fn(Box<Message>) -> bool + Send + Sync;

/// Hands messages over for delivery. Clones share one outbox.
#[derive(Clone)]
pub struct Outbox {
    hand_over: Arc<HandOver>,
    counters: Arc<Counters>,
    journal: EventJournal,
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl Outbox {
    /// Creates an outbox that calls `hand_over` with each message. At most [`WAITING`] messages, [`WAITING_PER_VM`]
    /// of one VM and its share of a tenant, exist at once. `hand_over` must not wait. If it returns false, the message is dropped and counted.
    #[must_use]
    pub fn new(hand_over: impl Fn(Box<Message>) -> bool + Send + Sync + 'static) -> Self {
        Self { hand_over: Arc::new(hand_over), counters: Arc::default(), journal: EventJournal::default() }
    }

    /// Returns the journal of the events of all VMs.
    #[must_use]
    pub fn journal(&self) -> &EventJournal {
        &self.journal
    }

    /// Creates an outbox for use without an agent. It drops and counts each message.
    #[must_use]
    pub fn detached() -> Self {
        Self::new(|_| false)
    }

    /// Returns the counts.
    #[must_use]
    pub fn counts(&self) -> SinkCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        SinkCounts {
            delivered: of(&counters.delivered),
            failed: of(&counters.failed),
            dropped: of(&counters.dropped),
            waiting: counters.waiting.share().used() as u64,
            waits_ended: of(&counters.waits_ended),
        }
    }

    /// Returns the most recent loss of a message since the start of the agent.
    #[must_use]
    pub fn last_loss(&self) -> Option<MessageLoss> {
        self.counters.last_loss.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns this outbox for one VM, with the limit per VM.
    #[must_use]
    pub(crate) fn for_vm(&self, vm: &str) -> VmOutbox {
        VmOutbox { outbox: self.clone(), vm: vm.into(), waiting: Arc::default() }
    }
}

#[derive(Debug)]
pub(crate) struct VmOutbox {
    outbox: Outbox,
    vm: Arc<str>,
    waiting: Arc<AtomicUsize>,
}

impl VmOutbox {
    /// Hands over one message; does nothing if the record has no sink for its kind.
    pub(crate) fn send(
        &self,
        sinks: &Sinks,
        kind: MessageKind,
        (tenant, name): (Tenant, Arc<str>),
        body: &[u8],
        now_unix: u64,
    ) {
        let Some(sink) = kind.sink(sinks) else { return };
        let counters = &self.outbox.counters;
        if body.len() > kind.most_bytes() {
            return counters.drop_message(TOO_LARGE);
        }
        let sent = Place::take(counters, &self.waiting, tenant).map(|place| {
            let (sink, vm, body) = (sink.clone(), Arc::clone(&self.vm), Bytes::copy_from_slice(body));
            let message = Message { sink, vm, name, kind, time_unix: now_unix, body, place };
            (self.outbox.hand_over)(Box::new(message))
        });
        if sent != Some(true) {
            counters.drop_message(NO_PLACE);
        }
    }

    pub(crate) fn count_ended_wait(&self) {
        self.outbox.counters.waits_ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// One place among the waiting messages. Dropping it frees the place.
#[derive(Debug)]
struct Place {
    counters: Arc<Counters>,
    of_vm: Arc<AtomicUsize>,
    tenant: Tenant,
}

impl Place {
    fn take(counters: &Arc<Counters>, of_vm: &Arc<AtomicUsize>, tenant: Tenant) -> Option<Self> {
        take_below(of_vm, WAITING_PER_VM)?;
        if counters.waiting.share().admit(&tenant, 1).is_err() {
            of_vm.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Self { counters: Arc::clone(counters), of_vm: Arc::clone(of_vm), tenant })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of_vm.fetch_sub(1, Ordering::Relaxed);
        self.counters.waiting.share().release(&self.tenant, 1);
    }
}

fn take_below(count: &AtomicUsize, limit: usize) -> Option<usize> {
    let more = |n| if n < limit { Some(n + 1) } else { None };
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()
}

/// Creates an outbox that accepts messages and never delivers them.
#[cfg(test)]
pub(crate) fn unattended() -> Outbox {
    let waiting = Mutex::new(Vec::new());
    Outbox::new(move |message| {
        waiting.lock().expect("sound").push(message);
        true
    })
}

// One message and its JSON.

/// Maximum number of form fields that are parsed; cloud-init sends seven.
const FORM_FIELDS: usize = 64;

/// One message to be delivered.
pub struct Message {
    sink: Sink,
    vm: Arc<str>,
    name: Arc<str>,
    kind: MessageKind,
    time_unix: u64,
    body: Bytes,
    /// Held until the message is delivered or lost.
    place: Place,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("vm", &self.vm).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Message {
    /// Returns the destination.
    #[must_use]
    pub fn sink(&self) -> &Sink {
        &self.sink
    }

    /// Returns whose message it is.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.place.tenant
    }

    /// Counts the message as delivered, or as failed for a reason, and frees its place.
    pub fn end<E: fmt::Display>(self, outcome: Result<(), E>) {
        let counters = &self.place.counters;
        match outcome {
            Ok(()) => drop(counters.delivered.fetch_add(1, Ordering::Relaxed)),
            Err(error) => {
                let reason = format!("{}: {error}", self.sink).into();
                *counters.last_loss.lock().unwrap_or_else(PoisonError::into_inner) =
                    Some(MessageLoss { at: Instant::now(), reason });
                counters.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns the message as one line of JSON without a newline. It is at most six times as long as the body (the
    /// escape of a control character), plus a few hundred bytes.
    #[must_use]
    pub fn json(&self) -> String {
        let seconds = i64::try_from(self.time_unix).unwrap_or(i64::MAX);
        let time =
            OffsetDateTime::from_unix_timestamp(seconds).ok().and_then(|time| time.format(&Rfc3339).ok());
        json!({
            "vm": &*self.vm,
            "name": &*self.name,
            "kind": self.kind.name(),
            "time": time,
            "body": body(self.kind, &self.body),
        })
        .to_string()
    }
}

/// Converts a body: a form to its fields, JSON objects and arrays unchanged, other text to a string, and anything else
/// to `{"base64": …}`.
fn body(kind: MessageKind, bytes: &[u8]) -> Value {
    match kind {
        MessageKind::PhoneHome => form(bytes),
        MessageKind::Password => text(bytes),
        MessageKind::Ready | MessageKind::Event => match parser::json(bytes) {
            Ok(value @ (Value::Object(_) | Value::Array(_))) => value,
            _ => text(bytes),
        },
    }
}

fn text(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => json!({ "base64": STANDARD.encode(bytes) }),
    }
}

/// Parses `application/x-www-form-urlencoded`. If two fields have one name, the first is kept.
fn form(bytes: &[u8]) -> Value {
    let mut fields = Map::new();
    for (name, value) in form_urlencoded::parse(bytes).take(FORM_FIELDS) {
        fields.entry(name).or_insert_with(|| value.into_owned().into());
    }
    fields.into()
}
