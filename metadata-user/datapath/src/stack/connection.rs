//! One TCP connection and the exchange over it.

use metadata_common::answer::WINDOW;
use metadata_common::cookie::Flow;
use metadata_common::maps::{AllSent, FIN_ENDS, FIN_ENDS_BOTH, FIN_IS_NEWS, Slot};
use std::time::Duration;

use super::frame::{RST, Segment};
use super::interfaces::{AckLedger, DisplacedConnection, KernelReceipt};
use super::interfaces::{ConnectionAction, Exchange};
use super::interfaces::{PIECES_PER_CONNECTION, RECEIVE_BUFFER, SEND_AHEAD};
use super::receive::SegmentOutcome;
use super::send::FrameWriter;
use super::table::Numbers;
use super::tcb::Tcb;
use metadata_common::time::Now;

/// Limit of exchange steps for one frame or timer: far more than a full receive buffer of the shortest requests
/// needs. The next turn runs the rest.
const STEPS_PER_TURN: usize = 2048;

/// Delay before a turn that reached its limit continues, and the least time between two timers.
const NEXT_TURN: Duration = Duration::from_millis(1);

const _: () = assert!(PIECES_PER_CONNECTION < STEPS_PER_TURN);

/// The kernel programs offer this window on our behalf.
const _: () = assert!(RECEIVE_BUFFER == WINDOW as usize);

/// Why a connection gets a turn.
#[derive(Clone, Copy)]
pub(super) enum TurnCause<'a> {
    /// A segment of the connection arrived.
    Segment(&'a Segment<'a>),
    /// The connection's deadline passed.
    Timer,
    /// Something the exchange may wait for has changed.
    Change,
    /// The connection may send its deferred output.
    Allowance,
}

/// The state of a connection after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionState {
    /// The connection stays open.
    Live,
    /// The connection has ended with a reset.
    Gone,
    /// Both sides have closed; the numbers go to TIME-WAIT.
    Closed(Numbers),
}

/// The effects of a turn, for the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TurnEffects {
    pub(super) aborted: bool,
    pub(super) stalled: bool,
    /// Data in flight counts as lost, because its acknowledgement is overdue.
    pub(super) timed_out: bool,
    /// The connection did not end within the drain's limit.
    pub(super) cut: bool,
    /// The exchange changed something that other exchanges of its slot may wait for.
    pub(super) stirred: bool,
    /// The connection whose ledger entry this one replaced.
    pub(super) displaced: Option<DisplacedConnection>,
}

/// How a connection is ranked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ConnectionRank {
    /// All output is acknowledged, and the exchange waits for the guest's next request or FIN.
    pub(super) idle: bool,
    /// The connection waits only for the guest's FIN.
    pub(super) lingers: bool,
    /// The connection has deferred output.
    pub(super) owes: bool,
}

/// What a turn needs besides the connection.
pub(super) struct TurnContext<'a, L> {
    pub(super) now: Now,
    pub(super) ledger: &'a mut L,
    pub(super) outlet: FrameWriter<'a>,
    /// When a drain cuts off the remaining connections.
    pub(super) end: Option<Duration>,
}

/// A connection and its exchange.
pub(super) struct StackConnection<E> {
    pub(super) tcb: Tcb,
    pub(super) flow: Flow,
    pub(super) slot: Slot,
    /// The index among its port's connections.
    pub(super) place: usize,
    /// When the connection next needs a turn.
    pub(super) deadline: Option<Duration>,
    /// The last rating.
    pub(super) rated: ConnectionRank,
    /// The connection has deferred output.
    owes: bool,
    exchange: E,
    /// Set while the exchange has nothing to send: the time of its next call, if it asked for one.
    waiting: Option<Option<Duration>>,
    /// The exchange was notified of the guest's FIN.
    finish_passed: bool,
    /// The last ledger entry: our next number, the guest's, and what the guest's FIN means.
    posted: Option<(u32, u32, u16)>,
}

impl<E: Exchange> StackConnection<E> {
    /// Creates a connection whose first segment is processed next.
    pub(super) fn new(tcb: Tcb, flow: Flow, slot: Slot, place: usize, exchange: E) -> Self {
        Self {
            tcb,
            flow,
            slot,
            place,
            deadline: None,
            rated: ConnectionRank::default(),
            owes: false,
            exchange,
            waiting: None,
            finish_passed: false,
            posted: None,
        }
    }

    /// Reads fields on most of the connection's cache lines.
    pub(super) fn touch(&self) -> u64 {
        let Self { tcb, flow, place, posted, exchange, .. } = self;
        let posted = posted.map_or(0, |(sent, ..)| sent);
        let numbers = tcb.una ^ tcb.rcv ^ tcb.initial.0 ^ tcb.outbox.end() ^ posted;
        let times = tcb.timer.unwrap_or_default() + tcb.progress;
        flow.number()
            ^ u64::from(numbers)
            ^ times.as_secs()
            ^ *place as u64
            ^ tcb.outbox.touch()
            ^ exchange.touch()
    }

    /// Whether the exchange waits with nothing to send, so that a turn may change something.
    pub(super) fn waits(&self) -> bool {
        self.waiting.is_some() && !self.tcb.closing
    }

    /// The current rating.
    pub(super) fn rating(&self) -> ConnectionRank {
        let lingers = self.lingers();
        let idle = self.tcb.una == self.tcb.max && (lingers || (self.waits() && self.exchange.is_idle()));
        ConnectionRank { idle, lingers, owes: self.owes }
    }

    /// Notifies the exchange of a drain and makes the connection due.
    pub(super) fn drain(&mut self, now: Now, until: Duration) {
        self.exchange.drain(now, until);
        self.deadline = Some(now.mono);
        self.waiting = self.waiting.map(|_| Some(now.mono));
    }

    /// Notifies the exchange that the drain is cancelled.
    pub(super) fn resume(&mut self) {
        self.exchange.resume();
    }

    /// Whether the connection waits only for the guest's FIN.
    pub(super) fn lingers(&self) -> bool {
        self.tcb.is_fin_acknowledged()
    }

    /// Whether the exchange holds a complete request that waits for its answer.
    pub(super) fn holds_a_request(&self) -> bool {
        self.exchange.is_waiting()
    }

    /// Whether the guest may have ended the connection with the kernel's help, unseen by the stack.
    pub(super) fn may_be_over(&self) -> bool {
        self.posted.is_some_and(|(.., finished)| finished != FIN_IS_NEWS)
            || (self.tcb.closing && self.tcb.guest_finished)
    }

    /// Runs one turn: processes the segment, runs the exchange, sends, and sets the next deadline.
    pub(super) fn turn<L: AckLedger>(
        &mut self,
        scene: &mut TurnContext<'_, L>,
        cause: TurnCause<'_>,
    ) -> (ConnectionState, TurnEffects) {
        let now = scene.now.mono;
        let mut turn = TurnEffects::default();
        let mut payload: &[u8] = &[];
        let mut due = true;
        match cause {
            TurnCause::Segment(segment) => {
                if self.posted.is_some() && segment.length() > 0 {
                    // The kernel may have consumed the acknowledgement that arrived in time.
                    self.tcb.recovery.forget_timing();
                }
                if self.answers_the_kernels_fin(segment) {
                    self.tcb.finished_by_proxy(now);
                    self.tcb.finished(now);
                    return (ConnectionState::Closed(self.numbers()), turn);
                }
                match self.tcb.arrived(segment, now) {
                    SegmentOutcome::Reset => return (ConnectionState::Gone, turn),
                    SegmentOutcome::Taken(bytes) => payload = bytes,
                }
                let finished = self.tcb.guest_finished && !self.finish_passed;
                due = self.waiting.is_none() || !payload.is_empty() || finished;
            }
            TurnCause::Timer => {
                self.hear(scene.ledger, now);
                due = self.waiting.is_none_or(|until| until.is_some_and(|until| until <= now));
            }
            TurnCause::Change => {}
            TurnCause::Allowance => due = self.waiting.is_none(),
        }
        let overdue = |conn: &Self| conn.tcb.timeout_at().is_some_and(|limit| limit <= now);
        if overdue(self) && self.hear(scene.ledger, now).is_none() && overdue(self) {
            turn.stalled = true;
            self.tcb.reset(&mut scene.outlet);
            return (ConnectionState::Gone, turn);
        }
        if scene.end.is_some_and(|end| end <= now) {
            // A guest that has acknowledged our FIN needs no reset.
            turn.cut = !self.lingers();
            if turn.cut {
                self.tcb.reset(&mut scene.outlet);
            }
            return (ConnectionState::Gone, turn);
        }
        let mut complete = true;
        if due && !self.tcb.closing {
            complete = self.converse(scene.now, payload, &mut turn);
            turn.stirred = self.exchange.stirs();
            if turn.aborted {
                self.tcb.reset(&mut scene.outlet);
                return (ConnectionState::Gone, turn);
            }
        }
        turn.timed_out = self.tcb.expire(now, &mut scene.outlet);
        if self.tcb.recovery.is_unheard() {
            scene.ledger.withdraw(self.flow);
        }
        let rests = self.waiting.is_some() || self.tcb.closing;
        let idle = self.waiting.is_some() && self.exchange.is_idle();
        let Self { tcb, flow, posted, .. } = self;
        let mut post = |tcb: &Tcb| {
            let is_posted = rests && !tcb.recovery.is_unheard();
            let entry = is_posted.then(|| all_sent(tcb, *flow, idle)).flatten();
            if let Some(entry) = entry
                && *posted != Some((entry.sent, entry.received, entry.finished))
            {
                *posted = Some((entry.sent, entry.received, entry.finished));
                turn.displaced = scene.ledger.post(*flow, entry).or(turn.displaced);
            }
        };
        let put_off = !tcb.output(now, &mut scene.outlet, &mut post);
        if tcb.is_over() {
            return (ConnectionState::Closed(self.numbers()), turn);
        }
        post(tcb);
        self.owes = put_off;
        self.deadline = self.next_deadline(scene, complete);
        (ConnectionState::Live, turn)
    }

    /// Whether the segment acknowledges a FIN that only the kernel can have sent. Another connection may have
    /// displaced the ledger entry that recorded it.
    fn answers_the_kernels_fin(&self, segment: &Segment<'_>) -> bool {
        let Tcb { max, rcv, .. } = self.tcb;
        self.posted == Some((max, rcv, FIN_ENDS_BOTH))
            && segment.ack == Some(max.wrapping_add(1))
            && segment.seq == rcv.wrapping_add(1)
            && segment.length() == 0
            && !segment.has(RST)
    }

    fn next_deadline<L>(&self, scene: &TurnContext<'_, L>, complete: bool) -> Option<Duration> {
        let now = scene.now.mono;
        let until = self.waiting.flatten().filter(|_| !self.tcb.closing);
        let cut = (!complete).then_some(now);
        let wishes = [self.tcb.timer, self.tcb.timeout_at(), until, cut, scene.end];
        wishes.into_iter().flatten().min().map(|at| at.max(now + NEXT_TURN))
    }

    /// The numbers to remember once the connection is over.
    pub(super) fn numbers(&self) -> Numbers {
        let Tcb { max, rcv, initial, .. } = self.tcb;
        Numbers { next: (max, rcv), initial }
    }

    /// Reads the connection's ledger entry. Returns the numbers to remember if both sides have closed.
    pub(super) fn hear<L: AckLedger>(&mut self, ledger: &L, now: Duration) -> Option<Numbers> {
        self.posted?;
        self.heard(ledger.look(self.flow)?, now)
    }

    /// Applies the connection's ledger entry. Returns the numbers to remember if both sides have closed.
    pub(super) fn heard(&mut self, heard: KernelReceipt, now: Duration) -> Option<Numbers> {
        let (sent, received, finished) = self.posted?;
        let is_new = self.tcb.max == sent && self.tcb.rcv == received;
        if is_new && heard.acknowledged == sent && self.tcb.una != sent {
            self.tcb.recovery.forget_timing();
            self.tcb.acknowledged(sent, now);
        }
        if is_new && finished != FIN_IS_NEWS && heard.closed == sent {
            if finished == FIN_ENDS_BOTH {
                self.tcb.finished_by_proxy(now);
            } else if self.tcb.una != sent {
                self.tcb.acknowledged(sent, now);
            }
            self.tcb.finished(now);
        }
        self.tcb.is_over().then(|| self.numbers())
    }

    /// Runs the exchange until it waits for the guest, or the guest for it. Returns false if the turn reached its
    /// limit first.
    fn converse(&mut self, now: Now, payload: &[u8], turn: &mut TurnEffects) -> bool {
        let mut held = std::mem::take(&mut self.tcb.held);
        let whole = if held.is_empty() {
            payload
        } else {
            held.extend_from_slice(payload);
            &held
        };
        let mut rest = whole;
        let complete = self.steps(now, &mut rest, turn);
        // The rest is already acknowledged, so it must be kept; it is no longer than the window offered.
        if !rest.is_empty() && !self.tcb.closing {
            let taken = whole.len() - rest.len();
            if held.is_empty() {
                held = rest.to_vec();
            } else {
                held.drain(..taken);
            }
            self.tcb.held = held;
        }
        self.tcb.ack_due |= self.tcb.is_window_reopened();
        complete
    }

    fn steps(&mut self, now: Now, rest: &mut &[u8], turn: &mut TurnEffects) -> bool {
        self.waiting = None;
        self.offer(now, rest);
        for _ in 0..STEPS_PER_TURN {
            if self.tcb.queued() as usize >= SEND_AHEAD || self.tcb.outbox.is_full() {
                return true;
            }
            match self.exchange.next(now) {
                ConnectionAction::Send(bytes) => self.line_up(now, bytes, None),
                ConnectionAction::SendWithin { bytes, hop_limit } => {
                    self.line_up(now, bytes, Some(hop_limit))
                }
                ConnectionAction::Wait { until } => {
                    if !self.offer(now, rest) {
                        self.waiting = Some(until);
                        return true;
                    }
                }
                ConnectionAction::Close => {
                    self.tcb.close(now.mono);
                    return true;
                }
                ConnectionAction::Abort => {
                    turn.aborted = true;
                    return true;
                }
            }
        }
        false
    }

    fn line_up(&mut self, now: Now, bytes: bytes::Bytes, hop_limit: Option<u8>) {
        self.tcb.begins_to_wait(now.mono);
        self.tcb.outbox.push(bytes, hop_limit);
    }

    /// Offers received bytes to the exchange, then the guest's FIN. Returns true if the exchange took anything.
    fn offer(&mut self, now: Now, rest: &mut &[u8]) -> bool {
        let mut moved = false;
        while !rest.is_empty() {
            let taken = self.exchange.receive(now, rest).min(rest.len());
            if taken == 0 {
                return moved;
            }
            *rest = &rest[taken..];
            moved = true;
        }
        if self.tcb.guest_finished && !self.finish_passed {
            self.finish_passed = true;
            self.exchange.finish(now);
            moved = true;
        }
        moved
    }
}

/// The ledger entry for a connection that has sent all current output. `idle` means that the guest's FIN only needs
/// our FIN as an answer.
fn all_sent(tcb: &Tcb, flow: Flow, idle: bool) -> Option<AllSent> {
    let finished = match (tcb.guest_finished, tcb.closing) {
        (false, true) => FIN_ENDS,
        (false, false) if idle => FIN_ENDS_BOTH,
        _ => FIN_IS_NEWS,
    };
    let expects = tcb.flight() > 0 || finished != FIN_IS_NEWS;
    let nothing_yet = tcb.max.wrapping_sub(1);
    (expects && tcb.is_all_sent() && tcb.held.is_empty()).then(|| AllSent {
        flow: flow.number(),
        sent: tcb.max,
        received: tcb.rcv,
        finished,
        acknowledged: nothing_yet,
        closed: nothing_yet,
        ..AllSent::default()
    })
}
