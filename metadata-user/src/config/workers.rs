//! The default number of workers.

use metadata_feed::memory_budget::{WORKER_BYTES, cgroup};

/// CPUs for which one worker suffices. By a model of a node with 62 VMs on each CPU that all run cloud-init at once
/// (the bench `many_cores`), a worker is then busy for an eighth of the storm.
const CPUS_OF_A_WORKER: usize = 32;
/// The most workers by default. Each takes 64 MiB for the rings of its hub.
const MOST: usize = 8;
/// The share of the memory limit that workers may take: one part of this many.
const PARTS: u64 = 8;

/// The number of workers for the CPUs and the memory that this process may use.
pub(super) fn by_default() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    for_machine(cpus, cgroup::memory_limit())
}

fn for_machine(cpus: usize, memory: Option<u64>) -> u32 {
    let by_cpus = cpus.div_ceil(CPUS_OF_A_WORKER).clamp(1, MOST);
    let by_memory = memory.map_or(u64::MAX, |bytes| bytes / PARTS / WORKER_BYTES as u64);
    (by_cpus as u64).min(by_memory).max(1) as u32
}

#[cfg(test)]
mod tests {
    use super::for_machine;

    #[test]
    fn workers_follow_the_cpus_within_an_eighth_of_the_memory() {
        const GIB: u64 = 1 << 30;
        for (cpus, memory, workers) in [
            (1, None, 1),
            (32, None, 1),
            (33, None, 2),
            (64, None, 2),
            (128, None, 4),
            (1_024, None, 8),
            (128, Some(GIB / 4), 1),
            (128, Some(3 * GIB / 2), 1),
            (128, Some(3 * GIB), 2),
            (128, Some(16 * GIB), 4),
        ] {
            assert_eq!(for_machine(cpus, memory), workers, "{cpus} CPUs, {memory:?} bytes");
        }
    }
}
