//! Renders and lints the Helm chart with Helm's own engine.

use super::python::Tools;
use super::{documents, title};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

const CHART: &str = "deploy/helm/xdp-imds";
/// The script gets the chart's files as input, because it runs as a user that cannot read the tree.
const SCRIPT: &str = include_str!("chart.py");

/// Renders the chart with the values of a file, or with the chart's defaults, and returns its objects.
pub(super) fn render(python: &Tools, values: Option<&str>) -> Result<Vec<Value>> {
    let mut input = chart()?;
    input["values"] = match values {
        Some(name) => serde_yaml::from_str(&fs::read_to_string(shell::top().join(CHART).join(name))?)?,
        None => json!({}),
    };
    let rendered = python.run(SCRIPT, &input)?;
    let rendered: BTreeMap<String, String> = serde_json::from_value(rendered["rendered"].clone())?;
    let mut objects = Vec::new();
    for (path, text) in rendered.iter().filter(|(path, _)| path.ends_with(".yaml")) {
        objects.extend(documents(text).with_context(|| format!("{path} rendered:\n{text}"))?);
    }
    objects.sort_by_key(title);
    Ok(objects)
}

/// Returns the messages of `helm lint --strict`.
pub(super) fn lint(python: &Tools) -> Result<Vec<String>> {
    let mut input = chart()?;
    input["values"] = json!({});
    let output = python.run(SCRIPT, &input)?;
    let messages = output["lint"].as_array().cloned().unwrap_or_default();
    Ok(messages.iter().map(|message| format!("helm lint: {message}")).collect())
}

/// Reads the chart's files.
fn chart() -> Result<Value> {
    let top = shell::top().join(CHART);
    let mut files = BTreeMap::new();
    for directory in ["", "templates", "files"] {
        for entry in fs::read_dir(top.join(directory))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                let name = entry.file_name().into_string().ok().context("a file name is not UTF-8")?;
                let path = if directory.is_empty() { name } else { format!("{directory}/{name}") };
                files.insert(path, fs::read_to_string(entry.path())?);
            }
        }
    }
    Ok(json!({ "files": files }))
}
