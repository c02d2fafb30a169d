//! Ignition fetches its config as the user-data of every cloud it shares with us, and applies it.

use crate::node::{Node, SUITE};
use serde_json::{Value, json};
use std::fmt::Write as _;
use support::packages::{ESSENTIAL, Packages, With};
use support::root::Root;

/// For one stage; Ignition itself gives up a config after half of it.
const PATIENCE_SECONDS: u32 = 40;
/// Where Debian puts the program.
const PROGRAM: &str = "/usr/lib/dracut/modules.d/30ignition/ignition";
/// What would write labels of SELinux.
const LABELS: &str = "usr/sbin/setfiles";
/// What the config makes it write.
const FILE: &str = "etc/from-user-data";

/// Every platform whose server we are, in Debian's version. Nutanix, KubeVirt and the rest read a disk.
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

/// Runs Ignition for each of these platforms and compares what it did with `expected`; what differs.
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
        match provisioned(&root, &node, platform) {
            Ok(found) if found.as_deref() == expected => {}
            Ok(found) => writeln!(deviations, "{platform}: {found:?}").expect("text has room"),
            Err(error) => writeln!(deviations, "{platform}: {error:#}").expect("text has room"),
        }
    }
    Some(deviations)
}

/// Fetches a config and applies it to a tree of its own; what the config's file has in it then.
fn provisioned(root: &Root, node: &Node, platform: &str) -> anyhow::Result<Option<String>> {
    let tree = format!("sysroot-{platform}");
    // Debian's is built for trees with labels.
    root.write(&format!("{tree}/etc/selinux/config"), "SELINUXTYPE=targeted\n")?;
    let mut said = String::new();
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
        said += &root.run(node.guest.ns(), &words, PATIENCE_SECONDS)?;
    }
    anyhow::ensure!(!said.contains("attempt #2"), "it had to ask again:\n{said}");
    Ok(root.read(&format!("{tree}/{FILE}")).ok())
}

#[test]
fn ignition_applies_the_user_data_of_every_cloud_it_shares() {
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
fn ignition_goes_on_without_user_data_at_once() {
    // Azure's looks for a disk then, for as long as it takes.
    let platforms: Vec<_> = PLATFORMS.into_iter().filter(|platform| *platform != "azure").collect();
    let change = |record: &mut Value| drop(record.as_object_mut().expect("a mapping").remove("user_data"));
    let Some(deviations) = deviations(&platforms, None, change) else { return };
    assert!(deviations.is_empty(), "{deviations}");
}
