use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use serde_json::{Map, Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{
    CACHED_PER_VM, Claims, CloudClaims, IdentityCounts, IssuedToken, Issuer, IssuerResponse, Nonce, Order,
    SIGNINGS_BURST, SigningRequest, TokenRefusal, VmIssuer, WAITING, WAITING_PER_VM,
};
use crate::record::identity::Audience;
use crate::record::{Owner, Record};

const NOW: u64 = 1_000_000;
const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
const MAC: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x57]);

fn full() -> Value {
    serde_yaml::from_str(include_str!("../../../../tests/vectors/record.yaml"))
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
    fn ask(self: &Arc<Self>, slot: Slot, audience: &Audience, now: Now, has_waited: bool) -> IssuerResponse {
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
    assert_eq!(ask(NOW - 60, true), IssuerResponse::Refused(TokenRefusal::Unavailable), "from the future");
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
    let waiting = (0..WAITING).filter(|_| ask(&node.vm_issuer(json!({}))) == IssuerResponse::Wait).count();
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
        let answer = node.vm_issuer(json!({"audiences": allowed})).ask(0, &audience(wanted), at(NOW), false);
        assert_eq!(answer == IssuerResponse::Refused(TokenRefusal::Audience), refused, "{allowed} {wanted}");
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
