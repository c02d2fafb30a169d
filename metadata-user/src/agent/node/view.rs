//! A read-only view of catalogue and ports: states of ports, records and guests.

mod guests;
mod instances;
mod top;
mod trace;
mod unserved;

use std::collections::BTreeMap;

use metadata_common::port::PortName;
use metadata_common::share::{ShareReport, Tenant};
use metadata_content::record::event::AnnouncedEvent;
use metadata_content::source::RecordSource;
use metadata_control::status::{
    ExpectedMac, GuestState, GuestWay, InstanceState, Instances, LISTED_COMPLAINTS, LISTED_PORTS,
    MacMismatch, PendingEvent, PortFilter, PortState, PortStatus, PortSummary as PortsReport, RefusedRecord,
    ShadowedRecord, SharedUuid,
};
use metadata_feed::registry::{RecordId, RecordStanding};
use metadata_links::inlet;
use metadata_steer::UnknownSender;

use super::catalogue::RecordCatalogue;
use super::port_text;
use super::ports::NodePorts;
pub(crate) use instances::name_of;
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
