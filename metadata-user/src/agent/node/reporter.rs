//! Status and metrics of the node.

mod top;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_common::printable::counted;
use metadata_common::share::ShareReport;
use metadata_common::verdict::Verdict;
use metadata_content::identity::Issuer;
use metadata_content::source::RecordSource;
use metadata_control::status::{
    AgentStatus, AttachmentStatus, FailedReads, IssuerState, LISTED_COMPLAINTS, OnDemandStatus, Phase,
    PortFilter, PortState, RecordMemory, SCHEMA, Share, SourceStatus, TenantShare, WorkerStatus,
};
use metadata_datapath::worker::LoopStats;
use metadata_feed::publisher::Outage;
use metadata_feed::source::{FailureStreak, OnDemandParty, Source, SourceHealth};
use metadata_steer::{Counters, Steering};
use top::Samples;
use tracing::warn;

use super::NodeView;
use super::workers::Workers;
use crate::agent::health::Health;
use crate::agent::state::unix_now;
use crate::identity::{Publication, SignerReport};
use crate::logging;
use crate::metrics::{self, HubMetrics, ProcessMetrics, Reloads, Snapshot};
use crate::service::{WaitEnd, WaitReason, WorkerCounts};

/// Days before the certificate for documents expires from which on the status calls for another.
const CERTIFICATE_DAYS: u64 = 14;
/// Seconds of a day.
const DAY: u64 = 86_400;

/// Facts for reports that are neither in the catalogue nor in the ports.
pub(crate) struct Reporter {
    started: Instant,
    /// The node's name (uname(2)).
    node: String,
    loads: Loads,
    /// Readings of counters while somebody follows the guests.
    samples: RefCell<Samples>,
    /// The problems that viewers were last told, and when they were looked for.
    problems: RefCell<Option<(Instant, Vec<String>)>>,
    reloads: Reloads,
    /// What each worker has answered, in the order of the hubs.
    tallies: Vec<Arc<WorkerCounts>>,
    from_snapshot: bool,
    /// The directory of records.
    records: Option<PathBuf>,
    /// The configured sources of records.
    sources: Vec<Arc<dyn Source>>,
    /// The issuer of identity tokens and its keys, on a node that issues them.
    identity: Option<(Issuer, Arc<Publication>)>,
    /// Whether each source can be read.
    outages: BTreeMap<RecordSource, Outage>,
    /// Why the last reload of the configuration was refused.
    refused_reload: Option<String>,
    /// Why a restart would fail with the configuration that was read last.
    refused_at_restart: Vec<String>,
}

impl Reporter {
    #[must_use]
    pub(crate) fn new(tallies: Vec<Arc<WorkerCounts>>) -> Self {
        Self {
            started: Instant::now(),
            node: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            loads: Loads::default(),
            samples: RefCell::default(),
            problems: RefCell::default(),
            reloads: Reloads::default(),
            tallies,
            from_snapshot: false,
            records: None,
            sources: Vec::new(),
            identity: None,
            outages: BTreeMap::new(),
            refused_reload: None,
            refused_at_restart: Vec::new(),
        }
    }

    /// Sets whether records come from the snapshot because their source is unavailable.
    pub(crate) fn set_from_snapshot(&mut self, from_snapshot: bool) {
        self.from_snapshot = from_snapshot;
    }

    /// Sets the directory of records, which a reload may change.
    pub(crate) fn set_records(&mut self, directory: Option<&Path>) {
        self.records = directory.map(|path| absolute(path).unwrap_or_else(|_| path.to_owned()));
    }

    /// Sets the sources to report on.
    pub(crate) fn set_sources(&mut self, sources: Vec<Arc<dyn Source>>) {
        self.sources = sources;
    }

    /// Sets the issuer of identity tokens to report on.
    pub(crate) fn set_identity(&mut self, issuer: Issuer, publication: Arc<Publication>) {
        self.identity = Some((issuer, publication));
    }

    /// Sets where a feed says that its source cannot be read.
    pub(crate) fn set_outage(&mut self, source: RecordSource, outage: Outage) {
        self.outages.insert(source, outage);
    }

    /// Counts an attempt to read the configuration again, and keeps why it was refused, or why a restart with it would
    /// be.
    pub(crate) fn on_reload(&mut self, outcome: Result<Vec<String>, String>) {
        let count = if outcome.is_ok() { &mut self.reloads.done } else { &mut self.reloads.failed };
        *count += 1;
        (self.refused_at_restart, self.refused_reload) = match outcome {
            Ok(refused) => (refused, None),
            Err(refused) => (Vec::new(), Some(refused)),
        };
    }

    /// Measures the load of workers since the last call.
    pub(super) fn note_loads(&mut self, workers: &Workers) {
        self.loads.note(workers.stats().map(|stats| stats.turns));
    }

    /// The status at this moment.
    #[must_use]
    pub(super) fn status(&self, view: NodeView<'_>, about: PortFilter, health: &Health) -> AgentStatus {
        let steering = view.ports.steering();
        let (pending_events, events) = view.events();
        let mut status = AgentStatus {
            schema: SCHEMA.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            pins: steering.attachments().pins().map(Path::to_owned),
            records: self.records.clone(),
            uptime: self.started.elapsed().as_secs_f64(),
            live: health.deadly().next().is_none(),
            ready: health.hindering().next().is_none(),
            phase: phase(health),
            side: steering.hubs().side(),
            from_snapshot: self.from_snapshot,
            has_left: steering.takeover().has_inherited(),
            troubles: health.hindering().map(|trouble| trouble.to_string()).collect(),
            workers: self.workers(view, health),
            ports: view.ports_report(about),
            instances: view.instances_by_state(),
            datasources: view.datasources(),
            identities: view.ports.identity_count() as u64,
            conflicts: view.conflicts(),
            refused: view.refused(),
            shadowed: view.shadowed(),
            mac_mismatches: Vec::new(),
            shared_uuids: view.shared_uuids(),
            missing_token_key: view.catalogue.missing_token_key().map(Into::into),
            sources: self.source_reports(),
            identity: self.identity_report(),
            record_memory: {
                let usage = view.catalogue.room().usage();
                RecordMemory { used: usage.used as u64, limit: usage.limit as u64 }
            },
            shares: view.shares().into_iter().map(share).collect(),
            attachments: attachments(steering),
            pending_events,
            events,
            counters: self.troubling(view),
            lately: logging::recent_warnings(),
        };
        self.complain(view, &mut status);
        status
    }

    /// Adds troubles on which an operator should act, in addition to those that keep the agent from being ready.
    fn complain(&self, view: NodeView<'_>, status: &mut AgentStatus) {
        status.troubles.extend(status.attachments.faults.iter().cloned());
        if self.from_snapshot {
            status.troubles.push("records come from the snapshot: their source is unavailable".into());
        }
        status.troubles.extend(self.refused_reload.as_ref().map(|reason| {
            format!("the configuration was refused at the last reload, and stays unchanged: {reason}")
        }));
        status.troubles.extend(self.refused_at_restart.iter().map(|reason| {
            format!("the agent would not start again with the configuration of the last reload: {reason}")
        }));
        status.troubles.extend(self.outages.values().flat_map(Outage::problems));
        status.troubles.extend(view.catalogue.state_troubles());
        status.troubles.extend(
            self.sources.iter().filter_map(|source| source.health()).flat_map(|health| health.problems),
        );
        if let Some(identity) = &status.identity {
            if identity.ended {
                status.troubles.push("the signer of identity tokens has ended: restart the agent".into());
            } else if identity.signs.is_none() {
                status
                    .troubles
                    .push("there is no key for identity tokens: add one to `identity.keys`".into());
            }
            let expiry = identity.certificate_expires.and_then(|expires| expiry(expires, unix_now()));
            status.troubles.extend(expiry.map(|expiry| {
                format!(
                    "the certificate for signed documents {expiry}: replace the files of `identity.certificate`"
                )
            }));
        }
        let mismatches = view.mac_mismatches();
        let listed = mismatches.iter().take(LISTED_COMPLAINTS);
        status.mac_mismatches = listed.map(|(port, sender)| view.mac_mismatch(port, *sender)).collect();
        status.troubles.extend(status.mac_mismatches.iter().map(ToString::to_string));
        if let more @ 1.. = mismatches.len().saturating_sub(LISTED_COMPLAINTS) {
            let ports = counted(more as u64, "more port");
            status.troubles.push(format!("frames of MACs that no record has there are dropped at {ports}"));
        }
        let errors = status.ports.counts.get(&PortState::Error).copied().unwrap_or_default();
        let conflicts = view.catalogue.plan().conflicts().count() as u64;
        let refused = view.catalogue.registry().refused().count() as u64;
        status.count_problems([errors, refused, conflicts]);
    }

    fn identity_report(&self) -> Option<IssuerState> {
        let (issuer, publication) = self.identity.as_ref()?;
        let SignerReport { issuer: url, algorithm, keys, signs, certificate_expires, ended } =
            publication.report();
        let signed = issuer.counts().signed;
        let algorithm = algorithm.into();
        Some(IssuerState { issuer: url, algorithm, keys, signs, certificate_expires, ended, signed })
    }

    /// How the sources can be read that say so.
    pub(crate) fn source_reports(&self) -> Vec<SourceStatus> {
        let report = |source: &Arc<dyn Source>| {
            let SourceHealth { reads, asked_for, answered, on_demand, failing, failures, notes, problems: _ } =
                source.health()?;
            let on_demand = on_demand.map(|OnDemandParty { name, answered, away }| OnDemandStatus {
                name,
                answered,
                away,
            });
            let failing =
                failing.map(|FailureStreak { since, kind, reason }| FailedReads { since, kind, reason });
            let source = source.kind();
            Some(SourceStatus { source, reads, asked_for, answered, on_demand, failing, failures, notes })
        };
        self.sources.iter().filter_map(report).collect()
    }

    fn workers(&self, view: NodeView<'_>, health: &Health) -> Vec<WorkerStatus> {
        let beats = health.workers().map(|(_, beat)| beat.age());
        let hubs = view.ports.steering().hubs().all().iter().zip(view.ports.workers().stats()).zip(beats);
        let each = hubs.enumerate().map(|(at, ((hub, stats), age))| {
            let engine = stats.engine;
            WorkerStatus {
                hub: hub.number,
                device: hub.inner_name.clone(),
                heartbeat: age.map(|age| age.as_secs_f64()),
                load: self.loads.of(at),
                connections: engine.connections,
                guests: engine.ports,
                requests: self
                    .tallies
                    .get(at)
                    .map_or(0, |tally| tally.answers().map(|(.., count)| count).sum()),
            }
        });
        each.collect()
    }

    /// Counters that are 0 on a healthy node.
    fn troubling(&self, view: NodeView<'_>) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        match view.ports.steering().maps().counters() {
            Ok(kernel) => {
                let of = |wanted: Verdict| {
                    kernel.iter().find(|(verdict, _)| *verdict == wanted).map_or(0, |(_, frames)| frames)
                };
                for (name, verdict) in [
                    ("frames_over_limit", Verdict::DropOverLimit),
                    ("frames_without_hub", Verdict::DropNoHub),
                    ("frames_without_socket", Verdict::SocketDropAbsent),
                    ("frames_without_ring", Verdict::RingDropAbsent),
                    ("namespace_ring_full", Verdict::RingDropFull),
                    ("identity_mismatch", Verdict::DropUnknownMac),
                ] {
                    counts.insert(name.to_owned(), of(verdict));
                }
            }
            Err(error) => warn!("kernel counters: {error}"),
        }
        let errands = view.catalogue.errands();
        let losses = view.ports.steering().losses();
        counts.insert("refused_by_ports".into(), losses.ports);
        counts
            .insert("namespace_numbers_retired".into(), view.ports.steering().attachments().retired() as u64);
        counts.insert("slots_retired".into(), view.ports.bindings().retired());
        counts.insert("veth_full".into(), losses.hubs.iter().map(|hub| hub.veth_full).sum());
        let mut add = |name: &str, count: u64| *counts.entry(name.to_owned()).or_default() += count;
        for stats in view.ports.workers().stats() {
            add("ring_full", stats.socket.ring_full);
            add("send_lost", stats.tap.full + stats.tap.no_memory + stats.tap.down + stats.tap.other);
            add(
                "connections_refused",
                stats.engine.refused_connections + stats.engine.refused_port_connections,
            );
            add("guests_refused", stats.engine.refused_ports);
            add("faults", stats.engine.faults);
        }
        let expired = |tally: &Arc<WorkerCounts>| tally.ended(WaitReason::Record, WaitEnd::Expired);
        add("requests_without_record", self.tallies.iter().map(expired).sum());
        let audit = view.ports.answers().audit_counts().unwrap_or_default();
        add("audit_dropped", audit.queue_full + audit.write_failed);
        add("messages_dropped", errands.messages.dropped);
        add("state_errors", errands.mailboxes.loads_failed + errands.mailboxes.saves_failed);
        add("records_rejected", view.catalogue.registry().refusals());
        counts
    }
}

fn share(ShareReport { limit, used, most, refusals, top }: ShareReport) -> Share {
    let tenants = top.into_iter();
    let tenants = tenants.map(|(tenant, held)| TenantShare { tenant: tenant.to_string(), held: held as u64 });
    Share {
        limit: limit.into(),
        used: used as u64,
        most: most as u64,
        refused: refusals,
        tenants: tenants.collect(),
    }
}

/// Says of a certificate until `expires` that it has expired, or that it will soon. Both times are in Unix seconds.
fn expiry(expires: u64, now: u64) -> Option<String> {
    match expires.checked_sub(now).map(|left| left / DAY) {
        None => Some("has expired".into()),
        Some(days) if days < CERTIFICATE_DAYS => Some(format!("expires in {}", counted(days, "day"))),
        Some(_) => None,
    }
}

/// The last comparison of what is attached and pinned with what the kernel has.
fn attachments(steering: &Steering) -> AttachmentStatus {
    let found = steering.attachments().last_check();
    AttachmentStatus {
        checked: found.checked.map(|ago| ago.as_secs_f64()),
        faults: found.faults,
        found: found.found.into_iter().map(|(fault, count)| (fault.name().to_owned(), count)).collect(),
        retired: found.retired as u64,
    }
}

/// The phase of the agent's life.
fn phase(health: &Health) -> Phase {
    match (health.is_draining(), health.is_settled()) {
        (true, _) => Phase::Draining,
        (false, true) => Phase::Serving,
        (false, false) => Phase::Starting,
    }
}

// The recent load of workers.

/// The load of each worker, from two readings of its clock a few seconds apart.
#[derive(Debug, Default)]
struct Loads(Vec<Load>);

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    elapsed: Duration,
    awake: Duration,
    last: f64,
}

impl Loads {
    /// Reads the clocks of all workers, in the order of their hubs.
    fn note(&mut self, workers: impl Iterator<Item = LoopStats>) {
        for (at, LoopStats { elapsed, slept, .. }) in workers.enumerate() {
            let awake = elapsed.saturating_sub(slept);
            // A worker is busy while it starts, so the time before the first reading does not count.
            if at == self.0.len() {
                self.0.push(Load { elapsed, awake, last: 0.0 });
            }
            let load = &mut self.0[at];
            let (over, of) = (elapsed.saturating_sub(load.elapsed), awake.saturating_sub(load.awake));
            // If the worker has published nothing since the last reading, its last load stays.
            if !over.is_zero() {
                *load = Load { elapsed, awake, last: of.as_secs_f64() / over.as_secs_f64() };
            }
        }
    }

    /// The fraction of the time between the last two readings in which a worker was awake, 0 to 1.
    fn of(&self, hub: usize) -> f64 {
        self.0.get(hub).map_or(0.0, |load| load.last.clamp(0.0, 1.0))
    }
}

// The facts behind `/metrics`.

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use metadata_datapath::worker::LoopStats;

    use super::{DAY, Loads, expiry};

    #[test]
    fn a_certificate_is_complained_of_before_it_expires_and_afterwards() {
        let now = 1_000 * DAY;
        for (expires, expected) in [
            (now + 14 * DAY, None),
            (now + 14 * DAY - 1, Some("expires in 13 days")),
            (now + DAY, Some("expires in 1 day")),
            (now, Some("expires in 0 days")),
            (now - 1, Some("has expired")),
            (0, Some("has expired")),
        ] {
            assert_eq!(expiry(expires, now).as_deref(), expected, "{expires}");
        }
    }

    #[test]
    fn a_load_covers_the_time_between_two_readings_and_is_0_before_them() {
        let look = |elapsed, slept| LoopStats {
            elapsed: Duration::from_secs(elapsed),
            slept: Duration::from_secs(slept),
            ..LoopStats::default()
        };
        let mut loads = Loads::default();
        assert_eq!(loads.of(0), 0.0);
        for (elapsed, slept, load) in [(10, 0, 0.0), (20, 5, 0.5), (20, 5, 0.5), (24, 5, 1.0)] {
            loads.note([look(elapsed, slept)].into_iter());
            assert_eq!(loads.of(0), load, "after {elapsed} s");
        }
    }
}
