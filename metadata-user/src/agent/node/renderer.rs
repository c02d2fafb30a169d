//! Renders records into responses, and shares equal payloads.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metadata_content::dialect;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;
use metadata_content::store::{Interner, Responses};
use metadata_feed::registry::RecordId;

use crate::agent::state::NodeState;

/// The responses of records in force.
pub(super) struct Renderer {
    interner: Interner,
    rendered: HashMap<RecordId, RenderedRecord>,
    spent: Duration,
}

/// The responses of a record, and the record they were rendered from.
struct RenderedRecord {
    record: Arc<Record>,
    responses: Arc<Responses>,
}

impl Renderer {
    pub(super) fn new() -> Self {
        Self { interner: Interner::new(), rendered: HashMap::new(), spent: Duration::ZERO }
    }

    /// Shares equal payloads of records, unless the record's feed does. Two interners that held one payload would hold
    /// it for each other, for ever.
    pub(super) fn compact(&mut self, source: RecordSource, record: Arc<Record>) -> Arc<Record> {
        if source.shares_payloads() {
            return record;
        }
        let mut record = Arc::unwrap_or_clone(record);
        record.compact(|bytes| self.interner.bytes(bytes));
        record.into()
    }

    /// Returns the responses of a record. Renders them if the record is new or has changed.
    pub(super) fn responses(
        &mut self,
        id: &RecordId,
        record: &Arc<Record>,
        state: &NodeState,
    ) -> Arc<Responses> {
        if let Some(rendered) = self.rendered.get(id).filter(|r| Arc::ptr_eq(&r.record, record)) {
            return Arc::clone(&rendered.responses);
        }
        let vm = state.vm(id, record);
        let asked = Some(vm.mailbox.asked()).filter(|asked| !asked.is_empty());
        let asked = asked.unwrap_or_else(|| dialect::expected(record));
        let start = Instant::now();
        let responses = Arc::new(dialect::render_asked(record, &mut self.interner, vm, asked));
        self.spent += start.elapsed();
        let rendered = RenderedRecord { record: Arc::clone(record), responses: Arc::clone(&responses) };
        self.rendered.insert(id.clone(), rendered);
        responses
    }

    /// Forgets the responses of a record.
    pub(super) fn forget(&mut self, id: &RecordId) {
        self.rendered.remove(id);
    }

    /// Frees payloads that no record uses.
    pub(super) fn sweep(&mut self) {
        self.interner.sweep();
    }

    /// Time spent on rendering since the start.
    pub(super) fn spent(&self) -> Duration {
        self.spent
    }
}
