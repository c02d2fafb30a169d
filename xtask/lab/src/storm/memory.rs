//! Measures the memory that a subject takes.

use super::model::Memory;
use std::time::Duration;

/// Fields of /proc/meminfo that are not the kernel's own memory: free memory, processes' memory, file caches and
/// reclaimable memory. The rest belongs to the kernel, whether it has a name (slabs, stacks, vmalloc, per-CPU) or not
/// (rings, packet pages). See Linux: Documentation/filesystems/proc.rst.
const NOT_THE_KERNELS: [&str; 7] =
    ["MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable", "PageTables"];

/// The most samples of the kernel's memory. The last one is used even if the memory is not stable.
const SAMPLES: usize = 30;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// The octets by which two samples may differ if the memory is stable.
const STABLE_WITHIN: u64 = 64 << 10;

/// Returns the octets that the kernel has taken for itself.
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

#[cfg(test)]
mod tests {
    use super::{parse, resident};

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
