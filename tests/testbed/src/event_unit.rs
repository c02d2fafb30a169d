//! The unit by which a guest reacts to what its host announces, as the book's page of events installs it.

use anyhow::{Context as _, Result};
use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/src/operate/events.md");

/// The `#cloud-config` that the page shows.
///
/// # Errors
/// If the page shows none.
pub fn cloud_config() -> Result<&'static str> {
    let blocks = PAGE.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let found = blocks.into_iter().find(|block| block.starts_with("#cloud-config\n"));
    found.context("docs/src/operate/events.md has no block of YAML that starts with #cloud-config")
}

/// A file that the `#cloud-config` writes.
///
/// # Errors
/// If it writes no such file.
pub fn file(path: &str) -> Result<String> {
    let config: Value = serde_yaml::from_str(cloud_config()?)?;
    let mut files = config["write_files"].as_array().into_iter().flatten();
    let content = files.find(|file| file["path"] == path).and_then(|file| file["content"].as_str());
    Ok(content
        .with_context(|| format!("the #cloud-config of docs/src/operate/events.md writes no {path}"))?
        .to_owned())
}
