//! `cargo xtask manifests`: what is deployed, rendered and judged without a cluster.
//!
//! Each overlay of `deploy/kustomize` is rendered by kubectl and written to `target/manifests`; the Helm chart with the values
//! of the same name must render the same objects. Objects are held strictly to the schemas of three Kubernetes versions, and
//! kinds of others, with the examples, to what their projects publish. No role may name `secrets`, pods have the capabilities
//! of a list and no other, no node is selected by a value that comes and goes, and no default inside a list is left out.

mod chart;
mod compare;
mod drift;
mod kubernetes;
mod kustomize;
mod placement;
mod privileges;
mod published;
mod python;
mod roles;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize as _;
use serde_json::Value;
use std::fs;

/// No choices.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Overlays, and the chart's values that are to render the same.
const PAIRS: [(&str, Option<&str>); 4] = [
    ("kubevirt", None),
    ("libvirt-host", Some("values-libvirt-host.yaml")),
    ("openshift", Some("values-openshift.yaml")),
    ("everything", Some("values-everything.yaml")),
];

/// Runs the verb.
pub(crate) fn run(_: &Args) -> Result<()> {
    let out = shell::target().join("manifests");
    fs::create_dir_all(&out)?;
    let kubectl = kustomize::Kubectl::find()?;
    let python = python::Tools::install()?;
    let mut findings = Vec::new();
    for (overlay, values) in PAIRS {
        let text = kubectl.render(overlay)?;
        fs::write(out.join(overlay).with_extension("yaml"), &text)?;
        let objects = documents(&text).with_context(|| format!("the overlay {overlay}"))?;
        let of_chart = chart::render(&python, values)?;
        let mut found = compare::differences(&objects, &of_chart);
        let equal = if found.is_empty() { "the chart's are equal" } else { "the chart's DIFFER" };
        found.extend(roles::findings(&objects));
        found.extend(privileges::findings(&objects));
        found.extend(placement::findings(&objects));
        found.extend(drift::findings(&objects));
        let (own, others): (Vec<_>, Vec<_>) = objects.iter().cloned().partition(kubernetes::is_own);
        found.extend(kubernetes::judge(&python, &own)?);
        found.extend(kubernetes::lets_through(&python, &own)?);
        found.extend(published::judge(&others));
        println!(
            "{overlay}: {} objects, {equal}; {} held to Kubernetes {}, {} to what others publish",
            objects.len(),
            own.len(),
            kubernetes::VERSIONS.join(", "),
            others.len()
        );
        findings.extend(found.into_iter().map(|finding| format!("{overlay}: {finding}")));
    }
    findings.extend(chart::lint(&python)?);
    let examples = published::examples()?;
    println!("{} examples held to what KubeVirt publishes", examples.len());
    for (file, object) in examples {
        findings.extend(published::judge(&[object]).into_iter().map(|finding| format!("{file}: {finding}")));
    }
    for finding in &findings {
        eprintln!("FOUND {finding}");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

/// The objects of a YAML text, in its order.
fn documents(text: &str) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        match Value::deserialize(document)? {
            // An empty document, as a template leaves it that renders nothing.
            Value::Null => {}
            object => objects.push(object),
        }
    }
    Ok(objects)
}

/// What an object is called: its kind, namespace and name.
fn title(object: &Value) -> String {
    let part = |of: &Value| of.as_str().unwrap_or("-").to_owned();
    let metadata = &object["metadata"];
    format!("{} {}/{}", part(&object["kind"]), part(&metadata["namespace"]), part(&metadata["name"]))
}
