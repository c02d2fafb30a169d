//! Adds volumes to a launcher's pod. kubelet mounts them, and the agent reads them from the host.
//!
//! | annotation of the pod, besides `imds.kubevirt.io/enabled: "true"` | volume |
//! |---|---|
//! | none | `imds-token`: a token of the pod's service account, renewed by kubelet |
//! | `user-data-secret`, `user-data-configmap`, without `user-data` | `imds-user-data` |
//! | `vendor-data-secret`, `vendor-data-configmap`, without `vendor-data` | `imds-vendor-data` |
//!
//! KubeVirt copies a VM's annotations to its pods. kubelet mounts only volumes that a container mounts, so the
//! launcher's container mounts them, although no program there reads them. An existing volume of that name stays
//! unchanged.

use serde_json::{Value, json};

use super::rules::{AdmissionOperation, ObjectChanges, PatchOperation};
use metadata_feed::kubevirt::options;

/// KubeVirt's label of launchers' pods, and its value.
const LAUNCHER: (&str, &str) = ("kubevirt.io", "virt-launcher");
/// The container that every launcher has.
const CONTAINER: &str = "compute";
/// The directory of the volumes in that container.
const MOUNTS: &str = "/var/run/xdp-imds";
/// Mode 0400: only root reads the files. kubelet may add permissions.
const MODE: u32 = 0o400;
/// Lifetime of a token, in seconds. kubelet renews a token when a fifth of its lifetime is left.
const TOKEN_SECONDS: u32 = 3_600;

/// Calls [`judge`] for a new pod. A pod's volumes cannot change later.
#[must_use]
pub fn judge_made(operation: AdmissionOperation, pod: &Value, _old: &Value) -> ObjectChanges {
    if operation == AdmissionOperation::Create { judge(pod) } else { ObjectChanges::default() }
}

/// Returns the changes to a new pod.
#[must_use]
pub fn judge(pod: &Value) -> ObjectChanges {
    let metadata = &pod["metadata"];
    let annotation = |name: &str| metadata["annotations"][name].as_str().filter(|text| !text.is_empty());
    let is_launcher = metadata["labels"][LAUNCHER.0] == LAUNCHER.1;
    let containers = pod["spec"]["containers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let at = containers.iter().position(|container| container["name"] == CONTAINER);
    let Some(at) = at.filter(|_| is_launcher && annotation(options::ENABLED) == Some("true")) else {
        return ObjectChanges::default();
    };
    let mut wanted = vec![("token", token())];
    for (field, inline, secret, map) in [
        ("user-data", options::USER_DATA, options::USER_DATA_SECRET, options::USER_DATA_CONFIGMAP),
        ("vendor-data", options::VENDOR_DATA, options::VENDOR_DATA_SECRET, options::VENDOR_DATA_CONFIGMAP),
    ] {
        let source = match (annotation(secret), annotation(map)) {
            // The agent prefers the inline value.
            _ if metadata["annotations"][inline].is_string() => continue,
            (Some(name), _) => json!({"secret": {"secretName": name, "defaultMode": MODE}}),
            (None, Some(name)) => json!({"configMap": {"name": name, "defaultMode": MODE}}),
            (None, None) => continue,
        };
        wanted.push((field, source));
    }
    let mut lists =
        VolumeLists { volumes: &pod["spec"]["volumes"], mounts: &containers[at]["volumeMounts"], at };
    ObjectChanges { changes: lists.with(wanted), warnings: Vec::new() }
}

fn token() -> Value {
    let token = json!({"path": "token", "expirationSeconds": TOKEN_SECONDS});
    json!({"projected": {"sources": [{"serviceAccountToken": token}], "defaultMode": MODE}})
}

/// The pod's lists of volumes and mounts. Both may be missing.
struct VolumeLists<'a> {
    volumes: &'a Value,
    mounts: &'a Value,
    at: usize,
}

impl VolumeLists<'_> {
    fn with(&mut self, wanted: Vec<(&str, Value)>) -> Vec<PatchOperation> {
        let present = self.volumes.as_array().map(Vec::as_slice).unwrap_or_default();
        let is_there = |name: &str| present.iter().any(|volume| volume["name"] == name);
        let missing = wanted.into_iter().map(|(field, source)| (options::volume(field), source));
        let (mut volumes, mut mounts) = (Vec::new(), Vec::new());
        for (name, mut volume) in missing.filter(|(name, _)| !is_there(name)) {
            mounts.push(json!({"name": name, "mountPath": format!("{MOUNTS}/{name}"), "readOnly": true}));
            volume["name"] = name.into();
            volumes.push(volume);
        }
        let mut changes = append(self.volumes, "/spec/volumes", volumes);
        changes.extend(append(self.mounts, &format!("/spec/containers/{}/volumeMounts", self.at), mounts));
        changes
    }
}

/// Appends to a list, or creates it.
fn append(list: &Value, path: &str, items: Vec<Value>) -> Vec<PatchOperation> {
    match list.is_array() {
        _ if items.is_empty() => Vec::new(),
        true => items.into_iter().map(|item| PatchOperation::add(format!("{path}/-"), item)).collect(),
        false => vec![PatchOperation::add(path.to_owned(), items.into())],
    }
}

#[cfg(test)]
mod tests {
    use super::judge;
    use crate::verbs::webhook::rules::ObjectChanges;
    use serde_json::json;

    #[test]
    fn missing_lists_are_created() {
        let pod = json!({
            "metadata": {"labels": {"kubevirt.io": "virt-launcher"},
                "annotations": {"imds.kubevirt.io/enabled": "true"}},
            "spec": {"containers": [{"name": "other"}, {"name": "compute"}]},
        });
        let paths: Vec<_> = judge(&pod).changes.into_iter().map(|change| change.path).collect();
        assert_eq!(paths, ["/spec/volumes", "/spec/containers/1/volumeMounts"]);
    }

    #[test]
    fn a_pod_that_is_no_launcher_stays_unchanged() {
        let annotated = json!({"annotations": {"imds.kubevirt.io/enabled": "true"}});
        let launcher = json!({"labels": {"kubevirt.io": "virt-launcher"},
            "annotations": {"imds.kubevirt.io/enabled": "true"}});
        for other in [
            json!(null),
            json!([]),
            json!({"metadata": annotated, "spec": {"containers": [{"name": "compute"}]}}),
            json!({"metadata": launcher, "spec": {"containers": [{"name": "compute-2"}]}}),
            json!({"metadata": launcher, "spec": {"containers": 1}}),
        ] {
            assert_eq!(judge(&other), ObjectChanges::default(), "{other}");
        }
    }
}
