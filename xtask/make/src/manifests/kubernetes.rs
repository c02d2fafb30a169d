//! Checks objects against Kubernetes' schemas. An unknown field is an error.

use super::python::Tools;
use anyhow::Result;
use serde_json::{Value, json};

/// The Kubernetes versions that objects are checked against.
pub(super) const VERSIONS: [&str; 3] = ["1.35", "1.36", "1.37"];
const SCRIPT: &str = include_str!("kubernetes.py");

/// Returns true for kinds that Kubernetes itself defines.
pub(super) fn is_own(object: &Value) -> bool {
    let group = object["apiVersion"].as_str().unwrap_or_default();
    // The groups of Kubernetes have no domain, or `k8s.io`.
    group.split('/').next().is_some_and(|group| !group.contains('.') || group.ends_with(".k8s.io"))
}

/// Returns every error of the objects under any of the versions.
pub(super) fn judge(python: &Tools, objects: &[Value]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for version in VERSIONS {
        let objects: Vec<_> = objects.iter().map(|object| of_version(object, version)).collect();
        let errors = python.run(SCRIPT, &json!({"version": version, "objects": objects}))?;
        for (object, error) in objects.iter().zip(errors.as_array().into_iter().flatten()) {
            let error = match error.as_str() {
                None => continue,
                Some("no schema") => "has no such kind",
                Some(error) => error,
            };
            found.push(format!("{}: Kubernetes {version}: {error}", super::title(object)));
        }
    }
    Ok(found)
}

/// Checks that the schemas are as strict as these checks assume: they must reject unknown fields. Returns a finding if
/// they do not.
pub(super) fn lets_through(python: &Tools, objects: &[Value]) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for object in objects {
        let (mut outside, mut inside) = (object.clone(), object.clone());
        outside["unheardOf"] = json!(1);
        inside["metadata"]["unheardOf"] = json!(1);
        wrong.extend([outside, inside]);
    }
    let found = judge(python, &wrong)?;
    let expected = wrong.len() * VERSIONS.len();
    let finding = (found.len() != expected)
        .then(|| format!("an unknown field is rejected {} times, expected {expected}", found.len()));
    Ok(finding.into_iter().collect())
}

/// MutatingAdmissionPolicy is v1 since 1.36. For 1.35 the chart's value `policy.apiVersion` is v1beta1.
fn of_version(object: &Value, version: &str) -> Value {
    let mut object = object.clone();
    let is_policy = object["kind"].as_str().is_some_and(|kind| kind.starts_with("MutatingAdmissionPolicy"));
    if is_policy && version == "1.35" {
        object["apiVersion"] = json!("admissionregistration.k8s.io/v1beta1");
    }
    object
}

#[cfg(test)]
mod tests {
    use super::is_own;
    use serde_json::json;

    #[test]
    fn the_group_shows_whether_a_kind_is_kubernetes_own() {
        for (group, own) in [
            ("v1", true),
            ("apps/v1", true),
            ("rbac.authorization.k8s.io/v1", true),
            ("kubevirt.io/v1", false),
            ("monitoring.coreos.com/v1", false),
            ("example.k8s.io.evil/v1", false),
        ] {
            assert_eq!(is_own(&json!({"apiVersion": group})), own, "{group}");
        }
    }
}
