//! Runs the rounds: in each round, every subject in turn on the same taps.

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::bpffs::Bpffs;

use super::cpu::{Clocks, Disturbed, Idle, MeasuredCase, MeasuredSubject, Round, Settings, Threads};
use super::crawl::Dialect;
use super::guest::{Arrival, Flood, Kill, Orders, Outcome, Prices};
use super::peer::{Disturbance, Running, Scene, Subject};
use super::watch::Watch;
use super::{Args, Case, cpu, lab, peer};
use lab::{Agent, Lab, RETRIES};

/// Pause between a server's start and the storm, so that one-time work after the start is not measured.
const SETTLE: Duration = Duration::from_millis(300);

/// Guests from which the agent learns an image.
const PIONEERS: usize = 2;

/// Pause before a server's idle time is measured. Its start-up threads end in this time, and it checks its ports for
/// the first time (after 2 s).
const SETTLE_IDLE: Duration = Duration::from_secs(3);

/// The shortest interval of progress lines of a round.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// Distance of the seeds of two cases, more than there are rounds.
const SEEDS: u64 = 10_000;

/// All cases of a run, measured one after the other.
pub(super) struct Run<'a> {
    pub(super) args: &'a Args,
    pub(super) agent: PathBuf,
    pub(super) lab: &'a mut Lab,
    pub(super) prices: Prices,
    pub(super) began: Instant,
    /// Number of cases begun.
    pub(super) cases: u64,
    /// Further configuration of the agent.
    pub(super) configuration: Option<String>,
    /// The version of each prepared subject.
    pub(super) versions: BTreeMap<String, String>,
    /// The user has ended the run in the view.
    pub(super) interrupted: Arc<AtomicBool>,
}

/// One round of one subject.
struct RoundPlan<'a> {
    case: &'a Case,
    /// What the agent serves after it was killed, if it is.
    next: Option<&'a Case>,
    vms: usize,
    number: u32,
    is_starved: bool,
    pinned: Option<&'a [usize]>,
}

impl Run<'_> {
    /// Measures one case: every subject, in turn, for all rounds.
    pub(super) fn case(&mut self, dialect: Dialect, vms: usize, user_data: usize) -> Result<MeasuredCase> {
        self.cases += 1;
        let guests = vms + usize::from(self.args.flood.is_some());
        self.progress(&format!(
            "{dialect}, {vms} VMs, {user_data} B of user-data: write records and documents"
        ));
        let case = Case::lay_out(dialect, guests, user_data, 0)?;
        let next = self.args.kill_after.map(|_| Case::lay_out(dialect, guests, user_data, 1)).transpose()?;
        self.lab.load(&case.plan())?;
        let subjects = self.subjects(&case)?;
        let cores = self.server_cores()?;
        let pinned = (!self.args.server_cpus.is_empty()).then_some(self.args.server_cpus.as_slice());
        let mut found: Vec<MeasuredSubject> = Vec::new();
        let mut prepared = Vec::new();
        let nodes: &[bool] = if self.args.server_cpu_weight.is_some() { &[false, true] } else { &[false] };
        for mut subject in subjects {
            let scene = Scene { node: self.lab.node(), tenants: &case.tenants, cores, pinned };
            match subject.prepare(&scene) {
                Ok(()) => {}
                Err(error) if lab::NAMES.contains(&subject.name()) => {
                    return Err(error.context("cannot prepare the agent"));
                }
                // A peer that cannot serve this case is left out of it, with a message.
                Err(error) => {
                    self.progress(&format!("{dialect} without {}: {error:#}", subject.name()));
                    continue;
                }
            }
            self.versions.insert(subject.name().into(), subject.version()?);
            let subject: Rc<dyn Subject> = subject.into();
            for &is_starved in nodes {
                let name = format!("{}{}", subject.name(), if is_starved { " starved" } else { "" });
                found.push(MeasuredSubject { name, rounds: Vec::new() });
                prepared.push((Rc::clone(&subject), is_starved));
            }
        }
        for number in 0..self.args.rounds {
            // Each round has another order, so that a subject does not always follow the same one.
            for turn in 0..prepared.len() {
                let place = (turn + number as usize) % prepared.len();
                let (subject, is_starved) = &prepared[place];
                let label =
                    format!("{dialect} round {}/{} {}", number + 1, self.args.rounds, found[place].name);
                let is_starved = *is_starved;
                let plan = RoundPlan { case: &case, next: next.as_ref(), vms, number, is_starved, pinned };
                match self.round(&label, subject.as_ref(), &plan) {
                    Ok(round) => found[place].rounds.push(round),
                    Err(error) if lab::NAMES.contains(&subject.name()) => return Err(error.context(label)),
                    // A peer that fails loses its round. The run continues.
                    Err(error) => self.progress(&format!("{label} failed: {error:#}")),
                }
            }
        }
        Ok(MeasuredCase { settings: self.settings(&case, vms), subjects: found })
    }

    /// Returns the number of cores that a server may use.
    fn server_cores(&self) -> Result<usize> {
        let all = std::thread::available_parallelism()?.get();
        Ok(if self.args.server_cpus.is_empty() { all } else { self.args.server_cpus.len() })
    }

    fn subjects(&self, case: &Case) -> Result<Vec<Box<dyn Subject>>> {
        let survives = !self.args.event.is_empty() || self.args.kill_after.is_some();
        let named = |name: &String| -> Result<Box<dyn Subject>> {
            if lab::NAMES.contains(&name.as_str()) {
                let configuration = self.configuration.clone().unwrap_or_default();
                let pins = survives.then(Bpffs::mount).transpose()?;
                let agent = Agent::new(self.agent.clone(), case.records(), configuration, pins);
                let is_on_compute_node = name == lab::NOVA;
                return Ok(Box::new(match is_on_compute_node {
                    true => agent.on_compute_node(self.args.networks),
                    false => agent,
                }));
            }
            peer::named(name, self.args.networks, self.args.pve_imds.as_deref())
                .with_context(|| format!("there is no subject `{name}`"))
        };
        self.args.subjects.iter().map(named).collect()
    }

    fn round(&mut self, label: &str, subject: &dyn Subject, plan: &RoundPlan<'_>) -> Result<Round> {
        go_on(&self.interrupted)?;
        let cores = self.server_cores()?;
        let kernel = cpu::settled_kernel();
        // `self.lab` is borrowed for the storm while the subject runs in the namespace, so the namespace is opened
        // again.
        let node = support::netns::Namespace::open(self.lab.node().name())?;
        let scene = Scene { node: &node, tenants: &plan.case.tenants, cores, pinned: plan.pinned };
        let started = Instant::now();
        let mut running = subject.start(&scene)?;
        let (ready, attached) = (started.elapsed(), running.attached_in());
        std::thread::sleep(SETTLE);
        let pids = running.pids();
        let silent = cpu::since(kernel, &pids);
        let idle = self.idle(&pids);
        let orders = Orders {
            kill: self.args.kill_after.map(|after| Kill { pid: pids[0], after }),
            ..self.orders(subject, plan)
        };
        let is_warm = self.args.warm || self.args.server_cpu_weight.is_some() || orders.kill.is_some();
        let asked_ahead = running.asked_of_nova()?;
        if is_warm {
            self.boot_once(&orders)?;
            running.settle()?;
        } else if self.args.known_image {
            self.boot_once(&Orders { guests: PIONEERS, ..orders.clone() })?;
            running.settle()?;
        }
        let asked = running.asked_of_nova()?;
        let signer: Vec<u32> = running.signer().into_iter().collect();
        let unsigned = Threads::read(&signer);
        let busy = plan.is_starved.then(|| self.lab.starve(&pids)).transpose()?;
        let before = Clocks::read(self.lab.pid(), &pids)?;
        let watch = running.run_directory().filter(|_| self.args.is_watched());
        let (shows, records) = (self.args.watch, self.args.record.is_some());
        let watch = watch.map(|run| Watch::start(run, shows, records, &self.interrupted)).transpose()?;
        let (outcome, events) = {
            let is_shown = || watch.as_ref().is_some_and(Watch::is_shown);
            let (began, mut reported) = (self.began, Instant::now());
            let interrupted = Arc::clone(&self.interrupted);
            let mut report = |boots: u64, failures: u64| {
                go_on(&interrupted)?;
                if !is_shown() && reported.elapsed() >= PROGRESS_INTERVAL {
                    reported = Instant::now();
                    super::progress(began, &format!("{label}: {boots} boots, {failures} failures"));
                }
                Ok(())
            };
            let (over, end) = std::sync::mpsc::channel::<()>();
            let (events, running) = (&self.args.event, running.as_mut());
            std::thread::scope(|scope| {
                let disturbed = scope.spawn(move || lab::all(running, events, &end));
                let outcome = self.lab.storm(&orders, &mut report);
                drop(over);
                let events = disturbed.join().expect("events do not panic");
                anyhow::Ok((outcome?, events?))
            })?
        };
        let after = Clocks::read(self.lab.pid(), &running.pids())?;
        drop(busy);
        let asked = running.asked_of_nova()?.zip(asked).map(|(after, before)| after - before - 1);
        if let Some(watch) = watch {
            watch.finish(self.args.record.as_deref())?;
        }
        let signing_us = Threads::read(&signer).since(&unsigned) as f64 / 1e3;
        let flood_frames = outcome.flood.map_or(0, |flood| flood.frames);
        let cpu = before.until(&after, &outcome.calls, &self.prices, flood_frames);
        let flooded = outcome.flood.filter(|flood| flood.wall_us > 0.0);
        let mut round = round_of(outcome);
        round.kernel.take_if(|kernel| !lab::NAMES.contains(&subject.name()) || kernel.count() == 0);
        (round.asked_of_nova, round.asked_ahead) = (asked, asked_ahead);
        round.events = events;
        if let Some(next) = plan.next {
            self.serve_anew(running.as_mut(), plan.case, next, &orders, &mut round)?;
        }
        running.stop()?;
        round.flood_per_second = flooded.map(|flood| flood.frames as f64 / flood.wall_us * 1e6);
        (round.cpu, round.memory, round.idle) = (cpu, silent, idle);
        round.signer_us = (!signer.is_empty()).then_some(signing_us);
        round.ready_us = ready.as_secs_f64() * 1e6;
        round.attach_us = attached.map(|took| took.as_secs_f64() * 1e6);
        self.progress(&format!("{label}: {}", super::figure::line(&round)));
        Ok(round)
    }

    /// Lets each guest boot once, from ports that the round does not use. No failed request is repeated.
    fn boot_once(&mut self, orders: &Orders) -> Result<Round> {
        let Orders { guests, keep_alive, any_bytes, seed, .. } = *orders;
        let orders = Orders { guests, keep_alive, any_bytes, seed: !seed, ..Orders::default() };
        let interrupted = Arc::clone(&self.interrupted);
        Ok(round_of(self.lab.storm(&orders, &mut |_, _| go_on(&interrupted))?))
    }

    /// Starts an agent with other records after one that was killed, and lets each guest boot again. A former answer
    /// is a failure.
    fn serve_anew(
        &mut self,
        running: &mut dyn Running,
        case: &Case,
        next: &Case,
        orders: &Orders,
        round: &mut Round,
    ) -> Result<()> {
        let exchange = || renameat_with(CWD, case.records(), CWD, next.records(), RenameFlags::EXCHANGE);
        exchange()?;
        self.lab.load(&next.plan())?;
        let started = Instant::now();
        running.disturb(Disturbance::Kill9)?;
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        round.events.push(Disturbed { event: "the next agent".into(), took_us });
        let again = self.boot_once(orders)?;
        round.failures += again.failures;
        for (reason, count) in again.reasons {
            *round.reasons.entry(reason).or_default() += count;
        }
        exchange()?;
        self.lab.load(&case.plan())
    }

    fn idle(&self, pids: &[u32]) -> Option<Idle> {
        if self.args.idle == 0 {
            return None;
        }
        std::thread::sleep(SETTLE_IDLE);
        let (began, before) = (Instant::now(), Threads::read(pids));
        std::thread::sleep(Duration::from_secs(self.args.idle));
        let used = Threads::read(pids).since(&before);
        let wall_us = began.elapsed().as_secs_f64() * 1e6;
        Some(Idle { wall_us, server_us: used as f64 / 1e3 })
    }

    fn orders(&self, subject: &dyn Subject, plan: &RoundPlan<'_>) -> Orders {
        let args = self.args;
        let arrival = if args.lone { Arrival::Lone } else { args.arrival };
        let is_disturbed = !args.event.is_empty() || args.kill_after.is_some();
        Orders {
            guests: plan.vms,
            arrival,
            seconds: args.seconds,
            keep_alive: args.keep_alive,
            retries: if is_disturbed || self.has_slow_answers(plan.case) { RETRIES } else { 0 },
            loss: args.loss,
            slow: args.slow_readers,
            flood: args.flood,
            any_bytes: subject.makes_its_own_documents(),
            // All subjects of a round have the same seed. Each round has another, so that guests use other ports.
            seed: args.seed.wrapping_add(self.cases * SEEDS + u64::from(plan.number)),
            ..Orders::default()
        }
    }

    /// Whether guests of this case repeat failed requests, as cloud-init does: a node with too many unsigned tokens
    /// answers 503 with `Retry-After: 1`, and one that asks Nova may be late.
    fn has_slow_answers(&self, case: &Case) -> bool {
        let asks = |name: &String| name == lab::NOVA || peer::ASKING.contains(&name.as_str());
        case.dialect == Dialect::Identity || self.args.subjects.iter().any(asks)
    }

    fn settings(&self, case: &Case, vms: usize) -> Settings {
        let args = self.args;
        let mut options = BTreeMap::new();
        let mut set = |name: &str, value: String| options.insert(name.to_owned(), value);
        set("arrival", if args.lone { "lone".into() } else { super::shown(args.arrival) });
        if args.keep_alive {
            set("keep-alive", "yes".into());
        }
        if args.loss > 0.0 {
            set("loss", args.loss.to_string());
        }
        if args.slow_readers > 0 {
            set("slow-readers", args.slow_readers.to_string());
        }
        match args.flood {
            None => {}
            Some(Flood::Syn) => drop(set("flood", "syn".into())),
            Some(Flood::Ordinary) => drop(set("flood", "ordinary".into())),
        }
        if !args.event.is_empty() {
            set("event", lab::shown(&args.event));
        }
        if let Some(after) = args.kill_after {
            set("kill-after", after.to_string());
        }
        if let Some(weight) = args.server_cpu_weight {
            set("server-cpu-weight", weight.to_string());
        }
        if args.known_image {
            set("known-image", "yes".into());
        }
        if args.vhost {
            set("vhost", "yes".into());
        } else if args.vnet_hdr {
            set("vnet-hdr", "yes".into());
        }
        if args.warm {
            set("warm", "yes".into());
        }
        if args.seconds != 1.0 {
            set("seconds", args.seconds.to_string());
        }
        if !args.server_cpus.is_empty() || args.guest_cpu.is_some() {
            set("cores", format!("guests {:?}, servers {:?}", args.guest_cpu, args.server_cpus));
        }
        if let Some(configuration) = &self.configuration {
            set("agent", configuration.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        Settings {
            dialect: case.dialect.to_string(),
            vms: vms as u32,
            user_data_bytes: case.user_data as u64,
            requests_per_boot: case.requests as u32,
            options,
        }
    }

    fn progress(&self, what: &str) {
        super::progress(self.began, what);
    }
}

/// Fails once the user has ended the run.
fn go_on(interrupted: &AtomicBool) -> Result<()> {
    ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
    Ok(())
}

fn round_of(outcome: Outcome) -> Round {
    let reason = |failure| serde_json::to_value(failure).ok()?.as_str().map(str::to_owned);
    Round {
        boots: outcome.boots,
        requests: outcome.requests,
        failures: outcome.failures,
        reasons: outcome.reasons.iter().filter_map(|(why, n)| Some((reason(why)?, *n))).collect(),
        retransmissions: outcome.retransmissions,
        retries: outcome.retries,
        wall_us: outcome.wall_us,
        request: outcome.request,
        kernel: Some(outcome.kernel),
        without_agent: outcome.without_agent,
        boot: outcome.boot,
        finished: outcome.finished,
        ..Round::default()
    }
}

/// Builds the agent and this program with optimisation; returns their paths. `given` is the agent of `--agent`.
pub(crate) fn build(given: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    let release = shell::target().join("release");
    if let Some(agent) = given {
        // The generator must be optimised too, or it would limit the measurement.
        let beside = agent.with_file_name("xdp-imds-lab");
        let own = if beside.is_file() { beside } else { std::env::current_exe()? };
        return Ok((agent.to_owned(), own));
    }
    shell::run(&mut shell::cargo([
        "build",
        "--release",
        "--package",
        "metadata-user",
        "--package",
        "xdp-imds-lab",
    ]))?;
    let (agent, own) = (release.join("xdp-imds"), release.join("xdp-imds-lab"));
    ensure!(agent.is_file() && own.is_file(), "the build made no programs in {}", release.display());
    Ok((agent, own))
}
