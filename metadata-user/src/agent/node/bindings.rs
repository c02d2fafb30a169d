//! The slots of identities, in the kernel, in the store and at the workers.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use crate::service::HandedRequest;
use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_common::port::PortName;
use metadata_common::share::{FairShare, Tenant};
use metadata_content::record::Record;
use metadata_content::store::Responses;
use metadata_feed::registry::RecordId;
use metadata_steer::{SteerError, Steering};
use tracing::{debug, warn};

use super::answers::{AnswerPublisher, SlotContent};
use super::catalogue::RecordCatalogue;
use super::workers::Workers;
use crate::agent::plan::Plan;
use crate::agent::slots::{IdentityName, Slots};
use metadata_content::http::Response;

/// The identities of attached ports. Calls that change the kernel's tables take the [`Steering`], which owns them.
pub(crate) struct Bindings {
    slots: Slots,
    bound: BTreeMap<IdentityName, KernelIdentity>,
    answers: AnswerPublisher,
    workers: Workers,
    /// Slots that are not used again.
    retired: u64,
}

/// An identity the kernel knows.
struct KernelIdentity {
    slot: Slot,
    serves: SlotContent,
}

/// Returns the identities in `bound` for which `there` has another slot or none.
fn moved<'a>(
    bound: impl Iterator<Item = (&'a IdentityName, Slot)>,
    there: impl Fn(&PortName) -> Vec<(Mac, Slot)>,
) -> Vec<(IdentityName, Slot)> {
    let is_there = |(who, slot): &(&IdentityName, Slot)| there(&who.port).contains(&(who.mac, *slot));
    bound.filter(|who| !is_there(who)).map(|(who, slot)| (who.clone(), slot)).collect()
}

impl Bindings {
    /// Creates the bindings without identities. Slots that the previous agent bound are reserved.
    pub(super) fn new(steering: &Steering, answers: AnswerPublisher, workers: Workers) -> Self {
        let mut bindings =
            Self { slots: Slots::new(MAX_SLOTS), bound: BTreeMap::new(), answers, workers, retired: 0 };
        bindings.reserve_inherited(steering);
        bindings
    }

    pub(super) fn answers(&self) -> &AnswerPublisher {
        &self.answers
    }

    pub(super) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Number of slots that are not used again, because frames or requests with them may still come.
    pub(crate) fn retired(&self) -> u64 {
        self.retired
    }

    /// Number of identities bound.
    pub(super) fn count(&self) -> usize {
        self.bound.len()
    }

    /// How tenants share the slots.
    pub(super) fn share(&self) -> &FairShare {
        self.slots.share()
    }

    /// The identities bound on a port.
    pub(super) fn on(&self, port: &PortName) -> impl Iterator<Item = &IdentityName> {
        let first = IdentityName { port: port.clone(), mac: Mac::default() };
        self.bound.range(first..).map(|(who, _)| who).take_while(move |who| who.port == *port)
    }

    /// Every bound identity and its slot.
    pub(super) fn all(&self) -> impl Iterator<Item = (&IdentityName, Slot)> {
        self.bound.iter().map(|(who, bound)| (who, bound.slot))
    }

    /// Every bound identity in order, with its slot and what that serves.
    pub(super) fn all_served(&self) -> impl Iterator<Item = (&IdentityName, (Slot, &SlotContent))> {
        self.bound.iter().map(|(who, bound)| (who, (bound.slot, &bound.serves)))
    }

    /// The slot of an identity and what it serves, if it is bound.
    pub(super) fn get(&self, who: &IdentityName) -> Option<(Slot, &SlotContent)> {
        self.bound.get(who).map(|bound| (bound.slot, &bound.serves))
    }

    /// Publishes the responses of an identity, and then binds it if it is not bound, so that its first frame finds
    /// them.
    ///
    /// # Errors
    /// The reason as text: no slot is free, or the kernel refuses. An identity that was bound stays bound.
    pub(super) fn serve(
        &mut self,
        steering: &mut Steering,
        (who, tenant): (&IdentityName, &Tenant),
        responses: Option<Arc<Responses>>,
        record: Option<&Record>,
    ) -> Result<(), String> {
        let bound = self.bound.get(who).map(|bound| &bound.serves);
        let serves = match (responses, bound) {
            (Some(responses), _) => SlotContent::Responses(responses),
            (None, None | Some(SlotContent::Awaited)) => SlotContent::Awaited,
            (None, Some(SlotContent::Responses(_) | SlotContent::Gone)) => SlotContent::Gone,
        };
        if bound.is_some_and(|old| old.is_same(&serves)) {
            return Ok(());
        }
        let is_bound = bound.is_some();
        let slot = self.slots.take(who, tenant, Instant::now()).map_err(|error| error.to_string())?;
        self.answers.publish(slot, who, record, &serves).map_err(|error| error.to_string())?;
        if is_bound {
            self.wake(steering, slot);
        } else if let Err(error) = steering.bind(&who.port, who.mac, slot) {
            self.empty(steering, who, slot, true);
            return Err(error.to_string());
        }
        self.bound.insert(who.clone(), KernelIdentity { slot, serves });
        Ok(())
    }

    /// Unbinds an identity, first in the kernel, so that no frame arrives for a slot that is being emptied.
    pub(super) fn unbind(&mut self, steering: &mut Steering, who: &IdentityName) {
        let Some(KernelIdentity { slot, .. }) = self.bound.remove(who) else { return };
        let unbound = steering.unbind(slot);
        if let Err(error) = &unbound {
            warn!(port = %who.port, mac = %who.mac, slot, "cannot unbind, so the slot is not used again: {error}");
        }
        self.empty(steering, who, slot, unbound.is_ok());
    }

    /// Unbinds the identities of a port for which `is_unwanted` is true.
    pub(super) fn unbind_on(
        &mut self,
        steering: &mut Steering,
        port: &PortName,
        is_unwanted: impl Fn(&IdentityName) -> bool,
    ) {
        for who in self.on(port).filter(|who| is_unwanted(who)).cloned().collect::<Vec<_>>() {
            self.unbind(steering, &who);
        }
    }

    /// Removes what a slot holds. The slot becomes free only if the kernel sends no more frames with it (`unbound`)
    /// and the worker can be reached.
    fn empty(&mut self, steering: &Steering, who: &IdentityName, slot: Slot, unbound: bool) {
        if let Err(error) = self.answers.withdraw(slot) {
            warn!(slot, "{error}");
        }
        match self.workers.forget(steering.hubs().worker_of(slot), slot) {
            Ok(()) if unbound => drop(self.slots.release(who, Instant::now())),
            Ok(()) => self.retire(who),
            Err(error) => {
                warn!(slot, "the slot is not free for other guests: {error}");
                self.retire(who);
            }
        }
    }

    /// Never gives the slot of an identity to anybody again, not even to an identity of the same name.
    fn retire(&mut self, who: &IdentityName) {
        self.retired += u64::from(self.slots.retire(who));
    }

    /// Makes the worker try waiting requests of a slot again.
    pub(super) fn wake(&mut self, steering: &Steering, slot: Slot) {
        self.workers.wake(steering.hubs().worker_of(slot), slot);
    }

    /// Repeats the wake-ups that found a worker's queue full.
    pub(super) fn retry_wakes(&mut self) {
        self.workers.retry();
    }

    /// Reserves the slots that the previous agent has bound, until they are kept or released.
    pub(super) fn reserve_inherited(&mut self, steering: &Steering) {
        self.slots.reserve(steering.identities().iter().map(|bound| bound.slot));
    }

    /// Keeps the slots of identities that the previous agent bound on a port. Unbinds identities that the plan does not
    /// have, and frees their slots.
    pub(super) fn keep_inherited(&mut self, steering: &mut Steering, port: &PortName, plan: &Plan) {
        for (mac, slot) in steering.attachments().bound_on(port) {
            let who = IdentityName { port: port.clone(), mac };
            if plan.knows(&who) {
                let tenant = plan.holder(&who).map_or(Tenant::Operator, RecordId::tenant);
                self.slots.claim(&who, &tenant, slot);
                continue;
            }
            match steering.unbind(slot) {
                Ok(()) => self.release_inherited(steering, slot),
                Err(error) => {
                    self.retired += 1;
                    warn!(%port, %mac, slot, "cannot unbind, so the slot is not used again: {error}");
                }
            }
        }
    }

    /// Frees a slot of the previous agent whose identity no record names.
    pub(super) fn release_inherited(&mut self, steering: &Steering, slot: Slot) {
        if let Err(error) = self.answers.withdraw(slot) {
            warn!(slot, "{error}");
        }
        match self.workers.forget(steering.hubs().worker_of(slot), slot) {
            Ok(()) => self.slots.give_up(slot, Instant::now()),
            Err(error) => {
                self.retired += 1;
                warn!(slot, "the slot is not used again: {error}");
            }
        }
    }

    /// Publishes the responses of identities that the previous agent bound on a port that is not attached yet.
    pub(super) fn answer_inherited(
        &mut self,
        steering: &mut Steering,
        port: &PortName,
        catalogue: &mut RecordCatalogue,
    ) {
        let inherited = steering.inherited_on(port).unwrap_or_else(|error| {
            debug!(%port, "its guests wait until it is attached: {error}");
            Vec::new()
        });
        for (mac, slot) in inherited {
            let who = IdentityName { port: port.clone(), mac };
            let Some(id) = catalogue.plan().holder(&who).cloned() else { continue };
            let Some(responses) = catalogue.responses(&id) else { continue };
            let record = catalogue.record(&id).map(AsRef::as_ref);
            match self.answers.publish(slot, &who, record, &SlotContent::Responses(responses)) {
                Ok(()) => self.wake(steering, slot),
                Err(error) => warn!(%port, slot, "{error}"),
            }
        }
    }

    /// Drops identities that the previous agent has unbound or bound to another slot since. Makes requests of slots
    /// that only the previous agent has bound wait for a record. Call it before frames with these slots arrive here, so
    /// that no guest gets the record of the slot's last holder.
    ///
    /// # Errors
    /// If the kernel refuses to list what is bound.
    pub(super) fn follow_slots(&mut self, steering: &mut Steering) -> Result<(), SteerError> {
        steering.reread()?;
        for (who, slot) in moved(self.all(), |port| steering.attachments().bound_on(port)) {
            debug!(port = %who.port, mac = %who.mac, slot, "the previous agent has given it another slot or none");
            self.bound.remove(&who);
            self.empty(steering, &who, slot, true);
        }
        let ready: HashSet<_> = self.bound.values().map(|bound| bound.slot).collect();
        for identity in steering.identities() {
            if !ready.contains(&identity.slot)
                && let Err(error) = self.answers.expect(identity.slot)
            {
                warn!(slot = identity.slot, "{error}");
            }
        }
        Ok(())
    }

    /// Answers a question that the previous agent passed on; `None` while no answer is known.
    pub(super) fn answer(&mut self, steering: &Steering, question: &HandedRequest) -> Option<Response> {
        let (response, changed) = self.answers.answer(question);
        if changed {
            self.wake(steering, question.connection.slot);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::{IdentityName, Mac, PortName, moved};

    #[test]
    fn identities_with_another_slot_or_none_have_moved() {
        let who =
            |port: &str, last| IdentityName { port: PortName::local(port), mac: Mac([2, 0, 0, 0, 0, last]) };
        let ours =
            [(who("stays", 1), 1), (who("swapped", 1), 2), (who("swapped", 2), 3), (who("gone", 1), 4)];
        let there = |port: &PortName| match port.ifname.as_str() {
            "stays" => vec![(Mac([2, 0, 0, 0, 0, 1]), 1), (Mac([2, 0, 0, 0, 0, 9]), 4)],
            "swapped" => vec![(Mac([2, 0, 0, 0, 0, 1]), 3), (Mac([2, 0, 0, 0, 0, 2]), 2)],
            _ => vec![],
        };
        let found = moved(ours.iter().map(|(who, slot)| (who, *slot)), there);
        assert_eq!(found, ours[1..]);
    }
}
