//! Published schemas of objects we write or read, and strict validation against them: a field that a schema lacks is an
//! error, as for `kubectl apply --validate=strict`.
//!
//! `cargo xtask schemas` extracts the schemas; `tests/schemas/README.md` names their source.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

/// The extracted schemas, as JSON.
pub const PUBLISHED: &str = include_str!("../../schemas/published.json");
/// Deepest nesting that is validated; a VM has about 20 levels.
const DEPTH: usize = 64;

/// Schemas to validate objects against.
#[derive(Debug)]
pub struct Schemas(Value);

impl Schemas {
    /// The extracted schemas.
    #[must_use]
    pub fn published() -> &'static Self {
        static PARSED: LazyLock<Schemas> =
            LazyLock::new(|| Schemas(serde_json::from_str(PUBLISHED).expect("the extract is JSON")));
        &PARSED
    }

    /// Other schemas, in the extract's form: `kinds` and `definitions`.
    #[must_use]
    pub fn of(document: Value) -> Self {
        Self(document)
    }

    /// True if there is a schema for the object's kind.
    #[must_use]
    pub fn has(&self, object: &Value) -> bool {
        self.definition(object).is_some()
    }

    fn definition(&self, object: &Value) -> Option<&Value> {
        let kind = format!("{} {}", object["apiVersion"].as_str()?, object["kind"].as_str()?);
        self.0["definitions"].get(self.0["kinds"][kind].as_str()?)
    }

    /// Every error in an object, with its path. A kind without a schema is an error.
    #[must_use]
    pub fn findings(&self, object: &Value) -> Vec<String> {
        let mut found = Vec::new();
        match self.definition(object) {
            Some(definition) => self.validate(definition, object, "", DEPTH, &mut found),
            None => {
                found.push(format!("there is no schema for {} of {}", object["kind"], object["apiVersion"]))
            }
        }
        found
    }

    fn validate(&self, to: &Value, value: &Value, path: &str, depth: usize, found: &mut Vec<String>) {
        let Some(depth) = depth.checked_sub(1) else {
            found.push(format!("{path} is nested too deep"));
            return;
        };
        if let Some(name) = to["$ref"].as_str() {
            return self.validate(&self.0["definitions"][name], value, path, depth, found);
        }
        if value.is_null() && to["nullable"] == true {
            return;
        }
        if !is_of_type(to, value) {
            found.push(format!("{path}: expected {}, found {value}", to["type"]));
            return;
        }
        found.extend(violated_bound(to, value).map(|what| format!("{path}: expected {what}, found {value}")));
        let is_free = to["x-kubernetes-preserve-unknown-fields"] == true;
        for name in to["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if value.get(name).is_none() {
                found.push(format!("{path}.{name} is missing"));
            }
        }
        for (name, inner) in value.as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            match (&to["properties"][name], &to["additionalProperties"]) {
                (Value::Null, Value::Object(_)) => {
                    self.validate(&to["additionalProperties"], inner, &path, depth, found)
                }
                (Value::Null, Value::Bool(true)) => {}
                (Value::Null, _) if is_free => {}
                (Value::Null, _) => found.push(format!("{path} is not in the schema")),
                (known, _) => self.validate(known, inner, &path, depth, found),
            }
        }
        for (at, inner) in value.as_array().into_iter().flatten().enumerate() {
            self.validate(&to["items"], inner, &format!("{path}[{at}]"), depth, found);
        }
    }
}

fn is_of_type(to: &Value, value: &Value) -> bool {
    if to["x-kubernetes-int-or-string"] == true {
        return value.is_string() || value.is_i64() || value.is_u64();
    }
    let is = |kind: &Value| match kind.as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        Some("null") => value.is_null(),
        _ => true,
    };
    match &to["type"] {
        Value::Array(several) => several.iter().any(is),
        one => is(one),
    }
}

/// The first bound that a value of the right type violates.
fn violated_bound(to: &Value, value: &Value) -> Option<String> {
    if let Some(listed) = to["enum"].as_array().filter(|listed| !listed.contains(value)) {
        return Some(format!("one of {}", Value::from(listed.clone())));
    }
    if let (Some(pattern), Some(text)) = (to["pattern"].as_str(), value.as_str()) {
        let is_right = Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(text));
        if !is_right {
            return Some(format!("text like {pattern}"));
        }
    }
    let size = match value {
        Value::String(text) => Some(("Length", text.chars().count())),
        Value::Array(items) => Some(("Items", items.len())),
        Value::Object(fields) => Some(("Properties", fields.len())),
        _ => None,
    };
    let (least, most, found) = match size {
        Some((of, size)) => (format!("min{of}"), format!("max{of}"), u32::try_from(size).ok().map(f64::from)),
        None => ("minimum".into(), "maximum".into(), value.as_f64()),
    };
    let found = found?;
    let is_less = to[&least].as_f64().is_some_and(|least| found < least);
    let is_more = to[&most].as_f64().is_some_and(|most| found > most);
    (is_less || is_more).then(|| format!("{least} {}, {most} {}", to[&least], to[&most]))
}

#[cfg(test)]
mod tests {
    use super::Schemas;
    use serde_json::{Value, json};

    fn findings(schema: Value, value: Value) -> Vec<String> {
        let definitions = json!({
            "Thing": {"type": "object", "required": ["spec"], "properties": {
                "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "spec": {"$ref": "Spec"}}},
            "Spec": schema,
        });
        let schemas = Schemas::of(json!({"kinds": {"a/v1 Thing": "Thing"}, "definitions": definitions}));
        schemas.findings(&json!({"apiVersion": "a/v1", "kind": "Thing", "spec": value}))
    }

    #[test]
    fn every_rule_of_a_schema_is_enforced() {
        let list = json!({"type": "array", "minItems": 1, "items": {"type": "object", "required": ["name"],
            "properties": {"name": {"type": "string"}}}});
        let map = json!({"type": "object", "additionalProperties": {"type": "string"}});
        let text = json!({"type": "string", "minLength": 2, "pattern": "^[0-9]+[ms]$"});
        let free = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let either = json!({"x-kubernetes-int-or-string": true});
        let number = json!({"type": "integer", "minimum": 1, "maximum": 9});
        for (schema, value, expected) in [
            (&list, json!([{"name": "a"}]), ""),
            (&list, json!([]), ".spec: expected minItems 1"),
            (&list, json!([{}]), ".spec[0].name is missing"),
            (&list, json!([{"name": "a", "nam": 1}]), ".spec[0].nam is not in the schema"),
            (&list, json!({}), ".spec: expected \"array\""),
            (&map, json!({"a": "b"}), ""),
            (&map, json!({"a": 1}), ".spec.a: expected \"string\""),
            (&text, json!("30s"), ""),
            (&text, json!("30"), ".spec: expected text like"),
            (&free, json!({"a": [1]}), ""),
            (&either, json!(1), ""),
            (&either, json!("1"), ""),
            (&either, json!(1.5), ".spec: expected"),
            (&number, json!(9), ""),
            (&number, json!(10), ".spec: expected minimum 1, maximum 9"),
            (&json!({"enum": ["A"]}), json!("B"), ".spec: expected one of [\"A\"]"),
            (&json!({"type": ["string", "null"]}), json!(null), ""),
            (&json!({"type": "object", "nullable": true}), json!(null), ""),
            (&json!({"type": "object"}), json!(null), ".spec: expected \"object\""),
            (&json!({"type": "object"}), json!({"a": 1}), ".spec.a is not in the schema"),
        ] {
            let found = findings(schema.clone(), value.clone());
            let is_right = match expected {
                "" => found.is_empty(),
                expected => found.len() == 1 && found[0].starts_with(expected),
            };
            assert!(is_right, "{schema} {value}: {found:?}");
        }
    }

    #[test]
    fn a_kind_without_a_schema_is_an_error() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod"});
        assert!(!Schemas::published().has(&pod));
        assert_eq!(Schemas::published().findings(&pod), [r#"there is no schema for "Pod" of "v1""#]);
    }

    #[test]
    fn endless_nesting_is_an_error() {
        let endless = json!({"type": "array", "items": {"$ref": "Spec"}});
        let deep = (0..200).fold(json!([]), |inner, _| json!([inner]));
        let found = findings(endless, deep);
        assert!(found.len() == 1 && found[0].ends_with("is nested too deep"), "{found:?}");
    }
}
