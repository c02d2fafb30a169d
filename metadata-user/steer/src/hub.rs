//! The hub's devices: a veth pair for inbound frames, a tap for outbound frames, and a tap for long outbound frames.
//!
//! ```text
//!  ports ══ XDP redirect ══▶ PREFIX-out │ PREFIX-in ── XDP `socket` ──▶ AF_XDP
//!  ports ◀══ XDP redirect ══ `hub` XDP ── PREFIX-tap ◀── write() of one frame
//!  ports ◀── tcx `hub_tcx` ────────────── PREFIX-gso ◀── write() of one frame of many segments
//! ```

use metadata_common::maps::{MAX_HUBS, MAX_STEERED};
use metadata_common::wire::ethernet;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::adopt::PreviousAgent;
use super::config::SteerConfig;
use super::{HUB_PREFIX_MAX, HUB_QUEUES, HUBS_OF_A_SIDE, SteerError};
use metadata_links::error::LinkError;
use metadata_links::netlink;
use metadata_links::netns::{self, Netns};
use metadata_links::tun::{self, Preamble};
use rtnetlink::packet_route::link::{LinkFlags, LinkMessage};

/// MTU of the hub's devices, in bytes. A redirect drops frames above the target's MTU, so this exceeds the MTU of
/// any guest. A veth runs XDP natively up to a page less headroom and tailroom, 3,506 bytes on x86.
pub const HUB_MTU: u32 = MAX_STEERED - ethernet::HEADER as u32;

/// Receive queues of each hub: one for each CPU this process may use, up to [`HUB_QUEUES`].
#[must_use]
pub fn hub_queues() -> u32 {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    cpus.clamp(1, HUB_QUEUES)
}

/// The inner end of a hub's veth pair, where the AF_XDP sockets are bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hub {
    /// The number of the hub, from 0.
    pub number: u32,
    /// Interface index of the inner end, in the namespace in which steering was started.
    pub inner_ifindex: u32,
    /// Name of the inner end.
    pub inner_name: String,
    /// Number of receive queues, each with its own veth ring and socket. The kernel picks the queue by the sender's
    /// CPU number modulo this number.
    pub queues: u32,
}

/// The devices of one hub. [`HubDevices::remove`] deletes them; a tap also goes when its descriptor is closed.
#[derive(Debug)]
pub(super) struct HubDevices {
    pub(super) outer: HubDevice,
    pub(super) inner: HubDevice,
    pub(super) tap: HubDevice,
    /// Absent if the kernel has no classifiers of the kind that this tap needs.
    pub(super) long_tap: Option<HubDevice>,
}

/// The descriptors of a hub's taps.
#[derive(Debug)]
pub(super) struct HubTaps {
    pub(super) tap: Option<OwnedFd>,
    pub(super) long_tap: Option<OwnedFd>,
}

#[derive(Debug)]
pub(super) struct HubDevice {
    pub(super) name: String,
    pub(super) ifindex: u32,
}

impl HubDevice {
    fn find(name: String) -> Result<Self, SteerError> {
        match netns::index_of(&name)? {
            Some(ifindex) => Ok(Self { name, ifindex }),
            None => {
                let gone = std::io::Error::from_raw_os_error(libc::ENODEV);
                Err(SteerError::device(format!("find {name}, which was just made"), gone))
            }
        }
    }

    /// Deletes the device. It logs an error, because its callers clean up and cannot act on one.
    fn remove(&self) {
        if let Err(error) = netlink::delete(&self.name, self.ifindex) {
            tracing::warn!(%error, "cannot remove a hub device; the next start removes it");
        }
    }
}

impl HubDevices {
    /// Makes the devices of hub `number` in the calling thread's namespace. All are up but carry no frames yet.
    ///
    /// Replaces a veth pair that a killed agent left behind. On an error nothing remains.
    pub(super) fn create(
        prefix: &str,
        number: u32,
        queues: u32,
        has_tcx: bool,
    ) -> Result<(Self, HubTaps), SteerError> {
        check_prefix(prefix)?;
        let [outer, inner, tap, long] = names(prefix, number);
        // Make the tap first: a running agent holds it, and then its devices must not be touched.
        let fd = tun::create(&tap, Preamble::None)?;
        let tap = HubDevice::find(tap)?;
        // Delete it explicitly: closing the descriptor waits for any child process that is just being started.
        let (outer, inner) = Self::create_veth(outer, inner, queues).inspect_err(|_| tap.remove())?;
        let mut devices = Self { outer, inner, tap, long_tap: None };
        let long = if has_tcx {
            Some(devices.create_long_tap(long).inspect_err(|_| devices.remove())?)
        } else {
            None
        };
        devices.bring_up().inspect_err(|_| devices.remove())?;
        Ok((devices, HubTaps { tap: Some(fd), long_tap: long }))
    }

    /// Makes the tap for long frames.
    fn create_long_tap(&mut self, name: String) -> Result<OwnedFd, SteerError> {
        let fd = tun::create(&name, Preamble::VirtioNet)?;
        self.long_tap = Some(HubDevice::find(name)?);
        Ok(fd)
    }

    /// Returns each device.
    pub(super) fn each(&self) -> impl Iterator<Item = &HubDevice> {
        [&self.outer, &self.inner, &self.tap].into_iter().chain(&self.long_tap)
    }

    fn create_veth(outer: String, inner: String, queues: u32) -> Result<(HubDevice, HubDevice), SteerError> {
        for end in [&outer, &inner] {
            remove_left_over(end)?;
        }
        netlink::create_veth(&outer, &inner, queues)?;
        let outer = HubDevice::find(outer)?;
        let inner = HubDevice::find(inner).inspect_err(|_| outer.remove())?;
        Ok((outer, inner))
    }

    fn bring_up(&self) -> Result<(), SteerError> {
        for HubDevice { name, ifindex } in self.each() {
            netlink::quiet_and_up(name, *ifindex, HUB_MTU)?;
        }
        Ok(())
    }

    /// Removes the devices. Call it in the namespace in which they were made.
    pub(super) fn remove(&self) {
        // Deleting one end deletes the other.
        for device in [&self.outer, &self.tap].into_iter().chain(&self.long_tap) {
            device.remove();
        }
    }
}

/// The hubs' devices, removed on drop, and their namespace: the agent's own.
pub(super) struct HubGuard {
    pub(super) devices: Vec<HubDevices>,
    pub(super) home: Arc<Netns>,
}

impl HubGuard {
    pub(super) fn new(home: Arc<Netns>) -> Self {
        Self { devices: Vec::new(), home }
    }

    /// Makes the devices of all hubs. After an error, dropping this removes what was made.
    /// The tap for long frames needs a classifier, so it is made only if the kernel `has_tcx`.
    pub(super) fn create(&mut self, config: &SteerConfig, has_tcx: bool) -> Result<Vec<HubTaps>, SteerError> {
        let mut taps = Vec::new();
        let first = config.adopt.side() * HUBS_OF_A_SIDE;
        if config.adopt == PreviousAgent::Alone {
            check_absent(&config.hub, config.hubs..MAX_HUBS)?;
        }
        for number in first..first + config.hubs {
            let (devices, tap) = HubDevices::create(&config.hub, number, config.queues, has_tcx)?;
            self.devices.push(devices);
            taps.push(tap);
        }
        let last = if config.adopt == PreviousAgent::Alone { MAX_HUBS } else { first + HUBS_OF_A_SIDE };
        remove_left_over_hubs(&config.hub, first + config.hubs..last)?;
        Ok(taps)
    }

    /// True for the index of one of these devices in the calling thread's namespace.
    pub(super) fn has(&self, ifindex: u32) -> bool {
        let mut devices = self.devices.iter().flat_map(HubDevices::each);
        devices.any(|device| device.ifindex == ifindex) && self.home.is_here()
    }
}

impl Drop for HubGuard {
    fn drop(&mut self) {
        let removed = self.home.run(|| {
            self.devices.iter().for_each(HubDevices::remove);
            Ok::<_, LinkError>(())
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "cannot remove the hub's devices; the next start removes them");
        }
    }
}

/// True for the message about a device of a hub that is up, with the MTU that it was given.
pub(super) fn is_as_made(device: &LinkMessage) -> bool {
    device.header.flags.contains(LinkFlags::Up) && netlink::mtu_of(device) == HUB_MTU
}

/// The names of a hub's devices: outer end, inner end, tap, tap for long frames. The first hub has descriptive
/// suffixes; the others put a number in the same four bytes.
pub(super) fn names(prefix: &str, number: u32) -> [String; 4] {
    match number {
        0 => ["out", "in", "tap", "gso"].map(|end| format!("{prefix}-{end}")),
        n => ["o", "i", "t", "g"].map(|end| format!("{prefix}-{end}{n}")),
    }
}

/// Fails if an agent has hubs of these numbers: only a running agent holds the tap.
pub(super) fn check_absent(prefix: &str, mut numbers: Range<u32>) -> Result<(), SteerError> {
    numbers.try_for_each(|number| {
        let [_, _, tap, _] = names(prefix, number);
        match netns::index_of(&tap)? {
            Some(_) => Err(LinkError::HubInUse { name: tap }.into()),
            None => Ok(()),
        }
    })
}

/// Removes hubs of these numbers that a killed agent left behind. Call it only once no other agent can own them.
pub(super) fn remove_left_over_hubs(prefix: &str, numbers: Range<u32>) -> Result<(), SteerError> {
    for [outer, ..] in numbers.map(|number| names(prefix, number)) {
        if let Some(ifindex) = netns::index_of(&outer)?
            && netlink::kind(&outer, ifindex)? == netlink::VETH
        {
            netlink::delete(&outer, ifindex)?;
        }
    }
    Ok(())
}

/// Removes the veth pairs of hubs that agents which have ended left behind, in the calling thread's namespace. Returns
/// their number. A hub whose tap exists belongs to a running agent, and stays.
///
/// # Errors
/// If the prefix cannot be one, or the kernel refuses.
pub fn release_hubs(prefix: &str) -> Result<usize, SteerError> {
    check_prefix(prefix)?;
    let mut removed = 0;
    for [outer, _, tap, _] in (0..MAX_HUBS).map(|number| names(prefix, number)) {
        // In this order: a starting agent makes the tap first, so a pair found before the tap is missing is not its
        // own.
        if let Some(ifindex) = netns::index_of(&outer)?
            && netns::index_of(&tap)?.is_none()
            && netlink::kind(&outer, ifindex)? == netlink::VETH
        {
            netlink::delete(&outer, ifindex)?;
            removed += 1;
        }
    }
    Ok(removed)
}

fn remove_left_over(name: &str) -> Result<(), SteerError> {
    let Some(ifindex) = netns::index_of(name)? else { return Ok(()) };
    let kind = netlink::kind(name, ifindex)?;
    if kind != netlink::VETH {
        return Err(SteerError::NotOurs { name: name.into(), kind });
    }
    tracing::info!(device = name, "removing a hub device of an earlier run");
    Ok(netlink::delete(name, ifindex)?)
}

/// The kernel's rules for names (`dev_valid_name`), with room for the longest suffix.
pub(super) fn check_prefix(prefix: &str) -> Result<(), SteerError> {
    let fits = (1..=HUB_PREFIX_MAX).contains(&prefix.len());
    let bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':' | '%');
    if fits && !prefix.contains(bad) { Ok(()) } else { Err(SteerError::HubName { found: prefix.into() }) }
}

#[cfg(test)]
mod tests {
    use super::{check_prefix, names};
    use crate::HUB_PREFIX_MAX;
    use metadata_common::maps::MAX_HUBS;
    use std::collections::HashSet;

    #[test]
    fn every_hub_has_unique_valid_device_names() {
        let prefix = "x".repeat(HUB_PREFIX_MAX);
        let all: HashSet<String> = (0..MAX_HUBS).flat_map(|number| names(&prefix, number)).collect();
        assert_eq!(all.len(), 4 * MAX_HUBS as usize);
        assert!(all.iter().all(|name| name.len() <= 15), "{all:?}");
    }

    #[test]
    fn a_hub_name_leaves_room_for_its_suffix() {
        for good in ["imds", "i", "elevenbytes"] {
            assert!(check_prefix(good).is_ok(), "{good}");
        }
        for bad in ["", "twelve-bytes", "a b", "a/b", "a:b", "a\0b", "a%d"] {
            assert!(check_prefix(bad).is_err(), "{bad:?}");
        }
    }
}
