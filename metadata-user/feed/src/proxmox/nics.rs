//! A VM's NICs: `netN` and `ipconfigN` (`parse_net` and `parse_ipconfig` in qemu-server's Network.pm).

use std::net::{Ipv4Addr, Ipv6Addr};

use metadata_common::mac::Mac;
use serde_json::{Value, json};

use super::property::list;
use super::{Problem, VmConfig};

/// Most NICs of a VM (`MAX_NETS` in QemuServer.pm).
pub const NICS: u8 = 32;

/// Longest name of a device (IFNAMSIZ without its NUL).
const IFNAME_OCTETS: usize = 15;

/// Models of NICs (`$nic_model_list`): `virtio=MAC` is short for `model=virtio,macaddr=MAC`.
const MODELS: [&str; 14] = [
    "e1000",
    "e1000-82540em",
    "e1000-82544gc",
    "e1000-82545em",
    "e1000e",
    "i82551",
    "i82557b",
    "i82559er",
    "ne2k_isa",
    "ne2k_pci",
    "pcnet",
    "rtl8139",
    "virtio",
    "vmxnet3",
];

/// A NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nic<'a> {
    /// `N` of `netN`.
    pub(super) number: u8,
    pub(super) mac: Mac,
    /// The bridge. Without one QEMU itself is the network, and there is no tap.
    pub(super) bridge: Option<&'a str>,
    /// MTU in octets, unless it is the bridge's.
    pub(super) mtu: Option<u16>,
    /// The addresses; `None` without `ipconfigN`, when the drive leaves the NIC out.
    pub(super) addresses: Option<Addresses<'a>>,
}

/// The addresses of a NIC, as the configuration spells them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Addresses<'a> {
    pub(super) ip: Option<Method<'a>>,
    pub(super) ip6: Option<Method<'a>>,
}

/// How a NIC gets an address of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method<'a> {
    Dhcp,
    /// Stateless autoconfiguration (IPv6).
    Auto,
    Static {
        address: &'a str,
        prefix: u8,
        gateway: Option<&'a str>,
    },
}

impl Nic<'_> {
    /// The NIC's tap on the node (`print_netdev_full` in QemuServer.pm). The firewall's bridge, VLAN tags and SDN do not
    /// change the name.
    pub(super) fn tap(&self, vmid: u32) -> Option<String> {
        self.bridge?;
        let name = format!("tap{vmid}i{}", self.number);
        (name.len() <= IFNAME_OCTETS).then_some(name)
    }

    /// The NIC as an entry of a record.
    pub(super) fn entry(&self, vmid: u32) -> Value {
        let addresses = self.addresses.unwrap_or_default();
        let entries = [(addresses.ip, "dhcp4"), (addresses.ip6, "dhcp6")];
        let entries = entries.into_iter().filter_map(|(method, dhcp)| Some(method?.entry(dhcp)));
        let mut nic = json!({
            "id": format!("net{}", self.number),
            "name": format!("eth{}", self.number),
            "mac": self.mac.to_string(),
            "addresses": entries.collect::<Vec<_>>(),
        });
        let fields = [
            ("port", self.tap(vmid).map(|tap| json!({"ifname": tap}))),
            ("mtu", self.mtu.map(Into::into)),
            ("network_id", self.bridge.map(Into::into)),
        ];
        for (field, value) in fields {
            if let Some(value) = value {
                nic[field] = value;
            }
        }
        nic
    }
}

impl Method<'_> {
    fn entry(self, dhcp: &str) -> Value {
        match self {
            Self::Dhcp => json!({"method": dhcp}),
            Self::Auto => json!({"method": "slaac"}),
            Self::Static { address, prefix, gateway } => {
                let mut entry = json!({"method": "static", "address": format!("{address}/{prefix}")});
                if let Some(gateway) = gateway {
                    entry["gateway"] = gateway.into();
                }
                entry
            }
        }
    }
}

/// The NICs of a configuration in the drive's order. Those that cannot be used go to `problems`.
pub(super) fn nics<'a>(config: &'a VmConfig, problems: &mut Vec<Problem>) -> Vec<Nic<'a>> {
    let mut found = Vec::new();
    for (number, text) in config.numbered("net", NICS) {
        let key = format!("ipconfig{number}");
        match nic(number, text) {
            Ok(mut nic) => {
                // A broken setting leaves a NIC without addresses in the drive.
                nic.addresses = config.get(&key).map(|text| match addresses(text) {
                    Ok(addresses) => addresses,
                    Err(expected) => {
                        problems.push(Problem::value(&key, expected, text));
                        Addresses::default()
                    }
                });
                found.push(nic);
            }
            Err(expected) => problems.push(Problem::value(format_args!("net{number}"), expected, text)),
        }
    }
    found
}

fn nic(number: u8, text: &str) -> Result<Nic<'_>, &'static str> {
    let fields = list(text, Some("model"))?;
    // Other fields may come with later versions, and do not change the tap.
    let mut models = fields.iter().filter(|(key, _)| MODELS.contains(key));
    let mac = match (models.next(), models.next(), fields.get("model"), fields.get("macaddr")) {
        (Some((_, mac)), None, None, None) => Some(*mac),
        (None, None, _, mac) => mac.copied(),
        _ => return Err("one model and one MAC"),
    };
    let mac: Option<Mac> = mac.and_then(|mac| mac.parse().ok());
    let mac = mac.filter(|mac| !mac.is_group() && *mac != Mac::default());
    Ok(Nic {
        number,
        mac: mac.ok_or("the MAC of one station, as in `virtio=BC:24:11:00:00:01`")?,
        bridge: fields.get("bridge").copied(),
        // 1 stands for the bridge's; a guest's NIC has at least 68 (RFC 791).
        mtu: fields.get("mtu").and_then(|mtu| mtu.parse().ok()).filter(|mtu| *mtu >= 68),
        addresses: None,
    })
}

fn addresses(text: &str) -> Result<Addresses<'_>, &'static str> {
    let fields = list(text, None)?;
    if fields.keys().any(|key| !["ip", "gw", "ip6", "gw6"].contains(key)) {
        return Err("only `ip`, `gw`, `ip6` and `gw6`");
    }
    let get = |key| fields.get(key).copied();
    if get("ip").is_none() && get("ip6").is_none() && get("gw").is_none() && get("gw6").is_none() {
        return Ok(Addresses { ip: Some(Method::Dhcp), ip6: Some(Method::Dhcp) });
    }
    Ok(Addresses {
        ip: method(get("ip"), get("gw"), &["dhcp"], |ip| ip.parse::<Ipv4Addr>().is_ok(), 32)?,
        ip6: method(get("ip6"), get("gw6"), &["dhcp", "auto"], |ip| ip.parse::<Ipv6Addr>().is_ok(), 128)?,
    })
}

/// One family's part of `ipconfigN`.
fn method<'a>(
    ip: Option<&'a str>,
    gateway: Option<&'a str>,
    words: &[&str],
    is_address: fn(&str) -> bool,
    longest: u8,
) -> Result<Option<Method<'a>>, &'static str> {
    let expected = "`ip=` and `ip6=` with an address and its prefix length, `dhcp` or (`ip6`) `auto`, and a gateway of \
                    the same family beside an address only";
    match (ip, gateway) {
        (None, None) => Ok(None),
        (Some("dhcp"), None) => Ok(Some(Method::Dhcp)),
        (Some("auto"), None) if words.contains(&"auto") => Ok(Some(Method::Auto)),
        (Some(ip), gateway) => {
            let (address, digits) = ip.split_once('/').ok_or(expected)?;
            let prefix: u8 = digits.parse().map_err(|_| expected)?;
            let is_good = digits.bytes().all(|digit| digit.is_ascii_digit())
                && (8..=longest).contains(&prefix)
                && is_address(address)
                && gateway.is_none_or(is_address);
            is_good.then_some(Some(Method::Static { address, prefix, gateway })).ok_or(expected)
        }
        (None, Some(_)) => Err(expected),
    }
}
