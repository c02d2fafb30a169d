//! The programs that labs need, and the Debian packages that have them.

use crate::Root;
use anyhow::{Result, bail};
use std::process::Command;

/// A program and its package.
pub type Tool = (&'static str, &'static str);

/// The tools for namespaces and simulated guests.
pub const LAB: &[Tool] = &[("ip", "iproute2"), ("curl", "curl"), ("ping", "iputils-ping")];

/// Servers that `storm` compares the agent with. Debian starts them on installation and at each boot, so the owner of
/// the host installs them.
const PEERS: &[Tool] = &[("nginx", "nginx-light"), ("haproxy", "haproxy")];

/// Returns which of these servers are missing and how to install them; `None` if all are there.
pub fn missing_peers() -> Option<String> {
    let missing: Vec<_> = PEERS.iter().filter(|(program, _)| crate::which(program).is_none()).collect();
    let list = |of: fn(&Tool) -> &'static str, between: &str| {
        missing.iter().map(|tool| of(tool)).collect::<Vec<_>>().join(between)
    };
    let (programs, packages) = (list(|tool| tool.0, ", "), list(|tool| tool.1, " "));
    (!missing.is_empty()).then(|| {
        format!(
            "missing: {programs}. On Debian, run `apt-get install --no-install-recommends {packages}`. It starts \
             them; stop them with `systemctl disable --now {}`",
            list(|tool| tool.0, " ")
        )
    })
}

/// Installs missing programs with apt-get as root. Where that cannot be done, the error says what to run.
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
        bail!(
            "missing: {programs}. On Debian they come in the packages {listed}; install the equivalent packages here"
        );
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
