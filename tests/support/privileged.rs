//! Whether this process may make namespaces, and the record of which tests really did.
//!
//! Two variables steer it, both set by `cargo xtask test`:
//! - `XDP_IMDS_REQUIRE_PRIVILEGED=1` turns a skip into a failure;
//! - `XDP_IMDS_PRIVILEGED_LOG=FILE` collects one line per test, `ran NAME` or `skipped NAME: REASON`, so
//!   that skips are reported by number and a run in which nothing ran cannot pass for a good one.
#![expect(unsafe_code, reason = "geteuid and unshare have no safe form in std")]

use std::fs::OpenOptions;
use std::io::Write as _;
use std::panic::Location;
use std::sync::OnceLock;

/// The variable that turns skips into failures.
pub const REQUIRE: &str = "XDP_IMDS_REQUIRE_PRIVILEGED";
/// The variable that names the file of runs and skips.
pub const LOG: &str = "XDP_IMDS_PRIVILEGED_LOG";

/// True when the calling test may go on: root, able to make a network namespace, with taps at hand.
///
/// Otherwise prints the reason and returns false; the test then returns at once.
///
/// # Panics
/// When the privilege is missing and [`REQUIRE`] is `1`: a skip must not look like a pass where every
/// test is meant to run.
#[must_use]
#[track_caller]
pub fn or_skip() -> bool {
    or_skip_for(missing())
}

/// As [`or_skip`], for a test that needs more than privilege: `reason` says what is missing, if anything is.
///
/// # Panics
/// When there is a reason to skip and [`REQUIRE`] is `1`.
#[must_use]
#[track_caller]
pub fn or_skip_for(reason: Option<&str>) -> bool {
    let name = caller();
    match reason {
        None => {
            log(&format!("ran {name}"));
            true
        }
        Some(reason) => {
            log(&format!("skipped {name}: {reason}"));
            assert!(std::env::var_os(REQUIRE).is_none_or(|v| v != "1"), "{name} must run, but {reason}");
            eprintln!("skipped {name}: {reason}");
            false
        }
    }
}

/// What this process lacks for namespace tests, found out once.
#[must_use]
pub fn missing() -> Option<&'static str> {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    MISSING.get_or_init(probe).as_deref()
}

/// The effective user of this process.
#[must_use]
pub fn user() -> u32 {
    // SAFETY: geteuid takes nothing, changes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

fn probe() -> Option<String> {
    let uid = user();
    if uid != 0 {
        return Some(format!(
            "it needs root (running as uid {uid}); `cargo xtask test` runs it through sudo"
        ));
    }
    // A thread of its own: the namespace it makes dies with it and nobody else moves.
    let unshared = std::thread::spawn(|| {
        // SAFETY: unshare changes only the calling thread's namespace membership.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        (rc == 0).then_some(()).ok_or_else(std::io::Error::last_os_error)
    });
    match unshared.join() {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Some(format!("it cannot make a network namespace: {error}")),
        Err(_) => return Some("the probing thread panicked".into()),
    }
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .err()
        .map(|error| format!("it cannot open /dev/net/tun: {error}; `modprobe tun` may help"))
}

/// The test's name: libtest names the thread after it, unless it runs tests on the main thread.
#[track_caller]
fn caller() -> String {
    match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => Location::caller().to_string(),
    }
}

fn log(line: &str) {
    let Some(path) = std::env::var_os(LOG) else { return };
    // One write of one line: O_APPEND keeps lines of parallel test binaries whole.
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    if let Err(error) = written {
        panic!("{LOG} names {}, which cannot be appended to: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_answer_agrees_with_the_reason() {
        let required = std::env::var_os(super::REQUIRE).is_some_and(|v| v == "1");
        if super::missing().is_none() {
            assert!(super::or_skip());
        } else if !required {
            assert!(!super::or_skip());
        }
    }
}
