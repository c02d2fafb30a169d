//! The results of a storm, in the form of its JSON file. The report and the comparison use nothing else.
//!
//! Times are in microseconds, sizes in bytes. Fields may be added; readers ignore unknown fields.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The version of the file format.
pub(crate) const SCHEMA: &str = "xdp-imds-storm/1";

/// The results of a run: every case, with its subjects in alternation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) schema: String,
    pub(crate) environment: Environment,
    pub(crate) cases: Vec<Case>,
}

/// The machine and the software of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Environment {
    /// Kernel release and version.
    pub(crate) kernel: String,
    /// Processor model.
    pub(crate) processor: String,
    /// Cores online.
    pub(crate) cores: usize,
    /// Bytes of the machine's memory.
    pub(crate) memory_bytes: u64,
    /// The commit that the agent was built from, with `-dirty` at the end if files had changed.
    pub(crate) commit: String,
    /// The start of the run, as RFC 3339.
    pub(crate) started: String,
    /// Versions of all subjects, by name.
    pub(crate) versions: BTreeMap<String, String>,
    /// The seed of every round's random choices.
    #[serde(default)]
    pub(crate) seed: u64,
    /// Other influences on the figures, such as pinning and load.
    pub(crate) notes: Vec<String>,
}

/// One set of settings, and every subject measured with them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) settings: Settings,
    pub(crate) subjects: Vec<Subject>,
}

/// The settings of a case. Two runs are comparable only where these are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// `nocloud`, `openstack`, `ec2` or `identity`.
    pub(crate) dialect: String,
    pub(crate) vms: u32,
    pub(crate) user_data_bytes: u64,
    /// Requests of one boot.
    pub(crate) requests_per_boot: u32,
    /// All other settings, by option and value: arrival, keep-alive, loss, flood, slow readers, offloads.
    pub(crate) options: BTreeMap<String, String>,
}

/// One server and its rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Subject {
    /// `xdp-imds`, `nginx`, `haproxy` or `neutron`.
    pub(crate) name: String,
    pub(crate) rounds: Vec<Round>,
}

/// One round. Every guest boots as often as the clocks need to be exact.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Round {
    /// Boots begun.
    #[serde(default)]
    pub(crate) boots: u64,
    /// Requests that were answered completely and correctly.
    pub(crate) requests: u64,
    /// Requests that failed.
    pub(crate) failures: u64,
    /// Failures by reason.
    pub(crate) reasons: BTreeMap<String, u64>,
    /// Segments that guests sent again.
    pub(crate) retransmissions: u64,
    /// Requests that guests repeated after a failure.
    #[serde(default)]
    pub(crate) retries: u64,
    /// Disturbances of the server during the round.
    #[serde(default)]
    pub(crate) events: Vec<Disturbed>,
    /// Time from the first guest's start to the last guest's end.
    pub(crate) wall_us: f64,
    pub(crate) cpu: Cpu,
    /// CPU time of the signer of identity tokens, which `cpu` includes, if there is one.
    #[serde(default)]
    pub(crate) signer_us: Option<f64>,
    pub(crate) request: Distribution,
    pub(crate) boot: Distribution,
    /// Finished boots over time since the round's start: (time, boots), both rising.
    pub(crate) finished: Vec<(f64, u32)>,
    pub(crate) memory: Memory,
    /// Time from the start of the server, before it has read records or configuration, until it serves all taps.
    pub(crate) ready_us: f64,
    /// The median time to attach one tap, if the server reports it. `ready_us` includes it.
    pub(crate) attach_us: Option<f64>,
    /// Frames per second that the flooding guest sent, if there was one.
    #[serde(default)]
    pub(crate) flood_per_second: Option<f64>,
    /// The cost of silent guests, if it was measured.
    #[serde(default)]
    pub(crate) idle: Option<Idle>,
}

/// A disturbance of the server while guests booted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Disturbed {
    /// The event as on the command line: `kill9@0.5`.
    pub(crate) event: String,
    /// Time until the next agent served all guests, and the previous agent had ended.
    pub(crate) took_us: f64,
}

/// The cost of silent guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Idle {
    /// The time without requests.
    pub(crate) wall_us: f64,
    /// CPU time of the subject's processes in that time.
    pub(crate) server_us: f64,
}

/// CPU time of one round by user, all cores together.
///
/// A guest's write to its tap runs the kernel's part of whatever serves it: XDP, bridge, the server's softirq. The
/// generator's system time is therefore mostly the subject's, and only its `floor` is subtracted: the price of the same
/// calls at the beginning of the run, on a tap that nothing serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cpu {
    /// The subject's processes in user mode.
    pub(crate) server_user_us: f64,
    /// The subject's processes in the kernel.
    pub(crate) server_system_us: f64,
    /// The generator's own work: what it would have used without any server. It is `generator_user_us` plus
    /// `generator_floor_us`.
    pub(crate) generator_us: f64,
    /// All time that was not idle, minus the background.
    pub(crate) busy_us: f64,
    /// The generator in user mode.
    #[serde(default)]
    pub(crate) generator_user_us: f64,
    /// The generator in the kernel, all of it.
    #[serde(default)]
    pub(crate) generator_system_us: f64,
    /// The price of the generator's calls on a tap that nothing serves. `generator_system_us` includes it.
    #[serde(default)]
    pub(crate) generator_floor_us: f64,
    /// Time used by other programs, already subtracted from `busy_us`.
    #[serde(default)]
    pub(crate) background_us: f64,
}

impl Cpu {
    /// Returns the kernel's work that is charged neither to the server nor to the generator: in softirqs, in kernel
    /// threads, and in the guests' system calls beyond the price of the calls. A frame is processed within the call
    /// that writes it to a tap.
    pub(crate) fn rest_us(&self) -> f64 {
        (self.busy_us - self.generator_us - self.server_user_us - self.server_system_us).max(0.0)
    }

    /// Returns the cost of serving for the host: everything but the generator.
    pub(crate) fn host_us(&self) -> f64 {
        (self.busy_us - self.generator_us).max(0.0)
    }
}

/// The memory that a subject takes with all guests attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// Resident memory of the subject's processes.
    pub(crate) server_bytes: u64,
    /// Growth of the kernel's own memory, 0 if it shrank; `None` if the kernel does not report it.
    pub(crate) kernel_bytes: Option<u64>,
}

/// Times, counted in buckets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Distribution {
    /// The buckets as (upper bound, number of times), with rising bounds and no empty bucket.
    pub(crate) buckets: Vec<(f64, u64)>,
    pub(crate) max_us: f64,
}

impl Distribution {
    /// Returns the number of times.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// Returns the time that the fraction `share` of all times did not exceed; `None` without times.
    pub(crate) fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let rank = ((share * count as f64).ceil() as u64).clamp(1, count.max(1));
        let mut passed = 0;
        self.buckets.iter().find_map(|&(bound, count)| {
            passed += count;
            (passed >= rank).then(|| bound.min(self.max_us))
        })
    }

    /// Returns the distribution of the times of several others.
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
    /// Reads a file that a storm wrote.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let results: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} has no results of `cargo xtask storm --json`", path.display()))?;
        ensure!(
            results.schema == SCHEMA,
            "{} has the format {}, expected {SCHEMA}; measure again",
            path.display(),
            results.schema
        );
        Ok(results)
    }
}

/// Median, lowest and highest of several values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

impl Spread {
    /// Returns the spread of finite values; `None` without values.
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
    fn a_quantile_is_the_bound_of_its_bucket() {
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
    fn time_of_neither_server_nor_generator_is_the_rest_of_the_host() {
        let cpu = Cpu {
            server_user_us: 1.0,
            server_system_us: 2.0,
            generator_us: 4.0,
            busy_us: 10.0,
            ..Cpu::default()
        };
        assert_eq!((cpu.rest_us(), cpu.host_us()), (3.0, 6.0));
        // Clocks of different resolution may disagree, but no cost is negative.
        let cpu = Cpu { generator_us: 12.0, ..cpu };
        assert_eq!((cpu.rest_us(), cpu.host_us()), (0.0, 0.0));
    }

    #[test]
    fn a_spread_has_the_lowest_the_median_and_the_highest() {
        let of = |values: &[f64]| Spread::of(values.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0, 1.0, f64::NAN, 2.0]), Some(Spread { low: 1.0, median: 2.0, high: 3.0 }));
        assert_eq!(of(&[1.0, 2.0]).map(|spread| spread.median), Some(1.5));
    }
}
