//! `cargo xtask manifests`: renders the deployment manifests and checks them without a cluster.
//!
//! kubectl renders each overlay of `deploy/kustomize` to `target/manifests`. The Helm chart with the values of the same
//! name must render the same objects. Kubernetes' own kinds are checked strictly against the schemas of three
//! Kubernetes versions. Other kinds, and the examples, are checked against the schemas that their projects publish.
//!
//! The chart's values schema accepts the chart's own files and refuses a list of mistakes.
//!
//! Further rules: no role names `secrets`; containers have exactly the listed capabilities; no pod selects nodes by a
//! label value that changes; no default inside a list is omitted.

mod chart;
mod kubernetes;
mod kustomize;
mod placement;
mod privileges;
mod published;
mod python;
mod roles;
pub(crate) mod values;

use anyhow::{Context as _, Result, ensure};
pub(crate) use chart::CHART;
use serde_json::Value;
use std::fs;

/// The verb has no options.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The overlays, each with the chart's values file that must render the same objects. `None` stands for the chart's
/// defaults.
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
        let mut found = kustomize::differences(&objects, &of_chart);
        let equal = if found.is_empty() { "equal to the chart's" } else { "DIFFERENT from the chart's" };
        found.extend(roles::findings(&objects));
        found.extend(privileges::findings(&objects));
        found.extend(placement::findings(&objects));
        found.extend(kustomize::findings(&objects));
        let (own, others): (Vec<_>, Vec<_>) = objects.iter().cloned().partition(kubernetes::is_own);
        found.extend(kubernetes::judge(&python, &own)?);
        found.extend(kubernetes::lets_through(&python, &own)?);
        found.extend(published::judge(&others));
        println!(
            "{overlay}: {} objects, {equal}; {} checked against Kubernetes {}, {} against other published schemas",
            objects.len(),
            own.len(),
            kubernetes::VERSIONS.join(", "),
            others.len()
        );
        findings.extend(found.into_iter().map(|finding| format!("{overlay}: {finding}")));
    }
    findings.extend(chart::lint(&python)?);
    findings.extend(chart::versions()?);
    let files: Vec<_> = PAIRS.iter().filter_map(|(_, values)| *values).collect();
    findings.extend(values::findings(&python, &files)?);
    let examples = published::examples()?;
    println!("{} examples checked against KubeVirt's published schemas", examples.len());
    for (file, object) in examples {
        findings.extend(published::judge(&[object]).into_iter().map(|finding| format!("{file}: {finding}")));
    }
    for finding in &findings {
        eprintln!("FOUND {finding}");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

/// Parses the objects of a YAML text, in its order.
fn documents(text: &str) -> Result<Vec<Value>> {
    // Templates that render nothing leave an empty document, which is left out.
    Ok(serde_yaml::from_multiple(text)?)
}

/// Returns kind, namespace and name, which identify an object in findings.
fn title(object: &Value) -> String {
    let part = |of: &Value| of.as_str().unwrap_or("-").to_owned();
    let metadata = &object["metadata"];
    format!("{} {}/{}", part(&object["kind"]), part(&metadata["namespace"]), part(&metadata["name"]))
}
