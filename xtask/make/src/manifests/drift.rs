//! Finds fields that are omitted inside lists and that API servers fill in with defaults. After such an omission,
//! `kubectl apply` reports `configured` each time, and GitOps tools see a drift that no sync ends, because a list
//! without merge keys is compared as a whole.

use serde_json::Value;

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
                let title = super::title(object);
                found.extend(
                    missing.map(|field| format!("{title}: {path} omits {field}, which has a default")),
                );
            }
        }
    }
    found
}

/// Returns the values at a path.
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
    fn an_omitted_default_is_found_in_every_item() {
        let rules = json!([{"scope": "*"}, {"apiGroups": [""]}, {}]);
        let policy = json!({"kind": "MutatingAdmissionPolicy", "metadata": {"name": "p"}, "spec": {"matchConstraints":
            {"matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}, "resourceRules": rules}}});
        let left = "MutatingAdmissionPolicy -/p: spec/matchConstraints/resourceRules/* omits scope, which has a default";
        assert_eq!(findings(&[policy]), [left, left]);
        let other = json!({"kind": "ConfigMap", "metadata": {"name": "c"}, "webhooks": [{}]});
        assert_eq!(findings(&[other]), [""; 0]);
    }
}
