//! What somebody else detaches or removes is noticed, restored and reported by the running agent.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use metadata_control::status::AgentStatus;
use support::agent::{self, Agent};
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::objects::{self, Objects};
use support::privileged;
use support::record::Identity;

use super::node::{Node, PATH, PATIENCE, broadcast_listener, fetch_own, metadata_frames};

fn troubles(node: &Node) -> Result<Vec<String>> {
    let mut command = Command::new(agent::binary()?);
    command.args(["status", "--json", "--run"]).arg(node.records.path().join("run"));
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let status: AgentStatus = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(status.troubles)
}

/// Makes the agent compare at once, and waits until a line of `status` has these words, or until it is healthy.
fn compares(node: &Node, agent: &mut Agent<'_>, words: Option<&str>) {
    agent.reload().expect("SIGHUP");
    let seen = || {
        let lines = troubles(node)?;
        let is_so = words.map_or(lines.is_empty(), |words| lines.iter().any(|line| line.contains(words)));
        ensure!(is_so, "expected {words:?}, found {lines:?}");
        Ok(())
    };
    eventually(PATIENCE, seen).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

#[test]
fn guests_are_answered_again_after_somebody_detached_every_program() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let mut agent = node.agent();
    fetch_own(&guest).expect("an answer");
    let held = Objects::held_by(agent.pid()).expect("its links");
    assert!(held.links.len() >= 3, "a port's link and those of the hub: {held}");
    for link in &held.links {
        objects::detach(*link).expect("detached");
    }
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("no program is attached");
    compares(&node, &mut agent, Some("detached by somebody else"));
    eventually(PATIENCE, || fetch_own(&guest)).expect("answered again, without a restart");
    let text = agent.ask("/metrics").expect("metrics").1;
    let faults =
        text.lines().find(|line| line.starts_with("xdp_imds_attachment_faults_total{fault=\"detached\"}"));
    assert!(faults.is_some_and(|line| !line.ends_with(" 0")), "{faults:?}");
    compares(&node, &mut agent, None);
}

#[test]
fn removed_pins_are_back_so_that_a_killed_agent_leaves_taps_closed() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let mut agent = node.agent();
    fetch_own(&guest).expect("an answer");
    let links = node.bpffs.links();
    std::fs::remove_dir_all(node.bpffs.pins()).expect("removed");
    compares(&node, &mut agent, Some("pins were removed"));
    assert_eq!(node.bpffs.links(), links);
    compares(&node, &mut agent, None);
    agent.kill().expect("killed");
    let ear = broadcast_listener(&node.host);
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
    assert_eq!(metadata_frames(&ear), 0, "the tap is closed");
    let _agent = node.agent();
    eventually(PATIENCE, || fetch_own(&guest)).expect("the next agent inherits the pins");
}

#[test]
fn a_second_bpffs_over_the_pins_is_reported_until_it_is_gone() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let mut agent = node.agent();
    node.bpffs.cover().expect("a second bpffs");
    compares(&node, &mut agent, Some("mounted over it"));
    fetch_own(&guest).expect("guests are served");
    node.bpffs.uncover().expect("unmounted");
    compares(&node, &mut agent, None);
    assert!(!node.bpffs.links().is_empty());
}
