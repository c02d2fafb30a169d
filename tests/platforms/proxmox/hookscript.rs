//! The hookscript of `deploy/proxmox` announces the end of a VM, and nothing that a guest does holds it up for long.

use anyhow::Result;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use support::agent;
use support::eventually::eventually;
use support::guest::{Guest, METADATA};
use support::privileged;
use support::process::write_script;
use support::record::replace;

use super::{NOTICE, Node, PATIENCE, configuration};

const HOOKSCRIPT: &str = include_str!("../../../deploy/proxmox/xdp-imds");

impl Node {
    /// The hookscript of this node, which waits so long for guests.
    fn hookscript(&self, hold: &str) -> PathBuf {
        let agent = agent::binary().expect("the agent is built").display().to_string();
        let text = HOOKSCRIPT.replace("agent=/usr/bin/xdp-imds\n", &format!("agent={agent}\n"));
        let text = text.replace("\nhold=\n", &format!("\nhold={hold}\n"));
        let run = self.path("run").display().to_string();
        let text = text.replace("\noptions=\n", &format!("\noptions='--run {run}'\n"));
        let path = self.path("hookscript");
        write_script(&path, &text).expect("a script");
        path
    }

    /// Runs the hookscript as qemu-server does; true if it ended with 0.
    fn phase(&self, hold: &str, phase: &str) -> bool {
        Command::new(self.hookscript(hold)).args(["100", phase]).status().expect("it runs").success()
    }
}

fn events(guest: &Guest) -> Result<Vec<String>> {
    let fetched = guest.fetch("/v1/events", PATIENCE)?;
    let document: Value = serde_json::from_str(&fetched.text())?;
    let events = document["events"].as_array().cloned().unwrap_or_default().into_iter();
    let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
    let shown =
        events.map(|event| ["id", "kind", "state"].map(|name| text(&event, name)).join(" ")).collect();
    Ok(shown)
}

#[privileged::test]
fn a_vm_is_told_of_a_migration_and_of_its_end() {
    let (node, identity, guest) = Node::with_vm();
    let plain = configuration("web-1", &identity);
    let _agent = node.agent().expect("an agent");
    let shows = |expected: &[&str], what: &str| {
        eventually(NOTICE, || {
            let found = events(&guest)?;
            anyhow::ensure!(found == expected, "{found:?}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    };
    shows(&[], "nothing is planned");
    replace(&node.configuration(100), &format!("lock: migrate\n{plain}")).expect("written");
    shows(&["migration freeze started"], "the VM migrates");
    replace(&node.configuration(100), &plain).expect("written");
    shows(&[], "the migration has failed");
    assert!(node.phase("", "pre-start") && node.phase("", "post-start"));
    shows(&[], "it starts");
    assert!(node.phase("", "pre-stop"));
    shows(&["stop terminate started"], "the host stops it");
    assert!(node.phase("", "post-stop"));
    shows(&["stop terminate completed"], "it has ended");
    // Its host was lost while it stopped, and it starts again.
    assert!(node.phase("", "pre-stop") && node.phase("", "pre-start"));
    shows(&["stop terminate completed"], "it starts again");
}

#[privileged::test]
fn the_host_waits_for_the_guest_as_asked_and_in_no_fault_longer() {
    let (node, _, guest) = Node::with_vm();
    let agent = node.agent().expect("an agent");
    eventually(NOTICE, || events(&guest)).expect("it is served");
    assert!(node.phase("200ms", "pre-stop"), "a silent guest changes nothing");
    assert_eq!(events(&guest).expect("events"), ["stop terminate started"]);
    assert!(node.phase("", "post-stop"));

    // A guest that is ready ends the wait.
    let run = |script: &Path| {
        let mut command = Command::new(script);
        command.args(["100", "pre-stop"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("it runs")
    };
    let hold = || run(&node.hookscript("30s"));
    let told = |what: &str| {
        eventually(PATIENCE, || {
            let found = events(&guest)?;
            anyhow::ensure!(found == ["stop terminate scheduled"], "{found:?}");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{what}: {error:#}"));
    };
    let ends = |mut waiting: std::process::Child, what: &str| {
        let end = eventually(Duration::from_secs(20), || {
            anyhow::ensure!(waiting.try_wait()?.is_some_and(|end| end.success()), "it still waits");
            Ok(())
        });
        let _ = waiting.kill();
        end.unwrap_or_else(|error| panic!("{what}: {error:#}"));
    };
    let waiting = hold();
    told("it stops");
    let url = format!("http://{METADATA}/v1/events/stop");
    assert_eq!(guest.curl(&["-X", "POST", &url], PATIENCE).expect("an answer").status, 204);
    ends(waiting, "the guest is ready");
    assert_eq!(events(&guest).expect("events"), ["stop terminate started"]);
    assert!(node.phase("", "post-stop"));

    // So does the end of the agent, and without one, or with one that cannot run, there is no wait.
    let waiting = hold();
    told("it stops again");
    agent.kill().expect("an agent to kill");
    ends(waiting, "the agent is killed");
    ends(hold(), "there is no agent");
    let script = node.hookscript("30s");
    let text = fs::read_to_string(&script).expect("the script");
    let agent = agent::binary().expect("built").display().to_string();
    let text = text.replace(&format!("agent={agent}\n"), "agent=/nowhere/xdp-imds\n");
    write_script(&script, &text).expect("a script");
    ends(run(&script), "it is not installed");
}
