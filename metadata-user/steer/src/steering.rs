//! The owners together: starts and ends steering, and does what needs more than one of them.
//!
//! Ports of a previous agent that still runs are not changed here: what would change one is refused or deferred until
//! the takeover is complete (`takeover`).

use metadata_common::mac::Mac;
use metadata_common::maps::{ANSWER_REQUESTS, MAX_SLOTS, Slot, name};
use metadata_common::port::PortName;
use metadata_links::devices::DeviceEvent;
use metadata_links::netns::{self, Netns};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::attachments::{Attachments, BoundIdentity, SteeringProgram};
use super::config::{PortLimits, PreviousAgent, SteerConfig, SteeringMode};
use super::devices::{Losses, NamespacePoll, place};
use super::documents::DocumentTable;
use super::error::{ProbeError, errno};
use super::features::{Feature, Features};
use super::hub_devices::{self, HubGuard};
use super::hubs::Hubs;
use super::maps::{self, Maps, SlotBinding};
use super::object::Object;
use super::pins::PinDirectory;
use super::takeover::{AdoptablePins, InheritedPorts};
use super::trace::{ProgramReports, TraceError, TraceSession};
use super::{HUB_QUEUES, HUBS_OF_A_SIDE, SteerError, attach};

/// Steers ports to the hubs until it is dropped.
pub struct Steering {
    // On drop, ports stop steering (unless pinned), then the hubs' devices are removed with `hubs`, and last the lock of
    // the pins goes with `attachments`.
    takeover: InheritedPorts,
    maps: Maps,
    documents: Option<DocumentTable>,
    reports: ProgramReports,
    hubs: Hubs,
    attachments: Attachments,
}

/// With pins, ports keep their programs but deliver nowhere, so no frame for a metadata address leaves them.
impl Drop for Steering {
    fn drop(&mut self) {
        self.hubs.detach();
        if let Some(pins) = self.attachments.pin_directory() {
            pins.clear_release();
        }
        for hub in self.hubs.all() {
            if let Err(error) = self.maps.clear_hub(hub.number) {
                tracing::warn!("{error}");
            }
        }
        self.attachments.drop_ports();
    }
}

impl Steering {
    /// Makes the hub in the calling thread's namespace and loads the programs. Ports can be attached afterwards.
    ///
    /// It replaces hub devices that a killed agent left behind, and inherits what that agent pinned. With
    /// [`PreviousAgent::TakeOver`] the pins belong to a running agent until [`Steering::take_over_all`].
    ///
    /// # Errors
    /// A wrong configuration, a missing privilege or kernel feature, or a hub name or pins in use. Nothing remains
    /// then, and the pins are unchanged.
    pub fn start(config: &SteerConfig) -> Result<Self, SteerError> {
        hub_devices::check_prefix(&config.hub)?;
        let features = Features::ask();
        features.check()?;
        let tcx = features.answer(Feature::Tcx);
        let mode = config.mode.on(&tcx)?;
        if mode != config.mode {
            let found = tcx
                .as_ref()
                .map_or_else(ProbeError::to_string, |_| "this kernel has no tcx classifiers".into());
            tracing::info!(found, "XDP steers each guest also after it has booted");
        }
        let has_tcx = tcx.unwrap_or_default();
        maps::check_served(&config.served, &config.arp_only)?;
        raise_descriptor_limit();
        let home = Arc::new(Netns::own()?);
        if !(1..=HUBS_OF_A_SIDE).contains(&config.hubs) {
            return Err(SteerError::Hubs { found: config.hubs });
        }
        if !(1..=HUB_QUEUES).contains(&config.queues) {
            return Err(SteerError::Queues { found: config.queues });
        }
        if config.adopt.side() > 1 {
            return Err(SteerError::Side { found: config.adopt.side() });
        }
        let alone = config.adopt == PreviousAgent::Alone;
        let pins = config.pins.as_deref().map(|pins| PinDirectory::open(pins, alone)).transpose()?;
        let devices = HubGuard::create(&home, config, has_tcx)?;
        let steering = home.run(|| Self::start_inside(config, (mode, has_tcx), pins, devices))?;
        if let Some(pins) = steering.attachments.pin_directory() {
            pins.share()?;
        }
        Ok(steering)
    }

    fn start_inside(
        config: &SteerConfig,
        (mode, has_tcx): (SteeringMode, bool),
        pins: Option<PinDirectory>,
        devices: HubGuard,
    ) -> Result<Self, SteerError> {
        let taking_over = config.adopt != PreviousAgent::Alone;
        let home = netns::cookie()?;
        let found = AdoptablePins::look(pins.as_ref())?;
        if taking_over {
            found.check_take_over(pins.as_ref())?;
        }
        let adopted = pins.as_ref().filter(|_| found.has_maps());
        let key = adopted.map(|pins| maps::pinned_key(&pins.map(name::AGENT).path())).transpose()?.flatten();
        let key = key.unwrap_or(config.key);
        let first = config.adopt.side() * HUBS_OF_A_SIDE;
        let answers_requests = config.answers & ANSWER_REQUESTS != 0;
        let (mut object, mut ebpf) =
            Object::load((key, config.request_key), first, home, adopted, (taking_over, answers_requests))?;
        let ordinary = object.ordinary().clone();
        let mut maps = Maps::take(&mut ebpf, config, key, ordinary.clone())?;
        let reports = ProgramReports::take(&mut ebpf, ordinary)?;
        let mut documents = answers_requests
            .then(|| DocumentTable::take(&mut ebpf, config.request_key, maps.guest_devices()))
            .transpose()?;
        maps.begin(taking_over.then_some(first))?;
        let hubs = Hubs::start(config, has_tcx, devices, &mut object, ebpf, &mut maps, pins.as_ref())?;
        if let Some(documents) = &mut documents {
            documents.set_completes(hubs.completes_answers());
        }
        let attachments = Attachments::new(object, mode, reports.senders(), hubs.home().clone(), pins);
        let takeover = InheritedPorts::new(taking_over);
        let mut steering = Self { takeover, maps, documents, reports, hubs, attachments };
        let Self { takeover, maps, hubs, attachments, .. } = &mut steering;
        takeover.adopt(found, hubs, attachments, maps)?;
        Ok(steering)
    }

    /// The kernel's tables.
    #[must_use]
    pub fn maps(&self) -> &Maps {
        &self.maps
    }

    /// Like [`Steering::maps`], to change them.
    pub fn maps_mut(&mut self) -> &mut Maps {
        &mut self.maps
    }

    /// Takes the tables of documents, once. `None` if the kernel does not answer requests.
    pub fn take_documents(&mut self) -> Option<DocumentTable> {
        self.documents.take()
    }

    /// The hubs.
    #[must_use]
    pub fn hubs(&self) -> &Hubs {
        &self.hubs
    }

    /// Like [`Steering::hubs`], to take their taps and rings.
    pub fn hubs_mut(&mut self) -> &mut Hubs {
        &mut self.hubs
    }

    /// The attached ports.
    #[must_use]
    pub fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    /// Like [`Steering::attachments`], to change what is known of their names and devices.
    pub fn attachments_mut(&mut self) -> &mut Attachments {
        &mut self.attachments
    }

    /// The ports of a previous agent.
    #[must_use]
    pub fn takeover(&self) -> &InheritedPorts {
        &self.takeover
    }

    /// What the programs report.
    pub fn reports_mut(&mut self) -> &mut ProgramReports {
        &mut self.reports
    }
}

// Ports and identities.
impl Steering {
    /// Loads what ports in other namespaces need. Otherwise the first attach there takes a tenth of a second longer.
    ///
    /// # Errors
    /// If the kernel refuses the program.
    pub fn prepare_for_namespaces(&mut self) -> Result<(), SteerError> {
        self.attachments.share_programs(false)
    }

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

    /// Attaches, and once more after the directory of pins was recreated, if it was removed.
    fn attach_as(&mut self, port: &PortName, closed: bool) -> Result<(), SteerError> {
        let attached = self.visit(port, |steering| steering.attach_inside(port, closed));
        let is_unpinned = attached
            .as_ref()
            .is_err_and(|error| matches!(error, SteerError::Pins(_)) && errno(error) == Some(libc::ENOENT));
        if is_unpinned && !self.takeover.is_running() && self.attachments.mend_pins(Instant::now())? {
            return self.visit(port, |steering| steering.attach_inside(port, closed));
        }
        attached
    }

    fn attach_inside(&mut self, port: &PortName, closed: bool) -> Result<(), SteerError> {
        let (cookie, Some(ifindex)) = place(port)? else {
            return Err(SteerError::PortGone { port: port.clone(), found: "none".into() });
        };
        if let Some(other) = self.attachments.holder_of((cookie, ifindex)) {
            let is_gone = self.attachments.is_gone(&other);
            if other == *port && !is_gone {
                if self.attachments.is_prepared(port) {
                    self.attachments.complete(port)?;
                    self.enter_home(port)?;
                }
                return Ok(());
            }
            // If the device still has the name it is attached under, it has two names. Otherwise the device or its
            // namespace was renamed.
            let here = |place| place == (cookie, Some(ifindex));
            if is_gone || !self.attachments.home().place_of(&other).is_ok_and(here) {
                self.detach(&other)?;
            } else {
                return Err(SteerError::SamePort { port: port.clone(), other });
            }
        }
        self.detach(port)?;
        if self.attachments.is_full() {
            return Err(SteerError::TooManyPorts);
        }
        let (attachments, maps) = (&mut self.attachments, &mut self.maps);
        let claimed = self.takeover.claim(port, (cookie, ifindex), closed, attachments, maps)?;
        let attached = match claimed {
            Some(attached) => attached,
            None if self.takeover.is_running() => {
                return Err(SteerError::TakingOver { port: port.clone() });
            }
            None => {
                check_guest_device(port, ifindex, &self.hubs)?;
                self.attachments.attach(port, (cookie, ifindex), closed, &mut self.maps)?
            }
        };
        self.attachments.insert(port, attached);
        self.enter_home(port)
    }

    /// Begins to make a tap a port: identities can be bound on it, and no program is attached yet. [`Steering::attach`]
    /// completes it, so that its guest's first frame finds the identity; [`Steering::detach`] gives it up. Returns
    /// false, and changes nothing, for a port that is attached or inherited, and during a takeover.
    ///
    /// # Errors
    /// As for [`Steering::attach`].
    pub fn prepare(&mut self, port: &PortName) -> Result<bool, SteerError> {
        self.visit(port, |Self { takeover, maps, hubs, attachments, .. }| {
            let (cookie, Some(ifindex)) = place(port)? else { return Ok(false) };
            let here = (cookie, ifindex);
            let is_known =
                attachments.is_attached(port) || attachments.holder_of(here).is_some() || takeover.has(here);
            if takeover.is_running() || is_known || attachments.is_full() {
                return Ok(false);
            }
            check_guest_device(port, ifindex, hubs)?;
            attachments.prepare(port, here, maps).map(|()| true)
        })
    }

    /// Frees the slots of a port and restores its tap if it still exists. A port that is not attached is not an
    /// error.
    ///
    /// # Errors
    /// If the kernel refuses to clear a table. The port is detached nevertheless.
    pub fn detach(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(attached) = self.attachments.remove(port) else { return Ok(()) };
        if self.takeover.is_running() {
            self.takeover.defer_detach(attached);
            return Ok(());
        }
        self.attachments.detach(attached, &mut self.maps)
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
        self.attachments.key_of(port)?;
        let is_bound = self.attachments.is_bound(port, mac, slot);
        if self.takeover.is_running() {
            return if is_bound { Ok(()) } else { Err(SteerError::TakingOver { port: port.clone() }) };
        }
        if !is_bound {
            self.unbind(slot)?;
        }
        // Bind inherited identities again: the previous agent may have stopped halfway through binding.
        self.visit(port, |Self { maps, hubs, attachments, .. }| {
            attachments.bind(port, mac, slot, hubs.hub_of(slot), maps)
        })
    }

    /// Frees a slot: from now on its guest's frames are neither received nor answered. A free slot is not an error.
    ///
    /// # Errors
    /// If the kernel refuses to clear a table.
    pub fn unbind(&mut self, slot: Slot) -> Result<(), SteerError> {
        if self.takeover.is_running() {
            self.attachments.unbind_later(slot);
            return Ok(());
        }
        self.attachments.unbind(slot, &mut self.maps)
    }

    /// Closes an attached port, or opens it for the identities bound on it. No frame for a served address passes in
    /// between. A port already in that state, or not attached, is left as it is.
    ///
    /// A closed port differs from any other only by a flag in its entry in the kernel's table. Every frame for a served
    /// address is dropped there, whatever its source, and counted as `drop_guarded`. Opening a port, once there is a
    /// record, and closing it again rewrite that entry; the programs stay attached throughout.
    ///
    /// # Errors
    /// [`SteerError::TakingOver`] if another agent still owns the port and has it in the other state. If the kernel
    /// refuses the entry, or the port's namespace cannot be entered.
    pub fn set_closed(&mut self, port: &PortName, closed: bool) -> Result<(), SteerError> {
        if self.takeover.is_running() {
            return match self.attachments.is_closed(port) {
                Some(now) if now != closed => Err(SteerError::TakingOver { port: port.clone() }),
                _ => Ok(()),
            };
        }
        self.attachments.set_closed(port, closed, &mut self.maps)
    }

    /// Sets the limits of every port, including ports attached later. While another agent owns the ports, only those
    /// attached later get them: call it again after the takeover.
    ///
    /// # Errors
    /// If the kernel refuses to change a table. Some ports have the new limits then.
    pub fn set_limits(&mut self, limits: PortLimits) -> Result<(), SteerError> {
        let ours = if self.takeover.is_running() { Vec::new() } else { self.attachments.keys() };
        self.maps.set_limits(limits, &ours)
    }

    /// All bound identities, on attached ports and on inherited ones.
    #[must_use]
    pub fn identities(&self) -> Vec<BoundIdentity> {
        let all = self.attachments.identities().chain(self.takeover.identities());
        let identity = |(cookie, SlotBinding { slot, port, mac }): (netns::Cookie, SlotBinding)| {
            BoundIdentity { netns: port.netns, cookie: cookie.number(), ifindex: port.ifindex, mac, slot }
        };
        all.map(identity).collect()
    }

    /// Names of the taps in a namespace, named as in [`PortName`]; `None` is the agent's own.
    ///
    /// # Errors
    /// If the namespace cannot be entered, or the kernel refuses to list its devices.
    pub fn taps(&self, netns: Option<&str>) -> Result<Vec<String>, SteerError> {
        self.hubs.home().taps(netns)
    }

    /// True if the name refers to a tap.
    ///
    /// # Errors
    /// Like [`Steering::taps`].
    pub fn is_tap(&self, port: &PortName) -> Result<bool, SteerError> {
        self.hubs.home().is_tap(port)
    }

    /// Traces a port, a MAC, or a MAC on a port: frames for the service, with `passing` all others too. A trace of a
    /// port alone does not show answers from user space.
    ///
    /// # Errors
    /// [`TraceError::Busy`] if a trace is running; if the port is not attached or the kernel refuses.
    pub fn trace(
        &self,
        port: Option<&PortName>,
        mac: Option<Mac>,
        passing: bool,
    ) -> Result<TraceSession, TraceError> {
        let key = port.map(|port| self.attachments.key_of(port)).transpose()?;
        self.reports.trace(key, mac, passing)
    }

    /// Updates how answers reach a port's guests after a change of its device. While another agent owns the port,
    /// nothing changes.
    fn enter_home(&mut self, port: &PortName) -> Result<(), SteerError> {
        if self.takeover.is_running() {
            return Ok(());
        }
        self.attachments.enter_home(port, &mut self.maps)
    }

    /// Runs `f` inside a port's namespace.
    fn visit<T: Send>(
        &mut self,
        port: &PortName,
        f: impl FnOnce(&mut Self) -> Result<T, SteerError> + Send,
    ) -> Result<T, SteerError> {
        self.hubs.home().netns_of(port)?.run(|| f(self))
    }
}

// What is done again and again, and on events.
impl Steering {
    /// Switches a port to XDP or to the classifier alone, without losing a frame or letting one through.
    /// [`Steering::follow_guests`] may switch it again.
    ///
    /// # Errors
    /// If the port is not attached, its tap or namespace is gone, or the kernel refuses. The port is then steered as
    /// before.
    pub fn switch(&mut self, port: &PortName, to: SteeringProgram) -> Result<(), SteerError> {
        self.visit(port, |Self { takeover, attachments, .. }| match takeover.is_running() {
            true => Err(SteerError::TakingOver { port: port.clone() }),
            false => attachments.switch_inside(port, to),
        })
    }

    /// Checks the next [`LOOKS_AT_ONCE`](super::LOOKS_AT_ONCE) ports and switches those whose guests have booted or boot
    /// again, at most [`SWITCHES_AT_ONCE`](super::SWITCHES_AT_ONCE). Call it every second or two. In the other modes,
    /// and on a kernel without tcx classifiers, it gives as many ports the program of the mode, if an agent of another
    /// mode steered them before a takeover. A failed switch is logged once and retried.
    pub fn follow_guests(&mut self, now: Instant) {
        if !self.takeover.is_running() {
            self.attachments.follow_guests(now, &self.maps);
        }
    }

    /// Makes the next call of [`Steering::check`] begin a round, which also undoes a forced release.
    pub fn check_soon(&mut self) {
        if !self.takeover.is_running() {
            self.attachments.end_release();
        }
        self.attachments.check_soon();
    }

    /// Notes that a device has changed. If it is one of a hub, the next call of [`Steering::check`] looks at them all, and
    /// not at once: a program that set it down may do so repeatedly.
    pub fn note_device(&mut self, device: &DeviceEvent) {
        if self.hubs.has(device) {
            self.attachments.note_hub_change();
        }
    }

    /// Checks everything at once, and pins again what a forced release unpinned. For a takeover: the next agent needs
    /// every pin, and a forced release was followed by another start, not by the end of the agent.
    pub fn check_all(&mut self, now: Instant) {
        self.check_soon();
        while !self.takeover.is_running() && self.attachments.check(now, &mut self.hubs) {}
    }

    /// Checks the next [`CHECKED_AT_ONCE`](super::CHECKED_AT_ONCE) ports, and repairs what another program has changed.
    /// Call it every two seconds. Does nothing between two rounds, and during a takeover.
    pub fn check(&mut self, now: Instant) {
        if !self.takeover.is_running() {
            self.attachments.check(now, &mut self.hubs);
        }
    }

    /// Like [`Steering::check`], but begins a round if the directory of the pins was removed or is hidden, and was not in
    /// the last round. Call it after [`PinWatch::changed`](crate::PinWatch::changed).
    pub fn check_pins(&mut self, now: Instant) {
        if !self.takeover.is_running() {
            self.attachments.check_pins(now, &mut self.hubs);
        }
    }

    /// Records the MTU of a port's device if it changed. Segments on the port's connections fit it from now on. Other
    /// devices are ignored. The entry of a port that another agent owns stays unchanged until the takeover.
    ///
    /// # Errors
    /// If the kernel refuses to change the port's entry. User space uses the new MTU nevertheless.
    pub fn update_mtu(&mut self, device: &DeviceEvent) -> Result<(), SteerError> {
        let is_ours = !self.takeover.is_running();
        self.attachments.update_mtu(device, is_ours, &mut self.maps)
    }

    /// Checks the MTUs of all ports' devices in a namespace, named as in [`PortName`]; `None` is the agent's own.
    /// Lists the namespace's devices once, and not at all if no port is attached there.
    ///
    /// # Errors
    /// Like [`Steering::update_mtu`], and if the namespace cannot be entered.
    pub fn inspect_mtus(&mut self, netns: Option<&str>) -> Result<(), SteerError> {
        let is_ours = !self.takeover.is_running();
        self.attachments.inspect_mtus(netns, is_ours, &mut self.maps)
    }

    /// Polls the devices of the agent's own namespace and of the next
    /// [`NAMESPACES_AT_ONCE`](super::NAMESPACES_AT_ONCE) others with ports. Returns the ports whose devices began or
    /// ceased to accept redirected frames. Call it every second or two; losses of a port before its first poll are not
    /// counted.
    pub fn inspect_devices(&mut self) -> Vec<PortName> {
        let mut changed = Vec::new();
        match self.hubs.home().netns().run(NamespacePoll::take) {
            Ok(found) => self.note(&found, &mut changed),
            Err(error) => tracing::debug!("cannot poll devices: {error}"),
        }
        for port in self.attachments.next_elsewhere() {
            match self.hubs.home().netns_of(&port).and_then(|netns| netns.run(NamespacePoll::take)) {
                Ok(found) => self.note(&found, &mut changed),
                Err(error) => tracing::debug!(%port, "cannot poll devices: {error}"),
            }
        }
        changed
    }

    fn note(&mut self, found: &NamespacePoll, changed: &mut Vec<PortName>) {
        let NamespacePoll { cookie, dropped, takers } = found;
        for (ifindex, counts) in dropped {
            let is_port = self.attachments.note_rejected((*cookie, *ifindex), counts.tx);
            if !is_port && *cookie == self.hubs.home().cookie() {
                self.hubs.note(*ifindex, *counts);
            }
        }
        for (ifindex, takes) in takers {
            changed.extend(self.attachments.note_takes((*cookie, *ifindex), *takes));
        }
        for port in changed.iter() {
            if let Err(error) = self.enter_home(port) {
                tracing::warn!(%port, "answers keep their former path: {error}");
            }
        }
    }

    /// Lost frames, as of the last poll.
    #[must_use]
    pub fn losses(&self) -> Losses {
        Losses { hubs: self.hubs.losses().to_vec(), ports: self.attachments.rejected() }
    }
}

// The previous agent and the next one.
impl Steering {
    /// The identities bound on an inherited port that is not attached yet, with their slots. Their frames already
    /// arrive, so this also records the MTU of their device. Empty if nothing was inherited on the port, and while
    /// another agent still owns the ports.
    ///
    /// # Errors
    /// If the port's namespace cannot be entered, or its device is gone.
    pub fn inherited_on(&mut self, port: &PortName) -> Result<Vec<(Mac, Slot)>, SteerError> {
        if !self.takeover.has_inherited() || self.takeover.is_running() {
            return Ok(Vec::new());
        }
        self.visit(port, |Self { takeover, maps, .. }| takeover.inherited_on(port, maps))
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
        if self.takeover.is_running() || !self.takeover.has_inherited() {
            return Ok(Vec::new());
        }
        let wanted = wanted.into_iter().map(|port| self.hubs.home().look(port));
        let wanted = wanted.collect::<Result<HashSet<_>, SteerError>>()?;
        Ok(self.takeover.release_all_but(&wanted, &mut self.attachments, &mut self.maps))
    }

    /// Takes all ports over from the agent that is still running, including ports it added since the start. Connections
    /// it has claimed stay with it. Blocks for some microseconds a port; no frame is lost meanwhile.
    ///
    /// The other agent must have stopped changing ports. [`Steering::identities`] lists the bound identities
    /// afterwards.
    ///
    /// # Errors
    /// If the kernel refuses a change. Call it again, or let the other agent continue.
    pub fn take_over_all(&mut self) -> Result<(), SteerError> {
        self.takeover.take_over_all(&self.hubs, &mut self.attachments, &mut self.maps)
    }

    /// Reads the other agent's ports and identities again. Does nothing outside a takeover.
    ///
    /// # Errors
    /// If the pins cannot be read.
    pub fn reread(&mut self) -> Result<(), SteerError> {
        self.takeover.reread(&mut self.attachments, &self.maps)
    }

    /// Ends the special treatment of connections that the departed agent had claimed.
    ///
    /// # Errors
    /// If the kernel refuses a change. Call it again.
    pub fn finish_take_over(&mut self) -> Result<(), SteerError> {
        self.takeover.finish(&self.hubs, &self.attachments, &mut self.maps)
    }

    /// Drops our references to the ports' links, which the new agent owns now. It can detach a program only if
    /// no other process holds the link.
    pub fn leave_to_pins(&mut self) {
        self.attachments.leave_to_pins();
    }

    /// Ends this agent after another agent has taken over ports, pins and tables. Removes only this agent's hubs.
    pub fn leave(self) {
        tracing::info!("another agent took over the ports");
        drop(self);
    }
}

/// Fails for a device that can be no guest's: one of this agent's hubs, or one without Ethernet frames.
fn check_guest_device(port: &PortName, ifindex: u32, hubs: &Hubs) -> Result<(), SteerError> {
    hub_devices::check_port_name(hubs.prefix(), port)?;
    if hubs.has_device(ifindex) {
        return Err(SteerError::HubDevice { port: port.clone() });
    }
    attach::check_device(port, ifindex)
}

/// Raises the soft limit on open files. Thousands of ports need thousands of descriptors, and the usual soft limit is
/// 1,024. That limit exists for `select(2)`, which is not used here.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the soft limit on open files");
    }
}
