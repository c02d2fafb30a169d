//! The table of slots and their responses, and what is read ahead from it.

use arc_swap::ArcSwapOption;
use metadata_common::bucket::take;
use metadata_common::maps::{Port, Slot};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::path::{Canonical, Endpoint, Host, Route};
use super::{RequestLimit, Responses, VmState};
use crate::account::Resource;
use crate::http::Response;

/// Maximum number of slots of a table: 2²⁰ VMs (8 MiB of pointers).
pub const MAX_SLOTS: u32 = 1 << 20;

/// State of a slot.
#[derive(Clone, Debug)]
pub enum SlotState {
    /// No VM has the slot: answer 404 at once.
    Unknown,
    /// The VM is known, but its record has not arrived: hold the request, then answer 503.
    Expected,
    /// The VM's responses are published.
    Ready(Arc<Responses>),
}

/// The slot is beyond the end of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot} is beyond the table of {slots} slots; start the agent with room for more VMs")]
pub struct SlotOutOfRange {
    /// The requested slot.
    pub slot: Slot,
    /// Number of slots of the table; the first is 0.
    pub slots: u32,
}

/// Maps slots to responses. The control side writes it, and the workers read it without locks.
#[derive(Debug)]
pub struct Store {
    pub(super) table: Box<[ArcSwapOption<Responses>]>,
    /// What a slot holds while its record is expected. Only its address counts, so that one swap changes a slot's
    /// state.
    expected: Arc<Responses>,
    /// Per slot: when its token bucket will be full again, in nanoseconds of `Now::mono`. A new record does not reset
    /// it, so replaced records do not weaken the limit.
    pub(super) buckets: Box<[AtomicU64]>,
}

impl Store {
    /// Creates a table of `slots` slots without a VM, at most [`MAX_SLOTS`].
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let slots = slots.min(MAX_SLOTS);
        Self {
            table: (0..slots).map(|_| ArcSwapOption::empty()).collect(),
            expected: Arc::new(Responses::builder(VmState::alone("")).build()),
            buckets: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        u32::try_from(self.table.len()).unwrap_or(MAX_SLOTS)
    }

    /// Publishes `responses` for `slot`. Later requests get them.
    ///
    /// # Errors
    /// [`SlotOutOfRange`] if the table does not have the slot.
    pub fn publish(&self, slot: Slot, responses: Arc<Responses>) -> Result<(), SlotOutOfRange> {
        self.set(slot, Some(responses))
    }

    /// Replaces `old` by `new` unless `slot` holds something else by now.
    pub fn replace(&self, slot: Slot, old: &Arc<Responses>, new: Arc<Responses>) {
        if let Some(cell) = usize::try_from(slot).ok().and_then(|index| self.table.get(index)) {
            drop(cell.compare_and_swap(old, Some(new)));
        }
    }

    /// Marks `slot` as a VM whose record has not arrived. Replaces published responses.
    ///
    /// # Errors
    /// [`SlotOutOfRange`] if the table does not have the slot.
    pub fn expect(&self, slot: Slot) -> Result<(), SlotOutOfRange> {
        self.set(slot, Some(Arc::clone(&self.expected)))
    }

    /// Takes one token from the bucket of `slot`; returns false if it is empty. Never waits.
    ///
    /// Only the worker that serves the slot calls this, so there is no race.
    #[must_use]
    pub fn admit(&self, slot: Slot, limit: RequestLimit, now: Duration) -> bool {
        let Some(bucket) = usize::try_from(slot).ok().and_then(|index| self.buckets.get(index)) else {
            return false;
        };
        let full_at_ns = bucket.load(Ordering::Relaxed);
        let port = Port { full_at_ns, ..Port::with_limit(limit.per_second, limit.burst) };
        let taken = take(port, u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
        taken.inspect(|full_at_ns| bucket.store(*full_at_ns, Ordering::Relaxed)).is_some()
    }

    /// Clears `slot` and refills its token bucket.
    ///
    /// # Errors
    /// [`SlotOutOfRange`] if the table does not have the slot.
    pub fn withdraw(&self, slot: Slot) -> Result<(), SlotOutOfRange> {
        self.set(slot, None)?;
        if let Some(bucket) = usize::try_from(slot).ok().and_then(|index| self.buckets.get(index)) {
            bucket.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the state of `slot`; [`SlotState::Unknown`] beyond the end of the table. Never waits.
    #[must_use]
    pub fn get(&self, slot: Slot) -> SlotState {
        let Some(cell) = usize::try_from(slot).ok().and_then(|index| self.table.get(index)) else {
            return SlotState::Unknown;
        };
        match cell.load_full() {
            None => SlotState::Unknown,
            Some(held) if Arc::ptr_eq(&held, &self.expected) => SlotState::Expected,
            Some(responses) => SlotState::Ready(responses),
        }
    }

    fn set(&self, slot: Slot, held: Option<Arc<Responses>>) -> Result<(), SlotOutOfRange> {
        let cell = usize::try_from(slot).ok().and_then(|index| self.table.get(index));
        let cell = cell.ok_or(SlotOutOfRange { slot, slots: self.slots() })?;
        cell.store(held);
        Ok(())
    }
}

// Reads ahead what a group of requests will touch.
//
// In a boot storm each request is another VM's, and nothing of that VM is in the CPU's cache. A look-up follows five
// pointers, so one request after the other waits for memory five times each. Here each pointer is followed for all
// requests before the next one: their reads overlap, and the group waits five times.

/// How many loads of one thread `arc_swap` protects at a low price. Further ones cost a locked instruction each.
const LOADS: usize = 8;
/// Bytes of a cache line of most CPUs.
const LINE: usize = 64;
/// Bytes of a body that are read ahead. A CPU recognises the order of more by itself.
const BODY: usize = 256;

/// A request that may follow: a hint, which nothing has checked.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestHint<'a> {
    /// The slot that sends the request.
    pub slot: Slot,
    /// The host that it is for.
    pub host: Host,
    /// The path of its target; empty if that is not known.
    pub path: &'a str,
}

impl Store {
    /// Reads ahead what these requests will touch. Changes nothing.
    pub fn read_ahead(&self, hints: &[RequestHint<'_>]) {
        hints.chunks(LOADS).for_each(|hints| self.read_some(hints));
    }

    fn read_some(&self, hints: &[RequestHint<'_>]) {
        let loads: [_; LOADS] = std::array::from_fn(|at| {
            let slot = hints.get(at)?.slot as usize;
            black_box(self.buckets.get(slot)?.load(Ordering::Relaxed));
            self.table.get(slot).map(ArcSwapOption::load)
        });
        let responses = loads.each_ref().map(|load| load.as_ref()?.as_deref());
        black_box(responses.iter().flatten().fold(0, |seen, responses| seen ^ responses.touch()));
        let mut routes: [Option<&Route>; LOADS] = [None; LOADS];
        for ((responses, hint), route) in responses.iter().zip(hints).zip(&mut routes) {
            let Some(responses) = responses else { continue };
            black_box(responses.vm().mailbox.account().used(Resource::Connections));
            *route = responses.likely(hint);
        }
        let fixed = routes.map(|route| match route?.endpoint() {
            Endpoint::Fixed(response) => Some(response),
            Endpoint::Live(_) => None,
        });
        black_box(fixed.iter().flatten().fold(0, |seen, response| seen ^ response.body().len()));
        black_box(fixed.into_iter().flatten().fold(0, |seen, response| seen ^ touch(response)));
    }
}

/// Reads the first bytes of a body and the place of its reference count.
fn touch(response: &Response) -> u8 {
    let Some(piece) = response.body().pieces().first() else { return 0 };
    let bytes = piece.iter().take(BODY).step_by(LINE).fold(0, |seen, byte| seen ^ byte);
    bytes ^ u8::from(piece.is_unique())
}

impl Responses {
    /// Reads fields on each of the struct's cache lines that a look-up needs.
    fn touch(&self) -> usize {
        let [first, ..] = &self.routes;
        let [hashes, ..] = &self.hashes;
        first.len() ^ hashes.len() ^ self.limit.burst as usize ^ Arc::strong_count(&self.vm.mailbox)
    }

    /// The first route with the hash of the hint's path; it may be another path's.
    fn likely(&self, hint: &RequestHint<'_>) -> Option<&Route> {
        let hash = Canonical::of(hint.host, hint.path).hash();
        let host = hint.host.index();
        let at = self.hashes[host].binary_search(&hash).ok()?;
        self.routes[host].get(at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::{MAX_SLOTS, RequestHint, SlotOutOfRange, SlotState};
    use crate::http::{Headers, Method, Request, RequestTarget, Response, StatusCode};
    use crate::store::{Endpoint, Host, LookupExplanation, RequestLimit, Responses, Route, Store, VmState};

    fn some() -> Arc<Responses> {
        Arc::new(Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d")).build())
    }

    #[test]
    fn a_slot_goes_from_unknown_to_expected_to_ready_and_back() {
        let store = Store::new(2);
        assert!(matches!(store.get(1), SlotState::Unknown));
        store.expect(1).expect("slot 1 exists");
        assert!(matches!(store.get(1), SlotState::Expected));
        let responses = some();
        store.publish(1, Arc::clone(&responses)).expect("slot 1 exists");
        assert!(matches!(store.get(1), SlotState::Ready(found) if Arc::ptr_eq(&found, &responses)));
        assert!(matches!(store.get(0), SlotState::Unknown), "another slot changed");
        store.withdraw(1).expect("slot 1 exists");
        assert!(matches!(store.get(1), SlotState::Unknown));
    }

    #[test]
    fn a_slot_beyond_the_table_is_an_error_for_writers_and_unknown_to_readers() {
        let store = Store::new(2);
        let refused = SlotOutOfRange { slot: 2, slots: 2 };
        assert_eq!(store.publish(2, some()), Err(refused));
        assert_eq!(store.expect(2), Err(refused));
        assert_eq!(store.withdraw(2), Err(refused));
        assert!(matches!(store.get(2), SlotState::Unknown));
        assert!(matches!(store.get(u32::MAX), SlotState::Unknown));
        assert_eq!(Store::new(u32::MAX).slots(), MAX_SLOTS);
    }

    #[test]
    fn a_slot_may_use_its_burst_at_once_and_its_rate_afterwards() {
        let store = Store::new(2);
        let limit = RequestLimit { per_second: 100, burst: 400 };
        let admitted = |slot, at| (0..1_000).filter(|_| store.admit(slot, limit, at)).count();
        assert_eq!(admitted(0, Duration::from_secs(9)), 400);
        assert_eq!(admitted(1, Duration::from_secs(9)), 400, "each slot has its own bucket");
        assert_eq!(admitted(0, Duration::from_secs(10)), 100);
        store.withdraw(0).expect("slot 0 exists");
        assert_eq!(admitted(0, Duration::from_secs(10)), 400, "the next guest has a full bucket");
        assert!(!store.admit(2, limit, Duration::ZERO), "no such slot");
    }

    #[test]
    fn an_exchange_keeps_the_responses_it_started_with() {
        let store = Store::new(1);
        let before = some();
        store.publish(0, Arc::clone(&before)).expect("slot 0 exists");
        let SlotState::Ready(held) = store.get(0) else { panic!("slot 0 was published") };
        store.publish(0, some()).expect("slot 0 exists");
        assert!(Arc::ptr_eq(&held, &before));
        drop(held);
        assert_eq!(Arc::strong_count(&before), 1, "the store still holds the replaced responses");
    }

    #[test]
    fn readers_see_either_record_while_a_writer_swaps_them() {
        const SWAPS: usize = 2_000;
        let store = Store::new(1);
        let records = [some(), some()];
        store.publish(0, Arc::clone(&records[0])).expect("slot 0 exists");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut reads = 0_usize;
                while !done.load(Ordering::Acquire) || reads == 0 {
                    let SlotState::Ready(found) = store.get(0) else { panic!("the slot was emptied") };
                    assert!(records.iter().any(|r| Arc::ptr_eq(r, &found)));
                    reads += 1;
                }
            });
            for swap in 0..SWAPS {
                store.publish(0, Arc::clone(&records[swap % 2])).expect("slot 0 exists");
            }
            done.store(true, Ordering::Release);
            reader.join().expect("the reader saw only published records");
        });
    }

    const PATHS: [&str; 3] = ["/", "/latest/user-data", "/v1/meta-data"];

    fn responses() -> Arc<Responses> {
        let mut responses = Responses::builder(VmState::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
        for path in PATHS {
            let answer = Response::new(StatusCode(200), None, &[], path);
            responses.add(Host::Metadata, path, Route::new("test", Endpoint::Fixed(answer)));
        }
        Arc::new(responses.build())
    }

    #[test]
    fn a_hint_leads_to_the_route_that_will_answer() {
        let responses = responses();
        for path in PATHS.into_iter().chain(["/2021-03-23/user-data", "/1.0/user-data"]) {
            let hint = RequestHint { path, ..RequestHint::default() };
            let request = Request {
                method: Method::Get,
                target: RequestTarget { path, query: "" },
                headers: Headers::new(&[]),
                body: &[],
            };
            let LookupExplanation::Route { route, .. } = responses.explain(Host::Metadata, &request) else {
                panic!("{path} is served")
            };
            assert!(responses.likely(&hint).is_some_and(|likely| std::ptr::eq(likely, route)), "{path}");
        }
    }

    #[test]
    fn reading_ahead_changes_nothing_whatever_the_hint() {
        let (store, responses) = (Store::new(20), responses());
        (0..10).for_each(|slot| store.publish(slot, Arc::clone(&responses)).expect("a slot of the table"));
        let paths = ["", "/", "v1", "//", "/latest", "/latest/", "/openstack/latest/x", "/v1/meta-data", "é"];
        let hints: Vec<RequestHint<'_>> = (0..30)
            .chain([u32::MAX])
            .flat_map(|slot| Host::ALL.map(|host| (slot, host)))
            .flat_map(|(slot, host)| paths.map(|path| RequestHint { slot, host, path }))
            .collect();
        store.read_ahead(&hints);
        assert_eq!(Arc::strong_count(&responses), 11);
    }
}
