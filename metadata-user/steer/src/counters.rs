//! Frames by verdict.

use metadata_common::port::PortName;
use metadata_common::verdict::Verdict;
use metadata_links::exchange::NetlinkSocket;
use metadata_links::netns;
use metadata_links::netns::Cookie;
use metadata_links::watch::attribute;
use rtnetlink::sys::protocols::{NETLINK_GENERIC, NETLINK_ROUTE};
use std::io;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

use super::{SteerError, Steering};

/// Frames by verdict since steering started, summed over CPUs. Each count wraps at 2⁶⁴.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    frames: Vec<u64>,
}

impl Counters {
    /// Takes the counts of [`Verdict::ALL`], in that order.
    pub(super) fn new(frames: Vec<u64>) -> Self {
        Self { frames }
    }

    /// The number of frames with this verdict.
    #[must_use]
    pub fn get(&self, verdict: Verdict) -> u64 {
        usize::try_from(verdict.index()).ok().and_then(|index| self.frames.get(index)).copied().unwrap_or(0)
    }

    /// Every verdict with its number of frames.
    pub fn iter(&self) -> impl Iterator<Item = (Verdict, u64)> {
        Verdict::ALL.iter().copied().zip(self.frames.iter().copied())
    }
}

// Statistics of devices by interface index: rejected frames (rtnetlink), and whether a device accepts redirected
// frames (the generic netlink family `netdev`, which newer kernels have). All calls act on the calling thread's
// namespace.

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

// Polls the kernel's devices every few seconds for two facts that no eBPF program sees: lost frames, and devices
// that accept no redirected answers.

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
    /// By hub, in the order of [`Steering::hubs`].
    pub hubs: Vec<HubLosses>,
    /// Frames that ports' devices rejected since the first poll, whoever sent them: the guest's ring was full, or its
    /// device was down.
    pub ports: u64,
}

/// State of a port's device at the last poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DevicePoll {
    /// Total of rejected frames at that poll.
    refused: Option<u64>,
    /// Whether it accepts redirected frames; `None` if the kernel does not report it.
    pub(super) takes: Option<bool>,
}

impl DevicePoll {
    /// The state of a device that has just been attached.
    pub(super) fn new(ifindex: u32) -> Self {
        Self { refused: None, takes: takes_redirected(ifindex) }
    }

    /// Records the total of rejected frames; returns the increase since the last poll.
    fn note(&mut self, refused: u64) -> u64 {
        let last = self.refused.replace(refused);
        last.map_or(0, |last| refused.saturating_sub(last))
    }
}

impl Steering {
    /// Polls the devices of the agent's own namespace and of the next [`NAMESPACES_AT_ONCE`] others with ports.
    /// Returns the ports whose devices began or ceased to accept redirected frames. Call it every second or two;
    /// losses of a port before its first poll are not counted.
    pub fn inspect_devices(&mut self) -> Vec<PortName> {
        let mut changed = Vec::new();
        let home = Arc::clone(&self.devices.home);
        match home.run(look) {
            Ok(found) => self.take_in(&found, &mut changed),
            Err(error) => tracing::debug!("cannot poll devices: {error}"),
        }
        for port in self.next_elsewhere() {
            match self.netns_of(&port).and_then(|netns| netns.run(look)) {
                Ok(found) => self.take_in(&found, &mut changed),
                Err(error) => tracing::debug!(%port, "cannot poll devices: {error}"),
            }
        }
        changed
    }

    /// Lost frames, as of the last poll.
    #[must_use]
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// One port of each of the next namespaces.
    fn next_elsewhere(&mut self) -> Vec<PortName> {
        let after = self.last_polled.take().map_or(Unbounded, Excluded);
        let mut next: Vec<PortName> = Vec::new();
        for name in self.ports.range((after, Unbounded)).map(|(name, _)| name) {
            if name.netns.is_none() || next.iter().any(|other| other.netns == name.netns) {
                continue;
            }
            next.push(name.clone());
            if next.len() == NAMESPACES_AT_ONCE {
                self.last_polled = Some(name.clone());
                break;
            }
        }
        next
    }

    fn take_in(&mut self, found: &NamespacePoll, changed: &mut Vec<PortName>) {
        let NamespacePoll { cookie, dropped, takers } = found;
        for (ifindex, counts) in dropped {
            self.note(*cookie, *ifindex, *counts);
        }
        for (ifindex, takes) in takers {
            let Some(port) = self.places.get(&(*cookie, *ifindex)) else { continue };
            let Some(attached) = self.ports.get_mut(port).filter(|attached| !attached.gone) else { continue };
            if attached.looks.takes.replace(*takes) != Some(*takes) {
                changed.push(port.clone());
            }
        }
        for port in changed.iter() {
            if let Err(error) = self.enter_home(port) {
                tracing::warn!(%port, "answers keep their former path: {error}");
            }
        }
    }

    fn note(&mut self, cookie: Cookie, ifindex: u32, counts: DroppedFrames) {
        let port = self.places.get(&(cookie, ifindex)).and_then(|port| self.ports.get_mut(port));
        if let Some(attached) = port.filter(|attached| !attached.gone) {
            self.losses.ports += attached.looks.note(counts.tx);
        } else if cookie == self.home {
            let hubs = self.devices.devices.iter().zip(&mut self.losses.hubs);
            for (devices, losses) in hubs {
                if devices.outer.ifindex == ifindex {
                    losses.veth_full = counts.tx;
                } else if devices.tap.ifindex == ifindex {
                    losses.tap_dropped = counts.rx;
                }
            }
        }
    }
}

/// State of a namespace's devices at one moment.
struct NamespacePoll {
    cookie: Cookie,
    dropped: Vec<(u32, DroppedFrames)>,
    takers: Vec<(u32, bool)>,
}

fn look() -> Result<NamespacePoll, SteerError> {
    Ok(NamespacePoll { cookie: netns::cookie()?, dropped: dropped()?, takers: all_takers() })
}

#[cfg(test)]
mod tests {
    use metadata_common::verdict::Verdict;

    use super::{Counters, DevicePoll, DroppedFrames, dropped, features, general, statistics};

    #[test]
    fn each_verdict_has_its_own_count() {
        let counters = Counters::new((0..u64::from(Verdict::COUNT)).map(|n| n * 10).collect());
        for (verdict, frames) in counters.iter() {
            assert_eq!(frames, u64::from(verdict.index()) * 10, "{verdict:?}");
            assert_eq!(counters.get(verdict), frames, "{verdict:?}");
        }
        assert_eq!(counters.iter().count(), Verdict::ALL.len());
    }

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
