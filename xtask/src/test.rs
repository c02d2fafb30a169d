//! `cargo xtask test`: builds as this user, tests as root, and counts skipped tests.

use anyhow::{Context as _, Result, bail, ensure};
use shell::variables::{CLOUD_INIT, PRIVILEGED_LOG, REQUIRE_PRIVILEGED, SEED};
use shell::{Root, afterburn, tools};
use std::io::{BufRead as _, BufReader};
use std::num::NonZero;
use std::process::{Command, ExitStatus, Stdio};

/// The variable by which the harness of tests learns how many run at a time.
const TEST_THREADS: &str = "RUST_TEST_THREADS";
/// The variables by which property tests learn what to draw.
const PROPERTIES: [&str; 2] = ["PROPTEST_RNG_SEED", "PROPTEST_CASES"];
/// Tests that run at a time for each processor. Most of them wait for timers, guests and processes: with one for each
/// processor more than half of the time is idle.
const TESTS_PER_CPU: usize = 3;
/// Most tests that run at a time. Some start virtual machines.
const TESTS_MOST: usize = 12;

/// What to test, and whether skips are failures.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fail if a privileged test is skipped or none runs (the default when CI=true)
    #[arg(long)]
    require_privileged: bool,
    /// Further arguments for `cargo test`, for example `--test guests boot_storm -- --nocapture`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let require = args.require_privileged || ci;
    let root = shell::root();
    if let Root::No(reason) = &root {
        ensure!(!require, "privileged tests must run, but {reason}");
        eprintln!("privileged tests are skipped: {reason}");
    } else {
        tools::ensure(tools::LAB)?;
        build_afterburn();
    }
    shell::run(&mut shell::tested_agent())?;

    let log = tempfile::NamedTempFile::new()?;
    let mut test = shell::cargo(["test", "--workspace"]);
    if !args.words.iter().any(|word| word == "--no-run") {
        test.arg("--no-fail-fast");
    }
    test.args(&args.words).env(PRIVILEGED_LOG, log.path());
    if require {
        test.env(REQUIRE_PRIVILEGED, "1");
    }
    match root {
        Root::Already => {}
        Root::Sudo(sudo) => {
            // Cargo and the compiler run as the user; only the test programs run as root.
            let variable = format!("CARGO_TARGET_{}_RUNNER", host()?.to_uppercase().replace('-', "_"));
            let kept = [PRIVILEGED_LOG, REQUIRE_PRIVILEGED, CLOUD_INIT, SEED, TEST_THREADS];
            let keep = format!("--preserve-env={},{}", kept.join(","), PROPERTIES.join(","));
            test.env(variable, format!("{} {keep}", sudo.display()));
        }
        Root::No(_) => {}
    }
    if std::env::var_os(TEST_THREADS).is_none() {
        let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
        test.env(TEST_THREADS, (cpus * TESTS_PER_CPU).min(cpus.max(TESTS_MOST)).to_string());
    }
    let (totals, outcome) = run_counted(&mut test)?;
    let runs = Runs::read(&std::fs::read_to_string(log.path())?);
    runs.report();
    println!(
        "tests: {} passed, {} failed, {} skipped, {} not available",
        totals.passed,
        totals.failed,
        runs.skipped.len(),
        runs.absent.len()
    );
    ensure!(outcome.success(), "cargo test: {outcome}");
    // A selection of tests may contain no privileged test.
    ensure!(!require || !args.words.is_empty() || runs.ran > 0, "no privileged test ran");
    ensure!(!require || runs.skipped.is_empty(), "{} privileged tests were skipped", runs.skipped.len());
    Ok(())
}

/// Builds Afterburn, a client that tests run, unless its release is already built. Without it those tests are skipped,
/// or fail where skips are failures.
fn build_afterburn() {
    let target = shell::target();
    if afterburn::program(&target).is_file() {
        return;
    }
    let mut install = shell::cargo(afterburn::install(&target));
    if let Err(error) = shell::run(install.env("CARGO_PROFILE_DEV_DEBUG", "0")) {
        eprintln!(
            "cannot build Afterburn for the tests: {error:#}; its build needs libssl-dev and pkg-config"
        );
    }
}

/// Runs `cargo test`, passes its output on line by line, and adds up its result lines.
fn run_counted(test: &mut Command) -> Result<(Totals, ExitStatus)> {
    let mut child = test.stdout(Stdio::piped()).spawn().context("cannot run cargo test")?;
    let mut totals = Totals::default();
    let output = child.stdout.take().context("the output of cargo test is not piped")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        totals.add(&line);
        println!("{line}");
    }
    Ok((totals, child.wait()?))
}

/// The results of all test programs together.
#[derive(Default, Debug, PartialEq)]
struct Totals {
    passed: usize,
    failed: usize,
}

impl Totals {
    /// Adds a line such as `test result: ok. 3 passed; 0 failed; 0 ignored; …` and ignores other lines.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let number = |word: &str| {
            let before = result.split(word).next().unwrap_or_default();
            before.trim_end().rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        self.passed += number(" passed");
        self.failed += number(" failed");
    }
}

/// How many privileged tests ran, which were skipped, and which need a device that this machine lacks.
#[derive(Default, Debug, PartialEq)]
struct Runs {
    ran: usize,
    skipped: Vec<String>,
    absent: Vec<String>,
}

impl Runs {
    fn read(log: &str) -> Self {
        let mut runs = Self::default();
        for line in log.lines() {
            match line.split_once(' ') {
                Some(("skipped", test)) => runs.skipped.push(test.to_owned()),
                Some(("absent", test)) => runs.absent.push(test.to_owned()),
                _ => runs.ran += 1,
            }
        }
        runs
    }

    fn report(&self) {
        eprintln!("privileged tests: {} ran, {} skipped", self.ran, self.skipped.len());
        for test in &self.skipped {
            eprintln!("  skipped {test}");
        }
        for test in &self.absent {
            eprintln!("  not available here: {test}");
        }
    }
}

/// Returns the target triple that this compiler builds for by default.
fn host() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output =
        Command::new(rustc).arg("-vV").current_dir(shell::top()).output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().find_map(|line| line.strip_prefix("host: ")) {
        Some(host) => Ok(host.to_owned()),
        None => bail!("rustc -vV shows no host: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Runs, Totals};

    #[test]
    fn results_of_all_test_programs_are_added_up() {
        let mut totals = Totals::default();
        for line in [
            "test result: ok. 32 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.03s",
            "test a_guest ... 7 passed",
            "test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s",
        ] {
            totals.add(line);
        }
        assert_eq!(totals, Totals { passed: 36, failed: 1 });
    }

    #[test]
    fn skips_are_counted_by_name() {
        let runs = Runs::read("ran one\nskipped two: it needs root\nran three\nabsent four: no device\n");
        let expected = Runs {
            ran: 2,
            skipped: vec!["two: it needs root".into()],
            absent: vec!["four: no device".into()],
        };
        assert_eq!(runs, expected);
    }
}
