//! The state directory of another release.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use support::agent::{self, Agent};
use support::privileged;

use super::node::Node;

/// The VM in the samples of state files.
const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

/// Each format of a state file, and the path of a file below the state directory.
fn files() -> [(&'static str, String); 5] {
    [
        ("token.key", "token.key".into()),
        ("mailbox", format!("vms/{VM}.json")),
        ("dialects", "dialects".into()),
        ("instance", "instances/hook-0.json".into()),
        ("records.snapshot", "records.snapshot".into()),
    ]
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(path, bytes).expect("a file");
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).expect("a private file");
}

/// The missing directory of records that the samples of snapshots name.
const AWAY: &str = "/nonexistent/records.d";

/// Starts an agent whose directory of records is missing.
fn start(node: &Node) -> anyhow::Result<Agent<'_>> {
    let mut words = agent::arguments_with_pins(node.records.path(), &node.ports, &node.bpffs.pins());
    let given = words.iter().position(|word| word == "--records").expect("it is given");
    words[given + 1] = AWAY.into();
    Agent::start_binary(&agent::binary()?, node.host.ns(), words)
}

#[test]
fn an_agent_starts_with_the_state_of_every_release() {
    if !privileged::or_skip() {
        return;
    }
    let releases = golden::releases();
    assert!(!releases.is_empty());
    for release in releases {
        let node = Node::new(&[]);
        let state = |file: &str| -> PathBuf { node.records.path().join("state").join(file) };
        for (format, file) in files() {
            write(&state(&file), &golden::of_release(format, &release).bytes);
        }
        let current = |text: &[u8]| -> String {
            let keys: serde_json::Value = serde_json::from_slice(text).expect("token keys");
            keys["current"].as_str().expect("a key").to_owned()
        };
        let key = current(&std::fs::read(state("token.key")).expect("a file of keys"));
        let agent = start(&node).expect("it starts");
        assert!(agent.eventually_logs("serving from the snapshot"), "{release}: {}", agent.log());
        assert!(agent.stop().expect("stopped").success(), "{release}");
        // Tokens of that key stay valid. The sample is older than `rotate_token_key_days`, so it may become the former.
        let keys = std::fs::read_to_string(state("token.key")).expect("a file of keys");
        assert!(keys.contains(&key), "{release}: the key is gone from {keys}");
    }
}

#[test]
fn an_agent_refuses_later_token_keys_and_names_the_remedy() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new(&[]);
    let path = node.records.path().join("state/token.key");
    let later = br#"{"form":"xdp-imds token keys 9","keys":[]}"#;
    write(&path, later);
    let error = start(&node).expect_err("a refusal").to_string();
    for part in ["expected token keys of version 1", "found version 9", "start a release that reads it"] {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
    assert_eq!(std::fs::read(&path).expect("it stays"), later);
}
