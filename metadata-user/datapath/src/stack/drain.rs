//! Drains a stack: current connections are brought to an end, and a new one is closed as soon as possible or left to
//! the next agent.
//!
//! A draining stack gives each of its flows to [`Claims`], so that the agent that takes over knows which flows to
//! leave alone. A flow that starts later is claimed before anything is sent on it. Without claims no agent takes
//! over, and new connections are left to the next agent: their guests retransmit. Each exchange is notified
//! ([`Exchange::drain`]) and closes after its answer, or at once if the guest has no request. Connections that remain
//! at the limit are reset.

use std::time::Duration;

use super::Stack;
use super::arrivals::Source;
use super::connection::Conn;
use super::emit::Header;
use super::ledger::Ledger;
use super::seam::{Exchange, Service, Transmit};
use super::segment::{FIN, RST, Segment};
use metadata_base::time::Now;

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
pub trait Claims {
    /// Claims a flow ([`Flow::number`](metadata_common::cookie::Flow::number)) for this stack until its connection
    /// ends. The implementation counts claims that it cannot store; the stack cannot handle them.
    fn claim(&mut self, flow: u64);

    /// Leaves a flow that may have been claimed to the next agent.
    fn renounce(&mut self, flow: u64);
}

/// A drain in progress.
pub(super) struct Draining {
    claims: Option<Box<dyn Claims + Send>>,
    /// When the last connection may start.
    admits: Duration,
    /// When exchanges must have sent their last output.
    until: Duration,
    /// When the remaining connections are reset.
    pub(super) end: Duration,
}

impl<S: Service, L: Ledger> Stack<S, L> {
    /// Starts to drain: claims every flow, those in TIME-WAIT last, and notifies every exchange. Without `claims` no
    /// new connection is accepted. Connections that remain after `limit` are reset. Idle connections get their turn
    /// in the next [`step`](Self::step).
    pub fn drain(&mut self, now: Now, limit: Duration, mut claims: Option<Box<dyn Claims + Send>>) {
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
        self.draining = Some(Draining { claims, admits, until, end });
    }

    /// Cancels the drain, because no agent has taken over. Closed connections stay closed.
    pub fn resume(&mut self) {
        if self.draining.take().is_some() {
            for at in 0..self.table.span() {
                self.table.get_mut(at).into_iter().for_each(Conn::resume);
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
    pub(super) fn leave_alone(&mut self, source: Source, segment: &Segment<'_>, out: &mut dyn Transmit) {
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
