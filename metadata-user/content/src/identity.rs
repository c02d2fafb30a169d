//! Identity tokens: who a VM is, in a form that others can verify.
//!
//! A token's claims come from the VM's record and from the NIC that asks, never from what the guest wrote. The guest
//! chooses the audience only. The keys are in another process, so a signature takes a while: the VM's [`VmIssuer`]
//! hands an [`Order`] over without waiting, and the request is parked until the token is there. The agent's module
//! `identity` passes orders on.
//!
//! Guests may also ask in the words of a cloud: for a token with that cloud's claims ([`CloudClaims`]), and, on a node
//! with an operator's certificate, for the cloud's signed documents ([`SigningRequest`]).

mod vm_issuer;

#[cfg(test)]
mod tests;

pub use vm_issuer::{
    CACHED_PER_VM, IssuedToken, IssuerResponse, Order, SIGNINGS_BURST, SIGNINGS_PER_SECOND, TokenRefusal,
    VmIssuer, WAITING_PER_VM,
};

use bytes::Bytes;
use metadata_common::mac::Mac;
use metadata_common::share::{FairShare, Tenant};
use serde_json::{Map, Value};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::record::Record;
use crate::record::identity::{Audience, escape_parts};

/// Maximum number of tokens of all VMs that wait for their signature. A namespace has at most half of what others
/// leave.
pub const WAITING: usize = 256;

/// Tokens that each namespace may have waiting while [`WAITING`] is not reached.
const WAITING_FLOOR: usize = WAITING_PER_VM;

/// Counts of tokens since the start of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdentityCounts {
    /// Tokens that were signed.
    pub signed: u64,
    /// Requests that got a token that was signed before.
    pub reused: u64,
    /// Requests beyond the limit of their VM.
    pub limited: u64,
    /// Requests beyond [`WAITING`].
    pub crowded: u64,
    /// Tokens that the signer refused or did not deliver.
    pub failed: u64,
    /// Tokens that wait for their signature now.
    pub waiting: u64,
}

#[derive(Debug, Default)]
struct Counters {
    signed: AtomicU64,
    reused: AtomicU64,
    limited: AtomicU64,
    crowded: AtomicU64,
    failed: AtomicU64,
    waiting: WaitingShares,
}

/// How tenants share the tokens that wait.
#[derive(Debug)]
struct WaitingShares(Mutex<FairShare>);

impl Default for WaitingShares {
    fn default() -> Self {
        Self(Mutex::new(FairShare::new(WAITING, WAITING_FLOOR)))
    }
}

impl WaitingShares {
    fn share(&self) -> MutexGuard<'_, FairShare> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

type HandOver = dyn Fn(Box<Order>) -> bool + Send + Sync;

struct Shared {
    trust_domain: Option<Box<str>>,
    signs_documents: AtomicBool,
    hand_over: Box<HandOver>,
    counters: Counters,
    /// Number of [`VmIssuer`]s that were created.
    vm_issuers: AtomicU64,
    /// Number of times that tokens were revoked.
    revocations: AtomicU64,
}

/// Hands orders over for signature. Clones share one queue.
#[derive(Clone)]
pub struct Issuer(Arc<Shared>);

impl fmt::Debug for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issuer").field("counters", &self.0.counters).finish_non_exhaustive()
    }
}

impl Issuer {
    /// Creates an issuer that calls `hand_over` with each order. At most [`WAITING`] orders, [`WAITING_PER_VM`] of one
    /// VM, exist at once. `hand_over` must not wait; if it returns false, the order has failed.
    #[must_use]
    pub fn new(
        trust_domain: Option<&str>,
        hand_over: impl Fn(Box<Order>) -> bool + Send + Sync + 'static,
    ) -> Self {
        let (trust_domain, hand_over) = (trust_domain.map(Into::into), Box::new(hand_over));
        let signs_documents = AtomicBool::new(false);
        let counters = Counters::default();
        let vm_issuers = AtomicU64::new(0);
        let revocations = AtomicU64::new(0);
        Self(Arc::new(Shared { trust_domain, signs_documents, hand_over, counters, vm_issuers, revocations }))
    }

    /// Sets whether the signer has a certificate. Issuers of VMs that are created later then sign the documents of
    /// clouds.
    pub fn set_signs_documents(&self, signs: bool) {
        self.0.signs_documents.store(signs, Ordering::Relaxed);
    }

    /// Makes every VM's issuer forget the tokens that were signed before, because a key is no longer published.
    pub fn revoke(&self) {
        self.0.revocations.fetch_add(1, Ordering::Relaxed);
    }

    fn revocations(&self) -> u64 {
        self.0.revocations.load(Ordering::Relaxed)
    }

    /// Returns the counts.
    #[must_use]
    pub fn counts(&self) -> IdentityCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.0.counters;
        IdentityCounts {
            signed: of(&counters.signed),
            reused: of(&counters.reused),
            limited: of(&counters.limited),
            crowded: of(&counters.crowded),
            failed: of(&counters.failed),
            waiting: counters.waiting.share().used() as u64,
        }
    }

    fn signs_documents(&self) -> bool {
        self.0.signs_documents.load(Ordering::Relaxed)
    }

    fn next_number(&self) -> u64 {
        self.0.vm_issuers.fetch_add(1, Ordering::Relaxed)
    }

    fn trust_domain(&self) -> Option<&str> {
        self.0.trust_domain.as_deref()
    }
}

/// Permission for one of the [`WAITING`] orders. Dropping it lets another order in.
struct Permit(Issuer, Tenant);

impl Permit {
    fn take(issuer: &Issuer, tenant: &Tenant) -> Option<Self> {
        issuer.0.counters.waiting.share().admit(tenant, 1).ok()?;
        Some(Self(issuer.clone(), tenant.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.0.counters.waiting.share().release(&self.1, 1);
    }
}

// Claims of a VM, from its record.

/// What the tokens of one VM say, besides audience and times.
#[derive(Debug)]
struct Claims {
    subject: Box<str>,
    /// The claim `vm` without the NIC.
    vm: Map<String, Value>,
    nics: Box<[(Mac, Box<str>)]>,
}

impl Claims {
    fn of(record: &Record, trust_domain: Option<&str>) -> Self {
        let vm = &record.vm;
        let image = record.image.as_ref().map(|image| image.id.as_str());
        let host = record.placement.host.as_ref().map(|host| host.as_str());
        let namespace = Some(record.namespace()).filter(|namespace| !namespace.is_empty());
        let members = [
            ("owner", Some(record.owner_text())),
            ("uuid", Some(vm.uuid.as_str())),
            ("name", Some(vm.name.as_str())),
            ("namespace", namespace),
            ("project", Some(vm.project.id.as_str())),
            ("image", image),
            ("node", host),
            ("region", Some(record.placement.region.as_str())),
            ("zone", Some(record.placement.zone.as_str())),
        ];
        let members = members.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into())));
        let nics = record.network.nics.iter();
        Self {
            subject: subject(record, trust_domain).into(),
            vm: members.collect(),
            nics: nics.filter_map(|nic| Some((nic.mac?.0, nic.id.as_str().into()))).collect(),
        }
    }

    fn subject(&self) -> &str {
        &self.subject
    }

    /// Returns the claims of a token for an audience, in the form of a cloud.
    fn in_form(&self, audience: &str, form: &CloudClaims) -> Map<String, Value> {
        let mut claims = form.claims.clone();
        claims.insert("aud".to_owned(), audience.into());
        claims.insert("sub".to_owned(), (&*self.subject).into());
        claims
    }

    /// Returns the claims of a token for an audience, which the NIC with this MAC asks for.
    fn for_audience(&self, audience: &str, mac: Option<Mac>) -> Map<String, Value> {
        let mut vm = self.vm.clone();
        if let Some(mac) = mac {
            let mut nic = Map::new();
            nic.insert("mac".into(), mac.to_string().into());
            if let Some((_, id)) = self.nics.iter().find(|(known, _)| *known == mac) {
                nic.insert("id".into(), (&**id).into());
            }
            vm.insert("nic".into(), nic.into());
        }
        let claims = [("aud", audience.into()), ("sub", (&*self.subject).into()), ("vm", vm.into())];
        claims.into_iter().map(|(name, value): (&str, Value)| (name.to_owned(), value)).collect()
    }
}

/// Returns the subject: a SPIFFE ID with a trust domain. By default it names the VM's place on its platform, which the
/// platform assigned; the claim `vm.owner` also tells the VM from an earlier one in that place.
fn subject(record: &Record, trust_domain: Option<&str>) -> String {
    let template = record.identity.as_ref().and_then(|identity| identity.subject.as_ref());
    // The parser refuses a record that lacks a value of its template.
    let given = template.and_then(|template| template.fill(record).ok());
    let owner = record.owner();
    let (kind, text) = owner.place();
    let mut place = String::new();
    escape_parts(text, &mut place);
    match (trust_domain, given) {
        (Some(domain), Some(path)) => format!("spiffe://{domain}/{path}"),
        (Some(domain), None) => format!("spiffe://{domain}/{kind}/{place}"),
        (None, Some(given)) => given,
        (None, None) => format!("{kind}:{place}"),
    }
}

// What a guest may ask for, and what the signer gets.

/// Claims in the words of a cloud. They come from the record, and replace the claim `vm` of our own tokens.
///
/// [`VmIssuer`] adds `aud` and `sub`: a VM has one subject in every form, so that a verifier's rule on
/// it holds for each.
#[derive(Debug, PartialEq)]
pub struct CloudClaims {
    /// Name of the form. Two forms of one VM have different names.
    pub name: &'static str,
    /// The claims.
    pub claims: Map<String, Value>,
}

/// A guest's own part of a statement, which makes an old statement useless to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nonce(Box<str>);

impl Nonce {
    /// Maximum length, in bytes. Azure documents ten digits.
    pub const BYTES: usize = 32;

    /// Parses a nonce: letters, digits, `-` and `_`. `None` if the text has another form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let fits = (1..=Self::BYTES).contains(&text.len());
        (fits && text.bytes().all(is_good)).then(|| Self(text.into()))
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a guest wants to be signed.
#[derive(Clone)]
pub enum SigningRequest {
    /// A token for an audience, with our own claims or those of a cloud.
    Token {
        /// The audience.
        audience: Audience,
        /// The cloud's claims.
        form: Option<Arc<CloudClaims>>,
    },
    /// The signature of a document, without the document.
    Signature(Bytes),
    /// A document within its signature (PKCS#7).
    Envelope(Bytes),
    /// The same form without the document, which may state an audience.
    Detached {
        /// The document.
        document: Bytes,
        /// Its audience.
        audience: Option<Audience>,
    },
    /// A statement within its signature (PKCS#7). The signer dates it.
    Attested {
        /// Members of the statement, without nonce and times.
        statement: Arc<Map<String, Value>>,
        /// The guest's nonce.
        nonce: Option<Nonce>,
    },
}

impl fmt::Debug for SigningRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wanted").field(&self.kind()).finish()
    }
}

impl SigningRequest {
    /// Returns a token with our own claims.
    #[must_use]
    pub fn token(audience: &Audience) -> Self {
        Self::Token { audience: audience.clone(), form: None }
    }

    /// Returns the audience; `None` for a document, which is for everybody.
    #[must_use]
    pub fn audience(&self) -> Option<&Audience> {
        match self {
            Self::Token { audience, .. } => Some(audience),
            Self::Detached { audience, .. } => audience.as_ref(),
            Self::Signature(_) | Self::Envelope(_) | Self::Attested { .. } => None,
        }
    }

    /// Returns the name of what is wanted, for reports.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Token { form: None, .. } => "token",
            Self::Token { form: Some(form), .. } => form.name,
            Self::Signature(_) => "signature",
            Self::Envelope(_) => "pkcs7",
            Self::Detached { .. } => "pkcs7_detached",
            Self::Attested { .. } => "attested",
        }
    }

    /// Returns whether one answer serves both requests of a VM. Documents and forms belong to its record.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Attested { nonce, .. }, Self::Attested { nonce: other, .. }) => nonce == other,
            _ => self.kind() == other.kind() && self.audience() == other.audience(),
        }
    }
}

/// What the signer gets. The agent passes each on as the signer's operation of this name.
#[derive(Debug, PartialEq)]
pub enum SigningJob {
    /// Claims of a JWT, without those of the signer.
    Jwt(Map<String, Value>),
    /// A JSON object whose bytes are signed.
    Signature(String),
    /// A JSON object whose bytes are signed, and kept within the signature.
    Envelope(String),
    /// A JSON object whose bytes are signed in the same form, but not kept.
    Detached(String),
    /// Members of a statement, without the signer's times.
    Attested(Map<String, Value>),
}
