//! The `xdp-imds` command.

use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use metadata_base::printable::Printable;
use metadata_base::run::SOCKET;
use metadata_control::status::{self, ClientError, Outcome};
use metadata_datapath::sandbox;
use metadata_feed::libvirt::hook;
use metadata_state::token_file;
use metadata_steer::{Guarded, RELEASE_GRACE, Released};
use metadata_user::agent::{self, preflight};
use metadata_user::config::{self, Config};
use metadata_user::logging::{FILTER_VARIABLE, FORMAT_VARIABLE, LogFilter, LogFormat, LogHandle};
use metadata_user::output;
use metadata_user::verbs::options::Options;
#[cfg(feature = "kubevirt")]
use metadata_user::verbs::webhook;
use metadata_user::verbs::{check, doctor, explain, export, identity, instances, pages, top, trace, which};

/// The instance metadata service of a hypervisor node.
///
/// An XDP program on each VM's tap steers packets for 169.254.169.254 to this agent. The agent answers with
/// responses that it computed from the VM's record. The kernel identifies the VM by its tap and MAC.
#[derive(Parser)]
#[command(name = "xdp-imds", version = build_id::VERSION, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    /// The log level (off, error, warn, info, debug or trace), or levels of parts such as `info,metadata_steer=debug`
    /// [default: `log` of the configuration, or info].
    #[arg(long, global = true, env = FILTER_VARIABLE, value_name = "FILTER", value_parser = filter)]
    log: Option<String>,
    /// The format of log lines [default: `log_format` of the configuration, or auto].
    #[arg(long, global = true, env = FORMAT_VARIABLE, value_name = "FORMAT", value_enum)]
    log_format: Option<LogFormat>,
    #[command(subcommand)]
    verb: Verb,
}

const EXAMPLES: &str = "\
Examples:
  Serve every VM whose record names its tap:
      xdp-imds serve --records /etc/xdp-imds/records.d
  Serve one tap whose guest has this MAC:
      xdp-imds serve --records ./records --port vnet0=52:54:00:12:34:56
  Serve a tap in another network namespace (a name under /run/netns, or a path):
      xdp-imds serve --records ./records --port tap0@/proc/4242/ns/net=52:54:00:12:34:56
  Register a VM before it boots, and wait until its tap is attached:
      xdp-imds register -f web-1.yaml --wait
  Check whether this node can serve:
      xdp-imds doctor --records ./records
  Validate the records, and show what each path would answer:
      xdp-imds check --paths ./records
      xdp-imds explain ./records/web-1.yaml GET /latest/user-data

In the guest:
      curl http://169.254.169.254/v1/meta-data";

#[derive(Subcommand)]
enum Verb {
    /// Attach to taps and serve their guests until SIGTERM. Needs root, or CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF,
    /// CAP_SYS_ADMIN and CAP_IPC_LOCK; for taps in namespaces named /proc/PID/ns/net also CAP_SYS_PTRACE.
    Serve(Serve),
    /// Remove all programs and maps that an agent has pinned. Afterwards the taps pass all frames. Needs the
    /// privileges of `serve`.
    Release {
        #[command(flatten)]
        agent: which::Agent,
        /// The directory of pins [default: the agent's, or /sys/fs/bpf/xdp-imds].
        #[arg(long, value_name = "DIR")]
        pins: Option<PathBuf>,
        /// Remove the pins even while an agent uses them. Its ports pass all frames once it ends.
        #[arg(long)]
        force: bool,
    },
    /// Validate the records in a directory and print what each path would answer. Needs no privilege.
    Check {
        /// Directory of VM records (*.yaml, *.yml or *.json, one VM each), or one such file.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Print every path instead of one line per dialect.
        #[arg(long)]
        paths: bool,
        /// The agent's configuration file, whose `metadata` limits records.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Show the state of this node's agent or of one guest. Exit codes: 0 no problem, 1 a problem to solve, 2 no
    /// agent.
    Status {
        /// Show only this guest, named by its port, its MAC, the name or UUID of its VM, or its record.
        #[arg(value_name = which::GUEST)]
        guest: Option<String>,
        #[command(flatten)]
        agent: which::Agent,
        /// Show every port, not only those that are not attached.
        #[arg(long, conflicts_with = "guest")]
        all: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Watch the node: requests, latency, drops, workers, and the VMs that boot, with what each has found and waits for.
    /// `q` quits, `?` shows the keys. Needs a running agent.
    Top(top::Arguments),
    /// Register the record of a VM with this node's agent, before the VM boots. The registration lasts until `rm`, also
    /// across restarts of the agent. It overrides records of the same VM from feeds.
    #[command(after_help = instances::EXIT)]
    Register(instances::Register),
    /// List the instances that the agent knows, with their sources and states.
    #[command(after_help = instances::EXIT)]
    Ls(instances::Ls),
    /// Show one instance, without its secrets.
    #[command(after_help = instances::EXIT)]
    Get(instances::Get),
    /// Remove the registration of a VM. A record of the same VM from another source then comes into force.
    #[command(after_help = instances::EXIT)]
    Rm(instances::Rm),
    /// Remove what the guest of an instance wrote: the password that it posted, its confirmation of the record's password,
    /// guest attributes and documents. The record's password is served again. The same happens when `vm.instance_id` of
    /// the record changes.
    #[command(after_help = instances::EXIT)]
    Clear(instances::Clear),
    /// Check kernel, privileges, directories and ports, and print each problem with its remedy. Changes nothing.
    /// Run it like the agent: as the same user, in the same namespaces, with the same limits.
    #[command(after_help = doctor::EXIT)]
    Doctor(doctor::Arguments),
    /// Show each frame to and from one guest, with its verdict. Needs a running agent, which runs one trace at a time.
    Trace(trace::Arguments),
    /// Show which dialect answers a request, the answer and the reason. Needs no privilege.
    Explain(Explain),
    /// Print a new token key that several nodes can share by `token_key` of the configuration. The key is a secret. Needs
    /// no privilege.
    TokenKey {
        /// The file of the present key. Tokens signed with that key stay valid until they expire.
        #[arg(long, value_name = "FILE")]
        after: Option<PathBuf>,
    },
    /// Make keys of identity tokens, and print their public halves. Needs no privilege.
    Identity(identity::Arguments),
    /// Serve admission reviews of a Kubernetes cluster. VMs annotated `imds.kubevirt.io/enabled: "true"` get the SMBIOS
    /// serial or asset tag that points their guests to this service. Their pods get a token, and the volumes that
    /// annotations name. Needs no privilege.
    #[cfg(feature = "kubevirt")]
    Webhook(webhook::Arguments),
    /// Write a VM's metadata to a disk image that its guest finds by label, for VMs that boot without a network. Needs no
    /// privilege.
    Export {
        /// The form of the disk.
        #[arg(value_name = "FORM", value_enum)]
        form: DiskForm,
        /// Directory of VM records, or one such file.
        #[arg(value_name = "RECORDS")]
        records: PathBuf,
        /// Directory for the images, one per record (*.iso, mode 0600).
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// The agent's configuration file, whose `metadata` limits records.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Write or remove the record of a libvirt domain, whose XML is read from standard input. For a script in
    /// /etc/libvirt/hooks/qemu.d. Prints nothing, always exits with 0, and logs to the host's log.
    LibvirtHook(hook::Arguments),
    /// Write the manual pages, and completions for bash, zsh and fish, below a directory. For those who make packages.
    #[command(hide = true)]
    Pages {
        /// The directory; it is made if it is missing.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
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
    /// The destination address [default: the URL's, or 169.254.169.254].
    #[arg(long, value_name = "ADDR")]
    to: Option<IpAddr>,
    /// The destination port [default: the URL's, or 80].
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// The guest's source port. Scaleway's dialect answers user-data only to ports below 1024.
    #[arg(long, value_name = "PORT", default_value_t = 40_000)]
    source_port: u16,
    /// The agent's configuration file, whose `metadata` limits records.
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
    /// Take the ports over from the running agent with the same pins and run directory, without an interruption for
    /// guests. Without such an agent, start as usual.
    #[arg(long, conflicts_with = "no_pins")]
    takeover: bool,
    /// After another agent has taken over from this one, wait for SIGTERM and answer `/healthz` instead of exiting. For
    /// supervisors such as kubelet, which restart a program that exits.
    #[arg(long, requires = "takeover")]
    linger: bool,
    /// Taps without a record to close, so that no frame for a metadata address leaves them [default: none].
    #[arg(long, value_name = "WHICH", value_enum)]
    guard: Option<Guarded>,
    /// Whether the agent drops the system calls and capabilities that serving does not need [default: on].
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
        match preflight::values(&config).into_iter().next() {
            Some(refusal) => Err(refusal.into()),
            None => Ok(config),
        }
    }
}

/// Checks a filter of the log.
fn filter(text: &str) -> Result<String, String> {
    text.parse::<LogFilter>().map(|_| text.to_owned())
}

/// Runs the agent. A reload reads the configuration from the same sources.
fn run(config: Config, serve: Serve, log: LogHandle) -> anyhow::Result<()> {
    log.follow(config.log.as_deref(), config.log_format);
    log_start(&config, serve.options.file());
    let entry = match serve.takeover {
        true => agent::Entry::TakeOver { linger: serve.linger },
        false => agent::Entry::Alone,
    };
    let read = Box::new(move || serve.config());
    agent::serve(
        config,
        agent::Origin {
            read,
            applied: Box::new(move |config| log.follow(config.log.as_deref(), config.log_format)),
        },
        entry,
    )
}

/// Logs what starts here: the first line of an agent.
fn log_start(config: &Config, file: Option<&Path>) {
    let configuration = file.map_or_else(|| "none".into(), |file| file.display().to_string());
    let control = config.run.join(SOCKET).display().to_string();
    let metrics = config.metrics.map(|address| format!("http://{address}/metrics"));
    let listeners: Vec<_> = std::iter::once(control).chain(metrics).collect();
    tracing::info!(
        version = %build_id::VERSION,
        %configuration,
        sources = %config.sources().join(", "),
        listeners = %listeners.join(", "),
        "xdp-imds starts"
    );
}

/// Prints the agent's status.
fn print_status(guest: Option<&str>, run: &Path, all: bool, json: bool) -> anyhow::Result<ExitCode> {
    let mut out = io::BufWriter::new(output::stdout());
    let outcome = status::run(run, guest, all, json, &mut out);
    out.flush()?;
    let outcome = outcome.or_else(|error| match error.downcast_ref() {
        Some(ClientError::NoAgent { .. } | ClientError::Forbidden { .. }) => {
            output::report(described(&error));
            Ok(Outcome::NoAgent)
        }
        _ => Err(error),
    })?;
    Ok(ExitCode::from(outcome as u8))
}

/// Prints a key file.
fn token_key(after: Option<&Path>) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    Ok(writeln!(output::stdout(), "{}", token_file::generate(after, now)?)?)
}

/// Removes the pins and prints their number.
fn release(pins: Option<&Path>, force: bool) -> anyhow::Result<()> {
    let Some(pins) = pins else {
        let text = "this agent pins nothing; the kernel removes its programs when it ends";
        return Ok(writeln!(output::stdout(), "{text}")?);
    };
    let Released { links, maps, agent_runs } = metadata_steer::release(pins, force)?;
    let mut out = output::stdout();
    match (links, maps) {
        (0, 0) => writeln!(out, "nothing is pinned in {}", Printable(pins.display()))?,
        _ if agent_runs => writeln!(
            out,
            "removed the pins of {links} programs and {maps} maps; an agent runs and keeps the programs on their devices \
             until it ends. If it still runs in {} minutes, it pins everything again",
            RELEASE_GRACE.as_secs() / 60
        )?,
        _ => writeln!(out, "removed {links} programs from their devices, and {maps} maps")?,
    }
    Ok(())
}

/// An error with its causes. A cause that the text already contains is left out.
fn described(error: &anyhow::Error) -> String {
    let causes = error.chain().map(ToString::to_string);
    let said =
        causes.reduce(|said, cause| if said.contains(&cause) { said } else { format!("{said}: {cause}") });
    said.unwrap_or_default()
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if hook::is_asked(std::env::args_os()) => {
            // libvirt interprets standard output and the exit code. A failure to write the log must not change them.
            let _ = write!(output::stderr(), "{error}");
            return ExitCode::SUCCESS;
        }
        Err(error) => error.exit(),
    };
    let ansi = output::is_error_terminal();
    let log = LogHandle::start(cli.log, cli.log_format, ansi);
    // Every verb reads records, which hold secrets.
    if let Err(error) = sandbox::keep_memory_private() {
        tracing::warn!("core dumps can contain secrets, because this process cannot disable them: {error}");
    }
    let done = match cli.verb {
        Verb::Serve(serve) => {
            let served = serve.config().and_then(|config| {
                let advice = "run `xdp-imds doctor` like the agent to see what is wrong and what to do";
                run(config, serve, log).map_err(|error| anyhow::anyhow!("{}; {advice}", described(&error)))
            });
            served.map(|()| ExitCode::SUCCESS)
        }
        Verb::Doctor(arguments) => doctor::run(&arguments.question(), &mut output::stdout()),
        Verb::Trace(arguments) => trace::run(&arguments, &mut output::stdout()).map(|()| ExitCode::SUCCESS),
        Verb::Top(arguments) => top::run(&arguments, &mut output::stdout()).map(|()| ExitCode::SUCCESS),
        Verb::Register(verb) => verb.run(&mut output::stdout()).map(ExitCode::from),
        Verb::Ls(verb) => {
            let mut out = io::BufWriter::new(output::stdout());
            let code = verb.run(&mut out).map(ExitCode::from);
            out.flush().map_err(Into::into).and(code)
        }
        Verb::Get(verb) => verb.run(&mut output::stdout()).map(ExitCode::from),
        Verb::Rm(verb) => verb.run(&mut output::stdout()).map(ExitCode::from),
        Verb::Clear(verb) => verb.run(&mut output::stdout()).map(ExitCode::from),
        Verb::Status { guest, agent, all, json } => {
            agent.run().and_then(|run| print_status(guest.as_deref(), &run, all, json))
        }
        Verb::TokenKey { after } => token_key(after.as_deref()).map(|()| ExitCode::SUCCESS),
        Verb::Identity(verb) => verb.run(&mut output::stdout()).map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "kubevirt")]
        Verb::Webhook(arguments) => webhook::run(&arguments).map(|()| ExitCode::SUCCESS),
        Verb::Release { agent, pins, force } => {
            let pins = agent.pins(pins.as_deref());
            pins.and_then(|pins| release(pins.as_deref(), force)).map(|()| ExitCode::SUCCESS)
        }
        Verb::Pages { dir } => pages::write(Cli::command(), &dir).map(|()| ExitCode::SUCCESS),
        Verb::LibvirtHook(arguments) => {
            hook::run(&arguments);
            Ok(ExitCode::SUCCESS)
        }
        Verb::Explain(question) => {
            let mut out = io::BufWriter::new(output::stdout());
            let explained = question.question().and_then(|question| explain::run(&question, &mut out));
            out.flush().map_err(Into::into).and(explained).map(|()| ExitCode::SUCCESS)
        }
        Verb::Export { form, records, dir, config } => configured(config.as_deref()).and_then(|config| {
            export::run(form.into(), &records, &config.record_limits(), &dir, &mut output::stdout())?;
            Ok(ExitCode::SUCCESS)
        }),
        Verb::Check { dir, paths, config } => {
            let mut out = io::BufWriter::new(output::stdout());
            let checked = configured(config.as_deref()).and_then(|config| {
                check::run(&dir, &config.record_limits(), paths, &mut out, &mut output::stderr())
            });
            checked.and_then(|findings| {
                out.flush()?;
                Ok(findings.into())
            })
        }
    };
    done.unwrap_or_else(|error| {
        output::report(described(&error));
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::described;
    use anyhow::Context as _;
    use metadata_user::config::Config;

    #[test]
    fn a_cause_appears_once() {
        let error = Config::read("/nowhere".as_ref()).context("starting").expect_err("there is no such file");
        let cause = "No such file or directory (os error 2)";
        assert_eq!(described(&error), format!("starting: cannot read the configuration /nowhere: {cause}"));
    }
}
