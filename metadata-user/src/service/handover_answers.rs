//! Answers during a handover to another agent. The handover moves guests' writes to the other agent, which then also
//! gives the answers that depend on them.
//!
//! | | a document | a live value, or a slot without a record |
//! |---|---|---|
//! | [`AnswerStage::Here`] | answered | answered |
//! | [`AnswerStage::Frozen`] | answered | held |
//! | [`AnswerStage::Away`] | answered | sent to the other agent ([`HandedRequest`]), and held meanwhile |
//!
//! So each write reaches exactly one agent, and a guest always reads back what it wrote.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metadata_common::maps::Slot;
use tokio::sync::mpsc;

use super::{Answer, AnswerOrigin, AnswerSource};
use metadata_common::addresses::Connection;
use metadata_common::share::{FairShare, Tenant};
use metadata_common::time::Now;
use metadata_content::account::Account;
use metadata_content::http::Request;
use metadata_content::on_demand::OnDemand;
use metadata_content::store::{Host, ParkedCall, RequestHint, SlotState};

/// Limit on questions that wait to be sent, wait for an answer, or have an answer that their request has not fetched.
/// Further requests are held and retried. A namespace has at most half of what others leave.
pub const QUESTIONS: usize = 1_024;

/// Questions that each namespace may have while [`QUESTIONS`] is not reached.
const QUESTIONS_FLOOR: usize = 16;

/// How long an answer is kept until its request fetches it; the connection may be closed. Expired answers are removed
/// only when [`QUESTIONS`] is reached.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// Where answers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AnswerStage {
    /// This agent owns the writes of guests.
    Here = 0,
    /// The writes of guests are in transfer to the other agent.
    Frozen = 1,
    /// The other agent owns the writes of guests.
    Away = 2,
}

/// A request that the other agent must answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedRequest {
    /// The slot and endpoints of the request.
    pub connection: Connection,
    /// Hash that distinguishes requests on a connection.
    pub mark: u64,
    /// The HTTP method.
    pub method: metadata_content::http::Method,
    /// The normalised path.
    pub path: String,
    /// The query: everything after the first `?`.
    pub query: String,
    /// The header fields.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Vec<u8>,
}

impl HandedRequest {
    fn of(connection: &Connection, mark: u64, request: &Request<'_>) -> Self {
        let headers = request.headers.iter().map(|(name, value)| (name.to_owned(), value.to_vec()));
        Self {
            connection: *connection,
            mark,
            method: request.method,
            path: request.target.path.to_owned(),
            query: request.target.query.to_owned(),
            headers: headers.collect(),
            body: request.body.to_vec(),
        }
    }
}

/// A question that was sent, and its answer once it has arrived.
#[derive(Debug)]
struct PendingRequest {
    mark: u64,
    at: Duration,
    answer: Option<Answer>,
    tenant: Tenant,
}

/// The questions that were sent, and how tenants share their number.
#[derive(Debug)]
struct PendingRequests {
    by_connection: HashMap<Connection, PendingRequest>,
    share: FairShare,
}

impl PendingRequests {
    fn remove(&mut self, connection: &Connection) -> Option<PendingRequest> {
        let asked = self.by_connection.remove(connection)?;
        self.share.release(&asked.tenant, 1);
        Some(asked)
    }

    /// Removes the answers that no request has fetched in time.
    fn expire(&mut self, now: Now) {
        let share = &mut self.share;
        self.by_connection.retain(|_, asked| {
            let keep = asked.answer.is_none() || now.mono < asked.at + KEPT_FOR;
            if !keep {
                share.release(&asked.tenant, 1);
            }
            keep
        });
    }
}

/// The answers of a store, from this agent or the other.
#[derive(Debug)]
pub struct HandoverAnswers {
    answers: Arc<OnDemand>,
    stage: AtomicU8,
    asked: Mutex<PendingRequests>,
    questions: mpsc::Sender<HandedRequest>,
}

impl HandoverAnswers {
    /// Starts in [`AnswerStage::Here`]. The receiver gets the questions asked in [`AnswerStage::Away`].
    #[must_use]
    pub fn new(answers: Arc<OnDemand>) -> (Arc<Self>, mpsc::Receiver<HandedRequest>) {
        let (questions, receiver) = mpsc::channel(QUESTIONS);
        let stage = AtomicU8::new(AnswerStage::Here as u8);
        let share = FairShare::new(QUESTIONS, QUESTIONS_FLOOR);
        let asked = Mutex::new(PendingRequests { by_connection: HashMap::new(), share });
        (Arc::new(Self { answers, stage, asked, questions }), receiver)
    }

    /// Sets where answers come from. Held requests need no notification: their workers retry them.
    pub fn set(&self, stage: AnswerStage) {
        // Release: a worker that reads this stage also sees what the control side did before, such as saving guests'
        // writes.
        self.stage.store(stage as u8, Ordering::Release);
    }

    /// Stores the other agent's answer; `None` if it has no answer yet. Returns the slot of the waiting request.
    pub fn answered(&self, connection: &Connection, mark: u64, answer: Option<Answer>) -> Option<Slot> {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = asked.by_connection.get_mut(connection).filter(|asked| asked.mark == mark)?;
        match answer {
            Some(answer) => waits.answer = Some(answer),
            None => _ = asked.remove(connection),
        }
        Some(connection.slot)
    }

    /// True for an answer that does not depend on guests' writes.
    fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        self.answers.is_fixed(connection, request)
    }

    /// Whose question it is: without a record, the slot's own.
    fn tenant(&self, slot: Slot) -> Tenant {
        match self.answers.store().get(slot) {
            SlotState::Ready(responses) => responses.vm().tenant.clone(),
            SlotState::Expected | SlotState::Unknown => Tenant::Vm(format!("slot {slot}").into()),
        }
    }

    fn ask(&self, now: Now, connection: &Connection, request: &Request<'_>) -> Answer {
        let mark = mark(request);
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = asked.by_connection.get(connection).filter(|asked| asked.mark == mark) {
            if same.answer.is_none() {
                return Answer::NotYet;
            }
            return asked.remove(connection).and_then(|asked| asked.answer).unwrap_or(Answer::NotYet);
        }
        // A connection has one request at a time, so its earlier question is obsolete.
        asked.remove(connection);
        let tenant = self.tenant(connection.slot);
        if asked.share.free_for(&tenant) == 0 {
            asked.expire(now);
        }
        if asked.share.admit(&tenant, 1).is_ok() {
            if self.questions.try_send(HandedRequest::of(connection, mark, request)).is_ok() {
                asked
                    .by_connection
                    .insert(*connection, PendingRequest { mark, at: now.mono, answer: None, tenant });
            } else {
                asked.share.release(&tenant, 1);
            }
        }
        Answer::NotYet
    }
}

/// Hash that distinguishes the requests of a connection.
fn mark(request: &Request<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (request.method, request.target.path, request.target.query, request.body).hash(&mut hasher);
    hasher.finish()
}

impl AnswerSource for HandoverAnswers {
    fn read_ahead(&self, hints: &[RequestHint<'_>]) {
        self.answers.read_ahead(hints);
    }

    fn account(&self, slot: Slot) -> Option<Arc<Account>> {
        self.answers.account(slot)
    }

    fn opens(&self, slot: Slot, host: Host) -> bool {
        self.answers.opens(slot, host)
    }

    fn answer(
        &self,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (Answer, AnswerOrigin) {
        // Acquire: see `set`.
        let stage = self.stage.load(Ordering::Acquire);
        if stage == AnswerStage::Here as u8 || self.is_fixed(connection, request) {
            return self.answers.answer(now, connection, request, parked);
        }
        let is_frozen = stage == AnswerStage::Frozen as u8;
        (if is_frozen { Answer::NotYet } else { self.ask(now, connection, request) }, AnswerOrigin::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Answer, AnswerSource as _, AnswerStage, Connection, HandedRequest, HandoverAnswers, KEPT_FOR,
        QUESTIONS,
    };
    use metadata_common::time::Now;
    use metadata_content::http::{Headers, Method, Request, RequestTarget, Response, StatusCode};
    use metadata_content::on_demand::OnDemand;
    use metadata_content::store::{Endpoint, Host, LiveOutcome, Methods, Responses, Route, Store, VmState};
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::sync::mpsc::Receiver;

    const NOW: Now = Now { mono: Duration::ZERO, unix_seconds: 0 };

    /// Returns the value of the VM's attribute `a/b`. A PUT first sets it to the body.
    #[derive(Debug)]
    struct Note;

    impl metadata_content::store::LiveRoute for Note {
        fn answer(&self, call: &metadata_content::store::LiveRequest<'_>) -> LiveOutcome {
            if call.request.method == Method::Put {
                call.vm.mailbox.set_attribute("a", "b", call.request.body).expect("room");
            }
            let value = call.vm.mailbox.attribute("a", "b").unwrap_or_default();
            Response::new(StatusCode(200), None, &[], value).into()
        }

        fn about(&self) -> &'static str {
            "a note"
        }
    }

    fn node() -> (Arc<HandoverAnswers>, Receiver<HandedRequest>) {
        let mut responses = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
        let fixed = Response::new(StatusCode(200), None, &[], "fixed");
        responses.add(Host::Metadata, "/fixed", Route::new("test", Endpoint::Fixed(fixed)));
        let live = Route::new("test", Endpoint::Live(Arc::new(Note)));
        responses.add(Host::Metadata, "/live", live.methods(Methods::of(&[Method::Get, Method::Put])));
        let store = Store::new(2);
        store.publish(0, Arc::new(responses.build())).expect("slot 0");
        store.expect(1).expect("slot 1");
        HandoverAnswers::new(Arc::new(OnDemand::new(store)))
    }

    fn from(slot: u32, port: u16) -> Connection {
        Connection { slot, local: ([169, 254, 169, 254].into(), 80), remote: ([10, 0, 0, 1].into(), port) }
    }

    fn ask(
        node: &HandoverAnswers,
        connection: Connection,
        method: Method,
        path: &str,
        body: &[u8],
    ) -> Option<Vec<u8>> {
        ask_at(node, NOW, connection, method, path, body)
    }

    fn ask_at(
        node: &HandoverAnswers,
        now: Now,
        connection: Connection,
        method: Method,
        path: &str,
        body: &[u8],
    ) -> Option<Vec<u8>> {
        let request =
            Request { method, target: RequestTarget { path, query: "" }, headers: Headers::new(&[]), body };
        match node.answer(now, &connection, &request, None).0 {
            Answer::Known(LiveOutcome::Ready(response)) => Some(response.body().to_bytes().to_vec()),
            Answer::NotYet => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn documents_are_answered_at_every_stage_and_live_values_at_the_first() {
        let (node, mut questions) = node();
        for stage in [AnswerStage::Here, AnswerStage::Frozen, AnswerStage::Away] {
            node.set(stage);
            assert_eq!(ask(&node, from(0, 1), Method::Get, "/fixed", b"").as_deref(), Some(&b"fixed"[..]));
            let live = ask(&node, from(0, 2), Method::Get, "/live", b"");
            assert_eq!(live.is_some(), stage == AnswerStage::Here, "{stage:?}");
            assert_eq!(questions.try_recv().is_ok(), stage == AnswerStage::Away, "{stage:?}");
        }
        node.set(AnswerStage::Here);
        assert!(ask(&node, from(0, 2), Method::Get, "/live", b"").is_some(), "the handover was cancelled");
    }

    #[test]
    fn a_held_write_has_no_effect_here() {
        let (node, mut questions) = node();
        node.set(AnswerStage::Frozen);
        assert_eq!(ask(&node, from(0, 1), Method::Put, "/live", b"late"), None);
        node.set(AnswerStage::Away);
        assert_eq!(ask(&node, from(0, 1), Method::Put, "/live", b"late"), None);
        assert_eq!(questions.try_recv().expect("a question").body, b"late");
        node.set(AnswerStage::Here);
        assert_eq!(ask(&node, from(0, 2), Method::Get, "/live", b"").as_deref(), Some(&b""[..]));
    }

    #[test]
    fn a_question_is_sent_once_and_its_answer_reaches_its_request() {
        let (node, mut questions) = node();
        node.set(AnswerStage::Away);
        for _ in 0..3 {
            assert_eq!(ask(&node, from(0, 1), Method::Get, "/live", b""), None);
        }
        let question = questions.try_recv().expect("a question");
        assert!(questions.try_recv().is_err(), "once");
        let answer = || Some(Answer::Known(Response::new(StatusCode(200), None, &[], "answer").into()));
        assert_eq!(
            node.answered(&from(0, 9), question.mark, answer()),
            None,
            "no request on that connection"
        );
        assert_eq!(node.answered(&question.connection, question.mark + 1, answer()), None, "another request");
        assert_eq!(node.answered(&question.connection, question.mark, answer()), Some(0));
        assert_eq!(ask(&node, from(0, 1), Method::Get, "/live", b"").as_deref(), Some(&b"answer"[..]));
        assert_eq!(
            ask(&node, from(0, 1), Method::Get, "/live", b""),
            None,
            "the next request sends a new question"
        );
        assert!(questions.try_recv().is_ok());
    }

    #[test]
    fn a_question_without_an_answer_yet_is_sent_again() {
        let (node, mut questions) = node();
        node.set(AnswerStage::Away);
        assert_eq!(ask(&node, from(1, 1), Method::Get, "/any", b""), None, "the slot has no record");
        let question = questions.try_recv().expect("a question");
        assert_eq!(node.answered(&question.connection, question.mark, None), Some(1));
        assert_eq!(ask(&node, from(1, 1), Method::Get, "/any", b""), None);
        assert!(questions.try_recv().is_ok(), "sent again");
    }

    /// What one VM may ask at once.
    const SHARE: usize = QUESTIONS / 2;

    #[test]
    fn expired_answers_make_room_for_new_questions() {
        let (node, mut questions) = node();
        node.set(AnswerStage::Away);
        for port in 0..SHARE as u16 {
            assert_eq!(ask(&node, from(0, port), Method::Get, "/live", b""), None);
        }
        while let Ok(question) = questions.try_recv() {
            let answer = Answer::Known(Response::new(StatusCode(200), None, &[], "answer").into());
            node.answered(&question.connection, question.mark, Some(answer));
        }
        let late = from(0, SHARE as u16);
        assert_eq!(ask(&node, late, Method::Get, "/live", b""), None);
        assert!(questions.try_recv().is_err(), "their answers have not expired");
        let later = Now { mono: NOW.mono + KEPT_FOR, ..NOW };
        assert_eq!(ask_at(&node, later, late, Method::Get, "/live", b""), None);
        assert_eq!(questions.try_recv().expect("a question").connection, late);
    }

    #[test]
    fn questions_beyond_a_share_are_held_and_sent_when_there_is_room() {
        let (node, mut questions) = node();
        node.set(AnswerStage::Away);
        for port in 0..=SHARE as u16 {
            assert_eq!(ask(&node, from(0, port), Method::Get, "/live", b""), None);
        }
        let first = questions.try_recv().expect("a question");
        assert_eq!(std::iter::from_fn(|| questions.try_recv().ok()).count(), SHARE - 1);
        node.answered(&first.connection, first.mark, None);
        assert_eq!(ask(&node, from(0, SHARE as u16), Method::Get, "/live", b""), None);
        assert!(questions.try_recv().is_ok());
    }

    #[test]
    fn the_questions_of_one_vm_leave_room_for_those_of_another() {
        let (node, mut questions) = node();
        node.set(AnswerStage::Away);
        for port in 0..2 * QUESTIONS as u16 {
            assert_eq!(ask(&node, from(0, port), Method::Get, "/live", b""), None);
        }
        while questions.try_recv().is_ok() {}
        assert_eq!(ask(&node, from(1, 1), Method::Get, "/live", b""), None);
        assert_eq!(questions.try_recv().expect("a question").connection, from(1, 1));
    }
}
