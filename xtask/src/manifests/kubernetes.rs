//! Kubernetes' schemas, strictly: a field nobody knows is a mistake.

use super::python::Tools;
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The versions objects are held to.
pub(super) const VERSIONS: [&str; 3] = ["1.35", "1.36", "1.37"];
const SCRIPT: &str = include_str!("kubernetes.py");

/// What the schemas say.
#[derive(Debug)]
pub(super) struct Judged {
    /// Of objects that are not what they should be.
    pub(super) findings: Vec<String>,
    /// Kinds of others, for which there is no schema.
    pub(super) unknown: Vec<String>,
}

/// Holds objects to the schemas.
pub(super) fn judge(python: &Tools, objects: &[Value]) -> Result<Judged> {
    let mut findings = Vec::new();
    let mut unknown = BTreeSet::new();
    for version in VERSIONS {
        let objects: Vec<_> = objects.iter().map(|object| of_version(object, version)).collect();
        let said = python.run(SCRIPT, &json!({"version": version, "objects": objects}))?;
        for (object, said) in objects.iter().zip(said.as_array().into_iter().flatten()) {
            match said.as_str() {
                None => {}
                Some("no schema") => {
                    let kind = object["kind"].as_str().unwrap_or_default();
                    // A kind of Kubernetes' own that a version does not have would be refused by it.
                    if object["apiVersion"]
                        .as_str()
                        .is_some_and(|group| group.contains(".k8s.io/") || !group.contains('.'))
                    {
                        findings
                            .push(format!("{}: Kubernetes {version} has no such kind", super::title(object)));
                    }
                    unknown.insert(kind.to_owned());
                }
                Some(said) => {
                    findings.push(format!("{}: Kubernetes {version}: {said}", super::title(object)))
                }
            }
        }
    }
    Ok(Judged { findings, unknown: unknown.into_iter().collect() })
}

/// MutatingAdmissionPolicy is v1 since 1.36; before, `policy.apiVersion` of the chart says v1beta1.
fn of_version(object: &Value, version: &str) -> Value {
    let mut object = object.clone();
    let is_policy = object["kind"].as_str().is_some_and(|kind| kind.starts_with("MutatingAdmissionPolicy"));
    if is_policy && version == "1.35" {
        object["apiVersion"] = json!("admissionregistration.k8s.io/v1beta1");
    }
    object
}
