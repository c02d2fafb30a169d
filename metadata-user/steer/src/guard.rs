//! Taps without a record: found, and closed.
//!
//! A closed port is a port like any other, but for a flag in its entry in the kernel's table: whatever is for a served
//! address is dropped there, whoever sends it, and counted as `drop_guarded`. Opening it, once there is a record, and
//! closing it again rewrites that entry; the programs stay on all the time.

use metadata_common::maps::MAX_HUBS;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage};

use super::{SteerError, Steering, hub};
use metadata_base::port::PortName;
use metadata_links::netlink;
use metadata_links::netns;
use metadata_links::netns::Netns;

/// Which taps are closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Guarded {
    /// Every tap without a record, in the agent's namespace and in those it serves ports in, as soon as it appears.
    All,
    /// None: what a guest without a record sends goes where the host's network takes it.
    #[default]
    None,
}

impl Steering {
    /// Names of the taps in a namespace, named as in [`PortName`]; `None` is the agent's own.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or the kernel refuses to list its devices.
    pub fn taps(&self, netns: Option<&str>) -> Result<Vec<String>, SteerError> {
        let list = || {
            let links = netlink::list()?;
            Ok(links.iter().filter(|link| is_tap(link)).filter_map(name_of).collect())
        };
        match netns {
            None => self.devices.home.run(list),
            Some(name) => Netns::open(name)?.run(list),
        }
    }

    /// True for a name that leads to a tap.
    ///
    /// # Errors
    /// As for [`Steering::taps`].
    pub fn is_tap(&self, port: &PortName) -> Result<bool, SteerError> {
        let look = || match netns::index_of(&port.ifname)? {
            Some(ifindex) => Ok(is_tap(&netlink::look(&port.ifname, ifindex)?)),
            None => Ok(false),
        };
        match &port.netns {
            None => self.devices.home.run(look),
            Some(name) => Netns::open(name)?.run(look),
        }
    }

    /// Closes a port that is attached, or opens it to those who are bound there. Never lets anything for a served address
    /// pass in between. One that is as it should be, or is not attached, is left as it is.
    ///
    /// # Errors
    /// When the kernel refuses the entry, or the port's namespace cannot be entered.
    pub fn set_closed(&mut self, port: &PortName, closed: bool) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port).filter(|attached| attached.closed != closed) else {
            return Ok(());
        };
        let key = attached.key;
        let mtu = self.visit(port, |steering| steering.enter(port, key, closed))?;
        if let Some(attached) = self.ports.get_mut(port) {
            attached.closed = closed;
        }
        self.fit(port, mtu)
    }

    /// Gives a port another name that leads to the same device, and leaves everything else as it is.
    pub fn rename(&mut self, from: &PortName, to: &PortName) {
        let Some(attached) = self.ports.remove(from) else { return };
        self.places.insert((attached.cookie, attached.key.ifindex), to.clone());
        self.bound.values_mut().filter(|(port, _)| port == from).for_each(|(port, _)| port.clone_from(to));
        self.ports.insert(to.clone(), attached);
    }
}

/// True for the name of a tap that a hub with this prefix has, on either side.
#[must_use]
pub fn is_hub_tap(prefix: &str, ifname: &str) -> bool {
    ifname.starts_with(prefix)
        && (0..MAX_HUBS).any(|number| {
            let [.., tap] = hub::names(prefix, number);
            tap == ifname
        })
}

/// True for a tap, which has frames of Ethernet; a tun, which is of the same kind, has bare IP.
fn is_tap(link: &LinkMessage) -> bool {
    let kinds = link.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let is_tun = kinds.flatten().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Tun)));
    is_tun && link.header.link_layer_type == LinkLayerType::Ether
}

fn name_of(link: &LinkMessage) -> Option<String> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::is_hub_tap;

    #[test]
    fn hub_taps_of_both_sides_are_known_by_name_and_guests_are_not() {
        for tap in ["imds-tap", "imds-t1", "imds-t32", "imds-t63"] {
            assert!(is_hub_tap("imds", tap), "{tap}");
        }
        for other in ["imds-t64", "imds-t0", "imds-in", "imds-out", "imds", "tap0", "other-tap", "imds-taps"]
        {
            assert!(!is_hub_tap("imds", other), "{other}");
        }
    }
}
