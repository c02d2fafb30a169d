//! Builds the agent and the test programs, without symbols, because they lie in the guest's memory.

use crate::kernel::Architecture;
use anyhow::{Context as _, Result, ensure};
use shell::architecture::Architecture as Processor;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The programs of one architecture.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) agent: PathBuf,
    /// Test programs by the name of their file in `tests/`.
    pub(crate) tests: Vec<(String, PathBuf)>,
}

/// Settings of the build for arm64. The programs lie in the guest's memory, so they have no symbols: as flags, because a
/// profile would build macros and build scripts again. Tests and agent share dependencies at one level of optimisation.
const SETTINGS: [(&str, &str); 3] = [
    ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUSTFLAGS", "-Cdebuginfo=none -Cstrip=symbols"),
    ("CARGO_PROFILE_TEST_OPT_LEVEL", "0"),
    ("CARGO_INCREMENTAL", "0"),
];
/// The agent and the tests in one build, without what only clusters need, so that dependencies are built once.
const WITHOUT_CLUSTER: [&str; 8] = [
    "build",
    "--package",
    "metadata-user",
    "--package",
    "xdp-imds-tests",
    "--no-default-features",
    "--features",
    "xdp-imds-tests/privileged",
];

/// Builds the agent and these test programs.
pub(crate) fn build(architecture: Architecture, names: &[&str], work: &Path) -> Result<Programs> {
    let tests = names.iter().flat_map(|name| ["--test", name]);
    let built = match architecture {
        // With the features of the whole workspace, so that nothing is built again that `cargo xtask test` built.
        Architecture::Amd64 => {
            let mut agent = shell::tested_agent();
            let mut test = shell::cargo(["test", "--no-run", "--workspace"]);
            [executables(&mut agent)?, executables(test.args(tests))?].concat()
        }
        Architecture::Arm64 => {
            Processor::Arm.prepare()?;
            let mut cargo = shell::cargo(WITHOUT_CLUSTER);
            executables(
                cargo
                    .args(["--target", Processor::Arm.triple(), "--bin", "xdp-imds"])
                    .args(tests)
                    .envs(SETTINGS),
            )?
        }
    };
    let find = |name: &str| {
        let found = built.iter().find(|(of, _)| of == name);
        found.map(|(_, path)| path.clone()).with_context(|| format!("Cargo built no program `{name}`"))
    };
    let directory = work.join(format!("programs-{}", architecture.debian()));
    fs::create_dir_all(&directory)?;
    let ready = |name: &str| match architecture {
        Architecture::Amd64 => strip(&find(name)?, &directory.join(name)),
        Architecture::Arm64 => find(name),
    };
    let tests = names.iter().map(|&name| Ok((name.to_owned(), ready(name)?))).collect::<Result<_>>()?;
    Ok(Programs { agent: ready("xdp-imds")?, tests })
}

/// Runs Cargo, and returns the names and paths of the programs it built.
fn executables(cargo: &mut Command) -> Result<Vec<(String, PathBuf)>> {
    cargo.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = cargo.spawn().context("cannot run cargo")?;
    let output = child.stdout.take().context("the output of cargo is piped")?;
    let mut built = Vec::new();
    for line in BufReader::new(output).lines() {
        built.extend(executable(&line?));
    }
    let status = child.wait()?;
    ensure!(status.success(), "cargo: {status}");
    Ok(built)
}

/// Reads a message of Cargo; `None` unless it tells of a program.
fn executable(line: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let path = message["executable"].as_str()?;
    Some((message["target"]["name"].as_str()?.to_owned(), path.into()))
}

fn strip(from: &Path, to: &Path) -> Result<PathBuf> {
    shell::tools::ensure(&[("strip", "binutils")])?;
    testbed::netns::run(Command::new("strip").arg("-o").args([to, from]))?;
    Ok(to.to_owned())
}

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn only_messages_of_programs_have_a_path() {
        for (line, expected) in [
            (
                r#"{"reason":"compiler-artifact","target":{"name":"doctor"},"executable":"/t/doctor-1"}"#,
                Some("doctor"),
            ),
            (r#"{"reason":"compiler-artifact","target":{"name":"libc"},"executable":null}"#, None),
            (r#"{"reason":"build-finished","success":true}"#, None),
            ("no JSON", None),
        ] {
            assert_eq!(executable(line).map(|(name, _)| name).as_deref(), expected, "{line}");
        }
    }
}
