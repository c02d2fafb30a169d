//! `serve`: how a VM's record is served.

use serde::{Deserialize, Serialize};

use super::values::{HopLimit, UrlPath};

/// `serve.limits.user_data` when it is not set, in octets.
pub const USER_DATA_DEFAULT: u32 = 64 << 10;
/// The most `serve.limits.user_data` may be, in octets.
pub const USER_DATA_MAX: u32 = 1 << 20;

/// Defines an enum of names, in the order the record's reference lists them.
macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
        #[expect(missing_docs, reason = "each variant is the name it is written as")]
        pub enum $name {
            $(#[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }
    };
}

names!(
    /// The dialects a record may name.
    Dialect {
        NoCloud = "nocloud",
        Kubevirt = "kubevirt",
        OpenStack = "openstack",
        Ec2 = "ec2",
        Gce = "gce",
        Azure = "azure",
        DigitalOcean = "digitalocean",
        UpCloud = "upcloud",
        Hetzner = "hetzner",
        Vultr = "vultr",
        Oracle = "oracle",
        Akamai = "akamai",
        Nwcs = "nwcs",
        CloudCix = "cloudcix",
        CloudStack = "cloudstack",
        Exoscale = "exoscale",
        AliYun = "aliyun",
        Scaleway = "scaleway",
        Maas = "maas",
        Eve = "eve",
    }
);

names!(
    /// What provisioning stamps into SMBIOS; HTTP does not look at it.
    Smbios {
        NoCloud = "nocloud",
        NoCloudNet = "nocloud-net",
        OpenStack = "openstack",
        Ec2 = "ec2",
        AliYun = "aliyun",
        Gce = "gce",
        Azure = "azure",
        DigitalOcean = "digitalocean",
        UpCloud = "upcloud",
        Hetzner = "hetzner",
        Vultr = "vultr",
        Scaleway = "scaleway",
        Exoscale = "exoscale",
        CloudStack = "cloudstack",
        Oracle = "oracle",
        Akamai = "akamai",
        CloudCix = "cloudcix",
        Nwcs = "nwcs",
    }
);

/// `serve`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Serve {
    /// Which dialects; all when not set. Paths of the others are 404.
    pub dialects: Option<Vec<Dialect>>,
    /// The SMBIOS identity.
    pub smbios: Smbios,
    /// Who owns the dated tree.
    pub date_tree: DateTree,
    /// Whether the dated tree needs a token.
    pub imdsv2: Imdsv2,
    /// Whether IAM credentials may go without a token while `imdsv2` is optional.
    pub imdsv1_credentials: bool,
    /// TTL of packets that carry a token.
    pub hop_limit: HopLimit,
    /// Status of NoCloud documents that do not exist.
    pub absent_seed: AbsentSeed,
    /// Makes `/` GCE's for every request, not only for those with GCE's header field.
    pub gce_root: bool,
    /// Adds `network-interfaces` to NoCloud's meta-data, for cloud-init before 24.3.
    pub legacy_eni: bool,
    /// Oracle's older tree.
    pub opc_v1: Switch,
    /// Where MAAS is served.
    pub maas_path: UrlPath,
    /// Limits.
    pub limits: ServeLimits,
}

impl Default for Serve {
    fn default() -> Self {
        use super::values::Text as _;
        Self {
            dialects: None,
            smbios: Smbios::NoCloud,
            date_tree: DateTree::Ec2,
            imdsv2: Imdsv2::Optional,
            imdsv1_credentials: false,
            hop_limit: HopLimit::ONE,
            absent_seed: AbsentSeed::NoContent,
            gce_root: false,
            legacy_eni: false,
            opc_v1: Switch::On,
            maas_path: UrlPath::read("/MAAS/metadata").expect("the default is a path"),
            limits: ServeLimits::default(),
        }
    }
}

impl Serve {
    /// True when the dialect is served.
    #[must_use]
    pub fn serves(&self, dialect: Dialect) -> bool {
        self.dialects.as_ref().is_none_or(|listed| listed.contains(&dialect))
    }
}

/// `serve.date_tree`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DateTree {
    /// EC2.
    Ec2,
    /// CloudStack and Exoscale.
    CloudStack,
}

/// `serve.imdsv2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Imdsv2 {
    /// There are no tokens.
    Off,
    /// Tokens are made, and not needed.
    Optional,
    /// Nothing without a token.
    Required,
}

/// A switch written `on` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// `serve.absent_seed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentSeed {
    /// 204: the only answer that costs no client any time.
    NoContent,
    /// 404: costs cloud-init 10 s a document and for user-data the boot; for compatibility tests.
    NotFound,
}

impl Serialize for AbsentSeed {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u16(match self {
            Self::NoContent => 204,
            Self::NotFound => 404,
        })
    }
}

impl<'de> Deserialize<'de> for AbsentSeed {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Code;
        impl serde::de::Visitor<'_> for Code {
            type Value = AbsentSeed;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("204 or 404")
            }
            fn visit_u64<E: serde::de::Error>(self, found: u64) -> Result<AbsentSeed, E> {
                match found {
                    204 => Ok(AbsentSeed::NoContent),
                    404 => Ok(AbsentSeed::NotFound),
                    _ => Err(E::custom(format_args!("expected 204 or 404, found {found}"))),
                }
            }
        }
        deserializer.deserialize_u64(Code)
    }
}

/// `serve.limits`: what one VM may take, all its NICs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct ServeLimits {
    /// Requests at once.
    pub burst: u32,
    /// Requests per second after that.
    pub rps: u32,
    /// Connections at once; one NIC has 128 at most.
    pub conns: u32,
    /// User-data and vendor-data in octets, [`USER_DATA_MAX`] at most.
    pub user_data: u32,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { burst: 400, rps: 100, conns: 128, user_data: USER_DATA_DEFAULT }
    }
}
