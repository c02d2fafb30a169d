//! Checks permissions on the API server against a list, so that they only grow on purpose.

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
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::{PUBLISHER, findings, publishers_rules, rules};
    use serde_json::{Value, json};

    fn role(kind: &str, rules: &Value) -> Value {
        json!({"kind": kind, "metadata": {"name": "xdp-imds", "namespace": "team-a"}, "rules": rules})
    }

    #[test]
    fn a_role_that_names_secrets_or_anything_new_is_found() {
        assert_eq!(findings(&[role("ClusterRole", &rules())]), [""; 0]);
        let mut wider = rules();
        wider[0]["resources"] = json!(["virtualmachineinstances", "virtualmachines"]);
        assert_eq!(findings(&[role("ClusterRole", &wider)]).len(), 1);
        let mut secrets = rules();
        secrets[1]["resources"] = json!(["events", "secrets"]);
        assert_eq!(findings(&[role("Role", &secrets)]).len(), 2);
        let publisher =
            |rules: &Value| json!({"kind": "Role", "metadata": {"name": PUBLISHER}, "rules": rules});
        assert_eq!(findings(&[publisher(&publishers_rules())]), [""; 0]);
        assert_eq!(findings(&[publisher(&rules())]).len(), 1);
        let stranger =
            json!({"kind": "ClusterRoleBinding", "roleRef": {"name": "cluster-admin"}, "subjects": []});
        assert_eq!(findings(&[stranger]).len(), 1);
    }
}
