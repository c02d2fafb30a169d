//! Announces to a booted guest what its host will do. A unit that the guest's cloud-init installed must react.

use anyhow::{Context as _, Result, anyhow, ensure};
use metadata_content::source::RecordSource;
use metadata_control::instances::{ACKNOWLEDGED_WITHIN, add_event, wait_for_acknowledgement};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::eventually;
use support::exposition::total;

use super::wire::{Finding, finding};

/// An entry for the list `runcmd`, with which the page's `#cloud-config` ends. The guest then also tells the lab what it
/// saved, on the port of its report.
pub(super) const TELLS: &str = "- echo 'echo \"saved $1\" > /dev/ttyS1' >> /usr/local/sbin/save\n";
/// The beginning of the line that [`TELLS`] makes the guest write.
const SAVED: &str = "saved ";
/// The longest time from the guest's report until its unit waits for an event.
const ASKS_WITHIN: Duration = Duration::from_secs(60);
/// The longest time from the beginning of the guest's end until QEMU ends.
const SHUTS_DOWN_WITHIN: Duration = Duration::from_secs(180);
/// The status with which QEMU ends after its guest has powered itself off.
const POWERED_OFF: &str = "exit status: 0";
/// A description that a shell script could misread, because it contains JSON.
const DESCRIPTION: &str = r#"the host "hv1" is drained {"id":"other","state":"started"}"#;

/// The announcements in their order. The freeze is completed before the termination starts.
const ANNOUNCED: [Announcement; 3] = [
    Announcement { id: "drain-1", kind: "freeze", state: "scheduled" },
    Announcement { id: "drain-1", kind: "freeze", state: "completed" },
    Announcement { id: "stop", kind: "terminate", state: "started" },
];

/// An event in one of its states.
struct Announcement {
    id: &'static str,
    kind: &'static str,
    state: &'static str,
}

/// What the guest did about an event.
struct EventReaction {
    id: &'static str,
    kind: &'static str,
    /// The time from the announcement until the acknowledgement was known, or why there was none.
    acknowledged: Result<Duration>,
    /// The events for which the guest had saved by then.
    saved: Vec<String>,
}

/// Announces the events of the record `name`, and checks what the guest does. `ended` returns how QEMU ended, or `None`
/// while it runs.
pub(super) fn announce(
    agent: &Agent<'_>,
    records: &Path,
    name: &str,
    directory: &Path,
    mut ended: impl FnMut() -> Result<Option<String>>,
) -> Result<Vec<Finding>> {
    let run = records.join("run");
    let asks = eventually(ASKS_WITHIN, || {
        let parked = total(&agent.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change")));
        ensure!(parked == 1, "{parked} requests wait for a change");
        Ok(())
    });
    let mut reactions = Vec::new();
    let mut started = Instant::now();
    for Announcement { id, kind, state } in ANNOUNCED {
        println!("guest: announcing {id}, a {kind}, {state}");
        let event = json!({"id": id, "kind": kind, "state": state, "description": DESCRIPTION});
        started = Instant::now();
        add_event(&run, RecordSource::File, name, &serde_json::from_value(event)?)?;
        if state == "completed" {
            continue;
        }
        let waited = wait_for_acknowledgement(&run, RecordSource::File, name, id, ACKNOWLEDGED_WITHIN);
        let acknowledged = match waited {
            Ok(document) if document.find(id).is_some_and(|event| event.acknowledged.is_some()) => {
                Ok(started.elapsed())
            }
            Ok(_) => Err(anyhow!("the event was over before")),
            Err(error) => Err(error.into()),
        };
        let report = fs::read_to_string(directory.join("report.json"))?;
        reactions.push(EventReaction { id, kind, acknowledged, saved: saved(&report) });
    }
    let end = eventually(SHUTS_DOWN_WITHIN, || {
        let status = ended()?.with_context(|| super::tail(directory))?;
        Ok((status, started.elapsed()))
    });
    let mut findings = vec![waits(&asks)];
    findings.extend(reactions.iter().map(EventReaction::finding));
    findings.push(saves(&reactions));
    findings.push(shuts_down(&end));
    Ok(findings)
}

/// Returns the ids of the events for which the guest has saved its work, in the order in which it did.
fn saved(report: &str) -> Vec<String> {
    report.lines().filter_map(|line| line.strip_prefix(SAVED)).map(|id| id.trim_end().to_owned()).collect()
}

impl EventReaction {
    fn finding(&self) -> Finding {
        let found = match &self.acknowledged {
            Ok(after) => {
                format!("{} acknowledged {:.2} s after it was announced", self.id, after.as_secs_f64())
            }
            Err(error) => format!("{} not acknowledged: {error:#}", self.id),
        };
        finding(self.kind, &found, self.acknowledged.is_ok())
    }
}

/// Checks that the unit waited, so that the times of its acknowledgements are those of a change.
fn waits(asks: &Result<()>) -> Finding {
    let found = match asks {
        Ok(()) => "the unit waits for a change".to_owned(),
        Err(error) => format!("the unit does not ask: {error:#}"),
    };
    finding("events", &found, asks.is_ok())
}

/// Checks that the guest had saved for each event once, and before it acknowledged the event.
fn saves(reactions: &[EventReaction]) -> Finding {
    let expected: Vec<_> = reactions.iter().map(|reaction| reaction.id).collect();
    let holds = (1..).zip(reactions).all(|(count, reaction)| reaction.saved == expected[..count]);
    let found = reactions.iter().map(|reaction| {
        let saved = reaction.saved.join(", ");
        format!("{} when {} was acknowledged", if saved.is_empty() { "nothing" } else { &saved }, reaction.id)
    });
    finding("saved", &found.collect::<Vec<_>>().join("; "), holds)
}

/// Checks that QEMU ended because its guest powered itself off.
fn shuts_down(end: &Result<(String, Duration)>) -> Finding {
    let found = match end {
        Ok((status, after)) => {
            format!("{:.1} s after its end was announced, QEMU: {status}", after.as_secs_f64())
        }
        Err(error) => format!("the guest runs: {error:#}"),
    };
    finding("shut down", &found, end.as_ref().is_ok_and(|(status, _)| status == POWERED_OFF))
}

#[cfg(test)]
mod tests {
    use anyhow::{Result, anyhow};
    use serde_json::Value;
    use std::time::Duration;

    use super::{EventReaction, TELLS, saved, saves, shuts_down};
    use support::guest::event_unit_config;

    #[test]
    fn the_user_data_of_the_book_installs_and_starts_a_unit() {
        let text = format!("{}{TELLS}", event_unit_config().expect("the page has it"));
        let config: Value = serde_yaml::from_str(&text).expect("YAML");
        let files = config["write_files"].as_array().expect("files");
        let file = |path: &str| {
            let file = files.iter().find(|file| file["path"] == path).expect(path);
            (file["content"].as_str().expect("text"), file["permissions"].as_str())
        };
        let (unit, _) = file("/etc/systemd/system/host-events.service");
        let program = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a program");
        for script in [program, "/usr/local/sbin/save"] {
            let (text, mode) = file(script);
            assert!(text.starts_with("#!/bin/sh\n") && mode == Some("0755"), "{script}: {mode:?} {text}");
        }
        let commands = config["runcmd"].as_array().expect("commands");
        let commands: Vec<_> = commands.iter().map(|command| command.as_str().expect("text")).collect();
        let tells = TELLS.trim_start_matches("- ").trim_end();
        assert_eq!(commands, ["systemctl enable --now host-events.service", tells]);
    }

    fn reaction(id: &'static str, acknowledged: Result<Duration>, report: &str) -> EventReaction {
        EventReaction { id, kind: "freeze", acknowledged, saved: saved(report) }
    }

    #[test]
    fn an_acknowledgement_holds_whatever_its_time() {
        let good = reaction("a", Ok(Duration::from_millis(1_234)), "").finding();
        assert_eq!((good.holds, good.found.as_str()), (true, "a acknowledged 1.23 s after it was announced"));
        let bad = reaction("a", Err(anyhow!("late")), "").finding();
        assert_eq!((bad.holds, bad.found.as_str()), (false, "a not acknowledged: late"));
    }

    #[test]
    fn the_guest_saves_for_each_event_once_before_it_acknowledges() {
        let cases = [
            ("{}\nsaved a\n", "{}\nsaved a\r\nsaved b\n", true),
            ("{}\n", "{}\nsaved a\nsaved b\n", false),
            ("{}\nsaved a\n", "{}\nsaved a\n", false),
            ("{}\nsaved a\n", "{}\nsaved a\nsaved a\nsaved b\n", false),
        ];
        for (first, second, holds) in cases {
            let reactions =
                [("a", first), ("b", second)].map(|(id, report)| reaction(id, Ok(Duration::ZERO), report));
            assert_eq!(saves(&reactions).holds, holds, "{first:?} {second:?}");
        }
        let never = saves(&[reaction("a", Ok(Duration::ZERO), "{}\n")]);
        assert_eq!(never.found, "nothing when a was acknowledged");
    }

    #[test]
    fn only_a_guest_that_powered_itself_off_has_shut_down() {
        for (status, holds) in [("exit status: 0", true), ("signal: 9 (SIGKILL)", false)] {
            assert_eq!(shuts_down(&Ok((status.to_owned(), Duration::ZERO))).holds, holds, "{status}");
        }
        assert!(!shuts_down(&Err(anyhow!("still"))).holds);
    }
}
