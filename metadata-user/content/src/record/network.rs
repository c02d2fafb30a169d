//! `network`: the network configuration that the guest reads.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::values::{Cidr, Device, Domain, Id, Ip, Line, Mtu, Netns, NicMac, VlanId};
use crate::parser;
use metadata_common::port::PortName;

/// `network`: network configuration of the guest.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Network {
    /// Source of the network documents: `auto`, `raw` or `none`; `auto` by default.
    pub mode: NetworkMode,
    /// cloud-init's network-config, version 1 or 2, for mode `raw`: a mapping, or text that is served unchanged.
    pub raw: Option<serde_json::Value>,
    /// OpenStack's `network_data.json`, for mode `raw`: a mapping, or text that is served unchanged. By default it is
    /// rendered from the NICs.
    pub network_data: Option<serde_json::Value>,
    /// DNS resolvers, for NICs with static addresses.
    pub dns: Vec<Ip>,
    /// DNS search domains.
    pub search: Vec<Domain>,
    /// NICs of the guest; the first is the primary one.
    pub nics: Vec<Nic>,
    /// The document in `raw`, if that is text and in force. It is parsed once, with the record, so that no dialect
    /// parses it again while a guest waits.
    #[serde(skip)]
    document: Option<Arc<serde_json::Value>>,
}

impl Network {
    /// Parses the text in `raw`; a text that is not a document leaves none.
    pub(super) fn parse_raw(&mut self) {
        self.document = match (self.mode, &self.raw) {
            (NetworkMode::Raw, Some(serde_json::Value::String(text))) => {
                parser::yaml(text).ok().map(Arc::new)
            }
            _ => None,
        };
    }

    /// The network-config of mode `raw` as a document, whether it was given as a mapping or as text.
    #[must_use]
    pub fn raw_document(&self) -> Option<&serde_json::Value> {
        match (self.mode, &self.raw) {
            (NetworkMode::Raw, Some(serde_json::Value::String(_))) => self.document.as_deref(),
            (NetworkMode::Raw, mapping) => mapping.as_ref(),
            _ => None,
        }
    }

    /// Returns whether a VLAN or a bond of the guest is on this NIC.
    #[must_use]
    pub fn carries_another(&self, nic: &Nic) -> bool {
        self.nics.iter().any(|upper| upper.links().any(|link| *link == nic.id))
    }
}

/// `network.mode`: source of the network documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    /// Renders the documents from the NICs.
    #[default]
    Auto,
    /// Serves `network.raw` and `network.network_data` in the dialects that support them.
    Raw,
    /// Serves no network document.
    None,
}

/// An entry of `network.nics`: one NIC of the guest.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Nic {
    /// Id of the NIC within the record; network documents use it if `name` is not set.
    pub id: Id,
    /// Interface name in the guest.
    pub name: Option<Device>,
    /// MAC address; required unless the NIC is a VLAN or a bond.
    pub mac: Option<NicMac>,
    /// MTU in bytes, 68 to 65535.
    pub mtu: Option<Mtu>,
    /// Id of the network the NIC is connected to.
    pub network_id: Option<Line>,
    /// `public` or `private`; by default the first NIC is public and the others are private.
    pub role: Option<Role>,
    /// IP addresses of the NIC.
    #[serde(default)]
    pub addresses: Vec<Address>,
    /// Routes other than the default routes to the gateways.
    #[serde(default)]
    pub routes: Vec<NicRoute>,
    /// Set if the NIC is a VLAN on another NIC.
    pub vlan: Option<Vlan>,
    /// Set if the NIC is a bond of other NICs.
    pub bond: Option<Bond>,
    /// Tap of the NIC on this node, if no other feed provides it.
    pub port: Option<NicPort>,
}

impl Nic {
    /// Returns the name of the NIC in network documents: `name`, or `id` if that is not set.
    #[must_use]
    pub fn label(&self) -> &str {
        self.name.as_ref().map_or(self.id.as_str(), Device::as_str)
    }

    /// Returns whether the hypervisor provides the NIC. The guest creates VLANs and bonds itself.
    #[must_use]
    pub fn is_physical(&self) -> bool {
        self.vlan.is_none() && self.bond.is_none()
    }

    /// Returns the ids of the NICs that the VLAN or bond is on.
    pub(super) fn links(&self) -> impl Iterator<Item = &Id> {
        let bonded = self.bond.iter().flat_map(|bond| &bond.links);
        self.vlan.iter().map(|vlan| &vlan.link).chain(bonded)
    }

    /// Returns the known IPv4 addresses, including the expected leases of DHCP.
    pub fn ipv4(&self) -> impl Iterator<Item = Cidr> {
        self.addresses.iter().filter_map(|entry| entry.address).filter(|cidr| cidr.address.is_ipv4())
    }

    /// Returns the known IPv6 addresses.
    pub fn ipv6(&self) -> impl Iterator<Item = Cidr> {
        self.addresses.iter().filter_map(|entry| entry.address).filter(|cidr| cidr.address.is_ipv6())
    }

    /// Returns whether no prefix of the NIC contains the next hop, so that a route through it must be on-link, as with
    /// a /32 address. A prefix may be unknown: if the NIC gets an address of the same family from the network, the
    /// answer is `false`. Link-local next hops (RFC 4291 section 2.5.6) are on every link.
    #[must_use]
    pub fn is_off_link(&self, next_hop: IpAddr) -> bool {
        let is_v4 = next_hop.is_ipv4();
        let mut own = self.addresses.iter().filter(|entry| entry.is_ipv4() == is_v4).peekable();
        let is_link_local = matches!(next_hop, IpAddr::V6(address) if address.is_unicast_link_local());
        let contains = |cidr: Cidr| {
            let cidr = cidr.network();
            cidr == Cidr { address: next_hop, ..cidr }.network()
        };
        own.peek().is_some()
            && !is_link_local
            && own.all(|entry| entry.address.is_some_and(|cidr| !contains(cidr)))
    }

    /// Returns the public IPv4 addresses that NAT translates to addresses of this NIC.
    pub fn public_ipv4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.addresses.iter().filter_map(|entry| match entry.public?.0 {
            IpAddr::V4(public) => Some(public),
            IpAddr::V6(_) => None,
        })
    }
}

/// `role` of a NIC: whether it reaches the Internet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reaches the Internet.
    Public,
    /// Does not reach the Internet.
    Private,
}

/// An entry of a NIC's `addresses`: one IP address.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Address {
    /// How the guest obtains the address: `static`, `dhcp4`, `dhcp6` or `slaac`.
    pub method: AddressMethod,
    /// Address with prefix length; required for `static`. For DHCP, the address of the expected lease.
    pub address: Option<Cidr>,
    /// Default gateway.
    pub gateway: Option<Ip>,
    /// Public address that NAT translates to this address.
    pub public: Option<Ip>,
}

impl Address {
    /// Returns whether the entry is an IPv4 address, known or not.
    #[must_use]
    pub fn is_ipv4(&self) -> bool {
        match self.method {
            AddressMethod::Dhcp4 => true,
            AddressMethod::Dhcp6 | AddressMethod::Slaac => false,
            AddressMethod::Static => self.address.is_none_or(|cidr| cidr.address.is_ipv4()),
        }
    }
}

/// `method` of an address: how the guest obtains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AddressMethod {
    /// The guest configures the address as given.
    Static,
    /// DHCP (RFC 2131).
    Dhcp4,
    /// DHCPv6 (RFC 8415).
    Dhcp6,
    /// Stateless address autoconfiguration (RFC 4862).
    Slaac,
}

/// An entry of a NIC's `routes`: one route.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct NicRoute {
    /// Destination network with prefix length.
    pub to: Cidr,
    /// Next hop, of the destination's address family.
    pub via: Ip,
    /// Route metric.
    pub metric: Option<u32>,
}

/// `vlan` of a NIC: makes it a VLAN on another NIC.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Vlan {
    /// `id` of the NIC that carries the VLAN.
    pub link: Id,
    /// VLAN id (IEEE 802.1Q), 1 to 4094.
    pub id: VlanId,
}

/// `bond` of a NIC: makes it a bond of other NICs.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Bond {
    /// `id`s of the bonded NICs, one or more.
    pub links: Vec<Id>,
    /// Bonding mode, by its name in the Linux bonding driver.
    pub mode: BondMode,
    /// Link monitoring interval in milliseconds.
    pub miimon: Option<u32>,
    /// Transmit hash policy for `802.3ad` and `balance-xor`, by the bonding driver's name.
    pub xmit_hash_policy: Option<HashPolicy>,
    /// LACP rate for `802.3ad`: `slow` or `fast`.
    pub lacp_rate: Option<LacpRate>,
}

/// `mode` of a bond, by its name in the Linux bonding driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the kernel's bonding documentation explains these words")]
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
    /// Returns the bonding driver's name of the value.
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

/// `xmit_hash_policy` of a bond, by its name in the Linux bonding driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[expect(missing_docs, reason = "the kernel's bonding documentation explains these words")]
pub enum HashPolicy {
    #[serde(rename = "layer2")]
    Layer2,
    #[serde(rename = "layer2+3")]
    Layer23,
    #[serde(rename = "layer3+4")]
    Layer34,
    #[serde(rename = "encap2+3")]
    Encap23,
    #[serde(rename = "encap3+4")]
    Encap34,
    #[serde(rename = "vlan+srcmac")]
    VlanSourceMac,
}

impl HashPolicy {
    /// Returns the bonding driver's name of the value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Layer2 => "layer2",
            Self::Layer23 => "layer2+3",
            Self::Layer34 => "layer3+4",
            Self::Encap23 => "encap2+3",
            Self::Encap34 => "encap3+4",
            Self::VlanSourceMac => "vlan+srcmac",
        }
    }
}

/// `lacp_rate` of a bond: how often the partner sends LACP frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LacpRate {
    /// Every 30 s.
    Slow,
    /// Every second.
    Fast,
}

impl LacpRate {
    /// Returns the bonding driver's name of the value.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Fast => "fast",
        }
    }
}

/// `port` of a NIC: its tap on this node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct NicPort {
    /// Interface name of the tap in its network namespace.
    pub ifname: Device,
    /// Network namespace of the tap; the agent's own by default.
    pub netns: Option<Netns>,
}

impl From<&NicPort> for PortName {
    fn from(port: &NicPort) -> Self {
        Self { ifname: port.ifname.to_string(), netns: port.netns.as_ref().map(ToString::to_string) }
    }
}
