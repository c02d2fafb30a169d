//! The ports: the programs on their devices, the links and pins that keep them there, and the slots bound on them.
//!
//! [`Attachments`] owns the attached ports, the eBPF objects with the numbers of namespaces (`object`), the directory of
//! pins (`pins`), and the state of the checks (`check`). Which program steers a port is decided in `mode`. It knows
//! neither the hubs nor the ports of a previous agent, and changes the kernel's maps only through
//! [`Maps`].
//!
//! Its invariants: each port is found by its device in `places`, and each slot bound on it in `bound`, except that a
//! slot unbound during a takeover is still among its port's slots. Every port counts as one in its namespace's number,
//! which is given back when the port is let go; a number with which a program may still send frames is retired.

mod check;
mod mode;

pub use check::{AttachmentCheck, CHECK_EVERY, CHECKED_AT_ONCE};
pub(super) use mode::Programs;
pub use mode::{BUSY, LOOKS_AT_ONCE, QUIET, SWITCHES_AT_ONCE, SteeringProgram};

use aya::programs::links::FdLink;
use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_PORTS, PortKey, Slot};
use metadata_common::port::PortName;
use metadata_links::devices::DeviceEvent;
use metadata_links::error::LinkError;
use metadata_links::netlink;
use metadata_links::netns::{self, Cookie};
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound::{Excluded, Unbounded};
use std::path::Path;
use std::time::Instant;

use super::SteerError;
use super::attach::{AttachError, HeldLink, replace_tcx, replace_xdp};
use super::config::SteeringMode;
use super::devices::{
    DeviceLookup, DevicePoll, Home, NAMESPACES_AT_ONCE, PortLocation, SearchResult, place, search,
};
use super::maps::{HomeDevice, Maps, PortDevice, SlotBinding};
use super::object::Object;
use super::pins::{LinkName, Pin, PinDirectory, PinnedProgram};
use super::trace::{UnknownSender, UnknownSenders};
use check::Checks;

/// How answers reach the guest of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerPath {
    /// The device accepts redirected frames, or the kernel does not report whether it does.
    Redirect,
    /// A classifier delivers answers to the device, which accepts no redirected frames.
    Classifier,
    /// Answers do not arrive: the device accepts no redirected frames, and no classifier reaches it.
    None,
}

/// A bound identity and its slot: an entry of the kernel's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BoundIdentity {
    /// The namespace's number in the tables.
    pub netns: u32,
    /// The namespace's cookie (`SO_NETNS_COOKIE`).
    pub cookie: u64,
    /// Interface index within the namespace.
    pub ifindex: u32,
    /// The MAC address bound on the device.
    pub mac: Mac,
    /// The slot bound to it.
    pub slot: Slot,
}

/// An attached port and the slots bound on it.
pub(super) struct AttachedPort {
    cookie: Cookie,
    key: PortKey,
    slots: BTreeMap<Mac, Slot>,
    programs: Programs,
    /// The port serves no identity, bound or not ([`Port::guarded`](metadata_common::maps::Port::guarded)).
    closed: bool,
    /// The port's device was deleted. A device with the same name and index is a new one.
    gone: bool,
    /// State of its device at the last check.
    looks: DevicePoll,
    device: PortDevice,
}

impl AttachedPort {
    /// A port without identities.
    fn new(cookie: Cookie, key: PortKey, programs: Programs, device: PortDevice) -> Self {
        Self::inherited(cookie, key, programs, device, BTreeMap::new(), false)
    }

    /// A port of the previous agent.
    pub(super) fn inherited(
        cookie: Cookie,
        key: PortKey,
        programs: Programs,
        device: PortDevice,
        slots: BTreeMap<Mac, Slot>,
        closed: bool,
    ) -> Self {
        let looks = DevicePoll::new(key.ifindex);
        Self { cookie, key, slots, programs, closed, gone: false, looks, device }
    }

    fn location(&self) -> PortLocation {
        (self.cookie, self.key.ifindex)
    }

    /// What the previous agent's side keeps of a port: its place and number, and its programs' kinds and its slots.
    pub(super) fn into_parts(self) -> (PortLocation, u32, Vec<PinnedProgram>, BTreeMap<Mac, Slot>) {
        (self.location(), self.key.netns, self.programs.on(), self.slots)
    }
}

/// The attached ports.
pub struct Attachments {
    ports: BTreeMap<PortName, AttachedPort>,
    /// The ports by namespace and interface index.
    places: HashMap<PortLocation, PortName>,
    bound: BTreeMap<Slot, (PortName, Mac)>,
    checks: Checks,
    /// Also owns the numbers of namespaces.
    object: Object,
    mode: SteeringMode,
    /// The last port examined, if the round is not complete.
    last_examined: Option<PortName>,
    /// The last port of another namespace whose devices were examined, if the round is not complete.
    last_polled: Option<PortName>,
    /// Frames that the ports' devices rejected, as of the last poll.
    rejected: u64,
    /// The senders that the programs' log names.
    senders: UnknownSenders,
    home: Home,
    /// Dropped last: its lock shows that an agent runs.
    pins: Option<PinDirectory>,
}

impl Attachments {
    /// True for an attached port, even if its tap is gone.
    #[must_use]
    pub fn is_attached(&self, port: &PortName) -> bool {
        self.ports.contains_key(port)
    }

    /// True for a port without programs, which [`Steering::prepare`](super::Steering::prepare) made.
    #[must_use]
    pub fn is_prepared(&self, port: &PortName) -> bool {
        self.ports.get(port).is_some_and(|held| held.programs.is_none())
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

    /// Names of attached ports in events.
    pub fn port_keys(&self) -> impl Iterator<Item = (PortKey, &PortName)> {
        self.ports.iter().map(|(name, attached)| (attached.key, name))
    }

    /// Whether an attached port is closed ([`Steering::set_closed`](super::Steering::set_closed)); `None` if it is not
    /// attached.
    #[must_use]
    pub fn is_closed(&self, port: &PortName) -> Option<bool> {
        self.ports.get(port).map(|attached| attached.closed)
    }

    /// The identities bound on an attached port, with their slots.
    #[must_use]
    pub fn bound_on(&self, port: &PortName) -> Vec<(Mac, Slot)> {
        let slots = self.ports.get(port).map(|attached| &attached.slots);
        slots.into_iter().flatten().map(|(mac, slot)| (*mac, *slot)).collect()
    }

    /// Which program steers a port now; `None` if the port is not attached.
    #[must_use]
    pub fn steered_by(&self, port: &PortName) -> Option<SteeringProgram> {
        self.ports.get(port).map(|attached| attached.programs.by())
    }

    /// How answers reach the guest of a port, as of the last check of its device.
    #[must_use]
    pub fn answer_path(&self, port: &PortName) -> AnswerPath {
        match self.ports.get(port) {
            Some(attached) if attached.looks.takes() == Some(false) => {
                if self.home_device(attached).is_some() { AnswerPath::Classifier } else { AnswerPath::None }
            }
            _ => AnswerPath::Redirect,
        }
    }

    /// The device that a port's name refers to now; finds it like [`exists`](super::exists). A new tap, or one of the
    /// same index in a new namespace, is not the attached device.
    ///
    /// # Errors
    /// If the namespace cannot be opened or entered.
    pub fn find(&self, port: &PortName) -> Result<DeviceLookup, SteerError> {
        let (cookie, ifindex) = match search(port)? {
            SearchResult::Device(cookie, ifindex) => (cookie, ifindex),
            SearchResult::NoDevice => return Ok(DeviceLookup::Nothing),
            SearchResult::NoNamespace => return Ok(DeviceLookup::NoNamespace),
        };
        let same = |held: &AttachedPort| {
            !held.gone
                && !held.programs.is_none()
                && held.key.ifindex == ifindex
                && cookie.is_none_or(|now| now == held.cookie)
        };
        Ok(if self.ports.get(port).is_some_and(same) { DeviceLookup::Attached } else { DeviceLookup::Other })
    }

    /// The name under which a device is attached, whatever its current name.
    #[must_use]
    pub fn port_of(&self, device: &DeviceEvent) -> Option<&PortName> {
        self.places.get(&(device.cookie, device.ifindex))
    }

    /// A MAC from which frames to the metadata addresses arrive on an attached port, although it is not registered
    /// there: they are dropped. `None` if none was noticed lately.
    #[must_use]
    pub fn unknown_sender_on(&self, port: &PortName) -> Option<UnknownSender> {
        let attached = self.ports.get(port)?;
        let sender = self.senders.on(attached.key, Instant::now());
        sender.filter(|sender| !attached.slots.contains_key(&sender.mac))
    }

    /// The attached ports on which such a MAC was noticed lately, each with the MAC.
    #[must_use]
    pub fn unknown_senders(&self) -> Vec<(&PortName, UnknownSender)> {
        let senders = self.senders.all(Instant::now());
        if senders.is_empty() {
            return Vec::new();
        }
        let known = self.ports.iter().filter_map(|(port, attached)| {
            let sender = senders.get(&attached.key);
            let sender = sender.filter(|sender| !attached.slots.contains_key(&sender.mac));
            sender.map(|sender| (port, *sender))
        });
        known.collect()
    }

    /// The directory of pins, if anything is pinned.
    #[must_use]
    pub fn pins(&self) -> Option<&Path> {
        self.pins.as_ref().map(PinDirectory::directory)
    }

    /// Renames a port to another name of the same device, and changes nothing else.
    pub fn rename(&mut self, from: &PortName, to: &PortName) {
        let Some(attached) = self.ports.remove(from) else { return };
        self.places.insert(attached.location(), to.clone());
        self.bound.values_mut().filter(|(port, _)| port == from).for_each(|(port, _)| port.clone_from(to));
        self.ports.insert(to.clone(), attached);
    }

    /// Records that a device was deleted. A new device of the same name and index is then not mistaken for the
    /// attached one. Does nothing for other changes.
    pub fn mark_deleted(&mut self, device: &DeviceEvent) {
        if device.gone
            && let Some(port) = self.places.get(&(device.cookie, device.ifindex))
            && let Some(attached) = self.ports.get_mut(port)
        {
            attached.gone = true;
        }
    }
}

// Which ports there are, and what is bound on them.
impl Attachments {
    pub(super) fn new(
        object: Object,
        mode: SteeringMode,
        senders: UnknownSenders,
        home: Home,
        pins: Option<PinDirectory>,
    ) -> Self {
        Self {
            ports: BTreeMap::new(),
            places: HashMap::new(),
            bound: BTreeMap::new(),
            checks: Checks::default(),
            object,
            mode,
            last_examined: None,
            last_polled: None,
            rejected: 0,
            senders,
            home,
            pins,
        }
    }

    /// The agent's own namespace.
    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    /// The names of the ports.
    pub(super) fn names(&self) -> Vec<PortName> {
        self.ports.keys().cloned().collect()
    }

    /// The keys of the ports in the maps.
    pub(super) fn keys(&self) -> Vec<PortKey> {
        self.ports.values().map(|attached| attached.key).collect()
    }

    /// The key of a port in the maps.
    pub(super) fn key_of(&self, port: &PortName) -> Result<PortKey, SteerError> {
        let attached = self.ports.get(port);
        attached.map(|attached| attached.key).ok_or_else(|| SteerError::NotAttached { port: port.clone() })
    }

    /// The port that a device is.
    pub(super) fn holder_of(&self, place: PortLocation) -> Option<PortName> {
        self.places.get(&place).cloned()
    }

    /// True for a port whose device was deleted.
    pub(super) fn is_gone(&self, port: &PortName) -> bool {
        self.ports.get(port).is_some_and(|held| held.gone)
    }

    /// True if no further port fits.
    pub(super) fn is_full(&self) -> bool {
        self.ports.len() >= MAX_PORTS as usize
    }

    /// Enters a port, with the slots bound on it.
    pub(super) fn insert(&mut self, port: &PortName, attached: AttachedPort) {
        self.places.insert(attached.location(), port.clone());
        self.bound.extend(attached.slots.iter().map(|(mac, slot)| (*slot, (port.clone(), *mac))));
        self.ports.insert(port.clone(), attached);
    }

    /// Removes a port with the slots bound on it.
    pub(super) fn remove(&mut self, port: &PortName) -> Option<AttachedPort> {
        let attached = self.ports.remove(port)?;
        self.places.remove(&attached.location());
        attached.slots.values().for_each(|slot| drop(self.bound.remove(slot)));
        Some(attached)
    }

    /// True if this identity has this slot.
    pub(super) fn is_bound(&self, port: &PortName, mac: Mac, slot: Slot) -> bool {
        self.bound.get(&slot).is_some_and(|(held, known)| held == port && *known == mac)
    }

    /// All bound identities.
    pub(super) fn identities(&self) -> impl Iterator<Item = (Cookie, SlotBinding)> {
        self.ports.values().flat_map(|AttachedPort { cookie, key, slots, .. }| {
            slots.iter().map(|(mac, slot)| (*cookie, SlotBinding { slot: *slot, port: *key, mac: *mac }))
        })
    }

    /// Binds a free slot; called in the port's namespace.
    pub(super) fn bind(
        &mut self,
        port: &PortName,
        mac: Mac,
        slot: Slot,
        hub: u32,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let now = place(port)?;
        let Some(attached) = self.ports.get(port) else {
            return Err(SteerError::NotAttached { port: port.clone() });
        };
        let (key, mtu) = (attached.key, attached.device.mtu);
        let device = self.home_device(attached);
        if now != (attached.cookie, Some(key.ifindex)) {
            let found = if now.1.is_some() { "another device of that name" } else { "none" };
            return Err(SteerError::PortGone { port: port.clone(), found: found.into() });
        }
        if let Some(former) = attached.slots.get(&mac).copied().filter(|former| *former != slot) {
            self.unbind(former, maps)?;
        }
        maps.set_mtu(slot, mtu);
        maps.set_home(slot, device)?;
        maps.bind(SlotBinding { slot, port: key, mac }, hub)?;
        self.bound.insert(slot, (port.clone(), mac));
        if let Some(attached) = self.ports.get_mut(port) {
            attached.slots.insert(mac, slot);
        }
        Ok(())
    }

    /// Frees a slot. A free slot is not an error.
    pub(super) fn unbind(&mut self, slot: Slot, maps: &mut Maps) -> Result<(), SteerError> {
        let Some((port, mac)) = self.bound.remove(&slot) else { return Ok(()) };
        let Some(attached) = self.ports.get_mut(&port) else { return Ok(()) };
        attached.slots.remove(&mac);
        maps.unbind(SlotBinding { slot, port: attached.key, mac })
    }

    /// Frees a slot once its port belongs to this agent.
    pub(super) fn unbind_later(&mut self, slot: Slot) {
        self.bound.remove(&slot);
    }

    /// Slots unbound here while the other agent still owned the ports.
    pub(super) fn unbound_meanwhile(&self) -> Vec<(PortName, Mac, Slot)> {
        let all = self.ports.iter().flat_map(|(port, attached)| {
            attached.slots.iter().map(move |(mac, slot)| (port.clone(), *mac, *slot))
        });
        all.filter(|(.., slot)| !self.bound.contains_key(slot)).collect()
    }

    /// Frees a slot that was unbound during a takeover, unless the identity has another one now.
    pub(super) fn unbind_now(
        &mut self,
        port: &PortName,
        mac: Mac,
        slot: Slot,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get_mut(port).filter(|held| held.slots.get(&mac) == Some(&slot))
        else {
            return Ok(());
        };
        attached.slots.remove(&mac);
        self.bound.remove(&slot);
        maps.unbind(SlotBinding { slot, port: attached.key, mac })
    }

    /// Follows the slots that another agent has bound meanwhile.
    pub(super) fn rebind(&mut self, mut by_key: HashMap<PortKey, BTreeMap<Mac, Slot>>, maps: &Maps) {
        for (port, attached) in &mut self.ports {
            let now = by_key.remove(&attached.key).unwrap_or_default();
            for (mac, slot) in &attached.slots {
                if now.get(mac) != Some(slot) {
                    self.bound.remove(slot);
                }
            }
            now.values().for_each(|slot| maps.set_mtu(*slot, attached.device.mtu));
            self.bound.extend(now.iter().map(|(mac, slot)| (*slot, (port.clone(), *mac))));
            attached.slots = now;
        }
    }

    /// Forgets the ports that another agent has detached meanwhile.
    pub(super) fn forget_gone(&mut self, is_gone: impl Fn(&PortLocation) -> bool) {
        for (place, port) in self.places.clone().into_iter().filter(|(place, _)| is_gone(place)) {
            self.places.remove(&place);
            if let Some(attached) = self.remove(&port) {
                self.object.release(attached.cookie);
            }
        }
    }
}

// Programs on ports, and the numbers of namespaces.
impl Attachments {
    /// Enters a device as a port without programs; called in its namespace.
    pub(super) fn prepare(
        &mut self,
        port: &PortName,
        (cookie, ifindex): PortLocation,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let key = PortKey { netns: self.object.acquire(cookie)?, ifindex };
        match maps.enter(port, key, false) {
            Ok(device) => {
                self.insert(port, AttachedPort::new(cookie, key, Programs::none(), device));
                Ok(())
            }
            Err(error) => {
                let removed = self.let_go(cookie, key, Programs::none(), true, maps);
                Err(removed.err().unwrap_or(error))
            }
        }
    }

    /// Attaches the programs of a prepared port; called in its namespace. After an error it is as before.
    pub(super) fn complete(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(AttachedPort { cookie, key, .. }) = self.ports.get(port) else { return Ok(()) };
        let (cookie, key, mut programs) = (*cookie, *key, Programs::none());
        let completed = self
            .take_from_other_versions(port, cookie, key, &mut programs)
            .and_then(|()| self.attach_programs(port, cookie, key, &mut programs));
        let remains = if completed.is_err() {
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
        completed
    }

    /// Attaches programs to a device that is not a port yet; called in its namespace. From then on no frame for a
    /// metadata address passes.
    pub(super) fn attach(
        &mut self,
        port: &PortName,
        (cookie, ifindex): PortLocation,
        closed: bool,
        maps: &mut Maps,
    ) -> Result<AttachedPort, SteerError> {
        let key = PortKey { netns: self.object.acquire(cookie)?, ifindex };
        let mut programs = Programs::none();
        let device = match self.own(port, cookie, key, closed, &mut programs, maps) {
            Ok(device) => device,
            Err(error) => {
                let removed = self.let_go(cookie, key, programs, true, maps);
                return Err(removed.err().unwrap_or(error));
            }
        };
        Ok(AttachedPort { closed, ..AttachedPort::new(cookie, key, programs, device) })
    }

    /// Attaches programs to a port that no other agent owns. Returns its device. After an error some programs may be
    /// attached.
    fn own(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
        closed: bool,
        programs: &mut Programs,
        maps: &mut Maps,
    ) -> Result<PortDevice, SteerError> {
        let device = maps.enter(port, key, closed)?;
        self.take_from_other_versions(port, cookie, key, programs)?;
        self.attach_programs(port, cookie, key, programs)?;
        Ok(device)
    }

    /// Frees the slots of a removed port and restores its tap if it still exists.
    pub(super) fn detach(&mut self, attached: AttachedPort, maps: &mut Maps) -> Result<(), SteerError> {
        let AttachedPort { cookie, key, slots, programs, .. } = attached;
        let mut outcome = Ok(());
        for (mac, slot) in slots {
            outcome = outcome.and(maps.unbind(SlotBinding { slot, port: key, mac }));
        }
        let is_off = outcome.is_ok();
        outcome.and(self.let_go(cookie, key, programs, is_off, maps))
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
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let remains = programs.detach_all();
        let removed = maps.remove_port(key);
        self.senders.forget(key);
        if !is_off || !remains.is_empty() || removed.is_err() {
            self.object.retire(cookie);
        }
        self.checks.keep(remains);
        self.object.release(cookie);
        removed
    }

    /// Drops every port: unless they are pinned, they stop steering.
    pub(super) fn drop_ports(&mut self) {
        self.ports.clear();
    }

    /// Drops the references to the ports' links, so that only their pins hold them.
    pub(super) fn leave_to_pins(&mut self) {
        self.ports.values_mut().for_each(|attached| attached.programs.leave_to_pins());
    }

    /// Closes a port, or opens it for the identities bound on it.
    pub(super) fn set_closed(
        &mut self,
        port: &PortName,
        closed: bool,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port).filter(|attached| attached.closed != closed) else {
            return Ok(());
        };
        let key = attached.key;
        let device = self.home.netns_of(port)?.run(|| maps.enter(port, key, closed))?;
        if let Some(attached) = self.ports.get_mut(port) {
            attached.closed = closed;
        }
        self.fit(port, device.mtu, true, maps)
    }

    /// Loads the programs behind all stubs, and calls them from the stubs if this agent owns the ports.
    pub(super) fn share_programs(&mut self, classifier: bool) -> Result<(), SteerError> {
        if classifier { self.object.share_classifier() } else { self.object.share() }
    }

    /// Puts our programs behind all stubs.
    pub(super) fn take_over_stubs(&mut self) -> Result<(), SteerError> {
        self.object.take_over()
    }

    /// Loads a program of a namespace with ports, so that attaching it takes no time.
    pub(super) fn load(&mut self, on: PinnedProgram, cookie: Cookie) -> Result<(), SteerError> {
        match on {
            PinnedProgram::Tcx => self.object.classifier(cookie).map(drop),
            PinnedProgram::Xdp | PinnedProgram::Hub | PinnedProgram::HubTcx => {
                self.object.port(cookie).map(drop)
            }
        }
    }

    /// Counts one more port in a namespace that the previous agent numbered. False if the number is not available.
    pub(super) fn acquire_as(&mut self, cookie: Cookie, number: u32) -> bool {
        self.object.acquire_as(cookie, number)
    }

    /// Counts one port less in a namespace.
    pub(super) fn release(&mut self, cookie: Cookie) {
        self.object.release(cookie);
    }

    /// Takes a program that is on no port off its device and removes its pin. Otherwise the number in the pin's name is
    /// retired, because frames with it may still come.
    pub(super) fn discard(&mut self, name: LinkName, pin: &Pin) {
        let remains = match HeldLink::open(pin.clone()) {
            Ok(held) => held.detach_and_unpin(),
            // It is no link, or it cannot be opened, so nothing is proven.
            Err(error) => {
                tracing::warn!("{error}");
                self.object.retire_number(name.netns);
                if let Err(error) = pin.remove() {
                    tracing::warn!("{error}");
                }
                None
            }
        };
        if let Some(held) = remains {
            self.object.retire_number(name.netns);
            self.checks.keep(vec![held]);
        }
    }

    /// Replaces the program of a pinned link with ours.
    pub(super) fn replace(
        &mut self,
        on: PinnedProgram,
        cookie: Cookie,
        path: &Pin,
    ) -> Result<FdLink, AttachError> {
        match on {
            PinnedProgram::Tcx => replace_tcx(path, self.object.classifier(cookie).map_err(AttachError::of)?),
            PinnedProgram::Xdp | PinnedProgram::Hub | PinnedProgram::HubTcx => {
                replace_xdp(path, self.object.port(cookie).map_err(AttachError::of)?)
            }
        }
    }

    /// Replaces the programs of pinned links with ours.
    pub(super) fn update(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
        links: &[PinnedProgram],
        programs: &mut Programs,
    ) -> Result<(), SteerError> {
        for on in links {
            let Some(path) = self.pin_of(*on, cookie, key) else { continue };
            match self.replace(*on, cookie, &path) {
                Ok(link) => programs.put(*on, Some(HeldLink::replaced(link, path)?)),
                // The device is gone, and another has its index.
                Err(AttachError::Gone) => path.remove()?,
                Err(refusal) => return Err(refusal.about(on.name(), port, key.ifindex)),
            }
        }
        Ok(())
    }

    /// Replaces the programs of a port that another agent pinned with ours. [`Attachments::follow_guests`] attaches
    /// what the mode requires.
    pub(super) fn take_over(&mut self, port: &PortName, maps: &mut Maps) -> Result<(), SteerError> {
        let Some(AttachedPort { cookie, key, device, .. }) = self.ports.get(port) else { return Ok(()) };
        let (cookie, key, device) = (*cookie, *key, *device);
        // The other agent may have switched programs since we read the pins.
        let is_pinned = |on: &PinnedProgram| {
            self.pin_of(*on, cookie, key).is_some_and(|pin| matches!(pin.inode(), Ok(Some(_))))
        };
        let links: Vec<PinnedProgram> =
            [PinnedProgram::Xdp, PinnedProgram::Tcx].into_iter().filter(is_pinned).collect();
        let mut programs = Programs::none();
        self.update(port, cookie, key, &links, &mut programs)?;
        if let Some(attached) = self.ports.get_mut(port) {
            attached.programs = programs;
            // The other agent may have closed or opened the port meanwhile.
            attached.closed = maps.is_closed(key);
        }
        // The other agent may have another configuration, and an agent of an earlier version did not write the MTU. The
        // programs are ours by now: the other agent's may not answer all that ours do.
        maps.adopt_port(key, device)
    }

    /// Takes over links that another version of the agent pinned on a port's device: replaces the programs in place
    /// and moves the pins to this version.
    pub(super) fn take_from_other_versions(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
        programs: &mut Programs,
    ) -> Result<(), SteerError> {
        let foreign = self.pins.as_ref().map(|pins| pins.foreign(cookie, key.ifindex)).unwrap_or_default();
        for (version, on, path) in foreign {
            match self.replace(on, cookie, &path) {
                Ok(link) => {
                    programs.put(on, Some(HeldLink::moved(link, self.pin_of(on, cookie, key))?));
                    path.remove()?;
                    tracing::info!(%port, version, "took over the port from another version of the agent");
                }
                Err(AttachError::Gone) => path.remove()?,
                Err(_) => {
                    let holder = format!("the program that {path} keeps there");
                    let remedy = format!("`xdp-imds release` of version {version} detaches it");
                    return Err(SteerError::Occupied { port: port.clone(), holder, remedy });
                }
            }
        }
        Ok(())
    }

    /// The pin of a program's link; `None` without pins.
    pub(super) fn pin_of(&self, on: PinnedProgram, cookie: Cookie, key: PortKey) -> Option<Pin> {
        let name = LinkName { on, netns: key.netns, cookie, ifindex: key.ifindex };
        self.pins.as_ref().filter(|pins| !pins.are_released()).map(|pins| pins.link(name))
    }

    /// The directory of pins and what is in it.
    pub(super) fn pin_directory(&self) -> Option<&PinDirectory> {
        self.pins.as_ref()
    }

    /// Pins the maps for the next agent, replacing those pinned there.
    pub(super) fn pin_maps(&self) -> Result<(), SteerError> {
        self.pins.as_ref().map_or(Ok(()), |pins| self.object.pin_maps(pins))
    }

    /// Pins the maps that no agent inherits, in place of the previous agent's.
    pub(super) fn pin_own_maps(&self) -> Result<(), SteerError> {
        self.pins.as_ref().map_or(Ok(()), |pins| self.object.pin_own_maps(pins))
    }
}

// Devices of ports: their MTU, their losses, and how answers reach them.
impl Attachments {
    /// The device of a port, if the classifier reaches it.
    fn home_device(&self, attached: &AttachedPort) -> Option<HomeDevice> {
        let by_classifier = attached.looks.takes() == Some(false) || self.mode == SteeringMode::Tcx;
        let device = HomeDevice { ifindex: attached.key.ifindex, by_classifier };
        self.home.delivers_to(attached.cookie).then_some(device)
    }

    /// Updates how answers reach a port's guests after a change of its device.
    pub(super) fn enter_home(&self, port: &PortName, maps: &mut Maps) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port) else { return Ok(()) };
        let device = self.home_device(attached);
        attached.slots.values().try_for_each(|slot| maps.set_home(*slot, device))
    }

    /// Records the MTU of a port's device if it changed. Unless `is_ours`, its entry in the map stays unchanged.
    pub(super) fn update_mtu(
        &mut self,
        device: &DeviceEvent,
        is_ours: bool,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        match (device.mtu, self.places.get(&(device.cookie, device.ifindex)).cloned()) {
            (Some(mtu), Some(port)) => self.fit(&port, mtu, is_ours, maps),
            _ => Ok(()),
        }
    }

    /// Checks the MTUs of all ports' devices in a namespace. Unless `is_ours`, their entries in the map stay unchanged.
    pub(super) fn inspect_mtus(
        &mut self,
        netns: Option<&str>,
        is_ours: bool,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let there = self.ports.iter().filter(|(port, _)| port.netns.as_deref() == netns);
        let there: HashMap<_, _> =
            there.map(|(port, attached)| (attached.location(), port.clone())).collect();
        let Some(port) = there.values().next() else { return Ok(()) };
        let list = || Ok::<_, LinkError>((netns::cookie()?, netlink::list()?));
        let (cookie, links) = self.home.netns_of(port)?.run(list)?;
        links.iter().try_for_each(|link| match there.get(&(cookie, link.header.index)) {
            Some(port) => self.fit(port, netlink::mtu_of(link), is_ours, maps),
            None => Ok(()),
        })
    }

    fn fit(&mut self, port: &PortName, mtu: u32, is_ours: bool, maps: &mut Maps) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get_mut(port).filter(|attached| attached.device.mtu != mtu) else {
            return Ok(());
        };
        attached.device.mtu = mtu;
        attached.slots.values().for_each(|slot| maps.set_mtu(*slot, mtu));
        tracing::debug!(%port, mtu, "the MTU of the device changed");
        // A closed port serves no identity; it gets its MTU when it is opened. That of another agent's port is written
        // when it is taken over.
        if attached.closed || !is_ours { Ok(()) } else { maps.fit_port(attached.key, mtu) }
    }

    /// One port of each of the next namespaces whose devices are to be polled.
    pub(super) fn next_elsewhere(&mut self) -> Vec<PortName> {
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

    /// Records the total of frames that a device rejected. False if it is not a port's.
    pub(super) fn note_rejected(&mut self, place: PortLocation, total: u64) -> bool {
        let port = self.places.get(&place).and_then(|port| self.ports.get_mut(port));
        let Some(attached) = port.filter(|attached| !attached.gone) else { return false };
        self.rejected += attached.looks.note(total);
        true
    }

    /// Records whether a device accepts redirected frames. Returns its port if that changed.
    pub(super) fn note_takes(&mut self, place: PortLocation, takes: bool) -> Option<PortName> {
        let port = self.places.get(&place)?;
        let attached = self.ports.get_mut(port).filter(|attached| !attached.gone)?;
        attached.looks.note_takes(takes).then(|| port.clone())
    }

    /// Frames that ports' devices rejected since the first poll.
    pub(super) fn rejected(&self) -> u64 {
        self.rejected
    }
}
