//! The API server fails, the agent is killed, or both: guests stay served, and later the agent catches up on changes.

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use metadata_content::account::CONNECTIONS_PER_VM;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;
use metadata_feed::registry::RecordId;
use metadata_feed::snapshot;
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use support::agent::{self, Agent};
use support::exposition::{self, sum};
use support::guest::{Guest, METADATA};
use support::pod::Plugin;
use support::record::Identity;

use super::node::{
    Node, Pod, REQUEST, eventually_gets, gets, may_run, times_logged, wait_for, wait_until_namespace_is_gone,
};

const PATH: &str = "/v1/user-data";

/// Waits until the agent has saved the VMI for the next agent.
#[track_caller]
fn wait_until_saved(agent: &Agent<'_>, node: &Node, pod: &Pod<'_>) {
    wait_for(agent, "VMIs are saved", || {
        ensure!(node.saved_vmis().contains(&pod.uid), "{} is not saved yet", pod.key());
        Ok(())
    });
}

/// A sum from the agent's metrics.
#[track_caller]
fn metric(agent: &Agent<'_>, name: &str, labels: &[(&str, &str)]) -> f64 {
    let (_, text) = agent.ask("/metrics").expect("metrics");
    sum(&exposition::read(&text).expect("metrics"), name, labels).expect("a family")
}

#[support::privileged::test(may_run)]
fn guests_stay_served_during_an_api_outage_and_later_changes_are_picked_up() {
    let node = Node::new();
    let agent = node.agent();
    let (mut first, mut second) = (node.pod(1), node.pod(2));
    let guest = first.run("# known\n");
    let leaving = second.run("# leaving\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    eventually_gets(&agent, &leaving, PATH, "# leaving\n");
    node.server.be_away(true);
    wait_for(&agent, "the outage is noticed", || {
        ensure!(times_logged(&agent, "the API server cannot be used") == 2, "not in the log of both watches");
        Ok(())
    });
    assert!(!agent.log().contains("ERROR"), "the outage is logged only as a warning:\n{}", agent.log());
    // The open watches end first, then no connection is accepted.
    wait_for(&agent, "connections are refused", || {
        let server = node.status().expect("a status").sources.pop().expect("an API server");
        ensure!(server.failing.as_ref().is_some_and(|failing| failing.kind == "refused"), "{server:?}");
        Ok(())
    });
    let away = node.status().expect("a status");
    let trouble = "requests to the API server have failed for";
    assert!(away.troubles.iter().any(|line| line.starts_with(trouble)), "{:?}", away.troubles);
    assert_eq!(metric(&agent, "xdp_imds_source_failing", &[("source", "kubevirt")]), 1.0);
    wait_for(&agent, "refusals are counted", || {
        let refused =
            metric(&agent, "xdp_imds_source_failures_total", &[("source", "kubevirt"), ("kind", "refused")]);
        ensure!(refused >= 2.0, "{refused}");
        Ok(())
    });
    let silence = metric(&agent, "xdp_imds_source_silence_seconds", &[("source", "kubevirt")]);
    wait_for(&agent, "silence grows", || {
        ensure!(
            metric(&agent, "xdp_imds_source_silence_seconds", &[("source", "kubevirt")]) > silence,
            "the metric does not grow"
        );
        Ok(())
    });
    gets(&guest, PATH, "# known\n").expect("served as before");
    // The node's pods continue: Secrets change, launchers end, and VMIs are created and changed unseen.
    first.secret("# new\n");
    eventually_gets(&agent, &guest, PATH, "# new\n");
    let key = second.key();
    let outer = second.end(leaving);
    wait_until_namespace_is_gone(&agent, &node, &outer);
    node.server.delete(&key);
    let mut third = node.pod(3);
    let other = third.run("# unseen\n");
    let mut vmi = first.vmi();
    vmi["spec"]["hostname"] = "renamed".into();
    node.server.put(vmi);
    node.server.forget();
    node.server.be_away(false);
    wait_for(&agent, "the recovery is noticed", || {
        ensure!(times_logged(&agent, "the API server is back") == 2, "not in the log of both watches");
        Ok(())
    });
    assert!(times_logged(&agent, "the API server's history is gone") >= 1, "{}", agent.log());
    let back = node.status().expect("a status");
    let server = back.sources.first().expect("the API server").clone();
    assert!(
        server.answered.is_some() && server.failing.is_none() && server.failures["gone"] >= 1,
        "{server:?}"
    );
    assert!(back.troubles.is_empty(), "{:?}", back.troubles);
    eventually_gets(&agent, &other, PATH, "# unseen\n");
    eventually_gets(&agent, &guest, "/v1/meta-data", "renamed");
    gets(&guest, PATH, "# new\n").expect("as before");
    assert_eq!(node.instances().expect("instances").len(), 2);
}

#[support::privileged::test(may_run)]
fn an_agent_restarted_after_a_kill_serves_as_before() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# known\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    agent.kill().expect("it ran until now");
    // Meanwhile a launcher may end and another may start.
    let mut next = node.pod(2);
    let other = next.run("# came meanwhile\n");
    let agent = node.agent();
    eventually_gets(&agent, &guest, PATH, "# known\n");
    eventually_gets(&agent, &other, PATH, "# came meanwhile\n");
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&agent, &node, &outer);
}

#[support::privileged::test(may_run)]
fn an_agent_killed_during_an_api_outage_serves_the_saved_vmis_again() {
    let node = Node::new();
    let agent = node.agent();
    let (mut pod, mut ending) = (node.pod(1), node.pod(2));
    let guest = pod.run("# known\n");
    let leaving = ending.run("# leaving\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    eventually_gets(&agent, &leaving, PATH, "# leaving\n");
    wait_until_saved(&agent, &node, &pod);
    wait_until_saved(&agent, &node, &ending);
    node.server.be_away(true);
    agent.kill().expect("it ran until now");
    // The launcher ends while no agent runs.
    let outer = ending.end(leaving);
    let agent = node.agent();
    wait_until_namespace_is_gone(&agent, &node, &outer);
    eventually_gets(&agent, &guest, PATH, "# known\n");
    pod.secret("# new\n");
    eventually_gets(&agent, &guest, PATH, "# new\n");
    let mut next = node.pod(3);
    let other = next.run("# other\n");
    node.server.be_away(false);
    eventually_gets(&agent, &other, PATH, "# other\n");
    gets(&guest, PATH, "# new\n").expect("as before");
    wait_for(&agent, "the ended VM is removed", || {
        ensure!(node.links() == 2, "{} programs are attached", node.links());
        Ok(())
    });
}

#[support::privileged::test(may_run)]
fn an_agent_that_takes_over_serves_the_previous_agents_pods() {
    let node = Node::new();
    let agent = node.agent();
    let mut pod = node.pod(1);
    let guest = pod.run("# known\n");
    eventually_gets(&agent, &guest, PATH, "# known\n");
    let next = node.agent_with(&["--takeover"]);
    gets(&guest, PATH, "# known\n").expect("served by the next agent");
    agent.ended(super::node::PATIENCE).expect("it leaves");
    gets(&guest, PATH, "# known\n").expect("served by the next agent");
    let outer = pod.end(guest);
    wait_until_namespace_is_gone(&next, &node, &outer);
}

// Files that the agent writes on a KubeVirt node, and that they contain no secret.

/// The beginning of every secret in this test.
const CANARY: &str = "CANARY";

/// The files below a directory that contain the canary, in plain or in base64 at any offset.
fn leaks(directory: &Path) -> Vec<String> {
    use base64::Engine as _;
    let encoded = (0..3).map(|offset| {
        let text =
            base64::engine::general_purpose::STANDARD_NO_PAD.encode(format!("{}{CANARY}", &"   "[..offset]));
        // The first and last characters depend on the bytes beside the canary.
        text[(offset * 4usize).div_ceil(3)..text.len() - 1].to_owned()
    });
    let forms: Vec<String> = encoded.chain([CANARY.to_owned()]).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(leaks(&path));
            continue;
        }
        let bytes = fs::read(&path).expect("a file");
        let text = String::from_utf8_lossy(&bytes);
        if forms.iter().any(|form| text.contains(form)) {
            found.push(path.display().to_string());
        }
    }
    found
}

#[support::privileged::test(may_run)]
fn no_file_of_the_state_directory_has_a_secret_of_a_kubevirt_record() {
    let node = Node::new();
    let state = node.path("state");
    // An earlier release wrote records with their secrets into the snapshot.
    fs::create_dir(&state).expect("a directory");
    let mut former: Value = serde_json::from_str(&Identity::of(7).record(1)).expect("a record");
    former["user_data"]["text"] = format!("#cloud-config\n# {CANARY}-former\n").into();
    let (former, _) = Record::parse("former.json", &former.to_string()).expect("a record");
    let id = RecordId::new(RecordSource::Kubevirt, "shop/former");
    snapshot::write(&state.join(snapshot::FILE), &[(id, Arc::new(former))], &snapshot::Origins::new())
        .expect("written");
    assert_eq!(leaks(&state).len(), 1, "the test finds what it looks for");

    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.write(Plugin::Projected, "imds-token", &[("token", format!("{CANARY}.e30.c2ln").as_bytes())]);
    let guest = pod.run(&format!("#cloud-config\n# {CANARY}-user-data\n"));
    eventually_gets(&agent, &guest, "/v1/user-data", CANARY);
    wait_for(&agent, "the kept file", || {
        ensure!(node.saved_vmis().contains(&pod.identity.hostname), "the VMI is not on disk");
        Ok(())
    });
    wait_for(&agent, "a snapshot without secrets", || {
        ensure!(leaks(&state).is_empty(), "{:?}", leaks(&state));
        Ok(())
    });
    assert!(agent.stop().expect("stopped").success());
    assert_eq!(leaks(&state), Vec::<String>::new());
}

// Two VMs of two namespaces whose tenants chose one firmware UUID.

const GOOGLE: &str = "-HMetadata-Flavor: Google";
const ATTRIBUTE: &str = "/computeMetadata/v1/instance/guest-attributes/hostkeys/ed25519";
const PASSWORD: &str = "/openstack/latest/password";

/// Sends a request by curl; returns status and body.
fn ask(guest: &Guest, words: &[&str], path: &str) -> (u16, String) {
    let url = format!("http://{METADATA}{path}");
    let words: Vec<_> = words.iter().copied().chain([&*url]).collect();
    let got = guest.curl(&words, REQUEST).unwrap_or_else(|error| panic!("{path}: {error:#}"));
    (got.status, got.text())
}

/// The claims of the guest's token.
fn claims(guest: &Guest) -> Result<Value> {
    let (status, token) = ask(guest, &["-HMetadata: true"], "/v1/identity/jwt?audience=vault");
    ensure!(status == 200, "{status}: {token}");
    let payload = token.split('.').nth(1).context("a JWT")?;
    Ok(serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload)?)?)
}

#[support::privileged::test(may_run)]
fn vms_of_two_namespaces_with_one_uuid_are_two_vms() {
    let node = Node::new();
    let keys = node.path("keys");
    let made = Command::new(agent::binary().expect("built")).args(["identity", "key"]).arg(&keys).output();
    assert!(made.expect("a key").status.success());
    let config = node.path("config.yaml");
    let text = fs::read_to_string(&config).expect("a configuration");
    let mut options: Value = serde_json::from_str(&text).expect("JSON");
    options["identity"] = json!({"issuer": "https://imds.example", "keys": keys});
    fs::write(&config, options.to_string()).expect("a configuration");
    let agent = node.agent();

    let mut pods = [node.pod(1), node.pod(2)];
    pods[1].identity.instance_id = pods[0].identity.instance_id.clone();
    let mut boot = |at: usize, namespace: &str| {
        let pod = &mut pods[at];
        pod.secret(&format!("# of {namespace}\n"));
        pod.launch();
        let guest = pod.boot();
        let mut vmi = pod.vmi();
        vmi["metadata"]["namespace"] = namespace.into();
        vmi["metadata"]["name"] = "test".into();
        node.server.put(vmi);
        guest
    };
    let (victim, attacker) = (boot(0, "bank"), boot(1, "attic"));
    eventually_gets(&agent, &victim, "/v1/user-data", "# of bank\n");
    eventually_gets(&agent, &attacker, "/v1/user-data", "# of attic\n");

    // What the victim writes, the other neither reads nor overwrites.
    assert_eq!(ask(&victim, &[GOOGLE, "-XPUT", "-dvictims-key"], ATTRIBUTE).0, 200);
    assert_eq!(ask(&victim, &["-dvictims-password"], PASSWORD).0, 200);
    assert_eq!(ask(&attacker, &[GOOGLE], ATTRIBUTE).0, 404);
    assert_eq!(ask(&attacker, &[], PASSWORD), (200, String::new()));
    assert_eq!(ask(&attacker, &[GOOGLE, "-XPUT", "-dforged-key"], ATTRIBUTE).0, 200);
    assert_eq!(ask(&attacker, &["-dforged-password"], PASSWORD).0, 200);
    assert_eq!(ask(&victim, &[GOOGLE], ATTRIBUTE).1, "victims-key");
    assert_eq!(ask(&victim, &[], PASSWORD).1, "victims-password");

    // Nor is it the victim for others.
    let [of_victim, of_attacker] =
        [&victim, &attacker].map(|guest| wait_for(&agent, "a token", || claims(guest)));
    assert_eq!(of_victim["sub"], "kubevirt:bank/test");
    assert_eq!(of_attacker["sub"], "kubevirt:attic/test");
    assert_ne!(of_victim["vm"]["owner"], of_attacker["vm"]["owner"]);
    assert_eq!(of_victim["vm"]["uuid"], of_attacker["vm"]["uuid"], "the UUID is a document's content");
    for (words, path) in [
        (&[][..], "/latest/meta-data/instance-id"),
        (&[GOOGLE], "/computeMetadata/v1/instance/id"),
        (&["-HAuthorization: Bearer Oracle"], "/opc/v2/instance/id"),
    ] {
        let [first, second] = [&victim, &attacker].map(|guest| ask(guest, words, path));
        assert_eq!((first.0, second.0), (200, 200), "{path}: {first:?} {second:?}");
        assert_ne!(first.1, second.1, "{path}");
    }
    let put = &["-XPUT", "-HX-aws-ec2-metadata-token-ttl-seconds: 600"];
    let stolen = format!("-HX-aws-ec2-metadata-token: {}", ask(&victim, put, "/latest/api/token").1);
    assert_eq!(ask(&victim, &[&stolen], "/latest/meta-data/instance-id").0, 200);
    assert_eq!(ask(&attacker, &[&stolen], "/latest/meta-data/instance-id").0, 401);

    // Nor does it use up the victim's account.
    let to = SocketAddr::from((METADATA, 80));
    let slow = |_| {
        let mut connection = attacker.ns().run_in(|| TcpStream::connect_timeout(&to, REQUEST)).ok()?;
        connection.write_all(b"GET /v1/user-data HTTP/1.1\r\n").ok()?;
        Some(connection)
    };
    let held: Vec<_> = (0..CONNECTIONS_PER_VM).filter_map(slow).collect();
    assert!(held.len() > CONNECTIONS_PER_VM / 2, "{} connections", held.len());
    gets(&victim, "/v1/user-data", "# of bank\n").expect("the victim is served");
    drop(held);

    // The status names both, and is healthy.
    let status = node.status().expect("a status");
    let [shared] = &status.shared_uuids[..] else { panic!("{:?}", status.shared_uuids) };
    assert_eq!(shared.uuid, of_victim["vm"]["uuid"].as_str().expect("text"));
    assert_eq!(shared.records, ["kubevirt/attic/test", "kubevirt/bank/test"]);
    assert!(status.troubles.is_empty(), "{:?}", status.troubles);

    // State that remains after a VM has gone is not the other's either.
    node.server.delete("bank/test");
    let [first, second] = pods;
    first.end(victim);
    assert_eq!(ask(&attacker, &[GOOGLE], ATTRIBUTE).1, "forged-key");
    drop((second, attacker));
}
