//! `cargo xtask storm`: boots thousands of guests at once on the agent and on peers, and checks every answer.
//!
//! ```text
//!  this process                      a namespace of its own
//!  run ── for each subject ────────── agent | peer (nginx, haproxy, …)
//!   │                                    │ the same taps
//!   └─ lab ── generator process ───────── guests (guest/: TCP clients that own the taps' descriptors)
//!   cpu, memory (from /proc) ── model ── table, --json, --report
//! ```

mod compare;
pub(crate) mod cpu;
pub(crate) mod crawl;
mod figure;
pub(crate) mod guest;
mod lab;
pub(crate) mod peer;
pub(crate) mod report;
pub(crate) mod run;
mod watch;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use cpu::{Results, SCHEMA};
use crawl::{CrawlRequest, Dialect};
use guest::{Arrival, Body, Expected, Flood, Plan, Planned, Wires, tap_name};
use lab::{Lab, StormEvent};
use metadata_common::addresses;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::dialect::render;
use metadata_content::http::target::normalise;
use metadata_content::http::{Headers, Method, Request, Response};
use metadata_content::record::{Record, RecordLimits, USER_DATA_DEFAULT, USER_DATA_MAX};
use metadata_content::store::{Interner, LiveOutcome, Responses, VmState};
use metadata_feed::directory;
use peer::{OWN_MAC, PeerPage, Tenant};
use run::Run;
use serde_json::json;
use shell::tools;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use support::guest::METADATA;
use support::record::{Identity, MAX_GUESTS, replace};
use tempfile::TempDir;

/// The size of a storm, its guests, its subjects and its reports.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of VMs that boot; each of several numbers is a case of its own
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1000",
          value_parser = clap::value_parser!(u16).range(1..i64::from(MAX_GUESTS)))]
    vms: Vec<u16>,
    /// Clouds that the guests boot with; each is a case of its own
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Dialect::Nocloud, Dialect::Openstack, Dialect::Ec2])]
    dialect: Vec<Dialect>,
    /// The subjects to measure, one after the other: xdp-imds, nginx, haproxy, pve-imds, or on an OpenStack compute
    /// node xdp-imds-nova, neutron, neutron-4. neutron is Neutron's metadata agent for OVN; neutron-4 has 4 workers
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "xdp-imds,nginx,haproxy")]
    subjects: Vec<String>,
    /// Number of rounds of each subject
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Guests boot again until this many seconds have passed; the clocks need about one second
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// When guests begin to boot: at-once, ramp:SECONDS or poisson:PER-SECOND
    #[arg(long, value_name = "HOW", default_value = "at-once", value_parser = arrival)]
    arrival: Arrival,
    /// Bytes of user-data, such as 300, 64KiB, 1MiB; each of several sizes is a case of its own
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "300", value_parser = size)]
    user_data: Vec<usize>,
    /// Use one connection for all requests of a boot, instead of one for each
    #[arg(long)]
    keep_alive: bool,
    /// Share of frames lost in each direction, such as 0.01
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    loss: f64,
    /// Number of guests that read slowly; this needs large answers, as with --user-data 64KiB
    #[arg(long, value_name = "N", default_value_t = 0)]
    slow_readers: usize,
    /// Let one more guest flood: SYNs to the metadata address, or as many frames to others
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "syn")]
    flood: Option<Flood>,
    /// Disturb xdp-imds this many seconds after the start of a storm: kill9@SECONDS (it is started again) or
    /// takeover@SECONDS. The agent then pins its links and maps, and guests repeat failed requests, as clients do
    #[arg(long, value_name = "WHAT@SECONDS", value_delimiter = ',', value_parser = lab::read)]
    event: Vec<StormEvent>,
    /// Kill xdp-imds this many seconds after the start of a storm, and start it again only after the storm, with other
    /// user-data. This counts the requests that the kernel answers meanwhile, those that wait, and those that it misses
    /// although it had answered them before. Needs `answer_requests_in_kernel` in --agent-config, and an
    /// `answer_without_agent_seconds` that is longer than the rest of the storm
    #[arg(long, value_name = "SECONDS", conflicts_with = "event")]
    kill_after: Option<f64>,
    /// Measure each subject twice: on an idle node, and `starved`. Its processes are then in a control group with this
    /// `cpu.weight`, and programs of a group with the weight 100 want all processors. The load generator comes before
    /// both. Each guest has booted once before, so that xdp-imds has published what it can
    #[arg(long, value_name = "WEIGHT", conflicts_with_all = ["event", "kill_after"],
          value_parser = clap::value_parser!(u32).range(1..=100))]
    server_cpu_weight: Option<u32>,
    /// Let two guests boot before each round, as on a node that has run the image: the agent then knows what guests send
    #[arg(long)]
    known_image: bool,
    /// Measure a lone request: one guest at a time, with pauses between requests
    #[arg(long)]
    lone: bool,
    /// Make taps with a virtio header: devices compute checksums, and large segments stay whole
    #[arg(long)]
    vnet_hdr: bool,
    /// Let guests send and receive by vhost-net, as in production, instead of one system call for each frame. Includes
    /// --vnet-hdr; each guest takes about a mebibyte for its rings
    #[arg(long)]
    vhost: bool,
    /// Also measure for this many seconds what silent guests cost
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    idle: u64,
    /// Let each guest boot once before the storm, so that a server has in its caches what it keeps
    #[arg(long)]
    warm: bool,
    /// Number of networks for haproxy and on an OpenStack compute node, with a proxy each for haproxy and neutron
    #[arg(long, value_name = "N", default_value_t = 8)]
    networks: usize,
    /// The program of the subject pve-imds, which serves only the dialect openstack-alone
    #[arg(long, value_name = "FILE")]
    pve_imds: Option<PathBuf>,
    /// The core on which the generator runs
    #[arg(long, value_name = "CORE")]
    guest_cpu: Option<usize>,
    /// The cores on which servers run
    #[arg(long, value_name = "CORES", value_delimiter = ',')]
    server_cpus: Vec<usize>,
    /// Run the generator on core 0 and servers on all others
    #[arg(long, conflicts_with_all = ["guest_cpu", "server_cpus"])]
    pin: bool,
    /// The seed of all random choices
    #[arg(long, value_name = "NUMBER", env = "XDP_IMDS_SEED", default_value_t = 1)]
    seed: u64,
    /// Write all results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with charts to this file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write one image with charts to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Show the storm on xdp-imds in `xdp-imds top` while it runs. This costs the agent a little for each request
    #[arg(long)]
    watch: bool,
    /// Record what `--watch` shows, as a picture with frames (FILE.svg) or an asciicast (FILE.cast)
    #[arg(long, value_name = "FILE", value_parser = watch::recording)]
    record: Option<PathBuf>,
    /// Measure nothing: show what improved or worsened from A to B, and fail on regressions
    #[arg(long, num_args = 2, value_names = ["A.json", "B.json"])]
    compare: Vec<PathBuf>,
    /// Compare files even if machine or settings differ
    #[arg(long, requires = "compare")]
    force: bool,
    /// The agent to run, instead of building one; the generator is then this program
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// Further configuration of the agent (YAML, without `ports`)
    #[arg(long, value_name = "FILE")]
    agent_config: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(mut args: Args) -> Result<()> {
    if let [before, after] = args.compare.as_slice() {
        return compare::run(before, after, args.force);
    }
    args.check()?;
    let (agent, generator) = run::build(args.agent.as_deref())?;
    if args.agent.is_none() {
        shell::go_on_as_root(&[OsString::from("--agent"), agent.clone().into()])?;
    }
    shell::go_on_as_root(&[])?;
    tools::ensure(tools::LAB)?;
    if args.subjects.iter().any(|name| ![lab::NAME, peer::PVE_IMDS].contains(&name.as_str()))
        && let Some(missing) = tools::missing_peers()
    {
        bail!("{missing}. Without them: --subjects {}", lab::NAME);
    }
    let results = measure(&args, agent, &generator)?;
    print!("{}", figure::text(&results));
    args.write(&results)?;
    let subjects = results.cases.iter().flat_map(|case| &case.subjects);
    let ours = subjects.filter(|subject| subject.name.starts_with(lab::NAME));
    let failures: u64 = ours.flat_map(|subject| &subject.rounds).map(cpu::Round::broken).sum();
    ensure!(failures == 0, "{failures} requests to {} failed", lab::NAME);
    Ok(())
}

fn measure(args: &Args, agent: PathBuf, generator: &Path) -> Result<Results> {
    let began = Instant::now();
    let mut environment = cpu::look(args.seed)?;
    let most = usize::from(args.vms.iter().copied().max().unwrap_or(1)) + usize::from(args.flood.is_some());
    progress(began, &format!("make {most} taps in a namespace of their own"));
    let mut lab = Lab::new(generator, most, args.wires(), args.guest_cpu, args.server_cpu_weight)?;
    let prices = lab.prices()?;
    progress(
        began,
        &format!(
            "system calls without effect: write {:.0} ns, read {:.0} ns, wait {:.0} ns",
            prices.write, prices.read, prices.wait
        ),
    );
    if let Some(cpu) = args.guest_cpu {
        environment.notes.push(format!("generator on core {cpu}, servers on {:?}", args.server_cpus));
    }
    let read = |file: &PathBuf| {
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
    };
    let configuration = args.agent_config.as_ref().map(read).transpose()?;
    if let Some(after) = args.kill_after {
        answers_for(configuration.as_deref().unwrap_or_default(), args.seconds - after)?;
    }
    if args.is_watched() {
        environment.notes.push("watched in `xdp-imds top`".into());
    }
    if args.watch && !metadata_control::screen::terminal::can_draw() {
        progress(began, "no view: --watch needs a terminal that can move its cursor");
    }
    if args.agent.is_some() {
        environment.notes.push(format!("agent {}", agent.display()));
    }
    let (versions, interrupted) = Default::default();
    if args.is_watched() {
        // The agent has to end with this program.
        metadata_control::screen::terminal::note_hang_up(&interrupted)?;
    }
    let lab = &mut lab;
    let mut run = Run { args, agent, lab, prices, began, cases: 0, configuration, versions, interrupted };
    let mut cases = Vec::new();
    for dialect in &args.dialect {
        for user_data in &args.user_data {
            for vms in &args.vms {
                cases.push(run.case(*dialect, usize::from(*vms), *user_data)?);
            }
        }
    }
    environment.versions = run.versions;
    Ok(Results { schema: SCHEMA.into(), environment, cases })
}

impl Args {
    /// How guests are connected.
    fn wires(&self) -> Wires {
        match (self.vhost, self.vnet_hdr) {
            (true, _) => Wires::VhostNet,
            (false, true) => Wires::VirtioHeader,
            (false, false) => Wires::Plain,
        }
    }

    /// Checks the options that clap cannot check, and applies `--pin`.
    fn check(&mut self) -> Result<()> {
        for name in &self.subjects {
            ensure!(
                lab::NAMES.iter().chain(&peer::PEERS).any(|known| known == name),
                "there is no subject `{name}`; expected one of {}, {}",
                lab::NAMES.join(", "),
                peer::PEERS.join(", ")
            );
            ensure!(
                name != peer::PVE_IMDS || self.pve_imds.as_ref().is_some_and(|file| file.is_file()),
                "the subject {name} needs its program: --pve-imds FILE"
            );
        }
        if self.vhost
            && let Some(missing) = support::vhost::missing()
        {
            bail!("--vhost needs vhost-net: {missing}, or measure without --vhost");
        }
        ensure!(
            (0.0..0.5).contains(&self.loss),
            "--loss: expected a share from 0 to 0.5, found {}",
            self.loss
        );
        let least = usize::from(self.vms.iter().copied().min().unwrap_or(0));
        ensure!(
            self.slow_readers <= least,
            "--slow-readers: expected at most {least}, the number of VMs, found {}",
            self.slow_readers
        );
        ensure!(
            self.event.is_empty() && self.kill_after.is_none()
                || self.subjects.iter().all(|name| name == lab::NAME),
            "--event and --kill-after work only with {}; add --subjects {0}",
            lab::NAME
        );
        ensure!(
            (0.0..=300.0).contains(&self.seconds),
            "--seconds: expected 0 to 300, found {}",
            self.seconds
        );
        ensure!(
            self.kill_after.is_none_or(|after| (0.0..self.seconds).contains(&after)),
            "--kill-after: expected less than --seconds, which is {}",
            self.seconds
        );
        let cores = std::thread::available_parallelism()?.get();
        if self.pin {
            ensure!(cores > 1, "--pin needs at least two cores");
            self.guest_cpu = Some(0);
            self.server_cpus = (1..cores).collect();
        }
        if let Some(core) = self.server_cpus.iter().chain(&self.guest_cpu).find(|core| **core >= cores) {
            bail!("there is no core {core}; this machine has {cores} cores, numbered from 0");
        }
        Ok(())
    }

    /// True if the storm on the agent is watched.
    fn is_watched(&self) -> bool {
        self.watch || self.record.is_some()
    }

    fn write(&self, results: &Results) -> Result<()> {
        let write = |path: &Option<PathBuf>, text: &dyn Fn() -> Result<String>| -> Result<()> {
            let Some(path) = path else { return Ok(()) };
            std::fs::write(path, text()?).with_context(|| format!("cannot write {}", path.display()))?;
            eprintln!("wrote {}", path.display());
            Ok(())
        };
        write(&self.json, &|| Ok(serde_json::to_string(results)? + "\n"))?;
        write(&self.report, &|| Ok(report::html(results)))?;
        write(&self.svg, &|| Ok(report::svg(results)))
    }
}

/// How long the kernel must answer beyond the end of a storm: guests that wait are given up after 3 s, and the agent has
/// set the end up to a second before it was killed.
const MARGIN: f64 = 5.0;

/// Fails if an agent of this configuration does not let the kernel answer for the rest of a storm.
fn answers_for(configuration: &str, rest: f64) -> Result<()> {
    let agent: serde_json::Value =
        serde_yaml::from_str(configuration).context("the agent's configuration")?;
    let seconds = agent["answer_without_agent_seconds"].as_f64().unwrap_or(0.0);
    let least = (rest + MARGIN).ceil();
    ensure!(
        agent["answer_requests_in_kernel"] == true && seconds >= least,
        "--kill-after needs `answer_requests_in_kernel: true` and `answer_without_agent_seconds: {least}` or more in \
         the file of --agent-config"
    );
    Ok(())
}

/// Prints a progress line on standard error.
fn progress(began: Instant, what: &str) {
    let what = metadata_common::printable::Printable(what);
    eprintln!("[{:>6.1} s] {what}", began.elapsed().as_secs_f64());
}

/// Parses `at-once`, `ramp:SECONDS` or `poisson:RATE`.
fn arrival(text: &str) -> Result<Arrival, String> {
    let number = |text: &str| text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    let read = match text.split_once(':') {
        None if text == "at-once" => Some(Arrival::AtOnce),
        Some(("ramp", seconds)) => number(seconds).map(Arrival::Ramp),
        Some(("poisson", rate)) => number(rate).map(Arrival::Poisson),
        _ => None,
    };
    read.ok_or_else(|| "expected at-once, ramp:SECONDS or poisson:PER-SECOND".into())
}

/// Formats an arrival as [`arrival`] parses it.
fn shown(arrival: Arrival) -> String {
    match arrival {
        Arrival::AtOnce => "at-once".into(),
        Arrival::Ramp(seconds) => format!("ramp:{seconds}"),
        Arrival::Poisson(rate) => format!("poisson:{rate}"),
        Arrival::Lone => "lone".into(),
    }
}

/// Parses a number of bytes: `300`, `64KiB`, `1MiB`.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let unit = match unit {
        "" | "B" => Some(1),
        "KiB" | "K" => Some(1 << 10),
        "MiB" | "M" => Some(1 << 20),
        _ => None,
    };
    let bytes = digits.parse::<usize>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    bytes.ok_or_else(|| "expected bytes, such as 300, 64KiB or 1MiB".into())
}

// Lays out one case: records for the agent, the same documents for the peers, and the plan for the guests.
//
// Every document comes from the agent's own renderer, so that all subjects serve the same bytes.

/// Bytes of all user-data of a case together. Beyond it, guests share texts.
const USER_DATA_IN_ALL: usize = 256 << 20;
/// Requests per second that a record allows its guest. It is high, because guests boot again and again.
const REQUESTS_PER_SECOND: u32 = 1_000_000;
/// The token that peers answer with. It is as long as the agent's.
const PEERS_TOKEN: &str = "AQAEAI4xVrg5xVnSdFYNZCbLpYWKSEwDqLtSLUFb9SDYmbrTYl1zXg==";

/// A case, with its files on a file system in memory.
pub(crate) struct Case {
    pub(crate) dialect: Dialect,
    /// The guests. The last one floods, if any does.
    pub(crate) tenants: Vec<Tenant>,
    /// Bytes of a guest's user-data.
    pub(crate) user_data: usize,
    /// Each edition has other user-data of this size.
    edition: u16,
    pub(crate) requests: usize,
    directory: TempDir,
}

impl Case {
    /// Lays out an edition of a case with `guests` guests.
    pub(crate) fn lay_out(dialect: Dialect, guests: usize, user_data: usize, edition: u16) -> Result<Self> {
        ensure!(
            user_data <= USER_DATA_MAX as usize,
            "user-data can have at most {USER_DATA_MAX} bytes, not {user_data}"
        );
        let directory = peer::in_memory()?;
        let mut case = Self { dialect, tenants: Vec::new(), user_data, edition, requests: 0, directory };
        std::fs::create_dir(case.records())?;
        case.write(guests)?;
        Ok(case)
    }

    /// Returns the directory of records.
    pub(crate) fn records(&self) -> PathBuf {
        self.directory.path().join("records")
    }

    /// Returns the file of the generator's plan.
    pub(crate) fn plan(&self) -> PathBuf {
        self.directory.path().join("plan.json")
    }

    fn write(&mut self, guests: usize) -> Result<()> {
        let crawl = self.dialect.crawl()?;
        self.requests = crawl.len();
        let mut bodies = Bodies::create(self.directory.path().join("bodies"))?;
        let mut planned = Vec::with_capacity(guests);
        let mut interner = Interner::new();
        for number in 0..guests {
            let identity = Identity::of(u16::try_from(number)?);
            let record = self.record(&identity, guests)?;
            let vm = VmState::alone(record.vm.uuid.as_str());
            let responses = render(&record, &mut interner, vm);
            let (pages, answers) = ask(&crawl, &identity, &responses, &mut bodies)?;
            self.tenants.push(Tenant {
                tap: tap_name(number),
                mac: identity.mac,
                address: identity.address,
                pages,
            });
            planned.push(Planned { mac: identity.mac.0, address: identity.address, answers });
        }
        let requests = crawl.iter().map(CrawlRequest::text).collect();
        let plan = Plan { server: METADATA, requests, bodies: bodies.finish()?, guests: planned };
        let mut file = BufWriter::new(File::create(self.plan())?);
        serde_json::to_writer(&mut file, &plan)?;
        Ok(file.flush()?)
    }

    /// Writes a guest's record and loads it as the agent will.
    fn record(&self, identity: &Identity, guests: usize) -> Result<Record> {
        // As many distinct texts as fit into memory. Guests whose numbers are equal modulo `texts` share one.
        let texts = (USER_DATA_IN_ALL / self.user_data.max(1)).clamp(1, guests) as u16;
        let like = Identity::of((identity.number % texts + self.edition) % MAX_GUESTS)
            .with_user_data_of(self.user_data);
        let mut record: serde_json::Value = serde_json::from_str(&identity.record(1))?;
        record["user_data"] = json!({"text": like.user_data});
        record["vendor_data"] = json!({"text": "#cloud-config\n{}\n"});
        record["metadata"] = json!({"role": "web"});
        record["admin"] = json!({"user": "alice"});
        let most = u32::try_from(self.user_data)?.max(USER_DATA_DEFAULT);
        record["serve"] = json!({"smbios": self.dialect.smbios(), "limits": {
            "rps": REQUESTS_PER_SECOND, "burst": REQUESTS_PER_SECOND, "user_data": most,
        }});
        replace(&identity.path(&self.records()), &record.to_string())?;
        let name = format!("{}.yaml", identity.hostname);
        let loaded = directory::load(&self.records(), &name, &RecordLimits::DEFAULT)
            .with_context(|| format!("{name} has no record"))?;
        Ok(loaded.record?.0)
    }
}

/// Returns the expected answers to a guest's requests, in order, and the pages that a peer needs for them.
pub(crate) fn ask(
    crawl: &[CrawlRequest],
    identity: &Identity,
    responses: &Responses,
    bodies: &mut Bodies,
) -> Result<(Vec<PeerPage>, Vec<Expected>)> {
    let (mut pages, mut answers, mut token) = (Vec::<PeerPage>::new(), Vec::new(), String::new());
    for asked in crawl {
        if asked.is_signed() {
            answers.push(Expected { status: 200, body: Body::Token });
            continue;
        }
        let response = answer(asked, identity, responses, &token)?;
        let mut body = response.body().to_bytes();
        let status = response.status().0;
        if asked.brings_token() {
            token = String::from_utf8(body.to_vec())?;
            answers.push(Expected { status, body: Body::Token });
            body = Bytes::from_static(PEERS_TOKEN.as_bytes());
        } else {
            let (offset, length) = (bodies.add(&body)?, body.len() as u64);
            answers.push(Expected { status, body: Body::Exactly { offset, length } });
        }
        // Guests request some documents twice.
        if !pages.iter().any(|page| page.method == asked.method && page.path == asked.path) {
            let content_type = response.field("Content-Type").unwrap_or_default().to_owned();
            let (method, path) = (asked.method.clone(), asked.path.clone());
            pages.push(PeerPage { method, path, status, content_type, body });
        }
    }
    Ok((pages, answers))
}

/// Returns the agent's answer to a request.
fn answer(asked: &CrawlRequest, identity: &Identity, responses: &Responses, token: &str) -> Result<Response> {
    let method = Method::from_token(&asked.method);
    let path = asked.path.replace(OWN_MAC, &identity.mac.to_string());
    let field = asked.field_with(token);
    let fields: Vec<_> =
        field.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
    let target = normalise(&path).ok().with_context(|| format!("{path} is not a valid path"))?;
    let request = Request { method, target: target.target(), headers: Headers::new(&fields), body: b"" };
    let connection = Connection {
        slot: 0,
        local: (addresses::METADATA.into(), 80),
        remote: (identity.address.into(), 40_000),
    };
    let now = Now { mono: Duration::ZERO, unix_seconds: 0 };
    let outcome = responses.answer(now, &connection, &request, None);
    let (LiveOutcome::Ready(response) | LiveOutcome::Changed(response)) = outcome else {
        anyhow::bail!("{path} has no immediate answer");
    };
    ensure!(
        matches!(response.status().0, 200 | 204),
        "{} {path} gets status {}; the crawl does not match the record",
        asked.method,
        response.status().0
    );
    Ok(response)
}

/// The file of bodies, which has each distinct body once.
pub(crate) struct Bodies {
    path: PathBuf,
    file: BufWriter<File>,
    length: u64,
    known: HashMap<Bytes, u64>,
}

impl Bodies {
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        let file =
            BufWriter::new(File::create(&path).with_context(|| format!("cannot make {}", path.display()))?);
        Ok(Self { path, file, length: 0, known: HashMap::new() })
    }

    /// Adds a body if it is new; returns its offset in the file.
    fn add(&mut self, body: &Bytes) -> Result<u64> {
        if let Some(&offset) = self.known.get(body) {
            return Ok(offset);
        }
        let offset = self.length;
        self.file.write_all(body)?;
        self.length += body.len() as u64;
        self.known.insert(body.clone(), offset);
        Ok(offset)
    }

    pub(crate) fn finish(mut self) -> Result<PathBuf> {
        self.file.flush()?;
        Ok(self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::{answers_for, arrival, shown, size};

    #[test]
    fn the_kernel_must_answer_until_a_storm_without_agent_is_over() {
        let longer = "answer_requests_in_kernel: true\nanswer_without_agent_seconds: 9\n";
        for (configuration, rest, is_enough) in [
            (longer, 4.0, true),
            (longer, 4.1, false),
            ("answer_requests_in_kernel: true\n", 0.5, false),
            ("answer_without_agent_seconds: 9\n", 0.5, false),
            ("", 0.5, false),
        ] {
            assert_eq!(answers_for(configuration, rest).is_ok(), is_enough, "{configuration}, {rest} s");
        }
    }

    #[test]
    fn an_arrival_is_shown_as_it_was_given() {
        for text in ["at-once", "ramp:2.5", "poisson:1000"] {
            assert_eq!(arrival(text).map(shown), Ok(text.to_owned()));
        }
        for text in ["", "ramp", "ramp:", "ramp:-1", "poisson:nan", "later"] {
            assert!(arrival(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [("300", 300), ("64KiB", 65_536), ("1MiB", 1 << 20), ("2K", 2_048)] {
            assert_eq!(size(text), Ok(bytes));
        }
        for text in ["", "KiB", "1GB", "-1", "99999999999999999999"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
