//! Conflicts on the node: devices with the hub's names, owners of served addresses, pins.

use aya::maps::{Map, MapData, PerCpuArray};
use aya::programs::links;
use futures_util::TryStreamExt as _;
use metadata_common::maps::name;
use metadata_common::verdict::Verdict;
use metadata_links::error::LinkError;
use metadata_links::{netlink, netns};
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage};
use rtnetlink::packet_route::route::{RouteFlags, RouteMessage, RouteType};
use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use super::super::failure::ProbeError;
use super::super::{HUBS_OF_A_SIDE, SteerError, hub, pins};
use crate::counters;

/// Limit on pinned links examined.
const LINKS_SEEN: usize = 65_536;

/// How the node itself uses a served address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressUse {
    /// The served address.
    pub address: IpAddr,
    /// The address belongs to the node.
    pub own: bool,
    /// Prefix length in bits of the route to it: 0 for the default route, `None` for no route.
    pub routed: Option<u8>,
    /// The neighbour on the link that answers for it.
    pub neighbour: Option<String>,
}

/// Devices of the calling thread's namespace with a name that a hub would use: name and kind.
///
/// # Errors
/// If the kernel refuses to list devices.
pub fn hub_devices(prefix: &str, hubs: u32) -> Result<Vec<(String, String)>, ProbeError> {
    let mut found = Vec::new();
    // An agent uses either side of the hub numbers.
    let sides = [0, HUBS_OF_A_SIDE];
    let numbers = sides.into_iter().flat_map(|first| first..first + hubs.min(HUBS_OF_A_SIDE));
    for name in numbers.flat_map(|number| hub::names(prefix, number)) {
        if let Some(ifindex) = netns::index_of(&name)? {
            let kind = netlink::kind(&name, ifindex)?;
            found.push((name, kind));
        }
    }
    Ok(found)
}

/// The devices of hubs, as [`hub_devices`] has them, that are down or have another MTU than the agent gave them.
///
/// # Errors
/// If the kernel refuses to list devices.
pub fn hub_devices_down(prefix: &str, hubs: u32) -> Result<Vec<String>, ProbeError> {
    let mut down = Vec::new();
    for (name, kind) in hub_devices(prefix, hubs)? {
        let is_ours = kind == netlink::VETH || kind == netlink::TUN;
        if let Some(ifindex) = netns::index_of(&name)?.filter(|_| is_ours)
            && !hub::is_as_made(&netlink::look(&name, ifindex)?)
        {
            down.push(name);
        }
    }
    Ok(down)
}

/// Steered frames that found the rings of the hubs' veths full, since the veths were made.
///
/// # Errors
/// If the kernel refuses the statistics.
pub fn veth_full(prefix: &str, hubs: u32) -> Result<u64, ProbeError> {
    let dropped = counters::dropped()?;
    let numbers = [0, HUBS_OF_A_SIDE].into_iter().flat_map(|first| first..first + hubs.min(HUBS_OF_A_SIDE));
    let mut sum = 0;
    for [outer, ..] in numbers.map(|number| hub::names(prefix, number)) {
        let ifindex = netns::index_of(&outer)?;
        let counts = dropped.iter().find(|(index, _)| Some(*index) == ifindex);
        sum += counts.map_or(0, |(_, counts)| counts.tx);
    }
    Ok(sum)
}

/// Frames of quiet guests in other namespaces that found a hub's ring full, read from an agent's pinned counters; 0
/// without pins.
#[must_use]
pub fn ring_full(pins: &Path) -> u64 {
    let map = MapData::from_pin(pins::map_of(pins, name::COUNTERS)).ok();
    let counters = map.and_then(|map| PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(map)).ok());
    let counted = counters.and_then(|counters| counters.get(&Verdict::RingDropFull.index(), 0).ok());
    counted.map_or(0, |by_cpu| by_cpu.iter().sum())
}

/// How the calling thread's namespace uses these addresses. Nothing is sent.
///
/// # Errors
/// If the kernel refuses to list neighbours.
pub fn address_uses(addresses: &[IpAddr]) -> Result<Vec<AddressUse>, ProbeError> {
    let neighbours = neighbours()?;
    let uses = addresses.iter().map(|address| {
        let route = route(*address).ok();
        AddressUse {
            address: *address,
            own: route.as_ref().is_some_and(|route| route.header.kind == RouteType::Local),
            routed: route.as_ref().map(|route| route.header.destination_prefix_length),
            neighbour: neighbours.get(address).cloned(),
        }
    });
    Ok(uses.collect())
}

/// The route that applies to an address.
fn route(address: IpAddr) -> Result<RouteMessage, LinkError> {
    let mut question = match address {
        IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(v4, 32).build(),
        IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(v6, 128).build(),
    };
    question.header.flags |= RouteFlags::FibMatch;
    netlink::talk(
        || format!("look up the route to {address}"),
        async |netlink| {
            let mut answer = std::pin::pin!(netlink.route().get(question).execute());
            answer.try_next().await?.ok_or(rtnetlink::Error::RequestFailed)
        },
    )
}

/// Neighbours on the link with a known MAC address.
fn neighbours() -> Result<BTreeMap<IpAddr, String>, SteerError> {
    let listed = netlink::talk(
        || "list the neighbours".to_owned(),
        async |netlink| {
            let mut all = Vec::new();
            for family in [AddressFamily::Inet, AddressFamily::Inet6] {
                let request = netlink.neighbours().get().set_address_family(family);
                all.extend(request.execute().try_collect::<Vec<_>>().await?);
            }
            Ok(all)
        },
    )?;
    Ok(listed.iter().filter_map(known).collect())
}

fn known(message: &NeighbourMessage) -> Option<(IpAddr, String)> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })?;
    let link = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => Some(bytes),
        _ => None,
    })?;
    Some((address, link.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")))
}

/// A link in a bpffs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedLink {
    /// Name of its file.
    pub name: String,
    /// Interface index of its device, 0 once the device is gone; `None` if the kernel does not report it.
    pub ifindex: Option<u32>,
}

/// The links pinned in a directory of a bpffs; empty if there is no such directory.
///
/// # Errors
/// If the directory cannot be read.
pub fn pinned_links(directory: &Path) -> Result<Vec<PinnedLink>, ProbeError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries.take(LINKS_SEEN) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        found.push(PinnedLink { ifindex: device_of(&entry.path()), name });
    }
    Ok(found)
}

/// The kernel reports a link's device next to its descriptor: `ifindex` in `/proc/self/fdinfo`.
fn device_of(pin: &Path) -> Option<u32> {
    let link: links::FdLink = links::PinnedLink::from_pin(pin).ok()?.into();
    let number = format!("link_id:\t{}", link.info().ok()?.id());
    let told = fs::read_dir("/proc/self/fdinfo").ok()?.flatten().find_map(|entry| {
        let text = fs::read_to_string(entry.path()).ok()?;
        text.lines().any(|line| line == number).then_some(text)
    })?;
    told.lines().find_map(|line| line.strip_prefix("ifindex:")?.trim().parse().ok())
}
