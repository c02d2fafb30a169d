//! Joins the ports of a node, which the local OVSDB has, to the instances that OVN's southbound database has, and makes
//! their records. This module reads only through its arguments.
//!
//! | What | Where |
//! |---|---|
//! | the tap, its MAC, its port and instance | `Interface` of the local OVSDB, which Nova (os-vif) or libvirt writes |
//! | the instance again, its project and fixed addresses | `Port_Binding` of the southbound database, which Neutron writes |
//!
//! Both must name the same instance. No tenant writes either.
//!
//! While an instance is migrated, its `Port_Binding` names a second chassis: in `requested_additional_chassis` once
//! Neutron has bound the port there, and in `additional_chassis` once the tap is there, for which Nova waits before it
//! sends memory (OVN 22.09; ovn-sb(5)).

use metadata_common::mac::Mac;
use metadata_common::port::{PortName, is_ifname};
use metadata_content::record::event::EventState;
use metadata_content::record::values::is_uuid;
use metadata_content::record::{Owner, Record, RecordError, RecordLimits};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

use super::OpenstackOptions;
use super::ovsdb::{MonitoredTables, TableRow};

/// Characters of a port's id in the names of its devices (Nova, `network/neutron.py`).
const ID_CHARS: usize = 11;
/// The device of a port with hybrid plug that is on the integration bridge. The tap is behind it.
const HYBRID: &str = "qvo";

/// The id of the event of a live migration. It is withdrawn with the migration, so the next one is another event.
const MIGRATION: &str = "migration";

/// A port of an instance on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalPort {
    /// The port's id in Neutron.
    pub(super) id: String,
    /// The tap.
    pub(super) ifname: String,
    /// The MAC of its NIC.
    pub(super) mac: Mac,
    /// The instance.
    pub(super) instance: String,
}

/// What the southbound database says of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortBinding {
    pub(super) instance: String,
    pub(super) project: String,
    /// The fixed addresses with their prefix lengths.
    pub(super) addresses: Vec<String>,
    /// The state of a live migration away from this chassis; `None` without one.
    pub(super) migration: Option<EventState>,
}

/// What the source says of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NodeInstance {
    /// Its ports are known, and their bindings are not: requests wait.
    Expected(Vec<(PortName, Mac)>),
    /// Its record, without a generation, and its project.
    Bound(Value, Owner),
    /// It has no record.
    Refused {
        reason: String,
        /// Its ports; `None` if they could not be read.
        identities: Option<Vec<(PortName, Mac)>>,
    },
}

impl NodeInstance {
    /// Its NICs on this node, of a bound instance those that are bound; `None` if they could not be read.
    pub(super) fn identities(&self) -> Option<Vec<(PortName, Mac)>> {
        match self {
            Self::Expected(identities) => Some(identities.clone()),
            Self::Refused { identities, .. } => identities.clone(),
            Self::Bound(record, _) => {
                let nics = record["network"]["nics"].as_array().into_iter().flatten();
                let identity = |nic: &Value| {
                    let port = PortName::local(nic["port"]["ifname"].as_str()?);
                    let mac: Mac = nic["mac"].as_str()?.parse().ok()?;
                    Some((port, mac))
                };
                Some(nics.filter_map(identity).collect())
            }
        }
    }
}

/// The instances of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeInstances {
    pub(super) instances: BTreeMap<String, NodeInstance>,
    /// Whether all that is needed of the instances has been read.
    pub(super) is_whole: bool,
}

/// The ports of instances in the local OVSDB. Others, such as tunnels, and those without a tap, such as vhost-user's, are
/// left out.
pub(super) fn local_ports(tables: &MonitoredTables) -> Vec<LocalPort> {
    let mut ports: Vec<_> = tables.rows("Interface").filter_map(local_port).collect();
    ports.sort_by(|a, b| a.id.cmp(&b.id));
    ports
}

fn local_port(row: TableRow<'_>) -> Option<LocalPort> {
    let id = row.external_id("iface-id")?;
    // os-vif and libvirt name the instance by different keys.
    let instance = row.external_id("vm-uuid").or_else(|| row.external_id("vm-id"))?;
    let mac = row.external_id("attached-mac")?.parse().ok()?;
    let name = row.text("name");
    let ifname = match name.strip_prefix(HYBRID) {
        Some(_) => tap(id)?,
        None => name.to_owned(),
    };
    let has_tap = !row.text("type").starts_with("dpdk") && is_ifname(&ifname);
    let instance = instance.to_ascii_lowercase();
    (has_tap && is_uuid(&instance)).then(|| LocalPort { id: id.to_owned(), ifname, mac, instance })
}

/// The name of the tap of a port, if Nova names it.
pub(super) fn tap(id: &str) -> Option<String> {
    Some(format!("tap{}", id.get(..ID_CHARS)?))
}

/// What the southbound database says of the ports of this chassis, by their ids. A chassis that registers anew may have
/// two rows for a moment.
pub(super) fn bindings(tables: &MonitoredTables, chassis: &[String]) -> BTreeMap<String, PortBinding> {
    let of = |row: TableRow<'_>| {
        let instance = row.external_id("neutron:device_id")?.to_ascii_lowercase();
        let project = row.external_id("neutron:project_id")?.to_owned();
        let addresses = row.external_id("neutron:cidrs").unwrap_or_default();
        let addresses = addresses.split_whitespace().map(str::to_owned).collect();
        let migration = migration(row, chassis);
        Some((row.text("logical_port").to_owned(), PortBinding { instance, project, addresses, migration }))
    };
    tables.rows("Port_Binding").filter_map(of).collect()
}

/// The state of a live migration away from this chassis. The target does not announce it, because the guest does not run
/// there yet.
fn migration(row: TableRow<'_>, chassis: &[String]) -> Option<EventState> {
    let is_ours = |uuid: &str| chassis.iter().any(|own| own == uuid);
    let names_another = |column| row.references(column).any(|uuid| !is_ours(uuid));
    let is_here = row.references("chassis").any(is_ours);
    let state = match () {
        () if names_another("additional_chassis") => EventState::Started,
        () if names_another("requested_additional_chassis") => EventState::Scheduled,
        () => return None,
    };
    is_here.then_some(state)
}

/// Keeps the last binding of each port that is here. When ovn-controller stops it takes all bindings away, and later makes
/// them again one by one; the guests stay.
pub(super) fn keep_last(
    last: &mut BTreeMap<String, PortBinding>,
    bindings: BTreeMap<String, PortBinding>,
    ports: &[LocalPort],
) {
    last.extend(bindings);
    let here: BTreeSet<_> = ports.iter().map(|port| &*port.id).collect();
    last.retain(|id, _| here.contains(&**id));
}

/// The instances of this node. Only ports that are here count: a binding without one costs nothing.
pub(super) fn instances(
    ports: &[LocalPort],
    bindings: &BTreeMap<String, PortBinding>,
    options: &OpenstackOptions,
) -> BTreeMap<String, NodeInstance> {
    let mut of_instance: BTreeMap<&str, Vec<&LocalPort>> = BTreeMap::new();
    for port in ports {
        of_instance.entry(&port.instance).or_default().push(port);
    }
    let described = |(instance, ports): (&str, Vec<&LocalPort>)| {
        let bound: Vec<_> = ports.iter().filter_map(|port| Some((*port, bindings.get(&port.id)?))).collect();
        (instance.to_owned(), describe(instance, &ports, &bound, options))
    };
    of_instance.into_iter().map(described).collect()
}

/// The instance with these ports, of which some are bound.
pub(super) fn describe(
    instance: &str,
    ports: &[&LocalPort],
    bound: &[(&LocalPort, &PortBinding)],
    options: &OpenstackOptions,
) -> NodeInstance {
    let identities = ports.iter().map(|port| (PortName::local(&port.ifname), port.mac)).collect();
    let Some((_, first)) = bound.first() else { return NodeInstance::Expected(identities) };
    let refused = |reason| NodeInstance::Refused { reason, identities: Some(identities) };
    if let Some((port, other)) = bound.iter().find(|(_, binding)| binding.instance != instance) {
        return refused(format!(
            "port {}: expected instance {instance} of the local OVSDB in its Port_Binding, found {}",
            port.id, other.instance
        ));
    }
    if let Some((port, other)) = bound.iter().find(|(_, binding)| binding.project != first.project) {
        return refused(format!(
            "port {}: expected project {} of the instance's first port, found {}",
            port.id, first.project, other.project
        ));
    }
    let nics: Vec<_> = bound.iter().map(|(port, binding)| nic(port, binding)).collect();
    let migrations = bound.iter().filter_map(|(_, binding)| binding.migration);
    let migration = migrations.max_by_key(|state| *state == EventState::Started);
    let event =
        |state| json!({"id": MIGRATION, "kind": "freeze", "state": state, "description": "live migration"});
    let record = json!({
        "schema": "vmrecord/1",
        "vm": {
            "uuid": instance,
            // Neither database has the name.
            "name": instance,
            "namespace": first.project,
            "project": {"id": first.project, "number": 0, "account": "000000000000"},
        },
        "hostname": {"short": instance},
        "placement": {"region": options.region, "zone": options.zone},
        "network": {"nics": nics},
        "serve": {"dialects": options.dialects},
        "events": migration.map(event).into_iter().collect::<Vec<_>>(),
    });
    NodeInstance::Bound(record, Owner::openstack(&first.project, instance))
}

fn nic(port: &LocalPort, binding: &PortBinding) -> Value {
    let addresses = binding.addresses.iter().map(|cidr| {
        let method = if cidr.contains(':') { "dhcp6" } else { "dhcp4" };
        json!({"method": method, "address": cidr})
    });
    json!({
        "id": port.id,
        "mac": port.mac.to_string(),
        "port": {"ifname": port.ifname},
        "addresses": addresses.collect::<Vec<_>>(),
    })
}

/// Makes the record of an instance.
pub(super) fn record(
    instance: &str,
    mut described: Value,
    owner: Owner,
    generation: u64,
    limits: &RecordLimits,
) -> Result<Record, RecordError> {
    described["generation"] = generation.into();
    let text = described.to_string();
    let (mut record, _) = Record::parse_within(limits, &format!("{instance}.json"), &text)?;
    record.vm.owner = Some(owner);
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::{NodeInstance, bindings, instances, keep_last, local_ports, record};
    use crate::openstack::OpenstackOptions;
    use crate::openstack::ovsdb::MonitoredTables;
    use metadata_content::record::{Record, RecordLimits};
    use serde_json::{Value, json};
    use std::collections::BTreeMap;

    const PORT: &str = "5c2f9b1e-0f6a-4c1b-9a51-2f9a43b1c0de";
    const OTHER: &str = "77777777-0f6a-4c1b-9a51-2f9a43b1c0de";
    const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const PROJECT: &str = "0123456789abcdef0123456789abcdef";
    /// The rows of this chassis and of another.
    const HERE: &str = "00000000-0000-4000-8000-000000000001";
    const THERE: &str = "00000000-0000-4000-8000-000000000002";

    fn tables(table: &str, rows: &[Value]) -> MonitoredTables {
        let rows: serde_json::Map<_, _> = rows
            .iter()
            .enumerate()
            .map(|(n, row)| {
                let mut row = row.clone();
                let ids: Vec<_> = row["external_ids"]
                    .as_object()
                    .into_iter()
                    .flatten()
                    .map(|(key, value)| json!([key, value]))
                    .collect();
                row["external_ids"] = json!(["map", ids]);
                (n.to_string(), json!({"initial": row}))
            })
            .collect();
        let mut tables = MonitoredTables::default();
        tables.begin_with(&json!({table: rows}));
        tables
    }

    fn interface(name: &str, ids: Value) -> Value {
        json!({"name": name, "type": "", "external_ids": ids})
    }

    fn plugged(name: &str, port: &str) -> Value {
        interface(
            name,
            json!({"iface-id": port, "attached-mac": "fa:16:3e:00:00:01", "iface-status": "active", "vm-uuid": VM}),
        )
    }

    fn binding(port: &str, instance: &str, project: &str) -> Value {
        json!({"logical_port": port, "external_ids": {
            "neutron:device_id": instance, "neutron:project_id": project,
            "neutron:cidrs": "10.0.0.5/24 fd00::5/64",
        }})
    }

    fn described(interfaces: &[Value], bound: &[Value]) -> BTreeMap<String, NodeInstance> {
        let ports = local_ports(&tables("Interface", interfaces));
        let bound = bindings(&tables("Port_Binding", bound), &[HERE.to_owned()]);
        instances(&ports, &bound, &OpenstackOptions::default())
    }

    fn only(instances: BTreeMap<String, NodeInstance>) -> NodeInstance {
        assert_eq!(instances.keys().collect::<Vec<_>>(), [VM]);
        instances.into_values().next().expect("one")
    }

    fn parsed(instance: NodeInstance) -> Record {
        let NodeInstance::Bound(value, owner) = instance else { panic!("{instance:?}") };
        record(VM, value, owner, 7, &RecordLimits::DEFAULT).expect("a good record")
    }

    #[test]
    fn taps_are_found_as_nova_and_libvirt_plug_them() {
        let by_libvirt =
            json!({"iface-id": PORT, "attached-mac": "fa:16:3e:00:00:01", "vm-id": VM.to_uppercase()});
        let without_instance = json!({"iface-id": PORT, "attached-mac": "fa:16:3e:00:00:01"});
        let mut vhost = plugged("vhu5c2f9b1e-0f", PORT);
        vhost["type"] = json!("dpdkvhostuserclient");
        for (what, interface, tap) in [
            ("native", plugged("tap5c2f9b1e-0f", PORT), Some("tap5c2f9b1e-0f")),
            ("hybrid", plugged("qvo5c2f9b1e-0f", PORT), Some("tap5c2f9b1e-0f")),
            ("libvirt", interface("tap5c2f9b1e-0f", by_libvirt), Some("tap5c2f9b1e-0f")),
            ("a health manager's", interface("o-hm0", without_instance), None),
            ("a tunnel", interface("ovn-a1b2c3-0", json!({})), None),
            ("DPDK", vhost, None),
            ("no device", plugged("a name that is too long", PORT), None),
        ] {
            let ports = local_ports(&tables("Interface", &[interface]));
            let found: Vec<_> = ports.iter().map(|port| (&*port.ifname, &*port.instance)).collect();
            assert_eq!(found, tap.map(|tap| (tap, VM)).into_iter().collect::<Vec<_>>(), "{what}");
        }
    }

    #[test]
    fn a_bound_instance_is_a_record_of_what_the_platform_assigned() {
        let record = parsed(only(described(
            &[plugged("tap5c2f9b1e-0f", PORT), plugged("tap77777777-0f", OTHER)],
            &[binding(PORT, VM, PROJECT), binding("foreign", "another", "project")],
        )));
        assert_eq!(record.owner_text(), format!("openstack/{PROJECT}/{VM}"));
        assert_eq!((record.vm.uuid.as_str(), record.vm.project.id.as_str()), (VM, PROJECT));
        let identities: Vec<_> = record.identities();
        assert_eq!(identities.len(), 1, "the other port is not bound yet");
        assert_eq!(identities[0].0.ifname, "tap5c2f9b1e-0f");
        assert_eq!(record.network.nics[0].ipv4().next().expect("an address").to_string(), "10.0.0.5/24");
        assert_eq!(record.serve.dialects.as_deref(), Some(&[][..]), "no dialect of ours");
    }

    #[test]
    fn an_instance_without_a_binding_is_expected() {
        let NodeInstance::Expected(ports) = only(described(&[plugged("tap5c2f9b1e-0f", PORT)], &[])) else {
            panic!("it is bound")
        };
        assert_eq!(ports[0].0.ifname, "tap5c2f9b1e-0f");
        assert_eq!(described(&[], &[binding(PORT, VM, PROJECT)]), BTreeMap::new(), "a binding alone is none");
    }

    #[test]
    fn a_binding_that_goes_is_kept_until_its_port_goes() {
        let ports = local_ports(&tables(
            "Interface",
            &[plugged("tap5c2f9b1e-0f", PORT), plugged("tap77777777-0f", OTHER)],
        ));
        let bound = |rows: &[Value]| bindings(&tables("Port_Binding", rows), &[HERE.to_owned()]);
        let [one, other] = [PORT, OTHER].map(|port| binding(port, VM, PROJECT));
        let mut last = BTreeMap::new();
        for (what, rows, here, kept) in [
            ("both are bound", &[one.clone(), other][..], &ports[..], &[PORT, OTHER][..]),
            ("ovn-controller stops", &[], &ports, &[PORT, OTHER]),
            ("it has bound one again", &[one], &ports, &[PORT, OTHER]),
            ("that one is unplugged", &[], &ports[1..], &[OTHER]),
            ("it is plugged, and not bound yet", &[], &ports, &[OTHER]),
        ] {
            keep_last(&mut last, bound(rows), here);
            assert_eq!(last.keys().collect::<Vec<_>>(), kept, "{what}");
        }
    }

    #[test]
    fn databases_that_disagree_give_no_record() {
        let two = [plugged("tap5c2f9b1e-0f", PORT), plugged("tap77777777-0f", OTHER)];
        for (bound, words) in [
            (vec![binding(PORT, OTHER, PROJECT)], [PORT, VM, OTHER]),
            (vec![binding(PORT, VM, PROJECT), binding(OTHER, VM, "p2")], [OTHER, PROJECT, "p2"]),
        ] {
            let refused = only(described(&two, &bound));
            let NodeInstance::Refused { reason, .. } = &refused else { panic!("no reason") };
            assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
            let taps: Vec<_> = refused.identities().into_iter().flatten().map(|who| who.0.ifname).collect();
            assert_eq!(taps, ["tap5c2f9b1e-0f", "tap77777777-0f"], "{reason}");
        }
    }

    #[test]
    fn a_live_migration_is_announced_where_the_guest_runs() {
        let on = |uuid: &str| json!(["uuid", uuid]);
        let none = || json!(["set", []]);
        for (what, chassis, additional, requested, state) in [
            ("at rest", on(HERE), none(), none(), None),
            ("bound there", on(HERE), none(), json!(["set", [on(THERE)]]), Some("scheduled")),
            ("plugged there", on(HERE), on(THERE), on(THERE), Some("started")),
            ("the other side", on(THERE), on(HERE), on(HERE), None),
            ("moved", on(THERE), none(), none(), None),
            ("a database before OVN 22.09", on(HERE), Value::Null, Value::Null, None),
        ] {
            let mut moving = binding(PORT, VM, PROJECT);
            moving["chassis"] = chassis;
            moving["additional_chassis"] = additional;
            moving["requested_additional_chassis"] = requested;
            let mut other = plugged("tap77777777-0f", OTHER);
            other["external_ids"]["attached-mac"] = json!("fa:16:3e:00:00:02");
            let ports = [plugged("tap5c2f9b1e-0f", PORT), other];
            let record = parsed(only(described(&ports, &[moving, binding(OTHER, VM, PROJECT)])));
            let events: Vec<_> =
                record.events.iter().map(|event| (event.id.as_str(), event.state.name())).collect();
            assert_eq!(
                events,
                state.map(|state| ("migration", state)).into_iter().collect::<Vec<_>>(),
                "{what}"
            );
        }
    }
}
