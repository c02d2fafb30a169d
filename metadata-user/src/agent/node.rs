//! The present state of the node, and the way from there to the plan.

mod configure;
mod guard;
mod handover;
mod instances;
mod loads;
mod ports;
mod report;
mod status;
mod trace;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use tracing::{debug, warn};

use super::attaching::Attaching;
use super::plan::{Plan, Records};
use super::slots::{IdentityName, Slots};
use super::state::State;
use crate::config::PortSpec;
use crate::metrics::Reloads;
use guard::Guard;
use instances::Registered;
pub use instances::{Clash, Tagged};
pub(in crate::agent) use instances::{etag, name_of};
use loads::Loads;
use metadata_base::port::PortName;
use metadata_content::record::Record;
use metadata_content::source::Source;
use metadata_content::store::{Interner, Responses, Store};
use metadata_datapath::stack::StackStats;
use metadata_datapath::worker::{Heartbeat, WorkerHandle};
use metadata_feed::contact::Contact;
use metadata_feed::registry::{Change, RecordId, Registry};
use metadata_feed::room::Room;
use metadata_feed::{FeedError, FeedEvent};
use metadata_links::watch::Changed;
use metadata_serve::Tally;
use metadata_serve::audit::Collector;
use metadata_steer::Steering;
pub use trace::{TraceRefusal, TraceTarget, Traced};

/// Everything the control side holds.
pub struct Node {
    steering: Steering,
    store: Arc<Store>,
    /// By the number of their hub.
    workers: Vec<WorkerHandle<StackStats>>,
    interner: Interner,
    state: State,
    slots: Slots,
    registry: Registry,
    /// What records take of memory.
    room: Arc<Room>,
    registered: Registered,
    /// Those in force.
    records: Records,
    plan: Plan,
    /// Ports to look at: something that matters to them has changed.
    touched: BTreeSet<PortName>,
    /// Ports that an agent before may have left, whose guests are answered before any port is attached again. None before
    /// the first look.
    left: Option<BTreeSet<PortName>>,
    /// Ports for which something could not be done yet.
    unsettled: BTreeSet<PortName>,
    attaching: Attaching,
    /// Time spent on rendering records.
    rendering: Duration,
    rendered: HashMap<RecordId, Rendered>,
    bound: BTreeMap<IdentityName, Bound>,
    /// What was last said about each port of the plan, and the conflicts, so that each trouble is told once.
    told: HashMap<PortName, String>,
    conflicts: HashSet<String>,
    /// Slots whose waiting requests could not be woken yet.
    asleep: BTreeSet<Slot>,
    reloads: Reloads,
    loads: Loads,
    started: Instant,
    /// What each worker answers.
    tallies: Vec<Arc<Tally>>,
    audit: Option<RefCell<Collector>>,
    from_snapshot: bool,
    /// How the API server answers, if a feed asks one.
    api_server: Option<Arc<Contact>>,
    guard: Guard,
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
        workers: Vec<WorkerHandle<StackStats>>,
        state: State,
        room: Arc<Room>,
        configured: &[PortSpec],
    ) -> Self {
        let plan = Plan::new(configured);
        let mut slots = Slots::new(MAX_SLOTS);
        slots.reserve(steering.identities().iter().map(|bound| bound.slot));
        Self {
            touched: plan.ports().cloned().collect(),
            plan,
            left: None,
            unsettled: BTreeSet::new(),
            attaching: Attaching::default(),
            rendering: Duration::ZERO,
            steering,
            store,
            workers,
            interner: Interner::new(),
            state,
            slots,
            registry: Registry::default(),
            room,
            registered: Registered::default(),
            records: Records::new(),
            rendered: HashMap::new(),
            bound: BTreeMap::new(),
            told: HashMap::new(),
            conflicts: HashSet::new(),
            asleep: BTreeSet::new(),
            reloads: Reloads::default(),
            loads: Loads::default(),
            started: Instant::now(),
            tallies: Vec::new(),
            audit: None,
            from_snapshot: false,
            api_server: None,
            guard: Guard::default(),
        }
    }

    /// Whether records come from the snapshot, their source being away.
    pub fn served_from_snapshot(&mut self, is: bool) {
        self.from_snapshot = is;
    }

    /// Reports in status and metrics how the API server answers.
    pub fn set_api_server(&mut self, contact: Arc<Contact>) {
        self.api_server = Some(contact);
    }

    /// Every good record that a feed told of, in force or not.
    #[must_use]
    pub fn records(&self) -> Vec<(RecordId, Arc<Record>)> {
        let told = self.registry.records().filter(|(id, _)| !id.source.is_kept());
        told.map(|(id, record)| (id.clone(), Arc::clone(record))).collect()
    }

    /// Tells of what workers answer: by their counts, in the order of their hubs, and by the audit log.
    pub fn hears(&mut self, tallies: Vec<Arc<Tally>>, audit: Option<Collector>) {
        (self.tallies, self.audit) = (tallies, audit.map(RefCell::new));
    }

    /// Writes down what workers have noted since the last time.
    pub fn audit(&self) {
        self.audit.iter().for_each(|audit| audit.borrow_mut().collect());
    }

    /// Has the audit log opened anew.
    pub fn reopen_audit(&self) {
        self.audit.iter().for_each(|audit| audit.borrow().reopen());
    }

    /// The room of all records.
    #[must_use]
    pub fn room(&self) -> Arc<Room> {
        Arc::clone(&self.room)
    }

    /// A source tells of a record, or that it has told of all.
    pub fn hear(&mut self, source: Source, event: FeedEvent) {
        let gone = match &event {
            FeedEvent::Upsert { key, .. } | FeedEvent::Remove { key } => Some(RecordId::new(source, key)),
            _ => None,
        };
        let synced = matches!(event, FeedEvent::Synced);
        self.take_in(source, event);
        if synced {
            let registry = &self.registry;
            self.room.keep_only(source, |id| registry.record(id).is_some());
        }
        if let Some(id) = gone.filter(|id| self.registry.record(id).is_none()) {
            self.room.give_back(&id);
        }
    }

    fn take_in(&mut self, source: Source, event: FeedEvent) {
        let event = match event {
            FeedEvent::Upsert { key, record } => {
                let id = RecordId::new(source, &key);
                let known = self.registry.record(&id);
                // A feed that starts anew tells again what is known.
                match (known.filter(|known| ***known == *record), self.room.arrive(&id, &record)) {
                    (Some(known), _) => FeedEvent::Upsert { key, record: Arc::clone(known) },
                    (None, Ok(())) => FeedEvent::Upsert { key, record: self.compact(record) },
                    (None, Err(no_room)) => {
                        warn!(record = %id, "refused, the last good state stays: {no_room}");
                        FeedEvent::Rejected { key, error: FeedError::Room(no_room) }
                    }
                }
            }
            FeedEvent::Rejected { key, error } => {
                let id = RecordId::new(source, &key);
                warn!(record = %id, "refused, the last good state stays: {error}");
                FeedEvent::Rejected { key, error }
            }
            other => other,
        };
        for change in self.registry.apply(source, event) {
            match change {
                Change::Put(id, record) => self.put(id, record),
                Change::Expect(id, identities) => self.expect(&id, identities),
                Change::Drop(id) => self.drop_record(&id),
            }
        }
    }

    /// A source begins to tell all it has.
    pub fn begin(&mut self, source: Source) {
        self.registry.begin(source);
        self.room.forget_pending(source);
    }

    /// A vendor-data that ten thousand VMs have is held once. A feed that keeps the record keeps its payloads: those are
    /// shared with it.
    fn compact(&mut self, record: Arc<Record>) -> Arc<Record> {
        let mut record = match Arc::try_unwrap(record) {
            Ok(mut record) => {
                record.compact(|octets| self.interner.octets(octets));
                return record.into();
            }
            Err(kept) => (*kept).clone(),
        };
        record.compact(|octets| self.interner.kept_octets(octets));
        record.into()
    }

    /// A record comes into force or has changed.
    fn put(&mut self, id: RecordId, record: Arc<Record>) {
        debug!(record = %id, generation = record.generation, vm = %record.vm.name, "record");
        let mut touched = self.plan.put(&id, Some(&record));
        touched.iter().for_each(|port| self.attaching.saw(port));
        self.touched.append(&mut touched);
        if let Some(last) = self.records.insert(id, Arc::clone(&record))
            && last.vm.uuid != record.vm.uuid
        {
            self.state.gone(&last.vm.uuid);
        }
    }

    /// A record is to come: those who will ask for it wait.
    fn expect(&mut self, id: &RecordId, identities: Vec<(PortName, Mac)>) {
        debug!(record = %id, "expected");
        let identities = identities.into_iter().map(|(port, mac)| IdentityName { port, mac });
        let mut touched = self.plan.expect(id, identities);
        touched.iter().for_each(|port| self.attaching.saw(port));
        self.touched.append(&mut touched);
    }

    /// A record is not in force any more.
    fn drop_record(&mut self, id: &RecordId) {
        debug!(record = %id, "record removed");
        self.touched.append(&mut self.plan.put(id, None));
        self.rendered.remove(id);
        if let Some(record) = self.records.remove(id) {
            self.state.gone(&record.vm.uuid);
        }
    }

    /// Looks after token keys and mailboxes.
    pub fn tend(&mut self) {
        let known: HashSet<&str> = self.records.values().map(|record| record.vm.uuid.as_str()).collect();
        self.state.tend(|vm| known.contains(vm));
        self.interner.sweep();
    }

    /// Writes what guests wrote and is not on disk yet.
    pub fn save(&self) {
        self.state.save();
    }

    /// Ports owned now.
    #[must_use]
    pub fn port_count(&self) -> usize {
        self.steering.port_count()
    }

    /// Identities served now.
    #[must_use]
    pub fn identity_count(&self) -> usize {
        self.bound.len()
    }

    /// The namespaces where links matter: the agent's own and those of the wanted ports.
    #[must_use]
    pub fn namespaces(&self) -> BTreeSet<Option<String>> {
        self.plan.namespaces().cloned().chain([None]).collect()
    }

    /// Fails when the packet path has stopped: an agent without it must not look alive.
    ///
    /// # Errors
    /// The worker thread has ended, or a device of the hub was deleted.
    pub fn check_path(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            !self.workers.iter().any(WorkerHandle::is_finished),
            "a worker thread has stopped; see the log above, then restart"
        );
        match self.steering.hub_is_whole() {
            Ok(whole) => anyhow::ensure!(whole, "a device of the hub was deleted; restart to make it anew"),
            Err(error) => warn!("looking for the hub's devices: {error}"),
        }
        Ok(())
    }

    /// The workers' heartbeats, by the number of their hub.
    #[must_use]
    pub fn heartbeats(&self) -> Vec<(u32, Heartbeat)> {
        (0..).zip(self.workers.iter().map(WorkerHandle::heartbeat)).collect()
    }

    /// Has ports steered by what costs their guests least now, and notes what the workers and the devices have done
    /// meanwhile.
    pub fn follow_guests(&mut self, now: Instant) {
        self.loads.note(self.workers.iter().map(|worker| worker.stats().turns));
        self.steering.follow_guests(now);
        self.touched.extend(self.steering.look_at_devices());
    }

    /// True while there are ports to look at.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Devices of a namespace came, went or changed: the ports they are or were need a look.
    pub fn touch(&mut self, netns: Option<&str>, changed: &Changed) {
        match changed {
            Changed::Unknown => {
                let there = self.plan.ports().filter(|port| port.netns.as_deref() == netns);
                for port in there {
                    self.attaching.saw(port);
                    self.touched.insert(port.clone());
                }
                if let Err(error) = self.steering.look_at_mtus(netns) {
                    debug!(?netns, "looking at MTUs: {error}");
                }
                self.look_for_taps(netns);
            }
            Changed::Devices(devices) => {
                for device in devices {
                    self.steering.lost(device);
                    if let Err(error) = self.steering.resized(device) {
                        warn!("{error}");
                    }
                    let named = PortName { ifname: device.name.clone(), netns: netns.map(str::to_owned) };
                    let attached = self.steering.attached_as(device).cloned();
                    if self.plan.wants(&named) {
                        self.attaching.saw(&named);
                    }
                    let looked_at = Some(named).filter(|port| self.plan.wants(port) || self.is_guarded(port));
                    self.touched.extend(attached.into_iter().chain(looked_at));
                }
            }
        }
    }

    /// Tries again what could not be done.
    pub fn retry(&mut self) {
        self.touched.append(&mut self.unsettled);
        for slot in std::mem::take(&mut self.asleep) {
            self.wake(slot);
        }
    }

    /// Tells of conflicts that are new. To be called after records changed.
    pub fn tell_conflicts(&mut self) {
        let conflicts: HashSet<String> = self.plan.conflicts().map(|conflict| conflict.to_string()).collect();
        for conflict in conflicts.difference(&self.conflicts) {
            warn!("record {conflict}");
        }
        self.conflicts = conflicts;
    }

    /// Brings touched ports to the plan until none is left or the time is over; what fails is told once and
    /// tried again with the next event. Guests that an agent before left come first: they have asked already.
    pub fn proceed(&mut self, for_at_most: Duration) {
        let start = Instant::now();
        self.answer_left(start, for_at_most);
        while start.elapsed() < for_at_most
            && let Some(port) = self.touched.pop_first()
        {
            self.unsettled.remove(&port);
            self.settle(&port);
            if !self.unsettled.contains(&port) {
                self.told.remove(&port);
            }
            self.attaching.tell(self.touched.len(), self.port_count());
        }
    }

    /// True while there are ports of an agent before that no record has named yet.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.steering.has_left()
    }

    /// Gives up what an agent before left and no record names. To be called once all records have been looked at; while
    /// it cannot be told where a wanted port is, what is left stays.
    pub fn give_up_left(&mut self) {
        if !self.steering.has_left() || self.look_for_left_taps() {
            return;
        }
        let wanted = self.unsettled.iter().filter(|port| self.plan.wants(port));
        match self.steering.give_up_left(wanted) {
            Ok(freed) => freed.into_iter().for_each(|slot| self.let_go(slot)),
            Err(error) => debug!("what an agent before left stays: {error}"),
        }
    }
}
