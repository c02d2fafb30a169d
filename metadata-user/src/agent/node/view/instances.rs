//! Instances, as the API shows them.

use metadata_content::source::RecordSource;
use metadata_control::instances::{Instance, InstancePort, InstanceVm, Name, PAGE, Page};
use metadata_control::status::GuestState;
use metadata_control::status::PortState;
use metadata_feed::RejectedVm;
use metadata_feed::registry::{RecordId, RecordStanding};
use metadata_feed::source::{Services, ServingState};

use super::NodeView;
use crate::agent::node::port_text;
use crate::agent::slots::IdentityName;

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
