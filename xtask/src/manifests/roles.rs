//! What the agent may ask of an API server: a snapshot, which only grows on purpose.

use serde_json::{Value, json};

/// Values that grant named Secrets of one namespace.
pub(super) const NAMED_SECRETS: &str = "{secretAccess: [{namespace: team-a, names: [vm-a, vm-b]}]}";

/// The rules of the one ClusterRole.
fn rules() -> Value {
    json!([
        {"apiGroups": ["kubevirt.io"], "resources": ["virtualmachineinstances"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    ])
}

fn of_kinds<'a>(objects: &'a [Value], kinds: &'a [&str]) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| kinds.iter().any(|kind| object["kind"] == *kind))
}

/// What differs from the snapshot.
pub(super) fn findings(objects: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    for role in of_kinds(objects, &["ClusterRole", "Role"]) {
        let title = super::title(role);
        if role.to_string().contains("secrets") {
            found.push(format!("{title} names secrets: the agent reads them where kubelet has mounted them"));
        }
        if role["rules"] != rules() {
            found.push(format!("{title} grants {}, expected {}", role["rules"], rules()));
        }
    }
    for binding in of_kinds(objects, &["ClusterRoleBinding", "RoleBinding"]) {
        let subjects = json!([{"kind": "ServiceAccount", "name": "xdp-imds", "namespace": "xdp-imds"}]);
        if binding["subjects"] != subjects || binding["roleRef"]["name"] != "xdp-imds" {
            found.push(format!("{} binds somebody else, or to something else", super::title(binding)));
        }
    }
    found
}

/// What is wrong with the roles of [`NAMED_SECRETS`], which are the only ones that may name secrets.
pub(super) fn of_named_secrets(objects: &[Value]) -> Vec<String> {
    let expected = json!([{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["vm-a", "vm-b"], "verbs": ["get"]}]);
    let roles: Vec<_> = of_kinds(objects, &["Role"]).collect();
    let is_right = |role: &Value| role["rules"] == expected && role["metadata"]["namespace"] == "team-a";
    let wide = of_kinds(objects, &["ClusterRole"]).any(|role| role["rules"] != rules());
    if roles.len() == 1 && is_right(roles[0]) && !wide {
        return Vec::new();
    }
    vec![format!("secretAccess makes {roles:?}, expected one Role in team-a with {expected}")]
}

#[cfg(test)]
mod tests {
    use super::{findings, of_named_secrets, rules};
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

    #[test]
    fn named_secrets_are_of_one_namespace_and_by_name() {
        let named = json!([{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["vm-a", "vm-b"], "verbs": ["get"]}]);
        let agents = role("ClusterRole", &rules());
        assert_eq!(of_named_secrets(&[agents.clone(), role("Role", &named)]), [""; 0]);
        let all = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]);
        assert_eq!(of_named_secrets(&[agents.clone(), role("Role", &all)]).len(), 1);
        assert_eq!(of_named_secrets(&[agents, role("ClusterRole", &named)]).len(), 1);
    }
}
