//! `xdp-imds doctor`: finds what prevents a configuration from working on this node, and prints the remedies.
//!
//! # Overview
//!
//! `gather` collects [`Facts`], which are plain data, about the kernel, this process, directories, ports and the node.
//! It tests features of the kernel by using them. Nothing that it creates outlives this process. `checks` turns the
//! facts into [`Check`]s. `print` prints the checks as lines or JSON.
//!
//! A failed check names the reason and the remedy; serving would fail too, at the start or for one port. A warning means
//! that serving works with a restriction, or that a fact is unknown.

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

/// The input of the checks.
#[derive(Clone, Debug)]
pub struct Question {
    /// The agent's configuration, or the reason why it cannot be used.
    pub config: Result<Config, String>,
    /// The configuration file, if there is one.
    pub file: Option<PathBuf>,
    /// Write JSON instead of lines.
    pub json: bool,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// No problem.
    Ok,
    /// Serving works with a restriction, or the result is unknown.
    Warn,
    /// Serving would fail.
    Fail,
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The stable name of the check, such as `port.xdp`.
    pub name: &'static str,
    /// The port, directory or address, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The result.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// What was expected; `None` without a problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// The remedy; `None` without a problem.
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

/// Runs all checks and prints their results.
///
/// The exit code is 1 if a check failed, and 0 otherwise. Warnings do not change it.
///
/// # Errors
/// When the result cannot be written.
pub fn run(question: &Question, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let mut checks = vec![checks::configuration(question)];
    // If the configuration cannot be used, the checks use the default one.
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
