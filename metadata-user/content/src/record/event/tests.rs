//! The events of one VM.

use super::{
    Acknowledgement, EVENTS_PER_VM, EventDocument, EventJournal, EventKind, EventNews, EventRefused,
    EventState, NOTES, ScheduledEvent, VmEvents,
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
fn the_journal_has_each_change_once_while_somebody_reads_it() {
    let journal = EventJournal::default();
    let events = VmEvents::noted(journal.clone(), "vm".into());
    let news = || {
        let notes = journal.take();
        assert!(notes.iter().all(|note| &*note.vm == "vm" && note.kind == EventKind::Freeze));
        notes.into_iter().map(|note| (note.id.to_string(), note.news)).collect::<Vec<_>>()
    };
    let state = |id: &str, state| (id.to_owned(), EventNews::State(state));
    assert_eq!(events.add(INSTANCE, scheduled("early"), 0), Ok(true));
    assert_eq!(news(), [], "nobody reads it");
    journal.turn_on();
    events.note_record(INSTANCE, &[scheduled("r")], 1);
    events.note_record(INSTANCE, &[scheduled("r")], 1);
    assert_eq!(events.add(INSTANCE, event("early", EventState::Started), 2), Ok(true));
    assert_eq!(news(), [state("r", EventState::Scheduled), state("early", EventState::Started)]);
    for _ in 0..2 {
        events.acknowledge("r", 3);
        events.acknowledge("none", 3);
    }
    assert_eq!(news(), [("r".to_owned(), EventNews::Acknowledged)]);
    assert_eq!(events.cancel("early", 4), Ok(true));
    events.note_record(INSTANCE, &[], 5);
    let withdrawn = ("r".to_owned(), EventNews::Withdrawn);
    assert_eq!(news(), [state("early", EventState::Cancelled), withdrawn]);
    let states = [EventState::Scheduled, EventState::Started];
    for n in 0..NOTES + 1 {
        assert_eq!(events.add(INSTANCE, event("e", states[n % 2]), 6), Ok(true));
    }
    assert_eq!((news().len(), journal.dropped()), (NOTES, 1));
}

#[test]
fn an_event_is_shown_in_a_line() {
    let events = VmEvents::default();
    let mut later = scheduled("a");
    later.not_before = super::Timestamp::at(1_893_456_000);
    events.note_record(INSTANCE, &[later, event("b", EventState::Started)], 0);
    events.acknowledge("b", 60);
    let lines: Vec<_> = events.document().events.iter().map(ToString::to_string).collect();
    assert_eq!(lines, ["a: freeze, scheduled for 2030-01-01T00:00:00Z", "b: freeze, started, acknowledged"]);
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
fn a_change_of_an_added_event_keeps_the_time_and_description_of_a_pending_one() {
    let new = |state, time, description: Option<&str>| {
        let mut event = event("a", state);
        event.not_before = super::Timestamp::at(time);
        event.description = description.map(|text| serde_json::from_value(text.into()).expect("a line"));
        event
    };
    use EventState::{Completed, Scheduled, Started};
    for (former, description, kept) in
        [(Scheduled, None, Some("drained")), (Started, Some("moved"), Some("moved")), (Completed, None, None)]
    {
        let events = VmEvents::default();
        assert_eq!(events.add(INSTANCE, new(former, 60, Some("drained")), 0), Ok(true));
        let mut change = new(Started, 60, description);
        change.not_before = None;
        let changes = events.add(INSTANCE, change, 0);
        let time = if former == Completed { None } else { super::Timestamp::at(60) };
        let found = events.document().events[0].event.clone();
        assert_eq!((&found.not_before, found.description()), (&time, kept.unwrap_or_default()), "{former:?}");
        assert_eq!(changes, Ok(true), "{former:?}");
    }
}

#[test]
fn an_event_that_is_completed_is_not_cancelled() {
    let events = VmEvents::default();
    assert_eq!(events.add(INSTANCE, event("a", EventState::Completed), 0), Ok(true));
    assert_eq!(events.cancel("a", 0), Err(EventRefused::Over("a".into())));
    assert_eq!(states(&events.document()), [("a", EventState::Completed)]);
}

#[test]
fn an_added_event_that_the_record_states_becomes_the_records_with_its_acknowledgement() {
    let events = VmEvents::default();
    assert_eq!(events.add(INSTANCE, scheduled("a"), 0), Ok(true));
    assert_eq!(events.acknowledge("a", 60), Acknowledgement::Noted);
    events.note_record(INSTANCE, &[event("a", EventState::Started)], 0);
    assert_eq!(states(&events.document()), [("a", EventState::Started)]);
    assert!(events.document().events[0].acknowledged.is_some());
    let refused = EventRefused::OfRecord("a".into());
    let added = events.add(INSTANCE, scheduled("a"), 0);
    assert_eq!((added, events.cancel("a", 0)), (Err(refused.clone()), Err(refused)));
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
