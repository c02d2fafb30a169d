//! The values of the guest's record. The guest must have them after its boot.

use super::dialect::Dialect;
use metadata_common::mac::Mac;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use support::host;

/// The address that the DHCP server assigns.
const LEASE: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// An address that no DHCP server assigns. A guest learns it only from its dialect.
const STATIC: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 20);
/// The file that user-data writes and the guest's report includes.
pub(super) const MARKER: &str = "/run/xdp-imds-user-data";

/// The values of one guest's record.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) dialect: Dialect,
    pub(super) mac: Mac,
    /// The system UUID in SMBIOS.
    pub(super) uuid: &'static str,
    /// The instance id of EC2, where it differs from the UUID.
    pub(super) ec2_id: &'static str,
    pub(super) hostname: &'static str,
    pub(super) ssh_key: &'static str,
    /// The text that user-data writes to [`MARKER`].
    pub(super) marker: &'static str,
    /// The address that the DHCP server assigns.
    pub(super) lease: Ipv4Addr,
}

impl Subject {
    /// Returns the guest for a dialect.
    pub(super) fn of(dialect: Dialect) -> Self {
        Self {
            dialect,
            mac: Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]),
            uuid: match dialect {
                Dialect::NoCloud | Dialect::OpenStack => "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
                // The beginning that AWS uses.
                Dialect::Ec2 => "ec2f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
            },
            ec2_id: "i-0f5e8a1b2c3d4e5f6",
            hostname: "debian-guest",
            ssh_key: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8wUQ0H0m1c3a0nYf1mVYQx0b7m2wq8q0R4T0qX9V1k lab@example",
            marker: "applied",
            lease: LEASE,
        }
    }

    /// Returns the instance id that cloud-init must have after the boot.
    pub(super) fn instance_id(&self) -> &'static str {
        match self.dialect {
            Dialect::NoCloud | Dialect::OpenStack => self.uuid,
            Dialect::Ec2 => self.ec2_id,
        }
    }

    /// Returns the address that the NIC must have after the boot. OpenStack has a static one; EC2 and 22.4's NoCloud
    /// use DHCP.
    pub(super) fn address(&self) -> Ipv4Addr {
        match self.dialect {
            Dialect::NoCloud | Dialect::Ec2 => self.lease,
            Dialect::OpenStack => STATIC,
        }
    }

    /// Returns the record as JSON, which is also YAML.
    pub(super) fn record(&self) -> String {
        let script = format!("echo {} > {MARKER}", self.marker);
        let user_data = format!("#cloud-config\nruncmd:\n- [sh, -c, \"{script}\"]\n");
        let record = json!({
            "schema": "vmrecord/1",
            "generation": 1,
            "vm": {
                "uuid": self.uuid,
                "ec2_id": self.ec2_id,
                "name": self.hostname,
                "project": {"id": "lab", "number": 1, "account": "000000000000"},
            },
            "hostname": {"short": self.hostname, "domain": "lab.internal"},
            "placement": {"region": "local", "zone": "local-a"},
            "ssh_keys": [{"name": "default", "key": self.ssh_key}],
            "user_data": {"text": user_data},
            "metadata": {"role": "guest"},
            "network": {"nics": [{
                "id": "n0",
                "name": "eth0",
                "mac": self.mac.to_string(),
                "mtu": 1500,
                "network_id": "lab",
                "addresses": [self.address_entry()],
            }]},
            // An AWS guest uses tokens in any case. This record also requires them.
            "serve": {"smbios": self.dialect.name(), "imdsv2": self.imdsv2()},
        });
        format!("{record:#}\n")
    }

    pub(super) fn address_entry(&self) -> Value {
        let address = self.address();
        let method = if address == self.lease { "dhcp4" } else { "static" };
        json!({"method": method, "address": format!("{address}/16"), "gateway": host::ADDRESS.to_string()})
    }

    pub(super) fn imdsv2(&self) -> &'static str {
        if self.dialect == Dialect::Ec2 { "required" } else { "optional" }
    }
}
