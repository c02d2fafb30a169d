//! Renders and lints the Helm chart with Helm's own engine.

use super::python::Tools;
use super::{documents, title};
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

/// The chart's directory, relative to the top of the project.
pub(crate) const CHART: &str = "deploy/helm/xdp-imds";
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

/// Returns the messages of `helm lint --strict`, and a finding if Helm does not judge values by the schema.
pub(super) fn lint(python: &Tools) -> Result<Vec<String>> {
    let mut input = chart()?;
    input["values"] = json!({});
    let output = python.run(SCRIPT, &input)?;
    let messages = output["lint"].as_array().cloned().unwrap_or_default();
    let mut found: Vec<_> = messages.iter().map(|message| format!("helm lint: {message}")).collect();
    input["values"] = json!({"unheardOf": 1});
    match python.run(SCRIPT, &input) {
        Err(error) if format!("{error:#}").contains("unheardOf") => {}
        Err(error) => return Err(error),
        Ok(_) => found.push("Helm renders the chart with an unknown value".to_owned()),
    }
    Ok(found)
}

/// Returns the places of `Chart.yaml` that name another version than this one.
pub(super) fn versions() -> Result<Vec<String>> {
    let text = fs::read_to_string(shell::top().join(CHART).join("Chart.yaml"))?;
    let chart: Value = serde_yaml::from_str(&text)?;
    let version = env!("CARGO_PKG_VERSION");
    let image = format!("image: ghcr.io/xdp-imds/xdp-imds:{version}\n");
    let images = chart["annotations"]["artifacthub.io/images"].as_str().unwrap_or_default();
    let is_right = [chart["version"] == version, chart["appVersion"] == version, images.contains(&image)];
    let places = ["version", "appVersion", "annotations.artifacthub.io/images"];
    let wrong = places.iter().zip(is_right).filter(|(_, is_right)| !is_right);
    Ok(wrong.map(|(place, _)| format!("Chart.yaml: {place} is not of version {version}")).collect())
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
