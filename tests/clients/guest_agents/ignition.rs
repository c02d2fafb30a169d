//! Ignition fetches its config from the user-data of every cloud whose dialect we serve, and applies it.

use super::node::{Node, SUITE};
use serde_json::{Value, json};
use std::fmt::Write as _;
use support::packages::{ESSENTIAL, Packages, With};
use support::root::Root;

/// Bound on one stage; Ignition itself stops fetching a config after half this time.
const PATIENCE_SECONDS: u32 = 40;
/// Path of the program in Debian.
const PROGRAM: &str = "/usr/lib/dracut/modules.d/30ignition/ignition";
/// The program that writes SELinux labels, replaced by a stub.
const LABELS: &str = "usr/sbin/setfiles";
/// The file that the config writes.
const FILE: &str = "etc/from-user-data";

/// Every platform of Debian's Ignition that fetches from an HTTP server we implement. Nutanix, KubeVirt and the
/// others read a disk.
const PLATFORMS: [&str; 9] =
    ["aliyun", "aws", "azure", "cloudstack", "digitalocean", "exoscale", "gcp", "openstack", "vultr"];

/// A config that writes a file.
fn config() -> String {
    json!({
        "ignition": {"version": "3.3.0"},
        "storage": {"files": [{"path": format!("/{FILE}"), "contents": {"source": "data:,applied"}}]},
    })
    .to_string()
}

/// Runs Ignition for each platform; returns the platforms whose result differs from `expected`.
fn deviations(platforms: &[&str], expected: Option<&str>, change: impl FnOnce(&mut Value)) -> Option<String> {
    let packages = Packages::or_skip(SUITE, &[ESSENTIAL, "ignition"], With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    std::os::unix::fs::symlink("/bin/true", root.path(LABELS)).expect("a link");
    let node = Node::new(change);
    let _agent = node.agent();
    let (path, lease) = node.lease();
    root.write(&path, lease).expect("a lease");
    let mut deviations = String::new();
    for platform in platforms {
        match provision(&root, &node, platform) {
            Ok(found) if found.as_deref() == expected => {}
            Ok(found) => writeln!(deviations, "{platform}: {found:?}").expect("text has room"),
            Err(error) => writeln!(deviations, "{platform}: {error:#}").expect("text has room"),
        }
    }
    Some(deviations)
}

/// Fetches a config and applies it to a tree of its own; returns the content of the config's file.
fn provision(root: &Root, node: &Node, platform: &str) -> anyhow::Result<Option<String>> {
    let tree = format!("sysroot-{platform}");
    // Debian's build expects a tree with SELinux labels.
    root.write(&format!("{tree}/etc/selinux/config"), "SELINUXTYPE=targeted\n")?;
    let mut output = String::new();
    for stage in ["fetch", "files"] {
        let words = [
            PROGRAM,
            &format!("-platform={platform}"),
            &format!("-stage={stage}"),
            &format!("-root=/{tree}"),
            &format!("-config-cache=/run/{platform}.json"),
            &format!("-state-file=/run/{platform}.state"),
            &format!("-fetch-timeout={}s", PATIENCE_SECONDS / 2),
            "-log-to-stdout",
        ];
        output += &root.run(node.guest.ns(), &words, PATIENCE_SECONDS)?;
    }
    anyhow::ensure!(!output.contains("attempt #2"), "Ignition repeated a request:\n{output}");
    Ok(root.read(&format!("{tree}/{FILE}")).ok())
}

#[test]
fn ignition_applies_the_user_data_of_every_shared_cloud() {
    let change = |record: &mut Value| record["user_data"] = json!({"text": config()});
    let Some(deviations) = deviations(&PLATFORMS, Some("applied"), change) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn ignition_gets_its_config_where_tokens_are_required() {
    let change = |record: &mut Value| {
        record["user_data"] = json!({"text": config()});
        record["serve"] = json!({"imdsv2": "required"});
    };
    let Some(deviations) = deviations(&["aws"], Some("applied"), change) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}

#[test]
fn ignition_continues_at_once_without_user_data() {
    // Azure's provider waits for a disk without limit if there is no user-data.
    let platforms: Vec<_> = PLATFORMS.into_iter().filter(|platform| *platform != "azure").collect();
    let change = |record: &mut Value| drop(record.as_object_mut().expect("a mapping").remove("user_data"));
    let Some(deviations) = deviations(&platforms, None, change) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}
