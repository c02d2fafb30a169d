//! Google's guest agent creates accounts for the record's keys, runs the record's script and follows its changes.

use super::node::{Node, SUITE};
use anyhow::ensure;
use serde_json::{Value, json};
use std::time::Duration;
use support::eventually::eventually;
use support::packages::{ESSENTIAL, Packages, With};
use support::record::Identity;
use support::root::Root;

/// Bound on the agent's first round: it creates three host keys, and an account by running five programs.
const FIRST_ROUND: Duration = Duration::from_secs(60);
/// Bound on noticing a change. It is shorter than the 60 s after which the agent's waiting request ends anyway, so a
/// change must wake the request.
const NOTICED: Duration = Duration::from_secs(30);
/// Bound on the agent's run time.
const LIFE_SECONDS: u32 = 180;
/// Bound on the run time of the script runner.
const PATIENCE_SECONDS: u32 = 30;

fn root() -> Option<Root> {
    let names = [ESSENTIAL, "google-guest-agent", "passwd", "openssh-client"];
    let packages = Packages::or_skip(SUITE, &names, With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    // Maintainer scripts of other packages would create these.
    root.write("etc/shadow", "").expect("a file");
    std::fs::create_dir_all(root.path("etc/sudoers.d")).expect("a directory");
    Some(root)
}

/// The keys the agent gave an account.
fn keys(root: &Root, account: &str) -> Vec<String> {
    let text = root.read(&format!("home/{account}/.ssh/authorized_keys")).unwrap_or_default();
    text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
}

/// A key unique to `number`.
fn key(number: u16) -> String {
    Identity::of(number).ssh_key
}

fn key_of(account: &str, number: u16) -> Value {
    json!({"name": format!("{account}-{number}"), "user": account, "key": key(number)})
}

#[test]
fn googles_guest_agent_creates_accounts_and_follows_record_changes() {
    let Some(root) = root() else { return };
    let node = Node::new(|record| record["ssh_keys"] = json!([key_of("alice", 1)]));
    let _agent = node.agent();
    let mut daemon = root.start(node.guest.ns(), &["google_guest_agent"], LIFE_SECONDS).expect("an agent");
    let mut accounts = |patience, expected: [(&str, &[u16]); 2]| {
        let as_expected = || {
            for (account, numbers) in expected {
                let expected: Vec<_> = numbers.iter().copied().map(key).collect();
                let found = keys(&root, account);
                ensure!(found == expected, "{account} has {found:?}, expected {expected:?}");
            }
            Ok(())
        };
        let outcome = eventually(patience, as_expected);
        daemon.runs().and(outcome).expect("accounts as in the record");
    };
    accounts(FIRST_ROUND, [("alice", &[1]), ("bob", &[])]);
    let groups = root.read("etc/group").expect("groups");
    assert!(
        groups.lines().any(|line| line.starts_with("google-sudoers:") && line.ends_with(":alice")),
        "{groups}"
    );

    node.change(|record| {
        record["ssh_keys"] = json!([key_of("alice", 1), key_of("alice", 2), key_of("bob", 3)])
    });
    accounts(NOTICED, [("alice", &[1, 2]), ("bob", &[3])]);
    node.change(|record| record["ssh_keys"] = json!([key_of("bob", 3)]));
    accounts(NOTICED, [("alice", &[]), ("bob", &[3])]);

    let own = root.read("etc/ssh/ssh_host_ed25519_key.pub").expect("a host key");
    let path = "/computeMetadata/v1/instance/guest-attributes/hostkeys/ssh-ed25519";
    let url = format!("http://169.254.169.254{path}");
    let stored = node.guest.curl(&["--header", "Metadata-Flavor: Google", &url], NOTICED).expect("an answer");
    assert_eq!(own.split(' ').nth(1), Some(stored.text().as_str()), "the host key as a guest attribute");
}

#[test]
fn googles_script_runner_runs_the_startup_script() {
    let Some(root) = root() else { return };
    let script = "#!/bin/sh\necho ran > /run/started\n";
    let node = Node::new(|record| record["metadata"] = json!({"startup-script": script}));
    let _agent = node.agent();
    let words = ["google_metadata_script_runner", "startup"];
    let output = root.run(node.guest.ns(), &words, PATIENCE_SECONDS).expect("a run");
    assert_eq!(root.read("run/started").unwrap_or_default(), "ran\n", "{output}");
}
