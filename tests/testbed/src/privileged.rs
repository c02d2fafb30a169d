//! Decides whether this process may create namespaces, and records which tests ran.
//!
//! Two environment variables control this module; `cargo xtask test` sets both:
//! - `XDP_IMDS_REQUIRE_PRIVILEGED=1` turns a skip into a failure;
//! - `XDP_IMDS_PRIVILEGED_LOG=FILE` collects one line per test, `ran NAME`, `skipped NAME: REASON`, or
//!   `absent NAME: REASON` where no privilege but a device is missing that few machines have. The caller can count the
//!   skips, and a run that skipped every test does not look like a pass.
//!
//! Without them, a test program lists the tests it skipped when it ends, because libtest counts them as passed and
//! hides their output.
#![expect(unsafe_code, reason = "geteuid, unshare and atexit have no safe form in std")]

pub use privileged_test::test;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::panic::Location;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

/// Name of the variable that turns skips into failures.
pub const REQUIRE: &str = shell::variables::REQUIRE_PRIVILEGED;
/// Name of the variable that names the log of runs and skips.
pub const LOG: &str = shell::variables::PRIVILEGED_LOG;
/// The command that builds what tests need and runs every test.
const REMEDY: &str = "`cargo xtask test` runs all tests: it builds what they need and uses sudo";

/// Names of skipped tests by reason, printed when the test program ends.
static SKIPPED: Mutex<BTreeMap<String, Vec<String>>> = Mutex::new(BTreeMap::new());

/// True if the calling test can run: as root, with network namespaces and taps available.
///
/// Otherwise prints the reason and returns false; the test must then return at once.
///
/// # Panics
/// Panics if a privilege is missing and [`REQUIRE`] is `1`.
#[must_use]
#[track_caller]
pub fn or_skip() -> bool {
    or_skip_for(missing())
}

/// Like [`or_skip`], for a test with further needs. `reason` names what is missing; `None` means that nothing is.
///
/// # Panics
/// Panics if there is a reason to skip and [`REQUIRE`] is `1`.
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
            remember(reason, name);
            false
        }
    }
}

/// Lists the calling test as not available on this machine, for a reason that no privilege changes. That fails no test.
#[track_caller]
pub fn not_available(reason: &str) {
    let name = caller();
    log(&format!("absent {name}: {reason}"));
    eprintln!("not available: {name}: {reason}");
    remember(reason, name);
}

/// The first privilege this process lacks for namespace tests; determined once.
#[must_use]
pub fn missing() -> Option<&'static str> {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    MISSING.get_or_init(probe).as_deref()
}

/// Effective user id of this process.
#[must_use]
pub fn user() -> u32 {
    // SAFETY: geteuid takes nothing, changes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

fn probe() -> Option<String> {
    let uid = user();
    if uid != 0 {
        return Some(format!("it needs root (running as uid {uid})"));
    }
    // A separate thread enters the new namespace, so that no other thread moves and the namespace ends with the thread.
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

/// Remembers a skipped test for the summary at the end of the program.
fn remember(reason: &str, name: String) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: the function takes no arguments, never unwinds (see its comment) and lives as long as the program.
        let rc = unsafe { libc::atexit(summarise) };
        if rc != 0 {
            eprintln!("cannot list the skipped tests at the end of this program");
        }
    });
    let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    skipped.entry(reason.to_owned()).or_default().push(name);
}

/// Prints the summary. A panic would unwind through C, so nothing here panics, even if standard error is closed.
extern "C" fn summarise() {
    let skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    // A failure to print cannot be reported anywhere.
    drop(std::io::stderr().write_all(summary(&skipped).as_bytes()));
}

/// The skipped tests by reason, one line for each reason.
fn summary(skipped: &BTreeMap<String, Vec<String>>) -> String {
    let line = |(reason, names): (&String, &Vec<String>)| {
        let tests = if names.len() == 1 { "test" } else { "tests" };
        format!("SKIPPED {} {tests}, counted above as passed: {reason} ({})\n", names.len(), names.join(", "))
    };
    let lines: String = skipped.iter().map(line).collect();
    format!("{lines}{REMEDY}\n\n")
}

/// The test's name. libtest gives it to the thread, unless it runs tests on the main thread.
#[track_caller]
fn caller() -> String {
    match std::thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => Location::caller().to_string(),
    }
}

fn log(line: &str) {
    let Some(path) = std::env::var_os(LOG) else { return };
    // One write per line: O_APPEND keeps lines of parallel test binaries whole.
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
    use super::{LOG, REQUIRE, not_available, or_skip_for};
    use std::process::Command;

    /// Makes the test below skip; only this module sets it.
    const SKIP: &str = "XDP_IMDS_SKIP_FOR_A_TEST";

    #[test]
    fn a_test_that_skips_on_request() {
        if std::env::var_os(SKIP).is_some() {
            assert!(!or_skip_for(Some("the variable is set")));
        }
    }

    #[test]
    fn a_test_program_lists_skipped_tests_when_it_ends() {
        let run = |skip: bool| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.args(["--exact", "privileged::tests::a_test_that_skips_on_request"]);
            command.env_remove(LOG).env_remove(REQUIRE);
            if skip {
                command.env(SKIP, "1");
            }
            let output = command.output().expect("it runs");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stderr).expect("text")
        };
        let printed = run(true);
        assert!(
            printed.contains("SKIPPED 1 test, counted above as passed: the variable is set (privileged::"),
            "{printed}"
        );
        assert!(printed.contains("`cargo xtask test`"), "{printed}");
        assert_eq!(run(false), "");
    }

    #[test]
    fn a_test_that_is_not_available_on_request() {
        if std::env::var_os(SKIP).is_some() {
            not_available("there is no such device");
        }
    }

    #[test]
    fn a_test_that_is_not_available_is_logged_and_fails_nothing() {
        let log = tempfile::NamedTempFile::new().expect("a file");
        let name = "privileged::tests::a_test_that_is_not_available_on_request";
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", name]).env(SKIP, "1").env(REQUIRE, "1").env(LOG, log.path());
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        let logged = std::fs::read_to_string(log.path()).expect("the log");
        assert!(logged.starts_with("absent ") && logged.ends_with(": there is no such device\n"), "{logged}");
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            printed.contains("SKIPPED 1 test, counted above as passed: there is no such device"),
            "{printed}"
        );
    }

    #[test]
    fn the_result_agrees_with_the_reason() {
        let required = std::env::var_os(REQUIRE).is_some_and(|v| v == "1");
        if super::missing().is_none() {
            assert!(super::or_skip());
        } else if !required {
            assert!(!super::or_skip());
        }
    }
}
