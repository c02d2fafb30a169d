//! A VMI in one of its pods.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use metadata_common::mac::Mac;

use super::{Action, Admit, Reason, Report};
use crate::kubevirt::Vmi;
use crate::kubevirt::translate::{Outcome, Problem};
use crate::pods::{Pod, PodUid};
use crate::{FeedError, FeedEvent};
use metadata_base::port::PortName;
use metadata_content::record::Record;

/// What is known and has been told of it.
pub(super) struct Instance {
    /// Its name towards the agent.
    pub(super) key: String,
    uid: PodUid,
    /// When the pod was heard of first.
    pub(super) since: Instant,
    /// Once its launcher has been found.
    pub(super) pod: Option<Pod>,
    /// Once it was looked for in vain.
    pub(super) absent: bool,
    /// The volumes its data is in, there or not.
    pub(super) volumes: BTreeSet<String>,
    /// The MAC its pod's inlet was asked for with.
    pub(super) inlet: Option<Mac>,
    /// The record that was told.
    pub(super) record: Option<Arc<Record>>,
    /// Who was said to be expected, while there is no record.
    expected: Vec<(PortName, Mac)>,
    /// Why its launcher is not known, if that is a fault.
    pub(super) missing: Option<Problem>,
    /// What keeps its record from being complete.
    pub(super) problems: Vec<Problem>,
    /// What was said of problems last.
    complaint: Option<String>,
    /// What was reported last.
    reported: Option<(Reason, String)>,
    ended: bool,
}

impl Instance {
    pub(super) fn new(key: String, uid: PodUid, since: Instant) -> Self {
        Self {
            key,
            uid,
            since,
            pod: None,
            absent: false,
            volumes: BTreeSet::new(),
            inlet: None,
            record: None,
            expected: Vec::new(),
            missing: None,
            problems: Vec::new(),
            complaint: None,
            reported: None,
            ended: false,
        }
    }

    /// True while its launcher runs.
    pub(super) fn lives(&self) -> bool {
        self.pod.is_some() && !self.ended
    }

    /// True once it is known whether its launcher runs, and its inlet is ready if it is to have one.
    pub(super) fn is_settled(&self) -> bool {
        let has_inlet = |pod: &Pod| self.inlet.is_none() || pod.has_inlet();
        self.pod.as_ref().map_or(self.absent, has_inlet) || self.ended
    }

    /// True while there may be a record soon: its launcher has not been found, or data is not there yet.
    pub(super) fn awaits(&self) -> bool {
        let pending = || !self.expected.is_empty() || self.problems.iter().any(Problem::may_pass);
        !self.ended && self.record.is_none() && (self.pod.is_none() || pending())
    }

    /// All that is wrong.
    pub(super) fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.missing.iter().chain(&self.problems)
    }

    /// True once its launcher has ended, or it was let go.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// True when it has no room, and this much were enough.
    pub(super) fn lacks_at_most(&self, free: usize) -> bool {
        let lacks = |problem: &Problem| matches!(problem, Problem::Room(no_room) if no_room.wants <= free);
        !self.ended && self.problems.iter().any(lacks)
    }

    /// The outcome, if there is room for it. Without room its NICs are expected to be served later.
    pub(super) fn admitted(&mut self, outcome: Outcome, former: &[Problem], admit: &Admit) -> Outcome {
        let Outcome::Record(record) = outcome else { return outcome };
        let Err(no_room) = admit(&self.key, &record) else { return Outcome::Record(record) };
        // Said once, though others come and go meanwhile.
        let said = former.iter().find(
            |problem| matches!(problem, Problem::Room(former) if former.wants == no_room.wants && former.limit == no_room.limit),
        );
        self.problems.push(said.cloned().unwrap_or(Problem::Room(no_room)));
        let nics = record.network.nics.iter();
        Outcome::Expect(nics.filter_map(|nic| Some((nic.port.as_ref()?.into(), nic.mac?.0))).collect())
    }

    /// Notes an outcome. Returns what is to be told, if it says something new. A record that was good stays when nothing
    /// can be made of what is there now: volumes go before their pod does.
    pub(super) fn tell(&mut self, outcome: Outcome, generation: u64) -> Option<FeedEvent> {
        let key = self.key.clone();
        match outcome {
            Outcome::Record(mut record) => {
                record.generation = self.record.as_ref().map_or(generation, |last| last.generation);
                if self.record.as_ref().is_some_and(|last| **last == *record) {
                    return None;
                }
                record.generation = generation;
                let record = Arc::<Record>::from(record);
                self.record = Some(Arc::clone(&record));
                self.expected.clear();
                Some(FeedEvent::Upsert { key, record })
            }
            Outcome::Expect(identities) if self.record.is_none() && self.expected != identities => {
                self.expected.clone_from(&identities);
                Some(FeedEvent::Expect { key, identities })
            }
            Outcome::Unserved if self.record.is_none() && !self.expected.is_empty() => {
                self.expected.clear();
                Some(FeedEvent::Remove { key })
            }
            Outcome::Expect(_) | Outcome::Unserved => None,
        }
    }

    /// Tells of problems that are new, or that there are none any more. Those that may pass count once they had time to.
    pub(super) fn complain(&mut self, vmi: &Vmi, all: bool) -> Vec<Action> {
        let problems = self.problems().filter(|problem| all || !problem.may_pass());
        let text = problems.map(ToString::to_string).collect::<Vec<_>>().join("; ");
        let key = self.key.clone();
        let mut actions = Vec::new();
        if !text.is_empty() && self.complaint.as_ref() != Some(&text) {
            let error = FeedError::Vm { reason: text.clone() };
            actions.push(Action::Tell(FeedEvent::Rejected { key, error }));
            self.complaint = Some(text.clone());
        } else if text.is_empty() && self.complaint.take().is_some() {
            // The same state again clears the complaint.
            actions.push(Action::Tell(match &self.record {
                Some(record) => FeedEvent::Upsert { key, record: Arc::clone(record) },
                None if self.expected.is_empty() => FeedEvent::Remove { key },
                None => FeedEvent::Expect { key, identities: self.expected.clone() },
            }));
        }
        actions.extend(self.report(vmi, text).map(Action::Report));
        actions
    }

    fn report(&mut self, vmi: &Vmi, complaint: String) -> Option<Report> {
        let said = match &self.record {
            _ if !complaint.is_empty() => (Reason::Degraded, complaint),
            Some(record) => {
                let nics = record.network.nics.len();
                (Reason::Ready, format!("the VM's metadata is served on {nics} of its NICs"))
            }
            None => return None,
        };
        if self.reported.as_ref() == Some(&said) {
            return None;
        }
        self.reported = Some(said.clone());
        Some(Report::of(vmi, said.0, said.1))
    }

    /// Ends it. What is to be done about that, once.
    pub(super) fn end(&mut self) -> Vec<Action> {
        if std::mem::replace(&mut self.ended, true) {
            return Vec::new();
        }
        let told = self.record.take().is_some() || !self.expected.is_empty() || self.complaint.is_some();
        let remove = told.then(|| Action::Tell(FeedEvent::Remove { key: self.key.clone() }));
        remove.into_iter().chain([Action::Leave(self.uid.clone())]).collect()
    }
}
