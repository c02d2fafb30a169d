//! What the cluster will do to a VM, as its VMI shows it: a live migration, a drain of its node, its deletion.

use metadata_content::record::event::ScheduledEvent;
use serde_json::{Value, json};

use crate::kubevirt::vmi::{MigrationState, Vmi};

/// The events of a VMI. No event names a node, because tenants need not know the nodes.
pub(super) fn of(vmi: &Vmi) -> Vec<ScheduledEvent> {
    let events = [evacuation(vmi), vmi.status.migration_state.as_ref().and_then(migration), deletion(vmi)];
    // The API server writes these fields. An unexpected value must not make the whole record invalid.
    events.into_iter().flatten().filter_map(|event| serde_json::from_value(event).ok()).collect()
}

/// A node that is drained: KubeVirt will migrate the VM, and has not begun.
fn evacuation(vmi: &Vmi) -> Option<Value> {
    vmi.status.evacuation_node_name.as_deref().filter(|node| !node.is_empty())?;
    let is_migrating = vmi.status.migration_state.as_ref().is_some_and(|state| !is_over(state));
    (!is_migrating)
        .then(|| json!({ "id": "evacuation", "kind": "freeze", "description": "the node is drained" }))
}

/// KubeVirt sets neither `completed` nor `failed` for some moments after the end.
fn is_over(state: &MigrationState) -> bool {
    state.completed || state.failed || state.end_timestamp.is_some()
}

/// The id of the event of a live migration.
pub(in crate::kubevirt) fn migration_id(migration: &MigrationState) -> Option<String> {
    let uid = &migration.migration_uid;
    (!uid.is_empty()).then(|| format!("migration-{uid}"))
}

/// A live migration. Its target is prepared for some seconds before memory is sent, and the guest stops at the end of
/// that.
fn migration(migration: &MigrationState) -> Option<Value> {
    let id = migration_id(migration)?;
    let state = match migration {
        MigrationState { failed: true, .. } => "cancelled",
        over if is_over(over) => "completed",
        MigrationState { start_timestamp: Some(_), .. } => "started",
        _ => "scheduled",
    };
    Some(json!({ "id": id, "kind": "freeze", "state": state, "description": "live migration" }))
}

/// The end of the VMI: KubeVirt deletes it when its VM is stopped, restarted or deleted. It shuts the guest down at
/// once, and ends it at the time.
fn deletion(vmi: &Vmi) -> Option<Value> {
    let time = vmi.metadata.deletion_timestamp.as_deref()?;
    let event = json!({
        "id": "deletion", "kind": "terminate", "state": "started", "not_before": time, "description": "the VM is stopped",
    });
    Some(event)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::of;
    use crate::kubevirt::vmi::Vmi;

    fn vmi(status: Value, deleted: Option<&str>) -> Vmi {
        Vmi::from_value(json!({
            "metadata": {"name": "web-1", "namespace": "shop", "uid": "u", "deletionTimestamp": deleted},
            "spec": {}, "status": status,
        }))
        .expect("a VMI")
    }

    /// The states of a migration and of a deletion in the order of a recording of KubeVirt 1.9, and of a drain.
    #[test]
    fn what_the_cluster_does_to_a_vm_is_an_event() {
        let uid = "e9767482-e6bf-4c5e-a3db-95f42c057701";
        let start = "2026-11-25T15:47:57Z";
        let end = "2026-11-25T15:48:31Z";
        let migration = |more: Value| {
            let mut state = json!({"migrationUid": uid, "sourceNode": "a", "targetNode": "b"});
            state.as_object_mut().expect("a mapping").extend(more.as_object().cloned().expect("a mapping"));
            json!({"migrationState": state})
        };
        let drained = |status: Value| {
            let mut status = status;
            status["evacuationNodeName"] = "a".into();
            status
        };
        let migrating = format!("migration-{uid} freeze");
        for (status, deleted, expected) in [
            (json!({}), None, vec![]),
            (json!({"migrationState": null, "evacuationNodeName": ""}), None, vec![]),
            (migration(json!({})), None, vec![format!("{migrating} scheduled")]),
            (migration(json!({"startTimestamp": start})), None, vec![format!("{migrating} started")]),
            (
                migration(json!({"startTimestamp": start, "endTimestamp": end})),
                None,
                vec![format!("{migrating} completed")],
            ),
            (
                migration(
                    json!({"startTimestamp": start, "endTimestamp": end, "completed": true, "failed": true}),
                ),
                None,
                vec![format!("{migrating} cancelled")],
            ),
            (drained(json!({})), None, vec!["evacuation freeze scheduled".to_owned()]),
            (drained(migration(json!({}))), None, vec![format!("{migrating} scheduled")]),
            (
                drained(migration(json!({"completed": true}))),
                None,
                vec!["evacuation freeze scheduled".to_owned(), format!("{migrating} completed")],
            ),
            (json!({}), Some(end), vec!["deletion terminate started".to_owned()]),
            // Never seen, and no reason to serve the VM nothing.
            (json!({"migrationState": {"migrationUid": "a b"}}), Some("soon"), vec![]),
        ] {
            let events = of(&vmi(status.clone(), deleted));
            let found: Vec<_> = events
                .iter()
                .map(|event| format!("{} {} {}", event.id, event.kind.name(), event.state.name()))
                .collect();
            assert_eq!(found, expected, "{status} {deleted:?}");
            assert!(events.iter().all(|event| !event.description().contains("kvnode")));
        }
    }
}
