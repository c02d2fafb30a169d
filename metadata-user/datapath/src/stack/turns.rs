//! Who gets a turn when, and what becomes of connections and ports after it.

use metadata_common::cookie::Flow;
use metadata_common::maps::Slot;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::Stack;
use super::config::{NARROW_FOR, TIME_WAITS_PER_PORT};
use super::connection::{Cause, Conn, Fate, Rating, Scene};
use super::ledger::{Displaced, Ledger};
use super::seam::{Service, Transmit};
use super::send::Outlet;
use super::timewait::{Numbers, TimeWait};
use metadata_base::time::Now;

/// Times all waiting connections of a port get a turn because one of them stirred: once to see what it
/// changed, and once more to see what they changed in turn. A stir after that is due [`STIR_AGAIN`] later, so
/// that none is missed and none goes on for ever at once.
const STIR_ROUNDS: usize = 2;

/// See [`STIR_ROUNDS`].
const STIR_AGAIN: Duration = Duration::from_millis(1);

/// Timers that are heard in one step at most: what may delay frames. The next step hears the rest.
const TIMERS_PER_STEP: usize = 64;

/// Connections probed, of all there are, when none is free or idle: the kernel may have closed some unseen.
const SWEEP: u32 = 32;

/// Connections of its slot probed when one begins. Most guests open one after the other, and the kernel has closed the
/// last one unseen: found now, it leaves the table, and its place to the kernel, 200 ms earlier than by its timer.
const PROBED: usize = 4;

impl<S: Service, L: Ledger> Stack<S, L> {
    /// Does what time demands: retransmissions, timeouts, held requests, freeing of idle ports.
    ///
    /// Returns when to call again at the latest, by the clock of [`Now::mono`]; `None` when nothing waits.
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

    /// Lets so many segments of answers be sent before the rest is put off: whoever calls this has to give the slots
    /// that are [`owing`](Self::owing) their turns by [`go_on`](Self::go_on). Without it all is sent at once.
    pub fn allow(&mut self, segments: u32) {
        self.workshop.allow(segments);
    }

    /// A slot of which output is put off; named once until [`go_on`](Self::go_on) has returned false for it.
    pub fn owing(&mut self) -> Option<Slot> {
        self.owing.pop_front()
    }

    /// True while output of a slot is put off.
    #[must_use]
    pub fn owes(&self, slot: Slot) -> bool {
        self.ports.get(slot).is_some_and(|port| port.owes)
    }

    /// Sends what was put off of a slot, as far as is allowed, its connections in turn. True while there is more.
    pub fn go_on(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) -> bool {
        let sent = catch_unwind(AssertUnwindSafe(|| {
            while self.workshop.may_send()
                && let Some(at) = self.owed.front(slot as usize)
            {
                self.owed.remove(slot as usize, at);
                self.owed.push(slot as usize, at);
                self.turn_and_stir(now, at, Cause::Allowance, out);
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
            Some(deadline) if deadline <= now.mono => self.turn_and_stir(now, at, Cause::Timer, out),
            // It has been put off since.
            Some(deadline) => self.wheel.set(at, deadline),
            None => {}
        }
    }

    fn step_port(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let idle = self.config.timeouts.port_idle;
        let Some(port) = self.ports.get(slot) else { return };
        if port.conns.is_empty() && port.idle_at(idle) <= now.mono {
            return self.forget(slot);
        }
        if port.stir_at.is_some_and(|at| at <= now.mono) {
            self.stir(now, slot, out);
        }
        self.expire_waits(now.mono, slot);
        self.schedule_port(slot);
    }

    fn port_timer(&self, slot: Slot) -> u32 {
        self.config.connections as u32 + slot
    }

    fn schedule_port(&mut self, slot: Slot) {
        let deadline = self.ports.get(slot).and_then(|port| port.deadline(self.config.timeouts.port_idle));
        if let Some(deadline) = deadline {
            self.wheel.set(self.port_timer(slot), deadline);
        }
    }

    /// Gives a connection a turn, and then those that wait for what it changed.
    pub(super) fn turn_and_stir(&mut self, now: Now, at: u32, cause: Cause<'_>, out: &mut dyn Transmit) {
        let Some(slot) = self.table.get(at).map(|conn| conn.slot) else { return };
        if self.turn(now, at, cause, out) {
            self.stir(now, slot, out);
        }
    }

    /// Gives a connection a turn, and buries it when it is over. True when it stirred.
    fn turn(&mut self, now: Now, at: u32, cause: Cause<'_>, out: &mut dyn Transmit) -> bool {
        let fits = matches!(cause, Cause::Timer).then(|| self.fits(now.mono, at)).flatten();
        let Self { config, ledger, workshop, table, ports, wheel, stats, draining, .. } = self;
        let Some(conn) = table.get_mut(at) else { return false };
        if let Some(fits) = fits {
            conn.tcb.fit(fits);
        }
        let end = draining.as_ref().map(|draining| draining.end);
        let mut scene = Scene { now, config, ledger, outlet: Outlet { workshop, out }, end };
        let (fate, turn) = conn.turn(&mut scene, cause);
        stats.aborted += u64::from(turn.aborted);
        stats.stalled += u64::from(turn.stalled);
        stats.cut_short += u64::from(turn.cut);
        if conn.tcb.recovery.take_narrow()
            && let Some(port) = ports.get_mut(conn.slot)
        {
            port.narrow_until = Some(now.mono + NARROW_FOR);
        }
        match (fate, conn.deadline) {
            (Fate::Live, deadline) => {
                deadline.into_iter().for_each(|deadline| wheel.set(at, deadline));
                self.rate(at);
            }
            (Fate::Gone, _) => self.bury(now.mono, at),
            (Fate::Closed(numbers), _) => self.close(now.mono, at, numbers),
        }
        if let Some(displaced) = turn.displaced {
            self.displaced(now.mono, displaced);
        }
        turn.stirred
    }

    /// Octets of payload that segments of a connection have at most now: its device's MTU may have changed.
    fn fits(&self, now: Duration, at: u32) -> Option<u16> {
        let conn = self.table.get(at)?;
        Some(self.largest_segment(now, conn.slot, conn.tcb.tuple.remote.0.is_ipv4()))
    }

    /// Gives every connection of a slot that waits a turn, and again while they stir one another, up to a
    /// limit.
    pub(super) fn stir(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let Some(port) = self.ports.get_mut(slot) else { return };
        port.stir_at = None;
        for _ in 0..STIR_ROUNDS {
            let mut stirred = false;
            // Backwards, because a connection that is buried is replaced by the last one.
            let count = self.ports.get(slot).map_or(0, |port| port.conns.len());
            for place in (0..count).rev() {
                let at = self.ports.get(slot).and_then(|port| port.conns.get(place).copied());
                let Some(at) = at.filter(|at| self.table.get(*at).is_some_and(Conn::waits)) else { continue };
                self.stats.woken += 1;
                stirred |= self.turn(now, at, Cause::Change, out);
            }
            if !stirred {
                return;
            }
        }
        if let Some(port) = self.ports.get_mut(slot) {
            port.stir_at = Some(now.mono + STIR_AGAIN);
            self.schedule_port(slot);
        }
    }

    /// Drops a connection without a word.
    pub(super) fn bury(&mut self, now: Duration, at: u32) {
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
            self.schedule_port(conn.slot);
        }
    }

    /// Drops a connection both sides have closed, and remembers its numbers.
    fn close(&mut self, now: Duration, at: u32, numbers: Numbers) {
        let Some((flow, slot)) = self.table.get(at).map(|conn| (conn.flow, conn.slot)) else { return };
        self.bury(now, at);
        self.expire_waits(now, slot);
        let Some(port) = self.ports.get_mut(slot) else { return };
        if port.waits.len() >= TIME_WAITS_PER_PORT
            && let Some((oldest, _)) = port.waits.pop_front()
        {
            self.table.forget(oldest);
        }
        let until = now + self.config.timeouts.time_wait;
        if self.table.remember(flow, TimeWait { until, numbers, reopened: false }) {
            port.waits.push_back((flow.number(), until));
            if port.waits.len() == 1 {
                self.schedule_port(slot);
            }
        }
    }

    /// Forgets one four-tuple in TIME-WAIT, if it is remembered.
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

    /// Forgets a slot: its connections end without a word, since nobody is there to hear it.
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

    /// Notes whether a connection is idle after what has happened to it.
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

    /// Takes back what was noted of a connection.
    fn unrate(&mut self, slot: Slot, at: u32, rated: Rating) {
        if rated.idle {
            self.idlers.remove(slot as usize, at);
            self.idle.set(slot, self.idle.count(slot) - 1);
        }
        self.lingering -= usize::from(rated.lingers);
        if rated.owes {
            self.owed.remove(slot as usize, at);
        }
    }

    /// True when a slot may have one more connection; what has ended without our hearing makes room, then what is idle.
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

    /// Frees some connections of a slot that the kernel has closed.
    fn reap_some(&mut self, now: Duration, slot: Slot) {
        let count = self.held.count(slot);
        for place in (count.saturating_sub(PROBED)..count).rev() {
            let at = self.ports.get(slot).and_then(|port| port.conns.get(place).copied());
            at.into_iter().for_each(|at| self.reap(now, at));
        }
    }

    /// True when a slot has room by its own limit, at last at the cost of its own longest idle connection.
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

    /// Frees a connection for a slot when all are taken: an idle one of the slot that has most of these, the longest
    /// idle first; else one of the slot that has most, unless that is its share or no more than the other would have.
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
        // One more than it has itself is not taken from another: two would take turns at it.
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

    /// The connection of a slot that can be spared first: requests that wait for us come last, and of others the one
    /// whose guest's time is over first. Also whether it is such a request.
    fn slowest(&self, slot: Slot) -> Option<(bool, u32)> {
        let conns = self.ports.get(slot)?.conns.iter();
        let rated = conns.filter_map(|at| {
            let conn = self.table.get(*at)?;
            Some((conn.holds_a_request(), conn.deadline.is_none(), conn.deadline, *at))
        });
        rated.min().map(|(waits, .., at)| (waits, at))
    }

    /// Frees what the kernel has heard the end of among a slot's connections.
    fn reap_all(&mut self, now: Duration, slot: Slot) {
        // Backwards, because a connection that is buried is replaced by the last one.
        for place in (0..self.held.count(slot)).rev() {
            let at = self.ports.get(slot).and_then(|port| port.conns.get(place).copied());
            at.into_iter().for_each(|at| self.reap(now, at));
        }
    }

    /// Frees a connection if the kernel has heard the end of it.
    fn reap(&mut self, now: Duration, at: u32) {
        let Self { table, ledger, .. } = self;
        let Some(conn) = table.get_mut(at).filter(|conn| conn.may_be_over()) else { return };
        match conn.hear(ledger, now) {
            Some(numbers) => self.close(now, at, numbers),
            None => self.rate(at),
        }
    }

    /// Ends a connection: by a reset, so that its guest knows, unless the kernel has heard the end of it.
    fn evict_connection(&mut self, now: Duration, at: u32, out: &mut dyn Transmit) {
        self.reap(now, at);
        let Some(conn) = self.table.get_mut(at) else { return };
        let idle = conn.rated.idle;
        conn.tcb.reset(&mut Outlet { workshop: &mut self.workshop, out });
        self.bury(now, at);
        self.stats.connections_evicted += u64::from(idle);
        self.stats.connections_displaced += u64::from(!idle);
    }

    /// Takes in the last that the kernel has heard of a connection, which nobody will be able to read again.
    fn displaced(&mut self, now: Duration, Displaced { flow, heard }: Displaced) {
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
