//! One allocation for equal bytes.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;

use super::responses::{Route, Terms};
use crate::http::{Body, Head, Response};

/// Entries below which the interner does not look for unused ones by itself.
const SWEEP_AT_LEAST: usize = 1_024;

/// Makes equal responses of all VMs, equal heads of different ones, equal octets and equal terms of routes share
/// one allocation.
///
/// What no VM uses any more goes with the next [`sweep`](Self::sweep), which also happens by itself whenever
/// the number of entries has doubled.
#[derive(Debug, Default)]
pub struct Interner {
    octets: HashSet<Bytes>,
    responses: HashSet<Response>,
    heads: HashSet<Arc<Head>>,
    terms: HashSet<Arc<Terms>>,
    sweep_at: usize,
}

impl Interner {
    /// An empty interner.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The shared copy of some octets, in an allocation of their own: what they were cut from or grown in is
    /// not kept with them.
    #[must_use]
    pub fn octets(&mut self, octets: Bytes) -> Bytes {
        if let Some(known) = self.octets.get(&octets) {
            return known.clone();
        }
        self.make_room();
        let octets = Bytes::copy_from_slice(&octets);
        self.octets.insert(octets.clone());
        octets
    }

    /// The shared copy of a response. Its body is shared with others where it is one of [`octets`](Self::octets).
    #[must_use]
    pub fn response(&mut self, response: Response) -> Response {
        if let Some(known) = self.responses.get(&response) {
            return known.clone();
        }
        let head = self.head(&response);
        // Bodies are mostly a VM's own, and an entry for each costs more than the copies it saves.
        let body = match response.body() {
            Body::One(body) => match self.octets.get(body) {
                Some(known) => known.clone().into(),
                None => Bytes::copy_from_slice(body).into(),
            },
            many @ Body::Many(_) => many.clone(),
        };
        self.make_room();
        let response = Response::sharing(head, body);
        self.responses.insert(response.clone());
        response
    }

    fn head(&mut self, response: &Response) -> Arc<Head> {
        let head = response.shared_head();
        if let Some(known) = self.heads.get(head) {
            return Arc::clone(known);
        }
        self.make_room();
        self.heads.insert(Arc::clone(head));
        Arc::clone(head)
    }

    /// The route on terms it shares with others.
    #[must_use]
    pub(crate) fn route(&mut self, mut route: Route) -> Route {
        match self.terms.get(&route.terms) {
            Some(known) => route.terms = Arc::clone(known),
            None => {
                self.terms.insert(Arc::clone(&route.terms));
            }
        }
        route
    }

    /// Lets go of everything nobody else holds.
    pub fn sweep(&mut self) {
        self.terms.retain(|terms| Arc::strong_count(terms) > 1);
        self.responses.retain(|response| !response.is_unique());
        self.heads.retain(|head| Arc::strong_count(head) > 1);
        self.octets.retain(|octets| !octets.is_unique());
    }

    /// How many responses, heads and pieces of them and terms of routes are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.octets.len() + self.responses.len() + self.heads.len() + self.terms.len()
    }

    /// True when nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn make_room(&mut self) {
        if self.len() >= self.sweep_at.max(SWEEP_AT_LEAST) {
            self.sweep();
            self.sweep_at = 2 * self.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Interner, SWEEP_AT_LEAST};
    use crate::http::{Response, Status};

    fn response(interner: &mut Interner, body: &str) -> Response {
        interner.response(Response::new(Status(200), Some("text/plain"), &[], body.to_owned()))
    }

    /// Where the body is.
    fn piece(response: &Response) -> *const u8 {
        response.body().pieces()[0].as_ptr()
    }

    #[test]
    fn equal_responses_are_one_allocation() {
        let mut interner = Interner::new();
        let first = response(&mut interner, "shared");
        for _ in 0..1_000 {
            let next = response(&mut interner, "shared");
            assert_eq!(next.head().as_ptr(), first.head().as_ptr());
            assert_eq!(piece(&next), piece(&first));
        }
        assert_eq!(interner.len(), 2, "one head and one response");
    }

    #[test]
    fn shared_octets_are_shared_between_different_heads() {
        let mut interner = Interner::new();
        let body = interner.octets("shared".into());
        let first = response(&mut interner, "shared");
        let other = interner.response(Response::new(Status(200), Some("text/yaml"), &[], "shared"));
        assert_ne!(other.head(), first.head());
        assert_eq!([piece(&first), piece(&other)], [body.as_ptr(); 2]);
    }

    #[test]
    fn octets_do_not_keep_what_they_were_cut_from() {
        let mut interner = Interner::new();
        let long = bytes::Bytes::from("a part of it".repeat(1_000));
        let part = interner.octets(long.slice(..6));
        assert!(long.is_unique(), "the whole is still held");
        assert_eq!(part, "a part");
    }

    #[test]
    fn heads_are_shared_between_different_bodies() {
        let mut interner = Interner::new();
        let (first, other) = (response(&mut interner, "a"), response(&mut interner, "b"));
        assert_ne!(other.body(), first.body());
        assert_eq!(other.head().as_ptr(), first.head().as_ptr());
    }

    #[test]
    fn a_sweep_keeps_only_what_is_used() {
        let mut interner = Interner::new();
        let kept = response(&mut interner, "kept");
        drop(response(&mut interner, "dropped"));
        assert_eq!(interner.len(), 4);
        interner.sweep();
        assert_eq!(interner.len(), 2);
        assert_eq!(piece(&response(&mut interner, "kept")), piece(&kept));
    }

    #[test]
    fn unused_entries_cannot_pile_up() {
        let mut interner = Interner::new();
        for n in 0..20 * SWEEP_AT_LEAST {
            drop(response(&mut interner, &format!("user-data of VM {n}")));
            assert!(interner.len() <= SWEEP_AT_LEAST + 1, "{} entries held", interner.len());
        }
    }
}
