//! Statistics of devices by interface index: rejected frames (rtnetlink), and whether a device accepts redirected
//! frames (the generic netlink family `netdev`, which newer kernels have). All calls act on the calling thread's namespace.

use rtnetlink::sys::protocols::{NETLINK_GENERIC, NETLINK_ROUTE};
use std::io;

use super::SteerError;
use metadata_links::exchange::Exchange;
use metadata_links::watch::attribute;

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
pub(super) struct Dropped {
    /// Outbound frames, to its reader or its peer.
    pub(super) tx: u64,
    /// Inbound frames.
    pub(super) rx: u64,
}

/// Frames dropped at every device of the namespace, by interface index.
pub(super) fn dropped() -> Result<Vec<(u32, Dropped)>, SteerError> {
    let mut found = Vec::new();
    let mut body = [0; IF_STATS];
    body[8..].copy_from_slice(&1_u32.to_ne_bytes());
    let mut ask = || -> io::Result<()> {
        Exchange::open(NETLINK_ROUTE)?.dump(RTM_GETSTATS, &body, |kind, body| {
            found.extend((kind == RTM_NEWSTATS).then(|| statistics(body)).flatten());
        })
    };
    ask().map_err(|source| SteerError::device("read the counters of devices", source))?;
    Ok(found)
}

fn statistics(body: &[u8]) -> Option<(u32, Dropped)> {
    let ifindex = u32::from_ne_bytes(body.get(4..8)?.try_into().ok()?);
    let all = attribute(body.get(IF_STATS..)?, IFLA_STATS_LINK_64)?;
    let at = |place: usize| Some(u64::from_ne_bytes(all.get(place..place + 8)?.try_into().ok()?));
    Some((ifindex, Dropped { tx: at(TX_DROPPED)?, rx: at(RX_DROPPED)? }))
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
    let mut netlink = Exchange::open(NETLINK_GENERIC)?;
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
    // The longest value has seven octets.
    let length = (4 + value.len()) as u16;
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
    body
}

#[cfg(test)]
mod tests {
    use super::{Dropped, dropped, features, general, statistics};

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
        assert_eq!(statistics(&whole), Some((7, Dropped { tx: 9, rx: 3 })));
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
}
