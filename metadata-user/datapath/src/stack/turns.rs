//! Schedules turns, and removes connections and ports after them. Drains a stack.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::Stack;
use super::connection::{ConnectionRank, ConnectionState, StackConnection, TurnCause, TurnContext};
use super::frame::{FIN, RST, Segment};
use super::interfaces::{
    AckLedger, DisplacedConnection, Exchange, NARROW_FOR, PORT_IDLE, Service, TIME_WAIT, TIME_WAITS_PER_PORT,
    Transmit,
};
use super::receive::SegmentContext;
use super::send::{FrameWriter, Header};
use super::table::{Numbers, TimeWait};

/// After a connection stirs, the waiting connections of its port get at most this many rounds of turns. In the first
/// round they see its change, in the second each other's changes. A further round is due [`STIR_AGAIN`] later, so that
/// no change is missed and every loop ends.
const STIR_ROUNDS: usize = 2;

/// Delay of a further round after [`STIR_ROUNDS`].
const STIR_AGAIN: Duration = Duration::from_millis(1);

/// Limit of timers run in one step. It bounds the delay of frames; the next step runs the rest.
const TIMERS_PER_STEP: usize = 64;

/// How many connections to probe when the table is full and none is idle; the kernel may have closed some unseen.
const SWEEP: u32 = 32;

/// How many connections of a slot to probe when it opens another. Most guests open one after the other, and the
/// kernel has closed the last one unseen. The probe frees it 200 ms before its timer would, and releases its ledger
/// entry.
const PROBED: usize = 4;

impl<S: Service, L: AckLedger> Stack<S, L> {
    /// Runs what is due: retransmissions, timeouts, held requests, freeing of idle ports.
    ///
    /// Returns the latest time of the next call, by the clock of [`Now::mono`]; `None` if nothing is scheduled.
    pub fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration> {
        for _ in 0..TIMERS_PER_STEP {
            let Some(timer) = self.wheel.pop(now.mono) else { break };
            let port = (timer as usize).checked_sub(self.config.connections);
            let slot = match (port, self.table.get(timer)) {
                (Some(port), _) => port as Slot,
                (None, Some(conn)) => conn.slot,
                (None, None) => continue,
            };
            let stepped = catch_unwind(AssertUnwindSafe(|| match port {
                Some(_) => self.step_port(now, slot, out),
                None => self.step_connection(now, timer, out),
            }));
            self.contain(slot, stepped);
        }
        self.wheel.next()
    }

    /// Allows this many answer segments before output is deferred. The caller must then run [`go_on`](Self::go_on)
    /// for the slots that [`next_pending_slot`](Self::next_pending_slot) returns. Without a call of `allow` all output is sent at
    /// once.
    pub fn allow(&mut self, segments: u32) {
        self.workshop.allow(segments);
    }

    /// Returns a slot with deferred output. A slot is returned once, until [`go_on`](Self::go_on) returns false for
    /// it.
    pub fn next_pending_slot(&mut self) -> Option<Slot> {
        self.owing.pop_front()
    }

    /// Whether a slot has deferred output.
    #[must_use]
    pub fn owes(&self, slot: Slot) -> bool {
        self.ports.get(slot).is_some_and(|port| port.owes)
    }

    /// Sends a slot's deferred output as far as allowed, its connections in turn. Returns true while there is more.
    pub fn go_on(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) -> bool {
        let sent = catch_unwind(AssertUnwindSafe(|| {
            while self.workshop.may_send()
                && let Some(at) = self.owed.front(slot as usize)
            {
                self.owed.remove(slot as usize, at);
                self.owed.push(slot as usize, at);
                self.turn_and_stir(now, at, TurnCause::Allowance, out);
            }
        }));
        self.contain(slot, sent);
        let more = self.owed.front(slot as usize).is_some();
        if let Some(port) = self.ports.get_mut(slot) {
            port.owes = more;
        }
        more
    }

    fn step_connection(&mut self, now: Now, at: u32, out: &mut dyn Transmit) {
        match self.table.get(at).and_then(|conn| conn.deadline) {
            Some(deadline) if deadline <= now.mono => self.turn_and_stir(now, at, TurnCause::Timer, out),
            // The deadline has moved since the timer was set.
            Some(deadline) => self.wheel.set(at, deadline),
            None => {}
        }
    }

    fn step_port(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let idle = PORT_IDLE;
        let Some(port) = self.ports.get(slot) else { return };
        if port.conns.is_empty() && port.idle_at(idle) <= now.mono {
            return self.forget(slot);
        }
        if port.stir_at.is_some_and(|at| at <= now.mono) {
            self.wake_slot(now, slot, out);
        }
        self.expire_waits(now.mono, slot);
        let Some(port) = self.ports.get_mut(slot) else { return };
        port.timer = None;
        let deadline = port.deadline(PORT_IDLE);
        if let Some(at) = deadline {
            self.schedule_port(slot, at);
        }
    }

    fn port_timer(&self, slot: Slot) -> u32 {
        self.config.connections as u32 + slot
    }

    /// Makes sure that the port's timer fires at `at` or before. A timer that fires early only sets the next one, so a
    /// later `at` changes nothing: most requests need no change here.
    fn schedule_port(&mut self, slot: Slot, at: Duration) {
        let timer = self.port_timer(slot);
        let Some(port) = self.ports.get_mut(slot) else { return };
        if port.timer.is_none_or(|set| at < set) {
            port.timer = Some(at);
            self.wheel.set(timer, at);
        }
    }

    /// Runs a turn for a connection, then for those that wait for what it changed.
    pub(super) fn turn_and_stir(&mut self, now: Now, at: u32, cause: TurnCause<'_>, out: &mut dyn Transmit) {
        let Some(slot) = self.table.get(at).map(|conn| conn.slot) else { return };
        if self.turn(now, at, cause, out) {
            self.wake_slot(now, slot, out);
        }
    }

    /// Runs a turn for a connection and removes it if it has ended. Returns true if its exchange stirred.
    fn turn(&mut self, now: Now, at: u32, cause: TurnCause<'_>, out: &mut dyn Transmit) -> bool {
        let fits = matches!(cause, TurnCause::Timer).then(|| self.fits(now.mono, at)).flatten();
        let Self { ledger, workshop, table, ports, wheel, stats, draining, .. } = self;
        let Some(conn) = table.get_mut(at) else { return false };
        if let Some(fits) = fits {
            conn.tcb.fit(fits);
        }
        let end = draining.as_ref().map(|draining| draining.end);
        let mut scene = TurnContext { now, ledger, outlet: FrameWriter { workshop, out }, end };
        let (fate, turn) = conn.turn(&mut scene, cause);
        stats.aborted += u64::from(turn.aborted);
        stats.stalled += u64::from(turn.stalled);
        stats.timed_out += u64::from(turn.timed_out);
        stats.cut_short += u64::from(turn.cut);
        if conn.tcb.recovery.take_narrow()
            && let Some(port) = ports.get_mut(conn.slot)
        {
            port.narrow_until = Some(now.mono + NARROW_FOR);
        }
        match (fate, conn.deadline) {
            (ConnectionState::Live, deadline) => {
                if let Some(deadline) = deadline {
                    wheel.set(at, deadline);
                }
                self.rate(at);
            }
            (ConnectionState::Gone, _) => self.remove_connection(now.mono, at),
            (ConnectionState::Closed(numbers), _) => self.close(now.mono, at, numbers),
        }
        if let Some(displaced) = turn.displaced {
            self.displaced(now.mono, displaced);
        }
        turn.stirred
    }

    /// The current limit of payload bytes per segment of a connection. Its device's MTU may have changed.
    fn fits(&self, now: Duration, at: u32) -> Option<u16> {
        let conn = self.table.get(at)?;
        Some(self.largest_segment(now, conn.slot, conn.tcb.tuple.remote.0.is_ipv4()))
    }

    /// Runs a turn for each waiting connection of a slot, and repeats while they stir one another, up to
    /// [`STIR_ROUNDS`].
    pub(super) fn wake_slot(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let Some(port) = self.ports.get_mut(slot) else { return };
        port.stir_at = None;
        for _ in 0..STIR_ROUNDS {
            let mut stirred = false;
            // Backwards, because the last connection takes the place of a removed one.
            let count = self.ports.get(slot).map_or(0, |port| port.conns.len());
            for place in (0..count).rev() {
                let at = self.ports.get(slot).and_then(|port| port.conns.get(place).copied());
                let Some(at) = at.filter(|at| self.table.get(*at).is_some_and(StackConnection::waits)) else {
                    continue;
                };
                self.stats.woken += 1;
                stirred |= self.turn(now, at, TurnCause::Change, out);
            }
            if !stirred {
                return;
            }
        }
        if let Some(port) = self.ports.get_mut(slot) {
            let at = now.mono + STIR_AGAIN;
            port.stir_at = Some(at);
            self.schedule_port(slot, at);
        }
    }

    /// Removes a connection without sending anything.
    pub(super) fn remove_connection(&mut self, now: Duration, at: u32) {
        let Some(conn) = self.table.remove(at) else { return };
        self.wheel.clear(at);
        self.ledger.release(conn.flow);
        self.unrate(conn.slot, at, conn.rated);
        let Some(port) = self.ports.get_mut(conn.slot) else { return };
        port.conns.swap_remove(conn.place);
        self.held.set(conn.slot, port.conns.len());
        if let Some(moved) = port.conns.get(conn.place).and_then(|at| self.table.get_mut(*at)) {
            moved.place = conn.place;
        }
        if port.conns.is_empty() {
            port.heard = now;
            let at = port.idle_at(PORT_IDLE);
            self.schedule_port(conn.slot, at);
        }
    }

    /// Removes a connection that both sides have closed, and remembers its numbers in TIME-WAIT.
    fn close(&mut self, now: Duration, at: u32, numbers: Numbers) {
        let Some((flow, slot)) = self.table.get(at).map(|conn| (conn.flow, conn.slot)) else { return };
        self.remove_connection(now, at);
        self.expire_waits(now, slot);
        let Some(port) = self.ports.get_mut(slot) else { return };
        if port.waits.len() >= TIME_WAITS_PER_PORT
            && let Some((oldest, _)) = port.waits.pop_front()
        {
            self.table.forget(oldest);
        }
        let until = now + TIME_WAIT;
        if self.table.remember(flow, TimeWait { until, numbers, reopened: false }) {
            port.waits.push_back((flow.number(), until));
            self.schedule_port(slot, until);
        }
    }

    /// Forgets a four-tuple in TIME-WAIT, if it is remembered.
    pub(super) fn forget_wait(&mut self, slot: Slot, flow: Flow) {
        if self.table.forget(flow.number())
            && let Some(port) = self.ports.get_mut(slot)
        {
            port.waits.retain(|(known, _)| *known != flow.number());
        }
    }

    fn expire_waits(&mut self, now: Duration, slot: Slot) {
        let Some(port) = self.ports.get_mut(slot) else { return };
        while let Some((oldest, _)) = port.waits.pop_front_if(|(_, until)| *until <= now) {
            match self.table.wait(oldest).filter(|wait| wait.until > now) {
                Some(wait) => port.waits.push_back((oldest, wait.until)),
                None => _ = self.table.forget(oldest),
            }
        }
    }

    /// Drops all state of a slot. Nothing is sent, because the guest is gone.
    pub fn forget(&mut self, slot: Slot) {
        let Some(port) = self.ports.remove(slot) else { return };
        for at in port.conns {
            if let Some(conn) = self.table.remove(at) {
                self.wheel.clear(at);
                self.ledger.release(conn.flow);
                self.unrate(slot, at, conn.rated);
            }
        }
        self.held.set(slot, 0);
        for (flow, _) in port.waits {
            self.table.forget(flow);
        }
        self.wheel.clear(self.port_timer(slot));
    }

    /// Leaves all connections, because the stack ends: the kernel answers SYNs with their ledger entries again. Nothing
    /// is sent. Call it last.
    pub fn end(&mut self) {
        for at in 0..self.table.span() {
            if let Some(conn) = self.table.remove(at) {
                self.wheel.clear(at);
                self.ledger.leave(conn.flow);
                self.unrate(conn.slot, at, conn.rated);
            }
        }
    }

    /// Updates the rankings after a change of a connection.
    fn rate(&mut self, at: u32) {
        let Some(conn) = self.table.get_mut(at) else { return };
        let rating = conn.rating();
        let before = std::mem::replace(&mut conn.rated, rating);
        if before == rating {
            return;
        }
        let slot = conn.slot;
        self.unrate(slot, at, before);
        if rating.idle {
            self.idlers.push(slot as usize, at);
            self.idle.set(slot, self.idle.count(slot) + 1);
        }
        self.lingering += usize::from(rating.lingers);
        if rating.owes {
            self.owed.push(slot as usize, at);
            if let Some(port) = self.ports.get_mut(slot)
                && !std::mem::replace(&mut port.owes, true)
            {
                self.owing.push_back(slot);
            }
        }
    }

    /// Removes a connection from the rankings.
    fn unrate(&mut self, slot: Slot, at: u32, rated: ConnectionRank) {
        if rated.idle {
            self.idlers.remove(slot as usize, at);
            self.idle.set(slot, self.idle.count(slot) - 1);
        }
        self.lingering -= usize::from(rated.lingers);
        if rated.owes {
            self.owed.remove(slot as usize, at);
        }
    }

    /// Whether a slot may have one more connection. Connections that have ended unseen make room first, then idle
    /// ones.
    pub(super) fn has_room(&mut self, now: Duration, slot: Slot, out: &mut dyn Transmit) -> bool {
        if !self.ports.has_room(slot) && !self.evict_port(now, out) {
            self.stats.refused_ports += 1;
            return false;
        }
        self.reap_some(now, slot);
        let limit = self.config.connections_per_port;
        if !self.makes_room_for_itself(now, slot, |stack| stack.held.count(slot) < limit, out) {
            self.stats.refused_port_connections += 1;
            return false;
        }
        if !self.makes_room_for_itself(now, slot, |stack| stack.service.admits(slot), out) {
            self.stats.refused_vm_connections += 1;
            return false;
        }
        if self.table.is_full() && !self.makes_room(now, slot, out) {
            self.stats.refused_connections += 1;
            return false;
        }
        true
    }

    /// Probes some connections of a slot and frees those the kernel has closed.
    fn reap_some(&mut self, now: Duration, slot: Slot) {
        let count = self.held.count(slot);
        for place in (count.saturating_sub(PROBED)..count).rev() {
            let at = self.ports.get(slot).and_then(|port| port.conns.get(place).copied());
            if let Some(at) = at {
                self.reap(now, at);
            }
        }
    }

    /// Whether a slot is within its own limit, if necessary after its longest idle connection is reset.
    fn makes_room_for_itself(
        &mut self,
        now: Duration,
        slot: Slot,
        has_room: impl Fn(&Self) -> bool,
        out: &mut dyn Transmit,
    ) -> bool {
        if has_room(self) {
            return true;
        }
        self.reap_all(now, slot);
        if has_room(self) {
            return true;
        }
        let idle = self.idlers.front(slot as usize);
        if let Some(at) = idle {
            self.evict_connection(now, at, out);
        }
        idle.is_some() && has_room(self)
    }

    /// Frees a connection for a slot when all are taken. It takes an idle one of the slot with the most idle
    /// connections, the longest idle first. Otherwise it takes one of the slot with the most connections, if that
    /// slot is above its share and would still have more than the other.
    fn makes_room(&mut self, now: Duration, slot: Slot, out: &mut dyn Transmit) -> bool {
        let idle = self.idle.top().and_then(|slot| self.idlers.front(slot as usize));
        if let Some(at) = idle {
            self.evict_connection(now, at, out);
            return true;
        }
        for _ in 0..SWEEP.min(self.table.span()) {
            self.sweep = (self.sweep + 1) % self.table.span();
            self.reap(now, self.sweep);
        }
        if !self.table.is_full() {
            return true;
        }
        let (mine, share) = (self.held.count(slot), self.config.share);
        // The top slot must hold at least two more than this slot; otherwise both would take the same connection from
        // each other in turn.
        let top = self.held.top().filter(|top| self.held.count(*top) > share.max(mine + 1));
        let Some(top) = top else { return false };
        self.reap_all(now, top);
        if !self.table.is_full() {
            return true;
        }
        match self.slowest(top) {
            Some((is_ours_to_answer, at)) if mine < share || !is_ours_to_answer => {
                self.evict_connection(now, at, out);
                true
            }
            _ => false,
        }
    }

    /// The first connection of a slot to give up: connections with a request that waits for our answer come last,
    /// others by their deadline. Also returns whether it holds such a request.
    fn slowest(&self, slot: Slot) -> Option<(bool, u32)> {
        let conns = self.ports.get(slot)?.conns.iter();
        let rated = conns.filter_map(|at| {
            let conn = self.table.get(*at)?;
            Some((conn.holds_a_request(), conn.deadline.is_none(), conn.deadline, *at))
        });
        rated.min().map(|(waits, .., at)| (waits, at))
    }

    /// Frees the connections of a slot that the kernel has seen end.
    fn reap_all(&mut self, now: Duration, slot: Slot) {
        // Backwards, because the last connection takes the place of a removed one.
        for place in (0..self.held.count(slot)).rev() {
            let at = self.ports.get(slot).and_then(|port| port.conns.get(place).copied());
            if let Some(at) = at {
                self.reap(now, at);
            }
        }
    }

    /// Frees a connection if the kernel has seen its end.
    fn reap(&mut self, now: Duration, at: u32) {
        let Self { table, ledger, .. } = self;
        let Some(conn) = table.get_mut(at).filter(|conn| conn.may_be_over()) else { return };
        match conn.hear(ledger, now) {
            Some(numbers) => self.close(now, at, numbers),
            None => self.rate(at),
        }
    }

    /// Ends a connection with a reset, so that its guest notices, unless the kernel has already seen its end.
    fn evict_connection(&mut self, now: Duration, at: u32, out: &mut dyn Transmit) {
        self.reap(now, at);
        let Some(conn) = self.table.get_mut(at) else { return };
        let idle = conn.rated.idle;
        conn.tcb.reset(&mut FrameWriter { workshop: &mut self.workshop, out });
        self.remove_connection(now, at);
        self.stats.connections_evicted += u64::from(idle);
        self.stats.connections_displaced += u64::from(!idle);
    }

    /// Applies the last state of a displaced ledger entry, which cannot be read again.
    fn displaced(&mut self, now: Duration, DisplacedConnection { flow, heard }: DisplacedConnection) {
        let Some(at) = self.table.find(flow) else { return };
        match self.table.get_mut(at).and_then(|conn| conn.heard(heard, now)) {
            Some(numbers) => self.close(now, at, numbers),
            None => self.rate(at),
        }
    }

    fn evict_port(&mut self, now: Duration, out: &mut dyn Transmit) -> bool {
        let idle = self.ports.longest_idle(|slot| self.idle.count(slot));
        if let Some(slot) = idle {
            while let Some(at) = self.idlers.front(slot as usize) {
                self.evict_connection(now, at, out);
            }
            self.forget(slot);
            self.stats.ports_evicted += 1;
        }
        idle.is_some()
    }
}

// The connections of one guest, by number.

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
    /// ([`NARROW_FOR`]).
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
                if let Some(conn) = self.table.get_mut(at) {
                    conn.resume();
                }
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
