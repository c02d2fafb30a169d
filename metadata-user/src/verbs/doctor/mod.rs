//! `xdp-imds doctor`: what is wrong with this node for this configuration, and what to do.
//!
//! # The tour
//!
//! `gather` looks: at the kernel by using it, at this process, at directories, ports and the node. It changes
//! nothing that lasts; what a probe makes goes with this process. What it saw are [`Facts`], plain data. `checks` say
//! what they think of them, a [`Check`] each, and `print` shows those: a line each, or JSON.
//!
//! A check that fails says why and what to do. Serving would fail too, at once or for one port; a warning is about
//! what works, but not as well as it might or not for ever. Facts that could not be had make a warning where they
//! leave something open.

mod arguments;
mod checks;
mod facts;
mod gather;
mod print;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;

pub use arguments::{Arguments, EXIT};
pub use facts::{
    Capabilities, Directory, Facts, FileSystem, Found, Kernel, Kubevirt, Node, Pins, Port, Process, Records,
    Resources, Wanted,
};

use crate::config::Config;

/// What the doctor is asked to look at.
#[derive(Clone, Debug)]
pub struct Question {
    /// What the agent would run with, or why its configuration cannot be used.
    pub config: Result<Config, String>,
    /// The configuration file, to name it.
    pub file: Option<PathBuf>,
    /// Write JSON instead of lines.
    pub json: bool,
}

/// What one check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// It works, but not as well as it might, or not for ever; or it could not be found out.
    Warn,
    /// Serving would fail.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at, by a name that stays: `port.xdp`.
    pub name: &'static str,
    /// Which one, where there are several: a port, a directory, an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// What it came to.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What should have been found; of a check that is well, nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What to do; of a check that is well, nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, subject: None, status: Status::Ok, found: found.into(), expected: None, remedy: None }
    }

    fn warn(
        name: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (expected, remedy) = (Some(expected.into()), Some(remedy.into()));
        Self { status: Status::Warn, expected, remedy, ..Self::ok(name, found) }
    }

    fn fail(
        name: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { status: Status::Fail, ..Self::warn(name, found, expected, remedy) }
    }

    fn of(self, subject: impl std::fmt::Display) -> Self {
        Self { subject: Some(subject.to_string()), ..self }
    }
}

/// Looks at everything and writes what it came to.
///
/// The exit code is 0 when nothing failed, also with warnings, and 1 when something did.
///
/// # Errors
/// When the result cannot be written.
pub fn run(question: &Question, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let mut checks = vec![checks::configuration(question)];
    // With a configuration that cannot be used, the node is looked at for the default one.
    let config = question.config.clone().unwrap_or_default();
    checks.extend(checks::all(&gather::facts(&config)));
    if question.json {
        print::json(&checks, out)?
    } else {
        print::lines(&checks, out)?
    }
    let failed = checks.iter().any(|check| check.status == Status::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
