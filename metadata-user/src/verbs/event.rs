//! `xdp-imds event add`, `cancel` and `ls`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use metadata_common::printable::Printable;
use metadata_common::time;
use metadata_content::record::event::{EventDocument, EventKind, EventState, ScheduledEvent};
use metadata_content::record::values::{AnyLine, Id, Timestamp};
use metadata_control::instances::{self, ACKNOWLEDGED_WITHIN, Instance};
use serde::de::DeserializeOwned;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use super::Exit;
use super::instances::{VmArgs, find, is_changeable};

/// `xdp-imds event`.
#[derive(clap::Args, Debug)]
pub struct Event {
    #[command(subcommand)]
    verb: EventVerb,
}

#[derive(clap::Subcommand, Debug)]
enum EventVerb {
    /// Announce an event, or say that it has begun or is over.
    ///
    /// Changes an event with the same id. A pending one keeps its time and description by default.
    Add(Add),
    /// Say that an event will not happen.
    ///
    /// Exits with 4 if it is completed.
    Cancel(Cancel),
    /// List the events of a VM.
    Ls(List),
}

#[derive(clap::Args, Debug)]
struct Add {
    #[command(flatten)]
    vm: VmArgs,
    /// What the host will do.
    ///
    /// `freeze` pauses the VM for a moment, as a live migration does. `reboot` restarts it, `redeploy` starts it on
    /// another host, `terminate` deletes it, and `preempt` ends it because another VM needs its place.
    #[arg(long, value_name = "KIND", value_parser = kind_parser())]
    kind: EventKind,
    /// The event's id [default: the kind].
    ///
    /// Up to 64 letters, digits, `.`, `_`, `:` and `-`.
    #[arg(long, value_name = "ID", value_parser = text::<Id>)]
    id: Option<Id>,
    /// How far the event has come.
    #[arg(long, value_name = "STATE", default_value = "scheduled", value_parser = state_parser())]
    state: EventState,
    /// Nothing happens before this time.
    ///
    /// A time from now, such as `5m`, or a date such as `2030-01-01T00:00:00Z`.
    #[arg(long, value_name = "TIME", value_parser = not_before)]
    not_before: Option<Timestamp>,
    /// Why, for the people who run the guest.
    #[arg(long, value_name = "TEXT", value_parser = text::<AnyLine>)]
    description: Option<AnyLine>,
    /// Wait until the guest has acknowledged the event, at most this long and at most 30s.
    ///
    /// Exits with 3 if the guest does not; continue in that case, too.
    #[arg(long, value_name = "TIME", value_parser = wait)]
    wait: Option<Duration>,
}

#[derive(clap::Args, Debug)]
struct Cancel {
    #[command(flatten)]
    vm: VmArgs,
    /// The event's id.
    #[arg(value_name = "ID", value_parser = text::<Id>)]
    id: Id,
}

#[derive(clap::Args, Debug)]
struct List {
    #[command(flatten)]
    vm: VmArgs,
}

fn kind_parser() -> impl TypedValueParser<Value = EventKind> {
    let names = PossibleValuesParser::new(EventKind::ALL.map(EventKind::name));
    names.try_map(|name| EventKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or("a kind"))
}

fn state_parser() -> impl TypedValueParser<Value = EventState> {
    let names = PossibleValuesParser::new(EventState::ALL.map(EventState::name));
    names.try_map(|name| EventState::ALL.into_iter().find(|state| state.name() == name).ok_or("a state"))
}

/// Reads a text within the limits of its type.
fn text<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

fn wait(text: &str) -> Result<Duration, String> {
    time::span_within(text, Duration::ZERO..=ACKNOWLEDGED_WITHIN)
}

fn not_before(text: &str) -> Result<Timestamp, String> {
    if let Some(from_now) = time::span(text) {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let unix = unix.as_secs().checked_add(from_now.as_secs());
        let time = unix.and_then(|unix| i64::try_from(unix).ok()).and_then(Timestamp::at);
        return time.ok_or_else(|| "expected a time before the year 10000".into());
    }
    self::text(text).map_err(|error| format!("{error}, or a time from now such as 5m"))
}

impl Event {
    /// Changes or lists the events of a VM. Returns the exit code.
    ///
    /// # Errors
    /// `out` cannot be written, or an argument cannot be used.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        match &self.verb {
            EventVerb::Add(verb) => verb.run(out),
            EventVerb::Cancel(verb) => {
                let run = verb.vm.common.agent.run()?;
                let found = find(&run, verb.vm.source, &verb.vm.name, is_changeable);
                let done = found.and_then(|(source, name)| {
                    instances::cancel_event(&run, source, &name, verb.id.as_str())
                });
                let done = done.map(|document| only(document, &verb.id));
                verb.vm.common.finish(out, done, table)
            }
            EventVerb::Ls(List { vm }) => {
                let run = vm.common.agent.run()?;
                // Reading is no harm, so any name that `ls` shows will do.
                let found = find(&run, vm.source, &vm.name, Instance::is_called);
                let events = found.and_then(|(source, name)| instances::events(&run, source, &name));
                vm.common.finish(out, events, table)
            }
        }
    }
}

impl Add {
    fn run(&self, out: &mut dyn Write) -> anyhow::Result<Exit> {
        let by_default = || serde_json::from_value(self.kind.name().into());
        let event = ScheduledEvent {
            id: self.id.clone().map_or_else(by_default, Ok)?,
            kind: self.kind,
            state: self.state,
            not_before: self.not_before.clone(),
            description: self.description.clone(),
        };
        let run = self.vm.common.agent.run()?;
        let found = find(&run, self.vm.source, &self.vm.name, is_changeable);
        let done = found.and_then(|(source, name)| {
            let document = instances::add_event(&run, source, &name, &event)?;
            match self.wait {
                Some(wait) => {
                    instances::wait_for_acknowledgement(&run, source, &name, event.id.as_str(), wait)
                }
                None => Ok(only(document, &event.id)),
            }
        });
        self.vm.common.finish(out, done, table)
    }
}

/// The document with only the event of this id.
fn only(mut document: EventDocument, id: &Id) -> EventDocument {
    document.events.retain(|known| known.event.id == *id);
    document
}

fn table(document: &EventDocument, out: &mut dyn Write) -> io::Result<()> {
    if document.events.is_empty() {
        return writeln!(out, "no events");
    }
    let none = || "-".to_owned();
    let head = ["ID", "KIND", "STATE", "NOT BEFORE", "ACKNOWLEDGED", "DESCRIPTION"].map(str::to_owned);
    let rows = document.events.iter().map(|known| {
        let event = &known.event;
        let time =
            |time: &Option<Timestamp>| time.as_ref().map_or_else(none, |time| time.as_str().to_owned());
        [
            event.id.to_string(),
            event.kind.name().to_owned(),
            event.state.name().to_owned(),
            time(&event.not_before),
            time(&known.acknowledged),
            Printable(event.description()).to_string(),
        ]
    });
    super::instances::columns(std::iter::once(head).chain(rows).collect(), out)
}

#[cfg(test)]
mod tests {
    use super::{EventDocument, Id, not_before, only, table};

    #[test]
    fn a_change_prints_only_the_event_that_it_names() {
        let event = |id: &str| serde_json::json!({"id": id, "kind": "freeze", "state": "scheduled"});
        let document = serde_json::json!({"incarnation": 2, "events": [event("a"), event("b")]});
        let document: EventDocument = serde_json::from_value(document).expect("a document");
        let id: Id = serde_json::from_value("b".into()).expect("an id");
        let mut out = Vec::new();
        table(&only(document, &id), &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        assert!(text.lines().count() == 2 && text.contains("\nb   freeze"), "{text}");
    }

    #[test]
    fn a_time_is_a_date_or_a_span_from_now() {
        assert_eq!(not_before("2030-01-01T00:00:00Z").map(|time| time.unix_seconds()), Ok(1_893_456_000));
        let soon = not_before("5m").expect("a span").unix_seconds();
        let later = not_before("2h").expect("a span").unix_seconds();
        assert!((6_800..=7_000).contains(&(later - soon)), "{soon} {later}");
        assert!(not_before("18446744073709000000s").is_err(), "no such year");
        let refused = not_before("tomorrow").expect_err("no time");
        assert!(refused.contains("RFC 3339") && refused.contains("5m"), "{refused}");
    }
}
