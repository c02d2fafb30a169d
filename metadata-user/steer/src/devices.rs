//! Devices by the names of ports: in which namespace they are, what they are, and what they lost.
//!
//! [`Home`] is the agent's own namespace, from which every other one is entered by its name. Statistics are read by
//! interface index: rejected frames (rtnetlink), and whether a device accepts redirected frames (the generic netlink
//! family `netdev`, which newer kernels have). No eBPF program sees either, so the kernel's devices are polled every few
//! seconds. All functions but those of [`Home`] act on the calling thread's namespace.

use metadata_common::port::PortName;
use metadata_links::devices::attribute;
use metadata_links::error::LinkError;
use metadata_links::netlink;
use metadata_links::netlink::NetlinkSocket;
use metadata_links::netns::{self, Cookie, Netns};
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkLayerType, LinkMessage};
use rtnetlink::sys::protocols::{NETLINK_GENERIC, NETLINK_ROUTE};
use std::io;
use std::sync::Arc;

use super::SteerError;

/// The agent's own namespace, which contains the hubs, and which other namespaces classifiers reach from it.
#[derive(Clone)]
pub(super) struct Home {
    netns: Arc<Netns>,
    cookie: Cookie,
    /// Every hub has the classifiers that send what XDP cannot redirect.
    has_classifiers: bool,
    /// Every hub has a ring, so a classifier can steer ports of other namespaces.
    has_rings: bool,
}

impl Home {
    pub(super) fn new(netns: Arc<Netns>, cookie: Cookie, has_classifiers: bool, has_rings: bool) -> Self {
        Self { netns, cookie, has_classifiers, has_rings }
    }

    pub(super) fn netns(&self) -> Arc<Netns> {
        Arc::clone(&self.netns)
    }

    pub(super) fn cookie(&self) -> Cookie {
        self.cookie
    }

    /// True for namespaces from which a port's classifier reaches its hub.
    pub(super) fn is_reached_from(&self, cookie: Cookie) -> bool {
        cookie == self.cookie || self.has_rings
    }

    /// True for a namespace to whose devices the hubs' classifiers deliver answers.
    pub(super) fn delivers_to(&self, cookie: Cookie) -> bool {
        self.has_classifiers && cookie == self.cookie
    }

    /// The namespace that a port's name refers to now.
    pub(super) fn netns_of(&self, port: &PortName) -> Result<Arc<Netns>, SteerError> {
        self.named(port.netns.as_deref())
    }

    /// A namespace, named as in [`PortName`]; `None` is this one.
    fn named(&self, netns: Option<&str>) -> Result<Arc<Netns>, SteerError> {
        match netns {
            None => Ok(self.netns()),
            Some(name) => Ok(Netns::open(name).map(Arc::new)?),
        }
    }

    /// The namespace and interface index that a port's name refers to now.
    pub(super) fn place_of(&self, port: &PortName) -> Result<(Cookie, Option<u32>), SteerError> {
        self.netns_of(port)?.run(|| place(port))
    }

    /// The place of a port's device, if it exists.
    pub(super) fn look(&self, port: &PortName) -> Result<Option<PortLocation>, SteerError> {
        let place = |(cookie, ifindex): (Option<Cookie>, u32)| (cookie.unwrap_or(self.cookie), ifindex);
        Ok(self.netns.run(|| look(port))?.map(place))
    }

    /// Names of the taps in a namespace, named as in [`PortName`].
    pub(super) fn taps(&self, netns: Option<&str>) -> Result<Vec<String>, SteerError> {
        self.named(netns)?.run(|| {
            let links = netlink::list()?;
            Ok(links.iter().filter(|link| is_tap(link)).filter_map(name_of).collect())
        })
    }

    /// True if the name refers to a tap.
    pub(super) fn is_tap(&self, port: &PortName) -> Result<bool, SteerError> {
        self.netns_of(port)?.run(|| match netns::index_of(&port.ifname)? {
            Some(ifindex) => Ok(is_tap(&netlink::link_of(&port.ifname, ifindex)?)),
            None => Ok(false),
        })
    }
}

/// Namespace and interface index of a port.
pub(super) type PortLocation = (Cookie, u32);

/// The device that a port's name refers to now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceLookup {
    /// No device of this name.
    Nothing,
    /// The port's namespace does not exist.
    NoNamespace,
    /// The device attached under this name.
    Attached,
    /// A device that is not attached under this name.
    Other,
}

/// The calling thread's namespace, and the index in it of a port's device if the device exists.
pub(super) fn place(port: &PortName) -> Result<(Cookie, Option<u32>), SteerError> {
    Ok((netns::cookie()?, netns::index_of(&port.ifname)?))
}

/// The interface index of a port's device, or `None` if the device or its namespace does not exist. A port without a
/// namespace is looked up in the calling thread's.
///
/// # Errors
/// If the namespace cannot be opened or entered.
pub fn exists(port: &PortName) -> Result<Option<u32>, SteerError> {
    Ok(look(port)?.map(|(_, ifindex)| ifindex))
}

/// The index of the device that a port's name refers to, and its namespace if the port names one.
fn look(port: &PortName) -> Result<Option<(Option<Cookie>, u32)>, SteerError> {
    Ok(match search(port)? {
        SearchResult::Device(cookie, ifindex) => Some((cookie, ifindex)),
        SearchResult::NoDevice | SearchResult::NoNamespace => None,
    })
}

/// What a port's name refers to.
pub(super) enum SearchResult {
    /// A device, and its namespace if the port names one.
    Device(Option<Cookie>, u32),
    NoDevice,
    NoNamespace,
}

pub(super) fn search(port: &PortName) -> Result<SearchResult, SteerError> {
    let device = |cookie, ifindex: Option<u32>| {
        ifindex.map_or(SearchResult::NoDevice, |ifindex| SearchResult::Device(cookie, ifindex))
    };
    let Some(name) = &port.netns else { return Ok(device(None, netns::index_of(&port.ifname)?)) };
    match Netns::open(name) {
        Ok(netns) => {
            let (cookie, ifindex) = netns.run(|| place(port))?;
            Ok(device(Some(cookie), ifindex))
        }
        Err(LinkError::Namespace { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(SearchResult::NoNamespace)
        }
        Err(error) => Err(error.into()),
    }
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

/// `struct if_stats_msg`: family, padding, interface index, mask of requested statistics (linux/if_link.h, Linux
/// 4.7).
const IF_STATS: usize = 12;
const RTM_NEWSTATS: u16 = 92;
const RTM_GETSTATS: u16 = 94;
const IFLA_STATS_LINK_64: u16 = 1;
/// Offset of `tx_dropped` in `struct rtnl_link_stats64`: its eighth number.
const TX_DROPPED: usize = 7 * 8;
/// Offset of `rx_dropped` there: its seventh number.
const RX_DROPPED: usize = 6 * 8;

/// `struct genlmsghdr`: command, version, padding (linux/genetlink.h).
const GENL: usize = 4;
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// linux/netdev.h.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
/// `NETDEV_XDP_ACT_NDO_XMIT`: the device accepts redirected frames.
const NDO_XMIT: u64 = 4;

/// Frames that a device dropped since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DroppedFrames {
    /// Outbound frames, to its reader or its peer.
    pub(super) tx: u64,
    /// Inbound frames.
    pub(super) rx: u64,
}

/// Frames dropped at every device of the namespace, by interface index.
pub(super) fn dropped() -> Result<Vec<(u32, DroppedFrames)>, SteerError> {
    let mut found = Vec::new();
    let mut body = [0; IF_STATS];
    body[8..].copy_from_slice(&1_u32.to_ne_bytes());
    let mut ask = || -> io::Result<()> {
        NetlinkSocket::open(NETLINK_ROUTE)?.dump(RTM_GETSTATS, &body, |kind, body| {
            found.extend((kind == RTM_NEWSTATS).then(|| statistics(body)).flatten());
        })
    };
    ask().map_err(|source| SteerError::device("read the counters of devices", source))?;
    Ok(found)
}

fn statistics(body: &[u8]) -> Option<(u32, DroppedFrames)> {
    let ifindex = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
    let all = attribute(body.get(IF_STATS..)?, IFLA_STATS_LINK_64)?;
    let at = |place: usize| Some(u64::from_ne_bytes(all.get(place..place + 8)?.try_into().ok()?));
    Some((ifindex, DroppedFrames { tx: at(TX_DROPPED)?, rx: at(RX_DROPPED)? }))
}

/// Whether each device of the namespace accepts redirected frames; empty if the kernel does not report it.
pub(super) fn all_takers() -> Vec<(u32, bool)> {
    ask_netdev(None).unwrap_or_default()
}

/// Whether the kernel reports which devices accept redirected frames.
pub(super) fn reports_takers() -> bool {
    !all_takers().is_empty()
}

/// Whether a device accepts redirected frames; `None` if the kernel does not report it.
pub(super) fn takes_redirected(ifindex: u32) -> Option<bool> {
    let found = ask_netdev(Some(ifindex)).ok()?;
    found.into_iter().find_map(|(index, takes)| (index == ifindex).then_some(takes))
}

fn ask_netdev(ifindex: Option<u32>) -> io::Result<Vec<(u32, bool)>> {
    let mut netlink = NetlinkSocket::open(NETLINK_GENERIC)?;
    let mut family = None;
    let question = general(CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_NAME, b"netdev\0");
    netlink.request(GENL_ID_CTRL, &question, |_, body| {
        let id = body.get(GENL..).and_then(|all| attribute(all, CTRL_ATTR_FAMILY_ID));
        family = id.and_then(|id| id.try_into().ok()).map(u16::from_ne_bytes).or(family);
    })?;
    let family = family.ok_or(io::ErrorKind::NotFound)?;
    let mut found = Vec::new();
    let take = |_, body: &[u8]| found.extend(features(body));
    match ifindex {
        None => netlink.dump(family, &[NETDEV_CMD_DEV_GET, 1, 0, 0], take)?,
        Some(ifindex) => {
            let question = general(NETDEV_CMD_DEV_GET, NETDEV_A_DEV_IFINDEX, &ifindex.to_ne_bytes());
            netlink.request(family, &question, take)?;
        }
    }
    Ok(found)
}

fn features(body: &[u8]) -> Option<(u32, bool)> {
    let all = body.get(GENL..)?;
    let ifindex = u32::from_ne_bytes(attribute(all, NETDEV_A_DEV_IFINDEX)?.try_into().ok()?);
    let features = u64::from_ne_bytes(attribute(all, NETDEV_A_DEV_XDP_FEATURES)?.try_into().ok()?);
    Some((ifindex, features & NDO_XMIT != 0))
}

/// A generic netlink request with one attribute.
fn general(command: u8, kind: u16, value: &[u8]) -> Vec<u8> {
    let mut body = vec![command, 1, 0, 0];
    // The longest value has seven bytes.
    let length = (4 + value.len()) as u16;
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
    body
}

/// Namespaces polled at once in addition to the agent's own. With a poll every second or two, a round of 1,000 pods
/// takes two minutes.
pub const NAMESPACES_AT_ONCE: usize = 16;

/// Frames of a hub that were lost without a verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubLosses {
    /// Steered frames that found the ring of the hub's veth full. Concurrent updates from several CPUs may miss a
    /// few.
    pub veth_full: u64,
    /// Frames dropped by the kernel at the hub tap: those in `hub_drop_*`, and those the guest's device rejects
    /// because it is down, has too small an MTU, or accepts no redirected frames.
    pub tap_dropped: u64,
}

/// Lost frames, as of the last poll.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// By hub, in the order of [`Hubs::all`](super::Hubs::all).
    pub hubs: Vec<HubLosses>,
    /// Frames that ports' devices rejected since the first poll, from any sender: the guest's ring was full, or its
    /// device was down.
    pub ports: u64,
}

/// State of a port's device at the last poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DevicePoll {
    /// Total of rejected frames at that poll.
    refused: Option<u64>,
    /// Whether it accepts redirected frames; `None` if the kernel does not report it.
    takes: Option<bool>,
}

impl DevicePoll {
    /// The state of a device that has just been attached.
    pub(super) fn new(ifindex: u32) -> Self {
        Self { refused: None, takes: takes_redirected(ifindex) }
    }

    /// Whether the device accepts redirected frames; `None` if the kernel does not report it.
    pub(super) fn takes(&self) -> Option<bool> {
        self.takes
    }

    /// Records whether the device accepts redirected frames; true if that changed.
    pub(super) fn note_takes(&mut self, takes: bool) -> bool {
        self.takes.replace(takes) != Some(takes)
    }

    /// Records the total of rejected frames; returns the increase since the last poll.
    pub(super) fn note(&mut self, refused: u64) -> u64 {
        let last = self.refused.replace(refused);
        last.map_or(0, |last| refused.saturating_sub(last))
    }
}

/// State of a namespace's devices at one moment.
pub(super) struct NamespacePoll {
    pub(super) cookie: Cookie,
    pub(super) dropped: Vec<(u32, DroppedFrames)>,
    pub(super) takers: Vec<(u32, bool)>,
}

impl NamespacePoll {
    /// Polls the calling thread's namespace.
    pub(super) fn take() -> Result<Self, SteerError> {
        Ok(Self { cookie: netns::cookie()?, dropped: dropped()?, takers: all_takers() })
    }
}

#[cfg(test)]
mod tests {
    use super::{DevicePoll, DroppedFrames, dropped, features, general, statistics};

    fn counters(ifindex: u32, rx: u64, tx: u64) -> Vec<u8> {
        let mut body = vec![0; 12];
        body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        body.extend([196_u16.to_ne_bytes(), 1_u16.to_ne_bytes()].concat());
        body.extend((0..24_u64).flat_map(|n| match n {
            6 => rx.to_ne_bytes(),
            7 => tx.to_ne_bytes(),
            other => other.to_ne_bytes(),
        }));
        body
    }

    #[test]
    fn drops_are_read_at_the_kernels_offsets() {
        let whole = counters(7, 3, 9);
        assert_eq!(statistics(&whole), Some((7, DroppedFrames { tx: 9, rx: 3 })));
        for length in 0..whole.len() {
            assert_eq!(statistics(&whole[..length]), None, "{length}");
        }
    }

    #[test]
    fn a_device_takes_redirected_frames_if_its_features_include_it() {
        for (bits, takes) in [(0x23_u64, false), (0x67, true), (0x7, true), (0, false)] {
            let mut body = general(1, 1, &9_u32.to_ne_bytes());
            body.extend([12_u16.to_ne_bytes(), 3_u16.to_ne_bytes()].concat());
            body.extend(bits.to_ne_bytes());
            assert_eq!(features(&body), Some((9, takes)), "{bits:#x}");
            assert_eq!(features(&body[..body.len() - 1]), None);
        }
    }

    #[test]
    fn the_loopback_has_counters() {
        assert!(dropped().expect("counters").iter().any(|(ifindex, _)| *ifindex == 1));
    }

    #[test]
    fn only_frames_rejected_between_two_polls_count() {
        let mut looks = DevicePoll::default();
        assert_eq!(looks.note(7), 0, "before the first poll");
        assert_eq!(looks.note(7), 0);
        assert_eq!(looks.note(19), 12);
        assert_eq!(looks.note(3), 0, "a count never decreases, so this is another device");
        assert_eq!(looks.note(4), 1);
    }
}
