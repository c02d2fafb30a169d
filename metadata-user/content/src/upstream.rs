//! Answers of another metadata service: what is asked of it for one VM, and what is kept of its answers.
//!
//! A platform such as OpenStack has a metadata service of its own, which knows more than the node does. The packet path
//! asks it without waiting: it hands an [`UpstreamOrder`] over and parks the request. The source of the VM's record
//! fetches the answer, [`UpstreamOrder::answered`] stores it, and the VM's slots are woken.
//!
//! Nothing that a guest sends decides whose answer it gets: an order names the instance and the project that the
//! platform assigned, and the address of the port that asks.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::share::{FairShare, Tenant};
use serde::Deserialize;
use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::http::{Body, Method, Request, Response, StatusCode};
use crate::parser;
use crate::record::Record;

/// How long a request waits for its answer: dynamic vendor-data may take ten seconds in Nova, twice.
pub const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
/// How long an answer is kept, in seconds: as long as Nova keeps it (`metadata_cache_expiration`).
pub const KEPT_SECONDS: u64 = 15;
/// How long an answer waits for the one request that it is for, in seconds. That is woken at once.
pub const UNCLAIMED_SECONDS: u64 = 2;
/// How long a failure is kept, in seconds, so that all who wait for it get it and the next request asks again.
pub const FAILED_SECONDS: u64 = 1;
/// Maximum number of answers that one VM may have stored or in flight. Reading both of Nova's trees takes about 60.
pub const ANSWERS_PER_VM: usize = 128;
/// Maximum bytes of the answers that are kept, of all VMs; tenants share them.
pub const ANSWERS_BYTES: usize = 64 << 20;
/// Bytes that each tenant may have kept while [`ANSWERS_BYTES`] are not reached.
const KEPT_FLOOR: usize = 64 << 10;
/// Maximum number of requests of one VM that wait for the service.
pub const ORDERS_PER_VM: usize = 16;
/// Maximum number of requests of all VMs that wait for the service; tenants share them.
pub const ORDERS_WAITING: usize = 1_024;
/// Most requests ahead of their guests, beyond which a VM's answers are fetched when its guest asks.
pub const ORDERS_AHEAD: usize = ORDERS_WAITING / 2;
/// Shortest seed that is replaced, in characters of base64. Nova's has 684.
const SEED_CHARS: usize = 32;
/// How far the time of an answer may be ahead of a worker's clock, in seconds.
const CLOCK_SLACK: u64 = 5;
/// Maximum number of slots whose NIC is known. Each NIC of a record may move to another slot once.
const KNOWN_NICS: usize = 64;
/// A status that a request gets for which the service has no answer.
const UNAVAILABLE: StatusCode = StatusCode(503);

/// Locks the mutex, ignoring poison: every change below is complete or has not started.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type HandOver = dyn Fn(UpstreamOrder) -> bool + Send + Sync;

struct Shared {
    hand_over: Box<HandOver>,
    ahead: &'static [&'static str],
    /// Requests beyond a limit, since the start.
    refused: AtomicU64,
    waiting: Mutex<FairShare>,
    kept: Mutex<FairShare>,
    /// The VMs with answers that were stored, and when those are over, in Unix seconds.
    stored: Mutex<VecDeque<(u64, Weak<VmUpstream>)>>,
    orders: AtomicU64,
}

/// Hands requests over to the service. Clones share one queue.
#[derive(Clone)]
pub struct Upstream(Arc<Shared>);

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("refused", &self.0.refused).finish_non_exhaustive()
    }
}

impl Upstream {
    /// Calls `hand_over` with each order, at most [`ORDERS_WAITING`] at once. It must not wait; if it returns false, the order
    /// has failed. The paths of `ahead` are fetched as soon as a VM has a port.
    #[must_use]
    pub fn new(
        ahead: &'static [&'static str],
        hand_over: impl Fn(UpstreamOrder) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shared {
            hand_over: Box::new(hand_over),
            ahead,
            refused: AtomicU64::new(0),
            waiting: Mutex::new(FairShare::new(ORDERS_WAITING, ORDERS_PER_VM)),
            kept: Mutex::new(FairShare::new(ANSWERS_BYTES, KEPT_FLOOR)),
            stored: Mutex::default(),
            orders: AtomicU64::new(0),
        }))
    }

    /// Forgets the answers that are over, including VMs that ask no more.
    fn expire(&self, now_unix: u64) {
        let is_over = |(at, _): &mut (u64, _)| now_unix >= *at;
        while let Some((_, vm)) = locked(&self.0.stored).pop_front_if(is_over) {
            if let Some(vm) = vm.upgrade() {
                locked(&vm.answers).retain(|entry| !entry.is_over(now_unix));
            }
        }
    }

    /// Returns how many requests were beyond a limit since the start.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }
}

/// A part of a limit that tenants share. Dropping it gives the part back.
struct SharePart {
    upstream: Upstream,
    of: fn(&Shared) -> &Mutex<FairShare>,
    tenant: Tenant,
    size: usize,
}

impl SharePart {
    fn take(
        upstream: &Upstream,
        of: fn(&Shared) -> &Mutex<FairShare>,
        tenant: &Tenant,
        size: usize,
    ) -> Option<Self> {
        locked(of(&upstream.0)).admit(tenant, size).ok()?;
        Some(Self { upstream: upstream.clone(), of, tenant: tenant.clone(), size })
    }
}

impl Drop for SharePart {
    fn drop(&mut self) {
        locked((self.of)(&self.upstream.0)).release(&self.tenant, self.size);
    }
}

/// What a guest asks: the parts of a request that the service gets.
#[derive(Clone, PartialEq, Eq)]
struct AskedRequest {
    method: Method,
    path: Box<str>,
    query: Box<str>,
    body: Bytes,
}

impl AskedRequest {
    fn of(request: &Request<'_>) -> Self {
        Self {
            method: method(request),
            path: request.target.path.into(),
            query: request.target.query.into(),
            body: Bytes::copy_from_slice(request.body),
        }
    }

    fn is(&self, request: &Request<'_>) -> bool {
        self.method == method(request)
            && *self.path == *request.target.path
            && *self.query == *request.target.query
            && *self.body == *request.body
    }

    /// Whether asking twice is as good as asking once (RFC 9110 §9.2.1).
    fn is_safe(&self) -> bool {
        self.method == Method::Get
    }

    /// Whether the answer may be given to a later request. A password is the guest's own and may change at any time.
    fn is_kept(&self) -> bool {
        self.is_safe() && !self.path.ends_with("/password")
    }
}

/// HEAD is asked as GET, so that both share one answer: the connection leaves the body out.
fn method(request: &Request<'_>) -> Method {
    if request.method == Method::Head { Method::Get } else { request.method }
}

/// What the service has answered.
#[derive(Clone, Debug)]
pub struct UpstreamAnswer {
    /// The status for the guest.
    pub status: StatusCode,
    /// The type of the body.
    pub content_type: Option<String>,
    /// The body of a 200. Other answers have the body that this agent gives to their status.
    pub body: Bytes,
}

struct KeptAnswer {
    response: Response,
    /// The place of a seed in the body, and the body's type: each guest that asks gets other bytes there.
    seed: Option<(Range<usize>, Option<String>)>,
}

impl KeptAnswer {
    fn unavailable() -> Self {
        Self { response: Response::error(UNAVAILABLE, &[("Retry-After", "1")]), seed: None }
    }

    /// The answer for one request.
    fn response(&self) -> Response {
        let Some((place, content_type)) = &self.seed else { return self.response.clone() };
        let body = self.response.body().to_bytes();
        let encoded = &body[place.clone()];
        let padding = encoded.iter().rev().take_while(|byte| **byte == b'=').count();
        let mut seed = vec![0; encoded.len() / 4 * 3 - padding];
        rand::fill(&mut seed[..]);
        let fresh = Bytes::from(STANDARD.encode(seed));
        let body = Body::join([body.slice(..place.start), fresh, body.slice(place.end..)]);
        Response::new(self.response.status(), content_type.as_deref(), &[], body)
    }
}

/// The member of `meta_data.json` that must differ in each answer.
#[derive(Deserialize)]
struct SeededDocument {
    #[serde(default)]
    random_seed: Option<String>,
}

/// The place of the seed in a document, if it has one. An error if it cannot be replaced: such a document is not kept.
fn seed_of(body: &[u8]) -> Result<Option<Range<usize>>, ()> {
    let document: SeededDocument = parser::json(body).map_err(|_| ())?;
    let Some(seed) = document.random_seed else { return Ok(None) };
    let is_replaceable = seed.len() >= SEED_CHARS && STANDARD.decode(&seed).is_ok();
    let quoted = format!("\"{seed}\"");
    let mut found = (body.windows(quoted.len()).enumerate()).filter(|(_, part)| *part == quoted.as_bytes());
    match (found.next(), found.next()) {
        (Some((at, _)), None) if is_replaceable => Ok(Some(at + 1..at + 1 + seed.len())),
        _ => Err(()),
    }
}

/// An answer that is kept or awaited.
struct AnswerEntry {
    asked: AskedRequest,
    /// The order that brings it; a parked request finds it by this.
    order: u64,
    state: EntryState,
}

enum EntryState {
    Awaited {
        /// When a guest last asked for it, in Unix seconds.
        asked: u64,
    },
    Answered {
        answer: KeptAnswer,
        /// When it came, and how long it is kept, in Unix seconds.
        since: u64,
        seconds: u64,
        /// It is for one request only.
        once: bool,
        _bytes: Option<SharePart>,
    },
}

impl AnswerEntry {
    fn is_awaited(&self) -> bool {
        matches!(self.state, EntryState::Awaited { .. })
    }

    /// True once no request can wait for it any more.
    fn is_abandoned(&self, now_unix: u64) -> bool {
        let EntryState::Awaited { asked } = self.state else { return false };
        now_unix > asked.saturating_add(ANSWERED_WITHIN.as_secs() + CLOCK_SLACK)
    }

    fn is_over(&self, now_unix: u64) -> bool {
        match self.state {
            EntryState::Awaited { .. } => false,
            EntryState::Answered { since, seconds, .. } => {
                since > now_unix.saturating_add(CLOCK_SLACK) || now_unix >= since.saturating_add(seconds)
            }
        }
    }
}

/// The outcome of a request.
#[derive(Debug)]
pub enum UpstreamOutcome {
    /// The answer.
    Ready(Response),
    /// The answer is awaited, by the order of this number.
    Awaited(u64),
    /// There is no answer, and none is awaited.
    Unavailable,
}

/// The answers of one VM. They belong to one version of its record: a changed record has no old answers.
pub struct VmUpstream {
    upstream: Upstream,
    instance: Box<str>,
    project: Box<str>,
    tenant: Tenant,
    /// The fixed address of each NIC.
    addresses: Box<[(Mac, IpAddr)]>,
    nics: SlotNics,
    answers: Mutex<Vec<AnswerEntry>>,
}

impl fmt::Debug for VmUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmUpstream").field("instance", &self.instance).finish_non_exhaustive()
    }
}

impl VmUpstream {
    /// The answers for a record, whose UUID is the instance and whose project asks.
    #[must_use]
    pub fn new(upstream: &Upstream, record: &Record) -> Self {
        let addresses = record.network.nics.iter().filter_map(|nic| {
            let address = nic.ipv4().next().or_else(|| nic.ipv6().next())?.address;
            Some((nic.mac?.0, address))
        });
        Self {
            upstream: upstream.clone(),
            instance: record.vm.uuid.as_str().into(),
            project: record.vm.project.id.as_str().into(),
            tenant: record.tenant(),
            addresses: addresses.collect(),
            nics: SlotNics::default(),
            answers: Mutex::default(),
        }
    }

    /// Sets which NIC has a slot. Asks ahead what its guest will ask first.
    pub fn set_nic(self: &Arc<Self>, slot: Slot, mac: Mac, now_unix: u64) {
        self.nics.set(slot, mac);
        for path in self.upstream.0.ahead {
            let asked = AskedRequest {
                method: Method::Get,
                path: (*path).into(),
                query: "".into(),
                body: Bytes::new(),
            };
            let mut answers = locked(&self.answers);
            answers.retain(|entry| !entry.is_over(now_unix));
            let is_known = answers.iter().any(|entry| entry.asked == asked);
            drop(answers);
            if !is_known {
                self.order(slot, asked, true, now_unix);
            }
        }
    }

    /// Answers a request of a slot. `parked` is the number of the order that a parked request waits for.
    #[must_use]
    pub fn answer(
        self: &Arc<Self>,
        slot: Slot,
        request: &Request<'_>,
        now_unix: u64,
        parked: Option<u64>,
    ) -> UpstreamOutcome {
        let mut answers = locked(&self.answers);
        answers.retain(|entry| !entry.is_over(now_unix));
        let by_order = answers.iter().position(|entry| Some(entry.order) == parked);
        let found = by_order.or_else(|| answers.iter().position(|entry| entry.asked.is(request)));
        let Some(at) = found else {
            drop(answers);
            let asked = AskedRequest::of(request);
            // A request that may have changed something is never asked twice.
            return match parked.is_some() && !asked.is_safe() {
                true => UpstreamOutcome::Unavailable,
                false => self
                    .order(slot, asked, false, now_unix)
                    .map_or(UpstreamOutcome::Unavailable, UpstreamOutcome::Awaited),
            };
        };
        let entry = &mut answers[at];
        match &mut entry.state {
            EntryState::Awaited { asked } => {
                // One that is parked waits no longer than before.
                if parked.is_none() {
                    *asked = now_unix;
                }
                UpstreamOutcome::Awaited(entry.order)
            }
            EntryState::Answered { answer, once, .. } => {
                let response = answer.response();
                if *once {
                    answers.swap_remove(at);
                }
                UpstreamOutcome::Ready(response)
            }
        }
    }

    /// Hands a request over. Returns the number of its order; `None` beyond a limit.
    fn order(
        self: &Arc<Self>,
        slot: Slot,
        asked: AskedRequest,
        is_ahead: bool,
        now_unix: u64,
    ) -> Option<u64> {
        let address = self.address(slot)?;
        let Shared { waiting, refused, orders, .. } = &*self.upstream.0;
        let order = orders.fetch_add(1, Ordering::Relaxed);
        let is_crowded = is_ahead && locked(waiting).used() >= ORDERS_AHEAD;
        let permit = match self.has_room() && !is_crowded {
            true => SharePart::take(&self.upstream, |shared| &shared.waiting, &self.tenant, 1),
            false => None,
        };
        let Some(permit) = permit else {
            if !is_ahead {
                refused.fetch_add(1, Ordering::Relaxed);
            }
            return None;
        };
        let state = EntryState::Awaited { asked: now_unix };
        locked(&self.answers).push(AnswerEntry { asked: asked.clone(), order, state });
        let vm = Arc::clone(self);
        let order_of =
            UpstreamOrder { vm, asked, number: order, address, is_ahead, is_done: false, _permit: permit };
        (self.upstream.0.hand_over)(order_of).then_some(order)
    }

    /// Makes room for one more answer: the oldest that nobody waits for goes. False if there is none.
    fn has_room(&self) -> bool {
        let mut answers = locked(&self.answers);
        let awaited = answers.iter().filter(|entry| entry.is_awaited()).count();
        if awaited >= ORDERS_PER_VM {
            return false;
        }
        if answers.len() >= ANSWERS_PER_VM
            && let Some(oldest) = answers.iter().position(|entry| !entry.is_awaited())
        {
            answers.remove(oldest);
        }
        true
    }

    fn address(&self, slot: Slot) -> Option<IpAddr> {
        let mac = self.nics.mac(slot)?;
        self.addresses.iter().find(|(known, _)| *known == mac).map(|(_, address)| *address)
    }

    fn store(self: &Arc<Self>, order: u64, answer: KeptAnswer, (since, seconds): (u64, u64), is_kept: bool) {
        self.upstream.expire(since);
        // Only what others may get too is weighed against what is kept for them; the rest goes with its request.
        let size = answer.response.body().len();
        let bytes = match is_kept {
            true => SharePart::take(&self.upstream, |shared| &shared.kept, &self.tenant, size),
            false => None,
        };
        let once = bytes.is_none();
        let seconds = if once { seconds.min(UNCLAIMED_SECONDS) } else { seconds };
        locked(&self.upstream.0.stored).push_back((since.saturating_add(seconds), Arc::downgrade(self)));
        if let Some(entry) = locked(&self.answers).iter_mut().find(|entry| entry.order == order) {
            entry.state = EntryState::Answered { answer, since, seconds, once, _bytes: bytes };
        }
    }
}

/// A request to the service.
pub struct UpstreamOrder {
    vm: Arc<VmUpstream>,
    asked: AskedRequest,
    number: u64,
    address: IpAddr,
    is_ahead: bool,
    is_done: bool,
    /// Held until the answer is there.
    _permit: SharePart,
}

impl fmt::Debug for UpstreamOrder {
    /// Leaves the body out: it may be a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AskedRequest { method, path, .. } = &self.asked;
        f.debug_struct("UpstreamOrder").field("method", method).field("path", path).finish_non_exhaustive()
    }
}

impl UpstreamOrder {
    /// The instance that asks.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.vm.instance
    }

    /// The project of the instance.
    #[must_use]
    pub fn project(&self) -> &str {
        &self.vm.project
    }

    /// Who shares the service with others: the project.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.vm.tenant
    }

    /// The fixed address of the port that asks.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The method, GET for a HEAD.
    #[must_use]
    pub fn method(&self) -> Method {
        self.asked.method
    }

    /// The normalised path, decoded.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.asked.path
    }

    /// The query, as the guest wrote it.
    #[must_use]
    pub fn query(&self) -> &str {
        &self.asked.query
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.asked.body
    }

    /// Whether asking twice is as good as asking once.
    #[must_use]
    pub fn is_safe(&self) -> bool {
        self.asked.is_safe()
    }

    /// Whether no guest has asked for it yet.
    #[must_use]
    pub fn is_ahead(&self) -> bool {
        self.is_ahead
    }

    /// Returns the order if it is still wanted: a guest may be waiting for it, or it was made before any guest asked. An
    /// order that is no longer wanted is dropped. If the guest asks again, it makes a new one.
    #[must_use]
    pub fn if_awaited(self, now_unix: u64) -> Option<Self> {
        let mut answers = locked(&self.vm.answers);
        let is_of_nobody = |entry: &AnswerEntry| entry.order == self.number && entry.is_abandoned(now_unix);
        let before = answers.len();
        if !self.is_ahead {
            answers.retain(|entry| !is_of_nobody(entry));
        }
        let is_forgotten = answers.len() < before;
        drop(answers);
        (!is_forgotten).then_some(self)
    }

    /// Stores the answer. Returns the slots whose requests may wait for it.
    #[must_use = "the slots are to be woken"]
    pub fn answered(mut self, answer: UpstreamAnswer, now_unix: u64) -> Vec<Slot> {
        let UpstreamAnswer { status, content_type, body } = answer;
        let is_found = status == StatusCode(200);
        let mut is_kept = self.asked.is_kept() && matches!(status, StatusCode(200 | 404));
        let mut seed = None;
        if is_kept && is_found && self.asked.path.ends_with("/meta_data.json") {
            match seed_of(&body) {
                Ok(place) => seed = place.map(|place| (place, content_type.clone())),
                Err(()) => is_kept = false,
            }
        }
        let response = match is_found {
            true => Response::new(status, content_type.as_deref(), &[], body),
            false => Response::error(status, &[]),
        };
        self.end(KeptAnswer { response, seed }, (now_unix, KEPT_SECONDS), is_kept)
    }

    /// Says that the service has given no answer. Returns the slots whose requests may wait for it.
    #[must_use = "the slots are to be woken"]
    pub fn failed(mut self, now_unix: u64) -> Vec<Slot> {
        let is_kept = self.asked.is_safe();
        self.end(KeptAnswer::unavailable(), (now_unix, FAILED_SECONDS), is_kept)
    }

    fn end(&mut self, answer: KeptAnswer, times: (u64, u64), is_kept: bool) -> Vec<Slot> {
        self.is_done = true;
        self.vm.store(self.number, answer, times, is_kept);
        self.vm.nics.slots()
    }
}

impl Drop for UpstreamOrder {
    fn drop(&mut self) {
        if !self.is_done {
            locked(&self.vm.answers).retain(|entry| entry.order != self.number);
        }
    }
}

/// The slots of one VM, each with the MAC of its NIC.
#[derive(Debug, Default)]
pub(crate) struct SlotNics(Mutex<VecDeque<(Slot, Mac)>>);

impl SlotNics {
    fn nics(&self) -> MutexGuard<'_, VecDeque<(Slot, Mac)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets which NIC has a slot.
    pub(crate) fn set(&self, slot: Slot, mac: Mac) {
        let mut nics = self.nics();
        nics.retain(|(known, _)| *known != slot);
        if nics.len() == KNOWN_NICS {
            nics.pop_front();
        }
        nics.push_back((slot, mac));
    }

    /// The MAC of the NIC that has a slot.
    pub(crate) fn mac(&self, slot: Slot) -> Option<Mac> {
        self.nics().iter().find(|(known, _)| *known == slot).map(|(_, mac)| *mac)
    }

    /// All known slots.
    pub(crate) fn slots(&self) -> Vec<Slot> {
        self.nics().iter().map(|(slot, _)| *slot).collect()
    }
}
