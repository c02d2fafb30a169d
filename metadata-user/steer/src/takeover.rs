//! Takes ports over from a running agent without losing a frame.
//!
//! With [`PreviousAgent::TakeOver`](super::PreviousAgent) the maps belong to the other agent, and our hubs are on the
//! other side. [`Steering::attach`] and [`Steering::bind`] find the ports and identities of the other agent and change
//! nothing. A port it does not have is refused with [`SteerError::TakingOver`]; `unbind` and `detach` are deferred.
//!
//! [`Steering::take_over_all`] reads the other agent's ports once more, sends every identity to our hubs (except
//! connections that the other agent has claimed) and replaces its programs. From then on the ports are ours.
//! [`Steering::finish_take_over`] ends the special treatment of claimed connections. The other agent ends its part with
//! [`Steering::leave`].

use metadata_common::mac::Mac;
use metadata_common::maps::{InheritedState, PortKey, Slot};
use std::collections::{BTreeMap, HashMap};

use super::adopt::{InheritedPort, PortLocation};
use super::error::errno;
use super::mode::Programs;
use super::pins::{LinkName, PinnedProgram};
use super::ports::AttachedPort;
use super::tables::SlotBinding;
use super::{HUBS_OF_A_SIDE, SteerError, Steering};
use metadata_common::port::PortName;

impl Steering {
    /// Takes all ports over from the agent that still runs, including ports it added since the start. Connections it
    /// has claimed stay with it. Blocks for some microseconds a port; no frame is lost meanwhile.
    ///
    /// The other agent must have stopped changing ports. [`Steering::identities`] lists the bound identities
    /// afterwards.
    ///
    /// # Errors
    /// If the kernel refuses a change. Call it again, or let the other agent continue.
    pub fn take_over_all(&mut self) -> Result<(), SteerError> {
        if !self.taking_over {
            return Ok(());
        }
        let released = self.released();
        self.look_again()?;
        self.object.take_over()?;
        let (served, arp_only) = self.served.clone();
        self.tables.serve(&served, &arp_only, self.object.ordinary())?;
        for port in self.ports.keys().cloned().collect::<Vec<_>>() {
            self.take_over_port(&port)?;
        }
        self.redirect_unattached()?;
        self.taking_over = false;
        for port in self.ports.keys().cloned().collect::<Vec<_>>() {
            self.enter_home(&port)?;
        }
        for (port, mac, slot) in released {
            if let Some(attached) = self.ports.get_mut(&port)
                && attached.slots.get(&mac) == Some(&slot)
            {
                let key = attached.key;
                attached.slots.remove(&mac);
                self.bound.remove(&slot);
                self.tables.unbind(SlotBinding { slot, port: key, mac, hub: 0 })?;
            }
        }
        self.tables.set_agent(InheritedState { key: self.key, side: self.side.into(), reserved: 0 })
    }

    /// Takes one port over: sends its identities to our hubs, except the connections that the other agent has
    /// claimed, and replaces its programs.
    ///
    /// # Errors
    /// Like [`Steering::take_over_all`].
    pub fn take_over_port(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port) else {
            return Err(SteerError::NotAttached { port: port.clone() });
        };
        let (cookie, key, mtu) = (attached.cookie, attached.key, attached.mtu);
        let slots: Vec<_> = attached.slots.iter().map(|(mac, slot)| (*mac, *slot)).collect();
        for (mac, slot) in slots {
            self.redirect_one(key, mac, slot)?;
        }
        // An agent of an earlier version did not write the MTU.
        self.tables.fit_port(key, mtu)?;
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
        }
        Ok(())
    }

    /// Ends the special treatment of connections that the departed agent had claimed.
    ///
    /// # Errors
    /// If the kernel refuses a change. Call it again.
    pub fn finish_take_over(&mut self) -> Result<(), SteerError> {
        let named = self.ports.values().flat_map(|AttachedPort { key, slots, .. }| {
            slots.iter().map(|(mac, slot)| (*key, *mac, *slot)).collect::<Vec<_>>()
        });
        let inherited = self.inherited.iter().flat_map(|((_, ifindex), inherited)| {
            let key = PortKey { netns: inherited.netns, ifindex: *ifindex };
            inherited.slots.iter().map(|(mac, slot)| (key, *mac, *slot)).collect::<Vec<_>>()
        });
        for (port, mac, slot) in named.chain(inherited).collect::<Vec<_>>() {
            let hub = self.hub_of(slot);
            match self.tables.redirect(SlotBinding { slot, port, mac, hub }, None) {
                // The tap is gone.
                Err(error) if errno(&error) == Some(libc::ENOENT) => {}
                other => other?,
            }
        }
        self.tables.clear_claims()
    }

    /// Drops our references to the ports' links, which the new agent owns now. It can detach a program only if
    /// no other process holds the link.
    pub fn handed_over(&mut self) {
        self.ports.values_mut().for_each(|attached| attached.programs.leave_to_pins());
    }

    /// Ends this agent after another agent has taken over ports, pins and tables. Removes only this agent's hubs.
    pub fn leave(self) {
        tracing::info!("another agent took the ports over");
        drop(self);
    }

    /// Slots unbound here while the other agent still owned the ports.
    fn released(&self) -> Vec<(PortName, Mac, Slot)> {
        let all = self.ports.iter().flat_map(|(port, attached)| {
            attached.slots.iter().map(move |(mac, slot)| (port.clone(), *mac, *slot))
        });
        all.filter(|(.., slot)| !self.bound.contains_key(slot)).collect()
    }

    /// Defers detaching a port until it is ours.
    pub(super) fn defer_detach(&mut self, attached: AttachedPort) {
        for slot in attached.slots.values() {
            self.bound.remove(slot);
        }
        let inherited =
            InheritedPort { netns: attached.key.netns, links: attached.programs.on(), slots: attached.slots };
        self.inherited.insert((attached.cookie, attached.key.ifindex), inherited);
    }

    /// Reads the other agent's ports and identities again. Does nothing outside a takeover.
    ///
    /// # Errors
    /// If the pins cannot be read.
    pub fn look_again(&mut self) -> Result<(), SteerError> {
        let Some(pins) = self.pins.as_ref().filter(|_| self.taking_over) else { return Ok(()) };
        let links = pins.links()?;
        let mut there: BTreeMap<PortLocation, Vec<LinkName>> = BTreeMap::new();
        for name in links.into_iter().filter(|name| name.on != PinnedProgram::Hub) {
            there.entry((name.cookie, name.ifindex)).or_default().push(name);
        }
        let gone = |place: &PortLocation| !there.contains_key(place);
        for place in self.inherited.keys().copied().filter(gone).collect::<Vec<_>>() {
            self.inherited.remove(&place);
            self.object.release(place.0);
        }
        for (place, port) in self.places.clone().into_iter().filter(|(place, _)| gone(place)) {
            self.places.remove(&place);
            if let Some(attached) = self.ports.remove(&port) {
                attached.slots.values().for_each(|slot| drop(self.bound.remove(slot)));
                self.object.release(attached.cookie);
            }
        }
        for (place, names) in there {
            if let Some(inherited) = self.inherited.get_mut(&place) {
                inherited.links = names.iter().map(|name| name.on).collect();
            } else if !self.places.contains_key(&place) {
                for name in names {
                    self.note_link(name);
                }
            }
        }
        self.reread_identities()
    }

    fn reread_identities(&mut self) -> Result<(), SteerError> {
        self.inherited.values_mut().for_each(|inherited| inherited.slots.clear());
        self.note_identities()?;
        let mut by_key: HashMap<PortKey, BTreeMap<Mac, Slot>> = HashMap::new();
        for (port, mac, identity) in self.tables.identities()? {
            by_key.entry(port).or_default().insert(mac, identity.slot);
        }
        for (port, attached) in &mut self.ports {
            let now = by_key.remove(&attached.key).unwrap_or_default();
            for (mac, slot) in &attached.slots {
                if now.get(mac) != Some(slot) {
                    self.bound.remove(slot);
                }
            }
            now.values().for_each(|slot| self.guest_devices.set_mtu(*slot, attached.mtu));
            self.bound.extend(now.iter().map(|(mac, slot)| (*slot, (port.clone(), *mac))));
            attached.slots = now;
        }
        Ok(())
    }

    fn redirect_unattached(&mut self) -> Result<(), SteerError> {
        let all: Vec<_> = self
            .inherited
            .iter()
            .flat_map(|((_, ifindex), inherited)| {
                let key = PortKey { netns: inherited.netns, ifindex: *ifindex };
                inherited.slots.iter().map(move |(mac, slot)| (key, *mac, *slot))
            })
            .collect();
        all.into_iter().try_for_each(|(key, mac, slot)| self.redirect_one(key, mac, slot))
    }

    /// Sends an identity to its hub on our side, and connections claimed by the other agent to that agent's hub.
    fn redirect_one(&mut self, port: PortKey, mac: Mac, slot: Slot) -> Result<(), SteerError> {
        let hub = self.hub_of(slot);
        let Some(now) = self.tables.identity(port, mac)? else { return Ok(()) };
        let is_ours = now.hub / HUBS_OF_A_SIDE == self.side;
        let leaving = if is_ours { now.drain.checked_sub(1) } else { Some(now.hub) };
        self.tables.redirect(SlotBinding { slot, port, mac, hub }, leaving)
    }
}
