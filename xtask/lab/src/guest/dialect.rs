//! The SMBIOS values by which cloud-init finds a dialect, and the expected results of a boot with them.

use super::subject::Subject;

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
    use super::{Dialect, Subject};
    use clap::ValueEnum as _;

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
