//! From what a port is to what the plan says it is.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use tracing::{debug, info, warn};

use super::status::spoken;
use super::{Bound, Node, Rendered, Serves};
use crate::agent::slots::IdentityName;
use metadata_base::port::PortName;
use metadata_content::dialect;
use metadata_content::store::{Responses, SlotOutOfRange};
use metadata_datapath::stack::StackStats;
use metadata_datapath::worker::{ControlError, WorkerHandle};
use metadata_feed::registry::RecordId;
use metadata_steer::{Found, SteerError, Way};

/// What is said of a port whose interface is not there.
pub(super) const ABSENT: &str = "no such interface yet; it is attached as soon as it appears";

/// What is said of a port whose guest gets no answer.
pub(super) const UNREACHABLE: &str = "answers do not reach its guest: the device takes no redirected frames. Of a veth, turn GRO on at the other end \
     (`ethtool -K PEER gro on`); else give the guest a tap. It is served as soon as it takes them";

/// What is said of a port whose guest is served the slower way.
pub(super) const BY_CLASSIFIER: &str = "served, at more cost a frame: the device takes no redirected frames, so a classifier hands it its answers. Of a \
     veth, turn GRO on at the other end (`ethtool -K PEER gro on`)";

impl Node {
    /// Brings one port to the plan.
    pub(super) fn settle(&mut self, port: &PortName) {
        let (start, rendered) = (Instant::now(), self.rendering);
        if !self.plan.wants(port) {
            self.attaching.lost(port);
            if self.is_guarded(port) {
                return self.close(port);
            }
            self.told.remove(port);
            return self.give_up_unguarded(port);
        }
        for who in self.speakers(port).filter(|who| !self.plan.knows(who)).cloned().collect::<Vec<_>>() {
            self.unbind(&who);
        }
        let fresh = !self.steering.is_attached(port);
        if !self.own(port) || !self.open(port) {
            return self.answer_on(port);
        }
        if fresh {
            self.go_on_with(port);
        }
        let speakers: Vec<_> =
            self.plan.speakers(port).map(|(who, key)| (who.clone(), key.cloned())).collect();
        for (who, key) in speakers {
            self.serve(&who, key.as_ref());
        }
        if self.steering.way_to(port) == Way::None {
            self.trouble(port, UNREACHABLE);
        }
        self.attaching.done(port, fresh);
        if fresh {
            self.attaching.took(start.elapsed().saturating_sub(self.rendering - rendered));
        }
    }

    /// Identities that an agent before bound on a port keep their slots, or go.
    pub(super) fn go_on_with(&mut self, port: &PortName) {
        for (mac, slot) in self.steering.bound_on(port) {
            let who = IdentityName { port: port.clone(), mac };
            if self.plan.knows(&who) {
                self.slots.claim(&who, slot);
                continue;
            }
            match self.steering.unbind(slot) {
                Ok(()) => self.let_go(slot),
                Err(error) => warn!(%port, %mac, slot, "the slot is not used again; unbinding: {error}"),
            }
        }
    }

    /// Gives guests of ports that an agent before left their answers, until all have them or the time is over.
    pub(super) fn answer_left(&mut self, start: Instant, for_at_most: Duration) {
        if self.left.is_none() {
            let all = self.steering.has_left().then(|| self.plan.ports().cloned());
            self.left = Some(all.into_iter().flatten().collect());
        }
        while start.elapsed() < for_at_most
            && let Some(port) = self.left.as_mut().and_then(BTreeSet::pop_first)
        {
            self.answer_on(&port);
        }
    }

    /// Gives guests their answers whom an agent before bound on a port that is not attached again.
    fn answer_on(&mut self, port: &PortName) {
        let bound = self.steering.left_on(port).unwrap_or_else(|error| {
            debug!(%port, "its guests wait until it is attached: {error}");
            Vec::new()
        });
        for (mac, slot) in bound {
            let who = IdentityName { port: port.clone(), mac };
            let Some(key) = self.plan.holder(&who).cloned() else { continue };
            let Some(responses) = self.responses(&key) else { continue };
            match self.store_in(slot, &who, Some(&key), &Serves::Responses(responses)) {
                Ok(()) => self.wake(slot),
                Err(error) => warn!(%port, slot, "{error}"),
            }
        }
    }

    /// Frees the slot of an identity that nobody named.
    pub(super) fn let_go(&mut self, slot: Slot) {
        if let Err(error) = self.store.withdraw(slot) {
            warn!(slot, "{error}");
        }
        match self.worker(slot).and_then(|worker| worker.forget(slot)) {
            Ok(()) => self.slots.give_up(slot, Instant::now()),
            Err(error) => warn!(slot, "the slot is not used again: {error}"),
        }
    }

    /// The identities bound on a port.
    pub(super) fn speakers(&self, port: &PortName) -> impl Iterator<Item = &IdentityName> {
        let first = IdentityName { port: port.clone(), mac: Mac::default() };
        self.bound.range(first..).map(|(who, _)| who).take_while(move |who| who.port == *port)
    }

    /// Makes a port ours; true when it is.
    fn own(&mut self, port: &PortName) -> bool {
        match self.steering.find(port) {
            Ok(Found::Attached) => return true,
            Ok(Found::Other) => {
                // The tap was deleted and made again: another device under the old name.
                self.give_up(port);
                match self.steering.attach(port) {
                    Ok(()) => {
                        self.told.remove(port);
                        info!(%port, "attached");
                        return true;
                    }
                    Err(SteerError::SamePort { other, .. }) if self.go_by(port, &other) => return true,
                    Err(error) => self.trouble(port, &error.to_string()),
                }
            }
            Ok(Found::Nothing) => {
                self.give_up(port);
                self.attaching.lost(port);
                self.trouble(port, ABSENT);
            }
            Err(error) => self.trouble(port, &error.to_string()),
        }
        false
    }

    /// Lets a port go, if we have it, with all that speak on it.
    pub(super) fn give_up(&mut self, port: &PortName) {
        // Steering detaches a device that was renamed by itself, so there may be speakers without a port.
        for who in self.speakers(port).cloned().collect::<Vec<_>>() {
            self.unbind(&who);
        }
        if !self.steering.is_attached(port) {
            return;
        }
        match self.steering.detach(port) {
            Ok(()) => info!(%port, "detached"),
            Err(error) => warn!(%port, "detaching: {error}"),
        }
    }

    /// Lets an identity speak and gives it its record's responses. Published before it is bound: the first
    /// frame already finds them.
    fn serve(&mut self, who: &IdentityName, key: Option<&RecordId>) {
        let rendered = key.and_then(|key| self.responses(key));
        let bound = self.bound.get(who).map(|bound| &bound.serves);
        let serves = match (rendered, bound) {
            (Some(responses), _) => Serves::Responses(responses),
            (None, None | Some(Serves::Awaited)) => Serves::Awaited,
            (None, Some(Serves::Responses(_) | Serves::Gone)) => Serves::Gone,
        };
        if bound.is_some_and(|old| old.same(&serves)) {
            return;
        }
        let slot = match self.slots.take(who, Instant::now()) {
            Ok(slot) => slot,
            Err(error) => return self.trouble(&who.port, &error.to_string()),
        };
        if let Err(error) = self.store_in(slot, who, key, &serves) {
            return self.trouble(&who.port, &error.to_string());
        }
        if bound.is_none()
            && let Err(error) = self.steering.bind(&who.port, who.mac, slot)
        {
            self.empty(who, slot, true);
            return self.trouble(&who.port, &error.to_string());
        }
        if bound.is_some() {
            self.wake(slot);
        }
        self.bound.insert(who.clone(), Bound { slot, serves });
    }

    /// From now on requests of a slot get this.
    fn store_in(
        &self,
        slot: Slot,
        who: &IdentityName,
        key: Option<&RecordId>,
        serves: &Serves,
    ) -> Result<(), SlotOutOfRange> {
        if let Some(audit) = &self.audit {
            let record = key.and_then(|key| self.records.get(key));
            let vm = record.map(|record| (record.vm.uuid.as_str(), record.vm.name.as_str()));
            audit.borrow_mut().is_now(slot, spoken(&who.port), who.mac.to_string(), vm);
        }
        match serves {
            Serves::Responses(responses) => self.store.publish(slot, Arc::clone(responses)),
            Serves::Awaited => self.store.expect(slot),
            Serves::Gone => self.store.withdraw(slot),
        }
    }

    /// The worker that serves a slot.
    pub(super) fn worker(&self, slot: Slot) -> Result<&WorkerHandle<StackStats>, ControlError> {
        self.workers.get(self.steering.worker_of(slot)).ok_or(ControlError::Ended)
    }

    /// Has requests that wait on a slot look at what has changed; tried again when the worker has no room.
    pub(super) fn wake(&mut self, slot: Slot) {
        match self.worker(slot).and_then(|worker| worker.wake(slot)) {
            Ok(()) => {}
            Err(ControlError::Full) => {
                self.asleep.insert(slot);
            }
            Err(error) => warn!(slot, "requests that wait are not woken: {error}"),
        }
    }

    /// Takes an identity out: the kernel first, so that no frame comes for a slot that is being emptied.
    pub(super) fn unbind(&mut self, who: &IdentityName) {
        let Some(Bound { slot, .. }) = self.bound.remove(who) else { return };
        let out = self.steering.unbind(slot);
        if let Err(error) = &out {
            warn!(port = %who.port, mac = %who.mac, slot, "the slot is not used again; unbinding: {error}");
        }
        self.empty(who, slot, out.is_ok());
    }

    /// Forgets what was held for a slot. The slot is given out again only when the kernel sends nothing more
    /// as it (`unbound`) and the worker has been told.
    pub(super) fn empty(&mut self, who: &IdentityName, slot: Slot, unbound: bool) {
        if let Err(error) = self.store.withdraw(slot) {
            warn!(slot, "{error}");
        }
        match self.worker(slot).and_then(|worker| worker.forget(slot)) {
            Ok(()) if unbound => {
                self.slots.release(who, Instant::now());
            }
            Ok(()) => {}
            Err(error) => warn!(slot, "the slot stays with its last holder: {error}"),
        }
    }

    /// The responses of a record, rendered when it is new.
    fn responses(&mut self, key: &RecordId) -> Option<Arc<Responses>> {
        let record = self.records.get(key)?;
        if let Some(rendered) = self.rendered.get(key).filter(|r| Arc::ptr_eq(&r.record, record)) {
            return Some(Arc::clone(&rendered.responses));
        }
        let vm = self.state.vm(record);
        let start = Instant::now();
        let responses = Arc::new(dialect::render(record, &mut self.interner, vm));
        self.rendering += start.elapsed();
        let rendered = Rendered { record: Arc::clone(record), responses: Arc::clone(&responses) };
        self.rendered.insert(key.clone(), rendered);
        Some(responses)
    }

    /// Tries again later, and logs what is new.
    pub(super) fn trouble(&mut self, port: &PortName, text: &str) {
        self.unsettled.insert(port.clone());
        if self.told.get(port).is_none_or(|last| last != text) {
            warn!("port {port}: {text}");
            self.told.insert(port.clone(), text.to_owned());
        }
    }
}
