//! The wanted state of the node, computed from the records and the configuration.
//!
//! The plan changes record by record. It does not depend on the order in which records arrive.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use metadata_common::mac::Mac;
use metadata_common::share::Tenant;

use super::slots::IdentityName;
use crate::config::PortSpec;
use metadata_common::port::PortName;
use metadata_content::record::Record;
use metadata_feed::registry::{RecordId, SortedIds};

/// Records in force.
pub(super) type ActiveRecords = BTreeMap<RecordId, Arc<Record>>;

/// The wanted state. The cost of a change depends only on the changed record.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Wanted ports, and how many identities and configured ports want each.
    ports: BTreeMap<PortName, usize>,
    /// The namespaces of wanted ports, and how many ports each has.
    namespaces: BTreeMap<Option<String>, usize>,
    /// The records with identities in each namespace other than the agent's own, and how many each has there.
    records: BTreeMap<String, BTreeMap<RecordId, usize>>,
    /// Identities and the records that claim each; the first record gets the identity. A configured identity without a
    /// record has an empty set.
    identities: BTreeMap<IdentityName, SortedIds>,
    /// Identities that more than one record claims.
    contested: BTreeSet<IdentityName>,
    /// The claims of each record, in order.
    claims: HashMap<RecordId, Box<[IdentityName]>>,
    /// NICs without a port whose MAC is configured on several ports, and the number of these ports.
    ambiguous: BTreeMap<RecordId, Vec<(Mac, usize)>>,
    /// Configured ports by their guest's MAC.
    by_mac: HashMap<Mac, BTreeSet<PortName>>,
}

/// Why a record is not served on a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Conflict {
    /// Two records claim one identity. The record whose source has precedence keeps it; within one source, the first by
    /// name.
    Taken {
        /// The identity.
        identity: IdentityName,
        /// The record that keeps it.
        kept: RecordId,
        /// The record that does not get it.
        refused: RecordId,
    },
    /// A NIC names no port, and its MAC is configured on several ports. All but one belong to other guests.
    Ambiguous {
        /// The NIC's MAC.
        mac: Mac,
        /// Number of ports configured with the MAC.
        ports: usize,
        /// The record, which is served on none of these ports.
        refused: RecordId,
    },
}

/// The words of a [`Conflict::Taken`] before the record that keeps the identity.
const BELONGS_TO: &str = " already belongs to ";

impl Conflict {
    /// Returns what the sentence of a conflict is about: the record that is refused, and its MAC and port. Which record
    /// keeps them depends on the sources that are known.
    pub(super) fn subject(sentence: &str) -> &str {
        sentence.split_once(BELONGS_TO).map_or(sentence, |(subject, _)| subject)
    }
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { identity, kept, refused } => write!(
                f,
                "{refused}: {} on port {}{BELONGS_TO}{kept}; give one of the NICs another MAC or port",
                identity.mac, identity.port
            ),
            Self::Ambiguous { mac, ports, refused } => write!(
                f,
                "{refused}: {mac} is configured on {ports} ports; name the NIC's port in the record"
            ),
        }
    }
}

impl Plan {
    /// The plan of the configuration alone, without records.
    #[must_use]
    pub(super) fn new(configured: &[PortSpec]) -> Self {
        let mut plan = Self::default();
        for spec in configured {
            plan.want(&spec.name);
            if let Some(mac) = spec.mac {
                plan.by_mac.entry(mac).or_default().insert(spec.name.clone());
                plan.identities.entry(IdentityName { port: spec.name.clone(), mac }).or_default();
            }
        }
        plan
    }

    /// Returns the plan for the same records and other configured ports, and the ports for which the two plans differ.
    #[must_use]
    pub(super) fn reconfigured(
        &self,
        configured: &[PortSpec],
        records: &ActiveRecords,
    ) -> (Self, BTreeSet<PortName>) {
        let mut plan = Self::new(configured);
        for (key, record) in records {
            plan.put(key, Some(record));
        }
        for (key, claims) in self.claims.iter().filter(|(key, _)| !records.contains_key(*key)) {
            plan.change(key, claims.iter().cloned().collect());
        }
        let speakers = |plan: &Self, port: &PortName| {
            let known = plan.speakers(port).map(|(who, key)| (who.clone(), key.cloned()));
            plan.wants(port).then(|| known.collect::<Vec<_>>())
        };
        let all: BTreeSet<_> = self.ports().chain(plan.ports()).cloned().collect();
        let touched = all.into_iter().filter(|port| speakers(self, port) != speakers(&plan, port)).collect();
        (plan, touched)
    }

    /// Replaces the record of a key, or removes it. Returns the ports whose plan may have changed.
    ///
    /// A NIC that names a port is served there. A NIC that names none is served on the configured port with its MAC,
    /// and nowhere if several ports have it. A configured port whose MAC no record has is wanted too: the requests of
    /// its guest wait for the record.
    pub(super) fn put(&mut self, key: &RecordId, record: Option<&Record>) -> BTreeSet<PortName> {
        self.ambiguous.remove(key);
        let wanted = record.map(|record| self.claims_of(key, record)).unwrap_or_default();
        self.change(key, wanted)
    }

    /// Claims identities for a record that has not arrived, so that their requests wait for it. [`put`](Self::put) of
    /// the key replaces the claims. Returns the ports whose plan may have changed.
    pub(super) fn expect(
        &mut self,
        key: &RecordId,
        identities: impl IntoIterator<Item = IdentityName>,
    ) -> BTreeSet<PortName> {
        self.ambiguous.remove(key);
        self.change(key, identities.into_iter().collect())
    }

    fn change(&mut self, key: &RecordId, wanted: BTreeSet<IdentityName>) -> BTreeSet<PortName> {
        let former: BTreeSet<_> = self.claims.remove(key).unwrap_or_default().into_iter().collect();
        for identity in former.difference(&wanted) {
            self.drop_claim(identity, key);
        }
        for identity in wanted.difference(&former) {
            self.claim(identity, key);
        }
        let touched = former.union(&wanted).map(|identity| identity.port.clone()).collect();
        if !wanted.is_empty() {
            self.claims.insert(key.clone(), wanted.into_iter().collect());
        }
        touched
    }

    /// True if the port is wanted.
    #[must_use]
    pub(super) fn wants(&self, port: &PortName) -> bool {
        self.ports.contains_key(port)
    }

    /// Every wanted port.
    pub(super) fn ports(&self) -> impl Iterator<Item = &PortName> {
        self.ports.keys()
    }

    /// The namespaces of wanted ports.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = &Option<String>> {
        self.namespaces.keys()
    }

    /// The namespaces whose links are watched: the agent's own and those of the wanted ports.
    #[must_use]
    pub(super) fn watched_namespaces(&self) -> BTreeSet<Option<String>> {
        self.namespaces().cloned().chain([None]).collect()
    }

    /// Whose port it is: that of the first record on it, or else of the first one in its namespace. Ports without a
    /// record in the agent's own namespace are the operator's.
    #[must_use]
    pub(super) fn tenant_of(&self, port: &PortName) -> Tenant {
        let there = port.netns.as_ref().and_then(|netns| self.records.get(netns));
        let there = there.and_then(|records| records.keys().next());
        let named = self.speakers(port).find_map(|(_, id)| id);
        named.or(there).map_or(Tenant::Operator, RecordId::tenant)
    }

    /// The identities of a port, and the record that each gets.
    pub(super) fn speakers(
        &self,
        port: &PortName,
    ) -> impl Iterator<Item = (&IdentityName, Option<&RecordId>)> {
        let first = IdentityName { port: port.clone(), mac: Mac::default() };
        self.identities
            .range(first..)
            .take_while(move |(who, _)| who.port == *port)
            .map(|(who, keys)| (who, keys.first()))
    }

    /// True if the identity is in the plan.
    #[must_use]
    pub(super) fn knows(&self, who: &IdentityName) -> bool {
        self.identities.contains_key(who)
    }

    /// The identities that a record claims, and whether the record gets each. If not, another record has precedence.
    pub(super) fn claims(&self, key: &RecordId) -> impl Iterator<Item = (&IdentityName, bool)> {
        let claims = self.claims.get(key).into_iter().flatten();
        let first = |who| self.identities.get(who).and_then(|keys| keys.first());
        claims.map(move |who| (who, first(who).is_some_and(|first| first == key)))
    }

    /// Every identity, and the record that each gets.
    pub(super) fn all_identities(&self) -> impl Iterator<Item = (&IdentityName, Option<&RecordId>)> {
        self.identities.iter().map(|(who, keys)| (who, keys.first()))
    }

    /// Number of configured ports with the MAC of a NIC that names no port; `None` unless there are several.
    pub(super) fn candidates(&self, key: &RecordId, mac: Mac) -> Option<usize> {
        let nics = self.ambiguous.get(key)?;
        nics.iter().find(|(other, _)| *other == mac).map(|(_, ports)| *ports)
    }

    /// Claims that cannot be met.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = Conflict> {
        let ambiguous = self.ambiguous.iter().flat_map(|(key, nics)| {
            nics.iter().map(|&(mac, ports)| Conflict::Ambiguous { mac, ports, refused: key.clone() })
        });
        let taken = self.contested.iter().flat_map(|identity| {
            let mut keys = self.identities.get(identity).into_iter().flat_map(|keys| keys.iter());
            let kept = keys.next();
            keys.filter_map(move |refused| {
                let (identity, kept, refused) = (identity.clone(), kept?.clone(), refused.clone());
                Some(Conflict::Taken { identity, kept, refused })
            })
        });
        ambiguous.chain(taken)
    }

    /// The identities under which a record would be served.
    #[must_use]
    pub(super) fn places(&self, record: &Record) -> BTreeSet<IdentityName> {
        let mut places = BTreeSet::new();
        for nic in &record.network.nics {
            let Some(mac) = nic.mac.map(|mac| mac.0) else { continue };
            match (&nic.port, self.by_mac.get(&mac)) {
                (Some(port), _) => _ = places.insert(IdentityName { port: port.into(), mac }),
                (None, Some(ports)) if ports.len() == 1 => {
                    places.extend(ports.iter().cloned().map(|port| IdentityName { port, mac }));
                }
                (None, _) => {}
            }
        }
        places
    }

    /// The record that an identity gets.
    #[must_use]
    pub(super) fn holder(&self, who: &IdentityName) -> Option<&RecordId> {
        self.identities.get(who)?.first()
    }

    fn claims_of(&mut self, key: &RecordId, record: &Record) -> BTreeSet<IdentityName> {
        let mut claims = BTreeSet::new();
        for nic in &record.network.nics {
            // VLANs and bonds have neither a MAC nor a tap of their own.
            let Some(mac) = nic.mac.map(|mac| mac.0) else { continue };
            match (&nic.port, self.by_mac.get(&mac)) {
                (Some(port), _) => {
                    claims.insert(IdentityName { port: port.into(), mac });
                }
                (None, Some(ports)) if ports.len() > 1 => {
                    self.ambiguous.entry(key.clone()).or_default().push((mac, ports.len()));
                }
                (None, ports) => {
                    let named = ports.into_iter().flatten().cloned();
                    claims.extend(named.map(|port| IdentityName { port, mac }));
                }
            }
        }
        claims
    }

    fn claim(&mut self, identity: &IdentityName, key: &RecordId) {
        self.want(&identity.port);
        if let Some(netns) = &identity.port.netns {
            *self.records.entry(netns.clone()).or_default().entry(key.clone()).or_default() += 1;
        }
        let keys = self.identities.entry(identity.clone()).or_default();
        keys.insert(key);
        if keys.len() > 1 {
            self.contested.insert(identity.clone());
        }
    }

    fn drop_claim(&mut self, identity: &IdentityName, key: &RecordId) {
        let configured = self.by_mac.get(&identity.mac).is_some_and(|ports| ports.contains(&identity.port));
        if let Some(keys) = self.identities.get_mut(identity) {
            keys.remove(key);
            if keys.len() < 2 {
                self.contested.remove(identity);
            }
            if keys.is_empty() && !configured {
                self.identities.remove(identity);
            }
        }
        if let Some(netns) = &identity.port.netns
            && let Some(records) = self.records.get_mut(netns)
            && count_down(records, key)
            && records.is_empty()
        {
            self.records.remove(netns);
        }
        self.want_less(&identity.port);
    }

    fn want(&mut self, port: &PortName) {
        let wanted = self.ports.entry(port.clone()).or_default();
        *wanted += 1;
        if *wanted == 1 {
            *self.namespaces.entry(port.netns.clone()).or_default() += 1;
        }
    }

    fn want_less(&mut self, port: &PortName) {
        count_down(&mut self.ports, port).then(|| count_down(&mut self.namespaces, &port.netns));
    }
}

/// Decrements the count of `key`. If the count was 1, removes it and returns true.
fn count_down<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) -> bool {
    match counts.get_mut(key) {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        Some(_) => counts.remove(key).is_some(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{ActiveRecords, Conflict, IdentityName, Plan};
    use crate::config::PortSpec;
    use metadata_common::port::PortName;
    use metadata_content::record::Record;
    use metadata_content::source::RecordSource;
    use metadata_feed::registry::RecordId;
    use std::collections::BTreeMap;
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

    fn planned(records: &ActiveRecords, configured: &[PortSpec]) -> Plan {
        let mut plan = Plan::new(configured);
        for (key, record) in records {
            plan.put(key, Some(record));
        }
        plan
    }

    fn identities(plan: &Plan) -> BTreeMap<IdentityName, Option<RecordId>> {
        plan.ports()
            .flat_map(|port| plan.speakers(port))
            .map(|(who, key)| (who.clone(), key.cloned()))
            .collect()
    }

    fn who(port: &str, mac: &str) -> IdentityName {
        IdentityName { port: PortName::local(port), mac: mac.parse().expect("a MAC") }
    }

    const A: &str = "52:54:00:00:00:0a";
    const B: &str = "52:54:00:00:00:0b";

    #[test]
    fn a_nic_that_names_its_port_is_served_there_without_configuration() {
        let records = ActiveRecords::from([("a".into(), record("a", A, ", port: {ifname: tap0}"))]);
        let plan = planned(&records, &[]);
        assert_eq!(identities(&plan), [(who("tap0", A), Some("a".into()))].into());
        assert_eq!(plan.ports().cloned().collect::<Vec<_>>(), [PortName::local("tap0")]);
    }

    #[test]
    fn a_nic_without_a_port_is_served_where_the_configuration_names_its_mac() {
        let records =
            ActiveRecords::from([("a".into(), record("a", A, "")), ("b".into(), record("b", B, ""))]);
        let specs = [format!("tap0={A}").parse().unwrap(), "tap1".parse().unwrap()];
        let plan = planned(&records, &specs);
        assert_eq!(identities(&plan), [(who("tap0", A), Some("a".into()))].into());
        assert_eq!(plan.ports().count(), 2);
    }

    #[test]
    fn a_record_that_names_another_port_does_not_move_to_the_configured_one() {
        let records = ActiveRecords::from([("a".into(), record("a", A, ", port: {ifname: tap9}"))]);
        let plan = planned(&records, &[format!("tap0={A}").parse().unwrap()]);
        assert_eq!(identities(&plan), [(who("tap0", A), None), (who("tap9", A), Some("a".into()))].into());
    }

    #[test]
    fn an_expected_record_claims_its_ports_until_it_arrives_or_is_dropped() {
        let mut plan = Plan::new(&[]);
        let expected = who("tap0", A);
        assert_eq!(plan.expect(&"a".into(), [expected.clone()]), [expected.port.clone()].into());
        assert_eq!(identities(&plan), [(expected.clone(), Some("a".into()))].into());
        let (mut plan, touched) = plan.reconfigured(&[], &ActiveRecords::new());
        assert_eq!(
            (plan.knows(&expected), touched.len()),
            (true, 0),
            "other configured ports change nothing"
        );
        plan.put(&"a".into(), Some(&record("a", B, ", port: {ifname: tap1}")));
        assert_eq!(identities(&plan), [(who("tap1", B), Some("a".into()))].into());
        plan.expect(&"b".into(), [expected]);
        plan.put(&"b".into(), None);
        plan.put(&"a".into(), None);
        assert_eq!(plan, Plan::new(&[]));
    }

    #[test]
    fn a_configured_identity_waits_for_its_record() {
        let plan = planned(&ActiveRecords::new(), &[format!("tap0={A}").parse().unwrap()]);
        assert_eq!(identities(&plan), [(who("tap0", A), None)].into());
    }

    #[test]
    fn the_first_of_two_records_with_one_identity_keeps_it() {
        let port = ", port: {ifname: tap0}";
        let records =
            ActiveRecords::from([("b".into(), record("b", A, port)), ("a".into(), record("a", A, port))]);
        let plan = planned(&records, &[]);
        assert_eq!(identities(&plan), [(who("tap0", A), Some("a".into()))].into());
        let (kept, refused) = ("a".into(), "b".into());
        assert_eq!(
            plan.conflicts().collect::<Vec<_>>(),
            [Conflict::Taken { identity: who("tap0", A), kept, refused }]
        );
        let api = RecordId::new(RecordSource::Api, "z");
        let records =
            ActiveRecords::from([("a".into(), record("a", A, port)), (api.clone(), record("z", A, port))]);
        assert_eq!(identities(&planned(&records, &[])), [(who("tap0", A), Some(api))].into());
    }

    #[test]
    fn the_sentences_of_a_refused_nic_have_one_subject_whoever_keeps_its_identity() {
        let port = ", port: {ifname: tap0}";
        let api = RecordId::new(RecordSource::Api, "z");
        let files =
            ActiveRecords::from([("a".into(), record("a", A, port)), ("b".into(), record("b", A, port))]);
        let sentences = |records: &ActiveRecords| {
            planned(records, &[]).conflicts().map(|conflict| conflict.to_string()).collect::<Vec<_>>()
        };
        let of_files = sentences(&files);
        let of_all = sentences(&files.into_iter().chain([(api, record("z", A, port))]).collect());
        assert_eq!((of_files.len(), of_all.len()), (1, 2), "b; a and b");
        let subject = format!("b: {A} on port tap0");
        assert_eq!(Conflict::subject(&of_files[0]), subject);
        assert!(of_all.iter().any(|sentence| Conflict::subject(sentence) == subject), "{of_all:?}");
        assert!(!of_all.contains(&of_files[0]), "another record keeps it");
    }

    #[test]
    fn a_record_without_a_port_is_served_on_none_of_two_that_have_its_mac() {
        let records = ActiveRecords::from([("a".into(), record("a", A, ""))]);
        let twice = [format!("tap0={A}"), format!("tap0@blue={A}")].map(|spec| spec.parse().unwrap());
        let plan = planned(&records, &twice);
        assert!(identities(&plan).values().all(Option::is_none), "{:?}", plan.identities);
        let mac = who("tap0", A).mac;
        assert_eq!(
            plan.conflicts().collect::<Vec<_>>(),
            [Conflict::Ambiguous { mac, ports: 2, refused: "a".into() }]
        );
        let same_port_twice = [format!("tap0={A}"), format!("tap0={A}")].map(|spec| spec.parse().unwrap());
        assert_eq!(
            identities(&planned(&records, &same_port_twice)),
            [(who("tap0", A), Some("a".into()))].into()
        );
    }

    #[test]
    fn one_mac_on_two_ports_is_two_identities() {
        let records = ActiveRecords::from([
            ("a".into(), record("a", A, ", port: {ifname: tap0}")),
            ("b".into(), record("b", A, ", port: {ifname: tap0, netns: blue}")),
        ]);
        let plan = planned(&records, &[]);
        assert_eq!(plan.identities.len(), 2);
        assert!(plan.conflicts().next().is_none());
    }

    #[test]
    fn removing_all_records_restores_the_initial_plan() {
        let configured = [format!("tap0={A}").parse().unwrap()];
        let records = [
            ("a".into(), record("a", A, "")),
            ("b".into(), record("b", A, ", port: {ifname: tap0}")),
            ("c".into(), record("c", B, ", port: {ifname: tap1, netns: blue}")),
        ];
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..64 {
            let mut plan = Plan::new(&configured);
            let mut order = [0, 1, 2, 0, 1, 2];
            for pass in [true, false] {
                rng.shuffle(&mut order);
                for n in order {
                    let (key, record) = &records[n];
                    let touched = plan.put(key, pass.then_some(&**record));
                    assert!(pass == plan.claims.contains_key(key) && touched.len() <= 1);
                }
                if pass {
                    assert_eq!(plan, planned(&records.clone().into(), &configured));
                    assert_eq!(plan.conflicts().count(), 1, "b's NIC is a's");
                }
            }
            assert_eq!(plan, Plan::new(&configured));
        }
    }

    #[test]
    fn a_change_touches_the_old_and_new_ports_of_a_record() {
        let mut plan = Plan::new(&[]);
        let at = |port: &str| record("a", A, &format!(", port: {{ifname: {port}}}"));
        let key = RecordId::from("a");
        let mut put = |record: Option<&Record>| {
            plan.put(&key, record).into_iter().map(|p| p.ifname).collect::<Vec<_>>()
        };
        assert_eq!(put(Some(&at("tap0"))), ["tap0"]);
        assert_eq!(put(Some(&at("tap1"))), ["tap0", "tap1"]);
        assert_eq!(put(None), ["tap1"]);
        assert_eq!(put(None), Vec::<String>::new());
        assert!(plan.ports().next().is_none() && plan.namespaces().next().is_none());
    }

    #[test]
    fn a_port_belongs_to_the_tenant_of_its_record_or_of_its_namespace() {
        let mut plan = Plan::new(&[]);
        let id = RecordId::new(RecordSource::Kubevirt, "shop/web");
        let port = |ifname: &str| PortName { ifname: ifname.into(), netns: Some("/proc/42/ns/net".into()) };
        let record = record("a", A, ", port: {ifname: tap0, netns: /proc/42/ns/net}");
        plan.put(&id, Some(&record));
        let shop = metadata_common::share::Tenant::namespace("shop");
        for name in ["tap0", "tap1"] {
            assert_eq!(plan.tenant_of(&port(name)), shop, "{name}");
        }
        assert_eq!(plan.tenant_of(&PortName::local("tap0")), metadata_common::share::Tenant::Operator);
        plan.put(&id, None);
        assert_eq!(plan.tenant_of(&port("tap0")), metadata_common::share::Tenant::Operator);
        assert_eq!(plan, Plan::new(&[]));
    }
}
