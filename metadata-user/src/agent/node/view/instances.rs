//! Instances, as the API shows them.

use metadata_content::source::Source;
use metadata_control::instances::{Instance, Name, PAGE, Page, Port, Vm};
use metadata_feed::registry::{RecordId, Standing};

use super::View;
use crate::agent::node::spoken;
use crate::agent::slots::IdentityName;

impl View<'_> {
    /// The record of a name, with the states of its ports.
    #[must_use]
    pub(in crate::agent) fn instance(self, id: &RecordId) -> Option<Instance> {
        let registry = self.catalogue.registry();
        let standing = registry.standing(id)?;
        let record = registry.record(id);
        let ports = self.catalogue.plan().claims(id).map(|(who, has)| self.place(who, has));
        Some(Instance {
            name: id.key.as_ref().into(),
            source: id.source,
            state: self.instance_state(id),
            in_force: standing == Standing::InForce,
            shadowed_by: if let Standing::Shadowed { by } = &standing { Some(name_of(by)) } else { None },
            refused: registry.refusal(id).map(str::to_owned),
            etag: self.catalogue.etag_of(id).map(|etag| etag.as_ref().into()),
            generation: record.map(|record| record.generation),
            vm: record.map(|record| Vm {
                name: record.vm.name.to_string(),
                uuid: record.vm.uuid.as_str().to_owned(),
                owner: record.owner_text().to_owned(),
            }),
            ports: ports.collect(),
            record: None,
            withheld: None,
        })
    }

    /// The [`PAGE`] instances after `after`, of one source or of all.
    #[must_use]
    pub(in crate::agent) fn page(self, source: Option<Source>, after: Option<&RecordId>) -> Page {
        let ids = self.catalogue.registry().after(after);
        let mut ids = ids.filter(|id| source.is_none_or(|source| source == id.source)).peekable();
        let instances: Vec<_> = ids.by_ref().take(PAGE).filter_map(|id| self.instance(id)).collect();
        let last = instances.last().filter(|_| ids.peek().is_some());
        let next = last.map(|last| format!("{}/{}", last.source.name(), last.name));
        Page { instances, next }
    }

    fn place(self, who: &IdentityName, has: bool) -> Port {
        let holder = self.catalogue.plan().holder(who).filter(|_| !has);
        Port {
            port: spoken(&who.port),
            mac: who.mac.to_string(),
            state: self.ports.guest_state(who),
            held_by: holder.map(name_of),
            reason: self.ports.state_of(&who.port).1.map(str::to_owned),
        }
    }
}

/// The name of a record in answers of the API.
pub(in crate::agent) fn name_of(id: &RecordId) -> Name {
    Name { source: id.source, name: id.key.as_ref().into() }
}
