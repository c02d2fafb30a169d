//! Compares two renderings object by object.

use super::title;
use serde_json::Value;
use std::collections::BTreeMap;

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
    use super::differences;
    use serde_json::{Value, json};

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
