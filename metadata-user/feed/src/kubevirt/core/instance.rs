//! A VMI in one of its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use metadata_common::mac::Mac;

use super::{Action, AdmitRecord, EventReason, GRACE, MAX_VANISHED, NIC_KEPT, ReportAllowance, VmiEvent};
use crate::kubevirt::Vmi;
use crate::kubevirt::translate::{TranslationOutcome, VmiProblem};
use crate::pods::{Pod, PodNic, PodUid};
use crate::source::ServingState;
use crate::{FeedError, FeedEvent};
use metadata_common::port::PortName;
use metadata_content::record::Record;
use metadata_links::inlet;

/// The state of an instance, and what was published of it.
pub(super) struct VmiInstance {
    /// Its key in feed events.
    pub(super) key: String,
    uid: PodUid,
    /// When the pod first appeared in the VMI.
    pub(super) since: Instant,
    /// The pod, once its launcher is found, with the NICs of `vanished`.
    pub(super) pod: Option<Pod>,
    /// NICs that vanished from the pod, and when.
    vanished: BTreeMap<String, (PodNic, Instant)>,
    /// Set once a search found no launcher.
    pub(super) absent: bool,
    /// True while its pod is followed, and counts in its namespace's share of pods.
    pub(super) is_followed: bool,
    /// Set once it was translated with its pod.
    pub(super) is_translated: bool,
    /// True while it waits for a translation.
    pub(super) is_queued: bool,
    /// The volumes that hold its data, whether they exist or not.
    pub(super) volumes: BTreeSet<String>,
    /// The source MAC last requested for its pod's inlet.
    pub(super) inlet: Option<Mac>,
    /// The last published record.
    pub(super) record: Option<Arc<Record>>,
    /// True if the last translation gave `record`; false if it gave none, and an earlier record stays.
    is_current: bool,
    /// The identities last published as expected, while there is no record.
    expected: Vec<(PortName, Mac)>,
    /// Why its launcher is unknown, if that is a fault.
    pub(super) missing: Option<VmiProblem>,
    /// The problems of the last translation.
    pub(super) problems: Vec<VmiProblem>,
    /// The problems last published, unless a later event has taken them back.
    complaint: Option<Complaint>,
    /// The reason and message last reported.
    reported: Option<(EventReason, String)>,
    /// Since when the agent has failed to serve it.
    failing_since: Option<Instant>,
    ended: bool,
}

/// Problems as they are published.
#[derive(Clone, PartialEq, Eq)]
struct Complaint {
    text: String,
    /// True if the record in force is the latest, and lacks what the problems name.
    is_of_part: bool,
}

impl Complaint {
    fn error(&self) -> FeedError {
        let reason = self.text.clone();
        if self.is_of_part { FeedError::Part { reason } } else { FeedError::Vm { reason } }
    }
}

impl VmiInstance {
    pub(super) fn new(key: String, uid: PodUid, since: Instant) -> Self {
        Self {
            key,
            uid,
            since,
            pod: None,
            vanished: BTreeMap::new(),
            absent: false,
            is_followed: false,
            is_translated: false,
            is_queued: false,
            volumes: BTreeSet::new(),
            inlet: None,
            record: None,
            is_current: false,
            expected: Vec::new(),
            missing: None,
            problems: Vec::new(),
            complaint: None,
            reported: None,
            failing_since: None,
            ended: false,
        }
    }

    /// True if it is in this pod.
    pub(super) fn is(&self, uid: &PodUid) -> bool {
        self.uid == *uid
    }

    /// Handles the devices of its pod. Returns when to forget the NICs that have vanished from it.
    pub(super) fn find(&mut self, mut pod: Pod, now: Instant) -> Option<Instant> {
        let is_inlet = |nic: &PodNic| nic.name == inlet::PORT || nic.name == inlet::POD_END;
        let former = self.pod.take().map(|pod| pod.nics).unwrap_or_default();
        for nic in former.into_iter().filter(|nic| !is_inlet(nic)) {
            if self.vanished.len() < MAX_VANISHED {
                self.vanished.entry(nic.name.clone()).or_insert((nic, now));
            }
        }
        let is_there = |name: &String| {
            pod.nics.iter().any(|nic| nic.name == *name) || pod.taps.iter().any(|tap| tap.ifname == *name)
        };
        self.vanished
            .retain(|name, (_, since)| !is_there(name) && now.saturating_duration_since(*since) < NIC_KEPT);
        pod.nics.extend(self.vanished.values().map(|(nic, _)| nic.clone()));
        self.pod = Some(pod);
        self.vanished.values().map(|(_, since)| *since + NIC_KEPT).min()
    }

    /// Forgets NICs that vanished [`NIC_KEPT`] ago. Returns whether there were any.
    pub(super) fn forget_vanished(&mut self, now: Instant) -> bool {
        let is_old = |since: Instant| now.saturating_duration_since(since) >= NIC_KEPT;
        let old: Vec<_> = self.vanished.extract_if(.., |_, (_, since)| is_old(*since)).collect();
        if let Some(pod) = &mut self.pod {
            pod.nics.retain(|nic| old.iter().all(|(name, _)| nic.name != *name));
        }
        !old.is_empty()
    }

    /// True while its launcher runs.
    pub(super) fn lives(&self) -> bool {
        self.pod.is_some() && !self.ended
    }

    /// True once the first search for its launcher has a result, and if it found one, the VM is translated and its
    /// inlet, if it needs one, is ready.
    pub(super) fn is_settled(&self) -> bool {
        let has_inlet = |pod: &Pod| self.is_translated && (self.inlet.is_none() || pod.has_inlet());
        self.pod.as_ref().map_or(self.absent, has_inlet) || self.ended
    }

    /// True while a record may follow soon: the launcher is not found yet, or data has not arrived yet or is not
    /// translated.
    pub(super) fn awaits(&self) -> bool {
        let pending =
            || self.is_queued || !self.expected.is_empty() || self.problems.iter().any(VmiProblem::may_pass);
        !self.ended && self.record.is_none() && (self.pod.is_none() || pending())
    }

    /// All current problems.
    pub(super) fn problems(&self) -> impl Iterator<Item = &VmiProblem> {
        self.missing.iter().chain(&self.problems)
    }

    /// True once its launcher has ended or the instance was dropped.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// True if it lacks memory for its record.
    pub(super) fn lacks_memory(&self) -> bool {
        self.lacks_at_most(usize::MAX)
    }

    /// True if it lacks memory for its record and `free` bytes suffice.
    pub(super) fn lacks_at_most(&self, free: usize) -> bool {
        let lacks =
            |problem: &VmiProblem| matches!(problem, VmiProblem::Room(no_room) if no_room.wants <= free);
        !self.ended && self.problems.iter().any(lacks)
    }

    /// Returns the outcome if the VM's owner is known. Otherwise notes the problem and expects the record's identities.
    pub(super) fn owned(&mut self, outcome: TranslationOutcome, vmi: &Vmi) -> TranslationOutcome {
        match outcome {
            TranslationOutcome::Record(record) if vmi.metadata.owner_references.is_none() => {
                self.problems.push(VmiProblem::Owner);
                TranslationOutcome::Expect(record.identities())
            }
            outcome => outcome,
        }
    }

    /// Returns the outcome if there is memory for its record. Otherwise notes the problem and expects the record's
    /// identities.
    pub(super) fn admitted(
        &mut self,
        outcome: TranslationOutcome,
        former: &[VmiProblem],
        admit: &AdmitRecord,
    ) -> TranslationOutcome {
        let TranslationOutcome::Record(record) = outcome else { return outcome };
        let Err(no_room) = admit(&self.key, &record) else { return TranslationOutcome::Record(record) };
        // The figures of others change meanwhile; keep the first message, so that it is published only once.
        let same = former.iter().find(
            |problem| matches!(problem, VmiProblem::Room(former) if former.wants == no_room.wants && former.limit == no_room.limit),
        );
        self.problems.push(same.cloned().unwrap_or(VmiProblem::Room(no_room)));
        TranslationOutcome::Expect(record.identities())
    }

    /// Notes an outcome, and returns an event if something changed. A good record stays when the data no longer gives
    /// one, because kubelet removes a pod's volumes before the pod.
    ///
    /// The registry drops what was rejected when a record arrives or is removed, so [`complain`](Self::complain) then
    /// publishes the problems again.
    pub(super) fn publish(&mut self, outcome: TranslationOutcome, generation: u64) -> Option<FeedEvent> {
        let key = self.key.clone();
        self.is_current = matches!(outcome, TranslationOutcome::Record(_));
        match outcome {
            TranslationOutcome::Record(mut record) => {
                record.generation = self.record.as_ref().map_or(generation, |last| last.generation);
                if self.record.as_ref().is_some_and(|last| **last == *record) {
                    return None;
                }
                record.generation = generation;
                let record = Arc::<Record>::from(record);
                self.record = Some(Arc::clone(&record));
                self.expected.clear();
                self.complaint = None;
                Some(FeedEvent::Upsert { key, record })
            }
            TranslationOutcome::Expect(identities)
                if self.record.is_none() && self.expected != identities =>
            {
                self.expected.clone_from(&identities);
                Some(FeedEvent::Expect { key, identities })
            }
            TranslationOutcome::Unserved if self.record.is_none() && !self.expected.is_empty() => {
                self.expected.clear();
                self.complaint = None;
                Some(FeedEvent::Remove { key })
            }
            TranslationOutcome::Expect(_) | TranslationOutcome::Unserved => None,
        }
    }

    /// The event that was published last. Publishing it again clears what was refused meanwhile.
    pub(super) fn published(&self) -> FeedEvent {
        let key = self.key.clone();
        match (&self.complaint, &self.record) {
            (Some(complaint), _) => FeedEvent::Rejected { key, error: complaint.error() },
            (None, Some(record)) => FeedEvent::Upsert { key, record: Arc::clone(record) },
            (None, None) if self.expected.is_empty() => FeedEvent::Remove { key },
            (None, None) => FeedEvent::Expect { key, identities: self.expected.clone() },
        }
    }

    /// The problems last published, unless a later event has taken them back.
    pub(super) fn complaint(&self) -> Option<&str> {
        self.complaint.as_ref().map(|complaint| complaint.text.as_str())
    }

    /// Publishes problems that changed, or that none are left. Problems that may pass by themselves count only if `all`
    /// is set.
    pub(super) fn complain(&mut self, all: bool) -> Option<Action> {
        let problems = self.problems().filter(|problem| all || !problem.may_pass());
        let text = problems.map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let is_of_part = self.is_current && self.record.is_some();
        let complaint = Some(Complaint { text, is_of_part }).filter(|complaint| !complaint.text.is_empty());
        if self.complaint == complaint {
            return None;
        }
        self.complaint = complaint;
        Some(Action::Publish(self.published()))
    }

    /// Notes how the agent serves it. Returns when to report a failure that has begun less than [`GRACE`] ago: a port
    /// that appears or vanishes cannot be served for a moment.
    pub(super) fn note(&mut self, service: &ServingState, now: Instant) -> Option<Instant> {
        self.failing_since = match service {
            ServingState::Failed(_) => self.failing_since.or(Some(now)),
            ServingState::Ready | ServingState::Waiting | ServingState::Mismatched(_) => None,
        };
        self.failing_since.map(|since| since + GRACE).filter(|due| now < *due)
    }

    /// The report on the complaint last published or, without one, on how the agent serves the record; `None` if
    /// nothing has changed, or if the VM is neither served nor known to be not.
    ///
    /// # Errors
    /// There are too many reports on the VMI; the time when to ask again.
    pub(super) fn report(
        &mut self,
        vmi: &Vmi,
        service: &ServingState,
        allowance: &mut ReportAllowance,
        now: Instant,
    ) -> Result<Option<VmiEvent>, Instant> {
        let news = self.state(service, now).filter(|state| self.reported.as_ref() != Some(state));
        let Some((reason, text)) = news else { return Ok(None) };
        allowance.take(now)?;
        self.reported = Some((reason, text.clone()));
        Ok(Some(VmiEvent::of(vmi, reason, text)))
    }

    /// What to report of it now.
    fn state(&self, service: &ServingState, now: Instant) -> Option<(EventReason, String)> {
        let record = self.record.as_ref();
        Some(match (&self.complaint, service) {
            (Some(complaint), _) => (EventReason::Degraded, complaint.text.clone()),
            (None, ServingState::Ready) => {
                let nics = record?.network.nics.len();
                (EventReason::Ready, format!("the VM's metadata is served on {nics} of its NICs"))
            }
            (None, ServingState::Mismatched(reason)) => {
                (EventReason::Degraded, record.map(|_| reason.clone())?)
            }
            (None, ServingState::Failed(reason)) => {
                let is_lasting = self.failing_since.is_some_and(|since| now >= since + GRACE);
                (EventReason::Degraded, record.filter(|_| is_lasting).map(|_| reason.clone())?)
            }
            (None, ServingState::Waiting) => return None,
        })
    }

    /// Ends the instance. Returns the actions that follow from it the first time, and none after.
    pub(super) fn end(&mut self) -> Vec<Action> {
        if std::mem::replace(&mut self.ended, true) {
            return Vec::new();
        }
        let is_published =
            self.record.take().is_some() || !self.expected.is_empty() || self.complaint.is_some();
        let remove = is_published.then(|| Action::Publish(FeedEvent::Remove { key: self.key.clone() }));
        // A pod that it does not follow may be followed for another VMI.
        let leave = self.is_followed.then(|| Action::Leave(self.uid.clone()));
        remove.into_iter().chain(leave).collect()
    }
}
