//! The connections of one guest, by number.

use metadata_common::maps::Slot;
use metadata_common::time::Now;
use std::collections::VecDeque;
use std::time::Duration;

use super::Stack;
use super::arrivals::SegmentContext;
use super::connection::StackConnection;
use super::emit::Header;
use super::frame::{FIN, RST, Segment};
use super::interfaces::{AckLedger, Exchange, Service, Transmit};

/// The connections and recently closed flows of one slot.
pub(super) struct PortConnections {
    /// Connection numbers in the table.
    pub(super) conns: Vec<u32>,
    /// Flows in TIME-WAIT in the order of entry, each with its expiry unless that was extended later.
    pub(super) waits: VecDeque<(u64, Duration)>,
    /// When the last frame of no connection arrived, or the last connection ended.
    pub(super) heard: Duration,
    /// When waiting connections get another turn after a stir.
    pub(super) stir_at: Option<Duration>,
    /// Until when the link is assumed to be narrower than its device's MTU
    /// ([`NARROW_FOR`](super::config::NARROW_FOR)).
    pub(super) narrow_until: Option<Duration>,
    /// When the port's timer fires; `None` if it is not set.
    pub(super) timer: Option<Duration>,
    /// The port has deferred output, and `owing` has returned it or will.
    pub(super) owes: bool,
}

impl PortConnections {
    /// When the port is freed if it stays without connections. It is kept until its link width expires.
    pub(super) fn idle_at(&self, idle: Duration) -> Duration {
        (self.heard + idle).max(self.narrow_until.unwrap_or_default())
    }

    /// Whether long segments to this port are assumed to be lost.
    pub(super) fn is_narrow(&self, now: Duration) -> bool {
        self.narrow_until.is_some_and(|until| now < until)
    }

    /// When the port itself needs attention, apart from its connections.
    pub(super) fn deadline(&self, idle: Duration) -> Option<Duration> {
        let idle = self.conns.is_empty().then(|| self.idle_at(idle));
        let wait = self.waits.front().map(|(_, until)| *until);
        idle.into_iter().chain(self.stir_at).chain(wait).min()
    }
}

/// Ports by slot: a table with one entry per slot, filled when a guest sends a frame.
pub(super) struct PortTable {
    table: Vec<Option<Box<PortConnections>>>,
    held: usize,
    limit: usize,
}

impl PortTable {
    pub(super) fn new(slots: u32, limit: usize) -> Self {
        Self { table: (0..slots).map(|_| None).collect(), held: 0, limit }
    }

    pub(super) fn admits(&self, slot: Slot) -> bool {
        (slot as usize) < self.table.len()
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&PortConnections> {
        self.table.get(slot as usize)?.as_deref()
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut PortConnections> {
        self.table.get_mut(slot as usize)?.as_deref_mut()
    }

    /// Whether `slot` has a port or can get one without evicting another.
    pub(super) fn has_room(&self, slot: Slot) -> bool {
        self.held < self.limit || self.get(slot).is_some()
    }

    /// The port of an admitted slot; creates it if there is none.
    pub(super) fn get_or_make(&mut self, slot: Slot, now: Duration) -> &mut PortConnections {
        let entry = &mut self.table[slot as usize];
        self.held += usize::from(entry.is_none());
        entry.get_or_insert_with(|| {
            Box::new(PortConnections {
                conns: Vec::new(),
                waits: VecDeque::new(),
                heard: now,
                stir_at: None,
                narrow_until: None,
                timer: None,
                owes: false,
            })
        })
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Box<PortConnections>> {
        let port = self.table.get_mut(slot as usize)?.take()?;
        self.held -= 1;
        Some(port)
    }

    /// The slot without connections that has been idle longest, else one with only idle connections; `idle` counts a
    /// slot's idle connections. Scans the whole table, but only at the limit, which by default is the number of
    /// slots.
    pub(super) fn longest_idle(&self, idle: impl Fn(Slot) -> usize) -> Option<Slot> {
        let idle = self.table.iter().enumerate().filter_map(|(slot, port)| {
            let (slot, port) = (slot as Slot, port.as_ref()?);
            (port.conns.len() == idle(slot)).then_some((!port.conns.is_empty(), port.heard, slot))
        });
        idle.min().map(|(.., slot)| slot)
    }
}

// Drains a stack: current connections are brought to an end, and a new one is closed as soon as possible or left to
// the next agent.
//
// A draining stack gives each of its flows to [`ServedFlows`], so that the agent that takes over knows which flows to
// leave alone. A flow that starts later is claimed before anything is sent on it. Without claims no agent takes
// over, and new connections are left to the next agent: their guests retransmit. Each exchange is notified
// ([`Exchange::drain`]) and closes after its answer, or at once if the guest has no request. Connections that remain
// at the limit are reset.

/// How long an agent serves its remaining connections after another agent has taken over. Long enough for most
/// clients' timeouts, and for 1 MiB at 40 KiB/s.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// Divisor of the drain time. In the last part, one quarter, no exchange starts an answer, so that TCP can deliver
/// what is already queued.
const LAST_WORDS: u32 = 4;

/// Divisor of the drain time. In the last part, one half, no connection starts. A guest that reuses the port of a
/// claimed connection then reaches the next agent with its retransmission. Earlier connections have at least this
/// part of the time for a held request.
const LAST_GUESTS: u32 = 2;

/// Upper limit of the part given by [`LAST_WORDS`].
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// Receives the flows that this stack still serves.
pub trait ServedFlows {
    /// Claims a flow ([`Flow::number`](metadata_common::cookie::Flow::number)) for this stack until its connection
    /// ends. The implementation counts claims that it cannot store; the stack cannot handle them.
    fn claim(&mut self, flow: u64);

    /// Leaves a flow that may have been claimed to the next agent.
    fn renounce(&mut self, flow: u64);
}

/// A drain in progress.
pub(super) struct DrainState {
    claims: Option<Box<dyn ServedFlows + Send>>,
    /// When the last connection may start.
    admits: Duration,
    /// When exchanges must have sent their last output.
    until: Duration,
    /// When the remaining connections are reset.
    pub(super) end: Duration,
}

impl<S: Service, L: AckLedger> Stack<S, L> {
    /// Starts to drain: claims every flow, those in TIME-WAIT last, and notifies every exchange. Without `claims` no
    /// new connection is accepted. Connections that remain after `limit` are reset. Idle connections get their turn
    /// in the next [`step`](Self::step).
    pub fn drain(&mut self, now: Now, limit: Duration, mut claims: Option<Box<dyn ServedFlows + Send>>) {
        let end = now.mono + limit;
        let until = end - (limit / LAST_WORDS).min(LAST_WORDS_MAX);
        for at in 0..self.table.span() {
            let Some(conn) = self.table.get_mut(at) else { continue };
            claims.iter_mut().for_each(|claims| claims.claim(conn.flow.number()));
            conn.drain(now, until);
            self.wheel.set(at, now.mono);
        }
        if let Some(claims) = &mut claims {
            self.table.waiting().for_each(|flow| claims.claim(flow));
        }
        let admits = end - limit / LAST_GUESTS;
        self.draining = Some(DrainState { claims, admits, until, end });
    }

    /// Cancels the drain, because no agent has taken over. Closed connections stay closed.
    pub fn resume(&mut self) {
        if self.draining.take().is_some() {
            for at in 0..self.table.span() {
                self.table.get_mut(at).into_iter().for_each(StackConnection::resume);
            }
        }
    }

    /// The number of connections with output to send or input to expect. Connections that wait only for the guest's
    /// FIN do not count.
    #[must_use]
    pub fn left(&self) -> usize {
        self.table.held() - self.lingering
    }

    /// Sets whether unknown connections may belong to another agent. If `true`, the stack resets none of them, and
    /// acknowledges a FIN so that a guest can close.
    pub fn spare_unknown(&mut self, spare: bool) {
        self.spares = spare;
    }

    /// Whether a new connection is left to the next agent.
    pub(super) fn turns_away(&mut self, now: Now, flow: u64) -> bool {
        let away = self.draining.as_mut().is_some_and(|draining| match &mut draining.claims {
            None => true,
            Some(_) if now.mono < draining.admits => false,
            Some(claims) => {
                claims.renounce(flow);
                true
            }
        });
        self.stats.refused_leaving += u64::from(away);
        away
    }

    /// Claims the flow of a new connection before anything is sent on it.
    pub(super) fn claim(&mut self, now: Now, flow: u64, exchange: &mut S::Exchange) {
        if let Some(draining) = &mut self.draining {
            draining.claims.iter_mut().for_each(|claims| claims.claim(flow));
            exchange.drain(now, draining.until);
        }
    }

    /// Processes a segment that would be reset if it could not belong to another agent, running or just stopped.
    pub(super) fn leave_alone(
        &mut self,
        source: SegmentContext,
        segment: &Segment<'_>,
        out: &mut dyn Transmit,
    ) {
        if segment.has(RST) {
            return;
        }
        self.stats.spared += 1;
        if let Some(seq) = segment.ack.filter(|_| segment.has(FIN)) {
            let ack = Some(segment.seq.wrapping_add(segment.length()));
            let answer = Header { seq, ack, flags: 0, window: 0, options: &[] };
            self.workshop.send(out, |frame| answer.emit(&segment.tuple, source.route, frame));
        }
    }
}
