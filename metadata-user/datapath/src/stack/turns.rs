//! Schedules turns, and removes connections and ports after them.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::Stack;
use super::config::{NARROW_FOR, PORT_IDLE, TIME_WAIT, TIME_WAITS_PER_PORT};
use super::connection::{ConnectionRank, ConnectionState, StackConnection, TurnCause, TurnContext};
use super::interfaces::{AckLedger, DisplacedConnection};
use super::interfaces::{Service, Transmit};
use super::send::FrameWriter;
use super::timewait::{Numbers, TimeWait};
use metadata_common::time::Now;

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
        deadline.into_iter().for_each(|at| self.schedule_port(slot, at));
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
                deadline.into_iter().for_each(|deadline| wheel.set(at, deadline));
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
            at.into_iter().for_each(|at| self.reap(now, at));
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
        idle.into_iter().for_each(|at| self.evict_connection(now, at, out));
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
            at.into_iter().for_each(|at| self.reap(now, at));
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
