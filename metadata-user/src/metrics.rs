//! Renders kernel and user counters as Prometheus text
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>, version 0.0.4).
//!
//! [`render`] is a pure function: the server of `/metrics` gathers a [`Snapshot`] and sends the rendered text.
//! Each section adds its metric families to one [`Exposition`].

mod node;

#[cfg(test)]
mod tests;

use metadata_common::printable::is_printable;
use metadata_common::share::ShareReport;
use metadata_content::identity::IdentityCounts;
use metadata_content::sink::SinkCounts;
use metadata_control::status::{Instances, PortState, SourceStatus};
use metadata_datapath::worker::WorkerStats;
use metadata_feed::memory_budget::Usage;
use metadata_feed::state::mailboxes::MailboxCounts;
use metadata_steer::{AttachmentCheck, HubLosses};
use node::HubFamilies;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use std::{fmt, fs};

use crate::identity::SignerReport;
use crate::service::audit::AuditCounts;
use crate::service::{BOUNDS_NS, DocumentCounts, Latencies, WaitEnd, WaitReason, WorkerCounts};

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
    /// What is published to the kernel; `None` if it answers no requests.
    pub documents: Option<DocumentCounts>,
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
    answers(snapshot.tallies, &mut out);
    waits(snapshot.tallies, &mut out);
    if let Some(counts) = &snapshot.documents {
        documents(counts, &mut out);
    }
    if let Some(lines) = &snapshot.audit {
        audit(lines, &mut out);
    }
    let numbers: Vec<String> = snapshot.hubs.iter().map(|hub| hub.number.to_string()).collect();
    let hubs = HubFamilies { hubs: snapshot.hubs, numbers: &numbers };
    hubs.received(&mut out);
    hubs.sent(&mut out);
    hubs.turns(&mut out);
    hubs.engine(&mut out);
    if let Some(process) = &snapshot.process {
        process.expose(&mut out);
    }
    out.into_text()
}

// The Prometheus text format.

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricType {
    /// A value that only grows while the agent runs; the name ends in `_total`.
    Counter,
    /// A value that can also decrease.
    Gauge,
    /// Counts of values per upper bound, with the sum and the number of all values.
    Histogram,
}

/// A time in seconds, to the nanosecond.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0.as_secs(), self.0.subsec_nanos())
    }
}

/// Builder of the text.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Adds a family: its head, and one line per sample. A sample has labels and a value. A family without samples is
    /// left out.
    pub fn family<'a, const N: usize, V: fmt::Display>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        samples: impl IntoIterator<Item = ([(&'a str, &'a str); N], V)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        self.head(name, help, kind);
        for (labels, value) in samples {
            self.text.push_str(name);
            for (i, (label, text)) in labels.into_iter().enumerate() {
                let open = if i == 0 { '{' } else { ',' };
                self.line(format_args!("{open}{label}=\"{}\"", Escaped { text, quotes: true }));
            }
            let close = if N == 0 { "" } else { "}" };
            self.line(format_args!("{close} {value}\n"));
        }
    }

    /// Adds a histogram. `counts` has the number of values in each bucket; the last bucket has no upper bound. `total`
    /// is the sum of all values.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        bounds: &[Duration],
        counts: &[u64],
        total: Duration,
    ) {
        debug_assert!(counts.len() == bounds.len() + 1, "one bucket more than bounds");
        self.head(name, help, MetricType::Histogram);
        let (mut bounds, mut sum) = (bounds.iter(), 0);
        for count in counts {
            sum += count;
            match bounds.next() {
                Some(bound) => {
                    self.line(format_args!("{name}_bucket{{le=\"{}\"}} {sum}\n", bound.as_secs_f64()))
                }
                None => self.line(format_args!("{name}_bucket{{le=\"+Inf\"}} {sum}\n")),
            }
        }
        self.line(format_args!("{name}_sum {}\n{name}_count {sum}\n", Seconds(total)));
    }

    fn head(&mut self, name: &str, help: &str, kind: MetricType) {
        let kind = match kind {
            MetricType::Counter => "counter",
            MetricType::Gauge => "gauge",
            MetricType::Histogram => "histogram",
        };
        let help = Escaped { text: help, quotes: false };
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// Returns the text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, line: fmt::Arguments<'_>) {
        let written = self.text.write_fmt(line);
        debug_assert!(written.is_ok(), "writing to a String does not fail");
    }
}

/// Displays a help text or label value. Backslashes and line feeds are escaped, unprintable characters are shown, and
/// quotes are escaped if `quotes` is true.
struct Escaped<'a> {
    text: &'a str,
    quotes: bool,
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.text.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                '"' if self.quotes => f.write_str("\\\"")?,
                c if is_printable(c) => f.write_char(c)?,
                // As others print it. The backslash is one of the text.
                c => write!(f, "\\{}", c.escape_unicode())?,
            }
        }
        Ok(())
    }
}

// Metrics of the process, under the standard names
// (<https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics>).

/// Resource use of this process, from `/proc/self`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessMetrics {
    /// CPU time of all threads.
    pub cpu: Duration,
    /// Resident memory in bytes.
    pub resident: u64,
    /// Virtual memory in bytes.
    pub virtual_size: u64,
    /// Threads.
    pub threads: u64,
    /// Open file descriptors.
    pub descriptors: u64,
    /// Limit of open file descriptors; `None` if there is no limit.
    pub most_descriptors: Option<u64>,
    /// Start time since the Unix epoch.
    pub started: Duration,
}

impl ProcessMetrics {
    /// Reads `/proc/self`. Returns `None` if that fails.
    #[must_use]
    pub fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // The command name may hold any character, so fields are counted after it, from field 3 (proc_pid_stat(5)).
        let (_, fields) = stat.rsplit_once(')')?;
        let fields: Vec<u64> =
            fields.split_whitespace().map(|field| field.parse().unwrap_or_default()).collect();
        let field = |number: usize| fields.get(number - 3).copied();
        let ticks = rustix::param::clock_ticks_per_second().max(1);
        let time = |of: u64| {
            Duration::from_nanos(
                u64::try_from(u128::from(of) * 1_000_000_000 / u128::from(ticks)).unwrap_or(u64::MAX),
            )
        };
        let uptime = fs::read_to_string("/proc/uptime").ok()?;
        let uptime = Duration::try_from_secs_f64(uptime.split(' ').next()?.parse().ok()?).ok()?;
        let age = uptime.saturating_sub(time(field(22)?));
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(Self {
            cpu: time(field(14)? + field(15)?),
            resident: field(24)? * rustix::param::page_size() as u64,
            virtual_size: field(23)?,
            threads: field(20)?,
            descriptors: descriptors()?,
            most_descriptors: rustix::process::getrlimit(rustix::process::Resource::Nofile).current,
            started: now.saturating_sub(age),
        })
    }

    fn expose(&self, out: &mut Exposition) {
        let none: [(&str, &str); 0] = [];
        let cpu = [(none, self.cpu.as_secs_f64())];
        let help = "Time the process has spent on CPUs.";
        out.family("process_cpu_seconds_total", help, MetricType::Counter, cpu);
        let started = [(none, self.started.as_secs_f64())];
        out.family(
            "process_start_time_seconds",
            "Start time of the process, in seconds since 1970.",
            MetricType::Gauge,
            started,
        );
        for (name, help, value) in [
            ("process_resident_memory_bytes", "Resident memory.", Some(self.resident)),
            ("process_virtual_memory_bytes", "Virtual memory.", Some(self.virtual_size)),
            ("process_threads", "Threads.", Some(self.threads)),
            ("process_open_fds", "Open file descriptors.", Some(self.descriptors)),
            ("process_max_fds", "Limit of open file descriptors.", self.most_descriptors),
        ] {
            out.family(name, help, MetricType::Gauge, value.map(|value| (none, value)));
        }
    }
}

/// Number of open file descriptors. Linux 6.2 and later report it directly; on older kernels the entries are counted.
fn descriptors() -> Option<u64> {
    let directory = "/proc/self/fd";
    match fs::metadata(directory).ok()?.len() {
        0 => Some(fs::read_dir(directory).ok()?.count() as u64),
        open => Some(open),
    }
}

// Metrics of requests: answers, latency, waiting requests and the audit log.

/// Adds answers by dialect and status, and their latency.
fn answers(tallies: &[Arc<WorkerCounts>], out: &mut Exposition) {
    if tallies.is_empty() {
        return;
    }
    let mut counts = BTreeMap::new();
    for (datasource, code, count) in tallies.iter().flat_map(|tally| tally.answers()) {
        *counts.entry((datasource.label(), code)).or_insert(0) += count;
    }
    let counts: Vec<_> = counts
        .into_iter()
        .map(|((datasource, code), count)| {
            (datasource, if code == 0 { "other".into() } else { code.to_string() }, count)
        })
        .collect();
    out.family(
        "xdp_imds_requests_total",
        "Answered requests, by status and dialect (none: no dialect serves the path, or the request is malformed).",
        MetricType::Counter,
        counts.iter().map(|(datasource, code, count)| ([("datasource", *datasource), ("code", code.as_str())], *count)),
    );
    let Latencies { buckets, total } =
        tallies.iter().map(|tally| tally.latencies()).fold(Latencies::default(), std::ops::Add::add);
    out.histogram(
        "xdp_imds_request_duration_seconds",
        "Time from the receipt of a request's last byte until its answer is passed to TCP, in steps of the worker's turns.",
        &BOUNDS_NS.map(Duration::from_nanos),
        &buckets,
        total,
    );
}

/// Adds requests that wait for their record, for their turn or for a change.
fn waits(tallies: &[Arc<WorkerCounts>], out: &mut Exposition) {
    if tallies.is_empty() {
        return;
    }
    let sum = |of: &dyn Fn(&WorkerCounts) -> u64| tallies.iter().map(|tally| of(tally)).sum::<u64>();
    let now =
        WaitReason::ALL.map(|reason| ([("reason", reason.label())], sum(&|tally| tally.waiting(reason))));
    let help =
        "Complete requests that wait for their record, for their turn under the VM's limit, or for a change.";
    out.family("xdp_imds_parked_requests", help, MetricType::Gauge, now);
    let ended = WaitReason::ALL.into_iter().flat_map(|reason| {
        WaitEnd::ALL.map(|end| {
            ([("reason", reason.label()), ("outcome", end.label())], sum(&|tally| tally.ended(reason, end)))
        })
    });
    let help = "Ended waits of requests, by reason and outcome.";
    out.family("xdp_imds_parked_total", help, MetricType::Counter, ended.collect::<Vec<_>>());
}

/// Adds what the kernel answers by itself.
fn documents(counts: &DocumentCounts, out: &mut Exposition) {
    let none: [(&str, &str); 0] = [];
    let DocumentCounts { learned, vms, documents, responses, displaced } = *counts;
    let gauges = [
        (
            "xdp_imds_learned_requests",
            "Requests whose answers are published to the kernel for each VM.",
            learned,
        ),
        ("xdp_imds_published_vms", "VMs for which the kernel answers requests.", vms),
        (
            "xdp_imds_published_documents",
            "Answers in the kernel's table. VMs that answer alike share them.",
            documents,
        ),
        ("xdp_imds_published_responses", "Distinct answers in the kernel's table.", responses),
    ];
    for (name, help, value) in gauges {
        out.family(name, help, MetricType::Gauge, [(none, value)]);
    }
    let help = "VMs whose answers were withdrawn from the kernel because a table was full.";
    out.family("xdp_imds_displaced_vms_total", help, MetricType::Counter, [(none, displaced)]);
}

/// Adds lines of the audit log by outcome.
fn audit(counts: &AuditCounts, out: &mut Exposition) {
    let none: [(&str, &str); 0] = [];
    let AuditCounts { written, sampled, queue_full, write_failed } = *counts;
    let help = "Lines written to the audit log.";
    out.family("xdp_imds_audit_lines_total", help, MetricType::Counter, [(none, written)]);
    let dropped = [("queue_full", queue_full), ("sampled", sampled), ("write_failed", write_failed)];
    let help = "Requests that have no line of their own in the audit log, by reason.";
    out.family(
        "xdp_imds_audit_dropped_total",
        help,
        MetricType::Counter,
        dropped.map(|(reason, count)| ([("reason", reason)], count)),
    );
}
