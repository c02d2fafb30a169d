//! One TCP connection and the exchange held over it.

use metadata_common::answer::WINDOW;
use metadata_common::cookie::Flow;
use metadata_common::maps::{AllSent, FIN_ENDS, FIN_ENDS_BOTH, FIN_IS_NEWS, Slot};
use std::time::Duration;

use super::config::{PIECES_PER_CONNECTION, RECEIVE_BUFFER, SEND_AHEAD, StackConfig};
use super::ledger::{Displaced, Heard, Ledger};
use super::receive::Arrival;
use super::seam::{Exchange, Step};
use super::segment::{RST, Segment};
use super::send::Outlet;
use super::tcb::Tcb;
use super::timewait::Numbers;
use metadata_base::time::Now;

/// Exchange steps taken for one frame or timer: far more than a full receive buffer of the shortest
/// requests asks for. What is left over is done on the next turn.
const STEPS_PER_TURN: usize = 2048;

/// How soon a turn that was cut short goes on, and the least time from one timer to the next.
const NEXT_TURN: Duration = Duration::from_millis(1);

const _: () = assert!(PIECES_PER_CONNECTION < STEPS_PER_TURN);

/// The window the kernel offers for us.
const _: () = assert!(RECEIVE_BUFFER == WINDOW as usize);

/// Why a connection gets a turn.
#[derive(Clone, Copy)]
pub(super) enum Cause<'a> {
    /// A segment of it has come.
    Segment(&'a Segment<'a>),
    /// Its deadline.
    Timer,
    /// Something it may wait for has changed.
    Change,
    /// It may send what was put off.
    Allowance,
}

/// What has become of a connection after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Live,
    /// It is over, by a reset.
    Gone,
    /// Both sides have closed: what is to be remembered.
    Closed(Numbers),
}

/// What a turn did, for the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    pub(super) aborted: bool,
    pub(super) stalled: bool,
    /// Draining took too long for it.
    pub(super) cut: bool,
    /// The exchange changed something others of its slot may wait for.
    pub(super) stirred: bool,
    /// The connection whose place in the ledger this one took.
    pub(super) displaced: Option<Displaced>,
}

/// What a connection counts as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rating {
    /// All that was said is acknowledged, and it waits for its guest to ask something, or to close.
    pub(super) idle: bool,
    /// Only the guest's FIN is missing.
    pub(super) lingers: bool,
    /// Some of its output is put off.
    pub(super) owes: bool,
}

/// Everything a turn needs beside the connection.
pub(super) struct Scene<'a, L> {
    pub(super) now: Now,
    pub(super) config: &'a StackConfig,
    pub(super) ledger: &'a mut L,
    pub(super) outlet: Outlet<'a>,
    /// When whatever is left is cut off.
    pub(super) end: Option<Duration>,
}

/// A connection and its exchange.
pub(super) struct Conn<E> {
    pub(super) tcb: Tcb,
    pub(super) flow: Flow,
    pub(super) slot: Slot,
    /// Where it stands among its port's connections.
    pub(super) place: usize,
    /// When it next wants a turn.
    pub(super) deadline: Option<Duration>,
    /// As it was last rated.
    pub(super) rated: Rating,
    /// Some of its output is put off.
    owes: bool,
    exchange: E,
    /// The exchange has nothing to hand over, and asked for this moment at the latest.
    waiting: Option<Option<Duration>>,
    /// The exchange has been told that the guest has finished.
    told: bool,
    /// What the kernel was told: our next number, the guest's, and what its FIN is to us.
    posted: Option<(u32, u32, u16)>,
}

impl<E: Exchange> Conn<E> {
    /// A connection whose first segment is about to be processed.
    pub(super) fn new(tcb: Tcb, flow: Flow, slot: Slot, place: usize, exchange: E) -> Self {
        Self {
            tcb,
            flow,
            slot,
            place,
            deadline: None,
            rated: Rating::default(),
            owes: false,
            exchange,
            waiting: None,
            told: false,
            posted: None,
        }
    }

    /// True when the exchange has nothing to hand over and waits, so that a turn may make a difference.
    pub(super) fn waits(&self) -> bool {
        self.waiting.is_some() && !self.tcb.closing
    }

    /// What it counts as after what has happened to it.
    pub(super) fn rating(&self) -> Rating {
        let lingers = self.lingers();
        let idle = self.tcb.una == self.tcb.max && (lingers || (self.waits() && self.exchange.is_idle()));
        Rating { idle, lingers, owes: self.owes }
    }

    /// Tells the exchange that the service leaves, and makes it due.
    pub(super) fn drain(&mut self, now: Now, until: Duration) {
        self.exchange.drain(now, until);
        self.deadline = Some(now.mono);
        self.waiting = self.waiting.map(|_| Some(now.mono));
    }

    /// Tells the exchange that the service stays.
    pub(super) fn resume(&mut self) {
        self.exchange.resume();
    }

    /// True when only the guest's FIN is missing.
    pub(super) fn lingers(&self) -> bool {
        self.tcb.is_fin_acknowledged()
    }

    /// True when it holds a complete request that waits for its answer.
    pub(super) fn holds_a_request(&self) -> bool {
        self.exchange.is_waiting()
    }

    /// True when its guest may have ended it without our hearing.
    pub(super) fn may_be_over(&self) -> bool {
        self.posted.is_some_and(|(.., finished)| finished != FIN_IS_NEWS)
            || (self.tcb.closing && self.tcb.guest_finished)
    }

    /// One turn: takes in what has come, runs the exchange, sends, and sets the next deadline.
    pub(super) fn turn<L: Ledger>(&mut self, scene: &mut Scene<'_, L>, cause: Cause<'_>) -> (Fate, Turn) {
        let now = scene.now.mono;
        let mut turn = Turn::default();
        let mut payload: &[u8] = &[];
        let mut due = true;
        match cause {
            Cause::Segment(segment) => {
                if self.posted.is_some() && segment.length() > 0 {
                    // The kernel may have kept the acknowledgement that came in time.
                    self.tcb.recovery.forget_timing();
                }
                if self.answers_the_kernels_fin(segment) {
                    self.tcb.finished_by_proxy(now);
                    self.tcb.finished(now);
                    return (Fate::Closed(self.numbers()), turn);
                }
                match self.tcb.arrived(segment, now) {
                    Arrival::Reset => return (Fate::Gone, turn),
                    Arrival::Taken(octets) => payload = octets,
                }
                let finished = self.tcb.guest_finished && !self.told;
                due = self.waiting.is_none() || !payload.is_empty() || finished;
            }
            Cause::Timer => {
                self.hear(scene.ledger, now);
                due = self.waiting.is_none_or(|until| until.is_some_and(|until| until <= now));
            }
            Cause::Change => {}
            Cause::Allowance => due = self.waiting.is_none(),
        }
        let overdue =
            |conn: &Self| conn.tcb.patience(&scene.config.timeouts).is_some_and(|limit| limit <= now);
        if overdue(self) && self.hear(scene.ledger, now).is_none() && overdue(self) {
            turn.stalled = true;
            self.tcb.reset(&mut scene.outlet);
            return (Fate::Gone, turn);
        }
        if scene.end.is_some_and(|end| end <= now) {
            // A guest that knows of the end needs no reset.
            turn.cut = !self.lingers();
            if turn.cut {
                self.tcb.reset(&mut scene.outlet);
            }
            return (Fate::Gone, turn);
        }
        let mut complete = true;
        if due && !self.tcb.closing {
            complete = self.converse(scene.now, payload, &mut turn);
            turn.stirred = self.exchange.stirs();
            if turn.aborted {
                self.tcb.reset(&mut scene.outlet);
                return (Fate::Gone, turn);
            }
        }
        self.tcb.expire(now, &mut scene.outlet);
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
            return (Fate::Closed(self.numbers()), turn);
        }
        post(tcb);
        self.owes = put_off;
        self.deadline = self.next_deadline(scene, complete);
        (Fate::Live, turn)
    }

    /// True for what acknowledges a FIN of ours that only the kernel can have sent, whose note of it was lost to
    /// another connection.
    fn answers_the_kernels_fin(&self, segment: &Segment<'_>) -> bool {
        let Tcb { max, rcv, .. } = self.tcb;
        self.posted == Some((max, rcv, FIN_ENDS_BOTH))
            && segment.ack == Some(max.wrapping_add(1))
            && segment.seq == rcv.wrapping_add(1)
            && segment.length() == 0
            && !segment.has(RST)
    }

    fn next_deadline<L>(&self, scene: &Scene<'_, L>, complete: bool) -> Option<Duration> {
        let now = scene.now.mono;
        let until = self.waiting.flatten().filter(|_| !self.tcb.closing);
        let cut = (!complete).then_some(now);
        let wishes = [self.tcb.timer, self.tcb.patience(&scene.config.timeouts), until, cut, scene.end];
        wishes.into_iter().flatten().min().map(|at| at.max(now + NEXT_TURN))
    }

    /// What is remembered of it once it is over.
    pub(super) fn numbers(&self) -> Numbers {
        let Tcb { max, rcv, initial, .. } = self.tcb;
        Numbers { next: (max, rcv), initial }
    }

    /// Reads what the kernel has heard. Returns what is to be remembered if both sides have closed.
    pub(super) fn hear<L: Ledger>(&mut self, ledger: &L, now: Duration) -> Option<Numbers> {
        self.posted?;
        self.heard(ledger.look(self.flow)?, now)
    }

    /// Takes in what the kernel has heard. Returns what is to be remembered if both sides have closed.
    pub(super) fn heard(&mut self, heard: Heard, now: Duration) -> Option<Numbers> {
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

    /// Lets the exchange and the guest talk until one has to wait for the other. False when the turn was
    /// cut short.
    fn converse(&mut self, now: Now, payload: &[u8], turn: &mut Turn) -> bool {
        let mut held = std::mem::take(&mut self.tcb.held);
        let whole = if held.is_empty() {
            payload
        } else {
            held.extend_from_slice(payload);
            &held
        };
        let mut rest = whole;
        let complete = self.steps(now, &mut rest, turn);
        // What waits is acknowledged, so it is kept: no more than the window offered.
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

    fn steps(&mut self, now: Now, rest: &mut &[u8], turn: &mut Turn) -> bool {
        self.waiting = None;
        self.offer(now, rest);
        for _ in 0..STEPS_PER_TURN {
            if self.tcb.queued() as usize >= SEND_AHEAD || self.tcb.outbox.is_full() {
                return true;
            }
            match self.exchange.next(now) {
                Step::Send(bytes) => self.line_up(now, bytes, None),
                Step::SendWithin { bytes, hop_limit } => self.line_up(now, bytes, Some(hop_limit)),
                Step::Wait { until } => {
                    if !self.offer(now, rest) {
                        self.waiting = Some(until);
                        return true;
                    }
                }
                Step::Close => {
                    self.tcb.close(now.mono);
                    return true;
                }
                Step::Abort => {
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

    /// Offers received bytes, then the end of them. True when the exchange took anything.
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
        if self.tcb.guest_finished && !self.told {
            self.told = true;
            self.exchange.finish(now);
            moved = true;
        }
        moved
    }
}

/// What to tell the kernel when all there is to say for now is sent; `idle` when the guest's FIN would only have
/// to be answered with ours.
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
