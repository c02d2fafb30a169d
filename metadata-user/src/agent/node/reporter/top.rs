//! The node's part of the live view.

use metadata_common::verdict::{Fate, Verdict};
use metadata_control::status::{AgentStatus, PortSummary};
use metadata_control::top::{DropCount, HISTORY, LatencyFigures, SCHEMA, Top, TopQuery, Traffic};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::{NodeView, Reporter, attachments, phase};
use crate::agent::health::Health;
use crate::service::{BOUNDS_NS, Latencies, WaitReason, WorkerCounts};

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
        let kernel = view.ports.steering().maps().counters();
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

/// How often counters are read.
const EVERY: Duration = Duration::from_secs(1);
/// The time that latency figures cover, at most.
const LATENCY_OVER: Duration = Duration::from_secs(10);

/// One reading.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    /// Answers since the start.
    pub(super) requests: u64,
    /// Of these, answers with a status of 429 or at least 500.
    pub(super) failed: u64,
    pub(super) latencies: Latencies,
    /// Drops since the start, by reason.
    pub(super) drops: Vec<(String, u64)>,
}

/// The last readings, the newest last: one more than [`HISTORY`] has seconds.
#[derive(Debug, Default)]
pub(super) struct Samples(VecDeque<Sample>);

impl Samples {
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.0.back().is_none_or(|last| now.saturating_duration_since(last.at) >= EVERY)
    }

    pub(super) fn push(&mut self, sample: Sample) {
        if self.0.len() > HISTORY {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The last two readings, and the seconds between them.
    fn last_two(&self) -> Option<(&Sample, &Sample, f64)> {
        let mut newest = self.0.iter().rev();
        let (last, before) = (newest.next()?, newest.next()?);
        Some((before, last, seconds(before, last)))
    }

    /// Requests up to now and in the last seconds.
    pub(super) fn traffic(&self, requests: u64) -> Traffic {
        let each = |count: fn(&Sample) -> u64| {
            let (before, last, seconds) = self.last_two()?;
            Some(count(last).saturating_sub(count(before)) as f64 / seconds)
        };
        let pairs = self.0.iter().zip(self.0.iter().skip(1));
        let rate = |(before, after): (&Sample, &Sample)| {
            (after.requests.saturating_sub(before.requests) as f64 / seconds(before, after)).round() as u64
        };
        Traffic {
            requests,
            per_second: each(|sample| sample.requests),
            failed_per_second: each(|sample| sample.failed),
            history: pairs.map(rate).collect(),
        }
    }

    /// Quantiles of the answers of the last [`LATENCY_OVER`].
    pub(super) fn latency(&self) -> Option<LatencyFigures> {
        let last = self.0.back()?;
        let covered = |sample: &&Sample| last.at.saturating_duration_since(sample.at) <= LATENCY_OVER;
        let first = self.0.iter().find(covered)?;
        let buckets = last.latencies.buckets.iter().zip(first.latencies.buckets);
        let counts: Vec<_> = buckets.map(|(after, before)| after.saturating_sub(before)).collect();
        let answers: u64 = counts.iter().sum();
        (answers > 0).then(|| LatencyFigures {
            over: seconds(first, last),
            answers,
            p50_us: bound_of(&counts, answers.div_ceil(2)),
            p90_us: bound_of(&counts, (answers * 9).div_ceil(10)),
            p99_us: bound_of(&counts, (answers * 99).div_ceil(100)),
            most_us: bound_of(&counts, answers),
        })
    }

    /// Reasons with drops, the one that grows fastest first.
    pub(super) fn drops(&self) -> Vec<DropCount> {
        let Some(last) = self.0.back() else { return Vec::new() };
        let before = self.last_two();
        let rate = |reason: &str, count: u64| {
            let (before, _, seconds) = before?;
            let (_, former) = before.drops.iter().find(|(other, _)| other == reason)?;
            Some(count.saturating_sub(*former) as f64 / seconds)
        };
        let some = last.drops.iter().filter(|(_, count)| *count > 0);
        let mut drops: Vec<_> = some
            .map(|(reason, count)| DropCount {
                reason: reason.clone(),
                count: *count,
                per_second: rate(reason, *count).unwrap_or_default(),
            })
            .collect();
        let order = |one: &DropCount, other: &DropCount| {
            other.per_second.total_cmp(&one.per_second).then(other.count.cmp(&one.count))
        };
        drops.sort_by(order);
        drops
    }
}

/// The upper bound in microseconds of the bucket that has the answer of a rank, which begins at 1; `None` for the last.
fn bound_of(counts: &[u64], rank: u64) -> Option<u64> {
    let mut sum = 0;
    let bucket = counts.iter().position(|count| {
        sum += count;
        sum >= rank
    })?;
    BOUNDS_NS.get(bucket).map(|bound| bound / 1_000)
}

fn seconds(before: &Sample, after: &Sample) -> f64 {
    after.at.saturating_duration_since(before.at).as_secs_f64().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use metadata_control::top::HISTORY;
    use std::time::{Duration, Instant};

    use super::{Sample, Samples, bound_of};
    use crate::service::{BOUNDS_NS, Latencies};

    fn sample(at: Instant, requests: u64, drops: &[(&str, u64)]) -> Sample {
        let mut latencies = Latencies::default();
        latencies.buckets[1] = requests;
        let drops = drops.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect();
        Sample { at, requests, failed: requests / 10, latencies, drops }
    }

    #[test]
    fn rates_cover_the_last_two_readings() {
        let (mut samples, now) = (Samples::default(), Instant::now());
        samples.push(sample(now, 100, &[]));
        assert_eq!(samples.traffic(100).per_second, None);
        samples.push(sample(now + Duration::from_secs(2), 300, &[]));
        let traffic = samples.traffic(310);
        assert_eq!((traffic.requests, traffic.per_second), (310, Some(100.0)));
        assert_eq!((traffic.failed_per_second, traffic.history), (Some(10.0), vec![100]));
    }

    #[test]
    fn the_history_has_a_limit() {
        let (mut samples, now) = (Samples::default(), Instant::now());
        for second in 0..3 * HISTORY as u64 {
            samples.push(sample(now + Duration::from_secs(second), 7 * second, &[]));
        }
        assert_eq!(samples.traffic(0).history, [7; HISTORY]);
    }

    #[test]
    fn latencies_are_those_of_the_last_ten_seconds() {
        let (mut samples, now) = (Samples::default(), Instant::now());
        for (second, requests) in [(0, 0), (20, 1_000), (25, 1_010)] {
            samples.push(sample(now + Duration::from_secs(second), requests, &[]));
        }
        let figures = samples.latency().expect("there were answers");
        assert_eq!((figures.answers, figures.over), (10, 5.0));
        assert_eq!(figures.p50_us, Some(BOUNDS_NS[1] / 1_000));
        samples.push(sample(now + Duration::from_secs(40), 1_010, &[]));
        assert_eq!(samples.latency(), None, "no answer since");
    }

    #[test]
    fn the_rank_of_an_answer_chooses_its_bucket() {
        let mut counts = [0; BOUNDS_NS.len() + 1];
        (counts[0], counts[2], counts[BOUNDS_NS.len()]) = (50, 49, 1);
        let us = |bucket: usize| Some(BOUNDS_NS[bucket] / 1_000);
        for (rank, bound) in [(1, us(0)), (50, us(0)), (51, us(2)), (99, us(2)), (100, None), (101, None)] {
            assert_eq!(bound_of(&counts, rank), bound, "rank {rank}");
        }
    }

    #[test]
    fn the_reason_that_grows_fastest_comes_first() {
        let (mut samples, now) = (Samples::default(), Instant::now());
        samples.push(sample(now, 0, &[("old", 500), ("new", 0), ("never", 0)]));
        samples.push(sample(now + Duration::from_secs(1), 0, &[("old", 500), ("new", 3), ("never", 0)]));
        let drops = samples.drops();
        let shown: Vec<_> = drops.iter().map(|drop| (&*drop.reason, drop.count, drop.per_second)).collect();
        assert_eq!(shown, [("new", 3, 3.0), ("old", 500, 0.0)]);
    }
}
