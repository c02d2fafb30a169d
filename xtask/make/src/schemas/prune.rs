//! What of a schema decides whether an object is valid.

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Kept as they are.
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
/// Explain, fill in, merge; or ask what a list of rules cannot (`format`, CEL).
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
/// The metadata of every object.
const METADATA: &str = "k8s.io.apimachinery.pkg.apis.meta.v1.ObjectMeta";
/// A map of anything, which OpenAPI 2 does not say.
const FREE: &str = "k8s.io.apimachinery.pkg.apis.meta.v1.FieldsV1";
const REFERENCE: &str = "#/definitions/";

/// The definitions that some need, themselves included.
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

/// The schema without what decides nothing.
pub(super) fn prune(schema: &Value) -> Result<Value> {
    let words = schema.as_object().with_context(|| format!("expected a schema, found {schema}"))?;
    let mut kept = Map::new();
    for (word, value) in words {
        let value = match word.as_str() {
            "$ref" => {
                let name = value.as_str().and_then(|name| name.strip_prefix(REFERENCE));
                let name = name.with_context(|| format!("another reference: {value}"))?;
                if name == FREE {
                    return Ok(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}));
                }
                name.into()
            }
            "properties" => {
                let fields = value.as_object().context("properties are a mapping")?;
                let fields = fields.iter().map(|(name, field)| Ok((name.clone(), prune(field)?)));
                Value::Object(fields.collect::<Result<_>>()?)
            }
            "items" => prune(value)?,
            "additionalProperties" if value.is_boolean() => value.clone(),
            "additionalProperties" => prune(value)?,
            // That there are two types says the other word.
            "anyOf" if words.contains_key("x-kubernetes-int-or-string") => continue,
            word if KEPT.contains(&word) => value.clone(),
            word if LEFT_OUT.contains(&word) => continue,
            word => bail!("`{word}` is not known: {value}"),
        };
        kept.insert(word.clone(), value);
    }
    if words.get("format").is_some_and(|format| format == "int-or-string") {
        return Ok(json!({"x-kubernetes-int-or-string": true}));
    }
    Ok(kept.into())
}

/// The schema of a CRD's kind in each version that is served, without some properties of its spec.
pub(super) fn definitions_of_crd(crd: &Value, without: &[&str]) -> Result<Vec<(String, Value)>> {
    let spec = &crd["spec"];
    let text = |value: &Value| value.as_str().map(ToOwned::to_owned).context("a CRD's names");
    let (group, kind) = (text(&spec["group"])?, text(&spec["names"]["kind"])?);
    let versions = spec["versions"].as_array().context("a CRD's versions")?;
    let served = versions.iter().filter(|version| version["served"] == true);
    served
        .map(|version| {
            let mut schema = version["schema"]["openAPIV3Schema"].clone();
            for property in without {
                let properties = schema["properties"]["spec"]["properties"].as_object_mut();
                let there = properties.and_then(|properties| properties.remove(*property));
                ensure!(there.is_some(), "{kind}'s spec has no {property} to leave out");
            }
            let name = format!("{group}/{} {kind}", text(&version["name"])?);
            Ok((name, with_metadata(prune(&schema)?)))
        })
        .collect()
}

/// A custom resource's schema says only that there is metadata: every API server knows its fields.
pub(super) fn with_metadata(mut schema: Value) -> Value {
    schema["properties"]["metadata"] = json!({"$ref": METADATA});
    schema
}

#[cfg(test)]
mod tests {
    use super::{closure, definitions_of_crd, prune};
    use serde_json::{Value, json};

    #[test]
    fn what_is_needed_is_found_through_references_that_turn_back() {
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
    fn what_decides_is_kept_and_what_is_not_known_is_an_error() {
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
    fn a_kind_is_taken_in_every_version_that_is_served() {
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
