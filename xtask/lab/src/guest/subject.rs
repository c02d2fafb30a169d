//! The values of the guest's record. The guest must have them after its boot.

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

// The SMBIOS values by which cloud-init finds a dialect, and the expected results of a boot with them.

/// The seed in SMBIOS, identical to the one in policy, webhook and manual. Without `dsmode`, Debian 12's cloud-init
/// (22.4) discards the fetched documents. Later versions call the older name `nocloud-net` deprecated.
pub(super) const SEED: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";

/// A dialect that Debian's cloud-init finds by SMBIOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dialect {
    /// The NoCloud seed, fetched once the guest's own network is up
    #[value(name = "nocloud")]
    NoCloud,
    /// OpenStack's documents and its EC2 tree, fetched before the guest has a network
    #[value(name = "openstack")]
    OpenStack,
    /// AWS's tree behind a session token, fetched before the guest has a network
    #[value(name = "ec2")]
    Ec2,
}

/// The expected results of a boot that found its dialect, besides the record's values.
#[derive(Debug)]
pub(super) struct Expected {
    /// The beginning of the name of cloud-init's datasource class.
    pub(super) datasource: &'static str,
    /// The output of `cloud-id`.
    pub(super) cloud_id: &'static str,
    /// The source of the NIC's configuration: the dialect, or cloud-init's own fallback, which is DHCP.
    pub(super) network: NetworkSource,
    /// The requests that cloud-init must make, by method and target.
    pub(super) asked: &'static [&'static str],
    /// Those of `asked` that cloud-init makes twice by itself. Any other repeated request is a retry.
    pub(super) twice: &'static [&'static str],
    /// The request that is answered with a token. The token must not leave the guest.
    pub(super) token: Option<&'static str>,
}

/// The source of cloud-init's network configuration, by the word in its log (`stages.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NetworkSource {
    /// DHCP on the first NIC, which cloud-init uses if no source has a configuration.
    Fallback,
    /// The datasource that cloud-init found.
    Datasource,
}

impl NetworkSource {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Fallback => "fallback",
            Self::Datasource => "ds",
        }
    }
}

/// Version 22.4 does not fetch network-config from a seed on the web.
const NOCLOUD: Expected = Expected {
    datasource: "DataSourceNoCloud",
    cloud_id: "nocloud",
    network: NetworkSource::Fallback,
    asked: &["GET /v1/meta-data", "GET /v1/user-data", "GET /v1/vendor-data"],
    twice: &[],
    token: None,
};

/// cloud-init requests `/openstack` to detect the service, and again to list its versions.
const OPENSTACK: Expected = Expected {
    datasource: "DataSourceOpenStack",
    cloud_id: "openstack",
    network: NetworkSource::Datasource,
    asked: &[
        "GET /openstack",
        "GET /openstack/2018-08-27/meta_data.json",
        "GET /openstack/2018-08-27/user_data",
        "GET /openstack/2018-08-27/vendor_data.json",
        "GET /openstack/2018-08-27/vendor_data2.json",
        "GET /openstack/2018-08-27/network_data.json",
        "GET /latest/meta-data/",
        "GET /latest/meta-data/instance-id",
    ],
    twice: &["GET /openstack"],
    token: None,
};

/// cloud-init requests `instance-id` to detect the version, and again as a leaf of the tree.
const EC2: Expected = Expected {
    datasource: "DataSourceEc2",
    cloud_id: "aws",
    network: NetworkSource::Datasource,
    asked: &[
        "PUT /latest/api/token",
        "GET /2021-03-23/meta-data/instance-id",
        "GET /2021-03-23/user-data",
        "GET /2021-03-23/meta-data/",
        "GET /2021-03-23/dynamic/instance-identity/document",
    ],
    twice: &["GET /2021-03-23/meta-data/instance-id"],
    token: Some("PUT /latest/api/token"),
};

impl Dialect {
    /// Returns the dialect's name on the command line and in records.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NoCloud => "nocloud",
            Self::OpenStack => "openstack",
            Self::Ec2 => "ec2",
        }
    }

    /// Returns the expected results of a boot with this dialect.
    pub(super) fn expected(self) -> &'static Expected {
        match self {
            Self::NoCloud => &NOCLOUD,
            Self::OpenStack => &OPENSTACK,
            Self::Ec2 => &EC2,
        }
    }

    /// Returns the values of QEMU's `-smbios` option. They show one identity and no other.
    ///
    /// For EC2, `ds-identify` and `DataSourceEc2.py` (22.4) expect the serial to equal the UUID, and both to begin with
    /// `ec2`, as on AWS's own machines. systemd uses the vendor of the firmware.
    pub(super) fn smbios(self, subject: &Subject) -> Vec<String> {
        let uuid = subject.uuid;
        match self {
            Self::NoCloud => vec![format!("type=1,uuid={uuid},serial={SEED}")],
            Self::OpenStack => vec![format!(
                "type=1,uuid={uuid},serial={uuid},manufacturer=OpenStack Foundation,product=OpenStack Nova"
            )],
            Self::Ec2 => vec![
                "type=0,vendor=Amazon EC2".to_owned(),
                format!("type=1,uuid={uuid},serial={uuid},manufacturer=Amazon EC2"),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::{Dialect, Subject};

    #[test]
    fn firmware_shows_one_identity_with_the_uuid_of_the_record() {
        let marks = [(Dialect::NoCloud, "ds=nocloud"), (Dialect::OpenStack, "OpenStack Nova")];
        let marks = [&marks[..], &[(Dialect::Ec2, "serial=ec2")]].concat();
        for &dialect in Dialect::value_variants() {
            let subject = Subject::of(dialect);
            let shown = dialect.smbios(&subject).join(" ");
            assert!(shown.contains(&format!("uuid={}", subject.uuid)), "{dialect:?}: {shown}");
            for &(other, mark) in &marks {
                assert_eq!(shown.contains(mark), other == dialect, "{dialect:?}: {shown}");
            }
        }
    }

    #[test]
    fn repeated_and_token_requests_are_among_the_expected_ones() {
        for dialect in Dialect::value_variants() {
            let expected = dialect.expected();
            assert!(expected.twice.iter().all(|again| expected.asked.contains(again)), "{dialect:?}");
            assert!(expected.token.iter().all(|token| expected.asked.contains(token)), "{dialect:?}");
        }
    }
}
