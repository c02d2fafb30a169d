//! Programs the lab calls, and the Debian packages they come in.

use crate::Root;
use anyhow::{Result, bail};
use std::process::Command;

/// A program and its package.
pub type Tool = (&'static str, &'static str);

/// What namespaces and pretend guests need.
pub const LAB: &[Tool] = &[("ip", "iproute2"), ("curl", "curl"), ("ping", "iputils-ping")];

/// Servers a boot storm is measured against. Debian starts them when they are installed and at each boot, so that is
/// left to whoever owns the host.
const PEERS: &[Tool] = &[("nginx", "nginx-light"), ("haproxy", "haproxy")];

/// What of these servers is missing, and how it is had.
pub fn missing_peers() -> Option<String> {
    let missing: Vec<_> = PEERS.iter().filter(|(program, _)| crate::which(program).is_none()).collect();
    let list = |of: fn(&Tool) -> &'static str, between: &str| {
        missing.iter().map(|tool| of(tool)).collect::<Vec<_>>().join(between)
    };
    let (programs, packages) = (list(|tool| tool.0, ", "), list(|tool| tool.1, " "));
    (!missing.is_empty()).then(|| {
        format!(
            "missing: {programs}. On Debian: `apt-get install --no-install-recommends {packages}`, and as it starts \
             them: `systemctl disable --now {}`",
            list(|tool| tool.0, " ")
        )
    })
}

/// Installs what is missing where apt-get and root are at hand; else says what to run.
pub fn ensure(tools: &[Tool]) -> Result<()> {
    let missing: Vec<_> = tools.iter().filter(|(program, _)| crate::which(program).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let programs: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
    let mut packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    let (programs, listed) = (programs.join(", "), packages.join(" "));
    let Some(apt) = crate::which("apt-get") else {
        bail!("missing: {programs}. On Debian they come in the packages {listed}; install their like here");
    };
    let as_root = |words: &[&str]| {
        let mut command = match crate::root() {
            Root::Already => Command::new(&apt),
            Root::Sudo(sudo) => {
                let mut command = Command::new(sudo);
                command.arg(&apt);
                command
            }
            Root::No(reason) => {
                bail!("missing: {programs}; {reason}. As root, run:\n  apt-get install -y {listed}")
            }
        };
        crate::run(command.args(words).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let mut install = vec!["install", "-y", "--no-install-recommends"];
    install.extend(packages);
    // Fresh machines have no package lists yet.
    as_root(&install).or_else(|_| as_root(&["update"]).and_then(|()| as_root(&install)))
}
