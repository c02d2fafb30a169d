//! `serve`: which dialects serve a VM's record, and how.

use serde::{Deserialize, Serialize};

use super::dialects::{Dialect, Smbios};
use super::values::{HopLimit, UrlPath};

/// Default of `serve.limits.user_data`, in octets.
pub const USER_DATA_DEFAULT: u32 = 64 << 10;
/// Upper bound of `serve.limits.user_data`, in octets.
pub const USER_DATA_MAX: u32 = 1 << 20;

/// `serve`: how the record is served.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Serve {
    /// Dialects to serve; all by default. Paths of other dialects return 404.
    pub dialects: Option<Vec<Dialect>>,
    /// Datasource that provisioning writes into SMBIOS; `nocloud` by default. It is rendered in advance.
    pub smbios: Smbios,
    /// Owner of the tree below `/latest` and `/<date>`: `ec2` or `cloudstack`; `ec2` by default.
    pub date_tree: DateTree,
    /// IMDSv2 tokens on EC2 and AliYun: `off`, `optional` or `required`; `optional` by default.
    pub imdsv2: Imdsv2,
    /// Serves IAM credentials without a token unless `imdsv2` is `required`; false by default.
    pub imdsv1_credentials: bool,
    /// TTL or hop limit of packets that carry a token, 1 to 64; 1 by default.
    pub hop_limit: HopLimit,
    /// Status of absent NoCloud documents: 204 or 404; 204 by default.
    pub absent_seed: AbsentSeed,
    /// Serves GCE's `/` to every request. By default (false), only requests with GCE's header field get it.
    pub gce_root: bool,
    /// Adds `network-interfaces` to NoCloud's meta-data, for cloud-init before 24.3; false by default.
    pub legacy_eni: bool,
    /// Oracle's older tree, `/opc/v1`: `on` or `off`; `on` by default.
    pub opc_v1: Switch,
    /// URL path of the MAAS dialect; `/MAAS/metadata` by default.
    pub maas_path: UrlPath,
    /// Rate, connection and size limits of the VM.
    pub limits: ServeLimits,
}

impl Default for Serve {
    fn default() -> Self {
        use super::values::Text as _;
        Self {
            dialects: None,
            smbios: Smbios::NO_CLOUD,
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
    /// Returns whether the record serves the dialect.
    #[must_use]
    pub fn serves(&self, dialect: Dialect) -> bool {
        self.dialects.as_ref().is_none_or(|listed| listed.contains(&dialect))
    }
}

/// `serve.date_tree`: owner of the tree below `/latest` and `/<date>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DateTree {
    /// EC2 serves the tree.
    Ec2,
    /// CloudStack and Exoscale serve the tree.
    CloudStack,
}

/// `serve.imdsv2`: whether a request needs a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Imdsv2 {
    /// The token path does not exist.
    Off,
    /// The agent issues tokens; requests need none.
    Optional,
    /// Every request needs a token.
    Required,
}

/// A setting with the values `on` and `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// Enabled.
    On,
    /// Disabled.
    Off,
}

/// `serve.absent_seed`: status of absent NoCloud documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentSeed {
    /// 204: no client retries it.
    NoContent,
    /// 404, for compatibility tests: cloud-init retries it for 10 s per document, and fails the boot without user-data.
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

/// `serve.limits`: limits of one VM, shared by its NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct ServeLimits {
    /// Requests that may arrive at once, 1 or more; 400 by default.
    pub burst: u32,
    /// Sustained requests per second, 1 or more; 100 by default.
    pub rps: u32,
    /// Concurrent connections, 1 or more; 128 by default. Each NIC has at most 128.
    pub conns: u32,
    /// Size of user-data and of each vendor-data in octets, at most 1048576; 65536 by default.
    pub user_data: u32,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { burst: 400, rps: 100, conns: 128, user_data: USER_DATA_DEFAULT }
    }
}
