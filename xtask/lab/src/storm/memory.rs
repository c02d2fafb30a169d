//! What a subject takes of the machine's memory.

use super::model::Memory;
use std::time::Duration;

/// What is free, somebody's, of files, or would be given back: the rest is the kernel's own, whether it has a
/// name (slabs, stacks, vmalloc, per-CPU) or not (rings, pages of packets). By /proc/meminfo's names (Linux:
/// Documentation/filesystems/proc.rst).
const NOT_THE_KERNELS: [&str; 7] =
    ["MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable", "PageTables"];

/// Looks at the kernel's memory before what is seen last must do, the time between two, and by how many octets two
/// may differ when it rests.
const LOOKS: usize = 30;
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);
const RESTS: u64 = 64 << 10;

/// Octets the kernel has taken for itself.
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

/// The same once it rests: what was let go of lately is freed later, after RCU's grace periods and by workqueues.
pub(super) fn settled_kernel() -> Option<u64> {
    let mut last = kernel()?;
    for _ in 0..LOOKS {
        std::thread::sleep(BETWEEN_LOOKS);
        let now = kernel()?;
        if now.abs_diff(last) < RESTS {
            return Some(now);
        }
        last = now;
    }
    Some(last)
}

/// What these processes have, and the kernel has taken since it had `before`.
pub(super) fn since(before: Option<u64>, pids: &[u32]) -> Memory {
    Memory {
        server_bytes: pids.iter().filter_map(|pid| resident(*pid)).sum(),
        kernel_bytes: before.zip(settled_kernel()).map(|(before, now)| now.saturating_sub(before)),
    }
}

/// Resident memory that is not of files, so that libraries do not count once per process.
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
    fn the_kernels_memory_is_what_is_nobody_elses() {
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
