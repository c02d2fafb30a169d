//! What a network configuration means, whatever its syntax, and how two meanings differ.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

/// What a guest's network is after the configuration is applied.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(super) struct Meaning {
    pub(super) devices: BTreeMap<String, Device>,
    pub(super) dns: BTreeSet<IpAddr>,
    pub(super) search: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(super) struct Device {
    pub(super) mac: Option<String>,
    pub(super) mtu: Option<u32>,
    pub(super) dhcp4: bool,
    pub(super) dhcp6: bool,
    /// `None` leaves it to the kernel, which accepts router advertisements.
    pub(super) slaac: Option<bool>,
    pub(super) addresses: BTreeSet<String>,
    pub(super) routes: Vec<Route>,
    pub(super) vlan: Option<Vlan>,
    pub(super) bond: Option<Bond>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(super) struct Route {
    pub(super) to: String,
    pub(super) via: IpAddr,
    pub(super) metric: Option<u32>,
    /// In a record: no prefix of the device contains the next hop. In a configuration: the kernel takes it anyway.
    pub(super) on_link: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Vlan {
    pub(super) link: String,
    pub(super) id: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Bond {
    pub(super) links: BTreeSet<String>,
    #[serde(flatten)]
    pub(super) options: BTreeMap<String, String>,
}

/// A part of a meaning. A known fault of a client is a fault of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The client raises an exception, or writes what nothing understands.
    Anything,
    Devices,
    Mtu,
    Dhcp,
    Slaac,
    Addresses,
    Addresses6,
    DefaultRoutes,
    Routes,
    Metrics,
    OnLink,
    Dns,
    Search,
    Vlan,
    Bond,
}

impl Part {
    pub(super) const ALL: [Self; 15] = [
        Self::Anything,
        Self::Devices,
        Self::Mtu,
        Self::Dhcp,
        Self::Slaac,
        Self::Addresses,
        Self::Addresses6,
        Self::DefaultRoutes,
        Self::Routes,
        Self::Metrics,
        Self::OnLink,
        Self::Dns,
        Self::Search,
        Self::Vlan,
        Self::Bond,
    ];
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anything => "everything",
            Self::Devices => "devices",
            Self::Mtu => "MTU",
            Self::Dhcp => "DHCP",
            Self::Slaac => "SLAAC",
            Self::Addresses => "addresses",
            Self::Addresses6 => "IPv6 addresses",
            Self::DefaultRoutes => "default routes",
            Self::Routes => "routes",
            Self::Metrics => "metrics",
            Self::OnLink => "on-link",
            Self::Dns => "DNS",
            Self::Search => "search domains",
            Self::Vlan => "VLAN",
            Self::Bond => "bond",
        })
    }
}

/// A part that differs, and how.
pub(super) type Difference = (Part, String);

impl Meaning {
    /// The differences between what is wanted and what a client made of it.
    pub(super) fn differences(&self, got: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        let names = |meaning: &Self| meaning.devices.keys().cloned().collect::<BTreeSet<_>>();
        if names(self) != names(got) {
            found.push((Part::Devices, format!("{:?} instead of {:?}", names(got), names(self))));
        }
        for (name, wanted) in &self.devices {
            let Some(device) = got.devices.get(name) else { continue };
            found.extend(
                wanted.differences(device).into_iter().map(|(part, how)| (part, format!("{name}: {how}"))),
            );
        }
        // A client may leave out resolvers that the guest cannot reach, because it has no address of their family.
        let speaks = |server: &&IpAddr| {
            let statics = self.devices.values().flat_map(|device| &device.addresses);
            statics.into_iter().any(|address| address.contains(':') == server.is_ipv6())
        };
        let missing: Vec<_> =
            self.dns.iter().filter(speaks).filter(|server| !got.dns.contains(server)).collect();
        let strange: Vec<_> = got.dns.difference(&self.dns).collect();
        if !missing.is_empty() || !strange.is_empty() {
            found.push((Part::Dns, format!("misses {missing:?}, invents {strange:?}")));
        }
        let has_statics = self.devices.values().any(|device| !device.addresses.is_empty());
        if (has_statics && self.search != got.search) || !got.search.is_subset(&self.search) {
            found.push((Part::Search, format!("{:?} instead of {:?}", got.search, self.search)));
        }
        found
    }
}

impl Device {
    fn differences(&self, got: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        let mut differ = |part, is_equal: bool, got: &dyn fmt::Debug, wanted: &dyn fmt::Debug| {
            if !is_equal {
                found.push((part, format!("{got:?} instead of {wanted:?}")));
            }
        };
        // A VLAN or a bond without a MAC in the record has that of a NIC below it.
        let is_same_mac = self.mac.is_none() || got.mac.is_none() || self.mac == got.mac;
        differ(Part::Devices, is_same_mac, &got.mac, &self.mac);
        differ(Part::Mtu, self.mtu == got.mtu, &got.mtu, &self.mtu);
        differ(Part::Dhcp, self.dhcp4 == got.dhcp4, &got.dhcp4, &self.dhcp4);
        // Where router advertisements are accepted, they may say that DHCPv6 is to be used.
        let wants_v6 = self.dhcp6 || self.slaac == Some(true);
        differ(Part::Dhcp, if got.dhcp6 { wants_v6 } else { !self.dhcp6 }, &got.dhcp6, &self.dhcp6);
        differ(Part::Slaac, self.slaac != Some(true) || got.slaac != Some(false), &got.slaac, &self.slaac);
        for (part, v6) in [(Part::Addresses, false), (Part::Addresses6, true)] {
            let (own, others) = (self.addresses_of(v6), got.addresses_of(v6));
            differ(part, own == others, &others, &own);
        }
        for (part, default) in [(Part::DefaultRoutes, true), (Part::Routes, false)] {
            let (own, others) = (self.targets(default), got.targets(default));
            differ(part, own == others, &others, &own);
        }
        for route in &self.routes {
            let Some(other) = got.routes.iter().find(|other| other.target() == route.target()) else {
                continue;
            };
            differ(Part::Metrics, route.metric == other.metric, other, route);
            differ(Part::OnLink, !route.on_link || other.on_link, other, route);
        }
        differ(Part::Vlan, self.vlan == got.vlan, &got.vlan, &self.vlan);
        differ(Part::Bond, self.bond == got.bond, &got.bond, &self.bond);
        found
    }

    fn addresses_of(&self, v6: bool) -> Vec<&String> {
        self.addresses.iter().filter(|address| address.contains(':') == v6).collect()
    }

    fn targets(&self, default: bool) -> BTreeSet<(&str, IpAddr)> {
        let routes = self.routes.iter().filter(|route| route.is_default() == default);
        routes.map(Route::target).collect()
    }
}

impl Route {
    fn target(&self) -> (&str, IpAddr) {
        (self.to.as_str(), self.via)
    }

    fn is_default(&self) -> bool {
        self.to.ends_with("/0")
    }
}
