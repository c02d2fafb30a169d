//! Checks the agent's permissions on the API server against a list, so that they only grow on purpose.

use serde_json::{Value, json};

/// The rules of the only ClusterRole.
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
        if role["rules"] != rules() {
            found.push(format!("{title} grants {}, expected {}", role["rules"], rules()));
        }
    }
    for binding in of_kinds(objects, &["ClusterRoleBinding", "RoleBinding"]) {
        let subjects = json!([{"kind": "ServiceAccount", "name": "xdp-imds", "namespace": "xdp-imds"}]);
        if binding["subjects"] != subjects || binding["roleRef"]["name"] != "xdp-imds" {
            found.push(format!("{} binds another subject or another role", super::title(binding)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{findings, rules};
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
        let stranger =
            json!({"kind": "ClusterRoleBinding", "roleRef": {"name": "cluster-admin"}, "subjects": []});
        assert_eq!(findings(&[stranger]).len(), 1);
    }
}
