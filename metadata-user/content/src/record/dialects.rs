//! The dialects a record can list, and the SMBIOS stamps provisioning can write. Both come from the table of
//! dialects, `each_dialect!`.

use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

use super::values::{HopLimit, UrlPath};

/// The form in which a dialect carries a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadEncoding {
    /// The dialect does not carry the payload.
    Absent,
    /// As bytes at a separate path.
    Bytes,
    /// As text at a separate path: UTF-8 unchanged, gzip in a MIME part, other bytes as empty text.
    Text,
    /// As a string in a JSON or YAML document, in the form of [`TextForm`](Self::Text).
    InDocument,
    /// As base64 of the bytes.
    Base64,
    /// As base64 of the form of [`TextForm`](Self::Text).
    Base64Text,
    /// In a JSON document, as a string if it is UTF-8 and as base64 otherwise.
    InDocumentOrBase64,
}

impl PayloadEncoding {
    /// Returns whether bytes that are neither UTF-8 nor gzip are lost.
    #[must_use]
    pub fn is_text_only(self) -> bool {
        matches!(self, Self::Text | Self::InDocument | Self::Base64Text)
    }
}

/// Defines [`Dialect`] from the rows of `each_dialect!`.
macro_rules! dialects {
    ($($module:ident: $(
        $variant:ident $name:literal $title:literal $user_data:ident $vendor_data:ident $stamps:tt
    ),+;)+) => {
        /// `serve.dialects`: the dialects a record can list.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
        #[expect(missing_docs, reason = "each variant is a dialect's name")]
        pub enum Dialect {
            $($(#[serde(rename = $name)] $variant,)+)+
        }

        impl Dialect {
            /// All dialects, in the order of the table.
            pub const ALL: &[Self] = &[$($(Self::$variant),+),+];

            /// Returns the name as records spell it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($(Self::$variant => $name,)+)+
                }
            }

            /// Returns the name as the cloud spells it.
            #[must_use]
            pub fn title(self) -> &'static str {
                match self {
                    $($(Self::$variant => $title,)+)+
                }
            }

            /// Returns the form in which the dialect carries user-data.
            #[must_use]
            pub fn user_data(self) -> PayloadEncoding {
                match self {
                    $($(Self::$variant => PayloadEncoding::$user_data,)+)+
                }
            }

            /// Returns the form in which the dialect carries vendor-data.
            #[must_use]
            pub fn vendor_data(self) -> PayloadEncoding {
                match self {
                    $($(Self::$variant => PayloadEncoding::$vendor_data,)+)+
                }
            }

            /// Returns the values of `serve.smbios` with which guests use this dialect.
            fn stamps(self) -> &'static [&'static str] {
                match self {
                    $($(Self::$variant => &$stamps,)+)+
                }
            }
        }
    };
}

each_dialect!(dialects);

/// A set of dialects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialects(u32);

const _: () = assert!(Dialect::ALL.len() <= u32::BITS as usize, "each dialect has a bit");

impl Dialects {
    /// No dialect.
    pub const NONE: Self = Self(0);

    /// Every dialect.
    pub const ALL: Self = Self(u32::MAX >> (u32::BITS - Dialect::ALL.len() as u32));

    /// Returns the set as a number, for [`from_bits`](Self::from_bits).
    #[must_use]
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Returns the set with this number.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns whether the set has no dialect.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// Returns whether the set contains the dialect.
    #[must_use]
    pub fn contains(self, dialect: Dialect) -> bool {
        self.0 & 1 << dialect as u32 != 0
    }

    /// Returns the dialects of either set.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the dialects of both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the dialects that the other set does not have.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the dialects, in the order of the table.
    pub fn iter(self) -> impl Iterator<Item = Dialect> {
        Dialect::ALL.iter().copied().filter(move |dialect| self.contains(*dialect))
    }
}

impl FromIterator<Dialect> for Dialects {
    fn from_iter<T: IntoIterator<Item = Dialect>>(dialects: T) -> Self {
        Self(dialects.into_iter().fold(0, |bits, dialect| bits | 1 << dialect as u32))
    }
}

static STAMPS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| Dialect::ALL.iter().flat_map(|dialect| dialect.stamps()).copied().collect());

/// `serve.smbios`: the datasource that provisioning writes into SMBIOS. It does not affect HTTP answers, but its
/// dialect is rendered in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Smbios(&'static str);

impl Smbios {
    /// The default.
    pub const NO_CLOUD: Self = Self("nocloud");

    /// Returns all values, in the order of the table of dialects.
    #[must_use]
    pub fn all() -> &'static [&'static str] {
        &STAMPS
    }

    /// Returns the value as records spell it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Returns the dialect that guests with this stamp use.
    #[must_use]
    pub fn dialect(self) -> Option<Dialect> {
        Dialect::ALL.iter().copied().find(|dialect| dialect.stamps().contains(&self.0))
    }
}

impl Serialize for Smbios {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for Smbios {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let found = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let known = Self::all().iter().find(|known| **known == found);
        known.map(|known| Self(known)).ok_or_else(|| D::Error::unknown_variant(&found, Self::all()))
    }
}

// `serve`: which dialects serve a VM's record, and how.

/// Default of `serve.limits.user_data`, in bytes.
pub const USER_DATA_DEFAULT: u32 = 64 << 10;
/// Upper bound of `serve.limits.user_data`, in bytes.
pub const USER_DATA_MAX: u32 = 1 << 20;

/// `serve`: how the record is served.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct ServeSettings {
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
    pub opc_v1: OnOff,
    /// URL path of the MAAS dialect; `/MAAS/metadata` by default.
    pub maas_path: UrlPath,
    /// Rate, connection and size limits of the VM.
    pub limits: ServeLimits,
}

impl Default for ServeSettings {
    fn default() -> Self {
        use super::values::TextForm as _;
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
            opc_v1: OnOff::On,
            maas_path: UrlPath::read("/MAAS/metadata").expect("the default is a path"),
            limits: ServeLimits::default(),
        }
    }
}

impl ServeSettings {
    /// Returns whether the record serves the dialect.
    #[must_use]
    pub fn serves(&self, dialect: Dialect) -> bool {
        self.dialects.as_ref().is_none_or(|listed| listed.contains(&dialect))
    }

    /// Returns whether the record serves user-data in a dialect to requests without a header field, even if it requires
    /// tokens. `signs_maas` is true for a record with credentials of MAAS, whose requests are then signed.
    pub(crate) fn opens_user_data(&self, dialect: Dialect, signs_maas: bool) -> bool {
        let is_open = match dialect {
            Dialect::NoCloud
            | Dialect::OpenStack
            | Dialect::DigitalOcean
            | Dialect::UpCloud
            | Dialect::Hetzner
            | Dialect::Vultr
            | Dialect::Nwcs
            | Dialect::Bigstep
            | Dialect::CloudCix
            | Dialect::Eve => true,
            Dialect::CloudStack | Dialect::Exoscale => self.date_tree == DateTree::CloudStack,
            // Its older tree needs no header field.
            Dialect::Oracle => self.opc_v1 == OnOff::On,
            Dialect::Maas => !signs_maas,
            Dialect::Kubevirt
            | Dialect::Ec2
            | Dialect::AliYun
            | Dialect::Gce
            | Dialect::Azure
            | Dialect::Akamai
            | Dialect::Scaleway => false,
        };
        is_open && self.serves(dialect)
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
pub enum OnOff {
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
    /// Requests that may arrive at once, 1 to [`ServeLimits::REQUESTS_MOST`]; 400 by default.
    pub burst: u32,
    /// Sustained requests per second, 1 to [`ServeLimits::REQUESTS_MOST`]; 100 by default.
    pub rps: u32,
    /// Concurrent connections, 1 to [`ServeLimits::CONNECTIONS_MOST`]; 128 by default. Each NIC has at most 128.
    pub conns: u32,
    /// Size of user-data and of each vendor-data in bytes, at most 1048576; 65536 by default.
    pub user_data: u32,
}

impl ServeLimits {
    /// Largest value of `burst` and `rps`.
    pub const REQUESTS_MOST: u32 = 1_000_000;
    /// Largest value of `conns`.
    pub const CONNECTIONS_MOST: u32 = 65_535;
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { burst: 400, rps: 100, conns: 128, user_data: USER_DATA_DEFAULT }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::{Dialect, Dialects, Smbios};

    #[test]
    fn a_set_contains_what_it_was_made_of_and_survives_as_a_number() {
        let (clouds, other): (Dialects, Dialects) =
            ([Dialect::Eve, Dialect::Ec2].into_iter().collect(), [Dialect::Ec2].into_iter().collect());
        assert_eq!(clouds.iter().collect::<Vec<_>>(), [Dialect::Ec2, Dialect::Eve]);
        assert_eq!(Dialects::from_bits(clouds.bits()), clouds);
        assert_eq!((clouds.and(other), clouds.or(other)), (other, clouds));
        assert!(!clouds.without(other).contains(Dialect::Ec2) && clouds.contains(Dialect::Ec2));
        assert!(other.without(clouds).is_empty());
        let all: Dialects = Dialect::ALL.iter().copied().collect();
        assert_eq!(all.iter().collect::<Vec<_>>(), Dialect::ALL);
    }

    #[test]
    fn every_name_in_the_table_is_unique() {
        let unique = |names: Vec<&str>| names.iter().collect::<HashSet<_>>().len() == names.len();
        assert!(unique(Dialect::ALL.iter().map(|dialect| dialect.as_str()).collect()));
        assert!(unique(Dialect::ALL.iter().map(|dialect| dialect.title()).collect()));
        assert!(unique(Smbios::all().to_vec()));
    }

    #[test]
    fn smbios_reads_the_stamps_of_the_table_and_no_other_text() {
        for known in Smbios::all() {
            let read: Smbios = serde_json::from_value((*known).into()).expect("a stamp of the table");
            assert_eq!(read.as_str(), *known);
            assert!(read.dialect().is_some_and(|dialect| known.starts_with(dialect.as_str())), "{known}");
        }
        assert_eq!(serde_json::to_value(Smbios::NO_CLOUD).expect("text"), "nocloud");
        let refused = serde_json::from_value::<Smbios>("kubevirt".into()).expect_err("kubevirt has no stamp");
        assert!(
            refused.to_string().starts_with("unknown variant `kubevirt`, expected one of `nocloud`"),
            "{refused}"
        );
    }
}
