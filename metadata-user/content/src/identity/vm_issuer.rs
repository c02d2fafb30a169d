//! Issues the tokens of one VM: knows its claims, keeps its tokens for reuse, and limits how many it may ask for.

use bytes::Bytes;
use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::share::Tenant;
use metadata_common::time::Now;
use serde_json::{Map, Value};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Claims, Issuer, Permit, SigningJob, SigningRequest, count};
use crate::record::identity::Audience;
use crate::record::{Owner, Record};
use crate::upstream::SlotNics;

/// Maximum number of tokens of one VM that are kept for reuse. Each is at most a few KiB.
pub const CACHED_PER_VM: usize = 16;
/// Maximum number of tokens of one VM that wait for their signature.
pub const WAITING_PER_VM: usize = 4;
/// Tokens that one VM may have signed at once.
pub const SIGNINGS_BURST: u64 = 16;
/// Tokens that one VM may have signed per second, sustained.
pub const SIGNINGS_PER_SECOND: u64 = 1;
/// How far a token's time may be ahead of the worker's clock, which is read about once a second, in seconds.
const CLOCK_SLACK: u64 = 5;

/// A signed token.
#[derive(Clone, PartialEq, Eq)]
pub struct IssuedToken {
    /// The token.
    pub text: Bytes,
    /// Time of the signature, in Unix seconds.
    pub issued: u64,
    /// End of its validity, in Unix seconds.
    pub expires: u64,
}

impl fmt::Debug for IssuedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires", &self.expires).finish_non_exhaustive()
    }
}

impl IssuedToken {
    /// Returns whether the token is valid. If it seems to be issued in the future, the clock has been set back.
    fn is_valid(&self, now_unix: u64) -> bool {
        self.issued <= now_unix.saturating_add(CLOCK_SLACK) && now_unix < self.expires
    }

    /// Returns whether half of its lifetime is left.
    fn is_fresh(&self, now_unix: u64) -> bool {
        let half = self.expires.saturating_sub(self.issued) / 2;
        self.is_valid(now_unix) && now_unix < self.issued.saturating_add(half)
    }
}

/// Why a request gets no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenRefusal {
    /// The record does not allow the audience.
    Audience,
    /// The VM asks too often.
    TooMany,
    /// Too many VMs ask, or the signer does not sign.
    Unavailable,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IssuerResponse {
    /// The token.
    Token(IssuedToken),
    /// The token is being signed.
    Wait,
    /// There is no token.
    Refused(TokenRefusal),
}

/// What one NIC wanted to be signed.
#[derive(Debug)]
struct Entry {
    wanted: SigningRequest,
    mac: Option<Mac>,
    waits: bool,
    token: Option<IssuedToken>,
    /// [`Issuer::revocations`] when `token` was stored.
    revocations: u64,
}

impl Entry {
    fn is_for(&self, wanted: &SigningRequest, mac: Option<Mac>) -> bool {
        self.mac == mac && self.wanted.is_same(wanted)
    }

    fn valid(&self, now_unix: u64) -> Option<&IssuedToken> {
        self.token.as_ref().filter(|token| token.is_valid(now_unix))
    }
}

/// The tokens of one VM that are kept or being signed, and how many more may be signed now.
#[derive(Debug)]
struct TokenCache {
    entries: Vec<Entry>,
    /// Signings that are left, and when that was counted. Workers share no monotonic clock, so this is Unix time.
    left: u64,
    counted_unix: u64,
}

impl TokenCache {
    fn take(&mut self, now_unix: u64) -> bool {
        let gained = now_unix.saturating_sub(self.counted_unix).saturating_mul(SIGNINGS_PER_SECOND);
        self.left = self.left.saturating_add(gained).min(SIGNINGS_BURST);
        self.counted_unix = now_unix;
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }

    fn waiting(&self) -> usize {
        self.entries.iter().filter(|entry| entry.waits).count()
    }

    fn find(&mut self, wanted: &SigningRequest, mac: Option<Mac>) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.is_for(wanted, mac))
    }

    /// Marks a token as ordered. A full cache forgets the token that expires first.
    fn order(&mut self, wanted: &SigningRequest, mac: Option<Mac>) {
        if let Some(entry) = self.find(wanted, mac) {
            entry.waits = true;
            return;
        }
        if self.entries.len() == CACHED_PER_VM {
            let idle = self.entries.iter().enumerate().filter(|(_, entry)| !entry.waits);
            let first = idle.min_by_key(|(_, entry)| entry.token.as_ref().map_or(0, |token| token.expires));
            if let Some((at, _)) = first {
                self.entries.swap_remove(at);
            }
        }
        self.entries.push(Entry { wanted: wanted.clone(), mac, waits: true, token: None, revocations: 0 });
    }
}

/// Issues the tokens of one VM. It belongs to one version of the VM's record, so a changed record has no old tokens.
pub struct VmIssuer {
    issuer: Issuer,
    number: u64,
    owner: Owner,
    /// Whose share of the tokens that wait its tokens use.
    tenant: Tenant,
    name: Box<str>,
    claims: Claims,
    audiences: Option<Box<[Audience]>>,
    signs_documents: bool,
    hop_limit: u8,
    nics: SlotNics,
    cache: Mutex<TokenCache>,
}

impl fmt::Debug for VmIssuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmIssuer").field("subject", &self.claims.subject()).finish_non_exhaustive()
    }
}

/// Locks the mutex, ignoring poison: every change below is complete or has not started.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VmIssuer {
    /// Creates the issuer for a record.
    #[must_use]
    pub fn new(issuer: &Issuer, record: &Record) -> Self {
        let audiences = record.identity.as_ref().and_then(|identity| identity.audiences.clone());
        // A record without audiences allows no tokens, so it allows no document that is for everybody.
        let allows_none = audiences.as_ref().is_some_and(Vec::is_empty);
        Self {
            signs_documents: issuer.signs_documents() && !allows_none,
            issuer: issuer.clone(),
            number: issuer.next_number(),
            owner: record.owner(),
            tenant: record.tenant(),
            name: record.vm.name.as_str().into(),
            claims: Claims::of(record, issuer.trust_domain()),
            audiences: audiences.map(Into::into),
            hop_limit: record.serve.hop_limit.get(),
            nics: SlotNics::default(),
            cache: Mutex::new(TokenCache { entries: Vec::new(), left: SIGNINGS_BURST, counted_unix: 0 }),
        }
    }

    /// Sets which NIC has a slot.
    pub fn set_nic(&self, slot: Slot, mac: Mac) {
        self.nics.set(slot, mac);
    }

    /// Returns a number that no other `VmIssuer` of the node has. After a change of the record, waiting
    /// requests see another number and are ordered again.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the TTL or hop limit of packets that carry a token.
    #[must_use]
    pub fn hop_limit(&self) -> u8 {
        self.hop_limit
    }

    /// Returns the subject of the VM's tokens.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.claims.subject()
    }

    /// Returns whether the VM gets signed documents.
    #[must_use]
    pub fn signs_documents(&self) -> bool {
        self.signs_documents
    }

    fn allows(&self, wanted: &SigningRequest) -> bool {
        match wanted.audience() {
            Some(audience) => self.audiences.as_ref().is_none_or(|allowed| allowed.contains(audience)),
            None => self.signs_documents,
        }
    }

    /// Returns what is wanted, or has it signed. `has_waited` is true for a request that got [`IssuerResponse::Wait`]
    /// before: it does not order a second time.
    #[must_use]
    pub fn ask_for(
        self: &Arc<Self>,
        slot: Slot,
        wanted: &SigningRequest,
        now: Now,
        has_waited: bool,
    ) -> IssuerResponse {
        if !self.allows(wanted) {
            return IssuerResponse::Refused(TokenRefusal::Audience);
        }
        let now_unix = now.unix_seconds;
        let mac = self.nics.mac(slot);
        let counters = &self.issuer.0.counters;
        let mut cache = locked(&self.cache);
        let revocations = self.issuer.revocations();
        let mut known = cache.find(wanted, mac);
        if let Some(entry) = known.as_mut().filter(|entry| entry.revocations != revocations) {
            entry.token = None;
        }
        if let Some(token) = known.as_ref().and_then(|entry| entry.token.as_ref())
            && token.is_fresh(now_unix)
        {
            if !has_waited {
                count(&counters.reused);
            }
            return IssuerResponse::Token(token.clone());
        }
        if known.as_ref().is_some_and(|entry| entry.waits) {
            return IssuerResponse::Wait;
        }
        // A token in the second half of its lifetime is better than none.
        let older = known.and_then(|entry| entry.valid(now_unix).cloned());
        let refused = |why| older.clone().map_or(IssuerResponse::Refused(why), IssuerResponse::Token);
        if has_waited {
            return refused(TokenRefusal::Unavailable);
        }
        if cache.waiting() >= WAITING_PER_VM || !cache.take(now_unix) {
            count(&counters.limited);
            return refused(TokenRefusal::TooMany);
        }
        let Some(permit) = Permit::take(&self.issuer, &self.tenant) else {
            count(&counters.crowded);
            return refused(TokenRefusal::Unavailable);
        };
        cache.order(wanted, mac);
        // An order that is dropped locks the cache.
        drop(cache);
        let vm_issuer = Arc::clone(self);
        let order = Order::new(vm_issuer, wanted.clone(), mac, slot, permit);
        if (self.issuer.0.hand_over)(Box::new(order)) {
            IssuerResponse::Wait
        } else {
            refused(TokenRefusal::Unavailable)
        }
    }
}

// What the signer is to sign for a VM.

/// A token to be signed.
pub struct Order {
    vm_issuer: Arc<VmIssuer>,
    wanted: SigningRequest,
    mac: Option<Mac>,
    slot: Slot,
    is_signed: bool,
    /// Held until the token is signed or lost.
    _permit: Permit,
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Order")
            .field("vm_issuer", &self.vm_issuer)
            .field("wanted", &self.wanted)
            .finish_non_exhaustive()
    }
}

impl Order {
    fn new(
        vm_issuer: Arc<VmIssuer>,
        wanted: SigningRequest,
        mac: Option<Mac>,
        slot: Slot,
        permit: Permit,
    ) -> Self {
        Self { vm_issuer, wanted, mac, slot, is_signed: false, _permit: permit }
    }

    /// Returns the slot whose request waits.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Returns the VM's owner and name.
    #[must_use]
    pub fn vm(&self) -> (&str, &str) {
        (self.vm_issuer.owner.as_str(), &self.vm_issuer.name)
    }

    /// Returns the MAC of the NIC that asks, if it is known.
    #[must_use]
    pub fn mac(&self) -> Option<Mac> {
        self.mac
    }

    /// Returns the subject.
    #[must_use]
    pub fn subject(&self) -> &str {
        self.vm_issuer.claims.subject()
    }

    /// Returns the audience; `None` for a document, which is for everybody.
    #[must_use]
    pub fn audience(&self) -> Option<&str> {
        self.wanted.audience().map(Audience::as_str)
    }

    /// Returns the name of what is ordered, for reports.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.wanted.kind()
    }

    /// Returns the claims of a token, without those of the signer. A document has none.
    #[must_use]
    pub fn claims(&self) -> Map<String, Value> {
        match &self.wanted {
            SigningRequest::Token { audience, form: Some(form) } => {
                self.vm_issuer.claims.in_form(audience.as_str(), form)
            }
            SigningRequest::Token { audience, form: None } => {
                self.vm_issuer.claims.for_audience(audience.as_str(), self.mac)
            }
            SigningRequest::Signature(_)
            | SigningRequest::Envelope(_)
            | SigningRequest::Detached { .. }
            | SigningRequest::Attested { .. } => Map::new(),
        }
    }

    /// Returns what to sign.
    #[must_use]
    pub fn work(&self) -> SigningJob {
        let text = |document: &Bytes| String::from_utf8_lossy(document).into_owned();
        match &self.wanted {
            SigningRequest::Token { .. } => SigningJob::Jwt(self.claims()),
            SigningRequest::Signature(document) => SigningJob::Signature(text(document)),
            SigningRequest::Envelope(document) => SigningJob::Envelope(text(document)),
            SigningRequest::Detached { document, .. } => SigningJob::Detached(text(document)),
            SigningRequest::Attested { statement, nonce } => {
                let mut statement = (**statement).clone();
                if let Some(nonce) = nonce {
                    statement.insert("nonce".to_owned(), nonce.as_str().into());
                }
                SigningJob::Attested(statement)
            }
        }
    }

    /// Stores the token. An order that is dropped without it has failed.
    pub fn signed(mut self, token: IssuedToken) {
        count(&self.vm_issuer.issuer.0.counters.signed);
        self.is_signed = true;
        self.end(Some(token));
    }

    fn end(&self, token: Option<IssuedToken>) {
        if let Some(entry) = locked(&self.vm_issuer.cache).find(&self.wanted, self.mac) {
            entry.waits = false;
            if let Some(token) = token {
                // The signer tells of a removed key before it signs by another one.
                (entry.token, entry.revocations) = (Some(token), self.vm_issuer.issuer.revocations());
            }
        }
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        if !self.is_signed {
            count(&self.vm_issuer.issuer.0.counters.failed);
            self.end(None);
        }
    }
}
