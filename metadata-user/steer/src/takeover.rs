//! The previous agent's side: inherits its ports, or takes them over while it still runs.
//!
//! [`InheritedPorts`] owns the ports of a previous agent that are not attached here, and knows whether that agent still runs.
//! Its invariants: a device is either among these ports or attached, never both; and while the other agent runs, this
//! one changes no map and no program of a port.
//!
//! *Inherited*: the agent that made the pins has ended for any reason. Its maps become ours, or new maps replace them
//! first if their layout differs. Each inherited port stays closed until [`Steering::attach`] names it. Frames of
//! identities bound on it arrive meanwhile ([`Steering::inherited_on`]). On attach, its programs are replaced in place,
//! and an identity keeps its slot if [`Steering::bind`] requests that slot. [`Steering::release_inherited`] releases
//! ports that were never attached.
//!
//! *Takeover*, without losing a frame: with [`PreviousAgent::TakeOver`](super::PreviousAgent) the maps belong to the
//! other agent, and our hubs are on the other side. [`Steering::attach`] and [`Steering::bind`] find the ports and
//! identities of the other agent and change nothing. A port it does not have is refused with
//! [`SteerError::TakingOver`], and so is [`Steering::set_closed`] that would change a port; [`Steering::unbind`] and
//! [`Steering::detach`] are deferred. Limits and MTUs reach the entries of ports once these are ours.
//!
//! [`Steering::take_over_all`] reads the other agent's ports once more, sends every identity to our hubs (except
//! connections that the other agent has claimed) and replaces its programs. From then on the ports are ours.
//! [`Steering::finish_take_over`] ends the special treatment of claimed connections. The other agent ends its part with
//! [`Steering::leave`].
//!
//! [`Steering::attach`]: super::Steering::attach
//! [`Steering::bind`]: super::Steering::bind
//! [`Steering::detach`]: super::Steering::detach
//! [`Steering::finish_take_over`]: super::Steering::finish_take_over
//! [`Steering::inherited_on`]: super::Steering::inherited_on
//! [`Steering::leave`]: super::Steering::leave
//! [`Steering::release_inherited`]: super::Steering::release_inherited
//! [`Steering::set_closed`]: super::Steering::set_closed
//! [`Steering::take_over_all`]: super::Steering::take_over_all
//! [`Steering::unbind`]: super::Steering::unbind

use metadata_common::mac::Mac;
use metadata_common::maps::{Identity, MAX_SLOTS, PortKey, Slot};
use metadata_common::port::PortName;
use metadata_links::netlink;
use metadata_links::netns::Cookie;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::attach::{AttachError, HeldLink};
use super::attachments::{AttachedPort, Attachments, Programs};
use super::devices::{PortLocation, place};
use super::error::errno;
use super::hubs::Hubs;
use super::maps::{Maps, PortDevice, SlotBinding};
use super::pins::{LinkName, PinDirectory, PinnedProgram};
use super::{SteerError, object};

/// A port of the previous agent that is not attached here.
struct InheritedPort {
    netns: u32,
    links: Vec<PinnedProgram>,
    slots: BTreeMap<Mac, Slot>,
}

impl InheritedPort {
    fn key(&self, ifindex: u32) -> PortKey {
        PortKey { netns: self.netns, ifindex }
    }
}

/// The ports of the previous agent.
pub struct InheritedPorts {
    /// Another agent still owns the ports.
    is_running: bool,
    /// Its ports that have not been attached yet, by namespace and interface index.
    inherited: BTreeMap<PortLocation, InheritedPort>,
    /// Identities that were unbound here while the other agent owned their ports, until that is done in the kernel.
    unbound: Vec<(PortName, Mac, Slot)>,
}

impl InheritedPorts {
    /// True while inherited ports remain that have not been attached.
    #[must_use]
    pub fn has_inherited(&self) -> bool {
        !self.inherited.is_empty()
    }

    /// True while another agent still owns the ports.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.is_running
    }
}

impl InheritedPorts {
    pub(super) fn new(is_running: bool) -> Self {
        Self { is_running, inherited: BTreeMap::new(), unbound: Vec::new() }
    }

    /// True if a port of the previous agent is on this device.
    pub(super) fn has(&self, place: PortLocation) -> bool {
        self.inherited.contains_key(&place)
    }

    /// The identities bound on its ports.
    pub(super) fn identities(&self) -> impl Iterator<Item = (Cookie, SlotBinding)> {
        self.inherited.iter().flat_map(|((cookie, ifindex), inherited)| {
            let port = inherited.key(*ifindex);
            inherited
                .slots
                .iter()
                .map(move |(mac, slot)| (*cookie, SlotBinding { slot: *slot, port, mac: *mac }))
        })
    }

    fn bindings(&self) -> Vec<SlotBinding> {
        self.identities().map(|(_, binding)| binding).collect()
    }

    /// Defers detaching a port until it is ours.
    pub(super) fn defer_detach(&mut self, attached: AttachedPort) {
        let (place, netns, links, slots) = attached.into_parts();
        self.inherited.insert(place, InheritedPort { netns, links, slots });
    }

    /// The identities bound on an inherited port, whose device gets its MTU recorded; called in the port's namespace.
    pub(super) fn inherited_on(&self, port: &PortName, maps: &Maps) -> Result<Vec<(Mac, Slot)>, SteerError> {
        let (cookie, ifindex) = place(port)?;
        let inherited = ifindex.and_then(|index| Some((index, self.inherited.get(&(cookie, index))?)));
        let Some((ifindex, inherited)) = inherited else { return Ok(Vec::new()) };
        let mtu = netlink::mtu(&port.ifname, ifindex)?;
        inherited.slots.values().for_each(|slot| maps.set_mtu(*slot, mtu));
        Ok(inherited.slots.iter().map(|(mac, slot)| (*mac, *slot)).collect())
    }
}

// Ports of an agent that has ended.
impl InheritedPorts {
    /// Inherits what is pinned; called once the hubs are ready, before any attach.
    pub(super) fn adopt(
        &mut self,
        found: AdoptablePins,
        hubs: &Hubs,
        attachments: &mut Attachments,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        if attachments.pin_directory().is_none() {
            return Ok(());
        }
        self.note_links(&found.links, hubs, attachments);
        let home = attachments.home().cookie();
        if self.inherited.keys().any(|(cookie, _)| *cookie != home) {
            attachments.share_programs(false)?;
        }
        if self
            .inherited
            .iter()
            .any(|((cookie, _), inherited)| *cookie != home && inherited.links.contains(&PinnedProgram::Tcx))
        {
            attachments.share_programs(true)?;
        }
        if self.is_running {
            return self.note_identities(maps).map(drop);
        }
        if let Err(reason) = found.maps {
            self.replace_maps(reason, attachments, maps)?;
        } else {
            let strays = self.note_identities(maps)?;
            self.sweep_maps(strays, maps)?;
            self.redirect_all(hubs, maps)?;
            attachments.pin_own_maps()?;
            if !self.inherited.is_empty() {
                tracing::info!(ports = self.inherited.len(), "inherited the ports of the previous agent");
            }
        }
        maps.set_inherited_state(hubs.side())
    }

    /// Records the device of each pinned link.
    fn note_links(&mut self, links: &[LinkName], hubs: &Hubs, attachments: &mut Attachments) {
        for name @ LinkName { on, ifindex, .. } in links.iter().copied() {
            let Some(path) = attachments.pin_directory().map(|pins| pins.link(name)) else { return };
            // A running agent owns its hubs; the hubs of an ended agent no longer exist.
            let stale = match on {
                PinnedProgram::Hub | PinnedProgram::HubTcx => {
                    !self.is_running && !hubs.all().iter().any(|hub| hub.inner_ifindex == ifindex)
                }
                PinnedProgram::Xdp | PinnedProgram::Tcx => !self.note_link(name, attachments),
            };
            // During a takeover the other agent owns all of them, and may be using this one.
            if stale && !self.is_running {
                tracing::debug!(link = %name, "removing an unusable pin");
                attachments.discard(name, &path);
            }
        }
    }

    /// Records a link on a port; false if the number of its namespace belongs to another one.
    fn note_link(&mut self, name: LinkName, attachments: &mut Attachments) -> bool {
        let LinkName { on, netns, cookie, ifindex } = name;
        match self.inherited.get_mut(&(cookie, ifindex)) {
            Some(inherited) if inherited.netns == netns => inherited.links.push(on),
            Some(_) => return false,
            None if attachments.acquire_as(cookie, netns) => {
                let inherited = InheritedPort { netns, links: vec![on], slots: BTreeMap::new() };
                self.inherited.insert((cookie, ifindex), inherited);
            }
            None => return false,
        }
        true
    }

    /// Records the identities bound on inherited ports; returns bindings on any other port.
    fn note_identities(&mut self, maps: &Maps) -> Result<Vec<SlotBinding>, SteerError> {
        let places: HashMap<PortKey, PortLocation> =
            self.inherited.iter().map(|(place, inherited)| (inherited.key(place.1), *place)).collect();
        let mut seen = HashSet::new();
        let mut strays = Vec::new();
        for (port, mac, Identity { slot, .. }) in maps.identities()? {
            let inherited = places.get(&port).and_then(|place| self.inherited.get_mut(place));
            match inherited {
                Some(inherited) if slot < MAX_SLOTS && seen.insert(slot) => {
                    inherited.slots.insert(mac, slot);
                }
                _ => strays.push(SlotBinding { slot, port, mac }),
            }
        }
        Ok(strays)
    }

    /// Clears map entries of ports that are not inherited: their taps disappeared while no agent ran.
    fn sweep_maps(&self, strays: Vec<SlotBinding>, maps: &mut Maps) -> Result<(), SteerError> {
        for stray in strays {
            maps.unbind(stray)?;
        }
        let keys: HashSet<_> =
            self.inherited.iter().map(|((_, ifindex), inherited)| inherited.key(*ifindex)).collect();
        let entered = maps.ports()?;
        for key in entered.iter().filter(|key| !keys.contains(key)) {
            maps.remove_port(*key)?;
        }
        for key in keys.iter().filter(|key| !entered.contains(key)) {
            maps.enter_limited(*key)?;
        }
        maps.clear_claims()
    }

    /// Redirects frames of inherited ports to hubs that exist.
    fn redirect_all(&self, hubs: &Hubs, maps: &mut Maps) -> Result<(), SteerError> {
        let mut all = self.bindings().into_iter();
        all.try_for_each(|binding| maps.redirect(binding, hubs.hub_of(binding.slot), None))
    }

    /// Replaces pinned maps of another layout. The inherited ports first get our programs with maps in which no
    /// identity is bound. Only then are these maps pinned in place of the others, so the ports stay closed
    /// throughout.
    fn replace_maps(
        &mut self,
        reason: String,
        attachments: &mut Attachments,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        if !self.inherited.is_empty() {
            tracing::warn!(
                ports = self.inherited.len(),
                "inherited maps are replaced, connections and slots are lost: {reason}"
            );
        }
        for ((cookie, ifindex), inherited) in &self.inherited {
            let key = inherited.key(*ifindex);
            maps.enter_limited(key)?;
            for on in &inherited.links {
                let Some(path) = attachments.pin_of(*on, *cookie, key) else { continue };
                match attachments.replace(*on, *cookie, &path) {
                    Ok(_) => {}
                    Err(AttachError::Gone) => path.remove()?,
                    Err(refusal) => {
                        let error =
                            refusal.about(on.name(), &PortName::local(format!("#{ifindex}")), *ifindex);
                        tracing::warn!("an inherited port stays closed: {error}");
                    }
                }
            }
        }
        attachments.pin_maps()
    }

    /// Attaches a port of the previous agent under its name; called in its namespace. `None` if there is none on this
    /// device. On an error the port stays closed and inherited.
    pub(super) fn claim(
        &mut self,
        port: &PortName,
        place: PortLocation,
        closed: bool,
        attachments: &mut Attachments,
        maps: &mut Maps,
    ) -> Result<Option<AttachedPort>, SteerError> {
        let Some(inherited) = self.inherited.remove(&place) else { return Ok(None) };
        let (cookie, ifindex) = place;
        let key = inherited.key(ifindex);
        let claimed = if self.is_running {
            find_programs(port, cookie, key, &inherited.links, attachments)
        } else {
            replace_programs(port, cookie, key, &inherited.links, closed, attachments, maps)
        };
        match claimed {
            Ok((programs, device)) => {
                inherited.slots.values().for_each(|slot| maps.set_mtu(*slot, device.mtu));
                tracing::debug!(%port, identities = inherited.slots.len(), "attached an inherited port");
                let closed = maps.is_closed(key);
                Ok(Some(AttachedPort::inherited(cookie, key, programs, device, inherited.slots, closed)))
            }
            Err(error) => {
                self.inherited.insert(place, inherited);
                Err(error)
            }
        }
    }

    /// Releases the ports on devices other than these, and returns the slots that are free then.
    pub(super) fn release_all_but(
        &mut self,
        wanted: &HashSet<Option<PortLocation>>,
        attachments: &mut Attachments,
        maps: &mut Maps,
    ) -> Vec<Slot> {
        let mut freed = Vec::new();
        let unused = self.inherited.extract_if(.., |place, _| !wanted.contains(&Some(*place)));
        for (place, inherited) in unused.collect::<Vec<_>>() {
            freed.extend(release(place, inherited, attachments, maps));
        }
        freed
    }
}

/// Opens the programs of a port that another agent still owns, and loads ours, so that the takeover itself takes no
/// time.
fn find_programs(
    port: &PortName,
    cookie: Cookie,
    key: PortKey,
    links: &[PinnedProgram],
    attachments: &mut Attachments,
) -> Result<(Programs, PortDevice), SteerError> {
    let mut programs = Programs::none();
    for on in links {
        let pin = attachments.pin_of(*on, cookie, key);
        programs.put(*on, pin.map(HeldLink::open).transpose()?);
        // The other agent still owns the program and may detach it.
        programs.leave_to_pins();
        attachments.load(*on, cookie)?;
    }
    Ok((programs, PortDevice::look(port, key.ifindex)?))
}

/// Replaces the programs of an inherited port with ours.
fn replace_programs(
    port: &PortName,
    cookie: Cookie,
    key: PortKey,
    links: &[PinnedProgram],
    closed: bool,
    attachments: &mut Attachments,
    maps: &mut Maps,
) -> Result<(Programs, PortDevice), SteerError> {
    let mut programs = Programs::none();
    let device = maps.enter(port, key, closed)?;
    attachments.update(port, cookie, key, links, &mut programs)?;
    attachments.take_from_other_versions(port, cookie, key, &mut programs)?;
    attachments.attach_programs(port, cookie, key, &mut programs)?;
    Ok((programs, device))
}

/// Releases an inherited port and returns the slots that are free then.
fn release(
    (cookie, ifindex): PortLocation,
    inherited: InheritedPort,
    attachments: &mut Attachments,
    maps: &mut Maps,
) -> Vec<Slot> {
    let key = inherited.key(ifindex);
    let (mut programs, mut is_off, mut freed) = (Programs::none(), true, Vec::new());
    for on in inherited.links {
        match attachments.pin_of(on, cookie, key).map(HeldLink::open).transpose() {
            Ok(held) => programs.put(on, held),
            // The pin is gone or is no link, so the program cannot be asked whether it is off.
            Err(error) => {
                is_off = false;
                let removed = attachments.pin_of(on, cookie, key).map_or(Ok(()), |pin| pin.remove());
                let removed =
                    removed.map_or_else(|error| error.to_string(), |()| "its pin is removed".into());
                tracing::warn!("a program of an unused device is out of reach: {error}; {removed}");
            }
        }
    }
    for (mac, slot) in inherited.slots {
        match maps.unbind(SlotBinding { slot, port: key, mac }) {
            Ok(()) => freed.push(slot),
            Err(error) => {
                is_off = false;
                tracing::warn!(slot, "cannot unbind, so the slot is not used again: {error}");
            }
        }
    }
    if let Err(error) = attachments.let_go(cookie, key, programs, is_off, maps) {
        tracing::warn!("cannot clear inherited table entries: {error}");
    }
    tracing::info!(
        ifindex,
        netns = format!("{:x}", cookie.number()),
        "released an inherited port that no record names"
    );
    freed
}

// Ports of an agent that still runs.
impl InheritedPorts {
    /// Takes all ports over from the agent that is still running, including ports it added since the start. They are
    /// ours once every step has succeeded: another call after an error takes all steps again.
    pub(super) fn take_over_all(
        &mut self,
        hubs: &Hubs,
        attachments: &mut Attachments,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        if !self.is_running {
            return Ok(());
        }
        // The bindings that are read next no longer show them.
        self.unbound.append(&mut attachments.unbound_meanwhile());
        self.reread(attachments, maps)?;
        attachments.take_over_stubs()?;
        maps.serve()?;
        for port in attachments.names() {
            for (mac, slot) in attachments.bound_on(&port) {
                let port = attachments.key_of(&port)?;
                redirect(SlotBinding { slot, port, mac }, hubs, maps)?;
            }
            attachments.take_over(&port, maps)?;
        }
        self.bindings().into_iter().try_for_each(|binding| redirect(binding, hubs, maps))?;
        for port in attachments.names() {
            attachments.enter_home(&port, maps)?;
        }
        for (port, mac, slot) in &self.unbound {
            attachments.unbind_now(port, *mac, *slot, maps)?;
        }
        attachments.pin_own_maps()?;
        maps.set_inherited_state(hubs.side())?;
        self.unbound.clear();
        self.is_running = false;
        Ok(())
    }

    /// Ends the special treatment of connections that the departed agent had claimed.
    pub(super) fn finish(
        &self,
        hubs: &Hubs,
        attachments: &Attachments,
        maps: &mut Maps,
    ) -> Result<(), SteerError> {
        let attached = attachments.identities().map(|(_, binding)| binding);
        for binding in attached.chain(self.bindings()) {
            match maps.redirect(binding, hubs.hub_of(binding.slot), None) {
                // The tap is gone.
                Err(error) if errno(&error) == Some(libc::ENOENT) => {}
                other => other?,
            }
        }
        maps.clear_claims()
    }

    /// Reads the other agent's ports and identities again. Does nothing once the takeover is over.
    pub(super) fn reread(&mut self, attachments: &mut Attachments, maps: &Maps) -> Result<(), SteerError> {
        let Some(pins) = attachments.pin_directory().filter(|_| self.is_running) else { return Ok(()) };
        let links = pins.links()?;
        let mut there: BTreeMap<PortLocation, Vec<LinkName>> = BTreeMap::new();
        for name in links.into_iter().filter(|name| !name.on.is_on_hub()) {
            there.entry((name.cookie, name.ifindex)).or_default().push(name);
        }
        let is_gone = |place: &PortLocation| !there.contains_key(place);
        for ((cookie, _), _) in self.inherited.extract_if(.., |place, _| is_gone(place)) {
            attachments.release(cookie);
        }
        attachments.forget_gone(is_gone);
        for (place, names) in there {
            if let Some(inherited) = self.inherited.get_mut(&place) {
                inherited.links = names.iter().map(|name| name.on).collect();
            } else if attachments.holder_of(place).is_none() {
                for name in names {
                    self.note_link(name, attachments);
                }
            }
        }
        self.inherited.values_mut().for_each(|inherited| inherited.slots.clear());
        self.note_identities(maps)?;
        let mut by_key: HashMap<PortKey, BTreeMap<Mac, Slot>> = HashMap::new();
        for (port, mac, identity) in maps.identities()? {
            by_key.entry(port).or_default().insert(mac, identity.slot);
        }
        attachments.rebind(by_key, maps);
        Ok(())
    }
}

/// Sends an identity to its hub on our side, and connections claimed by the other agent to that agent's hub.
fn redirect(binding: SlotBinding, hubs: &Hubs, maps: &mut Maps) -> Result<(), SteerError> {
    let Some(now) = maps.identity(binding.port, binding.mac)? else { return Ok(()) };
    let leaving = if hubs.is_ours(now.hub) { now.drain.checked_sub(1) } else { Some(now.hub) };
    maps.redirect(binding, hubs.hub_of(binding.slot), leaving)
}

/// The pins found at the start.
pub(super) struct AdoptablePins {
    links: Vec<LinkName>,
    /// Whether the pinned maps can be inherited, and the reason if not.
    maps: Result<(), String>,
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

    /// Fails if there is nothing to take over from an agent that still runs.
    pub(super) fn check_take_over(&self, pins: Option<&PinDirectory>) -> Result<(), SteerError> {
        let Err(reason) = &self.maps else { return Ok(()) };
        let no_pins = || SteerError::TakeOverWithoutPins;
        Err(pins.map_or_else(no_pins, |pins| pins.nothing_to_take_over(reason.clone()).into()))
    }

    /// True if the pinned maps become ours.
    pub(super) fn has_maps(&self) -> bool {
        self.maps.is_ok()
    }
}
