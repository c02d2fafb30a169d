//! The chart's values: the README's table, made from the comments of `values.yaml`, and what `values.schema.json`
//! accepts and refuses.

use super::{CHART, Tools};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::fs;

/// Judges values by the schema, as Helm does. It reads {"schema": …, "values": […]} and prints a list of the first
/// error of each, or null.
const SCRIPT: &str = r#"
import json, sys
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

given = json.load(sys.stdin)
Draft7Validator.check_schema(given["schema"])
judge = Draft7Validator(given["schema"])
errors = [best_match(judge.iter_errors(values)) for values in given["values"]]
json.dump([error and f"{error.json_path}: {error.message}" for error in errors], sys.stdout)
"#;

/// Values that the chart refuses, and a word of the error.
const WRONG: [(&str, &str); 23] = [
    ("unheardOf: 1", "unheardOf"),
    ("image: {tags: latest}", "tags"),
    ("image: {digest: latest}", "digest"),
    ("image: {tag: 'a b'}", "tag"),
    ("image: {pullPolicy: never}", "pullPolicy"),
    ("image: {pullSecrets: [registry]}", "pullSecrets"),
    ("namespace: {name: Imds}", "namespace"),
    ("kubevirt: {passt: always}", "passt"),
    ("kubevirt: {kubelet: /var/lib/kubelet/}", "kubelet"),
    ("kubevirt: false", "kubevirt"),
    ("hostNetwork: 'true'", "hostNetwork"),
    ("config: 'records: /x'", "config"),
    ("tolerations: [{operator: Exist}]", "tolerations"),
    ("nodeSelector: {gpu: true}", "nodeSelector"),
    ("maxSurge: 0", "maxSurge"),
    ("maxSurge: 0%", "maxSurge"),
    ("resources: {limits: {memory: 1 GiB}}", "memory"),
    ("networkPolicy: {apiServerPorts: [0]}", "apiServerPorts"),
    ("networkPolicy: {apiServerCidrs: [10.0.0.1]}", "apiServerCidrs"),
    ("plugin: {failureStrategy: fail}", "failureStrategy"),
    ("plugin: {holdSeconds: 31}", "holdSeconds"),
    ("policy: {apiVersion: v1}", "apiVersion"),
    ("webhook: {enabled: true, certManager: false}", "caBundle"),
];

/// Values beside those of the chart's own files that must be accepted.
const RIGHT: [&str; 7] = [
    "{}",
    "global: {imageRegistry: x}",
    "maxSurge: 10%",
    "image: {digest: 'sha256:0000000000000000000000000000000000000000000000000000000000000000', pullSecrets: [{name: x}]}",
    "resources: {requests: {cpu: 1, memory: 1.5Gi}, limits: {memory: 3221225472}}",
    "webhook: {enabled: true, certManager: false, caBundle: TUlJQg==}",
    "tolerations: [{key: a, operator: Equal, value: b, effect: NoSchedule}]",
];

/// Returns where the schema is wrong: too strict for one of the chart's own files, too lax, or unlike `values.yaml`.
pub(super) fn findings(python: &Tools, files: &[&str]) -> Result<Vec<String>> {
    let schema: Value = serde_json::from_str(&read("values.schema.json")?).context("values.schema.json")?;
    let defaults: Value = serde_yaml::from_str(&read("values.yaml")?).context("values.yaml")?;
    let merged = |text: &str| -> Result<Value> {
        let mut values = defaults.clone();
        merge(&mut values, serde_yaml::from_str(text).with_context(|| text.to_owned())?);
        Ok(values)
    };
    let mut cases: Vec<(String, Value, Option<&str>)> = Vec::new();
    for name in files {
        cases.push(((*name).to_owned(), merged(&read(name)?)?, None));
    }
    for text in RIGHT {
        cases.push((text.to_owned(), merged(text)?, None));
    }
    for (text, word) in WRONG {
        cases.push((text.to_owned(), merged(text)?, Some(word)));
    }
    let values: Vec<_> = cases.iter().map(|(_, values, _)| values).collect();
    let errors = python.run(SCRIPT, &json!({"schema": schema, "values": values}))?;
    let errors = errors.as_array().context("expected a list of errors")?;
    ensure!(errors.len() == cases.len(), "expected {} answers, found {}", cases.len(), errors.len());
    let mut found = Vec::new();
    for ((text, _, word), error) in cases.iter().zip(errors) {
        let finding = match (word, error.as_str()) {
            (None, Some(error)) => format!("is refused: {error}"),
            (Some(_), None) => "is accepted".into(),
            (Some(word), Some(error)) if !error.contains(word) => {
                format!("is refused for another reason: {error}")
            }
            _ => continue,
        };
        found.push(format!("values.schema.json: `{text}` {finding}"));
    }
    found.extend(unlike("", &defaults, &schema));
    Ok(found)
}

/// Returns values that only one of `values.yaml` and its schema has, and objects that admit any field.
fn unlike(path: &str, values: &Value, schema: &Value) -> Vec<String> {
    // An empty object in the defaults stands for any fields.
    let Some(values) = values.as_object().filter(|values| !values.is_empty()) else { return Vec::new() };
    let Some(properties) = schema["properties"].as_object() else {
        // A reference names a map whose fields are the user's own.
        return Vec::new();
    };
    let mut found = Vec::new();
    if schema["additionalProperties"] != json!(false) {
        found.push(format!("values.schema.json: {path} admits any field"));
    }
    for (name, value) in values {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match properties.get(name) {
            Some(schema) => found.extend(unlike(&path, value, schema)),
            None => found.push(format!("values.schema.json lacks {path} of values.yaml")),
        }
    }
    found
}

/// Puts the fields of `over` in place of those of `values`, as Helm merges values.
fn merge(values: &mut Value, over: Value) {
    match (values, over) {
        (Value::Object(values), Value::Object(over)) => {
            for (name, value) in over {
                merge(values.entry(name).or_insert(Value::Null), value);
            }
        }
        (values, over) => *values = over,
    }
}

fn read(name: &str) -> Result<String> {
    let path = shell::top().join(CHART).join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// The path of the chart's README, relative to the top of the project.
pub(crate) const README: &str = "deploy/helm/xdp-imds/README.md";

/// Returns the chart's README.
pub(crate) fn readme() -> Result<String> {
    let rows: String = rows(&read("values.yaml")?)?
        .into_iter()
        .map(|ValueRow { path, default, about }| format!("| `{path}` | `{default}` | {about} |\n"))
        .collect();
    Ok(format!("{HEAD}{rows}"))
}

/// The README before its table.
const HEAD: &str = r#"# xdp-imds

<!-- Generated by `cargo xtask book` from values.yaml; edit that, or xtask/make/src/manifests/values.rs. -->

The instance metadata service for the VMs of each node: an agent on every KubeVirt node answers
`http://169.254.169.254` for each VM from an XDP program on its tap, in the dialects that cloud-init and others speak.

```sh
helm install xdp-imds oci://ghcr.io/xdp-imds/charts/xdp-imds
```

The [book](https://xdp-imds.github.io/xdp-imds/operate/kubevirt.html) has what VMs need, upgrades and removal. Nodes need
Linux 5.15 or newer, and Kubernetes 1.30 or newer. The chart's objects are in a namespace of their own, which admits the
agent's pods by its Pod Security level `privileged`; what they may do is in
[deploy/README.md](https://github.com/xdp-imds/xdp-imds/blob/main/deploy/README.md#privileges-and-resources-of-the-agents-pod).

Verify chart and image before you install, with [cosign](https://docs.sigstore.dev):

```sh
cosign verify ghcr.io/xdp-imds/charts/xdp-imds:0.1.0 \
  --certificate-identity-regexp '^https://github.com/xdp-imds/xdp-imds/\.github/workflows/publish\.yml@' \
  --certificate-oidc-issuer https://token.actions.githubusercontent.com
```

## Values

`values-openshift.yaml` and `values-libvirt-host.yaml` have the values for OpenShift, and for nodes that run libvirt;
`values-everything.yaml` switches every optional part on. Unknown values are refused: `values.schema.json`.

| Value | Default | Meaning |
|---|---|---|
"#;

/// A value of the chart.
#[derive(Debug, PartialEq)]
struct ValueRow {
    path: String,
    default: String,
    about: String,
}

/// Returns the values of a YAML text, each with the comment above it. A value without a comment is an error.
fn rows(text: &str) -> Result<Vec<ValueRow>> {
    let defaults: Value = serde_yaml::from_str(text)?;
    let mut rows: Vec<ValueRow> = Vec::new();
    let (mut names, mut comment) = (Vec::<(usize, &str)>::new(), Vec::new());
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim();
        if let Some(words) = line.strip_prefix('#') {
            comment.push(words.trim());
            continue;
        }
        // Items of a list belong to the value before them, whose default the parsed text has.
        if let Some((name, _)) = line.split_once(':').filter(|_| !line.starts_with('-')) {
            names.retain(|(above, _)| *above < indent);
            names.push((indent, name));
            let path = names.iter().map(|(_, name)| *name).collect::<Vec<_>>();
            let parent = path[..path.len() - 1].iter().fold(&defaults, |value, name| &value[*name]);
            // A field of an item of a list.
            let Some(default) = parent.get(name) else { continue };
            let path = path.join(".");
            let about = comment.join(" ");
            if default.as_object().is_none_or(|fields| fields.is_empty()) {
                ensure!(!about.is_empty(), "values.yaml: {path} has no comment above it");
                rows.push(ValueRow { path, default: default.to_string(), about });
            } else if !about.is_empty() {
                rows.push(ValueRow { path, default: "{…}".into(), about });
            }
        }
        // A comment that an empty line follows is of the file.
        comment.clear();
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::{merge, rows, unlike};
    use serde_json::json;

    #[test]
    fn each_value_has_the_comment_above_it_and_its_default() {
        let text = "# Of the file.\n\n# Of a,\n# two lines.\na:\n  # Of b.\n  b: [1, 2]\n  c:\n    # Of d.\n    d: {}\n\
                    # Of e.\ne:\n- x: 1\n  y: 2\n# Of f.\nf: \"\"\n";
        let found: Vec<_> = rows(text)
            .expect("rows")
            .into_iter()
            .map(|row| [row.path, row.default, row.about].join(" | "))
            .collect();
        let expected = [
            "a | {…} | Of a, two lines.",
            "a.b | [1,2] | Of b.",
            "a.c.d | {} | Of d.",
            "e | [{\"x\":1,\"y\":2}] | Of e.",
            "f | \"\" | Of f.",
        ];
        assert_eq!(found, expected);
        let error = rows("a:\n  b: 1\n").expect_err("no comment").to_string();
        assert!(error.contains("a.b"), "{error}");
    }

    #[test]
    fn a_schema_that_lacks_a_value_or_admits_any_is_found() {
        let values = json!({"a": {"b": 1}, "c": 2, "d": {}});
        let inner = json!({"properties": {"b": {}}, "additionalProperties": false});
        let schema = json!({"properties": {"a": inner, "c": {}, "d": {}}, "additionalProperties": false});
        assert_eq!(unlike("", &values, &schema), [""; 0]);
        let lax = json!({"properties": {"a": {"properties": {}}, "d": {}}, "additionalProperties": false});
        assert_eq!(
            unlike("", &values, &lax),
            [
                "values.schema.json: a admits any field",
                "values.schema.json lacks a.b of values.yaml",
                "values.schema.json lacks c of values.yaml"
            ]
        );
    }

    #[test]
    fn values_are_merged_field_by_field_and_lists_as_a_whole() {
        let mut values = json!({"a": {"b": 1, "c": [1, 2]}, "d": 3});
        merge(&mut values, json!({"a": {"c": [4]}, "e": 5}));
        assert_eq!(values, json!({"a": {"b": 1, "c": [4]}, "d": 3, "e": 5}));
    }
}
