//! A store whose responses are rendered when guests ask for them.

use std::sync::{Arc, Mutex};

use metadata_common::addresses::Connection;
use metadata_common::maps::Slot;
use metadata_common::time::Now;

use crate::dialect;
use crate::http::Request;
use crate::record::Dialects;
use crate::store::{Datasource, Host, Interner, LiveOutcome, ParkedCall, Responses, SlotState, Store};

/// A [`Store`] that renders a dialect when its guest first asks for it. Rendering takes 20 to 90
/// µs for each dialect and VM.
#[derive(Debug)]
pub struct OnDemand {
    store: Store,
    interner: Mutex<Interner>,
}

impl OnDemand {
    /// Takes a store, to which the caller publishes through [`store`](Self::store).
    #[must_use]
    pub fn new(store: Store) -> Self {
        Self { store, interner: Mutex::new(Interner::new()) }
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the state of `slot`. Responses contain every route that may answer a request for `path`, which is
    /// normalised. Never waits.
    #[must_use]
    pub fn get(&self, slot: Slot, host: Host, path: &str) -> SlotState {
        let entry = self.store.get(slot);
        let SlotState::Ready(responses) = entry else { return entry };
        let missing = dialect::missing(&responses, host, path);
        SlotState::Ready(match missing.is_empty() {
            true => responses,
            false => self.render(slot, responses, missing),
        })
    }

    /// Answers a request of a slot by the responses that [`Store::get`] returned. Also returns the dialect of the
    /// route, and the responses that contain it.
    #[must_use]
    pub fn answer_with(
        &self,
        responses: Arc<Responses>,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (LiveOutcome, Datasource, Arc<Responses>) {
        if let Some((outcome, datasource)) = responses.answer_if_rendered(now, connection, request, parked) {
            return (outcome, datasource, responses);
        }
        let missing = dialect::missing(&responses, Host::at(connection.local), request.target.path);
        let responses = match missing.is_empty() {
            true => responses,
            false => self.render(connection.slot, responses, missing),
        };
        let (outcome, datasource) = responses.answer_of(now, connection, request, parked);
        (outcome, datasource, responses)
    }

    /// Renders more dialects of a slot's record.
    #[cold]
    fn render(&self, slot: Slot, old: Arc<Responses>, missing: Dialects) -> Arc<Responses> {
        let more = match self.interner.try_lock() {
            Ok(mut interner) => dialect::render_more(&old, &mut interner, missing),
            // Another thread renders or sweeps. This guest's answers share less memory with those of others.
            Err(_) => dialect::render_more(&old, &mut Interner::new(), missing),
        };
        let Some(more) = more.map(Arc::new) else { return old };
        more.vm().mailbox.note_asked(missing);
        // A record that was published meanwhile stays. This request still gets its answer from the record that was in
        // force when it came.
        self.store.replace(slot, &old, Arc::clone(&more));
        more
    }

    /// Returns whether the answer to a request is rendered in advance. Never waits.
    #[must_use]
    pub fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.get(connection.slot, Host::at(connection.local), request.target.path) {
            SlotState::Ready(responses) => responses.is_fixed(connection, request),
            SlotState::Expected => false,
            SlotState::Unknown => true,
        }
    }

    /// Returns whether the record of `slot` has routes at the host. True if the record has not arrived.
    #[must_use]
    pub fn opens(&self, slot: Slot, host: Host) -> bool {
        match self.store.get(slot) {
            SlotState::Ready(responses) => responses.has(host) || dialect::is_missing_at(&responses, host),
            SlotState::Expected => true,
            SlotState::Unknown => false,
        }
    }

    /// Frees what no VM uses any more. Call it about once a minute, off the packet path.
    pub fn sweep(&self) {
        // A poisoned interner is replaced by those of single guests.
        if let Ok(mut interner) = self.interner.lock() {
            interner.sweep();
        }
    }
}

#[cfg(test)]
mod tests;
