//! Defaults that API servers fill in inside lists: left out, `kubectl apply` says `configured` each time, and GitOps tools see
//! drift that no sync ends (a list without keys to merge by is compared as a whole).

use serde_json::Value;

/// Fields that must be written, by kind and by where they are; `*` is each item of a list.
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

/// Each default that is left out.
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for object in objects {
        for (kind, path, fields) in SPELLED_OUT {
            if object["kind"] != kind {
                continue;
            }
            for place in places(object, path) {
                let missing = fields.iter().filter(|field| place.get(field).is_none());
                let title = super::title(object);
                found.extend(missing.map(|field| format!("{title}: {path} leaves {field} to its default")));
            }
        }
    }
    found
}

/// What is at a path.
fn places<'a>(object: &'a Value, path: &str) -> Vec<&'a Value> {
    path.split('/').fold(vec![object], |places, step| {
        let next = |place: &'a Value| match step {
            "*" => place.as_array().into_iter().flatten().collect::<Vec<_>>(),
            field => place.get(field).into_iter().collect(),
        };
        places.into_iter().flat_map(next).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::findings;
    use serde_json::json;

    #[test]
    fn a_default_that_is_left_out_is_found_in_every_item() {
        let rules = json!([{"scope": "*"}, {"apiGroups": [""]}, {}]);
        let policy = json!({"kind": "MutatingAdmissionPolicy", "metadata": {"name": "p"}, "spec": {"matchConstraints":
            {"matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}, "resourceRules": rules}}});
        let left =
            "MutatingAdmissionPolicy -/p: spec/matchConstraints/resourceRules/* leaves scope to its default";
        assert_eq!(findings(&[policy]), [left, left]);
        let other = json!({"kind": "ConfigMap", "metadata": {"name": "c"}, "webhooks": [{}]});
        assert_eq!(findings(&[other]), [""; 0]);
    }
}
