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
        /// The prefix length as it is spelled, such as `064`.
        digits: &'a str,
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
            Self::Static { address, prefix, gateway, .. } => {
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
                if let Some(text) = config.get(&key) {
                    let (addresses, wrong) = addresses(text);
                    nic.addresses = addresses;
                    problems.extend(wrong.map(|expected| Problem::value(&key, expected, text)));
                }
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

/// Reads `ipconfigN`. Returns what the drive makes of it, and what is wrong with it.
///
/// qemu-server drops the setting if its format is wrong (`check_type` in QemuServer.pm), and then the drive leaves the
/// NIC out. A gateway beside no address is found only later (`parse_ipconfig`): the NIC stays, without addresses.
fn addresses(text: &str) -> (Option<Addresses<'_>>, Option<&'static str>) {
    let given = match given(text) {
        Ok(given) => given,
        Err(expected) => return (None, Some(expected)),
    };
    let has_way =
        |(method, gateway): Way<'_>| gateway.is_none() || matches!(method, Some(Method::Static { .. }));
    if !given.into_iter().all(has_way) {
        return (Some(Addresses::default()), Some("a gateway beside an address only"));
    }
    let [(ip, _), (ip6, _)] = given;
    (Some(Addresses { ip, ip6 }), None)
}

/// One family's method, and the gateway beside it.
type Way<'a> = (Option<Method<'a>>, Option<&'a str>);

/// Both families' ways.
fn given(text: &str) -> Result<[Way<'_>; 2], &'static str> {
    let fields = list(text, None)?;
    if fields.keys().any(|key| !["ip", "gw", "ip6", "gw6"].contains(key)) {
        return Err("only `ip`, `gw`, `ip6` and `gw6`");
    }
    let get = |key| fields.get(key).copied();
    let is_v4 = |ip: &str| ip.parse::<Ipv4Addr>().is_ok();
    let is_v6 = |ip: &str| ip.parse::<Ipv6Addr>().is_ok();
    let ip = method(get("ip"), get("gw"), &["dhcp", "manual"], is_v4, 32)?;
    let ip6 = method(get("ip6"), get("gw6"), &["dhcp", "manual", "auto"], is_v6, 128)?;
    if get("ip").is_none() && get("ip6").is_none() {
        return Ok([(Some(Method::Dhcp), None); 2]);
    }
    Ok([(ip, get("gw")), (ip6, get("gw6"))])
}

/// One family's part of `ipconfigN`, by its format (`pve-ipv4-config` and `pve-ipv6-config` in JSONSchema.pm).
fn method<'a>(
    ip: Option<&'a str>,
    gateway: Option<&'a str>,
    words: &[&str],
    is_address: fn(&str) -> bool,
    longest: u8,
) -> Result<Option<Method<'a>>, &'static str> {
    let expected = "`ip=` and `ip6=` with an address and its prefix length, `dhcp` or (`ip6`) `auto`, and a gateway of \
                    the same family";
    if gateway.is_some_and(|gateway| ip.is_none() || !is_address(gateway)) {
        return Err(expected);
    }
    match ip {
        None => Ok(None),
        Some(word) if words.contains(&word) => Ok(match word {
            "dhcp" => Some(Method::Dhcp),
            "auto" => Some(Method::Auto),
            // No drive says this: it has no word for it.
            _ => None,
        }),
        Some(ip) => {
            let (address, digits) = ip.split_once('/').ok_or(expected)?;
            let prefix: u8 = digits.parse().map_err(|_| expected)?;
            let is_good = digits.bytes().all(|digit| digit.is_ascii_digit())
                && (8..=longest).contains(&prefix)
                && is_address(address);
            is_good.then_some(Some(Method::Static { address, prefix, digits, gateway })).ok_or(expected)
        }
    }
}
