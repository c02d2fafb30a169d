//! Publishes answers to the kernel, which then sends them by itself.
//!
//! ```text
//!  worker ── answered request ──► RequestReports ──► DocumentPublisher ── documents ──► kernel
//!  node ──── new record, end of a record: close the slot's edition ────────────────────► kernel
//! ```
//!
//! The publisher has its own thread, because rendering and entering the documents of a thousand VMs takes some
//! hundred milliseconds. Withdrawal does not wait for it: the node closes an edition itself.

mod common;
mod learned;

use common::{CommonAnswer, CommonDocument, CommonIndices, NextAnswer};
pub(crate) use learned::LearnedFile;
use learned::{CandidateRequests, LearnedRequests};
use metadata_common::addresses::{Connection, METADATA};
use metadata_common::answer::PORT;
use metadata_common::mac::Mac;
use metadata_common::maps::{AnswerRecord, DATE_BYTES, DocumentKey, MAX_ANSWER_COUNTERS, Slot};
use metadata_content::http::parse::{FIELD_COUNT_MAX, RequestHead};
use metadata_content::http::target::normalise;
use metadata_content::http::{self, Method, Persistence, Request, Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::store::{Datasource, Responses, SlotState};
use metadata_datapath::afxdp::{AllSentTable, ForeignConnections};
use metadata_steer::{BodyKey, DocumentTable, Editions, KernelResponse, SteerError};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::RandomState;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};
use tracing::warn;

use crate::service::audit::{AuditEntry, RequestPath, Tape};
use crate::service::{
    DocumentCounts, ReportedRequest, RequestForm, RequestReports, WorkerCounts, is_plain, now_ns,
};

/// How often the log says that something is not published.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Limit on slots that are published before reports are read again.
const SLOTS_AT_ONCE: usize = 64;

/// Longest pause while anything is published or recorded.
const TICK: Duration = Duration::from_millis(50);

/// Interval at which connections of guests that went away are freed.
const FREE_EVERY: Duration = Duration::from_secs(10);

/// The guests' MACs.
type SlotMacs = Arc<Mutex<HashMap<Slot, Mac>>>;

/// The node's side: withdraws what the kernel serves.
pub(crate) struct DocumentPublisher {
    editions: Editions,
    reports: Arc<RequestReports>,
    macs: SlotMacs,
    counts: Arc<Mutex<DocumentCounts>>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DocumentPublisher {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(
        table: DocumentTable,
        sources: DocumentSources,
        reports: Arc<RequestReports>,
        file: Option<LearnedFile>,
    ) -> io::Result<Self> {
        let (editions, end) = (table.editions().clone(), Arc::new(AtomicBool::new(false)));
        let (its_reports, its_end) = (Arc::clone(&reports), Arc::clone(&end));
        let macs = SlotMacs::default();
        let counts = Arc::new(Mutex::new(DocumentCounts::default()));
        let (its_macs, its_counts) = (Arc::clone(&macs), Arc::clone(&counts));
        let thread = thread::Builder::new().name("imds-documents".into()).spawn(move || {
            its_reports.publish_here(table.tokens());
            let learned = LearnedRequests::new(Arc::clone(&its_reports), file);
            PublisherThread::new(table, sources, its_reports, its_macs, learned).run(&its_end, &its_counts);
        })?;
        Ok(Self { editions, reports, macs, counts, end, thread: Some(thread) })
    }

    /// What is published now.
    pub(crate) fn counts(&self) -> DocumentCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what a slot serves by `change`, and sets the MAC of its guest. From before the change until the new documents
    /// are published, workers answer all requests of the slot.
    pub(crate) fn replace<T>(&self, slot: Slot, mac: Option<Mac>, change: impl FnOnce() -> T) -> T {
        self.close(slot);
        let outcome = change();
        if let Some(mac) = mac {
            self.macs.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, mac);
        }
        // The publisher may have opened an edition meanwhile, of what was in force before.
        self.close(slot);
        self.reports.mark(slot);
        outcome
    }

    fn close(&self, slot: Slot) {
        if let Err(error) = self.editions.close(slot) {
            // Nothing of a slot may be served that is not in force. Without the thread the date expires.
            warn!("the kernel no longer answers requests; workers answer them: {error}");
            self.end.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for DocumentPublisher {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// What the thread reads and where it counts.
pub(crate) struct DocumentSources {
    pub(crate) content: Arc<OnDemand>,
    pub(crate) connections: AllSentTable,
    pub(crate) counts: Arc<WorkerCounts>,
    pub(crate) tape: Option<Arc<Tape>>,
    /// How long the kernel answers after the agent was killed.
    pub(crate) without_agent: Duration,
}

/// A counter of the kernel.
struct AnswerCounter {
    form: Arc<RequestForm>,
    datasource: Datasource,
    status: StatusCode,
    counted: u64,
}

/// What is published for a slot.
struct PublishedSlot {
    responses: Arc<Responses>,
    edition: u32,
    /// The number of the last learned request that was considered.
    learned: u64,
    documents: Vec<DocumentKey>,
    bodies: Vec<Arc<PublishedBody>>,
}

/// A response in the kernel's table; equal ones share it.
#[derive(Debug)]
struct PublishedBody {
    key: BodyKey,
}

/// What to remove from the kernel's tables. Nothing uses it any more but programs that run now.
#[derive(Default)]
struct RetiredDocuments {
    keys: Vec<DocumentKey>,
    bodies: Vec<Arc<PublishedBody>>,
    /// The indices of common documents.
    common: Vec<u16>,
}

struct PublisherThread {
    table: DocumentTable,
    sources: DocumentSources,
    reports: Arc<RequestReports>,
    macs: SlotMacs,
    candidates: CandidateRequests,
    learned: LearnedRequests,
    counters: Vec<AnswerCounter>,
    /// The index of each counter, by the request's hash, the dialect and the status.
    counter_of: HashMap<(u64, Datasource, StatusCode), u16>,
    slots: HashMap<Slot, PublishedSlot>,
    /// The documents of all slots.
    document_count: u64,
    /// Slots that made room in a full table.
    displaced: u64,
    /// Published slots, in the order in which they were published. Some are there twice.
    order: VecDeque<Slot>,
    /// Slots to publish, each once.
    waiting: VecDeque<Slot>,
    is_waiting: HashSet<Slot>,
    bodies: HashMap<KernelResponse, Arc<PublishedBody>>,
    retired: RetiredDocuments,
    common_indices: CommonIndices,
    hasher: RandomState,
    /// The second of `Date`, and whether answers are recorded.
    date: (u64, bool),
    counted_at: u64,
    /// What former agents' programs have answered.
    foreign: ForeignConnections,
    freed_at: Instant,
    warned_at: Option<Instant>,
}

impl PublisherThread {
    fn new(
        table: DocumentTable,
        sources: DocumentSources,
        reports: Arc<RequestReports>,
        macs: SlotMacs,
        learned: LearnedRequests,
    ) -> Self {
        Self {
            table,
            sources,
            reports,
            macs,
            candidates: CandidateRequests::default(),
            learned,
            counters: Vec::new(),
            counter_of: HashMap::new(),
            slots: HashMap::new(),
            document_count: 0,
            displaced: 0,
            order: VecDeque::new(),
            waiting: VecDeque::new(),
            is_waiting: HashSet::new(),
            bodies: HashMap::new(),
            retired: RetiredDocuments::default(),
            common_indices: CommonIndices::default(),
            hasher: RandomState::new(),
            date: (0, false),
            counted_at: 0,
            foreign: ForeignConnections::default(),
            freed_at: Instant::now(),
            warned_at: None,
        }
    }

    fn run(mut self, end: &AtomicBool, counts: &Mutex<DocumentCounts>) {
        while !end.load(Ordering::Relaxed) {
            self.read_reports();
            self.publish_waiting();
            let outcome = self.remove_retired().and_then(|()| self.renew_date());
            self.warn_of(outcome);
            self.count();
            self.record();
            self.free_idle();
            *counts.lock().unwrap_or_else(PoisonError::into_inner) = self.counts();
            if !self.waiting.is_empty() {
                continue;
            }
            let pause = match (self.slots.is_empty(), self.date.1) {
                (true, false) => Duration::MAX,
                (false, false) => until_next_second(),
                (_, true) => TICK.min(until_next_second()),
            };
            self.reports.falls_asleep();
            if !self.reports.has_reports() && !end.load(Ordering::SeqCst) {
                if pause == Duration::MAX { thread::park() } else { thread::park_timeout(pause) }
            }
        }
        // The next agent's programs replace ours. Until then, workers answer.
        if let Err(error) = self.table.end() {
            warn!("the kernel may answer requests until another agent starts: {error}");
        }
    }

    fn counts(&self) -> DocumentCounts {
        DocumentCounts {
            learned: self.learned.len() as u64,
            vms: self.slots.len() as u64,
            documents: self.document_count,
            responses: self.bodies.len() as u64,
            displaced: self.displaced,
        }
    }

    fn warn_of(&mut self, outcome: Result<(), SteerError>) {
        let is_due = self.warned_at.is_none_or(|at| at.elapsed() >= WARN_EVERY);
        if let Err(error) = outcome
            && is_due
        {
            self.warned_at = Some(Instant::now());
            warn!("some answers are not published to the kernel; workers send them: {error}");
        }
    }

    fn read_reports(&mut self) {
        let before = self.learned.count();
        while let Some(report) = self.reports.next() {
            self.consider(report);
        }
        for slot in self.reports.marked() {
            self.enqueue(slot);
        }
        if self.learned.count() != before {
            let slots: Vec<Slot> = self.slots.keys().copied().collect();
            slots.into_iter().for_each(|slot| self.enqueue(slot));
            self.learned.save();
        }
    }

    fn enqueue(&mut self, slot: Slot) {
        if self.is_waiting.insert(slot) {
            self.waiting.push_back(slot);
        }
    }

    /// Notes a reported request, and learns it if another slot has sent it, too.
    fn consider(&mut self, report: ReportedRequest) {
        let slot = report.slot;
        if self.learned.contains(report.form.hash) {
            return self.enqueue(slot);
        }
        let SlotState::Ready(responses) = self.sources.content.store().get(slot) else { return };
        let tenant = &responses.vm().tenant;
        if let Some(first) = self.candidates.add(tenant, &report)
            && (!self.learned.is_full() || self.forget_least())
            && self.learned.learn(Arc::clone(&report.form), tenant)
        {
            self.enqueue(first);
            self.enqueue(slot);
        }
    }

    /// Forgets the learned request with the fewest recent answers, unless all are young.
    fn forget_least(&mut self) -> bool {
        // The VMs' own documents stay until their editions end. They are still the right answers. New VMs would
        // not be compared with the common document any more, so it is withdrawn.
        let forgotten = self.learned.forget_least();
        let is_forgotten = forgotten.is_some();
        if let Some(forgotten) = forgotten {
            self.withdraw_common(forgotten.common);
        }
        is_forgotten
    }

    /// The MAC of a slot's guest.
    fn mac(&self, slot: Slot) -> Mac {
        let macs = self.macs.lock().unwrap_or_else(PoisonError::into_inner);
        macs.get(&slot).copied().unwrap_or(Mac([0; 6]))
    }

    fn publish_waiting(&mut self) {
        let end = self.waiting.len().min(SLOTS_AT_ONCE);
        let slots: Vec<Slot> = self.waiting.drain(..end).collect();
        for slot in slots {
            self.is_waiting.remove(&slot);
            let outcome = self.publish(slot);
            self.warn_of(outcome);
        }
    }

    /// Publishes what is in force for a slot, unless that is done.
    fn publish(&mut self, slot: Slot) -> Result<(), SteerError> {
        let editions = self.table.editions().clone();
        let edition = editions.get(slot);
        let SlotState::Ready(responses) = self.sources.content.store().get(slot) else {
            self.retire(slot);
            self.macs.lock().unwrap_or_else(PoisonError::into_inner).remove(&slot);
            return Ok(());
        };
        if let Some(published) = self.slots.get(&slot)
            && published.edition == edition
            && Arc::ptr_eq(&published.responses, &responses)
            && published.learned == self.learned.count()
        {
            return Ok(());
        }
        let is_open = self.slots.get(&slot).is_some_and(|published| published.edition == edition);
        if !is_open {
            self.retire(slot);
        }
        // The node alone ends the editions of its records, and an edition that nobody published stays closed.
        let closed = if is_open {
            None
        } else if edition & 1 == 0 {
            Some(edition)
        } else {
            return Ok(());
        };
        let edition = edition | 1;
        if !is_open {
            self.table.begin_common(slot, edition);
        }
        self.slots.entry(slot).or_insert_with(|| PublishedSlot {
            responses: Arc::clone(&responses),
            edition,
            learned: 0,
            documents: Vec::new(),
            bodies: Vec::new(),
        });
        let limit = (responses.limit().per_second, responses.limit().burst);
        let outcome = self.add_documents(slot, edition, &responses);
        if let Some(published) = self.slots.get_mut(&slot) {
            published.responses = responses;
            published.learned = if outcome.is_ok() { self.learned.count() } else { 0 };
        }
        if let Some(closed) = closed {
            self.order.push_back(slot);
            if !editions.open(slot, closed, limit)? {
                self.retire(slot);
            }
        }
        outcome
    }

    fn add_documents(&mut self, slot: Slot, edition: u32, responses: &Responses) -> Result<(), SteerError> {
        let Some(published) = self.slots.get(&slot) else { return Ok(()) };
        let is_same = std::ptr::eq(&*published.responses, responses);
        let since = if is_same { published.learned } else { 0 };
        let (mac, vm, now) = (self.mac(slot), responses.vm(), unix_seconds());
        let mut minted = HashMap::new();
        for form in self.learned.forms_after(since) {
            let request = form.request_of(mac);
            let own = match &request {
                Cow::Borrowed(_) => Some(form.hash),
                Cow::Owned(request) => self.table.hash(request),
            };
            // A request may have been learned again.
            let is_known = |own: &u64| {
                let published = self.slots.get(&slot);
                published.is_some_and(|published| published.documents.iter().any(|key| key.request == *own))
            };
            let Some(own) = own.filter(|own| !is_known(own)) else { continue };
            let mut mint = |kind| {
                minted
                    .entry(kind)
                    .or_insert_with(|| vm.keyring.mint(kind, &vm.owner, TOKEN_SECONDS, now))
                    .clone()
            };
            let token = form.token_kind().map(&mut mint).unwrap_or_default();
            let request = form.with_token(&request, &token);
            let Some((response, datasource)) = answer(slot, &request, responses, now) else { continue };
            // VMs that send other bytes cannot have a common document.
            if own == form.hash && self.use_common(slot, &form, &response, datasource) {
                continue;
            }
            let Some(bytes) = kernel_response(&response).filter(|bytes| self.table.can_send(slot, bytes))
            else {
                continue;
            };
            let Some(counter) = self.counter(&form, datasource, response.status()) else {
                let is_learned = |counter: &AnswerCounter| self.learned.contains(counter.form.hash);
                if self.counters.iter().all(is_learned) {
                    continue;
                }
                return self.begin_anew();
            };
            let body = match self.body(&bytes) {
                Ok(body) => body,
                Err(error) => {
                    self.make_room(slot);
                    return Err(error);
                }
            };
            let key = DocumentKey { slot, edition, request: own }.with_token(form.token_kind().is_some());
            if let Err(error) = self.table.add(key, body.key, &bytes, counter, None) {
                self.make_room(slot);
                return Err(error);
            }
            if let Some(published) = self.slots.get_mut(&slot) {
                published.documents.push(key);
                self.document_count += 1;
                published.bodies.push(body);
            }
        }
        Ok(())
    }

    /// Uses the common document for the slot's request, and publishes it if two VMs in a row have had this answer.
    /// Returns false if the slot needs a document of its own.
    fn use_common(
        &mut self,
        slot: Slot,
        form: &Arc<RequestForm>,
        response: &Response,
        datasource: Datasource,
    ) -> bool {
        let Some(learned) = self.learned.get_mut(form.hash) else { return false };
        let index = match learned.common.next(&self.hasher, response, datasource) {
            NextAnswer::Common(index) => Some(index),
            NextAnswer::Repeated => self.add_common(slot, form, response, datasource),
            NextAnswer::Own => None,
        };
        if let Some(index) = index {
            self.table.use_common(slot, index);
        }
        index.is_some()
    }

    /// Publishes a common document, and returns its index. `None` if it cannot be published, or if there is no room.
    fn add_common(
        &mut self,
        slot: Slot,
        form: &Arc<RequestForm>,
        response: &Response,
        datasource: Datasource,
    ) -> Option<u16> {
        let bytes = kernel_response(response).filter(|bytes| self.table.can_send(slot, bytes))?;
        let counter = self.counter(form, datasource, response.status())?;
        let body = self.body(&bytes).ok()?;
        let index = self.common_indices.take()?;
        let key = DocumentKey::common(form.hash).with_token(form.token_kind().is_some());
        if self.table.add(key, body.key, &bytes, counter, Some(index)).is_err() {
            self.common_indices.free(vec![index]);
            return None;
        }
        self.document_count += 1;
        let common = CommonDocument { key, response: response.clone(), datasource, index, body };
        self.learned.get_mut(form.hash)?.common = CommonAnswer::Published(common);
        Some(index)
    }

    /// Withdraws a common document.
    fn withdraw_common(&mut self, common: CommonAnswer) {
        if let CommonAnswer::Published(common) = common {
            self.table.withdraw_common(common.index);
            self.document_count -= 1;
            self.retired.keys.push(common.key);
            self.retired.bodies.push(common.body);
            self.retired.common.push(common.index);
        }
    }

    /// The body of a response, which is added to the kernel's table unless an equal one is there.
    fn body(&mut self, response: &KernelResponse) -> Result<Arc<PublishedBody>, SteerError> {
        if let Some(body) = self.bodies.get(response) {
            return Ok(Arc::clone(body));
        }
        let body = Arc::new(PublishedBody { key: self.table.add_body(response)? });
        self.bodies.insert(response.clone(), Arc::clone(&body));
        Ok(body)
    }

    /// The kernel's counter of these answers; `None` if all are in use.
    fn counter(
        &mut self,
        form: &Arc<RequestForm>,
        datasource: Datasource,
        status: StatusCode,
    ) -> Option<u16> {
        let of = (form.hash, datasource, status);
        if let Some(at) = self.counter_of.get(&of) {
            return Some(*at);
        }
        let at = u16::try_from(self.counters.len()).ok().filter(|at| u32::from(*at) < MAX_ANSWER_COUNTERS)?;
        // It may have counted for another request.
        let counted = self.table.count(at).unwrap_or(0);
        self.counters.push(AnswerCounter { form: Arc::clone(form), datasource, status, counted });
        self.counter_of.insert(of, at);
        Some(at)
    }

    /// Withdraws everything and publishes it again, because counters of requests that were forgotten take all the room.
    fn begin_anew(&mut self) -> Result<(), SteerError> {
        let slots: Vec<Slot> = self.slots.keys().copied().collect();
        for slot in slots {
            self.table.editions().close(slot)?;
            self.retire(slot);
            self.enqueue(slot);
        }
        let learned = self.learned.iter_mut();
        let all: Vec<_> = learned.map(|learned| std::mem::take(&mut learned.common)).collect();
        all.into_iter().for_each(|common| self.withdraw_common(common));
        self.remove_retired()?;
        // What was answered until now is counted and written down under the former numbers.
        self.add_counts();
        self.record();
        self.counters.clear();
        self.counter_of.clear();
        Ok(())
    }

    /// Retires the slots that were published first, after a table was full.
    fn make_room(&mut self, besides: Slot) {
        for _ in 0..SLOTS_AT_ONCE {
            let Some(slot) = self.order.pop_front() else { return };
            if slot == besides {
                self.order.push_back(slot);
                continue;
            }
            if let Err(error) = self.table.editions().close(slot) {
                return self.warn_of(Err(error));
            }
            self.displaced += u64::from(self.slots.contains_key(&slot));
            self.retire(slot);
        }
    }

    /// Forgets what is published for a slot whose edition is closed.
    fn retire(&mut self, slot: Slot) {
        if let Some(published) = self.slots.remove(&slot) {
            self.document_count -= published.documents.len() as u64;
            self.retired.keys.extend(published.documents);
            self.retired.bodies.extend(published.bodies);
        }
    }

    fn remove_retired(&mut self) -> Result<(), SteerError> {
        if self.retired.keys.is_empty() {
            return Ok(());
        }
        let RetiredDocuments { keys, bodies, common } = std::mem::take(&mut self.retired);
        drop(bodies);
        let mut unused = Vec::new();
        self.bodies.retain(|_, body| {
            let is_used = Arc::strong_count(body) > 1;
            if !is_used {
                unused.push(body.key);
            }
            is_used
        });
        self.order.retain(|slot| self.slots.contains_key(slot));
        self.table.remove(&keys, &unused)?;
        self.common_indices.free(common);
        Ok(())
    }

    fn renew_date(&mut self) -> Result<(), SteerError> {
        let records = self.sources.tape.as_ref().is_some_and(|tape| tape.is_on());
        let unix = unix_seconds();
        if self.slots.is_empty() && !self.date.1 || self.date == (unix, records) {
            return Ok(());
        }
        let tail = http::tail(unix, Persistence::Implied);
        let text = tail.get(DATE_AT..DATE_AT + DATE_BYTES).and_then(|text| text.try_into().ok());
        let until = now_ns() + self.sources.without_agent.as_nanos() as u64;
        self.table.set_date(text.unwrap_or([b' '; DATE_BYTES]), until, records)?;
        self.date = (unix, records);
        Ok(())
    }

    /// Adds the kernel's counts to those of the service, once a second.
    fn count(&mut self) {
        if self.counted_at == self.date.0 {
            return;
        }
        self.counted_at = self.date.0;
        self.add_counts();
    }

    fn add_counts(&mut self) {
        for (counter, at) in self.counters.iter_mut().zip(0..) {
            let Ok(count) = self.table.count(at) else { continue };
            let more = count.wrapping_sub(counter.counted);
            counter.counted = count;
            self.sources.counts.answered_elsewhere(counter.datasource, counter.status, more);
            if let Some(learned) = self.learned.get_mut(counter.form.hash) {
                learned.answered(more);
            }
        }
    }

    /// Writes down what the kernel has recorded.
    fn record(&mut self) {
        let Some(tape) = &self.sources.tape else { return };
        let unix = unix_seconds();
        let macs = self.macs.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(record) = self.table.next_record() {
            let AnswerRecord { slot, counter, content, guest, port, .. } = record;
            let Some(counter) = self.counters.get(usize::from(counter)) else { continue };
            let remote = (IpAddr::V4(Ipv4Addr::from(guest)), u16::from_be_bytes(port));
            tape.note(AuditEntry {
                method: Method::Get,
                path: path_of(&counter.form.request_of(macs.get(&slot).copied().unwrap_or(Mac([0; 6])))),
                datasource: counter.datasource,
                status: counter.status,
                bytes: content.into(),
                responses: self.slots.get(&slot).map(|published| Arc::clone(&published.responses)),
                ..AuditEntry::of(&Connection { slot, local: LOCAL, remote }, unix)
            });
        }
        tape.turned(Duration::ZERO);
    }

    fn free_idle(&mut self) {
        if self.freed_at.elapsed() >= FREE_EVERY {
            self.freed_at = Instant::now();
            // Without a published slot this agent may own no port yet.
            if !self.slots.is_empty() {
                self.foreign.free_idle(&self.sources.connections, now_ns());
            }
        }
    }
}

const LOCAL: (IpAddr, u16) = (IpAddr::V4(METADATA), PORT);

/// Lifetime in seconds of a session token by which answers are found that need one. No guest gets it.
const TOKEN_SECONDS: u32 = 60;

/// Offset of the value in a `Date` field.
const DATE_AT: usize = "Date: ".len();

/// The path of a request.
fn path_of(request: &[u8]) -> RequestPath {
    let target = request.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    RequestPath::of(&String::from_utf8_lossy(target))
}

/// The answer that a slot gets to every request with these bytes; `None` if the answers may differ.
fn answer(
    slot: Slot,
    request: &[u8],
    responses: &Responses,
    now_unix: u64,
) -> Option<(Response, Datasource)> {
    let mut fields = [httparse::EMPTY_HEADER; FIELD_COUNT_MAX];
    let head = RequestHead::parse(request, &mut fields).ok()?;
    let normal = normalise(head.target).ok()?;
    let request = Request { method: head.method, target: normal.target(), headers: head.headers, body: &[] };
    let connection = Connection { slot, local: LOCAL, remote: LOCAL };
    OnDemand::lasting_answer(responses, &connection, &request, now_unix)
        .filter(|(response, _)| is_plain(response))
}

/// The response as the kernel sends it, without fields that nobody needs.
fn kernel_response(response: &Response) -> Option<KernelResponse> {
    const LEFT_OUT: [&[u8]; 2] = [b"Server: ", b"Accept-Ranges: "];
    let lines = response.head().split_inclusive(|byte| *byte == b'\n');
    let kept = lines.filter(|line| !LEFT_OUT.iter().any(|field| line.starts_with(field)));
    let mut head = Vec::with_capacity(response.head().len());
    kept.for_each(|line| head.extend_from_slice(line));
    KernelResponse::new(&head, &response.body().to_bytes())
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn until_next_second() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Duration::from_nanos(1_000_000_000 - u64::from(since.subsec_nanos()))
}
