//! The connections of one guest, by number.

use metadata_common::maps::Slot;
use std::collections::VecDeque;
use std::time::Duration;

/// The connections and recently closed flows of one slot.
pub(super) struct Port {
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

impl Port {
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
pub(super) struct Ports {
    table: Vec<Option<Box<Port>>>,
    held: usize,
    limit: usize,
}

impl Ports {
    pub(super) fn new(slots: u32, limit: usize) -> Self {
        Self { table: (0..slots).map(|_| None).collect(), held: 0, limit }
    }

    pub(super) fn admits(&self, slot: Slot) -> bool {
        (slot as usize) < self.table.len()
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&Port> {
        self.table.get(slot as usize)?.as_deref()
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Port> {
        self.table.get_mut(slot as usize)?.as_deref_mut()
    }

    /// Whether `slot` has a port or can get one without evicting another.
    pub(super) fn has_room(&self, slot: Slot) -> bool {
        self.held < self.limit || self.get(slot).is_some()
    }

    /// The port of an admitted slot; creates it if there is none.
    pub(super) fn get_or_make(&mut self, slot: Slot, now: Duration) -> &mut Port {
        let entry = &mut self.table[slot as usize];
        self.held += usize::from(entry.is_none());
        entry.get_or_insert_with(|| {
            Box::new(Port {
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

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Box<Port>> {
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
