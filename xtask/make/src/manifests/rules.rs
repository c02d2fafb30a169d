//! Rules for what is deployed: permissions on the API server, privileges and placement of pods.
//!
//! Permissions are compared with a list, so that they only grow on purpose.

use serde_json::{Value, json};

/// The name of the role that publishes keys of identity tokens, and of its service account.
const PUBLISHER: &str = "xdp-imds-identity";

/// The rules of the publisher: it writes one ConfigMap.
fn publishers_rules() -> Value {
    json!([{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [PUBLISHER], "verbs": ["patch"]}])
}

/// The rules of the agent, in the only ClusterRole.
fn rules() -> Value {
    json!([
        {"apiGroups": ["kubevirt.io"], "resources": ["virtualmachineinstances"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ])
}

fn of_kinds<'a>(objects: &'a [Value], kinds: &'a [&str]) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| kinds.iter().any(|kind| object["kind"] == *kind))
}

/// Returns each difference from the list.
pub(super) fn role_findings(objects: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for role in of_kinds(objects, &["ClusterRole", "Role"]) {
        let title = super::title(role);
        if role.to_string().contains("secrets") {
            found
                .push(format!("{title} names secrets, but the agent reads only secrets that kubelet mounts"));
        }
        let is_publishers = role["kind"] == "Role" && role["metadata"]["name"] == PUBLISHER;
        let expected = if is_publishers { publishers_rules() } else { rules() };
        if role["rules"] != expected {
            found.push(format!("{title} grants {}, expected {expected}", role["rules"]));
        }
    }
    for binding in of_kinds(objects, &["ClusterRoleBinding", "RoleBinding"]) {
        // A service account gets the role of its own name.
        let is_publishers = binding["kind"] == "RoleBinding" && binding["metadata"]["name"] == PUBLISHER;
        let name = if is_publishers { PUBLISHER } else { "xdp-imds" };
        let subjects = json!([{"kind": "ServiceAccount", "name": name, "namespace": "xdp-imds"}]);
        if binding["subjects"] != subjects || binding["roleRef"]["name"] != name {
            found.push(format!("{} binds another subject or another role", super::title(binding)));
        }
    }
    found
}

// Checks the privileges of pods against a list, so that they only grow on purpose.

/// The agent's capabilities. `tests/agent/least_privilege.rs` proves that it needs them.
const CAPABILITIES: [&str; 7] =
    ["NET_ADMIN", "NET_RAW", "BPF", "SYS_ADMIN", "IPC_LOCK", "SYS_PTRACE", "DAC_READ_SEARCH"];

/// Returns each difference from the list.
pub(super) fn privilege_findings(objects: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    let mut agents = 0;
    for object in objects {
        let title = super::title(object);
        let pod = match object["kind"].as_str() {
            Some("DaemonSet" | "Deployment") => &object["spec"]["template"]["spec"],
            Some("CronJob") => &object["spec"]["jobTemplate"]["spec"]["template"]["spec"],
            Some("Pod" | "Job" | "StatefulSet" | "ReplicaSet") => {
                found.push(format!("{title} has no entry in the list of privileges"));
                continue;
            }
            _ => continue,
        };
        let is_agent = object["kind"] == "DaemonSet";
        agents += u32::from(is_agent);
        let added = if is_agent { json!(CAPABILITIES) } else { Value::Null };
        for container in [&pod["initContainers"], &pod["containers"], &pod["ephemeralContainers"]]
            .into_iter()
            .flat_map(|list| list.as_array().into_iter().flatten())
        {
            let security = &container["securityContext"];
            let name = &container["name"];
            if security["capabilities"]["add"] != added || security["capabilities"]["drop"] != json!(["ALL"])
            {
                let has = &security["capabilities"];
                found.push(format!("{title}: {name} has {has}, expected ALL dropped and {added} added"));
            }
            if security["privileged"] == true {
                found.push(format!("{title}: {name} is privileged"));
            }
            if security["readOnlyRootFilesystem"] != true {
                found.push(format!("{title}: {name} can write to its root file system"));
            }
        }
        if !is_agent && (pod["securityContext"]["runAsNonRoot"] != true || pod["hostPID"] == true) {
            found.push(format!("{title} runs as root or sees the node's processes; only the agent may"));
        }
    }
    if agents != 1 {
        found.push(format!("expected one DaemonSet, found {agents}"));
    }
    found
}

// Checks that pods select nodes only by labels that do not change.
//
// The DaemonSet controller deletes a pod whose node selector or required affinity no longer matches its node. KubeVirt
// sets `kubevirt.io/schedulable` to `"false"` whenever virt-handler or its heartbeat stops, so in every upgrade.

/// The labels whose values never change on a node.
const CONSTANT: [&str; 3] = ["kubernetes.io/os", "kubernetes.io/arch", "kubernetes.io/hostname"];

/// Returns each selection by a value that may change.
pub(super) fn placement_findings(objects: &[Value]) -> Vec<String> {
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
    use serde_json::{Value, json};

    use super::{
        CAPABILITIES, PUBLISHER, placement_findings, privilege_findings, publishers_rules, role_findings,
        rules,
    };

    fn role(kind: &str, rules: &Value) -> Value {
        json!({"kind": kind, "metadata": {"name": "xdp-imds", "namespace": "team-a"}, "rules": rules})
    }

    #[test]
    fn a_role_that_names_secrets_or_anything_new_is_found() {
        assert_eq!(role_findings(&[role("ClusterRole", &rules())]), [""; 0]);
        let mut wider = rules();
        wider[0]["resources"] = json!(["virtualmachineinstances", "virtualmachines"]);
        assert_eq!(role_findings(&[role("ClusterRole", &wider)]).len(), 1);
        let mut secrets = rules();
        secrets[1]["resources"] = json!(["events", "secrets"]);
        assert_eq!(role_findings(&[role("Role", &secrets)]).len(), 2);
        let publisher =
            |rules: &Value| json!({"kind": "Role", "metadata": {"name": PUBLISHER}, "rules": rules});
        assert_eq!(role_findings(&[publisher(&publishers_rules())]), [""; 0]);
        assert_eq!(role_findings(&[publisher(&rules())]).len(), 1);
        let stranger =
            json!({"kind": "ClusterRoleBinding", "roleRef": {"name": "cluster-admin"}, "subjects": []});
        assert_eq!(role_findings(&[stranger]).len(), 1);
    }

    fn agent(security: &Value) -> Value {
        json!({"kind": "DaemonSet", "metadata": {"name": "a"}, "spec": {"template": {"spec": {
            "containers": [{"name": "agent", "securityContext": security}]}}}})
    }

    #[test]
    fn one_capability_more_or_less_is_found() {
        let right = json!({"readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"], "add": CAPABILITIES}});
        assert_eq!(privilege_findings(&[agent(&right)]), [""; 0]);
        for (change, expected) in [
            (json!({"capabilities": {"drop": ["ALL"], "add": CAPABILITIES[1..]}}), "expected ALL dropped"),
            (json!({"capabilities": {"add": CAPABILITIES}}), "expected ALL dropped"),
            (json!({"privileged": true}), "is privileged"),
            (json!({"readOnlyRootFilesystem": false}), "can write"),
        ] {
            let mut security = right.clone();
            for (name, value) in change.as_object().expect("a mapping") {
                security[name] = value.clone();
            }
            let found = privilege_findings(&[agent(&security)]);
            assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
        }
        let mut more = agent(&right);
        let more_of = json!([{"name": "mount", "securityContext": {"privileged": true}}]);
        more["spec"]["template"]["spec"]["initContainers"] = more_of;
        assert_eq!(privilege_findings(&[more]).len(), 3);
        assert_eq!(privilege_findings(&[]).len(), 1, "no agent at all");
    }

    #[test]
    fn pods_other_than_the_agent_have_no_privilege() {
        let right = json!({"drop": ["ALL"]});
        let template = |root: bool| {
            json!({"template": {"spec": {
                "securityContext": {"runAsNonRoot": !root},
                "containers": [{"name": "w", "securityContext":
                    {"readOnlyRootFilesystem": true, "capabilities": right}}]}}})
        };
        let deployment =
            |root: bool| json!({"kind": "Deployment", "metadata": {"name": "w"}, "spec": template(root)});
        let cron_job = |root: bool| {
            let spec = json!({"jobTemplate": {"spec": template(root)}});
            json!({"kind": "CronJob", "metadata": {"name": "c"}, "spec": spec})
        };
        let agent = agent(&json!({"readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"], "add": CAPABILITIES}}));
        assert_eq!(privilege_findings(&[agent.clone(), deployment(false), cron_job(false)]), [""; 0]);
        assert_eq!(privilege_findings(&[agent, deployment(true), cron_job(true)]).len(), 2);
    }

    fn placed(pod: &Value) -> Value {
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
            assert_eq!(placement_findings(&[placed(&pod)]).len(), expected, "{pod}");
        }
    }
}
