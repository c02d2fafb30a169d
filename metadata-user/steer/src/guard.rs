//! Finds taps without a record and closes them.
//!
//! A closed port differs from any other only by a flag in its entry in the kernel's table. Every frame for a served
//! address is dropped there, whatever its source, and counted as `drop_guarded`. Opening a port, once there is a
//! record, and closing it again rewrite that entry; the programs stay attached throughout.

use metadata_common::maps::MAX_HUBS;
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage};

use super::{SteerError, Steering, hub};
use metadata_common::port::PortName;
use metadata_links::netlink;
use metadata_links::netns;
use metadata_links::netns::Netns;

/// Which taps are closed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum ClosedTaps {
    /// Every tap without a record, as soon as it appears, in the agent's namespace and in those with served ports.
    All,
    /// None: the host's network forwards the frames of a guest without a record.
    #[default]
    None,
}

impl Steering {
    /// Names of the taps in a namespace, named as in [`PortName`]; `None` is the agent's own.
    ///
    /// # Errors
    /// If the namespace cannot be entered, or the kernel refuses to list its devices.
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

    /// True if the name refers to a tap.
    ///
    /// # Errors
    /// Like [`Steering::taps`].
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

    /// Closes an attached port, or opens it for the identities bound on it. No frame for a served address passes in
    /// between. A port already in that state, or not attached, is left as it is.
    ///
    /// # Errors
    /// If the kernel refuses the entry, or the port's namespace cannot be entered.
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

    /// Renames a port to another name of the same device, and changes nothing else.
    pub fn rename(&mut self, from: &PortName, to: &PortName) {
        let Some(attached) = self.ports.remove(from) else { return };
        self.places.insert((attached.cookie, attached.key.ifindex), to.clone());
        self.bound.values_mut().filter(|(port, _)| port == from).for_each(|(port, _)| port.clone_from(to));
        self.ports.insert(to.clone(), attached);
    }
}

/// True for the name of a hub's tap with this prefix, on either side.
#[must_use]
pub fn is_hub_tap(prefix: &str, ifname: &str) -> bool {
    ifname.starts_with(prefix)
        && (0..MAX_HUBS).any(|number| {
            let [_, _, tap, long_tap] = hub::names(prefix, number);
            tap == ifname || long_tap == ifname
        })
}

/// True for a tap, which carries Ethernet frames; a tun is of the same kind but carries bare IP packets.
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
    fn only_hub_taps_of_either_side_are_recognized_by_name() {
        for tap in ["imds-tap", "imds-t1", "imds-t32", "imds-t63", "imds-gso", "imds-g63"] {
            assert!(is_hub_tap("imds", tap), "{tap}");
        }
        for other in ["imds-t64", "imds-t0", "imds-in", "imds-out", "imds", "tap0", "other-tap", "imds-taps"]
        {
            assert!(!is_hub_tap("imds", other), "{other}");
        }
    }
}
