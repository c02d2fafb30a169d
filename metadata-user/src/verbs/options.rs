//! The options that say what an agent serves and with what: `serve` takes them, and `doctor`, which looks at the same.

use std::path::{Path, PathBuf};

use crate::config::{self, Config, ConfigError, PortSpec};
use metadata_steer::Mode;

/// Options that win over the configuration file.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
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
    /// Directory of what outlives the agent (token keys, one-shot passwords, guest attributes), made if need be;
    /// /var/lib/xdp-imds by default.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Directory on a bpffs below which links and maps are pinned, so that ports stay closed while no agent runs and the
    /// next one goes on with them; /sys/fs/bpf/xdp-imds by default. Two agents on a node need two.
    #[arg(long, value_name = "DIR")]
    pins: Option<PathBuf>,
    /// Pin nothing: when the agent ends, taps are as if there never was one.
    #[arg(long, conflicts_with = "pins")]
    no_pins: bool,
    /// Directory of the sockets by which the running agent is reached, made if need be; /run/xdp-imds by default. Two
    /// agents on a node need two.
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// By which program taps are steered [default: auto].
    #[arg(long, value_name = "MODE", value_enum)]
    steer: Option<Mode>,
    /// Prefix of the hub's device names; two agents in one namespace need two.
    #[arg(long, value_name = "NAME")]
    hub: Option<String>,
    /// Threads that answer guests [default: 1].
    #[arg(long, value_name = "N", value_parser = config::workers)]
    workers: Option<u32>,
}

impl Options {
    /// The configuration file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// The configuration in the file, or the default, with these options in it. It is still to be validated.
    ///
    /// # Errors
    /// The file cannot be read or is none.
    pub fn config(self) -> Result<Config, ConfigError> {
        let mut config = self.config.as_deref().map(Config::read).transpose()?.unwrap_or_default();
        config.ports.extend(self.ports);
        config.records = self.records.or(config.records);
        config.state = self.state.or(config.state);
        config.pins = if self.no_pins { None } else { self.pins.or(config.pins) };
        config.run = self.run.unwrap_or(config.run);
        config.steer = self.steer.unwrap_or(config.steer);
        config.hub = self.hub.unwrap_or(config.hub);
        config.workers = self.workers.unwrap_or(config.workers);
        Ok(config)
    }
}
