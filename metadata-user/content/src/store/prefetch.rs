//! Reads ahead what a group of requests will touch.
//!
//! In a boot storm each request is another VM's, and nothing of that VM is in the CPU's cache. A look-up follows five
//! pointers, so one request after the other waits for memory five times each. Here each pointer is followed for all
//! requests before the next one: their reads overlap, and the group waits five times.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arc_swap::ArcSwapOption;
use metadata_common::maps::Slot;

use super::path::{Canonical, Host};
use super::path::{Endpoint, Route};
use super::responses::Responses;
use super::table::Store;
use crate::account::Resource;
use crate::http::Response;

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
    use super::RequestHint;
    use crate::http::{Headers, Method, Request, RequestTarget, Response, StatusCode};
    use crate::store::{Endpoint, Host, LookupExplanation, Responses, Route, Store, VmState};
    use std::sync::Arc;

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
