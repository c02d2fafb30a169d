//! Kernel and user counters joined, as Prometheus text
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4).
//!
//! A pure function of what it is given: whoever serves `/metrics` gathers a [`Snapshot`] and sends what
//! [`render`] makes of it. [`Exposition`] takes further families, one after the other.

mod exposition;
mod hubs;
mod node;
mod process;
mod requests;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use metadata_content::sink::SinkCounts;
use metadata_control::status::{ApiServer, Instances, PortState};
use metadata_datapath::worker::WorkerStats;
use metadata_feed::room::Usage;
use metadata_serve::Tally;
use metadata_serve::audit::AuditCounts;
use metadata_state::mailboxes::MailboxCounts;
use metadata_steer::HubLosses;

pub use exposition::{Exposition, Kind};
use hubs::Hubs;
pub use process::Process;

/// The `Content-Type` of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One hub's worker.
#[derive(Clone, Debug)]
pub struct Hub<'a, T> {
    /// The hub's number.
    pub number: u32,
    /// Frames lost on the way through its devices.
    pub losses: HubLosses,
    /// Its worker's counters.
    pub worker: WorkerStats<T>,
    /// The engine's counters, by name (`snake_case`, without prefix or suffix).
    pub counters: &'a [(&'static str, u64)],
    /// The engine's gauges, likewise.
    pub gauges: &'a [(&'static str, u64)],
}

/// Everything counted, at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot<'a, T> {
    /// Frames the kernel side decided on, by the verdict's name.
    pub verdicts: &'a [(&'static str, u64)],
    /// Ports attached.
    pub ports: u64,
    /// Of these, how many each program steers, by its name.
    pub steered_by: [(&'static str, u64); 2],
    /// Ports the configuration and the records ask for, by what has become of them.
    pub taps: &'a [(PortState, u64)],
    /// Records, by where they came from and what has become of them.
    pub instances: &'a [Instances],
    /// Identities bound.
    pub identities: u64,
    /// Attachments so far.
    pub attaching: Attaching,
    /// Time spent on rendering records.
    pub rendering: Duration,
    /// Records held.
    pub records: u64,
    /// Records refused since the start.
    pub records_rejected: u64,
    /// What records take of memory.
    pub room: Usage,
    /// Times the configuration was read again.
    pub config_reloads: Reloads,
    /// What each worker has answered.
    pub tallies: &'a [Arc<Tally>],
    /// What became of lines of the audit log, if there is one.
    pub audit: Option<AuditCounts>,
    /// The process, if the kernel tells.
    pub process: Option<Process>,
    /// Whether records come from the snapshot, their source being away.
    pub from_snapshot: bool,
    /// How the API server answers, if a feed asks one.
    pub api_server: Option<ApiServer>,
    /// What became of messages from guests, and of what is kept for them.
    pub errands: Errands,
    /// Frames that devices of ports did not take.
    pub refused_by_ports: u64,
    /// The hubs.
    pub hubs: &'a [Hub<'a, T>],
}

/// How long attaching ports has taken, from the look at the port until its guest is bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attaching {
    /// Ports attached since the start, those that have gone included.
    pub count: u64,
    /// What all of them took.
    pub total: Duration,
    /// The median of the last few thousand.
    pub median: Duration,
    /// How long it was from the first sight of a tap until its guest was bound.
    pub lag: Lag,
}

/// Upper bounds of [`Lag`]'s buckets.
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

/// A histogram of how long taps waited.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lag {
    /// By bucket, the last without bound.
    pub buckets: [u64; LAG_BOUNDS.len() + 1],
    /// In all.
    pub total: Duration,
}

impl Lag {
    /// One more waited so long.
    pub fn waited(&mut self, time: Duration) {
        let bucket = LAG_BOUNDS.iter().position(|bound| time <= *bound).unwrap_or(LAG_BOUNDS.len());
        self.buckets[bucket] += 1;
        self.total += time;
    }
}

/// Attempts to read the configuration again since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reloads {
    /// The new configuration is in force.
    pub done: u64,
    /// The configuration was unusable; the old one stays in force.
    pub failed: u64,
}

/// What is done for guests beside answering them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errands {
    /// Messages on their way to sinks.
    pub messages: SinkCounts,
    /// What guests wrote.
    pub mailboxes: MailboxCounts,
}

/// The text of a snapshot.
#[must_use]
pub fn render<T>(snapshot: &Snapshot<'_, T>) -> String {
    let mut out = Exposition::default();
    node::build(&mut out);
    node::frames(snapshot.verdicts, &mut out);
    node::ports(snapshot, &mut out);
    node::records(snapshot, &mut out);
    if let Some(server) = &snapshot.api_server {
        node::api_server(server, &mut out);
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
