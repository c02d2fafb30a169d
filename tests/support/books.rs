//! The difference between two readings of an agent's counters, and whether the counters balance.

use crate::agent::{Agent, Metrics};
use crate::eventually::eventually;
use anyhow::{Context as _, Result, ensure};
use metadata_common::verdict::Verdict;
use std::collections::BTreeMap;
use std::time::Duration;

/// Limit for frames in transit, and for workers to publish their counters.
const SETTLED: Duration = Duration::from_secs(10);
/// Prefixes of the verdicts of the programs after `port`. These programs count the same frame again.
const BEHIND: [&str; 3] = ["socket_", "ring_", "hub_"];

/// Frames by verdict of `port`.
pub type Counts = BTreeMap<&'static str, u64>;

/// The current counters of the verdicts of `port`.
///
/// # Errors
/// When the agent's metrics are not available.
pub fn verdicts(agent: &Agent<'_>) -> Result<Counts> {
    let metrics = agent.metrics()?;
    let known = Verdict::ALL.iter().map(|verdict| verdict.name());
    Ok(known
        .filter(|name| !BEHIND.iter().any(|behind| name.starts_with(behind)))
        .map(|name| (name, metrics.verdicts().find(|(found, _)| *found == name).map_or(0, |(_, n)| n)))
        .collect())
}

/// The difference between two readings, without the counters that did not change.
#[must_use]
pub fn since(before: &Counts, after: &Counts) -> Counts {
    let more = after.iter().map(|(name, frames)| (*name, frames - before.get(name).copied().unwrap_or(0)));
    more.filter(|(_, frames)| *frames != 0).collect()
}

/// The sum of a counter over all hubs; 0 if the counter does not exist yet.
#[must_use]
pub fn total(metrics: &Metrics, name: &str, label: Option<(&str, &str)>) -> u64 {
    let of = metrics.samples().iter().filter(|sample| {
        sample.name == name && label.is_none_or(|(key, value)| sample.label(key) == Some(value))
    });
    of.map(|sample| sample.value as u64).sum()
}

/// Checks that the counters account for every frame. A frame that `port` steered reached a socket or a ring, and then a
/// stack or a loss counter. A frame that the stack sent reached a guest or a loss counter. `more` is added to
/// the steered frames: the kernel segments large frames, and drops steered frames that are too long for the hub.
///
/// # Errors
/// The first sum that does not balance after the frames in transit had time to arrive.
pub fn balance(agent: &Agent<'_>, more: i64) -> Result<()> {
    eventually(SETTLED, || {
        let metrics = agent.metrics()?;
        let verdict = |name: &str| metrics.frames(name).unwrap_or(0);
        let lost = |name: &str, reasons: &[&str]| -> u64 {
            reasons.iter().map(|reason| total(&metrics, name, Some(("reason", reason)))).sum()
        };
        let (receive, send) = ("xdp_imds_receive_lost_frames_total", "xdp_imds_send_lost_frames_total");
        let received = total(&metrics, "xdp_imds_received_frames_total", None);
        let stack = total(&metrics, "xdp_imds_stack_received_total", None);
        let at_link = lost(receive, &["runt", "unstamped", "slot_out_of_range", "over_share"]);
        let at_socket = lost(receive, &["ring_full", "dropped"]);
        let sent = total(&metrics, "xdp_imds_sent_frames_total", None);
        let unsent = lost(send, &["full", "no_memory", "down", "bad_length", "other"]);
        let taken = verdict("socket_delivered") + verdict("ring_delivered");
        let accounts = [
            (
                "steered = at the socket or in the ring",
                verdict("steer_").saturating_add_signed(more),
                taken + verdict("socket_drop_") + verdict("ring_drop_") + lost(receive, &["veth_full"]),
            ),
            ("at the socket or in the ring = received + lost", taken, received + at_socket),
            ("received = to the stack + refused", received, stack + at_link),
            (
                "by the stack = to the tap + lost",
                total(&metrics, "xdp_imds_stack_sent_total", None),
                sent + unsent,
            ),
            ("to the tap = to guests + dropped", sent, verdict("hub_")),
        ];
        for (account, left, right) in accounts {
            ensure!(left == right, "{account}: {left} frames against {right}");
        }
        for fault in ["xdp_imds_stack_faults_total", "xdp_imds_fill_ring_invalid_total"] {
            ensure!(total(&metrics, fault, None) == 0, "{fault} is not 0");
        }
        Ok(())
    })
    .with_context(|| format!("the agent's log:\n{}", agent.log()))
}
