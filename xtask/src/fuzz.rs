//! `cargo xtask fuzz`: runs each fuzz target for some time, one after the other.
//!
//! Seeds come from `tests/fuzz/corpus`, which is committed and small. Inputs that a fuzzer finds worth keeping go to a
//! directory below Cargo's target directory, and the next run starts from them. If an input breaks a target's
//! assertion, name it after its fault, add it to the seeds, and fix the bug.

use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The crate of the fuzz targets.
const CRATE: &str = "tests/fuzz";
/// The longest run of one target, in minutes.
const MINUTES_MOST: f64 = 24.0 * 60.0;
/// The most time and memory that one input may take. An input that takes more counts as a find, like one that breaks an
/// assertion.
const TIMEOUT_S: u32 = 20;
const MEMORY_MIB: u32 = 2_048;
/// The most memory of one allocation. No input is so long that its parser needs more at once.
const ALLOCATION_MIB: u32 = 64;
/// Interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// The last lines of output that are printed with a find.
const KEPT: usize = 40;

/// Which targets to fuzz, and for how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Minutes that each target runs
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// Targets to fuzz; all by default
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
}

fn minutes(text: &str) -> Result<f64, String> {
    let read = text.parse().ok().filter(|minutes| (0.01..=MINUTES_MOST).contains(minutes));
    read.ok_or_else(|| format!("expected minutes, from 0.01 to {MINUTES_MOST}, found `{text}`"))
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let all = targets()?;
    for name in &args.targets {
        ensure!(all.contains(name), "there is no target `{name}`; expected one of {}", all.join(", "));
    }
    let chosen = if args.targets.is_empty() { all } else { args.targets.clone() };
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let mut build = fuzz("build");
    shell::run(&mut build)?;
    let mut lines = vec![format!(
        "{:<12} {:>14} {:>12} {:>10} {:>10}",
        "target", "inputs", "per second", "edges", "finds"
    )];
    let mut found = Vec::new();
    for target in &chosen {
        let outcome = one(target, args.minutes)?;
        let FuzzOutcome { inputs, edges, seconds, find } = &outcome;
        let rate = *inputs as f64 / seconds.max(1e-3);
        let finds = usize::from(find.is_some());
        lines.push(format!("{target:<12} {inputs:>14} {rate:>12.0} {edges:>10} {finds:>10}"));
        if let Some(output) = find {
            eprintln!("{output}");
            found.push(target.clone());
        }
    }
    println!("{}", lines.join("\n"));
    let advice = "give the input a name that describes it and add it to tests/fuzz/corpus/TARGET";
    ensure!(found.is_empty(), "finds of {}; {advice}", found.join(", "));
    Ok(())
}

/// Lists the targets by the names of their source files.
fn targets() -> Result<Vec<String>> {
    let directory = shell::top().join(CRATE).join("fuzz_targets");
    let files =
        std::fs::read_dir(&directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut names = Vec::new();
    for file in files {
        let path = file?.path();
        names.extend(path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Says what fuzzing needs and this machine lacks.
pub(crate) fn missing() -> Option<&'static str> {
    if shell::which("cargo-fuzz").is_none() {
        return Some("cargo-fuzz is missing; run `cargo install --locked cargo-fuzz`");
    }
    (!has_nightly()).then_some("a nightly toolchain is missing; run `rustup toolchain install nightly`")
}

/// True if `cargo +nightly` works.
pub(crate) fn has_nightly() -> bool {
    let mut command = Command::new("cargo");
    command.args(["+nightly", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns a cargo-fuzz command. It uses no sanitizer: Miri checks unsafe code, and without one the assertions are
/// tested twice as often.
fn fuzz(word: &str) -> Command {
    let mut command = Command::new("cargo");
    // These variables would make the nightly Cargo use this one's toolchain.
    command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").env_remove("RUSTC").current_dir(shell::top());
    command.args(["+nightly", "fuzz", word, "--fuzz-dir", CRATE, "--sanitizer", "none"]);
    command
}

/// The result of one target.
struct FuzzOutcome {
    inputs: u64,
    edges: u64,
    seconds: f64,
    /// The fuzzer's last output, if an input broke an assertion.
    find: Option<String>,
}

fn one(target: &str, minutes: f64) -> Result<FuzzOutcome> {
    let found = shell::target().join("fuzz").join(target);
    std::fs::create_dir_all(&found).with_context(|| format!("cannot make {}", found.display()))?;
    let seeds = shell::top().join(CRATE).join("corpus").join(target);
    let mut command = fuzz("run");
    command.arg(target).args([&found, &seeds]).arg("--");
    command.args([
        format!("-max_total_time={}", (minutes * 60.0).ceil()),
        format!("-timeout={TIMEOUT_S}"),
        format!("-rss_limit_mb={MEMORY_MIB}"),
        format!("-malloc_limit_mb={ALLOCATION_MIB}"),
        "-print_final_stats=1".to_owned(),
    ]);
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run cargo fuzz")?;
    let output = BufReader::new(child.stderr.take().context("standard error is not piped")?);
    let mut read = Read::default();
    let mut reported = began;
    for line in output.lines() {
        read.line(&line?);
        if reported.elapsed() >= PROGRESS_INTERVAL {
            reported = Instant::now();
            let seconds = began.elapsed().as_secs();
            eprintln!("[{seconds:>5} s] {target}: {} inputs, {} edges", read.inputs, read.edges);
        }
    }
    let status = child.wait()?;
    let find = (!status.success()).then(|| format!("{target}: {status}\n{}", read.kept.join("\n")));
    Ok(FuzzOutcome { inputs: read.inputs, edges: read.edges, seconds: began.elapsed().as_secs_f64(), find })
}

/// The figures in libFuzzer's output (<https://llvm.org/docs/LibFuzzer.html#output>).
#[derive(Default)]
struct Read {
    inputs: u64,
    edges: u64,
    kept: Vec<String>,
}

impl Read {
    fn line(&mut self, line: &str) {
        if self.kept.len() == KEPT {
            self.kept.remove(0);
        }
        self.kept.push(line.to_owned());
        let number = |text: &str| text.trim().parse::<u64>().ok();
        if let Some(total) = line.strip_prefix("stat::number_of_executed_units:").and_then(number) {
            self.inputs = total;
            return;
        }
        // `#1234 NEW cov: 56 ft: 78 corp: …`
        let Some(rest) = line.strip_prefix('#') else { return };
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        self.inputs = number(digits).unwrap_or(self.inputs);
        let mut words = rest.split_whitespace();
        if words.any(|word| word == "cov:") {
            self.edges = words.next().and_then(number).unwrap_or(self.edges);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CRATE, Read, minutes, targets};

    #[test]
    fn every_target_has_seeds_and_a_place_in_the_manifest() {
        let manifest =
            std::fs::read_to_string(shell::top().join("tests/fuzz/Cargo.toml")).expect("a manifest");
        let targets = targets().expect("targets");
        assert!(targets.len() >= 9, "{targets:?}");
        for target in targets {
            let count = std::fs::read_dir(shell::top().join(CRATE).join("corpus").join(&target))
                .expect("a corpus")
                .count();
            assert!(count >= 10, "{target} has {count} seeds");
            assert!(manifest.contains(&format!("name = \"{target}\"")), "{target} is not built");
        }
    }

    #[test]
    fn figures_in_the_output_of_the_fuzzer_are_read() {
        let mut read = Read::default();
        for line in [
            "INFO: Seed: 1",
            "#2\tINITED cov: 101 ft: 102 corp: 1/1b exec/s: 0 rss: 30Mb",
            "#4096\tpulse  cov: 345 ft: 900 corp: 50/2kb lim: 43 exec/s: 2048 rss: 40Mb",
            "stat::number_of_executed_units: 5000",
        ] {
            read.line(line);
        }
        assert_eq!((read.inputs, read.edges, read.kept.len()), (5_000, 345, 4));
    }

    #[test]
    fn minutes_are_bounded() {
        assert_eq!(minutes("0.5"), Ok(0.5));
        for text in ["0", "-1", "1e9", "nan", "ten"] {
            assert!(minutes(text).is_err(), "{text}");
        }
    }
}
