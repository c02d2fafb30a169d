//! Afterburn writes the record's attributes, host name and keys for every cloud whose dialect we serve.

use super::clouds::{AZURE, CLOUDS, Cloud, FLAT};
use super::node::{LOCAL, Node, PRIVATE, PUBLIC, SUITE, V6};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use support::packages::{ESSENTIAL, Packages, With};
use support::root::Root;

/// Bound on one run. A repeated request adds a second and fails the test.
const PATIENCE_SECONDS: u32 = 60;
/// Accounts in the guest's root; `core` gets the keys.
const ACCOUNTS: &str = "root:x:0:0::/root:/bin/sh\ncore:x:1000:1000::/home/core:/bin/sh\n";
const CORE: u32 = 1000;
const ATTRIBUTES: &str = "run/attributes";
const HOSTNAME: &str = "run/hostname";
const KEYS: &str = "home/core/.ssh/authorized_keys.d/afterburn";
/// Files that one run writes.
const WRITTEN: [&str; 3] = [ATTRIBUTES, HOSTNAME, KEYS];
/// An attribute with one of these substrings may be empty with a bare record.
const ONLY_FULL: [&str; 5] = [LOCAL, PUBLIC, V6, PRIVATE, "web"];

/// Runs Afterburn for each cloud; returns a table of deviations, empty on success.
fn deviations(clouds: &[Cloud], bare: bool, change: impl FnOnce(&mut Value)) -> Option<String> {
    let program = support::afterburn::or_skip()?;
    let packages = Packages::or_skip(SUITE, &[ESSENTIAL, "libssl3"], With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    std::fs::copy(program, root.path("usr/bin/afterburn")).expect("a program");
    root.write("etc/passwd", ACCOUNTS).expect("accounts");
    let home = root.path("home/core");
    std::fs::create_dir_all(&home).expect("a home");
    std::os::unix::fs::chown(home, Some(CORE), Some(CORE)).expect("an owner");
    let node = Node::new(change);
    let _agent = node.agent();
    let (path, lease) = node.lease();
    root.write(&path, lease).expect("a lease");
    let mut deviations = String::new();
    for cloud in clouds {
        if let Err(wrong) = cloud.run(&root, &node, bare) {
            writeln!(deviations, "{}:\n{wrong}", cloud.provider).expect("text has room");
        }
    }
    Some(deviations)
}

impl Cloud {
    /// Runs Afterburn; the error lists every difference between its files and the record.
    fn run(&self, root: &Root, node: &Node, bare: bool) -> Result<(), String> {
        for file in WRITTEN {
            // The run for the previous cloud has written this file.
            std::fs::remove_file(root.path(file)).unwrap_or_default();
        }
        let words = ["afterburn", "multi", "--provider", self.provider, "--check-in", "--ssh-keys=core"];
        let files =
            ["--attributes=/run/attributes", "--hostname=/run/hostname", "--network-units=/run/units"];
        let output = root.run(node.guest.ns(), &[&words[..], &files].concat(), PATIENCE_SECONDS);
        let output = output.map_err(|error| format!("{error:#}"))?;
        let read = |file| root.read(file).unwrap_or_default();
        let text = read(ATTRIBUTES);
        let mut wrong = self.wrong_attributes(&text, bare);
        if output.contains("Attempt #2") {
            wrong += &format!("  it repeated a request:\n{output}\n");
        }
        let line = |text: &str| format!("{text}\n");
        let hostname = self.hostname.map(line).unwrap_or_default();
        let keys = if bare { String::new() } else { line(&node.guest.identity().ssh_key) };
        for (file, expected) in [(HOSTNAME, hostname), (KEYS, keys)] {
            if read(file) != expected {
                wrong += &format!("  {file} is {:?}, expected {expected:?}\n", read(file));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong + &text) }
    }

    /// Lists wrong attributes. With a bare record, those of a full record must be absent or empty.
    fn wrong_attributes(&self, text: &str, bare: bool) -> String {
        let own = |line: &str| {
            let (name, value) =
                line.strip_prefix("AFTERBURN_")?.strip_prefix(self.prefix)?.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        let mut found: BTreeMap<String, String> = text.lines().filter_map(own).collect();
        let mut wrong = String::new();
        for &(name, value) in self.attributes {
            let found = found.remove(name).unwrap_or_default();
            let only_full = name == "PUBLIC_HOSTNAME" || ONLY_FULL.iter().any(|part| value.contains(part));
            if found != value && !(bare && only_full && found.is_empty()) {
                wrong += &format!("  {name} is {found:?}, expected {value:?}\n");
            }
        }
        if !found.is_empty() {
            wrong += &format!("  unexpected: {found:?}\n");
        }
        wrong
    }
}

/// Removes every optional field of a record.
fn bare(record: &mut Value) {
    let fields = record.as_object_mut().expect("a mapping");
    fields.retain(|name, _| !["user_data", "ssh_keys", "labels"].contains(&name.as_str()));
    let nic = &mut record["network"]["nics"][0];
    nic["addresses"] = json!([{"method": "dhcp4"}]);
    record["network"]["nics"] = json!([nic]);
}

#[test]
fn afterburn_writes_the_records_values_for_every_shared_cloud() {
    let Some(deviations) = deviations(CLOUDS, false, |_| {}) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_writes_the_records_values_on_cloudstack_and_exoscale() {
    let flat = |record: &mut Value| record["serve"] = json!({"date_tree": "cloudstack"});
    let Some(deviations) = deviations(FLAT, false, flat) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_writes_the_records_values_on_azure() {
    let Some(deviations) = deviations(AZURE, false, |_| {}) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_repeats_no_request_with_a_bare_record_on_azure() {
    let Some(deviations) = deviations(AZURE, true, bare) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_repeats_no_request_with_a_bare_record() {
    let Some(deviations) = deviations(CLOUDS, true, bare) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn afterburn_repeats_no_request_with_a_bare_record_on_exoscale() {
    let flat = |record: &mut Value| {
        bare(record);
        record["serve"] = json!({"date_tree": "cloudstack"});
    };
    let Some(deviations) = deviations(FLAT, true, flat) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}
