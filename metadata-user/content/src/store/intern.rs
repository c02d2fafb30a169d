//! Stores equal bytes once.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use foldhash::{HashMap, HashSet};

use super::path::{Route, RouteTerms};
use super::responses::Responses;
use crate::http::{Body, Response, ResponseHead, StatusCode};

/// Number of entries below which the interner does not sweep by itself.
const SWEEP_AT_LEAST: usize = 1_024;
/// Minimum number of new bytes between automatic sweeps; an eighth of the held bytes if that is more.
const SWEEP_BYTES: usize = 4 << 20;

/// Encoding of a text within a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Notation {
    /// JSON string.
    Json,
    /// YAML scalar.
    Yaml,
}

impl Notation {
    const COUNT: usize = 2;
}

/// Stores equal responses, response heads, bytes and route terms of all VMs in one allocation each.
///
/// [`sweep`](Self::sweep) drops entries that no VM uses. It runs by itself when the number of entries has doubled, or
/// when their bytes have grown by an eighth.
///
/// The hash is fast and not collision-resistant. Operators control the interned values through the records, and tenants
/// those of their own VMs, so each process has a seed of its own. Values of equal hashes are compared before they are
/// shared.
#[derive(Default)]
pub struct Interner {
    bytes: HashSet<Bytes>,
    /// Payloads of records, until the next sweep. Two interners that held a payload for as long as somebody else does
    /// would hold it for each other, for ever.
    payloads: HashSet<Bytes>,
    /// Texts among `bytes` with their encoded form, by notation.
    written: [HashMap<Bytes, Bytes>; Notation::COUNT],
    responses: HashSet<Response>,
    /// Heads of plain 200 responses, by content type and body length.
    found: HashMap<(&'static str, usize), Arc<ResponseHead>>,
    /// Heads of all other responses.
    heads: HashSet<Arc<ResponseHead>>,
    terms: HashSet<Arc<RouteTerms>>,
    hashes: HashSet<Arc<[u32]>>,
    sweep_at: usize,
    /// Bytes added since the last sweep, and how many trigger the next one.
    fresh: usize,
    fresh_most: usize,
}

impl fmt::Debug for Interner {
    /// Prints counts, not content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Interner");
        shown.field("bytes", &self.bytes.len()).field("responses", &self.responses.len());
        shown.finish_non_exhaustive()
    }
}

impl Interner {
    /// Creates an empty interner.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the shared copy of the bytes. A new copy has an allocation of its exact size, so it does not keep alive
    /// a larger buffer that `bytes` is part of.
    #[must_use]
    pub fn bytes(&mut self, bytes: Bytes) -> Bytes {
        match self.known(&bytes) {
            Some(known) => known.clone(),
            None => self.share(Bytes::copy_from_slice(&bytes)),
        }
    }

    /// Like [`bytes`](Self::bytes), for borrowed bytes.
    #[must_use]
    pub fn copy_of(&mut self, bytes: &[u8]) -> Bytes {
        match self.known(bytes) {
            Some(known) => known.clone(),
            None => self.share(Bytes::copy_from_slice(bytes)),
        }
    }

    /// Returns the shared copy of a payload that its record keeps alive. Records share equal payloads themselves, so a
    /// new one is held only until the next sweep.
    #[must_use]
    pub(crate) fn payload(&mut self, payload: Bytes) -> Bytes {
        if let Some(known) = self.known(&payload) {
            return known.clone();
        }
        self.make_room(0);
        self.payloads.insert(payload.clone());
        payload
    }

    fn known(&self, bytes: &[u8]) -> Option<&Bytes> {
        self.bytes.get(bytes).or_else(|| self.payloads.get(bytes))
    }

    fn share(&mut self, bytes: Bytes) -> Bytes {
        self.make_room(bytes.len());
        self.bytes.insert(bytes.clone());
        bytes
    }

    /// Returns the shared copy of a text in a notation. `write` runs once for all VMs if the text itself is in
    /// [`bytes`](Self::bytes), and at each call otherwise.
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
        let Some(text) = self.known(text.as_bytes()).cloned() else {
            return self.bytes(write().into());
        };
        let written = Bytes::from(write().into_boxed_slice());
        self.make_room(written.len());
        self.written[notation as usize].insert(text, written.clone());
        written
    }

    /// Returns the shared 200 response with this content type and body.
    #[must_use]
    pub(crate) fn found(&mut self, content_type: &'static str, body: Body) -> Response {
        let head = self.found_head(content_type, &body);
        let response = Response::sharing(head, body);
        match self.responses.get(&response) {
            Some(known) => known.clone(),
            None => self.keep(Arc::clone(response.shared_head()), response.body()),
        }
    }

    /// Returns the shared head of a 200 with this content type, for a body of this length.
    #[must_use]
    pub(crate) fn found_head(&mut self, content_type: &'static str, body: &Body) -> Arc<ResponseHead> {
        let key = (content_type, body.len());
        if let Some(known) = self.found.get(&key) {
            return Arc::clone(known);
        }
        self.make_room(0);
        let response = Response::new(StatusCode(200), Some(content_type), &[], body.clone());
        self.found.insert(key, Arc::clone(response.shared_head()));
        Arc::clone(response.shared_head())
    }

    /// Returns the shared copy of a response. The body is shared too if it is in [`bytes`](Self::bytes).
    #[must_use]
    pub fn response(&mut self, response: Response) -> Response {
        if let Some(known) = self.responses.get(&response) {
            return known.clone();
        }
        let head = self.head(&response);
        self.keep(head, response.body())
    }

    fn keep(&mut self, head: Arc<ResponseHead>, body: &Body) -> Response {
        // Most bodies belong to one VM. An entry for each would cost more memory than it saves.
        let body = match body {
            Body::One(body) => match self.known(body) {
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

    fn head(&mut self, response: &Response) -> Arc<ResponseHead> {
        let head = response.shared_head();
        if let Some(known) = self.heads.get(head) {
            return Arc::clone(known);
        }
        self.make_room(0);
        self.heads.insert(Arc::clone(head));
        Arc::clone(head)
    }

    /// Makes the route share its terms with equal ones.
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

    /// Makes the responses share their hash tables with equal ones.
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

    /// Drops every entry that is not referenced elsewhere, and all payloads.
    pub fn sweep(&mut self) {
        self.terms.retain(|terms| Arc::strong_count(terms) > 1);
        self.hashes.retain(|hashes| Arc::strong_count(hashes) > 1);
        self.responses.retain(|response| !response.is_unique());
        self.found.retain(|_, head| Arc::strong_count(head) > 1);
        self.heads.retain(|head| Arc::strong_count(head) > 1);
        self.payloads.clear();
        // `written` holds references into `bytes`, so it comes first.
        self.written.iter_mut().for_each(|written| written.retain(|_, written| !written.is_unique()));
        self.bytes.retain(|bytes| !bytes.is_unique());
        self.fresh = 0;
        self.fresh_most = (self.held() / 8).max(SWEEP_BYTES);
    }

    /// Returns the bytes held in `bytes` and `written`.
    fn held(&self) -> usize {
        let written = self.written.iter().flat_map(HashMap::values);
        self.bytes.iter().chain(written).map(Bytes::len).sum()
    }

    /// Returns the number of entries of all kinds.
    #[must_use]
    pub fn len(&self) -> usize {
        let written: usize = self.written.iter().map(HashMap::len).sum();
        let heads = self.found.len() + self.heads.len();
        self.bytes.len()
            + self.payloads.len()
            + written
            + self.responses.len()
            + heads
            + self.terms.len()
            + self.hashes.len()
    }

    /// Returns whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sweeps if a threshold is reached, before the caller adds this many bytes.
    fn make_room(&mut self, bytes: usize) {
        let full = self.len() >= self.sweep_at.max(SWEEP_AT_LEAST);
        if full || self.fresh >= self.fresh_most.max(SWEEP_BYTES) {
            self.sweep();
        }
        if full {
            self.sweep_at = 2 * self.len();
        }
        self.fresh += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::{Interner, Notation, SWEEP_AT_LEAST, SWEEP_BYTES};
    use crate::http::{Response, StatusCode};

    fn response(interner: &mut Interner, body: &str) -> Response {
        interner.response(Response::new(StatusCode(200), Some("text/plain"), &[], body.to_owned()))
    }

    /// Address of the body.
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
    fn shared_bytes_are_shared_between_different_heads() {
        let mut interner = Interner::new();
        let body = interner.bytes("shared".into());
        let first = response(&mut interner, "shared");
        let other = interner.response(Response::new(StatusCode(200), Some("text/yaml"), &[], "shared"));
        assert_ne!(other.head(), first.head());
        assert_eq!([piece(&first), piece(&other)], [body.as_ptr(); 2]);
    }

    #[test]
    fn bytes_do_not_keep_the_buffer_they_were_part_of() {
        let mut interner = Interner::new();
        let long = bytes::Bytes::from("a part of it".repeat(1_000));
        let part = interner.bytes(long.slice(..6));
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
    fn a_shared_text_is_encoded_once_per_notation_and_dropped_with_its_users() {
        let mut interner = Interner::new();
        let shared = interner.bytes("shared".into());
        let mut written = |notation, text: &str, encoded: &str| {
            interner.written(notation, text, || encoded.as_bytes().to_vec())
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
    fn a_plain_answer_equals_one_built_without_an_interner() {
        let mut interner = Interner::new();
        for (kind, body) in
            [("text/plain", "a"), ("text/plain", "b"), ("text/yaml", "b"), ("text/plain", "bb")]
        {
            let found = interner.found(kind, body.into());
            assert_eq!(found, Response::new(StatusCode(200), Some(kind), &[], body));
            assert_eq!(piece(&interner.found(kind, body.into())), piece(&found));
        }
        interner.sweep();
        assert!(interner.is_empty());
    }

    #[test]
    fn a_sweep_keeps_only_entries_in_use() {
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
    fn unused_bytes_cannot_pile_up() {
        let mut interner = Interner::new();
        for n in 0..=u8::MAX {
            drop(interner.bytes(vec![n; 1 << 20].into()));
            assert!(interner.held() <= SWEEP_BYTES, "{} bytes held", interner.held());
        }
    }
}
