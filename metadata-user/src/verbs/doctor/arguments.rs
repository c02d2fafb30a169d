//! The options of `xdp-imds doctor`: those of `serve` that say what to look at.

use std::path::PathBuf;

use super::Question;
use crate::config::{self, Config, ConfigError, PortSpec};
use metadata_steer::Mode;

/// What the exit codes mean.
pub const EXIT: &str = "\
One line a check: `ok`, `warn` (it works, but not as well as it might, or was not found out) or
`FAIL` (serving would fail, at once or for one port), with what was found, what was expected and
what to do.

Exit code: 0 when nothing failed, 1 when something did, 2 when the options are wrong.";

/// The options of `xdp-imds doctor`.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// The agent's configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A port to look at besides those that configuration and records name; repeat for more.
    #[arg(long = "port", value_name = "IFNAME[@NETNS]")]
    ports: Vec<PortSpec>,
    /// Directory of VM records, or one such file.
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    /// The agent's --state.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// The agent's --pins.
    #[arg(long, value_name = "DIR")]
    pins: Option<PathBuf>,
    /// As the agent's.
    #[arg(long, conflicts_with = "pins")]
    no_pins: bool,
    /// The agent's --run.
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// The agent's --steer.
    #[arg(long, value_name = "MODE", value_enum)]
    steer: Option<Mode>,
    /// The agent's --hub.
    #[arg(long, value_name = "NAME")]
    hub: Option<String>,
    /// The agent's --workers.
    #[arg(long, value_name = "N", value_parser = config::workers)]
    workers: Option<u32>,
    /// Write one JSON document instead of lines.
    #[arg(long)]
    json: bool,
}

impl Arguments {
    /// What they ask.
    #[must_use]
    pub fn question(self) -> Question {
        let (file, json) = (self.config.clone(), self.json);
        Question { config: self.config().map_err(|error| error.to_string()), file, json }
    }

    fn config(self) -> Result<Config, ConfigError> {
        let mut config = self.config.as_deref().map(Config::read).transpose()?.unwrap_or_default();
        config.ports.extend(self.ports);
        config.records = self.records.or(config.records);
        config.state = self.state.or(config.state);
        config.pins = if self.no_pins { None } else { self.pins.or(config.pins) };
        config.run = self.run.unwrap_or(config.run);
        config.steer = self.steer.unwrap_or(config.steer);
        config.hub = self.hub.unwrap_or(config.hub);
        config.workers = self.workers.unwrap_or(config.workers);
        config.validate()?;
        Ok(config)
    }
}
