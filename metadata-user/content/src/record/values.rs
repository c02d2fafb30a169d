//! Values that the parser checks while it reads them, so that an error has the line and column of the value.

use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use metadata_common::mac::Mac;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Maximum length of a one-line value, in characters.
pub const LINE_CHARS: usize = 255;
/// Maximum length of a host name with its domain in bytes, as text without the final dot (RFC 1035 §2.3.4).
pub const FQDN_BYTES: usize = 253;
/// Maximum number of characters of a refused value that an error repeats.
const FOUND_CHARS: usize = 64;

/// A value with a text form.
pub(super) trait TextForm: Sized {
    /// Description of the form, for errors and for the book.
    const EXPECTED: &'static str;
    /// Whether errors must not repeat the value.
    const SECRET: bool = false;
    /// Parses the text form; `None` if it is invalid.
    fn read(text: &str) -> Option<Self>;
}

/// Deserializes a [`TextForm`]. The visitor checks the value, so that the parser adds its place to the error. The
/// parser of YAML would take a plain `null` for a text if it were asked for one at once, and Serde a missing field for
/// `null` if it were asked for an optional value at once.
pub(super) fn text<'de, T: TextForm, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct TextVisitor<T>(PhantomData<T>);
    impl<'de, T: TextForm> Visitor<'de> for TextVisitor<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(T::EXPECTED)
        }
        fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
            deserializer.deserialize_str(self)
        }
        fn visit_none<E: de::Error>(self) -> Result<T, E> {
            Err(E::custom(format_args!("expected {}, found null; quote it if it is the value", T::EXPECTED)))
        }
        fn visit_unit<E: de::Error>(self) -> Result<T, E> {
            self.visit_none()
        }
        fn visit_str<E: de::Error>(self, found: &str) -> Result<T, E> {
            T::read(found).ok_or_else(|| {
                let found =
                    if T::SECRET { "something else".to_owned() } else { format!("`{}`", excerpt(found)) };
                E::custom(format_args!("expected {}, found {found}", T::EXPECTED))
            })
        }
    }
    struct FieldVisitor<T>(PhantomData<T>);
    impl<'de, T: TextForm> Visitor<'de> for FieldVisitor<T> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(T::EXPECTED)
        }
        fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
            deserializer.deserialize_option(TextVisitor(PhantomData))
        }
        fn visit_str<E: de::Error>(self, found: &str) -> Result<T, E> {
            TextVisitor(PhantomData).visit_str(found)
        }
    }
    deserializer.deserialize_newtype_struct("text", FieldVisitor(PhantomData))
}

/// Returns the first 64 characters of a value as one printable line.
pub fn excerpt(found: &str) -> String {
    let mut shown: String = found.chars().take(FOUND_CHARS).flat_map(char::escape_debug).collect();
    if found.chars().nth(FOUND_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

/// Implements `Deserialize` by the [`TextForm`] form.
macro_rules! readable {
    ($($name:ty),+ $(,)?) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::record::values::text(deserializer)
            }
        }
    )+};
}
pub(super) use readable;

/// Implements `Serialize` by `Display`, which gives the form that [`TextForm`] reads.
macro_rules! writable {
    ($($name:ty),+ $(,)?) => {$(
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )+};
}
pub(super) use writable;

/// Defines a checked string.
macro_rules! checked_string {
    ($(#[$doc:meta])* $name:ident, $expected:expr, $read:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Returns the text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TextForm for $name {
            const EXPECTED: &'static str = $expected;
            fn read(text: &str) -> Option<Self> {
                let read: fn(&str) -> Option<String> = $read;
                read(text).map(Self)
            }
        }

        readable!($name);
        writable!($name);
    };
}

fn kept(text: &str, good: bool) -> Option<String> {
    good.then(|| text.to_owned())
}

fn is_line(text: &str) -> bool {
    text.chars().count() <= LINE_CHARS && !text.chars().any(char::is_control)
}

fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Returns whether the text is a UUID in its usual form (RFC 9562 §4), in upper or lower case.
#[must_use]
pub fn is_uuid(text: &str) -> bool {
    text.split('-').map(str::len).eq([8, 4, 4, 4, 12])
        && text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
}

fn is_device(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && !matches!(text, "." | "..")
        && text.bytes().all(|b| b.is_ascii_graphic() && b != b'/' && b != b':')
}

checked_string!(
    /// One line of text, not empty.
    Line,
    "one line of 1 to 255 characters",
    |text| kept(text, !text.is_empty() && is_line(text))
);
checked_string!(
    /// One line of text, possibly empty.
    AnyLine,
    "one line of at most 255 characters",
    |text| kept(text, is_line(text))
);
checked_string!(
    /// A host name's first label (RFC 1123 §2.1).
    Label,
    "a host name label (1 to 63 letters, digits and inner hyphens)",
    |text| kept(text, is_label(text))
);
checked_string!(
    /// A domain: labels joined by dots.
    Domain,
    "a domain (labels of letters, digits and inner hyphens, joined by dots)",
    |text| kept(text, text.len() <= FQDN_BYTES && text.split('.').all(is_label))
);
checked_string!(
    /// A UUID in lower case (RFC 9562 §4). Upper case is accepted and converted.
    Uuid,
    "a UUID (7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d)",
    |text| is_uuid(text).then(|| text.to_ascii_lowercase())
);
checked_string!(
    /// An EC2 instance id.
    Ec2Id,
    "an EC2 instance id (`i-` and 8 to 17 lower-case hex digits)",
    |text| kept(text, text.strip_prefix("i-").is_some_and(|id| (8..=17).contains(&id.len()) && is_hex(id)))
);
checked_string!(
    /// An account number of 12 digits.
    Account,
    "an account number of 12 digits, quoted",
    |text| kept(text, text.len() == 12 && text.bytes().all(|b| b.is_ascii_digit()))
);
checked_string!(
    /// A Linux interface name.
    Device,
    "an interface name (1 to 15 printable characters without `/` and `:`)",
    |text| kept(text, is_device(text))
);
checked_string!(
    /// A name that is unique within one record.
    Id,
    "an id (1 to 64 letters, digits, `.`, `_`, `:` and `-`)",
    |text| kept(
        text,
        (1..=64).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
    )
);
checked_string!(
    /// A network namespace: a name below `/run/netns`, or an absolute path.
    Netns,
    "a network namespace (a name under /run/netns, or an absolute path)",
    |text| kept(
        text,
        is_line(text)
            && !text.is_empty()
            && !matches!(text, "." | "..")
            && (text.starts_with('/') || !text.contains('/'))
    )
);
checked_string!(
    /// An absolute URL path.
    UrlPath,
    "a path that starts with `/` and has no spaces",
    |text| kept(text, text.starts_with('/') && is_line(text) && text.bytes().all(|b| b.is_ascii_graphic()))
);
checked_string!(
    /// Name of a public key: one line without `=`.
    KeyName,
    "a key name (one line of 1 to 255 characters without `=`)",
    |text| kept(text, !text.is_empty() && is_line(text) && !text.contains('='))
);
checked_string!(
    /// Name of an IAM role.
    RoleName,
    "a role name (1 to 64 letters, digits and `+=,.@_-`, not `.` or `..`)",
    |text| kept(
        text,
        (1..=64).contains(&text.len())
            && !matches!(text, "." | "..")
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+=,.@_-".contains(&b))
    )
);
checked_string!(
    /// A public key on one line. A final newline is dropped.
    PublicKey,
    "a public key on one line of at most 16384 characters",
    |text| {
        let key = text.trim_end_matches(['\r', '\n']);
        kept(key, !key.is_empty() && key.len() <= 16_384 && !key.chars().any(char::is_control))
    }
);

/// Defines a checked string that never appears in logs and errors.
macro_rules! secret_string {
    ($(#[$doc:meta])* $name:ident, $expected:expr, $is_good:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq)]
        pub struct $name(String);

        impl $name {
            /// Returns the text.
            #[must_use]
            pub fn expose(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(…)"))
            }
        }

        impl TextForm for $name {
            const EXPECTED: &'static str = $expected;
            const SECRET: bool = true;
            fn read(text: &str) -> Option<Self> {
                let is_good: fn(&str) -> bool = $is_good;
                kept(text, is_good(text)).map(Self)
            }
        }

        readable!($name);

        /// Writes the secret itself. Store the result only in files as private as the record's.
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }
    };
}

secret_string!(
    /// A text that never appears in logs and errors.
    Secret,
    "a secret of 1 to 65536 bytes on one line",
    |text| (1..=65_536).contains(&text.len()) && !text.chars().any(char::is_control)
);
secret_string!(
    /// A text of any number of lines that never appears in logs and errors.
    SecretText,
    "a secret text of at most 65536 bytes without NUL",
    |text| text.len() <= 65_536 && !text.contains('\0')
);
checked_string!(
    /// The name of a systemd credential (systemd.exec(5)): a file name without `:`.
    CredentialName,
    "a credential's name: 1 to 255 printable ASCII characters without `/` and `:`, and not `.` or `..`",
    |name| {
        let is_plain = name.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b'/' && byte != b':');
        kept(name, is_plain && (1..=255).contains(&name.len()) && name != "." && name != "..")
    }
);

/// Bytes that the agent does not interpret. Their debug form shows only their length.
#[derive(Clone, PartialEq, Eq)]
pub struct OpaqueBytes(pub Bytes);

impl fmt::Debug for OpaqueBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpaqueBytes({})", self.0.len())
    }
}

impl TextForm for OpaqueBytes {
    const EXPECTED: &'static str = "standard base64 with padding (RFC 4648 §4)";
    const SECRET: bool = true;
    fn read(text: &str) -> Option<Self> {
        let packed: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        STANDARD.decode(packed).ok().map(|bytes| Self(bytes.into()))
    }
}

/// A time (RFC 3339) that keeps the text it was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timestamp {
    text: String,
    unix_seconds: i64,
}

impl Timestamp {
    /// Returns the text (RFC 3339).
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Builds a timestamp from Unix seconds; `None` outside the years 0 to 9999.
    #[must_use]
    pub fn at(unix_seconds: i64) -> Option<Self> {
        let time = time::OffsetDateTime::from_unix_timestamp(unix_seconds).ok()?;
        let text = time.format(&time::format_description::well_known::Rfc3339).ok()?;
        Some(Self { text, unix_seconds })
    }

    /// Returns the seconds since 1970-01-01 UTC.
    #[must_use]
    pub fn unix_seconds(&self) -> i64 {
        self.unix_seconds
    }
}

impl TextForm for Timestamp {
    const EXPECTED: &'static str = "a time as in RFC 3339 (2030-01-01T00:00:00Z)";
    fn read(text: &str) -> Option<Self> {
        let parsed = time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339);
        Some(Self { text: text.to_owned(), unix_seconds: parsed.ok()?.unix_timestamp() })
    }
}

/// An address with its host bits, and the prefix length of its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// The address.
    pub address: IpAddr,
    /// Prefix length in bits: at most 32 for IPv4, 128 for IPv6.
    pub prefix: u8,
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Cidr {
    /// Returns the network of the address, with host bits of zero.
    #[must_use]
    pub fn network(self) -> Self {
        let prefix = u32::from(self.prefix);
        let address = match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
                Ipv4Addr::from(u32::from(address) & mask).into()
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
                Ipv6Addr::from(u128::from(address) & mask).into()
            }
        };
        Self { address, ..self }
    }

    /// Returns the network mask as an address of the same family.
    #[must_use]
    pub fn netmask(self) -> IpAddr {
        let ones = match self.address {
            IpAddr::V4(_) => Ipv4Addr::BROADCAST.into(),
            IpAddr::V6(_) => Ipv6Addr::from(u128::MAX).into(),
        };
        Self { address: ones, ..self }.network().address
    }
}

impl TextForm for Cidr {
    const EXPECTED: &'static str = "an address with its prefix length (192.0.2.5/24, 2001:db8::5/64)";
    fn read(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let digits = (1..=3).contains(&prefix.len()) && prefix.bytes().all(|b| b.is_ascii_digit());
        let prefix: u8 = prefix.parse().ok().filter(|_| digits)?;
        (prefix <= if address.is_ipv4() { 32 } else { 128 }).then_some(Self { address, prefix })
    }
}

/// An IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ip(pub IpAddr);

impl fmt::Display for Ip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TextForm for Ip {
    const EXPECTED: &'static str = "an IP address without prefix length";
    fn read(text: &str) -> Option<Self> {
        text.parse().ok().map(Self)
    }
}

/// MAC address of a NIC: neither a group address nor zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicMac(pub Mac);

impl fmt::Display for NicMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TextForm for NicMac {
    const EXPECTED: &'static str = "the MAC address of one NIC, whose first byte is even (52:54:00:12:34:56)";
    fn read(text: &str) -> Option<Self> {
        text.parse().ok().filter(|mac: &Mac| !mac.is_group() && *mac != Mac::default()).map(Self)
    }
}

readable!(OpaqueBytes, Timestamp, Cidr, Ip, NicMac);
writable!(Cidr, Ip, NicMac);

impl Serialize for OpaqueBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Defines an integer between two inclusive bounds.
macro_rules! bounded {
    ($(#[$doc:meta])* $name:ident($type:ty), $low:expr, $high:expr, $expected:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name($type);

        impl $name {
            /// Returns the number.
            #[must_use]
            pub fn get(self) -> $type {
                self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.0.serialize(serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                number(deserializer, $low, $high, $expected)
                    .and_then(|n| <$type>::try_from(n).map(Self).map_err(de::Error::custom))
            }
        }
    };
}

fn number<'de, D: Deserializer<'de>>(
    deserializer: D,
    low: u64,
    high: u64,
    expected: &'static str,
) -> Result<u64, D::Error> {
    struct Bounded(u64, u64, &'static str);
    impl Visitor<'_> for Bounded {
        type Value = u64;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.2)
        }
        fn visit_u64<E: de::Error>(self, found: u64) -> Result<u64, E> {
            if (self.0..=self.1).contains(&found) {
                Ok(found)
            } else {
                Err(E::custom(format_args!("expected {}, found {found}", self.2)))
            }
        }
    }
    deserializer.deserialize_u64(Bounded(low, high, expected))
}

bounded!(
    /// A numeric instance id, 1 to 2⁵³−1: JSON numbers represent these exactly.
    NumericId(u64), 1, (1 << 53) - 1, "a number from 1 to 9007199254740991");
bounded!(
    /// MTU of a link in bytes.
    Mtu(u16), 68, 65_535, "an MTU from 68 to 65535 bytes");
bounded!(
    /// A VLAN id (IEEE 802.1Q).
    VlanId(u16), 1, 4_094, "a VLAN id from 1 to 4094");
bounded!(
    /// IP TTL or hop limit of packets that carry a token.
    HopLimit(u8), 1, 64, "a hop limit from 1 to 64");

impl HopLimit {
    /// One hop: a router or container bridge in the guest drops the packet.
    pub const ONE: Self = Self(1);
}
