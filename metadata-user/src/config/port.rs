//! Ports, in the forms of the file and of the command line.

use std::str::FromStr;

use metadata_common::mac::Mac;
use metadata_common::port::{MAX_IFNAME, PortName, is_ifname};
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Serialize};

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
