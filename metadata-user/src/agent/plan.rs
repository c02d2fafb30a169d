//! What the node should look like, given the records and the configuration.
//!
//! A pure function of its inputs, so that every event may simply ask for the whole plan again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use metadata_common::mac::Mac;

use super::slots::IdentityName;
use crate::config::PortSpec;
use crate::port::PortName;
use crate::record::Record;

/// Records by the key their feed gives them: for a directory, the file name.
pub type Records = BTreeMap<String, Arc<Record>>;

/// The wanted state.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Ports to own.
    pub ports: BTreeSet<PortName>,
    /// Who speaks on them, and the key of the record they get; `None` while it has not arrived.
    pub identities: BTreeMap<IdentityName, Option<String>>,
    /// What cannot be had, for the operator.
    pub conflicts: Vec<Conflict>,
}

/// Why a record is not served where it could be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Two records claim one identity: the first by key keeps it.
    Taken {
        /// What both claim.
        identity: IdentityName,
        /// The record that keeps it.
        kept: String,
        /// The record that does not get it.
        refused: String,
    },
    /// A NIC names no port, and its MAC is configured on several: any but one of them is another guest's.
    Ambiguous {
        /// The NIC's MAC.
        mac: Mac,
        /// How many ports are configured with it.
        ports: usize,
        /// The record that is served on none of them.
        refused: String,
    },
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { identity, kept, refused } => write!(
                f,
                "{refused}: {} on port {} already belongs to {kept}; give one of the NICs another MAC or port",
                identity.mac, identity.port
            ),
            Self::Ambiguous { mac, ports, refused } => write!(
                f,
                "{refused}: {mac} is configured on {ports} ports; say in the record which of them is the NIC's"
            ),
        }
    }
}

impl Plan {
    /// Joins records and configured ports.
    ///
    /// A NIC that names its port is served there. A NIC that names none is served on the configured port
    /// that names its MAC, and nowhere if several do. A configured port with a MAC that no record has is owned already: its guest's
    /// requests wait for the record.
    #[must_use]
    pub fn new(records: &Records, configured: &[PortSpec]) -> Self {
        let mut plan = Self::default();
        let mut by_mac: HashMap<Mac, BTreeSet<PortName>> = HashMap::new();
        for spec in configured {
            plan.ports.insert(spec.name.clone());
            if let Some(mac) = spec.mac {
                by_mac.entry(mac).or_default().insert(spec.name.clone());
                plan.identities.insert(IdentityName { port: spec.name.clone(), mac }, None);
            }
        }
        for (key, record) in records {
            for nic in &record.network.nics {
                // VLANs and bonds have no MAC of their own, and no tap.
                let Some(mac) = nic.mac.map(|mac| mac.0) else { continue };
                match (&nic.port, by_mac.get(&mac)) {
                    (Some(port), _) => plan.claim(IdentityName { port: port.into(), mac }, key),
                    (None, Some(ports)) if ports.len() > 1 => {
                        let (ports, refused) = (ports.len(), key.clone());
                        plan.conflicts.push(Conflict::Ambiguous { mac, ports, refused });
                    }
                    (None, ports) => {
                        for port in ports.into_iter().flatten().cloned() {
                            plan.claim(IdentityName { port, mac }, key);
                        }
                    }
                }
            }
        }
        plan
    }

    fn claim(&mut self, identity: IdentityName, key: &str) {
        self.ports.insert(identity.port.clone());
        let holder = self.identities.entry(identity.clone()).or_insert(None);
        match holder {
            None => *holder = Some(key.to_owned()),
            Some(kept) => {
                let conflict = Conflict::Taken { identity, kept: kept.clone(), refused: key.to_owned() };
                self.conflicts.push(conflict);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Conflict, IdentityName, Plan, Records};
    use crate::port::PortName;
    use crate::record::Record;
    use std::sync::Arc;

    /// A record with one NIC; `port` is YAML to follow the MAC, or empty.
    fn record(name: &str, mac: &str, port: &str) -> Arc<Record> {
        let text = format!(
            "schema: vmrecord/1\ngeneration: 1\nvm: {{uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: {name}, \
             project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: {name}}}\n\
             placement: {{region: r, zone: z}}\ninstance_type: t\nimage: {{id: i}}\n\
             network: {{nics: [{{id: n0, name: eth0, mac: '{mac}'{port}, network_id: n, addresses: [{{method: dhcp4}}]}}]}}\n"
        );
        Arc::new(Record::parse(name, &text).unwrap_or_else(|e| panic!("{name}: {e}")).0)
    }

    fn who(port: &str, mac: &str) -> IdentityName {
        IdentityName { port: PortName::local(port), mac: mac.parse().expect("a MAC") }
    }

    const A: &str = "52:54:00:00:00:0a";
    const B: &str = "52:54:00:00:00:0b";

    #[test]
    fn a_nic_that_names_its_port_is_served_there_without_configuration() {
        let records = Records::from([("a".into(), record("a", A, ", port: {ifname: tap0}"))]);
        let plan = Plan::new(&records, &[]);
        assert_eq!(plan.identities, [(who("tap0", A), Some("a".into()))].into());
        assert_eq!(plan.ports, [PortName::local("tap0")].into());
    }

    #[test]
    fn a_nic_without_a_port_is_served_where_the_configuration_names_its_mac() {
        let records = Records::from([("a".into(), record("a", A, "")), ("b".into(), record("b", B, ""))]);
        let specs = [format!("tap0={A}").parse().unwrap(), "tap1".parse().unwrap()];
        let plan = Plan::new(&records, &specs);
        assert_eq!(plan.identities, [(who("tap0", A), Some("a".into()))].into());
        assert_eq!(plan.ports.len(), 2);
    }

    #[test]
    fn a_record_that_names_another_port_does_not_move_to_the_configured_one() {
        let records = Records::from([("a".into(), record("a", A, ", port: {ifname: tap9}"))]);
        let plan = Plan::new(&records, &[format!("tap0={A}").parse().unwrap()]);
        assert_eq!(plan.identities, [(who("tap0", A), None), (who("tap9", A), Some("a".into()))].into());
    }

    #[test]
    fn a_configured_identity_waits_for_its_record() {
        let plan = Plan::new(&Records::new(), &[format!("tap0={A}").parse().unwrap()]);
        assert_eq!(plan.identities, [(who("tap0", A), None)].into());
    }

    #[test]
    fn of_two_records_with_one_identity_the_first_by_key_keeps_it() {
        let port = ", port: {ifname: tap0}";
        let records = Records::from([("b".into(), record("b", A, port)), ("a".into(), record("a", A, port))]);
        let plan = Plan::new(&records, &[]);
        assert_eq!(plan.identities, [(who("tap0", A), Some("a".into()))].into());
        let (kept, refused) = ("a".into(), "b".into());
        assert_eq!(plan.conflicts, [Conflict::Taken { identity: who("tap0", A), kept, refused }]);
    }

    #[test]
    fn a_record_without_a_port_is_served_on_none_of_two_that_have_its_mac() {
        let records = Records::from([("a".into(), record("a", A, ""))]);
        let twice = [format!("tap0={A}"), format!("tap0@blue={A}")].map(|spec| spec.parse().unwrap());
        let plan = Plan::new(&records, &twice);
        assert!(plan.identities.values().all(Option::is_none), "{:?}", plan.identities);
        let mac = who("tap0", A).mac;
        assert_eq!(plan.conflicts, [Conflict::Ambiguous { mac, ports: 2, refused: "a".into() }]);
        let same_port_twice = [format!("tap0={A}"), format!("tap0={A}")].map(|spec| spec.parse().unwrap());
        assert_eq!(
            Plan::new(&records, &same_port_twice).identities,
            [(who("tap0", A), Some("a".into()))].into()
        );
    }

    #[test]
    fn one_mac_on_two_ports_is_two_identities() {
        let records = Records::from([
            ("a".into(), record("a", A, ", port: {ifname: tap0}")),
            ("b".into(), record("b", A, ", port: {ifname: tap0, netns: blue}")),
        ]);
        let plan = Plan::new(&records, &[]);
        assert_eq!(plan.identities.len(), 2);
        assert!(plan.conflicts.is_empty());
    }
}
