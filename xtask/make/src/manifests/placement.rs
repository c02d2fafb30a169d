//! Checks that pods select nodes only by labels that do not change.
//!
//! The DaemonSet controller deletes a pod whose node selector or required affinity no longer matches its node. KubeVirt
//! sets `kubevirt.io/schedulable` to `"false"` whenever virt-handler or its heartbeat stops, so in every upgrade.

use serde_json::Value;

/// The labels whose values never change on a node.
const CONSTANT: [&str; 3] = ["kubernetes.io/os", "kubernetes.io/arch", "kubernetes.io/hostname"];

/// Returns each selection by a value that may change.
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for object in objects.iter().filter(|object| object["kind"] == "DaemonSet") {
        let title = super::title(object);
        let pod = &object["spec"]["template"]["spec"];
        let selected = pod["nodeSelector"].as_object().into_iter().flat_map(|labels| labels.keys());
        for label in selected.filter(|label| !CONSTANT.contains(&label.as_str())) {
            found.push(format!("{title} selects nodes by the value of {label}"));
        }
        let required = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
        let terms = required["nodeSelectorTerms"].as_array().into_iter().flatten();
        for requirement in terms.flat_map(|term| {
            let of = |field: &str| term[field].as_array().into_iter().flatten();
            of("matchExpressions").chain(of("matchFields"))
        }) {
            let label = requirement["key"].as_str().unwrap_or_default();
            if requirement["operator"] != "Exists" && !CONSTANT.contains(&label) {
                found.push(format!("{title} requires a value of {label}"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::findings;
    use serde_json::{Value, json};

    fn agent(pod: &Value) -> Value {
        json!({"kind": "DaemonSet", "metadata": {"name": "a"}, "spec": {"template": {"spec": pod}}})
    }

    fn requiring(requirement: &Value) -> Value {
        let terms = json!([{"matchExpressions": [requirement]}]);
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": terms}}}})
    }

    #[test]
    fn selecting_nodes_by_a_value_that_changes_is_found() {
        let schedulable = "kubevirt.io/schedulable";
        for (pod, expected) in [
            (json!({}), 0),
            (json!({"nodeSelector": {"kubernetes.io/os": "linux"}}), 0),
            (requiring(&json!({"key": schedulable, "operator": "Exists"})), 0),
            (json!({"nodeSelector": {"kubernetes.io/os": "linux", schedulable: "true"}}), 1),
            (requiring(&json!({"key": schedulable, "operator": "In", "values": ["true"]})), 1),
            (requiring(&json!({"key": schedulable, "operator": "NotIn", "values": ["false"]})), 1),
            (requiring(&json!({"key": schedulable, "operator": "DoesNotExist"})), 1),
        ] {
            assert_eq!(findings(&[agent(&pod)]).len(), expected, "{pod}");
        }
    }
}
