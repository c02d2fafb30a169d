use metadata_common::time::Now;
use serde_json::{Value, json};
use std::time::Duration;

use super::tree::HASHED;
use crate::dialect::render;
use crate::dialect::tests::{DialectGuest, TestRequest, full, issued, parse, text};
use crate::http::{Method, RequestTarget, Response};
use crate::identity::SigningJob;
use crate::mailbox::WAITS_PER_VM;
use crate::store::{Interner, LiveOutcome, ParkedCall, Responses, VmState};

const FLAVOUR: (&str, &str) = ("Metadata-Flavor", "Google");
const ROOT: &str = "/computeMetadata/v1";

/// A guest of one VM.
struct Guest {
    responses: Responses,
    interner: Interner,
    vm: VmState,
}

impl Guest {
    fn of(record: &Value) -> Self {
        let record = parse(record);
        let vm = VmState::alone(record.vm.uuid.as_str());
        let mut interner = Interner::new();
        Self { responses: render(&record, &mut interner, vm.clone()), interner, vm }
    }

    /// Publishes another record of the VM.
    fn publish(&mut self, record: &Value) {
        self.responses = render(&parse(record), &mut self.interner, self.vm.clone());
    }

    fn ask_with(&self, fields: &[(&str, &str)], method: Method, target: &str, body: &[u8]) -> Response {
        match self.outcome(fields, method, target, body) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
            LiveOutcome::Park(_) => panic!("{target} waits"),
        }
    }

    fn outcome(&self, fields: &[(&str, &str)], method: Method, target: &str, body: &[u8]) -> LiveOutcome {
        let request = TestRequest::new(method, "/", fields);
        TestRequest { target: split(target), body, ..request }.send(&self.responses)
    }

    /// Sends a GET as clients of the cloud do.
    fn get(&self, below: &str) -> Response {
        self.ask_with(&[FLAVOUR], Method::Get, &format!("{ROOT}{below}"), b"")
    }

    fn text(&self, below: &str) -> String {
        let response = self.get(below);
        assert_eq!(response.status().0, 200, "{below}");
        String::from_utf8(response.body().to_bytes().to_vec()).expect("text")
    }

    fn json(&self, below: &str) -> Value {
        let response = self.get(below);
        assert_eq!(response.field("Content-Type"), Some("application/json"), "{below}");
        serde_json::from_slice(&response.body().to_bytes()).expect("JSON")
    }

    /// Sends a GET at a second, or repeats one that was parked.
    fn wait(&self, at: u64, below: &str, parked: Option<&ParkedCall>) -> LiveOutcome {
        let now = Now { mono: Duration::from_secs(at), unix_seconds: at };
        let target = format!("{ROOT}{below}");
        let request = TestRequest::new(Method::Get, "/", &[FLAVOUR]);
        TestRequest { now, target: split(&target), parked, ..request }.send(&self.responses)
    }
}

fn split(target: &str) -> RequestTarget<'_> {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    RequestTarget { path: if path == "/" { path } else { path.trim_end_matches('/') }, query }
}

fn parked(outcome: LiveOutcome) -> ParkedCall {
    match outcome {
        LiveOutcome::Park(parked) => parked,
        other => panic!("answered at once: {other:?}"),
    }
}

fn answered(outcome: LiveOutcome) -> Response {
    match outcome {
        LiveOutcome::Ready(response) => response,
        other => panic!("not answered: {other:?}"),
    }
}

#[test]
fn every_answer_has_the_flavour() {
    let guest = Guest::of(&full());
    let other = ("X-Forwarded-For", "");
    let legacy = ("x-google-metadata-request", "True");
    let no_value = ("Metadata-Flavor", "Microsoft");
    for (fields, method, target, status) in [
        (&[FLAVOUR][..], Method::Get, "/computeMetadata", 200),
        (&[legacy], Method::Get, "/computeMetadata/v1/instance/id", 200),
        (&[], Method::Get, "/computeMetadata/v1", 403),
        (&[no_value], Method::Get, "/computeMetadata/v1", 403),
        (&[FLAVOUR, other], Method::Get, "/computeMetadata/v1", 403),
        (&[FLAVOUR], Method::Get, "/computeMetadata/v2", 404),
        (&[FLAVOUR], Method::Get, "/computeMetadata/v1/instance/id/more", 404),
        (&[FLAVOUR], Method::Get, "/computeMetadata/v1/instance/machineType", 404),
        (&[FLAVOUR], Method::Put, "/computeMetadata/v1/instance/id", 405),
        (&[FLAVOUR], Method::Put, "/computeMetadata/v1/instance/guest-attributes/ns", 405),
        (&[FLAVOUR], Method::Post, "/computeMetadata/v1/instance/guest-attributes/ns/key", 405),
        (&[FLAVOUR], Method::Other, "/computeMetadata/v1", 405),
        (&[FLAVOUR], Method::Delete, "/computeMetadata/v1/instance/guest-attributes/ns/key", 404),
    ] {
        let answer = guest.ask_with(fields, method, target, b"");
        assert_eq!(answer.status().0, status, "{method:?} {target}");
        assert_eq!(answer.field("Metadata-Flavor"), Some("Google"), "{method:?} {target}");
        assert_eq!(answer.field("Server"), Some("Metadata Server for VM"), "{method:?} {target}");
        assert_eq!(answer.field("Allow").is_some(), status == 405, "{method:?} {target}");
    }
}

#[test]
fn values_have_the_requested_form() {
    let mut record = full();
    record["metadata"] = json!({ "camelCase": "a", "with-hyphen": "b" });
    record["labels"] = json!(["web", "db"]);
    let guest = Guest::of(&record);
    for (below, body) in [
        ("/", "instance/\noslogin/\nproject/\n"),
        ("/instance/tags", r#"["web","db"]"#),
        ("/instance/tags?alt=text", "web\ndb\n"),
        ("/instance/tags?recursive=true&alt=text", "web\ndb\n"),
        ("/instance/tags/?alt=json", r#"["web","db"]"#),
        ("/instance/tags?recursive=TRUE", r#"["web","db"]"#),
        ("/instance/remaining-cpu-time?alt=json", "-1"),
        ("/instance/id?alt=TEXT", "12345"),
        ("/instance/id?alt=xml", "12345"),
        ("/instance/virtual-clock/drift-token", "0"),
        ("/instance/network-interfaces/", "0/\n1/\n"),
        ("/instance/network-interfaces/0/dns-servers", "10.0.2.3\n"),
        ("/instance/network-interfaces/0/access-configs/0/external-ip", "203.0.113.7"),
        ("/instance/network-interfaces/0/forwarded-ips/", ""),
        ("/instance/disks/?recursive=true", "[]"),
        ("/instance/attributes/", "camelCase\nssh-keys\nuser-data\nwith-hyphen\n"),
        ("/instance/attributes/?alt=json", r#"["camelCase","ssh-keys","user-data","with-hyphen"]"#),
        ("/instance/attributes/camelCase", "a"),
        ("/instance/attributes/user-data", "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"),
        ("/instance/service-accounts/", "default/\nweb@p1.local/\n"),
        ("/instance/service-accounts/default/", "aliases\nemail\nidentity\nscopes\ntoken\n"),
        ("/instance/service-accounts/web@p1.local/scopes", "cloud-platform\n"),
        (
            "/instance/scheduling/?recursive=true&alt=text",
            "automatic-restart TRUE\non-host-maintenance MIGRATE\npreemptible FALSE\n",
        ),
        // "Whether a VM is about to be preempted" stands beside `scheduling` in Google's list, and not in it.
        ("/instance/preempted", "FALSE"),
        ("/oslogin/authenticate/", ""),
        ("/project/numeric-project-id", "1"),
    ] {
        assert_eq!(guest.text(below), body, "{below}");
    }
    assert_eq!(guest.get("/instance/scheduling/preempted").status().0, 404);
}

#[test]
fn systemd_finds_its_credentials_in_an_attribute() {
    let mut record = full();
    record["metadata"] = json!({ "systemd-userdata": "of metadata" });
    assert_eq!(Guest::of(&record).text("/instance/attributes/systemd-userdata"), "of metadata");
    record["systemd_credentials"] = json!([{ "name": "a", "text": "b\n" }]);
    let guest = Guest::of(&record);
    let document = r#"{"systemd.credentials":[{"name":"a","text":"b\n"}]}"#;
    assert_eq!(guest.text("/instance/attributes/systemd-userdata"), document);
    assert!(guest.text("/instance/attributes/user-data").starts_with("#cloud-config"), "its own user-data");
    record.as_object_mut().expect("a mapping").remove("user_data");
    let expected = format!("#systemd-userdata\n{document}\n");
    assert_eq!(Guest::of(&record).text("/instance/attributes/user-data"), expected);
}

#[test]
fn an_etag_depends_on_the_value_and_not_on_its_form() {
    let mut record = full();
    let guest = Guest::of(&record);
    let etag = |guest: &Guest, below: &str| guest.get(below).field("ETag").expect("an ETag").to_owned();
    let before = etag(&guest, "/instance/attributes");
    assert!(before.len() == 16 && before.bytes().all(|b| b.is_ascii_hexdigit()), "{before}");
    assert_eq!(before, etag(&guest, "/instance/attributes?recursive=true"));
    assert_eq!(before, etag(&guest, "/instance/attributes?recursive=true&alt=text"));
    record["labels"] = json!(["other"]);
    record["user_data"] = json!({ "text": "long\n".repeat(2_000) });
    let other = Guest::of(&record);
    assert_ne!(before, etag(&other, "/instance/attributes"));
    assert_eq!(etag(&guest, "/instance/zone"), etag(&other, "/instance/zone"));
    assert_eq!(etag(&other, "/instance"), etag(&other, "/instance"), "hashed once");
    assert_ne!(etag(&other, "/"), etag(&other, "/instance"));
}

#[test]
fn absent_values_are_empty_directories() {
    let mut record = full();
    for field in ["user_data", "ssh_keys", "metadata", "credentials", "labels", "image"] {
        record.as_object_mut().expect("a mapping").remove(field);
    }
    record["network"] = json!({});
    let guest = Guest::of(&record);
    for below in ["/instance/attributes", "/project/attributes", "/instance/service-accounts"] {
        assert_eq!(guest.json(&format!("{below}?recursive=True")), json!({}), "{below}");
        assert_eq!(guest.text(below), "", "{below}");
    }
    assert_eq!(guest.text("/instance/image"), "");
    assert_eq!(guest.json("/instance/network-interfaces?recursive=true"), json!([]));
    for absent in ["", "/token", "/identity?audience=x", "/email"] {
        assert_eq!(guest.get(&format!("/instance/service-accounts/default{absent}")).status().0, 404);
    }
}

#[test]
fn keys_name_their_users_and_generated_attributes_override_metadata() {
    let mut record = full();
    record["admin"] = json!({ "user": "alice" });
    record["ssh_keys"] = json!([
        { "name": "a", "key": "ssh-ed25519 AAAA a" },
        { "name": "b", "key": "ssh-ed25519 BBBB b", "user": "bob" },
    ]);
    record["user_data"] = json!({ "base64": "AP8=" });
    record["metadata"] = json!({ "user-data": "x", "user-data-encoding": "x", "ssh-keys": "x", "k": "v" });
    let attributes = Guest::of(&record).json("/instance/attributes?recursive=true");
    let wanted = json!({
        "k": "v",
        "ssh-keys": "alice:ssh-ed25519 AAAA a\nbob:ssh-ed25519 BBBB b",
        "user-data": "AP8=",
        "user-data-encoding": "base64",
    });
    assert_eq!(attributes, wanted);
    record["user_data"] = json!({ "text": "plain\n" });
    let attributes = Guest::of(&record).json("/instance/attributes?recursive=true");
    assert_eq!(attributes.get("user-data-encoding"), None, "text has no encoding");
}

#[test]
fn a_nic_without_ipv4_has_no_ipv4_values() {
    let mut record = full();
    record["network"] = json!({ "nics": [
        { "id": "n0", "mac": "52:54:00:12:34:56",
          "addresses": [{ "method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1" }] },
        { "id": "n1", "mac": "52:54:00:12:34:57", "addresses": [{ "method": "dhcp4" }] },
        { "id": "v", "vlan": { "link": "n0", "id": 5 } },
    ] });
    let guest = Guest::of(&record);
    let empty = "access-configs/\ndns-servers\nforwarded-ips/\nip-aliases/\n";
    assert_eq!(
        guest.text("/instance/network-interfaces/0"),
        format!("{empty}ipv6s\nmac\ntarget-instance-ips/\n")
    );
    assert_eq!(guest.text("/instance/network-interfaces/0/ipv6s"), "2001:db8::15\n");
    assert_eq!(guest.text("/instance/network-interfaces/1"), format!("{empty}mac\ntarget-instance-ips/\n"));
    assert_eq!(guest.get("/instance/network-interfaces/2").status().0, 404, "the guest creates VLANs itself");
}

#[test]
fn text_user_data_is_held_once_for_all_dialects() {
    let mut record = full();
    record["user_data"] = json!({ "text": "line \"quoted\"\n".repeat(100) });
    let guest = Guest::of(&record);
    let raw = guest.ask_with(&[], Method::Get, "/v1/user-data", b"");
    let attribute = guest.get("/instance/attributes/user-data");
    assert_eq!(attribute.body().pieces()[0].as_ptr(), raw.body().pieces()[0].as_ptr());
}

#[test]
fn unread_user_data_is_503() {
    let mut record = full();
    record["user_data"] = json!({ "source": { "file": "user-data" } });
    let guest = Guest::of(&record);
    for (below, status) in [
        ("/?recursive=true", 503),
        ("/instance/?recursive=true", 503),
        ("/instance/attributes/?recursive=true", 503),
        ("/instance/attributes/user-data", 503),
        ("/instance/id", 200),
        ("/instance/", 200),
        ("/project/attributes/?recursive=true", 200),
    ] {
        let answer = guest.get(below);
        assert_eq!(answer.status().0, status, "{below}");
        assert_eq!(answer.field("Metadata-Flavor"), Some("Google"), "{below}");
    }
}

#[test]
fn a_token_states_its_remaining_lifetime_and_is_503_afterwards() {
    let mut record = full();
    record["credentials"]["service_account"]["token"]["expires"] = json!("1970-01-01T01:00:00Z");
    let guest = Guest::of(&record);
    let below = "/instance/service-accounts/web@p1.local/token";
    for (at, left) in [(0, 3_600), (3_599, 1)] {
        let answer = answered(guest.wait(at, below, None));
        let token: Value = serde_json::from_slice(&answer.body().to_bytes()).expect("JSON");
        let wanted =
            json!({ "access_token": "eyJhbGciOiJub25lIn0.e30.", "expires_in": left, "token_type": "Bearer" });
        assert_eq!(token, wanted);
        assert_eq!(answer.field("Content-Type"), Some("application/json"));
    }
    for at in [3_600, 9_999] {
        assert_eq!(answered(guest.wait(at, below, None)).status().0, 503);
    }
    let empty = guest.get("/instance/service-accounts/default/identity?audience=");
    assert_eq!(empty.status().0, 400);
}

#[test]
fn the_root_is_gces_if_the_record_asks_for_it() {
    let mut record = full();
    let root = |record: &Value| Guest::of(record).ask_with(&[], Method::Get, "/", b"");
    assert_eq!(root(&record).field("Metadata-Flavor"), None);
    record["serve"]["gce_root"] = json!(true);
    let answer = root(&record);
    assert_eq!(answer.body().to_bytes(), "computeMetadata/\n");
    assert_eq!(answer.field("Metadata-Flavor"), Some("Google"));
}

#[test]
fn guest_attributes_are_read_back_until_they_are_deleted() {
    let guest = Guest::of(&full());
    let write = |method, below: &str, body: &[u8]| {
        let outcome = guest.outcome(&[FLAVOUR], method, &format!("{ROOT}/instance{below}"), body);
        match outcome {
            LiveOutcome::Changed(response) => (true, response.status().0),
            LiveOutcome::Ready(response) => (false, response.status().0),
            LiveOutcome::Park(_) => panic!("{below} waits"),
        }
    };
    for (method, below, body, result) in [
        (Method::Put, "/guest-attributes/a/x", &b"one"[..], (true, 200)),
        (Method::Put, "/guest-attributes/a/x", b"one", (false, 200)),
        (Method::Put, "/guest-attributes/a/y", b"two\n\xff", (true, 200)),
        (Method::Put, "/guest-attributes/b/x", b"", (true, 200)),
        (Method::Delete, "/guest-attributes/b/x", b"", (true, 200)),
        (Method::Delete, "/guest-attributes/b/x", b"", (false, 404)),
        (Method::Put, "/guest-attributes/a b/x", b"", (false, 400)),
        (Method::Put, "/guest-attributes/a/big", &[0; (32 << 10) + 1], (false, 413)),
    ] {
        assert_eq!(write(method, below, body), result, "{method:?} {below}");
    }
    assert_eq!(guest.text("/instance/guest-attributes"), "a/\n");
    assert_eq!(guest.text("/instance/guest-attributes/a/"), "x\ny\n");
    assert_eq!(guest.text("/instance/guest-attributes/a/x?alt=json"), "\"one\"");
    assert_eq!(guest.get("/instance/guest-attributes/a/y").body().to_bytes(), &b"two\n\xff"[..]);
    assert_eq!(
        guest.json("/instance/guest-attributes?recursive=true"),
        json!({ "a": { "x": "one", "y": "two\n\u{fffd}" } })
    );
    for absent in ["/b", "/a/z", "/a/x/more"] {
        assert_eq!(guest.get(&format!("/instance/guest-attributes{absent}")).status().0, 404, "{absent}");
    }
    for n in 0..62 {
        assert_eq!(write(Method::Put, &format!("/guest-attributes/n/{n}"), b"").1, 200);
    }
    assert_eq!(write(Method::Put, "/guest-attributes/n/more", b"").1, 409, "64 is the limit");
}

#[test]
fn a_request_waits_until_its_value_changes() {
    let mut record = full();
    let mut guest = Guest::of(&record);
    let below = "/instance/attributes/?recursive=true&wait_for_change=true&timeout_sec=60";
    let etag = guest.get("/instance/attributes").field("ETag").expect("an ETag").to_owned();
    let below = format!("{below}&last_etag={etag}");
    let wait = parked(guest.wait(1, &below, None));
    assert_eq!(wait.until, Duration::from_secs(61));
    record["labels"] = json!(["other"]);
    guest.publish(&record);
    parked(guest.wait(2, &below, Some(&wait)));
    record["metadata"] = json!({ "role": "db" });
    guest.publish(&record);
    let answer = answered(guest.wait(3, &below, Some(&wait)));
    assert_ne!(answer.field("ETag"), Some(etag.as_str()));
    answered(guest.wait(4, &below, None));
}

#[test]
fn a_wait_times_out_with_the_unchanged_value() {
    let guest = Guest::of(&full());
    for (query, seconds) in [
        ("", 60),
        ("&timeout_sec=5", 5),
        ("&timeout_sec=x", 60),
        ("&timeout_sec=18446744073709551615", 3_600),
    ] {
        let below = format!("/instance/id?wait_for_change=TRUE{query}");
        let wait = parked(guest.wait(10, &below, None));
        assert_eq!(wait.until, Duration::from_secs(10 + seconds), "{query}");
        parked(guest.wait(10 + seconds - 1, &below, Some(&wait)));
        let answer = answered(guest.wait(10 + seconds, &below, Some(&wait)));
        assert_eq!(answer.body().to_bytes(), "12345");
    }
    for seen in ["NONE", "0", "0000000000000000"] {
        answered(guest.wait(0, &format!("/instance/id?wait_for_change=true&last_etag={seen}"), None));
    }
    answered(guest.wait(0, "/nothing?wait_for_change=true", None));
}

#[test]
fn guests_can_wait_for_changes_of_guest_attributes() {
    let guest = Guest::of(&full());
    let put = |key: &str, body: &[u8]| {
        let target = format!("{ROOT}/instance/guest-attributes/ns/{key}");
        guest.ask_with(&[FLAVOUR], Method::Put, &target, body);
    };
    put("a", b"1");
    let (all, one) = (
        "/instance/guest-attributes/?recursive=true&wait_for_change=true",
        "/instance/guest-attributes/ns/a?wait_for_change=true",
    );
    let (wait_all, wait_one) = (parked(guest.wait(0, all, None)), parked(guest.wait(0, one, None)));
    put("a", b"1");
    parked(guest.wait(1, all, Some(&wait_all)));
    put("b", b"2");
    answered(guest.wait(1, all, Some(&wait_all)));
    parked(guest.wait(1, one, Some(&wait_one)));
    put("a", b"3");
    assert_eq!(answered(guest.wait(1, one, Some(&wait_one))).body().to_bytes(), "3");
}

#[test]
fn a_parked_request_does_not_hash_its_value_again() {
    let mut record = full();
    record["user_data"] = json!({ "text": format!("#!/bin/sh\n{}", "#".repeat(16 << 10)) });
    let guest = Guest::of(&record);
    let long = "v".repeat(32 << 10);
    let target = format!("{ROOT}/instance/guest-attributes/ns/a");
    guest.ask_with(&[FLAVOUR], Method::Put, &target, long.as_bytes());
    let cloud_init = [FLAVOUR, ("User-Agent", "Cloud-Init/25.3")];
    let wait = |fields: &[(&str, &str)], below: &str, parked: Option<&ParkedCall>| {
        let target = format!("{ROOT}/instance/{below}?recursive=true&wait_for_change=true");
        let request = TestRequest::new(Method::Get, "/", fields);
        TestRequest { target: split(&target), parked, ..request }.send(&guest.responses)
    };
    for (fields, below) in [
        (&[FLAVOUR][..], "attributes"),
        (&cloud_init[..], "attributes"),
        (&cloud_init[..], "attributes/user-data"),
        (&[FLAVOUR][..], "guest-attributes/ns/a"),
    ] {
        let call = parked(wait(fields, below, None));
        let before = HASHED.get();
        parked(wait(fields, below, Some(&call)));
        assert_eq!(HASHED.get(), before, "{below} {fields:?}");
    }
}

#[test]
fn the_etag_of_an_attribute_is_the_hash_of_its_value() {
    let guest = Guest::of(&full());
    let target = format!("{ROOT}/instance/guest-attributes/ns/a");
    let written = guest.ask_with(&[FLAVOUR], Method::Put, &target, b"value");
    let read = guest.get("/instance/guest-attributes/ns/a");
    assert_eq!(read.field("ETag"), written.field("ETag"));
}

#[test]
fn a_wait_beyond_the_limit_ends_the_oldest() {
    let guest = Guest::of(&full());
    let below = "/instance/id?wait_for_change=true";
    let waits: Vec<ParkedCall> = (0..WAITS_PER_VM).map(|_| parked(guest.wait(0, below, None))).collect();
    parked(guest.wait(1, below, Some(&waits[0])));
    let newest = parked(guest.wait(1, below, None));
    assert_eq!(answered(guest.wait(1, below, Some(&waits[0]))).body().to_bytes(), "12345");
    for wait in waits[1..].iter().chain([&newest]) {
        parked(guest.wait(1, below, Some(wait)));
    }
}

#[test]
fn debug_output_contains_no_secret() {
    let mut record = full();
    record["serve"]["dialects"] = json!(["gce"]);
    let debug = format!("{:?}", Guest::of(&record).responses);
    assert!(debug.contains("/computeMetadata"), "the routes are missing");
    for secret in ["eyJhbGciOiJub25lIn0", "runcmd"] {
        assert!(!debug.contains(secret), "{secret}");
    }
}

const ACCOUNT: &str = "/computeMetadata/v1/instance/service-accounts/default";

/// Returns the full record with a service account without a token.
fn tokenless() -> Value {
    let mut record = full();
    record["credentials"] = json!({"service_account": {"name": "web", "email": "web@p1.example"}});
    record["identity"] = json!({"audiences": ["https://a/b?c=d", "vault"]});
    record
}

fn claims(work: SigningJob) -> Value {
    let SigningJob::Jwt(claims) = work else { panic!("{work:?}") };
    claims.into()
}

#[test]
fn each_format_has_googles_claims() {
    let record = tokenless();
    let parsed = parse(&record);
    let subject = format!("vm:{}", parsed.vm.uuid);
    let standard = json!({"aud": "https://a/b?c=d", "azp": subject, "sub": subject});
    let mut whole = standard.clone();
    whole["email"] = json!("web@p1.example");
    whole["email_verified"] = json!(true);
    whole["google"] = json!({"compute_engine": {
        "instance_id": parsed.numeric_id().to_string(),
        "instance_name": record["vm"]["name"],
        "project_id": record["vm"]["project"]["id"],
        "project_number": record["vm"]["project"]["number"],
        "zone": record["placement"]["zone"],
    }});
    for (more, expected) in [
        ("", &standard),
        ("&format=standard", &standard),
        ("&format=other", &standard),
        ("&format=standard&licenses=TRUE", &standard),
        ("&format=full", &whole),
        ("&format=FULL&licenses=TRUE", &whole),
    ] {
        let (guest, orders) = issued(&record, false);
        let target = format!("{ACCOUNT}/identity?audience=https%3A%2F%2Fa%2Fb%3Fc%3Dd{more}");
        let (work, answer) = guest.served(&target, &[FLAVOUR], &orders);
        assert_eq!(claims(work), *expected, "{more}");
        assert_eq!((answer.status().0, answer.hop_limit(), &*text(&answer)), (200, Some(1), "SIGNED"));
        assert_eq!(answer.field("Metadata-Flavor"), Some("Google"));
    }
}

#[test]
fn a_format_has_its_own_token_and_an_account_only_the_email_of_its_record() {
    let mut record = tokenless();
    record["credentials"]["service_account"].as_object_mut().expect("a mapping").remove("email");
    let (guest, orders) = issued(&record, false);
    let target = |format: &str| format!("{ACCOUNT}/identity?audience=vault&format={format}");
    let (standard, _) = guest.served(&target("standard"), &[FLAVOUR], &orders);
    let (whole, _) = guest.served(&target("full"), &[FLAVOUR], &orders);
    assert!(claims(standard).get("google").is_none());
    let whole = claims(whole);
    assert!(whole.get("google").is_some() && whole.get("email").is_none(), "{whole}");
    assert_eq!(guest.got(&target("full"), &[FLAVOUR]).status().0, 200, "the second request needs no order");
    assert!(orders.lock().expect("sound").is_empty());
}

#[test]
fn the_account_lists_what_it_serves() {
    let (own, without) = (full(), tokenless());
    let mut absent = full();
    absent["credentials"] = json!({});
    let own_lists = "aliases\nemail\nidentity\nscopes\ntoken\n";
    for (record, issuer, listing, identity, token) in [
        (&own, false, Some(own_lists), 200, 200),
        (&own, true, Some(own_lists), 200, 200),
        (&without, false, Some("aliases\nemail\nscopes\n"), 404, 404),
        (&without, true, Some("aliases\nemail\nidentity\nscopes\n"), 403, 404),
        (&absent, true, None, 404, 404),
    ] {
        let guest = if issuer { issued(record, false).0 } else { DialectGuest::of(record) };
        let listed = guest.got(ACCOUNT, &[FLAVOUR]);
        assert_eq!((listed.status().0 == 200).then(|| text(&listed)).as_deref(), listing, "{record}");
        let refused = guest.got(&format!("{ACCOUNT}/identity?audience=refused"), &[FLAVOUR]);
        assert_eq!(refused.status().0, identity, "{record}");
        assert_eq!(guest.got(&format!("{ACCOUNT}/token"), &[FLAVOUR]).status().0, token, "{record}");
    }
    let (guest, _) = issued(&own, false);
    let answer = guest.got(&format!("{ACCOUNT}/identity?audience=any"), &[FLAVOUR]);
    let literal = own["credentials"]["service_account"]["token"]["text"].as_str();
    assert_eq!(Some(&*text(&answer)), literal, "the record's token stays");
}

#[test]
fn a_request_needs_the_flavour_and_one_good_audience() {
    let (guest, orders) = issued(&tokenless(), false);
    let proxied = [FLAVOUR, ("X-Forwarded-For", "10.0.0.1")];
    let long = format!("audience={}", "x".repeat(256));
    type Fields<'a> = &'a [(&'a str, &'a str)];
    let cases: [(&str, Fields<'_>, u16); 9] = [
        ("audience=vault", &[], 403),
        ("audience=vault", &[("Metadata-Flavor", "Microsoft")], 403),
        ("audience=vault", &proxied, 403),
        ("", &[FLAVOUR], 400),
        ("audience=", &[FLAVOUR], 400),
        ("audience=a%20b", &[FLAVOUR], 400),
        (&long, &[FLAVOUR], 400),
        ("audience=other", &[FLAVOUR], 403),
        ("audience=vault&wait_for_change=true", &[], 403),
    ];
    for (query, fields, status) in cases {
        let answer = guest.got(&format!("{ACCOUNT}/identity?{query}"), fields);
        assert_eq!(answer.status().0, status, "{query} {fields:?}");
        assert_eq!(answer.field("Metadata-Flavor"), Some("Google"), "{query} {fields:?}");
    }
    let other = ACCOUNT.replace("default", "other");
    assert_eq!(guest.got(&format!("{other}/identity?audience=vault"), &[FLAVOUR]).status().0, 404);
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
}

#[test]
fn a_lost_order_gets_503_with_the_flavour() {
    let (guest, orders) = issued(&tokenless(), false);
    let target = format!("{ACCOUNT}/identity?audience=vault");
    let LiveOutcome::Park(parked) = guest.get(&target, &[FLAVOUR], None) else { panic!("not parked") };
    orders.lock().expect("sound").clear();
    let LiveOutcome::Ready(answer) = guest.get(&target, &[FLAVOUR], Some(&parked)) else {
        panic!("not ready")
    };
    assert_eq!((answer.status().0, answer.field("Retry-After")), (503, Some("1")));
    assert_eq!(answer.field("Metadata-Flavor"), Some("Google"));
}
