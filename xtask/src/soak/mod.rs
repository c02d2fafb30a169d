//! `cargo xtask soak`: hours of a node's life in minutes, with an eye on everything that could leak.
//!
//! ```text
//!  steady ─── crawls on taps that never change: nothing may fail while one agent serves
//!  roam ───── taps and records that change all the time: after each change, the right octets
//!  hostile ── floods, garbage, hoarders, slow readers, bombs
//!  this thread ── restarts of the agent, then one long life ── watch (a look at each interval, all else still)
//!                                                                 └─ bounds ── report (table, page, JSON)
//! ```
//!
//! It takes place in two network namespaces of its own. The first part of the time goes to restarts, by SIGTERM and
//! SIGKILL in turn, under full load; the rest is the life of one agent, whose memory and objects are held
//! against the bounds once it is warm.

mod bounds;
mod hostile;
mod node;
mod report;
mod roam;
mod script;
mod shared;
mod steady;
mod watch;

use crate::shell;
use crate::tools;
use anyhow::{Context as _, Result, bail, ensure};
use node::{Ending, Guests, Node};
use report::Report;
use shared::{EndsWithMe, Shared};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::agent::Agent;
use watch::{Sample, Watch};

/// Longest soak: longer ones are for a node of their own.
const MINUTES_MOST: f64 = 24.0 * 60.0;
/// Most taps: one machine holds more, but then their guests are what is measured.
const TAPS_MOST: i64 = 1_000;
/// Of all time, what goes to restarts, and of a life, what goes to warming up.
const RESTARTS: f64 = 0.25;
const WARM_UP: f64 = 0.2;
/// Between two restarts.
const RESTART_EVERY: Duration = Duration::from_secs(6);
/// Between two looks, and how many there are at least, however short the soak.
const LOOK_EVERY: Duration = Duration::from_secs(60);
const LOOKS: f64 = 8.0;
/// How often progress is told.
const TELL: Duration = Duration::from_secs(5);
/// Between two changes of roaming guests.
const CHANGE_PAUSE: Duration = Duration::from_millis(20);

/// How long, and how told.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long, after everything is set up
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = minutes)]
    minutes: f64,
    /// Taps: three eighths of them steady guests', as many roaming ones', the others hostile ones'
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(16..=TAPS_MOST))]
    taps: u16,
    /// Where all choices come from: the same seed, the same changes in the same order
    #[arg(long, value_name = "S", env = "XDP_IMDS_SEED", default_value_t = 1)]
    seed: u64,
    /// Also write everything seen as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a page with charts
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Pin nothing: no agent takes over from another, and none leaves anything behind
    #[arg(long)]
    no_pins: bool,
    /// The agent to run, instead of building one with optimisation
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

fn minutes(text: &str) -> Result<f64, String> {
    let read = text.parse().ok().filter(|minutes| (0.5..=MINUTES_MOST).contains(minutes));
    read.ok_or_else(|| format!("expected minutes, from 0.5 to {MINUTES_MOST}, found `{text}`"))
}

/// Runs the verb.
pub(crate) fn run(args: Args) -> Result<()> {
    let agent = match &args.agent {
        Some(agent) => agent.canonicalize().with_context(|| format!("no agent at {}", agent.display()))?,
        None => build()?,
    };
    if args.agent.is_none() {
        shell::go_on_as_root(&["--agent".into(), agent.clone().into()])?;
    }
    shell::go_on_as_root(&[])?;
    tools::ensure(tools::LAB)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The first ends the soak in good order, the second at once.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&interrupted))?;
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    let report = soak(&args, agent, interrupted)?;
    print!("{}", report.text());
    report.write(args.json.as_deref(), args.report.as_deref())?;
    let broken = report.broken();
    ensure!(broken.is_empty(), "broken: {}", broken.join("; "));
    Ok(())
}

/// The agent, built with optimisation.
fn build() -> Result<PathBuf> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "metadata-user"]))?;
    let agent = shell::target().join("release/xdp-imds");
    ensure!(agent.is_file(), "nothing was built at {}", agent.display());
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
    let (looks, agent) = std::thread::scope(|scope| {
        let ends = EndsWithMe(&shared);
        let threads = set_going(scope, &shared, &node, &records, &mut guests, args.seed);
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
    // Nobody sends any more: the last look is at what stays behind.
    node.stop(agent, &shared)?;
    node.release()?;
    let left = watch.orphans(None)?;
    if !left.is_empty() {
        shared.breach(format!("the last agent has left {left}"));
    }
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    Ok(Report::new(args.seed, args.taps.into(), minutes, looks, &shared))
}

type Running<'scope> = Vec<std::thread::ScopedJoinHandle<'scope, Result<()>>>;

/// Starts everybody who sends frames or changes things.
fn set_going<'scope, 'env>(
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

/// Restarts, then a long life; returns what was seen of that, once it was warm, and the agent.
fn stages<'a>(
    args: &Args,
    node: &'a Node,
    mut agent: Agent<'a>,
    watch: &mut Watch,
    shared: &Shared,
    began: Instant,
) -> Result<(Vec<Sample>, Agent<'a>)> {
    let whole = Duration::from_secs_f64(args.minutes * 60.0);
    let mut tell = Tell { shared, began, whole, told: began };
    let mut endings = node.endings().iter().cycle();
    while began.elapsed() + RESTART_EVERY < whole.mul_f64(RESTARTS) && !shared.is_over() {
        tell.wait(RESTART_EVERY, "restarts");
        if shared.is_over() {
            break;
        }
        let ending = *endings.next().unwrap_or(&Ending::Stop);
        agent = node.restart(agent, ending, watch, shared)?;
    }
    let life = whole.saturating_sub(began.elapsed());
    tell.wait(life.mul_f64(WARM_UP), "warming up");
    let every = LOOK_EVERY.min(life.mul_f64((1.0 - WARM_UP) / LOOKS));
    let mut looks = Vec::new();
    while !shared.is_over() {
        {
            let _calm = shared.calm();
            looks.push(watch.sample(&agent, &node.ns)?);
        }
        if began.elapsed() >= whole {
            break;
        }
        tell.wait(every.min(whole.saturating_sub(began.elapsed())), "one life");
    }
    if shared.interrupted.load(Ordering::Relaxed) {
        bail!("interrupted after {:.1} minutes", began.elapsed().as_secs_f64() / 60.0);
    }
    Ok((looks, agent))
}

/// Tells of progress while time passes.
struct Tell<'a> {
    shared: &'a Shared,
    began: Instant,
    whole: Duration,
    told: Instant,
}

impl Tell<'_> {
    fn wait(&mut self, long: Duration, stage: &str) {
        let end = Instant::now() + long;
        while !self.shared.is_over() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.shared
                .sleep(left.min(TELL.saturating_sub(self.told.elapsed())).max(Duration::from_millis(1)));
            if self.told.elapsed() >= TELL {
                self.told = Instant::now();
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
