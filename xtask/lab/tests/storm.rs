//! A boot storm as users run it, small: guests of three clouds at once, every answer checked, none fails.

use std::process::Command;
use support::{agent, privileged};

/// What the verb is told besides the case; wall time bounded by the rounds, as a single wave is enough.
const SMALL: [&str; 7] = ["storm", "--rounds", "1", "--seconds", "0", "--subjects", "xdp-imds"];

/// Guests of the small ones.
const FEW: [&str; 2] = ["--vms", "32"];

/// Runs a storm and reads what it wrote.
fn storm(more: &[&str]) -> serde_json::Value {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("storm.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_xdp-imds-lab"));
    command.args(SMALL).args(more).arg("--json").arg(&json);
    command.arg("--agent").arg(agent::binary().expect("the agent is built"));
    let output = command.output().expect("the storm runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}", output.status);
    serde_json::from_slice(&std::fs::read(&json).expect("the results")).expect("JSON")
}

/// Requests answered rightly and failed, per case.
fn outcomes(results: &serde_json::Value) -> Vec<(u64, u64)> {
    let cases = results["cases"].as_array().expect("cases");
    let round = |case: &serde_json::Value| case["subjects"][0]["rounds"][0].clone();
    let count = |round: &serde_json::Value, what: &str| round[what].as_u64().expect("a number");
    cases.iter().map(round).map(|round| (count(&round, "requests"), count(&round, "failures"))).collect()
}

#[test]
fn guests_of_every_cloud_boot_at_once_without_a_failure() {
    if !privileged::or_skip() {
        return;
    }
    let results = storm(&FEW);
    assert_eq!(outcomes(&results), [(32 * 4, 0), (32 * 48, 0), (32 * 46, 0)]);
}

#[test]
fn guests_that_lose_frames_read_slowly_or_leave_checksums_to_the_device_boot_all_the_same() {
    if !privileged::or_skip() {
        return;
    }
    for more in [
        &["--loss", "0.02"][..],
        &["--slow-readers", "2", "--user-data", "64KiB"],
        &["--vnet-hdr"],
        &["--keep-alive"],
        &["--arrival", "poisson:500"],
    ] {
        let results = storm(&[&FEW[..], &["--dialect", "nocloud"], more].concat());
        assert_eq!(outcomes(&results), [(32 * 4, 0)], "{more:?}");
    }
}

#[test]
fn guests_boot_through_a_takeover_without_noticing_and_through_the_death_of_the_agent_without_a_failure() {
    if !privileged::or_skip() {
        return;
    }
    for event in ["takeover@0.3", "kill9@0.3"] {
        let results =
            storm(&["--vms", "64", "--dialect", "openstack", "--arrival", "ramp:1", "--event", event]);
        let round = &results["cases"][0]["subjects"][0]["rounds"][0];
        let count = |what: &str| round[what].as_u64().expect("a number");
        assert_eq!((count("failures"), &round["events"][0]["event"]), (0, &event.into()), "{event}: {round}");
        assert_eq!(count("requests"), 64 * 48, "{event}: {round}");
        if event.starts_with("takeover") {
            assert_eq!((count("retries"), &round["reasons"]), (0, &serde_json::json!({})), "{event}");
        }
    }
}

#[test]
fn one_guest_that_floods_makes_no_other_fail() {
    if !privileged::or_skip() {
        return;
    }
    let results = storm(&[&FEW[..], &["--dialect", "nocloud", "--flood", "syn"]].concat());
    assert_eq!(outcomes(&results), [(32 * 4, 0)]);
}

#[test]
fn guests_that_ask_nothing_cost_their_documents_and_less_time_in_five_seconds_than_booting_once() {
    if !privileged::or_skip() {
        return;
    }
    let results = storm(&["--vms", "100,600", "--dialect", "nocloud", "--idle", "5"]);
    let rounds: Vec<_> =
        (0..2).map(|case| results["cases"][case]["subjects"][0]["rounds"][0].clone()).collect();
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    let [few, many] = [0, 1].map(|case: usize| number(&rounds[case]["memory"]["server_bytes"]));
    // All dialects of a VM are some 30 kB; its record, its tables and the allocator's share come on top.
    let each = (many - few) / 500.0;
    assert!(each < 64.0 * 1024.0, "{each} octets for each further VM");
    let idle = number(&rounds[1]["idle"]["server_us"]);
    let boots = ["server_user_us", "server_system_us"].map(|what| number(&rounds[1]["cpu"][what]));
    assert!(idle < boots.iter().sum(), "{idle} µs while nobody asks, {boots:?} µs to boot");
}
