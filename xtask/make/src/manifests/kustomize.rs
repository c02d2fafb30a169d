//! Renders the overlays with kubectl's kustomize.
//!
//! Debian 12's kubectl (1.20) has kustomize 2.0.3, which accepts directories only as `bases` and patches only as
//! `patchesStrategicMerge`. For such a kubectl, a copy of the tree with these two old fields is rendered. The objects
//! are the same.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::title;

/// The first minor version of kubectl with a kustomize newer than 2.0.3.
const FIRST_WITH_NEW_FIELDS: u64 = 21;

/// A kubectl, and a tree that it can read.
#[derive(Debug)]
pub(super) struct Kubectl {
    program: PathBuf,
    tree: PathBuf,
    _copy: Option<tempfile::TempDir>,
}

impl Kubectl {
    /// Finds kubectl by the variable `KUBECTL`, or on PATH.
    pub(super) fn find() -> Result<Self> {
        let program: PathBuf = match std::env::var_os("KUBECTL") {
            Some(path) => path.into(),
            None => {
                shell::tools::ensure(&[("kubectl", "kubernetes-client")])?;
                "kubectl".into()
            }
        };
        let tree = shell::top().join("deploy/kustomize");
        let minor = minor(&program)?;
        if minor >= FIRST_WITH_NEW_FIELDS {
            return Ok(Self { program, tree, _copy: None });
        }
        eprintln!("kubectl 1.{minor}: rendering a copy with the fields of kustomize 2.0.3");
        let room = tempfile::tempdir()?;
        let copy = room.path().join("kustomize");
        copy_tree(&tree, &copy)?;
        Ok(Self { program, tree: copy, _copy: Some(room) })
    }

    /// Renders an overlay as YAML.
    pub(super) fn render(&self, overlay: &str) -> Result<String> {
        let directory = self.tree.join("overlays").join(overlay);
        let output = Command::new(&self.program).arg("kustomize").arg(&directory).output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl kustomize {}: {}", directory.display(), messages.trim());
        // Users would see a deprecation warning about our files, so it is an error.
        ensure!(
            messages.trim().is_empty() || self._copy.is_some(),
            "kubectl kustomize {overlay}: {}",
            messages.trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

fn minor(program: &Path) -> Result<u64> {
    let output = Command::new(program).args(["version", "--client", "--output=json"]).output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    let version: Value =
        serde_json::from_slice(&output.stdout).context("expected kubectl's version as JSON")?;
    let minor =
        version["clientVersion"]["minor"].as_str().context("kubectl's version has no minor number")?;
    Ok(minor.trim_end_matches('+').parse()?)
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_tree(&path, &copy)?;
        } else if path.ends_with("kustomization.yaml") {
            fs::write(&copy, with_old_fields(&fs::read_to_string(&path)?, from)?)?;
        } else {
            fs::copy(&path, &copy)?;
        }
    }
    Ok(())
}

/// Returns a kustomization with the fields of kustomize 2.0.3.
fn with_old_fields(text: &str, directory: &Path) -> Result<String> {
    let mut kustomization: Value = serde_yaml::from_str(text)?;
    let words = kustomization.as_object_mut().context("expected a kustomization to be a mapping")?;
    if let Some(Value::Array(resources)) = words.remove("resources") {
        let is_directory = |name: &Value| name.as_str().is_some_and(|name| directory.join(name).is_dir());
        let (bases, files): (Vec<_>, Vec<_>) = resources.into_iter().partition(is_directory);
        words.insert("bases".into(), bases.into());
        words.insert("resources".into(), files.into());
    }
    if let Some(Value::Array(patches)) = words.remove("patches") {
        let files: Vec<_> = patches.iter().map(|patch| patch["path"].clone()).collect();
        words.insert("patchesStrategicMerge".into(), files.into());
    }
    Ok(serde_yaml::to_string(&kustomization)?)
}

// Finds fields that are omitted inside lists and that API servers fill in with defaults. After such an omission,
// `kubectl apply` reports `configured` each time, and GitOps tools see a drift that no sync ends, because a list
// without merge keys is compared as a whole.

/// The fields that must be written, by kind and path. `*` stands for each item of a list.
const SPELLED_OUT: [(&str, &str, &[&str]); 8] = [
    (
        "MutatingAdmissionPolicy",
        "spec/matchConstraints",
        &["matchPolicy", "namespaceSelector", "objectSelector"],
    ),
    ("MutatingAdmissionPolicy", "spec/matchConstraints/resourceRules/*", &["scope"]),
    (
        "MutatingWebhookConfiguration",
        "webhooks/*",
        &[
            "failurePolicy",
            "matchPolicy",
            "namespaceSelector",
            "objectSelector",
            "reinvocationPolicy",
            "timeoutSeconds",
        ],
    ),
    ("MutatingWebhookConfiguration", "webhooks/*/rules/*", &["scope"]),
    ("NetworkPolicy", "spec/ingress/*/ports/*", &["protocol"]),
    ("NetworkPolicy", "spec/egress/*/ports/*", &["protocol"]),
    ("PodMonitor", "spec/podMetricsEndpoints/*/relabelings/*", &["action"]),
    ("Service", "spec/ports/*", &["protocol", "targetPort"]),
];

/// Returns each omitted field.
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for object in objects {
        for (kind, path, fields) in SPELLED_OUT {
            if object["kind"] != kind {
                continue;
            }
            for place in places(object, path) {
                let missing = fields.iter().filter(|field| place.get(field).is_none());
                let title = title(object);
                found.extend(
                    missing.map(|field| format!("{title}: {path} omits {field}, which has a default")),
                );
            }
        }
    }
    found
}

fn places<'a>(object: &'a Value, path: &str) -> Vec<&'a Value> {
    path.split('/').fold(vec![object], |places, step| {
        let next = |place: &'a Value| match step {
            "*" => place.as_array().into_iter().flatten().collect::<Vec<_>>(),
            field => place.get(field).into_iter().collect(),
        };
        places.into_iter().flat_map(next).collect()
    })
}

// Compares two renderings object by object.

/// Returns one line for each difference. The order of the objects does not matter.
pub(super) fn differences(kustomize: &[Value], chart: &[Value]) -> Vec<String> {
    let by_title = |objects: &[Value]| -> BTreeMap<String, Value> {
        objects.iter().map(|object| (title(object), parsed(object))).collect()
    };
    let (ours, theirs) = (by_title(kustomize), by_title(chart));
    let mut found = Vec::new();
    if ours.len() != kustomize.len() || theirs.len() != chart.len() {
        found.push("an object occurs twice".to_owned());
    }
    for (title, object) in &ours {
        match theirs.get(title) {
            None => found.push(format!("{title} is not in the chart")),
            Some(other) => compare(title, object, other, &mut found),
        }
    }
    let only = theirs.keys().filter(|title| !ours.contains_key(*title));
    found.extend(only.map(|title| format!("{title} is only in the chart")));
    found
}

/// Returns the object with YAML documents inside a ConfigMap parsed, so that their form does not matter.
fn parsed(object: &Value) -> Value {
    let mut object = object.clone();
    if object["kind"] == "ConfigMap"
        && let Some(data) = object["data"].as_object_mut()
    {
        for text in data.values_mut() {
            if let Some(document) = text.as_str().and_then(|text| serde_yaml::from_str(text).ok()) {
                *text = document;
            }
        }
    }
    object
}

fn compare(path: &str, ours: &Value, theirs: &Value, found: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(one), Value::Object(other)) => {
            for (name, value) in one {
                match other.get(name) {
                    Some(theirs) => compare(&format!("{path}.{name}"), value, theirs, found),
                    None => found.push(format!("{path}.{name} is not in the chart")),
                }
            }
            let only = other.keys().filter(|name| !one.contains_key(*name));
            found.extend(only.map(|name| format!("{path}.{name} is only in the chart")));
        }
        // Kubernetes merges lists of named items by name, so their order does not matter.
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            let sorted = |list: &[Value]| -> Vec<Value> {
                let mut list = list.to_vec();
                if list.iter().all(|item| item["name"].is_string()) {
                    list.sort_by_key(|item| item["name"].to_string());
                }
                list
            };
            for (at, (ours, theirs)) in sorted(one).iter().zip(&sorted(other)).enumerate() {
                compare(&format!("{path}[{at}]"), ours, theirs, found);
            }
        }
        _ if ours == theirs => {}
        _ => found.push(format!("{path} is {ours}, but {theirs} in the chart")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use std::fs;

    use super::{differences, findings, with_old_fields};

    #[test]
    fn directories_become_bases_and_patches_become_files() {
        let room = tempfile::tempdir().expect("a directory");
        fs::create_dir(room.path().join("base")).expect("a directory");
        let text = "kind: Kustomization\nresources: [base, a.yaml]\npatches:\n- path: p.yaml\n";
        let old: Value =
            serde_yaml::from_str(&with_old_fields(text, room.path()).expect("translated")).expect("YAML");
        let expected = json!({"kind": "Kustomization", "bases": ["base"], "resources": ["a.yaml"],
            "patchesStrategicMerge": ["p.yaml"]});
        assert_eq!(old, expected);
    }

    #[test]
    fn an_omitted_default_is_found_in_every_item() {
        let rules = json!([{"scope": "*"}, {"apiGroups": [""]}, {}]);
        let policy = json!({"kind": "MutatingAdmissionPolicy", "metadata": {"name": "p"}, "spec": {"matchConstraints":
            {"matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}, "resourceRules": rules}}});
        let left = "MutatingAdmissionPolicy -/p: spec/matchConstraints/resourceRules/* omits scope, which has a default";
        assert_eq!(findings(&[policy]), [left, left]);
        let other = json!({"kind": "ConfigMap", "metadata": {"name": "c"}, "webhooks": [{}]});
        assert_eq!(findings(&[other]), [""; 0]);
    }

    fn object(name: &str, spec: &Value) -> Value {
        json!({"kind": "DaemonSet", "metadata": {"namespace": "n", "name": name}, "spec": spec})
    }

    #[test]
    fn order_and_the_form_of_documents_do_not_matter() {
        let map =
            |text: &str| json!({"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a.yaml": text}});
        let ours = [object("a", &json!({"m": [{"name": "x"}, {"name": "y"}]})), map("b: 1\na: [2]\n")];
        let theirs = [map("a:\n- 2\nb: 1\n"), object("a", &json!({"m": [{"name": "y"}, {"name": "x"}]}))];
        assert_eq!(differences(&ours, &theirs), [""; 0]);
    }

    #[test]
    fn every_difference_is_reported() {
        let ours = [object("a", &json!({"n": 1, "l": [1, 2], "only": true})), object("b", &json!({}))];
        let theirs = [object("a", &json!({"n": 2, "l": [2, 1], "more": 0})), object("c", &json!({}))];
        let found = differences(&ours, &theirs);
        for expected in [
            "a.spec.n is 1, but 2 in the chart",
            "a.spec.l[0] is 1",
            "a.spec.only is not in the chart",
            "a.spec.more is only in the chart",
            "DaemonSet n/b is not in the chart",
            "DaemonSet n/c is only in the chart",
        ] {
            assert!(found.iter().any(|line| line.contains(expected)), "{expected}: {found:?}");
        }
        assert_eq!(found.len(), 7, "{found:?}");
    }
}
