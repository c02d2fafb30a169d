//! The `xdp-imds` command.

use std::io::{self, IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use metadata_user::config::{Config, PortSpec};
use metadata_user::{agent, check};
use tracing_subscriber::EnvFilter;

/// The instance metadata service of a hypervisor node.
///
/// An XDP program on each VM's tap steers packets for 169.254.169.254 to this agent, which answers with
/// what it computed from the VM's record. Who is asking is decided by the tap and the MAC, in the kernel.
#[derive(Parser)]
#[command(version, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    /// What to log: error, warn, info, debug, trace, or a tracing filter such as `info,metadata_user::steer=debug`.
    #[arg(long, global = true, env = "XDP_IMDS_LOG", default_value = "info", value_name = "FILTER")]
    log: EnvFilter,
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
  Look before serving: are the records valid, and what would each path answer?
      xdp-imds check ./records

In the guest:
      curl http://169.254.169.254/v1/meta-data";

#[derive(Subcommand)]
enum Verb {
    /// Own taps and serve their guests until SIGTERM. Needs root, or CAP_NET_ADMIN, CAP_BPF,
    /// CAP_PERFMON and (for taps in other namespaces) CAP_SYS_ADMIN.
    Serve(Serve),
    /// Validate the records in a directory and print what each path would answer. Needs no privilege.
    Check {
        /// Directory of VM records (*.yaml, *.yml or *.json, one VM each), or one such file.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

#[derive(Args)]
struct Serve {
    /// Directory of VM records, one VM a file; watched for changes (write elsewhere, then rename into it).
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    /// A tap to own, and the MAC of its guest; repeat for more. Records may name taps themselves
    /// (`network.nics[].port`), then none is needed here. A tap that is not there yet is attached when it appears.
    #[arg(long = "port", value_name = "IFNAME[@NETNS][=MAC]")]
    ports: Vec<PortSpec>,
    /// Configuration file (YAML); the options here win over it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serve Prometheus metrics at http://ADDR/metrics.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Prefix of the hub's device names; two agents in one namespace need two.
    #[arg(long, value_name = "NAME")]
    hub: Option<String>,
}

impl Serve {
    fn config(self) -> anyhow::Result<Config> {
        let mut config = match &self.config {
            Some(path) => Config::read(path)?,
            None => Config::default(),
        };
        config.ports.extend(self.ports);
        config.records = self.records.or(config.records);
        config.metrics = self.metrics.or(config.metrics);
        config.hub = self.hub.unwrap_or(config.hub);
        config.validate()?;
        anyhow::ensure!(
            config.records.is_some(),
            "no records to serve: give --records DIR, or `records:` in the configuration file"
        );
        Ok(config)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ansi = io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(cli.log)
        .with_writer(io::stderr)
        .with_ansi(ansi)
        .with_target(false)
        .init();
    let done = match cli.verb {
        Verb::Serve(serve) => {
            serve.config().and_then(|config| agent::serve(&config)).map(|()| ExitCode::SUCCESS)
        }
        Verb::Check { dir } => {
            let mut out = io::BufWriter::new(io::stdout().lock());
            check::run(&dir, &mut out, &mut io::stderr()).and_then(|findings| {
                out.flush()?;
                Ok(findings.into())
            })
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("xdp-imds: {error:#}");
        ExitCode::FAILURE
    })
}
