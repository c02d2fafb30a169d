//! What a guest's firmware shows so that cloud-init finds a dialect, and what a boot under it must come to.

use super::subject::Subject;

/// The seed as the firmware names it, and as policy, webhook and manual have it. Without `dsmode` Debian 12's cloud-init
/// (22.4) throws away what it fetched, and later versions call the older name `nocloud-net` deprecated.
pub(super) const SEED: &str = "ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/";

/// A dialect that Debian's cloud-init finds by SMBIOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dialect {
    /// The seed, fetched once the guest's own network is up
    #[value(name = "nocloud")]
    NoCloud,
    /// OpenStack's documents and the EC2 tree beside them, fetched before the guest has a network
    #[value(name = "openstack")]
    OpenStack,
    /// AWS's tree behind a session token, fetched before the guest has a network
    #[value(name = "ec2")]
    Ec2,
}

/// What holds after a boot that found its dialect, besides what the record says.
#[derive(Debug)]
pub(super) struct Expected {
    /// How the name of cloud-init's class begins.
    pub(super) datasource: &'static str,
    /// What `cloud-id` says.
    pub(super) cloud_id: &'static str,
    /// Whether the NIC is configured as the dialect says, or by cloud-init's own fallback, which is DHCP.
    pub(super) network: NetworkSource,
    /// Requests that are made, by method and target.
    pub(super) asked: &'static [&'static str],
    /// Of those, what cloud-init asks twice by itself; anything else asked again is a retry.
    pub(super) twice: &'static [&'static str],
    /// The one whose answer is a token, which is not to leave the guest.
    pub(super) token: Option<&'static str>,
}

/// Where cloud-init has the network configuration from, in the word of its log (`stages.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NetworkSource {
    /// DHCP on the first NIC, for want of anything better.
    Fallback,
    /// The datasource.
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

/// 22.4 does not ask a seed on the web for network-config.
const NOCLOUD: Expected = Expected {
    datasource: "DataSourceNoCloud",
    cloud_id: "nocloud",
    network: NetworkSource::Fallback,
    asked: &["GET /v1/meta-data", "GET /v1/user-data", "GET /v1/vendor-data"],
    twice: &[],
    token: None,
};

/// `/openstack` shows that the service is there, and is then read for its versions.
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

/// `instance-id` shows that the version is there, and is a leaf of the tree.
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
    /// As the command line and the record name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NoCloud => "nocloud",
            Self::OpenStack => "openstack",
            Self::Ec2 => "ec2",
        }
    }

    /// What a boot under it must come to.
    pub(super) fn expected(self) -> &'static Expected {
        match self {
            Self::NoCloud => &NOCLOUD,
            Self::OpenStack => &OPENSTACK,
            Self::Ec2 => &EC2,
        }
    }

    /// QEMU's `-smbios` words, one identity and no other.
    ///
    /// EC2: `ds-identify` and `DataSourceEc2.py` (22.4) want the serial equal to the UUID, both beginning
    /// `ec2`, as on AWS's own machines; systemd looks at the vendor of the firmware.
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
    fn what_is_special_among_the_requests_is_one_of_them() {
        for dialect in Dialect::value_variants() {
            let expected = dialect.expected();
            assert!(expected.twice.iter().all(|again| expected.asked.contains(again)), "{dialect:?}");
            assert!(expected.token.iter().all(|token| expected.asked.contains(token)), "{dialect:?}");
        }
    }
}
