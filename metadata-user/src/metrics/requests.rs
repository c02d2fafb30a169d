//! Metrics of requests: answers, latency, waiting requests and the audit log.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::exposition::{Exposition, MetricType};
use crate::service::audit::AuditCounts;
use crate::service::{BOUNDS_NS, Latencies, WaitEnd, WaitReason, WorkerCounts};

/// Adds answers by dialect and status, and their latency.
pub(super) fn answers(tallies: &[Arc<WorkerCounts>], out: &mut Exposition) {
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
pub(super) fn waits(tallies: &[Arc<WorkerCounts>], out: &mut Exposition) {
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

/// Adds lines of the audit log by outcome.
pub(super) fn audit(counts: &AuditCounts, out: &mut Exposition) {
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
