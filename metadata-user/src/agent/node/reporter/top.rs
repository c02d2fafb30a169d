//! The node's part of the live view.

use std::time::{Duration, Instant};

use crate::service::{Latencies, WaitReason, WorkerCounts};
use metadata_common::verdict::{Fate, Verdict};
use metadata_control::status::{AgentStatus, PortSummary};
use metadata_control::top::{SCHEMA, Top, TopQuery};

use super::samples::Sample;
use super::{NodeView, Reporter, attachments, phase};
use crate::agent::health::Health;

/// How often to look for problems. A node has thousands of ports, and several viewers may ask each second.
const PROBLEMS_EVERY: Duration = Duration::from_secs(1);

/// Counters of `status` that count drops in user space and in devices. Those of the kernel's programs are not among
/// them.
const DROPS: [&str; 6] =
    ["ring_full", "send_lost", "connections_refused", "guests_refused", "refused_by_ports", "veth_full"];

impl Reporter {
    /// The live view at this moment.
    #[must_use]
    pub(crate) fn top(&self, view: NodeView<'_>, query: &TopQuery, health: &Health) -> Top {
        let now = Instant::now();
        let (followed, listed) = view.ports.answers().follow(now, |following| {
            (now.saturating_duration_since(following.since()), view.listed(query, following, now))
        });
        self.sample(view);
        let samples = self.samples.borrow();
        let waiting = |reason: WaitReason| self.tallies.iter().map(|tally| tally.waiting(reason)).sum();
        Top {
            schema: SCHEMA.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            node: self.node.clone(),
            uptime: self.started.elapsed().as_secs_f64(),
            phase: phase(health),
            followed: followed.as_secs_f64(),
            troubles: self.problems(view, health, now),
            traffic: samples.traffic(self.answered(|_| true)),
            latency: samples.latency(),
            parked: WaitReason::ALL.map(|reason| (reason.label().to_owned(), waiting(reason))).into(),
            drops: samples.drops(),
            workers: self.workers(view, health),
            stages: listed.stages,
            vms: listed.vms,
            matching: listed.matching,
        }
    }

    /// The problems that `status` tells.
    fn problems(&self, view: NodeView<'_>, health: &Health, now: Instant) -> Vec<String> {
        let mut known = self.problems.borrow_mut();
        let is_fresh = |(at, _): &(Instant, _)| now.saturating_duration_since(*at) < PROBLEMS_EVERY;
        if !known.as_ref().is_some_and(is_fresh) {
            let mut status = AgentStatus {
                attachments: attachments(view.ports.steering()),
                identity: self.identity_report(),
                ports: PortSummary { counts: view.ports_by_state(), ..PortSummary::default() },
                ..AgentStatus::default()
            };
            self.complain(view, &mut status);
            *known = Some((now, status.troubles));
        }
        let complaints = known.iter().flat_map(|(_, complaints)| complaints.iter().cloned());
        health.hindering().map(|trouble| trouble.to_string()).chain(complaints).collect()
    }

    /// Reads the counters if somebody follows the guests and a second has passed.
    pub(crate) fn sample(&self, view: NodeView<'_>) {
        let mut samples = self.samples.borrow_mut();
        if !view.ports.answers().are_followed() {
            return samples.clear();
        }
        let now = Instant::now();
        if samples.is_due(now) {
            samples.push(Sample {
                at: now,
                requests: self.answered(|_| true),
                failed: self.answered(|status| status == 429 || status >= 500),
                latencies: self
                    .tallies
                    .iter()
                    .fold(Latencies::default(), |sum, tally| sum + tally.latencies()),
                drops: self.drops(view),
            });
        }
    }

    /// Number of answers with these statuses.
    fn answered(&self, is: impl Fn(u16) -> bool) -> u64 {
        let of = |tally: &WorkerCounts| {
            tally.answers().filter(|(_, status, _)| is(*status)).map(|(.., count)| count).sum::<u64>()
        };
        self.tallies.iter().map(|tally| of(tally)).sum()
    }

    /// Drops by reason: the verdicts of the kernel's programs, and the counters of user space.
    fn drops(&self, view: NodeView<'_>) -> Vec<(String, u64)> {
        let kernel = view.ports.steering().counters();
        let dropped = |(verdict, count): (Verdict, u64)| {
            (verdict.fate() == Fate::Drop).then(|| (verdict.name().to_owned(), count))
        };
        let mut drops: Vec<_> =
            kernel.iter().flat_map(|counters| counters.iter().filter_map(dropped)).collect();
        let counters = self.troubling(view).into_iter();
        drops.extend(counters.filter(|(name, _)| DROPS.contains(&name.as_str())));
        drops
    }
}
