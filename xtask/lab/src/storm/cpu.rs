//! Measures CPU time: of the whole machine, the server, the generator, and all other programs.
//!
//! Busy time is all time that was not idle, so that softirqs count wherever they ran. The kernel counts idle time
//! exactly (NO_HZ), and other times by ticks. Other programs are measured by their own clocks. A program that has ended
//! is included in the clock of its parent. Kernel threads do not count as other programs, because they may work for the
//! server.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use support::netns::run;

use super::guest::{Calls, Prices};

/// Returns the microseconds of one tick of /proc's clocks.
fn tick_us() -> f64 {
    1e6 / rustix::param::clock_ticks_per_second() as f64
}

/// User and system time, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    user: u64,
    system: u64,
}

impl std::ops::AddAssign for Ticks {
    fn add_assign(&mut self, other: Self) {
        self.user += other.user;
        self.system += other.system;
    }
}

/// The state of all clocks at one moment.
#[derive(Clone, Debug)]
pub(super) struct Clocks {
    at: Instant,
    cores: u64,
    /// Ticks of all cores that were idle, waiting for a disk, or taken by the hypervisor of this machine.
    idle: u64,
    server: Ticks,
    generator: Ticks,
    others: Ticks,
}

/// A process as /proc/PID/stat shows it (Linux: Documentation/filesystems/proc.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    pid: u32,
    parent: u32,
    own: Ticks,
    /// Time of ended children that the process has waited for.
    children: Ticks,
}

impl Clocks {
    /// Reads all clocks.
    pub(super) fn read(generator: u32, server: &[u32]) -> Result<Self> {
        let server: HashSet<u32> = server.iter().copied().collect();
        let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        let (cores, idle) = idle(&stat).context("/proc/stat has no line `cpu`")?;
        let mut clocks = Self {
            at: Instant::now(),
            cores,
            idle,
            server: Ticks::default(),
            generator: Ticks::default(),
            others: Ticks::default(),
        };
        for entry in std::fs::read_dir("/proc")?.flatten() {
            // A process that ends during the loop is included in the times of its parent.
            let Ok(text) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
            let Some(process) = Process::parse(&text) else { continue };
            if process.pid == generator {
                clocks.generator = process.own;
            } else if server.contains(&process.pid) {
                clocks.server += process.own;
            } else if process.pid != KTHREADD && process.parent != KTHREADD {
                clocks.others += process.own;
                clocks.others += process.children;
            }
        }
        Ok(clocks)
    }

    /// Returns the CPU time used from `self` to `after`. The generator's own share of a flood is the price of its
    /// calls, as for other guests. The kernel's work on the frames counts as the subject's cost.
    pub(super) fn until(&self, after: &Self, calls: &Calls, prices: &Prices, flood_frames: u64) -> Cpu {
        let us = |before: u64, after: u64| after.saturating_sub(before) as f64 * tick_us();
        let wall = after.at.duration_since(self.at).as_secs_f64() * 1e6;
        let background = us(self.others.user + self.others.system, after.others.user + after.others.system);
        let busy = wall * after.cores as f64 - us(self.idle, after.idle) - background;
        let user = us(self.generator.user, after.generator.user);
        let floor = ((calls.writes + flood_frames) as f64 * prices.write
            + calls.reads as f64 * prices.read
            + calls.waits as f64 * prices.wait)
            / 1e3;
        let system = us(self.generator.system, after.generator.system);
        Cpu {
            server_user_us: us(self.server.user, after.server.user),
            server_system_us: us(self.server.system, after.server.system),
            generator_us: user + floor,
            busy_us: busy.max(0.0),
            generator_user_us: user,
            generator_system_us: system,
            generator_floor_us: floor,
            background_us: background,
        }
    }
}

/// CPU time of each thread of some processes so far, in nanoseconds. It is exact where ticks of 10 ms are too coarse
/// (Linux: Documentation/scheduler/sched-stats.rst), but does not distinguish user mode from the kernel.
#[derive(Debug, Default)]
pub(super) struct Threads(HashMap<PathBuf, u64>);

impl Threads {
    /// Reads the times of all threads of these processes.
    pub(super) fn read(pids: &[u32]) -> Self {
        let threads =
            pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).ok()).flatten();
        let spent = |thread: std::fs::DirEntry| {
            let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
            Some((thread.path(), text.split(' ').next()?.parse().ok()?))
        };
        Self(threads.flatten().filter_map(spent).collect())
    }

    /// Returns the time that the remaining threads have used since `before`. Threads that ended since then are not
    /// included.
    pub(super) fn since(&self, before: &Self) -> u64 {
        let used =
            |(thread, now): (&PathBuf, &u64)| now.saturating_sub(before.0.get(thread).copied().unwrap_or(0));
        self.0.iter().map(used).sum()
    }
}

/// Returns a child of a process.
pub(super) fn child_of(parent: u32) -> Option<u32> {
    let entries = std::fs::read_dir("/proc").ok()?.flatten();
    let stats = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    let mut processes = stats.filter_map(|stat| Process::parse(&stat));
    processes.find(|process| process.parent == parent).map(|process| process.pid)
}

/// The parent of all kernel threads.
const KTHREADD: u32 = 2;

/// Returns the number of cores, and the ticks of all cores that were idle, waiting or stolen.
fn idle(stat: &str) -> Option<(u64, u64)> {
    let cores = stat.lines().filter(|line| {
        line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    });
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // user, nice, system, idle, iowait, irq, softirq, steal.
    let fields: Vec<u64> = all.split_whitespace().map_while(|field| field.parse().ok()).collect();
    Some((cores.count() as u64, fields.get(3)? + fields.get(4)? + fields.get(7)?))
}

impl Process {
    fn parse(stat: &str) -> Option<Self> {
        let (pid, rest) = stat.split_once(' ')?;
        // The name is in parentheses and may contain anything.
        let fields: Vec<&str> = rest[rest.rfind(')')? + 2..].split(' ').collect();
        let number = |at: usize| fields.get(at)?.trim().parse::<u64>().ok();
        // proc(5) numbers fields from 1, and 3 is the first field after the name.
        Some(Self {
            pid: pid.parse().ok()?,
            parent: number(1)? as u32,
            own: Ticks { user: number(11)?, system: number(12)? },
            children: Ticks { user: number(13)?, system: number(14)? },
        })
    }
}

// Measures the memory that a subject takes.

/// Fields of /proc/meminfo that are not the kernel's own memory: free memory, processes' memory, file caches and
/// reclaimable memory. The rest belongs to the kernel, whether it has a name (slabs, stacks, vmalloc, per-CPU) or not
/// (rings, packet pages). See Linux: Documentation/filesystems/proc.rst.
const NOT_THE_KERNELS: [&str; 7] =
    ["MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable", "PageTables"];

/// The most samples of the kernel's memory. The last one is used even if the memory is not stable.
const SAMPLES: usize = 30;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// The bytes by which two samples may differ if the memory is stable.
const STABLE_WITHIN: u64 = 64 << 10;

/// Returns the bytes that the kernel has taken for itself.
fn kernel() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(text: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let others = NOT_THE_KERNELS.iter().map(|name| field(name)).sum::<Option<u64>>()?;
    Some(field("MemTotal")?.checked_sub(others)? << 10)
}

/// Returns the kernel's memory once it is stable. Objects released a moment ago are freed later, after RCU's grace
/// periods and by workqueues.
pub(super) fn settled_kernel() -> Option<u64> {
    let mut last = kernel()?;
    for _ in 0..SAMPLES {
        std::thread::sleep(SAMPLE_INTERVAL);
        let now = kernel()?;
        if now.abs_diff(last) < STABLE_WITHIN {
            return Some(now);
        }
        last = now;
    }
    Some(last)
}

/// Returns the memory of these processes, and the growth of the kernel's memory since `before`.
pub(super) fn since(before: Option<u64>, pids: &[u32]) -> Memory {
    Memory {
        server_bytes: pids.iter().filter_map(|pid| proportional(*pid)).sum(),
        kernel_bytes: before.zip(settled_kernel()).map(|(before, now)| now.saturating_sub(before)),
    }
}

/// Returns resident memory without mapped files, and of pages that a process shares with those that it has forked only
/// its part (Linux: Documentation/filesystems/proc.rst, smaps_rollup).
fn proportional(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((field("Pss_Anon:")? + field("Pss_Shmem:")?) << 10)
}

/// Returns resident memory without mapped files, so that libraries do not count once per process.
pub(crate) fn resident(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((field("VmRSS:")?.checked_sub(field("RssFile:")?)?) << 10)
}

// The machine and the source of a storm, for readers of its results.

/// Describes this machine and this source before the storm.
pub(super) fn look(seed: u64) -> Result<Environment> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
        line.map(|value| value.trim().to_owned())
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let memory = memory.and_then(|text| text.split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
    let load = read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned();
    Ok(Environment {
        kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
        processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".into()),
        cores: std::thread::available_parallelism()?.get(),
        memory_bytes: memory << 10,
        commit: commit().unwrap_or_else(|| "unknown".into()),
        started: run(Command::new("date").args(["-u", "+%FT%TZ"]))?.trim().to_owned(),
        seed,
        notes: vec![format!("load average at the start: {load}")],
        ..Environment::default()
    })
}

fn commit() -> Option<String> {
    let git = |words: &[&str]| run(Command::new("git").arg("-C").arg(shell::top()).args(words)).ok();
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.trim().is_empty();
    Some(if changed { format!("{commit}-dirty") } else { commit })
}

// The results of a storm, in the form of its JSON file. The report and the comparison use nothing else.
//
// Times are in microseconds, sizes in bytes. Fields may be added; readers ignore unknown fields.

/// The version of the file format.
pub(crate) const SCHEMA: &str = "xdp-imds-storm/1";

/// The results of a run: every case, with its subjects in alternation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) schema: String,
    pub(crate) environment: Environment,
    pub(crate) cases: Vec<MeasuredCase>,
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
pub(crate) struct MeasuredCase {
    pub(crate) settings: Settings,
    pub(crate) subjects: Vec<MeasuredSubject>,
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
pub(crate) struct MeasuredSubject {
    /// The subject's name, such as `xdp-imds` or `nginx`.
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
    /// What became of requests since the agent was killed, if it was.
    #[serde(default)]
    pub(crate) without_agent: Option<WithoutAgent>,
    /// Time from the first guest's start to the last guest's end.
    pub(crate) wall_us: f64,
    pub(crate) cpu: Cpu,
    /// Requests that Nova had during the round, and before it since the server's start, if there is one.
    #[serde(default)]
    pub(crate) asked_of_nova: Option<u64>,
    #[serde(default)]
    pub(crate) asked_ahead: Option<u64>,
    /// CPU time of the signer of identity tokens, which `cpu` includes, if there is one.
    #[serde(default)]
    pub(crate) signer_us: Option<f64>,
    pub(crate) request: Distribution,
    /// Requests that the agent's kernel part has answered; `None` for other servers.
    #[serde(default)]
    pub(crate) kernel: Option<Distribution>,
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

impl Round {
    /// Returns the number of requests without the right answer, as far as the server promises one.
    pub(crate) fn broken(&self) -> u64 {
        self.failures + self.without_agent.map_or(0, |it| it.missed)
    }
}

/// A disturbance of the server while guests booted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Disturbed {
    /// The event as on the command line: `kill9@0.5`.
    pub(crate) event: String,
    /// Time until the next agent served all guests, and the previous agent had ended.
    pub(crate) took_us: f64,
}

/// Requests since an agent was killed. The answer to a VM's request was published if the kernel had given it before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WithoutAgent {
    /// Requests that the kernel has answered.
    pub(crate) answered: u64,
    /// Requests whose answer was not published: they wait for the next agent.
    pub(crate) waiting: u64,
    /// Requests that got no answer although it was published.
    pub(crate) missed: u64,
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
    /// Resident memory of the subject's processes. What they share counts once.
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
    use std::time::{Duration, Instant};

    use super::{Clocks, Cpu, Distribution, Process, Spread, Threads, Ticks, idle, parse, resident};
    use crate::storm::guest::{Calls, Prices};

    #[test]
    fn idle_time_includes_waiting_and_stolen_time() {
        let stat = "cpu  1 2 3 400 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8\ncpu1 1 2 3 4 5 6 7 8\nintr 5\n";
        assert_eq!(idle(stat), Some((2, 458)));
        assert_eq!(idle("cpu0 1 2"), None);
    }

    #[test]
    fn the_time_used_by_this_process_grows() {
        let own = [std::process::id()];
        let before = Threads::read(&own);
        let until = Instant::now() + Duration::from_millis(20);
        while Instant::now() < until {}
        assert!(Threads::read(&own).since(&before) > 0);
    }

    #[test]
    fn a_process_is_parsed_whatever_its_name() {
        let line = "77 (a) b (c) S 5 77 77 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0 99\n";
        let expected = Process {
            pid: 77,
            parent: 5,
            own: Ticks { user: 10, system: 20 },
            children: Ticks { user: 30, system: 40 },
        };
        assert_eq!(Process::parse(line), Some(expected));
        assert_eq!(Process::parse("77 no name"), None);
    }

    #[test]
    fn busy_time_excludes_others_and_host_time_excludes_calls() {
        let at = Instant::now();
        let none = Ticks::default();
        let before = Clocks { at, cores: 2, idle: 0, server: none, generator: none, others: none };
        let after = Clocks {
            at: at + Duration::from_secs(1),
            idle: 50,
            server: Ticks { user: 10, system: 20 },
            generator: Ticks { user: 15, system: 35 },
            others: Ticks { user: 30, system: 10 },
            ..before
        };
        let calls = Calls { writes: 1_000, reads: 1_000, waits: 10 };
        let prices = Prices { write: 100.0, read: 50.0, wait: 1_000.0 };
        let cpu = before.until(&after, &calls, &prices, 0);
        // Two cores for a second, minus half a second of idle time and 0.4 s of other programs. A tick is 10 ms.
        assert_eq!(cpu.busy_us.round(), 1_100_000.0);
        assert_eq!(cpu.generator_floor_us, 160.0);
        assert_eq!(cpu.generator_us, 150_160.0);
        assert_eq!(cpu.host_us().round(), 949_840.0);
    }

    #[test]
    fn the_kernels_memory_is_the_rest_of_all_memory() {
        let text = "MemTotal: 1000 kB\nMemFree: 400 kB\nBuffers: 10 kB\nCached: 200 kB\nSwapCached: 0 kB\n\
                    AnonPages: 100 kB\nSReclaimable: 50 kB\nPageTables: 5 kB\nSUnreclaim: 90 kB\n";
        assert_eq!(parse(text), Some(235 << 10));
        assert_eq!(parse("MemTotal: 1000 kB\n"), None);
    }

    #[test]
    fn this_process_has_memory_of_its_own() {
        assert!(resident(std::process::id()).expect("a process") > 64 << 10);
    }

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
