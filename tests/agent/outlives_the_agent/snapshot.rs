//! The snapshot of records, for agents whose directory of records is missing.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use support::agent::{self, Agent, PortArgument};
use support::answers;
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::privileged;
use support::record::Identity;

use super::node::{Node, PATH, PATIENCE, REQUEST, fetch_own};

/// A directory of records that the test can remove, like a missing mount.
fn removable(records: &Path) -> std::path::PathBuf {
    records.join("elsewhere")
}

#[test]
fn records_are_served_from_the_snapshot_while_their_directory_is_missing() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&[]);
    let records = removable(node.records.path());
    std::fs::create_dir(&records).expect("a directory");
    let ports: Vec<_> =
        identities.iter().map(|one| PortArgument::new(Host::tap_name(one), one.mac)).collect();
    let node = Node { ports, ..node };
    for identity in &identities {
        identity.write(&records, 1).expect("a record");
    }
    let [stays, goes] =
        identities.each_ref().map(|identity| Guest::boot(&node.host, &Spec::of(identity)).expect("a guest"));
    let agent = node.agent_for(&records);
    fetch_own(&stays).expect("an answer before the kill");
    assert!(agent.stop().expect("stopped").success());

    let hidden = node.records.path().join("hidden");
    std::fs::rename(&records, &hidden).expect("the directory is away");
    let agent = node.agent_for(&records);
    fetch_own(&stays).expect("an answer from the snapshot");
    fetch_own(&goes).expect("an answer from the snapshot");
    let source = |agent: &Agent<'_>, name: &str| -> Result<f64> {
        let metrics = agent.metrics()?;
        let mut samples = metrics.samples().iter();
        let found = samples
            .find(|one| one.name == "xdp_imds_records_source" && one.label("source") == Some(name))
            .context("no such metric")?;
        Ok(found.value)
    };
    assert_eq!(source(&agent, "snapshot").expect("a metric"), 1.0);
    assert!(agent.eventually_logs("serving from the snapshot"), "{}", agent.log());
    assert!(!agent.log().contains(&identities[0].user_data), "a record is in the log");

    // The directory comes back without one record and with a change of the other.
    std::fs::remove_file(identities[1].path(&hidden)).expect("removed");
    let renewed = Identity::of(0).with_user_data_of(3_000);
    renewed.write(&hidden, 2).expect("a record");
    std::fs::rename(&hidden, &records).expect("the directory is back");
    eventually(PATIENCE, || {
        let fetched = stays.fetch(PATH, REQUEST)?;
        answers::check(&renewed, PATH, fetched.status, &fetched.body)
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    assert_eq!(source(&agent, "source").expect("a metric"), 1.0);
    eventually(PATIENCE, || {
        let fetched = goes.fetch(PATH, REQUEST)?;
        ensure!(fetched.status == 404, "the request still gets status {}", fetched.status);
        Ok(())
    })
    .expect("the missing record is not served");
}

#[test]
fn a_damaged_snapshot_is_reported_only_when_it_is_needed() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    assert!(node.agent().stop().expect("stopped").success());
    let snapshot = node.records.path().join("state/records.snapshot");
    let good = std::fs::read(&snapshot).expect("the agent saved it at its end");
    std::fs::write(&snapshot, &good[..good.len() / 2]).expect("damaged");
    // The agent does not read the snapshot while its source is available.
    let agent = node.agent();
    fetch_own(&guest).expect("an answer from the source");
    assert!(agent.stop().expect("stopped").success());
    assert_eq!(std::fs::read(&snapshot).expect("the agent saved it again"), good);
    // Without its source, the agent reports the damage and ends as it does without a snapshot.
    std::fs::write(&snapshot, &good[..good.len() / 2]).expect("damaged");
    let mut words = agent::arguments_with_pins(node.records.path(), &node.ports, &node.bpffs.pins());
    let given = words.iter().position(|word| word == "--records").expect("it is given");
    words[given + 1] = node.records.path().join("away").into();
    let binary = agent::binary().expect("the agent is built");
    let error =
        Agent::start_binary(&binary, node.host.ns(), words).expect_err("nothing to serve").to_string();
    assert!(error.contains("damaged") && !error.contains(&identity.user_data), "{error}");
}

#[test]
fn an_agent_with_another_directory_does_not_serve_the_snapshot_and_does_not_replace_it() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let records = removable(node.records.path());
    std::fs::create_dir(&records).expect("a directory");
    identity.write(&records, 1).expect("a record");
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let agent = node.agent_for(&records);
    fetch_own(&guest).expect("an answer before the mistake");
    assert!(agent.stop().expect("stopped").success());
    let snapshot = node.records.path().join("state/records.snapshot");
    let good = std::fs::read(&snapshot).expect("the agent saved it at its end");

    let mut words = agent::arguments_with_pins(node.records.path(), &node.ports, &node.bpffs.pins());
    let given = words.iter().position(|word| word == "--records").expect("it is given");
    let mistyped = node.records.path().join("elsewere");
    words[given + 1] = mistyped.clone().into();
    let binary = agent::binary().expect("the agent is built");
    let error =
        Agent::start_binary(&binary, node.host.ns(), words).expect_err("nothing to serve").to_string();
    let own = format!("are of {} and are not served", records.display());
    assert!(error.contains(&own) && error.contains(&mistyped.display().to_string()), "{error}");
    assert_eq!(std::fs::read(&snapshot).expect("it is kept"), good);

    // With the mistake mended, the guest is served although the directory is away.
    std::fs::rename(&records, node.records.path().join("hidden")).expect("the directory is away");
    let agent = node.agent_for(&records);
    fetch_own(&guest).expect("an answer from the snapshot");
    assert!(agent.eventually_logs("serving from the snapshot"), "{}", agent.log());
}
