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

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;
    use metadata_common::maps::Slot;
    use metadata_common::time::Now;
    use serde_json::{Map, Value, json};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::{
        CACHED_PER_VM, Claims, CloudClaims, IdentityCounts, IssuedToken, Issuer, IssuerResponse, Nonce,
        Order, SIGNINGS_BURST, SigningRequest, TokenRefusal, VmIssuer, WAITING, WAITING_PER_VM,
    };
    use crate::record::identity::Audience;
    use crate::record::{Owner, Record};

    const NOW: u64 = 1_000_000;
    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const MAC: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x57]);

    fn full() -> Value {
        serde_yaml::from_str(include_str!("../../../tests/vectors/record.yaml"))
            .expect("the full record is YAML")
    }

    fn parse(record: &Value) -> Record {
        Record::parse("test.json", &record.to_string()).expect("a good record").0
    }

    fn at(unix_seconds: u64) -> Now {
        Now { mono: Duration::ZERO, unix_seconds }
    }

    fn audience(text: &str) -> Audience {
        Audience::parse(text).expect("an audience")
    }

    impl VmIssuer {
        /// Asks for the token for an audience, with our own claims.
        fn ask(
            self: &Arc<Self>,
            slot: Slot,
            audience: &Audience,
            now: Now,
            has_waited: bool,
        ) -> IssuerResponse {
            self.ask_for(slot, &SigningRequest::token(audience), now, has_waited)
        }
    }

    fn token(text: &str, issued: u64) -> IssuedToken {
        IssuedToken { text: text.to_owned().into(), issued, expires: issued + 100 }
    }

    fn record(identity: Value) -> Record {
        let mut record = full();
        record["identity"] = identity;
        parse(&record)
    }

    /// An issuer whose orders stay in a list.
    struct Node {
        issuer: Issuer,
        orders: Arc<Mutex<Vec<Order>>>,
    }

    impl Node {
        fn new(trust_domain: Option<&str>) -> Self {
            let orders: Arc<Mutex<Vec<Order>>> = Arc::default();
            let list = Arc::clone(&orders);
            let issuer = Issuer::new(trust_domain, move |order| {
                list.lock().expect("sound").push(*order);
                true
            });
            Self { issuer, orders }
        }

        fn vm_issuer(&self, identity: Value) -> Arc<VmIssuer> {
            Arc::new(VmIssuer::new(&self.issuer, &record(identity)))
        }

        fn next(&self) -> Order {
            self.orders.lock().expect("sound").remove(0)
        }
    }

    #[test]
    fn a_subject_names_the_vms_place_on_its_platform_and_a_claim_its_owner() {
        let given = |text: &str| serde_json::from_value::<Owner>(text.into()).expect("an owner");
        for (owner, subject, path) in [
            (None, format!("vm:{UUID}"), format!("vm/{UUID}")),
            (Some(Owner::kubevirt("a", "test", "u1")), "kubevirt:a/test".into(), "kubevirt/a/test".into()),
            (Some(Owner::proxmox("pve", 100, "17")), "proxmox:pve/100".into(), "proxmox/pve/100".into()),
            (Some(given("kubevirt/a/test/u1")), "kubevirt:a/test".into(), "kubevirt/a/test".into()),
            (Some(given("acme/7")), "vm:acme/7".into(), "vm/acme/7".into()),
            (Some(given("a=b/..")), "vm:a%3Db/%2E%2E".into(), "vm/a%3Db/%2E%2E".into()),
        ] {
            let mut record = parse(&full());
            record.vm.owner = owner;
            for (domain, subject) in [(None, subject), (Some("d"), format!("spiffe://d/{path}"))] {
                let claims = Claims::of(&record, domain);
                assert_eq!(claims.subject(), subject);
                let claims = claims.for_audience("a", None);
                assert_eq!(
                    (&claims["sub"], &claims["vm"]["owner"]),
                    (&json!(subject), &json!(record.owner_text()))
                );
                assert_eq!(claims["vm"]["uuid"], json!(UUID));
            }
        }
    }

    #[test]
    fn claims_come_from_the_record_and_the_nic_that_asks() {
        let template = "ns/{namespace}/sa-{project}/{name}";
        for (domain, identity, subject) in [
            (None, json!({}), format!("vm:{UUID}")),
            (Some("example.org"), json!({}), format!("spiffe://example.org/vm/{UUID}")),
            (None, json!({"subject": template}), "ns/default/sa-p1/web-1".into()),
            (
                Some("example.org"),
                json!({"subject": template}),
                "spiffe://example.org/ns/default/sa-p1/web-1".into(),
            ),
        ] {
            let node = Node::new(domain);
            let vm_issuer = node.vm_issuer(identity);
            vm_issuer.set_nic(3, MAC);
            for (slot, nic) in [(3, json!({"id": "n1", "mac": "52:54:00:12:34:57"})), (4, json!(null))] {
                assert_eq!(vm_issuer.ask(slot, &audience("vault"), at(NOW), false), IssuerResponse::Wait);
                let order = node.next();
                let claims = Value::Object(order.claims());
                assert_eq!((&claims["sub"], &claims["aud"]), (&json!(subject), &json!("vault")));
                assert_eq!(
                    (&claims["vm"]["uuid"], &claims["vm"]["image"]),
                    (&json!(UUID), &json!("ami-00000001"))
                );
                assert_eq!((&claims["vm"]["nic"], order.slot()), (&nic, slot));
            }
        }
    }

    #[test]
    fn no_value_of_a_record_adds_a_segment_to_a_subject() {
        let mut odd = full();
        odd["identity"] = json!({"subject": "ns/{namespace}/{name}"});
        for (name, namespace, subject) in [
            ("a/../b", "prod", "ns/prod/a%2F..%2Fb"),
            ("..", "x", "ns/x/%2E%2E"),
            ("ä b", "{name}", "ns/%7Bname%7D/%C3%A4%20b"),
        ] {
            (odd["vm"]["name"], odd["vm"]["namespace"]) = (json!(name), json!(namespace));
            let node = Node::new(Some("d"));
            let vm_issuer = Arc::new(VmIssuer::new(&node.issuer, &parse(&odd)));
            assert_eq!(vm_issuer.ask(0, &audience("a"), at(NOW), false), IssuerResponse::Wait);
            assert_eq!(node.next().subject(), format!("spiffe://d/{subject}"));
        }
    }

    #[test]
    fn bad_templates_and_audiences_are_refused() {
        let mut lacks = full();
        lacks["vm"].as_object_mut().expect("a mapping").remove("namespace");
        lacks["identity"] = json!({"subject": "{namespace}"});
        let refused =
            |record: &Value| Record::parse("vm.json", &record.to_string()).expect_err("refused").to_string();
        assert!(
            refused(&lacks).contains("expected a value for `{namespace}`, found none"),
            "{}",
            refused(&lacks)
        );
        let mut dots = full();
        dots["identity"] = json!({"subject": "../x"});
        assert!(refused(&dots).contains("no segment that is empty, `.` or `..`"), "{}", refused(&dots));
        for (field, value) in [
            ("subject", json!("")),
            ("subject", json!("/a")),
            ("subject", json!("a//b")),
            ("subject", json!("a/../b")),
            ("subject", json!("{user}")),
            ("subject", json!("{uuid")),
            ("subject", json!("a b")),
            ("subject", json!("x".repeat(256))),
            ("audiences", json!([""])),
            ("audiences", json!(["a b"])),
            ("audiences", json!(["x".repeat(256)])),
            ("audiences", json!(vec!["a"; 33])),
            ("issuer", json!("https://elsewhere")),
        ] {
            let mut record = full();
            record["identity"] = json!({field: value});
            assert!(refused(&record).contains("identity"), "{field} {value}: {}", refused(&record));
        }
    }

    #[test]
    fn a_token_is_reused_until_half_of_its_lifetime_and_not_after_a_step_of_the_clock() {
        let node = Node::new(None);
        let vm_issuer = node.vm_issuer(json!({}));
        let ask = |now, has_waited| vm_issuer.ask(0, &audience("a"), at(now), has_waited);
        assert_eq!((ask(NOW, false), ask(NOW, false)), (IssuerResponse::Wait, IssuerResponse::Wait));
        let first = token("first", NOW);
        node.next().signed(first.clone());
        assert!(node.orders.lock().expect("sound").is_empty(), "two requests are one order");
        for now in [NOW, NOW - 1, NOW + 49] {
            assert_eq!(ask(now, true), IssuerResponse::Token(first.clone()), "{now}");
        }
        assert_eq!(ask(NOW + 50, false), IssuerResponse::Wait, "half of the lifetime is over");
        drop(node.next());
        assert_eq!(ask(NOW + 50, true), IssuerResponse::Token(first.clone()), "better than none");
        assert_eq!(ask(NOW + 100, true), IssuerResponse::Refused(TokenRefusal::Unavailable));
        assert_eq!(
            ask(NOW - 60, true),
            IssuerResponse::Refused(TokenRefusal::Unavailable),
            "from the future"
        );
        assert_eq!(ask(NOW + 100, false), IssuerResponse::Wait);
        node.next().signed(token("second", NOW + 100));
        assert_eq!(ask(NOW + 100, true), IssuerResponse::Token(token("second", NOW + 100)));
        let IdentityCounts { signed, reused, failed, waiting, .. } = node.issuer.counts();
        assert_eq!((signed, reused, failed, waiting), (2, 0, 1, 0));
    }

    #[test]
    fn no_token_of_a_revoked_key_is_reused() {
        let node = Node::new(None);
        let vm_issuer = node.vm_issuer(json!({}));
        let ask = || vm_issuer.ask(0, &audience("a"), at(NOW), false);
        assert_eq!(ask(), IssuerResponse::Wait);
        node.next().signed(token("old", NOW));
        assert_eq!(ask(), IssuerResponse::Token(token("old", NOW)));
        node.issuer.revoke();
        assert_eq!(ask(), IssuerResponse::Wait);
        node.next().signed(token("new", NOW));
        assert_eq!(ask(), IssuerResponse::Token(token("new", NOW)));
    }

    #[test]
    fn a_token_that_is_signed_after_a_revocation_reaches_the_request_that_waits() {
        let node = Node::new(None);
        let vm_issuer = node.vm_issuer(json!({}));
        assert_eq!(vm_issuer.ask(0, &audience("a"), at(NOW), false), IssuerResponse::Wait);
        node.issuer.revoke();
        node.next().signed(token("new", NOW));
        assert_eq!(vm_issuer.ask(0, &audience("a"), at(NOW), true), IssuerResponse::Token(token("new", NOW)));
    }

    #[test]
    fn each_limit_can_be_reached_and_not_exceeded() {
        let node = Node::new(None);
        let vm_issuer = node.vm_issuer(json!({}));
        let ask = |n: usize, now| vm_issuer.ask(0, &audience(&format!("a{n}")), at(now), false);
        (0..WAITING_PER_VM).for_each(|n| assert_eq!(ask(n, NOW), IssuerResponse::Wait));
        assert_eq!(ask(WAITING_PER_VM, NOW), IssuerResponse::Refused(TokenRefusal::TooMany));
        let sign = |now| {
            while let Some(order) = node.orders.lock().expect("sound").pop() {
                order.signed(token("t", now));
            }
        };
        sign(NOW);
        let burst = usize::try_from(SIGNINGS_BURST).expect("small");
        for n in WAITING_PER_VM..burst {
            assert_eq!(ask(n, NOW), IssuerResponse::Wait);
            sign(NOW);
        }
        assert_eq!(ask(burst, NOW), IssuerResponse::Refused(TokenRefusal::TooMany));
        assert!(matches!(ask(0, NOW), IssuerResponse::Token(_)), "a signed token stays available");
        assert_eq!(ask(burst, NOW + 1), IssuerResponse::Wait, "one more each second");
        sign(NOW + 1);
        assert_eq!(burst, CACHED_PER_VM);
        let kept = (0..=burst).filter(|n| matches!(ask(*n, NOW + 1), IssuerResponse::Token(_))).count();
        assert_eq!(kept, CACHED_PER_VM);
        assert_eq!(node.issuer.counts().limited, 3);
    }

    #[test]
    fn the_tokens_of_one_namespace_leave_places_for_those_of_another() {
        let node = Node::new(None);
        let ask = |vm_issuer: &Arc<VmIssuer>| vm_issuer.ask(0, &audience("a"), at(NOW), false);
        let waiting =
            (0..WAITING).filter(|_| ask(&node.vm_issuer(json!({}))) == IssuerResponse::Wait).count();
        assert_eq!(waiting, WAITING / 2);
        let mut record = full();
        record["identity"] = json!({});
        record["vm"]["namespace"] = "modest".into();
        assert_eq!(ask(&Arc::new(VmIssuer::new(&node.issuer, &parse(&record)))), IssuerResponse::Wait);
    }

    #[test]
    fn a_full_queue_of_the_node_refuses_and_recovers() {
        let node = Node::new(None);
        // Every VM is in its own namespace.
        let of_namespace = |n: usize| {
            let mut record = full();
            record["identity"] = json!({});
            record["vm"]["namespace"] = format!("n{n}").into();
            Arc::new(VmIssuer::new(&node.issuer, &parse(&record)))
        };
        let vm_issuers: Vec<_> = (0..=WAITING).map(of_namespace).collect();
        let ask = |vm_issuer: &Arc<VmIssuer>| vm_issuer.ask(0, &audience("a"), at(NOW), false);
        assert!(vm_issuers[..WAITING].iter().all(|vm_issuer| ask(vm_issuer) == IssuerResponse::Wait));
        assert_eq!(ask(&vm_issuers[WAITING]), IssuerResponse::Refused(TokenRefusal::Unavailable));
        node.orders.lock().expect("sound").clear();
        assert_eq!((ask(&vm_issuers[WAITING]), node.issuer.counts().crowded), (IssuerResponse::Wait, 1));
        let closed = Issuer::new(None, |_| false);
        let vm_issuer = Arc::new(VmIssuer::new(&closed, &record(json!({}))));
        assert_eq!(ask(&vm_issuer), IssuerResponse::Refused(TokenRefusal::Unavailable), "there is no signer");
        assert_eq!((closed.counts().failed, closed.counts().waiting), (1, 0));
    }

    #[test]
    fn a_record_limits_the_audiences() {
        for (allowed, wanted, refused) in [
            (json!(null), "a", false),
            (json!(["a", "b"]), "b", false),
            (json!(["a"]), "b", true),
            (json!([]), "a", true),
        ] {
            let node = Node::new(None);
            let answer =
                node.vm_issuer(json!({"audiences": allowed})).ask(0, &audience(wanted), at(NOW), false);
            assert_eq!(
                answer == IssuerResponse::Refused(TokenRefusal::Audience),
                refused,
                "{allowed} {wanted}"
            );
        }
    }

    #[test]
    fn debug_output_shows_no_token() {
        let node = Node::new(None);
        let vm_issuer = node.vm_issuer(json!({}));
        assert_eq!(vm_issuer.ask(0, &audience("a"), at(NOW), false), IssuerResponse::Wait);
        let order = node.next();
        assert!(!format!("{order:?}").is_empty());
        order.signed(token("CANARY", NOW));
        let answer = vm_issuer.ask(0, &audience("a"), at(NOW), false);
        for text in [format!("{vm_issuer:?}"), format!("{answer:?}"), format!("{:?}", node.issuer)] {
            assert!(!text.contains("CANARY") && !text.contains("67, 65"), "{text}");
        }
    }

    fn request(audience: &str, form: Option<&'static str>) -> SigningRequest {
        let form = form.map(|name| Arc::new(CloudClaims { name, claims: Map::new() }));
        SigningRequest::Token { audience: Audience::parse(audience).expect("an audience"), form }
    }

    fn attested(nonce: Option<&str>) -> SigningRequest {
        SigningRequest::Attested { statement: Arc::default(), nonce: nonce.and_then(Nonce::parse) }
    }

    #[test]
    fn one_answer_serves_only_what_is_the_same() {
        let all = [
            request("a", None),
            request("b", None),
            request("a", Some("google")),
            request("a", Some("google_full")),
            SigningRequest::Signature("{}".into()),
            SigningRequest::Envelope("{}".into()),
            SigningRequest::Detached { document: "{}".into(), audience: None },
            attested(None),
            attested(Some("1")),
            attested(Some("2")),
        ];
        for (n, one) in all.iter().enumerate() {
            for (m, other) in all.iter().enumerate() {
                assert_eq!(one.is_same(other), n == m, "{n} {m}");
            }
            assert_eq!(one.audience().is_some(), n < 4, "{n}");
        }
    }

    #[test]
    fn a_nonce_is_short_and_plain() {
        let longest = "0".repeat(Nonce::BYTES);
        for good in ["1234567890", "a-B_9", &longest] {
            assert_eq!(Nonce::parse(good).expect(good).as_str(), good);
        }
        for bad in ["", " ", "a b", "\"", "ä", "a/b", &format!("{longest}0")] {
            assert_eq!(Nonce::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn debug_output_shows_no_document() {
        let statement = Arc::new(json!({"vmId": "CANARY"}).as_object().expect("an object").clone());
        for wanted in [
            SigningRequest::Signature("{\"CANARY\":1}".into()),
            SigningRequest::Attested { statement, nonce: Nonce::parse("CANARY") },
        ] {
            assert!(!format!("{wanted:?}").contains("CANARY"));
        }
    }
}
