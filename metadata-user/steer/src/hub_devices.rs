//! The devices of the hubs: their names, how they are made and removed, and the names that no port may have.
//!
//! [`HubGuard`] owns the devices of this agent's hubs and removes them when it is dropped. It knows none of the
//! programs on them.

use metadata_common::maps::{MAX_HUBS, MAX_STEERED};
use metadata_common::port::PortName;
use metadata_common::wire::ethernet;
use metadata_links::error::LinkError;
use metadata_links::ioctl::{self, Preamble};
use metadata_links::netlink;
use metadata_links::netns::{self, Netns};
use rtnetlink::packet_route::link::{LinkFlags, LinkMessage};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::attach;
use super::config::{PreviousAgent, SteerConfig};
use super::features::LOOPBACK;
use super::{HUB_PREFIX_MAX, HUBS_OF_A_SIDE, SteerError};

/// MTU of the hub's devices, in bytes. A redirect drops frames above the target's MTU, so this exceeds the MTU of
/// any guest. A veth runs XDP natively up to a page less headroom and tailroom, 3,506 bytes on x86.
pub const HUB_MTU: u32 = MAX_STEERED - ethernet::HEADER as u32;

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

#[derive(Clone, Debug)]
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
    fn create(prefix: &str, number: u32, queues: u32, has_tcx: bool) -> Result<(Self, HubTaps), SteerError> {
        check_prefix(prefix)?;
        let [outer, inner, tap, long] = names(prefix, number);
        // Make the tap first: a running agent holds it, and then its devices must not be touched.
        let fd = ioctl::create_tap(&tap, Preamble::None)?;
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
        let fd = ioctl::create_tap(&name, Preamble::VirtioNet)?;
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
    fn remove(&self) {
        // Deleting one end deletes the other.
        for device in [&self.outer, &self.tap].into_iter().chain(&self.long_tap) {
            device.remove();
        }
    }
}

/// The hubs' devices and their taps, removed on drop, and their namespace: the agent's own.
pub(super) struct HubGuard {
    /// What the devices' names begin with.
    pub(super) prefix: String,
    pub(super) devices: Vec<HubDevices>,
    pub(super) taps: Vec<HubTaps>,
    pub(super) home: Arc<Netns>,
}

impl HubGuard {
    /// Makes the devices of all hubs in the agent's own namespace. After an error nothing remains.
    /// The tap for long frames needs a classifier, so it is made only if the kernel `has_tcx`.
    pub(super) fn create(home: &Arc<Netns>, config: &SteerConfig, has_tcx: bool) -> Result<Self, SteerError> {
        let (prefix, devices, taps) = (config.hub.clone(), Vec::new(), Vec::new());
        let mut guard = Self { prefix, devices, taps, home: Arc::clone(home) };
        home.run(|| guard.create_inside(config, has_tcx))?;
        Ok(guard)
    }

    fn create_inside(&mut self, config: &SteerConfig, has_tcx: bool) -> Result<(), SteerError> {
        let first = config.adopt.side() * HUBS_OF_A_SIDE;
        if config.adopt == PreviousAgent::Alone {
            check_absent(&config.hub, config.hubs..MAX_HUBS)?;
        }
        for number in first..first + config.hubs {
            let (devices, tap) = HubDevices::create(&config.hub, number, config.queues, has_tcx)?;
            self.devices.push(devices);
            self.taps.push(tap);
        }
        let last = if config.adopt == PreviousAgent::Alone { MAX_HUBS } else { first + HUBS_OF_A_SIDE };
        remove_left_over_hubs(&config.hub, first + config.hubs..last)
    }

    /// True for the index of one of these devices in the calling thread's namespace.
    pub(super) fn has(&self, ifindex: u32) -> bool {
        let mut devices = self.devices.iter().flat_map(HubDevices::each);
        devices.any(|device| device.ifindex == ifindex) && self.home.is_here()
    }
}

impl Drop for HubGuard {
    fn drop(&mut self) {
        // A tap goes when its descriptor is closed.
        self.taps.clear();
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

/// True for the name of a hub's tap with this prefix, on either side.
#[must_use]
pub fn is_hub_tap(prefix: &str, ifname: &str) -> bool {
    ifname.starts_with(prefix)
        && (0..MAX_HUBS).any(|number| {
            let [_, _, tap, long_tap] = names(prefix, number);
            tap == ifname || long_tap == ifname
        })
}

/// True for the name of any device of a hub with this prefix, on either side.
#[must_use]
pub fn is_hub_device(prefix: &str, ifname: &str) -> bool {
    ifname.starts_with(prefix)
        && (0..MAX_HUBS).any(|number| names(prefix, number).iter().any(|name| name == ifname))
}

/// Fails for a port whose name alone says that it is no guest's: a device of a hub with this prefix in the agent's own
/// namespace, or the loopback of any. The device need not exist.
///
/// # Errors
/// [`SteerError::HubDevice`] or [`SteerError::NoGuestDevice`].
pub fn check_port_name(hub: &str, port: &PortName) -> Result<(), SteerError> {
    if port.netns.is_none() && is_hub_device(hub, &port.ifname) {
        return Err(SteerError::HubDevice { port: port.clone() });
    }
    if port.ifname == LOOPBACK {
        return Err(SteerError::NoGuestDevice { port: port.clone(), kind: attach::LOOPBACK_KIND });
    }
    Ok(())
}

/// Fails if an agent has hubs of these numbers: only a running agent holds the tap.
fn check_absent(prefix: &str, mut numbers: Range<u32>) -> Result<(), SteerError> {
    numbers.try_for_each(|number| {
        let [_, _, tap, _] = names(prefix, number);
        match netns::index_of(&tap)? {
            Some(_) => Err(LinkError::HubInUse { name: tap }.into()),
            None => Ok(()),
        }
    })
}

/// Removes hubs of these numbers that a killed agent left behind. Call it only once no other agent can own them.
fn remove_left_over_hubs(prefix: &str, numbers: Range<u32>) -> Result<(), SteerError> {
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
    use super::{check_port_name, check_prefix, is_hub_tap, names};
    use crate::HUB_PREFIX_MAX;
    use metadata_common::maps::MAX_HUBS;
    use metadata_common::port::PortName;
    use std::collections::HashSet;

    #[test]
    fn every_hub_has_unique_valid_device_names() {
        let prefix = "x".repeat(HUB_PREFIX_MAX);
        let all: HashSet<String> = (0..MAX_HUBS).flat_map(|number| names(&prefix, number)).collect();
        assert_eq!(all.len(), 4 * MAX_HUBS as usize);
        assert!(all.iter().all(|name| name.len() <= 15), "{all:?}");
    }

    #[test]
    fn every_device_of_a_hub_is_known_by_its_name() {
        for name in ["imds-in", "imds-out", "imds-tap", "imds-gso", "imds-i1", "imds-t3"] {
            assert!(super::is_hub_device("imds", name), "{name}");
        }
        for name in ["imds-", "imds-x", "imds", "vnet0", "other-in", "imds-in1"] {
            assert!(!super::is_hub_device("imds", name), "{name}");
        }
    }

    #[test]
    fn a_port_is_refused_by_the_name_of_a_hub_or_of_the_loopback() {
        let port = |ifname: &str, netns: Option<&str>| PortName {
            ifname: ifname.into(),
            netns: netns.map(Into::into),
        };
        for (port, words) in [
            (port("imds-in", None), Some("a device of an xdp-imds hub")),
            (port("imds-t3", None), Some("a device of an xdp-imds hub")),
            (port("lo", None), Some("the loopback interface")),
            (port("lo", Some("vm")), Some("the loopback interface")),
            // It is a device of another agent at most.
            (port("imds-in", Some("vm")), None),
            (port("other-in", None), None),
            (port("tap0", None), None),
        ] {
            let error = check_port_name("imds", &port).err().map(|error| error.to_string());
            let is_as_wanted = match (&error, words) {
                (Some(error), Some(words)) => error.contains(words),
                (found, wanted) => found.is_none() && wanted.is_none(),
            };
            assert!(is_as_wanted, "{port}: {error:?}");
        }
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
