//! Publishes what each slot serves, and writes it to the audit log.

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use metadata_content::http::{Headers, Request, RequestTarget, Response};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Record;
use metadata_content::record::values::Timestamp;
use metadata_content::source::RecordSource;
use metadata_content::store::{Interner, LiveOutcome, Responses, SlotOutOfRange, Store};
use metadata_content::{dialect, http};
use metadata_feed::registry::RecordId;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::port_text;
use crate::agent::documents::DocumentPublisher;
use crate::agent::slots::IdentityName;
use crate::agent::state::{NodeState, unix_now};
use crate::identity::SignedItem;
use crate::service::audit::collect::FollowedGuests;
use crate::service::audit::{AuditCounts, Collector, TokenLine};
use crate::service::{Answer, AnswerSource as _, DocumentCounts, HandedRequest};

/// The content that a slot serves.
pub(crate) enum SlotContent {
    /// The responses of a record.
    Responses(Arc<Responses>),
    /// The record has not arrived: requests wait for it.
    Awaited,
    /// The record was removed: requests are refused at once.
    Gone,
}

impl SlotContent {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Responses(a), Self::Responses(b)) => Arc::ptr_eq(a, b),
            (Self::Awaited, Self::Awaited) | (Self::Gone, Self::Gone) => true,
            _ => false,
        }
    }
}

/// Publishes to the store that workers read, and notes in the audit log which identity has which slot.
pub(crate) struct AnswerPublisher {
    content: Arc<OnDemand>,
    collector: RefCell<Collector>,
    started: Instant,
    /// Set if answers are published to the kernel, too.
    documents: Option<DocumentPublisher>,
}

impl AnswerPublisher {
    #[must_use]
    pub(crate) fn new(
        content: Arc<OnDemand>,
        collector: Collector,
        documents: Option<DocumentPublisher>,
    ) -> Self {
        Self { content, collector: RefCell::new(collector), started: Instant::now(), documents }
    }

    /// Sets what a slot serves, and the identity and record for the audit log.
    ///
    /// # Errors
    /// If there is no such slot.
    pub(super) fn publish(
        &self,
        slot: Slot,
        who: &IdentityName,
        record: Option<&Record>,
        serves: &SlotContent,
    ) -> Result<(), SlotOutOfRange> {
        if self.collector.borrow().has_log() {
            let vm = record.map(|record| (record.owner_text(), record.vm.name.as_str()));
            self.collector.borrow_mut().is_now(slot, port_text(&who.port), who.mac.to_string(), vm);
        }
        if let SlotContent::Responses(responses) = serves {
            responses.vm().set_nic(slot, who.mac, unix_now());
        }
        self.replace(slot, Some(who.mac), |store| match serves {
            SlotContent::Responses(responses) => store.publish(slot, Arc::clone(responses)),
            SlotContent::Awaited => store.expect(slot),
            SlotContent::Gone => store.withdraw(slot),
        })
    }

    /// Changes what a slot serves, here and in the kernel.
    fn replace<T>(&self, slot: Slot, mac: Option<Mac>, change: impl FnOnce(&Store) -> T) -> T {
        match &self.documents {
            Some(documents) => documents.replace(slot, mac, || change(self.content.store())),
            None => change(self.content.store()),
        }
    }

    /// Makes requests of a slot wait for a record.
    ///
    /// # Errors
    /// If there is no such slot.
    pub(super) fn expect(&self, slot: Slot) -> Result<(), SlotOutOfRange> {
        self.replace(slot, None, |store| store.expect(slot))
    }

    /// Removes what a slot serves.
    ///
    /// # Errors
    /// If there is no such slot.
    pub(super) fn withdraw(&self, slot: Slot) -> Result<(), SlotOutOfRange> {
        self.replace(slot, None, |store| store.withdraw(slot))
    }

    /// Answers a question that the previous agent passed on; `None` while no answer is known. A request that would
    /// wait for a change is answered with the present state. The flag is true if the request changed state that other
    /// requests of the slot may wait for.
    pub(super) fn answer(&self, question: &HandedRequest) -> (Option<Response>, bool) {
        let fields: Vec<_> = question
            .headers
            .iter()
            .map(|(name, value)| httparse::Header { name: name.as_str(), value: value.as_slice() })
            .collect();
        let request = Request {
            method: question.method,
            target: RequestTarget { path: &question.path, query: &question.query },
            headers: Headers::new(&fields),
            body: &question.body,
        };
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = Now { mono: self.started.elapsed(), unix_seconds: unix.as_secs() };
        let mut answer = self.content.answer(now, &question.connection, &request, None).0;
        if let Answer::Known(LiveOutcome::Park(parked)) = &mut answer
            && parked.has_answer
        {
            parked.until = now.mono;
            answer = self.content.answer(now, &question.connection, &request, Some(parked)).0;
        }
        match answer {
            Answer::Known(LiveOutcome::Ready(response)) => (Some(response), false),
            Answer::Known(LiveOutcome::Changed(response)) => (Some(response), true),
            Answer::Unknown => (Some(Response::error(http::StatusCode(404), &[])), false),
            Answer::Known(LiveOutcome::Park(_)) | Answer::NotYet | Answer::TooMany => (None, false),
        }
    }

    /// Frees payloads that no slot uses.
    pub(super) fn sweep(&self) {
        self.content.sweep();
    }

    /// Writes the audit line of an identity token or a signed document.
    pub(crate) fn token_signed(&self, signed: &SignedItem) {
        let time = i64::try_from(signed.issued).ok().and_then(Timestamp::at);
        self.collector.borrow_mut().token_signed(&TokenLine {
            time: time.as_ref().map_or("", Timestamp::as_str),
            vm: &signed.vm,
            name: &signed.name,
            mac: signed.mac.as_deref(),
            signed: signed.kind,
            token: signed.token.as_deref(),
            key: &signed.key,
            subject: &signed.subject,
            audience: signed.audience.as_deref(),
            expires: signed.expires,
        });
    }

    /// Takes the answers that workers have recorded: writes their audit lines, and notes them for viewers.
    pub(crate) fn collect(&self) {
        self.collector.borrow_mut().collect(Instant::now());
    }

    /// True while workers record answers, and [`collect`](Self::collect) has to be called.
    pub(crate) fn are_recorded(&self) -> bool {
        self.collector.borrow().is_on()
    }

    /// True while somebody follows the guests.
    pub(super) fn are_followed(&self) -> bool {
        self.collector.borrow().following().is_some()
    }

    /// Follows the guests for a while, and shows what they have asked.
    pub(super) fn follow<T>(&self, now: Instant, show: impl FnOnce(&FollowedGuests) -> T) -> T {
        show(self.collector.borrow_mut().follow(now))
    }

    /// Opens the audit log again, after it was rotated.
    pub(crate) fn reopen_audit(&self) {
        self.collector.borrow().reopen();
    }

    /// What is published to the kernel; `None` if it answers no requests.
    pub(super) fn document_counts(&self) -> Option<DocumentCounts> {
        self.documents.as_ref().map(DocumentPublisher::counts)
    }

    /// Counts of audit lines; `None` without an audit log.
    pub(super) fn audit_counts(&self) -> Option<AuditCounts> {
        self.collector.borrow().counts()
    }
}

/// The responses of records in force.
pub(super) struct Renderer {
    interner: Interner,
    rendered: HashMap<RecordId, RenderedRecord>,
    spent: Duration,
}

/// The responses of a record, and the record they were rendered from.
struct RenderedRecord {
    record: Arc<Record>,
    /// The incarnation of the VM's events in the responses.
    events: u32,
    responses: Arc<Responses>,
}

impl RenderedRecord {
    /// Returns whether the responses are those of this record and of the VM's present events.
    fn is_of(&self, record: &Arc<Record>) -> bool {
        Arc::ptr_eq(&self.record, record) && self.events == self.responses.vm().mailbox.events().incarnation()
    }
}

impl Renderer {
    pub(super) fn new() -> Self {
        Self { interner: Interner::new(), rendered: HashMap::new(), spent: Duration::ZERO }
    }

    /// Shares equal payloads of records, unless the record's feed does. Two interners that held one payload would hold
    /// it for each other, for ever.
    pub(super) fn compact(&mut self, source: RecordSource, record: Arc<Record>) -> Arc<Record> {
        if source.shares_payloads() {
            return record;
        }
        let mut record = Arc::unwrap_or_clone(record);
        record.compact(|bytes| self.interner.bytes(bytes));
        record.into()
    }

    /// Returns the responses of a record. Renders them if the record is new, or if it or the
    /// events of its VM have changed.
    pub(super) fn responses(
        &mut self,
        id: &RecordId,
        record: &Arc<Record>,
        state: &NodeState,
    ) -> Arc<Responses> {
        if let Some(rendered) = self.rendered.get(id).filter(|rendered| rendered.is_of(record)) {
            return Arc::clone(&rendered.responses);
        }
        let vm = state.vm(id, record);
        // Before rendering: a change in between is rendered next time.
        let events = vm.mailbox.events().incarnation();
        let asked = Some(vm.mailbox.asked()).filter(|asked| !asked.is_empty());
        let asked = asked.unwrap_or_else(|| dialect::expected(record));
        let start = Instant::now();
        let responses = Arc::new(dialect::render_asked(record, &mut self.interner, vm, asked));
        self.spent += start.elapsed();
        let rendered =
            RenderedRecord { record: Arc::clone(record), events, responses: Arc::clone(&responses) };
        self.rendered.insert(id.clone(), rendered);
        responses
    }

    /// Returns whether a record was rendered, and its responses would differ now.
    pub(super) fn is_outdated(&self, id: &RecordId, record: &Arc<Record>) -> bool {
        self.rendered.get(id).is_some_and(|rendered| !rendered.is_of(record))
    }

    /// Forgets the responses of a record.
    pub(super) fn forget(&mut self, id: &RecordId) {
        self.rendered.remove(id);
    }

    /// Frees payloads that no record uses.
    pub(super) fn sweep(&mut self) {
        self.interner.sweep();
    }

    /// Time spent on rendering since the start.
    pub(super) fn spent(&self) -> Duration {
        self.spent
    }
}
