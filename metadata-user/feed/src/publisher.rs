//! Publishes a feed's events to the agent.
//!
//! A feed reserves memory before it publishes a record, and drops a refused record, so that refusals cost no memory.
//! The queue to the agent is limited both in bytes and in events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metadata_common::share::{ShareReport, Tenant};
use tokio::sync::{mpsc, watch};

use super::FeedEvent;
use crate::memory_budget::{MemoryBudget, MemoryExhausted};
use crate::registry::RecordId;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;

/// Most bytes of payloads in the queue, whatever the number of events. The queue always accepts one record.
pub const QUEUED_BYTES: usize = 16 << 20;

/// Why a source, or a part of it, cannot be read at present, for reports. Its last good records stay in force.
#[derive(Clone, Debug, Default)]
pub struct Outage(Arc<Mutex<OutageState>>);

#[derive(Debug, Default)]
struct OutageState {
    /// Why the source cannot be read.
    reason: Option<String>,
    /// Parts of records that cannot be read, a sentence each.
    problems: Vec<String>,
}

impl Outage {
    /// The reason; `None` while the source can be read.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        self.state().reason.clone()
    }

    /// The reason, and what cannot be read of single records.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let state = self.state();
        state.reason.iter().chain(&state.problems).cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sending end of a feed's events.
#[derive(Clone)]
pub struct Publisher {
    tx: mpsc::Sender<FeedEvent>,
    /// The memory accounts and the source of these records; `None` admits every record.
    room: Option<(Arc<MemoryBudget>, RecordSource)>,
    /// Maps the feed's key of a record to the agent's key.
    name: fn(String) -> String,
    outage: Outage,
}

impl From<mpsc::Sender<FeedEvent>> for Publisher {
    /// A publisher that admits every record.
    fn from(tx: mpsc::Sender<FeedEvent>) -> Self {
        Self { tx, room: None, name: |key| key, outage: Outage::default() }
    }
}

/// The receiver of events was dropped.
#[derive(Debug)]
pub struct Closed;

/// Waits for free memory.
pub struct MemoryFreed(Option<watch::Receiver<u64>>);

impl Publisher {
    /// Publishes records of a source, within the memory that `room` allows.
    #[must_use]
    pub fn new(tx: mpsc::Sender<FeedEvent>, room: Arc<MemoryBudget>, source: RecordSource) -> Self {
        Self { room: Some((room, source)), ..tx.into() }
    }

    /// Sets the function that maps the feed's keys to the agent's.
    #[must_use]
    pub fn named(self, name: fn(String) -> String) -> Self {
        Self { name, ..self }
    }

    /// Where this feed says that its source cannot be read.
    #[must_use]
    pub fn outage(&self) -> Outage {
        self.outage.clone()
    }

    /// Says that the source cannot be read, or with `None` that it can again.
    pub fn set_outage(&self, reason: Option<String>) {
        self.outage.state().reason = reason;
    }

    /// Says what cannot be read of single records.
    pub fn set_problems(&self, problems: Vec<String>) {
        self.outage.state().problems = problems;
    }

    /// Reserves memory for a record, in place of its former version.
    ///
    /// # Errors
    /// [`MemoryExhausted`]: the caller must publish the record as rejected, and its former version stays.
    pub fn admit(&self, key: &str, record: &Record) -> Result<(), MemoryExhausted> {
        let Some((room, source)) = &self.room else { return Ok(()) };
        room.take(&RecordId::new(*source, &(self.name)(key.to_owned())), record)
    }

    /// Bytes free for records.
    #[must_use]
    pub fn free(&self) -> usize {
        self.room.as_ref().map_or(usize::MAX, |(room, _)| room.free())
    }

    /// Bytes free for records of a tenant.
    #[must_use]
    pub fn free_for(&self, tenant: &Tenant) -> usize {
        self.room.as_ref().map_or(usize::MAX, |(room, _)| room.free_for(tenant))
    }

    /// Reports who holds how much of a limit of this feed.
    pub fn report(&self, share: ShareReport) {
        if let Some((room, _)) = &self.room {
            room.report(share);
        }
    }

    /// A waiter for free memory.
    #[must_use]
    pub fn freed(&self) -> MemoryFreed {
        MemoryFreed(self.room.as_ref().map(|(room, _)| room.freed()))
    }

    /// Publishes an event once the queue has a place for it.
    ///
    /// # Errors
    /// [`Closed`]: the agent has stopped, or has replaced this feed.
    pub async fn publish(&self, event: FeedEvent) -> Result<(), Closed> {
        let places = self.tx.max_capacity();
        let most = QUEUED_BYTES.checked_div(bytes(&event)).unwrap_or(places).clamp(1, places);
        // The free places must suffice if all queued events have this size.
        let mut permits = self.tx.reserve_many(places - most + 1).await.map_err(|_| Closed)?;
        let permit = permits.next().ok_or(Closed)?;
        permit.send(self.renamed(event));
        Ok(())
    }

    /// Waits until the receiver is dropped.
    pub async fn closed(&self) {
        self.tx.closed().await;
    }

    /// True once the receiver is dropped.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.tx.is_closed()
    }

    fn renamed(&self, event: FeedEvent) -> FeedEvent {
        let name = self.name;
        match event {
            FeedEvent::Upsert { key, record } => FeedEvent::Upsert { key: name(key), record },
            FeedEvent::Expect { key, identities } => FeedEvent::Expect { key: name(key), identities },
            FeedEvent::Remove { key } => FeedEvent::Remove { key: name(key) },
            FeedEvent::RemoveUnless { key, identities } => {
                FeedEvent::RemoveUnless { key: name(key), identities }
            }
            FeedEvent::Rejected { key, error } => FeedEvent::Rejected { key: name(key), error },
            FeedEvent::Synced => FeedEvent::Synced,
        }
    }
}

impl MemoryFreed {
    /// Returns when a refused record may fit; never returns if every record is admitted.
    pub async fn wait(&mut self) {
        let changed = match &mut self.0 {
            Some(freed) => freed.changed().await.is_ok(),
            None => false,
        };
        if !changed {
            std::future::pending().await
        }
    }
}

/// Bytes of an event's payloads and files.
fn bytes(event: &FeedEvent) -> usize {
    let FeedEvent::Upsert { record, .. } = event else { return 0 };
    let payloads =
        record.payloads().into_iter().filter_map(|(_, payload)| payload).map(|payload| payload.len());
    payloads.chain(record.files.iter().map(|file| file.base64.0.len())).sum()
}

#[cfg(test)]
mod tests {
    use super::{Publisher, QUEUED_BYTES};
    use crate::FeedEvent;
    use futures_util::FutureExt as _;
    use metadata_content::record::Record;
    use tokio::sync::mpsc;

    fn event(bytes: usize) -> FeedEvent {
        let text = "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: a, \
                    project: {id: p, number: 1, account: '000000000000'}}\nhostname: {short: a}\n\
                    placement: {region: r, zone: z}\n";
        let mut record = Record::parse("a", text).expect("a good record").0;
        record.user_data = Some(bytes::Bytes::from(vec![b'x'; bytes]).into());
        FeedEvent::Upsert { key: "a".into(), record: record.into() }
    }

    #[test]
    fn events_wait_when_their_bytes_fill_the_queue() {
        const PLACES: usize = 1_024;
        for (bytes, waits_after) in [
            (0, PLACES),
            (QUEUED_BYTES / PLACES, PLACES),
            (1 << 20, QUEUED_BYTES >> 20),
            (QUEUED_BYTES * 2, 1),
        ] {
            let (tx, mut events) = mpsc::channel(PLACES);
            let publisher = Publisher::from(tx);
            for n in 0..waits_after {
                assert!(
                    publisher.publish(event(bytes)).now_or_never().is_some(),
                    "event {n} of {bytes} bytes waits"
                );
            }
            assert!(
                publisher.publish(event(bytes)).now_or_never().is_none(),
                "{bytes} bytes: there is no limit"
            );
            assert!(events.try_recv().is_ok());
            assert!(
                publisher.publish(event(bytes)).now_or_never().is_some(),
                "{bytes} bytes: its place is free"
            );
        }
    }
}
