//! Collects the rights and limits of this process.

use std::fs;
use std::time::SystemTime;

use rustix::process::{Resource, geteuid, getrlimit};

use super::super::facts::{Capabilities, ProcessFacts, Resources};

/// The fields of `/proc/self/uid_map` in the initial user namespace: the first user ID inside, the first user ID
/// outside, and the number of user IDs.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

pub(crate) fn process() -> ProcessFacts {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ProcessFacts {
        uid: geteuid().as_raw(),
        capabilities: capabilities(&status),
        seccomp: field(&status, "Seccomp").and_then(|value| value.parse().ok()),
        initial_user_namespace: fs::read_to_string("/proc/self/uid_map")
            .map_or(true, |map| map.split_whitespace().eq(ALL_USERS)),
        resources: Resources {
            open_files: getrlimit(Resource::Nofile).maximum,
            locked_memory: getrlimit(Resource::Memlock).current,
        },
        cpus: std::thread::available_parallelism().map_or(1, Into::into),
        unix_time: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    }
}

fn capabilities(status: &str) -> Option<Capabilities> {
    let set = |name| u64::from_str_radix(field(status, name)?, 16).ok();
    Some(Capabilities { effective: set("CapEff")?, permitted: set("CapPrm")?, bounding: set("CapBnd")? })
}

/// Returns the value of a line `NAME: VALUE` in `/proc/self/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::{Capabilities, capabilities};

    #[test]
    fn the_capability_sets_are_read_from_the_kernels_text() {
        let status = "Name:\tx\nCapInh:\t0000000000000000\nCapPrm:\t00000000000000ff\n\
                      CapEff:\t0000000000001000\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n";
        let sets = Capabilities { effective: 1 << 12, permitted: 0xff, bounding: 0x1ff_ffff_ffff };
        assert_eq!(capabilities(status), Some(sets));
        assert_eq!(capabilities("Name:\tx\n"), None);
    }
}
