//! amazon-ec2-net-utils sets up policy routes from the record: traffic from each NIC leaves through that NIC.

use super::node::{Node, SECOND_MAC};
use serde_json::json;
use support::guest::NIC;
use support::packages::{ESSENTIAL, Packages, With};
use support::root::Root;

/// Bound on one NIC; the program itself waits 30 s for a silent server.
const PATIENCE_SECONDS: u32 = 60;
/// Programs that need a running systemd, replaced by stubs.
const OF_SYSTEMD: [&str; 3] =
    ["usr/bin/networkctl", "usr/bin/logger", "usr/lib/systemd/systemd-networkd-wait-online"];
const NETWORKS: &str = "run/systemd/network";

fn root(suite: &str) -> Option<Root> {
    let names = [ESSENTIAL, "amazon-ec2-net-utils"];
    let packages = Packages::or_skip(suite, &names, With::Dependencies)?;
    let root = Root::copy_of(packages.root()).expect("a root");
    for program in OF_SYSTEMD {
        std::fs::remove_file(root.path(program)).unwrap_or_default();
        std::os::unix::fs::symlink("/bin/true", root.path(program)).expect("a link");
    }
    Some(root)
}

/// The values of a key in systemd's files, in order.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

fn assert_traffic_leaves_through_its_own_nic(suite: &str) {
    let Some(root) = root(suite) else { return };
    let node = Node::new(|record| {
        record["serve"] = json!({"imdsv2": "required"});
        record["network"]["nics"][1]["addresses"] = json!([
            {"method": "static", "address": "192.168.7.5/24"},
            {"method": "static", "address": "192.168.7.6/24"},
            {"method": "static", "address": "2001:db8:1::5/64"},
        ]);
    });
    let ns = node.guest.ns();
    ns.ip(&format!("link add eth1 address {SECOND_MAC} type veth peer name wire")).expect("a second NIC");
    ns.sysctl("ipv6/conf/eth1/disable_ipv6", "0").expect("IPv6");
    ns.ip_batch(
        "link set eth1 up\naddr add 192.168.7.5/24 dev eth1\naddr add 2001:db8:1::5/64 dev eth1 nodad\n",
    )
    .expect("addresses");
    let _agent = node.agent();
    let mut output = String::new();
    for nic in [NIC, "eth1"] {
        output += &root.run(ns, &["setup-policy-routes", nic, "start"], PATIENCE_SECONDS).expect("a run");
    }
    let read = |name: &str| root.read(&format!("{NETWORKS}/70-{name}")).unwrap_or_default();
    let (first, second) = (read("eth0.network.d/eni.conf"), read("eth1.network.d/eni.conf"));
    let [v4, v6, alias] =
        ["policy_4", "policy_6", "alias"].map(|name| read(&format!("eth1.network.d/ec2net_{name}.conf")));
    let mac = node.guest.identity().mac.to_string();
    assert_eq!(values(&first, "MACAddress"), [mac.as_str()], "{output}");
    assert_eq!(values(&second, "MACAddress"), [SECOND_MAC], "{output}");
    assert_eq!(values(&v4, "From"), ["192.168.7.5", "192.168.7.6"], "{output}");
    assert_eq!(values(&v6, "From"), ["2001:db8:1::5"], "{output}");
    assert_eq!(values(&alias, "Address"), ["192.168.7.6/32"], "{output}");
    for text in [&v4, &v6] {
        assert!(
            values(text, "Table").iter().all(|table| *table == "10001"),
            "tables of the second NIC: {text}"
        );
    }
    assert!(values(&second, "Table").contains(&"10001"), "{second}");
    let link = ns.ip("link show dev eth1").expect("a NIC");
    assert!(link.contains("altname eni-") && link.contains("altname device-number-1"), "{link}");
}

#[test]
fn net_utils_2_3_routes_each_nics_traffic_out_of_that_nic() {
    assert_traffic_leaves_through_its_own_nic("bookworm");
}

#[test]
fn net_utils_2_4_routes_each_nics_traffic_out_of_that_nic() {
    assert_traffic_leaves_through_its_own_nic("trixie");
}
