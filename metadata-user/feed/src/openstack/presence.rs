//! What Neutron's ML2/OVN driver reads of a node to list its metadata agent (`openstack network agent list`) and to tell
//! whether it is alive: `external_ids` of the node's row of `Chassis_Private`.
//!
//! | Key | Value |
//! |---|---|
//! | `neutron:ovn-metadata-id` | the agent's id, which follows from the chassis' name |
//! | `neutron:ovn-metadata-sb-cfg` | the last `nb_cfg` of `SB_Global` that the agent has seen; Neutron increases it |
//! | `neutron:ovn-bridge` | the integration bridge, which Neutron tells Nova of; `br-int` without it |
//!
//! Nothing else is written, and no other row. With OVN's access control (ovn-northd(8), "RBAC") ovn-controller's
//! certificate may write this row.

use metadata_content::record::values::is_uuid;
use serde_json::{Value, json};
use sha1::{Digest as _, Sha1};
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;
use tokio::time::Instant;

use super::ovsdb::{MonitorStart, MonitorUpdate, MonitoredTables, OvsdbError};

/// The table of the rows that nodes write themselves, since OVN 20.09.
pub(super) const TABLE: &str = "Chassis_Private";
/// Longest random delay until a new `nb_cfg` is acknowledged, as in Neutron's agent: all nodes see it at once.
pub const SPREAD: Duration = Duration::from_secs(10);
const ID: &str = "neutron:ovn-metadata-id";
const SEEN: &str = "neutron:ovn-metadata-sb-cfg";
const BRIDGE: &str = "neutron:ovn-bridge";
/// `OVN_METADATA_UUID_NAMESPACE` of Neutron, for chassis whose names are no UUIDs.
const NAMESPACE: u128 = 0xd34b_f9f6_da32_4871_9af8_15a4_626b_41ab;

/// The row of this node, and what is to be written into it.
pub(super) struct NeutronPresence {
    chassis: String,
    bridge: String,
    tables: MonitoredTables,
    /// When the row shall be written.
    due: Option<Instant>,
    /// The row and the `nb_cfg` that were written last, or could not be. Whoever has changed them since, or refuses it,
    /// is left alone until the next one.
    tried: Option<(String, i64)>,
}

impl NeutronPresence {
    pub(super) fn new(chassis: &str, bridge: &str) -> Self {
        let (chassis, bridge) = (chassis.to_owned(), bridge.to_owned());
        Self { chassis, bridge, tables: MonitoredTables::default(), due: None, tried: None }
    }

    /// The tables to follow.
    pub(super) fn wanted(&self) -> Value {
        json!({
            "SB_Global": [{"columns": ["nb_cfg"]}],
            TABLE: [{"columns": ["external_ids"], "where": [["name", "==", self.chassis]]}],
        })
    }

    pub(super) fn begin(&mut self, start: MonitorStart) -> Result<(), OvsdbError> {
        self.tables.begin(start)?;
        self.plan();
        Ok(())
    }

    pub(super) fn apply(&mut self, update: MonitorUpdate) -> Result<(), OvsdbError> {
        self.tables.apply(update)?;
        self.plan();
        Ok(())
    }

    /// When [`NeutronPresence::transaction`] is to be sent; `None` for never, as things are.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The transaction that writes the row.
    pub(super) fn transaction(&mut self) -> Vec<Value> {
        let seen = self.nb_cfg();
        (self.due, self.tried) = (None, Some((self.row_uuid(), seen)));
        let changed = [(BRIDGE, self.bridge.clone()), (SEEN, seen.to_string())];
        let keys: Vec<_> = changed.iter().map(|(key, _)| *key).collect();
        // An existing id stays, because `insert` does not replace the value of a key (RFC 7047 §5.1).
        let id = (ID, agent_id(&self.chassis));
        let pairs: Vec<_> = changed.into_iter().chain([id]).map(|(key, value)| json!([key, value])).collect();
        vec![json!({
            "op": "mutate", "table": TABLE, "where": [["name", "==", self.chassis]],
            "mutations": [["external_ids", "delete", ["set", keys]], ["external_ids", "insert", ["map", pairs]]],
        })]
    }

    fn nb_cfg(&self) -> i64 {
        self.tables.rows("SB_Global").find_map(|row| row.integer("nb_cfg")).unwrap_or_default()
    }

    fn row_uuid(&self) -> String {
        self.tables.uuids(TABLE).first().copied().unwrap_or_default().to_owned()
    }

    fn plan(&mut self) {
        let seen = self.nb_cfg();
        let Some(row) = self.tables.rows(TABLE).next() else {
            self.due = None;
            return;
        };
        let is_new = row.external_id(ID).is_none()
            || row.external_id(SEEN).is_none()
            || row.external_id(BRIDGE) != Some(&self.bridge);
        let is_known = row.external_id(SEEN) == Some(&*seen.to_string());
        let tried = Some((self.row_uuid(), seen));
        if self.tried == tried || (is_known && !is_new) {
            self.due = None;
        } else if is_new {
            self.due = Some(Instant::now());
        } else {
            let delay = RandomState::new().hash_one(seen) % (SPREAD.as_millis() as u64 + 1);
            self.due.get_or_insert_with(|| Instant::now() + Duration::from_millis(delay));
        }
    }
}

/// The id of a chassis' metadata agent, as Neutron's own agent makes it.
fn agent_id(chassis: &str) -> String {
    let digits = Some(chassis.replace('-', "")).filter(|_| is_uuid(chassis));
    let own = digits.and_then(|digits| u128::from_str_radix(&digits, 16).ok());
    let namespace = own.unwrap_or_else(|| uuid5(NAMESPACE, chassis));
    let id = format!("{:032x}", uuid5(namespace, "metadata_agent"));
    format!("{}-{}-{}-{}-{}", &id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..])
}

/// A UUID of version 5 (RFC 9562 §5.5).
fn uuid5(namespace: u128, name: &str) -> u128 {
    let digest = Sha1::new().chain_update(namespace.to_be_bytes()).chain_update(name).finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    bytes[6] = bytes[6] & 0x0f | 0x50;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    u128::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::{BRIDGE, ID, NeutronPresence, SEEN, SPREAD, TABLE, agent_id};
    use serde_json::{Value, json};
    use tokio::time::{Instant, advance};

    #[test]
    fn the_id_is_that_of_neutrons_own_agent() {
        // Made by Python: `uuid.uuid5(uuid.UUID(chassis), "metadata_agent")`, and through the namespace.
        for (chassis, id) in [
            ("3f1de0a9-6a4b-4f0e-9a53-6f1c2f8f5a11", "dbf8652a-fc9d-5a54-875c-e82902f15447"),
            ("3F1DE0A9-6A4B-4F0E-9A53-6F1C2F8F5A11", "dbf8652a-fc9d-5a54-875c-e82902f15447"),
            ("node-1", "9c01c527-1932-509d-8d73-c4b395161e30"),
        ] {
            assert_eq!(agent_id(chassis), id, "{chassis}");
        }
    }

    fn row(uuid: &str, pairs: &[(&str, &str)]) -> Value {
        let pairs: Vec<_> = pairs.iter().map(|(key, value)| json!([key, value])).collect();
        json!({TABLE: {uuid: {"initial": {"external_ids": ["map", pairs]}}}})
    }

    #[tokio::test(start_paused = true)]
    async fn the_row_is_written_at_once_if_it_lacks_something_and_else_within_the_spread() {
        let global = |nb_cfg: i64| json!({"SB_Global": {"g": {"initial": {"nb_cfg": nb_cfg}}}});
        let mut presence = NeutronPresence::new("node-1", "br-int");
        let see = |presence: &mut NeutronPresence, tables: Value| {
            presence.tables.begin_with(&tables);
            presence.plan();
            presence.due().map(|due| due.saturating_duration_since(Instant::now()))
        };
        assert_eq!(see(&mut presence, global(7)), None, "no row");
        assert!(see(&mut presence, row("1", &[("other", "x")])).is_some_and(|wait| wait.is_zero()));
        let sent = json!(presence.transaction()).to_string();
        for word in [ID, BRIDGE, SEEN, "br-int", "\"7\"", &agent_id("node-1"), "node-1"] {
            assert!(sent.contains(word), "{word}: {sent}");
        }
        assert_eq!(
            see(&mut presence, row("1", &[("other", "x")])),
            None,
            "whoever takes it away is left alone"
        );
        let kept = [(ID, "another"), (BRIDGE, "br-int"), (SEEN, "7")];
        assert_eq!(see(&mut presence, row("1", &kept)), None, "as it shall be");
        let wait = see(&mut presence, global(8)).expect("another nb_cfg");
        assert!(wait <= SPREAD, "{wait:?}");
        advance(wait / 2).await;
        assert_eq!(see(&mut presence, global(9)), Some(wait - wait / 2), "a further one makes it no later");
        presence.transaction();
        let mut anew = row("2", &[]);
        anew[TABLE]["1"] = json!({"delete": null});
        assert!(see(&mut presence, anew).is_some_and(|wait| wait.is_zero()), "the chassis registers anew");
    }
}
