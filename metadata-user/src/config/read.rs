//! Reads the file, and parses values that have more than one written form.

use metadata_common::mac::Mac;
use metadata_common::port::{MAX_IFNAME, PortName, is_ifname};
use metadata_content::parser;
use metadata_content::parser::{ParseError, PathStep, Syntax};
use metadata_steer::HUBS_OF_A_SIDE;
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{AddrParseError, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::Config;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is malformed or has an invalid value. The error text names the file and the field, and the line if it
    /// is known.
    #[error("{}{}: {reason}", path.display(), Position(*position))]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line and column, counted from 1, if they are known.
        position: Option<(usize, usize)>,
        /// The field and the reason.
        reason: String,
    },
    /// A value is out of range.
    #[error("{field}: expected {expected}, found {}", if found.is_empty() { "nothing" } else { found })]
    Value {
        /// The field, such as `limits.burst`.
        field: &'static str,
        /// The range of valid values.
        expected: String,
        /// The configured value.
        found: String,
    },
}

/// A position after a file's name.
struct Position(Option<(usize, usize)>);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |(line, column)| write!(f, ":{line}:{column}"))
    }
}

impl Config {
    /// Reads a file and validates its values.
    ///
    /// # Errors
    /// The file cannot be read or parsed, has an unknown field, or has a value out of range.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let config = Self::parse(&text).map_err(|error| {
            let position = error.position;
            let hint =
                if is_record(&text) { "; this is the record of a VM, not a configuration" } else { "" };
            let reason = format!("{}{hint}", ParseError { position: None, ..error });
            ConfigError::Parse { path: path.into(), position, reason }
        })?;
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error) => {
                let field = match &error {
                    ConfigError::Value { field, .. } => *field,
                    ConfigError::Read { .. } | ConfigError::Parse { .. } => "",
                };
                let steps: Vec<PathStep> = field.split('.').map(PathStep::from).collect();
                let position = parser::locate(Syntax::Yaml, &text, &steps);
                Err(ConfigError::Parse { path: path.into(), position, reason: error.to_string() })
            }
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, ParseError> {
        // YAML reads an empty document as null, but users expect it to mean "all defaults".
        if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        parser::yaml(text)
    }
}

/// True for a text that says of itself that it is a record.
fn is_record(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("schema: vmrecord/"))
}

/// Parses `workers`, a number from 1 to [`HUBS_OF_A_SIDE`].
///
/// # Errors
/// The text is not a number in this range.
pub fn workers(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=HUBS_OF_A_SIDE).contains(number));
    number.ok_or_else(|| format!("expected a number of workers from 1 to {HUBS_OF_A_SIDE}, found `{text}`"))
}

/// Parses `metrics`, an address with a port.
///
/// # Errors
/// The text is no such address.
pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|error: AddrParseError| parser::plain(&error.to_string()))
}

/// Parses bytes: a number, optionally with the unit `KiB`, `MiB` or `GiB`.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].trim_start() {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        _ => None,
    };
    let number = text[..digits].parse::<usize>().ok();
    let bytes = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| format!("expected bytes such as 536870912 or `512MiB`, found `{text}`"))
}

pub(super) fn bytes_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected bytes such as 536870912 or `512MiB`")]
    enum NumberOrText {
        Number(usize),
        Text(String),
    }
    match Option::<NumberOrText>::deserialize(from)? {
        None => Ok(None),
        Some(NumberOrText::Number(number)) => Ok(Some(number)),
        Some(NumberOrText::Text(text)) => bytes(&text).map(Some).map_err(serde::de::Error::custom),
    }
}

pub(super) fn workers_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(from)?;
    workers(&number.to_string()).map_err(serde::de::Error::custom)
}

/// Range of `answer_without_agent_seconds`. `Date` is renewed each second, on a busy node later.
pub(super) const WITHOUT_AGENT_MIN: u32 = 3;
const WITHOUT_AGENT_MAX: u32 = 3_600;

pub(super) fn without_agent_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(from)?;
    let seconds =
        u32::try_from(number).ok().filter(|it| (WITHOUT_AGENT_MIN..=WITHOUT_AGENT_MAX).contains(it));
    seconds.ok_or_else(|| {
        serde::de::Error::custom(format!(
            "expected {WITHOUT_AGENT_MIN} to {WITHOUT_AGENT_MAX} seconds, found {number}"
        ))
    })
}

/// A port to serve, and the MAC address of its guest if no record names the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// The interface and its namespace.
    pub name: PortName,
    /// The guest's MAC address. Without it, only records that name the port define its identities.
    pub mac: Option<Mac>,
}

impl FromStr for PortSpec {
    type Err = String;

    /// Parses `IFNAME[@NETNS][=MAC]`, the form of the command line.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (port, mac) = match text.split_once('=') {
            Some((port, mac)) => (port, Some(mac.parse::<Mac>().map_err(|e| e.to_string())?)),
            None => (text, None),
        };
        let (ifname, netns) = match port.split_once('@') {
            Some((ifname, netns)) => (ifname, Some(netns.to_owned())),
            None => (port, None),
        };
        Self::checked(ifname.to_owned(), netns, mac)
    }
}

impl PortSpec {
    fn checked(ifname: String, netns: Option<String>, mac: Option<Mac>) -> Result<Self, String> {
        if !is_ifname(&ifname) {
            return Err(format!("expected an interface name of 1 to {MAX_IFNAME} bytes, found `{ifname}`"));
        }
        if netns.as_deref() == Some("") {
            return Err("expected a namespace after `@`: a name under /run/netns or an absolute path".into());
        }
        if let Some(mac) = mac.filter(|mac| mac.is_group()) {
            return Err(format!(
                "expected a MAC address with an even first byte, found the group address {mac}"
            ));
        }
        Ok(Self { name: PortName { ifname, netns }, mac })
    }
}

impl Serialize for PortSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { name: PortName { ifname, netns }, mac } = self;
        let mut port = serializer.serialize_struct("PortSpec", 3)?;
        port.serialize_field("ifname", ifname)?;
        port.serialize_field("netns", netns)?;
        port.serialize_field("mac", &mac.map(|mac| mac.to_string()))?;
        port.end()
    }
}

impl<'de> Deserialize<'de> for PortSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct RawPort {
            ifname: String,
            netns: Option<String>,
            mac: Option<String>,
        }
        let raw = RawPort::deserialize(deserializer)?;
        let mac = raw.mac.map(|mac| mac.parse::<Mac>()).transpose().map_err(serde::de::Error::custom)?;
        Self::checked(raw.ifname, raw.netns, mac).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::{PortName, PortSpec};

    #[test]
    fn a_port_option_has_an_interface_and_optionally_a_namespace_and_mac() {
        let cases = [
            ("tap0", None, None),
            ("tap0=52:54:00:12:34:56", None, Some("52:54:00:12:34:56")),
            ("tap0@blue", Some("blue"), None),
            ("tap0@/proc/42/ns/net=52:54:00:12:34:56", Some("/proc/42/ns/net"), Some("52:54:00:12:34:56")),
        ];
        for (text, netns, mac) in cases {
            let spec: PortSpec = text.parse().expect(text);
            assert_eq!(spec.name, PortName { ifname: "tap0".into(), netns: netns.map(Into::into) }, "{text}");
            assert_eq!(spec.mac, mac.map(|m| m.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn a_malformed_port_is_refused() {
        for text in
            ["", "=52:54:00:12:34:56", "tap0=", "tap0@", "a/b", "tap0=ff:ff:ff:ff:ff:ff", "sixteen-letters-"]
        {
            assert!(text.parse::<PortSpec>().is_err(), "{text} was accepted");
        }
    }
}
