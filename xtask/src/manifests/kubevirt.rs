//! The examples, held to KubeVirt's published schema (OpenAPI 2, api/openapi-spec/swagger.json), strictly: a field the
//! schema does not have is a mistake. The schema is fetched by commit and digest, not kept here.

use super::documents;
use crate::shell;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// KubeVirt's main branch on 22 August 2026.
const COMMIT: &str = "d923fdb815cd2016ddaebdaaa51db04133576d72";
const SHA256: &str = "92b7a06a64069cdf1422b32f14a8e29744e5b51921b6d28056e92b32917d39d6";
const EXAMPLES: &str = "deploy/examples";
/// Deepest nesting that is looked at; a VM's has about 20.
const DEPTH: usize = 64;

/// What is wrong with the examples. Where the schema cannot be had, this says that it did not look.
pub(super) fn judge_examples(given: Option<&Path>) -> Result<Vec<String>> {
    let path = match given.map_or_else(fetch, |path| Ok(path.to_owned())) {
        Ok(path) => path,
        Err(error) => {
            eprintln!("NOT CHECKED: KubeVirt's schema: {error:#}; --kubevirt-schema FILE names one at hand");
            return Ok(Vec::new());
        }
    };
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let schema: Value = serde_json::from_slice(&text).context("the schema is JSON")?;
    let mut found = Vec::new();
    let mut count = 0;
    for entry in fs::read_dir(shell::top().join(EXAMPLES))? {
        let path = entry?.path();
        for object in documents(&fs::read_to_string(&path)?)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.extend(judge(&schema, &object).into_iter().map(|finding| format!("{name}: {finding}")));
            count += 1;
        }
    }
    println!("{count} examples held to KubeVirt's schema");
    Ok(found)
}

/// The schema's file, from where it was published.
fn fetch() -> Result<PathBuf> {
    let path = shell::target().join(format!("kubevirt-{COMMIT}.json"));
    if !path.is_file() {
        let aside = path.with_extension("part");
        let url = format!(
            "https://raw.githubusercontent.com/kubevirt/kubevirt/{COMMIT}/api/openapi-spec/swagger.json"
        );
        let mut curl = Command::new("curl");
        curl.args(["--fail", "--silent", "--show-error", "--location", "--max-time", "60", "--output"])
            .arg(&aside);
        let output = curl.arg(&url).output().context("cannot run curl")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        let found = format!("{:x}", HexDigest(&fs::read(&aside)?));
        ensure!(found == SHA256, "expected {url} with SHA-256 {SHA256}, found {found}");
        fs::rename(&aside, &path)?;
    }
    Ok(path)
}

struct HexDigest<'a>(&'a [u8]);

impl std::fmt::LowerHex for HexDigest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Sha256::digest(self.0).iter().try_for_each(|octet| write!(f, "{octet:02x}"))
    }
}

/// What is wrong with an object.
fn judge(schema: &Value, object: &Value) -> Vec<String> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let definition = &schema["definitions"][format!("v1.{kind}")];
    if object["apiVersion"] != "kubevirt.io/v1" || definition.is_null() {
        return vec![format!("{} of {} is not in the schema", object["kind"], object["apiVersion"])];
    }
    let mut found = Vec::new();
    hold(schema, definition, object, "", DEPTH, &mut found);
    found
}

fn hold(schema: &Value, to: &Value, value: &Value, path: &str, depth: usize, found: &mut Vec<String>) {
    let Some(depth) = depth.checked_sub(1) else {
        found.push(format!("{path} is nested too deep"));
        return;
    };
    if let Some(name) = to["$ref"].as_str().and_then(|name| name.strip_prefix("#/definitions/")) {
        return hold(schema, &schema["definitions"][name], value, path, depth, found);
    }
    let types = match &to["type"] {
        Value::Array(several) => several.clone(),
        one => vec![one.clone()],
    };
    let fits = types.iter().any(|kind| match kind.as_str() {
        Some("string") => value.is_string() || (value.is_number() && to["format"] == "int-or-string"),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        Some("null") => value.is_null(),
        _ => true,
    });
    if !fits {
        found.push(format!("{path}: expected {}, found {value}", to["type"]));
        return;
    }
    for name in to["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.is_object() && value.get(name).is_none() {
            found.push(format!("{path}.{name} is missing"));
        }
    }
    for (name, inner) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        match (&to["properties"][name], &to["additionalProperties"]) {
            (Value::Null, Value::Null) if to["properties"].is_object() => {
                found.push(format!("{path} is not in the schema"))
            }
            (Value::Null, more) => hold(schema, more, inner, &path, depth, found),
            (known, _) => hold(schema, known, inner, &path, depth, found),
        }
    }
    for (at, inner) in value.as_array().into_iter().flatten().enumerate() {
        hold(schema, &to["items"], inner, &format!("{path}[{at}]"), depth, found);
    }
}

#[cfg(test)]
mod tests {
    use super::judge;
    use serde_json::json;

    #[test]
    fn an_object_is_held_to_its_schema_and_every_other_field_is_a_mistake() {
        let schema = json!({"definitions": {
            "v1.VirtualMachine": {"type": "object", "required": ["spec"], "properties": {
                "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "spec": {"$ref": "#/definitions/v1.Spec"}}},
            "v1.Spec": {"type": "object", "properties": {
                "cores": {"type": "integer"}, "memory": {"type": ["string", "integer"]}, "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "disks": {"type": "array", "items": {"type": "object", "required": ["name"], "properties": {
                    "name": {"type": "string"}}}}}}}});
        let of = |spec| {
            judge(&schema, &json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "spec": spec}))
        };
        assert_eq!(
            of(json!({"cores": 2, "memory": 1024, "labels": {"a": "b"}, "disks": [{"name": "d"}]})),
            [""; 0]
        );
        for (spec, expected) in [
            (json!({"cores": "2"}), ".spec.cores: expected \"integer\""),
            (json!({"core": 2}), ".spec.core is not in the schema"),
            (json!({"labels": {"a": 1}}), ".spec.labels.a: expected \"string\""),
            (json!({"disks": [{}]}), ".spec.disks[0].name is missing"),
            (json!([]), ".spec: expected \"object\""),
        ] {
            let found = of(spec);
            assert!(found.len() == 1 && found[0].starts_with(expected), "{expected}: {found:?}");
        }
        let missing = judge(&schema, &json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine"}));
        assert_eq!(missing, [".spec is missing"]);
        assert_eq!(judge(&schema, &json!({"apiVersion": "kubevirt.io/v1", "kind": "Pod"})).len(), 1);
    }
}
