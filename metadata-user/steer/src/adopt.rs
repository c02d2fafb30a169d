//! Inherits ports from a previous agent, or finds the ports of one that still runs.
//!
//! *Inherited*: the agent that made the pins has ended for any reason. Its maps become ours, or new maps replace them
//! first if their layout differs. Each inherited port stays closed until [`Steering::attach`] names it. Frames of
//! identities bound on it arrive meanwhile ([`Steering::inherited_on`]). On attach, its programs are replaced in place,
//! and an identity keeps its slot if [`Steering::bind`] requests that slot. [`Steering::release_inherited`] releases
//! ports that were never attached.
//!
//! If the agent that made the pins still runs, its ports are found in the same way but not changed: see `takeover`.

use metadata_common::mac::Mac;
use metadata_common::maps::{Identity, InheritedState, MAX_SLOTS, PortKey, Slot};
use std::collections::{BTreeMap, HashMap, HashSet};

use super::attach::AttachError;
use super::counters::DevicePoll;
use super::held_link::{HeldLink, replace_tcx, replace_xdp};
use super::mode::Programs;
use super::pins::{LinkName, Pin, PinDirectory, PinnedProgram};
use super::ports::{AttachedPort, look, place};
use super::tables::SlotBinding;
use super::{SteerError, Steering, object};
use aya::programs::links::FdLink;
use metadata_common::port::PortName;
use metadata_links::netlink;
use metadata_links::netns::Cookie;

/// Whether another agent runs with the same pins at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreviousAgent {
    /// No other agent runs with these pins; finding one is an error. The pins of an ended agent are inherited.
    #[default]
    Alone,
    /// Another agent runs with these pins, on the other side. Take over from it.
    TakeOver {
        /// The free side: 0 or 1.
        side: u32,
    },
}

impl PreviousAgent {
    /// The side on which hubs are made.
    #[must_use]
    pub fn side(self) -> u32 {
        match self {
            Self::Alone => 0,
            Self::TakeOver { side } => side,
        }
    }
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

/// A port of the previous agent that is not attached here. During a takeover the previous agent still runs.
pub(super) struct InheritedPort {
    pub(super) netns: u32,
    pub(super) links: Vec<PinnedProgram>,
    pub(super) slots: BTreeMap<Mac, Slot>,
}

/// Namespace and interface index of a port.
pub(super) type PortLocation = (Cookie, u32);

impl Steering {
    /// True while inherited ports remain that have not been attached.
    #[must_use]
    pub fn has_inherited(&self) -> bool {
        !self.inherited.is_empty()
    }

    /// All bound identities, on attached ports and on inherited ones.
    #[must_use]
    pub fn identities(&self) -> Vec<BoundIdentity> {
        let bound = |cookie: Cookie, netns, ifindex, slots: &BTreeMap<Mac, Slot>| {
            let cookie = cookie.number();
            let each = slots.iter().map(move |(mac, slot)| (*mac, *slot)).collect::<Vec<_>>();
            each.into_iter().map(move |(mac, slot)| BoundIdentity { netns, cookie, ifindex, mac, slot })
        };
        let named = self.ports.values().flat_map(|AttachedPort { cookie, key, slots, .. }| {
            bound(*cookie, key.netns, key.ifindex, slots)
        });
        let inherited = self.inherited.iter().flat_map(|((cookie, ifindex), inherited)| {
            bound(*cookie, inherited.netns, *ifindex, &inherited.slots)
        });
        named.chain(inherited).collect()
    }

    /// The identities bound on an attached port, with their slots.
    #[must_use]
    pub fn bound_on(&self, port: &PortName) -> Vec<(Mac, Slot)> {
        let slots = self.ports.get(port).map(|attached| &attached.slots);
        slots.into_iter().flatten().map(|(mac, slot)| (*mac, *slot)).collect()
    }

    /// The identities bound on an inherited port that is not attached yet, with their slots. Their frames already
    /// arrive, so this also records the MTU of their device. Empty if nothing was inherited on the port, and while
    /// another agent still owns the ports.
    ///
    /// # Errors
    /// If the port's namespace cannot be entered, or its device is gone.
    pub fn inherited_on(&mut self, port: &PortName) -> Result<Vec<(Mac, Slot)>, SteerError> {
        if self.inherited.is_empty() || self.taking_over {
            return Ok(Vec::new());
        }
        self.visit(port, |steering| {
            let (cookie, ifindex) = place(port)?;
            let inherited =
                ifindex.and_then(|index| Some((index, steering.inherited.get(&(cookie, index))?)));
            let Some((ifindex, inherited)) = inherited else { return Ok(Vec::new()) };
            let mtu = netlink::mtu(&port.ifname, ifindex)?;
            inherited.slots.values().for_each(|slot| steering.guest_devices.set_mtu(*slot, mtu));
            Ok(inherited.slots.iter().map(|(mac, slot)| (*mac, *slot)).collect())
        })
    }

    /// Releases inherited ports that were not attached, except those in `wanted`, whose attach may still succeed.
    /// Returns the slots it frees. The taps, if they still exist, are restored.
    ///
    /// # Errors
    /// If a wanted port cannot be located. Nothing is released then.
    pub fn release_inherited<'a>(
        &mut self,
        wanted: impl IntoIterator<Item = &'a PortName>,
    ) -> Result<Vec<Slot>, SteerError> {
        let mut freed = Vec::new();
        if self.taking_over || self.inherited.is_empty() {
            return Ok(freed);
        }
        let home = self.home;
        let place = |(cookie, ifindex): (Option<Cookie>, u32)| (cookie.unwrap_or(home), ifindex);
        let wanted = wanted.into_iter().map(|port| Ok(self.devices.home.run(|| look(port))?.map(place)));
        let wanted = wanted.collect::<Result<HashSet<_>, SteerError>>()?;
        for ((cookie, ifindex), inherited) in
            self.inherited.extract_if(.., |place, _| !wanted.contains(&Some(*place))).collect::<Vec<_>>()
        {
            freed.extend(self.forget(cookie, ifindex, inherited));
        }
        Ok(freed)
    }

    /// Releases an inherited port and returns the slots that are free then.
    fn forget(&mut self, cookie: Cookie, ifindex: u32, inherited: InheritedPort) -> Vec<Slot> {
        let key = PortKey { netns: inherited.netns, ifindex };
        let (mut programs, mut is_off, mut freed) = (Programs::none(), true, Vec::new());
        for on in inherited.links {
            match self.pin_of(on, cookie, key).map(HeldLink::open).transpose() {
                Ok(held) => programs.put(on, held),
                // The pin is gone or is no link, so the program cannot be asked whether it is off.
                Err(error) => {
                    is_off = false;
                    let removed = self.pin_of(on, cookie, key).map_or(Ok(()), |pin| pin.remove());
                    let removed =
                        removed.map_or_else(|error| error.to_string(), |()| "its pin is removed".into());
                    tracing::warn!("a program of an unused device is out of reach: {error}; {removed}");
                }
            }
        }
        for (mac, slot) in inherited.slots {
            match self.tables.unbind(SlotBinding { slot, port: key, mac, hub: 0 }) {
                Ok(()) => freed.push(slot),
                Err(error) => {
                    is_off = false;
                    tracing::warn!(slot, "cannot unbind, so the slot is not used again: {error}");
                }
            }
        }
        if let Err(error) = self.let_go(cookie, key, programs, is_off) {
            tracing::warn!("cannot clear inherited table entries: {error}");
        }
        tracing::info!(
            ifindex,
            netns = format!("{:x}", cookie.number()),
            "released an inherited port that no record names"
        );
        freed
    }

    /// The pin of a program's link; `None` without pins.
    pub(super) fn pin_of(&self, on: PinnedProgram, cookie: Cookie, key: PortKey) -> Option<Pin> {
        let name = LinkName { on, netns: key.netns, cookie, ifindex: key.ifindex };
        self.pins.as_ref().filter(|pins| !pins.are_released()).map(|pins| pins.link(name))
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
            PinnedProgram::Xdp | PinnedProgram::Hub => {
                replace_xdp(path, self.object.port(cookie).map_err(AttachError::of)?)
            }
        }
    }

    /// Attaches an inherited port under its name; called in its namespace. On an error the port stays closed and
    /// inherited.
    pub(super) fn claim(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        ifindex: u32,
        inherited: InheritedPort,
        closed: bool,
    ) -> Result<AttachedPort, SteerError> {
        let key = PortKey { netns: inherited.netns, ifindex };
        match self.claim_inside(port, cookie, key, &inherited, closed) {
            Ok((programs, mtu)) => {
                inherited.slots.values().for_each(|slot| self.guest_devices.set_mtu(*slot, mtu));
                let bound = inherited.slots.iter().map(|(mac, slot)| (*slot, (port.clone(), *mac)));
                self.bound.extend(bound);
                tracing::debug!(%port, identities = inherited.slots.len(), "attached an inherited port");
                let closed = self.tables.is_closed(key);
                Ok(AttachedPort {
                    cookie,
                    key,
                    slots: inherited.slots,
                    programs,
                    closed,
                    gone: false,
                    looks: DevicePoll::new(ifindex),
                    mtu,
                })
            }
            Err(error) => {
                self.inherited.insert((cookie, ifindex), inherited);
                Err(error)
            }
        }
    }

    fn claim_inside(
        &mut self,
        port: &PortName,
        cookie: Cookie,
        key: PortKey,
        inherited: &InheritedPort,
        closed: bool,
    ) -> Result<(Programs, u32), SteerError> {
        let mut programs = Programs::none();
        if self.taking_over {
            for on in &inherited.links {
                let pin = self.pin_of(*on, cookie, key);
                programs.put(*on, pin.map(HeldLink::open).transpose()?);
                // The other agent still owns the program and may detach it.
                programs.leave_to_pins();
                // Load the program now, so that the takeover itself takes no time.
                match on {
                    PinnedProgram::Tcx => drop(self.object.classifier(cookie)?),
                    PinnedProgram::Xdp | PinnedProgram::Hub => drop(self.object.port(cookie)?),
                }
            }
            return Ok((programs, netlink::mtu(&port.ifname, key.ifindex)?));
        }
        let mtu = self.enter(port, key, closed)?;
        self.update(port, cookie, key, &inherited.links, &mut programs)?;
        self.take_from_other_versions(port, cookie, key, &mut programs)?;
        self.attach_programs(port, cookie, key, &mut programs)?;
        Ok((programs, mtu))
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
                    tracing::info!(%port, version, "took the port over from another version of the agent");
                }
                Err(AttachError::Gone) => path.remove()?,
                Err(_) => {
                    let holder = format!("the program that {path} keeps there");
                    let remedy = format!("`xdp-imds release` of version {version} takes it off");
                    return Err(SteerError::Occupied { port: port.clone(), holder, remedy });
                }
            }
        }
        Ok(())
    }
}

/// The pins found at the start.
pub(super) struct AdoptablePins {
    links: Vec<LinkName>,
    /// Whether the pinned maps can be inherited, and the reason if not.
    pub(super) maps: Result<(), String>,
}

impl AdoptablePins {
    /// Reads the pins.
    pub(super) fn look(pins: Option<&PinDirectory>) -> Result<Self, SteerError> {
        let Some(pins) = pins else { return Ok(Self { links: Vec::new(), maps: Err("no pins".into()) }) };
        let others = pins.other_versions();
        if !others.is_empty() {
            tracing::warn!(?others, "other versions have pins here; they are left alone");
        }
        Ok(Self { links: pins.links()?, maps: object::compare(pins) })
    }
}

impl Steering {
    /// Inherits what is pinned; called once the hubs are ready, before any attach.
    pub(super) fn adopt(&mut self, found: AdoptablePins) -> Result<(), SteerError> {
        if self.pins.is_none() {
            return Ok(());
        }
        let is_fresh = found.maps.is_err();
        self.note_links(&found.links);
        if self.inherited.keys().any(|(cookie, _)| *cookie != self.home) {
            self.object.share()?;
        }
        if self.inherited.iter().any(|((cookie, _), inherited)| {
            *cookie != self.home && inherited.links.contains(&PinnedProgram::Tcx)
        }) {
            self.object.share_classifier()?;
        }
        if self.taking_over {
            return self.note_identities().map(drop);
        }
        if is_fresh {
            self.replace_inherited_maps(found.maps.err().unwrap_or_default())?;
        } else {
            let strays = self.note_identities()?;
            self.sweep_tables(strays)?;
            self.redirect_inherited()?;
            if !self.inherited.is_empty() {
                tracing::info!(ports = self.inherited.len(), "inherited the ports of the previous agent");
            }
        }
        self.tables.set_agent(InheritedState { key: self.key, side: self.side.into(), reserved: 0 })
    }

    /// Records the device of each pinned link.
    fn note_links(&mut self, links: &[LinkName]) {
        for name @ LinkName { on, ifindex, .. } in links.iter().copied() {
            let Some(path) = self.pins.as_ref().map(|pins| pins.link(name)) else { return };
            // A running agent owns its hubs; the hubs of an ended agent no longer exist.
            let stale = match on {
                PinnedProgram::Hub => {
                    !self.taking_over && !self.hubs.iter().any(|hub| hub.inner_ifindex == ifindex)
                }
                PinnedProgram::Xdp | PinnedProgram::Tcx => !self.note_link(name),
            };
            // During a takeover the other agent owns all of them, and may be using this one.
            if stale && !self.taking_over {
                tracing::debug!(link = %name, "removing an unusable pin");
                self.discard(name, path);
            }
        }
    }

    /// Takes the program of an unusable pin off and removes the pin. Otherwise the number in the pin's name is retired,
    /// because frames with it may still come.
    fn discard(&mut self, name: LinkName, pin: Pin) {
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

    /// Records a link on a port; false if the number of its namespace belongs to another one.
    pub(super) fn note_link(&mut self, LinkName { on, netns, cookie, ifindex }: LinkName) -> bool {
        match self.inherited.get_mut(&(cookie, ifindex)) {
            Some(inherited) if inherited.netns == netns => inherited.links.push(on),
            Some(_) => return false,
            None if self.object.acquire_as(cookie, netns) => {
                let inherited = InheritedPort { netns, links: vec![on], slots: BTreeMap::new() };
                self.inherited.insert((cookie, ifindex), inherited);
            }
            None => return false,
        }
        true
    }

    /// Records the identities bound on inherited ports; returns bindings on any other port.
    pub(super) fn note_identities(&mut self) -> Result<Vec<SlotBinding>, SteerError> {
        let places: HashMap<PortKey, PortLocation> = self
            .inherited
            .iter()
            .map(|(place, inherited)| (PortKey { netns: inherited.netns, ifindex: place.1 }, *place))
            .collect();
        let mut seen = HashSet::new();
        let mut strays = Vec::new();
        for (port, mac, Identity { slot, hub, .. }) in self.tables.identities()? {
            let inherited = places.get(&port).and_then(|place| self.inherited.get_mut(place));
            match inherited {
                Some(inherited) if slot < MAX_SLOTS && seen.insert(slot) => {
                    inherited.slots.insert(mac, slot);
                }
                _ => strays.push(SlotBinding { slot, port, mac, hub }),
            }
        }
        Ok(strays)
    }

    /// Clears table entries of ports that are not inherited: their taps disappeared while no agent ran.
    fn sweep_tables(&mut self, strays: Vec<SlotBinding>) -> Result<(), SteerError> {
        for stray in strays {
            self.tables.unbind(stray)?;
        }
        let keys: HashSet<_> = self
            .inherited
            .iter()
            .map(|((_, ifindex), inherited)| PortKey { netns: inherited.netns, ifindex: *ifindex })
            .collect();
        let entered = self.tables.ports()?;
        for key in entered.iter().filter(|key| !keys.contains(key)) {
            self.tables.remove_port(*key)?;
        }
        for key in keys.iter().filter(|key| !entered.contains(key)) {
            self.tables.add_port(*key, self.limited())?;
        }
        self.tables.clear_claims()
    }

    /// Redirects frames of inherited ports to hubs that exist.
    fn redirect_inherited(&mut self) -> Result<(), SteerError> {
        for ((_, ifindex), inherited) in &self.inherited {
            let port = PortKey { netns: inherited.netns, ifindex: *ifindex };
            for (mac, slot) in &inherited.slots {
                let hub = self.hub_of(*slot);
                self.tables.redirect(SlotBinding { slot: *slot, port, mac: *mac, hub }, None)?;
            }
        }
        Ok(())
    }

    /// Replaces pinned maps of another layout. The inherited ports first get our programs with maps in which no
    /// identity is bound. Only then are these maps pinned in place of the others, so the ports stay closed
    /// throughout.
    fn replace_inherited_maps(&mut self, reason: String) -> Result<(), SteerError> {
        if !self.inherited.is_empty() {
            tracing::warn!(
                ports = self.inherited.len(),
                "inherited maps are replaced, connections and slots are lost: {reason}"
            );
        }
        let places: Vec<(PortLocation, u32, Vec<PinnedProgram>)> = self
            .inherited
            .iter()
            .map(|(place, inherited)| (*place, inherited.netns, inherited.links.clone()))
            .collect();
        for ((cookie, ifindex), netns, links) in places {
            let key = PortKey { netns, ifindex };
            self.tables.add_port(key, self.limited())?;
            for on in links {
                let Some(path) = self.pin_of(on, cookie, key) else { continue };
                match self.replace(on, cookie, &path) {
                    Ok(_) => {}
                    Err(AttachError::Gone) => path.remove()?,
                    Err(refusal) => {
                        let error =
                            refusal.about(on.name(), &PortName::local(format!("#{ifindex}")), ifindex);
                        tracing::warn!("an inherited port stays closed: {error}");
                    }
                }
            }
        }
        self.pins.as_ref().map_or(Ok(()), |pins| self.object.pin_maps(pins))
    }
}
