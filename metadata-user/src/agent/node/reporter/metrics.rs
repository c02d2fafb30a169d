//! The facts behind `/metrics`.

use tracing::warn;

use super::{NodeView, Reporter};
use crate::agent::health::Health;
use crate::metrics::{self, HubMetrics, ProcessMetrics, Snapshot};
use metadata_control::status::PortFilter;
use metadata_steer::Counters;

impl Reporter {
    /// The exposition text at this moment.
    #[must_use]
    pub(crate) fn metrics(&self, NodeView { catalogue, ports }: NodeView<'_>, health: &Health) -> String {
        let (view, steering) = (NodeView { catalogue, ports }, ports.steering());
        let kernel = steering.maps().counters().map_err(|error| warn!("kernel counters: {error}")).ok();
        let verdicts: Vec<_> = kernel
            .iter()
            .flat_map(Counters::iter)
            .map(|(verdict, frames)| (verdict.name(), frames))
            .collect();
        let workers: Vec<_> = ports.workers().stats().collect();
        let named: Vec<_> =
            workers.iter().map(|worker| (worker.engine.counters(), worker.engine.gauges())).collect();
        let losses = steering.losses();
        let hubs: Vec<_> = (0_u32..)
            .zip(workers.iter().zip(&named))
            .map(|(number, (worker, (counters, gauges)))| {
                let at = usize::try_from(number).unwrap_or(usize::MAX);
                let losses = losses.hubs.get(at).copied().unwrap_or_default();
                HubMetrics { number, losses, worker: *worker, counters, gauges }
            })
            .collect();
        let (xdp, tcx) = steering.attachments().ports_by_program();
        let status = self.status(view, PortFilter::Trouble, health);
        let taps: Vec<_> = status.ports.counts.into_iter().collect();
        let shares = view.shares();
        let snapshot = Snapshot {
            is_ready: status.ready,
            problems: status.troubles.len() as u64,
            verdicts: &verdicts,
            ports: ports.count() as u64,
            steered_by: [("xdp", xdp as u64), ("tcx", tcx as u64)],
            taps: &taps,
            instances: &status.instances,
            identities: ports.identity_count() as u64,
            attaching: ports.attaching().figures(),
            rendering: catalogue.rendering(),
            records: catalogue.registry().records().count() as u64,
            records_rejected: catalogue.registry().refusals(),
            room: catalogue.room().usage(),
            shares: &shares,
            from_snapshot: self.from_snapshot,
            sources: &status.sources,
            identity: self
                .identity
                .as_ref()
                .map(|(issuer, publication)| (publication.report(), issuer.counts())),
            config_reloads: self.reloads,
            tallies: &self.tallies,
            documents: ports.answers().document_counts(),
            audit: ports.answers().audit_counts(),
            process: ProcessMetrics::read(),
            errands: catalogue.errands(),
            refused_by_ports: losses.ports,
            attachments: &steering.attachments().last_check(),
            slots_retired: ports.bindings().retired(),
            hubs: &hubs,
        };
        metrics::render(&snapshot)
    }
}
