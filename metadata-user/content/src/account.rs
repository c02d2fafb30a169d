//! What one VM holds of the agent's memory and patience, all its NICs and all workers together.
//!
//! Answers are shared and cost nothing to hold out to a slow reader; what a VM can make the agent keep for it alone
//! is counted here, and has an end. A VM that reaches one of its limits is refused, and nobody else notices.

use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::http::body::BODY_MAX;

/// Connections of one VM at once, unless its record says otherwise (`serve.limits.conns`).
pub const CONNECTIONS_PER_VM: usize = 128;
/// Requests of one VM that wait for its record or its turn. A client that asks side by side asks for a few; each
/// looks again twenty times a second.
pub const HELD_PER_VM: usize = 32;
/// Octets of requests half received, or complete and held, that are kept for one VM: sixteen of the largest bodies.
/// Memory is up to twice as much, as buffers grow by doubling.
pub const BUFFERED_PER_VM: usize = 16 * BODY_MAX;
/// The same of all VMs of a worker. Beyond, a VM keeps [`BUFFERED_ALWAYS`] and no more, so that the many of some
/// never displace the few of others.
pub const BUFFERED_PER_WORKER: usize = 64 << 20;
/// What a VM may always keep: one request with the largest head and body.
pub const BUFFERED_ALWAYS: usize = BODY_MAX + (32 << 10);
/// Octets of answers computed for one VM alone that are not acknowledged yet. A VM's user-data may be most of one.
pub const COMPUTED_PER_VM: usize = 4 << 20;
/// Octets of computed answers that all guests of a worker may leave unread. A VM may have one answer beyond, so that
/// others' unread answers cost it none.
pub const COMPUTED_PER_WORKER: usize = 64 << 20;
/// Computed answers below this are not counted: [`SEND_AHEAD`](metadata_datapath::stack::SEND_AHEAD) limits what a connection
/// has of them.
pub const COMPUTED_FROM: usize = 4 << 10;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Connections.
    Connections,
    /// Requests that are held.
    Held,
    /// Octets half received.
    Buffered,
    /// Octets computed and not acknowledged.
    Computed,
}

/// What one VM holds, or one worker for all of them.
#[derive(Debug)]
pub struct Account {
    used: [AtomicUsize; 4],
    limits: [AtomicUsize; 4],
}

impl Default for Account {
    /// A VM's.
    fn default() -> Self {
        Self::with([CONNECTIONS_PER_VM, HELD_PER_VM, BUFFERED_PER_VM, COMPUTED_PER_VM])
    }
}

impl Account {
    fn with(limits: [usize; 4]) -> Self {
        Self { used: Default::default(), limits: limits.map(AtomicUsize::new) }
    }

    /// A worker's: what is half received and what is computed is limited.
    #[must_use]
    pub fn of_worker() -> Self {
        Self::with([usize::MAX, usize::MAX, BUFFERED_PER_WORKER, COMPUTED_PER_WORKER])
    }

    /// Lets the VM have so many connections from now on; those it has stay.
    pub fn allow_connections(&self, connections: usize) {
        self.limits[Resource::Connections as usize].store(connections, Ordering::Relaxed);
    }

    /// How much is in use.
    #[must_use]
    pub fn used(&self, of: Resource) -> usize {
        self.used[of as usize].load(Ordering::Relaxed)
    }

    /// True when there is room for so much more.
    #[must_use]
    pub fn has_room(&self, of: Resource, more: usize) -> bool {
        self.used(of).saturating_add(more) <= self.limits[of as usize].load(Ordering::Relaxed)
    }

    /// Takes so much if there is room. Relaxed, and not one step: two workers may go beyond by one taking each.
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

/// What one connection holds of its VM's account and its worker's; given back when this is dropped.
#[derive(Debug)]
pub struct Tab {
    vm: Arc<Account>,
    worker: Arc<Account>,
    holds: bool,
    buffered: usize,
}

impl Tab {
    /// Counts one connection more.
    pub fn open(vm: Arc<Account>, worker: Arc<Account>) -> Self {
        vm.enter(Resource::Connections, 1);
        Self { vm, worker, holds: false, buffered: 0 }
    }

    /// Counts a request that is held, once; false when the VM holds as many as it may.
    pub fn hold(&mut self) -> bool {
        self.holds = self.holds || self.vm.take(Resource::Held, 1);
        self.holds
    }

    /// No request is held any more.
    pub fn let_go(&mut self) {
        if std::mem::take(&mut self.holds) {
            self.vm.give_back(Resource::Held, 1);
        }
    }

    /// So many octets are kept from now on; false, and as before, when that is more than there is room for.
    pub fn buffer(&mut self, octets: usize) -> bool {
        let Some(more) = octets.checked_sub(self.buffered) else {
            self.give_back(self.buffered - octets);
            return true;
        };
        let few = self.vm.used(Resource::Buffered) + more <= BUFFERED_ALWAYS;
        if !(few || self.worker.has_room(Resource::Buffered, more)) || !self.vm.take(Resource::Buffered, more)
        {
            return false;
        }
        self.worker.enter(Resource::Buffered, more);
        self.buffered = octets;
        true
    }

    fn give_back(&mut self, octets: usize) {
        self.vm.give_back(Resource::Buffered, octets);
        self.worker.give_back(Resource::Buffered, octets);
        self.buffered -= octets;
    }

    /// Counts octets that are this connection's alone, until the last reference to them goes.
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
        Some(Bytes::from_owner(Charged { bytes, vm, worker }))
    }
}

impl Drop for Tab {
    fn drop(&mut self) {
        self.let_go();
        self.give_back(self.buffered);
        self.vm.give_back(Resource::Connections, 1);
    }
}

/// Octets on a VM's account and its worker's.
struct Charged {
    bytes: Bytes,
    vm: Arc<Account>,
    worker: Arc<Account>,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Charged {
    fn drop(&mut self) {
        self.vm.give_back(Resource::Computed, self.bytes.len());
        self.worker.give_back(Resource::Computed, self.bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tab(vm: &Arc<Account>, worker: &Arc<Account>) -> Tab {
        Tab::open(Arc::clone(vm), Arc::clone(worker))
    }

    fn accounts() -> (Arc<Account>, Arc<Account>) {
        (Arc::default(), Arc::new(Account::of_worker()))
    }

    #[test]
    fn what_a_connection_holds_is_given_back_with_it() {
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
        assert_eq!(used(&vm), [0, 0, 0, 5000], "a part of it is still to be sent");
        drop(part);
        assert_eq!((used(&vm), worker.used(Resource::Buffered)), ([0; 4], 0));
    }

    #[test]
    fn each_limit_is_reached_and_no_further() {
        let (vm, worker) = accounts();
        let mut tabs: Vec<_> = (0..HELD_PER_VM + 1).map(|_| tab(&vm, &worker)).collect();
        assert_eq!(tabs.iter_mut().filter_map(|tab| tab.hold().then_some(())).count(), HELD_PER_VM);
        tabs[0].let_go();
        assert!(tabs[HELD_PER_VM].hold(), "one has left");
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
    fn a_worker_that_is_full_leaves_every_vm_one_request() {
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
    fn unread_answers_of_others_leave_every_vm_one() {
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
        let first = modest.charge(answer()).expect("one is always taken");
        assert!(modest.charge(answer()).is_none(), "the worker has no room");
        drop(first);
        drop(held);
        assert_eq!(worker.used(Resource::Computed), 0);
    }
}
