//! The `xdp-imds` command.

use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use metadata_common::run::{SOCKET, UNIT_WRITES};
use metadata_control::status::{self, LookupOutcome};
use metadata_datapath::sandbox;
use metadata_feed::libvirt::hook;
use metadata_feed::state::token_file;
use metadata_steer::ClosedTaps;
use metadata_user::agent::{self, preflight};
use metadata_user::config::{self, Config};
use metadata_user::logging::{FILTER_VARIABLE, FORMAT_VARIABLE, LogFilter, LogFormat, LogHandle};
use metadata_user::output;
use metadata_user::verbs::options::{self, ConfigOverrides};
#[cfg(feature = "kubevirt")]
use metadata_user::verbs::webhook;
use metadata_user::verbs::{
    self, Exit, ExitError, check, doctor, event, explain, export, identity, instances, openstack, pages,
    release, top, trace,
};
use rustix::process::geteuid;
use rustix::thread::{CapabilitySet, capabilities};

/// The instance metadata service of a hypervisor node.
///
/// An XDP program on each VM's tap steers packets for 169.254.169.254 to this agent. The agent answers with
/// responses that it computed from the VM's record. The kernel identifies the VM by its tap and MAC.
#[derive(Parser)]
#[command(
    name = "xdp-imds", version = metadata_user::VERSION, max_term_width = 100, after_long_help = EXAMPLES,
    // "verbs" is the word of this program and its book.
    subcommand_value_name = "VERB", subcommand_help_heading = "Commands"
)]
struct Cli {
    /// The log level (off, error, warn, info, debug or trace), or levels of parts such as `info,metadata_steer=debug`
    /// [default: `log` of the configuration, or info].
    #[arg(
        long, global = true, env = FILTER_VARIABLE, value_name = "FILTER", value_parser = filter,
        hide_short_help = true, display_order = 900
    )]
    log: Option<String>,
    /// The format of log lines [default: `log_format` of the configuration, or auto].
    #[arg(
        long, global = true, env = FORMAT_VARIABLE, value_name = "FORMAT", value_enum, hide_short_help = true,
        display_order = 900
    )]
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
    /// Attach to taps and serve their guests until SIGTERM.
    ///
    /// Needs root, or CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_SYS_ADMIN and CAP_IPC_LOCK; for taps in namespaces named
    /// /proc/PID/ns/net also CAP_SYS_PTRACE.
    Serve(Serve),
    /// Remove what an agent that has ended left in the kernel.
    ///
    /// Removes its pinned programs and maps, and the devices of its hubs. Afterwards the taps pass all frames. Needs
    /// the privileges of `serve`.
    ///
    /// Unless --run or --config names the agent, /etc/xdp-imds/config.yaml does, if there is one. If that file cannot
    /// be used, the defaults apply.
    Release {
        #[command(flatten)]
        agent: options::Agent,
        /// The directory of pins [default: the agent's, or /sys/fs/bpf/xdp-imds].
        #[arg(long, value_name = "DIR")]
        pins: Option<PathBuf>,
        /// Prefix of the hub's device names [default: `hub` of the configuration, or imds].
        #[arg(long, value_name = "NAME")]
        hub: Option<String>,
        /// Remove the pins even while an agent uses them.
        ///
        /// Its ports pass all frames once it ends. If it still runs ten minutes later, it pins everything again.
        #[arg(long)]
        force: bool,
    },
    /// Validate records, and print what they would serve.
    ///
    /// Also warns about valid records that are unlikely to work as intended. Needs no privilege.
    Check {
        /// Directory of VM records (*.yaml, *.yml or *.json, one VM each), or one such file.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Print every path instead of one line per dialect.
        #[arg(long)]
        paths: bool,
        /// The agent's configuration file: `metadata` limits records, `hub` names its devices.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Print one JSON document, of the form `check/1`.
        #[arg(long)]
        json: bool,
    },
    /// Show the state of this node's agent, or of one guest.
    ///
    /// The first line says whether anything needs fixing; so does the exit code.
    Status {
        /// Show only this guest, named by its port, its MAC, the name or UUID of its VM, or its record.
        #[arg(value_name = options::GUEST)]
        guest: Option<String>,
        #[command(flatten)]
        agent: options::Agent,
        /// Show every port, not only those that are not attached.
        #[arg(long, conflicts_with = "guest")]
        all: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Watch the node in a terminal.
    ///
    /// Shows requests, latency, drops, workers, and the VMs that boot, with what each has found and waits for. `q`
    /// quits, `?` shows the keys. Needs a running agent.
    Top(top::TopArgs),
    /// Register the record of a VM with this node's agent, before the VM boots.
    ///
    /// The registration lasts until `rm`, including across restarts of the agent. It overrides records of the same VM
    /// from feeds.
    Register(instances::Register),
    /// List the instances that the agent knows, with their sources and states.
    Ls(instances::LsArgs),
    /// Show one instance, without its secrets.
    Get(instances::GetArgs),
    /// Remove the registration of a VM.
    ///
    /// A record of the same VM from another source then comes into force.
    #[command(alias = "unregister")]
    Rm(instances::Rm),
    /// Remove what the guest of an instance wrote.
    ///
    /// That is the password that it posted, its confirmation of the record's password, guest attributes and documents.
    /// The record's password is served again. The same happens when `vm.instance_id` of the record changes.
    Clear(instances::Clear),
    /// Announce to a VM what the host will do, and see whether its guest has acknowledged it.
    ///
    /// Guests read the events of their cloud's datasource: Azure's scheduled events, EC2's maintenance and spot notices,
    /// GCE's maintenance events, and `/v1/events`. An event only announces: the platform acts.
    Event(event::Event),
    /// Check whether this node can serve, and print each problem with its remedy.
    ///
    /// Checks the configuration, kernel, privileges, directories and ports. Changes nothing. Run it like the agent: as
    /// the same user, in the same namespaces, with the same limits.
    #[command(after_long_help = doctor::LINES)]
    Doctor(doctor::DoctorArgs),
    /// Show each frame to and from one guest, with its verdict.
    ///
    /// Needs a running agent, which runs one trace at a time.
    Trace(trace::TraceArgs),
    /// Show which dialect answers a request, the answer and the reason.
    ///
    /// Reads the record and the configuration only: no agent is needed, and no privilege.
    Explain(Explain),
    /// Print a new token key that several nodes can share.
    ///
    /// `token_key` of the configuration names its file. The key is a secret. Needs no privilege.
    TokenKey {
        /// The file of the present key, whose tokens stay valid until they expire.
        #[arg(long, value_name = "FILE")]
        after: Option<PathBuf>,
    },
    /// Make keys for identity tokens, and print their public halves.
    Identity(identity::IdentityArgs),
    /// Take over from the metadata agents of OpenStack's Neutron.
    Openstack(openstack::OpenstackArgs),
    /// Serve admission reviews of a Kubernetes cluster.
    ///
    /// VMs annotated `imds.kubevirt.io/enabled: "true"` get the SMBIOS serial or asset tag that points their guests to
    /// this service. Their pods get a token, and the volumes that annotations name. Needs no privilege.
    #[cfg(feature = "kubevirt")]
    Webhook(webhook::WebhookArgs),
    /// Write a VM's metadata to a disk image, for VMs that boot without a network.
    ///
    /// The guest finds the disk by its label. Needs no privilege.
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
    /// Write or remove the record of a libvirt domain, for a script in /etc/libvirt/hooks/qemu.d.
    ///
    /// Reads the domain's XML from standard input, prints its outcome on standard error, and logs changes to the host's
    /// log. Prints nothing on standard output, which libvirt would read as a changed domain, and always exits with 0.
    LibvirtHook(hook::HookArgs),
    /// Write the manual pages, and completions for bash, zsh and fish, below a directory.
    ///
    /// For those who make packages.
    #[command(hide = true)]
    Pages {
        /// The directory; it is created if it is missing.
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

impl From<DiskForm> for export::ImageFormat {
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
    /// The guest's source port.
    ///
    /// Scaleway's dialect answers user-data only to ports below 1024.
    #[arg(long, value_name = "PORT", default_value_t = 40_000)]
    source_port: u16,
    /// The agent's configuration file: `metadata` limits records, `identity` issues tokens.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print one JSON document, of the form `explain/1`.
    #[arg(long)]
    json: bool,
}

impl Explain {
    fn question(self) -> anyhow::Result<explain::ExplainRequest> {
        let Self { record, method, target, fields, body, to, port, source_port, config, json: _ } = self;
        let config = configured(config.as_deref())?;
        let (limits, identity) = (config.record_limits(), config.identity);
        Ok(explain::ExplainRequest {
            record,
            limits,
            identity,
            method,
            target,
            fields,
            body,
            to,
            port,
            source_port,
        })
    }
}

/// The configuration in a file, or the defaults.
fn configured(path: Option<&Path>) -> anyhow::Result<Config> {
    Ok(path.map(Config::read).transpose()?.unwrap_or_default())
}

#[derive(Args, Clone)]
struct Serve {
    #[command(flatten)]
    options: ConfigOverrides,
    /// Serve Prometheus metrics at http://ADDR/metrics.
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::socket_address)]
    metrics: Option<SocketAddr>,
    /// Write a line of JSON for each request to this file, or to `stderr`.
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
    /// Take the ports over from the running agent, without an interruption for guests.
    ///
    /// That is the agent with the same pins and run directory. Without such an agent, start as usual.
    #[arg(long, conflicts_with = "no_pins")]
    takeover: bool,
    /// Do not exit after another agent has taken over from this one.
    ///
    /// Wait for SIGTERM and answer `/healthz` instead. For supervisors such as kubelet, which restart a program that
    /// exits.
    #[arg(long, requires = "takeover")]
    linger: bool,
    /// Taps without a record to close, so that no frame for a metadata address leaves them [default: none].
    #[arg(long, value_name = "WHICH", value_enum)]
    guard: Option<ClosedTaps>,
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
    // For an ordinary user, files that may not be read would be named first.
    if !geteuid().is_root() && !capabilities(None)?.effective.contains(CapabilitySet::NET_ADMIN) {
        let text = "permission denied: the agent needs CAP_NET_ADMIN, which this user's process lacks; run it as root or by \
                    the packaged unit; operate/privileges.md of the documentation (/usr/share/doc/xdp-imds) lists what another user needs";
        return Err(ExitError::new(Exit::Forbidden, text).into());
    }
    let entry = match serve.takeover {
        true => agent::TakeoverMode::TakeOver { linger: serve.linger },
        false => agent::TakeoverMode::Alone,
    };
    let read = Box::new(move || serve.config());
    agent::serve(
        config,
        agent::ConfigSource {
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
        version = %metadata_user::VERSION,
        %configuration,
        sources = %config.source_names().join(", "),
        listeners = %listeners.join(", "),
        "xdp-imds starts"
    );
}

/// Prints the agent's status.
fn print_status(guest: Option<&str>, run: &Path, all: bool, json: bool) -> anyhow::Result<Exit> {
    let mut out = io::BufWriter::new(output::stdout());
    let outcome = status::run(run, guest, all, json, &mut out)?;
    out.flush()?;
    Ok(match outcome {
        LookupOutcome::Healthy => Exit::Done,
        LookupOutcome::Degraded => Exit::Failure,
        LookupOutcome::Unknown => Exit::Unknown,
    })
}

/// Prints a key file.
fn token_key(after: Option<&Path>, out: &mut dyn io::Write) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    Ok(writeln!(out, "{}", token_file::generate(after, now)?)?)
}

/// The options that a variable sets too, by their names in [`Cli`].
const OPTIONS_OF_THE_LOG: [(&str, &str, &str); 2] =
    [("log", "--log", FILTER_VARIABLE), ("log_format", "--log-format", FORMAT_VARIABLE)];

/// The command with its exit codes. A variable whose option is given is not read: clap would refuse its value all the
/// same where the option stands behind the verb.
fn command() -> clap::Command {
    let given = OPTIONS_OF_THE_LOG.into_iter().filter(|(_, option, _)| is_given(option));
    given.fold(verbs::with_exit_codes(Cli::command()), |command, (name, ..)| {
        command.mut_arg(name, |argument| argument.env(None))
    })
}

/// True if this process was started with an option.
fn is_given(option: &str) -> bool {
    std::env::args_os().any(|word| word.to_str().and_then(|word| word.split('=').next()) == Some(option))
}

/// Names the environment variable of a value that is not on the command line: clap names the option alone.
fn naming_variable(mut error: clap::Error) -> clap::Error {
    let option = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let option = option.split(' ').next().unwrap_or_default();
    let of_variable = OPTIONS_OF_THE_LOG.iter().find(|(_, name, _)| *name == option && !is_given(name));
    if let Some((_, _, variable)) = of_variable {
        let text = format!("the value is that of the environment variable {variable}");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![text.into()]));
    }
    error
}

fn main() -> ExitCode {
    let parsed = command().try_get_matches().and_then(|mut found| Cli::from_arg_matches_mut(&mut found));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) if hook::is_asked(std::env::args_os()) => {
            // libvirt interprets standard output and the exit code. A failure to write the log must not change them.
            let _ = write!(output::stderr(), "{}", naming_variable(error));
            return ExitCode::SUCCESS;
        }
        Err(error) => naming_variable(error).exit(),
    };
    let ansi = output::is_error_terminal();
    let log = LogHandle::start(cli.log, cli.log_format, ansi);
    // Every verb reads records, which hold secrets.
    if let Err(error) = sandbox::keep_memory_private() {
        tracing::warn!("core dumps can contain secrets, because this process cannot disable them: {error}");
    }
    let done = run_verb(cli.verb, log);
    if output::is_closed() {
        return Exit::Closed.into();
    }
    let exit = done.unwrap_or_else(|error| {
        output::report(output::described(&error));
        Exit::of_error(&error)
    });
    exit.into()
}

/// Adds the advice to run `doctor` to the text of an error of `serve`, unless `doctor` would find nothing: it runs outside
/// the unit's sandbox, and a running agent is not a problem for it.
fn advised(text: String) -> String {
    if [UNIT_WRITES, "--takeover"].iter().any(|remedy| text.contains(remedy)) {
        return text;
    }
    format!("{text}; run `xdp-imds doctor` like the agent to see what is wrong and what to do")
}

/// Runs a verb. Whatever it prints is written when this returns.
fn run_verb(verb: Verb, log: LogHandle) -> anyhow::Result<Exit> {
    let mut out = io::BufWriter::new(output::stdout());
    match verb {
        Verb::Serve(serve) => {
            drop(out);
            let config = serve.config()?;
            return run(config, serve, log).map(|()| Exit::Done).map_err(|error| {
                if Exit::of_error(&error) == Exit::Conflict {
                    // There is nothing more to see.
                    return error;
                }
                let text = advised(output::described(&error));
                error.context(text)
            });
        }
        Verb::Doctor(arguments) => {
            let exit = doctor::run(&arguments.question(), &mut out)?;
            out.flush()?;
            return Ok(exit);
        }
        // These flush what they print as they go on.
        Verb::Trace(arguments) => trace::run(&arguments, &mut out)?,
        Verb::Top(arguments) => {
            // It draws on the terminal by itself.
            drop(out);
            return top::run(&arguments, &mut output::stdout()).map(|()| Exit::Done);
        }
        Verb::Register(verb) => return flushed(verb.run(&mut out), out),
        Verb::Ls(verb) => return flushed(verb.run(&mut out), out),
        Verb::Get(verb) => return flushed(verb.run(&mut out), out),
        Verb::Rm(verb) => return flushed(verb.run(&mut out), out),
        Verb::Clear(verb) => return flushed(verb.run(&mut out), out),
        Verb::Event(verb) => return flushed(verb.run(&mut out), out),
        Verb::Status { guest, agent, all, json } => {
            drop(out);
            return print_status(guest.as_deref(), &agent.run()?, all, json);
        }
        Verb::TokenKey { after } => token_key(after.as_deref(), &mut out)?,
        Verb::Identity(verb) => verb.run(&mut out)?,
        Verb::Openstack(verb) => verb.run(&mut out, &mut output::stderr())?,
        #[cfg(feature = "kubevirt")]
        Verb::Webhook(arguments) => webhook::run(&arguments)?,
        Verb::Release { agent, pins, hub, force } => {
            // The file has nothing to add where both are given.
            let (agent, unusable) = match (&pins, &hub) {
                (Some(_), Some(_)) => (agent, None),
                _ => agent.or_default_file(),
            };
            if let Some(error) = unusable {
                // Closed taps must not wait until the file is mended.
                output::report(format_args!(
                    "{error}; the default pins and hub are released instead, unless --pins and --hub name others"
                ));
            }
            let hub = agent.hub(hub)?;
            release::run(agent.pins(pins.as_deref())?.as_deref(), &hub, force, &mut out)?;
        }
        Verb::Pages { dir } => pages::write(Cli::command(), &dir)?,
        Verb::LibvirtHook(arguments) => hook::run(&arguments),
        Verb::Explain(arguments) => {
            let json = arguments.json;
            let explained = arguments.question().and_then(|question| explain::run(&question, json, &mut out));
            return flushed(explained.map(|()| Exit::Done), out);
        }
        Verb::Export { form, records, dir, config } => {
            let limits = configured(config.as_deref())?.record_limits();
            let exported = export::run(form.into(), &records, &limits, &dir, &mut out);
            return flushed(exported.map(|()| Exit::Done), out);
        }
        Verb::Check { dir, paths, config, json } => {
            let config = configured(config.as_deref())?;
            let (limits, hub) = (config.record_limits(), &*config.hub);
            let checked = match json {
                true => check::run_json(&dir, &limits, hub, paths, &mut out),
                false => check::run(&dir, &limits, hub, paths, &mut out, &mut output::stderr()),
            };
            return flushed(checked.map(Into::into), out);
        }
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// Writes what is left, even if the verb failed.
fn flushed(done: anyhow::Result<Exit>, mut out: impl io::Write) -> anyhow::Result<Exit> {
    out.flush().map_err(Into::into).and(done)
}

#[cfg(test)]
mod tests {
    use super::{advised, command};
    use anyhow::Context as _;
    use metadata_user::config::Config;
    use metadata_user::output::described;

    #[test]
    fn doctor_is_advised_unless_it_would_find_nothing() {
        let read_only = metadata_common::run::unit_hint(&std::io::ErrorKind::ReadOnlyFilesystem.into());
        for (text, is_advised) in [
            ("cannot attach tap0".to_owned(), true),
            (format!("cannot make /srv/run{read_only}"), false),
            ("another xdp-imds runs: take over from it with --takeover".to_owned(), false),
        ] {
            assert_eq!(advised(text.clone()).contains("xdp-imds doctor"), is_advised, "{text}");
        }
    }

    #[test]
    fn unregister_is_another_word_for_rm() {
        let found = command().try_get_matches_from(["xdp-imds", "unregister", "web-1"]).expect("a verb");
        assert_eq!(found.subcommand_name(), Some("rm"));
    }

    #[test]
    fn a_cause_appears_once() {
        let error = Config::read("/nowhere".as_ref()).context("starting").expect_err("there is no such file");
        let cause = "No such file or directory (os error 2)";
        assert_eq!(described(&error), format!("starting: cannot read the configuration /nowhere: {cause}"));
    }
}
