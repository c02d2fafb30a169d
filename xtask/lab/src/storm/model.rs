//! What a storm found out, as it stands in its JSON file: the report and the comparison read nothing else.
//!
//! Times are microseconds, sizes octets. Fields may be added; readers ignore what they do not know.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Version of the file's form.
pub(crate) const SCHEMA: &str = "xdp-imds-storm/1";

/// A whole run: every case, with all subjects alternating in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) schema: String,
    pub(crate) environment: Environment,
    pub(crate) cases: Vec<Case>,
}

/// Where and with what it ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Environment {
    /// Kernel release and version.
    pub(crate) kernel: String,
    /// Processor model.
    pub(crate) processor: String,
    /// Cores online.
    pub(crate) cores: usize,
    /// Memory of the machine.
    pub(crate) memory_bytes: u64,
    /// Commit the agent was built from; `-dirty` at its end if files were changed.
    pub(crate) commit: String,
    /// When it began, as RFC 3339.
    pub(crate) started: String,
    /// Versions of the peers, by subject.
    pub(crate) versions: BTreeMap<String, String>,
    /// What every round's randomness grows from.
    #[serde(default)]
    pub(crate) seed: u64,
    /// Whatever else may sway the figures: pinning, other load.
    pub(crate) notes: Vec<String>,
}

/// One set of settings, and every subject measured with them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) settings: Settings,
    pub(crate) subjects: Vec<Subject>,
}

/// What was asked of the subjects. Two runs compare only where these are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// `nocloud`, `openstack`, `ec2`.
    pub(crate) dialect: String,
    pub(crate) vms: u32,
    pub(crate) user_data_bytes: u64,
    /// Requests of one boot.
    pub(crate) requests_per_boot: u32,
    /// Everything else, by option and value: arrival, keep-alive, loss, flood, slow readers, offloads.
    pub(crate) options: BTreeMap<String, String>,
}

/// One server and its rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Subject {
    /// `xdp-imds`, `nginx`, `haproxy`, `neutron`.
    pub(crate) name: String,
    pub(crate) rounds: Vec<Round>,
}

/// One round: every guest boots, as often as it takes for the clocks to be exact.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Round {
    /// Boots begun.
    #[serde(default)]
    pub(crate) boots: u64,
    /// Requests that were answered in full and correctly.
    pub(crate) requests: u64,
    /// Requests that were not.
    pub(crate) failures: u64,
    /// Why, with how often; the first few reasons.
    pub(crate) reasons: BTreeMap<String, u64>,
    /// Segments guests sent again.
    pub(crate) retransmissions: u64,
    /// Requests guests asked again after they had failed.
    #[serde(default)]
    pub(crate) retries: u64,
    /// What was done to the server meanwhile.
    #[serde(default)]
    pub(crate) events: Vec<Disturbed>,
    /// From the first guest's start to the last one's end.
    pub(crate) wall_us: f64,
    pub(crate) cpu: Cpu,
    pub(crate) request: Distribution,
    pub(crate) boot: Distribution,
    /// Boots finished by a time since the round's start: (time, boots), both rising.
    pub(crate) finished: Vec<(f64, u32)>,
    pub(crate) memory: Memory,
    /// From the start of the server, its records or configuration not read yet, until all taps are served.
    pub(crate) ready_us: f64,
    /// Of that, what attaching one tap took (the median), where the server tells.
    pub(crate) attach_us: Option<f64>,
    /// Frames the flooding guest sent a second, if there was one.
    #[serde(default)]
    pub(crate) flood_per_second: Option<f64>,
    /// With all guests attached and silent, if that was asked for.
    #[serde(default)]
    pub(crate) idle: Option<Idle>,
}

/// Something done to the server while guests booted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Disturbed {
    /// As it was asked for: `kill9@0.5`.
    pub(crate) event: String,
    /// Until all guests were served by the next agent again, or the one before had left.
    pub(crate) took_us: f64,
}

/// What silent guests cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Idle {
    /// How long nobody asked.
    pub(crate) wall_us: f64,
    /// CPU time of the subject's processes in it.
    pub(crate) server_us: f64,
}

/// CPU time of one round by who used it, all cores together.
///
/// A guest's write to its tap runs the kernel's side of whatever serves it: XDP, bridge, the server's softirq.
/// So the generator's system time is mostly the subject's, and only its `floor` is taken off: the same calls,
/// priced at the beginning of the run against a tap that nobody serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cpu {
    /// The subject's processes in user mode.
    pub(crate) server_user_us: f64,
    /// The subject's processes in the kernel.
    pub(crate) server_system_us: f64,
    /// What the load generator would have used against nobody, its own work: `generator_user_us` plus
    /// `generator_floor_us`.
    pub(crate) generator_us: f64,
    /// Everything that was not idle, less the background.
    pub(crate) busy_us: f64,
    /// The generator in user mode.
    #[serde(default)]
    pub(crate) generator_user_us: f64,
    /// The generator in the kernel, all of it.
    #[serde(default)]
    pub(crate) generator_system_us: f64,
    /// Of that, the price of its calls against a tap that nobody serves.
    #[serde(default)]
    pub(crate) generator_floor_us: f64,
    /// What other programs used meanwhile; already taken off `busy_us`.
    #[serde(default)]
    pub(crate) background_us: f64,
}

impl Cpu {
    /// What the kernel did for either side and the server is not charged for: within the guests' system calls (on a tap
    /// a frame is processed where it is written) beyond what these cost by themselves, in softirqs, in kernel threads.
    pub(crate) fn rest_us(&self) -> f64 {
        (self.busy_us - self.generator_us - self.server_user_us - self.server_system_us).max(0.0)
    }

    /// What serving cost the host: everything but the generator.
    pub(crate) fn host_us(&self) -> f64 {
        (self.busy_us - self.generator_us).max(0.0)
    }
}

/// Memory a subject takes with all guests attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Resident memory of its processes.
    pub(crate) server_bytes: u64,
    /// Growth of the kernel's own memory, 0 where it shrank; none where the kernel does not say.
    pub(crate) kernel_bytes: Option<u64>,
}

/// Times, counted in buckets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Distribution {
    /// (upper bound of the bucket, times in it), bounds rising; none is empty.
    pub(crate) buckets: Vec<(f64, u64)>,
    pub(crate) max_us: f64,
}

impl Distribution {
    /// Times counted.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// The time that a share of all were no longer than; none of nothing.
    pub(crate) fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let rank = ((share * count as f64).ceil() as u64).clamp(1, count.max(1));
        let mut passed = 0;
        self.buckets.iter().find_map(|&(bound, count)| {
            passed += count;
            (passed >= rank).then(|| bound.min(self.max_us))
        })
    }

    /// All times of several.
    pub(crate) fn joined<'a>(all: impl Iterator<Item = &'a Self>) -> Self {
        let mut joined = Self::default();
        for one in all {
            joined.buckets.extend(&one.buckets);
            joined.max_us = joined.max_us.max(one.max_us);
        }
        joined.buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        joined.buckets.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 += if same { next.1 } else { 0 };
            same
        });
        joined
    }
}

impl Results {
    /// Reads a file a storm wrote.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let results: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} holds no results of `cargo xtask storm --json`", path.display()))?;
        ensure!(
            results.schema == SCHEMA,
            "{} has the form {}, and this reads {SCHEMA}: measure again",
            path.display(),
            results.schema
        );
        Ok(results)
    }
}

/// The middle one of several figures, and the lowest and the highest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

impl Spread {
    /// None of nothing.
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Self { low, median, high })
    }
}

#[cfg(test)]
mod tests {
    use super::{Cpu, Distribution, Spread};

    #[test]
    fn a_quantile_is_the_bound_of_the_bucket_it_falls_into() {
        let times = Distribution { buckets: vec![(10.0, 90), (20.0, 9), (50.0, 1)], max_us: 43.0 };
        for (share, expected) in
            [(0.0, 10.0), (0.5, 10.0), (0.9, 10.0), (0.91, 20.0), (0.99, 20.0), (1.0, 43.0)]
        {
            assert_eq!(times.quantile(share), Some(expected), "{share}");
        }
        assert_eq!(Distribution::default().quantile(0.5), None);
    }

    #[test]
    fn joined_distributions_count_everything_once() {
        let one = Distribution { buckets: vec![(10.0, 1), (20.0, 2)], max_us: 19.0 };
        let other = Distribution { buckets: vec![(10.0, 3), (30.0, 4)], max_us: 27.0 };
        let joined = Distribution::joined([&one, &other].into_iter());
        assert_eq!(joined.buckets, [(10.0, 4), (20.0, 2), (30.0, 4)]);
        assert_eq!((joined.count(), joined.max_us), (10, 27.0));
    }

    #[test]
    fn what_is_neither_server_nor_generator_is_the_rest_of_the_host() {
        let cpu = Cpu {
            server_user_us: 1.0,
            server_system_us: 2.0,
            generator_us: 4.0,
            busy_us: 10.0,
            ..Cpu::default()
        };
        assert_eq!((cpu.rest_us(), cpu.host_us()), (3.0, 6.0));
        // Clocks of different grain may disagree: nothing costs less than nothing.
        let cpu = Cpu { generator_us: 12.0, ..cpu };
        assert_eq!((cpu.rest_us(), cpu.host_us()), (0.0, 0.0));
    }

    #[test]
    fn a_spread_is_lowest_middle_and_highest() {
        let of = |values: &[f64]| Spread::of(values.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0, 1.0, f64::NAN, 2.0]), Some(Spread { low: 1.0, median: 2.0, high: 3.0 }));
        assert_eq!(of(&[1.0, 2.0]).map(|spread| spread.median), Some(1.5));
    }
}
