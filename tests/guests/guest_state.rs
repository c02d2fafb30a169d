//! A guest's state survives the agent, changes wake its waiting requests, and its messages reach the host.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use support::agent::binary;
use support::eventually;
use support::exposition::total;
use support::privileged;
use support::record::Identity;
use support::scene::OneGuest;

const PATIENCE: Duration = Duration::from_secs(20);
const METADATA: &str = "http://169.254.169.254";

#[privileged::test]
fn tokens_and_one_shot_passwords_survive_a_killed_agent() {
    let node = OneGuest::with_record(|record| {
        record["serve"] = json!({"imdsv2": "required"});
        record["admin"] = json!({"password": "correct-horse"});
    });
    let (put, ttl) = (format!("{METADATA}/latest/api/token"), "X-aws-ec2-metadata-token-ttl-seconds: 60");
    let (name, passwords) = (format!("{METADATA}/latest/meta-data/hostname"), format!("{METADATA}:8080/"));
    let agent = node.agent();
    let (status, token) = node.curl(&["-X", "PUT", "-H", ttl, &put]);
    assert_eq!((status, token.len()), (200, 56));
    assert_eq!(node.curl(&["-H", "DomU_Request: send_my_password", &passwords]).1, "correct-horse");
    assert_eq!(node.curl(&["-H", "DomU_Request: saved_password", &passwords]).1, "saved_password");
    // The agent writes changes to disk after a quarter of a second.
    let file = format!("state/vms/{}.json", node.guest.identity().instance_id);
    let file = node.file(&file);
    eventually(PATIENCE, || {
        ensure!(file.is_file(), "no {}", file.display());
        Ok(())
    })
    .expect("a file");
    agent.kill().expect("an agent to kill");
    let _agent = node.agent();
    assert_eq!(node.curl(&[&name]).0, 401);
    let (status, found) = node.curl(&["-H", &format!("X-aws-ec2-metadata-token: {token}"), &name]);
    assert_eq!((status, found.starts_with(&node.guest.identity().hostname)), (200, true), "{found}");
    assert_eq!(node.curl(&["-H", "DomU_Request: send_my_password", &passwords]).1, "saved_password");
}

#[privileged::test]
fn a_vm_that_is_built_anew_under_its_uuid_finds_nothing_of_its_predecessor() {
    let node = OneGuest::with_record(|record| record["vm"]["instance_id"] = json!("first"));
    let agent = node.agent();
    let passwords = format!("{METADATA}/openstack/latest/password");
    let flavor = "Metadata-Flavor: Google";
    let attribute = format!("{METADATA}/computeMetadata/v1/instance/guest-attributes/ns/key");
    let write = |password: &str| {
        assert_eq!(node.curl(&["-d", password, &passwords]).0, 200, "{password}");
        assert_eq!(node.curl(&["-X", "PUT", "-d", password, "-H", flavor, &attribute]).0, 200, "{password}");
        assert_eq!(node.curl(&["-d", "other", &passwords]).0, 409, "{password}");
        assert_eq!(node.curl(&[&passwords]).1, password);
        assert_eq!(node.curl(&["-H", flavor, &attribute]), (200, password.to_owned()));
    };
    let expect_nothing = || {
        let (password, attribute) = (node.curl(&[&passwords]), node.curl(&["-H", flavor, &attribute]));
        ensure!(password == (200, String::new()) && attribute.0 == 404, "{password:?}, {attribute:?}");
        Ok(())
    };
    write("of-the-first");
    node.write(2, |record| record["vm"]["instance_id"] = json!("second"));
    eventually(PATIENCE, expect_nothing).expect("nothing of the first instance");
    write("of-the-second");
    let record = node.guest.identity().path(node.records.path());
    let name = record.file_name().and_then(|name| name.to_str()).expect("a name");
    let run = node.file("run");
    let clear = |name: &str| {
        let mut command = Command::new(binary().expect("the agent is built"));
        let output = command.args(["clear", name, "--source", "file", "--run"]).arg(&run).output();
        let output = output.expect("it runs");
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).expect("text"))
    };
    assert_eq!(clear(name), (Some(0), format!("{name}: removed what its guest wrote\n")));
    expect_nothing().expect("nothing after the verb");
    assert!(agent.eventually_logs("removed what the guest wrote"), "{}", agent.log());
    let (code, said) = clear("nobody");
    assert!(code == Some(7) && said.contains("xdp-imds ls"), "{code:?} {said}");
    agent.kill().expect("an agent to kill");
    let _agent = node.agent();
    expect_nothing().expect("nothing after a restart");
    write("of-the-third");
}

#[privileged::test]
fn a_record_change_answers_a_waiting_request_at_once() {
    let node = OneGuest::with_record(|record| record["metadata"] = json!({"colour": "red"}));
    let agent = node.agent();
    let url = format!(
        "{METADATA}/computeMetadata/v1/instance/attributes/colour?wait_for_change=true&timeout_sec=600"
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| node.curl(&["-H", "Metadata-Flavor: Google", &url]));
        eventually(PATIENCE, || {
            ensure!(total(&agent.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change"))) == 1);
            Ok(())
        })
        .expect("a request that waits");
        let asked = Instant::now();
        std::thread::sleep(Duration::from_secs(2));
        assert!(!waiting.is_finished(), "answered after {:?} without a change", asked.elapsed());
        node.write(2, |record| record["metadata"] = json!({"colour": "blue"}));
        assert_eq!(waiting.join().expect("an answer"), (200, "blue".to_owned()));
    });
}

#[privileged::test]
fn a_guests_messages_reach_their_sink_and_a_failing_sink_refuses_none() {
    let node = OneGuest::boot(&Identity::of(0), |spec| spec);
    node.write(1, |record| {
        let file = format!("file:{}", node.file("homes.jsonl").display());
        record["sinks"] = json!({"phone_home": file, "events": "unix:/nowhere.sock"});
    });
    let _agent = node.agent();
    let home = format!("{METADATA}/v1/phone-home");
    assert_eq!(node.curl(&["-d", "instance_id=i-1&hostname=guest-0", &home]).0, 200);
    assert_eq!(node.curl(&["-d", "{\"name\": \"boot\"}", &format!("{METADATA}/v1/events")]).0, 200);
    let path = node.file("homes.jsonl");
    let line = eventually(PATIENCE, || Ok(serde_json::from_str::<Value>(&std::fs::read_to_string(&path)?)?));
    let line = line.expect("a line in the sink");
    assert_eq!(line["body"]["instance_id"], "i-1");
    assert_eq!(
        (&line["kind"], &line["vm"]),
        (&json!("phone_home"), &json!(node.guest.identity().instance_id))
    );
}

#[privileged::test]
fn what_the_host_will_do_is_told_at_once_and_an_acknowledgement_ends_the_wait() {
    let node = OneGuest::with_record(|record| record["serve"] = json!({"imdsv2": "off"}));
    let agent = node.agent();
    let name = node.guest.identity().path(node.records.path());
    let name = name.file_name().and_then(|name| name.to_str()).expect("a name");
    let event = |words: &[&str]| {
        let mut command = Command::new(binary().expect("the agent is built"));
        command.arg("event").args(words).args(["--source", "file", "--json", "--run"]).arg(node.file("run"));
        let output = command.output().expect("it runs");
        let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), said)
    };
    let azure = format!("{METADATA}/metadata/scheduledevents?api-version=2020-07-01");
    let flavor = "Metadata-Flavor: Google";
    let events = || {
        let (status, text) = node.curl(&["-H", "Metadata: true", &azure]);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).expect("JSON")
    };
    assert_eq!(events(), json!({"DocumentIncarnation": 1, "Events": []}));
    let maintenance = format!("{METADATA}/computeMetadata/v1/instance/maintenance-event");
    let change = format!("{maintenance}?wait_for_change=true&timeout_sec=600");
    let own = format!("{METADATA}/v1/events?incarnation=1&timeout=600");
    std::thread::scope(|scope| {
        let google = scope.spawn(|| node.curl(&["-H", flavor, &change]));
        let neutral = scope.spawn(|| node.curl(&[&own]));
        eventually(PATIENCE, || {
            ensure!(total(&agent.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change"))) == 2);
            Ok(())
        })
        .expect("requests that wait");
        let add =
            ["add", name, "--kind", "freeze", "--id", "drain-1", "--not-before", "2030-01-01T00:00:00Z"];
        assert_eq!(event(&add).0, Some(0));
        assert_eq!(google.join().expect("an answer"), (200, "MIGRATE_ON_HOST_MAINTENANCE".to_owned()));
        let (status, told) = neutral.join().expect("an answer");
        assert!(status == 200 && told.contains("drain-1"), "{status} {told}");
    });
    let told = events();
    assert!(
        told["DocumentIncarnation"].as_u64() > Some(1) && told["Events"][0]["EventId"] == "drain-1",
        "{told}"
    );
    // Nobody waits for a guest without a limit, and its acknowledgement ends the wait.
    let wait = |wait: &str| event(&["add", name, "--kind", "freeze", "--id", "drain-1", "--wait", wait]);
    assert_eq!(wait("100ms").0, Some(3), "the guest is silent");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait("30s"));
        let start = json!({"StartRequests": [{"EventId": "drain-1"}]}).to_string();
        assert_eq!(node.curl(&["-H", "Metadata: true", "-d", &start, &azure]).0, 200);
        let (code, document) = waiting.join().expect("an end");
        assert!(code == Some(0) && document["events"][0]["acknowledged"].is_string(), "{code:?} {document}");
    });
    // Events outlive the agent, and end as the operator says.
    agent.kill().expect("an agent to kill");
    let _agent = node.agent();
    assert_eq!(events()["Events"][0]["EventId"], "drain-1");
    assert_eq!(event(&["cancel", name, "drain-1"]).0, Some(0));
    eventually(PATIENCE, || {
        ensure!(events()["Events"] == json!([]), "{}", events());
        Ok(())
    })
    .expect("a cancelled event is not pending");
    assert_eq!(node.curl(&["-H", flavor, &maintenance]).1, "NONE");
    assert_eq!(event(&["cancel", name, "other"]).0, Some(7), "there is no such event");
    assert_eq!(event(&["ls", name]).1["events"][0]["state"], "cancelled");
}
