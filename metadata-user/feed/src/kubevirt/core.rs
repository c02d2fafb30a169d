//! The state of the VMIs and their pods, and the actions that follow from it.
//!
//! The caller passes in events with their times and takes the actions out. This module never waits, never reads a
//! clock, and reads files only through the function it is given for a pod's volumes.
//!
//! The feed serves a VM from the moment it finds its pod's launcher, whichever origin names the VMI first: one of the
//! two watches, the hook or the kept list. It stops serving the VM when the launcher ends, when the pod leaves the
//! VMI's `activePods`, or when the VMI ends. A VMI that leaves a watch stays while its launcher runs: on the
//! source node of a migration the label changes before the launcher ends. After a failed migration the VMI leaves the
//! watch of the target node, where it never ran. The feed drops it there after [`LINGER`], because the label of a
//! successful migration arrives within that time.
//!
//! A pod belongs to the VMI whose UID is on its launcher's command line. `status.activePods` alone proves nothing:
//! KubeVirt's VMIs have no status subresource, so a tenant who may update a VMI may write the UID of any pod there.

mod instance;
mod queue;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_common::mac::Mac;
use metadata_common::share::{FairShare, ShareError, Tenant};

use super::translate::{VmiProblem, VmiTranslation, is_wanted};
use super::volumes::ReadVolumes;
use super::{KubevirtOptions, Vmi, VmiError};
use crate::memory_budget::MemoryExhausted;
use crate::pods::{self, PodEvent, PodUid, PodsError};
use crate::source::{Services, ServingState};
use crate::{FeedError, FeedEvent};
use instance::VmiInstance;
use metadata_content::record::{Record, RecordLimits};
use queue::TranslationQueue;
pub use queue::{EventReason, JobResult, REST_FACTOR, REST_LEAST, REST_MOST, TranslationJob, VmiEvent};

/// Most VMIs on a node. The feed rejects each one beyond.
pub const MAX_VMIS: usize = 4_096;
/// Most bytes of all VMIs on a node, counting what the feed keeps of each: annotations, labels, volumes and
/// interfaces. It rejects each VMI beyond.
pub const VMIS_BYTES: usize = 32 << 20;
/// VMIs, and pods, that each namespace may have while the node's limit is not reached.
pub const VMIS_FLOOR: usize = 32;
/// Bytes of VMIs that each namespace may have while the node's limit is not reached.
pub const VMIS_FLOOR_BYTES: usize = 256 << 10;
/// Most pods of one VMI on a node; a VMI has at most two, while it migrates.
pub const MAX_PODS: usize = 4;
/// How long a VMI that never ran here stays after it left its last watch.
pub const LINGER: Duration = Duration::from_secs(5);
/// How long problems of a new pod are not reported: its volumes, taps and MACs appear one after the other.
pub const GRACE: Duration = Duration::from_secs(10);
/// How long the NIC of a pod counts after it has vanished. For a bridge, KubeVirt renames the pod's NIC, and then makes
/// another device of its name and MAC. On a busy node that takes seconds.
pub const NIC_KEPT: Duration = Duration::from_secs(60);
/// Reports on a VMI that may be written at once.
pub const REPORTS_AT_ONCE: u32 = 6;
/// The time after which another report on a VMI may be written.
pub const REPORT_EVERY: Duration = Duration::from_secs(10);
/// Most vanished NICs of a pod that are kept.
pub const MAX_VANISHED: usize = 32;

/// Which source named a VMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum VmiOrigin {
    /// The watch of VMIs that run on this node.
    Here,
    /// The watch of VMIs that migrate to this node.
    Coming,
    /// KubeVirt's node hook, called before the VMI runs here.
    Hook,
    /// The kept file of the previous run. The watches precede the hook, and the hook precedes this file.
    Kept,
}

/// A step for the caller to take.
#[derive(Clone, Debug)]
pub enum Action {
    /// Pass this event to the agent.
    Publish(FeedEvent),
    /// Watch this pod and these of its volumes.
    Watch(PodUid, BTreeSet<String>),
    /// Create the pod's inlet with this source MAC, or remove it if there is none.
    Inlet(PodUid, Option<Mac>),
    /// Stop watching this pod.
    Leave(PodUid),
    /// Write this Event on the VMI.
    Report(VmiEvent),
}

/// Reserves memory for a record under its key; see [`Publisher::admit`](crate::publisher::Publisher::admit).
pub type AdmitRecord = Box<dyn Fn(&str, &Record) -> Result<(), MemoryExhausted> + Send>;

/// The state machine of the feed.
pub struct Core {
    node: String,
    options: Arc<KubevirtOptions>,
    limits: Arc<RecordLimits>,
    read: Arc<dyn ReadVolumes>,
    admit: AdmitRecord,
    /// How the agent serves each record; `None` if it does not say so, and every record counts as served.
    services: Option<Services>,
    shares: Shares,
    queue: TranslationQueue,
    vmis: BTreeMap<String, KnownVmi>,
    /// The VMI key of each pod.
    owners: HashMap<PodUid, String>,
    /// Why VMIs of which no version is known are refused, by their keys; [`MAX_VMIS`] at most.
    refused: BTreeMap<String, String>,
    /// When to review a VMI again, by its key.
    timers: BTreeSet<(Instant, String)>,
    /// Generation of the last published record.
    generation: u64,
    actions: Vec<Action>,
    changed: bool,
}

/// How namespaces share the node's limits of VMIs.
#[derive(Debug)]
pub struct Shares {
    /// The number of VMIs.
    pub vmis: FairShare,
    /// Bytes of all VMIs, estimated by [`Vmi::bytes`].
    pub bytes: FairShare,
    /// The number of pods that are followed.
    pub pods: FairShare,
}

impl Shares {
    fn new() -> Self {
        Self {
            vmis: FairShare::new(MAX_VMIS, VMIS_FLOOR),
            bytes: FairShare::new(VMIS_BYTES, VMIS_FLOOR_BYTES),
            pods: FairShare::new(pods::MAX_PODS, VMIS_FLOOR),
        }
    }
}

/// What the core knows of one VMI.
struct KnownVmi {
    vmi: Arc<Vmi>,
    tenant: Tenant,
    /// Estimated bytes of `vmi`.
    bytes: usize,
    origins: BTreeSet<VmiOrigin>,
    /// Set once an origin other than [`VmiOrigin::Coming`] has named it.
    ran: bool,
    /// When it lost its last origin.
    lost_at: Option<Instant>,
    instances: BTreeMap<PodUid, VmiInstance>,
    /// Why the newest version is not `vmi`, if it was refused as a whole.
    version_fault: Option<String>,
    /// Pods that it names and does not get.
    contested: BTreeMap<PodUid, PodRefusal>,
    /// What was last published under the VMI's key of these two. Its instances publish there what they lack.
    refusal: Option<String>,
    reports: ReportAllowance,
}

/// Why a VMI does not get a pod that it names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum PodRefusal {
    /// Another VMI named it first, and its launcher is not found yet or runs that VMI.
    #[error("already belongs to the VMI {holder}")]
    Held {
        /// The key of the other VMI.
        holder: String,
    },
    /// Its launcher runs another VMI. That never changes.
    #[error(
        "expected a launcher of this VMI, found that of the VMI with the UID `{vmi}`; remove the pod from \
         `status.activePods`"
    )]
    Runs {
        /// The UID of the other VMI.
        vmi: String,
    },
}

/// How many reports on a VMI may be written. A tenant may change how its VM is served as often as it writes the VMI.
struct ReportAllowance {
    /// When all of [`REPORTS_AT_ONCE`] are allowed again.
    full_at: Instant,
}

impl ReportAllowance {
    fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Takes one report.
    ///
    /// # Errors
    /// None is left; the time when one is.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let full_at = self.full_at.max(now) + REPORT_EVERY;
        let due = full_at.checked_sub(REPORT_EVERY * REPORTS_AT_ONCE).unwrap_or(now);
        if due > now {
            return Err(due);
        }
        self.full_at = full_at;
        Ok(())
    }
}

impl VmiOrigin {
    /// The origin's name in logs and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Here => "running",
            Self::Coming => "arriving",
            Self::Hook => "hook",
            Self::Kept => "kept",
        }
    }

    /// The two origins that are watches of the API server.
    pub const WATCHES: [Self; 2] = [Self::Here, Self::Coming];

    /// True for a watch of the API server.
    fn is_a_watch(&self) -> bool {
        matches!(self, Self::Here | Self::Coming)
    }
}

impl KnownVmi {
    /// True if a watch has a VMI of this UID.
    fn is_watched_as(&self, vmi: &Vmi) -> bool {
        self.vmi.metadata.uid == vmi.metadata.uid && self.origins.iter().any(VmiOrigin::is_a_watch)
    }

    /// True if the watch of VMIs that run here has a VMI of this UID.
    fn runs_here_as(&self, vmi: &Vmi) -> bool {
        self.vmi.metadata.uid == vmi.metadata.uid && self.origins.contains(&VmiOrigin::Here)
    }

    /// The instance whose events have this key, unless it has ended.
    fn named(&self, key: &str) -> Option<&VmiInstance> {
        self.instances.values().find(|instance| instance.key == key && !instance.has_ended())
    }

    /// What of it is refused apart from its instances.
    fn faults(&self) -> Option<String> {
        let pods = self.contested.iter().map(|(uid, refusal)| format!("pod `{uid}` {refusal}"));
        let faults: Vec<_> = self.version_fault.iter().cloned().chain(pods).collect();
        (!faults.is_empty()).then(|| faults.join("; "))
    }
}

impl Core {
    /// Creates an empty core, whose records' generations start after `generation`. Pass the time since an epoch: it
    /// grows faster than records change, so generations increase across restarts.
    #[must_use]
    pub fn new(
        node: String,
        options: KubevirtOptions,
        limits: RecordLimits,
        generation: u64,
        read: Arc<dyn ReadVolumes>,
    ) -> Self {
        Self {
            node,
            options: Arc::new(options),
            limits: Arc::new(limits),
            read,
            admit: Box::new(|_, _| Ok(())),
            services: None,
            shares: Shares::new(),
            queue: TranslationQueue::new(),
            vmis: BTreeMap::new(),
            owners: HashMap::new(),
            refused: BTreeMap::new(),
            timers: BTreeSet::new(),
            generation,
            actions: Vec::new(),
            changed: false,
        }
    }

    /// Sets the function that reserves memory for records. The default admits every record.
    #[must_use]
    pub fn admitting(self, admit: AdmitRecord) -> Self {
        Self { admit, ..self }
    }

    /// Reports no VM as served until the agent says so ([`served`](Self::served)). The default counts every record as
    /// served.
    #[must_use]
    pub fn told_of_services(self) -> Self {
        Self { services: Some(Services::new()), ..self }
    }

    /// Handles how the agent serves the records now.
    pub fn served(&mut self, services: Services, now: Instant) {
        let former = self.services.replace(services).unwrap_or_default();
        let services = self.services.as_ref();
        let is_new = |instance: &VmiInstance| {
            services.and_then(|services| services.get(&instance.key)) != former.get(&instance.key)
        };
        let changed = self.vmis.iter().flat_map(|(key, known)| {
            let changed = known.instances.iter().filter(|(_, instance)| is_new(instance));
            changed.map(move |(uid, _)| (key.clone(), uid.clone()))
        });
        for (key, uid) in changed.collect::<Vec<_>>() {
            self.report_problems(&key, &uid, now);
        }
    }

    /// Handles a VMI that is new or has changed.
    pub fn applied(&mut self, origin: VmiOrigin, mut vmi: Vmi, now: Instant) {
        let key = vmi.key();
        if origin != VmiOrigin::Kept {
            vmi.metadata.owner_references.get_or_insert_default();
        }
        match self.vmis.get(&key) {
            Some(_) if origin == VmiOrigin::Kept => return,
            // The watch has the newer version; the hook only adds that the VMI is about to run.
            Some(known) if origin == VmiOrigin::Hook && known.is_watched_as(&vmi) => {
                self.vmis.entry(key).and_modify(|known| known.ran = true);
                return;
            }
            // The watch of VMIs that run here gets every version too. The other may be behind, and have an older one.
            Some(known) if origin == VmiOrigin::Coming && known.runs_here_as(&vmi) => {
                self.vmis.entry(key).and_modify(|known| _ = known.origins.insert(origin));
                return;
            }
            Some(known) if known.vmi.metadata.uid != vmi.metadata.uid => self.drop_vmi(&key),
            Some(_) | None => {}
        }
        let tenant = Tenant::namespace(&vmi.metadata.namespace);
        let former = self.vmis.get(&key).map(|known| known.bytes);
        if former.is_none()
            && let Err(error) = self.shares.vmis.admit(&tenant, 1)
        {
            let reason =
                format!("too many VMIs on this node: {error}; move VMs of this namespace to other nodes");
            return self.refuse_version(&key, reason);
        }
        let bytes = vmi.bytes();
        if let Err(error) = self.shares.bytes.replace(&tenant, former.unwrap_or_default(), bytes) {
            if former.is_none() {
                self.shares.vmis.release(&tenant, 1);
            }
            let reason = format!(
                "the VMI has {bytes} bytes, which is too much for this node: {error}; a version that is served stays. \
                 Put user-data into a Secret"
            );
            return self.refuse_version(&key, reason);
        }
        self.refused.remove(&key);
        let known = self.vmis.entry(key.clone()).or_insert_with(|| KnownVmi {
            vmi: Arc::default(),
            tenant,
            bytes,
            origins: BTreeSet::new(),
            ran: false,
            lost_at: None,
            instances: BTreeMap::new(),
            version_fault: None,
            contested: BTreeMap::new(),
            refusal: None,
            reports: ReportAllowance::new(now),
        });
        known.version_fault = None;
        if *known.vmi != vmi {
            self.changed = true;
            known.vmi = Arc::new(vmi);
        }
        known.bytes = bytes;
        known.lost_at = None;
        known.ran |= origin != VmiOrigin::Coming;
        known.origins.retain(VmiOrigin::is_a_watch);
        known.origins.insert(origin);
        self.review(&key, now);
    }

    /// Reports a VMI that cannot be decoded. Its last published state stays.
    pub fn unreadable(&mut self, key: &str, error: &VmiError) {
        self.refuse_version(key, error.to_string());
    }

    /// Refuses the newest version of a VMI. The version before, if there is one, stays. The same refusal is published
    /// once, however often the VMI is written.
    fn refuse_version(&mut self, key: &str, reason: String) {
        if let Some(known) = self.vmis.get_mut(key) {
            known.version_fault = Some(reason);
            return self.settle_refusal(key);
        }
        if self.refused.get(key) == Some(&reason) {
            return;
        }
        if self.refused.len() < MAX_VMIS || self.refused.contains_key(key) {
            self.refused.insert(key.to_owned(), reason.clone());
        }
        self.emit(FeedEvent::Rejected { key: key.to_owned(), error: FeedError::Vm { reason } });
    }

    /// Handles a VMI that has left a watch.
    pub fn gone(&mut self, origin: VmiOrigin, key: &str, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else {
            // This VMI was rejected: it could not be decoded or exceeded a limit.
            self.refused.remove(key);
            return self.emit(FeedEvent::Remove { key: key.to_owned() });
        };
        if !known.origins.remove(&origin) || !known.origins.is_empty() {
            return;
        }
        self.changed = true;
        if !known.instances.values().any(VmiInstance::lives) {
            return self.drop_vmi(key);
        }
        known.lost_at = Some(now);
        if !known.ran {
            self.timers.insert((now + LINGER, key.to_owned()));
        }
    }

    /// Handles a VMI that has stopped, which the hook says. virt-handler may say it late or again, when the next VMI of
    /// that name is there.
    pub fn stopped(&mut self, vmi: &Vmi, now: Instant) {
        let key = vmi.key();
        if self.vmis.get(&key).is_none_or(|known| known.vmi.metadata.uid == vmi.metadata.uid) {
            self.gone(VmiOrigin::Hook, &key, now);
        }
    }

    /// Handles the complete list of a watch: VMIs that `keys` lacks have left it.
    pub fn listed(&mut self, origin: VmiOrigin, keys: &BTreeSet<String>, now: Instant) {
        let here = self.vmis.iter().filter(|(_, known)| known.origins.contains(&origin));
        let lost: Vec<_> = here.filter(|(key, _)| !keys.contains(*key)).map(|(key, _)| key.clone()).collect();
        for key in &lost {
            self.gone(origin, key, now);
        }
    }

    /// The VMIs that no watch names and no launcher runs, and their pods on this node.
    pub fn idle(&self) -> impl Iterator<Item = (&String, Vec<PodUid>)> {
        let is_idle = |known: &KnownVmi| {
            !known.origins.iter().any(VmiOrigin::is_a_watch)
                && !known.instances.values().any(VmiInstance::lives)
        };
        self.vmis.iter().filter(move |&(_, known)| is_idle(known)).map(move |(key, known)| {
            let is_own = |uid: &PodUid| !matches!(known.contested.get(uid), Some(PodRefusal::Runs { .. }));
            let pods = known.vmi.pods_on(&self.node).filter_map(|uid| uid.parse().ok());
            (key, pods.filter(is_own).collect())
        })
    }

    /// Forgets a VMI.
    pub fn forget(&mut self, key: &str) {
        self.drop_vmi(key);
    }

    /// Handles an event of a pod.
    pub fn pod(&mut self, uid: &PodUid, event: PodEvent, now: Instant) {
        let Some(key) = self.owners.get(uid).cloned() else { return };
        let Some(known) = self.vmis.get_mut(&key) else { return };
        if let PodEvent::Found(pod) | PodEvent::Taps(pod) = &event
            && pod.vmi != known.vmi.metadata.uid
        {
            return self.refuse_pod(&key, uid, &pod.vmi, now);
        }
        let Some(instance) = known.instances.get_mut(uid) else { return };
        match event {
            PodEvent::Found(pod) | PodEvent::Taps(pod) => {
                if let Some(due) = instance.find(pod, now) {
                    self.timers.insert((due, key.clone()));
                }
                instance.missing = None;
            }
            PodEvent::Absent => {
                instance.absent = true;
                return;
            }
            PodEvent::Missing { reason } => {
                let pod = uid.to_string();
                return self.lacks(&key, uid, VmiProblem::Launcher { pod, reason }, now);
            }
            PodEvent::Files { .. } => {}
            PodEvent::Gone => {
                self.end_instance(&key, uid);
                let Some(known) = self.vmis.get(&key) else { return };
                let watched = known.origins.iter().any(VmiOrigin::is_a_watch);
                if !watched && !known.instances.values().any(VmiInstance::lives) {
                    self.drop_vmi(&key);
                }
                return;
            }
        }
        self.refresh(&key, uid, now);
    }

    /// Retries the records that were refused for lack of memory and now fit into what is free for their tenant.
    pub fn freed(&mut self, free: impl Fn(&Tenant) -> usize, now: Instant) {
        let lacking = self.vmis.iter().flat_map(|(key, known)| {
            let mut lacking =
                known.instances.iter().filter(|(_, instance)| instance.lacks_memory()).peekable();
            let free = lacking.peek().map_or(0, |_| free(&known.tenant));
            let lacking = lacking.filter(move |(_, instance)| instance.lacks_at_most(free));
            lacking.map(move |(uid, _)| (key.clone(), uid.clone()))
        });
        for (key, uid) in lacking.collect::<Vec<_>>() {
            self.refresh(&key, &uid, now);
        }
    }

    /// Reports a pod that the feed cannot follow, or whose volumes it cannot all follow.
    pub fn unfollowed(&mut self, uid: &PodUid, error: &PodsError, now: Instant) {
        let Some(key) = self.owners.get(uid).cloned() else { return };
        let (pod, reason) = (uid.to_string(), error.to_string());
        self.lacks(&key, uid, VmiProblem::Unfollowed { pod, reason }, now);
    }

    /// Notes why the launcher of a pod is unknown.
    fn lacks(&mut self, key: &str, uid: &PodUid, problem: VmiProblem, now: Instant) {
        let known = self.vmis.get_mut(key);
        let Some(instance) = known.and_then(|known| known.instances.get_mut(uid)) else { return };
        instance.absent = true;
        instance.missing = Some(problem);
        self.report_problems(key, uid, now);
    }

    /// Handles the timers that are due.
    pub fn tick(&mut self, now: Instant) {
        while self.deadline().is_some_and(|due| due <= now) {
            let Some((_, key)) = self.timers.pop_first() else { return };
            let Some(known) = self.vmis.get(&key) else { continue };
            if known.lost_at.is_some_and(|lost_at| !known.ran && now >= lost_at + LINGER) {
                self.drop_vmi(&key);
                continue;
            }
            let uids: Vec<_> = known.instances.keys().cloned().collect();
            for uid in &uids {
                let instance = self.vmis.get_mut(&key).and_then(|known| known.instances.get_mut(uid));
                if instance.is_some_and(|instance| instance.forget_vanished(now)) {
                    self.refresh(&key, uid, now);
                }
                self.report_problems(&key, uid, now);
            }
        }
    }

    /// When to call [`tick`](Self::tick) next.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Takes the actions that arose since the last call.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// True if the set of VMIs or their content changed since the last call.
    pub fn has_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// All VMIs, for the kept file.
    pub fn vmis(&self) -> impl Iterator<Item = &Vmi> {
        self.vmis.values().map(|known| &*known.vmi)
    }

    /// All VMIs, without copying them. Those that name another's pod come last: the next agent reads them in this
    /// order, and until it has found a pod's launcher, the pod is the first one's.
    #[must_use]
    pub fn shared_vmis(&self) -> Vec<Arc<Vmi>> {
        let (held, contesting): (Vec<_>, Vec<_>) =
            self.vmis.values().partition(|known| known.contested.is_empty());
        held.into_iter().chain(contesting).map(|known| Arc::clone(&known.vmi)).collect()
    }

    /// How namespaces share the node's limits of VMIs.
    #[must_use]
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// True once the search for every pod's launcher has had a first result, and those found a first translation.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.vmis.values().flat_map(|known| known.instances.values()).all(VmiInstance::is_settled)
    }

    /// True while a VMI that this node is to serve has no record yet.
    #[must_use]
    pub fn awaits(&self, key: &str) -> bool {
        let Some(known) = self.vmis.get(key) else { return false };
        // The pod may turn out to be this VMI's.
        let may_get_pod =
            || known.contested.values().any(|refusal| matches!(refusal, PodRefusal::Held { .. }));
        known.instances.values().any(VmiInstance::awaits) || (known.instances.is_empty() && may_get_pod())
    }

    /// True if a VMI that this node is to serve is refused as a whole: no version of it is known, or its pods are those
    /// of others.
    #[must_use]
    pub fn refuses(&self, key: &str) -> bool {
        let has_no_pod = |known: &KnownVmi| known.instances.is_empty() && !known.contested.is_empty();
        self.vmis.get(key).is_none_or(has_no_pod)
    }

    /// Starts and ends instances until they match the VMI's pods on this node.
    fn review(&mut self, key: &str, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let wanted = is_wanted(&known.vmi, &self.options);
        let pods = known.vmi.pods_on(&self.node).filter(|_| wanted).filter_map(|uid| uid.parse().ok());
        let pods: BTreeSet<PodUid> = pods.take(MAX_PODS).collect();
        let past: Vec<_> = known.instances.keys().filter(|uid| !pods.contains(*uid)).cloned().collect();
        for uid in past {
            self.remove_instance(key, &uid);
        }
        for uid in &pods {
            if !self.contest(key, uid) {
                self.begin_instance(key, uid, now);
            }
        }
        if let Some(known) = self.vmis.get_mut(key) {
            known.contested.retain(|uid, _| pods.contains(uid));
            self.settle_refusal(key);
        }
        for uid in &pods {
            self.refresh(key, uid, now);
        }
    }

    /// Returns whether a pod belongs to another VMI, and notes that. Until the pod's launcher is found, the VMI that
    /// named the pod first has it, whatever its name.
    fn contest(&mut self, key: &str, uid: &PodUid) -> bool {
        let Some(known) = self.vmis.get_mut(key) else { return false };
        if let Some(PodRefusal::Runs { .. }) = known.contested.get(uid) {
            return true;
        }
        let Some(holder) = self.owners.get(uid).filter(|holder| *holder != key) else {
            known.contested.remove(uid);
            return false;
        };
        known.contested.insert(uid.clone(), PodRefusal::Held { holder: holder.clone() });
        // The VMI may have named the pod before the holder did, beyond its namespace's share of pods.
        self.remove_instance(key, uid);
        true
    }

    /// Takes a pod from a VMI that its launcher does not run. The VMI that the launcher runs gets it, if it names it.
    fn refuse_pod(&mut self, key: &str, uid: &PodUid, runs: &str, now: Instant) {
        self.remove_instance(key, uid);
        let mut claimants = Vec::new();
        for (other, known) in &mut self.vmis {
            if other != key && !known.contested.contains_key(uid) {
                continue;
            }
            if known.vmi.metadata.uid != runs {
                known.contested.insert(uid.clone(), PodRefusal::Runs { vmi: runs.to_owned() });
            }
            claimants.push(other.clone());
        }
        for claimant in &claimants {
            self.review(claimant, now);
        }
    }

    /// Follows a pod of a VMI. A pod beyond its namespace's share is tried again when the VMI changes.
    fn begin_instance(&mut self, key: &str, uid: &PodUid, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        if known.instances.get(uid).is_some_and(|instance| instance.is_followed) {
            return;
        }
        let alone =
            known.instances.values().all(|other| other.has_ended() || other.key != *key || other.is(uid));
        let name = if alone { key.to_owned() } else { format!("{key}@{uid}") };
        let instance =
            known.instances.entry(uid.clone()).or_insert_with(|| VmiInstance::new(name, uid.clone(), now));
        match self.shares.pods.admit(&known.tenant, 1) {
            Ok(()) => {
                self.owners.insert(uid.clone(), key.to_owned());
                instance.is_followed = true;
                instance.missing = None;
                self.actions.push(Action::Watch(uid.clone(), BTreeSet::new()));
            }
            Err(error) => self.lacks(key, uid, unfollowed_of_share(uid, &error), now),
        }
    }

    fn remove_instance(&mut self, key: &str, uid: &PodUid) {
        self.end_instance(key, uid);
        if self.owners.get(uid).is_some_and(|holder| holder == key) {
            self.owners.remove(uid);
        }
        if let Some(known) = self.vmis.get_mut(key) {
            known.instances.remove(uid);
        }
    }

    /// Ends an instance, the first time.
    fn end_instance(&mut self, key: &str, uid: &PodUid) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let Some(instance) = known.instances.get_mut(uid).filter(|instance| !instance.has_ended()) else {
            return;
        };
        self.actions.extend(instance.end());
        if instance.is_followed {
            self.shares.pods.release(&known.tenant, 1);
            self.read.keep_only(uid, &BTreeSet::new());
        }
    }

    /// Asks for the translation of a VMI in one of its pods.
    fn refresh(&mut self, key: &str, uid: &PodUid, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let Some(instance) = known.instances.get_mut(uid) else { return };
        if instance.lives() {
            instance.is_queued = true;
            self.queue.add(&known.tenant, key, uid, now);
        }
    }

    /// The next translation; the caller runs it, and passes the result to [`translated`](Self::translated).
    pub fn next_job(&mut self, now: Instant) -> Option<TranslationJob> {
        while let Some((key, pods)) = self.queue.next(now) {
            if let Some(known) = self.vmis.get_mut(&key) {
                let pods = pods.into_iter().filter_map(|uid| {
                    let instance = known.instances.get_mut(&uid).filter(|instance| instance.lives())?;
                    Some((uid, instance.pod.clone()?))
                });
                let pods: Vec<_> = pods.collect();
                if !pods.is_empty() {
                    let (vmi, tenant) = (Arc::clone(&known.vmi), known.tenant.clone());
                    let (options, limits) = (Arc::clone(&self.options), Arc::clone(&self.limits));
                    return Some(TranslationJob {
                        key,
                        tenant,
                        vmi,
                        pods,
                        read: Arc::clone(&self.read),
                        options,
                        limits,
                    });
                }
            }
            self.queue.finish(&key, Duration::ZERO, now);
        }
        None
    }

    /// When to call [`next_job`](Self::next_job) again although nothing happens.
    #[must_use]
    pub fn next_job_at(&self) -> Option<Instant> {
        self.queue.due()
    }

    /// Handles the result of a translation: publishes what changed.
    pub fn translated(&mut self, result: JobResult, now: Instant) {
        let JobResult { key, vmi, pods, took } = result;
        for (uid, translation, volumes) in pods {
            self.publish(&key, &vmi, &uid, translation, volumes, now);
        }
        self.queue.finish(&key, took, now);
    }

    fn publish(
        &mut self,
        key: &str,
        vmi: &Vmi,
        uid: &PodUid,
        translation: VmiTranslation,
        volumes: BTreeSet<String>,
        now: Instant,
    ) {
        let known = self.vmis.get_mut(key).filter(|known| known.vmi.metadata.uid == vmi.metadata.uid);
        let instance = known.and_then(|known| known.instances.get_mut(uid));
        let Some(instance) = instance.filter(|instance| instance.lives()) else {
            // It ended meanwhile: what the translation has read is not needed any more.
            return self.read.keep_only(uid, &BTreeSet::new());
        };
        let Some(pod) = &instance.pod else { return };
        instance.is_translated = true;
        instance.is_queued = self.queue.has(key, uid);
        let former = std::mem::replace(&mut instance.problems, translation.problems);
        let wanted = translation.inlet;
        // A missing inlet may have been deleted, so each pass asks for it again. An unwanted inlet comes from a
        // previous agent with other options.
        let asks = match wanted {
            Some(_) => wanted != instance.inlet || !pod.has_inlet(),
            None => pod.has_some_inlet(),
        };
        if asks {
            self.actions.push(Action::Inlet(uid.clone(), wanted));
        }
        instance.inlet = wanted;
        let outcome = instance.owned(translation.outcome, vmi);
        let outcome = instance.admitted(outcome, &former, &self.admit);
        if instance.volumes != volumes {
            instance.volumes.clone_from(&volumes);
            self.actions.push(Action::Watch(uid.clone(), volumes));
        }
        let event = instance.publish(outcome, self.generation + 1);
        if let Some(FeedEvent::Upsert { .. }) = &event {
            self.generation += 1;
        }
        let clears_refusal = matches!(event, Some(FeedEvent::Upsert { .. } | FeedEvent::Remove { .. }));
        self.actions.extend(event.map(Action::Publish));
        self.report_problems_after(key, uid, clears_refusal, now);
    }

    /// Reports an instance's problems, or that none are left.
    fn report_problems(&mut self, key: &str, uid: &PodUid, now: Instant) {
        self.report_problems_after(key, uid, false, now);
    }

    /// Like [`report_problems`](Self::report_problems). `clears_refusal` is true after an event of the instance by
    /// which the registry drops what is refused under its key.
    fn report_problems_after(&mut self, key: &str, uid: &PodUid, clears_refusal: bool, now: Instant) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let Some(instance) = known.instances.get_mut(uid).filter(|instance| !instance.has_ended()) else {
            return;
        };
        let service = match &self.services {
            Some(services) => services.get(&instance.key).unwrap_or(&ServingState::Waiting),
            None => &ServingState::Ready,
        };
        let due = instance.since + GRACE;
        if now < due && instance.problems().any(VmiProblem::may_pass) {
            self.timers.insert((due, key.to_owned()));
        }
        if let Some(due) = instance.note(service, now) {
            self.timers.insert((due, key.to_owned()));
        }
        let complaint = instance.complain(now >= due);
        let clears_refusal = (clears_refusal || complaint.is_some()) && instance.key == key;
        self.actions.extend(complaint);
        match instance.report(&known.vmi, service, &mut known.reports, now) {
            Ok(report) => self.actions.extend(report.map(Action::Report)),
            Err(due) => _ = self.timers.insert((due, key.to_owned())),
        }
        if clears_refusal {
            self.publish_refusal(key);
        }
    }

    /// Publishes what is refused under the VMI's key, or takes it back, if that has changed.
    fn settle_refusal(&mut self, key: &str) {
        let Some(known) = self.vmis.get_mut(key) else { return };
        let refusal = known.faults();
        if known.refusal == refusal {
            return;
        }
        known.refusal = refusal;
        if known.refusal.is_some() {
            return self.publish_refusal(key);
        }
        let removed = || FeedEvent::Remove { key: key.to_owned() };
        let event = known.named(key).map_or_else(removed, VmiInstance::published);
        self.emit(event);
    }

    /// Publishes what is refused under the VMI's key, if anything is, with what its instance of that key lacks: the
    /// registry keeps one reason for each key.
    fn publish_refusal(&mut self, key: &str) {
        let Some(known) = self.vmis.get(key) else { return };
        let Some(refusal) = known.refusal.as_deref() else { return };
        let reason = match known.named(key).and_then(VmiInstance::complaint) {
            Some(complaint) => format!("{refusal}; {complaint}"),
            None => refusal.to_owned(),
        };
        self.emit(FeedEvent::Rejected { key: key.to_owned(), error: FeedError::Vm { reason } });
    }

    fn drop_vmi(&mut self, key: &str) {
        let Some(known) = self.vmis.get(key) else { return };
        let uids: Vec<_> = known.instances.keys().cloned().collect();
        for uid in &uids {
            self.remove_instance(key, uid);
        }
        if let Some(known) = self.vmis.get_mut(key) {
            (known.version_fault, known.contested) = (None, BTreeMap::new());
            self.settle_refusal(key);
        }
        let Some(known) = self.vmis.remove(key) else { return };
        self.changed = true;
        self.shares.vmis.release(&known.tenant, 1);
        self.shares.bytes.release(&known.tenant, known.bytes);
        self.queue.forget(key);
    }

    fn emit(&mut self, event: FeedEvent) {
        self.actions.push(Action::Publish(event));
    }
}

fn unfollowed_of_share(uid: &PodUid, error: &ShareError) -> VmiProblem {
    let reason = format!("too many pods on this node: {error}; move VMs of this namespace to other nodes");
    VmiProblem::Unfollowed { pod: uid.to_string(), reason }
}
