//! One guest's connections.

use metadata_common::maps::Slot;
use std::time::Duration;

use super::connection::{Conn, Fate, Scene, Tuple};
use super::pool::Pool;
use super::seam::{Exchange, Service};
use super::stats::StackStats;
use super::timewait::{TimeWait, TimeWaits};

/// Times all waiting connections of a port get a turn because one of them stirred: once to see what it
/// changed, and once more to see what they changed in turn. A stir after that is due [`STIR_AGAIN`] later, so
/// that none is missed and none goes on for ever at once.
const STIR_ROUNDS: usize = 2;

/// See [`STIR_ROUNDS`].
const STIR_AGAIN: Duration = Duration::from_millis(1);

/// The connections of one slot, and those it closed lately.
pub(super) struct Port<E> {
    pub(super) conns: Vec<Conn<E>>,
    pub(super) waits: TimeWaits,
    /// When its last frame came.
    pub(super) heard: Duration,
    /// When connections that wait are to look again at what was stirred.
    stir_at: Option<Duration>,
}

impl<E: Exchange> Port<E> {
    pub(super) fn new(now: Duration) -> Self {
        Self { conns: Vec::new(), waits: TimeWaits::default(), heard: now, stir_at: None }
    }

    pub(super) fn find(&self, tuple: &Tuple) -> Option<usize> {
        self.conns.iter().position(|conn| conn.tuple == *tuple)
    }

    /// Gives one connection a turn, and buries it when it is over. True when it stirred.
    pub(super) fn turn<S>(
        &mut self,
        at: usize,
        scene: &mut Scene<'_, S>,
        packet: Option<&[u8]>,
        pool: &mut Pool,
        stats: &mut StackStats,
    ) -> bool
    where
        S: Service<Exchange = E>,
    {
        let (fate, turn) = self.conns[at].turn(scene, packet);
        stats.accepted += u64::from(turn.accepted);
        stats.aborted += u64::from(turn.aborted);
        stats.stalled += u64::from(turn.stalled);
        stats.half_open_expired += u64::from(turn.half_open_expired);
        if let Fate::TimeWait(next) = fate {
            let until = scene.now.mono + scene.config.timeouts.time_wait;
            self.waits.push(TimeWait { tuple: self.conns[at].tuple, until, next });
        }
        if fate != Fate::Live {
            self.bury(at, pool);
        }
        turn.stirred
    }

    /// Gives every connection that waits a turn, and again while they stir one another, up to a limit.
    pub(super) fn stir<S>(&mut self, scene: &mut Scene<'_, S>, pool: &mut Pool, stats: &mut StackStats)
    where
        S: Service<Exchange = E>,
    {
        self.stir_at = None;
        for _ in 0..STIR_ROUNDS {
            let mut stirred = false;
            // Backwards, because a connection that is buried is replaced by the last one.
            for at in (0..self.conns.len()).rev() {
                if self.conns[at].waits() {
                    stats.woken += 1;
                    stirred |= self.turn(at, scene, None, pool, stats);
                }
            }
            if !stirred {
                return;
            }
        }
        self.stir_at = Some(scene.now.mono + STIR_AGAIN);
    }

    /// Drops a connection without a word.
    pub(super) fn bury(&mut self, at: usize, pool: &mut Pool) {
        pool.put(self.conns.swap_remove(at).tcp);
    }

    /// Drops the oldest half-open connection older than `grace`, to make room. True when there was one.
    pub(super) fn evict_half_open(&mut self, now: Duration, grace: Duration, pool: &mut Pool) -> bool {
        let oldest = (0..self.conns.len())
            .filter(|at| self.conns[*at].is_half_open() && self.conns[*at].opened + grace <= now)
            .min_by_key(|at| self.conns[*at].opened);
        if let Some(at) = oldest {
            self.bury(at, pool);
        }
        oldest.is_some()
    }

    /// Gives every connection that is due its turn.
    pub(super) fn step<S>(&mut self, scene: &mut Scene<'_, S>, pool: &mut Pool, stats: &mut StackStats)
    where
        S: Service<Exchange = E>,
    {
        let now = scene.now.mono;
        let mut stirred = self.stir_at.is_some_and(|at| at <= now);
        // Backwards, as above.
        for at in (0..self.conns.len()).rev() {
            if self.conns[at].deadline.is_some_and(|deadline| deadline <= now) {
                stirred |= self.turn(at, scene, None, pool, stats);
            }
        }
        if stirred {
            self.stir(scene, pool, stats);
        }
    }

    /// When the port next wants attention: a connection's deadline, else the end of its idle time.
    pub(super) fn deadline(&self, idle: Duration) -> Option<Duration> {
        if self.conns.is_empty() {
            return Some(self.heard + idle);
        }
        self.conns.iter().filter_map(|conn| conn.deadline).chain(self.stir_at).min()
    }
}

/// Port by slot: a table as long as there are slots, filled only where a guest has spoken.
pub(super) struct Ports<E> {
    table: Vec<Option<Box<Port<E>>>>,
    held: usize,
    limit: usize,
}

impl<E: Exchange> Ports<E> {
    pub(super) fn new(slots: u32, limit: usize) -> Self {
        Self { table: (0..slots).map(|_| None).collect(), held: 0, limit }
    }

    pub(super) fn admits(&self, slot: Slot) -> bool {
        (slot as usize) < self.table.len()
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn get(&mut self, slot: Slot) -> Option<&mut Port<E>> {
        self.table.get_mut(slot as usize)?.as_deref_mut()
    }

    /// True when a port for `slot` is there or can be made without evicting another.
    pub(super) fn has_room(&self, slot: Slot) -> bool {
        self.held < self.limit || self.table[slot as usize].is_some()
    }

    /// The port of an admitted slot, made if need be.
    pub(super) fn get_or_make(&mut self, slot: Slot, now: Duration) -> &mut Port<E> {
        let entry = &mut self.table[slot as usize];
        self.held += usize::from(entry.is_none());
        entry.get_or_insert_with(|| Box::new(Port::new(now)))
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Box<Port<E>>> {
        let port = self.table.get_mut(slot as usize)?.take()?;
        self.held -= 1;
        Some(port)
    }

    /// The slot without connections that has been silent longest. Walks the whole table: only at the limit.
    pub(super) fn longest_idle(&self) -> Option<Slot> {
        let idle = self.table.iter().enumerate().filter_map(|(slot, port)| {
            let port = port.as_ref().filter(|port| port.conns.is_empty())?;
            Some((port.heard, slot as Slot))
        });
        idle.min().map(|(_, slot)| slot)
    }

    pub(super) fn time_waits(&self) -> usize {
        self.table.iter().flatten().map(|port| port.waits.len()).sum()
    }
}
