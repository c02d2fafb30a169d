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

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use shell::tools;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use support::agent::{Agent, PortArgument, arguments};
use support::guest::{Guest, METADATA, NIC, Spec};
use support::netns::Namespace;
use support::pump::{Faults, Recent};
use support::record::Identity;
use support::tap::{Shape, Tap};

use crate::storm::crawl::Dialect;
use crate::storm::guest::{
    Answer, DESCRIBED, Expected, Nanos, Orders, Plan, Progress, Pump, SECOND, Stall, StallWatch, Stalls,
    TAP_GROUP, seconds, tap_name,
};
use crate::storm::{self, Case, size};

/// The most guests of a kind: a Linux guest takes a namespace and three threads.
const GUESTS_MOST: usize = 256;
/// The shortest interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The kind of TCP that the guests use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum GuestKind {
    /// A simulated TCP client that owns its tap's descriptor, as in a storm
    Pretended,
    /// Linux's own TCP in a namespace behind the tap
    Linux,
}

impl fmt::Display for GuestKind {
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
    guests: Vec<(GuestKind, usize)>,
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
    pub(super) kind: GuestKind,
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
pub(super) struct HaulCounts {
    pub(super) answered: u64,
    /// Failed requests, by reason.
    pub(super) failed: BTreeMap<String, u64>,
    pub(super) stalls: Stalls,
}

/// Prints the progress of a case.
pub(super) struct HaulProgress {
    label: String,
    began: Instant,
    printed: Instant,
}

impl HaulProgress {
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
    let mut report = HaulReport::new(args.seed, args.limit);
    for &(bytes, answers) in &args.answers {
        for &loss in &args.loss {
            for &(kind, guests) in &args.guests {
                let mut progress = HaulProgress::new(format!("{kind}, {bytes} bytes, loss {loss}"));
                let Args { limit, seed, .. } = *args;
                let job = Job { kind, guests, bytes, answers, loss, limit, seed, end };
                let site = HaulSite::new(&job, &agent, &configuration)?;
                let began = Instant::now();
                let found = match kind {
                    GuestKind::Pretended => haul_to_pretended(&site, &job, &mut progress)?,
                    GuestKind::Linux => haul_to_linux(&site, &job, &mut progress)?,
                };
                report.add(HaulCase::new(&job, found, began.elapsed()));
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
fn guests(text: &str) -> Result<(GuestKind, usize), String> {
    let (kind, count) = text.split_once('=').ok_or("expected KIND=COUNT, such as linux=32")?;
    let kind = clap::ValueEnum::from_str(kind, false)?;
    let count = count.parse().ok().filter(|count| (1..=GUESTS_MOST).contains(count));
    Ok((kind, count.ok_or_else(|| format!("expected a number of guests, 1 to {GUESTS_MOST}"))?))
}

// Guests with Linux's own TCP, each in a namespace behind its tap. A guest uses one connection after the other.
// Connections are closed in three ways in turn: by the service, by the service after the guest has closed its half,
// and by the guest.

/// A guest gives a connection up if nothing arrives for this time.
const GIVES_UP: Duration = Duration::from_secs(30);
/// Interval at which all guests are checked for stalls.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The most bytes of one read.
const READ: usize = 256 << 10;

/// The side that closes a connection.
#[derive(Clone, Copy)]
enum HaulEnding {
    /// The service closes, and the guest reads to the end.
    Service,
    /// The service closes, after the guest closed its half right after the request.
    HalfClosed,
    /// The guest closes once it has the answer.
    Guest,
}

const ENDINGS: [HaulEnding; 3] = [HaulEnding::Service, HaulEnding::HalfClosed, HaulEnding::Guest];

/// The state of one guest, shared by its own thread and the thread that checks for stalls.
struct Lane {
    guest: Guest,
    recent: Arc<Mutex<Recent>>,
    state: Mutex<TransferState>,
}

/// The progress of a guest.
#[derive(Default)]
struct TransferState {
    /// The time of the current connection's last progress; `None` without a connection.
    since: Option<Nanos>,
    port: u16,
    answered: u64,
    watch: StallWatch,
}

/// The state that all guests share.
struct TransferShared<'a> {
    job: &'a Job,
    began: Instant,
    /// The request, and the same request with `Connection: close`.
    requests: [&'a str; 2],
    bodies: &'a [u8],
    /// Requests begun, and guests whose thread still runs.
    begun: AtomicU64,
    busy: AtomicU64,
    stalls: Mutex<Stalls>,
    failed: Mutex<BTreeMap<String, u64>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TransferShared<'_> {
    fn now(&self) -> Nanos {
        self.began.elapsed().as_nanos() as Nanos
    }

    fn limit(&self) -> Nanos {
        (self.job.limit * SECOND as f64) as Nanos
    }

    /// Returns the next request's number, or `None` if there are no more requests.
    fn next(&self) -> Option<u64> {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        (number < self.job.answers && Instant::now() < self.job.end).then_some(number)
    }

    /// Records that a guest's connection made progress. `goes_on` is false if the connection is over.
    fn progressed(&self, lane: &Lane, goes_on: bool) {
        let lost = lock(&lane.recent).lost;
        let mut state = lock(&lane.state);
        let now = self.now();
        if let Some(since) = state.since.replace(now) {
            state.watch.progressed(now - since, lost, self.limit(), &mut lock(&self.stalls));
        }
        state.since = state.since.filter(|_| goes_on);
    }

    /// Records a stall if a guest waits for too long.
    fn check(&self, lane: &Lane) {
        let lost = lock(&lane.recent).lost;
        let overdue = |state: &TransferState| {
            let waited = self.now().saturating_sub(state.since?);
            state.watch.overdue(waited, lost, self.limit())
        };
        if overdue(&lock(&lane.state)).is_none() {
            return;
        }
        let sockets = lane.guest.ns().output(Command::new("ss").args(["-H", "-t", "-i", "-n", "-o"]));
        let sockets = sockets.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        let mut state = lock(&lane.state);
        let Some((lost, since)) = overdue(&state).zip(state.since) else { return };
        let stall = Stall {
            connection: format!("{}:{}", lane.guest.identity().address, state.port),
            answers: state.answered,
            seconds: seconds(self.now().saturating_sub(since)),
            lost,
            segments: lock(&lane.recent).lines(),
            sockets: sockets.unwrap_or_else(|error| format!("{error:#}")),
        };
        state.watch.stalls(stall, &mut lock(&self.stalls));
    }
}

/// Runs all guests until all answers have arrived.
fn haul_to_linux(site: &HaulSite, job: &Job, progress: &mut HaulProgress) -> Result<HaulCounts> {
    let agent = site.serve()?;
    let closing = site.closing_request();
    let bodies = std::fs::read(&site.plan.bodies).context("cannot read the file of bodies")?;
    let began = Instant::now();
    let lanes = (0..job.guests).map(|number| lane(site, job, number, began)).collect::<Result<Vec<_>>>()?;
    let shared = TransferShared {
        job,
        began,
        requests: [&site.plan.requests[0], &closing],
        bodies: &bodies,
        begun: AtomicU64::new(0),
        busy: AtomicU64::new(lanes.len() as u64),
        stalls: Mutex::default(),
        failed: Mutex::default(),
    };
    let answered = || lanes.iter().map(|lane| lock(&lane.state).answered).sum();
    std::thread::scope(|scope| {
        for (number, lane) in lanes.iter().enumerate() {
            let (shared, expected) = (&shared, site.expected(number));
            scope.spawn(move || {
                let _ends = Busy(&shared.busy);
                lane.guest.ns().run_in(|| ask(shared, lane, expected));
            });
        }
        while shared.busy.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(CHECK_INTERVAL);
            lanes.iter().for_each(|lane| shared.check(lane));
            progress.report(answered(), lock(&shared.stalls).count);
        }
    });
    drop(agent);
    let answered = answered();
    let take = |failed: Mutex<_>| failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let stalls = shared.stalls.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(HaulCounts { answered, failed: take(shared.failed), stalls })
}

/// Counts a guest as busy until it is dropped at the end of the guest's thread.
struct Busy<'a>(&'a AtomicU64);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lane(site: &HaulSite, job: &Job, number: usize, began: Instant) -> Result<Lane> {
    let identity = Identity::of(u16::try_from(number)?);
    let recent = Arc::new(Mutex::new(Recent::default()));
    let faults = Faults::loss(job.loss);
    let spec = Spec {
        shape: Shape::virtio(),
        to_host: faults,
        to_guest: faults,
        seed: job.seed.wrapping_mul(1 << 16).wrapping_add(number as u64),
        recent: Some((Arc::clone(&recent), began)),
        ..Spec::of(&identity)
    };
    let guest = Guest::boot_on(Arc::clone(&site.taps[number]), Namespace::new("guest")?, &spec)?;
    // Frames of address resolution are lost as often as others. More than the usual three tries keep this from failing
    // requests.
    for (name, value) in [("mcast_solicit", "20"), ("ucast_solicit", "20"), ("retrans_time_ms", "100")] {
        guest.ns().sysctl(&format!("ipv4/neigh/{NIC}/{name}"), value)?;
    }
    Ok(Lane { guest, recent, state: Mutex::default() })
}

/// Makes the requests of a guest, on a thread in the guest's namespace.
fn ask(shared: &TransferShared<'_>, lane: &Lane, expected: &Expected) {
    let mut buffer = vec![0; READ];
    while let Some(number) = shared.next() {
        let ending = ENDINGS[number as usize % ENDINGS.len()];
        shared.progressed(lane, true);
        let fetched = fetch(shared, lane, ending, expected, &mut buffer);
        shared.progressed(lane, false);
        match fetched {
            Ok(()) => lock(&lane.state).answered += 1,
            Err(error) => *lock(&shared.failed).entry(format!("{error:#}")).or_default() += 1,
        }
    }
}

fn fetch(
    shared: &TransferShared<'_>,
    lane: &Lane,
    ending: HaulEnding,
    expected: &Expected,
    buffer: &mut [u8],
) -> Result<()> {
    let mut stream =
        TcpStream::connect_timeout(&SocketAddr::from((METADATA, 80)), GIVES_UP).context("connect")?;
    shared.progressed(lane, true);
    lock(&lane.state).port = stream.local_addr()?.port();
    stream.set_read_timeout(Some(GIVES_UP))?;
    let request = shared.requests[usize::from(!matches!(ending, HaulEnding::Guest))];
    stream.write_all(request.as_bytes()).context("send the request")?;
    if matches!(ending, HaulEnding::HalfClosed) {
        stream.shutdown(Shutdown::Write).context("close one half")?;
    }
    let (mut answer, mut is_done) = (Answer::default(), false);
    loop {
        let length = stream.read(buffer).context(if is_done { "read up to the end" } else { "read" })?;
        shared.progressed(lane, true);
        if length == 0 {
            ensure!(is_done, "the connection ended before the answer");
            return Ok(());
        }
        ensure!(!is_done, "bytes follow the answer");
        match answer.feed(&buffer[..length], expected, shared.bodies) {
            Progress::More => {}
            Progress::Done { .. } if matches!(ending, HaulEnding::Guest) => return Ok(()),
            Progress::Done { .. } => is_done = true,
            Progress::Wrong(failure) => bail!("wrong answer: {failure:?}"),
        }
    }
}

// Guests with the storm's own simulated TCP clients. In alternate rounds, the guests and the service close the
// connections.

/// Requests of each guest in one storm. All guests wait for the slowest one before the next storm, so there should be
/// many requests; but a storm should end within minutes.
const REQUESTS: u64 = 250;

/// Runs all guests until all answers have arrived.
fn haul_to_pretended(site: &HaulSite, job: &Job, progress: &mut HaulProgress) -> Result<HaulCounts> {
    let _agent = site.serve()?;
    let mut pump = Pump::new(&site.taps)?;
    let mut found = HaulCounts::default();
    let (mut asked, mut rounds) = (0, 0);
    while asked < job.answers && Instant::now() < job.end {
        let requests = (job.answers - asked).div_ceil(job.guests as u64).min(REQUESTS);
        let to_the_end = rounds % 2 == 1;
        let request = if to_the_end { site.closing_request() } else { site.plan.requests[0].clone() };
        let mut plan = site.plan.clone();
        plan.requests = vec![request; requests as usize];
        plan.guests.iter_mut().for_each(|it| it.answers = vec![it.answers[0]; requests as usize]);
        pump.load(plan)?;
        let orders = Orders {
            guests: job.guests,
            to_the_end,
            loss: job.loss,
            stall: job.limit,
            seed: job.seed.wrapping_add(rounds),
            ..Orders::default()
        };
        let (tally, _) = pump.storm(&orders, &mut |_, _| {})?;
        asked += requests * job.guests as u64;
        rounds += 1;
        found.answered += tally.requests;
        for (failure, times) in tally.reasons {
            *found.failed.entry(format!("{failure:?}").to_lowercase()).or_default() += times;
        }
        let (stalls, more) = (&mut found.stalls, tally.stalls);
        stalls.count += more.count;
        stalls.excused += more.excused;
        stalls.longest = stalls.longest.max(more.longest);
        let room = DESCRIBED - stalls.described.len();
        stalls.described.extend(more.described.into_iter().take(room));
        progress.report(found.answered, found.stalls.count);
    }
    Ok(found)
}

// The site of a case: taps in a namespace of their own, a record for each guest, and the agent.

/// Turns off the limits on what a port may send. The records raise the limit of requests.
const NO_LIMITS: &str = "limits: {frames_per_second: 0, connections_per_second: 0}\n";

/// The namespace with its taps, and the files of the agent and its guests.
struct HaulSite {
    agent: PathBuf,
    configuration: PathBuf,
    taps: Vec<Arc<Tap>>,
    /// One request, for user-data, and the answer to each guest.
    plan: Plan,
    case: Case,
    ns: Namespace,
}

impl HaulSite {
    /// Makes taps and records.
    fn new(job: &Job, agent: &Path, configuration: &str) -> Result<Self> {
        let case = Case::lay_out(Dialect::Nocloud, job.guests, job.bytes, 0)?;
        let crawl = Dialect::Nocloud.crawl()?;
        let at = crawl.iter().position(|asked| asked.path.ends_with("/user-data"));
        let at = at.context("the crawl has no request for user-data")?;
        let mut plan: Plan = serde_json::from_reader(BufReader::new(File::open(case.plan())?))?;
        plan.requests = vec![plan.requests.swap_remove(at)];
        plan.guests.iter_mut().for_each(|guest| guest.answers = vec![guest.answers[at]]);
        let file = case.plan().with_file_name("agent.yaml");
        std::fs::write(&file, format!("{NO_LIMITS}{configuration}"))?;
        let ns = Namespace::new("haul")?;
        // Without IPv6 the node itself sends no frames on the taps.
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let mut lines = String::new();
        let mut taps = Vec::new();
        for number in 0..job.guests {
            let name = tap_name(number);
            writeln!(lines, "link set {name} group {TAP_GROUP} up")?;
            taps.push(Arc::new(Tap::create(&ns, &name, Shape::virtio())?));
        }
        ns.ip_batch(&lines)?;
        Ok(Self { agent: agent.to_owned(), configuration: file, taps, plan, case, ns })
    }

    /// Starts the agent.
    fn serve(&self) -> Result<Agent<'_>> {
        let ports = self.case.tenants.iter().map(|tenant| PortArgument::new(&tenant.tap, tenant.mac));
        let mut words = arguments(&self.case.records(), &ports.collect::<Vec<_>>());
        words.extend(["--config".into(), self.configuration.clone().into()]);
        Agent::start_binary(&self.agent, &self.ns, words)
    }

    /// Returns the request with `Connection: close` in place of `keep-alive`.
    fn closing_request(&self) -> String {
        self.plan.requests[0].replace("Connection: keep-alive", "Connection: close")
    }

    /// Returns the answer that a guest must get.
    fn expected(&self, number: usize) -> &Expected {
        &self.plan.guests[number].answers[0]
    }
}

impl Drop for HaulSite {
    fn drop(&mut self) {
        // All taps are deleted in one step. Each tap that closes by its descriptor waits for a grace period of its own.
        if let Err(error) = self.ns.ip(&format!("link del group {TAP_GROUP}")) {
            eprintln!("cannot delete the taps of {} in one step: {error:#}", self.ns.name());
        }
    }
}

// The results of a haul: a table and JSON.

/// The results of one run.
#[derive(Debug, Serialize)]
struct HaulReport {
    seed: u64,
    limit_s: f64,
    cases: Vec<HaulCase>,
}

/// The results of one case.
#[derive(Debug, Default, Serialize)]
struct HaulCase {
    kind: String,
    guests: usize,
    bytes: usize,
    loss: f64,
    asked: u64,
    answered: u64,
    failed: BTreeMap<String, u64>,
    stalls: u64,
    /// Number of waits beyond the limit that lost frames explain, so that they are no stalls.
    excused: u64,
    longest_wait_s: f64,
    took_s: f64,
    /// The first stalls, with their segments.
    described: Vec<Stall>,
}

impl HaulCase {
    fn new(job: &Job, found: HaulCounts, took: Duration) -> Self {
        Self {
            kind: job.kind.to_string(),
            guests: job.guests,
            bytes: job.bytes,
            loss: job.loss,
            asked: job.answers,
            answered: found.answered,
            failed: found.failed,
            stalls: found.stalls.count,
            excused: found.stalls.excused,
            longest_wait_s: seconds(found.stalls.longest),
            took_s: took.as_secs_f64(),
            described: found.stalls.described,
        }
    }

    fn name(&self) -> String {
        format!("{} {} bytes, loss {}", self.kind, self.bytes, self.loss)
    }

    fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Returns the described stalls and the failures as text.
    fn described(&self) -> String {
        let mut text = String::new();
        for stall in &self.described {
            let Stall { connection, answers, seconds, lost, segments, sockets } = stall;
            let name = self.name();
            let _ = writeln!(
                text,
                "\nSTALL {name}: {connection}, {seconds:.1} s, {lost} frames lost, after {answers} answers"
            );
            for line in segments.iter().chain([sockets]) {
                let _ = writeln!(text, "  {line}");
            }
        }
        for (why, times) in &self.failed {
            let _ = writeln!(text, "\nFAILED {}: {why}, {times} times", self.name());
        }
        text
    }
}

impl HaulReport {
    fn new(seed: u64, limit_s: f64) -> Self {
        Self { seed, limit_s, cases: Vec::new() }
    }

    fn add(&mut self, case: HaulCase) {
        eprintln!("{}: {} of {} answers, {} stalls", case.name(), case.answered, case.asked, case.stalls);
        self.cases.push(case);
    }

    /// Returns one sentence for each case with a stall, a failure or a missing answer.
    fn broken(&self) -> Vec<String> {
        let broken = self.cases.iter().filter(|it| it.stalls + it.failures() > 0 || it.answered < it.asked);
        let shown = |case: &HaulCase| {
            let HaulCase { answered, asked, stalls, .. } = case;
            let failures = case.failures();
            format!("{}: {stalls} stalls, {failures} failures, {answered} of {asked} answers", case.name())
        };
        broken.map(shown).collect()
    }

    /// Returns the stalls, then the table.
    fn text(&self) -> String {
        let mut text: String = self.cases.iter().map(HaulCase::described).collect();
        let _ = writeln!(text, "\nseed {}; a stall is {} s without progress\n", self.seed, self.limit_s);
        let _ = writeln!(
            text,
            "{:<10} {:>6} {:>8} {:>5} {:>8} {:>6} {:>6} {:>7} {:>8} {:>7} {:>9}",
            "guests",
            "",
            "bytes",
            "loss",
            "answers",
            "failed",
            "stalls",
            "excused",
            "longest",
            "took",
            "per second"
        );
        for case in &self.cases {
            let _ = writeln!(
                text,
                "{:<10} {:>6} {:>8} {:>5} {:>8} {:>6} {:>6} {:>7} {:>6.2} s {:>5.0} s {:>9.0}",
                case.kind,
                case.guests,
                case.bytes,
                case.loss,
                case.answered,
                case.failures(),
                case.stalls,
                case.excused,
                case.longest_wait_s,
                case.took_s,
                case.answered as f64 / case.took_s.max(f64::MIN_POSITIVE),
            );
        }
        text
    }

    /// Writes the JSON file if one is wanted.
    fn write(&self, json: Option<&Path>) -> Result<()> {
        let Some(path) = json else { return Ok(()) };
        std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::{GuestKind, HaulCase, HaulReport, Stall, answers, guests};

    #[test]
    fn answers_and_guests_have_a_kind_and_a_count() {
        assert_eq!(answers("64KiB=1000000"), Ok((65_536, 1_000_000)));
        assert_eq!(guests("linux=32"), Ok((GuestKind::Linux, 32)));
        for text in ["", "64KiB", "64KiB=", "64KiB=0", "x=1"] {
            assert!(answers(text).is_err(), "{text}");
        }
        for text in ["", "linux", "linux=0", "linux=1000000", "windows=1"] {
            assert!(guests(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_stall_a_failure_or_a_missing_answer_breaks_a_haul() {
        let good = || HaulCase { asked: 5, answered: 5, excused: 3, ..HaulCase::default() };
        let failed = [("read".to_owned(), 1)].into();
        let bad = [
            HaulCase { stalls: 1, ..good() },
            HaulCase { failed, ..good() },
            HaulCase { answered: 4, ..good() },
        ];
        for (case, broken) in bad.into_iter().map(|case| (case, 1)).chain([(good(), 0)]) {
            let report = HaulReport { seed: 1, limit_s: 3.0, cases: vec![case] };
            assert_eq!(report.broken().len(), broken, "{report:?}");
        }
    }

    #[test]
    fn a_stall_is_shown_with_its_connection_and_segments() {
        let stall = Stall {
            connection: "10.0.16.0:40000".into(),
            segments: vec!["seq 7".into()],
            ..Stall::default()
        };
        let case = HaulCase { described: vec![stall], ..HaulCase::default() };
        let text = HaulReport { seed: 1, limit_s: 3.0, cases: vec![case] }.text();
        assert!(text.contains("10.0.16.0:40000") && text.contains("seq 7"), "{text}");
    }
}
