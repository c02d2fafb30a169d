//! The workers, one for each hub.

use metadata_common::maps::Slot;
use metadata_control::instances::Instance;
use metadata_control::status::InstanceState;
use metadata_datapath::stack::{SlotStats, StackStats};
use metadata_datapath::worker::{ControlError, Heartbeat, WorkerHandle, WorkerStats};
use metadata_feed::registry::RecordId;
use metadata_steer::{FlowClaimer, SteerError};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::oneshot;
use tracing::warn;

/// The workers, in the order of their hubs. A worker is addressed by its index.
pub(crate) struct Workers {
    handles: Vec<WorkerHandle<StackStats>>,
    /// Workers and slots whose waiting requests are to be woken when the worker's queue has room.
    asleep: BTreeSet<(usize, Slot)>,
}

impl Workers {
    #[must_use]
    pub(crate) fn new(handles: Vec<WorkerHandle<StackStats>>) -> Self {
        Self { handles, asleep: BTreeSet::new() }
    }

    fn get(&self, at: usize) -> Result<&WorkerHandle<StackStats>, ControlError> {
        self.handles.get(at).ok_or(ControlError::Ended)
    }

    /// Makes a worker forget a slot: its connections and waiting requests end.
    ///
    /// # Errors
    /// If the worker has ended or its queue is full.
    pub(super) fn forget(&self, at: usize, slot: Slot) -> Result<(), ControlError> {
        self.get(at)?.forget(slot)
    }

    /// Makes a worker try the waiting requests of a slot again. If its queue is full, [`Workers::retry`] repeats it.
    pub(super) fn wake(&mut self, at: usize, slot: Slot) {
        match self.get(at).and_then(|worker| worker.wake(slot)) {
            Ok(()) => {}
            Err(ControlError::Full) => drop(self.asleep.insert((at, slot))),
            Err(error) => warn!(slot, "waiting requests are not woken: {error}"),
        }
    }

    /// Repeats the wake-ups that found a queue full.
    pub(super) fn retry(&mut self) {
        for (at, slot) in std::mem::take(&mut self.asleep) {
            self.wake(at, slot);
        }
    }

    /// Asks a worker how many connections and requests it holds for a slot; `None` if it cannot be asked. The answer
    /// comes after the worker's next turn.
    pub(super) fn ask_held(&self, at: usize, slot: Slot) -> Option<oneshot::Receiver<SlotStats>> {
        let (reply, answer) = oneshot::channel();
        // Sending fails if the receiver was dropped.
        self.get(at).ok()?.look(slot, |held| _ = reply.send(held)).ok()?;
        Some(answer)
    }

    /// The latest counters of each worker.
    pub(super) fn stats(&self) -> impl Iterator<Item = WorkerStats<StackStats>> {
        self.handles.iter().map(WorkerHandle::stats)
    }

    /// True once the thread of any worker has ended.
    pub(super) fn any_ended(&self) -> bool {
        self.handles.iter().any(WorkerHandle::is_finished)
    }

    /// The workers' heartbeats, by the number of their hub.
    #[must_use]
    pub(crate) fn heartbeats(&self) -> Vec<(u32, Heartbeat)> {
        (0..).zip(self.handles.iter().map(WorkerHandle::heartbeat)).collect()
    }

    /// Drains every worker for at most `limit`. New connections are left to the next agent.
    ///
    /// # Errors
    /// If a worker cannot be reached. The others drain nevertheless.
    pub(crate) fn drain(&self, limit: Duration) -> Result<(), ControlError> {
        self.each(|worker| worker.drain(limit, None))
    }

    /// Drains every worker for at most `limit`. Each worker claims its present connections and those that begin later.
    ///
    /// # Errors
    /// If no file descriptor is available, or a worker cannot be reached. The workers before it drain nevertheless.
    pub(super) fn drain_and_claim(
        &self,
        limit: Duration,
        mut claims: impl FnMut() -> Result<FlowClaimer, SteerError>,
    ) -> anyhow::Result<()> {
        for worker in &self.handles {
            worker.drain(limit, Some(Box::new(claims()?)))?;
        }
        Ok(())
    }

    /// Ends the drain: every worker serves as before.
    ///
    /// # Errors
    /// If a worker cannot be reached. It continues to drain.
    pub(super) fn resume(&self) -> Result<(), ControlError> {
        self.each(WorkerHandle::resume)
    }

    /// Sets whether workers ignore segments of connections they do not know, which may be another agent's.
    ///
    /// # Errors
    /// If a worker cannot be reached.
    pub(crate) fn spare_unknown(&self, spare: bool) -> Result<(), ControlError> {
        self.each(|worker| worker.spare_unknown(spare))
    }

    /// Number of connections that the workers still drain; `None` until each worker has claimed its connections. A
    /// worker that has ended counts 0.
    #[must_use]
    pub(crate) fn remaining(&self) -> Option<u64> {
        let of = |worker: &WorkerHandle<_>| worker.left().or_else(|| worker.is_finished().then_some(0));
        self.handles.iter().map(of).sum()
    }

    /// True if no worker drains.
    #[must_use]
    pub(crate) fn are_resumed(&self) -> bool {
        self.handles.iter().all(|worker| worker.left().is_none())
    }

    fn each(
        &self,
        command: impl Fn(&WorkerHandle<StackStats>) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        self.handles.iter().map(command).fold(Ok(()), Result::and)
    }
}

// Clients that wait until the ports of their record are attached.

/// The reply channels of waiting clients, each with its record. The caller of `push` limits the number of clients.
#[derive(Debug, Default)]
pub(super) struct WaitingClients(Vec<(RecordId, oneshot::Sender<Instance>)>);

impl WaitingClients {
    /// Adds a client.
    pub(super) fn push(&mut self, id: RecordId, reply: oneshot::Sender<Instance>) {
        self.0.retain(|(_, reply)| !reply.is_closed());
        self.0.push((id, reply));
    }

    /// Drops the clients of a record.
    pub(super) fn forget(&mut self, id: &RecordId) {
        self.0.retain(|(waits, _)| waits != id);
    }

    /// Replies to clients whose record is served. Drops clients that disconnected or whose record was removed.
    pub(super) fn notify(&mut self, instance: impl Fn(&RecordId) -> Option<Instance>) {
        for (id, reply) in std::mem::take(&mut self.0) {
            match instance(&id) {
                Some(instance) if instance.state == InstanceState::Served => _ = reply.send(instance),
                Some(_) if !reply.is_closed() => self.0.push((id, reply)),
                Some(_) | None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use metadata_content::source::RecordSource;
    use metadata_control::instances::Instance;
    use metadata_control::status::InstanceState;
    use metadata_feed::registry::RecordId;
    use tokio::sync::oneshot;

    use super::WaitingClients;

    fn instance(id: &RecordId, state: InstanceState) -> Instance {
        Instance {
            name: id.key.as_ref().into(),
            source: id.source,
            state,
            in_force: true,
            shadowed_by: None,
            refused: None,
            etag: None,
            generation: None,
            vm: None,
            ports: Vec::new(),
            change: None,
            record: None,
            withheld: None,
        }
    }

    #[test]
    fn a_client_gets_a_reply_once_its_record_is_served_and_none_if_it_is_removed() {
        let (mut waiting, id) = (WaitingClients::default(), RecordId::new(RecordSource::Api, "web"));
        let (reply, mut answer) = oneshot::channel();
        waiting.push(id.clone(), reply);
        waiting.notify(|id| Some(instance(id, InstanceState::Waiting)));
        assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        waiting.notify(|id| Some(instance(id, InstanceState::Served)));
        assert!(answer.try_recv().is_ok());
        for drops in
            [|waiting: &mut WaitingClients, _: &RecordId| waiting.notify(|_| None), WaitingClients::forget]
        {
            let (reply, mut answer) = oneshot::channel();
            waiting.push(id.clone(), reply);
            drops(&mut waiting, &id);
            assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
        }
    }
}
