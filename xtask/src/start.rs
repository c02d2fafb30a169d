//! Verbs that are programs of their own: built when they are asked for, and started in the place of this one.

use anyhow::{Context as _, Result, bail, ensure};
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The words of a verb, which only its program understands.
#[derive(clap::Args)]
pub(crate) struct Words {
    /// Options of the verb; see `cargo xtask VERB --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    pub(crate) words: Vec<OsString>,
}

/// A program beside this one.
pub(crate) struct Program {
    /// Its package, and its file.
    name: &'static str,
    /// Cargo's profile to build it by.
    profile: &'static str,
}

/// Guests, a node and the agent, with as little to compile as can be.
pub(crate) const DEMO: Program = Program { name: "xdp-imds-demo", profile: "demo" };
/// What uses the agent's own crates.
pub(crate) const LAB: Program = Program { name: "xdp-imds-lab", profile: "dev" };
/// What makes or checks files that are committed or released.
pub(crate) const MAKE: Program = Program { name: "xdp-imds-make", profile: "dev" };

/// Files that are built here.
const PROGRAMS: [&str; 4] = ["xdp-imds", DEMO.name, LAB.name, MAKE.name];
/// How a program is asked for help, or given an agent: then it needs none built.
const WITHOUT_AGENT: [&str; 3] = ["--help", "-h", "--agent"];

impl Program {
    /// Builds it and lets it take the place of this process, with this verb and these words.
    pub(crate) fn start(&self, verb: &str, words: &Words) -> Result<()> {
        let Words { words } = words;
        let directory = if self.profile == "dev" { "debug" } else { self.profile };
        let path = shell::target().join(directory).join(self.name);
        let build = self.build(verb, words);
        let is_built = |word: &&str| path.with_file_name(word).is_file();
        let all_built = build.iter().filter(|word| PROGRAMS.contains(word)).all(is_built);
        let mut cargo = shell::cargo(build);
        if all_built && !std::io::stderr().is_terminal() {
            // Cargo has little or nothing to do, and what a script reads is the verb's.
            cargo.arg("--quiet");
        }
        let status = cargo.status().context("cannot run cargo")?;
        ensure!(status.success(), "{} does not build: {status}", self.name);
        let mut command = Command::new(path);
        command.arg(verb).args(words);
        bail!("cannot start {}: {}", self.name, command.exec())
    }

    /// The words for Cargo that build it.
    fn build(&self, verb: &str, words: &[OsString]) -> Vec<&'static str> {
        let mut build = vec!["build", "--profile", self.profile, "--package", self.name, "--bin", self.name];
        let given = |word: &OsString| {
            let word = word.to_string_lossy();
            WITHOUT_AGENT.contains(&word.split('=').next().unwrap_or_default())
        };
        if verb == "demo" && !words.iter().any(given) {
            // In one call, so that what both use is compiled once; without what only clusters need.
            build.extend(["--package", "metadata-user", "--no-default-features", "--bin", "xdp-imds"]);
        }
        build
    }
}

#[cfg(test)]
mod tests {
    use super::{DEMO, LAB};
    use std::ffi::OsString;

    #[test]
    fn only_a_demo_that_is_given_no_agent_builds_one() {
        for (program, verb, line, expected) in [
            (DEMO, "demo", "", true),
            (DEMO, "demo", "--guests 5 --json", true),
            (DEMO, "demo", "--agent target/debug/xdp-imds", false),
            (DEMO, "demo", "--agent=target/debug/xdp-imds", false),
            (DEMO, "demo", "--help", false),
            (DEMO, "lab", "up", false),
            (LAB, "storm", "", false),
        ] {
            let words: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
            let built = program.build(verb, &words).contains(&"metadata-user");
            assert_eq!(built, expected, "{verb} {line}");
        }
    }
}
