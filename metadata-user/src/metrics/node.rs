//! Metrics of the node: build, verdicts, ports, records, API server, and messages and data of guests.

use metadata_common::share::{ShareReport, Tenant};
use metadata_common::verdict::Verdict;
use metadata_content::identity::IdentityCounts;
use metadata_control::status::SourceStatus;
use metadata_datapath::worker::WorkerStats;
use metadata_feed::memory_budget::Usage;
use metadata_steer::AttachmentCheck;
use std::time::Duration;

use super::{
    AttachHistogram, BackgroundCounters, Exposition, HubMetrics, LAG_BOUNDS, MetricType, Reloads, Seconds,
    Snapshot,
};
use crate::identity::SignerReport;

const NONE: [(&str, &str); 0] = [];

/// Adds version and architecture.
pub(super) fn build(out: &mut Exposition) {
    let labels = [("version", env!("CARGO_PKG_VERSION")), ("arch", std::env::consts::ARCH)];
    out.family(
        "xdp_imds_build_info",
        "Version and architecture of the agent; always 1.",
        MetricType::Gauge,
        [(labels, 1)],
    );
}

/// Adds readiness and the number of problems.
pub(super) fn health<T>(snapshot: &Snapshot<'_, T>, out: &mut Exposition) {
    let help = "1 if records are read, ports are settled, every worker runs and the agent is not stopping.";
    out.family("xdp_imds_ready", help, MetricType::Gauge, [(NONE, u64::from(snapshot.is_ready))]);
    let help = "Problems that an operator needs to act on, as `xdp-imds status` lists them.";
    out.family("xdp_imds_problems", help, MetricType::Gauge, [(NONE, snapshot.problems)]);
}

/// Adds frames by verdict.
pub(super) fn frames(verdicts: &[(&str, u64)], out: &mut Exposition) {
    let each = verdicts.iter().map(|(name, count)| ([("verdict", *name)], *count));
    let (name, help) = (
        "xdp_imds_frames_total",
        "Frames on attached ports and on hubs, by verdict. Classifiers do not count pass_ipv4.",
    );
    out.family(name, help, MetricType::Counter, each);
    let mismatches = verdicts.iter().filter(|(name, _)| *name == Verdict::DropUnknownMac.name());
    out.family(
        "xdp_imds_identity_mismatch_total",
        "Frames dropped because their MAC is not one of their port's.",
        MetricType::Counter,
        mismatches.map(|(_, count)| (NONE, *count)),
    );
}

/// Adds ports and identities.
pub(super) fn ports<T>(snapshot: &Snapshot<'_, T>, out: &mut Exposition) {
    out.family("xdp_imds_ports", "Ports attached.", MetricType::Gauge, [(NONE, snapshot.ports)]);
    let steered = snapshot.steered_by.map(|(program, ports)| ([("program", program)], ports));
    out.family(
        "xdp_imds_ports_steered",
        "Attached ports, by the program that steers them.",
        MetricType::Gauge,
        steered,
    );
    let taps = snapshot.taps.iter().map(|(state, count)| ([("state", state.name())], *count));
    let help = "Ports that records or the configuration name, by state.";
    out.family("xdp_imds_taps", help, MetricType::Gauge, taps);
    let (name, help) = (
        "xdp_imds_port_refused_frames_total",
        "Frames of any sender that ports' devices refused because the guest's ring was full or the device was down.",
    );
    out.family(name, help, MetricType::Counter, [(NONE, snapshot.refused_by_ports)]);
    out.family(
        "xdp_imds_identities",
        "Identities that are bound to a slot.",
        MetricType::Gauge,
        [(NONE, snapshot.identities)],
    );
    attaching(&snapshot.attaching, out);
}

/// Adds what the checks of attached programs found.
pub(super) fn attachments<T>(snapshot: &Snapshot<'_, T>, out: &mut Exposition) {
    let AttachmentCheck { checked, faults, found, retired } = snapshot.attachments;
    let found = found.iter().map(|(fault, count)| ([("fault", fault.name())], *count));
    let (name, help) = (
        "xdp_imds_attachment_faults_total",
        "Programs, links and pins that another program detached, replaced or removed, as checks found them, by fault.",
    );
    out.family(name, help, MetricType::Counter, found);
    let help = "Kinds of fault that the last check of programs, links and pins found.";
    out.family("xdp_imds_attachment_faults", help, MetricType::Gauge, [(NONE, faults.len() as u64)]);
    let help =
        "Time since the last complete check of programs, links and pins; at most 70 in normal operation.";
    let checked = checked.map(|ago| (NONE, Seconds(ago)));
    out.family("xdp_imds_attachments_checked_seconds", help, MetricType::Gauge, checked);
    out.family(
        "xdp_imds_numbers_retired",
        "Numbers that are not used again because it is not proven that no frame carries them, by kind.",
        MetricType::Gauge,
        [("namespace", *retired as u64), ("slot", snapshot.slots_retired)]
            .map(|(kind, count)| ([("kind", kind)], count)),
    );
}

fn attaching(AttachHistogram { count, total, median, lag }: &AttachHistogram, out: &mut Exposition) {
    let (name, help) = ("xdp_imds_attached_total", "Ports attached since the start.");
    out.family(name, help, MetricType::Counter, [(NONE, *count)]);
    let (name, help) =
        ("xdp_imds_attach_seconds_total", "Time spent on attaching ports and binding their guests.");
    out.family(name, help, MetricType::Counter, [(NONE, Seconds(*total))]);
    let (name, help) =
        ("xdp_imds_attach_seconds_median", "Median time to attach a port, of the last 4096 ports.");
    out.family(name, help, MetricType::Gauge, [(NONE, Seconds(*median))]);
    let help = "Time from the discovery of a wanted tap until its guest was bound.";
    out.histogram("xdp_imds_registration_lag_seconds", help, &LAG_BOUNDS, &lag.buckets, lag.total);
}

/// Adds records and reloads of the configuration.
pub(super) fn records<T>(snapshot: &Snapshot<'_, T>, out: &mut Exposition) {
    let rendering = [(NONE, Seconds(snapshot.rendering))];
    out.family(
        "xdp_imds_render_seconds_total",
        "Time spent on rendering records in advance.",
        MetricType::Counter,
        rendering,
    );
    out.family("xdp_imds_records", "Records held.", MetricType::Gauge, [(NONE, snapshot.records)]);
    let instances = snapshot.instances.iter().map(|instances| {
        ([("source", instances.source.as_str()), ("state", instances.state.name())], instances.count)
    });
    let help = "Records held, by source and state.";
    out.family("xdp_imds_instances", help, MetricType::Gauge, instances);
    out.family(
        "xdp_imds_records_source",
        "1 for the place that records are read from: their source, or the snapshot while the source is unavailable.",
        MetricType::Gauge,
        [("source", !snapshot.from_snapshot), ("snapshot", snapshot.from_snapshot)]
            .map(|(name, is)| ([("source", name)], u64::from(is))),
    );
    out.family(
        "xdp_imds_records_rejected_total",
        "Records refused because they are invalid; the previous version stays in force.",
        MetricType::Counter,
        [(NONE, snapshot.records_rejected)],
    );
    let Usage { limit, used, refusals } = snapshot.room;
    let help = "Memory that records use; an upper estimate.";
    out.family("xdp_imds_record_memory_bytes", help, MetricType::Gauge, [(NONE, used as u64)]);
    let help = "Limit of the memory that records use; a record that exceeds it is refused.";
    out.family("xdp_imds_record_memory_limit_bytes", help, MetricType::Gauge, [(NONE, limit as u64)]);
    let help = "Records refused for lack of memory; the previous version stays in force.";
    out.family("xdp_imds_record_memory_refused_total", help, MetricType::Counter, [(NONE, refusals)]);
    shares(snapshot.shares, out);
    let Reloads { done, failed } = snapshot.config_reloads;
    out.family(
        "xdp_imds_config_reloads_total",
        "Reloads of the configuration, by outcome; a failed reload changes nothing.",
        MetricType::Counter,
        [([("outcome", "done")], done), ([("outcome", "failed")], failed)],
    );
}

/// Adds who holds how much of the node's limits. Of each limit at most ten tenants are named, and no VM.
fn shares(shares: &[ShareReport], out: &mut Exposition) {
    let named = shares.iter().flat_map(|share| {
        let tenants = share.top.iter().filter(|(tenant, _)| !matches!(tenant, Tenant::Vm(_)));
        tenants.map(|(tenant, held)| (share.limit, tenant.to_string(), *held as u64))
    });
    let named: Vec<_> = named.collect();
    let held =
        named.iter().map(|(limit, tenant, held)| ([("limit", *limit), ("tenant", tenant.as_str())], *held));
    let help =
        "What a tenant holds of a limit of the node, for the ten tenants of each limit that hold most.";
    out.family("xdp_imds_share_held", help, MetricType::Gauge, held);
    let most = shares.iter().map(|share| ([("limit", share.limit)], share.most as u64));
    let help = "What all tenants may hold of a limit; each has at most half of what the others leave.";
    out.family("xdp_imds_share_limit", help, MetricType::Gauge, most);
    let refused = shares.iter().map(|share| ([("limit", share.limit)], share.refusals));
    let help = "Requests of a tenant for more than its share of a limit.";
    out.family("xdp_imds_share_refused_total", help, MetricType::Counter, refused);
}

/// Adds how the sources of records can be read.
pub(super) fn sources(sources: &[SourceStatus], out: &mut Exposition) {
    if sources.is_empty() {
        return;
    }
    let of = |source: &SourceStatus| [("source", source.source.name())];
    out.family(
        "xdp_imds_source_silence_seconds",
        "Time since a source was last read whole or gave a useful answer, or since the first attempt if there was none; at most 150 in normal operation.",
        MetricType::Gauge,
        sources.iter().map(|source| (of(source), source.silence())),
    );
    out.family(
        "xdp_imds_source_failing",
        "1 while attempts to read a source fail.",
        MetricType::Gauge,
        sources.iter().map(|source| (of(source), u64::from(source.failing.is_some()))),
    );
    let failures = sources.iter().flat_map(|source| {
        let name = source.source.name();
        source.failures.iter().map(move |(kind, count)| ([("source", name), ("kind", kind.as_str())], *count))
    });
    let help = "Failed requests to a source, by kind; gone: the requested history is gone, so the agent lists everything again.";
    out.family("xdp_imds_source_failures_total", help, MetricType::Counter, failures);
}

/// Adds identity tokens and the state of their signer.
pub(super) fn identity(report: &SignerReport, counts: &IdentityCounts, out: &mut Exposition) {
    let IdentityCounts { signed, reused, limited, crowded, failed, waiting } = *counts;
    let outcomes = [
        ("signed", signed),
        ("reused", reused),
        ("limited", limited),
        ("crowded", crowded),
        ("failed", failed),
    ];
    out.family(
        "xdp_imds_identity_tokens_total",
        "Requests for identity tokens, by outcome; limited: beyond the limit of the VM, crowded: beyond that of the node.",
        MetricType::Counter,
        outcomes.map(|(outcome, count)| ([("outcome", outcome)], count)),
    );
    let help = "Identity tokens that wait for their signature.";
    out.family("xdp_imds_identity_tokens_waiting", help, MetricType::Gauge, [(NONE, waiting)]);
    let help = "Public keys of identity tokens.";
    out.family("xdp_imds_identity_keys", help, MetricType::Gauge, [(NONE, report.keys)]);
    let signs = u64::from(!report.ended && report.signs.is_some());
    let help = "Time when the certificate for signed documents expires, in Unix seconds.";
    let expires = report.certificate_expires.map(|expires| (NONE, expires));
    out.family(
        "xdp_imds_identity_certificate_expiration_timestamp_seconds",
        help,
        MetricType::Gauge,
        expires,
    );
    let help = "1 while the signer of identity tokens runs and has a key.";
    out.family("xdp_imds_identity_signer_up", help, MetricType::Gauge, [(NONE, signs)]);
}

/// Adds messages from guests and errors of stored data.
pub(super) fn errands(
    BackgroundCounters { messages, mailboxes, unsaved }: &BackgroundCounters,
    out: &mut Exposition,
) {
    out.family(
        "xdp_imds_messages_total",
        "Messages from guests to sinks, by outcome.",
        MetricType::Counter,
        [("delivered", messages.delivered), ("failed", messages.failed), ("dropped", messages.dropped)]
            .map(|(outcome, count)| ([("outcome", outcome)], count)),
    );
    let waiting = [(NONE, messages.waiting)];
    out.family(
        "xdp_imds_messages_waiting",
        "Messages that wait for delivery to a sink.",
        MetricType::Gauge,
        waiting,
    );
    out.family(
        "xdp_imds_waits_ended_total",
        "Requests that waited for a change until a newer request of the same VM took their place.",
        MetricType::Counter,
        [(NONE, messages.waits_ended)],
    );
    out.family(
        "xdp_imds_pending_events",
        "Events of VMs that are scheduled or have begun.",
        MetricType::Gauge,
        [(NONE, mailboxes.pending_events)],
    );
    out.family(
        "xdp_imds_state_errors_total",
        "Failures to read or write a file of the state directory, by operation.",
        MetricType::Counter,
        [("load", mailboxes.loads_failed), ("save", mailboxes.saves_failed)]
            .map(|(operation, count)| ([("operation", operation)], count)),
    );
    out.family(
        "xdp_imds_state_unsaved_files",
        "Files of the state directory whose last write failed. They are written again until it succeeds.",
        MetricType::Gauge,
        [(NONE, *unsaved)],
    );
}

// Metrics of each hub: frames, turns of its worker, and the TCP stack's own counters.

/// The hubs of a snapshot, with their numbers as text.
pub(super) struct HubFamilies<'a, T> {
    pub(super) hubs: &'a [HubMetrics<'a, T>],
    pub(super) numbers: &'a [String],
}

impl<'a, T> HubFamilies<'a, T> {
    fn each(&self) -> impl Iterator<Item = (&'a str, &'a HubMetrics<'a, T>)> {
        self.numbers.iter().map(String::as_str).zip(self.hubs)
    }

    /// Adds a family with one value per hub.
    fn one(&self, out: &mut Exposition, name: &str, help: &str, of: fn(&WorkerStats<T>) -> u64) {
        let samples = self.each().map(|(number, hub)| ([("hub", number)], of(&hub.worker)));
        out.family(name, help, MetricType::Counter, samples);
    }

    /// Adds a family of lost frames, with one value per hub and reason.
    fn lost<const N: usize>(
        &self,
        out: &mut Exposition,
        name: &str,
        help: &str,
        of: fn(&HubMetrics<'_, T>) -> [(&'static str, u64); N],
    ) {
        let samples = self.each().flat_map(|(number, hub)| {
            of(hub).map(|(reason, count)| ([("hub", number), ("reason", reason)], count))
        });
        out.family(name, help, MetricType::Counter, samples);
    }

    pub(super) fn received(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_received_frames_total", "Frames that the AF_XDP socket received.", |w| {
            w.socket.frames
        });
        self.one(
            out,
            "xdp_imds_received_bytes_total",
            "Bytes of the frames that the AF_XDP socket received.",
            |w| w.socket.bytes,
        );
        let help = "Received frames that were lost, by reason; over_share: frames of VMs that exceed their share of a worker's time.";
        self.lost(out, "xdp_imds_receive_lost_frames_total", help, |hub| {
            let w = &hub.worker;
            [
                ("veth_full", hub.losses.veth_full),
                ("ring_full", w.socket.ring_full),
                ("dropped", w.socket.dropped),
                ("bad_descriptor", w.socket.bad_descriptors),
                ("runt", w.link.runt),
                ("unstamped", w.link.unstamped),
                ("slot_out_of_range", w.link.slot_out_of_range),
                ("over_share", w.link.over_share),
            ]
        });
        let help = "Times the kernel found the fill ring empty.";
        self.one(out, "xdp_imds_fill_ring_empty_total", help, |w| w.socket.fill_ring_empty);
        let help = "Addresses in the fill ring that the kernel refused.";
        self.one(out, "xdp_imds_fill_ring_invalid_total", help, |w| w.socket.invalid_fill);
    }

    pub(super) fn sent(&self, out: &mut Exposition) {
        self.one(
            out,
            "xdp_imds_sent_frames_total",
            "Frames that the hub's taps accepted, long ones included.",
            |w| w.tap.frames,
        );
        self.one(
            out,
            "xdp_imds_sent_bytes_total",
            "Bytes of the frames that the hub's taps accepted.",
            |w| w.tap.bytes,
        );
        let help = "Frames of more than one segment that the hub's taps accepted.";
        self.one(out, "xdp_imds_sent_long_frames_total", help, |w| w.tap.long);
        let help = "Frames that the hub's taps refused, by reason.";
        self.lost(out, "xdp_imds_send_lost_frames_total", help, |hub| {
            let w = &hub.worker;
            [
                ("full", w.tap.full),
                ("no_memory", w.tap.no_memory),
                ("down", w.tap.down),
                ("bad_length", w.tap.bad_length),
                ("other", w.tap.other),
            ]
        });
        let help = "Frames that the kernel dropped behind the hub's tap: by a verdict hub_drop_*, or because the port's device is \
                    down, has a smaller MTU or accepts no redirected frames.";
        let dropped = self.each().map(|(number, hub)| ([("hub", number)], hub.losses.tap_dropped));
        out.family("xdp_imds_hub_dropped_frames_total", help, MetricType::Counter, dropped);
    }

    pub(super) fn turns(&self, out: &mut Exposition) {
        self.one(out, "xdp_imds_worker_turns_total", "Turns of the worker's loop.", |w| w.turns.turns);
        let help = "Turns that ended at their limit with work left.";
        self.one(out, "xdp_imds_worker_full_batches_total", help, |w| w.turns.full_batches);
        self.one(out, "xdp_imds_worker_sleeps_total", "Times the worker slept.", |w| w.turns.sleeps);
        self.one(
            out,
            "xdp_imds_worker_naps_total",
            "Short pauses of a busy worker, in which frames gather.",
            |w| w.turns.naps,
        );
        let help = "Slots whose state the worker dropped because their identity departed.";
        self.one(out, "xdp_imds_worker_forgotten_total", help, |w| w.turns.forgotten);
        let help = "Notifications that made the worker check a VM's waiting requests again.";
        self.one(out, "xdp_imds_worker_woken_total", help, |w| w.turns.woken);
        let of = |time: fn(&WorkerStats<T>) -> Duration| {
            self.each().map(move |(number, hub)| ([("hub", number)], Seconds(time(&hub.worker))))
        };
        let (name, help) = ("xdp_imds_worker_seconds_total", "Time since the worker started.");
        out.family(name, help, MetricType::Counter, of(|w| w.turns.elapsed));
        let (name, help) =
            ("xdp_imds_worker_slept_seconds_total", "Time that the worker has slept since it started.");
        out.family(name, help, MetricType::Counter, of(|w| w.turns.slept));
    }

    /// Adds the stack's counters and gauges. The first hub determines the names. A hub without one of these names
    /// has no sample for it.
    pub(super) fn engine(&self, out: &mut Exposition) {
        let Some(first) = self.hubs.first() else { return };
        for (names, kind) in [(first.counters, MetricType::Counter), (first.gauges, MetricType::Gauge)] {
            for (name, _) in names {
                let samples = self.each().filter_map(|(number, hub)| {
                    let all = if kind == MetricType::Counter { hub.counters } else { hub.gauges };
                    let (_, value) = all.iter().find(|(other, _)| other == name)?;
                    Some(([("hub", number)], *value))
                });
                let suffix = if kind == MetricType::Counter { "_total" } else { "" };
                let help = format!("The TCP stack's count of {}.", name.replace('_', " "));
                out.family(&format!("xdp_imds_stack_{name}{suffix}"), &help, kind, samples);
            }
        }
    }
}
