//! The node's figures, for metrics.

use tracing::warn;

use super::Node;
use crate::metrics::{self, Hub, Process, Snapshot};
use metadata_datapath::worker::WorkerHandle;
use metadata_steer::Counters;

impl Node {
    /// The exposition text of this moment.
    #[must_use]
    pub fn metrics(&self) -> String {
        let kernel = self.steering.counters().map_err(|error| warn!("kernel counters: {error}")).ok();
        let verdicts: Vec<_> = kernel
            .iter()
            .flat_map(Counters::iter)
            .map(|(verdict, frames)| (verdict.name(), frames))
            .collect();
        let workers: Vec<_> = self.workers.iter().map(WorkerHandle::stats).collect();
        let named: Vec<_> =
            workers.iter().map(|worker| (worker.engine.counters(), worker.engine.gauges())).collect();
        let losses = self.steering.losses();
        let hubs: Vec<_> = (0_u32..)
            .zip(workers.iter().zip(&named))
            .map(|(number, (worker, (counters, gauges)))| {
                let at = usize::try_from(number).unwrap_or(usize::MAX);
                let losses = losses.hubs.get(at).copied().unwrap_or_default();
                Hub { number, losses, worker: *worker, counters, gauges }
            })
            .collect();
        let (xdp, tcx) = self.steering.ports_by_program();
        let (taps, instances) = (self.ports_by_state().into_iter().collect::<Vec<_>>(), self.instances());
        let snapshot = Snapshot {
            verdicts: &verdicts,
            ports: self.port_count() as u64,
            steered_by: [("xdp", xdp as u64), ("tcx", tcx as u64)],
            taps: &taps,
            instances: &instances,
            identities: self.bound.len() as u64,
            attaching: self.attaching.figures(),
            rendering: self.rendering,
            records: self.registry.records().count() as u64,
            records_rejected: self.registry.refusals(),
            room: self.room.usage(),
            from_snapshot: self.from_snapshot,
            api_server: self.api_server(),
            config_reloads: self.reloads,
            tallies: &self.tallies,
            audit: self.audit.as_ref().map(|audit| audit.borrow().counts()),
            process: Process::read(),
            errands: self.state.counts(),
            refused_by_ports: losses.ports,
            hubs: &hubs,
        };
        metrics::render(&snapshot)
    }
}
