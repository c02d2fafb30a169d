//! Finds a daemon of libvirt that does not run the hook, because it looks for hooks only when it starts.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metadata_feed::libvirt::{HOOK, HOOKS};

/// The daemons that run hooks of QEMU, one of which a host has.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];
/// Most processes that are looked at.
const PROCESSES: usize = 1 << 16;
/// Ticks of the kernel's clock in a second, as `/proc` has them on every architecture (`USER_HZ`).
const TICKS: u64 = 100;
/// The package's directory, which is as old as its first installation.
const PACKAGE: &str = "/etc/xdp-imds";

/// The daemon that has run since before the first hook was installed.
pub(super) fn too_old() -> Option<String> {
    fs::metadata(HOOK).ok()?;
    let hooks = fs::read_dir(HOOKS).ok()?.take(PROCESSES).flatten().map(|entry| entry.path());
    let others = [Path::new("/etc/libvirt/hooks/qemu").to_owned(), PACKAGE.into()];
    // With any hook at its start the daemon looks into the directory at each event.
    let installed = hooks.chain(others).filter_map(|path| made(&path)).min()?;
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let boot = UNIX_EPOCH + Duration::from_secs(boot_time(&stat)?);
    let processes = fs::read_dir("/proc").ok()?.take(PROCESSES).flatten();
    let daemon = |process: fs::DirEntry| {
        let name = fs::read_to_string(process.path().join("comm")).ok()?.trim().to_owned();
        if !DAEMONS.contains(&&*name) {
            return None;
        }
        let stat = fs::read_to_string(process.path().join("stat")).ok()?;
        (boot + started(&stat)? < installed).then_some(name)
    };
    processes.into_iter().find_map(daemon)
}

/// When a file was made; `None` if there is none, or if its file system does not tell.
fn made(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.created().ok()
}

/// The time of the boot, in seconds since 1970, in `/proc/stat`.
fn boot_time(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// The time from the boot to the start of a process, in `/proc/PID/stat`: field 22. Its name may have spaces and
/// parentheses.
fn started(stat: &str) -> Option<Duration> {
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    Some(Duration::from_millis(ticks.saturating_mul(1_000 / TICKS)))
}

#[cfg(test)]
mod tests {
    use super::{boot_time, started};
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    #[test]
    fn the_start_of_a_process_is_read_from_the_kernels_text() {
        let text = "4465 (a b) c) S 1 4465 4465 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 17 0 1234 9 9 9";
        assert_eq!(started(text), Some(Duration::from_millis(12_340)));
        assert_eq!(started("4465 (a) S 1"), None);
        assert_eq!(boot_time("cpu 1 2\nbtime 1700000000\nprocesses 7\n"), Some(1_700_000_000));
    }

    #[test]
    fn this_process_has_started_before_now_and_after_the_boot() {
        let read = |path: &str| std::fs::read_to_string(path).expect("the kernel's text");
        let boot = UNIX_EPOCH + Duration::from_secs(boot_time(&read("/proc/stat")).expect("a time"));
        let start = boot + started(&read("/proc/self/stat")).expect("a time");
        assert!(boot < start && start < SystemTime::now() + Duration::from_secs(2), "{boot:?} {start:?}");
    }
}
