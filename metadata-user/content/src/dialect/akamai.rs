//! Akamai (Linode): documents and user-data for requests with a token.
//!
//! A document is text, one `name: value` a line, unless the request accepts JSON: so is the token, which is a list of
//! one string in JSON. User-data is text in any case.
//!
//! cloud-init (`DataSourceAkamai.py`) drops both keys and user-data on any error. So user-data always exists and may
//! be empty. A request for `/v1/user-data` without a token gets NoCloud's user-data.

#[cfg(test)]
mod tests;

use std::net::Ipv6Addr;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::record_values::{IpVersion, given, known, labels, public_keys};
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
        Mount::open("/v1/token"),
        Mount::open("/v1/instance").needs(AccessCondition::Token(TOKEN)),
        Mount::open("/v1/network").needs(AccessCondition::Token(TOKEN)),
        Mount::open("/v1/ssh-keys").needs(AccessCondition::Token(TOKEN)),
        Mount::open("/v1/user-data").needs(AccessCondition::Token(TOKEN)),
    ],
    "`DataSourceAkamaiLocal`; Afterburn; linode-metadata",
    render,
)
.remark("`PUT /v1/token`; text, or JSON with `Accept: application/json`");

const TOKEN: &str = "Metadata-Token";
const EXPIRY: &str = "Metadata-Token-Expiry-Seconds";

static HAS_TOKEN: LazyLock<[RequestGuard; 1]> =
    LazyLock::new(|| [tokens::required(TOKEN, TokenKind::Akamai)]);

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let mint = SessionTokenIssuer { hop_limit: record.serve.hop_limit.get() };
    sheet.live("/v1/token", Methods::of(&[Method::Put]), &*UNPROXIED, mint);
    for (path, document) in [
        ("/v1/instance", instance(record)),
        ("/v1/network", network(record)),
        ("/v1/ssh-keys", json!({ "users": users(record) })),
    ] {
        let mut lines = String::new();
        flatten("", &document, &mut lines);
        let (text, json) = (sheet.found(TEXT, lines), sheet.json(&document));
        let about = "the document as text, or as JSON if the request accepts it";
        sheet.either(path, &*HAS_TOKEN, about, |call| accepts_json(call.request), json, text);
    }
    let user_data = match record.user_data.as_ref().map(Payload::bytes) {
        None => sheet.found(TEXT, ""),
        Some(Some(bytes)) => {
            let encoded = sheet.bytes(STANDARD.encode(bytes));
            sheet.found(TEXT, encoded)
        }
        Some(None) => sheet.unread(),
    };
    sheet.guarded_when(TOKEN, "/v1/user-data", &*HAS_TOKEN, user_data.clone());
    if !record.serve.serves(record::Dialect::NoCloud) {
        sheet.guarded("/v1/user-data", &*HAS_TOKEN, user_data);
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

/// Returns the first NIC's link-local address as IPv6 derives it from the MAC (RFC 4291 appendix A). Talos makes the
/// gateway from its first group and refuses the network without one.
fn link_local(record: &Record) -> String {
    let Some((.., mac)) = given(&record.network).next() else { return String::new() };
    let [a, b, c, d, e, f] = mac.0.0;
    let identifier = [a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    format!("{}/128", Ipv6Addr::from(0xfe80 << 112 | u128::from(u64::from_be_bytes(identifier))))
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

/// Issues session tokens.
#[derive(Debug)]
struct SessionTokenIssuer {
    hop_limit: u8,
}

impl LiveRoute for SessionTokenIssuer {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let Some(seconds) = call.request.headers.get(EXPIRY).and_then(expiry) else {
            return Response::error(StatusCode(400), &[]).into();
        };
        let vm = call.vm;
        let token = vm.keyring.mint(TokenKind::Akamai, &vm.owner, seconds, call.now.unix_seconds);
        let fields = [(EXPIRY, &*seconds.to_string())];
        let (kind, body) = match accepts_json(call.request) {
            true => (JSON, json!([token]).to_string()),
            false => (TEXT, token),
        };
        Response::new(StatusCode(200), Some(kind), &fields, body).within(self.hop_limit).into()
    }

    fn lacks(&self, call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        let most = TokenKind::Akamai.longest_ttl_seconds();
        let is_refused = call.request.headers.get(EXPIRY).and_then(expiry).is_none();
        is_refused.then(|| (format!("the field `{EXPIRY}` with 1 to {most} seconds"), StatusCode(400)))
    }

    fn about(&self) -> &'static str {
        "a token for 1 to 86400 s"
    }
}

/// Parses a token lifetime in seconds; `None` outside the allowed range.
fn expiry(field: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(field).ok()?;
    let seconds = digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok())??;
    (1..=TokenKind::Akamai.longest_ttl_seconds()).contains(&seconds).then_some(seconds)
}
