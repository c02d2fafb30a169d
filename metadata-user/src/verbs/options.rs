//! Options that `serve` and `doctor` share, so that `doctor` checks what the agent would use.

use std::path::{Path, PathBuf};

use crate::config::{self, Config, ConfigError, PortSpec};
use metadata_steer::SteeringMode;

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

    /// These options; without any, those of the service, whose unit and pods read [`DEFAULT_FILE`], if there is one.
    #[must_use]
    pub fn or_default_file(self) -> Self {
        self.or_file(Path::new(DEFAULT_FILE))
    }

    /// A file that this user may not see counts as there, so that reading it gives the reason.
    fn or_file(self, file: &Path) -> Self {
        if self == Self::default() && file.try_exists().unwrap_or(true) {
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

#[cfg(test)]
mod tests {
    use super::ConfigOverrides;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_default_file_that_cannot_be_looked_at_is_not_taken_for_absent() {
        let room = tempfile::tempdir().expect("a directory");
        let file = room.path().join("config.yaml");
        let chosen = || ConfigOverrides::default().or_file(&file).config.is_some();
        assert!(!chosen(), "there is none");
        std::fs::write(&file, "").expect("written");
        assert!(chosen(), "it is there");
        // As root every directory can be searched; a loop of links fails for everybody.
        std::fs::remove_file(&file).expect("removed");
        symlink(&file, &file).expect("a link");
        assert!(chosen(), "whether it is there cannot be told");
    }
}
