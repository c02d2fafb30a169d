//! Whoever waits for a guest to acknowledge an event waits no longer than asked, whatever happens meanwhile.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use metadata_content::source::RecordSource;
use metadata_control::instances::add_event;
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument, binary};
use support::eventually;
use support::exposition::total;
use support::host::Host;
use support::netns::run;
use support::privileged;
use support::record::Identity;
use support::scene::OneGuest;
use support::tap::Shape;
use support::tap_client::storm;

const PATIENCE: Duration = Duration::from_secs(20);
/// The wait of clients that something else ends. A test that waits it out fails.
const LONG: &str = "30s";

struct Node {
    node: OneGuest,
    name: String,
}

impl Node {
    fn new() -> Self {
        let node = OneGuest::with_record(|record| record["serve"] = json!({"imdsv2": "off"}));
        let path = node.guest.identity().path(node.records.path());
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        Self { node, name }
    }

    fn event(&self, words: &[&str]) -> Command {
        let mut command = Command::new(binary().expect("the agent is built"));
        command.arg("event").args(words).args(["--source", "file", "--run"]).arg(self.node.file("run"));
        command
    }

    /// Announces a freeze, and waits for the guest.
    fn hold(&self, wait: &str) -> Command {
        self.event(&["add", &self.name, "--kind", "freeze", "--id", "drain-1", "--wait", wait])
    }

    /// Starts a [`Self::hold`], and returns once the guest is told.
    fn begun(&self, wait: &str) -> Child {
        let mut command = self.hold(wait);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs");
        eventually(PATIENCE, || {
            let (status, text) = self.node.curl(&["http://169.254.169.254/v1/events/drain-1"]);
            ensure!(status == 200, "{status} {text}");
            Ok(())
        })
        .expect("the guest is told");
        child
    }

    fn acknowledge(&self) {
        let url = "http://169.254.169.254/v1/events/drain-1";
        assert_eq!(self.node.curl(&["-X", "POST", url]).0, 204);
    }
}

/// How a client ended that is to end early.
#[track_caller]
fn ended(mut client: Child) -> Option<i32> {
    let end = eventually(PATIENCE, || {
        let end = client.try_wait()?;
        ensure!(end.is_some(), "it still waits");
        Ok(end)
    });
    let _ = client.kill();
    end.expect("an early end").expect("an end").code()
}

#[privileged::test]
fn a_hold_ends_when_the_guest_is_silent_and_when_the_agent_is_killed() {
    let node = Node::new();
    let agent = node.node.agent();
    assert_eq!(node.hold("300ms").status().expect("it runs").code(), Some(3), "the guest is silent");
    let waiting = node.begun(LONG);
    agent.kill().expect("an agent to kill");
    assert_eq!(ended(waiting), Some(5), "no agent answers");
    assert_eq!(node.hold(LONG).status().expect("it runs").code(), Some(5), "nor is there one to ask");
}

#[privileged::test]
fn a_hook_that_is_killed_leaves_nothing_behind_but_its_event() {
    let node = Node::new();
    let _agent = node.node.agent();
    // More than may wait at once, so that the last ones find room only because the first ones left theirs.
    for _ in 0..80 {
        let mut waiting = node.hold(LONG).stdout(Stdio::null()).spawn().expect("it runs");
        if waiting.id().is_multiple_of(8) {
            // Some get as far as their wait.
            thread::sleep(Duration::from_millis(40));
        }
        waiting.kill().expect("killed");
        waiting.wait().expect("an end");
    }
    let waiting = node.begun(LONG);
    node.acknowledge();
    assert_eq!(ended(waiting), Some(0));
}

/// A library for `LD_PRELOAD`: the clock of the day goes forward and back by a day at each reading.
const STEPPING_CLOCK: &str = r#"
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int readings;
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += __atomic_add_fetch(&readings, 1, __ATOMIC_RELAXED) % 2 ? 86400 : -86400;
    return result;
}
"#;

fn stepping_clock(room: &Path) -> PathBuf {
    let (source, library) = (room.join("clock.c"), room.join("clock.so"));
    std::fs::write(&source, STEPPING_CLOCK).expect("written");
    run(Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source])).expect("a C compiler");
    library
}

#[privileged::test]
fn a_step_of_the_clock_makes_no_hold_longer_or_shorter() {
    let node = Node::new();
    let room = tempfile::tempdir().expect("a directory");
    let clock = stepping_clock(room.path());
    // The agent is started by `env`, which sets the variable for it alone.
    let mut words = vec![format!("LD_PRELOAD={}", clock.display()).into()];
    words.push(binary().expect("the agent is built").into());
    words.extend(agent::arguments(node.node.records.path(), &[node.node.port()]));
    let _agent =
        Agent::start_binary(Path::new("/usr/bin/env"), node.node.host.ns(), words).expect("an agent");
    let hold = |wait: &str| {
        let mut command = node.hold(wait);
        command.env("LD_PRELOAD", &clock);
        command
    };
    let started = Instant::now();
    assert_eq!(hold("2s").status().expect("it runs").code(), Some(3), "the guest is silent");
    assert!(started.elapsed() >= Duration::from_secs(2), "after {:?}", started.elapsed());
    let waiting = hold(LONG).stdout(Stdio::null()).spawn().expect("it runs");
    node.acknowledge();
    assert_eq!(ended(waiting), Some(0));
    // The clock did step.
    let list = node.event(&["ls", &node.name, "--json"]).output().expect("it runs");
    let list: Value = serde_json::from_slice(&list.stdout).expect("JSON");
    let day = |name: &str| list["events"][0][name].as_str().map(|time| time[..10].to_owned());
    let metadata = std::fs::metadata(room.path().join("clock.so")).expect("a file");
    let today = metadata.modified().expect("a time").duration_since(std::time::UNIX_EPOCH).expect("a time");
    let today = metadata_content::record::values::Timestamp::at(today.as_secs() as i64).expect("a time");
    assert_ne!(day("acknowledged").as_deref(), Some(&today.as_str()[..10]), "{list}");
}

// The host announces an event to each of many VMs, whose guests wait for news.

/// Ends the test if something hangs.
const DRAIN_PATIENCE: Duration = Duration::from_secs(120);
/// Variables for a measurement: how many guests wait, and how many clients announce events. The test prints the times.
const GUESTS: &str = "XDP_IMDS_DRAIN_GUESTS";
const CLIENTS: &str = "XDP_IMDS_DRAIN_CLIENTS";

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[privileged::test]
fn each_vm_of_a_node_that_is_drained_is_told_its_own_event() {
    let (count, clients) = (number(GUESTS, 64), number(CLIENTS, 4));
    let mut host = Host::new().expect("a node");
    let records = tempfile::tempdir().expect("a directory");
    let guests: Vec<_> = (0..u16::try_from(count).expect("few")).map(Identity::of).collect();
    guests.iter().for_each(|guest| guest.write(records.path(), 1).expect("a record"));
    let taps = host.rack(&guests, Shape::default()).expect("taps");
    let ports: Vec<_> = guests.iter().map(|it| PortArgument::new(Host::tap_name(it), it.mac)).collect();
    let agent = Agent::start(host.ns(), records.path(), &ports).expect("an agent");
    let (run, told) = (records.path().join("run"), channel());

    let outcomes = thread::scope(|scope| {
        let all = guests.iter().cloned().zip(taps).collect();
        let begun = Instant::now();
        let storm = scope.spawn(|| storm(all, &["/v1/events?incarnation=1&timeout=600"], DRAIN_PATIENCE));
        eventually(DRAIN_PATIENCE, || {
            let waiting = total(&agent.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change")));
            ensure!(waiting == count as u64, "{waiting} guests wait");
            Ok(())
        })
        .expect("every guest waits");
        for client in 0..clients {
            let (guests, run, told) = (&guests, &run, told.0.clone());
            scope.spawn(move || {
                for guest in guests.iter().skip(client).step_by(clients) {
                    let event = json!({"id": guest.hostname, "kind": "freeze", "description": "drain"});
                    let event = serde_json::from_value(event).expect("an event");
                    let name = format!("{}.yaml", guest.hostname);
                    let asked = begun.elapsed();
                    add_event(run, RecordSource::File, &name, &event).expect("it is announced");
                    told.send((guest.number, asked, begun.elapsed())).expect("somebody counts");
                }
            });
        }
        storm.join().expect("the guests")
    });
    drop(told.0);
    let mut asked: Vec<_> = told.1.iter().collect();
    asked.sort_unstable();
    assert_eq!(asked.len(), count);

    let mut delays = Vec::new();
    for (outcome, (_, asked, _)) in outcomes.into_iter().zip(&asked) {
        let name = &outcome.identity.hostname;
        let answers = outcome.answers.unwrap_or_else(|error| panic!("{name}: {error:#}"));
        let [answer] = &answers[..] else { panic!("{name}: {answers:?}") };
        let told: Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert_eq!((answer.status, told["events"].as_array().map(Vec::len)), (200, Some(1)), "{told}");
        assert_eq!(told["events"][0]["id"], **name, "another guest's event");
        delays.push(outcome.took.saturating_sub(*asked));
    }
    delays.sort_unstable();
    let at = |share: usize| delays[(delays.len() - 1) * share / 100];
    let first = asked.iter().map(|(_, asked, _)| *asked).min().unwrap_or_default();
    let last = asked.iter().map(|(.., done)| *done).max().unwrap_or_default();
    eprintln!(
        "{count} guests, {clients} clients: event to guest p50 {:?}, p99 {:?}, most {:?}; all announced and stored in {:?}",
        at(50),
        at(99),
        at(100),
        last.saturating_sub(first)
    );
}
