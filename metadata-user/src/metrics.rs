//! Renders kernel and user counters as Prometheus text
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4).
//!
//! [`render`] is a pure function: the server of `/metrics` gathers a [`Snapshot`] and sends the rendered text.
//! Each module adds its metric families to one [`Exposition`].

mod exposition;
mod hubs;
mod node;
mod process;
mod requests;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::service::WorkerCounts;
use crate::service::audit::AuditCounts;
use metadata_common::share::ShareReport;
use metadata_content::identity::IdentityCounts;
use metadata_content::sink::SinkCounts;
use metadata_control::status::{Instances, PortState, SourceStatus};
use metadata_datapath::worker::WorkerStats;
use metadata_feed::memory_budget::Usage;
use metadata_feed::state::mailboxes::MailboxCounts;
use metadata_steer::{AttachmentCheck, HubLosses};

use crate::identity::SignerReport;
pub use exposition::{Exposition, MetricType};
use hubs::Hubs;
pub use process::ProcessMetrics;

/// The `Content-Type` of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A hub and its counters.
#[derive(Clone, Debug)]
pub struct HubMetrics<'a, T> {
    /// The hub's number.
    pub number: u32,
    /// Frames lost in the hub's devices.
    pub losses: HubLosses,
    /// The counters of the hub's worker.
    pub worker: WorkerStats<T>,
    /// The engine's counters, by name (`snake_case`, without prefix or suffix).
    pub counters: &'a [(&'static str, u64)],
    /// The engine's gauges, by name (`snake_case`, without prefix or suffix).
    pub gauges: &'a [(&'static str, u64)],
}

/// All counters and gauges at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot<'a, T> {
    /// `/readyz` reports success.
    pub is_ready: bool,
    /// Problems that `xdp-imds status` lists.
    pub problems: u64,
    /// Frames that the eBPF programs counted, by the name of their verdict.
    pub verdicts: &'a [(&'static str, u64)],
    /// Ports attached.
    pub ports: u64,
    /// Attached ports by the name of the program that steers them.
    pub steered_by: [(&'static str, u64); 2],
    /// Ports that the configuration and the records name, by state.
    pub taps: &'a [(PortState, u64)],
    /// Records by source and state.
    pub instances: &'a [Instances],
    /// Identities that are bound to a slot.
    pub identities: u64,
    /// Number and times of ports attached since the start.
    pub attaching: AttachHistogram,
    /// Time spent on rendering records.
    pub rendering: Duration,
    /// Records held.
    pub records: u64,
    /// Records refused since the start.
    pub records_rejected: u64,
    /// Memory that records use.
    pub room: Usage,
    /// How tenants share the node's limits.
    pub shares: &'a [ShareReport],
    /// Reloads of the configuration.
    pub config_reloads: Reloads,
    /// Answers of each worker.
    pub tallies: &'a [Arc<WorkerCounts>],
    /// Counters of the audit log; `None` if it is off.
    pub audit: Option<AuditCounts>,
    /// Figures of the process; `None` if `/proc/self` cannot be read.
    pub process: Option<ProcessMetrics>,
    /// Whether records come from the snapshot because their source is unavailable.
    pub from_snapshot: bool,
    /// How the sources of records can be read.
    pub sources: &'a [SourceStatus],
    /// The signer of identity tokens and the counts of its tokens; `None` on a node that issues none.
    pub identity: Option<(SignerReport, IdentityCounts)>,
    /// Counters of messages from guests and of data stored for guests.
    pub errands: BackgroundCounters,
    /// Frames that the ports' devices refused.
    pub refused_by_ports: u64,
    /// What is attached and pinned, compared with what the kernel has.
    pub attachments: &'a AttachmentCheck,
    /// Slots that are not used again.
    pub slots_retired: u64,
    /// The hubs.
    pub hubs: &'a [HubMetrics<'a, T>],
}

/// Time to attach ports, each measured from the inspection of its device until its guest is bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttachHistogram {
    /// Ports attached since the start, including those detached since.
    pub count: u64,
    /// Sum of their times.
    pub total: Duration,
    /// Median of the most recent 4,096 times.
    pub median: Duration,
    /// Time from the discovery of a wanted tap until its guest was bound.
    pub lag: BindHistogram,
}

/// Upper bounds of [`BindHistogram`]'s buckets.
pub const LAG_BOUNDS: [Duration; 10] = [
    Duration::from_millis(1),
    Duration::from_millis(5),
    Duration::from_millis(25),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_millis(2_500),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// Histogram of the time that taps waited for their guest to be bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct BindHistogram {
    /// Counts per bucket; the last bucket has no upper bound.
    pub buckets: [u64; LAG_BOUNDS.len() + 1],
    /// Sum of all waits.
    pub total: Duration,
}

impl BindHistogram {
    /// Counts one tap that waited this long.
    pub fn waited(&mut self, time: Duration) {
        let bucket = LAG_BOUNDS.iter().position(|bound| time <= *bound).unwrap_or(LAG_BOUNDS.len());
        self.buckets[bucket] += 1;
        self.total += time;
    }
}

/// Attempts to read the configuration again since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reloads {
    /// Attempts that put a new configuration in force.
    pub done: u64,
    /// Attempts that failed and left the configuration in force unchanged.
    pub failed: u64,
}

/// Counters of work for guests other than answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackgroundCounters {
    /// Messages that guests send to sinks.
    pub messages: SinkCounts,
    /// Data that guests store with the agent.
    pub mailboxes: MailboxCounts,
    /// Files of the state directory whose last write failed.
    pub unsaved: u64,
}

/// Renders a snapshot as Prometheus text.
#[must_use]
pub fn render<T>(snapshot: &Snapshot<'_, T>) -> String {
    let mut out = Exposition::default();
    node::build(&mut out);
    node::health(snapshot, &mut out);
    node::frames(snapshot.verdicts, &mut out);
    node::ports(snapshot, &mut out);
    node::attachments(snapshot, &mut out);
    node::records(snapshot, &mut out);
    node::sources(snapshot.sources, &mut out);
    if let Some((report, counts)) = &snapshot.identity {
        node::identity(report, counts, &mut out);
    }
    node::errands(&snapshot.errands, &mut out);
    requests::answers(snapshot.tallies, &mut out);
    requests::waits(snapshot.tallies, &mut out);
    if let Some(audit) = &snapshot.audit {
        requests::audit(audit, &mut out);
    }
    let numbers: Vec<String> = snapshot.hubs.iter().map(|hub| hub.number.to_string()).collect();
    let hubs = Hubs { hubs: snapshot.hubs, numbers: &numbers };
    hubs.received(&mut out);
    hubs.sent(&mut out);
    hubs.turns(&mut out);
    hubs.engine(&mut out);
    if let Some(process) = &snapshot.process {
        process.expose(&mut out);
    }
    out.into_text()
}
