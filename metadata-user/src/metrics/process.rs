//! Metrics of the process, under the standard names
//! (<https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics>).

use std::fs;
use std::time::{Duration, SystemTime};

use super::exposition::{Exposition, MetricType};

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

    pub(super) fn expose(&self, out: &mut Exposition) {
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

#[cfg(test)]
mod tests {
    use super::ProcessMetrics;
    use std::time::{Duration, SystemTime};

    #[test]
    fn the_process_figures_are_plausible_and_grow() {
        let process = ProcessMetrics::read().expect("/proc is there");
        assert!(process.resident > 1 << 20 && process.virtual_size > process.resident, "{process:?}");
        assert!(process.threads >= 1 && process.descriptors >= 3, "{process:?}");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        assert!(process.started < now && now - process.started < Duration::from_secs(86_400), "{process:?}");
        let more: Vec<_> = (0..16).map(|_| std::fs::File::open("/dev/null").expect("a descriptor")).collect();
        let then = ProcessMetrics::read().expect("/proc is there");
        assert!(then.descriptors >= more.len() as u64, "{then:?}");
        assert!(then.cpu >= process.cpu, "{then:?}");
    }
}
