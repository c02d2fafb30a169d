//! The place of a storm: a namespace, and the generator process that holds its taps.

use anyhow::{Context as _, Result, bail, ensure};
use std::fmt;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use support::agent::{METRICS, Metrics};
use support::bpffs::Bpffs;
use support::eventually;
use support::netns::Namespace;
use support::process;

use super::cpu;
use super::cpu::Disturbed;
use super::guest::{Command as Order, Orders, Outcome, Prices, Reply, TAP_GROUP, Wires};
use super::peer::{ComputeNode, ComputeSite, Disturbance, Running, Scene, Subject, pinned};
use crate::control_group::ControlGroup;

/// A node with taps, and the generator of its guests.
pub(super) struct Lab {
    generator: Child,
    orders: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
    /// Dropped after the generator has ended, as `node` with its taps.
    starvation: Option<Starvation>,
    node: Namespace,
}

impl Lab {
    /// Makes the namespace and the taps. `weight` is that of servers that are starved.
    pub(super) fn new(
        generator: &Path,
        taps: usize,
        wires: Wires,
        cpu: Option<usize>,
        weight: Option<u32>,
    ) -> Result<Self> {
        let node = Namespace::new("storm")?;
        // Without IPv6 the node itself sends no frames on the taps.
        node.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let mut command = Command::new(generator);
        command.args(["storm-guests", node.name(), &taps.to_string()]);
        match wires {
            Wires::Plain => {}
            Wires::VirtioHeader => drop(command.arg("--vnet-hdr")),
            Wires::VhostNet => drop(command.arg("--vhost")),
        }
        if let Some(cpu) = cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut generator =
            command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let orders = generator.stdin.take();
        let replies = BufReader::new(generator.stdout.take().context("standard output is not piped")?);
        let mut lab = Self { generator, orders, replies, starvation: None, node };
        lab.expect_done()?;
        lab.starvation = weight.map(|weight| Starvation::new(weight, lab.pid())).transpose()?;
        Ok(lab)
    }

    /// Starves a server's processes from now on, and keeps the node busy until the value is dropped.
    pub(super) fn starve(&self, server: &[u32]) -> Result<BusyNode> {
        self.starvation.as_ref().context("no weight was given for starved servers")?.begin(server)
    }

    /// Returns the node's namespace.
    pub(super) fn node(&self) -> &Namespace {
        &self.node
    }

    /// Returns the generator's process id.
    pub(super) fn pid(&self) -> u32 {
        self.generator.id()
    }

    /// Loads a plan into the generator.
    pub(super) fn load(&mut self, plan: &Path) -> Result<()> {
        self.order(&Order::Load(plan.to_owned()))?;
        self.expect_done()
    }

    /// Measures the prices of the generator's system calls. No server may run.
    pub(super) fn prices(&mut self) -> Result<Prices> {
        self.order(&Order::Price)?;
        match self.reply()? {
            Reply::Priced(prices) => Ok(prices),
            other => bail!("expected prices, found the reply {other:?}"),
        }
    }

    /// Runs a storm. `report` gets the numbers of finished boots and of failures; its error ends the generator.
    pub(super) fn storm(
        &mut self,
        orders: &Orders,
        report: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Outcome> {
        self.order(&Order::Storm(orders.clone()))?;
        loop {
            match self.reply()? {
                Reply::Progress { boots, failures } => {
                    if let Err(error) = report(boots, failures) {
                        self.generator.kill()?;
                        return Err(error);
                    }
                }
                Reply::Stormed(outcome) => return Ok(*outcome),
                other => bail!("expected an outcome, found the reply {other:?}"),
            }
        }
    }

    fn order(&mut self, order: &Order) -> Result<()> {
        let orders = self.orders.as_mut().context("the generator's input is closed")?;
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        orders.write_all(&line).context("the generator has ended; its messages are above")
    }

    fn reply(&mut self) -> Result<Reply> {
        let mut line = String::new();
        ensure!(
            self.replies.read_line(&mut line)? > 0,
            "the generator has ended ({}); its messages are above",
            self.generator.wait()?
        );
        serde_json::from_str(&line)
            .with_context(|| format!("cannot parse the generator's reply {}", line.trim()))
    }

    fn expect_done(&mut self) -> Result<()> {
        match self.reply()? {
            Reply::Done => Ok(()),
            other => bail!("expected the end of an order, found the reply {other:?}"),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // All taps are deleted in one step, before their descriptors close one by one.
        if let Err(error) = self.node.ip(&format!("link del group {TAP_GROUP}")) {
            eprintln!("cannot delete the taps of {} in one step: {error:#}", self.node.name());
        }
        drop(self.orders.take());
        if let Err(error) = self.generator.wait() {
            eprintln!("cannot end generator {}: {error}", self.generator.id());
        }
    }
}

// A node whose processors are wanted by programs that come before the servers.

/// The weight of guests, so that a busy node does not slow them down. It is the greatest (Linux:
/// Documentation/admin-guide/cgroup-v2.rst).
const GUESTS: u32 = 10_000;
/// The weight of the programs that keep the node busy. It is the usual one.
const PROGRAMS: u32 = 100;

/// The control groups of guests, servers, and programs that keep the node busy.
struct Starvation {
    _guests: ControlGroup,
    servers: ControlGroup,
    programs: ControlGroup,
}

impl Starvation {
    fn new(weight: u32, generator: u32) -> Result<Self> {
        let [guests, servers, programs] = [("guests", GUESTS), ("servers", weight), ("programs", PROGRAMS)]
            .map(|(name, weight)| ControlGroup::with_weight(name, weight));
        let guests = guests?;
        guests.add(generator)?;
        Ok(Self { _guests: guests, servers: servers?, programs: programs? })
    }

    fn begin(&self, servers: &[u32]) -> Result<BusyNode> {
        servers.iter().try_for_each(|pid| self.servers.add(*pid))?;
        let mut node = BusyNode(Vec::new());
        for _ in 0..std::thread::available_parallelism()?.get() {
            // It ends with this process, whatever ends this process.
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "sh", "-c", "while :; do :; done"]);
            let program =
                command.stdin(Stdio::null()).spawn().context("cannot start setpriv (util-linux)")?;
            self.programs.add(program.id())?;
            node.0.push(program);
        }
        Ok(node)
    }
}

/// Programs that compute on each processor until the value is dropped.
pub(super) struct BusyNode(Vec<Child>);

impl Drop for BusyNode {
    fn drop(&mut self) {
        for program in &mut self.0 {
            if let Err(error) = program.kill().and_then(|()| program.wait()) {
                eprintln!("cannot end the program {}: {error}", program.id());
            }
        }
    }
}

// Events that disturb the agent in the middle of a storm, and their durations.

/// How often a guest repeats a failed request, a second apart, if the storm has events or the node signs the answers.
/// cloud-init's clients repeat at least as often.
pub(super) const RETRIES: u8 = 5;

/// A disturbance, and its time since the start of a storm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StormEvent {
    what: Disturbance,
    after: Duration,
}

impl fmt::Display for StormEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.what {
            Disturbance::Kill9 => "kill9",
            Disturbance::TakeOver => "takeover",
        };
        write!(f, "{name}@{}", self.after.as_secs_f64())
    }
}

/// Parses `kill9@SECONDS` or `takeover@SECONDS`.
pub(super) fn read(text: &str) -> Result<StormEvent, String> {
    let parts = text.split_once('@').and_then(|(name, seconds)| {
        let what = match name {
            "kill9" => Disturbance::Kill9,
            "takeover" => Disturbance::TakeOver,
            _ => return None,
        };
        let after = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        Some(StormEvent { what, after })
    });
    parts.ok_or_else(|| "expected kill9@SECONDS or takeover@SECONDS".into())
}

/// Formats all events as on the command line.
pub(super) fn shown(events: &[StormEvent]) -> String {
    events.iter().map(StormEvent::to_string).collect::<Vec<_>>().join(",")
}

/// Causes each event when it is due, until the storm is over. Dropping the other end of `over` ends the storm.
pub(super) fn all(
    running: &mut dyn Running,
    events: &[StormEvent],
    over: &Receiver<()>,
) -> Result<Vec<Disturbed>> {
    let began = Instant::now();
    let mut done = Vec::new();
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.after);
    for event in events {
        match over.recv_timeout(event.after.saturating_sub(began.elapsed())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
        let started = Instant::now();
        running.disturb(event.what).with_context(|| event.to_string())?;
        let took_us = started.elapsed().as_secs_f64() * 1e6;
        done.push(Disturbed { event: event.to_string(), took_us });
    }
    Ok(done)
}

// The storm's subjects xdp-imds: the agent as an operator runs it, with a record for each guest, or on an OpenStack
// compute node.

/// The name of the subject in tables and files.
pub(super) const NAME: &str = "xdp-imds";
/// The name of the one on a compute node, which asks Nova.
pub(super) const NOVA: &str = "xdp-imds-nova";
/// The names of both.
pub(super) const NAMES: [&str; 2] = [NAME, NOVA];
/// The longest time the agent may take to read all records and attach all taps, or to stop.
const PATIENCE: Duration = Duration::from_secs(120);
/// The number of looks without a change after which the agent has published all answers, and their interval.
const SETTLED: u32 = 10;
const LOOK: Duration = Duration::from_millis(100);
/// Interval at which the agent's readiness is checked.
const PAUSE: Duration = Duration::from_millis(5);

/// The agent and its files.
pub(super) struct Agent {
    pub(super) binary: PathBuf,
    pub(super) records: PathBuf,
    /// Further lines of its YAML configuration, for comparisons of settings.
    pub(super) configuration: String,
    /// The number of networks of the compute node, if the agent runs on one and has no records.
    networks: Option<usize>,
    site: Option<ComputeSite>,
    directory: Option<tempfile::TempDir>,
    /// The directory for pinned links and maps; `None` if nothing is pinned.
    pins: Option<Bpffs>,
}

impl Agent {
    /// Describes an agent of `binary` that serves `records`. It does not run yet.
    pub(super) fn new(binary: PathBuf, records: PathBuf, configuration: String, pins: Option<Bpffs>) -> Self {
        Self { binary, records, configuration, networks: None, site: None, directory: None, pins }
    }

    /// The same agent on an OpenStack compute node with this number of networks.
    pub(super) fn on_compute_node(self, networks: usize) -> Self {
        Self { networks: Some(networks), ..self }
    }

    fn file(&self, name: &str) -> Result<PathBuf> {
        Ok(self.directory.as_ref().context("`prepare` was not called")?.path().join(name))
    }
}

impl Subject for Agent {
    fn name(&self) -> &'static str {
        if self.networks.is_some() { NOVA } else { NAME }
    }

    fn version(&self) -> Result<String> {
        Ok(support::netns::run(Command::new(&self.binary).arg("--version"))?.trim().to_owned())
    }

    fn prepare(&mut self, scene: &Scene<'_>) -> Result<()> {
        self.directory = Some(tempfile::tempdir()?);
        if let Some(networks) = self.networks {
            let site = ComputeSite::lay_out(scene.tenants, networks)?;
            let text = format!("{}\n{}", self.configuration, serde_yaml::to_string(&site.section())?);
            self.site = Some(site);
            return Ok(fs::write(self.file("config.yaml")?, text)?);
        }
        let mut text = format!("{}\nports:\n", self.configuration.trim_end());
        for tenant in scene.tenants {
            writeln!(text, "- {{ifname: {}, mac: \"{}\"}}", tenant.tap, tenant.mac)?;
        }
        Ok(fs::write(self.file("config.yaml")?, text)?)
    }

    fn start<'a>(&'a self, scene: &'a Scene<'a>) -> Result<Box<dyn Running + 'a>> {
        let compute = self.site.as_ref().map(|site| site.start(scene)).transpose()?;
        // Neither the guests of a former round nor its snapshot must help this one.
        let state = self.file("state")?;
        if state.exists() {
            fs::remove_dir_all(state)?;
        }
        let child = self.spawn(scene, false)?;
        let mut serving = Serving { child, agent: self, scene, log: self.file("log")?, compute };
        serving.wait(scene.tenants.len())?;
        Ok(Box::new(serving))
    }
}

impl Agent {
    /// Starts a process, which takes over from the running agent if `takeover` is set.
    fn spawn(&self, scene: &Scene<'_>, takeover: bool) -> Result<Child> {
        let mut command = pinned(&self.binary, scene.pinned);
        command.args(["serve", "--metrics", &METRICS.to_string()]);
        command.arg("--config").arg(self.file("config.yaml")?);
        if self.networks.is_none() {
            command.arg("--records").arg(&self.records);
        }
        command.arg("--state").arg(self.file("state")?).env("NO_COLOR", "1");
        command.arg("--run").arg(self.file("run")?);
        match &self.pins {
            Some(bpffs) => command.arg("--pins").arg(bpffs.pins()),
            None => command.arg("--no-pins"),
        };
        if takeover {
            command.arg("--takeover");
        }
        let file = File::options().create(true).append(true).open(self.file("log")?)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        scene.node.spawn(&mut command)
    }
}

/// A running agent.
struct Serving<'a> {
    child: Child,
    agent: &'a Agent,
    scene: &'a Scene<'a>,
    log: PathBuf,
    /// The rest of the compute node, if it is on one. It ends after the agent.
    compute: Option<ComputeNode>,
}

impl Serving<'_> {
    /// Waits until `ports` ports are attached.
    fn wait(&mut self, ports: usize) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            ensure!(self.child.try_wait()?.is_none(), "the agent ended:\n{}", tail(&self.log));
            let attached =
                Metrics::of(self.scene.node).ok().and_then(|metrics| metrics.value("xdp_imds_ports"));
            if attached.is_some_and(|attached| attached as usize >= ports) {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "the agent did not attach {ports} ports within {PATIENCE:?}:\n{}",
                tail(&self.log)
            );
            std::thread::sleep(PAUSE);
        }
    }

    fn end(&mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        process::terminate(self.child.id())?;
        let ended = eventually(PATIENCE, || {
            ensure!(self.child.try_wait()?.is_some(), "the agent has not ended");
            Ok(())
        });
        if ended.is_err() {
            self.child.kill()?;
            self.child.wait()?;
            bail!("the agent did not stop and was killed:\n{}", tail(&self.log));
        }
        Ok(())
    }
}

impl Running for Serving<'_> {
    fn pids(&self) -> Vec<u32> {
        std::iter::once(self.child.id()).chain(self.signer()).collect()
    }

    /// The signer is the agent's only child.
    fn signer(&self) -> Option<u32> {
        cpu::child_of(self.child.id())
    }

    fn asked_of_nova(&self) -> Result<Option<u64>> {
        self.compute.as_ref().map(ComputeNode::asked_of_nova).transpose()
    }

    fn run_directory(&self) -> Option<PathBuf> {
        self.agent.file("run").ok()
    }

    fn settle(&self) -> Result<()> {
        let (mut last, mut looks, end) = (None, 0, Instant::now() + PATIENCE);
        while looks < SETTLED {
            ensure!(Instant::now() < end, "the agent still publishes answers after {PATIENCE:?}");
            std::thread::sleep(LOOK);
            let published = Metrics::of(self.scene.node)?.value("xdp_imds_published_documents");
            looks = if published == last { looks + 1 } else { 0 };
            last = published;
        }
        Ok(())
    }

    fn attached_in(&self) -> Option<Duration> {
        let seconds = Metrics::of(self.scene.node).ok()?.value("xdp_imds_attach_seconds_median");
        seconds.map(Duration::from_secs_f64)
    }

    fn disturb(&mut self, what: Disturbance) -> Result<()> {
        match what {
            Disturbance::Kill9 => {
                self.child.kill()?;
                self.child.wait()?;
                self.child = self.agent.spawn(self.scene, false)?;
                self.wait(self.scene.tenants.len())
            }
            Disturbance::TakeOver => {
                let next = self.agent.spawn(self.scene, true)?;
                let mut previous = std::mem::replace(&mut self.child, next);
                let ended =
                    eventually(PATIENCE, || previous.try_wait()?.context("the previous agent has not ended"));
                if ended.is_err() {
                    previous.kill()?;
                    previous.wait()?;
                }
                let status = ended.with_context(|| tail(&self.log))?;
                ensure!(status.success(), "the previous agent ended with {status}:\n{}", tail(&self.log));
                self.wait(self.scene.tenants.len())
            }
        }
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        self.end()?;
        // The next round, or another subject, must find the taps without programs.
        match &self.agent.pins {
            Some(bpffs) => metadata_steer::release(&bpffs.pins(), false).map(drop).map_err(Into::into),
            None => Ok(()),
        }
    }
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("cannot end agent {}: {error:#}", self.child.id());
        }
    }
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let last: Vec<_> = text.lines().rev().take(10).collect();
    last.into_iter().rev().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use anyhow::Result;
    use std::sync::mpsc::{Sender, channel};

    use super::{all, read, shown};
    use crate::storm::peer::{Disturbance, Running};

    /// Records its disturbances. A takeover ends the storm.
    struct Noted(Vec<Disturbance>, Option<Sender<()>>);

    impl Running for Noted {
        fn pids(&self) -> Vec<u32> {
            Vec::new()
        }

        fn disturb(&mut self, what: Disturbance) -> Result<()> {
            self.0.push(what);
            self.1.take_if(|_| what == Disturbance::TakeOver);
            Ok(())
        }

        fn stop(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_shown_as_it_was_given() {
        for text in ["kill9@0.5", "takeover@2"] {
            assert_eq!(read(text).map(|event| event.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "kill9", "kill9@", "kill9@-1", "kill9@nan", "reboot@1"] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn events_are_sorted_by_time_and_none_follows_the_end() {
        let events = ["takeover@0.02", "kill9@0", "kill9@3600"].map(|text| read(text).expect("an event"));
        assert_eq!(shown(&events), "takeover@0.02,kill9@0,kill9@3600");
        let (over, end) = channel::<()>();
        let mut running = Noted(Vec::new(), Some(over));
        let done = all(&mut running, &events, &end).expect("all done");
        assert_eq!(running.0, [Disturbance::Kill9, Disturbance::TakeOver]);
        assert_eq!(
            done.iter().map(|done| done.event.as_str()).collect::<Vec<_>>(),
            ["kill9@0", "takeover@0.02"]
        );
    }
}
