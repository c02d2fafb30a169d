//! `xdp-imds doctor`: finds what prevents a configuration from working on this node, and prints the remedies.
//!
//! # Overview
//!
//! 1. `gather` collects [`Facts`] about the kernel, this process, directories, ports and the node. It tests a kernel
//!    feature by using it. Nothing that it creates outlives this process.
//! 2. `checks` compares the facts with the needs of the agent and returns [`Check`]s.
//! 3. `print` prints the checks as lines or JSON.
//!
//! A check fails if the agent would not start, or would not serve a port. A check warns if the agent would serve with a
//! restriction, or if a fact is unknown. In both cases it names the reason and the remedy.

mod checks;
mod facts;
mod gather;
mod print;

pub use facts::{
    Capabilities, ConfigFacts, Directory, ExposedFile, Facts, FileSystem, Kernel, NodeFacts, PathFacts,
    PinFacts, PortFacts, ProcessFacts, RecordFacts, Resources,
};

use std::io::Write;
use std::path::{Path, PathBuf};

pub use metadata_feed::check::{Check, CheckStatus};

use super::Exit;
use crate::agent::preflight::{self, ConfigRefusal};
use crate::config::Config;
use crate::verbs::options::{ConfigOverrides, DEFAULT_FILE};

/// Where the unit of the packages is, and where one that was installed by hand is.
const UNITS: [&str; 2] = ["/usr/lib/systemd/system/xdp-imds.service", "/etc/systemd/system/xdp-imds.service"];

/// The configuration to check, and how to print the result.
#[derive(Clone, Debug)]
pub struct DoctorRequest {
    /// The agent's configuration, or the reason why it cannot be used.
    pub config: Result<Config, String>,
    /// The configuration file, if there is one.
    pub file: Option<PathBuf>,
    /// Neither options nor the file of the service say what to check.
    pub lacks_file: bool,
    /// Write JSON instead of lines.
    pub json: bool,
}

fn checks(question: &DoctorRequest) -> Vec<Check> {
    let process = gather::process();
    // Another user's view of directories and programs is no statement about the agent.
    if let Some(check) = checks::user(&process) {
        return vec![check];
    }
    let mut checks = vec![checks::configuration(question)];
    // What `serve` refuses before it changes anything.
    let refusals = question.config.as_ref().map(preflight::refusals).unwrap_or_default();
    // Without a file no source is configured, which the first check says.
    let refusals = refusals
        .into_iter()
        .filter(|refusal| !(question.lacks_file && refusal.name == preflight::NO_SOURCES));
    checks.extend(
        refusals.map(|ConfigRefusal { name, found, expected, remedy }| {
            Check::fail(name, found, expected, remedy)
        }),
    );
    // The service's file is for the service, and doctor sees what its unit hides.
    if question.file.as_deref() == Some(Path::new(DEFAULT_FILE))
        && UNITS.iter().any(|unit| Path::new(unit).exists())
    {
        checks.extend(question.config.iter().flat_map(checks::hidden));
    }
    // Without a usable configuration, the other checks use the default configuration.
    let config = question.config.clone().unwrap_or_default();
    // What it names is then unknown, and not absent.
    let is_known = |check: &Check| question.config.is_ok() || !matches!(check.name, "records" | "port");
    checks.extend(
        checks::all(&gather::facts(&config, question.file.as_deref(), process)).into_iter().filter(is_known),
    );
    checks
}

/// Runs all checks and prints their results.
///
/// A warning does not change the exit code.
///
/// # Errors
/// The results cannot be written to `out`.
pub fn run(question: &DoctorRequest, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let checks = checks(question);
    if question.json {
        print::json(&checks, out)?
    } else {
        print::lines(&checks, out)?
    }
    let failed = checks.iter().any(|check| check.status == CheckStatus::Fail);
    Ok(if failed { Exit::Failure } else { Exit::Done })
}

// The command line of `xdp-imds doctor`.

/// The text after the options in `doctor --help`. It explains the printed lines.
pub const LINES: &str = "\
Without options it checks /etc/xdp-imds/config.yaml, which the packages and manifests install, if there is one.

Each line shows the result of one check and the state found:
  ok    no problem
  warn  serving works with a restriction, or the result is unknown
  FAIL  serving would fail, at startup or for one port
A line with a problem also shows the state expected and the remedy. Warnings do not change the exit code.";

/// The options of `xdp-imds doctor`.
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    #[command(flatten)]
    options: ConfigOverrides,
    /// Print one JSON document, of the form `doctor/1`.
    #[arg(long)]
    json: bool,
}

impl DoctorArgs {
    /// Reads and validates the configuration.
    #[must_use]
    pub fn question(self) -> DoctorRequest {
        let is_default = self.options == ConfigOverrides::default();
        let options = self.options.or_default_file();
        let file = options.file().map(Into::into);
        let config = options.config().and_then(|config| config.validate().map(|()| config));
        let lacks_file = is_default && file.is_none();
        DoctorRequest { config: config.map_err(|error| error.to_string()), file, lacks_file, json: self.json }
    }
}
