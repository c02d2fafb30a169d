//! DigitalOcean and UpCloud: one document that satisfies the clients of both, and a tree of texts.
//!
//! cloud-init reads only `/metadata/v1.json` (`sources/helpers/{digitalocean,upcloud}.py`). Afterburn and Talos read
//! leaves of the tree. User-data and vendor-data are bytes in the tree and text in the document.
//!
//! Afterburn drops the whole document if a gateway is not an address. So an unknown gateway is the unspecified address
//! (RFC 1122 section 3.2.1.3, RFC 4291 section 2.5.2). cloud-init makes a default route from every gateway of a public
//! NIC. So its document has an empty text there.

use bytes::Bytes;
use serde_json::{Map, Value};
use std::time::Duration;

use super::common::{
    IpVersion, cloud_init, gateway, given, known, labels, only_ipv6, payload_texts, public_keys, resolvers,
    role_name,
};
use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT, computed};
use super::{Description, Mount};
use crate::dialect::document::{DocumentNode, JsonDocument, PartKind};
use crate::dialect::json::json;
use crate::http::{Body, Response, StatusCode};
use crate::record::network::{Address, AddressMethod};
use crate::record::values::NicMac;
use crate::record::{Nic, Record, Role};
use crate::store::Methods;

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open(WHOLE).waits(Duration::from_millis(1_500)), Mount::open("/metadata/v1")],
    "`DataSourceDigitalOcean`, `DataSourceUpCloudLocal`; ohai",
    render,
);

/// Path of the document.
const WHOLE: &str = "/metadata/v1.json";

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let mut document = document(record);
    let texts = payload_texts(record);
    let unread = texts.is_none();
    if let Some((user_data, vendor_data)) = texts {
        document["user_data"] = user_data.into();
        document["vendor_data"] = vendor_data.into();
    }
    let shown = routes.document(&document);
    if unread {
        let unread = routes.unread();
        routes.open(WHOLE, unread);
    } else {
        let for_others = routes.own(JSON, shown.body());
        let known = interfaces(record, Reader::CloudInit);
        if known == document["interfaces"] {
            routes.open(WHOLE, for_others);
        } else {
            document["interfaces"] = known;
            let for_cloud_init = routes.json(&document);
            let about = "the document; for cloud-init, without unknown gateways";
            routes.either(
                WHOLE,
                &[],
                about,
                |request| cloud_init(request).is_some(),
                for_cloud_init,
                for_others,
            );
        }
    }
    for (paths, payload) in [
        (["/metadata/v1/user-data", "/metadata/v1/user_data"], &record.user_data),
        (["/metadata/v1/vendor-data", "/metadata/v1/vendor_data"], &record.vendor_data),
    ] {
        // Ignition fails the boot if user-data does not exist, and continues if it is empty.
        let response = match payload {
            Some(payload) => routes.payload(payload),
            None => routes.found(BYTES, ""),
        };
        for path in paths {
            routes.open(path, response.clone());
        }
    }
    // Everything but user-data and vendor-data.
    let tree = computed("a text of /metadata/v1.json", move |call| match leaf(&shown, call.rest) {
        Some(text) => Response::new(StatusCode(200), Some(TEXT), &[], text),
        None => Response::error(StatusCode(404), &[]),
    });
    routes.live_below("/metadata/v1", Methods::READ, &[], tree);
}

/// Returns the document without user-data and vendor-data.
fn document(record: &Record) -> Value {
    let dns = resolvers(&record.network);
    let mut document = json!({
        "cloud_name": "upcloud",
        "dns": { "nameservers": dns.clone() },
        "droplet_id": record.numeric_id(),
        "features": { "dhcp_enabled": true },
        "hostname": record.hostname.fqdn(),
        "instance_id": record.vm.uuid.as_str(),
        "interfaces": interfaces(record, Reader::Other),
        "network": { "dns": dns, "interfaces": upcloud_interfaces(record) },
        "platform": "servers",
        "public_keys": public_keys(record),
        "region": record.placement.region.as_str(),
        "storage": { "disks": [] },
        "tags": labels(record),
    });
    if !only_ipv6(&record.network) {
        document["floating_ip"] = json!({ "ipv4": { "active": false } });
        document["reserved_ip"] = document["floating_ip"].clone();
    }
    document
}

/// Reader of the document.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    CloudInit,
    Other,
}

/// Returns DigitalOcean's NICs by role. A role without NICs is absent, because clients read the first entry of each
/// list without a check.
fn interfaces(record: &Record, reader: Reader) -> Value {
    let mut roles = Map::new();
    for (n, nic, mac) in given(&record.network) {
        let role = role_name(record.role(n));
        let entry = roles.entry(role).or_insert_with(|| json!([]));
        entry.as_array_mut().expect("every role is a list").push(interface(nic, mac, record.role(n), reader));
    }
    roles.into()
}

fn interface(nic: &Nic, mac: NicMac, role: Role, reader: Reader) -> Value {
    let gateway = |address: &Address, unknown: &str| match gateway(address) {
        known if !known.is_empty() => known,
        none if reader == Reader::CloudInit && role == Role::Public => none,
        _ => unknown.to_owned(),
    };
    let mut interface = json!({ "mac": mac.to_string(), "type": role_name(role) });
    if let Some((address, cidr)) = known(nic, IpVersion::V4).next() {
        interface["ipv4"] = json!({
            "ip_address": cidr.address.to_string(),
            "netmask": cidr.netmask().to_string(),
            "gateway": gateway(address, "0.0.0.0"),
        });
    }
    if let Some((address, cidr)) = known(nic, IpVersion::V6).next() {
        interface["ipv6"] = json!({
            "ip_address": cidr.address.to_string(),
            "cidr": cidr.prefix,
            "gateway": gateway(address, "::"),
        });
    }
    interface
}

/// Returns UpCloud's NICs, numbered from 1.
fn upcloud_interfaces(record: &Record) -> Value {
    let interface = |(n, nic, mac): (usize, &Nic, NicMac)| {
        let addresses = nic.addresses.iter().map(|address| upcloud_address(record, address));
        json!({
            "index": n + 1,
            "ip_addresses": addresses.collect::<Vec<_>>(),
            "mac": mac.to_string(),
            "network_id": nic.network_id.as_ref().map_or("", |id| id.as_str()),
            "type": role_name(record.role(n)),
        })
    };
    given(&record.network).map(interface).collect()
}

fn upcloud_address(record: &Record, address: &Address) -> Value {
    let family = match IpVersion::of_entry(address) {
        IpVersion::V4 => "IPv4",
        IpVersion::V6 => "IPv6",
    };
    let mut entry = json!({
        "dhcp": address.method != AddressMethod::Static,
        "dns": resolvers(&record.network),
        "family": family,
        "floating": false,
        "gateway": gateway(address),
    });
    if let Some(cidr) = address.address {
        entry["address"] = cidr.address.to_string().into();
        entry["network"] = cidr.network().to_string().into();
    }
    entry
}

// The tree of texts, read from the document per request.

/// Names at the top of the tree, with the document's members that they show. UpCloud's names, with underscores, are
/// served but not listed.
const TOP: [(&str, &str); 12] = [
    ("id", "droplet_id"),
    ("hostname", "hostname"),
    ("public-keys", "public_keys"),
    ("public_keys", "public_keys"),
    ("region", "region"),
    ("instance_id", "instance_id"),
    ("interfaces", "interfaces"),
    ("dns", "dns"),
    ("floating_ip", "floating_ip"),
    ("reserved_ip", "reserved_ip"),
    ("tags", "tags"),
    ("features", "features"),
];

/// Listing of the top.
const LISTED: [&str; 12] = [
    "id",
    "hostname",
    "user-data",
    "vendor-data",
    "public-keys",
    "region",
    "interfaces/",
    "dns/",
    "floating_ip/",
    "reserved_ip/",
    "tags/",
    "features/",
];

/// Returns a text of the tree.
fn leaf(document: &JsonDocument, rest: &str) -> Option<Body> {
    let mut segments = rest.split('/').skip(1);
    let Some(top) = segments.next() else { return Some(listing(document).into()) };
    let (_, member) = TOP.into_iter().find(|(name, _)| *name == top)?;
    let mut node = document.root().member(|name| name == member)?;
    for segment in segments {
        node = node.member(|name| shown(name) == segment)?;
    }
    Some(text(node))
}

fn listing(document: &JsonDocument) -> String {
    let has_ipv4 = document.root().member(|name| name == "reserved_ip").is_some();
    let exists = |name: &&str| has_ipv4 || !name.ends_with("_ip/");
    LISTED.iter().filter(|name| exists(name)).copied().collect::<Vec<_>>().join("\n")
}

/// Returns the tree's name for a member of the document.
fn shown(name: &str) -> &str {
    if name == "ip_address" { "address" } else { name }
}

/// Returns a scalar, a list with one item per line, or the names below; without a final newline.
pub(crate) fn text(node: DocumentNode<'_>) -> Body {
    let is_tree = |node: DocumentNode<'_>| match node.form() {
        PartKind::Object => true,
        PartKind::Array => node.members().iter().any(|(_, member)| member.form() == PartKind::Object),
        PartKind::Scalar => false,
    };
    let lines: Vec<Bytes> = match node.form() {
        PartKind::Scalar => return node.text(),
        PartKind::Array if !is_tree(node) => {
            node.members().into_iter().map(|(_, member)| member.text().to_bytes()).collect()
        }
        PartKind::Array | PartKind::Object => {
            let name = |(name, member): (std::borrow::Cow<'_, str>, DocumentNode<'_>)| {
                format!("{}{}", shown(&name), if is_tree(member) { "/" } else { "" }).into()
            };
            node.members().into_iter().map(name).collect()
        }
    };
    lines.join(&b'\n').into()
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

    fn document(record: &Value) -> Value {
        let answer = get(&rendered(record), "/metadata/v1.json");
        serde_json::from_slice(&answer.body().to_bytes()).expect("JSON")
    }

    #[test]
    fn the_tree_equals_the_document() {
        let mut record = full();
        record["ssh_keys"] = json!([{"name": "a", "key": "ssh-rsa A"}, {"name": "b", "key": "ssh-rsa B"}]);
        record["labels"] = json!(["web", "db"]);
        let addresses = record["network"]["nics"][1]["addresses"].as_array_mut().expect("addresses");
        addresses.push(json!({"method": "static", "address": "2001:db8::5/64"}));
        let responses = rendered(&record);
        for (path, text) in [
            ("hostname", "web-1.example.internal"),
            ("region", "local"),
            ("instance_id", "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"),
            ("public-keys", "ssh-rsa A\nssh-rsa B"),
            ("public_keys", "ssh-rsa A\nssh-rsa B"),
            ("tags", "web\ndb"),
            ("dns", "nameservers"),
            ("dns/nameservers", "10.0.2.3"),
            ("features", "dhcp_enabled"),
            ("features/dhcp_enabled", "true"),
            ("floating_ip", "ipv4/"),
            ("floating_ip/ipv4/active", "false"),
            ("reserved_ip", "ipv4/"),
            ("reserved_ip/ipv4/active", "false"),
            ("interfaces", "private/\npublic/"),
            ("interfaces/private", "0/"),
            ("interfaces/private/0", "ipv4/\nipv6/\nmac\ntype"),
            ("interfaces/private/0/ipv4", "gateway\naddress\nnetmask"),
            ("interfaces/private/0/ipv4/netmask", "255.255.255.0"),
            ("interfaces/private/0/ipv6/address", "2001:db8::5"),
            ("interfaces/private/0/ipv6/cidr", "64"),
            ("user_data", "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n"),
            ("vendor-data", "#cloud-config\n{}\n"),
        ] {
            let answer = get(&responses, &format!("/metadata/v1/{path}"));
            assert_eq!(
                (answer.status().0, answer.body().to_bytes().as_ref()),
                (200, text.as_bytes()),
                "{path}"
            );
        }
        for path in ["droplet_id", "interfaces/public/1", "interfaces/public/0/ipv4/ip_address", "region/x"] {
            assert_eq!(get(&responses, &format!("/metadata/v1/{path}")).status().0, 404, "{path}");
        }
    }

    #[test]
    fn absent_values_are_empty() {
        let mut record = full();
        for field in ["user_data", "vendor_data", "ssh_keys", "labels", "network"] {
            record.as_object_mut().expect("a mapping").remove(field);
        }
        let responses = rendered(&record);
        let names =
            ["user-data", "user_data", "vendor-data", "vendor_data", "public-keys", "tags", "interfaces"];
        for name in names {
            let answer = get(&responses, &format!("/metadata/v1/{name}"));
            assert_eq!((answer.status().0, answer.body().len()), (200, 0), "{name}");
        }
        let document = document(&record);
        assert_eq!((&document["interfaces"], &document["user_data"]), (&json!({}), &json!("")));
    }

    #[test]
    fn a_vm_without_ipv4_has_no_ipv4_member() {
        let mut record = full();
        record["network"] = json!({"dns": ["fd00::53"], "nics": [{
            "id": "n0", "mac": "52:54:00:12:34:56",
            "addresses": [{"method": "slaac"}, {"method": "static", "address": "2001:db8::15/64", "gateway": "fe80::1"}],
        }]});
        let document = document(&record);
        let text = document.to_string();
        for word in ["ipv4", "IPv4", "netmask"] {
            assert!(!text.contains(word), "{word} in {text}");
        }
        let address = json!({"ip_address": "2001:db8::15", "cidr": 64, "gateway": "fe80::1"});
        assert_eq!(document["interfaces"]["public"][0]["ipv6"], address);
        let listing = get(&rendered(&record), "/metadata/v1").body().to_bytes();
        assert!(!listing.windows(8).any(|part| part == b"floating"));
    }

    #[test]
    fn an_unknown_lease_is_dhcp_without_an_address() {
        let mut record = full();
        record["network"]["nics"][0]["addresses"] = json!([{"method": "dhcp4"}]);
        let document = document(&record);
        assert_eq!(
            document["network"]["interfaces"][0]["ip_addresses"],
            json!([{"dhcp": true, "dns": ["10.0.2.3"], "family": "IPv4", "floating": false, "gateway": ""}])
        );
        assert_eq!(document["interfaces"]["public"], json!([{"mac": "52:54:00:12:34:56", "type": "public"}]));
    }

    #[test]
    fn an_unknown_gateway_is_unspecified_and_gives_cloud_init_no_route() {
        let both = json!([
            {"method": "dhcp4", "address": "10.0.2.15/24"},
            {"method": "static", "address": "2001:db8::15/64"},
        ]);
        let mut record = full();
        for nic in record["network"]["nics"].as_array_mut().expect("NICs") {
            nic["addresses"] = both.clone();
        }
        let responses = rendered(&record);
        for (agent, role, v4, v6) in [
            ("Cloud-Init/25.1", "public", "", ""),
            ("Cloud-Init/25.1", "private", "0.0.0.0", "::"),
            ("", "public", "0.0.0.0", "::"),
            ("", "private", "0.0.0.0", "::"),
        ] {
            let fields = [("User-Agent", agent)];
            let answer = ask_with(&responses, Method::Get, "/metadata/v1.json", &fields, b"");
            let document: Value = serde_json::from_slice(&answer.body().to_bytes()).expect("JSON");
            let nic = &document["interfaces"][role][0];
            let found = [&nic["ipv4"]["gateway"], &nic["ipv6"]["gateway"]];
            assert_eq!(found, [v4, v6], "{agent} about {role}");
        }
    }

    #[test]
    fn only_nics_that_the_hypervisor_provides_are_listed() {
        let mut record = full();
        let nics = record["network"]["nics"].as_array_mut().expect("NICs");
        nics[1]["role"] = json!("public");
        nics.push(json!({"id": "v7", "mac": "52:54:00:12:34:57", "vlan": {"link": "n1", "id": 7}}));
        let document = document(&record);
        let macs = |list: &Value| -> Vec<Value> {
            list.as_array().expect("a list").iter().map(|nic| nic["mac"].clone()).collect()
        };
        let both = [json!("52:54:00:12:34:56"), json!("52:54:00:12:34:57")];
        assert_eq!(macs(&document["interfaces"]["public"]), both);
        assert_eq!(macs(&document["network"]["interfaces"]), both);
        assert_eq!(document["interfaces"].get("private"), None);
    }

    #[test]
    fn an_unread_payload_delays_the_document_and_not_the_tree() {
        let mut record = full();
        record["vendor_data"] = json!({"source": {"file": "vendor-data"}});
        let responses = rendered(&record);
        for (path, status) in [
            ("/metadata/v1.json", 503),
            ("/metadata/v1/vendor-data", 503),
            ("/metadata/v1/user-data", 200),
            ("/metadata/v1/hostname", 200),
        ] {
            assert_eq!(get(&responses, path).status().0, status, "{path}");
        }
    }

    #[test]
    fn digitalocean_and_upcloud_serve_the_same_tree() {
        for (dialect, status) in [("digitalocean", 200), ("upcloud", 200), ("hetzner", 404)] {
            let mut record = full();
            record["serve"]["dialects"] = json!([dialect]);
            assert_eq!(get(&rendered(&record), "/metadata/v1.json").status().0, status, "{dialect}");
        }
    }
}
