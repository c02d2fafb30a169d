//! A read-only view of catalogue and ports: states of ports, records and guests.

mod top;
mod trace;

use std::collections::BTreeMap;

use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_common::share::{ShareReport, Tenant};
use metadata_content::record::Record;
use metadata_content::record::event::AnnouncedEvent;
use metadata_content::source::RecordSource;
use metadata_control::instances::{Instance, InstancePort, InstanceVm, Name, PAGE, Page};
use metadata_control::status::{
    ExpectedMac, GuestState, GuestStatus, GuestWay, InstanceState, Instances, LISTED_COMPLAINTS,
    LISTED_GUESTS, LISTED_PORTS, MacMismatch, PendingEvent, PortFilter, PortState, PortStatus,
    PortSummary as PortsReport, RefusedRecord, ShadowedRecord, SharedUuid,
};
use metadata_control::top::{BootStage, VmPage, VmRow};
use metadata_datapath::stack::SlotStats;
use metadata_feed::RejectedVm;
use metadata_feed::registry::{RecordId, RecordStanding};
use metadata_feed::source::{Services, ServingState};
use metadata_links::inlet;
use metadata_steer::UnknownSender;
use tokio::sync::oneshot;

use super::catalogue::RecordCatalogue;
use super::port_text;
use super::ports::NodePorts;
use crate::agent::slots::IdentityName;
pub(crate) use top::VmReport;
pub(crate) use trace::{StartedTrace, TraceRefusal, TraceTarget};

/// The wanted and the present state at one moment.
#[derive(Clone, Copy)]
pub(crate) struct NodeView<'a> {
    pub(super) catalogue: &'a RecordCatalogue,
    pub(super) ports: &'a NodePorts,
}

impl<'a> NodeView<'a> {
    /// Number of ports in each state.
    pub(super) fn ports_by_state(self) -> BTreeMap<PortState, u64> {
        let mut counts: BTreeMap<_, _> = PortState::ALL.map(|state| (state, 0)).into();
        for port in self.catalogue.plan().ports() {
            *counts.entry(self.ports.state_of(port).0).or_default() += 1;
        }
        counts.insert(PortState::Closed, self.ports.closed().count() as u64);
        *counts.entry(PortState::Error).or_default() += self.failed_to_close().count() as u64;
        counts
    }

    /// How tenants share the node's limits.
    pub(super) fn shares(self) -> Vec<ShareReport> {
        let registry = self.catalogue.registry();
        let refused = RecordSource::ALL.into_iter().filter_map(|source| registry.refused_share(source));
        let refused =
            refused.filter(|share| share.top().iter().any(|(tenant, _)| *tenant != Tenant::Operator));
        let refused = refused.max_by_key(|share| share.used());
        let refused = refused.map(|share| ShareReport::of("refused_records", share));
        self.catalogue.room().shares().into_iter().chain(self.ports.shares()).chain(refused).collect()
    }

    /// Number of good records by `serve.smbios`.
    pub(super) fn datasources(self) -> BTreeMap<String, u64> {
        let mut counts: BTreeMap<String, u64> = BTreeMap::new();
        for (_, record) in self.catalogue.registry().records() {
            *counts.entry(record.serve.smbios.as_str().to_owned()).or_default() += 1;
        }
        counts
    }

    fn failed_to_close(self) -> impl Iterator<Item = (&'a PortName, &'a str)> {
        self.ports.failed_to_close(self.catalogue.plan())
    }

    /// Counts of ports, and a list of ports: all for [`PortFilter::EveryPort`], otherwise at most [`LISTED_PORTS`].
    pub(super) fn ports_report(self, about: PortFilter) -> PortsReport {
        let most = if about == PortFilter::EveryPort { usize::MAX } else { LISTED_PORTS };
        let mut report = PortsReport {
            counts: self.ports_by_state(),
            // Closed taps have programs too, and are counted as closed.
            programs: [("xdp".into(), 0), ("tcx".into(), 0)].into(),
            ..PortsReport::default()
        };
        let wanted = self.catalogue.plan().ports().map(|port| (port, self.ports.state_of(port)));
        let closed = self.ports.closed().map(|port| (port, (PortState::Closed, None)));
        let open = self.failed_to_close().map(|(port, reason)| (port, (PortState::Error, Some(reason))));
        for (port, (state, reason)) in wanted.chain(open).chain(closed) {
            if state == PortState::Attached
                && let Some(program) = self.ports.program_of(port)
            {
                *report.programs.entry(program).or_default() += 1;
            }
            if about == PortFilter::Trouble && matches!(state, PortState::Attached | PortState::Closed) {
                continue;
            }
            if report.listed.len() == most {
                report.unlisted += 1;
                continue;
            }
            report.listed.push(PortStatus {
                name: port_text(port),
                state,
                reason: reason.map(str::to_owned),
                program: self.ports.program_of(port),
                way: way_of(port),
                identities: self.ports.bindings().on(port).count() as u64,
            });
        }
        report
    }

    /// Number of records in each state, for files and for every source that has records.
    pub(super) fn instances_by_state(self) -> Vec<Instances> {
        let none = InstanceState::ALL.map(|state| (state, 0));
        let mut counts = BTreeMap::from([(RecordSource::File, none)]);
        for id in self.catalogue.registry().ids() {
            let state = self.instance_state(id);
            let counts = counts.entry(id.source).or_insert(none);
            counts.iter_mut().filter(|(other, _)| *other == state).for_each(|(_, count)| *count += 1);
        }
        let of = |(source, counts): (RecordSource, [_; InstanceState::ALL.len()])| {
            counts.map(|(state, count)| Instances { source: source.name().into(), state, count })
        };
        counts.into_iter().flat_map(of).collect()
    }

    fn instance_state(self, id: &RecordId) -> InstanceState {
        match self.catalogue.registry().standing(id) {
            Some(RecordStanding::InForce) => {}
            Some(RecordStanding::Shadowed { .. }) => return InstanceState::Shadowed,
            Some(RecordStanding::Rejected) | None => return InstanceState::Rejected,
        }
        let mut state = InstanceState::Unplaced;
        for (who, has) in self.catalogue.plan().claims(id) {
            if !has {
                return InstanceState::Contested;
            }
            let served = self.ports.guest_state(who) == GuestState::Served;
            state = match (served, state) {
                (true, InstanceState::Unplaced | InstanceState::Served) => InstanceState::Served,
                _ => InstanceState::Waiting,
            };
        }
        state
    }

    /// Conflicts between records, [`LISTED_COMPLAINTS`] at most.
    pub(super) fn conflicts(self) -> Vec<String> {
        let conflicts = self.catalogue.plan().conflicts();
        conflicts.take(LISTED_COMPLAINTS).map(|conflict| conflict.to_string()).collect()
    }

    /// Ports whose guests use a MAC that no record has there.
    pub(crate) fn mac_mismatches(self) -> Vec<(PortName, UnknownSender)> {
        let senders = self.ports.steering().attachments().unknown_senders();
        senders.into_iter().map(|(port, sender)| (port.clone(), sender)).collect()
    }

    /// What is known of a MAC on a port on which no record has it.
    pub(crate) fn mac_mismatch(self, port: &PortName, sender: UnknownSender) -> MacMismatch {
        let speakers = self.catalogue.plan().speakers(port).take(LISTED_COMPLAINTS);
        let expected = speakers
            .map(|(who, id)| ExpectedMac { mac: who.mac.to_string(), record: id.map(RecordId::to_string) });
        MacMismatch {
            port: port_text(port),
            mac: sender.mac.to_string(),
            expected: expected.collect(),
            ago: Some(sender.ago.as_secs_f64()),
        }
    }

    /// Rejected records, [`LISTED_COMPLAINTS`] at most.
    pub(super) fn refused(self) -> Vec<RefusedRecord> {
        let refused = self.catalogue.registry().refused().take(LISTED_COMPLAINTS);
        refused
            .map(|(id, reason)| RefusedRecord { record: id.to_string(), reason: reason.to_owned() })
            .collect()
    }

    /// UUIDs that several VMs share, [`LISTED_COMPLAINTS`] at most.
    pub(super) fn shared_uuids(self) -> Vec<SharedUuid> {
        let shared = self.catalogue.shared_uuids().into_iter().take(LISTED_COMPLAINTS);
        let listed =
            |ids: &[&RecordId]| ids.iter().take(LISTED_COMPLAINTS).map(ToString::to_string).collect();
        let shared = shared.map(|(uuid, ids)| SharedUuid {
            uuid: uuid.to_owned(),
            records: listed(&ids),
            unlisted: ids.len().saturating_sub(LISTED_COMPLAINTS) as u64,
        });
        shared.collect()
    }

    /// The pending events of a record's VM, if the record is in force.
    fn pending_events(self, id: Option<&RecordId>) -> Vec<AnnouncedEvent> {
        let record = id.and_then(|id| self.catalogue.record(id));
        let mailbox = record.and_then(|record| self.catalogue.mailboxes().loaded(&record.owner()));
        mailbox.map_or_else(Vec::new, |mailbox| mailbox.events().document().pending().cloned().collect())
    }

    /// Number of pending events, and the first [`LISTED_COMPLAINTS`] of them.
    pub(super) fn events(self) -> (u64, Vec<PendingEvent>) {
        let count = self.catalogue.errands().mailboxes.pending_events;
        if count == 0 {
            return (0, Vec::new());
        }
        let events = self.catalogue.records().flat_map(|(id, record)| {
            let events = self.pending_events(Some(id)).into_iter();
            let (record, vm) = (id.to_string(), record.vm.name.to_string());
            events.map(move |event| PendingEvent { record: record.clone(), vm: vm.clone(), event })
        });
        (count, events.take(LISTED_COMPLAINTS).collect())
    }

    /// Records shadowed by another source's record of the same VM, [`LISTED_COMPLAINTS`] at most.
    pub(super) fn shadowed(self) -> Vec<ShadowedRecord> {
        let registry = self.catalogue.registry();
        let shadowed = registry.ids().filter_map(|id| match registry.standing(id)? {
            RecordStanding::Shadowed { by } => {
                Some(ShadowedRecord { record: id.to_string(), by: by.to_string() })
            }
            RecordStanding::InForce | RecordStanding::Rejected => None,
        });
        shadowed.take(LISTED_COMPLAINTS).collect()
    }
}

/// How guests reach a port.
fn way_of(port: &PortName) -> GuestWay {
    if inlet::is_inlet(port) { GuestWay::Inlet } else { GuestWay::Device }
}

// Finds guests by the names that people use.

/// A guest, and the channel for its worker's report on connections and requests; `None` if the guest is not bound.
pub(crate) type GuestReport = (GuestStatus, Option<oneshot::Receiver<SlotStats>>);

impl<'a> NodeView<'a> {
    /// The guests known by a name: a port, a MAC, a VM's name, UUID or owner, or a record's name or file; those whose
    /// record is not in force come last. [`LISTED_GUESTS`] at most.
    #[must_use]
    pub(crate) fn guests(self, name: &str) -> Vec<GuestReport> {
        let known = self.called(name).map(|(who, id)| self.guest(who, id));
        let unserved = self.unserved(name).into_iter().map(|nic| {
            // Without a valid version, the refusal is the reason.
            let id = nic.id.filter(|id| self.catalogue.registry().record(id).is_some());
            (GuestStatus { problem: id.and_then(|id| self.refusal(id)), ..nic.guest() }, None)
        });
        known.chain(unserved).take(LISTED_GUESTS).collect()
    }

    /// The identities that are known by a name. A MAC that no record has is that of the guest on whose port it was
    /// noticed.
    fn called(self, name: &str) -> impl Iterator<Item = (&'a IdentityName, Option<&'a RecordId>)> {
        let senders = name
            .parse::<Mac>()
            .map_or_else(|_| Vec::new(), |_| self.ports.steering().attachments().unknown_senders());
        let is_here = move |port: &PortName| {
            senders
                .iter()
                .any(|(other, sender)| *other == port && sender.mac.to_string().eq_ignore_ascii_case(name))
        };
        let known = self.catalogue.plan().all_identities();
        known.filter(move |(who, id)| self.is_called(name, who, *id) || is_here(&who.port))
    }

    /// The MAC that was noticed on a port although no record has it there, in words.
    fn mac_problem(self, port: &PortName) -> Option<String> {
        let sender = self.ports.steering().attachments().unknown_sender_on(port)?;
        Some(self.mac_mismatch(port, sender).to_string())
    }

    /// Why the latest version of a record, or a part of it, is not served, although a record of its VM is.
    fn refusal(self, id: &RecordId) -> Option<String> {
        let registry = self.catalogue.registry();
        let reason = registry.refusal(id)?;
        let effect = if registry.is_good_in_part(id) {
            "its VM is served in part"
        } else {
            "the latest version of its record is refused, and the last valid one stays in force"
        };
        Some(format!("{effect}: {reason}"))
    }

    fn is_called(self, name: &str, who: &IdentityName, id: Option<&RecordId>) -> bool {
        id.is_some_and(|id| self.is_vm(name, id))
            || is_port(name, &who.port)
            || who.mac.to_string().eq_ignore_ascii_case(name)
    }

    /// The identities of the VMs with this name, UUID or owner, or with this record: [`LISTED_GUESTS`] at most.
    fn identities_of_vm(self, name: &str) -> Vec<&'a IdentityName> {
        let known = self.catalogue.plan().all_identities();
        let known = known.filter(|(_, id)| id.is_some_and(|id| self.is_vm(name, id)));
        known.map(|(who, _)| who).take(LISTED_GUESTS).collect()
    }

    /// True if the record, in force or not, has this name or file, or is that of a VM with this name, UUID or owner.
    fn is_vm(self, name: &str, id: &RecordId) -> bool {
        let record = self.catalogue.registry().record(id);
        record.is_some_and(|record| {
            record.vm.name.as_str() == name
                || record.vm.uuid.as_str().eq_ignore_ascii_case(name)
                || record.owner_text() == name
        }) || self.is_rejected_vm(name, id)
            || &*id.key == name
            || name.strip_prefix(id.source.name()).and_then(|rest| rest.strip_prefix('/')) == Some(&*id.key)
            || id.source == RecordSource::File
                && name.starts_with('/')
                && name.rsplit('/').next() == Some(&id.key)
    }

    /// True if the record has no good version, and people call its VM so. A name that its source does not tell is that of
    /// the file, or of the VirtualMachineInstance.
    fn is_rejected_vm(self, name: &str, id: &RecordId) -> bool {
        let registry = self.catalogue.registry();
        if registry.record(id).is_some() {
            return false;
        }
        if let Some(vm) = registry.rejected_vm(id) {
            return vm.is_called(name);
        }
        let own = match id.source {
            RecordSource::File => id.key.rsplit_once('.').map(|(name, _)| name),
            RecordSource::Kubevirt => id.key.rsplit_once('/').map(|(_, name)| name),
            _ => None,
        };
        own == Some(name)
    }

    fn guest(self, who: &IdentityName, id: Option<&RecordId>) -> GuestReport {
        let record = id.and_then(|id| self.catalogue.record(id));
        let slot = self.ports.bindings().get(who).map(|(slot, _)| slot);
        let guest = GuestStatus {
            port: port_text(&who.port),
            mac: who.mac.to_string(),
            record: id.map(RecordId::to_string),
            vm: record.map(|record| record.vm.name.to_string()),
            uuid: record.map(|record| record.vm.uuid.as_str().to_owned()),
            owner: record.map(|record| record.owner_text().to_owned()),
            state: self.ports.guest_state(who),
            reason: self.ports.state_of(&who.port).1.map(str::to_owned),
            problem: self.mac_problem(&who.port).or_else(|| self.refusal(id?)),
            slot,
            hub: slot.map(|slot| self.ports.steering().hubs().hub_of(slot)),
            program: self.ports.program_of(&who.port),
            way: way_of(&who.port),
            held: None,
            events: self.pending_events(id),
        };
        (guest, self.ports.ask_held(who))
    }
}

/// True if the port has this name, in any namespace if the name has none.
fn is_port(name: &str, port: &PortName) -> bool {
    port.ifname == name || port_text(port) == name
}

// Instances, as the API shows them.

impl NodeView<'_> {
    /// The record of a name, with the states of its ports.
    #[must_use]
    pub(crate) fn instance(self, id: &RecordId) -> Option<Instance> {
        let registry = self.catalogue.registry();
        let standing = registry.standing(id)?;
        let record = registry.record(id);
        let rejected = || {
            let RejectedVm { name, uuid, .. } = registry.rejected_vm(id)?;
            let owner = registry.rejected_vm(id)?.owner().to_owned();
            Some(InstanceVm { name: name.clone(), uuid: uuid.clone(), owner })
        };
        let ports = self.catalogue.plan().claims(id).map(|(who, has)| self.place(who, has));
        Some(Instance {
            name: id.key.as_ref().into(),
            source: id.source,
            state: self.instance_state(id),
            in_force: standing == RecordStanding::InForce,
            shadowed_by: if let RecordStanding::Shadowed { by } = &standing {
                Some(name_of(by))
            } else {
                None
            },
            refused: registry.refusal(id).map(str::to_owned),
            etag: self.catalogue.etag_of(id).map(|etag| etag.as_ref().into()),
            generation: record.map(|record| record.generation),
            vm: record.map_or_else(rejected, |record| {
                Some(InstanceVm {
                    name: record.vm.name.to_string(),
                    uuid: record.vm.uuid.as_str().to_owned(),
                    owner: record.owner_text().to_owned(),
                })
            }),
            ports: ports.collect(),
            change: None,
            record: None,
            withheld: None,
        })
    }

    /// The [`PAGE`] instances after `after`, of one source or of all.
    #[must_use]
    pub(crate) fn page(self, source: Option<RecordSource>, after: Option<&RecordId>) -> Page {
        let ids = self.catalogue.registry().after(after);
        let mut ids = ids.filter(|id| source.is_none_or(|source| source == id.source)).peekable();
        let instances: Vec<_> = ids.by_ref().take(PAGE).filter_map(|id| self.instance(id)).collect();
        let last = instances.last().filter(|_| ids.peek().is_some());
        let next = last.map(|last| format!("{}/{}", last.source.name(), last.name));
        Page { instances, next }
    }

    /// How the records of a source are served, by their keys.
    pub(crate) fn services(self, source: RecordSource) -> Services {
        let ids = self.catalogue.registry().ids().filter(|id| id.source == source);
        ids.map(|id| (id.key.to_string(), self.service(id))).collect()
    }

    fn service(self, id: &RecordId) -> ServingState {
        match self.catalogue.registry().standing(id) {
            Some(RecordStanding::InForce) => {}
            Some(RecordStanding::Shadowed { .. }) => {
                return ServingState::Failed(
                    "the record of another source takes the place of this VM's".into(),
                );
            }
            Some(RecordStanding::Rejected) | None => return ServingState::Waiting,
        }
        let (mut are_ready, mut mismatch) = (None, None);
        for (who, has) in self.catalogue.plan().claims(id) {
            let IdentityName { port, mac } = who;
            if !has {
                return ServingState::Failed(format!(
                    "port {}: another VM's record has MAC {mac} there",
                    port_text(port)
                ));
            }
            let (state, reason) = self.ports.state_of(port);
            if state == PortState::Error {
                return ServingState::Failed(format!(
                    "port {}: {}",
                    port_text(port),
                    reason.unwrap_or_default()
                ));
            }
            let is_served = state == PortState::Attached && self.ports.guest_state(who) == GuestState::Served;
            are_ready = Some(are_ready.unwrap_or(true) && is_served);
            if let Some(found) = self.ports.steering().attachments().unknown_sender_on(port) {
                mismatch.get_or_insert_with(|| {
                    format!(
                        "port {}: frames from MAC {} are dropped, because the VM's NIC has MAC {mac}; set \
                         `macAddress` of the NIC to the one that the guest uses, or have the guest use the NIC's",
                        port_text(port),
                        found.mac
                    )
                });
            }
        }
        match (are_ready, mismatch) {
            (Some(true), Some(mismatch)) => ServingState::Mismatched(mismatch),
            (Some(true), None) => ServingState::Ready,
            (Some(false) | None, _) => ServingState::Waiting,
        }
    }

    fn place(self, who: &IdentityName, has: bool) -> InstancePort {
        let holder = self.catalogue.plan().holder(who).filter(|_| !has);
        InstancePort {
            port: port_text(&who.port),
            mac: who.mac.to_string(),
            // The state of the guest there is that of the other record.
            state: if has { self.ports.guest_state(who) } else { GuestState::Unserved },
            held_by: holder.map(name_of),
            reason: self.ports.state_of(&who.port).1.map(str::to_owned),
        }
    }
}

/// The name of a record in answers of the API.
pub(crate) fn name_of(id: &RecordId) -> Name {
    Name { source: id.source, name: id.key.as_ref().into() }
}

// VMs that have a record and are not served from it, and why.

/// A NIC that is not served from its record; without a MAC, the record has no such NIC, or a port has no record.
#[derive(Debug)]
struct UnservedNic<'a> {
    id: Option<&'a RecordId>,
    record: Option<&'a Record>,
    /// The VM of a record that is refused from the start.
    rejected: Option<&'a RejectedVm>,
    mac: Option<Mac>,
    port: Option<PortName>,
    /// Why, and what to do.
    reason: String,
}

impl UnservedNic<'_> {
    fn port(&self) -> String {
        self.port.as_ref().map(port_text).unwrap_or_default()
    }

    fn mac(&self) -> String {
        self.mac.as_ref().map(Mac::to_string).unwrap_or_default()
    }

    fn vm_name(&self) -> Option<String> {
        let rejected = || self.rejected.map(|vm| vm.name.clone());
        self.record.map(|record| record.vm.name.to_string()).or_else(rejected)
    }

    fn uuid(&self) -> Option<String> {
        let rejected = || self.rejected.map(|vm| vm.uuid.clone()).filter(|uuid| !uuid.is_empty());
        self.record.map(|record| record.vm.uuid.as_str().to_owned()).or_else(rejected)
    }

    /// As `xdp-imds status` shows it.
    fn guest(&self) -> GuestStatus {
        GuestStatus {
            port: self.port(),
            mac: self.mac(),
            record: self.id.map(RecordId::to_string),
            vm: self.vm_name(),
            uuid: self.uuid(),
            owner: self.record.map(|record| record.owner_text().to_owned()),
            state: GuestState::Unserved,
            reason: Some(self.reason.clone()),
            problem: None,
            slot: None,
            hub: None,
            program: None,
            way: self.port.as_ref().map_or(GuestWay::Device, way_of),
            held: None,
            events: Vec::new(),
        }
    }

    /// As `xdp-imds top` shows it.
    fn page(&self) -> VmPage {
        let row = VmRow {
            vm: self.vm_name(),
            uuid: self.uuid(),
            port: self.port(),
            mac: self.mac(),
            stage: BootStage::Unattached,
            waits_for: Some(self.reason.clone()),
            ..VmRow::default()
        };
        VmPage { row, record: self.id.map(RecordId::to_string), ..VmPage::default() }
    }
}

impl<'a> NodeView<'a> {
    /// The NICs known by a name that no record serves there, [`LISTED_GUESTS`] at most. The name is one of those that
    /// [`NodeView::guests`] takes.
    fn unserved(self, name: &str) -> Vec<UnservedNic<'a>> {
        let mac = name.parse::<Mac>().ok();
        let ids = self.catalogue.registry().ids();
        let nics = ids.flat_map(|id| {
            let is_vm = self.is_vm(name, id);
            let is_meant = is_vm || self.has_nic(id, name, mac);
            // Who asks for the VM, and not for this record, means the record in force.
            let is_other = match self.catalogue.registry().standing(id) {
                Some(RecordStanding::Shadowed { by }) => {
                    self.is_vm(name, &by) || self.has_nic(&by, name, mac)
                }
                _ => false,
            };
            let nics = if is_meant && !is_other { self.unserved_nics(id) } else { Vec::new() };
            let is_called = move |nic: &UnservedNic<'_>| {
                is_vm
                    || mac.is_some() && nic.mac == mac
                    || nic.port.as_ref().is_some_and(|port| is_port(name, port))
            };
            nics.into_iter().filter(is_called)
        });
        let closed = self.ports.closed().filter(|port| is_port(name, port)).map(|port| UnservedNic {
            id: None,
            record: None,
            rejected: None,
            mac: None,
            port: Some(port.clone()),
            reason: "no record has a NIC on this port, and `guard: all` keeps it closed; register the VM"
                .into(),
        });
        nics.chain(closed).take(LISTED_GUESTS).collect()
    }

    fn has_nic(self, id: &RecordId, name: &str, mac: Option<Mac>) -> bool {
        let Some(record) = self.catalogue.registry().record(id) else { return false };
        record.network.nics.iter().any(|nic| {
            mac.is_some() && nic.mac.map(|mac| mac.0) == mac
                || nic.port.as_ref().is_some_and(|port| is_port(name, &port.into()))
        })
    }

    fn unserved_nics(self, id: &'a RecordId) -> Vec<UnservedNic<'a>> {
        let registry = self.catalogue.registry();
        let record = registry.record(id).map(|record| &**record);
        let rejected = registry.rejected_vm(id);
        let nic = |mac, port, reason| UnservedNic { id: Some(id), record, rejected, mac, port, reason };
        let all = |reason: &str| -> Vec<_> {
            let nics = record.into_iter().flat_map(|record| &record.network.nics);
            let nics = nics.filter_map(|of| Some((of.mac?.0, of.port.as_ref().map(PortName::from))));
            let nics: Vec<_> = nics.map(|(mac, port)| nic(Some(mac), port, reason.to_owned())).collect();
            if nics.is_empty() { vec![nic(None, None, reason.to_owned())] } else { nics }
        };
        match registry.standing(id) {
            None => return Vec::new(),
            Some(RecordStanding::Rejected) => {
                return all(&format!("its record is refused: {}", registry.refusal(id).unwrap_or_default()));
            }
            Some(RecordStanding::Shadowed { by }) => {
                return all(&format!(
                    "{by} is in force for this VM, because its source has precedence; remove one of them"
                ));
            }
            Some(RecordStanding::InForce) => {}
        }
        let plan = self.catalogue.plan();
        let mut has_place = false;
        let mut nics = Vec::new();
        for (who, has) in plan.claims(id) {
            has_place = true;
            if let Some(holder) = plan.holder(who).filter(|_| !has) {
                let reason =
                    format!("{holder} has this MAC on this port; give one of the NICs another MAC or port");
                nics.push(nic(Some(who.mac), Some(who.port.clone()), reason));
            }
        }
        let macs = record.into_iter().flat_map(|record| &record.network.nics).filter_map(|nic| nic.mac);
        for mac in macs.map(|mac| mac.0) {
            if let Some(ports) = plan.candidates(id, mac) {
                has_place = true;
                let reason =
                    format!("this MAC is configured on {ports} ports; name the NIC's port in the record");
                nics.push(nic(Some(mac), None, reason));
            }
        }
        if has_place {
            return nics;
        }
        all("no port is known for this NIC; name the port in the record, or configure one with this MAC")
    }
}
