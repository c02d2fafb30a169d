//! Properties that hold for every record, in addition to the test vectors, and a guest without a network.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::render as render_for;
use super::{AccessCondition, Mount, all, computation_timeout};
use crate::http::{Headers, Method, Request, RequestTarget, Response};
use crate::identity::{IssuedToken, Issuer, Order, SigningJob};
use crate::record::{Dialect, RESERVED_KEYS, Record};
use crate::store::{Endpoint, Host, Interner, LiveOutcome, ParkedCall, Responses, VmState};
use metadata_common::addresses::Connection;
use metadata_common::time::Now;

const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");
/// Time of requests, in Unix seconds: 2026-11-21T00:00:00Z.
pub(super) const NOW: u64 = 1_795_219_200;

/// A request to the responses of a VM, without a network.
#[derive(Clone, Copy)]
pub(super) struct TestRequest<'a> {
    pub(super) now: Now,
    pub(super) local: (&'a str, u16),
    pub(super) source_port: u16,
    pub(super) method: Method,
    pub(super) target: RequestTarget<'a>,
    pub(super) fields: &'a [(&'a str, &'a str)],
    pub(super) body: &'a [u8],
    /// The previous outcome of the same request.
    pub(super) parked: Option<&'a ParkedCall>,
}

impl<'a> TestRequest<'a> {
    /// A request to 169.254.169.254 without header fields and body.
    pub(super) fn new(method: Method, target: &'a str, fields: &'a [(&'a str, &'a str)]) -> Self {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let now = Now { mono: Duration::ZERO, unix_seconds: NOW };
        let (local, target) = (("169.254.169.254", 80), RequestTarget { path, query });
        Self { now, local, source_port: 40_000, method, target, fields, body: b"", parked: None }
    }

    pub(super) fn send(self, responses: &Responses) -> LiveOutcome {
        let field = |(name, value): &(&'a str, &'a str)| httparse::Header { name, value: value.as_bytes() };
        let fields: Vec<_> = self.fields.iter().map(field).collect();
        let Self { method, target, body, .. } = self;
        let request = Request { method, target, headers: Headers::new(&fields), body };
        let address = |text: &str| -> IpAddr { text.parse().expect("an address") };
        let local = (address(self.local.0), self.local.1);
        let connection = Connection { slot: 0, local, remote: (address("10.0.2.15"), self.source_port) };
        responses.answer(self.now, &connection, &request, self.parked)
    }

    /// Sends a request that is not parked.
    pub(super) fn answer(self, responses: &Responses) -> Response {
        match self.send(responses) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
            LiveOutcome::Park(parked) => panic!("{} is parked: {parked:?}", self.target.path),
        }
    }
}

fn ask(responses: &Responses, method: Method, path: &str) -> Response {
    ask_with(responses, method, path, &[("Metadata", "true")], b"")
}

/// Sends a request with these header fields and this body.
pub(super) fn ask_with(
    responses: &Responses,
    method: Method,
    path: &str,
    fields: &[(&str, &str)],
    body: &[u8],
) -> Response {
    TestRequest { body, ..TestRequest::new(method, path, fields) }.answer(responses)
}

/// Renders a record that is served without an issuer.
pub(super) fn render(record: &Record, interner: &mut Interner) -> Responses {
    render_for(record, interner, VmState::alone(record.vm.uuid.as_str()))
}

/// Like [`render`], from the record's value.
pub(super) fn rendered(record: &Value) -> Responses {
    render(&parse(record), &mut Interner::new())
}

/// Returns the full record as a value that a test can change.
pub(super) fn full() -> Value {
    serde_yaml::from_str(FULL).expect("the full record is YAML")
}

/// Returns the full record without its optional fields.
pub(super) fn bare() -> Value {
    let mut record = full();
    let members = record.as_object_mut().expect("a record is a mapping");
    members.retain(|field, _| {
        matches!(field.as_str(), "schema" | "generation" | "vm" | "hostname" | "placement")
    });
    record
}

pub(super) fn parse(record: &Value) -> Record {
    Record::parse("test.json", &record.to_string()).expect("a good record").0
}

/// Returns the full record with a field replaced.
pub(super) fn with(field: &str, value: Value) -> Record {
    let mut record = full();
    record[field] = value;
    parse(&record)
}

/// Orders that wait for their signature.
pub(super) type Orders = Arc<Mutex<Vec<Order>>>;

/// Returns the guest of a VM whose node has an issuer, and its orders.
pub(super) fn issued(record: &Value, signs_documents: bool) -> (DialectGuest, Orders) {
    let orders = Orders::default();
    let list = Arc::clone(&orders);
    let issuer = Issuer::new(None, move |order| {
        list.lock().expect("sound").push(*order);
        true
    });
    issuer.set_signs_documents(signs_documents);
    let record = parse(record);
    let vm = VmState::alone(record.vm.uuid.as_str()).issued_by(&issuer, &record);
    (DialectGuest::with(&record, vm), orders)
}

/// Takes the last order, which must exist.
pub(super) fn ordered(orders: &Orders) -> Order {
    orders.lock().expect("sound").pop().expect("an order")
}

/// Signs an order with this text, for a minute.
pub(super) fn sign(order: Order, text: &'static str) {
    order.signed(IssuedToken { text: text.into(), issued: NOW, expires: NOW + 60 });
}

/// The guest of one VM.
pub(super) struct DialectGuest {
    responses: Responses,
    pub(super) now: u64,
}

impl DialectGuest {
    pub(super) fn of(record: &Value) -> Self {
        let record = parse(record);
        Self::with(&record, VmState::alone(record.vm.uuid.as_str()))
    }

    pub(super) fn with(record: &Record, vm: VmState) -> Self {
        Self { responses: render_for(record, &mut Interner::new(), vm), now: NOW }
    }

    /// Returns the guest of the same VM after a change of its record.
    pub(super) fn changed(&self, record: &Value) -> Self {
        Self::with(&parse(record), self.responses.vm().clone())
    }

    fn request<'a>(
        &self,
        method: Method,
        target: &'a str,
        fields: &'a [(&'a str, &'a str)],
    ) -> TestRequest<'a> {
        let now = Now { mono: Duration::ZERO, unix_seconds: self.now };
        TestRequest { now, ..TestRequest::new(method, target, fields) }
    }

    /// Sends a request to an address and port.
    pub(super) fn ask_at(
        &self,
        local: (&str, u16),
        method: Method,
        path: &str,
        fields: &[(&str, &str)],
    ) -> Response {
        TestRequest { local, ..self.request(method, path, fields) }.answer(&self.responses)
    }

    /// Sends a GET for a target to 169.254.169.254, or repeats one that was parked.
    pub(super) fn get(
        &self,
        target: &str,
        fields: &[(&str, &str)],
        parked: Option<&ParkedCall>,
    ) -> LiveOutcome {
        TestRequest { parked, ..self.request(Method::Get, target, fields) }.send(&self.responses)
    }

    /// Like [`get`](Self::get), at another address.
    pub(super) fn get_at(
        &self,
        address: &str,
        target: &str,
        fields: &[(&str, &str)],
        parked: Option<&ParkedCall>,
    ) -> LiveOutcome {
        let request = self.request(Method::Get, target, fields);
        TestRequest { local: (address, 80), parked, ..request }.send(&self.responses)
    }

    /// Returns the answer to a GET that is not parked.
    pub(super) fn got(&self, target: &str, fields: &[(&str, &str)]) -> Response {
        match self.get(target, fields, None) {
            LiveOutcome::Ready(response) => response,
            other => panic!("{target}: {other:?}"),
        }
    }

    /// Returns the answer to a GET that waits for what it orders, and the order.
    pub(super) fn served(
        &self,
        target: &str,
        fields: &[(&str, &str)],
        orders: &Orders,
    ) -> (SigningJob, Response) {
        let LiveOutcome::Park(parked) = self.get(target, fields, None) else {
            panic!("{target} does not wait")
        };
        let order = ordered(orders);
        let work = order.work();
        sign(order, "SIGNED");
        match self.get(target, fields, Some(&parked)) {
            LiveOutcome::Ready(response) => (work, response),
            other => panic!("{target}: {other:?}"),
        }
    }

    /// Sends a request to 169.254.169.254.
    pub(super) fn ask(&self, method: Method, path: &str, fields: &[(&str, &str)]) -> Response {
        self.ask_at(("169.254.169.254", 80), method, path, fields)
    }

    /// Returns the status of a GET.
    pub(super) fn status(&self, path: &str, fields: &[(&str, &str)]) -> u16 {
        self.ask(Method::Get, path, fields).status().0
    }

    /// Returns the body of a GET that must succeed.
    pub(super) fn text(&self, path: &str) -> String {
        let response = self.ask(Method::Get, path, &[]);
        assert_eq!(response.status().0, 200, "{path}");
        text(&response)
    }

    pub(super) fn responses(&self) -> &Responses {
        &self.responses
    }
}

/// Returns a body as text.
pub(super) fn text(response: &Response) -> String {
    String::from_utf8(response.body().to_bytes().to_vec()).expect("the body is text")
}

/// Returns a NIC with a unique MAC and these addresses.
pub(super) fn nic(number: usize, addresses: &Value) -> Value {
    json!({
        "id": format!("n{number}"),
        "mac": format!("52:54:00:00:00:{number:02x}"),
        "addresses": addresses,
    })
}

#[test]
fn user_data_that_a_thousand_vms_share_is_stored_once() {
    let mut interner = Interner::new();
    let user_data = STANDARD.encode(vec![7_u8; 60_000]);
    let vms: Vec<Responses> = (0..1_000)
        .map(|n| {
            let mut record = full();
            record["vm"]["name"] = json!(format!("web-{n}"));
            record["vm"]["uuid"] = json!(format!("7c0f1a52-3b5e-4d1a-9d2c-{n:012}"));
            record["user_data"] = json!({ "base64": user_data });
            render(&parse(&record), &mut interner)
        })
        .collect();
    let first = ask(&vms[0], Method::Get, "/v1/user-data");
    for vm in &vms {
        let next = ask(vm, Method::Get, "/v1/user-data");
        assert_eq!(next.body().pieces()[0].as_ptr(), first.body().pieces()[0].as_ptr());
        assert_eq!(next.head().as_ptr(), first.head().as_ptr());
    }
    let meta_data = |n: usize| ask(&vms[n], Method::Get, "/v1/meta-data");
    assert_ne!(meta_data(0).body(), meta_data(1).body(), "the names differ");
    drop((vms, first));
    interner.sweep();
    assert!(interner.is_empty(), "{} entries outlive their VMs", interner.len());
}

#[test]
fn only_listed_dialects_are_served() {
    let paths = |dialects: Value| -> Vec<String> {
        let record = with("serve", json!({ "dialects": dialects }));
        render(&record, &mut Interner::new()).routes().map(|(_, path, _)| path.to_owned()).collect()
    };
    let always = ["/", "/v1/events", "/v1/phone-home"];
    let of = |dialects: Value| -> Vec<String> {
        paths(dialects).into_iter().filter(|path| !always.contains(&path.as_str())).collect()
    };
    let nocloud = ["/v1/meta-data", "/v1/network-config", "/v1/user-data", "/v1/vendor-data"];
    assert_eq!(of(json!(["nocloud"])), nocloud);
    assert_eq!(of(json!(["kubevirt"])), ["/healthz", "/v1/identity", "/v1/token"]);
    assert_eq!(of(json!(["maas"])), ["/MAAS/metadata"]);
    assert_eq!(paths(json!([])), always);
}

#[test]
fn unread_user_data_is_503() {
    let record = with("user_data", json!({ "source": { "file": "user-data" } }));
    let answer = ask(&render(&record, &mut Interner::new()), Method::Get, "/v1/user-data");
    assert_eq!(answer.status().0, 503);
    let head = String::from_utf8_lossy(answer.head()).into_owned();
    assert!(head.contains("\r\nRetry-After: 1\r\n"), "{head}");
}

#[test]
fn a_bare_record_has_no_server_error_except_for_its_missing_token() {
    let responses = rendered(&bare());
    for (_, path, _) in responses.routes() {
        let answer = ask(&responses, Method::Get, path);
        let token =
            path == "/v1/token" && answer.body().to_bytes().starts_with(br#"{"error":"token_unavailable""#);
        assert!(answer.status().0 < 500 || token, "{path} is {}", answer.status().0);
    }
    for absent in ["/v1/user-data", "/v1/vendor-data", "/v1/network-config"] {
        assert_eq!(ask(&responses, Method::Get, absent).status().0, 204, "{absent}");
    }
}

#[test]
fn older_clients_get_debians_interfaces_if_the_record_asks_for_it() {
    let mut record = full();
    record["serve"]["legacy_eni"] = json!(true);
    record["network"]["nics"][1]["addresses"] = json!([
        { "method": "static", "address": "192.168.7.5/22", "gateway": "192.168.4.1" },
        { "method": "static", "address": "2001:db8::5/64" },
        { "method": "slaac" },
    ]);
    let responses = rendered(&record);
    let body = ask(&responses, Method::Get, "/v1/meta-data");
    let meta_data: Value = serde_yaml::from_slice(&body.body().to_bytes()).expect("meta-data is YAML");
    let wanted = "auto lo\niface lo inet loopback\n\nauto eth0\niface eth0 inet dhcp\n    \
                  hwaddress ether 52:54:00:12:34:56\n    mtu 1500\n\nauto eth1\niface eth1 inet static\n    \
                  hwaddress ether 52:54:00:12:34:57\n    mtu 1500\n    address 192.168.7.5\n    \
                  netmask 255.255.252.0\n    gateway 192.168.4.1\n    dns-nameservers 10.0.2.3\n    \
                  dns-search example.internal\n\nauto eth1:1\niface eth1:1 inet6 static\n    \
                  hwaddress ether 52:54:00:12:34:57\n    mtu 1500\n    address 2001:db8::5\n    netmask 64\n    \
                  dns-nameservers 10.0.2.3\n    dns-search example.internal\n";
    assert_eq!(meta_data["network-interfaces"], wanted);
}

/// Any line that a record accepts.
fn line() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{1,40}"
}

fn metadata() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map("[A-Za-z0-9._-]{1,12}", any::<String>(), 0..10)
}

prop_compose! {
    /// A record with random user-data, metadata, names and keys, and random choices.
    fn records()(
        user_data in prop::option::of(prop::collection::vec(any::<u8>(), 0..2_000)),
        (name, id, kind) in (line(), line(), line()),
        metadata in metadata(),
        keys in prop::collection::vec(line(), 0..4),
        absent_seed in prop_oneof![Just(204), Just(404)],
        mode in prop_oneof![Just("auto"), Just("none")],
        legacy_eni in any::<bool>(),
    ) -> (Record, Option<Vec<u8>>, BTreeMap<String, String>) {
        let mut record = full();
        record["vm"]["name"] = json!(name);
        record["vm"]["instance_id"] = json!(id);
        record["instance_type"] = json!(kind);
        record["metadata"] = json!(metadata);
        record["ssh_keys"] = keys.iter().map(|key| json!({ "name": "k", "key": key })).collect();
        record["serve"]["absent_seed"] = json!(absent_seed);
        record["serve"]["legacy_eni"] = json!(legacy_eni);
        record["network"]["mode"] = json!(mode);
        record["user_data"] = json!(user_data.as_ref().map(|bytes| json!({ "base64": STANDARD.encode(bytes) })));
        (parse(&record), user_data, metadata)
    }
}

proptest! {
    #[test]
    fn user_data_arrives_byte_for_byte((record, user_data, _) in records()) {
        let answer = ask(&render(&record, &mut Interner::new()), Method::Get, "/v1/user-data");
        match user_data {
            Some(bytes) => prop_assert_eq!(answer.body().to_bytes(), bytes),
            None => prop_assert!(matches!(answer.status().0, 204 | 404)),
        }
    }

    #[test]
    fn meta_data_reads_back_as_the_record((record, _, metadata) in records()) {
        let answer = ask(&render(&record, &mut Interner::new()), Method::Get, "/v1/meta-data");
        let read: Value = serde_yaml::from_slice(&answer.body().to_bytes()).expect("meta-data is YAML");
        prop_assert_eq!(&read["instance-id"], record.instance_id());
        prop_assert_eq!(&read["instance-type"], record.instance_type());
        let keys: Vec<_> = record.ssh_keys.iter().map(|key| key.key.as_str()).collect();
        prop_assert_eq!(read.get("public-keys").cloned().unwrap_or(json!([])), json!(keys));
        for (key, value) in metadata.iter().filter(|(key, _)| !RESERVED_KEYS.contains(&key.as_str())) {
            prop_assert_eq!(&read[key], value, "{}", key);
        }
    }

    #[test]
    fn head_is_answered_as_get_on_every_path((record, _, _) in records(), other in "/[ -~]{0,20}") {
        let responses = render(&record, &mut Interner::new());
        for path in responses.routes().map(|(_, path, _)| path).chain([other.as_str()]) {
            prop_assert_eq!(ask(&responses, Method::Head, path), ask(&responses, Method::Get, path));
        }
    }

    #[test]
    fn every_route_has_a_normalised_path((record, _, _) in records()) {
        for (_, path, _) in render(&record, &mut Interner::new()).routes() {
            let segments = path.strip_prefix('/').expect("paths start with a slash");
            prop_assert!(path == "/" || segments.split('/').all(|s| !matches!(s, "" | "." | "..")), "{}", path);
        }
    }

    #[test]
    fn no_rendered_answer_is_a_server_error_if_there_is_a_token((record, _, _) in records()) {
        let responses = render(&record, &mut Interner::new());
        for (_, path, route) in responses.routes() {
            if let Endpoint::Fixed(response) = route.endpoint() {
                prop_assert!(response.status().0 < 500, "{}", path);
            }
        }
    }
}

// What modules state of their dialects.

/// A record with the strictest conditions of every dialect.
fn strict() -> Value {
    let mut record = full();
    record["serve"]["imdsv2"] = json!("required");
    record["credentials"]["maas"] =
        json!({"consumer_key": "consumer", "token_key": "token", "token_secret": "secret"});
    record
}

/// The most specific mount that contains a path.
fn mount(mounts: &'static [Mount], host: Host, path: &str) -> Option<&'static Mount> {
    let holding = mounts.iter().filter(|mount| mount.host == host && mount.holds(path));
    holding.max_by_key(|mount| mount.path.len())
}

/// The status of a GET from an unprivileged port.
fn status(guest: &DialectGuest, host: Host, path: &str, fields: &[(&str, &str)]) -> u16 {
    let (address, port) = host.authority().split_once(':').unwrap_or((host.authority(), "80"));
    let local = (address, port.parse().expect("a port"));
    guest.ask_at(local, Method::Get, path, fields).status().0
}

#[test]
fn every_route_of_a_dialect_is_below_one_of_its_mounts() {
    for record in [full(), strict()] {
        let guest = DialectGuest::of(&record);
        for (names, dialect) in all() {
            let own = guest.responses().routes().filter(|(.., route)| route.dialect() == names[0].as_str());
            for (host, path, _) in own {
                assert!(
                    mount(dialect.mounts, host, path).is_some(),
                    "{}: {host:?} {path}",
                    names[0].as_str()
                );
            }
        }
    }
}

#[test]
fn every_mount_has_a_route_and_enforces_its_condition() {
    for (names, dialect) in all() {
        // Serve this dialect alone: another one may answer the same path without the condition.
        let mut record = strict();
        record["serve"]["dialects"] = names.iter().map(|name| name.as_str()).collect();
        let (guest, name) = (DialectGuest::of(&record), names[0].as_str());
        for one in dialect.mounts {
            let routes = guest.responses().routes().filter(|(host, path, route)| {
                let own = route.dialect() == name && *host == one.host && one.holds(path);
                own && mount(dialect.mounts, *host, path).is_some_and(|most| most.path == one.path)
            });
            let routes: Vec<_> = routes.map(|(host, path, _)| (host, path.to_owned())).collect();
            let statuses = |fields: &[(&str, &str)]| -> Vec<u16> {
                routes.iter().map(|(host, path)| status(&guest, *host, path, fields)).collect()
            };
            let plain = statuses(&[]);
            // CloudStack has the tree only with `serve.date_tree: cloudstack`.
            assert!(
                !plain.is_empty() || (name, one.path) == ("cloudstack", "/latest"),
                "{name} {}",
                one.path
            );
            match one.access {
                AccessCondition::Open => {
                    assert!(!plain.iter().any(|status| matches!(status, 401 | 403)), "{name} {plain:?}")
                }
                AccessCondition::Field(field, value) => {
                    assert!(!plain.contains(&200), "{name} {}: {plain:?}", one.path);
                    let with = statuses(&[(field, value)]);
                    assert!(with.contains(&200) || with.contains(&404), "{name} {}: {with:?}", one.path);
                }
                AccessCondition::Token(_)
                | AccessCondition::Imdsv2(_)
                | AccessCondition::LowPort
                | AccessCondition::Signature => {
                    assert!(!plain.contains(&200), "{name} {}: {plain:?}", one.path);
                }
            }
        }
    }
}

#[test]
fn user_data_is_open_in_the_dialects_that_check_says() {
    const SECRET: &str = "open-sesame";
    let settings = [
        json!({}),
        json!({"date_tree": "cloudstack"}),
        json!({"opc_v1": "off"}),
        json!({"maas_path": "/MAAS"}),
    ];
    let mut wrong = Vec::new();
    for (name, more) in Dialect::ALL.iter().flat_map(|name| settings.iter().map(move |more| (name, more))) {
        let mut record = strict();
        record["user_data"] = json!({"text": format!("#cloud-config\nhostname: {SECRET}\n")});
        record["serve"]["dialects"] = json!([name]);
        for (setting, value) in more.as_object().into_iter().flatten() {
            record["serve"][setting] = value.clone();
            // Without credentials nobody signs requests.
            if setting == "maas_path" {
                record["credentials"] = json!({});
            }
        }
        let guest = DialectGuest::of(&record);
        let secrets = [SECRET.to_owned(), STANDARD.encode(format!("#cloud-config\nhostname: {SECRET}\n"))];
        let is_told = guest.responses().routes().any(|(host, path, _)| {
            let (address, port) = host.authority().split_once(':').unwrap_or((host.authority(), "80"));
            let local = (address, port.parse().expect("a port"));
            // Of a tree that is computed only the root is a route.
            ["", "/user-data", "/2012-03-01/user-data"].iter().any(|below| {
                let response = guest.ask_at(local, Method::Get, &format!("{path}{below}"), &[]);
                let body = response.body().to_bytes();
                let body = String::from_utf8_lossy(&body);
                response.status().0 == 200 && secrets.iter().any(|secret| body.contains(secret))
            })
        });
        let parsed = parse(&record);
        if is_told != parsed.serve.opens_user_data(*name, parsed.credentials.maas.is_some()) {
            wrong.push(format!("{name:?} with {more}: {is_told}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn a_mount_contains_its_path_and_all_paths_below_it() {
    let cases = [
        ("/hetzner", "/hetzner", true),
        ("/hetzner", "/hetzner/v1/metadata", true),
        ("/hetzner", "/hetznerx", false),
        ("/metadata/v1", "/metadata/v1.json", false),
        ("/metadata/v1", "/metadata", false),
        ("/", "/", true),
        ("/", "/anything/at/all", true),
    ];
    for (path, asked, held) in cases {
        assert_eq!(Mount::open(path).holds(asked), held, "{path} {asked}");
    }
}

#[test]
fn the_longest_mount_decides_how_long_a_request_may_wait() {
    for (path, milliseconds) in [
        ("/metadata/v1.json", 1_500),
        ("/metadata/v1/id", 4_000),
        ("/hetzner/v1/metadata", 1_500),
        ("/openstack", 8_000),
        ("/openstack/latest/meta_data.json", 8_000),
        ("/latest/meta-data", 4_000),
        ("/", 4_000),
        ("/of/no/dialect", 4_000),
    ] {
        assert_eq!(computation_timeout(path), Duration::from_millis(milliseconds), "{path}");
    }
}
