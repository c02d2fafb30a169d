//! Limits on the memory and connections that one VM can occupy, over all its NICs and all workers.
//!
//! Responses rendered in advance are shared, so a slow reader costs no memory. This module counts and limits whatever
//! the agent stores for one VM alone. A VM that reaches a limit is refused; other VMs are not affected.

use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::http::body::BODY_MAX;

/// Maximum concurrent connections of one VM, unless its record sets `serve.limits.conns`.
pub const CONNECTIONS_PER_VM: usize = 128;
/// Maximum number of requests of one VM that wait for its record or its rate limit. Each one is retried 20 times per
/// second. Usual clients send at most a few requests in parallel.
pub const HELD_PER_VM: usize = 32;
/// Maximum bytes buffered for incomplete and held requests of one VM: sixteen bodies of maximum size. Buffers grow by
/// doubling, so memory use is up to twice as much.
pub const BUFFERED_PER_VM: usize = 16 * BODY_MAX;
/// Maximum bytes buffered for all VMs of a worker. Beyond it each VM can still buffer [`BUFFERED_ALWAYS`], so that
/// heavy users do not displace others.
pub const BUFFERED_PER_WORKER: usize = 64 << 20;
/// Bytes that a VM can always buffer: one request with head and body of maximum size.
pub const BUFFERED_ALWAYS: usize = BODY_MAX + (32 << 10);
/// Maximum bytes of unacknowledged answers computed for one VM. One answer may contain the VM's user-data.
pub const COMPUTED_PER_VM: usize = 4 << 20;
/// Maximum bytes of unacknowledged computed answers of all VMs of a worker. Beyond it each VM can still have one
/// answer, so that the unread answers of others do not block it.
pub const COMPUTED_PER_WORKER: usize = 64 << 20;
/// Minimum size of a computed answer that is counted, in bytes.
/// The stack limits smaller answers per connection (`SEND_AHEAD` of `metadata-datapath`).
pub const COMPUTED_FROM: usize = 4 << 10;

/// A counted resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Concurrent connections.
    Connections,
    /// Requests that wait for the record or the rate limit.
    Held,
    /// Bytes buffered for incomplete and held requests.
    Buffered,
    /// Bytes of computed answers that are not acknowledged.
    Computed,
}

/// Usage and limits of one VM, or of one worker for all its VMs.
#[derive(Debug)]
pub struct Account {
    used: [AtomicUsize; 4],
    limits: [AtomicUsize; 4],
}

impl Default for Account {
    /// Creates the account of a VM.
    fn default() -> Self {
        Self::with([CONNECTIONS_PER_VM, HELD_PER_VM, BUFFERED_PER_VM, COMPUTED_PER_VM])
    }
}

impl Account {
    fn with(limits: [usize; 4]) -> Self {
        Self { used: Default::default(), limits: limits.map(AtomicUsize::new) }
    }

    /// Creates the account of a worker, which limits buffered and computed bytes only.
    #[must_use]
    pub fn of_worker() -> Self {
        Self::with([usize::MAX, usize::MAX, BUFFERED_PER_WORKER, COMPUTED_PER_WORKER])
    }

    /// Sets the connection limit. Existing connections stay open.
    pub fn allow_connections(&self, connections: usize) {
        self.limits[Resource::Connections as usize].store(connections, Ordering::Relaxed);
    }

    /// Returns the amount in use.
    #[must_use]
    pub fn used(&self, of: Resource) -> usize {
        self.used[of as usize].load(Ordering::Relaxed)
    }

    /// Returns whether the limit leaves room for `more`.
    #[must_use]
    pub fn has_room(&self, of: Resource, more: usize) -> bool {
        self.used(of).saturating_add(more) <= self.limits[of as usize].load(Ordering::Relaxed)
    }

    /// Adds `more` if there is room. Check and addition are not atomic: two workers can exceed the limit by one
    /// addition each.
    fn take(&self, of: Resource, more: usize) -> bool {
        let has_room = self.has_room(of, more);
        if has_room {
            self.enter(of, more);
        }
        has_room
    }

    fn enter(&self, of: Resource, more: usize) {
        self.used[of as usize].fetch_add(more, Ordering::Relaxed);
    }

    fn give_back(&self, of: Resource, amount: usize) {
        self.used[of as usize].fetch_sub(amount, Ordering::Relaxed);
    }
}

/// Usage of one connection on the accounts of its VM and its worker. Dropping it releases the usage.
#[derive(Debug)]
pub struct ConnectionUsage {
    vm: Arc<Account>,
    worker: Arc<Account>,
    holds: bool,
    buffered: usize,
}

impl ConnectionUsage {
    /// Counts one more connection.
    pub fn open(vm: Arc<Account>, worker: Arc<Account>) -> Self {
        vm.enter(Resource::Connections, 1);
        Self { vm, worker, holds: false, buffered: 0 }
    }

    /// Counts a held request, once; returns false if the VM is at its limit.
    pub fn hold(&mut self) -> bool {
        self.holds = self.holds || self.vm.take(Resource::Held, 1);
        self.holds
    }

    /// Releases the held request.
    pub fn let_go(&mut self) {
        if std::mem::take(&mut self.holds) {
            self.vm.give_back(Resource::Held, 1);
        }
    }

    /// Sets the number of buffered bytes. Returns false and changes nothing if there is no room.
    pub fn buffer(&mut self, bytes: usize) -> bool {
        let Some(more) = bytes.checked_sub(self.buffered) else {
            self.give_back(self.buffered - bytes);
            return true;
        };
        let few = self.vm.used(Resource::Buffered) + more <= BUFFERED_ALWAYS;
        if !(few || self.worker.has_room(Resource::Buffered, more)) || !self.vm.take(Resource::Buffered, more)
        {
            return false;
        }
        self.worker.enter(Resource::Buffered, more);
        self.buffered = bytes;
        true
    }

    fn give_back(&mut self, bytes: usize) {
        self.vm.give_back(Resource::Buffered, bytes);
        self.worker.give_back(Resource::Buffered, bytes);
        self.buffered -= bytes;
    }

    /// Counts an answer that only this connection uses until its last reference is dropped; `None` if there is no room.
    /// Does not count answers below [`COMPUTED_FROM`].
    pub fn charge(&self, bytes: Bytes) -> Option<Bytes> {
        if bytes.len() < COMPUTED_FROM {
            return Some(bytes);
        }
        let first = self.vm.used(Resource::Computed) == 0;
        let admitted = first || self.worker.has_room(Resource::Computed, bytes.len());
        if !admitted || !self.vm.take(Resource::Computed, bytes.len()) {
            return None;
        }
        self.worker.enter(Resource::Computed, bytes.len());
        let (vm, worker) = (Arc::clone(&self.vm), Arc::clone(&self.worker));
        Some(Bytes::from_owner(ByteCharge { bytes, vm, worker }))
    }
}

impl Drop for ConnectionUsage {
    fn drop(&mut self) {
        self.let_go();
        self.give_back(self.buffered);
        self.vm.give_back(Resource::Connections, 1);
    }
}

/// Bytes counted on the accounts of a VM and its worker.
struct ByteCharge {
    bytes: Bytes,
    vm: Arc<Account>,
    worker: Arc<Account>,
}

impl AsRef<[u8]> for ByteCharge {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for ByteCharge {
    fn drop(&mut self) {
        self.vm.give_back(Resource::Computed, self.bytes.len());
        self.worker.give_back(Resource::Computed, self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tab(vm: &Arc<Account>, worker: &Arc<Account>) -> ConnectionUsage {
        ConnectionUsage::open(Arc::clone(vm), Arc::clone(worker))
    }

    fn accounts() -> (Arc<Account>, Arc<Account>) {
        (Arc::default(), Arc::new(Account::of_worker()))
    }

    #[test]
    fn dropping_a_connection_releases_its_usage() {
        let (vm, worker) = accounts();
        let mut tab = tab(&vm, &worker);
        assert!(tab.hold() && tab.hold() && tab.buffer(500) && tab.buffer(200));
        let bytes = tab.charge(vec![7; 5000].into()).expect("room");
        let used = |account: &Account| {
            [Resource::Connections, Resource::Held, Resource::Buffered, Resource::Computed]
                .map(|resource| account.used(resource))
        };
        assert_eq!((used(&vm), worker.used(Resource::Buffered)), ([1, 1, 200, 5000], 200));
        drop(tab);
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(used(&vm), [0, 0, 0, 5000], "a part of the answer is not sent yet");
        drop(part);
        assert_eq!((used(&vm), worker.used(Resource::Buffered)), ([0; 4], 0));
    }

    #[test]
    fn each_limit_can_be_reached_and_not_exceeded() {
        let (vm, worker) = accounts();
        let mut tabs: Vec<_> = (0..HELD_PER_VM + 1).map(|_| tab(&vm, &worker)).collect();
        assert_eq!(tabs.iter_mut().filter_map(|tab| tab.hold().then_some(())).count(), HELD_PER_VM);
        tabs[0].let_go();
        assert!(tabs[HELD_PER_VM].hold(), "one was released");
        let kept = tabs.iter_mut().filter_map(|tab| tab.buffer(BODY_MAX).then_some(())).count();
        assert_eq!(kept, BUFFERED_PER_VM / BODY_MAX);
        let large = Bytes::from(vec![1; COMPUTED_PER_VM / 4]);
        let held: Vec<_> = (0..5).filter_map(|_| tabs[0].charge(large.slice(..))).collect();
        assert_eq!(held.len(), 4);
        assert!(tabs[0].charge(Bytes::from(vec![1; COMPUTED_FROM - 1])).is_some(), "too small to count");
        vm.allow_connections(2);
        assert!(!vm.has_room(Resource::Connections, 1));
    }

    #[test]
    fn every_vm_can_buffer_one_request_on_a_full_worker() {
        let worker = Arc::new(Account::of_worker());
        let greedy: Vec<_> = (0..BUFFERED_PER_WORKER / BUFFERED_PER_VM).map(|_| Arc::default()).collect();
        let mut tabs: Vec<_> = greedy.iter().map(|vm| tab(vm, &worker)).collect();
        assert!(tabs.iter_mut().all(|tab| tab.buffer(BUFFERED_PER_VM)));
        let mut small = tab(&Arc::default(), &worker);
        assert!(small.buffer(BUFFERED_ALWAYS) && !small.buffer(BUFFERED_ALWAYS + 1));
        tabs.clear();
        assert!(small.buffer(BUFFERED_ALWAYS + 1), "there is room again");
    }

    #[test]
    fn every_vm_gets_one_answer_on_a_full_worker() {
        const ANSWER: usize = 1 << 20;
        let worker = Arc::new(Account::of_worker());
        let answer = || Bytes::from(vec![1; ANSWER]);
        let greedy: Vec<_> = (0..COMPUTED_PER_WORKER / COMPUTED_PER_VM).map(|_| Arc::default()).collect();
        let tabs: Vec<_> = greedy.iter().map(|vm| tab(vm, &worker)).collect();
        let held: Vec<_> = tabs
            .iter()
            .flat_map(|tab| std::iter::repeat_with(|| tab.charge(answer())).take(COMPUTED_PER_VM / ANSWER))
            .collect();
        assert!(held.iter().all(Option::is_some));
        let modest = tab(&Arc::default(), &worker);
        let first = modest.charge(answer()).expect("a first answer always has room");
        assert!(modest.charge(answer()).is_none(), "the worker has no room");
        drop(first);
        drop(held);
        assert_eq!(worker.used(Resource::Computed), 0);
    }
}
