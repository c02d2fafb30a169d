//! Options that verbs share: those of `serve` and `doctor`, so that `doctor` checks what the agent would use, those that
//! name an agent or a guest, and the record of one file.

use anyhow::{Context as _, bail};
use metadata_common::run::DEFAULT_RUN;
use metadata_content::record::{Record, RecordLimits, Warning};
use metadata_control::status::{self, ClientError};
use metadata_feed::directory::{self, LoadedFile};
use metadata_steer::SteeringMode;
use std::path::{Path, PathBuf};

use super::{Exit, ExitError};
use crate::config::{self, Config, ConfigError, DEFAULT_PINS, PortSpec};

/// The configuration that the packages and the manifests install.
pub const DEFAULT_FILE: &str = "/etc/xdp-imds/config.yaml";

/// Options that override the configuration file.
#[derive(clap::Args, Clone, Debug, Default, PartialEq)]
pub struct ConfigOverrides {
    /// Directory of VM records, one file per VM.
    ///
    /// The agent watches it: write a file elsewhere, then rename it into this directory.
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    /// A tap to attach to, and the MAC of its guest; repeat for more.
    ///
    /// Taps that records name (`network.nics[].port`) need no option. A tap that does not exist yet is attached when it
    /// appears.
    #[arg(long = "port", value_name = "IFNAME[@NETNS][=MAC]")]
    ports: Vec<PortSpec>,
    /// Configuration file (YAML). Options override it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the state that outlives the agent [default: /var/lib/xdp-imds].
    ///
    /// It holds token keys, one-shot passwords and guest attributes. It is created if it is missing.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Directory on a bpffs in which links and maps are pinned [default: /sys/fs/bpf/xdp-imds].
    ///
    /// With pins, ports stay closed while no agent runs, and the next agent inherits them. Each agent of a node needs
    /// its own directory.
    #[arg(long, value_name = "DIR")]
    pins: Option<PathBuf>,
    /// Pin nothing: taps pass all frames when the agent ends.
    #[arg(long, conflicts_with = "pins")]
    no_pins: bool,
    /// Directory of the running agent's sockets [default: /run/xdp-imds].
    ///
    /// It is created if it is missing. Each agent of a node needs its own.
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// The program that steers taps [default: auto].
    #[arg(long, value_name = "MODE", value_enum)]
    steer: Option<SteeringMode>,
    /// Prefix of the hub's device names [default: imds].
    ///
    /// Each agent of a namespace needs its own.
    #[arg(long, value_name = "NAME")]
    hub: Option<String>,
    /// Threads that answer guests [default: one for each 32 CPUs].
    #[arg(long, value_name = "N", value_parser = config::workers)]
    workers: Option<u32>,
}

impl ConfigOverrides {
    /// The configuration file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// Whether an option says what to serve.
    #[must_use]
    pub fn names_source(&self) -> bool {
        self.config.is_some() || self.records.is_some() || !self.ports.is_empty()
    }

    /// These options; if none says what to serve, they override the configuration of the service, whose unit and pods
    /// read [`DEFAULT_FILE`], if there is one.
    #[must_use]
    pub fn or_default_file(self) -> Self {
        self.or_file(Path::new(DEFAULT_FILE))
    }

    /// A file that this user may not see counts as there, so that reading it gives the reason.
    fn or_file(self, file: &Path) -> Self {
        if !self.names_source() && file.try_exists().unwrap_or(true) {
            return Self { config: Some(file.into()), ..self };
        }
        self
    }

    /// Returns the configuration of the file, or the default one, with these options applied. The caller validates it.
    ///
    /// # Errors
    /// The file cannot be read, or is not a configuration.
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

// Options that name an agent or a guest, shared by the verbs that need one.

/// The ways to name a guest. `xdp-imds status --all` lists ports, and `xdp-imds ls` lists VMs.
pub const GUEST: &str = "PORT|MAC|VM";

/// The agent that a verb talks to.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Agent {
    /// The run directory with the agent's sockets [default: `run` of the configuration, or /run/xdp-imds].
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,
    /// The agent's configuration file, which names its directories.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Agent {
    /// This agent; if no option names one, that of the service, whose unit and pods read [`DEFAULT_FILE`], if there is
    /// one. If that file cannot be used, it stays unused, and the reason is returned too.
    #[must_use]
    pub fn or_default_file(self) -> (Self, Option<ConfigError>) {
        self.or_file(Path::new(DEFAULT_FILE))
    }

    fn or_file(self, file: &Path) -> (Self, Option<ConfigError>) {
        if self.run.is_some() || self.config.is_some() || !file.try_exists().unwrap_or(true) {
            return (self, None);
        }
        match Config::read(file) {
            Ok(_) => (Self { config: Some(file.into()), ..self }, None),
            Err(error) => (self, Some(error)),
        }
    }

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
                        let advice = "use --pins or --config to name the pins of an agent that has ended";
                        let run = path.display();
                        let text = format!("no agent runs with the run directory {run}: {source}; {advice}");
                        ExitError::new(Exit::NoAgent, text).into()
                    }
                    error => anyhow::Error::from(error),
                })?;
                Ok(serde_json::from_slice::<status::AgentStatus>(&answer)?.pins)
            }
            (None, None, None) => Ok(Some(DEFAULT_PINS.into())),
        }
    }

    /// Returns the prefix of the hub's device names: `given` if there is one, then that of the configuration, then the
    /// default.
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

// The record that a verb takes from one file.

/// Reads a record and the files that it names, within `limits`.
///
/// # Errors
/// The path is not a file, or the record is invalid.
pub(super) fn load(path: &Path, limits: &RecordLimits) -> anyhow::Result<(Record, Vec<Warning>)> {
    Ok(load_file(path, limits)?.record?)
}

/// Reads a record and the files it names, with what is missing of them.
///
/// # Errors
/// There is no such file.
pub(super) fn load_file(path: &Path, limits: &RecordLimits) -> anyhow::Result<LoadedFile> {
    let shown = path.display();
    let reading = || format!("cannot read the record {shown}");
    if std::fs::metadata(path).with_context(reading)?.is_dir() {
        bail!("expected the file of one record, found the directory {shown}; name a file in it");
    }
    let (dir, names) = directory::files(path)?;
    let loaded = names.first().and_then(|name| directory::load(&dir, name, limits));
    // It was there a moment ago.
    loaded.with_context(reading)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{Agent, ConfigOverrides, DEFAULT_PINS, DEFAULT_RUN};
    use std::os::unix::fs::symlink;

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
        assert!(shown.contains("--pins") && shown.contains("no agent runs"), "{shown}");
        assert!(!shown.contains("xdp-imds serve"), "the remedy of another verb: {shown}");
    }

    #[test]
    fn a_release_without_options_has_the_pins_and_the_hub_of_the_service() {
        let room = tempfile::tempdir().expect("a directory");
        let path = |name: &str, text: &str| {
            let file = room.path().join(name);
            std::fs::write(&file, text).expect("written");
            file
        };
        let service = path("service", "pins: /service/pins\nhub: service\n");
        let other = path("other", "pins: /other/pins\nhub: other\n");
        let (broken, absent) = (path("broken", "pins: [\n"), room.path().join("absent"));
        for (file, config, pins, hub, expected) in [
            (&service, None, None, None, ("/service/pins", "service", true)),
            (&service, Some(&other), None, None, ("/other/pins", "other", true)),
            (&service, None, Some("/given"), None, ("/given", "service", true)),
            (&service, None, None, Some("given"), ("/service/pins", "given", true)),
            (&absent, None, None, None, (DEFAULT_PINS, "imds", true)),
            (&broken, Some(&other), None, None, ("/other/pins", "other", true)),
            (&broken, None, None, None, (DEFAULT_PINS, "imds", false)),
            (&broken, None, Some("/given"), None, ("/given", "imds", false)),
        ] {
            let (agent, unusable) = Agent { run: None, config: config.cloned() }.or_file(file);
            let found = agent.pins(pins.map(Path::new)).expect("a directory").expect("it pins");
            let hub = agent.hub(hub.map(str::to_owned)).expect("a prefix");
            let found = (found.to_str().expect("text"), &*hub, unusable.is_none());
            assert_eq!(found, expected, "{file:?} {agent:?}");
        }
        // The agent in a run directory says what its pins are.
        let (agent, _) = Agent { run: Some("/given".into()), config: None }.or_file(&service);
        assert_eq!(agent.config, None);
    }

    #[test]
    fn a_default_file_that_cannot_be_looked_at_is_not_taken_for_absent() {
        let room = tempfile::tempdir().expect("a directory");
        let file = room.path().join("config.yaml");
        let chosen = || ConfigOverrides::default().or_file(&file).config.is_some();
        assert!(!chosen(), "there is none");
        std::fs::write(&file, "").expect("written");
        assert!(chosen(), "it is there");
        let path = || Some(room.path().to_owned());
        let with_state = ConfigOverrides { state: path(), ..ConfigOverrides::default() }.or_file(&file);
        assert_eq!((with_state.config.as_deref(), with_state.state), (Some(&*file), path()));
        let with_records = ConfigOverrides { records: path(), ..ConfigOverrides::default() }.or_file(&file);
        assert_eq!(with_records.config, None, "the option says what to serve");
        // As root every directory can be searched; a loop of links fails for everybody.
        std::fs::remove_file(&file).expect("removed");
        symlink(&file, &file).expect("a link");
        assert!(chosen(), "whether it is there cannot be told");
    }
}
