//! `cargo xtask haul`: sends millions of large answers to guests on real taps with offloads, and fails on any stall.
//!
//! ```text
//!  this process ── for each case ── site (namespace, taps, records, agent)
//!                     ├─ pretended ── the storm's guests: TCP clients that own the taps' descriptors
//!                     ├─ linux ────── kernels' TCP in namespaces behind the same taps, frames pumped
//!                     └─ stalls ── report (table, JSON)
//! ```
//!
//! A stall is a connection that makes no progress for longer than `--limit`, and for longer than the frames lost on
//! purpose explain (`storm::guest::stall`). Each stall is shown with its last segments. The agent's rate limits are
//! off.

mod linux;
mod pretended;
mod report;
mod site;

use crate::storm::guest::stall::Stalls;
use crate::storm::{self, size};
use anyhow::{Context as _, Result, ensure};
use report::{Case, Report};
use shell::tools;
use site::Site;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The most guests of a kind: a Linux guest takes a namespace and three threads.
const GUESTS_MOST: usize = 256;
/// The shortest interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The kind of TCP that the guests use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Kind {
    /// A simulated TCP client that owns its tap's descriptor, as in a storm
    Pretended,
    /// Linux's own TCP in a namespace behind the tap
    Linux,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Pretended { "pretended" } else { "linux" })
    }
}

/// Number of answers, kinds of guests, and the limit of a stall.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Sizes of answers, and how many answers each kind of guest gets at each loss
    #[arg(long, value_name = "SIZE=COUNT", value_delimiter = ',', value_parser = answers,
          default_value = "64KiB=1000000,1MiB=100000")]
    answers: Vec<(usize, u64)>,
    /// Kinds and numbers of guests; each kind is a case of its own
    #[arg(long, value_name = "KIND=COUNT", value_delimiter = ',', value_parser = guests,
          default_value = "pretended=64,linux=32")]
    guests: Vec<(Kind, usize)>,
    /// Shares of frames lost in each direction; each is a case of its own
    #[arg(long, value_name = "SHARE", value_delimiter = ',', default_values_t = [0.0, 0.01])]
    loss: Vec<f64>,
    /// Seconds without progress that count as a stall
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    limit: f64,
    /// Time limit of the whole run, in minutes; answers missing then are a failure
    #[arg(long, value_name = "N", default_value_t = 240.0)]
    minutes: f64,
    /// The seed of all random choices
    #[arg(long, value_name = "NUMBER", env = "XDP_IMDS_SEED", default_value_t = 1)]
    seed: u64,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The agent to run, instead of building an optimised one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// Further configuration of the agent (YAML, without `limits` and `ports`)
    #[arg(long, value_name = "FILE")]
    agent_config: Option<PathBuf>,
}

/// One case: the guests, their requests and the losses.
pub(super) struct Job {
    pub(super) kind: Kind,
    pub(super) guests: usize,
    pub(super) bytes: usize,
    pub(super) answers: u64,
    pub(super) loss: f64,
    /// Seconds without progress that count as a stall.
    pub(super) limit: f64,
    pub(super) seed: u64,
    /// No request begins after this time.
    pub(super) end: Instant,
}

/// The results of a case.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) answered: u64,
    /// Failed requests, by reason.
    pub(super) failed: std::collections::BTreeMap<String, u64>,
    pub(super) stalls: Stalls,
}

/// Prints the progress of a case.
pub(super) struct ProgressLines {
    label: String,
    began: Instant,
    printed: Instant,
}

impl ProgressLines {
    fn new(label: String) -> Self {
        let now = Instant::now();
        Self { label, began: now, printed: now }
    }

    /// Prints a line if the last one is at least [`PROGRESS_INTERVAL`] old.
    pub(super) fn report(&mut self, answered: u64, stalls: u64) {
        if self.printed.elapsed() >= PROGRESS_INTERVAL {
            self.printed = Instant::now();
            let seconds = self.began.elapsed().as_secs_f64();
            eprintln!("[{seconds:>6.0} s] {}: {answered} answers, {stalls} stalls", self.label);
        }
    }
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    args.check()?;
    let (agent, _) = storm::run::build(args.agent.as_deref())?;
    if args.agent.is_none() {
        shell::go_on_as_root(&[OsString::from("--agent"), agent.clone().into()])?;
    }
    shell::go_on_as_root(&[])?;
    tools::ensure(tools::LAB)?;
    let read = |file: &PathBuf| {
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
    };
    let configuration = args.agent_config.as_ref().map(read).transpose()?.unwrap_or_default();
    let end = Instant::now() + Duration::from_secs_f64(args.minutes * 60.0);
    let mut report = Report::new(args.seed, args.limit);
    for &(bytes, answers) in &args.answers {
        for &loss in &args.loss {
            for &(kind, guests) in &args.guests {
                let mut progress = ProgressLines::new(format!("{kind}, {bytes} bytes, loss {loss}"));
                let Args { limit, seed, .. } = *args;
                let job = Job { kind, guests, bytes, answers, loss, limit, seed, end };
                let site = Site::new(&job, &agent, &configuration)?;
                let began = Instant::now();
                let found = match kind {
                    Kind::Pretended => pretended::haul(&site, &job, &mut progress)?,
                    Kind::Linux => linux::haul(&site, &job, &mut progress)?,
                };
                report.add(Case::new(&job, found, began.elapsed()));
            }
        }
    }
    print!("{}", report.text());
    report.write(args.json.as_deref())?;
    let broken = report.broken();
    ensure!(broken.is_empty(), "{}", broken.join("; "));
    Ok(())
}

impl Args {
    /// Checks the options that clap cannot check.
    fn check(&self) -> Result<()> {
        for loss in &self.loss {
            ensure!((0.0..0.5).contains(loss), "--loss: expected a share from 0 to 0.5, found {loss}");
        }
        ensure!(
            (0.1..=60.0).contains(&self.limit),
            "--limit: expected 0.1 to 60 seconds, found {}",
            self.limit
        );
        ensure!(
            (0.1..=1_440.0).contains(&self.minutes),
            "--minutes: expected 0.1 to 1440, found {}",
            self.minutes
        );
        Ok(())
    }
}

/// Parses `64KiB=1000000`.
fn answers(text: &str) -> Result<(usize, u64), String> {
    let (bytes, count) = text.split_once('=').ok_or("expected SIZE=COUNT, such as 64KiB=1000000")?;
    let count = count.parse().ok().filter(|count| *count > 0);
    Ok((size(bytes)?, count.ok_or("expected a number of answers from 1")?))
}

/// Parses `linux=32`.
fn guests(text: &str) -> Result<(Kind, usize), String> {
    let (kind, count) = text.split_once('=').ok_or("expected KIND=COUNT, such as linux=32")?;
    let kind = clap::ValueEnum::from_str(kind, false)?;
    let count = count.parse().ok().filter(|count| (1..=GUESTS_MOST).contains(count));
    Ok((kind, count.ok_or_else(|| format!("expected a number of guests, 1 to {GUESTS_MOST}"))?))
}

#[cfg(test)]
mod tests {
    use super::{Kind, answers, guests};

    #[test]
    fn answers_and_guests_have_a_kind_and_a_count() {
        assert_eq!(answers("64KiB=1000000"), Ok((65_536, 1_000_000)));
        assert_eq!(guests("linux=32"), Ok((Kind::Linux, 32)));
        for text in ["", "64KiB", "64KiB=", "64KiB=0", "x=1"] {
            assert!(answers(text).is_err(), "{text}");
        }
        for text in ["", "linux", "linux=0", "linux=1000000", "windows=1"] {
            assert!(guests(text).is_err(), "{text}");
        }
    }
}
