//! What is known of VMIs and pods, and what is told of them.
//!
//! Events go in with the time they happened at, actions come out; nothing here waits, reads a clock or opens anything but
//! a pod's volumes, by a function it is given.
//!
//! A VM is served from the moment its pod has a launcher, whichever of the two watches, the hook or the kept list names it
//! first. It ends with its launcher, with its pod's leaving the VMI's `activePods`, and with the VMI's end. That a
//! VMI leaves a watch does not end it while its launcher runs: on the source of a migration the label goes first, and
//! the launcher only when all is over. A target whose migration fails leaves its watch before it was ever run:
//! it is let go after [`LINGER`], in which the label of a migration that went well would have come.

mod instance;
mod report;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;

use super::translate::{Files, Problem, is_wanted, translate};
use super::{Options, Vmi, VmiError};
use crate::pods::{PodEvent, PodUid, PodsError};
use crate::room::NoRoom;
use crate::{FeedError, FeedEvent};
use instance::Instance;
use metadata_content::record::{Limits, Record};
pub use report::{Reason, Report};

/// Most VMIs of a node. More are refused one by one.
pub const MAX_VMIS: usize = 4_096;
/// Octets of all VMIs of a node, of what the agent keeps of each: its annotations, labels, volumes and interfaces. More are
/// refused one by one.
pub const VMIS_OCTETS: usize = 32 << 20;
/// Most pods of one VMI on a node; it has two at most while it migrates.
pub const MAX_PODS: usize = 4;
/// How long a VMI that never ran here stays after the last watch has lost it.
pub const LINGER: Duration = Duration::from_secs(5);
/// How long a pod's beginnings are no trouble: volumes, taps and MACs come one after the other.
pub const GRACE: Duration = Duration::from_secs(10);

/// Who knows a VMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The watch of VMIs that run here.
    Here,
    /// The watch of VMIs that migrate here.
    Coming,
    /// KubeVirt's node hook, which runs it here.
    Hook,
    /// What an agent before kept. Any other says it better, and a watch better than the hook.
    Kept,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Action {
    /// To be told the agent.
    Tell(FeedEvent),
    /// A pod is to be watched, and these of its volumes.
    Watch(PodUid, BTreeSet<String>),
    /// A pod is to have an inlet whose frames come from this MAC, or none.
    Inlet(PodUid, Option<Mac>),
    /// A pod matters no more.
    Leave(PodUid),
    /// To be told the VMI's owner.
    Report(Report),
}

/// Takes room for a record under its key; see [`Teller::admit`](crate::teller::Teller::admit).
pub type Admit = Box<dyn Fn(&str, &Record) -> Result<(), NoRoom> + Send>;

/// Reads a volume of a pod.
pub type Read = Box<dyn Fn(&PodUid, &str) -> Result<Option<Files>, String> + Send>;

/// The state.
pub struct Core {
    node: String,
    options: Options,
    limits: Limits,
    read: Read,
    admit: Admit,
    /// Octets of all VMIs.
    octets: usize,
    vmis: BTreeMap<String, Known>,
    /// Whose pods are whose.
    owners: HashMap<PodUid, String>,
    /// When to look at a VMI again.
    timers: BTreeSet<(Instant, String)>,
    /// Of the last record that was told.
    generation: u64,
    actions: Vec<Action>,
    changed: bool,
}

/// A VMI.
struct Known {
    vmi: Vmi,
    /// Its length, nearly.
    octets: usize,
    origins: BTreeSet<Origin>,
    /// True once it was to run here.
    ran: bool,
    /// When the last of `origins` went.
    left: Option<Instant>,
    instances: BTreeMap<PodUid, Instance>,
}

impl Origin {
    /// A short name, for logs and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Here => "running",
            Self::Coming => "arriving",
            Self::Hook => "hook",
            Self::Kept => "kept",
        }
    }

    /// The watches of the API server.
    pub const WATCHES: [Self; 2] = [Self::Here, Self::Coming];

    /// True for the API server's own word.
    fn is_a_watch(&self) -> bool {
        matches!(self, Self::Here | Self::Coming)
    }
}

impl Known {
    /// True when a watch has it, and it is this one.
    fn is_watched_as(&self, vmi: &Vmi) -> bool {
        self.vmi.metadata.uid == vmi.metadata.uid && self.origins.iter().any(Origin::is_a_watch)
    }
}

impl Core {
    /// Nothing is known yet. Records' generations count from `generation`: time since an epoch grows
    /// faster than records change.
    #[must_use]
    pub fn new(node: String, options: Options, limits: Limits, generation: u64, read: Read) -> Self {
        Self {
            node,
            options,
            limits,
            read,
            admit: Box::new(|_, _| Ok(())),
            octets: 0,
            vmis: BTreeMap::new(),
            owners: HashMap::new(),
            timers: BTreeSet::new(),
            generation,
            actions: Vec::new(),
            changed: false,
        }
    }

    /// The same with room for as many records as `admit` lets in.
    #[must_use]
    pub fn admitting(self, admit: Admit) -> Self {
        Self { admit, ..self }
    }

    /// A VMI is there, or is another than it was.
    pub fn applied(&mut self, origin: Origin, vmi: Vmi, now: Instant) {
        let key = vmi.key();
        match self.vmis.get(&key) {
            Some(_) if origin == Origin::Kept => return,
            // The watch knows better what it is like, and the hook what it is about to do.
            Some(known) if origin == Origin::Hook && known.is_watched_as(&vmi) => {
                self.vmis.entry(key).and_modify(|known| known.ran = true);
                return;
            }
            Some(known) if known.vmi.metadata.uid != vmi.metadata.uid => self.drop_vmi(&key),
            None if self.vmis.len() >= MAX_VMIS => {
                let reason = format!("this node has {MAX_VMIS} VMIs already, and serves no more");
                self.tell(FeedEvent::Rejected { key, error: FeedError::Vm { reason } });
                return;
            }
            Some(_) | None => {}
        }
        let (octets, former) = (vmi.octets(), self.vmis.get(&key).map_or(0, |known| known.octets));
        if octets > former && self.octets - former + octets > VMIS_OCTETS {
            let reason = format!(
                "the VMI has {octets} octets, and of {VMIS_OCTETS} for all VMIs of this node {} are taken; a version that \
                 is served stays. Put user-data into a Secret",
                self.octets
            );
            self.tell(FeedEvent::Rejected { key, error: FeedError::Vm { reason } });
            return;
        }
        self.octets = self.octets - former + octets;
        let known = self.vmis.entry(key.clone()).or_insert_with(|| Known {
            vmi: Vmi::default(),
            octets,
            origins: BTreeSet::new(),
            ran: false,
            left: None,
            instances: BTreeMap::new(),
        });
        self.changed |= known.vmi != vmi;
        (known.vmi, known.octets) = (vmi, octets);
        known.left = None;
        known.ran |= origin != Origin::Coming;
        known.origins.retain(Origin::is_a_watch);
        known.origins.insert(origin);
        self.review(&key, now);
    }

    /// A VMI cannot be read. What was told of it stays.
    pub fn unreadable(&mut self, key: &str, error: &VmiError) {
        self.tell(FeedEvent::Rejected {
            key: key.to_owned(),
            error: FeedError::Vm { reason: error.to_string() },
        });
    }

    /// A VMI has left a watch.
    pub fn gone(&mut self, origin: Origin, key: &str, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else {
            // One that could not be read, or for which there was no room.
            return self.tell(FeedEvent::Remove { key: key.to_owned() });
        };
        if !known.origins.remove(&origin) || !known.origins.is_empty() {
            return;
        }
        self.changed = true;
        if !known.instances.values().any(Instance::lives) {
            return self.drop_vmi(key);
        }
        known.left = Some(now);
        if !known.ran {
            self.timers.insert((now + LINGER, key.to_owned()));
        }
    }

    /// A watch has named all it knows: those of its VMIs that are not among them have left it.
    pub fn listed(&mut self, origin: Origin, keys: &BTreeSet<String>, now: Instant) {
        let here = self.vmis.iter().filter(|(_, known)| known.origins.contains(&origin));
        let lost: Vec<_> = here.filter(|(key, _)| !keys.contains(*key)).map(|(key, _)| key.clone()).collect();
        lost.iter().for_each(|key| self.gone(origin, key, now));
    }

    /// Something has become of a pod.
    pub fn pod(&mut self, uid: &PodUid, event: PodEvent, now: Instant) {
        let Some(key) = self.owners.get(uid).cloned() else { return };
        let Some(known) = self.vmis.get_mut(&key) else { return };
        let Some(instance) = known.instances.get_mut(uid) else { return };
        match event {
            PodEvent::Found(pod) | PodEvent::Taps(pod) => {
                instance.pod = Some(pod);
                instance.missing = None;
            }
            PodEvent::Absent => {
                instance.absent = true;
                return;
            }
            PodEvent::Missing { reason } => {
                let pod = uid.to_string();
                return self.lacks(&key, uid, Problem::Launcher { pod, reason }, now);
            }
            PodEvent::Files { .. } => {}
            PodEvent::Gone => {
                self.actions.extend(instance.end());
                let watched = known.origins.iter().any(Origin::is_a_watch);
                if !watched && !known.instances.values().any(Instance::lives) {
                    self.drop_vmi(&key);
                }
                return;
            }
        }
        self.look_at(&key, uid, now);
    }

    /// So many octets of memory are free: those VMs are looked at again that lack no more.
    pub fn freed(&mut self, free: usize, now: Instant) {
        let lacking = self.vmis.iter().flat_map(|(key, known)| {
            let lacking = known.instances.iter().filter(|(_, instance)| instance.lacks_at_most(free));
            lacking.map(move |(uid, _)| (key.clone(), uid.clone()))
        });
        for (key, uid) in lacking.collect::<Vec<_>>() {
            self.look_at(&key, &uid, now);
        }
    }

    /// A pod is not followed, or not all of its volumes are.
    pub fn unfollowed(&mut self, uid: &PodUid, error: &PodsError, now: Instant) {
        let Some(key) = self.owners.get(uid).cloned() else { return };
        let (pod, reason) = (uid.to_string(), error.to_string());
        self.lacks(&key, uid, Problem::Unfollowed { pod, reason }, now);
    }

    /// Notes why a pod's launcher is not known.
    fn lacks(&mut self, key: &str, uid: &PodUid, problem: Problem, now: Instant) {
        let known = self.vmis.get_mut(key);
        let Some(instance) = known.and_then(|known| known.instances.get_mut(uid)) else { return };
        instance.absent = true;
        instance.missing = Some(problem);
        self.publish(key, uid, now);
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        while self.deadline().is_some_and(|due| due <= now) {
            let Some((_, key)) = self.timers.pop_first() else { return };
            let Some(known) = self.vmis.get(&key) else { continue };
            if known.left.is_some_and(|left| !known.ran && now >= left + LINGER) {
                self.drop_vmi(&key);
                continue;
            }
            let uids: Vec<_> = known.instances.keys().cloned().collect();
            uids.iter().for_each(|uid| self.publish(&key, uid, now));
        }
    }

    /// When [`tick`](Self::tick) is to be called next.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// What is to be done since the last call.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// True when other VMIs are known than at the last call.
    pub fn has_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The VMIs, to be kept.
    pub fn vmis(&self) -> impl Iterator<Item = &Vmi> {
        self.vmis.values().map(|known| &known.vmi)
    }

    /// True when the launcher of every pod has been looked for.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.vmis.values().flat_map(|known| known.instances.values()).all(Instance::is_settled)
    }

    /// True while a VMI that is to be served here is not yet.
    #[must_use]
    pub fn awaits(&self, key: &str) -> bool {
        let Some(known) = self.vmis.get(key) else { return false };
        known.instances.values().any(Instance::awaits)
    }

    /// Compares a VMI's pods with those that are known.
    fn review(&mut self, key: &str, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let wanted = is_wanted(&known.vmi, &self.options);
        let pods = known.vmi.pods_on(&self.node).filter(|_| wanted).filter_map(|uid| uid.parse().ok());
        let pods: BTreeSet<PodUid> = pods.take(MAX_PODS).collect();
        let past: Vec<_> = known.instances.keys().filter(|uid| !pods.contains(*uid)).cloned().collect();
        for uid in past {
            self.owners.remove(&uid);
            self.actions.extend(known.instances.remove(&uid).map(|mut past| past.end()).unwrap_or_default());
        }
        for uid in &pods {
            if !known.instances.contains_key(uid) {
                let alone = known.instances.values().all(|other| other.has_ended() || other.key != *key);
                let name = if alone { key.to_owned() } else { format!("{key}@{uid}") };
                known.instances.insert(uid.clone(), Instance::new(name, uid.clone(), now));
                self.owners.insert(uid.clone(), key.to_owned());
                self.actions.push(Action::Watch(uid.clone(), BTreeSet::new()));
            }
        }
        pods.iter().for_each(|uid| self.look_at(key, uid, now));
    }

    /// Translates a VMI in one of its pods, and tells what is new.
    fn look_at(&mut self, key: &str, uid: &PodUid, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let Some(instance) = known.instances.get_mut(uid) else { return };
        let Some(pod) = instance.pod.as_ref().filter(|_| !instance.has_ended()) else { return };
        let volumes = RefCell::new(BTreeSet::new());
        let read = |volume: &str| {
            volumes.borrow_mut().insert(volume.to_owned());
            (self.read)(uid, volume)
        };
        let translation = translate(&known.vmi, pod, &read, &self.options, &self.limits);
        let former = std::mem::replace(&mut instance.problems, translation.problems);
        let wanted = translation.inlet;
        // One that is missing is asked for at each look: it may have been deleted. One that this agent does not want is
        // that of a previous agent with other options.
        let asks = match wanted {
            Some(_) => wanted != instance.inlet || !pod.has_inlet(),
            None => pod.has_some_inlet(),
        };
        if asks {
            self.actions.push(Action::Inlet(uid.clone(), wanted));
        }
        instance.inlet = wanted;
        let outcome = instance.admitted(translation.outcome, &former, &self.admit);
        let volumes = volumes.into_inner();
        if instance.volumes != volumes {
            instance.volumes.clone_from(&volumes);
            self.actions.push(Action::Watch(uid.clone(), volumes));
        }
        let told = instance.tell(outcome, self.generation + 1);
        if let Some(FeedEvent::Upsert { .. }) = &told {
            self.generation += 1;
        }
        self.actions.extend(told.map(Action::Tell));
        self.publish(key, uid, now);
    }

    /// Tells of an instance's problems, or that it has none any more.
    fn publish(&mut self, key: &str, uid: &PodUid, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let Some(instance) = known.instances.get_mut(uid).filter(|instance| !instance.has_ended()) else {
            return;
        };
        let due = instance.since + GRACE;
        if now < due && instance.problems().any(Problem::may_pass) {
            self.timers.insert((due, key.to_owned()));
        }
        self.actions.extend(instance.complain(&known.vmi, now >= due));
    }

    fn drop_vmi(&mut self, key: &str) {
        let Some(known) = self.vmis.remove(key) else { return };
        self.changed = true;
        self.octets -= known.octets;
        for (uid, mut instance) in known.instances {
            self.owners.remove(&uid);
            self.actions.extend(instance.end());
        }
    }

    fn tell(&mut self, event: FeedEvent) {
        self.actions.push(Action::Tell(event));
    }
}
