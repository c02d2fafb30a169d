//! Checks that the agent accepts the configurations and records that README and book show.

use super::markdown::{Page, SOURCE};
use anyhow::{Context as _, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// A valid record: `xdp-imds check` reads a configuration only together with a record.
const RECORD: &str = "tests/vectors/record.yaml";

/// The kind of a YAML block.
enum Sample {
    /// Objects of Kubernetes, which `cargo xtask manifests` checks, and kustomizations.
    Foreign,
    /// A VM's record.
    Record,
    /// The agent's configuration.
    Config,
}

/// Returns the errors of `xdp-imds check` for each sample.
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
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
            let output = check.output().with_context(|| format!("cannot run {}", agent.display()))?;
            if !output.status.success() {
                let reason = String::from_utf8_lossy(&output.stderr);
                findings.push(format!("{}: {}", page.at(block.line), reason.trim()));
            }
        }
    }
    Ok(findings)
}

/// Finds fields that the configuration page does not show: those of the first table of its fields, and those of
/// `kubevirt`.
pub(super) fn unshown(pages: &[Page]) -> Vec<String> {
    let page =
        |name: &str| pages.iter().find(|page| page.path == Path::new(SOURCE).join("reference").join(name));
    let (Some(shown), Some(fields)) = (page("configuration.md"), page("configuration-fields.md")) else {
        return vec!["the pages of the configuration are missing".to_owned()];
    };
    let mut section = "";
    let mut findings = Vec::new();
    for line in fields.text.lines() {
        section = line.strip_prefix("## ").unwrap_or(section);
        let indent = match section {
            "" => "",
            "`kubevirt`" => "  ",
            _ => continue,
        };
        let Some((field, _)) = line.strip_prefix("| `").and_then(|row| row.split_once('`')) else { continue };
        let start = format!("{indent}{field}:");
        if !shown.text.lines().any(|line| line.starts_with(&start)) {
            findings.push(format!("{}: it does not show {start}", shown.path.display()));
        }
    }
    findings
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
