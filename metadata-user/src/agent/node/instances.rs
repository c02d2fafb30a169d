//! Records that are registered at the agent itself: looked at, checked, put in and taken out.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::Node;
use super::status::spoken;
use crate::agent::shelf::Shelf;
use crate::agent::slots::IdentityName;
use metadata_base::hex::hex;
use metadata_content::record::{Limits, Record};
use metadata_content::source::Source;
use metadata_control::instances::{Instance, Name, PAGE, Page, Port, Vm};
use metadata_control::status::InstanceState;
use metadata_feed::FeedEvent;
use metadata_feed::registry::{MAX_RECORDS, RecordId, Standing};
use metadata_feed::room::NoRoom;

/// What the node knows of records nobody tells again.
#[derive(Debug)]
pub(super) struct Registered {
    shelf: Shelf,
    limits: Limits,
    /// Most records of each source.
    most: usize,
    etags: BTreeMap<RecordId, Arc<str>>,
    /// Who wants to know when all ports of a record are attached.
    waiting: Vec<(RecordId, oneshot::Sender<Instance>)>,
}

impl Default for Registered {
    fn default() -> Self {
        let (limits, etags, waiting) = (Limits::DEFAULT, BTreeMap::new(), Vec::new());
        Self { shelf: Shelf::below(None), limits, most: MAX_RECORDS, etags, waiting }
    }
}

/// A record and what it is told apart by.
#[derive(Clone, Debug)]
pub struct Tagged {
    /// The record.
    pub record: Arc<Record>,
    /// Of its content.
    pub etag: Arc<str>,
}

/// Why a record cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clash {
    /// Another VM's record has one of its MACs on the same port.
    Taken {
        /// The MAC and the port.
        identity: IdentityName,
        /// That record.
        by: RecordId,
    },
    /// Another record of its source is of the same VM.
    SameVm {
        /// That record.
        by: RecordId,
    },
    /// There is no room for another.
    Full {
        /// How many there may be.
        most: usize,
    },
    /// There is no memory for it.
    Memory(NoRoom),
    /// None of its NICs has a port, so that waiting for one would have no end.
    Unplaced,
}

impl Node {
    /// Where records nobody tells again are kept, and how much they may hold. Those that are kept come in.
    pub(in crate::agent) fn keeps(&mut self, shelf: Shelf, limits: Limits, most: usize) {
        self.registered = Registered { shelf, limits, most, ..Registered::default() };
        self.read_registered();
    }

    /// Records registered later keep to other limits.
    pub(in crate::agent) fn limit_registered(&mut self, limits: Limits, most: usize) {
        (self.registered.limits, self.registered.most) = (limits, most);
    }

    /// Takes in what is kept: at a start, and when another agent has kept it until now.
    pub(super) fn read_registered(&mut self) {
        let sources = Source::ALL.into_iter().filter(|source| source.is_kept());
        sources.clone().for_each(|source| self.registry.begin(source));
        self.registered.etags.clear();
        let kept = self.registered.shelf.read(&self.registered.limits);
        for (id, record) in kept.into_iter().filter(|(id, _)| id.source.is_kept()) {
            match etag(&record) {
                Ok(etag) => self.register(&id, Tagged { record: record.into(), etag }),
                Err(error) => tracing::warn!(record = %id, "not served: {error}"),
            }
        }
        sources.for_each(|source| self.hear(source, FeedEvent::Synced));
        self.tell_conflicts();
    }

    /// The tag of what is registered under a name.
    pub(in crate::agent) fn tag(&self, id: &RecordId) -> Option<Arc<str>> {
        self.registered.etags.get(id).cloned()
    }

    /// Whether a record may be registered under a name; with `waits`, by somebody who waits until it is attached.
    ///
    /// # Errors
    /// [`Clash`]: it may not.
    pub(in crate::agent) fn admits(&self, id: &RecordId, record: &Record, waits: bool) -> Result<(), Clash> {
        let vm = &record.vm.uuid;
        let same = self.registry.of_vm(vm).find(|other| other.source == id.source && *other != id);
        if let Some(by) = same {
            return Err(Clash::SameVm { by: by.clone() });
        }
        let places = self.plan.places(record);
        if waits && places.is_empty() {
            return Err(Clash::Unplaced);
        }
        for identity in places {
            let holder = self.plan.holder(&identity).filter(|holder| *holder != id);
            let other = holder.filter(|holder| self.records.get(holder).is_some_and(|r| r.vm.uuid != *vm));
            if let Some(by) = other.cloned() {
                return Err(Clash::Taken { identity, by });
            }
        }
        let most = self.registered.most;
        if self.registry.record(id).is_none() && self.registry.count(id.source) >= most {
            return Err(Clash::Full { most });
        }
        self.room.fits(id, record).map_err(Clash::Memory)
    }

    /// Puts a record in the place of what is registered under its name.
    pub(in crate::agent) fn register(&mut self, id: &RecordId, Tagged { record, etag }: Tagged) {
        self.registered.etags.insert(id.clone(), etag);
        self.hear(id.source, FeedEvent::Upsert { key: id.key.as_ref().into(), record });
        self.tell_conflicts();
    }

    /// Takes out what is registered under a name.
    pub(in crate::agent) fn unregister(&mut self, id: &RecordId) {
        self.registered.etags.remove(id);
        self.registered.waiting.retain(|(waits, _)| waits != id);
        self.hear(id.source, FeedEvent::Remove { key: id.key.as_ref().into() });
        self.tell_conflicts();
    }

    /// Tells when all ports of a record are attached; never when it goes before.
    pub(in crate::agent) fn wait_for(&mut self, id: RecordId, reply: oneshot::Sender<Instance>) {
        self.registered.waiting.retain(|(_, reply)| !reply.is_closed());
        self.registered.waiting.push((id, reply));
        self.tell_waiting();
    }

    /// Tells those who wait for what has happened. To be called after ports changed.
    pub(in crate::agent) fn tell_waiting(&mut self) {
        if self.registered.waiting.is_empty() {
            return;
        }
        for (id, reply) in std::mem::take(&mut self.registered.waiting) {
            match self.look_at(&id) {
                Some(instance) if instance.state == InstanceState::Served => _ = reply.send(instance),
                Some(_) if !reply.is_closed() => self.registered.waiting.push((id, reply)),
                Some(_) | None => {}
            }
        }
    }

    /// A record as it is held, if there is one of that name.
    pub(in crate::agent) fn look_at(&self, id: &RecordId) -> Option<Instance> {
        let standing = self.registry.standing(id)?;
        let record = self.registry.record(id);
        let ports = self.plan.claims(id).map(|(who, has)| self.place(who, has));
        Some(Instance {
            name: id.key.as_ref().into(),
            source: id.source,
            state: self.instance(id),
            in_force: standing == Standing::InForce,
            shadowed_by: if let Standing::Shadowed { by } = &standing { Some(name_of(by)) } else { None },
            refused: self.registry.refusal(id).map(str::to_owned),
            etag: self.tag(id).map(|etag| etag.as_ref().into()),
            generation: record.map(|record| record.generation),
            vm: record.map(|record| Vm {
                name: record.vm.name.to_string(),
                uuid: record.vm.uuid.as_str().to_owned(),
            }),
            ports: ports.collect(),
            record: None,
            withheld: None,
        })
    }

    /// The last good record of a name.
    pub(in crate::agent) fn record_of(&self, id: &RecordId) -> Option<Arc<Record>> {
        self.registry.record(id).cloned()
    }

    /// The instances behind `after`, of one source or of all.
    pub(in crate::agent) fn page(&self, source: Option<Source>, after: Option<&RecordId>) -> Page {
        let ids = self.registry.after(after).filter(|id| source.is_none_or(|source| source == id.source));
        let mut ids = ids.peekable();
        let instances: Vec<_> = ids.by_ref().take(PAGE).filter_map(|id| self.look_at(id)).collect();
        let last = instances.last().filter(|_| ids.peek().is_some());
        let next = last.map(|last| format!("{}/{}", last.source.name(), last.name));
        Page { instances, next }
    }

    fn place(&self, who: &IdentityName, has: bool) -> Port {
        let holder = self.plan.holder(who).filter(|_| !has);
        Port {
            port: spoken(&who.port),
            mac: who.mac.to_string(),
            state: self.guest_state(who),
            held_by: holder.map(name_of),
            reason: self.port_state(&who.port).1.map(str::to_owned),
        }
    }
}

/// What a record is called in answers.
pub(in crate::agent) fn name_of(id: &RecordId) -> Name {
    Name { source: id.source, name: id.key.as_ref().into() }
}

/// What a record is told apart by, as HTTP writes it: the same for the same record, however it was written.
///
/// # Errors
/// A path in it is no UTF-8.
pub(in crate::agent) fn etag(record: &Record) -> serde_json::Result<Arc<str>> {
    use sha2::{Digest as _, Sha256};
    let digest = Sha256::digest(record.to_json()?.as_bytes());
    Ok(format!("\"{}\"", hex(&digest[..16])).into())
}
