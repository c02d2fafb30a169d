//! `cargo xtask soak`: puts hours of a node's life into minutes, and watches everything that could leak.
//!
//! ```text
//!  steady ─── crawls on taps that never change: no request may fail while one agent serves
//!  roam ───── taps and records that change all the time: each change must show in the answers
//!  hostile ── floods, garbage, hoarders, slow readers, bombs
//!  this thread ── restarts of the agent, then one long life ── watch (samples while all else pauses)
//!                                                                 └─ bounds ── report (table, page, JSON)
//! ```
//!
//! The soak runs in two network namespaces of its own. In the first part, the agent is restarted under full load, by
//! SIGTERM, SIGKILL and takeover in turn. The rest is the life of one agent. Once the agent is warm, its memory and its
//! kernel objects are checked against the bounds.

mod bounds;
mod hostile;
mod node;
mod report;
mod roam;
mod script;
mod shared;
mod steady;
mod tenants;
mod watch;

use anyhow::{Context as _, Result, bail, ensure};
use node::{Ending, Guests, Node};
use report::Report;
use shared::{EndsWithMe, Shared};
use shell::architecture::Architecture;
use shell::tools;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::agent::Agent;
use watch::{Sample, Watch};

/// The longest soak, in minutes. A longer one deserves a node of its own.
const MINUTES_MOST: f64 = 24.0 * 60.0;
/// The most taps. With more of them, the soak would measure the guests rather than the agent.
const TAPS_MOST: i64 = 1_000;
/// The share of the whole time for restarts.
const RESTARTS: f64 = 0.25;
/// The share of the last agent's life for warming up.
const WARM_UP: f64 = 0.2;
/// Time between two restarts.
const RESTART_EVERY: Duration = Duration::from_secs(6);
/// The interval of samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(60);
/// The least number of samples in a short soak.
const SAMPLES: f64 = 8.0;
/// Interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Pause between two changes of roaming guests.
const CHANGE_PAUSE: Duration = Duration::from_millis(20);

/// Length of the soak, its guests and its reports.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Minutes of the soak, without the set-up
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// Number of taps: three eighths for steady guests, three eighths for roaming ones, the others for hostile ones
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(16..=TAPS_MOST))]
    taps: u16,
    /// The seed of all choices: the same seed makes the same changes in the same order
    #[arg(long, value_name = "S", env = "XDP_IMDS_SEED", default_value_t = 1)]
    seed: u64,
    /// Also write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a page with charts; with `--tenants` and a name in `.svg`, only the picture
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Pin nothing: no agent takes over from another, and none leaves anything behind
    #[arg(long)]
    no_pins: bool,
    /// The agent to run, instead of building an optimised one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// Instead of churn: hostile tenants, who may create VMs, all at once, and a modest one whose new VMs are measured
    #[arg(long, conflicts_with_all = ["taps", "no_pins"])]
    tenants: bool,
    /// With `--tenants`: only these attacks
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "tenants")]
    only: Vec<String>,
    /// With `--tenants`: memory limit of the agent in MiB, by default that of the DaemonSet
    #[arg(long, value_name = "MIB", default_value_t = 1_536, requires = "tenants", value_parser = clap::value_parser!(u64).range(256..=65_536))]
    memory: u64,
}

fn minutes(text: &str) -> Result<f64, String> {
    let read = text.parse().ok().filter(|minutes| (0.5..=MINUTES_MOST).contains(minutes));
    read.ok_or_else(|| format!("expected minutes, from 0.5 to {MINUTES_MOST}, found `{text}`"))
}

/// Runs the verb.
pub(crate) fn run(args: Args) -> Result<()> {
    let agent = match &args.agent {
        Some(agent) => agent.canonicalize().with_context(|| format!("no agent at {}", agent.display()))?,
        None if args.tenants => build_static()?,
        None => build()?,
    };
    if args.agent.is_none() {
        shell::go_on_as_root(&["--agent".into(), agent.clone().into()])?;
    }
    shell::go_on_as_root(&[])?;
    tools::ensure(tools::LAB)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The first signal ends the soak in an orderly way, the second one at once.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&interrupted))?;
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    if args.tenants {
        return hostile_tenants(&args, agent, interrupted);
    }
    let report = soak(&args, agent, interrupted)?;
    print!("{}", report.text());
    report.write(args.json.as_deref(), args.report.as_deref())?;
    let broken = report.broken();
    ensure!(broken.is_empty(), "the soak failed: {}", broken.join("; "));
    Ok(())
}

fn hostile_tenants(args: &Args, agent: PathBuf, interrupted: Arc<AtomicBool>) -> Result<()> {
    let plan = tenants::Plan {
        agent,
        length: Duration::from_secs_f64(args.minutes * 60.0),
        only: args.only.clone(),
        limit: args.memory << 20,
    };
    let report = tenants::soak(&plan, interrupted)?;
    print!("{}", report.text());
    report.write(args.json.as_deref(), args.report.as_deref())?;
    let broken = report.broken();
    ensure!(broken.is_empty(), "the soak failed:\n- {}", broken.join("\n- "));
    Ok(())
}

/// Builds the agent of the image, whose C library gives memory back at once. glibc keeps an arena for each thread.
fn build_static() -> Result<PathBuf> {
    Architecture::named(std::env::consts::ARCH)?.build_static("release")
}

/// Builds an optimised agent and returns its path.
fn build() -> Result<PathBuf> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "metadata-user"]))?;
    let agent = shell::target().join("release/xdp-imds");
    ensure!(agent.is_file(), "the build made no {}", agent.display());
    Ok(agent)
}

fn soak(args: &Args, agent: PathBuf, interrupted: Arc<AtomicBool>) -> Result<Report> {
    eprintln!("{} taps, seed {}", args.taps, args.seed);
    let node = Node::new(agent, args.taps, !args.no_pins)?;
    let records = node.records();
    let mut guests = node.populate(&records, args.seed)?;
    let first = node.start()?;
    let shared = Shared::new(interrupted);
    let began = Instant::now();
    let mut watch = Watch::new(began);
    let (samples, agent) = std::thread::scope(|scope| {
        let ends = EndsWithMe(&shared);
        let threads = start_threads(scope, &shared, &node, &records, &mut guests, args.seed);
        let stages = stages(args, &node, first, &mut watch, &shared, began);
        drop(ends);
        for thread in threads {
            match thread.join() {
                Ok(ended) => ended?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        stages
    })?;
    // All guests have ended. The last check finds objects that stayed behind.
    node.stop(agent, &shared)?;
    node.release()?;
    let remaining = watch.orphans(None)?;
    if !remaining.is_empty() {
        shared.breach(format!("the last agent left {remaining}"));
    }
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    Ok(Report::new(args.seed, args.taps.into(), minutes, samples, &shared))
}

type Running<'scope> = Vec<std::thread::ScopedJoinHandle<'scope, Result<()>>>;

/// Starts all threads that send frames or make changes.
fn start_threads<'scope, 'env>(
    scope: &'scope std::thread::Scope<'scope, 'env>,
    shared: &'env Shared,
    node: &'env Node,
    records: &'env Path,
    guests: &'env mut Guests,
    seed: u64,
) -> Running<'scope> {
    let Guests { steady, plans, roaming, hostile } = guests;
    let (steady, plans) = (&*steady, &*plans);
    vec![
        scope.spawn(move || {
            let _ends = EndsWithMe(shared);
            steady::crawl(shared, steady, plans, seed).context("steady guests")
        }),
        scope.spawn(move || {
            let _ends = EndsWithMe(shared);
            let places = node.places(records);
            roam::roam(shared, &places, roaming, CHANGE_PAUSE, seed).context("roaming guests")
        }),
        scope.spawn(move || {
            let _ends = EndsWithMe(shared);
            hostile::harm(shared, hostile).context("hostile guests")
        }),
    ]
}

/// Runs the restarts, then one long life. Returns the samples of that life after its warm-up, and the agent.
fn stages<'a>(
    args: &Args,
    node: &'a Node,
    mut agent: Agent<'a>,
    watch: &mut Watch,
    shared: &Shared,
    began: Instant,
) -> Result<(Vec<Sample>, Agent<'a>)> {
    let whole = Duration::from_secs_f64(args.minutes * 60.0);
    let mut progress = ProgressLines { shared, began, whole, printed: began };
    let mut endings = node.endings().iter().cycle();
    while began.elapsed() + RESTART_EVERY < whole.mul_f64(RESTARTS) && !shared.is_over() {
        progress.wait(RESTART_EVERY, "restarts");
        if shared.is_over() {
            break;
        }
        let ending = *endings.next().unwrap_or(&Ending::Stop);
        agent = node.restart(agent, ending, watch, shared)?;
    }
    let life = whole.saturating_sub(began.elapsed());
    progress.wait(life.mul_f64(WARM_UP), "warm-up");
    let every = SAMPLE_INTERVAL.min(life.mul_f64((1.0 - WARM_UP) / SAMPLES));
    let mut samples = Vec::new();
    while !shared.is_over() {
        {
            let _calm = shared.calm();
            samples.push(watch.sample(&agent, &node.ns)?);
        }
        if began.elapsed() >= whole {
            break;
        }
        progress.wait(every.min(whole.saturating_sub(began.elapsed())), "one life");
    }
    if shared.interrupted.load(Ordering::Relaxed) {
        bail!("interrupted after {:.1} minutes", began.elapsed().as_secs_f64() / 60.0);
    }
    Ok((samples, agent))
}

/// Prints progress lines during waits.
struct ProgressLines<'a> {
    shared: &'a Shared,
    began: Instant,
    whole: Duration,
    printed: Instant,
}

impl ProgressLines<'_> {
    fn wait(&mut self, long: Duration, stage: &str) {
        let end = Instant::now() + long;
        while !self.shared.is_over() {
            let remaining = end.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return;
            }
            self.shared.sleep(
                remaining
                    .min(PROGRESS_INTERVAL.saturating_sub(self.printed.elapsed()))
                    .max(Duration::from_millis(1)),
            );
            if self.printed.elapsed() >= PROGRESS_INTERVAL {
                self.printed = Instant::now();
                let counts = self.shared.counts.all();
                let counts: Vec<_> =
                    counts.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")).collect();
                eprintln!(
                    "[{:>6.0} of {:.0} s] {stage}: {}",
                    self.began.elapsed().as_secs_f64(),
                    self.whole.as_secs_f64(),
                    counts.join(", ")
                );
            }
        }
    }
}
