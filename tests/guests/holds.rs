//! Whoever waits for a guest to acknowledge an event waits no longer than asked, whatever happens meanwhile.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use support::agent::{self, Agent, binary};
use support::eventually::eventually;
use support::netns::run;
use support::privileged;
use support::scene::OneGuest;

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
            std::thread::sleep(Duration::from_millis(40));
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
