//! The `xdp-imds` command.

use std::io::{self, IsTerminal as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Args, Parser, Subcommand, ValueEnum};
use metadata_control::status::{self, ClientError, Outcome};
use metadata_datapath::sandbox;
use metadata_feed::libvirt::hook;
use metadata_state::token_file;
use metadata_steer::{Guarded, Released};
use metadata_user::agent;
use metadata_user::config::{self, Config};
use metadata_user::recent::Recent;
use metadata_user::verbs::options::Options;
#[cfg(feature = "kubevirt")]
use metadata_user::verbs::webhook;
use metadata_user::verbs::{check, doctor, explain, export, instances, trace, which};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};

/// The instance metadata service of a hypervisor node.
///
/// An XDP program on each VM's tap steers packets for 169.254.169.254 to this agent, which answers with
/// what it computed from the VM's record. Who is asking is decided by the tap and the MAC, in the kernel.
#[derive(Parser)]
#[command(name = "xdp-imds", version = build_id::VERSION, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    /// What to log: error, warn, info, debug, trace, or a tracing filter such as `info,metadata_steer=debug`
    /// [default: `log` of the configuration, or info].
    #[arg(long, global = true, env = "XDP_IMDS_LOG", value_name = "FILTER", value_parser = filter)]
    log: Option<String>,
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  Serve every VM whose record names its tap:
      xdp-imds serve --records /etc/xdp-imds/records.d
  Serve one tap by hand, its guest known by MAC:
      xdp-imds serve --records ./records --port vnet0=52:54:00:12:34:56
  A tap in another network namespace (a name under /run/netns, or a path):
      xdp-imds serve --records ./records --port tap0@/proc/4242/ns/net=52:54:00:12:34:56
  Register a VM before it boots, and wait until its tap is attached:
      xdp-imds register -f web-1.yaml --wait
  Look before serving: can this node serve, and if not, what is wrong?
      xdp-imds doctor --records ./records
  Are the records valid, and what would each path answer?
      xdp-imds check --paths ./records
      xdp-imds explain ./records/web-1.yaml GET /latest/user-data

In the guest:
      curl http://169.254.169.254/v1/meta-data";

#[derive(Subcommand)]
enum Verb {
    /// Own taps and serve their guests until SIGTERM. Needs root, or CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF,
    /// CAP_SYS_ADMIN and CAP_IPC_LOCK; with taps in namespaces named /proc/PID/ns/net, CAP_SYS_PTRACE too.
    Serve(Serve),
    /// Take all programs and maps that agents have pinned off the taps, which are then as if there never was one.
    /// Needs the privileges of `serve`.
    Release {
        #[command(flatten)]
        agent: which::Agent,
        /// The directory of pins [default: the agent's, or /sys/fs/bpf/xdp-imds].
        #[arg(long, value_name = "DIR")]
        pins: Option<PathBuf>,
        /// Even while an agent runs on them: its ports are open when it ends.
        #[arg(long)]
        force: bool,
    },
    /// Validate the records in a directory and print what each path would answer. Needs no privilege.
    Check {
        /// Directory of VM records (*.yaml, *.yml or *.json, one VM each), or one such file.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Every path instead of a line per dialect.
        #[arg(long)]
        paths: bool,
        /// The agent's configuration file: its `metadata` says how much records may hold.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Show how the agent of this node is, or one of its guests. Ends with 0 when all is well, 1 when something is to
    /// be done, 2 when there is no agent.
    Status {
        /// Only this guest: its port, its MAC, the name or UUID of its VM, or its record.
        #[arg(value_name = which::GUEST)]
        guest: Option<String>,
        #[command(flatten)]
        agent: which::Agent,
        /// Every port, not only those that are not attached.
        #[arg(long, conflicts_with = "guest")]
        all: bool,
        /// As JSON, for programs.
        #[arg(long)]
        json: bool,
    },
    /// Register a VM with the agent of this node, before it boots: by its record, until `rm`. What is registered outlives
    /// the agent and comes before what feeds tell of the same VM.
    #[command(after_help = instances::EXIT)]
    Register(instances::Register),
    /// List the VMs the agent knows, with their sources and states.
    #[command(after_help = instances::EXIT)]
    Ls(instances::Ls),
    /// Show one of them. Secrets are never shown.
    #[command(after_help = instances::EXIT)]
    Get(instances::Get),
    /// Take a VM out that was registered; a record of the same VM from another source then comes into force.
    #[command(after_help = instances::EXIT)]
    Rm(instances::Rm),
    /// Look at kernel, privileges, directories and ports, and say what is wrong and what to do. Changes nothing.
    /// Run it as the agent is run: by its user, in its namespaces, with its limits.
    #[command(after_help = doctor::EXIT)]
    Doctor(doctor::Arguments),
    /// Show what one guest sends and is sent, frame by frame, and what became of each. Asks the agent, which does this for
    /// one at a time.
    Trace(trace::Arguments),
    /// Show which dialect answers a request, with what, and why. Needs no privilege.
    Explain(Explain),
    /// Print a new token key for several nodes to share, for `token_key` of the configuration. It is a secret. Needs no
    /// privilege.
    TokenKey {
        /// The key in use: tokens signed with it stay good until they expire.
        #[arg(long, value_name = "FILE")]
        after: Option<PathBuf>,
    },
    /// Answer a cluster's admission reviews: VMs annotated `imds.kubevirt.io/enabled: "true"` get the SMBIOS serial (or asset
    /// tag) that points their guests here, and their pods a token and what annotations name. Needs no privilege.
    #[cfg(feature = "kubevirt")]
    Webhook(webhook::Arguments),
    /// Write what a VM would be answered to a disk image that its guest finds by label, for VMs that boot
    /// without a network. Needs no privilege.
    Export {
        /// The form of the disk.
        #[arg(value_name = "FORM", value_enum)]
        form: DiskForm,
        /// Directory of VM records, or one such file.
        #[arg(value_name = "RECORDS")]
        records: PathBuf,
        /// Where to write an image (*.iso, mode 0600) per record.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// The agent's configuration file: its `metadata` says how much records may hold.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Make or take away the record of a libvirt domain, whose XML is on standard input. For a script in
    /// /etc/libvirt/hooks/qemu.d; prints nothing and always ends with 0, what it does is in the host's log.
    LibvirtHook(hook::Arguments),
}

#[derive(Clone, Copy, ValueEnum)]
enum DiskForm {
    /// OpenStack's ConfigDrive, label config-2.
    #[value(name = "configdrive")]
    ConfigDrive,
    /// A NoCloud seed, label cidata.
    #[value(name = "nocloud-iso")]
    NoCloud,
}

impl From<DiskForm> for export::Form {
    fn from(form: DiskForm) -> Self {
        match form {
            DiskForm::ConfigDrive => Self::ConfigDrive,
            DiskForm::NoCloud => Self::NoCloud,
        }
    }
}

#[derive(Args)]
struct Explain {
    /// The VM's record file.
    #[arg(value_name = "RECORD")]
    record: PathBuf,
    /// The request's method: GET, HEAD, PUT, POST, …
    #[arg(value_name = "METHOD")]
    method: String,
    /// The request's path with its query, or a whole URL.
    #[arg(value_name = "PATH")]
    target: String,
    /// A header field; repeat for more.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    fields: Vec<String>,
    /// The request's body.
    #[arg(short = 'd', long = "data", value_name = "TEXT", default_value = "")]
    body: String,
    /// The address asked; by default the URL's, or 169.254.169.254.
    #[arg(long, value_name = "ADDR")]
    to: Option<IpAddr>,
    /// The port asked; by default the URL's, or 80.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// The port the guest asks from: Scaleway's dialect answers user-data only to ports below 1024.
    #[arg(long, value_name = "PORT", default_value_t = 40_000)]
    source_port: u16,
    /// The agent's configuration file: its `metadata` says how much records may hold.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Explain {
    fn question(self) -> anyhow::Result<explain::Question> {
        let Self { record, method, target, fields, body, to, port, source_port, config } = self;
        let limits = configured(config.as_deref())?.record_limits();
        Ok(explain::Question { record, limits, method, target, fields, body, to, port, source_port })
    }
}

/// The configuration in a file, or the defaults.
fn configured(path: Option<&Path>) -> anyhow::Result<Config> {
    Ok(path.map(Config::read).transpose()?.unwrap_or_default())
}

#[derive(Args, Clone)]
struct Serve {
    #[command(flatten)]
    options: Options,
    /// Serve Prometheus metrics at http://ADDR/metrics.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Write a line of JSON for each request to this file, or to `stderr`.
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
    /// Take the ports over from the agent that runs with these pins and this run directory, while guests are served: none of
    /// them notices. Starts as usual when none runs.
    #[arg(long, conflicts_with = "no_pins")]
    takeover: bool,
    /// Once another agent has taken over from this one, wait for SIGTERM instead of ending, and answer `/healthz` meanwhile:
    /// for supervisors that start what has ended again, such as kubelet.
    #[arg(long, requires = "takeover")]
    linger: bool,
    /// Which taps without a record are closed, so that nothing for a metadata address leaves them [default: none].
    #[arg(long, value_name = "WHICH", value_enum)]
    guard: Option<Guarded>,
    /// Whether the agent gives up what serving does not take of system calls and capabilities [default: on].
    #[arg(long, value_name = "MODE", value_enum)]
    sandbox: Option<config::Sandbox>,
}

impl Serve {
    fn config(&self) -> anyhow::Result<Config> {
        let this = self.clone();
        let mut config = this.options.config()?;
        config.metrics = this.metrics.or(config.metrics);
        config.audit.to = this.audit.or(config.audit.to);
        config.guard = this.guard.unwrap_or(config.guard);
        config.sandbox = this.sandbox.unwrap_or(config.sandbox);
        config.validate()?;
        anyhow::ensure!(
            config.has_records(),
            "no records to serve: give --records DIR, or `records:` or `kubevirt: {{}}` in the configuration file; with \
             `api: {{}}` there, VMs may be registered without"
        );
        Ok(config)
    }
}

/// Checks a filter of the log.
fn filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// The client of the cluster's API logs each failed request as an error, and not which: the feed says what it means. A
/// filter that names it brings it back.
const NOISE: &str = "kube_client";

/// The log on standard error, whose filter can change.
struct Log {
    /// What the command line or the environment asks for: it wins.
    asked: Option<String>,
    filter: reload::Handle<EnvFilter, Registry>,
}

impl Log {
    fn start(asked: Option<String>, ansi: bool) -> Self {
        let (layer, filter) = reload::Layer::new(Self::filter(asked.as_deref().unwrap_or("info")));
        let lines =
            tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(ansi).with_target(false);
        tracing_subscriber::registry()
            .with(lines.with_filter(layer))
            .with(Recent.with_filter(
                Targets::new().with_default(LevelFilter::WARN).with_target(NOISE, LevelFilter::OFF),
            ))
            .init();
        Self { asked, filter }
    }

    fn filter(text: &str) -> EnvFilter {
        EnvFilter::new(format!("{NOISE}=off,{text}"))
    }

    fn follow(&self, config: &Config) {
        let text = self.asked.as_deref().or(config.log.as_deref()).unwrap_or("info");
        // Both were checked when they were read.
        if let Err(error) = self.filter.reload(Self::filter(text)) {
            tracing::warn!("what is logged stays as it was: {error}");
        }
    }
}

/// Serves by a configuration that is read again as it was first.
fn run(config: Config, serve: Serve, log: Log) -> anyhow::Result<()> {
    log.follow(&config);
    let entry = match serve.takeover {
        true => agent::Entry::TakeOver { linger: serve.linger },
        false => agent::Entry::Alone,
    };
    let read = Box::new(move || serve.config());
    agent::serve(config, agent::Origin { read, applied: Box::new(move |config| log.follow(config)) }, entry)
}

/// Prints how the agent is; whoever asked stops reading when they have seen enough.
fn look(guest: Option<&str>, run: &Path, all: bool, json: bool) -> anyhow::Result<ExitCode> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let outcome = status::run(run, guest, all, json, &mut out);
    out.flush()?;
    let outcome = outcome.or_else(|error| match error.downcast_ref() {
        Some(ClientError::NoAgent { .. } | ClientError::Forbidden { .. }) => {
            eprintln!("xdp-imds: {}", told(&error));
            Ok(Outcome::NoAgent)
        }
        _ => Err(error),
    })?;
    Ok(ExitCode::from(outcome as u8))
}

/// Prints a key file.
fn token_key(after: Option<&Path>) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    println!("{}", token_file::generate(after, now)?);
    Ok(())
}

/// Takes off what is pinned and says what that was.
fn release(pins: Option<&Path>, force: bool) -> anyhow::Result<()> {
    let Some(pins) = pins else {
        println!("this agent pins nothing: its programs go when it ends");
        return Ok(());
    };
    let Released { links, maps } = metadata_steer::release(pins, force)?;
    match (links, maps) {
        (0, 0) => println!("nothing is pinned in {}", pins.display()),
        _ => println!("took {links} programs off their devices and forgot {maps} maps"),
    }
    Ok(())
}

/// An error with its causes, each said once: some errors say theirs themselves.
fn told(error: &anyhow::Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    let said =
        causes.reduce(|said, cause| if said.contains(&cause) { said } else { format!("{said}: {cause}") });
    said.unwrap_or_default()
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if hook::is_asked(std::env::args_os()) => {
            // Standard output and the exit code are libvirt's; a log that cannot be written to is no reason either.
            let _ = write!(io::stderr(), "{error}");
            return ExitCode::SUCCESS;
        }
        Err(error) => error.exit(),
    };
    let ansi = io::stderr().is_terminal();
    let log = Log::start(cli.log, ansi);
    // Every verb reads records.
    if let Err(error) = sandbox::keep_memory_private() {
        tracing::warn!("what is in memory may be dumped: {error}");
    }
    let done = match cli.verb {
        Verb::Serve(serve) => {
            let served = serve.config().and_then(|config| {
                let advice = "run `xdp-imds doctor` as the agent is run to see what is wrong and what to do";
                run(config, serve, log).map_err(|error| anyhow::anyhow!("{}; {advice}", told(&error)))
            });
            served.map(|()| ExitCode::SUCCESS)
        }
        Verb::Doctor(arguments) => doctor::run(&arguments.question(), &mut io::stdout().lock()),
        Verb::Trace(arguments) => {
            trace::run(&arguments, &mut io::stdout().lock()).map(|()| ExitCode::SUCCESS)
        }
        Verb::Register(verb) => verb.run(&mut io::stdout().lock()).map(ExitCode::from),
        Verb::Ls(verb) => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            let code = verb.run(&mut out).map(ExitCode::from);
            out.flush().map_err(Into::into).and(code)
        }
        Verb::Get(verb) => verb.run(&mut io::stdout().lock()).map(ExitCode::from),
        Verb::Rm(verb) => verb.run(&mut io::stdout().lock()).map(ExitCode::from),
        Verb::Status { guest, agent, all, json } => {
            agent.run().and_then(|run| look(guest.as_deref(), &run, all, json))
        }
        Verb::TokenKey { after } => token_key(after.as_deref()).map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "kubevirt")]
        Verb::Webhook(arguments) => webhook::run(&arguments).map(|()| ExitCode::SUCCESS),
        Verb::Release { agent, pins, force } => {
            let pins = agent.pins(pins.as_deref());
            pins.and_then(|pins| release(pins.as_deref(), force)).map(|()| ExitCode::SUCCESS)
        }
        Verb::LibvirtHook(arguments) => {
            hook::run(&arguments);
            Ok(ExitCode::SUCCESS)
        }
        Verb::Explain(question) => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            let explained = question.question().and_then(|question| explain::run(&question, &mut out));
            out.flush().map_err(Into::into).and(explained).map(|()| ExitCode::SUCCESS)
        }
        Verb::Export { form, records, dir, config } => configured(config.as_deref()).and_then(|config| {
            export::run(form.into(), &records, &config.record_limits(), &dir, &mut io::stdout())?;
            Ok(ExitCode::SUCCESS)
        }),
        Verb::Check { dir, paths, config } => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            let checked = configured(config.as_deref()).and_then(|config| {
                check::run(&dir, &config.record_limits(), paths, &mut out, &mut io::stderr())
            });
            checked.and_then(|findings| {
                out.flush()?;
                Ok(findings.into())
            })
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("xdp-imds: {}", told(&error));
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::told;
    use anyhow::Context as _;
    use metadata_user::config::Config;

    #[test]
    fn a_cause_is_said_once() {
        let error = Config::read("/nowhere".as_ref()).context("starting").expect_err("there is no such file");
        let cause = "No such file or directory (os error 2)";
        assert_eq!(told(&error), format!("starting: cannot read the configuration /nowhere: {cause}"));
    }
}
