//! Checks the privileges of pods against a list, so that they only grow on purpose.

use serde_json::{Value, json};

/// The agent's capabilities. `tests/agent/least_privilege.rs` proves that it needs them.
const CAPABILITIES: [&str; 7] =
    ["NET_ADMIN", "NET_RAW", "BPF", "SYS_ADMIN", "IPC_LOCK", "SYS_PTRACE", "DAC_READ_SEARCH"];

/// Returns each difference from the list.
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::{CAPABILITIES, findings};
    use serde_json::{Value, json};

    fn agent(security: &Value) -> Value {
        json!({"kind": "DaemonSet", "metadata": {"name": "a"}, "spec": {"template": {"spec": {
            "containers": [{"name": "agent", "securityContext": security}]}}}})
    }

    #[test]
    fn one_capability_more_or_less_is_found() {
        let right = json!({"readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"], "add": CAPABILITIES}});
        assert_eq!(findings(&[agent(&right)]), [""; 0]);
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
            let found = findings(&[agent(&security)]);
            assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
        }
        let mut more = agent(&right);
        let more_of = json!([{"name": "mount", "securityContext": {"privileged": true}}]);
        more["spec"]["template"]["spec"]["initContainers"] = more_of;
        assert_eq!(findings(&[more]).len(), 3);
        assert_eq!(findings(&[]).len(), 1, "no agent at all");
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
        assert_eq!(findings(&[agent.clone(), deployment(false), cron_job(false)]), [""; 0]);
        assert_eq!(findings(&[agent, deployment(true), cron_job(true)]).len(), 2);
    }
}
