//! Keeps only the keywords of a schema that decide whether an object is valid.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Keywords that are copied unchanged.
const KEPT: [&str; 13] = [
    "type",
    "required",
    "enum",
    "pattern",
    "nullable",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
];
/// Keywords that describe, fill in defaults or control merging, and rules that `testbed::schema` does not check
/// (`format`, CEL).
const LEFT_OUT: [&str; 11] = [
    "description",
    "title",
    "default",
    "example",
    "format",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-patch-merge-key",
    "x-kubernetes-patch-strategy",
    "x-kubernetes-validations",
];
/// The definition of every object's metadata.
const METADATA: &str = "k8s.io.apimachinery.pkg.apis.meta.v1.ObjectMeta";
/// A map with arbitrary fields, which OpenAPI 2 cannot express.
const FREE: &str = "k8s.io.apimachinery.pkg.apis.meta.v1.FieldsV1";
const REFERENCE: &str = "#/definitions/";

/// Returns the wanted definitions and all that they refer to.
pub(super) fn closure(definitions: &Value, mut wanted: Vec<String>) -> Result<BTreeSet<String>> {
    let mut needed = BTreeSet::new();
    while let Some(name) = wanted.pop() {
        let definition = definitions.get(&name).with_context(|| format!("no definition {name}"))?;
        if needed.insert(name) {
            references(definition, &mut wanted);
        }
    }
    Ok(needed)
}

fn references(schema: &Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(words) => {
            let name = words.get("$ref").and_then(Value::as_str);
            found.extend(name.and_then(|name| name.strip_prefix(REFERENCE)).map(ToOwned::to_owned));
            words.values().for_each(|inner| references(inner, found));
        }
        Value::Array(several) => several.iter().for_each(|inner| references(inner, found)),
        _ => {}
    }
}

/// Returns the schema without the keywords of [`LEFT_OUT`].
pub(super) fn prune(schema: &Value) -> Result<Value> {
    let words = schema.as_object().with_context(|| format!("expected a schema, found {schema}"))?;
    let mut kept = Map::new();
    for (word, value) in words {
        let value = match word.as_str() {
            "$ref" => {
                let name = value.as_str().and_then(|name| name.strip_prefix(REFERENCE));
                let name = name.with_context(|| format!("unexpected reference: {value}"))?;
                if name == FREE {
                    return Ok(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}));
                }
                name.into()
            }
            "properties" => {
                let fields = value.as_object().context("expected properties to be a mapping")?;
                let fields = fields.iter().map(|(name, field)| Ok((name.clone(), prune(field)?)));
                Value::Object(fields.collect::<Result<_>>()?)
            }
            "items" => prune(value)?,
            "additionalProperties" if value.is_boolean() => value.clone(),
            "additionalProperties" => prune(value)?,
            // `x-kubernetes-int-or-string` already says which two types are valid.
            "anyOf" if words.contains_key("x-kubernetes-int-or-string") => continue,
            word if KEPT.contains(&word) => value.clone(),
            word if LEFT_OUT.contains(&word) => continue,
            word => bail!("unknown keyword `{word}`: {value}"),
        };
        kept.insert(word.clone(), value);
    }
    if words.get("format").is_some_and(|format| format == "int-or-string") {
        return Ok(json!({"x-kubernetes-int-or-string": true}));
    }
    Ok(kept.into())
}

/// Returns the schema of a CRD's kind in each served version, without the properties of its spec in `without`.
pub(super) fn definitions_of_crd(crd: &Value, without: &[&str]) -> Result<Vec<(String, Value)>> {
    let spec = &crd["spec"];
    let text = |value: &Value| value.as_str().map(ToOwned::to_owned).context("the CRD lacks a name");
    let (group, kind) = (text(&spec["group"])?, text(&spec["names"]["kind"])?);
    let versions = spec["versions"].as_array().context("the CRD lacks versions")?;
    let served = versions.iter().filter(|version| version["served"] == true);
    served
        .map(|version| {
            let mut schema = version["schema"]["openAPIV3Schema"].clone();
            for property in without {
                let properties = schema["properties"]["spec"]["properties"].as_object_mut();
                let there = properties.and_then(|properties| properties.remove(*property));
                ensure!(there.is_some(), "cannot leave out {property}: the spec of {kind} lacks it");
            }
            let name = format!("{group}/{} {kind}", text(&version["name"])?);
            Ok((name, with_metadata(prune(&schema)?)))
        })
        .collect()
}

/// Adds the schema of the metadata. A CRD says only that there is metadata, because every API server knows its fields.
pub(super) fn with_metadata(mut schema: Value) -> Value {
    schema["properties"]["metadata"] = json!({"$ref": METADATA});
    schema
}

#[cfg(test)]
mod tests {
    use super::{closure, definitions_of_crd, prune};
    use serde_json::{Value, json};

    #[test]
    fn needed_definitions_are_found_through_circular_references() {
        let reference = |name: &str| json!({"$ref": format!("#/definitions/{name}")});
        let definitions = json!({
            "a": {"properties": {"b": reference("b")}}, "b": {"items": reference("c")},
            "c": {"additionalProperties": reference("a")}, "d": reference("a"),
        });
        let needed = closure(&definitions, vec!["a".into()]).expect("all are there");
        assert_eq!(needed.into_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
        closure(&definitions, vec!["e".into()]).expect_err("there is no e");
    }

    #[test]
    fn deciding_keywords_are_kept_and_unknown_ones_are_an_error() {
        let schema = json!({"description": "d", "type": "object", "required": ["description"], "properties": {
            "description": {"type": "string", "description": "a field of this name", "default": ""},
            "size": {"type": "string", "format": "int-or-string"},
            "port": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": true},
            "meta": {"default": {}, "$ref": "#/definitions/m"}}});
        let expected = json!({"type": "object", "required": ["description"], "properties": {
            "description": {"type": "string"},
            "size": {"x-kubernetes-int-or-string": true},
            "port": {"x-kubernetes-int-or-string": true},
            "meta": {"$ref": "m"}}});
        assert_eq!(prune(&schema).expect("a schema"), expected);
        for odd in [json!({"oneOf": []}), json!({"anyOf": []}), json!({"items": {"not": {}}}), json!(1)] {
            prune(&odd).expect_err(&odd.to_string());
        }
    }

    #[test]
    fn a_kind_is_taken_in_every_served_version() {
        let version = |name: &str, served: bool| {
            let spec =
                json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}});
            let schema =
                json!({"type": "object", "properties": {"metadata": {"type": "object"}, "spec": spec}});
            json!({"name": name, "served": served, "schema": {"openAPIV3Schema": schema}})
        };
        let crd = json!({"spec": {"group": "g", "names": {"kind": "K"},
            "versions": [version("v1", true), version("v1alpha1", false)]}});
        let found = definitions_of_crd(&crd, &["b"]).expect("a CRD");
        let [(name, schema)] = &found[..] else { panic!("{found:?}") };
        assert_eq!(name, "g/v1 K");
        assert_eq!(schema["properties"]["spec"]["properties"], json!({"a": {"type": "string"}}));
        assert!(schema["properties"]["metadata"]["$ref"].is_string());
        definitions_of_crd(&crd, &["c"]).expect_err("there is no c");
        assert_eq!(definitions_of_crd(&Value::Null, &[]).ok(), None);
    }
}
