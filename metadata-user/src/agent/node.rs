//! The present state of the node, and the way from there to the plan.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use tracing::{debug, info, warn};

use super::endpoint::MetricsRequest;
use super::plan::{Plan, Records};
use super::slots::{IdentityName, Slots};
use super::state::State;
use crate::config::PortSpec;
use crate::dialect;
use crate::metrics::{self, Hub, Snapshot};
use crate::port::PortName;
use crate::record::Record;
use crate::stack::StackStats;
use crate::steer::{Counters, Found, Steering};
use crate::store::{Interner, Responses, Store};
use crate::worker::{ControlError, WorkerHandle};

/// Everything the control side holds.
pub struct Node {
    steering: Steering,
    store: Arc<Store>,
    worker: WorkerHandle<StackStats>,
    interner: Interner,
    state: State,
    slots: Slots,
    records: Records,
    rendered: HashMap<String, Rendered>,
    bound: BTreeMap<IdentityName, Bound>,
    /// What was last said about each port of the plan, and the conflicts, so that each trouble is told once.
    told: HashMap<PortName, String>,
    conflicts: HashSet<String>,
    /// Slots whose waiting requests could not be woken yet.
    asleep: BTreeSet<Slot>,
    /// False while something of the plan could not be done yet.
    settled: bool,
    rejected: u64,
}

/// A record's responses, and the record they were rendered from.
struct Rendered {
    record: Arc<Record>,
    responses: Arc<Responses>,
}

/// An identity the kernel knows.
struct Bound {
    slot: Slot,
    serves: Serves,
}

/// What a slot serves.
enum Serves {
    /// A record's responses.
    Responses(Arc<Responses>),
    /// The record has not arrived: requests are held.
    Awaited,
    /// The record was there and went: nothing will come, so say so at once.
    Gone,
}

impl Serves {
    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Responses(a), Self::Responses(b)) => Arc::ptr_eq(a, b),
            (Self::Awaited, Self::Awaited) | (Self::Gone, Self::Gone) => true,
            _ => false,
        }
    }
}

impl Node {
    /// A node that owns no port yet.
    #[must_use]
    pub fn new(
        steering: Steering,
        store: Arc<Store>,
        worker: WorkerHandle<StackStats>,
        state: State,
    ) -> Self {
        Self {
            steering,
            store,
            worker,
            interner: Interner::new(),
            state,
            slots: Slots::new(MAX_SLOTS),
            records: Records::new(),
            rendered: HashMap::new(),
            bound: BTreeMap::new(),
            told: HashMap::new(),
            conflicts: HashSet::new(),
            asleep: BTreeSet::new(),
            settled: true,
            rejected: 0,
        }
    }

    /// A record came or changed.
    pub fn upsert(&mut self, key: String, record: Arc<Record>) {
        // A vendor-data that ten thousand VMs have is held once.
        let mut record = Arc::unwrap_or_clone(record);
        record.compact(|octets| self.interner.octets(octets));
        let record = Arc::new(record);
        debug!(record = key, generation = record.generation, vm = %record.vm.name, "record");
        if let Some(last) = self.records.insert(key, Arc::clone(&record))
            && last.vm.uuid != record.vm.uuid
        {
            self.state.gone(&last.vm.uuid);
        }
    }

    /// A record went.
    pub fn remove(&mut self, key: &str) {
        debug!(record = key, "record removed");
        if let Some(record) = self.records.remove(key) {
            self.state.gone(&record.vm.uuid);
        }
    }

    /// Looks after token keys and mailboxes.
    pub fn tend(&mut self) {
        let known: HashSet<&str> = self.records.values().map(|record| record.vm.uuid.as_str()).collect();
        self.state.tend(|vm| known.contains(vm));
    }

    /// Writes what guests wrote and is not on disk yet.
    pub fn save(&self) {
        self.state.save();
    }

    /// A record was refused by its feed.
    pub fn count_rejected(&mut self) {
        self.rejected += 1;
    }

    /// Ports owned now.
    #[must_use]
    pub fn port_count(&self) -> usize {
        self.steering.ports().count()
    }

    /// Identities served now.
    #[must_use]
    pub fn identity_count(&self) -> usize {
        self.bound.len()
    }

    /// True when the whole plan was carried out.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    /// The namespaces where links matter: the agent's own and those of the wanted ports.
    #[must_use]
    pub fn namespaces(&self, configured: &[PortSpec]) -> BTreeSet<Option<String>> {
        let nics = self.records.values().flat_map(|record| &record.network.nics);
        let named = nics.filter_map(|nic| nic.port.as_ref()).map(|port| PortName::from(port).netns);
        let configured = configured.iter().map(|spec| spec.name.netns.clone());
        named.chain(configured).chain([None]).collect()
    }

    /// Fails when the packet path has stopped: an agent without it must not look alive.
    ///
    /// # Errors
    /// The worker thread has ended, or a device of the hub was deleted.
    pub fn check_path(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            !self.worker.is_finished(),
            "the worker thread has stopped; see the log above, then restart"
        );
        match self.steering.hub_is_whole() {
            Ok(whole) => anyhow::ensure!(whole, "a device of the hub was deleted; restart to make it anew"),
            Err(error) => warn!("looking for the hub's devices: {error}"),
        }
        Ok(())
    }

    /// Answers a metrics request with the counters of this moment.
    pub fn report(&self, request: MetricsRequest) {
        let kernel = self.steering.counters().map_err(|error| warn!("kernel counters: {error}")).ok();
        let verdicts: Vec<_> = kernel
            .iter()
            .flat_map(Counters::iter)
            .map(|(verdict, frames)| (verdict.name(), frames))
            .collect();
        let worker = self.worker.stats();
        let (counters, gauges) = (worker.engine.counters(), worker.engine.gauges());
        let snapshot = Snapshot {
            verdicts: &verdicts,
            ports: self.port_count() as u64,
            identities: self.bound.len() as u64,
            records: self.records.len() as u64,
            records_rejected: self.rejected,
            errands: self.state.counts(),
            hubs: &[Hub { number: 0, worker, counters: &counters, gauges: &gauges }],
        };
        // A client that has gone away needs no answer.
        let _ = request.reply.send(metrics::render(&snapshot));
    }

    /// Brings the node to the plan, as far as the kernel lets it; what fails is told once and tried again
    /// with the next event.
    pub fn reconcile(&mut self, configured: &[PortSpec]) {
        let plan = Plan::new(&self.records, configured);
        self.settled = true;
        for slot in std::mem::take(&mut self.asleep) {
            self.wake(slot);
        }
        let conflicts: HashSet<String> = plan.conflicts.iter().map(ToString::to_string).collect();
        for conflict in conflicts.difference(&self.conflicts) {
            warn!("record {conflict}");
        }
        self.conflicts = conflicts;
        self.told.retain(|port, _| plan.ports.contains(port));

        let gone: Vec<_> =
            self.bound.keys().filter(|who| !plan.identities.contains_key(*who)).cloned().collect();
        for who in &gone {
            self.unbind(who);
        }
        let owned: Vec<PortName> = self.steering.ports().map(|(port, _)| port.clone()).collect();
        for port in owned.iter().filter(|port| !plan.ports.contains(*port)) {
            self.give_up(port);
        }
        let ready: BTreeSet<&PortName> = plan.ports.iter().filter(|port| self.own(port)).collect();
        self.rendered.retain(|key, _| self.records.contains_key(key));
        for (who, key) in plan.identities.iter().filter(|(who, _)| ready.contains(&who.port)) {
            self.serve(who, key.as_deref());
        }
        self.interner.sweep();
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
                    Err(error) => self.trouble(port, &error.to_string()),
                }
            }
            Ok(Found::Nothing) => {
                self.give_up(port);
                self.trouble(port, "no such interface yet; it is attached as soon as it appears");
            }
            Err(error) => self.trouble(port, &error.to_string()),
        }
        false
    }

    /// Lets a port go, if we have it, with all that speak on it.
    fn give_up(&mut self, port: &PortName) {
        // Steering detaches a device that was renamed by itself, so there may be speakers without a port.
        let first = IdentityName { port: port.clone(), mac: Mac::default() };
        let speakers = self.bound.range(first..).map(|(who, _)| who).take_while(|who| who.port == *port);
        for who in &speakers.cloned().collect::<Vec<_>>() {
            self.unbind(who);
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
    fn serve(&mut self, who: &IdentityName, key: Option<&str>) {
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
        let stored = match &serves {
            Serves::Responses(responses) => self.store.publish(slot, Arc::clone(responses)),
            Serves::Awaited => self.store.expect(slot),
            Serves::Gone => self.store.withdraw(slot),
        };
        if let Err(error) = stored {
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

    /// Has requests that wait on a slot look at what has changed; tried again when the worker has no room.
    fn wake(&mut self, slot: Slot) {
        match self.worker.wake(slot) {
            Ok(()) => {}
            Err(ControlError::Full) => {
                self.asleep.insert(slot);
                self.settled = false;
            }
            Err(error) => warn!(slot, "requests that wait are not woken: {error}"),
        }
    }

    /// Takes an identity out: the kernel first, so that no frame comes for a slot that is being emptied.
    fn unbind(&mut self, who: &IdentityName) {
        let Some(Bound { slot, .. }) = self.bound.remove(who) else { return };
        let out = self.steering.unbind(slot);
        if let Err(error) = &out {
            warn!(port = %who.port, mac = %who.mac, slot, "the slot is not used again; unbinding: {error}");
        }
        self.empty(who, slot, out.is_ok());
    }

    /// Forgets what was held for a slot. The slot is given out again only when the kernel sends nothing more
    /// as it (`unbound`) and the worker has been told.
    fn empty(&mut self, who: &IdentityName, slot: Slot, unbound: bool) {
        if let Err(error) = self.store.withdraw(slot) {
            warn!(slot, "{error}");
        }
        match self.worker.forget(slot) {
            Ok(()) if unbound => {
                self.slots.release(who, Instant::now());
            }
            Ok(()) => {}
            Err(error) => warn!(slot, "the slot stays with its last holder: {error}"),
        }
    }

    /// The responses of a record, rendered when it is new.
    fn responses(&mut self, key: &str) -> Option<Arc<Responses>> {
        let record = self.records.get(key)?;
        if let Some(rendered) = self.rendered.get(key).filter(|r| Arc::ptr_eq(&r.record, record)) {
            return Some(Arc::clone(&rendered.responses));
        }
        let vm = self.state.vm(record);
        let responses = Arc::new(dialect::render(record, &mut self.interner, vm));
        let rendered = Rendered { record: Arc::clone(record), responses: Arc::clone(&responses) };
        self.rendered.insert(key.to_owned(), rendered);
        Some(responses)
    }

    /// Tries again later, and logs what is new.
    fn trouble(&mut self, port: &PortName, text: &str) {
        self.settled = false;
        if self.told.get(port).is_none_or(|last| last != text) {
            warn!("port {port}: {text}");
            self.told.insert(port.clone(), text.to_owned());
        }
    }
}
