//! Options that name an agent or a guest, shared by the verbs that need one.

use std::path::{Path, PathBuf};

use metadata_common::run::DEFAULT_RUN;
use metadata_control::status::{self, ClientError};

use super::exit::{Exit, ExitError};
use crate::config::{Config, DEFAULT_PINS};

/// The ways to name a guest. `xdp-imds status --all` lists ports, and `xdp-imds ls` lists VMs.
pub const GUEST: &str = "PORT|MAC|VM";

/// The agent that a verb talks to.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Agent {
    /// The run directory with the agent's sockets [default: `run` of the configuration, or /run/xdp-imds].
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// The agent's configuration file, for its directories.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Agent {
    /// The run directory.
    ///
    /// # Errors
    /// The configuration cannot be read.
    pub fn run(&self) -> anyhow::Result<PathBuf> {
        match (&self.run, self.configured()?) {
            (Some(run), _) => Ok(run.clone()),
            (None, Some(config)) => Ok(config.run),
            (None, None) => Ok(DEFAULT_RUN.into()),
        }
    }

    /// Returns the directory of pins: `given`, the configuration's, the one that the agent in `--run` reports, or the
    /// default, in this order. Returns `None` if the agent pins nothing.
    ///
    /// # Errors
    /// The configuration cannot be read, or no agent answers in the run directory that alone was given.
    pub fn pins(&self, given: Option<&Path>) -> anyhow::Result<Option<PathBuf>> {
        match (given, &self.run, self.configured()?) {
            (Some(pins), _, _) => Ok(Some(pins.into())),
            (None, _, Some(config)) => Ok(config.pins),
            (None, Some(run), None) => {
                let answer = status::get(run, "/v1/status").map_err(|error| match error {
                    // The client's own advice, to start an agent, is not what a release is for.
                    ClientError::NoAgent { path, source } => {
                        let advice = "name the pins of an agent that has ended by --pins or --config";
                        let run = path.display();
                        let text =
                            format!("no agent serves with the run directory {run}: {source}; {advice}");
                        ExitError::new(Exit::NoAgent, text).into()
                    }
                    error => anyhow::Error::from(error),
                })?;
                Ok(serde_json::from_slice::<status::AgentStatus>(&answer)?.pins)
            }
            (None, None, None) => Ok(Some(DEFAULT_PINS.into())),
        }
    }

    /// Returns the prefix of the hub's device names: `given`, the configuration's or the default, in this order.
    ///
    /// # Errors
    /// The configuration cannot be read.
    pub fn hub(&self, given: Option<String>) -> anyhow::Result<String> {
        match given {
            Some(hub) => Ok(hub),
            None => Ok(self.configured()?.unwrap_or_default().hub),
        }
    }

    fn configured(&self) -> anyhow::Result<Option<Config>> {
        Ok(self.config.as_deref().map(Config::read).transpose()?)
    }
}

#[cfg(test)]
mod tests {
    use super::{Agent, DEFAULT_PINS, DEFAULT_RUN};
    use std::path::{Path, PathBuf};

    #[test]
    fn options_override_the_configuration_which_overrides_defaults() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("config.yaml");
        std::fs::write(&file, "run: /configured/run\npins: /configured/pins\n").expect("a file");
        let given = || Some(PathBuf::from("/given"));
        for (run, config, pins, expected_run, expected_pins) in [
            (None, None, None, DEFAULT_RUN, DEFAULT_PINS),
            (None, Some(&file), None, "/configured/run", "/configured/pins"),
            (given(), Some(&file), None, "/given", "/configured/pins"),
            (given(), Some(&file), given(), "/given", "/given"),
            (given(), None, given(), "/given", "/given"),
        ] {
            let agent = Agent { run, config: config.cloned() };
            assert_eq!(agent.run().expect("a directory"), Path::new(expected_run), "{agent:?}");
            let pins = agent.pins(pins.as_deref()).expect("a directory");
            assert_eq!(pins.as_deref(), Some(Path::new(expected_pins)), "{agent:?}");
        }
    }

    #[test]
    fn pins_are_unknown_without_an_agent_in_the_run_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let agent = Agent { run: Some(directory.path().into()), config: None };
        let error = agent.pins(None).expect_err("no agent listens there");
        let shown = format!("{error:#}");
        assert!(shown.contains("--pins") && shown.contains("no agent serves"), "{shown}");
        assert!(!shown.contains("xdp-imds serve"), "the remedy of another verb: {shown}");
    }
}
