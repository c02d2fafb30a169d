//! Programs that print a guest's metadata: EC2's two scripts (cloud-utils, amazon-ec2-utils), and Chef's ohai on each
//! cloud whose metadata it reads.

use super::node::{EC2_ID, LOCAL, Node, PRIVATE, PUBLIC, SECOND_MAC, SUITE, V6};
use serde_json::{Value, json};
use std::process::Stdio;
use support::packages::{ESSENTIAL, Packages, With};
use support::root::Root;

/// Bound on one program. ohai starts Ruby and asks for each name of a tree by itself.
const PATIENCE_SECONDS: u32 = 120;
/// Directory of the files that tell ohai on which cloud it runs.
const HINTS: &str = "etc/chef/ohai/hints";
const FQDN: &str = "guest-7.lab.internal";

fn root(package: &str) -> Option<Root> {
    let packages = Packages::or_skip(SUITE, &[ESSENTIAL, package], With::Dependencies)?;
    Some(Root::copy_of(packages.root()).expect("a root"))
}

fn node() -> Node {
    Node::new(|record| {
        record["serve"] = json!({"imdsv2": "required"});
        record["image"] = json!({"id": "ami-00000001"});
        record["metadata"] = json!({"role": "web", "tier": "front"});
    })
}

/// What a program prints on its standard output.
fn printed(root: &Root, node: &Node, words: &[&str]) -> String {
    let mut command = root.command(words, PATIENCE_SECONDS);
    let output = node.guest.ns().output(command.stderr(Stdio::piped())).expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?} ended with {}: {said}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// Checks lines in the form `name: value`.
fn assert_lines(text: &str, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        let line = format!("{name}: {value}");
        assert!(text.lines().any(|found| found == line), "no line {line:?} in:\n{text}");
    }
}

#[test]
fn ec2metadata_prints_the_record() {
    let Some(root) = root("cloud-guest-utils") else { return };
    let node = node();
    let _agent = node.agent();
    let identity = node.guest.identity();
    // Binary user-data is the program's only value that it prints as Python's bytes.
    let text = printed(&root, &node, &["ec2metadata"]);
    assert_lines(
        &text,
        &[
            ("ami-id", "ami-00000001"),
            ("ami-launch-index", "0"),
            ("availability-zone", "local-a"),
            ("instance-id", EC2_ID),
            ("instance-type", "std.small"),
            ("local-hostname", FQDN),
            ("local-ipv4", LOCAL),
            ("mac", &identity.mac.to_string()),
            ("public-hostname", FQDN),
            ("public-ipv4", PUBLIC),
            ("public-keys", &format!("['{}']", identity.ssh_key)),
            ("region", "local"),
        ],
    );
    assert_eq!(printed(&root, &node, &["ec2metadata", "--user-data"]), identity.user_data);
}

#[test]
fn amazons_ec2_metadata_prints_the_record() {
    let Some(root) = root("amazon-ec2-utils") else { return };
    let node = node();
    let _agent = node.agent();
    let identity = node.guest.identity();
    let text = printed(&root, &node, &["ec2-metadata", "--all"]);
    assert_lines(
        &text,
        &[
            ("ami-id", "ami-00000001"),
            ("instance-id", EC2_ID),
            ("instance-type", "std.small"),
            ("local-hostname", FQDN),
            ("local-ipv4", LOCAL),
            ("placement", "local-a"),
            ("public-ipv4", PUBLIC),
        ],
    );
    for piece in [&identity.ssh_key, &identity.user_data, "role: web", "tier: front"] {
        assert!(text.contains(piece.trim_end()), "no {piece:?} in:\n{text}");
    }
}

/// What ohai finds on a cloud of which a hint tells it.
fn found(root: &Root, node: &Node, cloud: &str) -> Value {
    root.write(&format!("{HINTS}/{cloud}.json"), "{}").expect("a hint");
    let text = printed(root, node, &["ohai", "--log_level", "fatal", cloud]);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{cloud}: {error}: {text}"))
}

/// Checks values by their JSON pointers.
fn assert_values(found: &Value, expected: &[(&str, Value)]) {
    for (pointer, value) in expected {
        assert_eq!(found.pointer(pointer), Some(value), "{pointer} of {found:#}");
    }
}

#[test]
fn ohai_reads_the_record_on_each_of_its_clouds() {
    let Some(root) = root("ohai") else { return };
    root.write("etc/hosts", "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal.\n")
        .expect("a file");
    let node = node();
    let _agent = node.agent();
    let identity = node.guest.identity();
    let (mac, key) = (identity.mac.to_string(), identity.ssh_key.as_str());
    let nic = |member: &str| format!("/network_interfaces_macs/{mac}/{member}");
    assert_values(
        &found(&root, &node, "ec2"),
        &[
            ("/account_id", json!("000000000000")),
            ("/availability_zone", json!("local-a")),
            ("/hostname", json!(FQDN)),
            ("/instance_id", json!(EC2_ID)),
            ("/local_ipv4", json!(LOCAL)),
            ("/public_ipv4", json!(PUBLIC)),
            ("/public_keys_0_openssh_key", json!(key)),
            ("/region", json!("local")),
            ("/tags_instance_role", json!("web")),
            ("/userdata", json!(identity.user_data)),
            (&nic("ipv6s"), json!(V6)),
            (&nic("local_ipv4s"), json!(LOCAL)),
            (&format!("/network_interfaces_macs/{SECOND_MAC}/local_ipv4s"), json!(PRIVATE)),
        ],
    );
    let openstack = found(&root, &node, "openstack");
    assert_values(&openstack, &[("/instance_id", json!(EC2_ID)), ("/provider", json!("openstack"))]);
    assert_values(
        &found(&root, &node, "gce"),
        &[
            ("/instance/hostname", json!(FQDN)),
            ("/instance/networkInterfaces/0/ip", json!(LOCAL)),
            ("/instance/tags", json!(["web"])),
            ("/instance/attributes/role", json!("web")),
            ("/project/projectId", json!("lab")),
        ],
    );
    let upper = mac.replace(':', "").to_uppercase();
    assert_values(
        &found(&root, &node, "azure"),
        &[
            ("/metadata/compute/name", json!(identity.hostname)),
            ("/metadata/compute/vmSize", json!("std.small")),
            ("/metadata/network/public_ipv4", json!([PUBLIC])),
            (&format!("/metadata/network/interfaces/{upper}/local_ipv4"), json!([LOCAL])),
            (&format!("/metadata/network/interfaces/{upper}/local_ipv6"), json!([V6])),
        ],
    );
    assert_values(
        &found(&root, &node, "digital_ocean"),
        &[
            ("/hostname", json!(FQDN)),
            ("/interfaces/public/0/ipv4/ip_address", json!(LOCAL)),
            ("/public_keys", json!([key])),
            ("/tags", json!(["web"])),
        ],
    );
    assert_values(
        &found(&root, &node, "scaleway"),
        &[
            ("/commercial_type", json!("std.small")),
            ("/hostname", json!(identity.hostname)),
            ("/public_ip/address", json!(PUBLIC)),
            ("/ssh_public_keys/0/key", json!(key)),
        ],
    );
}
