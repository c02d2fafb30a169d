//! Kubernetes' schemas, strictly: a field nobody knows is a mistake.

use super::python::Tools;
use anyhow::Result;
use serde_json::{Value, json};

/// The versions objects are held to.
pub(super) const VERSIONS: [&str; 3] = ["1.35", "1.36", "1.37"];
const SCRIPT: &str = include_str!("kubernetes.py");

/// True for kinds of Kubernetes' own.
pub(super) fn is_own(object: &Value) -> bool {
    let group = object["apiVersion"].as_str().unwrap_or_default();
    // Groups of its own have no domain, or this one.
    group.split('/').next().is_some_and(|group| !group.contains('.') || group.ends_with(".k8s.io"))
}

/// What is wrong with objects, in some version or other.
pub(super) fn judge(python: &Tools, objects: &[Value]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for version in VERSIONS {
        let objects: Vec<_> = objects.iter().map(|object| of_version(object, version)).collect();
        let said = python.run(SCRIPT, &json!({"version": version, "objects": objects}))?;
        for (object, said) in objects.iter().zip(said.as_array().into_iter().flatten()) {
            let said = match said.as_str() {
                None => continue,
                Some("no schema") => "has no such kind",
                Some(said) => said,
            };
            found.push(format!("{}: Kubernetes {version}: {said}", super::title(object)));
        }
    }
    Ok(found)
}

/// Whether the schemas are as strict as this relies on: what is let through with a field nobody knows.
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
    let let_through = (found.len() != expected)
        .then(|| format!("a field nobody knows is found {} times, expected {expected}", found.len()));
    Ok(let_through.into_iter().collect())
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

#[cfg(test)]
mod tests {
    use super::is_own;
    use serde_json::json;

    #[test]
    fn kinds_of_others_are_told_by_their_group() {
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
