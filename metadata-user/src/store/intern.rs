//! One allocation for equal bytes.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};

use bytes::Bytes;

use crate::http::Response;

/// Entries below which the interner does not look for unused ones by itself.
const SWEEP_AT_LEAST: usize = 1_024;

/// Makes equal bodies, and equal responses, of all VMs share one allocation.
///
/// Bodies are shared also between responses whose heads differ. What no VM uses any more goes with the
/// next [`sweep`](Self::sweep), which also happens by itself whenever the number of entries has doubled.
#[derive(Debug, Default)]
pub struct Interner {
    bodies: HashSet<Bytes>,
    responses: HashSet<Entry>,
    sweep_at: usize,
}

impl Interner {
    /// An empty interner.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The shared copy of a body. One made from `'static` octets is kept for good: it counts no references.
    #[must_use]
    pub fn body(&mut self, body: Bytes) -> Bytes {
        if body.is_empty() {
            return Bytes::new();
        }
        if let Some(known) = self.bodies.get(&body) {
            return known.clone();
        }
        self.make_room();
        self.bodies.insert(body.clone());
        body
    }

    /// The shared copy of a response.
    #[must_use]
    pub fn response(&mut self, response: Response) -> Response {
        let entry = Entry(response);
        if let Some(known) = self.responses.get(&entry) {
            return known.0.clone();
        }
        self.make_room();
        self.responses.insert(Entry(entry.0.clone()));
        entry.0
    }

    /// Lets go of everything nobody else holds.
    pub fn sweep(&mut self) {
        self.responses.retain(|entry| !entry.0.head().is_unique());
        self.bodies.retain(|body| !body.is_unique());
    }

    /// How many bodies and responses are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bodies.len() + self.responses.len()
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

/// A response, hashed by its bytes.
#[derive(Debug, PartialEq, Eq)]
struct Entry(Response);

impl Hash for Entry {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.head().hash(state);
        self.0.body().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::{Interner, SWEEP_AT_LEAST};
    use crate::http::{Response, Status};
    use bytes::Bytes;

    fn response(interner: &mut Interner, body: &str) -> Response {
        let body = interner.body(Bytes::copy_from_slice(body.as_bytes()));
        interner.response(Response::new(Status(200), Some("text/plain"), &[], body))
    }

    #[test]
    fn equal_responses_are_one_allocation() {
        let mut interner = Interner::new();
        let first = response(&mut interner, "shared");
        for _ in 0..1_000 {
            let next = response(&mut interner, "shared");
            assert_eq!(next.head().as_ptr(), first.head().as_ptr());
            assert_eq!(next.body().as_ptr(), first.body().as_ptr());
        }
        assert_eq!(interner.len(), 2, "one body and one response");
    }

    #[test]
    fn equal_bodies_are_shared_between_different_heads() {
        let mut interner = Interner::new();
        let first = response(&mut interner, "shared");
        let body = interner.body(Bytes::copy_from_slice(b"shared"));
        let other = interner.response(Response::new(Status(200), Some("text/yaml"), &[], body));
        assert_ne!(other.head(), first.head());
        assert_eq!(other.body().as_ptr(), first.body().as_ptr());
    }

    #[test]
    fn a_sweep_keeps_only_what_is_used() {
        let mut interner = Interner::new();
        let kept = response(&mut interner, "kept");
        drop(response(&mut interner, "dropped"));
        assert_eq!(interner.len(), 4);
        interner.sweep();
        assert_eq!(interner.len(), 2);
        assert_eq!(response(&mut interner, "kept").body().as_ptr(), kept.body().as_ptr());
    }

    #[test]
    fn unused_entries_cannot_pile_up() {
        let mut interner = Interner::new();
        for n in 0..20 * SWEEP_AT_LEAST {
            drop(response(&mut interner, &format!("user-data of VM {n}")));
            assert!(interner.len() <= SWEEP_AT_LEAST + 1, "{} entries held", interner.len());
        }
    }

    #[test]
    fn empty_bodies_are_not_held() {
        let mut interner = Interner::new();
        assert!(interner.body(Bytes::new()).is_empty());
        assert!(interner.is_empty());
    }
}
