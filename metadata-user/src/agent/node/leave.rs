//! Leaving a node: the workers drain, and the control side sees how far they are.

use std::time::Duration;

use super::Node;
use crate::stack::Claims;
use crate::worker::{ControlError, WorkerHandle};

impl Node {
    /// Has every worker drain for `limit` at most; with `claims`, one for each worker, connections are still made.
    ///
    /// # Errors
    /// A worker cannot be told. Those told before drain all the same.
    pub fn drain(
        &self,
        limit: Duration,
        mut claims: impl FnMut(usize) -> Option<Box<dyn Claims + Send>>,
    ) -> Result<(), ControlError> {
        let mut workers = self.workers.iter().enumerate();
        workers.try_for_each(|(number, worker)| worker.drain(limit, claims(number)))
    }

    /// Has every worker go on as before a drain.
    ///
    /// # Errors
    /// A worker cannot be told: it drains on.
    pub fn resume(&self) -> Result<(), ControlError> {
        self.each(WorkerHandle::resume)
    }

    /// Has every worker let be what it does not know, which may be another agent's, or ends that.
    ///
    /// # Errors
    /// A worker cannot be told.
    pub fn spare_unknown(&self, spare: bool) -> Result<(), ControlError> {
        self.each(|worker| worker.spare_unknown(spare))
    }

    /// Connections the workers have left to drain; `None` until each has claimed all it has. A worker that has ended has
    /// none.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        let of = |worker: &WorkerHandle<_>| worker.left().or_else(|| worker.is_finished().then_some(0));
        self.workers.iter().map(of).sum()
    }

    fn each(
        &self,
        tell: impl Fn(&WorkerHandle<crate::stack::StackStats>) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        self.workers.iter().map(tell).fold(Ok(()), Result::and)
    }
}
