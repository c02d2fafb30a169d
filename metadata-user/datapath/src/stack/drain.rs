//! Leaving: what is going on is brought to its end, and nothing new is kept going.
//!
//! A stack that drains gives each of its flows to [`Claims`] (an agent that takes over then knows whose they are),
//! later ones before anything is said on them. Without claims nobody takes over, and connections that would begin are
//! left to whoever comes next: their guests repeat what they said. Exchanges are told ([`Exchange::drain`]): they close after their
//! answer, or at once when the guest asks nothing. What is not over in time is cut off.

use std::time::Duration;

use super::Stack;
use super::arrivals::Source;
use super::connection::Conn;
use super::emit::Header;
use super::ledger::Ledger;
use super::seam::{Exchange, Service, Transmit};
use super::segment::{FIN, RST, Segment};
use metadata_base::time::Now;

/// How long guests are served to their end by an agent that another has taken over from. Long enough for what
/// is answered within a minute by any client's patience, and for 1 MiB at 40 KiB/s.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// The part of the time to drain at the end of which no exchange begins an answer: it is left for TCP to
/// deliver what has been said.
const LAST_WORDS: u32 = 4;

/// The part of the time to drain at the end of which no connection begins: a guest that uses the port of a connection that
/// was claimed gets to the next agent when it repeats itself. What began before has the time of any request that is
/// held.
const LAST_GUESTS: u32 = 2;

/// The same as for [`LAST_WORDS`], at most.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// Who is told which flows are still this stack's.
pub trait Claims {
    /// A flow ([`Flow::number`](metadata_common::cookie::Flow::number)) belongs to this stack until its end. A claim
    /// that cannot be entered is counted where it is entered: nothing can be done about it here.
    fn claim(&mut self, flow: u64);

    /// A flow that may have been claimed is the next agent's from now on.
    fn renounce(&mut self, flow: u64);
}

/// A drain under way.
pub(super) struct Draining {
    claims: Option<Box<dyn Claims + Send>>,
    /// When the last connection may begin.
    admits: Duration,
    /// When exchanges must have said their last.
    until: Duration,
    /// When what is left is cut off.
    pub(super) end: Duration,
}

impl<S: Service, L: Ledger> Stack<S, L> {
    /// Begins to drain: claims every flow, those in TIME-WAIT last, and tells every exchange. Without `claims` no connection
    /// is made any more. What is left after
    /// `limit` is reset. Connections that rest get their turn with the next [`step`](Self::step).
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

    /// Goes on as before: whoever was to take over has not. What was closed stays closed.
    pub fn resume(&mut self) {
        if self.draining.take().is_some() {
            for at in 0..self.table.span() {
                self.table.get_mut(at).into_iter().for_each(Conn::resume);
            }
        }
    }

    /// Connections with something left to say or to hear. Those whose guest has yet to close its side, with nothing
    /// to hear after that, are not among them.
    #[must_use]
    pub fn left(&self) -> usize {
        self.table.held() - self.lingering
    }

    /// From now on what is not known here may be another agent's: `true` resets none of it, and acknowledges a
    /// FIN, which is all a guest that closes wants to hear. `false` ends that.
    pub fn spare_unknown(&mut self, spare: bool) {
        self.spares = spare;
    }

    /// True when a connection that would begin is left to the next agent.
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

    /// A connection is being made: it is claimed before anything is said on it.
    pub(super) fn claim(&mut self, now: Now, flow: u64, exchange: &mut S::Exchange) {
        if let Some(draining) = &mut self.draining {
            draining.claims.iter_mut().for_each(|claims| claims.claim(flow));
            exchange.drain(now, draining.until);
        }
    }

    /// A segment that would be reset, did it not belong to another agent, or to one that has just gone.
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
