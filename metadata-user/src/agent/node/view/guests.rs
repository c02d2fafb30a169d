//! Finds guests by the names that people use.

use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use metadata_content::source::RecordSource;
use metadata_control::status::{GuestStatus, LISTED_GUESTS};
use metadata_datapath::stack::SlotStats;
use metadata_feed::registry::RecordId;
use tokio::sync::oneshot;

use super::{NodeView, way_of};
use crate::agent::node::port_text;
use crate::agent::slots::IdentityName;

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
    pub(super) fn called(self, name: &str) -> impl Iterator<Item = (&'a IdentityName, Option<&'a RecordId>)> {
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
    pub(super) fn mac_problem(self, port: &PortName) -> Option<String> {
        let sender = self.ports.steering().attachments().unknown_sender_on(port)?;
        Some(self.mac_mismatch(port, sender).to_string())
    }

    /// Why the latest version of a record is not served, although an earlier one is.
    fn refusal(self, id: &RecordId) -> Option<String> {
        let reason = self.catalogue.registry().refusal(id)?;
        Some(format!(
            "the latest version of its record is refused, and the last valid one stays in force: {reason}"
        ))
    }

    fn is_called(self, name: &str, who: &IdentityName, id: Option<&RecordId>) -> bool {
        id.is_some_and(|id| self.is_vm(name, id))
            || is_port(name, &who.port)
            || who.mac.to_string().eq_ignore_ascii_case(name)
    }

    /// The identities of the VMs with this name, UUID or owner, or with this record: [`LISTED_GUESTS`] at most.
    pub(super) fn identities_of_vm(self, name: &str) -> Vec<&'a IdentityName> {
        let known = self.catalogue.plan().all_identities();
        let known = known.filter(|(_, id)| id.is_some_and(|id| self.is_vm(name, id)));
        known.map(|(who, _)| who).take(LISTED_GUESTS).collect()
    }

    /// True if the record, in force or not, has this name or file, or is that of a VM with this name, UUID or owner.
    pub(super) fn is_vm(self, name: &str, id: &RecordId) -> bool {
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
pub(super) fn is_port(name: &str, port: &PortName) -> bool {
    port.ifname == name || port_text(port) == name
}
