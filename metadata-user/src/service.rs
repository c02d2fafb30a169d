//! The HTTP exchange of a guest's connection: finds the answer for the slot, holds a request while its answer is not
//! available, and counts the result.

pub mod audit;
mod connection;
mod handover_answers;
mod learning;
mod worker_counts;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use metadata_common::maps::Slot;

use crate::service::audit::Tape;
use metadata_common::addresses;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::account::{Account, Resource};
use metadata_content::dialect;
use metadata_content::http::parse::path_in;
use metadata_content::http::{Request, Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::store::path::{HOST_PLUGIN_PORT, PASSWORD_PORT};
use metadata_content::store::{Datasource, Host, LiveOutcome, ParkedCall, RequestHint, Responses, SlotState};
use metadata_datapath::GROUP;
use metadata_datapath::stack::{FramePreview, RefusedRequests, Service};

pub use connection::HttpConnection;
pub use handover_answers::{AnswerStage, HandedRequest, HandoverAnswers, QUESTIONS};
pub use learning::{DocumentCounts, REPORTS, ReportedRequest, RequestForm, RequestReports};
pub(crate) use learning::{is_plain, now_ns};
pub use worker_counts::{BOUNDS_NS, Latencies, WaitEnd, WaitReason, WorkerCounts};

/// The answer to a request.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The slot has a record, which gives this outcome.
    Known(LiveOutcome),
    /// The slot is bound, but its record has not arrived.
    NotYet,
    /// The slot has exceeded its request rate.
    TooMany,
    /// The slot has no record, and none is expected.
    Unknown,
}

/// The source of an answer, for metrics and the audit log.
#[derive(Clone, Debug)]
pub struct AnswerOrigin {
    /// The dialect that answered.
    pub datasource: Datasource,
    /// The VM's responses; `None` without a record.
    pub responses: Option<Arc<Responses>>,
}

impl AnswerOrigin {
    /// An answer without a record.
    pub const NONE: Self = Self { datasource: Datasource::NONE, responses: None };
}

/// The source of answers.
pub trait AnswerSource {
    /// The answer to one request, and where it came from. Must not block. For a parked request, call it again with the
    /// value it was parked with.
    fn answer(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (Answer, AnswerOrigin);

    /// The account of a slot's VM; `None` if the VM is not known.
    fn account(&self, _slot: Slot) -> Option<Arc<Account>> {
        None
    }

    /// True if a slot may connect to a host that exists only for VMs of one dialect.
    fn opens(&self, _slot: Slot, _host: Host) -> bool {
        true
    }

    /// Reads ahead what the answers to these requests will touch. Changes nothing.
    fn read_ahead(&self, _hints: &[RequestHint<'_>]) {}
}

impl AnswerSource for OnDemand {
    fn read_ahead(&self, hints: &[RequestHint<'_>]) {
        self.store().read_ahead(hints);
    }

    fn account(&self, slot: Slot) -> Option<Arc<Account>> {
        match self.store().get(slot) {
            SlotState::Ready(responses) => Some(Arc::clone(responses.vm().mailbox.account())),
            SlotState::Expected | SlotState::Unknown => None,
        }
    }

    fn opens(&self, slot: Slot, host: Host) -> bool {
        self.opens(slot, host)
    }

    fn answer(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (Answer, AnswerOrigin) {
        match self.store().get(connection.slot) {
            SlotState::Ready(responses) => {
                // The limit exempts requests for tokens: a client whose PUT for a token fails gives up its datasource
                // for good. It exempts a parked request because that was counted when it arrived.
                let host = Host::at(connection.local);
                let free = parked.is_some() || dialect::asks_for_token(host, request);
                if !free && !self.store().admit(connection.slot, responses.limit(), now.mono) {
                    let origin = AnswerOrigin { datasource: Datasource::NONE, responses: Some(responses) };
                    return (Answer::TooMany, origin);
                }
                let (outcome, datasource, responses) =
                    self.answer_with(responses, now, connection, request, parked);
                (Answer::Known(outcome), AnswerOrigin { datasource, responses: Some(responses) })
            }
            SlotState::Expected => (Answer::NotYet, AnswerOrigin::NONE),
            SlotState::Unknown => (Answer::Unknown, AnswerOrigin::NONE),
        }
    }
}

/// The port that every dialect uses; it is open on every served address.
const HTTP: u16 = 80;
/// The only addresses on which [`PASSWORD_PORT`] is open.
const PASSWORD_SERVERS: [IpAddr; 2] =
    [IpAddr::V4(addresses::METADATA), IpAddr::V6(addresses::METADATA_LINK_LOCAL)];

/// Limit from the first byte of a request to the end of its head.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// Limit from the end of the head to the end of the body.
const BODY_WITHIN: Duration = Duration::from_secs(30);
/// How long a connection stays open after an answer without another request.
const IDLE: Duration = Duration::from_secs(75);
/// Interval at which a request that waits for its record or its rate limit is retried.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// How long a PUT may wait for its VM's record before its connection closes without an answer. Clients that PUT for an
/// EC2 token give up their datasource on any error, but retry if no answer comes.
pub const PUT_HOLD: Duration = Duration::from_secs(45);

/// Every method that some path accepts, for `OPTIONS *`.
const ALLOW: &str = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT";

/// State shared by all exchanges of one service.
#[derive(Debug)]
struct Shared<A> {
    answers: Arc<A>,
    /// Error answers by status. These and the next three are rendered once, because their content never changes.
    errors: Vec<Response>,
    not_ready: Response,
    too_many: Response,
    options: Response,
    tally: Arc<WorkerCounts>,
    tape: Option<Arc<Tape>>,
    /// Set if answers are published to the kernel.
    reports: Option<Arc<RequestReports>>,
    /// The worker's account over all VMs.
    account: Arc<Account>,
    refused: Counters,
}

/// Refused resources, see [`RefusedRequests`].
#[derive(Debug, Default)]
struct Counters {
    held: AtomicU64,
    buffered: AtomicU64,
    computed: AtomicU64,
}

impl<A> Shared<A> {
    fn new(answers: Arc<A>, tape: Option<Arc<Tape>>, reports: Option<Arc<RequestReports>>) -> Self {
        let errors = [400, 404, 408, 413, 414, 417, 431, 501, 505];
        Self {
            answers,
            errors: errors.into_iter().map(|status| Response::error(StatusCode(status), &[])).collect(),
            not_ready: Response::error(StatusCode(503), &[("Retry-After", "1")]),
            too_many: Response::error(StatusCode(429), &[("Retry-After", "1")]),
            options: Response::new(StatusCode(204), None, &[("Allow", ALLOW)], bytes::Bytes::new()),
            account: Arc::new(Account::of_worker()),
            refused: Counters::default(),
            tally: Arc::default(),
            tape,
            reports,
        }
    }

    fn error(&self, status: StatusCode) -> Response {
        let rendered = self.errors.iter().find(|response| response.status() == status);
        rendered.cloned().unwrap_or_else(|| Response::error(status, &[]))
    }
}

/// The metadata service, as used by the stack.
#[derive(Debug)]
pub struct MetadataService<A = OnDemand> {
    shared: Arc<Shared<A>>,
    /// Accounts of slots whose VM is not known. The connections own them.
    unknown: HashMap<Slot, Weak<Account>>,
}

/// Size of `MetadataService::unknown` below which accounts without a connection are not removed.
const UNKNOWN_MIN: usize = 64;

impl<A: AnswerSource> MetadataService<A> {
    /// A service that answers from `answers`.
    #[must_use]
    pub fn new(answers: Arc<A>) -> Self {
        Self::audited(answers, None)
    }

    /// Like [`new`](Self::new), and records its answers on the tape while that is on.
    #[must_use]
    pub fn audited(answers: Arc<A>, tape: Option<Arc<Tape>>) -> Self {
        Self::reporting(answers, tape, None)
    }

    /// Like [`audited`](Self::audited), and reports the requests that the kernel could have answered.
    #[must_use]
    pub fn reporting(answers: Arc<A>, tape: Option<Arc<Tape>>, reports: Option<Arc<RequestReports>>) -> Self {
        Self { shared: Arc::new(Shared::new(answers, tape, reports)), unknown: HashMap::new() }
    }

    /// The counts of this service.
    #[must_use]
    pub fn tally(&self) -> Arc<WorkerCounts> {
        Arc::clone(&self.shared.tally)
    }
}

impl<A: AnswerSource> MetadataService<A> {
    fn account(&mut self, slot: Slot) -> Arc<Account> {
        if let Some(account) = self.shared.answers.account(slot) {
            return account;
        }
        if let Some(account) = self.unknown.get(&slot).and_then(Weak::upgrade) {
            return account;
        }
        // Cleaning up only when the map is full costs at most one step per inserted account.
        if self.unknown.len() >= UNKNOWN_MIN && self.unknown.len() == self.unknown.capacity() {
            self.unknown.retain(|_, account| account.strong_count() > 0);
        }
        let account = Arc::default();
        self.unknown.insert(slot, Arc::downgrade(&account));
        account
    }
}

impl<A: AnswerSource> Service for MetadataService<A> {
    type Exchange = HttpConnection<A>;

    fn listens(&self, slot: Slot, (address, port): (IpAddr, u16)) -> bool {
        match port {
            HTTP => true,
            PASSWORD_PORT => PASSWORD_SERVERS.contains(&address),
            HOST_PLUGIN_PORT => {
                address == addresses::AZURE_WIRESERVER && self.shared.answers.opens(slot, Host::HostPlugin)
            }
            _ => false,
        }
    }

    fn read_ahead(&self, glimpses: &[FramePreview<'_>]) {
        let mut hints = [RequestHint::default(); GROUP];
        for (hint, glimpse) in hints.iter_mut().zip(glimpses) {
            *hint = RequestHint {
                slot: glimpse.slot,
                host: Host::at(glimpse.local),
                path: path_in(glimpse.payload),
            };
        }
        self.shared.answers.read_ahead(&hints[..glimpses.len().min(GROUP)]);
    }

    fn open(&mut self, now: Now, connection: Connection) -> HttpConnection<A> {
        let account = self.account(connection.slot);
        HttpConnection::new(Arc::clone(&self.shared), account, connection, now)
    }

    fn admits(&self, slot: Slot) -> bool {
        self.shared.answers.account(slot).is_none_or(|vm| vm.has_room(Resource::Connections, 1))
    }

    fn refused(&self) -> RefusedRequests {
        let Counters { held, buffered, computed } = &self.shared.refused;
        let [held, buffered, computed] =
            [held, buffered, computed].map(|count| count.load(Ordering::Relaxed));
        RefusedRequests { held, buffered, computed }
    }

    fn turned(&mut self, turn: Duration) {
        self.shared.tally.turned(turn);
        if let Some(tape) = &self.shared.tape {
            tape.turned(turn);
        }
    }
}

/// The control side makes a stack and moves it to its worker's thread, so it must be `Send`.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<metadata_datapath::stack::Stack<MetadataService>>();
};
