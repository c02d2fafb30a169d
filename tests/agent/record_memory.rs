//! The agent refuses records beyond its memory limit with a reason and continues to serve the others.

use std::time::Duration;

use anyhow::ensure;
use support::agent::{self, Agent};
use support::books::total;
use support::eventually::eventually;
use support::guest::{Guest, Spec};
use support::host::Host;
use support::privileged;
use support::record::{Identity, replace};

const PATIENCE: Duration = Duration::from_secs(60);
/// The smallest limit that can be configured, in bytes.
const MEMORY: u64 = 16 << 20;
/// Length of user-data in a large record, in bytes.
const LARGE: usize = 60_000;
/// Number of large records, which need several times the memory.
const OTHERS: u16 = 300;

fn user_data(guest: &Guest) -> anyhow::Result<String> {
    let fetched = guest.fetch("/v1/user-data", PATIENCE)?;
    ensure!(fetched.status == 200, "answered {}", fetched.status);
    Ok(fetched.text())
}

#[test]
fn records_beyond_the_memory_limit_are_refused_until_others_are_removed() {
    if !privileged::or_skip() {
        return;
    }
    let room = tempfile::tempdir().expect("a directory");
    let records = room.path().join("records");
    std::fs::create_dir(&records).expect("a directory");
    let small = Identity::of(0);
    small.write(&records, 1).expect("a record");
    // Their names sort after the guest's, so the agent reads the guest's record first.
    let others: Vec<_> = (1..=OTHERS).map(|number| Identity::of(number).with_user_data_of(LARGE)).collect();
    others.iter().for_each(|other| other.write(&records, 1).expect("a record"));
    let host = Host::new().expect("a node");
    let guest = Guest::boot(&host, &Spec::of(&small)).expect("a guest");
    let config = room.path().join("agent.yaml");
    let (tap, mac) = (guest.host_tap().name(), small.mac);
    let text = format!("ports:\n- {{ifname: {tap}, mac: \"{mac}\"}}\nrecord_memory: {MEMORY}\n");
    replace(&config, &text).expect("a configuration");
    let mut words = agent::arguments(&records, &[]);
    words.extend(["--config".into(), config.into()]);
    let binary = agent::binary().expect("the agent is built");
    let agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");
    let count = |name: &str| total(&agent.metrics().expect("metrics"), name, None);

    assert_eq!(user_data(&guest).expect("an answer"), small.user_data);
    let (refused, taken) =
        (count("xdp_imds_record_memory_refused_total"), count("xdp_imds_record_memory_bytes"));
    assert!(refused > 200, "{refused} of {OTHERS} records were refused");
    assert!((MEMORY / 2..=MEMORY).contains(&taken), "the records take {taken} bytes");
    assert!(agent.log().contains("Raise `record_memory`"), "{}", agent.log());

    // The larger version of the guest's record is refused, and the smaller one is still served.
    let large = small.clone().with_user_data_of(LARGE);
    large.write(&records, 2).expect("a record");
    eventually(PATIENCE, || {
        ensure!(
            count("xdp_imds_record_memory_refused_total") > refused,
            "the larger version is not refused yet"
        );
        Ok(())
    })
    .expect("a refusal");
    assert_eq!(user_data(&guest).expect("an answer"), small.user_data);

    others.iter().for_each(|other| std::fs::remove_file(other.path(&records)).expect("removed"));
    eventually(PATIENCE, || {
        ensure!(user_data(&guest)? == large.user_data, "the small version is still served");
        Ok(())
    })
    .expect("there is room for the large version");
}
