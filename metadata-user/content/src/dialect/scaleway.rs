//! Scaleway, at its own addresses: a document in shell syntax or JSON, user-data and vendor-data for root only, and a
//! state that the guest sets.
//!
//! A source port below 1024 proves root. cloud-init (`DataSourceScaleway.py`) requests both payloads from port 1, one
//! right after the other. So the server closes the connection: TIME-WAIT on the guest's side would block the port.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use bytes::Bytes;
use serde_json::Value;

use super::common::cloud_init;
use super::record_values::{IpVersion, gateway, given, known, labels, payload_text};
use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT};
use super::{AccessCondition, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Body, Method as Verb, Response, StatusCode};
use crate::record::network::{Address, AddressMethod};
use crate::record::values::Cidr;
use crate::record::vm::Payload;
use crate::record::{Nic, Record, Role};
use crate::sink::MessageKind;
use crate::store::{Host, LiveOutcome, LiveRequest, LiveRoute, Methods};

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/").at(Host::Scaleway),
        Mount::open("/user_data").at(Host::Scaleway).needs(AccessCondition::LowPort),
        Mount::open("/vendor_data").at(Host::Scaleway).needs(AccessCondition::LowPort),
    ],
    "`DataSourceScaleway`; ohai; systemd-imdsd",
    render,
)
.remark("`/conf`, `PATCH /state`");

/// First port that every user may bind on Linux (`ip_unprivileged_port_start`).
const FIRST_OPEN_PORT: u16 = 1_024;

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    sheet.at(Host::Scaleway);
    sheet.text("/", "api-metadata\n");
    let (mut document, old) = (conf(record), addresses_of_old(record));
    let json = sheet.json(&document);
    let once = sheet.bytes(old.to_string().into_bytes());
    if let (Value::Object(members), Value::Object(old)) = (&mut document, old) {
        members.extend(old);
    }
    let mut shell = String::new();
    for (name, value) in document.as_object().into_iter().flatten() {
        assign(&shell_name(name), value, &mut shell);
    }
    let shell = sheet.bytes(shell);
    let leases = given(&record.network).next().filter(|(_, nic, _)| is_lease_unknown(nic));
    let leased = leases.map(|(_, nic, _)| nic.eni_id().unwrap_or_default());
    let conf = Conf { response: json, old: once, shell: sheet.found(TEXT, shell), leased };
    sheet.live("/conf", Methods::READ, &[], conf);
    let keys = if record.user_data.is_some() { json!(["cloud-init"]) } else { json!([]) };
    let keys = sheet.json(&json!({ "user_data": keys })).and_close();
    for (path, payload, keys) in [
        ("/user_data", &record.user_data, Some(sheet.share(keys))),
        ("/vendor_data", &record.vendor_data, None),
    ] {
        let response = response(payload.as_ref(), sheet).and_close();
        let response = sheet.share(response);
        sheet.live_below(path, Methods::READ, &[], PayloadFolder { response, keys });
    }
    sheet.live("/state", Methods::of(&[Verb::Patch]), &[], State);
}

/// The document, preceded by the members that Scaleway had before `public_ips` and that Afterburn reads. They are
/// null for cloud-init: versions before 26.1 read `ipv6` unconditionally, and those from 24.1 on read `public_ips`
/// only without a `private_ip`.
///
/// Scripts such as Alpine's tiny-cloud read it as assignments in shell syntax, which is the default; `format=json` asks
/// for JSON.
#[derive(Debug)]
struct Conf {
    response: Response,
    /// Object with the old members.
    old: Bytes,
    /// All members in shell syntax.
    shell: Response,
    /// Id of the first NIC, if its lease is unknown.
    leased: Option<String>,
}

/// The starts of the lists of addresses in which a lease belongs, in the order of the document. They cannot be part of
/// a string, where quotes are escaped.
const ADDRESSES: [&[u8]; 2] = [b"\"public_ips\":[", b"\"public_ips_v4\":["];

impl LiveRoute for Conf {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if !asks_for_json(call) {
            return self.shell.clone().into();
        }
        let old = if cloud_init(call.request).is_some() {
            Bytes::from_static(NO_OLD_ADDRESSES)
        } else {
            self.old.clone()
        };
        let document = self.response.body().to_bytes();
        let mut parts = vec![old.slice(..old.len() - 1), Bytes::from_static(b",")];
        let mut written = 1;
        if let Some(lease) = self.lease(call) {
            let lease = Bytes::from(lease.to_string().into_bytes());
            for start in ADDRESSES {
                let Some(at) = document.windows(start.len()).position(|part| part == start) else { continue };
                let at = at + start.len();
                let comma: &[u8] = if document[at..].starts_with(b"]") { b"" } else { b"," };
                parts.extend([document.slice(written..at), lease.clone(), Bytes::from_static(comma)]);
                written = at;
            }
        }
        parts.push(document.slice(written..));
        Response::new(StatusCode(200), Some(JSON), &[], Body::join(parts)).into()
    }

    fn about(&self) -> &'static str {
        "the document; for cloud-init, with addresses in public_ips only"
    }
}

fn asks_for_json(call: &LiveRequest<'_>) -> bool {
    let mut query = form_urlencoded::parse(call.request.target.query.as_bytes());
    query.any(|(name, value)| name == "format" && value.eq_ignore_ascii_case("json"))
}

impl Conf {
    /// Returns the address from which the guest asks, if its first NIC has a lease that the record does not know.
    /// Without it, cloud-init would turn DHCP off, because it looks for its own lease in the list.
    fn lease(&self, call: &LiveRequest<'_>) -> Option<Value> {
        let id = self.leased.as_ref()?;
        match call.connection.remote.0 {
            IpAddr::V4(address) if !address.is_link_local() => Some(json!({
                "address": address.to_string(),
                "dynamic": false,
                "family": "inet",
                "gateway": "",
                "id": id.as_str(),
                "netmask": "32",
                "provisioning_mode": "dhcp",
            })),
            _ => None,
        }
    }
}

fn is_lease_unknown(nic: &Nic) -> bool {
    nic.addresses.iter().any(|address| address.method == AddressMethod::Dhcp4 && address.address.is_none())
}

/// Writes a value as assignments: a list as its length and its items, an object as its names and its members.
fn assign(name: &str, value: &Value, text: &mut String) {
    let own = match value {
        Value::Array(items) => items.len().to_string(),
        Value::Object(members) => members.keys().map(|key| shell_name(key)).collect::<Vec<_>>().join(" "),
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    };
    *text += &format!("{name}={}\n", shell_word(&own));
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(n, item)| assign(&format!("{name}_{n}"), item, text));
        }
        Value::Object(members) => {
            for (key, member) in members {
                assign(&format!("{name}_{}", shell_name(key)), member, text);
            }
        }
        _ => {}
    }
}

/// Returns a member's name as a shell variable.
fn shell_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect()
}

/// Returns a text as one word of a shell. Clients that split lines at `=` do not remove quotes, so a plain word has
/// none.
fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "@%+=:,./-_".contains(c);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\"'\"'")) }
}

const NO_OLD_ADDRESSES: &[u8] = b"{\"ipv6\":null,\"private_ip\":null,\"public_ip\":null}";

/// Returns the first address of each kind of the first NIC, under the names used before `public_ips`.
fn addresses_of_old(record: &Record) -> Value {
    let (mut private, mut public, mut v6) = (Value::Null, Value::Null, Value::Null);
    if let Some((n, nic, _)) = given(&record.network).next() {
        let local = known(nic, IpVersion::V4).next().map(|(_, cidr)| cidr.address.to_string());
        let translated = nic.public_ipv4().next().map(|address| address.to_string());
        let is_public = translated.is_none() && record.role(n) == Role::Public;
        let (inner, outer) = if is_public { (None, local) } else { (local, translated) };
        private = inner.into();
        public = outer.map_or(
            Value::Null,
            |address| json!({ "address": address, "dynamic": false, "id": nic.eni_id() }),
        );
        // Without a gateway, Talos refuses the document.
        let mut routed = known(nic, IpVersion::V6).filter(|(address, _)| address.gateway.is_some());
        if let Some((address, cidr)) = routed.next() {
            v6 = json!({
                "address": cidr.address.to_string(),
                "gateway": gateway(address),
                "netmask": cidr.prefix.to_string(),
            });
        }
    }
    json!({ "ipv6": v6, "private_ip": private, "public_ip": public })
}

fn response(payload: Option<&Payload>, sheet: &mut RouteBuilder<'_>) -> Response {
    if payload.is_none() {
        return Response::error(StatusCode(404), &[]);
    }
    match payload_text(payload) {
        Some(text) => {
            let bytes = sheet.bytes(text);
            sheet.found(BYTES, bytes)
        }
        None => sheet.unread(),
    }
}

fn conf(record: &Record) -> Value {
    let keys = record.ssh_keys.iter().map(|key| json!({ "fingerprint": "", "key": key.key.as_str() }));
    let zone = record.placement.zone.as_str();
    let addresses = given(&record.network).next().map_or_else(Vec::new, |(_, nic, _)| addresses(nic));
    let of = |family: &str| {
        addresses.iter().filter(|entry| entry["family"] == family).cloned().collect::<Vec<_>>()
    };
    json!({
        "commercial_type": record.instance_type(),
        "hostname": record.hostname.short.as_str(),
        "id": record.vm.uuid.as_str(),
        "location": { "zone_id": zone },
        "name": record.vm.name.as_str(),
        "organization": record.vm.project.account.as_str(),
        "private_nics": [],
        "project": record.vm.project.id.as_str(),
        // Talos asks for a lease only if it finds an address here.
        "public_ips_v4": of("inet"),
        "public_ips_v6": of("inet6"),
        "public_ips": addresses,
        "ssh_public_keys": keys.collect::<Vec<_>>(),
        "tags": labels(record),
        "volumes": {},
        "zone": zone,
    })
}

/// Returns the first NIC's own addresses, the leased one first: cloud-init compares that with its lease and keeps DHCP
/// only if they are equal. It configures the other addresses as listed. IPv6 comes last, because versions before 24.2
/// forget the routes of the addresses before the leased one.
fn addresses(nic: &Nic) -> Vec<Value> {
    let mut known: Vec<(&Address, Cidr)> =
        nic.addresses.iter().filter_map(|address| Some((address, address.address?))).collect();
    known.sort_by_key(|(address, cidr)| (cidr.address.is_ipv6(), address.method != AddressMethod::Dhcp4));
    known.into_iter().filter_map(|(address, cidr)| entry(nic, address, cidr)).collect()
}

/// Returns one address; `None` for IPv6 without a gateway, from which cloud-init would make an invalid default route.
fn entry(nic: &Nic, address: &Address, cidr: Cidr) -> Option<Value> {
    let is_v4 = IpVersion::of_entry(address) == IpVersion::V4;
    if !is_v4 && address.gateway.is_none() {
        return None;
    }
    let (mode, prefix) = match address.method {
        // Scaleway leases single addresses: its routers are outside their network.
        AddressMethod::Dhcp4 => ("dhcp", 32),
        AddressMethod::Dhcp6 => ("dhcp", cidr.prefix),
        AddressMethod::Slaac => ("slaac", cidr.prefix),
        AddressMethod::Static => ("manual", cidr.prefix),
    };
    Some(json!({
        "address": cidr.address.to_string(),
        "dynamic": false,
        "family": if is_v4 { "inet" } else { "inet6" },
        "gateway": gateway(address),
        "id": nic.eni_id(),
        "netmask": prefix.to_string(),
        "provisioning_mode": mode,
    }))
}

/// Serves a payload at its path, where systemd reads it, and as `cloud-init` below.
#[derive(Debug)]
struct PayloadFolder {
    response: Response,
    /// The list of keys in JSON, of which Scaleway's library asks at the path of user-data.
    keys: Option<Response>,
}

impl LiveRoute for PayloadFolder {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let (_, port) = call.connection.remote;
        match call.rest {
            _ if port >= FIRST_OPEN_PORT => Response::error(StatusCode(403), &[]).into(),
            "" if let Some(keys) = self.keys.as_ref().filter(|_| asks_for_json(call)) => keys.clone().into(),
            "" | "/cloud-init" => self.response.clone().into(),
            _ => Response::error(StatusCode(404), &[]).and_close().into(),
        }
    }

    fn about(&self) -> &'static str {
        "for source ports below 1024"
    }
}

/// Forwards the guest's state to `sinks.ready`.
#[derive(Debug)]
struct State;

impl LiveRoute for State {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let (vm, now) = (call.vm, call.now.unix_seconds);
        vm.mailbox.send(&vm.sinks, MessageKind::Ready, call.request.body, now);
        Response::new(StatusCode(200), Some(JSON), &[], "{}").into()
    }

    fn about(&self) -> &'static str {
        "forwards the guest's state"
    }
}
