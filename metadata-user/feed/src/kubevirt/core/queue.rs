//! Which VMI is translated next.
//!
//! Namespaces take turns, and within one its VMIs. Changes of a VMI that arrive while it waits cost nothing more. After
//! each translation a VMI waits ten times as long as the translation took. So it uses at most an eleventh of the
//! translator's time, however often its owner changes it.

use metadata_common::share::{FairQueue, Tenant};
use metadata_content::record::RecordLimits;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::MAX_VMIS;
use crate::kubevirt::translate::{VmiTranslation, translate};
use crate::kubevirt::volumes::{BudgetedVolumes, ReadVolumes};
use crate::kubevirt::{KubevirtOptions, Vmi};
use crate::pods::{Pod, PodUid};

/// How long a VMI rests after a translation, as a multiple of the time that it took.
pub const REST_FACTOR: u32 = 10;
/// The shortest rest. Changes of a pod that starts come within that time.
pub const REST_LEAST: Duration = Duration::from_millis(50);
/// The longest rest.
pub const REST_MOST: Duration = Duration::from_secs(10);

/// The VMIs to translate.
#[derive(Debug)]
pub(super) struct TranslationQueue {
    /// VMIs that may be translated now.
    waiting: FairQueue<String>,
    /// VMIs that wait until their rest is over.
    resting: BTreeSet<(Instant, String)>,
    vmis: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    tenant: Tenant,
    /// The pods whose record is to be made.
    pods: BTreeSet<PodUid>,
    /// When its rest is over.
    ready: Instant,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Waiting,
    Resting,
    Running,
}

impl TranslationQueue {
    pub(super) fn new() -> Self {
        // Each VMI is at most once in the queue, and tenants share the number of VMIs.
        let waiting = FairQueue::new(MAX_VMIS, MAX_VMIS);
        Self { waiting, resting: BTreeSet::new(), vmis: HashMap::new() }
    }

    /// Asks for the translation of a VMI in one of its pods.
    pub(super) fn add(&mut self, tenant: &Tenant, key: &str, pod: &PodUid, now: Instant) {
        let entry = self.vmis.entry(key.to_owned()).or_insert_with(|| Entry {
            tenant: tenant.clone(),
            pods: BTreeSet::new(),
            ready: now,
            state: State::Idle,
        });
        entry.pods.insert(pod.clone());
        if entry.state == State::Idle {
            self.schedule(key, now);
        }
    }

    fn schedule(&mut self, key: &str, now: Instant) {
        let Some(entry) = self.vmis.get_mut(key) else { return };
        if entry.ready > now || self.waiting.push(&entry.tenant, key.to_owned()).is_err() {
            entry.state = State::Resting;
            self.resting.insert((entry.ready, key.to_owned()));
        } else {
            entry.state = State::Waiting;
        }
    }

    /// The VMI whose turn it is, and the pods to translate it in.
    pub(super) fn next(&mut self, now: Instant) -> Option<(String, BTreeSet<PodUid>)> {
        let rested: Vec<_> = self.resting.iter().take_while(|(ready, _)| *ready <= now).cloned().collect();
        for rest in rested {
            self.resting.remove(&rest);
            self.schedule(&rest.1, now);
        }
        let (_, key) = self.waiting.pop()?;
        let entry = self.vmis.get_mut(&key)?;
        entry.state = State::Running;
        Some((key, std::mem::take(&mut entry.pods)))
    }

    /// Ends the translation of a VMI, which took this time.
    pub(super) fn finish(&mut self, key: &str, took: Duration, now: Instant) {
        let Some(entry) = self.vmis.get_mut(key).filter(|entry| entry.state == State::Running) else {
            return;
        };
        entry.ready = now + took.saturating_mul(REST_FACTOR).clamp(REST_LEAST, REST_MOST);
        entry.state = State::Idle;
        if !entry.pods.is_empty() {
            self.schedule(key, now);
        }
    }

    /// True if a VMI waits for its translation in a pod.
    pub(super) fn has(&self, key: &str, pod: &PodUid) -> bool {
        self.vmis.get(key).is_some_and(|entry| entry.pods.contains(pod))
    }

    /// Removes a VMI.
    pub(super) fn forget(&mut self, key: &str) {
        let Some(entry) = self.vmis.remove(key) else { return };
        self.waiting.retain(&entry.tenant, |waiting| waiting != key);
        self.resting.remove(&(entry.ready, key.to_owned()));
    }

    /// When the next rest is over; `None` if no VMI rests that is to be translated.
    pub(super) fn due(&self) -> Option<Instant> {
        self.resting.first().map(|(ready, _)| *ready)
    }
}

// A translation, away from the core: the caller runs it on a thread that may take long.

/// A VMI to translate in some of its pods.
pub struct TranslationJob {
    pub(super) key: String,
    pub(super) tenant: Tenant,
    pub(super) vmi: Arc<Vmi>,
    pub(super) pods: Vec<(PodUid, Pod)>,
    pub(super) read: Arc<dyn ReadVolumes>,
    pub(super) options: Arc<KubevirtOptions>,
    pub(super) limits: Arc<RecordLimits>,
}

/// The result of a [`TranslationJob`], for [`Core::translated`](super::Core::translated).
pub struct JobResult {
    pub(super) key: String,
    pub(super) vmi: Arc<Vmi>,
    pub(super) pods: Vec<(PodUid, VmiTranslation, BTreeSet<String>)>,
    pub(super) took: Duration,
}

impl TranslationJob {
    /// Reads the volumes and makes the records. Blocks while it reads files.
    #[must_use]
    pub fn run(self) -> JobResult {
        let Self { key, tenant, vmi, pods, read, options, limits } = self;
        let start = Instant::now();
        let each = pods.into_iter().map(|(uid, pod)| {
            let volumes = BudgetedVolumes::new(&*read, &tenant, &uid);
            let translation = translate(&vmi, &pod, &volumes, &options, &limits);
            let names = volumes.into_names();
            read.keep_only(&uid, &names);
            (uid, translation, names)
        });
        let pods = each.collect();
        JobResult { key, vmi, pods, took: start.elapsed() }
    }
}

// Reports for the owner of a VMI, as Kubernetes Events.

/// The reason field of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventReason {
    /// `ImdsReady`: the VM is served.
    Ready,
    /// `ImdsDegraded`: the VM is not served, or not completely.
    Degraded,
}

impl EventReason {
    /// The reason as the Event spells it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ImdsReady",
            Self::Degraded => "ImdsDegraded",
        }
    }

    /// The Event's type: `Normal` or `Warning`.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Ready => "Normal",
            Self::Degraded => "Warning",
        }
    }
}

/// An Event on a VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmiEvent {
    /// The VMI's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, so that the Event belongs to this VMI and not to a later one of its name.
    pub uid: String,
    /// Whether the VM is served or degraded.
    pub reason: EventReason,
    /// The message for the owner.
    pub message: String,
}

impl VmiEvent {
    pub(super) fn of(vmi: &Vmi, reason: EventReason, message: String) -> Self {
        let meta = &vmi.metadata;
        let (namespace, name, uid) = (meta.namespace.clone(), meta.name.clone(), meta.uid.clone());
        Self { namespace, name, uid, reason, message }
    }
}

#[cfg(test)]
mod tests {
    use metadata_common::share::Tenant;
    use std::time::{Duration, Instant};

    use super::{REST_LEAST, REST_MOST, TranslationQueue};
    use crate::pods::PodUid;

    fn pod() -> PodUid {
        "p".parse().expect("a uid")
    }

    fn add(queue: &mut TranslationQueue, key: &str, now: Instant) {
        let (namespace, _) = key.split_once('/').expect("a key");
        queue.add(&Tenant::namespace(namespace), key, &pod(), now);
    }

    #[test]
    fn changes_of_a_waiting_or_running_vmi_cost_one_translation() {
        let (mut queue, now) = (TranslationQueue::new(), Instant::now());
        (0..100).for_each(|_| add(&mut queue, "a/vm", now));
        assert_eq!(queue.next(now).map(|(key, _)| key).as_deref(), Some("a/vm"));
        (0..100).for_each(|_| add(&mut queue, "a/vm", now));
        assert_eq!(queue.next(now), None, "it runs");
        queue.finish("a/vm", Duration::ZERO, now);
        assert_eq!((queue.next(now), queue.due()), (None, Some(now + REST_LEAST)), "it rests");
        assert!(queue.next(now + REST_LEAST).is_some());
        queue.finish("a/vm", Duration::ZERO, now + REST_LEAST);
        assert_eq!((queue.next(now + REST_MOST), queue.due()), (None, None), "no change is left");
    }

    #[test]
    fn a_storm_of_changes_takes_at_most_an_eleventh_of_the_time() {
        const TOOK: Duration = Duration::from_millis(300);
        let (mut queue, start) = (TranslationQueue::new(), Instant::now());
        let (mut now, mut spent) = (start, Duration::ZERO);
        while now < start + Duration::from_secs(60) {
            add(&mut queue, "a/vm", now);
            if queue.next(now).is_some() {
                now += TOOK;
                spent += TOOK;
                queue.finish("a/vm", TOOK, now);
            }
            now += Duration::from_millis(7);
        }
        assert!(spent * 10 <= now - start && spent * 13 >= now - start, "{spent:?} of {:?}", now - start);
    }

    #[test]
    fn a_vmi_of_another_namespace_waits_for_one_translation_of_many() {
        let (mut queue, now) = (TranslationQueue::new(), Instant::now());
        (0..1_000).for_each(|n| add(&mut queue, &format!("a/vm-{n}"), now));
        add(&mut queue, "b/vm", now);
        let turns: Vec<_> = std::iter::from_fn(|| queue.next(now)).map(|(key, _)| key).collect();
        assert_eq!(turns.len(), 1_001);
        assert!(turns.iter().position(|key| key == "b/vm").is_some_and(|at| at <= 1), "{:?}", &turns[..3]);
    }

    #[test]
    fn nothing_is_left_of_a_forgotten_vmi() {
        let (mut queue, now) = (TranslationQueue::new(), Instant::now());
        for key in ["a/waits", "a/runs", "a/rests"] {
            add(&mut queue, key, now);
        }
        let run = |queue: &mut TranslationQueue| queue.next(now).map(|(key, _)| key).expect("a turn");
        let first = run(&mut queue);
        queue.finish(&first, Duration::ZERO, now);
        add(&mut queue, &first, now);
        run(&mut queue);
        for key in ["a/waits", "a/runs", "a/rests"] {
            queue.forget(key);
            queue.finish(key, Duration::ZERO, now);
        }
        assert!(queue.vmis.is_empty() && queue.waiting.is_empty() && queue.resting.is_empty());
        assert_eq!(queue.next(now + REST_MOST), None);
    }
}
