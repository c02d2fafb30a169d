//! A guest with a modified record, the agent that serves it, and the environment of guest agents.

use serde_json::{Value, json};
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, NIC, Spec};
use support::host::Host;
use support::record::{Identity, replace};

/// The Debian suite of the guest agents.
pub(super) const SUITE: &str = "bookworm";
/// Address of the guest's NIC.
pub(super) const LOCAL: &str = "10.0.16.7";
/// Public address, translated to [`LOCAL`].
pub(super) const PUBLIC: &str = "203.0.113.7";
/// IPv6 address of the guest.
pub(super) const V6: &str = "2001:db8::7";
/// Address of the second NIC.
pub(super) const PRIVATE: &str = "192.168.7.5";
/// Numeric instance id.
pub(super) const NUMBER: &str = "12345";
/// EC2 instance id.
pub(super) const EC2_ID: &str = "i-0f5e8a1b2c3d4e5f6";
/// MAC of the second NIC.
pub(super) const SECOND_MAC: &str = "52:54:00:6a:00:07";

/// A guest, its node and its record.
pub(super) struct Node {
    records: tempfile::TempDir,
    pub(super) guest: Guest,
    host: Host,
    record: Value,
}

impl Node {
    /// Boots a guest whose record has every field that guest agents read, modified by the test.
    pub(super) fn new(change: impl FnOnce(&mut Value)) -> Self {
        let identity = Identity::of(7);
        let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
        record["vm"]["ec2_id"] = EC2_ID.into();
        record["vm"]["numeric_id"] = NUMBER.parse::<u64>().expect("a number").into();
        record["instance_type"] = "std.small".into();
        record["labels"] = json!(["web"]);
        record["network"]["dns"] = json!(["10.0.2.3"]);
        let nics = record["network"]["nics"].as_array_mut().expect("a list");
        nics[0]["addresses"][0]["public"] = PUBLIC.into();
        let v6 = json!({"method": "static", "address": format!("{V6}/64"), "gateway": "fe80::1"});
        nics[0]["addresses"].as_array_mut().expect("a list").push(v6);
        nics.push(json!({
            "id": "n1",
            "name": "eth1",
            "mac": SECOND_MAC,
            "role": "private",
            "network_id": "inner",
            "addresses": [{"method": "static", "address": format!("{PRIVATE}/24")}],
        }));
        change(&mut record);
        let records = tempfile::tempdir().expect("a directory");
        let host = Host::new().expect("a node");
        let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
        let node = Self { records, guest, host, record };
        node.publish();
        node
    }

    /// Starts xdp-imds.
    pub(super) fn agent(&self) -> Agent<'_> {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        Agent::start(self.host.ns(), self.records.path(), &[port]).expect("an agent")
    }

    /// Publishes a changed record with the next generation.
    pub(super) fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut record = self.record.clone();
        let generation = record["generation"].as_u64().expect("a number");
        record["generation"] = (generation + 1).into();
        change(&mut record);
        self.write(&record);
    }

    fn publish(&self) {
        self.write(&self.record);
    }

    fn write(&self, record: &Value) {
        let path = self.guest.identity().path(self.records.path());
        replace(&path, &record.to_string()).expect("a record file");
    }

    /// Path (without the leading `/`) and content of the NIC's lease as systemd-networkd stores it. Guest agents
    /// find the servers of CloudStack and Azure in it.
    pub(super) fn lease(&self) -> (String, &'static str) {
        let links = self.guest.ns().links().expect("links");
        let nic = links.iter().find(|link| link["ifname"] == NIC).expect("a NIC");
        let path = format!("run/systemd/netif/leases/{}", nic["ifindex"]);
        (path, "SERVER_ADDRESS=169.254.169.254\nOPTION_245=a83f8110\n")
    }
}
