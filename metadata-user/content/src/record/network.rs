//! `network`: what the guest shall find on its NICs.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::values::{Cidr, Device, Domain, Id, Ip, Line, Mtu, Netns, NicMac, VlanId};
use metadata_base::port::PortName;

/// `network`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Network {
    /// Where the network documents come from.
    pub mode: Mode,
    /// With [`Mode::Raw`]: network-config version 1 or 2, as text (sent as it is) or as a mapping.
    pub raw: Option<serde_json::Value>,
    /// With [`Mode::Raw`]: OpenStack's `network_data.json`, as text (sent as it is) or as a mapping. Without it that is
    /// rendered from the NICs.
    pub network_data: Option<serde_json::Value>,
    /// Resolvers for NICs with static addresses.
    pub dns: Vec<Ip>,
    /// Search domains.
    pub search: Vec<Domain>,
    /// The NICs the guest has now; the first is the primary.
    pub nics: Vec<Nic>,
}

/// `network.mode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Rendered from the NICs.
    #[default]
    Auto,
    /// `network.raw` and `network.network_data` where a dialect takes them.
    Raw,
    /// No network document at all.
    None,
}

/// One of `network.nics`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Nic {
    /// Names the NIC in the record and, without `name`, in network documents.
    pub id: Id,
    /// The name the guest shall give it.
    pub name: Option<Device>,
    /// The Ethernet address. Only VLANs and bonds may go without.
    pub mac: Option<NicMac>,
    /// MTU in octets.
    pub mtu: Option<Mtu>,
    /// The network it is on.
    pub network_id: Option<Line>,
    /// Public or private; by default the first NIC is public and the others are private.
    pub role: Option<Role>,
    /// Its addresses.
    #[serde(default)]
    pub addresses: Vec<Address>,
    /// Further routes.
    #[serde(default)]
    pub routes: Vec<NicRoute>,
    /// Makes it a VLAN on another NIC.
    pub vlan: Option<Vlan>,
    /// Makes it a bond of other NICs.
    pub bond: Option<Bond>,
    /// The tap behind it on this node, where no other feed knows.
    pub port: Option<NicPort>,
}

impl Nic {
    /// The name network documents use for it.
    #[must_use]
    pub fn label(&self) -> &str {
        self.name.as_ref().map_or(self.id.as_str(), Device::as_str)
    }

    /// True for one the hypervisor gives: no VLAN or bond, which the guest makes.
    #[must_use]
    pub fn is_physical(&self) -> bool {
        self.vlan.is_none() && self.bond.is_none()
    }

    /// The IPv4 addresses that are known: with DHCP those whose lease is.
    pub fn ipv4(&self) -> impl Iterator<Item = Cidr> {
        self.addresses.iter().filter_map(|entry| entry.address).filter(|cidr| cidr.address.is_ipv4())
    }

    /// The IPv6 addresses that are known.
    pub fn ipv6(&self) -> impl Iterator<Item = Cidr> {
        self.addresses.iter().filter_map(|entry| entry.address).filter(|cidr| cidr.address.is_ipv6())
    }

    /// The public IPv4 addresses that are translated to its own.
    pub fn public_ipv4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.addresses.iter().filter_map(|entry| match entry.public?.0 {
            IpAddr::V4(public) => Some(public),
            IpAddr::V6(_) => None,
        })
    }
}

/// `role` of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reaches the world.
    Public,
    /// Does not.
    Private,
}

/// One of a NIC's `addresses`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Address {
    /// How the guest gets it.
    pub method: Method,
    /// The address; with DHCP the lease that will be given.
    pub address: Option<Cidr>,
    /// The default gateway.
    pub gateway: Option<Ip>,
    /// The public address that is translated to it.
    pub public: Option<Ip>,
}

/// `method` of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Configured as given.
    Static,
    /// DHCP (RFC 2131).
    Dhcp4,
    /// DHCPv6 (RFC 8415).
    Dhcp6,
    /// Stateless address autoconfiguration (RFC 4862).
    Slaac,
}

/// One of a NIC's `routes`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct NicRoute {
    /// The destination.
    pub to: Cidr,
    /// The next hop.
    pub via: Ip,
    /// The metric.
    pub metric: Option<u32>,
}

/// `vlan` of a NIC.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Vlan {
    /// `id` of the NIC below.
    pub link: Id,
    /// The VLAN id.
    pub id: VlanId,
}

/// `bond` of a NIC.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Bond {
    /// `id`s of the NICs below.
    pub links: Vec<Id>,
    /// The mode.
    pub mode: BondMode,
    /// Link check interval in milliseconds.
    pub miimon: Option<u32>,
    /// How 802.3ad and balance-xor choose a link, in the bonding driver's words (`layer3+4`).
    pub xmit_hash_policy: Option<Line>,
    /// `slow` or `fast`, for 802.3ad.
    pub lacp_rate: Option<LacpRate>,
}

/// `mode` of a bond, in the bonding driver's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the kernel's own words, explained in its bonding documentation")]
pub enum BondMode {
    BalanceRr,
    ActiveBackup,
    BalanceXor,
    Broadcast,
    #[serde(rename = "802.3ad")]
    Lacp,
    BalanceTlb,
    BalanceAlb,
}

impl BondMode {
    /// The bonding driver's word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BalanceRr => "balance-rr",
            Self::ActiveBackup => "active-backup",
            Self::BalanceXor => "balance-xor",
            Self::Broadcast => "broadcast",
            Self::Lacp => "802.3ad",
            Self::BalanceTlb => "balance-tlb",
            Self::BalanceAlb => "balance-alb",
        }
    }
}

/// `lacp_rate` of a bond.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LacpRate {
    /// Every 30 s.
    Slow,
    /// Every second.
    Fast,
}

impl LacpRate {
    /// The bonding driver's word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Fast => "fast",
        }
    }
}

/// `port` of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct NicPort {
    /// The tap's name in its namespace.
    pub ifname: Device,
    /// Its namespace; without it the agent's own.
    pub netns: Option<Netns>,
}

impl From<&NicPort> for PortName {
    fn from(port: &NicPort) -> Self {
        Self { ifname: port.ifname.to_string(), netns: port.netns.as_ref().map(ToString::to_string) }
    }
}
