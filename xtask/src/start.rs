//! Builds the program of a verb and replaces this process by it.

use anyhow::{Context as _, Result, bail, ensure};
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The arguments of a verb, which only its program understands.
#[derive(clap::Args)]
pub(crate) struct Words {
    /// Options of the verb; see `cargo xtask VERB --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    pub(crate) words: Vec<OsString>,
}

/// A program beside this one.
pub(crate) struct Program {
    /// The name of its package and of its executable.
    name: &'static str,
    /// The Cargo profile that builds it.
    profile: &'static str,
}

/// Guests, a node and the agent, with few dependencies to compile.
pub(crate) const DEMO: Program = Program { name: "xdp-imds-demo", profile: "demo" };
/// Kernels in QEMU, with few dependencies to compile.
pub(crate) const KERNELS: Program = Program { name: "xdp-imds-kernels", profile: "dev" };
/// The verbs that use the agent's own crates.
pub(crate) const LAB: Program = Program { name: "xdp-imds-lab", profile: "dev" };
/// The verbs that run the agent on hypervisors.
pub(crate) const LOAD: Program = Program { name: "xdp-imds-load", profile: "dev" };
/// The verbs that make or check committed or released files.
pub(crate) const MAKE: Program = Program { name: "xdp-imds-make", profile: "dev" };

/// The executables that `start` may build.
const PROGRAMS: [&str; 6] = ["xdp-imds", DEMO.name, KERNELS.name, LAB.name, LOAD.name, MAKE.name];
/// Options with which a demo needs no agent built: a request for help, or the path of an agent.
const WITHOUT_AGENT: [&str; 3] = ["--help", "-h", "--agent"];

impl Program {
    /// Builds the program and replaces this process by it, with this verb and these arguments.
    pub(crate) fn start(&self, verb: &str, words: &Words) -> Result<()> {
        let Words { words } = words;
        let directory = if self.profile == "dev" { "debug" } else { self.profile };
        let path = shell::target().join(directory).join(self.name);
        let build = self.build(verb, words);
        let is_built = |word: &&str| path.with_file_name(word).is_file();
        let all_built = build.iter().filter(|word| PROGRAMS.contains(word)).all(is_built);
        let mut cargo = shell::cargo(build);
        if all_built && !std::io::stderr().is_terminal() {
            // Cargo has little or nothing to build, and a script wants only the verb's output.
            cargo.arg("--quiet");
        }
        let status = cargo.status().context("cannot run cargo")?;
        ensure!(status.success(), "{} does not build: {status}", self.name);
        let mut command = Command::new(path);
        command.arg(verb).args(words);
        bail!("cannot start {}: {}", self.name, command.exec())
    }

    /// Returns Cargo's arguments to build the program.
    fn build(&self, verb: &str, words: &[OsString]) -> Vec<&'static str> {
        let mut build = vec!["build", "--profile", self.profile, "--package", self.name, "--bin", self.name];
        let given = |word: &OsString| {
            let word = word.to_string_lossy();
            WITHOUT_AGENT.contains(&word.split('=').next().unwrap_or_default())
        };
        if verb == "demo" && !words.iter().any(given) {
            // One call compiles shared dependencies once. The demo needs no feature that only clusters use.
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
