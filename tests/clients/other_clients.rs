//! Unmodified clients other than cloud-init get their record's data: SDKs of three clouds from their package registry,
//! and HTTP/1.0, persistent, pipelining and IPv6 clients.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, METADATA, NIC, Spec};
use support::host::Host;
use support::inside::Libraries;
use support::privileged;
use support::record::{Identity, replace};
use support::scene::OneGuest;

const PATIENCE: Duration = Duration::from_secs(10);
const LATER: &str = "2099-12-31T23:59:59Z";

fn node(change: impl FnOnce(&mut Value)) -> OneGuest {
    let node = OneGuest::with_record(change);
    std::fs::write(node.file("identity.token"), token()).expect("a token file");
    node
}

/// A token in the form of an unsigned JWT (RFC 7519), valid until 2099.
fn token() -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}.", part(json!({"alg": "none"})), part(json!({"exp": 4_102_444_799_u64})))
}

fn answer_to(script: &str, change: impl FnOnce(&mut Value)) -> Option<Value> {
    let libraries = Libraries::or_skip()?;
    let node = node(change);
    let _agent = node.agent();
    Some(libraries.run(node.guest.ns(), script).expect("the client gets its answers"))
}

/// A record's credentials of AWS.
fn iam() -> Value {
    json!({
        "role": "app",
        "access_key_id": "AKIDEXAMPLE",
        "secret_access_key": "sk-example",
        "session_token": "st-example",
        "expires": LATER,
        "updated": "2026-01-01T00:00:00Z",
    })
}

#[test]
fn an_aws_sdk_gets_credentials_and_region_with_a_session_token() {
    let answer = answer_to(include_str!("aws.py"), |record| {
        record["serve"] = json!({"imdsv2": "required"});
        record["placement"] = json!({"region": "local-1", "zone": "local-1a"});
        record["credentials"]["iam"] = iam();
    });
    let Some(answer) = answer else { return };
    let expected = json!({
        "method": "iam-role",
        "access_key": "AKIDEXAMPLE",
        "secret_key": "sk-example",
        "token": "st-example",
        "region": "local-1",
    });
    assert_eq!(answer, expected);
}

/// Runs once with EC2's list of versions at `/`, and once with GCE's root there.
#[test]
fn googles_auth_library_gets_its_platform_project_and_token() {
    [false, true].into_iter().for_each(googles_auth_library);
}

fn googles_auth_library(gce_root: bool) {
    let answer = answer_to(include_str!("google.py"), |record| {
        record["serve"] = json!({"gce_root": gce_root});
        record["credentials"]["service_account"] = json!({
            "name": "web",
            "email": "web@lab.local",
            "scopes": ["cloud-platform"],
            "token": {"text": token(), "expires": LATER},
        });
    });
    let Some(answer) = answer else { return };
    let expected = json!({
        "ping": true,
        "credentials": "google.auth.compute_engine.credentials",
        "project": "lab",
        "email": "web@lab.local",
        "token": token(),
        "expired": false,
    });
    assert_eq!(answer, expected, "gce_root: {gce_root}");
}

#[test]
fn azures_identity_library_gets_the_managed_identitys_token() {
    let answer = answer_to(include_str!("azure.py"), |record| {
        record["credentials"]["managed_identity"] = json!({"client_id": "c0ffee00-0000-4000-8000-000000000000", "source": {"file": "identity.token"}});
    });
    let Some(answer) = answer else { return };
    assert_eq!(answer, json!({"token": token(), "expired": false}));
}

/// A record with what clients of EC2 and Linode read: a second NIC, a public address, IPv6, tags and credentials.
fn widen(record: &mut Value) {
    record["serve"] = json!({"imdsv2": "required"});
    record["vm"]["ec2_id"] = "i-0f5e8a1b2c3d4e5f6".into();
    record["vm"]["numeric_id"] = 12_345.into();
    record["image"] = json!({"id": "ami-00000001"});
    record["instance_type"] = "std.small".into();
    record["metadata"] = json!({"role": "web"});
    record["labels"] = json!(["web", "front"]);
    record["credentials"]["iam"] = iam();
    let nics = record["network"]["nics"].as_array_mut().expect("a list");
    nics[0]["addresses"][0]["public"] = "203.0.113.7".into();
    let v6 = json!({"method": "static", "address": "2001:db8::7/64", "gateway": "fe80::1"});
    nics[0]["addresses"].as_array_mut().expect("a list").push(v6);
    nics.push(json!({
        "id": "n1",
        "name": "eth1",
        "mac": "52:54:00:6a:00:07",
        "role": "private",
        "network_id": "inner",
        "addresses": [{"method": "static", "address": "192.168.7.5/24"}],
    }));
}

#[test]
fn ec2_metadata_reads_every_name_that_it_knows() {
    let Some(answer) = answer_to(include_str!("ec2_metadata.py"), widen) else { return };
    let identity = Identity::of(0);
    let fqdn = format!("{}.lab.internal", identity.hostname);
    let mut expected = json!({
        "account_id": "000000000000",
        "ami_id": "ami-00000001",
        "ami_launch_index": 0,
        "ami_manifest_path": "(unknown)",
        "availability_zone": "local-a",
        "availability_zone_id": null,
        "autoscaling": null,
        "domain": "amazonaws.com",
        "iam": "AKIDEXAMPLE",
        "iam_name": "app",
        "instance_action": "none",
        "instance_id": "i-0f5e8a1b2c3d4e5f6",
        "instance_life_cycle": "on-demand",
        "instance_type": "std.small",
        "kernel_id": null,
        "mac": identity.mac.to_string(),
        "partition": "aws",
        "private_hostname": fqdn,
        "private_ipv4": identity.address.to_string(),
        "public_hostname": fqdn,
        "public_ipv4": "203.0.113.7",
        "public_keys": {"default": identity.ssh_key},
        "region": "local",
        "reservation_id": "r-",
        "security_groups": ["default"],
        "spot": null,
        "tags": {"role": "web"},
        "user_data": identity.user_data,
        "nics": {},
    });
    let (own, group) = (identity.address.to_string(), json!(["default"]));
    let networks = json!(["10.0.0.0/16", "192.168.7.0/24"]);
    let of_vpc = json!({
        "owner_id": "000000000000",
        "private_hostname": fqdn,
        "id": "eni-",
        "ipv6_prefix": [],
        "public_hostname": null,
        "security_groups": group,
        "security_group_ids": 1,
        "subnet_id": "subnet-",
        "vpc_id": "vpc-",
        "vpc_ipv4_cidr_block": "10.0.0.0/16",
        "vpc_ipv4_cidr_blocks": networks,
        "vpc_ipv6_cidr_blocks": ["2001:db8::/64"],
    });
    let first = json!({
        "device_number": 0,
        "ipv4_associations": {"203.0.113.7": [own]},
        "ipv6s": ["2001:db8::7"],
        "private_ipv4s": [own],
        "public_ipv4s": ["203.0.113.7"],
        "subnet_ipv4_cidr_block": "10.0.0.0/16",
        "subnet_ipv6_cidr_blocks": ["2001:db8::/64"],
    });
    let second = json!({
        "device_number": 1,
        "ipv4_associations": {},
        "ipv6s": [],
        "private_ipv4s": ["192.168.7.5"],
        "public_ipv4s": [],
        "subnet_ipv4_cidr_block": "192.168.7.0/24",
        "subnet_ipv6_cidr_blocks": [],
    });
    for (mac, nic) in [(identity.mac.to_string(), first), ("52:54:00:6a:00:07".to_owned(), second)] {
        let mut members = of_vpc.clone();
        members.as_object_mut().expect("an object").extend(nic.as_object().expect("an object").clone());
        expected["nics"][mac] = members;
    }
    assert_eq!(answer, expected);
}

#[test]
fn linodes_library_reads_instance_network_keys_and_user_data() {
    let Some(answer) = answer_to(include_str!("linode.py"), widen) else { return };
    let identity = Identity::of(0);
    let specs = json!({"disk": 0, "gpus": 0, "memory": 0, "transfer": 0, "vcpus": 0});
    let instance = json!({
        "backups": {"enabled": false, "status": null},
        "host_uuid": identity.instance_id,
        "id": 12_345,
        "label": identity.hostname,
        "region": "local",
        "specs": specs,
        "tags": ["web", "front"],
        "type": "std.small",
    });
    let network = json!({
        "interfaces": [
            {"ipam_address": null, "label": "lab", "purpose": "public"},
            {"ipam_address": "192.168.7.5/24", "label": "inner", "purpose": "vlan"},
        ],
        "ipv4": {
            "private": [format!("{}/32", identity.address), "192.168.7.5/32"],
            "public": ["203.0.113.7/32"],
            "shared": [],
        },
        "ipv6": {
            "link_local": "fe80::5054:ff:fe69:0/128",
            "ranges": [],
            "shared_ranges": [],
            "slaac": "2001:db8::7/128",
        },
    });
    let keys = json!({"root": [identity.ssh_key]});
    let expected = json!({
        "instance": instance,
        "network": network,
        "keys": keys,
        "user_data": identity.user_data,
    });
    assert_eq!(answer, expected);
}

#[test]
fn cloud_detect_finds_each_of_its_clouds() {
    let Some(answer) = answer_to(include_str!("detect.py"), widen) else { return };
    // The library asks AliYun for a path that AliYun does not have either.
    let expected = json!({
        "alibaba": false,
        "aws": true,
        "azure": true,
        "do": true,
        "gcp": true,
        "oci": true,
        "vultr": true,
    });
    assert_eq!(answer, expected);
}

/// Runs `test` with a guest and its agent, for clients installed on the machine.
fn with_guest(test: impl FnOnce(&Guest)) {
    if !privileged::or_skip() {
        return;
    }
    let node = node(|_| {});
    let _agent = node.agent();
    test(&node.guest);
}

const USER_DATA: &str = "http://169.254.169.254/v1/user-data";

#[test]
fn an_http_1_0_request_is_answered_and_its_connection_closed() {
    with_guest(|guest| {
        let words = ["--http1.0", "--include", USER_DATA];
        let answer = guest.curl(&words, PATIENCE).expect("an answer").text();
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert_eq!(body, guest.identity().user_data);
        assert!(head.starts_with("HTTP/1."), "{head}");
        assert!(!head.to_lowercase().contains("connection: keep-alive"), "{head}");
    });
}

#[test]
fn a_second_request_reuses_the_connection_of_the_first() {
    with_guest(|guest| {
        let verbose = guest.ns().output(std::process::Command::new("curl").args([
            "--silent",
            "--noproxy",
            "*",
            "--max-time",
            "10",
            "--write-out",
            "\n%{num_connects} %{http_code}\n",
            USER_DATA,
            "http://169.254.169.254/v1/meta-data",
        ]));
        let said = String::from_utf8(verbose.expect("curl runs").stdout).expect("text");
        let counts: Vec<_> = said.lines().filter(|line| line.ends_with(" 200")).collect();
        assert_eq!(counts, ["1 200", "0 200"], "{said}");
    });
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    with_guest(|guest| {
        let answers = guest.ns().run_in(|| -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&(METADATA, 80).into(), PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let get = |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nHost: metadata\r\n{more}\r\n");
            let requests = [
                get("/v1/user-data", ""),
                get("/v1/meta-data", ""),
                get("/v1/user-data", "Connection: close\r\n"),
            ];
            stream.write_all(requests.concat().as_bytes())?;
            let mut answers = String::new();
            stream.read_to_string(&mut answers)?;
            Ok(answers)
        });
        let answers = answers.expect("three answers");
        let bodies: Vec<_> = answers
            .split("HTTP/1.1 200 OK\r\n")
            .skip(1)
            .map(|answer| answer.split_once("\r\n\r\n").expect("a head").1)
            .collect();
        let identity = guest.identity();
        assert_eq!(bodies.len(), 3, "{answers}");
        assert_eq!([bodies[0], bodies[2]], [&identity.user_data; 2]);
        assert!(bodies[1].contains(&identity.instance_id), "{answers}");
    });
}

#[test]
fn user_data_is_the_same_over_ipv6() {
    with_guest(|guest| {
        guest.enable_ipv6().expect("IPv6");
        guest.ns().ip(&format!("-6 route add fd00:ec2::254 dev {NIC}")).expect("a route");
        for authority in ["[fd00:ec2::254]", "[fe80::a9fe:a9fe%25eth0]"] {
            let url = format!("http://{authority}/v1/user-data");
            let answer = guest.curl(&["--globoff", &url], PATIENCE).expect("an answer");
            assert_eq!((answer.status, answer.text()), (200, guest.identity().user_data.clone()), "{url}");
        }
    });
}
