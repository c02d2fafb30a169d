//! A guest whose record the test has changed, the agent that serves it, and the surroundings of an agent in it.

use serde_json::{Value, json};
use support::agent::{Agent, PortArgument};
use support::guest::{Guest, NIC, Spec};
use support::host::Host;
use support::record::{Identity, replace};

/// The suite that agents come from.
pub(super) const SUITE: &str = "bookworm";
/// The address of the guest's NIC.
pub(super) const LOCAL: &str = "10.0.16.7";
/// The address that is translated to it.
pub(super) const PUBLIC: &str = "203.0.113.7";
/// The guest's address of IPv6.
pub(super) const V6: &str = "2001:db8::7";
/// The address of its second NIC.
pub(super) const PRIVATE: &str = "192.168.7.5";
/// Its id where that is a number.
pub(super) const NUMBER: &str = "12345";
/// Its id on EC2.
pub(super) const EC2_ID: &str = "i-0f5e8a1b2c3d4e5f6";
/// The MAC of its second NIC.
pub(super) const SECOND_MAC: &str = "52:54:00:6a:00:07";

/// A guest and what lives as long.
pub(super) struct Node {
    records: tempfile::TempDir,
    pub(super) guest: Guest,
    host: Host,
    record: Value,
}

impl Node {
    /// Boots a guest with a record of all that agents read, changed once more by the test.
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

    /// Starts the agent.
    pub(super) fn agent(&self) -> Agent<'_> {
        let port = PortArgument::new(self.guest.host_tap().name(), self.guest.identity().mac);
        Agent::start(self.host.ns(), self.records.path(), &[port]).expect("an agent")
    }

    /// Publishes the record once more, with changes.
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

    /// The file that systemd-networkd keeps of a NIC's lease, below `/`, and what is in it: agents find the servers
    /// of CloudStack and Azure by DHCP.
    pub(super) fn lease(&self) -> (String, &'static str) {
        let links = self.guest.ns().links().expect("links");
        let nic = links.iter().find(|link| link["ifname"] == NIC).expect("a NIC");
        let path = format!("run/systemd/netif/leases/{}", nic["ifindex"]);
        (path, "SERVER_ADDRESS=169.254.169.254\nOPTION_245=a83f8110\n")
    }
}
