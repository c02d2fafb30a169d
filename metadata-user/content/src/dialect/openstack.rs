//! OpenStack's tree as Nova serves it (`nova/api/metadata/base.py`): JSON documents below `/openstack/<version>/`,
//! injected files, and a password that the guest can post once.
//!
//! Every version has the newest documents; clients ignore unknown keys. Only the first version lacks the password.
//! Absent documents are 404, absent vendor-data is `{}`; neither delays cloud-init.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value};

use super::common::text_form;
use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT, computed};
use super::tokens::UNPROXIED;
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::http::{Method, Response, StatusCode};
use crate::mailbox::PasswordRefused;
use crate::record::network::{Address, AddressMethod, Network, NetworkMode, NicRoute};
use crate::record::values::{Line, NicMac, Secret};
use crate::record::vm::{Disk, Payload};
use crate::record::{Dialect, Nic, Record};
use crate::sink::MessageKind;
use crate::store::path::OPENSTACK_VERSIONS;
use crate::store::{LiveRequest, Methods, RequestGuard};

/// EVE's guests read the same tree.
pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/openstack").waits(Duration::from_secs(8))],
    "cloud-init 22.4 booted; `DataSourceOpenStackLocal`",
    render,
)
.also_for(&[Dialect::Eve])
.remark("eleven versions, with `password` and `content/`; also EC2's tree");

/// Version without a password; Nova's Grizzly release added it.
const WITHOUT_PASSWORD: &str = OPENSTACK_VERSIONS[0];

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    // A record that serves EVE alone has one version; EVE's guests request no other.
    let versions = if record.serve.serves(Dialect::OpenStack) {
        format!("{}\nlatest", OPENSTACK_VERSIONS.join("\n"))
    } else {
        "latest\n".to_owned()
    };
    routes.text("/openstack", versions);
    let meta_data = routes.json(&meta_data(record));
    // The answers contain a password.
    let guards: &[RequestGuard] = if admin_password(record).is_some() { &*UNPROXIED } else { &[] };
    routes.guarded("/openstack/latest/meta_data.json", guards, meta_data);
    if let Some(payload) = &record.user_data {
        let response = routes.payload(payload);
        routes.open("/openstack/latest/user_data", response);
    }
    for (path, payload) in [
        ("/openstack/latest/vendor_data.json", &record.vendor_data),
        ("/openstack/latest/vendor_data2.json", &record.vendor_data2),
    ] {
        let response = vendor_data(payload.as_ref(), routes);
        routes.open(path, response);
    }
    let network = match &record.network.network_data {
        Some(Value::String(text)) if record.network.mode == NetworkMode::Raw => {
            Some(routes.found(JSON, text.clone()))
        }
        Some(given) if record.network.mode == NetworkMode::Raw => Some(routes.json(given)),
        _ => network_data(record).map(|document| routes.json(&document)),
    };
    let has_network = network.is_some();
    if let Some(response) = network {
        routes.open("/openstack/latest/network_data.json", response);
    }
    for (n, file) in record.files.iter().enumerate() {
        let bytes = routes.bytes(file.base64.0.clone());
        let response = routes.found(BYTES, bytes);
        routes.open(format!("/openstack{}", content_path(n)), response);
    }
    let mut listing = |password| {
        let names = names(record.user_data.is_some(), password, has_network);
        routes.found(TEXT, names.join("\n"))
    };
    let (first, later) = (listing(false), listing(true));
    let about = "the names of existing documents";
    let names =
        move |call: &LiveRequest<'_>| if is_without_password(call) { first.clone() } else { later.clone() };
    routes.live("/openstack/latest", Methods::READ, &[], computed(about, names));
    let methods = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    let password = computed("the password that the guest posted, once", password);
    routes.live("/openstack/latest/password", methods, &*UNPROXIED, password);
}

/// Returns the names of the documents that exist, for the listing of a version.
fn names(user_data: bool, password: bool, network: bool) -> Vec<&'static str> {
    let names = [
        ("meta_data.json", true),
        ("password", password),
        ("user_data", user_data),
        ("vendor_data.json", true),
        ("network_data.json", network),
        ("vendor_data2.json", true),
    ];
    names.into_iter().filter_map(|(name, is_there)| is_there.then_some(name)).collect()
}

fn content_path(n: usize) -> String {
    format!("/content/{n:04}")
}

fn admin_password(record: &Record) -> Option<&str> {
    record.admin.as_ref()?.password.as_ref().map(Secret::expose)
}

fn meta_data(record: &Record) -> Value {
    let mut document = json!({
        "uuid": record.instance_id(),
        "hostname": record.hostname.fqdn(),
        "name": record.vm.name.as_str(),
        "launch_index": record.vm.launch_index,
        "availability_zone": record.placement.zone.as_str(),
        "project_id": record.vm.project.id.as_str(),
        "devices": devices(record),
        "dedicated_cpus": [],
    });
    let mut add = |key: &str, value: Value| document[key] = value;
    if !record.ssh_keys.is_empty() {
        let keys = record.ssh_keys.iter();
        let named = keys.clone().map(|key| (key.name.to_string(), key.key.as_str().into()));
        add("public_keys", Value::Object(named.collect()));
        let listed =
            keys.map(|key| json!({ "name": key.name.as_str(), "type": "ssh", "data": key.key.as_str() }));
        add("keys", listed.collect());
    }
    let password = admin_password(record);
    let meta = meta(record, password.is_some());
    if !meta.is_empty() {
        add("meta", meta.into());
    }
    if let Some(password) = password {
        add("admin_pass", password.into());
    }
    if let Some(seed) = &record.random_seed {
        add("random_seed", STANDARD.encode(&seed.base64.0).into());
    }
    if !record.files.is_empty() {
        let files = record.files.iter().enumerate();
        let files =
            files.map(|(n, file)| json!({ "path": file.path.as_str(), "content_path": content_path(n) }));
        add("files", files.collect());
    }
    document
}

/// Returns the custom keys without `dsmode`, which would change cloud-init's mode against the operator's choice. Leaves
/// out `admin_pass` if the document has one, because cloudbase-init would prefer the custom key.
fn meta(record: &Record, password: bool) -> Map<String, Value> {
    let entries = record.metadata.0.iter();
    let entries = entries.filter(|(key, _)| *key != "dsmode" && !(password && *key == "admin_pass"));
    entries.map(|(key, value)| (key.clone(), value.as_str().into())).collect()
}

/// Returns the disks. Nova also lists NICs, but only for tags, which records do not have for NICs.
fn devices(record: &Record) -> Value {
    let device = |disk: &Disk| {
        let mut device = json!({
            "type": disk.kind.as_str(),
            "bus": disk.bus.as_str(),
            "address": disk.address.as_str(),
            "tags": disk.tags.iter().map(Line::as_str).collect::<Vec<_>>(),
        });
        if let Some(serial) = &disk.serial {
            device["serial"] = serial.as_str().into();
        }
        device
    };
    record.disks.iter().map(device).collect()
}

/// Renders vendor-data as an object with the only member that cloud-init reads. Many VMs share it. JSON cannot carry
/// bytes that are not text.
fn vendor_data(payload: Option<&Payload>, routes: &mut RouteBuilder<'_>) -> Response {
    let Some(payload) = payload else { return routes.found(JSON, "{}") };
    let Some(bytes) = payload.bytes() else { return routes.unread() };
    let document = text_form(&bytes).map_or_else(|| json!({}), |text| json!({ "cloud-init": text }));
    let body = routes.document(&document).body();
    routes.found(JSON, body)
}

fn is_without_password(call: &LiveRequest<'_>) -> bool {
    call.request.target.path.split('/').any(|segment| segment == WITHOUT_PASSWORD)
}

/// Serves the password that the guest generated and encrypted for the owner of the VM's key, and takes it once.
fn password(call: &LiveRequest<'_>) -> Response {
    let answer = |status: u16| Response::error(StatusCode(status), &[]);
    if is_without_password(call) {
        return answer(404);
    }
    let mailbox = &call.vm.mailbox;
    let ok = |bytes: Bytes| Response::new(StatusCode(200), Some(TEXT), &[], bytes);
    if call.request.method != Method::Post {
        return ok(mailbox.posted_password());
    }
    match mailbox.post_password(call.request.body) {
        Ok(()) => {
            let body = call.request.body;
            mailbox.send(&call.vm.sinks, MessageKind::Password, body, call.now.unix_seconds);
            ok(Bytes::new())
        }
        Err(PasswordRefused::Empty | PasswordRefused::TooLarge) => answer(400),
        Err(PasswordRefused::AlreadySet) => answer(409),
    }
}

// `network_data.json`: links, the networks on them, and resolvers.

/// Returns the document; `None` in mode `none` and without NICs, because clients read an empty list of links as a guest
/// without NICs.
fn network_data(record: &Record) -> Option<Value> {
    let network = &record.network;
    if network.mode == NetworkMode::None || network.nics.is_empty() {
        return None;
    }
    let mut networks = Vec::new();
    for nic in &network.nics {
        let mut routes: Vec<&NicRoute> = nic.routes.iter().collect();
        for address in &nic.addresses {
            let id = networks.len();
            networks.push(network_of(network, nic, address, &mut routes, id));
        }
    }
    Some(json!({
        "links": network.nics.iter().map(|nic| link(network, nic)).collect::<Vec<_>>(),
        "networks": networks,
        "services": services(network),
    }))
}

fn link(network: &Network, nic: &Nic) -> Value {
    let mut link = Map::new();
    let mut add = |key: &str, value: Value| link.insert(key.to_owned(), value);
    add("id", nic.id.as_str().into());
    add("mtu", nic.mtu.map(|mtu| mtu.get()).into());
    let mac: Value = mac(network, nic).map(|mac| mac.to_string()).into();
    if let Some(vlan) = &nic.vlan {
        add("type", "vlan".into());
        add("vlan_link", vlan.link.as_str().into());
        add("vlan_id", vlan.id.get().into());
        add("vlan_mac_address", mac);
        return link.into();
    }
    add("ethernet_mac_address", mac);
    match &nic.bond {
        Some(bond) => {
            add("type", "bond".into());
            add("bond_links", bond.links.iter().map(|id| id.as_str()).collect());
            add("bond_mode", bond.mode.as_str().into());
            // Options are text, as in the bonding driver: a number makes Talos refuse the document (`,string` in Go).
            // cloud-init makes the same of both.
            let named = [
                ("bond_miimon", bond.miimon.map(|milliseconds| milliseconds.to_string().into())),
                ("bond_xmit_hash_policy", bond.xmit_hash_policy.map(|policy| policy.as_str().into())),
                ("bond_lacp_rate", bond.lacp_rate.map(|rate| rate.as_str().into())),
            ];
            for (key, value) in named {
                if let Some(value) = value {
                    add(key, value);
                }
            }
        }
        None => {
            add("type", "phy".into());
            add("vif_id", nic.id.as_str().into());
        }
    }
    link.into()
}

/// Returns the NIC's MAC, or that of the NIC below it, which the kernel would use. Clients require a MAC.
fn mac(network: &Network, nic: &Nic) -> Option<NicMac> {
    let mut nic = nic;
    // A VLAN may be on a bond, and a bond on NICs. A chain longer than the number of NICs is a loop.
    for _ in 0..network.nics.len() {
        if nic.mac.is_some() {
            return nic.mac;
        }
        let bonded = || nic.bond.as_ref().and_then(|bond| bond.links.first());
        let below = nic.vlan.as_ref().map(|vlan| &vlan.link).or_else(bonded)?;
        nic = network.nics.iter().find(|nic| nic.id == *below)?;
    }
    None
}

/// Returns one network: an address and how the guest gets it. Moves the routes of its IP version out of `routes`.
fn network_of(
    network: &Network,
    nic: &Nic,
    address: &Address,
    routes: &mut Vec<&NicRoute>,
    id: usize,
) -> Value {
    let is_v4 = address.is_ipv4();
    let kind = match address.method {
        AddressMethod::Static if is_v4 => "ipv4",
        AddressMethod::Static => "ipv6",
        AddressMethod::Dhcp4 => "ipv4_dhcp",
        // Every client knows this name. The names of the DHCPv6 modes are newer.
        AddressMethod::Dhcp6 => "ipv6_dhcp",
        AddressMethod::Slaac => "ipv6_slaac",
    };
    let mut document = json!({ "id": format!("network{id}"), "link": nic.id.as_str(), "type": kind });
    let mut add = |key: &str, value: Value| document[key] = value;
    // Nova's schema requires it (`nova/api/metadata/network_data_schema.json`).
    add("network_id", nic.network_id.as_ref().map_or_else(|| nic.id.as_str(), |id| id.as_str()).into());
    let is_static = address.method == AddressMethod::Static;
    let of_family = |route: &&NicRoute| route.to.address.is_ipv4() == is_v4;
    let (own, others): (Vec<_>, Vec<_>) = std::mem::take(routes).into_iter().partition(of_family);
    *routes = others;
    let default = address.gateway.filter(|_| is_static).map(|gateway| {
        let any = if is_v4 { "0.0.0.0" } else { "::" };
        json!({ "network": any, "netmask": any, "gateway": gateway.to_string() })
    });
    let listed: Vec<Value> = default.into_iter().chain(own.into_iter().map(route)).collect();
    if is_static || !listed.is_empty() {
        add("routes", listed.into());
    }
    if let Some(cidr) = address.address.filter(|_| is_static) {
        add("ip_address", cidr.address.to_string().into());
        add("netmask", cidr.netmask().to_string().into());
        add("services", services(network));
    }
    document
}

fn route(route: &NicRoute) -> Value {
    let mut entry = json!({
        "network": route.to.network().address.to_string(),
        "netmask": route.to.netmask().to_string(),
        "gateway": route.via.to_string(),
    });
    if let Some(metric) = route.metric {
        entry["metric"] = metric.into();
    }
    entry
}

fn services(network: &Network) -> Value {
    network.dns.iter().map(|address| json!({ "type": "dns", "address": address.to_string() })).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, rendered};
    use crate::http::{Method, Response};
    use crate::store::Responses;

    fn get(responses: &Responses, path: &str) -> Response {
        ask_with(responses, Method::Get, path, &[], b"")
    }

    fn document(record: &Value, name: &str) -> Value {
        let answer = get(&rendered(record), &format!("/openstack/latest/{name}"));
        assert_eq!(answer.status().0, 200, "{name}");
        serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
    }

    fn text(answer: &Response) -> String {
        String::from_utf8(answer.body().to_bytes().to_vec()).expect("text")
    }

    #[test]
    fn disks_and_files_are_listed_and_files_are_served() {
        let mut record = full();
        record["disks"] = json!([
            {"type": "disk", "bus": "scsi", "address": "1:0:2:0", "serial": "d1", "tags": ["db"]},
            {"type": "disk", "bus": "virtio", "address": "none"},
        ]);
        record["files"] = json!([
            {"path": "/etc/a", "base64": "AP8="},
            {"path": "/etc/b", "base64": ""},
        ]);
        let meta_data = document(&record, "meta_data.json");
        let devices = json!([
            {"type": "disk", "bus": "scsi", "address": "1:0:2:0", "serial": "d1", "tags": ["db"]},
            {"type": "disk", "bus": "virtio", "address": "none", "tags": []},
        ]);
        assert_eq!(meta_data["devices"], devices);
        let files = json!([
            {"path": "/etc/a", "content_path": "/content/0000"},
            {"path": "/etc/b", "content_path": "/content/0001"},
        ]);
        assert_eq!(meta_data["files"], files);
        let responses = rendered(&record);
        assert_eq!(get(&responses, "/openstack/content/0000").body().to_bytes(), &[0, 0xff][..]);
        assert_eq!(get(&responses, "/openstack/content/0001").status().0, 200);
        for path in ["/openstack/content", "/openstack/content/0002", "/openstack/content/0"] {
            assert_eq!(get(&responses, path).status().0, 404, "{path}");
        }
    }

    #[test]
    fn a_password_of_the_record_does_not_reach_proxies() {
        let mut record = full();
        assert_eq!(document(&record, "meta_data.json").get("admin_pass"), None);
        record["metadata"]["admin_pass"] = json!("the tenant's");
        assert_eq!(document(&record, "meta_data.json")["meta"]["admin_pass"], "the tenant's");
        record["admin"]["password"] = json!("s3cret");
        let meta_data = document(&record, "meta_data.json");
        assert_eq!(
            (&meta_data["admin_pass"], &meta_data["meta"]),
            (&json!("s3cret"), &json!({"role": "web"}))
        );
        assert!(!format!("{:?}", rendered(&record)).contains("s3cret"), "a password is in the debug output");
        let forwarded = [("X-Forwarded-For", "")];
        let path = "/openstack/latest/meta_data.json";
        assert_eq!(ask_with(&rendered(&record), Method::Get, path, &forwarded, b"").status().0, 403);
        assert_eq!(ask_with(&rendered(&full()), Method::Get, path, &forwarded, b"").status().0, 200);
    }

    #[test]
    fn absent_documents_are_neither_listed_nor_served() {
        let mut record = full();
        let names =
            |record: &Value, version: &str| text(&get(&rendered(record), &format!("/openstack/{version}")));
        let whole =
            "meta_data.json\npassword\nuser_data\nvendor_data.json\nnetwork_data.json\nvendor_data2.json";
        assert_eq!(names(&record, "latest"), whole);
        assert_eq!(names(&record, "2012-08-10"), whole.replace("password\n", ""));
        for field in ["user_data", "ssh_keys", "metadata", "random_seed", "vendor_data"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        record["network"] = json!({"mode": "none"});
        assert_eq!(names(&record, "latest"), "meta_data.json\npassword\nvendor_data.json\nvendor_data2.json");
        let responses = rendered(&record);
        for name in ["user_data", "network_data.json"] {
            assert_eq!(get(&responses, &format!("/openstack/latest/{name}")).status().0, 404, "{name}");
        }
        let meta_data = document(&record, "meta_data.json");
        let keys: Vec<_> = meta_data.as_object().expect("an object").keys().map(String::as_str).collect();
        let always = [
            "availability_zone",
            "dedicated_cpus",
            "devices",
            "hostname",
            "launch_index",
            "name",
            "project_id",
            "uuid",
        ];
        assert_eq!(keys, always);
        assert_eq!(document(&record, "vendor_data.json"), json!({}));
    }

    #[test]
    fn a_network_is_complete_or_absent() {
        let mut record = full();
        for network in
            [json!({"mode": "none", "nics": record["network"]["nics"]}), json!({}), json!({"nics": []})]
        {
            record["network"] = network;
            assert_eq!(get(&rendered(&record), "/openstack/latest/network_data.json").status().0, 404);
        }
        record["network"] = json!({
            "mode": "raw",
            "raw": {"version": 2},
            "nics": [{"id": "a", "mac": "52:54:00:00:00:01", "addresses": [{"method": "dhcp4"}]}],
        });
        let document = document(&record, "network_data.json");
        assert_eq!(
            document["networks"],
            json!([{"id": "network0", "link": "a", "network_id": "a", "type": "ipv4_dhcp"}])
        );
        assert_eq!(document["links"][0]["mtu"], Value::Null);
        assert_eq!(document["services"], json!([]));
    }

    #[test]
    fn network_data_of_the_record_is_served_unchanged() {
        let mut record = full();
        let nics = record["network"]["nics"].clone();
        // Text keeps its spaces and its order.
        let text = r#"{ "networks": [], "links": [{"type": "phy", "id": "l"}], "services": [] }"#;
        let mapping = json!({"links": [{"id": "l"}], "networks": [], "own": 1});
        for (given, body) in [
            (json!(text), text.to_owned()),
            (mapping.clone(), serde_json::to_string_pretty(&mapping).expect("JSON")),
        ] {
            record["network"] = json!({"mode": "raw", "network_data": given, "nics": nics});
            let responses = rendered(&record);
            let answer = get(&responses, "/openstack/latest/network_data.json");
            assert_eq!(answer.field("Content-Type"), Some("application/json"));
            let value = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
            let found = self::text(&answer);
            assert_eq!(value(&found), value(&body));
            assert!(given.is_object() || found == body, "{found}");
            assert!(self::text(&get(&responses, "/openstack/latest")).contains("network_data.json"));
            // NoCloud does not serve `network_data`.
            assert_eq!(get(&responses, "/v1/network-config").status().0, 204);
        }
    }

    #[test]
    fn bonds_vlans_and_every_method_of_addressing_are_listed() {
        let mut record = full();
        record["network"] = json!({"dns": ["2001:db8::53"], "nics": [
            {"id": "a", "mac": "52:54:00:00:00:01"},
            {"id": "b", "mac": "52:54:00:00:00:02"},
            {"id": "bond", "mtu": 9000, "bond": {"links": ["a", "b"], "mode": "802.3ad", "miimon": 100,
                "xmit_hash_policy": "layer3+4", "lacp_rate": "fast"},
             "addresses": [{"method": "slaac"}, {"method": "dhcp6"}, {"method": "dhcp4", "gateway": "10.0.0.1"}],
             "routes": [{"to": "10.1.2.3/8", "via": "10.0.0.9"}]},
            {"id": "v", "vlan": {"link": "bond", "id": 7},
             "addresses": [{"method": "static", "address": "2001:db8::5/56", "gateway": "fe80::1"}],
             "routes": [{"to": "2001:db8:1::1/48", "via": "2001:db8::9", "metric": 5},
                        {"to": "0.0.0.0/0", "via": "10.0.0.1"}]},
        ]});
        let document = document(&record, "network_data.json");
        let links = json!([
            {"id": "a", "type": "phy", "vif_id": "a", "mtu": null, "ethernet_mac_address": "52:54:00:00:00:01"},
            {"id": "b", "type": "phy", "vif_id": "b", "mtu": null, "ethernet_mac_address": "52:54:00:00:00:02"},
            {"id": "bond", "type": "bond", "mtu": 9000, "ethernet_mac_address": "52:54:00:00:00:01",
             "bond_links": ["a", "b"], "bond_mode": "802.3ad", "bond_miimon": "100",
             "bond_xmit_hash_policy": "layer3+4", "bond_lacp_rate": "fast"},
            {"id": "v", "type": "vlan", "mtu": null, "vlan_link": "bond", "vlan_id": 7,
             "vlan_mac_address": "52:54:00:00:00:01"},
        ]);
        assert_eq!(document["links"], links);
        let dns = json!([{"type": "dns", "address": "2001:db8::53"}]);
        let networks = json!([
            {"id": "network0", "link": "bond", "network_id": "bond", "type": "ipv6_slaac"},
            {"id": "network1", "link": "bond", "network_id": "bond", "type": "ipv6_dhcp"},
            {"id": "network2", "link": "bond", "network_id": "bond", "type": "ipv4_dhcp",
             "routes": [{"network": "10.0.0.0", "netmask": "255.0.0.0", "gateway": "10.0.0.9"}]},
            {"id": "network3", "link": "v", "network_id": "v", "type": "ipv6", "ip_address": "2001:db8::5",
             "netmask": "ffff:ffff:ffff:ff00::", "services": dns,
             "routes": [{"network": "::", "netmask": "::", "gateway": "fe80::1"},
                        {"network": "2001:db8:1::", "netmask": "ffff:ffff:ffff::", "gateway": "2001:db8::9",
                         "metric": 5}]},
        ]);
        assert_eq!(document["networks"], networks);
        assert_eq!(document["services"], dns);
    }

    #[test]
    fn vendor_data_is_text_wrapped_or_left_out() {
        let mut record = full();
        record["vendor_data"] = json!({"base64": "H4sI"});
        record["vendor_data2"] = json!({"base64": "//4="});
        let first = document(&record, "vendor_data.json")["cloud-init"].as_str().map(str::to_owned);
        assert!(first.expect("text").starts_with("MIME-Version: 1.0\nContent-Type: application/gzip\n"));
        assert_eq!(document(&record, "vendor_data2.json"), json!({}));
        record["vendor_data"] = json!({"source": {"file": "vd"}});
        record["user_data"] = json!({"source": {"file": "ud"}});
        for name in ["vendor_data.json", "user_data"] {
            assert_eq!(
                get(&rendered(&record), &format!("/openstack/latest/{name}")).status().0,
                503,
                "{name}"
            );
        }
    }

    #[test]
    fn a_password_is_posted_once_and_not_to_the_first_version() {
        let responses = rendered(&full());
        let long = vec![b'x'; 1_021];
        let later = "/openstack/2013-04-04/password";
        for (method, path, fields, body, status, said) in [
            (Method::Get, later, &[][..], &b""[..], 200, ""),
            (Method::Post, later, &[], b"", 400, "Bad Request\n"),
            (Method::Post, later, &[], &long, 400, "Bad Request\n"),
            (Method::Post, "/openstack/2012-08-10/password", &[], b"a", 404, "Not Found\n"),
            (Method::Get, "/openstack/2012-08-10/password", &[], b"", 404, "Not Found\n"),
            (Method::Post, later, &[("X-Forwarded-For", "a")], b"a", 403, "Forbidden\n"),
            (Method::Post, later, &[], &long[..1_020], 200, ""),
            (Method::Post, later, &[], b"a", 409, "Conflict\n"),
            (Method::Delete, later, &[], b"", 405, "Method Not Allowed\n"),
            (Method::Get, later, &[("X-Forwarded-For", "")], b"", 403, "Forbidden\n"),
        ] {
            let answer = ask_with(&responses, method, path, fields, body);
            assert_eq!((answer.status().0, text(&answer).as_str()), (status, said), "{method:?} {path}");
        }
        let kept = get(&responses, "/openstack/latest/password");
        assert_eq!(kept.body().to_bytes(), long[..1_020]);
        assert_eq!(ask_with(&responses, Method::Head, later, &[], b""), kept);
    }

    #[test]
    fn a_record_of_eve_alone_lists_only_latest() {
        let versions = |dialects: Value| {
            let mut record = full();
            record["serve"]["dialects"] = dialects;
            text(&get(&rendered(&record), "/openstack"))
        };
        assert_eq!(versions(json!(["eve"])), "latest\n");
        assert!(versions(json!(["eve", "openstack"])).ends_with("\n2025-04-04\nlatest"));
    }
}
