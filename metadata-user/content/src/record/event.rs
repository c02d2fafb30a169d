//! Events: what the host will do to a VM, announced before it does it.
//!
//! A source states events in the VM's record, and an operator adds others through the API. Dialects render both in
//! their clouds' form, and the guest may acknowledge one: anyone who waits for that may then continue. An event changes
//! nothing else: what it announces is done by the platform.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::values::{AnyLine, Id, Timestamp};

/// Maximum number of events of a record, and of those that operators add to one VM.
pub const EVENTS_PER_VM: usize = 16;

/// What the host will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The VM is paused for a moment, for a live migration as a rule, and keeps its memory.
    Freeze,
    /// The VM is restarted on its host.
    Reboot,
    /// The VM is stopped and started on another host.
    Redeploy,
    /// The VM is stopped for good here, or deleted.
    Terminate,
    /// The VM is stopped or deleted because another needs its place.
    Preempt,
}

impl EventKind {
    /// Every kind, in the order of this type.
    pub const ALL: [Self; 5] = [Self::Freeze, Self::Reboot, Self::Redeploy, Self::Terminate, Self::Preempt];

    /// Returns the name in records and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Freeze => "freeze",
            Self::Reboot => "reboot",
            Self::Redeploy => "redeploy",
            Self::Terminate => "terminate",
            Self::Preempt => "preempt",
        }
    }
}

/// How far an event has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventState {
    /// It is announced.
    #[default]
    Scheduled,
    /// It has begun.
    Started,
    /// It is over.
    Completed,
    /// It will not happen.
    Cancelled,
}

impl EventState {
    /// Every state, in the order of this type.
    pub const ALL: [Self; 4] = [Self::Scheduled, Self::Started, Self::Completed, Self::Cancelled];

    /// Returns the name in records and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Started => "started",
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// An entry of `events`: what the host will do to the VM, as its guest is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct ScheduledEvent {
    /// Name of the event, unique for the VM.
    pub id: Id,
    /// What will be done: `freeze`, `reboot`, `redeploy`, `terminate` or `preempt`.
    pub kind: EventKind,
    /// `scheduled` by default, then `started`, `completed` or `cancelled`.
    #[serde(default)]
    pub state: EventState,
    /// Nothing happens before this time; as soon as possible by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
    /// Why, for the people who run the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<AnyLine>,
}

impl ScheduledEvent {
    /// Returns whether the event is still to come or has begun.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        matches!(self.state, EventState::Scheduled | EventState::Started)
    }

    /// Returns the description; the empty string if there is none.
    #[must_use]
    pub fn description(&self) -> &str {
        self.description.as_ref().map_or("", AnyLine::as_str)
    }
}

/// An event with what the guest said of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnouncedEvent {
    /// The event.
    #[serde(flatten)]
    pub event: ScheduledEvent,
    /// When the guest could first know of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced: Option<Timestamp>,
    /// When the guest acknowledged it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acknowledged: Option<Timestamp>,
}

impl AnnouncedEvent {
    fn new(event: ScheduledEvent, now_unix: u64) -> Self {
        Self { event, announced: timestamp(now_unix), acknowledged: None }
    }

    /// Replaces the event by another of its id. An acknowledgement stays, unless the event was over and comes again.
    fn replace(&mut self, event: ScheduledEvent, now_unix: u64) {
        if event.is_pending() && !self.event.is_pending() {
            *self = Self::new(event, now_unix);
        } else {
            self.event = event;
        }
    }

    /// Returns the time before which nothing happens. An event without one happens as soon as its guest knows of it.
    #[must_use]
    pub fn time(&self) -> Timestamp {
        let time = self.event.not_before.clone().or_else(|| self.announced.clone());
        time.or_else(|| Timestamp::at(0)).expect("1970 is a year between 0 and 9999")
    }
}

/// One line for operators: `drain-1: freeze, scheduled for 2030-01-01T00:00:00Z, acknowledged`.
impl fmt::Display for AnnouncedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScheduledEvent { id, kind, state, not_before, .. } = &self.event;
        write!(f, "{id}: {}, {}", kind.name(), state.name())?;
        if let (EventState::Scheduled, Some(time)) = (state, not_before) {
            write!(f, " for {}", time.as_str())?;
        }
        f.write_str(if self.acknowledged.is_some() { ", acknowledged" } else { "" })
    }
}

fn timestamp(unix: u64) -> Option<Timestamp> {
    i64::try_from(unix).ok().and_then(Timestamp::at)
}

/// All events of a VM at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventDocument {
    /// Grows with each change of the events. An acknowledgement is not a change. It is at least the time of the change
    /// in Unix seconds, so it also grows when the VM moves to another node or its agent starts without state.
    pub incarnation: u32,
    /// The events of the record, then those that operators added.
    pub events: Vec<AnnouncedEvent>,
}

impl Default for EventDocument {
    fn default() -> Self {
        Self { incarnation: 1, events: Vec::new() }
    }
}

impl EventDocument {
    /// Returns the events that are still to come or have begun.
    pub fn pending(&self) -> impl Iterator<Item = &AnnouncedEvent> {
        self.events.iter().filter(|known| known.event.is_pending())
    }

    /// Returns the event of this id.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<&AnnouncedEvent> {
        self.events.iter().find(|announced| announced.event.id.as_str() == id)
    }
}

/// Why an event is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventRefused {
    /// The VM has [`EVENTS_PER_VM`] events that are pending.
    #[error("expected at most {EVENTS_PER_VM} pending events of one VM, found one more; cancel one first")]
    Full,
    /// The record has an event of this id.
    #[error(
        "expected another id: the event `{0}` is in the VM's record, and is changed where that comes from"
    )]
    OfRecord(String),
    /// The record of the VM is not in force.
    #[error("expected a record in force; this VM is served from another record, or is not served yet")]
    NotInForce,
    /// The event has happened.
    #[error(
        "expected an event that is still to come or has begun: `{0}` is completed, and its guest was told so"
    )]
    Over(String),
    /// There is no such event.
    #[error("expected the id of an event that was added, found `{0}`; `xdp-imds event ls` lists them")]
    Unknown(String),
}

/// What became of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledgement {
    /// It is noted.
    Noted,
    /// It was noted before.
    Repeated,
    /// No pending event has this id.
    Unknown,
}

/// Limit on changes of events that wait for the audit log.
pub const NOTES: usize = 4_096;

/// What has become of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventNews {
    /// It is announced, or in another state.
    State(EventState),
    /// The record or the VM no longer has it, although it was pending.
    Withdrawn,
    /// The guest acknowledged it.
    Acknowledged,
}

/// A change of a VM's events, for the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedEvent {
    /// The owner of the VM.
    pub vm: Arc<str>,
    /// When, in Unix seconds.
    pub unix_seconds: u64,
    /// The event's id.
    pub id: Id,
    /// Its kind.
    pub kind: EventKind,
    /// What has become of it.
    pub news: EventNews,
}

/// Where changes of events wait for the audit log; off without one. Clones are the same journal.
#[derive(Clone, Debug, Default)]
pub struct EventJournal(Arc<JournalState>);

#[derive(Debug, Default)]
struct JournalState {
    is_on: AtomicBool,
    notes: Mutex<VecDeque<NotedEvent>>,
    dropped: AtomicU64,
}

impl EventJournal {
    /// Begins to note changes.
    pub fn turn_on(&self) {
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    /// Takes what was noted.
    #[must_use]
    pub fn take(&self) -> VecDeque<NotedEvent> {
        std::mem::take(&mut *self.0.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of changes that found no room.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    fn note(&self, notes: impl Iterator<Item = NotedEvent>) {
        let mut waiting = self.0.notes.lock().unwrap_or_else(PoisonError::into_inner);
        for note in notes {
            if waiting.len() < NOTES {
                waiting.push_back(note);
            } else {
                self.0.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// The events of one VM. A VM without events has no memory for them.
#[derive(Debug, Default)]
pub struct VmEvents {
    list: Mutex<Option<Box<EventList>>>,
    /// Where changes are noted, and the owner of the VM.
    journal: Option<(EventJournal, Arc<str>)>,
}

/// The events of a VM as they are stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventList {
    incarnation: u32,
    /// Instance-id of the VM; `None` before its first record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance: Option<Box<str>>,
    /// Events of the record.
    of_record: Vec<AnnouncedEvent>,
    /// Events that operators added. None has the id of one of the record.
    added: Vec<AnnouncedEvent>,
}

impl Default for EventList {
    fn default() -> Self {
        let incarnation = EventDocument::default().incarnation;
        Self { incarnation, instance: None, of_record: Vec::new(), added: Vec::new() }
    }
}

impl EventList {
    fn all(&self) -> impl Iterator<Item = &AnnouncedEvent> {
        self.of_record.iter().chain(&self.added)
    }

    fn is_of_record(&self, id: &str) -> bool {
        self.of_record.iter().any(|known| known.event.id.as_str() == id)
    }

    fn change(&mut self, now_unix: u64) {
        let now = u32::try_from(now_unix).unwrap_or(u32::MAX);
        self.incarnation = self.incarnation.saturating_add(1).max(now);
    }

    /// Sets the instance-id. What was added for another instance, and what its guest acknowledged, is removed.
    fn set_instance(&mut self, instance: &str, now_unix: u64) {
        let last = self.instance.replace(instance.into());
        if last.is_none_or(|last| *last == *instance) {
            return;
        }
        if !self.added.is_empty() {
            self.change(now_unix);
        }
        self.added.clear();
        self.of_record.iter_mut().for_each(|known| known.acknowledged = None);
    }

    /// Replaces the events of the record. An added event of the same id becomes the record's: it is one event, whose end
    /// only the record states.
    fn set_record(&mut self, events: &[ScheduledEvent], now_unix: u64) {
        if self.of_record.iter().map(|known| &known.event).eq(events) {
            return;
        }
        let mut before = std::mem::take(&mut self.of_record);
        for event in events.iter().take(EVENTS_PER_VM) {
            let known = take(&mut before, &event.id).or_else(|| take(&mut self.added, &event.id));
            let mut known = known.unwrap_or_else(|| AnnouncedEvent::new(event.clone(), now_unix));
            known.replace(event.clone(), now_unix);
            self.of_record.push(known);
        }
        self.change(now_unix);
    }

    /// Adds an event. A pending one with the same id keeps the time and description that are not given, so that a new
    /// state changes nothing else.
    fn add(&mut self, mut event: ScheduledEvent, now_unix: u64) -> Result<bool, EventRefused> {
        if self.is_of_record(event.id.as_str()) {
            return Err(EventRefused::OfRecord(event.id.to_string()));
        }
        if let Some(known) = self.added.iter_mut().find(|known| known.event.id == event.id) {
            if known.event.is_pending() {
                event.not_before = event.not_before.or_else(|| known.event.not_before.clone());
                event.description = event.description.or_else(|| known.event.description.clone());
            }
            if known.event == event {
                return Ok(false);
            }
            known.replace(event, now_unix);
        } else {
            if self.added.len() >= EVENTS_PER_VM {
                // The oldest that is over makes room.
                let over = self.added.iter().position(|known| !known.event.is_pending());
                self.added.remove(over.ok_or(EventRefused::Full)?);
            }
            self.added.push(AnnouncedEvent::new(event, now_unix));
        }
        self.change(now_unix);
        Ok(true)
    }

    fn cancel(&mut self, id: &str, now_unix: u64) -> Result<bool, EventRefused> {
        if self.is_of_record(id) {
            return Err(EventRefused::OfRecord(id.to_owned()));
        }
        let known = self.added.iter_mut().find(|known| known.event.id.as_str() == id);
        let event = &mut known.ok_or_else(|| EventRefused::Unknown(id.to_owned()))?.event;
        match event.state {
            EventState::Cancelled => Ok(false),
            EventState::Completed => Err(EventRefused::Over(id.to_owned())),
            EventState::Scheduled | EventState::Started => {
                event.state = EventState::Cancelled;
                self.change(now_unix);
                Ok(true)
            }
        }
    }

    /// Takes over the added events and the acknowledgements that another agent stored. The incarnation then exceeds
    /// that of either agent.
    fn merge(&mut self, mut stored: Self, now_unix: u64) {
        self.incarnation = self.incarnation.max(stored.incarnation);
        if self.instance.is_none() || self.instance == stored.instance {
            for known in &mut self.of_record {
                let of_record = take(&mut stored.of_record, &known.event.id);
                if let Some(mut stored) = of_record.or_else(|| take(&mut stored.added, &known.event.id)) {
                    stored.replace(known.event.clone(), now_unix);
                    *known = stored;
                }
            }
            (self.instance, self.added) = (stored.instance, stored.added);
        }
        self.change(now_unix);
    }

    fn acknowledge(&mut self, id: &str, now_unix: u64) -> Acknowledgement {
        let mut all = self.of_record.iter_mut().chain(&mut self.added);
        match all.find(|known| known.event.id.as_str() == id && known.event.is_pending()) {
            None => Acknowledgement::Unknown,
            Some(AnnouncedEvent { acknowledged: Some(_), .. }) => Acknowledgement::Repeated,
            Some(known) => {
                known.acknowledged = timestamp(now_unix);
                Acknowledgement::Noted
            }
        }
    }
}

/// Removes the event of an id from a list.
fn take(events: &mut Vec<AnnouncedEvent>, id: &Id) -> Option<AnnouncedEvent> {
    let at = events.iter().position(|known| known.event.id == *id)?;
    Some(events.remove(at))
}

impl VmEvents {
    /// Locks the events, ignoring poison: every change is complete or has not started.
    fn locked(&self) -> MutexGuard<'_, Option<Box<EventList>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the events of the VM of this owner, whose changes are noted.
    #[must_use]
    pub fn noted(journal: EventJournal, vm: Arc<str>) -> Self {
        Self { list: Mutex::default(), journal: Some((journal, vm)) }
    }

    /// Makes a change, and notes what has become of the events.
    fn change<T>(&self, now_unix: u64, change: impl FnOnce(&mut Option<Box<EventList>>) -> T) -> T {
        let mut list = self.locked();
        let journal = self.journal.as_ref().filter(|(journal, _)| journal.0.is_on.load(Ordering::Relaxed));
        let Some((journal, vm)) = journal else { return change(&mut list) };
        let all = |list: &Option<Box<EventList>>| {
            list.iter().flat_map(|list| list.all()).cloned().collect::<Vec<_>>()
        };
        let before = all(&list);
        let done = change(&mut list);
        let note = |known: &AnnouncedEvent, news| {
            let (vm, id) = (Arc::clone(vm), known.event.id.clone());
            NotedEvent { vm, unix_seconds: now_unix, id, kind: known.event.kind, news }
        };
        let after = all(&list);
        let find = |list: &[AnnouncedEvent], one: &AnnouncedEvent| {
            list.iter().find(|known| known.event.id == one.event.id).cloned()
        };
        let news = after.iter().flat_map(|known| {
            let former = find(&before, known);
            let state = |event: &AnnouncedEvent| (event.event.kind, event.event.state);
            let is_new = former.as_ref().map(state) != Some(state(known));
            let said = known.acknowledged.is_some() && former.is_none_or(|it| it.acknowledged.is_none());
            let news = [(is_new, EventNews::State(known.event.state)), (said, EventNews::Acknowledged)];
            news.into_iter().filter(|(has, _)| *has).map(|(_, news)| note(known, news))
        });
        let gone = before.iter().filter(|known| known.event.is_pending() && find(&after, known).is_none());
        journal.note(news.chain(gone.map(|known| note(known, EventNews::Withdrawn))));
        done
    }

    /// Returns all events.
    #[must_use]
    pub fn document(&self) -> EventDocument {
        self.locked().as_ref().map_or_else(EventDocument::default, |list| EventDocument {
            incarnation: list.incarnation,
            events: list.all().cloned().collect(),
        })
    }

    /// Returns a number that grows with each change of the events.
    #[must_use]
    pub fn incarnation(&self) -> u32 {
        self.locked().as_ref().map_or(EventDocument::default().incarnation, |list| list.incarnation)
    }

    /// Returns whether an event is pending and the guest has not acknowledged it; `None` if there is no such event.
    #[must_use]
    pub fn is_awaited(&self, id: &str) -> Option<bool> {
        let list = self.locked();
        let known = list.as_ref()?.all().find(|known| known.event.id.as_str() == id)?;
        Some(known.event.is_pending() && known.acknowledged.is_none())
    }

    /// Returns the number of events that are still to come or have begun.
    #[must_use]
    pub fn pending(&self) -> u64 {
        let list = self.locked();
        list.as_ref().map_or(0, |list| list.all().filter(|known| known.event.is_pending()).count() as u64)
    }

    /// Replaces the events of the VM's record. Those that were added for another instance-id are removed, and so are
    /// the acknowledgements of its guest. `now_unix` is the time in Unix seconds, here and below.
    pub fn note_record(&self, instance: &str, events: &[ScheduledEvent], now_unix: u64) {
        self.change(now_unix, |list| {
            if list.is_some() || !events.is_empty() {
                let list = list.get_or_insert_default();
                list.set_instance(instance, now_unix);
                list.set_record(events, now_unix);
            }
        });
    }

    /// Adds an event for the instance-id of the VM's record, or changes the added one of its id: a pending one keeps the
    /// time and description that are not given. Returns false if it was the same.
    ///
    /// # Errors
    /// [`EventRefused`]: nothing has changed.
    pub fn add(&self, instance: &str, event: ScheduledEvent, now_unix: u64) -> Result<bool, EventRefused> {
        self.change(now_unix, |list| {
            let list = list.get_or_insert_default();
            list.set_instance(instance, now_unix);
            list.add(event, now_unix)
        })
    }

    /// Cancels an added event. Returns false if it was cancelled already.
    ///
    /// # Errors
    /// [`EventRefused`] if there is no such event, if it is completed, or if it is of the record.
    pub fn cancel(&self, id: &str, now_unix: u64) -> Result<bool, EventRefused> {
        self.change(now_unix, |list| match list {
            Some(list) => list.cancel(id, now_unix),
            None => Err(EventRefused::Unknown(id.to_owned())),
        })
    }

    /// Notes that the guest acknowledged a pending event.
    pub fn acknowledge(&self, id: &str, now_unix: u64) -> Acknowledgement {
        self.change(now_unix, |list| {
            list.as_mut().map_or(Acknowledgement::Unknown, |list| list.acknowledge(id, now_unix))
        })
    }

    /// Returns the events to store; `None` if there never was one.
    #[must_use]
    pub fn stored(&self) -> Option<EventList> {
        self.locked().as_deref().cloned()
    }

    /// Takes over the events that an earlier agent stored. Events of a record that this agent knows stay.
    pub fn restore(&self, stored: EventList, now_unix: u64) {
        let mut list = self.locked();
        match list.as_mut() {
            Some(list) if **list == stored => {}
            Some(list) => list.merge(stored, now_unix),
            None => *list = Some(Box::new(stored)),
        }
    }
}
