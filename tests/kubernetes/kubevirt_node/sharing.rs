//! Two VMs of two namespaces whose tenants chose one firmware UUID.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use metadata_content::account::CONNECTIONS_PER_VM;
use serde_json::{Value, json};
use support::agent;
use support::guest::{Guest, METADATA};

use super::node::{Node, REQUEST, eventually_gets, gets, may_run, wait_for};

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

#[test]
fn vms_of_two_namespaces_with_one_uuid_are_two_vms() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let keys = node.path("keys");
    let made = Command::new(agent::binary().expect("built")).args(["identity", "key"]).arg(&keys).output();
    assert!(made.expect("a key").status.success());
    let config = node.path("config.yaml");
    let text = std::fs::read_to_string(&config).expect("a configuration");
    let mut options: Value = serde_json::from_str(&text).expect("JSON");
    options["identity"] = json!({"issuer": "https://imds.example", "keys": keys});
    std::fs::write(&config, options.to_string()).expect("a configuration");
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
