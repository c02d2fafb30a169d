//! Attaches and detaches ports, binds and unbinds slots, while frames flow.

use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_PORTS, MAX_SLOTS, Port, PortKey, Slot, answers_within};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::attach;
use super::counters::DevicePoll;
use super::held_link::is_missing;
use super::mode::{Programs, SteeringProgram};
use super::tables::SlotBinding;
use super::{PortLimits, SteerError, Steering};
use metadata_common::port::PortName;
use metadata_links::error::LinkError;
use metadata_links::netlink;
use metadata_links::netns;
use metadata_links::netns::{Cookie, Netns};
use metadata_links::watch::DeviceEvent;

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

/// An attached port and the slots bound on it.
pub(super) struct AttachedPort {
    pub(super) cookie: Cookie,
    pub(super) key: PortKey,
    pub(super) slots: BTreeMap<Mac, Slot>,
    pub(super) programs: Programs,
    /// The port serves no identity, bound or not ([`Port::guarded`]).
    pub(super) closed: bool,
    /// The port's device was deleted. A device with the same name and index is a new one.
    pub(super) gone: bool,
    /// State of its device at the last check.
    pub(super) looks: DevicePoll,
    /// MTU of its device: bytes of the longest IP packet.
    pub(super) mtu: u32,
}

impl AttachedPort {
    /// A port without identities.
    fn new(cookie: Cookie, key: PortKey, programs: Programs, mtu: u32) -> Self {
        let looks = DevicePoll::new(key.ifindex);
        Self { cookie, key, slots: BTreeMap::new(), programs, closed: false, gone: false, looks, mtu }
    }
}

impl Steering {
    /// Makes a tap a port. From now on, a frame for a metadata address is served if its sender's identity is bound, and
    /// dropped otherwise.
    ///
    /// A port that is already attached stays unchanged. If its tap was replaced meanwhile, the new tap is attached
    /// with no identity bound on it.
    ///
    /// # Errors
    /// If there is no such device, another XDP program is on it, or the node is full. The port is then unchanged,
    /// except that a deleted tap is detached.
    pub fn attach(&mut self, port: &PortName) -> Result<(), SteerError> {
        self.attach_as(port, false)
    }

    /// Like [`Steering::attach`], but the port is closed: no identity on it is served until [`Steering::set_closed`]
    /// opens it.
    ///
    /// # Errors
    /// As for [`Steering::attach`].
    pub fn attach_closed(&mut self, port: &PortName) -> Result<(), SteerError> {
        self.attach_as(port, true)
    }

    /// Begins to make a tap a port: identities can be bound on it, and no program is attached yet. [`Steering::attach`]
    /// completes it, so that its guest's first frame finds the identity; [`Steering::detach`] gives it up. Returns
    /// false, and changes nothing, for a port that is attached or inherited, and during a takeover.
    ///
    /// # Errors
    /// As for [`Steering::attach`].
    pub fn prepare(&mut self, port: &PortName) -> Result<bool, SteerError> {
        self.visit(port, |steering| {
            let (cookie, Some(ifindex)) = place(port)? else { return Ok(false) };
            let is_known = steering.ports.contains_key(port)
                || steering.places.contains_key(&(cookie, ifindex))
                || steering.inherited.contains_key(&(cookie, ifindex));
            if steering.taking_over || is_known || steering.ports.len() >= MAX_PORTS as usize {
                return Ok(false);
            }
            steering.check_guest_device(port, ifindex)?;
            let key = PortKey { netns: steering.object.acquire(cookie)?, ifindex };
            match steering.enter(port, key, false) {
                Ok(mtu) => {
                    let attached = AttachedPort::new(cookie, key, Programs::none(), mtu);
                    steering.places.insert((cookie, ifindex), port.clone());
                    steering.ports.insert(port.clone(), attached);
                    Ok(true)
                }
                Err(error) => {
                    let removed = steering.let_go(cookie, key, Programs::none(), true);
                    Err(removed.err().unwrap_or(error))
                }
            }
        })
    }

    /// Fails for a device that can be no guest's: one of this agent's hubs, or one without Ethernet frames.
    fn check_guest_device(&self, port: &PortName, ifindex: u32) -> Result<(), SteerError> {
        if self.devices.has(ifindex) {
            return Err(SteerError::HubDevice { port: port.clone() });
        }
        attach::check_device(port, ifindex)
    }

    /// Attaches the programs of a prepared port; called in its namespace. After an error it is as before.
    fn complete(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(AttachedPort { cookie, key, .. }) = self.ports.get(port) else { return Ok(()) };
        let (cookie, key, mut programs) = (*cookie, *key, Programs::none());
        let equipped = self
            .take_from_other_versions(port, cookie, key, &mut programs)
            .and_then(|()| self.attach_programs(port, cookie, key, &mut programs));
        let remains = if equipped.is_err() {
            programs.detach_all()
        } else {
            if let Some(attached) = self.ports.get_mut(port) {
                attached.programs = programs;
            }
            Vec::new()
        };
        if !remains.is_empty() {
            self.object.retire(cookie);
            self.checks.keep(remains);
        }
        equipped?;
        self.enter_home(port)
    }

    /// Attaches, and once more after the directory of pins was made again, if somebody removed it.
    fn attach_as(&mut self, port: &PortName, closed: bool) -> Result<(), SteerError> {
        let attached = self.visit(port, |steering| steering.attach_inside(port, closed));
        let is_unpinned =
            attached.as_ref().is_err_and(|error| matches!(error, SteerError::Pins(_)) && is_missing(error));
        if is_unpinned && self.mend_pins(Instant::now())? {
            return self.visit(port, |steering| steering.attach_inside(port, closed));
        }
        attached
    }

    fn attach_inside(&mut self, port: &PortName, closed: bool) -> Result<(), SteerError> {
        let (cookie, Some(ifindex)) = place(port)? else {
            return Err(SteerError::PortGone { port: port.clone(), found: "none".into() });
        };
        if let Some(other) = self.holder_of(cookie, ifindex) {
            let is_gone = self.ports.get(&other).is_some_and(|held| held.gone);
            if other == *port && !is_gone {
                let is_prepared = self.ports.get(port).is_some_and(|held| held.programs.is_none());
                return if is_prepared { self.complete(port) } else { Ok(()) };
            }
            // If the device still has the name it is attached under, it has two names. Otherwise the device or its
            // namespace was renamed.
            if is_gone || !self.place_of(&other).is_ok_and(|place| place == (cookie, Some(ifindex))) {
                self.detach(&other)?;
            } else {
                return Err(SteerError::SamePort { port: port.clone(), other });
            }
        }
        self.detach(port)?;
        if self.ports.len() >= MAX_PORTS as usize {
            return Err(SteerError::TooManyPorts);
        }
        let attached = match self.inherited.remove(&(cookie, ifindex)) {
            Some(inherited) => self.claim(port, cookie, ifindex, inherited, closed)?,
            None if self.taking_over => return Err(SteerError::TakingOver { port: port.clone() }),
            None => self.attach_new(port, cookie, ifindex, closed)?,
        };
        self.places.insert((cookie, ifindex), port.clone());
        self.ports.insert(port.clone(), attached);
        self.enter_home(port)
    }

    fn attach_new(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        ifindex: u32,
        closed: bool,
    ) -> Result<AttachedPort, SteerError> {
        self.check_guest_device(port, ifindex)?;
        let netns = self.object.acquire(cookie)?;
        let key = PortKey { netns, ifindex };
        let mut programs = Programs::none();
        let owned = self.own(port, cookie, key, closed, &mut programs);
        let mtu = match owned {
            Ok(mtu) => mtu,
            Err(error) => {
                let removed = self.let_go(cookie, key, programs, true);
                return Err(removed.err().unwrap_or(error));
            }
        };
        Ok(AttachedPort { closed, ..AttachedPort::new(cookie, key, programs, mtu) })
    }

    /// Attaches programs to a port that no other agent owns. From then on no frame for a metadata address passes.
    /// Returns the device's MTU in bytes. After an error some programs may be attached.
    fn own(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
        closed: bool,
        programs: &mut Programs,
    ) -> Result<u32, SteerError> {
        let mtu = self.enter(port, key, closed)?;
        self.take_from_other_versions(port, cookie, key, programs)?;
        self.attach_programs(port, cookie, key, programs)?;
        Ok(mtu)
    }

    /// Takes the programs of a port off, removes its entry, and gives the number of its namespace back. Unless
    /// `is_off`, the programs are off and the entry is removed, the number is retired: frames of the old port would
    /// have it too.
    pub(super) fn let_go(
        &mut self,
        cookie: Cookie,
        key: PortKey,
        programs: Programs,
        is_off: bool,
    ) -> Result<(), SteerError> {
        let remains = programs.detach_all();
        let removed = self.tables.remove_port(key);
        self.logs.senders().forget(key);
        if !is_off || !remains.is_empty() || removed.is_err() {
            self.object.retire(cookie);
        }
        self.checks.keep(remains);
        self.object.release(cookie);
        removed
    }

    /// Adds a port to the table, closed or with its limits and full buckets, replacing any entry. Returns the MTU of
    /// its device in bytes.
    pub(super) fn enter(&mut self, port: &PortName, key: PortKey, closed: bool) -> Result<u32, SteerError> {
        let (kind, mtu) = netlink::kind_and_mtu(&port.ifname, key.ifindex)?;
        let entry = if closed {
            Port::closed()
        } else {
            let answers = if sends_back(&kind) { self.answers } else { 0 };
            Port { answers: answers_within(answers, mtu), ..self.limited() }
        };
        self.tables.add_port(key, entry).map(|()| mtu)
    }

    /// Records the MTU of a port's device if it changed. Segments on the port's connections fit it from now on. Other
    /// devices are ignored.
    ///
    /// # Errors
    /// If the kernel refuses to change the port's entry. User space uses the new MTU nevertheless.
    pub fn resized(&mut self, device: &DeviceEvent) -> Result<(), SteerError> {
        match (device.mtu, self.places.get(&(device.cookie, device.ifindex)).cloned()) {
            (Some(mtu), Some(port)) => self.fit(&port, mtu),
            _ => Ok(()),
        }
    }

    /// Checks the MTUs of all ports' devices in a namespace, named as in [`PortName`]; `None` is the agent's own.
    /// Lists the namespace's devices once, and not at all if no port is attached there.
    ///
    /// # Errors
    /// Like [`Steering::resized`], and if the namespace cannot be entered.
    pub fn inspect_mtus(&mut self, netns: Option<&str>) -> Result<(), SteerError> {
        let of = |attached: &AttachedPort| (attached.cookie, attached.key.ifindex);
        let there = self.ports.iter().filter(|(port, _)| port.netns.as_deref() == netns);
        let there: HashMap<_, _> = there.map(|(port, attached)| (of(attached), port.clone())).collect();
        let Some(port) = there.values().next() else { return Ok(()) };
        let list = || Ok::<_, LinkError>((netns::cookie()?, netlink::list()?));
        let (cookie, links) = self.netns_of(port)?.run(list)?;
        links.iter().try_for_each(|link| match there.get(&(cookie, link.header.index)) {
            Some(port) => self.fit(port, netlink::mtu_of(link)),
            None => Ok(()),
        })
    }

    pub(super) fn fit(&mut self, port: &PortName, mtu: u32) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get_mut(port).filter(|attached| attached.mtu != mtu) else {
            return Ok(());
        };
        attached.mtu = mtu;
        attached.slots.values().for_each(|slot| self.guest_devices.set_mtu(*slot, mtu));
        tracing::debug!(%port, mtu, "the MTU of the device changed");
        // A closed port serves no identity; it gets its MTU when it is opened.
        if attached.closed { Ok(()) } else { self.tables.fit_port(attached.key, mtu) }
    }

    /// A table entry with the current limits, for which the kernel answers nothing by itself.
    pub(super) fn limited(&self) -> Port {
        let PortLimits { frames_per_second, burst, connections_per_second, connection_burst } = self.limits;
        Port::with_limit(frames_per_second, burst).and_connections(connections_per_second, connection_burst)
    }

    /// Sets the limits of every port, including ports attached later.
    ///
    /// # Errors
    /// If the kernel refuses to change a table. Some ports have the new limits then.
    pub fn set_limits(&mut self, limits: PortLimits) -> Result<(), SteerError> {
        self.limits = limits;
        let keys: Vec<PortKey> = self.ports.values().map(|attached| attached.key).collect();
        let limit = self.limited();
        keys.into_iter().try_for_each(|key| self.tables.limit_port(key, limit))
    }

    /// The limits of every port.
    #[must_use]
    pub fn limits(&self) -> PortLimits {
        self.limits
    }

    fn holder_of(&self, cookie: Cookie, ifindex: u32) -> Option<PortName> {
        self.places.get(&(cookie, ifindex)).cloned()
    }

    /// Frees the slots of a port and restores its tap if it still exists. A port that is not attached is not an
    /// error.
    ///
    /// # Errors
    /// If the kernel refuses to clear a table. The port is detached nevertheless.
    pub fn detach(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(attached) = self.ports.remove(port) else { return Ok(()) };
        self.places.remove(&(attached.cookie, attached.key.ifindex));
        if self.taking_over {
            self.defer_detach(attached);
            return Ok(());
        }
        let mut outcome = Ok(());
        for (mac, slot) in attached.slots {
            self.bound.remove(&slot);
            outcome = outcome.and(self.tables.unbind(SlotBinding { slot, port: attached.key, mac, hub: 0 }));
        }
        let is_off = outcome.is_ok();
        outcome.and(self.let_go(attached.cookie, attached.key, attached.programs, is_off))
    }

    /// Binds `mac` on a port to `slot`. Any earlier binding of the slot or of the identity ends.
    ///
    /// Frames in flight keep the slot's number. Before you reuse a slot for another guest, unbind it, make the worker
    /// forget it, and let the worker finish a turn.
    ///
    /// # Errors
    /// If the port is not attached, its tap is gone or was replaced (attach again), the slot is out of range, or the
    /// MAC is a group address. The slot is free then.
    pub fn bind(&mut self, port: &PortName, mac: Mac, slot: Slot) -> Result<(), SteerError> {
        if slot >= MAX_SLOTS {
            return Err(SteerError::Slot { slot });
        }
        if mac.is_group() {
            return Err(SteerError::GroupMac { mac });
        }
        if !self.ports.contains_key(port) {
            return Err(SteerError::NotAttached { port: port.clone() });
        }
        let is_bound = self.bound.get(&slot).is_some_and(|(held, known)| held == port && *known == mac);
        if self.taking_over {
            return if is_bound { Ok(()) } else { Err(SteerError::TakingOver { port: port.clone() }) };
        }
        if !is_bound {
            self.unbind(slot)?;
        }
        // Bind inherited identities again: the previous agent may have stopped halfway through binding.
        self.visit(port, |steering| steering.bind_inside(port, mac, slot))
    }

    fn bind_inside(&mut self, port: &PortName, mac: Mac, slot: Slot) -> Result<(), SteerError> {
        let now = place(port)?;
        let Some(attached) = self.ports.get(port) else {
            return Err(SteerError::NotAttached { port: port.clone() });
        };
        let (key, mtu) = (attached.key, attached.mtu);
        let device = self.home_device(attached);
        if now != (attached.cookie, Some(key.ifindex)) {
            let found = if now.1.is_some() { "another device of that name" } else { "none" };
            return Err(SteerError::PortGone { port: port.clone(), found: found.into() });
        }
        if let Some(former) = attached.slots.get(&mac).copied().filter(|former| *former != slot) {
            self.unbind(former)?;
        }
        let hub = self.hub_of(slot);
        self.guest_devices.set_mtu(slot, mtu);
        self.guest_devices.set_takes_long(slot, device.is_some());
        self.tables.set_home(slot, device)?;
        self.tables.bind(SlotBinding { slot, port: key, mac, hub })?;
        self.bound.insert(slot, (port.clone(), mac));
        if let Some(attached) = self.ports.get_mut(port) {
            attached.slots.insert(mac, slot);
        }
        Ok(())
    }

    /// Frees a slot: from now on its guest's frames are neither received nor answered. A free slot is not an error.
    ///
    /// # Errors
    /// If the kernel refuses to clear a table.
    pub fn unbind(&mut self, slot: Slot) -> Result<(), SteerError> {
        let Some((port, mac)) = self.bound.remove(&slot) else { return Ok(()) };
        if self.taking_over {
            return Ok(());
        }
        let Some(attached) = self.ports.get_mut(&port) else { return Ok(()) };
        attached.slots.remove(&mac);
        self.tables.unbind(SlotBinding { slot, port: attached.key, mac, hub: 0 })
    }

    /// The device that a port's name refers to now; finds it like [`exists`]. A new tap, or one of the same index in
    /// a new namespace, is not the attached device.
    ///
    /// # Errors
    /// If the namespace cannot be opened or entered.
    pub fn find(&self, port: &PortName) -> Result<DeviceLookup, SteerError> {
        let (cookie, ifindex) = match search(port)? {
            Searched::Device(cookie, ifindex) => (cookie, ifindex),
            Searched::NoDevice => return Ok(DeviceLookup::Nothing),
            Searched::NoNamespace => return Ok(DeviceLookup::NoNamespace),
        };
        let same = |held: &AttachedPort| {
            !held.gone
                && !held.programs.is_none()
                && held.key.ifindex == ifindex
                && cookie.is_none_or(|now| now == held.cookie)
        };
        Ok(if self.ports.get(port).is_some_and(same) { DeviceLookup::Attached } else { DeviceLookup::Other })
    }

    /// True for an attached port, even if its tap is gone.
    #[must_use]
    pub fn is_attached(&self, port: &PortName) -> bool {
        self.ports.contains_key(port)
    }

    /// True for a port without programs, which [`Steering::prepare`] made.
    #[must_use]
    pub fn is_prepared(&self, port: &PortName) -> bool {
        self.ports.get(port).is_some_and(|held| held.programs.is_none())
    }

    /// The name under which a device is attached, whatever its current name.
    #[must_use]
    pub fn attached_as(&self, device: &DeviceEvent) -> Option<&PortName> {
        self.places.get(&(device.cookie, device.ifindex))
    }

    /// Records that a device was deleted. A new device of the same name and index is then not mistaken for the
    /// attached one. Does nothing for other changes.
    pub fn lost(&mut self, device: &DeviceEvent) {
        if device.gone
            && let Some(port) = self.places.get(&(device.cookie, device.ifindex))
            && let Some(attached) = self.ports.get_mut(port)
        {
            attached.gone = true;
        }
    }

    /// The number of attached ports.
    #[must_use]
    pub fn port_count(&self) -> usize {
        self.ports.len()
    }

    /// The number of ports steered by XDP, and of those steered by the classifier alone.
    #[must_use]
    pub fn ports_by_program(&self) -> (usize, usize) {
        let xdp =
            self.ports.values().filter(|attached| attached.programs.by() == SteeringProgram::Xdp).count();
        (xdp, self.ports.len() - xdp)
    }

    /// The attached ports and their interface indexes, each in its namespace. A port whose tap is gone is included
    /// until it is detached.
    pub fn ports(&self) -> impl Iterator<Item = (&PortName, u32)> {
        self.ports.iter().map(|(name, attached)| (name, attached.key.ifindex))
    }

    /// Runs `f` inside a port's namespace.
    pub(super) fn visit<T: Send>(
        &mut self,
        port: &PortName,
        f: impl FnOnce(&mut Self) -> Result<T, SteerError> + Send,
    ) -> Result<T, SteerError> {
        self.netns_of(port)?.run(|| f(self))
    }

    /// The namespace and interface index that a port's name refers to now.
    pub(super) fn place_of(&self, port: &PortName) -> Result<(Cookie, Option<u32>), SteerError> {
        self.netns_of(port)?.run(|| place(port))
    }

    pub(super) fn netns_of(&self, port: &PortName) -> Result<Arc<Netns>, SteerError> {
        match &port.netns {
            None => Ok(Arc::clone(&self.devices.home)),
            Some(name) => Ok(Netns::open(name).map(Arc::new)?),
        }
    }
}

/// True for a kind of device that can send a frame back (`XDP_TX`): a tap. A veth can only while its peer, which the
/// guest's side controls, accepts such frames, and the kernel does not report that.
fn sends_back(kind: &str) -> bool {
    kind == netlink::TUN
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
pub(super) fn look(port: &PortName) -> Result<Option<(Option<Cookie>, u32)>, SteerError> {
    Ok(match search(port)? {
        Searched::Device(cookie, ifindex) => Some((cookie, ifindex)),
        Searched::NoDevice | Searched::NoNamespace => None,
    })
}

/// What a port's name refers to.
enum Searched {
    /// A device, and its namespace if the port names one.
    Device(Option<Cookie>, u32),
    NoDevice,
    NoNamespace,
}

fn search(port: &PortName) -> Result<Searched, SteerError> {
    let device = |cookie, ifindex: Option<u32>| {
        ifindex.map_or(Searched::NoDevice, |ifindex| Searched::Device(cookie, ifindex))
    };
    let Some(name) = &port.netns else { return Ok(device(None, netns::index_of(&port.ifname)?)) };
    match Netns::open(name) {
        Ok(netns) => {
            let (cookie, ifindex) = netns.run(|| place(port))?;
            Ok(device(Some(cookie), ifindex))
        }
        Err(LinkError::Namespace { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Ok(Searched::NoNamespace)
        }
        Err(error) => Err(error.into()),
    }
}
