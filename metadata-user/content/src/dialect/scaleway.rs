//! Scaleway, at its own addresses: a document in shell syntax or JSON, user-data and vendor-data for root only, and a
//! state that the guest sets.
//!
//! A source port below 1024 proves root. cloud-init (`DataSourceScaleway.py`) requests both payloads from port 1, one
//! right after the other. So the server closes the connection: TIME-WAIT on the guest's side would block the port.

use std::net::IpAddr;

use bytes::Bytes;
use serde_json::Value;

use super::common::{IpVersion, cloud_init, gateway, given, known, labels, payload_text};
use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT, computed};
use super::{AccessCondition, Description, Mount};
use crate::dialect::json::json;
use crate::http::{Body, Method, Response, StatusCode};
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

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    routes.at(Host::Scaleway);
    routes.text("/", "api-metadata\n");
    let (mut document, old) = (conf(record), addresses_of_old(record));
    let json = routes.json(&document);
    let once = routes.bytes(old.to_string().into_bytes());
    if let (Value::Object(members), Value::Object(old)) = (&mut document, old) {
        members.extend(old);
    }
    let mut shell = String::new();
    for (name, value) in document.as_object().into_iter().flatten() {
        assign(&shell_name(name), value, &mut shell);
    }
    let shell = routes.bytes(shell);
    let leases = given(&record.network).next().filter(|(_, nic, _)| is_lease_unknown(nic));
    let leased = leases.map(|(_, nic, _)| nic.eni_id().unwrap_or_default());
    let conf = Conf { response: json, old: once, shell: routes.found(TEXT, shell), leased };
    routes.live("/conf", Methods::READ, &[], conf);
    let keys = if record.user_data.is_some() { json!(["cloud-init"]) } else { json!([]) };
    let keys = routes.json(&json!({ "user_data": keys })).and_close();
    for (path, payload, keys) in [
        ("/user_data", &record.user_data, Some(routes.share(keys))),
        ("/vendor_data", &record.vendor_data, None),
    ] {
        let response = response(payload.as_ref(), routes).and_close();
        let response = routes.share(response);
        // The payload at its path, where systemd reads it, and as `cloud-init` below. Scaleway's library asks at the
        // path of user-data for the list of keys in JSON.
        let folder = computed("for source ports below 1024", move |call| {
            let (_, port) = call.connection.remote;
            match (call.rest, &keys) {
                _ if port >= FIRST_OPEN_PORT => Response::error(StatusCode(403), &[]),
                ("", Some(keys)) if asks_for_json(call) => keys.clone(),
                ("" | "/cloud-init", _) => response.clone(),
                _ => Response::error(StatusCode(404), &[]).and_close(),
            }
        });
        routes.live_below(path, Methods::READ, &[], folder);
    }
    let state = computed("forwards the guest's state", |call| {
        let (vm, now) = (call.vm, call.now.unix_seconds);
        vm.mailbox.send(&vm.sinks, MessageKind::Ready, call.request.body, now);
        Response::new(StatusCode(200), Some(JSON), &[], "{}")
    });
    routes.live("/state", Methods::of(&[Method::Patch]), &[], state);
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

fn response(payload: Option<&Payload>, routes: &mut RouteBuilder<'_>) -> Response {
    if payload.is_none() {
        return Response::error(StatusCode(404), &[]);
    }
    match payload_text(payload) {
        Some(text) => {
            let bytes = routes.bytes(text);
            routes.found(BYTES, bytes)
        }
        None => routes.unread(),
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::render as render_for;
    use crate::dialect::tests::{TestRequest, full, parse, rendered};
    use crate::http::{Method, Response};
    use crate::mailbox::Mailbox;
    use crate::sink;
    use crate::store::{Interner, Responses, VmState};

    const V4: &str = "169.254.42.42";

    fn get(responses: &Responses, address: &str, source_port: u16, path: &str) -> Response {
        let request = TestRequest::new(Method::Get, path, &[]);
        TestRequest { local: (address, 80), source_port, ..request }.answer(responses)
    }

    fn conf(nic: Value) -> Value {
        let mut record = full();
        record["network"]["nics"] = json!([nic]);
        let answer = get(&rendered(&record), "fd00:42::42", 40_000, "/conf?format=json");
        serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
    }

    /// Returns `public_ips`, and asserts that the lists by family have the same entries.
    fn addresses(nic: Value) -> Value {
        let conf = conf(nic);
        for (name, family) in [("public_ips_v4", "inet"), ("public_ips_v6", "inet6")] {
            let all = conf["public_ips"].as_array().expect("a list").iter();
            let expected: Value = all.filter(|entry| entry["family"] == family).cloned().collect();
            assert_eq!(conf[name], expected, "{name}");
        }
        conf["public_ips"].clone()
    }

    #[test]
    fn the_old_ipv6_address_has_a_gateway() {
        let nic = |gateway: Option<&str>| {
            let mut entry = json!({"method": "static", "address": "2001:db8::5/64"});
            if let Some(gateway) = gateway {
                entry["gateway"] = gateway.into();
            }
            json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [entry]})
        };
        let with = json!({"address": "2001:db8::5", "gateway": "fe80::1", "netmask": "64"});
        assert_eq!(conf(nic(Some("fe80::1")))["ipv6"], with);
        assert_eq!(conf(nic(None))["ipv6"], Value::Null);
    }

    #[test]
    fn the_keys_of_user_data_are_listed_in_json() {
        let mut record = full();
        let keys = |record: &Value, path: &str| {
            let answer = get(&rendered(record), V4, 1, path);
            (answer.closes(), serde_json::from_slice::<Value>(&answer.body().to_bytes()).ok())
        };
        let listed = |keys: Value| (true, Some(json!({ "user_data": keys })));
        assert_eq!(keys(&record, "/user_data?format=json"), listed(json!(["cloud-init"])));
        assert_eq!(keys(&record, "/vendor_data?format=json"), (true, None));
        record.as_object_mut().expect("an object").remove("user_data");
        assert_eq!(keys(&record, "/user_data?format=json"), listed(json!([])));
    }

    #[test]
    fn an_unknown_lease_is_the_address_from_which_the_guest_asks() {
        let leased = json!({"method": "dhcp4"});
        let fixed = json!({"method": "static", "address": "2001:db8::5/64", "gateway": "fe80::1"});
        for (list, count) in [(json!([leased]), 1), (json!([leased, fixed]), 2), (json!([fixed]), 1)] {
            let is_leased = list[0] == leased;
            let found = addresses(json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": list}));
            let found = found.as_array().expect("a list");
            assert_eq!(found.len(), count, "{list}");
            let lease = json!({
                "address": "10.0.2.15", "dynamic": false, "family": "inet", "gateway": "",
                "id": "eni-d4dd82cf2995e2454", "netmask": "32", "provisioning_mode": "dhcp",
            });
            assert_eq!(found[0] == lease, is_leased, "{list}");
        }
    }

    #[test]
    fn ipv6_addresses_follow_the_leased_one() {
        let found = addresses(json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
            {"method": "static", "address": "2001:db8::5/64", "gateway": "fe80::1"},
            {"method": "static", "address": "10.0.0.5/24"},
            {"method": "dhcp4", "address": "10.0.1.5/24"},
        ]}));
        let order: Vec<&Value> =
            found.as_array().expect("a list").iter().map(|entry| &entry["address"]).collect();
        assert_eq!(order, ["10.0.1.5", "10.0.0.5", "2001:db8::5"]);
    }

    #[test]
    fn the_document_is_shell_syntax_unless_the_request_asks_for_json() {
        let mut record = full();
        record["ssh_keys"] = json!([
            {"name": "a", "key": "ssh-ed25519 AAAA alice's laptop"}, {"name": "b", "key": "ssh-ed25519 BBBB"},
        ]);
        let responses = rendered(&record);
        let answer = get(&responses, V4, 40_000, "/conf");
        assert_eq!(answer.field("Content-Type"), Some("text/plain; charset=utf-8"));
        let text = String::from_utf8(answer.body().to_bytes().to_vec()).expect("text");
        let lines: Vec<&str> = text.lines().collect();
        for line in [
            "HOSTNAME=web-1",
            "ID=7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d",
            "LOCATION=ZONE_ID",
            "LOCATION_ZONE_ID=local-a",
            "PRIVATE_IP=10.0.2.15",
            "PUBLIC_IP_ADDRESS=203.0.113.7",
            "SSH_PUBLIC_KEYS=2",
            "SSH_PUBLIC_KEYS_0_KEY='ssh-ed25519 AAAA alice'\"'\"'s laptop'",
            "SSH_PUBLIC_KEYS_1_KEY='ssh-ed25519 BBBB'",
            "TAGS_0=web",
            "VOLUMES=",
        ] {
            assert!(lines.contains(&line), "{line} in\n{text}");
        }
        for query in ["?format=json", "?format=JSON&x"] {
            let answer = get(&responses, V4, 40_000, &format!("/conf{query}"));
            assert_eq!(answer.field("Content-Type"), Some("application/json"), "{query}");
        }
    }

    #[test]
    fn payloads_are_for_ports_below_1024_and_the_server_closes_the_connection() {
        let responses = rendered(&full());
        for path in ["/user_data", "/user_data/cloud-init", "/vendor_data", "/vendor_data/cloud-init"] {
            for port in [1, 2, 1_023] {
                let answer = get(&responses, V4, port, path);
                assert_eq!((answer.status().0, answer.closes()), (200, true), "{path} from {port}");
            }
            for port in [1_024, 65_535] {
                assert_eq!(get(&responses, V4, port, path).status().0, 403, "{path} from {port}");
            }
        }
        let other = get(&responses, V4, 1, "/user_data/other");
        assert_eq!((other.status().0, other.closes()), (404, true));
        assert_eq!(get(&responses, "169.254.169.254", 1, "/user_data").status().0, 404);
    }

    #[test]
    fn payloads_without_a_text_form_are_empty_and_unread_ones_are_503() {
        let mut record = full();
        let mut user_data = |payload: Value| {
            record["user_data"] = payload;
            let answer = get(&rendered(&record), V4, 1, "/user_data/cloud-init");
            (answer.status().0, answer.closes(), answer.body().len())
        };
        assert_eq!(user_data(json!({"base64": "/wA="})), (200, true, 0));
        assert_eq!(user_data(json!({"text": "x"})), (200, true, 1));
        let (status, closes, _) = user_data(json!({"source": {"file": "user-data"}}));
        assert_eq!((status, closes), (503, true));
    }

    #[test]
    fn the_lease_is_first_and_other_addresses_have_their_own_prefix() {
        let listed = addresses(json!({"id": "n0", "mac": "52:54:00:12:34:56", "addresses": [
            {"method": "static", "address": "198.51.100.9/24", "gateway": "198.51.100.1"},
            {"method": "slaac", "address": "2001:db8::15/64", "gateway": "fe80::1"},
            {"method": "static", "address": "2001:db8:1::15/64"},
            {"method": "dhcp4", "address": "10.0.2.15/24", "gateway": "10.0.2.2", "public": "203.0.113.7"},
            {"method": "dhcp6"},
        ]}));
        let entry = |address: &str, family: &str, gateway: &str, netmask: &str, mode: &str| {
            json!({
                "address": address, "dynamic": false, "family": family, "gateway": gateway,
                "id": "eni-d4dd82cf2995e2454", "netmask": netmask, "provisioning_mode": mode,
            })
        };
        let wanted = json!([
            entry("10.0.2.15", "inet", "10.0.2.2", "32", "dhcp"),
            entry("198.51.100.9", "inet", "198.51.100.1", "24", "manual"),
            entry("2001:db8::15", "inet6", "fe80::1", "64", "slaac"),
        ]);
        assert_eq!(listed, wanted, "an IPv6 address without a gateway would make an invalid route");
    }

    #[test]
    fn a_state_reaches_the_sink_and_only_patch_sets_it() {
        let mut record = full();
        record["sinks"] = json!({"ready": "file:/var/log/guests.jsonl"});
        let record = parse(&record);
        let outbox = sink::unattended();
        let uuid = record.vm.uuid.as_str();
        let vm = VmState {
            mailbox: Mailbox::new(uuid, &outbox).into(),
            sinks: record.sinks.clone(),
            ..VmState::alone(uuid)
        };
        let responses = render_for(&record, &mut Interner::new(), vm);
        let patch = |method| {
            let (request, body) = (TestRequest::new(method, "/state", &[]), br#"{"state_detail":"booted"}"#);
            TestRequest { local: (V4, 80), body, ..request }.answer(&responses)
        };
        let answer = patch(Method::Patch);
        assert_eq!((answer.status().0, answer.body().to_bytes().as_ref()), (200, &b"{}"[..]));
        assert_eq!(outbox.counts().waiting, 1);
        let refused = patch(Method::Get);
        assert_eq!((refused.status().0, refused.field("Allow")), (405, Some("PATCH")));
        assert_eq!(outbox.counts().waiting, 1);
    }

    #[test]
    fn old_names_of_addresses_are_null_for_cloud_init_only() {
        let document = |record: &Value, agent: &str| -> Value {
            let fields = [("User-Agent", agent)];
            let request = TestRequest::new(Method::Get, "/conf?format=json", &fields);
            let answer = TestRequest { local: (V4, 80), ..request }.answer(&rendered(record));
            serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
        };
        let v4 = json!({"method": "static", "address": "198.51.100.9/24"});
        let nat = json!({"method": "static", "address": "10.0.2.15/24", "public": "203.0.113.7"});
        let v6 = json!({"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"});
        let id = "eni-d4dd82cf2995e2454";
        let six = json!({"address": "2001:db8::15", "gateway": "fe80::1", "netmask": "64"});
        let public = |address: &str| json!({"address": address, "dynamic": false, "id": id});
        for (addresses, role, members) in [
            (json!([nat, v6]), "public", [json!("10.0.2.15"), public("203.0.113.7"), six]),
            (json!([v4]), "public", [json!(null), public("198.51.100.9"), json!(null)]),
            (json!([v4]), "private", [json!("198.51.100.9"), json!(null), json!(null)]),
            (json!([{"method": "dhcp4"}]), "public", [json!(null), json!(null), json!(null)]),
        ] {
            let mut record = full();
            record["network"]["nics"][0]["addresses"] = addresses;
            record["network"]["nics"][0]["role"] = role.into();
            let (mut others, mut cloud_init) =
                (document(&record, "curl/7.88.1"), document(&record, "Cloud-Init/22.4.2"));
            let names = ["private_ip", "public_ip", "ipv6"];
            let take = |document: &mut Value| {
                names.map(|name| document.as_object_mut().and_then(|members| members.remove(name)))
            };
            assert_eq!(take(&mut others), members.map(Some), "{record}");
            assert_eq!(take(&mut cloud_init), [const { Some(Value::Null) }; 3]);
            assert_eq!(cloud_init, others);
        }
    }
}
