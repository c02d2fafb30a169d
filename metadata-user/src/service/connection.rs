//! One connection's requests and answers, one after the other.
//!
//! A request that arrives in one piece without a body, as nearly all do, is parsed in the receive buffer. Other
//! requests are first collected. While an answer is being sent, no request is read, so a client that pipelines requests
//! fills its own send buffer and not the agent's memory.

use bytes::Bytes;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::account::{Account, ConnectionUsage};
use metadata_content::dialect;
use metadata_content::http::body::{BodyReader, Framing};
use metadata_content::http::parse::{FIELD_COUNT_MAX, RequestHead, Scanner, is_head_request};
use metadata_content::http::target::{TargetError, normalise};
use metadata_content::http::{self, Method, Persistence, Request, RequestError, Response, StatusCode};
use metadata_content::store::{LiveOutcome, ParkedCall};
use metadata_datapath::stack::{ConnectionAction, Exchange};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::worker_counts::{WaitEnd, WaitGuard, WaitReason};
use super::{
    Answer, AnswerOrigin, AnswerSource, BODY_WITHIN, HEAD_WITHIN, IDLE, PUT_HOLD, RETRY_EVERY, Shared,
};
use crate::service::audit;

/// In a drain, how long a connection stays open after its last answer. A client in the middle of a series sends its
/// next request within this time, and the answer to that closes the connection. Closing at once could cross a request
/// in flight (RFC 9112 §9.5).
const LAST_CALL: Duration = Duration::from_millis(250);
/// Largest capacity of a head's buffer that is kept for the next request: the connection may stay idle.
const HEAD_KEPT: usize = 2 * 1024;

#[derive(Debug)]
enum Phase {
    /// Between requests, or in the middle of a head.
    Head,
    /// `head` is complete; the body is still arriving.
    Body(BodyReader),
    /// A complete request that waits for its record or its rate limit.
    Held { retry_at: Duration, give_up: Duration },
    /// A complete request that waits for a change of the VM's record or mailbox.
    Parked(ParkedCall),
    /// The last answer is queued.
    Over,
}

/// What to do with a complete request.
enum Decision {
    Answer(Response),
    /// Wait for this reason and at most this long. Then send the answer, or close the connection if there is none.
    Hold(WaitReason, Duration, Option<Response>),
    /// Wait for a change.
    Park(ParkedCall),
}

/// Until when a parked request waits in a drain that ends at a time: not at all for a change, and for an answer that is
/// still being made as long as others are waited for.
fn latest(parked: &ParkedCall, now: Now, end: Duration) -> Duration {
    if parked.has_answer { now.mono } else { end }
}

/// True for `OPTIONS *`, which concerns the server and not a path (RFC 9110 §9.3.7).
fn asks_for_options(head: &RequestHead<'_>) -> bool {
    head.method == Method::Options && head.target == "*"
}

/// The exchange over one connection.
pub struct HttpConnection<A> {
    shared: Arc<Shared<A>>,
    connection: Connection,
    phase: Phase,
    scanner: Scanner,
    head: Vec<u8>,
    body: Vec<u8>,
    /// What the stack has not got yet.
    sending: ConnectionOutput,
    /// The hop limit of the current answer.
    hop_limit: Option<u8>,
    /// An answer changed a value that other requests of the slot may wait for.
    stirs: bool,
    /// Time at which the current request was complete (`Now::mono`).
    asked: Duration,
    /// Set while the current request waits.
    wait: Option<WaitGuard>,
    /// Time at which the limit on the current phase expires.
    deadline: Duration,
    /// The client has closed its side.
    ended: bool,
    /// Bytes have arrived after the current request.
    more: bool,
    /// Set in a drain: the connection begins no answer after this time.
    leaves_by: Option<Duration>,
    /// Usage of this connection on its VM's account.
    tab: ConnectionUsage,
}

impl<A> fmt::Debug for HttpConnection<A> {
    /// Shows the state, but nothing of the content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { connection, phase, head, body, .. } = self;
        let mut shown = f.debug_struct("Talk");
        shown.field("connection", connection).field("phase", phase);
        shown.field("head_bytes", &head.len()).field("body_bytes", &body.len()).finish_non_exhaustive()
    }
}

impl<A: AnswerSource> HttpConnection<A> {
    pub(super) fn new(
        shared: Arc<Shared<A>>,
        account: Arc<Account>,
        connection: Connection,
        now: Now,
    ) -> Self {
        let deadline = now.mono + HEAD_WITHIN;
        let tab = ConnectionUsage::open(account, Arc::clone(&shared.account));
        Self {
            shared,
            connection,
            tab,
            phase: Phase::Head,
            scanner: Scanner::default(),
            head: Vec::new(),
            body: Vec::new(),
            sending: ConnectionOutput::Nothing,
            hop_limit: None,
            stirs: false,
            asked: now.mono,
            wait: None,
            deadline,
            ended: false,
            more: false,
            leaves_by: None,
        }
    }

    /// Queues an answer and prepares for the next request or for the end.
    fn send(&mut self, now: Now, response: Response, without_body: bool, persistence: Persistence) {
        // In a drain, requests that have arrived are answered before the connection closes.
        let leaves = self.leaves_by.is_some_and(|by| !self.more || by <= now.mono);
        let persistence = if response.closes() || leaves { Persistence::Close } else { persistence };
        self.hop_limit = response.hop_limit();
        let tail = http::tail(now.unix_seconds, persistence);
        self.sending = ConnectionOutput::answer(response, tail, without_body);
        self.tab.let_go();
        if self.head.capacity() > HEAD_KEPT {
            self.head = Vec::new();
        }
        self.head.clear();
        // A body has up to 64 KiB: do not keep its buffer for a connection that may stay idle.
        self.body = Vec::new();
        self.tab.buffer(0);
        self.scanner = Scanner::default();
        self.phase = if persistence == Persistence::Close { Phase::Over } else { Phase::Head };
    }

    /// Counts an answer, and records it on the tape if that is on.
    fn note(&mut self, now: Now, response: &Response, about: (Method, &str), origin: AnswerOrigin) {
        if let Some(wait) = self.wait.take() {
            let expired = matches!(&self.phase, Phase::Held { give_up, .. } if *give_up <= now.mono)
                && matches!(response.status(), StatusCode(429 | 503));
            wait.end(if expired { WaitEnd::Expired } else { WaitEnd::Released });
        }
        let took = now.mono.saturating_sub(self.asked);
        self.shared.tally.answered(origin.datasource, response.status(), took);
        if let Some(tape) = &self.shared.tape
            && tape.is_on()
        {
            self.write_down(tape, now, took, response, about, origin);
        }
    }

    /// A separate function, so that answers that nobody records do not pay for its stack frame.
    #[inline(never)]
    fn write_down(
        &self,
        tape: &audit::Tape,
        now: Now,
        took: Duration,
        response: &Response,
        (method, target): (Method, &str),
        origin: AnswerOrigin,
    ) {
        let bytes = if method == Method::Head { 0 } else { response.body().len() as u64 };
        tape.note(audit::AuditEntry {
            took,
            method,
            path: audit::RequestPath::of(target),
            datasource: origin.datasource,
            status: response.status(),
            bytes,
            responses: origin.responses,
            ..audit::AuditEntry::of(&self.connection, now.unix_seconds)
        });
    }

    /// Makes a complete request wait, unless it already waits for this reason.
    fn wait_for(&mut self, reason: WaitReason) {
        if self.wait.as_ref().is_none_or(|wait| !wait.is_for(reason)) {
            let former = self.wait.replace(WaitGuard::begin(&self.shared.tally, reason));
            if let Some(wait) = former {
                wait.end(WaitEnd::Released);
            }
        }
    }

    /// Answers an invalid request. The start of the next request is unknown, so this answer is the last.
    fn refuse(&mut self, now: Now, error: RequestError, without_body: bool) {
        let response = self.shared.error(error.status());
        if !self.is_waiting() {
            self.asked = now.mono;
        }
        self.note(now, &response, (Method::Other, ""), AnswerOrigin::NONE);
        self.send(now, response, without_body, Persistence::Close);
    }

    /// Consumes bytes of a head; returns how many.
    fn take_head(&mut self, now: Now, bytes: &[u8]) -> usize {
        let before = self.head.len();
        if before == 0 {
            match self.scanner.advance(bytes) {
                Ok(Some(length)) => {
                    self.more = length < bytes.len();
                    self.complete_head(now, &bytes[..length]);
                    return length;
                }
                Ok(None) => {
                    let deadline = now.mono + HEAD_WITHIN;
                    self.deadline = self.leaves_by.map_or(deadline, |by| by.min(deadline));
                    self.head.extend_from_slice(bytes);
                }
                Err(error) => self.refuse(now, error, is_head_request(bytes)),
            }
            return bytes.len();
        }
        let mut head = std::mem::take(&mut self.head);
        head.extend_from_slice(bytes);
        let scanned = self.scanner.advance(&head);
        let mut taken = bytes.len();
        if let Ok(Some(length)) = scanned {
            taken = length - before;
            self.more = taken < bytes.len();
            head.truncate(length);
            self.complete_head(now, &head);
        }
        // Put the buffer back: for its content while the head is incomplete, else for its capacity.
        if matches!(scanned, Ok(Some(_))) && self.head.is_empty() {
            head.clear();
            self.head = head;
        } else if !matches!(scanned, Ok(Some(_))) {
            self.head = head;
        }
        if let Err(error) = scanned {
            self.refuse(now, error, is_head_request(&self.head));
        }
        taken
    }

    /// Handles a complete head: answers the request, or prepares for its body.
    fn complete_head(&mut self, now: Now, bytes: &[u8]) {
        let mut fields = [httparse::EMPTY_HEADER; FIELD_COUNT_MAX];
        if let Err(error) =
            RequestHead::parse(bytes, &mut fields).and_then(|head| self.start(now, &head, bytes))
        {
            self.refuse(now, error, is_head_request(bytes));
        }
    }

    fn start(&mut self, now: Now, head: &RequestHead<'_>, bytes: &[u8]) -> Result<(), RequestError> {
        let framing = Framing::of(&head.headers, head.is_1_1)?;
        let waits = head.expects_continue()?;
        if framing == Framing::Absent {
            return self.attempt(now, head, &[], bytes);
        }
        // Refuse an impossible target before requesting its body.
        if !asks_for_options(head) && normalise(head.target) == Err(TargetError::Malformed) {
            return Err(RequestError::Target);
        }
        if waits {
            self.sending = ConnectionOutput::Continue;
        }
        let keep = !matches!(head.method, Method::Get | Method::Head);
        self.phase = Phase::Body(BodyReader::new(framing, keep));
        self.deadline = now.mono + BODY_WITHIN;
        self.head.extend_from_slice(bytes);
        Ok(())
    }

    /// Tries to answer a complete request; keeps the request while it must wait.
    fn attempt(
        &mut self,
        now: Now,
        head: &RequestHead<'_>,
        body: &[u8],
        bytes: &[u8],
    ) -> Result<(), RequestError> {
        if !self.is_waiting() {
            self.asked = now.mono;
        }
        let (decision, origin) = self.find(now, head, body)?;
        let crowded = matches!(decision, Decision::Hold(..)) && !self.tab.hold();
        let response = match (decision, &self.phase) {
            (Decision::Answer(response), _) => self.charged(response),
            (Decision::Hold(_, _, at_last), phase)
                if crowded || matches!(phase, Phase::Held { give_up, .. } if *give_up <= now.mono) =>
            {
                if crowded {
                    self.shared.refused.held.fetch_add(1, Ordering::Relaxed);
                }
                let Some(response) = at_last else {
                    if let Some(wait) = self.wait.take() {
                        wait.end(WaitEnd::Expired);
                    }
                    self.phase = Phase::Over;
                    return Ok(());
                };
                response
            }
            (Decision::Park(mut parked), _) => {
                if let Some(by) = self.leaves_by {
                    parked.until = parked.until.min(latest(&parked, now, by));
                }
                self.phase = Phase::Parked(parked);
                self.wait_for(WaitReason::Change);
                if self.head.is_empty() {
                    self.head.extend_from_slice(bytes);
                }
                return Ok(());
            }
            (Decision::Hold(reason, timeout, _), phase) => {
                let give_up = match phase {
                    Phase::Held { give_up, .. } => *give_up,
                    _ => now.mono + timeout,
                };
                let give_up = self.leaves_by.map_or(give_up, |by| by.min(give_up));
                let retry_at = give_up.min(now.mono + RETRY_EVERY);
                self.phase = Phase::Held { retry_at, give_up };
                self.wait_for(reason);
                if self.head.is_empty() {
                    self.head.extend_from_slice(bytes);
                }
                return Ok(());
            }
        };
        let persistence = match (head.keeps_alive(), head.is_1_1) {
            (false, _) => Persistence::Close,
            (true, true) => Persistence::Implied,
            (true, false) => Persistence::KeepAlive,
        };
        if let (Some(reports), Some(responses), true) =
            (&self.shared.reports, &origin.responses, body.is_empty())
        {
            reports.report(&self.connection, head, bytes, &response, (responses.vm(), now.unix_seconds));
        }
        self.note(now, &response, (head.method, head.target), origin);
        self.send(now, response, head.method == Method::Head, persistence);
        Ok(())
    }

    /// Charges an answer that was computed for this request to its VM's account. Returns another answer if the VM has
    /// too many unread ones.
    fn charged(&self, response: Response) -> Response {
        response.charged(|bytes| self.tab.charge(bytes)).unwrap_or_else(|| {
            self.shared.refused.computed.fetch_add(1, Ordering::Relaxed);
            self.shared.not_ready.clone()
        })
    }

    /// Charges the buffers of a request to its VM's account; refuses the request if the account is exhausted.
    fn keep(&mut self, now: Now) {
        if !self.tab.buffer(self.head.len() + self.body.len()) {
            self.shared.refused.buffered.fetch_add(1, Ordering::Relaxed);
            let response = self.shared.not_ready.clone();
            self.asked = now.mono;
            self.note(now, &response, (Method::Other, ""), AnswerOrigin::NONE);
            self.send(now, response, false, Persistence::Close);
        }
    }

    fn find(
        &mut self,
        now: Now,
        head: &RequestHead<'_>,
        body: &[u8],
    ) -> Result<(Decision, AnswerOrigin), RequestError> {
        if asks_for_options(head) {
            return Ok((Decision::Answer(self.shared.options.clone()), AnswerOrigin::NONE));
        }
        let normal = match normalise(head.target) {
            Ok(normal) => normal,
            Err(TargetError::NotText) => {
                return Ok((Decision::Answer(self.shared.error(StatusCode(404))), AnswerOrigin::NONE));
            }
            Err(TargetError::Malformed) => return Err(RequestError::Target),
        };
        let target = normal.target();
        let request = Request { method: head.method, target, headers: head.headers, body };
        let parked = match &self.phase {
            Phase::Parked(parked) => Some(parked),
            _ => None,
        };
        let timeout = || dialect::computation_timeout(target.path);
        let (answer, origin) = self.shared.answers.answer(now, &self.connection, &request, parked);
        let decision = match answer {
            Answer::Known(LiveOutcome::Ready(response)) => Decision::Answer(response),
            Answer::Known(LiveOutcome::Changed(response)) => {
                self.stirs = true;
                Decision::Answer(response)
            }
            Answer::Known(LiveOutcome::Park(parked)) => {
                // A newly parked request may have ended the VM's oldest one, which then needs its answer.
                self.stirs |= !matches!(self.phase, Phase::Parked(_));
                Decision::Park(parked)
            }
            Answer::Unknown => Decision::Answer(self.shared.error(StatusCode(404))),
            Answer::NotYet if head.method == Method::Put => {
                Decision::Hold(WaitReason::Record, PUT_HOLD, None)
            }
            Answer::NotYet => {
                Decision::Hold(WaitReason::Record, timeout(), Some(self.shared.not_ready.clone()))
            }
            Answer::TooMany => {
                Decision::Hold(WaitReason::Rate, timeout(), Some(self.shared.too_many.clone()))
            }
        };
        Ok((decision, origin))
    }

    /// Tries to answer the request collected in `head` and `body`.
    fn attempt_gathered(&mut self, now: Now) {
        let (bytes, body) = (std::mem::take(&mut self.head), std::mem::take(&mut self.body));
        let mut fields = [httparse::EMPTY_HEADER; FIELD_COUNT_MAX];
        let done =
            RequestHead::parse(&bytes, &mut fields).and_then(|head| self.attempt(now, &head, &body, &[]));
        match done {
            Err(error) => self.refuse(now, error, is_head_request(&bytes)),
            Ok(()) if self.is_waiting() => (self.head, self.body) = (bytes, body),
            Ok(()) => {}
        }
    }

    /// Consumes bytes of a body; returns how many.
    fn take_body(&mut self, now: Now, bytes: &[u8]) -> usize {
        let Phase::Body(reader) = &mut self.phase else { return 0 };
        match reader.take(bytes, &mut self.body) {
            Ok(taken) => {
                if reader.is_done() {
                    self.more = taken < bytes.len();
                    self.attempt_gathered(now);
                }
                taken
            }
            Err(error) => {
                self.refuse(now, error, is_head_request(&self.head));
                bytes.len()
            }
        }
    }

    fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// The next step when no answer is queued.
    fn advance(&mut self, now: Now) -> ConnectionAction {
        let overdue = now.mono >= self.deadline;
        match &self.phase {
            Phase::Over => return ConnectionAction::Close,
            // A client that closed its side no longer waits for a change.
            Phase::Parked(_) if self.ended => return ConnectionAction::Close,
            Phase::Held { .. } | Phase::Parked(_) => self.attempt_gathered(now),
            Phase::Head if self.head.is_empty() && (self.ended || overdue) => return ConnectionAction::Close,
            Phase::Head | Phase::Body(_) if self.ended || overdue => {
                let error = if self.ended { RequestError::Truncated } else { RequestError::Timeout };
                self.refuse(now, error, is_head_request(&self.head));
            }
            Phase::Head | Phase::Body(_) => return ConnectionAction::Wait { until: Some(self.deadline) },
        }
        match &self.phase {
            Phase::Held { retry_at, .. } => ConnectionAction::Wait { until: Some(*retry_at) },
            Phase::Parked(parked) => ConnectionAction::Wait { until: Some(parked.until) },
            Phase::Over if !self.is_sending() => ConnectionAction::Close,
            _ => self.send_next(now),
        }
    }

    /// How long the connection may stay open without a request.
    fn idle_limit(&self) -> Duration {
        if self.leaves_by.is_some() { LAST_CALL } else { IDLE }
    }

    /// Passes the next piece to the stack.
    fn send_next(&mut self, now: Now) -> ConnectionAction {
        let piece = self.sending.take().unwrap_or_default();
        if !self.is_sending() && matches!(self.phase, Phase::Head) {
            self.deadline = now.mono + self.idle_limit();
        }
        match self.hop_limit {
            Some(hop_limit) => ConnectionAction::SendWithin { bytes: piece, hop_limit },
            None => ConnectionAction::Send(piece),
        }
    }
}

impl<A: AnswerSource> Exchange for HttpConnection<A> {
    fn receive(&mut self, now: Now, bytes: &[u8]) -> usize {
        if self.is_sending() {
            return 0;
        }
        let taken = match self.phase {
            Phase::Head => self.take_head(now, bytes),
            Phase::Body(_) => self.take_body(now, bytes),
            Phase::Held { .. } | Phase::Parked(_) | Phase::Over => return 0,
        };
        // Most requests are answered by now, and their buffers are gone.
        if !self.is_sending() {
            self.keep(now);
        }
        taken
    }

    fn touch(&self) -> u64 {
        let Self { head, body, sending, wait, more, .. } = self;
        (head.capacity() ^ body.capacity()) as u64 ^ u64::from(wait.is_some() ^ *more ^ sending.is_some())
    }

    fn finish(&mut self, _: Now) {
        self.ended = true;
    }

    fn next(&mut self, now: Now) -> ConnectionAction {
        if self.is_sending() { self.send_next(now) } else { self.advance(now) }
    }

    fn drain(&mut self, now: Now, until: Duration) {
        let idle_since = self.deadline.saturating_sub(self.idle_limit());
        self.leaves_by = Some(until);
        match &mut self.phase {
            Phase::Parked(parked) => parked.until = parked.until.min(latest(parked, now, until)),
            Phase::Held { give_up, .. } => *give_up = until.min(*give_up),
            Phase::Head if self.head.is_empty() => {
                self.deadline = self.deadline.min(idle_since + LAST_CALL).min(until);
            }
            Phase::Head | Phase::Body(_) => self.deadline = self.deadline.min(until),
            Phase::Over => {}
        }
    }

    fn resume(&mut self) {
        let idle_since = self.deadline.saturating_sub(self.idle_limit());
        self.leaves_by = None;
        if self.is_idle() {
            self.deadline = idle_since + self.idle_limit();
        }
    }

    fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Head) && self.head.is_empty() && !self.is_sending() && !self.stirs
    }

    fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Held { .. } | Phase::Parked(_))
    }

    fn stirs(&mut self) -> bool {
        std::mem::take(&mut self.stirs)
    }
}

// What an exchange still has to pass to the stack.

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The output of an exchange. The pieces of an answer stay where the response has them, so that an answer needs no
/// queue of its own.
#[derive(Default)]
pub(super) enum ConnectionOutput {
    /// No output.
    #[default]
    Nothing,
    /// `100 Continue` (RFC 9110 §15.2.1).
    Continue,
    /// An answer of `count` pieces, of which `next` is the next: the head, its tail, and the pieces of the body.
    Answer { response: Response, tail: Bytes, next: usize, count: usize },
}

impl ConnectionOutput {
    /// An answer, with the tail of its head.
    pub(super) fn answer(response: Response, tail: Bytes, without_body: bool) -> Self {
        let body = response.body();
        let pieces = if without_body || body.is_empty() { 0 } else { body.pieces().len() };
        Self::Answer { response, tail, next: 0, count: 2 + pieces }
    }

    /// Takes the next piece.
    pub(super) fn take(&mut self) -> Option<Bytes> {
        let (piece, is_last) = match self {
            Self::Nothing => return None,
            Self::Continue => (Bytes::from_static(CONTINUE), true),
            Self::Answer { response, tail, next, count } => {
                let piece = match *next {
                    0 => response.head().clone(),
                    1 => std::mem::take(tail),
                    at => response.body().pieces().get(at - 2).cloned().unwrap_or_default(),
                };
                *next += 1;
                (piece, next == count)
            }
        };
        if is_last {
            *self = Self::Nothing;
        }
        Some(piece)
    }

    /// Whether there is output.
    pub(super) fn is_some(&self) -> bool {
        !matches!(self, Self::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use metadata_content::http::{Body, Response, StatusCode};

    use super::{CONTINUE, ConnectionOutput};

    fn all(mut sending: ConnectionOutput) -> Vec<Bytes> {
        let pieces = std::iter::from_fn(|| sending.take()).collect();
        assert!(!sending.is_some());
        pieces
    }

    #[test]
    fn an_answer_is_its_head_the_tail_and_the_pieces_of_its_body() {
        let tail = Bytes::from_static(b"tail");
        for (pieces, without_body, expected) in [
            (&["a", "b", "c"][..], false, &["a", "b", "c"][..]),
            (&["a"], false, &["a"]),
            (&["a", "b"], true, &[]),
            (&[], false, &[]),
        ] {
            let body = Body::join(pieces.iter().map(|piece| Bytes::from_static(piece.as_bytes())));
            let response = Response::new(StatusCode(200), None, &[], body);
            let head = response.head().clone();
            let found = all(ConnectionOutput::answer(response, tail.clone(), without_body));
            assert_eq!(found[..2], [head, tail.clone()]);
            assert_eq!(found[2..], *expected, "{pieces:?}, without body: {without_body}");
        }
    }

    #[test]
    fn a_continue_is_one_piece() {
        assert_eq!(all(ConnectionOutput::Continue), [CONTINUE]);
        assert!(all(ConnectionOutput::Nothing).is_empty());
    }
}
