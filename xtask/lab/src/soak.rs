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

mod guests;
mod node;
mod tenants;
mod watch;

use anyhow::{Context as _, Result, bail, ensure};
use metadata_content::dialect::render;
use metadata_content::record::RecordLimits;
use metadata_content::store::{Interner, VmState};
use metadata_feed::directory;
use node::{Ending, Guests, Node};
use serde_json::{Value, json};
use shell::architecture::Architecture;
use shell::tools;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::guest::METADATA;
use support::record::{Identity, replace};
use watch::{SoakReport, SoakSample, SoakWatch};

use crate::storm::crawl::Dialect;
use crate::storm::guest::{Plan, Planned};
use crate::storm::{Bodies, ask};

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
    /// Instead of churn: hostile tenants that may create VMs, all at once, and a modest one whose new VMs are measured
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
    let plan = tenants::TenantsPlan {
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

fn soak(args: &Args, agent: PathBuf, interrupted: Arc<AtomicBool>) -> Result<SoakReport> {
    eprintln!("{} taps, seed {}", args.taps, args.seed);
    let node = Node::new(agent, args.taps, !args.no_pins)?;
    let records = node.records();
    let mut guests = node.populate(&records, args.seed)?;
    let first = node.start()?;
    let shared = Shared::new(interrupted);
    let began = Instant::now();
    let mut watch = SoakWatch::new(began);
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
    Ok(SoakReport::new(args.seed, args.taps.into(), minutes, samples, &shared))
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
            guests::crawl(shared, steady, plans, seed).context("steady guests")
        }),
        scope.spawn(move || {
            let _ends = EndsWithMe(shared);
            let places = node.places(records);
            guests::roam(shared, &places, roaming, CHANGE_PAUSE, seed).context("roaming guests")
        }),
        scope.spawn(move || {
            let _ends = EndsWithMe(shared);
            guests::harm(shared, hostile).context("hostile guests")
        }),
    ]
}

/// Runs the restarts, then one long life. Returns the samples of that life after its warm-up, and the agent.
fn stages<'a>(
    args: &Args,
    node: &'a Node,
    mut agent: Agent<'a>,
    watch: &mut SoakWatch,
    shared: &Shared,
    began: Instant,
) -> Result<(Vec<SoakSample>, Agent<'a>)> {
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

// The guests' records, and the answers that each guest must get.

/// Requests per second that a record allows its guest. It is high, because crawls follow one another without a pause.
const REQUESTS_PER_SECOND: u32 = 1_000_000;
/// Bytes of user-data, enough for several segments. Each generation of a record has its own.
const USER_DATA: usize = 5_000;

/// The tap of a guest, as its record names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    ifname: String,
    /// The tap's namespace; `None` for the agent's.
    netns: Option<String>,
}

fn record(guest: &Identity, generation: u64, place: &Place) -> Result<String> {
    let mut record: Value = serde_json::from_str(&guest.record(generation))?;
    let Place { ifname, netns } = place;
    record["network"]["nics"][0]["port"] = match netns {
        None => json!({"ifname": ifname}),
        Some(netns) => json!({"ifname": ifname, "netns": netns}),
    };
    let name = &guest.hostname;
    let line = format!("# {name}, generation {generation}\n");
    let text = format!("#cloud-config\n{}", line.repeat(USER_DATA / line.len()));
    record["user_data"] = json!({"text": text});
    record["vendor_data"] = json!({"text": "#cloud-config\n{}\n"});
    record["metadata"] = json!({"role": "web"});
    record["admin"] = json!({"user": "alice"});
    record["serve"] = json!({"limits": {"rps": REQUESTS_PER_SECOND, "burst": REQUESTS_PER_SECOND}});
    Ok(record.to_string())
}

/// Replaces a guest's record in one step.
fn write(directory: &Path, guest: &Identity, generation: u64, place: &Place) -> Result<()> {
    replace(&guest.path(directory), &record(guest, generation, place)?)
}

/// Returns the requests of these guests and the answers that their current records give. `bodies` is a file that only
/// this plan uses; it is read when the plan is loaded.
fn plan(records: &Path, bodies: &Path, dialect: Dialect, guests: &[Identity]) -> Result<Plan> {
    let crawl = dialect.crawl()?;
    let mut bodies = Bodies::create(bodies.to_owned())?;
    let mut planned = Vec::with_capacity(guests.len());
    for guest in guests {
        let name = format!("{}.yaml", guest.hostname);
        let loaded = directory::load(records, &name, &RecordLimits::DEFAULT)
            .with_context(|| format!("{} has no record", guest.hostname))?;
        let (record, _) = loaded.record?;
        let vm = VmState::alone(record.vm.uuid.as_str());
        let responses = render(&record, &mut Interner::new(), vm);
        let (_, answers) = ask(&crawl, guest, &responses, &mut bodies)?;
        planned.push(Planned { mac: guest.mac.0, address: guest.address, answers });
    }
    let requests = crawl.iter().map(|asked| asked.text()).collect();
    Ok(Plan { server: METADATA, requests, bodies: bodies.finish()?, guests: planned })
}

// State that the threads of a soak share: when to end, when to pause, and the counts.

/// The most breaches that are kept as text. Further ones are only counted.
const BREACHES_KEPT: usize = 20;
/// The longest time until a sleeping thread notices the end of the soak.
const WAKE_INTERVAL: Duration = Duration::from_millis(50);

/// The shared state.
struct Shared {
    /// True once the soak must end.
    over: AtomicBool,
    /// True after SIGINT or SIGTERM.
    interrupted: Arc<AtomicBool>,
    /// Threads hold it for reading while they send frames or make changes. Whoever holds it for writing has paused them
    /// all.
    calm: RwLock<()>,
    /// Odd while no agent runs.
    disturbances: AtomicU64,
    /// Odd during a takeover.
    handovers: AtomicU64,
    breaches: Mutex<Vec<String>>,
    counts: Counts,
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Counts of what happened so far.
        #[derive(Debug, Default)]
        struct Counts {
            $($(#[doc = $doc])+ pub(super) $name: AtomicU64,)+
        }

        impl Counts {
            /// Returns each count with its name.
            fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(Ordering::Relaxed)),)+]
            }
        }
    };
}

counts! {
    /// Boots of steady guests.
    boots,
    /// Requests of steady guests that were answered correctly.
    requests,
    /// Requests of steady guests that failed while no agent ran, or that were sent on a kept connection just as the
    /// previous agent closed it. A client repeats the latter (RFC 9112 §9.3.1).
    interrupted,
    /// Requests of steady guests that failed for another reason.
    failed,
    /// Changes to taps and records of roaming guests.
    changes,
    /// Crawls of roaming guests that got the right answers after a change.
    verified,
    /// Crawls of roaming guests before the change took effect, or during a restart.
    early,
    /// Frames sent by hostile guests.
    hostile_frames,
    /// Connections opened by hostile guests.
    hostile_connections,
    /// Agents ended by SIGTERM.
    stops,
    /// Agents ended by SIGKILL.
    kills,
    /// Agents ended by a takeover.
    takeovers,
    /// Expectations that were not met.
    breaches,
}

impl Shared {
    fn new(interrupted: Arc<AtomicBool>) -> Self {
        Self {
            over: AtomicBool::new(false),
            interrupted,
            calm: RwLock::new(()),
            disturbances: AtomicU64::new(0),
            handovers: AtomicU64::new(0),
            breaches: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// Whether all threads must end.
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed) || self.interrupted.load(Ordering::Relaxed)
    }

    /// Makes all threads end.
    fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Allows the caller to send frames and make changes while it holds the guard.
    fn busy(&self) -> RwLockReadGuard<'_, ()> {
        self.calm.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all threads pause, and keeps them paused while the caller holds the guard.
    fn calm(&self) -> RwLockWriteGuard<'_, ()> {
        self.calm.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the agent ends. The next call records that an agent serves again.
    fn disturb(&self) {
        self.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the start of a takeover. The next call records its end.
    fn hand_over(&self) {
        self.handovers.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the current numbers of disturbances and takeovers.
    fn mark(&self) -> Mark {
        let [disturbances, handovers] =
            [&self.disturbances, &self.handovers].map(|count| count.load(Ordering::SeqCst));
        Mark { disturbances, handovers }
    }

    /// Whether an agent served all the time since the mark.
    fn was_undisturbed_since(&self, mark: Mark) -> bool {
        mark.disturbances.is_multiple_of(2) && mark.disturbances == self.mark().disturbances
    }

    /// Whether the same agent served all the time since the mark.
    fn was_one_since(&self, mark: Mark) -> bool {
        mark.handovers.is_multiple_of(2) && mark == self.mark()
    }

    /// Records an expectation that was not met, and prints it.
    fn breach(&self, what: String) {
        add(&self.counts.breaches, 1);
        // It may quote what a hostile guest sent.
        eprintln!("BREACH: {}", metadata_common::printable::Printable(&what));
        let mut breaches = self.breaches.lock().unwrap_or_else(PoisonError::into_inner);
        if breaches.len() < BREACHES_KEPT {
            breaches.push(what);
        }
    }

    /// Returns the recorded breaches.
    fn breaches(&self) -> Vec<String> {
        self.breaches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sleeps, at most until the end of the soak.
    fn sleep(&self, long: Duration) {
        let mut remaining = long;
        while !remaining.is_zero() && !self.is_over() {
            let step = remaining.min(WAKE_INTERVAL);
            std::thread::sleep(step);
            remaining -= step;
        }
    }
}

/// The numbers of disturbances and takeovers at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    disturbances: u64,
    handovers: u64,
}

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// Ends the soak when dropped, so that a panic in one thread ends the others.
struct EndsWithMe<'a>(&'a Shared);

impl Drop for EndsWithMe<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
