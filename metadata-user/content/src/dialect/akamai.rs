//! Akamai (Linode): JSON documents and user-data for requests with a token.
//!
//! cloud-init (`DataSourceAkamai.py`) drops both keys and user-data on any error. So user-data always exists and may
//! be empty. A request for `/v1/user-data` without a token gets NoCloud's user-data.

#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::addresses::{Version, given, known, labels, public_keys};
use super::sheet::{Sheet, TEXT};
use super::{Access, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Method, Response, Status};
use crate::record::vm::Payload;
use crate::record::{self, Record, Role};
use crate::store::{Call, Condition, Guard, Live, Methods, Outcome};
use crate::token::Kind;

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/v1/token"),
        Mount::open("/v1/instance").needs(Access::Token(TOKEN)),
        Mount::open("/v1/network").needs(Access::Token(TOKEN)),
        Mount::open("/v1/ssh-keys").needs(Access::Token(TOKEN)),
        Mount::open("/v1/user-data").needs(Access::Token(TOKEN)),
    ],
    "`DataSourceAkamaiLocal`; Afterburn",
    render,
)
.remark("`PUT /v1/token`");

const TOKEN: &str = "Metadata-Token";
const EXPIRY: &str = "Metadata-Token-Expiry-Seconds";

static HAS_TOKEN: LazyLock<[Guard; 1]> = LazyLock::new(|| {
    let condition = Condition::TokenNeeded { name: TOKEN, kind: Kind::Akamai };
    [Guard { condition, otherwise: Response::error(Status(401), &[]) }]
});

static NOT_FORWARDED: LazyLock<[Guard; 1]> = LazyLock::new(|| {
    let condition = Condition::HeaderAbsent { name: "X-Forwarded-For" };
    [Guard { condition, otherwise: Response::error(Status(403), &[]) }]
});

fn render(record: &Record, sheet: &mut Sheet<'_>) {
    let mint = Mint { hop_limit: record.serve.hop_limit.get() };
    sheet.live("/v1/token", Methods::of(&[Method::Put]), &*NOT_FORWARDED, mint);
    for (path, document) in [
        ("/v1/instance", instance(record)),
        ("/v1/network", network(record)),
        ("/v1/ssh-keys", json!({ "users": users(record) })),
    ] {
        let response = sheet.json(&document);
        sheet.guarded(path, &*HAS_TOKEN, response);
    }
    let user_data = match record.user_data.as_ref().map(Payload::bytes) {
        None => sheet.found(TEXT, ""),
        Some(Some(octets)) => {
            let encoded = sheet.octets(STANDARD.encode(octets));
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
        for (address, cidr) in known(nic, Version::V4) {
            let own = if is_public && address.public.is_none() { &mut public } else { &mut private };
            own.push(format!("{}/32", cidr.address));
            if let Some(translated) = address.public.filter(|public| public.0.is_ipv4()) {
                public.push(format!("{translated}/32"));
            }
        }
        v6.extend(known(nic, Version::V6).map(|(_, cidr)| format!("{}/128", cidr.address)));
    }
    let mut v6 = v6.into_iter();
    json!({
        "interfaces": interfaces,
        "ipv4": { "private": private, "public": public, "shared": [] },
        "ipv6": {
            "link_local": "",
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

/// Issues session tokens.
#[derive(Debug)]
struct Mint {
    hop_limit: u8,
}

impl Live for Mint {
    fn answer(&self, call: &Call<'_>) -> Outcome {
        let Some(seconds) = call.request.headers.get(EXPIRY).and_then(expiry) else {
            return Response::error(Status(400), &[]).into();
        };
        let vm = call.vm;
        let token = vm.keyring.mint(Kind::Akamai, &vm.owner, seconds, call.now.unix_seconds);
        let fields = [(EXPIRY, &*seconds.to_string())];
        Response::new(Status(200), Some(TEXT), &fields, token).within(self.hop_limit).into()
    }

    fn about(&self) -> &'static str {
        "a token for 1 to 86400 s"
    }
}

/// Parses a token lifetime in seconds; `None` outside the allowed range.
fn expiry(field: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(field).ok()?;
    let seconds = digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok())??;
    (1..=Kind::Akamai.longest_ttl_seconds()).contains(&seconds).then_some(seconds)
}
