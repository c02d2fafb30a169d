//! Akamai (Linode): documents and user-data for requests with a token.
//!
//! A document is text, one `name: value` a line, unless the request accepts JSON: so is the token, which is a list of
//! one string in JSON. User-data is text in any case.
//!
//! cloud-init (`DataSourceAkamai.py`) drops both keys and user-data on any error. So user-data always exists and may
//! be empty. A request for `/v1/user-data` without a token gets NoCloud's user-data.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::common::{self, IpVersion, given, known, labels, public_keys};
use super::route_builder::{JSON, RouteBuilder, TEXT};
use super::tokens::{self, UNPROXIED};
use super::{AccessCondition, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Method, Request, Response, StatusCode};
use crate::record::vm::Payload;
use crate::record::{self, Record, Role};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};
use crate::token::TokenKind;

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open(tokens::AKAMAI_PATH),
        Mount::open("/v1/instance").needs(AccessCondition::Token(TOKEN)),
        Mount::open("/v1/network").needs(AccessCondition::Token(TOKEN)),
        Mount::open("/v1/ssh-keys").needs(AccessCondition::Token(TOKEN)),
        Mount::open("/v1/user-data").needs(AccessCondition::Token(TOKEN)),
    ],
    "`DataSourceAkamaiLocal`; Afterburn; linode-metadata",
    render,
)
.remark("`PUT /v1/token`; text, or JSON with `Accept: application/json`");

const TOKEN: &str = TokenKind::Akamai.field();
const EXPIRY: &str = "Metadata-Token-Expiry-Seconds";

static HAS_TOKEN: LazyLock<[RequestGuard; 1]> =
    LazyLock::new(|| [tokens::required(TOKEN, TokenKind::Akamai)]);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let mint = SessionTokenIssuer { hop_limit: record.serve.hop_limit.get() };
    routes.live(tokens::AKAMAI_PATH, Methods::of(&[Method::Put]), &*UNPROXIED, mint);
    for (path, document) in [
        ("/v1/instance", instance(record)),
        ("/v1/network", network(record)),
        ("/v1/ssh-keys", json!({ "users": users(record) })),
    ] {
        let mut lines = String::new();
        flatten("", &document, &mut lines);
        let (text, json) = (routes.found(TEXT, lines), routes.json(&document));
        let about = "the document as text, or as JSON if the request accepts it";
        routes.either(path, &*HAS_TOKEN, about, accepts_json, json, text);
    }
    let user_data = match record.user_data.as_ref().map(Payload::bytes) {
        None => routes.found(TEXT, ""),
        Some(Some(bytes)) => {
            let encoded = routes.bytes(STANDARD.encode(bytes));
            routes.found(TEXT, encoded)
        }
        Some(None) => routes.unread(),
    };
    routes.guarded_when(TOKEN, "/v1/user-data", &*HAS_TOKEN, user_data.clone());
    if !record.serve.serves(record::Dialect::NoCloud) {
        routes.guarded("/v1/user-data", &*HAS_TOKEN, user_data);
    }
}

fn instance(record: &Record) -> Value {
    json!({
        "account_euuid": record.vm.project.account.as_str(),
        "backups": { "enabled": false, "status": null },
        "host_uuid": record.vm.uuid.as_str(),
        "id": record.numeric_id(),
        "label": record.vm.name.as_str(),
        // The real service lacks these two members; cloud-init reads them if they exist.
        "local-hostname": record.hostname.short.as_str(),
        "public-keys": public_keys(record),
        "region": record.placement.region.as_str(),
        "specs": { "disk": 0, "gpus": 0, "memory": 0, "transfer": 0, "vcpus": 0 },
        "tags": labels(record),
        "type": record.instance_type(),
    })
}

/// Returns the first NIC's link-local address. Talos makes the gateway from its first group and refuses the network
/// without one.
fn link_local(record: &Record) -> String {
    let Some((.., mac)) = given(&record.network).next() else { return String::new() };
    format!("{}/128", common::link_local(mac))
}

/// Returns NICs and addresses. Afterburn needs every member, so lists may be empty.
fn network(record: &Record) -> Value {
    let (mut interfaces, mut public, mut private, mut v6) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (n, nic, _) in given(&record.network) {
        let is_public = record.role(n) == Role::Public;
        let ipam = nic.addresses.iter().find_map(|address| address.address).filter(|_| !is_public);
        interfaces.push(json!({
            "id": n + 1,
            "ipam_address": ipam.map(|cidr| cidr.to_string()),
            "label": nic.network_id.as_ref().map(|id| id.as_str()),
            "purpose": if is_public { "public" } else { "vlan" },
        }));
        for (address, cidr) in known(nic, IpVersion::V4) {
            let own = if is_public && address.public.is_none() { &mut public } else { &mut private };
            own.push(format!("{}/32", cidr.address));
            if let Some(translated) = address.public.filter(|public| public.0.is_ipv4()) {
                public.push(format!("{translated}/32"));
            }
        }
        v6.extend(known(nic, IpVersion::V6).map(|(_, cidr)| format!("{}/128", cidr.address)));
    }
    let mut v6 = v6.into_iter();
    json!({
        "interfaces": interfaces,
        "ipv4": { "private": private, "public": public, "shared": [] },
        "ipv6": {
            "link_local": link_local(record),
            "slaac": v6.next().unwrap_or_default(),
            "ranges": v6.collect::<Vec<_>>(),
            "shared_ranges": [],
        },
    })
}

/// Returns the public keys by account. Keys without an account are root's.
fn users(record: &Record) -> Value {
    let mut users: Map<String, Value> = Map::new();
    users.insert("root".into(), json!([]));
    for key in &record.ssh_keys {
        let user = key.user.as_ref().map_or("root", |user| user.as_str());
        let keys = users.entry(user).or_insert_with(|| json!([]));
        keys.as_array_mut().expect("every account has a list").push(key.key.as_str().into());
    }
    users.into()
}

/// Writes a document as lines: the names of nested members joined by dots, the items of a list under its own name,
/// those that are objects by their number. Unknown values have no line.
fn flatten(name: &str, value: &Value, lines: &mut String) {
    let joined = |member: &str| if name.is_empty() { member.to_owned() } else { format!("{name}.{member}") };
    match value {
        Value::Object(members) => {
            members.iter().for_each(|(member, value)| flatten(&joined(member), value, lines));
        }
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                let numbered = item.is_object().then(|| joined(&n.to_string()));
                flatten(numbered.as_deref().unwrap_or(name), item, lines);
            }
        }
        Value::Null => {}
        Value::String(text) if text.is_empty() => {}
        Value::String(text) => *lines += &format!("{name}: {text}\n"),
        Value::Bool(_) | Value::Number(_) => *lines += &format!("{name}: {value}\n"),
    }
}

/// Returns whether the request accepts JSON. It gets text otherwise.
fn accepts_json(request: &Request<'_>) -> bool {
    let accepted = request.headers.get("Accept").unwrap_or_default();
    accepted.split(|byte| *byte == b',').any(|entry| {
        let kind = entry.split(|byte| *byte == b';').next().unwrap_or_default();
        kind.trim_ascii().eq_ignore_ascii_case(JSON.as_bytes())
    })
}

#[derive(Debug)]
struct SessionTokenIssuer {
    hop_limit: u8,
}

impl LiveRoute for SessionTokenIssuer {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let Some(seconds) = tokens::requested_ttl(call, EXPIRY, TokenKind::Akamai) else {
            return Response::error(StatusCode(400), &[]).into();
        };
        let vm = call.vm;
        let token = vm.keyring.mint(TokenKind::Akamai, &vm.owner, seconds, call.now.unix_seconds);
        let fields = [(EXPIRY, &*seconds.to_string())];
        let (kind, body) =
            if accepts_json(call.request) { (JSON, json!([token]).to_string()) } else { (TEXT, token) };
        Response::new(StatusCode(200), Some(kind), &fields, body).within(self.hop_limit).into()
    }

    fn lacks(&self, call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        tokens::lacks_ttl(call, EXPIRY, TokenKind::Akamai)
    }

    fn about(&self) -> &'static str {
        "a token for 1 to 86400 s"
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::EXPIRY;
    use crate::dialect::render as render_for;
    use crate::dialect::tests::{ask_with, full, parse, rendered};
    use crate::http::{Method, Response};
    use crate::store::{Interner, Responses, VmState};
    use crate::token::{Keyring, TokenKind};

    fn put(responses: &Responses, fields: &[(&str, &str)]) -> Response {
        ask_with(responses, Method::Put, "/v1/token", fields, b"")
    }

    fn get(responses: &Responses, path: &str, token: &str) -> Response {
        ask_with(
            responses,
            Method::Get,
            path,
            &[("Metadata-Token", token), ("Accept", "application/json")],
            b"",
        )
    }

    fn token(responses: &Responses) -> String {
        let answer = put(responses, &[(EXPIRY, "300")]);
        String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
    }

    fn document(record: &Value, name: &str) -> Value {
        let responses = rendered(record);
        let answer = get(&responses, &format!("/v1/{name}"), &token(&responses));
        serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
    }

    #[test]
    fn tokens_live_one_second_to_one_day_and_travel_one_hop() {
        let mut record = full();
        record["serve"]["hop_limit"] = json!(3);
        let responses = rendered(&record);
        for (seconds, status) in [
            ("1", 200),
            ("86400", 200),
            ("0", 400),
            ("86401", 400),
            ("", 400),
            ("-1", 400),
            ("+300", 400),
            ("300s", 400),
            ("99999999999999999999", 400),
        ] {
            assert_eq!(put(&responses, &[(EXPIRY, seconds)]).status().0, status, "{seconds}");
        }
        assert_eq!(put(&responses, &[]).status().0, 400);
        assert_eq!(put(&responses, &[(EXPIRY, "300"), ("X-Forwarded-For", "")]).status().0, 403);
        let answer = put(&responses, &[(EXPIRY, "300")]);
        assert_eq!((answer.hop_limit(), answer.field(EXPIRY)), (Some(3), Some("300")));
    }

    #[test]
    fn tokens_of_another_vm_or_dialect_are_refused() {
        let keyring = Arc::new(Keyring::ephemeral());
        let vms =
            ["7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3e"].map(|uuid| {
                let mut record = full();
                record["vm"]["uuid"] = json!(uuid);
                let vm = VmState { keyring: Arc::clone(&keyring), ..VmState::alone(uuid) };
                render_for(&parse(&record), &mut Interner::new(), vm)
            });
        let own = token(&vms[0]);
        let aws = keyring.mint(TokenKind::Aws, "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", 300, u64::MAX / 2);
        for path in ["/v1/instance", "/v1/network", "/v1/ssh-keys", "/v1/user-data"] {
            assert_eq!(get(&vms[0], path, &own).status().0, 200, "{path}");
            for (vm, token) in [(&vms[1], own.as_str()), (&vms[0], aws.as_str()), (&vms[0], "")] {
                assert_eq!(get(vm, path, token).status().0, 401, "{path}");
            }
        }
    }

    #[test]
    fn user_data_without_a_token_is_noclouds_or_refused() {
        let mut record = full();
        let ask = |record: &Value| ask_with(&rendered(record), Method::Get, "/v1/user-data", &[], b"");
        assert!(ask(&record).body().to_bytes().starts_with(b"#cloud-config"));
        record["serve"]["dialects"] = json!(["akamai"]);
        assert_eq!(ask(&record).status().0, 401);
    }

    #[test]
    fn keys_are_listed_by_account() {
        let mut record = full();
        record["ssh_keys"] = json!([
            {"name": "a", "key": "ssh-rsa A"},
            {"name": "b", "key": "ssh-rsa B", "user": "alice"},
            {"name": "c", "key": "ssh-rsa C"},
        ]);
        let users = json!({"users": {"alice": ["ssh-rsa B"], "root": ["ssh-rsa A", "ssh-rsa C"]}});
        assert_eq!(document(&record, "ssh-keys"), users);
        record["ssh_keys"] = json!([]);
        assert_eq!(document(&record, "ssh-keys"), json!({"users": {"root": []}}));
    }

    #[test]
    fn addresses_are_listed_as_public_or_private_and_every_list_exists() {
        let mut record = full();
        let network = document(&record, "network");
        let v4 = json!({"private": ["10.0.2.15/32", "192.168.7.5/32"], "public": ["203.0.113.7/32"], "shared": []});
        assert_eq!(network["ipv4"], v4);
        let interfaces = json!([
            {"id": 1, "ipam_address": null, "label": "net-a", "purpose": "public"},
            {"id": 2, "ipam_address": "192.168.7.5/24", "label": "net-b", "purpose": "vlan"},
        ]);
        assert_eq!(network["interfaces"], interfaces);
        record["network"]["nics"] = json!([{"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
        {"method": "slaac", "address": "2001:db8::15/64"}, {"method": "static", "address": "2001:db8::16/64"}]}]);
        let network = document(&record, "network");
        assert_eq!(network["ipv4"], json!({"private": [], "public": [], "shared": []}));
        assert_eq!(
            (&network["ipv6"]["slaac"], &network["ipv6"]["ranges"]),
            (&json!("2001:db8::15/128"), &json!(["2001:db8::16/128"]))
        );
    }

    #[test]
    fn unread_user_data_is_503() {
        let mut record = full();
        record["user_data"] = json!({"source": {"file": "user-data"}});
        let responses = rendered(&record);
        assert_eq!(get(&responses, "/v1/user-data", &token(&responses)).status().0, 503);
    }

    #[test]
    fn a_document_is_text_unless_the_request_accepts_json() {
        let mut record = full();
        record["ssh_keys"] = json!([
            {"name": "a", "key": "ssh-rsa A"},
            {"name": "b", "key": "ssh-rsa B", "user": "alice"},
            {"name": "c", "key": "ssh-rsa C"},
        ]);
        let responses = rendered(&record);
        let token = token(&responses);
        let answer = |name: &str, accepted: &str| {
            let fields = [("Metadata-Token", token.as_str()), ("Accept", accepted)];
            let answer = ask_with(&responses, Method::Get, &format!("/v1/{name}"), &fields, b"");
            (answer.field("Content-Type").map(str::to_owned), answer.body().to_bytes())
        };
        let text = "users.alice: ssh-rsa B\nusers.root: ssh-rsa A\nusers.root: ssh-rsa C\n";
        for accepted in ["", "*/*", "text/plain", "text/plain, */*;q=0.1", "application/jsonlines"] {
            let (kind, body) = answer("ssh-keys", accepted);
            assert_eq!(kind.as_deref(), Some("text/plain; charset=utf-8"), "{accepted}");
            assert_eq!(body, text, "{accepted}");
        }
        for accepted in
            ["application/json", "text/html, Application/JSON;q=0.9", "application/json;charset=utf-8"]
        {
            let (kind, body) = answer("ssh-keys", accepted);
            assert_eq!(kind.as_deref(), Some("application/json"), "{accepted}");
            assert!(serde_json::from_slice::<Value>(&body).is_ok(), "{accepted}");
        }
        let (_, body) = answer("network", "");
        let lines = String::from_utf8(body.to_vec()).expect("text");
        for line in ["interfaces.1.ipam_address: 192.168.7.5/24", "ipv4.public: 203.0.113.7/32"] {
            assert!(lines.lines().any(|found| found == line), "{line}: {lines}");
        }
        let put = put(&responses, &[(EXPIRY, "300"), ("Accept", "application/json")]);
        let token: Vec<String> = serde_json::from_slice(&put.body().to_bytes()).expect("a list");
        assert_eq!(get(&responses, "/v1/instance", &token[0]).status().0, 200);
    }

    #[test]
    fn the_link_local_address_is_that_of_the_first_mac() {
        let network = document(&full(), "network");
        assert_eq!(network["ipv6"]["link_local"], json!("fe80::5054:ff:fe12:3456/128"));
    }
}
