//! The rights and limits of this process.

use std::fs;
use std::time::SystemTime;

use rustix::process::{Resource, geteuid, getrlimit};

use super::super::facts::{Capabilities, Process, Resources};

/// The content of `/proc/self/uid_map` in the initial user namespace, which maps all users to themselves.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

pub(super) fn process() -> Process {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    Process {
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

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::{Capabilities, capabilities};

    #[test]
    fn capability_sets_of_the_kernels_form_are_read() {
        let status = "Name:\tx\nCapInh:\t0000000000000000\nCapPrm:\t00000000000000ff\n\
                      CapEff:\t0000000000001000\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n";
        let sets = Capabilities { effective: 1 << 12, permitted: 0xff, bounding: 0x1ff_ffff_ffff };
        assert_eq!(capabilities(status), Some(sets));
        assert_eq!(capabilities("Name:\tx\n"), None);
    }
}
