//! Whether the agent lives, and whether it is ready.
//!
//! Both are read off flags and heartbeats, so that looking waits for nobody, neither the packet path nor the
//! control loop, and allocates nothing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use metadata_datapath::worker::{Heartbeat, Silence};

/// What the probes look at. Shared between the control loop, which writes, and the doors, which read.
#[derive(Debug, Default)]
pub struct Health {
    /// By the number of their hub.
    workers: Vec<(u32, Heartbeat)>,
    records_read: AtomicBool,
    ports_settled: AtomicBool,
    adopting: AtomicBool,
    draining: AtomicBool,
}

/// One thing that is wrong, in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A worker does not answer guests.
    Worker(u32, Silence),
    /// The first scan of the records is not complete.
    RecordsUnread,
    /// Ports are still being attached for the first time.
    PortsUnsettled,
    /// What a former agent left is still being adopted.
    Adopting,
    /// The agent is leaving.
    Draining,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(hub, silence) => write!(f, "worker {hub} {silence}"),
            Self::RecordsUnread => f.write_str("the first scan of the records is not complete"),
            Self::PortsUnsettled => f.write_str("ports are still being attached"),
            Self::Adopting => f.write_str("what a former agent left is still being adopted"),
            Self::Draining => f.write_str("the agent is draining: it serves what it holds, and ends"),
        }
    }
}

impl Health {
    /// Of an agent with these workers, by the number of their hub: alive, and not ready.
    #[must_use]
    pub fn new(workers: Vec<(u32, Heartbeat)>) -> Arc<Self> {
        Arc::new(Self { workers, ..Self::default() })
    }

    /// The first scan of the records is complete.
    pub fn set_records_read(&self) {
        self.records_read.store(true, Ordering::Relaxed);
    }

    /// Every port that records and configuration ask for has been looked at once.
    pub fn set_ports_settled(&self) {
        self.ports_settled.store(true, Ordering::Relaxed);
    }

    /// What a former agent left is being adopted (true), or has been.
    pub fn set_adopting(&self, yes: bool) {
        self.adopting.store(yes, Ordering::Relaxed);
    }

    /// The agent is leaving.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// True once records and ports have been looked at for the first time.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.records_read.load(Ordering::Relaxed) && self.ports_settled.load(Ordering::Relaxed)
    }

    /// True once the agent leaves.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The workers' heartbeats, by the number of their hub.
    pub fn workers(&self) -> impl Iterator<Item = (u32, &Heartbeat)> {
        self.workers.iter().map(|(hub, beat)| (*hub, beat))
    }

    /// What keeps guests from being answered until the agent is started again: nothing when it lives.
    pub fn deadly(&self) -> impl Iterator<Item = Trouble> {
        self.workers().filter_map(|(hub, beat)| Some(Trouble::Worker(hub, beat.check().err()?)))
    }

    /// What keeps the agent from being ready: nothing when it is.
    pub fn hindering(&self) -> impl Iterator<Item = Trouble> {
        let on = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        let reasons = [
            (!on(&self.records_read), Trouble::RecordsUnread),
            (!on(&self.ports_settled), Trouble::PortsUnsettled),
            (on(&self.adopting), Trouble::Adopting),
            (self.is_draining(), Trouble::Draining),
        ];
        self.deadly().chain(reasons.into_iter().filter_map(|(holds, reason)| holds.then_some(reason)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Health, Trouble};

    #[test]
    fn an_agent_is_ready_when_records_and_ports_are_and_nothing_takes_over() {
        let health = Health::new(vec![(0, Default::default())]);
        let why = |health: &Health| health.hindering().collect::<Vec<_>>();
        assert_eq!(why(&health), [Trouble::RecordsUnread, Trouble::PortsUnsettled]);
        health.set_records_read();
        health.set_adopting(true);
        assert_eq!(why(&health), [Trouble::PortsUnsettled, Trouble::Adopting]);
        health.set_ports_settled();
        health.set_adopting(false);
        assert_eq!(why(&health), []);
        health.set_draining();
        assert_eq!(why(&health), [Trouble::Draining]);
        assert_eq!(health.deadly().count(), 0, "a drain is no reason to be killed");
    }
}
