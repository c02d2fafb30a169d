//! DigitalOcean and UpCloud: one document that satisfies the clients of both, and a tree of texts.
//!
//! cloud-init reads only `/metadata/v1.json` (`sources/helpers/{digitalocean,upcloud}.py`). Afterburn and Talos read
//! leaves of the tree. User-data and vendor-data are bytes in the tree and text in the document.
//!
//! Afterburn drops the whole document if a gateway is not an address. So an unknown gateway is the unspecified address
//! (RFC 1122 section 3.2.1.3, RFC 4291 section 2.5.2). cloud-init makes a default route from every gateway of a public
//! NIC. So its document has an empty text there.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use serde_json::{Map, Value};
use std::time::Duration;

use super::common::cloud_init;
use super::record_values::{
    IpVersion, gateway, given, known, labels, only_ipv6, payload_texts, public_keys, resolvers, role_name,
};
use super::route_builder::{BYTES, JSON, RouteBuilder};
use super::{Description, Mount};
use crate::dialect::document::{DocumentNode, JsonDocument, PartKind};
use crate::dialect::json::json;
use crate::dialect::route_builder::TEXT;
use crate::http::{Body, Response, StatusCode};
use crate::record::network::{Address, AddressMethod};
use crate::record::values::NicMac;
use crate::record::{Nic, Record, Role};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute, Methods};

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open(WHOLE).waits(Duration::from_millis(1_500)), Mount::open("/metadata/v1")],
    "`DataSourceDigitalOcean`, `DataSourceUpCloudLocal`; ohai",
    render,
);

/// Path of the document.
const WHOLE: &str = "/metadata/v1.json";

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let mut document = document(record);
    let texts = payload_texts(record);
    let unread = texts.is_none();
    if let Some((user_data, vendor_data)) = texts {
        document["user_data"] = user_data.into();
        document["vendor_data"] = vendor_data.into();
    }
    let shown = sheet.document(&document);
    if unread {
        let unread = sheet.unread();
        sheet.open(WHOLE, unread);
    } else {
        let for_others = sheet.own(JSON, shown.body());
        let known = interfaces(record, Reader::CloudInit);
        if known == document["interfaces"] {
            sheet.open(WHOLE, for_others);
        } else {
            document["interfaces"] = known;
            let for_cloud_init = sheet.json(&document);
            let about = "the document; for cloud-init, without unknown gateways";
            sheet.either(
                WHOLE,
                &[],
                about,
                |call| cloud_init(call.request).is_some(),
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
            Some(payload) => sheet.payload(payload),
            None => sheet.found(BYTES, ""),
        };
        for path in paths {
            sheet.open(path, response.clone());
        }
    }
    let tree = Tree::new(shown);
    sheet.live_below("/metadata/v1", Methods::READ, &[], tree);
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

/// Serves everything below `/metadata/v1` except user-data and vendor-data.
#[derive(Debug)]
struct Tree {
    document: JsonDocument,
}

impl Tree {
    fn new(document: JsonDocument) -> Self {
        Self { document }
    }

    fn text(&self, rest: &str) -> Option<Body> {
        let mut segments = rest.split('/').skip(1);
        let Some(top) = segments.next() else { return Some(self.listing().into()) };
        let (_, member) = TOP.into_iter().find(|(name, _)| *name == top)?;
        let mut node = self.document.root().member(|name| name == member)?;
        for segment in segments {
            node = node.member(|name| shown(name) == segment)?;
        }
        Some(text(node))
    }

    fn listing(&self) -> String {
        let root = self.document.root();
        let has_ipv4 = root.member(|name| name == "reserved_ip").is_some();
        let exists = |name: &&str| has_ipv4 || !name.ends_with("_ip/");
        LISTED.iter().filter(|name| exists(name)).copied().collect::<Vec<_>>().join("\n")
    }
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

impl LiveRoute for Tree {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        match self.text(call.rest) {
            Some(text) => Response::new(StatusCode(200), Some(TEXT), &[], text).into(),
            None => Response::error(StatusCode(404), &[]).into(),
        }
    }

    fn about(&self) -> &'static str {
        "a text of /metadata/v1.json"
    }
}
