//! Events: what the host will do to a VM, announced before it does it.
//!
//! A source states events in the VM's record, and an operator adds others through the API. Dialects render both in
//! their clouds' form, and the guest may acknowledge one: whoever waits for that may then go on. An event changes
//! nothing else: what it announces is done by the platform.

use serde::{Deserialize, Serialize};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

    /// Replaces the event by another of its id. An acknowledgement stays, unless the event was over and comes anew.
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
    #[error("expected a record in force; the VM of this one is served from another record, or not yet")]
    NotInForce,
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

/// The events of one VM. A VM without events has no memory for them.
#[derive(Debug, Default)]
pub struct VmEvents(Mutex<Option<Box<EventList>>>);

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

    fn add(&mut self, event: ScheduledEvent, now_unix: u64) -> Result<bool, EventRefused> {
        if self.is_of_record(event.id.as_str()) {
            return Err(EventRefused::OfRecord(event.id.to_string()));
        }
        if let Some(known) = self.added.iter_mut().find(|known| known.event.id == event.id) {
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
        let changes = event.is_pending();
        if changes {
            event.state = EventState::Cancelled;
            self.change(now_unix);
        }
        Ok(changes)
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

impl VmEvents {
    /// Locks the events, ignoring poison: every change is complete or has not started.
    fn locked(&self) -> MutexGuard<'_, Option<Box<EventList>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Returns the number of events that are still to come or have begun.
    #[must_use]
    pub fn pending(&self) -> u64 {
        let list = self.locked();
        list.as_ref().map_or(0, |list| list.all().filter(|known| known.event.is_pending()).count() as u64)
    }

    /// Replaces the events of the VM's record. Those that were added for another instance-id are removed, and so are
    /// the acknowledgements of its guest. `now_unix` is the time in Unix seconds, here and below.
    pub fn note_record(&self, instance: &str, events: &[ScheduledEvent], now_unix: u64) {
        let mut list = self.locked();
        if list.is_some() || !events.is_empty() {
            let list = list.get_or_insert_default();
            list.set_instance(instance, now_unix);
            list.set_record(events, now_unix);
        }
    }

    /// Adds an event for the instance-id of the VM's record, or replaces the added one of its id. Returns false if it
    /// was the same.
    ///
    /// # Errors
    /// [`EventRefused`]: nothing has changed.
    pub fn add(&self, instance: &str, event: ScheduledEvent, now_unix: u64) -> Result<bool, EventRefused> {
        let mut list = self.locked();
        let list = list.get_or_insert_default();
        list.set_instance(instance, now_unix);
        list.add(event, now_unix)
    }

    /// Cancels an added event. Returns false if it was over already.
    ///
    /// # Errors
    /// [`EventRefused`] if there is no such event, or if it is of the record.
    pub fn cancel(&self, id: &str, now_unix: u64) -> Result<bool, EventRefused> {
        match self.locked().as_mut() {
            Some(list) => list.cancel(id, now_unix),
            None => Err(EventRefused::Unknown(id.to_owned())),
        }
    }

    /// Notes that the guest acknowledged a pending event.
    pub fn acknowledge(&self, id: &str, now_unix: u64) -> Acknowledgement {
        self.locked().as_mut().map_or(Acknowledgement::Unknown, |list| list.acknowledge(id, now_unix))
    }

    /// Returns the events to store; `None` if there never was one.
    #[must_use]
    pub fn stored(&self) -> Option<EventList> {
        self.locked().as_deref().cloned()
    }
            (self.instance, self.added) = (stored.instance, stored.added);

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

#[cfg(test)]
mod tests {
    use super::{
        Acknowledgement, EVENTS_PER_VM, EventDocument, EventKind, EventRefused, EventState, ScheduledEvent,
        VmEvents,
/// Removes the event of an id from a list.
fn take(events: &mut Vec<AnnouncedEvent>, id: &Id) -> Option<AnnouncedEvent> {
    let at = events.iter().position(|known| known.event.id == *id)?;
    Some(events.remove(at))
}

    };

    const INSTANCE: &str = "i-1";

    fn event(id: &str, state: EventState) -> ScheduledEvent {
        let text = format!(r#"{{"id": "{id}", "kind": "freeze", "state": "{}"}}"#, state.name());
        serde_json::from_str(&text).expect("an event")
    }

    fn scheduled(id: &str) -> ScheduledEvent {
        event(id, EventState::Scheduled)
    }

    fn states(document: &EventDocument) -> Vec<(&str, EventState)> {
        document.events.iter().map(|known| (known.event.id.as_str(), known.event.state)).collect()
    }

    #[test]
    fn names_are_those_of_records() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).expect("a name"), kind.name());
        }
        for state in EventState::ALL {
            assert_eq!(serde_json::to_value(state).expect("a name"), state.name());
        }
    }

    #[test]
    fn a_vm_without_events_has_an_empty_document_and_no_memory_for_them() {
        let events = VmEvents::default();
        events.note_record(INSTANCE, &[], 0);
        assert_eq!((events.document(), events.stored()), (EventDocument::default(), None));
        assert_eq!(events.acknowledge("a", 1), Acknowledgement::Unknown);
        assert_eq!(events.cancel("a", 0), Err(EventRefused::Unknown("a".into())));
    }

    #[test]
    fn each_change_has_a_number_and_a_repetition_has_none() {
        let events = VmEvents::default();
        let first = events.incarnation();
        assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
        assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(false));
        assert_eq!(events.add(INSTANCE, event("a", EventState::Started), 0), Ok(true));
        assert_eq!((events.cancel("a", 0), events.cancel("a", 0)), (Ok(true), Ok(false)));
        events.note_record(INSTANCE, &[scheduled("b")], 0);
        events.note_record(INSTANCE, &[scheduled("b")], 0);
        let now = events.document();
        assert_eq!(now.incarnation, first + 4);
        assert_eq!(states(&now), [("b", EventState::Scheduled), ("a", EventState::Cancelled)]);
        assert_eq!(now.pending().map(|known| known.event.id.as_str()).collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn an_added_event_that_the_record_states_becomes_the_records_with_its_acknowledgement() {
        let events = VmEvents::default();
        assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
        events.note_record(INSTANCE, &[event("a", EventState::Started)], 0);
        assert_eq!(states(&events.document()), [("a", EventState::Started)]);
        let refused = EventRefused::OfRecord("a".into());
        let added = events.add(INSTANCE, scheduled("a"), 0);
        assert_eq!((added, events.cancel("a", 0)), (Err(refused.clone()), Err(refused)));
    }

    #[test]
    fn an_acknowledgement_is_noted_once_stays_with_its_event_and_changes_no_number() {
        let events = VmEvents::default();
        events.note_record(INSTANCE, &[scheduled("r")], 0);
        assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
        let before = events.incarnation();
        for id in ["r", "a"] {
            assert_eq!(events.acknowledge(id, 60), Acknowledgement::Noted);
            assert_eq!(events.acknowledge(id, 90), Acknowledgement::Repeated);
        }
        assert_eq!(events.incarnation(), before);
        events.note_record(INSTANCE, &[event("r", EventState::Started)], 0);
        assert_eq!(events.add(INSTANCE, event("a", EventState::Completed), 0), Ok(true));
        for known in &events.document().events {
            let acknowledged = known.acknowledged.as_ref().map(super::Timestamp::as_str);
            assert_eq!(acknowledged, Some("1970-01-01T00:01:00Z"), "{}", known.event.id);
        }
        assert_eq!(events.acknowledge("a", 99), Acknowledgement::Unknown, "it is over");
    }

    #[test]
    fn an_event_that_comes_anew_is_not_acknowledged_yet() {
        let events = VmEvents::default();
        let is_acknowledged = |id: &str| events.document().find(id).expect(id).acknowledged.is_some();
        for state in [EventState::Completed, EventState::Cancelled] {
            events.note_record(INSTANCE, &[scheduled("r")], 0);
            assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
            assert!(!is_acknowledged("r") && !is_acknowledged("a"), "{state:?}");
            assert_eq!(events.acknowledge("r", 60), Acknowledgement::Noted);
            assert_eq!(events.acknowledge("a", 60), Acknowledgement::Noted);
            events.note_record(INSTANCE, &[event("r", state)], 0);
            assert_eq!(events.add(INSTANCE, event("a", state), 0), Ok(true));
            assert!(is_acknowledged("r") && is_acknowledged("a"), "{state:?}: its end changes nothing");
        }
    }

    #[test]
    fn a_change_has_a_later_number_than_any_before_it_on_any_node() {
        let (source, target) = (VmEvents::default(), VmEvents::default());
        source.note_record(INSTANCE, &[scheduled("r")], 1_000);
        source.note_record(INSTANCE, &[event("r", EventState::Started)], 1_000);
        assert_eq!(source.incarnation(), 1_001);
        target.note_record(INSTANCE, &[event("r", EventState::Completed)], 1_050);
        assert_eq!(target.incarnation(), 1_050);
    }

    #[test]
    fn what_the_previous_agent_stored_is_joined_with_what_this_one_has_noted() {
        let (previous, next) = (VmEvents::default(), VmEvents::default());
        previous.note_record(INSTANCE, &[scheduled("r")], 0);
        assert_eq!(previous.add(INSTANCE, scheduled("a"), 0), Ok(true));
        assert_eq!(previous.acknowledge("r", 60), Acknowledgement::Noted);
        let stored = previous.stored().expect("it has events");
        next.note_record(INSTANCE, &[event("r", EventState::Started)], 0);
        next.note_record(INSTANCE, &[event("r", EventState::Completed)], 0);
        assert_eq!(next.incarnation(), stored.incarnation, "by chance");
        next.restore(stored.clone(), 0);
        let document = next.document();
        assert_eq!(states(&document), [("r", EventState::Completed), ("a", EventState::Scheduled)]);
        assert!(document.events[0].acknowledged.is_some());
        assert!(document.incarnation > stored.incarnation, "what was rendered is outdated");
    }

    #[test]
    fn pending_events_are_limited_and_those_that_are_over_make_room() {
        let events = VmEvents::default();
        for n in 0..EVENTS_PER_VM {
            assert_eq!(events.add(INSTANCE, scheduled(&format!("e{n}")), 0), Ok(true));
        }
        assert_eq!(events.add(INSTANCE, scheduled("more"), 0), Err(EventRefused::Full));
        assert_eq!(events.cancel("e3", 0), Ok(true));
        assert_eq!(events.add(INSTANCE, scheduled("more"), 0), Ok(true));
        let document = events.document();
        assert_eq!(document.events.len(), EVENTS_PER_VM);
        assert!(document.find("e3").is_none() && document.find("more").is_some());
    }

    #[test]
    fn what_is_stored_comes_back_and_another_instance_starts_without_it() {
        let events = VmEvents::default();
        events.note_record(INSTANCE, &[scheduled("r")], 0);
        assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
        assert_eq!(events.acknowledge("r", 60), Acknowledgement::Noted);
        let text = serde_json::to_string(&events.stored()).expect("stored events");
        let next = VmEvents::default();
        next.restore(serde_json::from_str(&text).expect("stored events"), 0);
        assert_eq!(next.document(), events.document());
        next.note_record(INSTANCE, &[scheduled("r")], 0);
        assert_eq!(next.document(), events.document(), "the record is the same");
        next.note_record("i-2", &[scheduled("r")], 0);
        let document = next.document();
        assert_eq!(states(&document), [("r", EventState::Scheduled)]);
        assert!(document.events[0].acknowledged.is_none() && document.incarnation > events.incarnation());
    }
}
        assert_eq!(events.acknowledge("a", 60), Acknowledgement::Noted);
        assert!(events.document().events[0].acknowledged.is_some());
        events.note_record(INSTANCE, &[], 0);
        assert_eq!(states(&events.document()), [], "it does not come back when the record drops it");
    }

    #[test]
    fn a_guest_acknowledges_no_event_that_it_is_not_shown() {
        let events = VmEvents::default();
        assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
        events.note_record(INSTANCE, &[event("a", EventState::Completed)], 0);
        assert_eq!(events.acknowledge("a", 60), Acknowledgement::Unknown, "the record says that it is over");
        // Nor after a restart, when the record is known before what was stored of it.
        let (previous, next) = (VmEvents::default(), VmEvents::default());
        assert_eq!(previous.add(INSTANCE, scheduled("a"), 0), Ok(true));
        next.note_record(INSTANCE, &[event("a", EventState::Completed)], 0);
        next.restore(previous.stored().expect("it has events"), 0);
        assert_eq!(states(&next.document()), [("a", EventState::Completed)]);
        assert_eq!(next.acknowledge("a", 60), Acknowledgement::Unknown);
        // The guest of another instance has acknowledged nothing.
        let other = VmEvents::default();
        other.note_record("i-2", &[scheduled("a")], 0);
        assert_eq!(previous.acknowledge("a", 60), Acknowledgement::Noted);
        other.restore(previous.stored().expect("it has events"), 0);
        assert!(other.document().events[0].acknowledged.is_none());
