//! Measures CPU time: of the whole machine, the server, the generator, and all other programs.
//!
//! Busy time is all time that was not idle, so that softirqs count wherever they ran. The kernel counts idle time
//! exactly (NO_HZ), and other times by ticks. Other programs are measured by their own clocks. A program that has ended
//! is included in the clock of its parent. Kernel threads do not count as other programs, because they may work for the
//! server.

use anyhow::{Context as _, Result};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use support::netns::run;

use super::guest::{Calls, Prices};
use super::model::{Cpu, Environment, Memory};

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
        server_bytes: pids.iter().filter_map(|pid| resident(*pid)).sum(),
        kernel_bytes: before.zip(settled_kernel()).map(|(before, now)| now.saturating_sub(before)),
    }
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Clocks, Process, Threads, Ticks, idle, parse, resident};
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
}
