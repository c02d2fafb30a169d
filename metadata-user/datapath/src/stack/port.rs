//! One guest's connections, by number.

use metadata_common::maps::Slot;
use std::collections::VecDeque;
use std::time::Duration;

/// The connections of one slot, and those it closed lately.
pub(super) struct Port {
    /// Numbers in the table.
    pub(super) conns: Vec<u32>,
    /// Flows in TIME-WAIT, in the order they got there, and when each is over unless it was put off since.
    pub(super) waits: VecDeque<(u64, Duration)>,
    /// When its last frame came that belonged to no connection, or its last connection ended.
    pub(super) heard: Duration,
    /// When connections that wait are to look again at what was stirred.
    pub(super) stir_at: Option<Duration>,
    /// Until when its link is taken for narrower than its device's MTU says
    /// ([`NARROW_FOR`](super::config::NARROW_FOR)).
    pub(super) narrow_until: Option<Duration>,
    /// Output of it is put off, and whoever shares out the time knows.
    pub(super) owes: bool,
}

impl Port {
    /// When it is to be freed, if it has no connection until then: not before what it has learnt is out of date.
    pub(super) fn idle_at(&self, idle: Duration) -> Duration {
        (self.heard + idle).max(self.narrow_until.unwrap_or_default())
    }

    /// True while long segments to it are taken for lost.
    pub(super) fn is_narrow(&self, now: Duration) -> bool {
        self.narrow_until.is_some_and(|until| now < until)
    }

    /// When the port itself wants attention, whatever its connections want.
    pub(super) fn deadline(&self, idle: Duration) -> Option<Duration> {
        let idle = self.conns.is_empty().then(|| self.idle_at(idle));
        let wait = self.waits.front().map(|(_, until)| *until);
        idle.into_iter().chain(self.stir_at).chain(wait).min()
    }
}

/// Port by slot: a table as long as there are slots, filled only where a guest has spoken.
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

    /// True when a port for `slot` is there or can be made without evicting another.
    pub(super) fn has_room(&self, slot: Slot) -> bool {
        self.held < self.limit || self.get(slot).is_some()
    }

    /// The port of an admitted slot, made if need be.
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
                owes: false,
            })
        })
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Box<Port>> {
        let port = self.table.get_mut(slot as usize)?.take()?;
        self.held -= 1;
        Some(port)
    }

    /// The slot without connections that has been silent longest, or else one with none but idle ones, of which
    /// `idle` is the count. Walks the whole table: only at the limit, which is no less than the slots by default.
    pub(super) fn longest_idle(&self, idle: impl Fn(Slot) -> usize) -> Option<Slot> {
        let idle = self.table.iter().enumerate().filter_map(|(slot, port)| {
            let (slot, port) = (slot as Slot, port.as_ref()?);
            (port.conns.len() == idle(slot)).then_some((!port.conns.is_empty(), port.heard, slot))
        });
        idle.min().map(|(.., slot)| slot)
    }
}
