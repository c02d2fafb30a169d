//! Whether the agent lives, and whether it is ready.
//!
//! Both are computed from flags and heartbeats, without waiting for the packet path or the control loop, and without
//! allocation.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use metadata_datapath::worker::{Heartbeat, Silence};

/// The state behind the probes. The control loop writes it, the endpoints read it.
#[derive(Debug, Default)]
pub struct Health {
    /// The workers' heartbeats, by the number of their hub.
    workers: Vec<(u32, Heartbeat)>,
    records_read: AtomicBool,
    ports_settled: AtomicBool,
    adopting: AtomicBool,
    draining: AtomicBool,
}

/// One reason why the agent is not ready. Displayed as one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthProblem {
    /// A worker does not answer guests.
    Worker(u32, Silence),
    /// The first scan of the records is not complete.
    RecordsUnread,
    /// Ports are still being attached for the first time.
    PortsUnsettled,
    /// Ports of the previous agent are still being adopted.
    Adopting,
    /// The agent is ending.
    Draining,
}

impl fmt::Display for HealthProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(hub, silence) => write!(f, "worker {hub} {silence}"),
            Self::RecordsUnread => f.write_str("the first scan of the records is not complete"),
            Self::PortsUnsettled => f.write_str("ports are still being attached"),
            Self::Adopting => f.write_str("ports of the previous agent are still being adopted"),
            Self::Draining => f.write_str("the agent is draining: it serves open connections, then ends"),
        }
    }
}

impl Health {
    /// Creates the health of an agent that is alive and not ready. `workers` are by the number of their hub.
    #[must_use]
    pub fn new(workers: Vec<(u32, Heartbeat)>) -> Arc<Self> {
        Arc::new(Self { workers, ..Self::default() })
    }

    /// Records that the first scan of the records is complete.
    pub fn set_records_read(&self) {
        self.records_read.store(true, Ordering::Relaxed);
    }

    /// Records that every wanted port has been settled once.
    pub fn set_ports_settled(&self) {
        self.ports_settled.store(true, Ordering::Relaxed);
    }

    /// Sets whether ports of the previous agent are still being adopted.
    pub fn set_adopting(&self, yes: bool) {
        self.adopting.store(yes, Ordering::Relaxed);
    }

    /// Records that the agent is ending.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// True once records were scanned and ports settled for the first time.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.records_read.load(Ordering::Relaxed) && self.ports_settled.load(Ordering::Relaxed)
    }

    /// True once the agent is ending.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The workers' heartbeats, by the number of their hub.
    pub fn workers(&self) -> impl Iterator<Item = (u32, &Heartbeat)> {
        self.workers.iter().map(|(hub, beat)| (*hub, beat))
    }

    /// The troubles that only a restart ends. Without any, the agent is alive.
    pub fn deadly(&self) -> impl Iterator<Item = HealthProblem> {
        self.workers().filter_map(|(hub, beat)| Some(HealthProblem::Worker(hub, beat.check().err()?)))
    }

    /// The troubles that keep the agent from being ready. Without any, it is ready.
    pub fn hindering(&self) -> impl Iterator<Item = HealthProblem> {
        let on = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        let reasons = [
            (!on(&self.records_read), HealthProblem::RecordsUnread),
            (!on(&self.ports_settled), HealthProblem::PortsUnsettled),
            (on(&self.adopting), HealthProblem::Adopting),
            (self.is_draining(), HealthProblem::Draining),
        ];
        self.deadly().chain(reasons.into_iter().filter_map(|(holds, reason)| holds.then_some(reason)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Health, HealthProblem};

    #[test]
    fn an_agent_is_ready_once_records_are_read_and_ports_settled_and_adopted() {
        let health = Health::new(vec![(0, Default::default())]);
        let why = |health: &Health| health.hindering().collect::<Vec<_>>();
        assert_eq!(why(&health), [HealthProblem::RecordsUnread, HealthProblem::PortsUnsettled]);
        health.set_records_read();
        health.set_adopting(true);
        assert_eq!(why(&health), [HealthProblem::PortsUnsettled, HealthProblem::Adopting]);
        health.set_ports_settled();
        health.set_adopting(false);
        assert_eq!(why(&health), []);
        health.set_draining();
        assert_eq!(why(&health), [HealthProblem::Draining]);
        assert_eq!(health.deadly().count(), 0, "a drain is no reason to be killed");
    }
}
