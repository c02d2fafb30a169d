//! `xdp-imds release` takes away what agents have pinned.

use std::process::Output;
use std::time::Duration;

use anyhow::ensure;
use support::agent::{self, Agent};
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::privileged;
use support::record::Identity;

use super::node::{Node, PATH, PATIENCE, broadcast_listener, fetch_own, metadata_frames};

#[test]
fn release_opens_the_ports_of_an_ended_agent_and_refuses_those_of_a_running_one() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let said = |output: &Output| {
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
    };
    let nothing = node.release(&[]);
    assert!(nothing.status.success() && said(&nothing).contains("nothing is pinned"), "{}", said(&nothing));

    let agent = node.agent();
    let refused = node.release(&[]);
    assert!(
        refused.status.code() == Some(4) && said(&refused).contains("stop it first"),
        "{}",
        said(&refused)
    );
    fetch_own(&guest).expect("the guest is still served");
    assert!(agent.stop().expect("stopped").success());

    let ear = broadcast_listener(&node.host);
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
    assert_eq!(metadata_frames(&ear), 0, "a clean stop must leave the port closed");
    let released = node.release(&[]);
    assert!(
        released.status.success() && said(&released).contains("removed 1 program"),
        "{}",
        said(&released)
    );
    eventually(PATIENCE, || {
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
        ensure!(metadata_frames(&ear) > 0, "the port is still closed");
        Ok(())
    })
    .expect("the port is open");
}

#[test]
fn a_takeover_after_an_abandoned_uninstall_serves_old_and_new_guests() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let agent = node.agent();
    let boot = |identity: &Identity| Guest::boot(&node.host, &Spec::of(identity)).expect("a guest");
    let old = boot(&identities[0]);
    eventually(PATIENCE, || fetch_own(&old)).expect("an answer");
    let released = node.release(&["--force"]);
    let said = String::from_utf8_lossy(&released.stdout).into_owned();
    assert!(released.status.success() && said.contains("an agent runs and keeps the programs"), "{said}");
    assert!(!said.contains("from their devices"), "nothing was detached: {said}");
    fetch_own(&old).expect("it is still served");
    // Nobody deletes the DaemonSet: VMs start, and the next rollout comes within the grace of the release.
    let new = boot(&identities[1]);
    eventually(PATIENCE, || fetch_own(&new)).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    let next = node.agent_with(node.records.path(), &["--takeover"]);
    let (status, log) = agent.ended(PATIENCE).expect("it hands over");
    assert!(status.success(), "{log}");
    for guest in [&old, &new] {
        eventually(PATIENCE, || fetch_own(guest)).unwrap_or_else(|error| panic!("{error:#}\n{}", next.log()));
    }
    assert_eq!(node.bpffs.port_links().len(), 2, "{}", next.log());
    next.kill().expect("killed");
    let ear = broadcast_listener(&node.host);
    for guest in [&old, &new] {
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
    }
    assert_eq!(metadata_frames(&ear), 0, "its taps are closed");
}

#[test]
fn release_finds_the_pins_by_run_directory_or_configuration() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new(&[]);
    let pins = node.bpffs.pins();
    let run = node.records.path().join("run");
    let file = node.records.path().join("agent.yml.off");
    std::fs::write(&file, format!("pins: {}\n", pins.display())).expect("a file");
    let stderr = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();

    let agent = node.agent();
    for (option, path) in [("--run", &run), ("--config", &file)] {
        let refused = node.release_of(option, path, &[]);
        assert!(!refused.status.success(), "{option}: an agent runs on these pins");
        assert!(stderr(&refused).contains(&pins.display().to_string()), "{option}: {}", stderr(&refused));
    }
    assert!(agent.stop().expect("stopped").success());
    let unanswered = node.release_of("--run", &run, &[]);
    assert!(stderr(&unanswered).contains("--pins"), "{}", stderr(&unanswered));
    let released = node.release_of("--config", &file, &[]);
    assert!(released.status.success(), "{}", stderr(&released));
}

#[test]
fn the_error_about_a_missing_bpffs_names_both_remedies() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new(&[]);
    let elsewhere = tempfile::tempdir().expect("a directory");
    let words = agent::arguments_with_pins(node.records.path(), &[], &elsewhere.path().join("pins"));
    let binary = agent::binary().expect("the agent is built");
    let error = Agent::start_binary(&binary, node.host.ns(), words).expect_err("a refusal").to_string();
    assert!(error.contains("below /sys/fs/bpf") && error.contains("--no-pins"), "{error}");
}
