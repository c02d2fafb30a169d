//! One allocation for equal bytes.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use foldhash::{HashMap, HashSet};

use super::responses::{Responses, Route, Terms};
use crate::http::{Body, Head, Response, Status};

/// Entries below which the interner does not look for unused ones by itself.
const SWEEP_AT_LEAST: usize = 1_024;
/// Octets that come before the interner looks for unused ones by itself, at least; else an eighth of what is held.
const SWEEP_OCTETS: usize = 4 << 20;

/// How a text is written into documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Notation {
    /// As a JSON string.
    Json,
    /// As a YAML scalar.
    Yaml,
}

impl Notation {
    const COUNT: usize = 2;
}

/// Makes equal responses of all VMs, equal heads of different ones, equal octets and equal terms of routes share
/// one allocation.
///
/// What no VM uses any more goes with the next [`sweep`](Self::sweep), which also happens by itself whenever
/// the number of entries has doubled, or an eighth has been added to their octets.
///
/// A fast hash will do for all of it: what is interned comes from records, so from who runs the node, and
/// nothing a guest sends ever does. It is seeded for each process all the same.
#[derive(Default)]
pub struct Interner {
    octets: HashSet<Bytes>,
    /// Texts that are among `octets`, and how they are written, by notation.
    written: [HashMap<Bytes, Bytes>; Notation::COUNT],
    responses: HashSet<Response>,
    /// Heads of plain answers, by type and length of the body.
    found: HashMap<(&'static str, usize), Arc<Head>>,
    /// Other heads.
    heads: HashSet<Arc<Head>>,
    terms: HashSet<Arc<Terms>>,
    hashes: HashSet<Arc<[u32]>>,
    sweep_at: usize,
    /// Octets that came since the last sweep, and how many may.
    fresh: usize,
    fresh_most: usize,
}

impl fmt::Debug for Interner {
    /// How much is held, not what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Interner");
        shown.field("octets", &self.octets.len()).field("responses", &self.responses.len());
        shown.finish_non_exhaustive()
    }
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
        self.share(Bytes::copy_from_slice(&octets))
    }

    /// The shared copy of some octets.
    #[must_use]
    pub fn copy_of(&mut self, octets: &[u8]) -> Bytes {
        match self.octets.get(octets) {
            Some(known) => known.clone(),
            None => self.share(Bytes::copy_from_slice(octets)),
        }
    }

    /// The shared copy of some octets that somebody else keeps anyway: a copy would be another.
    #[must_use]
    pub fn kept_octets(&mut self, octets: Bytes) -> Bytes {
        match self.octets.get(&octets) {
            Some(known) => known.clone(),
            None => self.share(octets),
        }
    }

    fn share(&mut self, octets: Bytes) -> Bytes {
        self.make_room(octets.len());
        self.octets.insert(octets.clone());
        octets
    }

    /// The shared copy of a text in a notation. Where the text itself is one of [`octets`](Self::octets), which
    /// others may have, too, it is written once for all of them.
    #[must_use]
    pub(crate) fn written(
        &mut self,
        notation: Notation,
        text: &str,
        write: impl FnOnce() -> Vec<u8>,
    ) -> Bytes {
        if let Some(known) = self.written[notation as usize].get(text.as_bytes()) {
            return known.clone();
        }
        let Some(text) = self.octets.get(text.as_bytes()).cloned() else {
            return self.octets(write().into());
        };
        let written = Bytes::from(write().into_boxed_slice());
        self.make_room(written.len());
        self.written[notation as usize].insert(text, written.clone());
        written
    }

    /// The shared 200 of a type with a body.
    #[must_use]
    pub(crate) fn found(&mut self, content_type: &'static str, body: Body) -> Response {
        let head = self.found_head(content_type, &body);
        let response = Response::sharing(head, body);
        match self.responses.get(&response) {
            Some(known) => known.clone(),
            None => self.keep(Arc::clone(response.shared_head()), response.body()),
        }
    }

    /// The head of a 200 of a type, for a body as long as this.
    #[must_use]
    pub(crate) fn found_head(&mut self, content_type: &'static str, body: &Body) -> Arc<Head> {
        let key = (content_type, body.len());
        if let Some(known) = self.found.get(&key) {
            return Arc::clone(known);
        }
        self.make_room(0);
        let response = Response::new(Status(200), Some(content_type), &[], body.clone());
        self.found.insert(key, Arc::clone(response.shared_head()));
        Arc::clone(response.shared_head())
    }

    /// The shared copy of a response. Its body is shared with others where it is one of [`octets`](Self::octets).
    #[must_use]
    pub fn response(&mut self, response: Response) -> Response {
        if let Some(known) = self.responses.get(&response) {
            return known.clone();
        }
        let head = self.head(&response);
        self.keep(head, response.body())
    }

    fn keep(&mut self, head: Arc<Head>, body: &Body) -> Response {
        // Bodies are mostly a VM's own, and an entry for each costs more than the copies it saves.
        let body = match body {
            Body::One(body) => match self.octets.get(body) {
                Some(known) => known.clone().into(),
                None => Bytes::copy_from_slice(body).into(),
            },
            many @ Body::Many(_) => many.clone(),
        };
        self.make_room(body.len());
        let response = Response::sharing(head, body);
        self.responses.insert(response.clone());
        response
    }

    fn head(&mut self, response: &Response) -> Arc<Head> {
        let head = response.shared_head();
        if let Some(known) = self.heads.get(head) {
            return Arc::clone(known);
        }
        self.make_room(0);
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

    /// The responses, found by what they share with others.
    #[must_use]
    pub(crate) fn responses(&mut self, mut responses: Responses) -> Responses {
        for hashes in &mut responses.hashes {
            match self.hashes.get(hashes) {
                Some(known) => *hashes = Arc::clone(known),
                None => {
                    self.hashes.insert(Arc::clone(hashes));
                }
            }
        }
        responses
    }

    /// Lets go of everything nobody else holds.
    pub fn sweep(&mut self) {
        self.terms.retain(|terms| Arc::strong_count(terms) > 1);
        self.hashes.retain(|hashes| Arc::strong_count(hashes) > 1);
        self.responses.retain(|response| !response.is_unique());
        self.found.retain(|_, head| Arc::strong_count(head) > 1);
        self.heads.retain(|head| Arc::strong_count(head) > 1);
        // Texts hold on to what they are among.
        self.written.iter_mut().for_each(|written| written.retain(|_, written| !written.is_unique()));
        self.octets.retain(|octets| !octets.is_unique());
        self.fresh = 0;
        self.fresh_most = (self.held() / 8).max(SWEEP_OCTETS);
    }

    /// Octets held of texts and what is written of them.
    fn held(&self) -> usize {
        let written = self.written.iter().flat_map(HashMap::values);
        self.octets.iter().chain(written).map(Bytes::len).sum()
    }

    /// How many responses, heads and pieces of them, terms and tables of routes are held.
    #[must_use]
    pub fn len(&self) -> usize {
        let written: usize = self.written.iter().map(HashMap::len).sum();
        let heads = self.found.len() + self.heads.len();
        self.octets.len() + written + self.responses.len() + heads + self.terms.len() + self.hashes.len()
    }

    /// True when nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sweeps when it is time to, before so many octets come.
    fn make_room(&mut self, octets: usize) {
        let full = self.len() >= self.sweep_at.max(SWEEP_AT_LEAST);
        if full || self.fresh >= self.fresh_most.max(SWEEP_OCTETS) {
            self.sweep();
        }
        if full {
            self.sweep_at = 2 * self.len();
        }
        self.fresh += octets;
    }
}

#[cfg(test)]
mod tests {
    use super::{Interner, Notation, SWEEP_AT_LEAST, SWEEP_OCTETS};
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
    fn a_text_others_may_have_is_written_once_in_a_notation_and_goes_with_its_users() {
        let mut interner = Interner::new();
        let shared = interner.octets("shared".into());
        let mut written = |notation, text: &str, as_what: &str| {
            interner.written(notation, text, || as_what.as_bytes().to_vec())
        };
        let json = written(Notation::Json, "shared", "'shared'");
        assert_eq!(json, "'shared'");
        let again = written(Notation::Json, "shared", "written again");
        assert_eq!(again.as_ptr(), json.as_ptr());
        assert_eq!(written(Notation::Yaml, "shared", "shared:"), "shared:");
        assert_eq!(written(Notation::Json, "a VM's own", "first"), "first");
        assert_eq!(written(Notation::Json, "a VM's own", "next"), "next");
        drop((shared, again));
        interner.sweep();
        assert_eq!(interner.len(), 2, "the text and its JSON");
        drop(json);
        interner.sweep();
        assert!(interner.is_empty(), "{} entries outlive their users", interner.len());
    }

    #[test]
    fn a_plain_answer_is_what_it_is_without_an_interner() {
        let mut interner = Interner::new();
        for (kind, body) in
            [("text/plain", "a"), ("text/plain", "b"), ("text/yaml", "b"), ("text/plain", "bb")]
        {
            let found = interner.found(kind, body.into());
            assert_eq!(found, Response::new(Status(200), Some(kind), &[], body));
            assert_eq!(piece(&interner.found(kind, body.into())), piece(&found));
        }
        interner.sweep();
        assert!(interner.is_empty());
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

    #[test]
    fn unused_octets_cannot_pile_up() {
        let mut interner = Interner::new();
        for n in 0..=u8::MAX {
            drop(interner.octets(vec![n; 1 << 20].into()));
            assert!(interner.held() <= SWEEP_OCTETS, "{} octets held", interner.held());
        }
    }

    #[test]
    fn octets_that_somebody_keeps_are_not_copied() {
        let mut interner = Interner::new();
        let kept = bytes::Bytes::from(vec![b'x'; 1_000]);
        assert_eq!(interner.kept_octets(kept.clone()).as_ptr(), kept.as_ptr());
        assert_eq!(interner.octets(kept.to_vec().into()).as_ptr(), kept.as_ptr());
    }
}
