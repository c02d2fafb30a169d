//! What workers see of requests, so that their answers can be published to the kernel.
//!
//! A worker reports a request that the kernel could have answered. The publisher learns it once a second VM has sent the
//! same bytes, and then publishes the answer of every VM. From then on a worker only marks the VM, because its answer is
//! not published.

use crossbeam_queue::ArrayQueue;
use metadata_common::addresses::{Connection, METADATA};
use metadata_common::answer::PORT;
use metadata_common::answer::request::hash_of;
use metadata_common::mac::Mac;
use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_common::siphash::SipKey;
use metadata_content::http::parse::{FIELD_COUNT_MAX, RequestHead};
use metadata_content::http::{Method, Response};
use metadata_content::store::VmState;
use metadata_content::token::{TOKEN_CHARS, TokenKind};
use metadata_steer::SlotTokens;
use rustix::time::{ClockId, clock_gettime};
use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

/// Limit on reported requests that wait for the publisher; further ones are reported when they are sent again.
pub const REPORTS: usize = 256;

/// Entries of the table of learned requests, a power of two. Two requests may share one; then both are reported again.
const LEARNED_ENTRIES: usize = 1_024;

/// How long the kernel takes a session token for valid before a worker checks it again. A key that is replaced ends its
/// tokens; in the kernel they end this much later.
const TOKEN_KEPT_FOR: Duration = Duration::from_secs(30);

/// Header fields on which no limit, token or state of the agent depends. The answer may depend on their values, and a
/// published answer is that to a request of the same bytes.
const PLAIN_FIELDS: [&str; 7] =
    ["host", "user-agent", "accept", "accept-encoding", "connection", "metadata", "metadata-flavor"];

/// A request that a worker has answered.
#[derive(Clone, PartialEq, Eq)]
pub struct ReportedRequest {
    /// The slot that sent it.
    pub slot: Slot,
    /// Its form.
    pub form: Arc<RequestForm>,
}

/// What the requests of several VMs have in common: all bytes, except for a MAC in EC2's tree, and a session token.
#[derive(Clone, PartialEq, Eq)]
pub struct RequestForm {
    /// The hash of the bytes.
    pub hash: u64,
    /// The bytes, with zeros in place of the MAC and of the token.
    bytes: Box<[u8]>,
    /// The offset of the MAC's text.
    mac_at: Option<usize>,
    token: Option<TokenPlace>,
}

/// A session token in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TokenPlace {
    kind: TokenKind,
    at: usize,
}

/// The kernel answers no request with such fields: the value is no session token, or there are two.
struct UnusableToken;

impl TokenPlace {
    /// Finds the session token in a request; `None` if it has no field for one.
    fn of(head: &RequestHead<'_>, bytes: &[u8]) -> Result<Option<Self>, UnusableToken> {
        let mut fields = TokenKind::ALL
            .into_iter()
            .flat_map(|kind| head.headers.all(kind.field()).map(move |value| (kind, value)));
        match (fields.next(), fields.next()) {
            (None, _) => Ok(None),
            (Some((kind, value)), None) if value.len() == TOKEN_CHARS => {
                // If the text is in a later field, too, no other VM sends these bytes, so they are never learned.
                let at = bytes.windows(TOKEN_CHARS).rposition(|part| part == value).ok_or(UnusableToken)?;
                Ok(Some(Self { kind, at }))
            }
            _ => Err(UnusableToken),
        }
    }

    /// The bytes of the token.
    fn token<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8; TOKEN_CHARS]> {
        bytes.get(self.at..)?.first_chunk()
    }
}

/// What precedes a MAC in EC2's tree.
const MACS: &[u8] = b"/macs/";
/// Length of the text of a MAC.
const MAC_LENGTH: usize = 17;

impl RequestForm {
    fn of(request: &[u8], token: Option<TokenPlace>, key: &SipKey) -> Option<Self> {
        let line = request.iter().position(|byte| *byte == b'\r')?;
        let macs = request[..line].windows(MACS.len()).position(|part| part == MACS);
        let mac_at = macs.map(|at| at + MACS.len()).filter(|at| {
            let text = request[..line].get(*at..at + MAC_LENGTH);
            text.and_then(|text| std::str::from_utf8(text).ok())
                .is_some_and(|text| text.parse::<Mac>().is_ok())
        });
        let mut bytes: Box<[u8]> = request.into();
        if let Some(at) = mac_at {
            bytes[at..at + MAC_LENGTH].fill(0);
        }
        if let Some(TokenPlace { at, .. }) = token {
            bytes[at..at + TOKEN_CHARS].fill(0);
        }
        Some(Self { hash: hash_of(&bytes, key)?, bytes, mac_at, token })
    }

    /// The kind of session token that the request needs.
    #[must_use]
    pub fn token_kind(&self) -> Option<TokenKind> {
        self.token.map(|token| token.kind)
    }

    /// Writes a token into a [request of this form](Self::request_of), unless it has none.
    #[must_use]
    pub fn with_token<'a>(&self, request: &Cow<'a, [u8]>, token: &str) -> Cow<'a, [u8]> {
        let mut request = request.clone();
        if let Some(TokenPlace { at, .. }) = self.token {
            request.to_mut()[at..at + TOKEN_CHARS].copy_from_slice(token.as_bytes());
        }
        request
    }

    /// Bytes from the start of the token to the end of the request.
    fn token_from_end(&self) -> Option<u16> {
        u16::try_from(self.bytes.len() - self.token?.at).ok()
    }

    /// The request of the VM with this MAC, with zeros in place of the token. It is borrowed if every VM sends the same
    /// bytes; then its hash is [that of the form](Self::hash).
    #[must_use]
    pub fn request_of(&self, mac: Mac) -> Cow<'_, [u8]> {
        let Some(at) = self.mac_at else { return Cow::Borrowed(&self.bytes) };
        let mut request = self.bytes.to_vec();
        request[at..at + MAC_LENGTH].copy_from_slice(mac.to_string().as_bytes());
        Cow::Owned(request)
    }
}

impl ReportedRequest {
    /// A request of these bytes without a token; `None` if the kernel answers none of this length.
    #[cfg(test)]
    pub(crate) fn of(slot: Slot, request: &[u8], key: &SipKey) -> Option<Self> {
        RequestForm::of(request, None, key).map(|form| Self { slot, form: Arc::new(form) })
    }
}

impl fmt::Debug for ReportedRequest {
    /// Omits the bytes, which the guest chose.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReportedRequest").field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// What is published to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DocumentCounts {
    /// Learned requests.
    pub learned: u64,
    /// VMs with an open edition.
    pub vms: u64,
    /// Answers in the kernel's table, those of single VMs and common ones.
    pub documents: u64,
    /// Distinct answers.
    pub responses: u64,
    /// VMs whose answers were withdrawn since the start because a table was full.
    pub displaced: u64,
}

/// Shared by the workers and the publisher. No method waits.
pub struct RequestReports {
    key: SipKey,
    reports: ArrayQueue<ReportedRequest>,
    /// Hashes of learned requests, by their low bits.
    learned: Box<[AtomicU64]>,
    /// A bit for each slot whose answers should be published.
    marked: Box<[AtomicU64]>,
    is_asleep: AtomicBool,
    publisher: OnceLock<Thread>,
    /// The session tokens of all slots, for the kernel.
    tokens: OnceLock<Arc<SlotTokens>>,
    /// How far from its end a request had its token when one was learned last; 0 before.
    token_from_end: AtomicU16,
}

impl fmt::Debug for RequestReports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestReports").field("waiting", &self.reports.len()).finish_non_exhaustive()
    }
}

impl RequestReports {
    /// Makes an empty table for the kernel's key.
    #[must_use]
    pub fn new(key: SipKey) -> Self {
        let zeroes = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            key,
            reports: ArrayQueue::new(REPORTS),
            learned: zeroes(LEARNED_ENTRIES),
            marked: zeroes(MAX_SLOTS as usize / 64),
            is_asleep: AtomicBool::new(false),
            publisher: OnceLock::new(),
            tokens: OnceLock::new(),
            token_from_end: AtomicU16::new(0),
        }
    }

    /// Reports a request that a worker has answered, if the kernel could have answered it.
    pub(super) fn report(
        &self,
        connection: &Connection,
        head: &RequestHead<'_>,
        bytes: &[u8],
        response: &Response,
        (vm, now_unix): (&VmState, u64),
    ) {
        let slot = connection.slot;
        if connection.local != (IpAddr::V4(METADATA), PORT) {
            return;
        }
        if head.method == Method::Put {
            return self.enter_issued(slot, response, vm, now_unix);
        }
        if !is_kept_get(head) || !is_plain(response) {
            return;
        }
        let Ok(token) = TokenPlace::of(head, bytes) else { return };
        let Some(form) = RequestForm::of(bytes, token, &self.key) else { return };
        if let Some(place) = token {
            let Some(token) = place.token(bytes) else { return };
            let Some(expiry) = vm.keyring.expiry(place.kind, &vm.owner, token, now_unix) else { return };
            let from_end = form.token_from_end().unwrap_or(0);
            self.enter(slot, token, from_end, expiry.saturating_sub(now_unix));
        }
        let hash = form.hash;
        if self.entry(hash).load(Ordering::Relaxed) == hash {
            return self.mark(slot);
        }
        if has_plain_fields(head) && self.reports.push(ReportedRequest { slot, form: Arc::new(form) }).is_ok()
        {
            self.wake();
        }
    }

    /// Enters a token that a worker has just issued, because its guest will use it at once. It is expected where other
    /// guests had theirs. If it is elsewhere, the guest's first request with it goes to a worker.
    fn enter_issued(&self, slot: Slot, response: &Response, vm: &VmState, now_unix: u64) {
        let from_end = self.token_from_end.load(Ordering::Relaxed);
        if from_end == 0 || response.status().0 != 200 {
            return;
        }
        let body = response.body().to_bytes();
        let Ok(token) = <&[u8; TOKEN_CHARS]>::try_from(&*body) else { return };
        let expiry = |kind| vm.keyring.expiry(kind, &vm.owner, token, now_unix);
        if let Some(expiry) = TokenKind::ALL.into_iter().find_map(expiry) {
            self.enter(slot, token, from_end, expiry - now_unix);
        }
    }

    /// Tells the kernel which token a slot's guest uses.
    fn enter(&self, slot: Slot, token: &[u8; TOKEN_CHARS], from_end: u16, seconds: u64) {
        let Some(tokens) = self.tokens.get() else { return };
        let valid_for = Duration::from_secs(seconds).min(TOKEN_KEPT_FOR);
        // If the kernel refuses it, workers answer the requests.
        let _ = tokens.set(slot, token, from_end, now_ns() + valid_for.as_nanos() as u64);
    }

    /// Asks the publisher to publish the answers of a slot.
    pub fn mark(&self, slot: Slot) {
        let Some(word) = self.marked.get(slot as usize / 64) else { return };
        let bit = 1 << (slot % 64);
        if word.fetch_or(bit, Ordering::Release) & bit == 0 {
            self.wake();
        }
    }

    /// Wakes the publisher unless it runs anyway.
    fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::AcqRel)
            && let Some(publisher) = self.publisher.get()
        {
            publisher.unpark();
        }
    }

    fn entry(&self, hash: u64) -> &AtomicU64 {
        &self.learned[hash as usize % LEARNED_ENTRIES]
    }
}

/// The publisher's side.
impl RequestReports {
    /// Makes the calling thread the publisher. From now on tokens are entered in the kernel's table.
    pub fn publish_here(&self, tokens: Arc<SlotTokens>) {
        let _ = self.publisher.set(std::thread::current());
        let _ = self.tokens.set(tokens);
    }

    /// The form of a request that no guest may have sent; `None` if the kernel answers none of its kind.
    #[must_use]
    pub fn form_of(&self, request: &[u8]) -> Option<Arc<RequestForm>> {
        let mut fields = [httparse::EMPTY_HEADER; FIELD_COUNT_MAX];
        let head = RequestHead::parse(request, &mut fields).ok()?;
        let is_learnable = is_kept_get(&head) && has_plain_fields(&head);
        let token = TokenPlace::of(&head, request).ok()?;
        RequestForm::of(request, token, &self.key).filter(|_| is_learnable).map(Arc::new)
    }

    /// The next reported request.
    pub fn next(&self) -> Option<ReportedRequest> {
        self.reports.pop()
    }

    /// Tells the workers that a request is learned.
    pub fn is_learned(&self, form: &RequestForm) {
        self.entry(form.hash).store(form.hash, Ordering::Relaxed);
        if let Some(from_end) = form.token_from_end() {
            self.token_from_end.store(from_end, Ordering::Relaxed);
        }
    }

    /// Tells the workers that a request is no longer learned.
    pub fn is_forgotten(&self, hash: u64) {
        let _ = self.entry(hash).compare_exchange(hash, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Takes the marked slots.
    pub fn marked(&self) -> Vec<Slot> {
        let words = (0..).step_by(64).zip(&*self.marked);
        let marked = words.filter(|(_, word)| word.load(Ordering::Relaxed) != 0);
        let slots = |(first, word): (Slot, &AtomicU64)| {
            let bits = word.swap(0, Ordering::Acquire);
            (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| first + bit)
        };
        marked.flat_map(slots).collect()
    }

    /// Says that the publisher is about to sleep. Reports and marks that come later wake it.
    pub fn falls_asleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
    }

    /// Returns whether there is a report.
    #[must_use]
    pub fn has_reports(&self) -> bool {
        !self.reports.is_empty() || self.marked.iter().any(|word| word.load(Ordering::SeqCst) != 0)
    }
}

/// Returns whether the request is a GET, and its connection stays open.
fn is_kept_get(head: &RequestHead<'_>) -> bool {
    head.method == Method::Get && head.is_1_1 && head.keeps_alive()
}

fn has_plain_fields(head: &RequestHead<'_>) -> bool {
    let tokens = TokenKind::ALL.map(TokenKind::field);
    let is_plain =
        |name: &str| PLAIN_FIELDS.iter().chain(&tokens).any(|plain| name.eq_ignore_ascii_case(plain));
    head.headers.iter().all(|(name, _)| is_plain(name))
}

/// Returns the time on the clock that the eBPF programs read: `CLOCK_MONOTONIC`, in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Returns whether the response needs nothing of the connection that sends it.
pub(crate) fn is_plain(response: &Response) -> bool {
    !response.closes() && response.hop_limit().is_none()
}

#[cfg(test)]
mod tests {
    use super::{LEARNED_ENTRIES, ReportedRequest, RequestForm, RequestReports};
    use metadata_common::maps::MAX_SLOTS;
    use metadata_common::siphash::SipKey;

    #[test]
    fn marked_slots_are_taken_once_and_others_are_ignored() {
        let reports = RequestReports::new(SipKey([1, 2]));
        for slot in [0, 63, 64, MAX_SLOTS - 1, 64, MAX_SLOTS, u32::MAX] {
            reports.mark(slot);
        }
        assert!(reports.has_reports());
        assert_eq!(reports.marked(), [0, 63, 64, MAX_SLOTS - 1]);
        assert_eq!((reports.marked(), reports.has_reports()), (vec![], false));
    }

    #[test]
    fn requests_that_differ_in_a_mac_of_ec2s_tree_have_one_form() {
        let (key, macs) = (SipKey([1, 2]), ["52:54:00:00:00:01", "52:54:00:00:00:02"]);
        let request = |mac: &str| {
            format!("GET /latest/meta-data/network/interfaces/macs/{mac}/mac HTTP/1.1\r\nHost: a\r\n\r\n")
                .into_bytes()
        };
        let [first, second] = macs.map(|mac| RequestForm::of(&request(mac), None, &key).expect("a form"));
        assert!(first == second);
        assert_eq!(*first.request_of(macs[0].parse().expect("a MAC")), *request(macs[0]));
        for other in ["52:54:00:00:00:0g", "", "52:54:00:00:00:01 HTTP/1.1\r\nUser-Agent: /macs/x"] {
            let form = RequestForm::of(&request(other), None, &key).expect("a form");
            assert!(form != first, "{other}");
        }
    }

    #[test]
    fn forgetting_a_request_leaves_another_one_of_its_entry() {
        let reports = RequestReports::new(SipKey([1, 2]));
        let (first, second) = (5, 5 + LEARNED_ENTRIES as u64);
        for hash in [first, second] {
            let form =
                ReportedRequest::of(0, b"GET /a HTTP/1.1\r\n\r\n", &SipKey([1, 2])).expect("a form").form;
            reports.is_learned(&RequestForm { hash, ..RequestForm::clone(&form) });
        }
        reports.is_forgotten(first);
        assert_eq!(reports.entry(first).load(std::sync::atomic::Ordering::Relaxed), second);
    }
}
