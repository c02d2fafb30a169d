//! Configurations and records that README and book show are ones that the agent takes.

use super::markdown::{Page, SOURCE};
use crate::shell;
use anyhow::{Context as _, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A record that is good, for the verb that reads a configuration.
const RECORD: &str = "tests/vectors/record.yaml";

/// What a block of YAML is.
enum Sample {
    /// Kubernetes' objects, which `cargo xtask manifests` judges, and what its tools read.
    Foreign,
    /// A VM's record.
    Record,
    /// The agent's configuration.
    Config,
}

/// What `xdp-imds check` has to say of them.
pub(super) fn findings(pages: &[Page], agent: &Path) -> Result<Vec<String>> {
    let room = tempfile::tempdir()?;
    let file = room.path().join("sample.yaml");
    let mut findings = Vec::new();
    for page in
        pages.iter().filter(|page| page.path.starts_with(SOURCE) || page.path == Path::new("README.md"))
    {
        for block in page.blocks().into_iter().filter(|block| block.language == "yaml") {
            let mut check = Command::new(agent);
            check.arg("check");
            match sample(&block.text) {
                Sample::Foreign => continue,
                Sample::Record => check.arg(&file),
                Sample::Config => check.arg(shell::top().join(RECORD)).arg("--config").arg(&file),
            };
            fs::write(&file, &block.text)?;
            let output = check.output().with_context(|| format!("cannot run {}", agent.display()))?;
            if !output.status.success() {
                let reason = String::from_utf8_lossy(&output.stderr);
                findings.push(format!("{}: {}", page.at(block.line), reason.trim()));
            }
        }
    }
    Ok(findings)
}

fn sample(text: &str) -> Sample {
    let has = |start: &str| text.lines().any(|line| line.starts_with(start));
    if has("apiVersion:") || has("resources:") {
        Sample::Foreign
    } else if has("schema: vmrecord/") {
        Sample::Record
    } else {
        Sample::Config
    }
}
