//! Hetzner: a YAML document, the private networks and raw user-data, and leaves for Afterburn and systemd.
//!
//! cloud-init (`DataSourceHetzner.py`) requires every document: an empty list means no private networks, 204 means no
//! user-data. It configures the NICs of private networks by DHCP itself, so network-config contains only other NICs.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use bytes::Bytes;
use serde_json::{Map, Value};

use std::time::Duration;

use super::document::DocumentTree;
use super::network_config::{Resolvers, version_1};
use super::record_values::{IpVersion, gateway, given, known, payload_text, public_keys, speaks};
use super::route_builder::{RouteBuilder, YAML};
use super::yaml;
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::http::{Body, Response, StatusCode};
use crate::record::values::NicMac;
use crate::record::{Nic, Record, Role};
use crate::store::Methods;

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/hetzner").waits(Duration::from_millis(1_500))],
    "`DataSourceHetzner`; systemd-imdsd",
    render,
);

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let mut network_config = version_1(&record.network, Resolvers::Subnets, |n, _| !is_private(record, n));
    name_families(&mut network_config);
    let networks = sheet.found(YAML, yaml::document(&private_networks(record)));
    sheet.open("/hetzner/v1/metadata/private-networks", networks);
    let config = sheet.found(YAML, yaml::document(&network_config));
    sheet.open("/hetzner/v1/metadata/network-config", config);

    let user_data = match &record.user_data {
        Some(payload) => sheet.payload(payload),
        None => sheet.share(Response::new(StatusCode(204), None, &[], "")),
    };
    sheet.open("/hetzner/v1/userdata", user_data.clone());
    // systemd reads user-data at this path, because all its keys have one base path.
    sheet.open("/hetzner/v1/metadata/userdata", user_data);

    let leaves = leaves(record);
    let mut document = leaves.clone();
    document.insert("network-config".into(), network_config);
    let whole = whole(record, document, sheet);
    let leaves = DocumentTree::of(sheet.document(&leaves.into())).with_whole(whole);
    sheet.live_below("/hetzner/v1/metadata", Methods::READ, &[], leaves);
}

/// Names the subnets as Hetzner does: a family is a member of its own, and a static subnet of either is `static`. Talos
/// takes no other names, and asks for no lease without `ipv4`.
fn name_families(network_config: &mut Value) {
    let devices = network_config["config"].as_array_mut().into_iter().flatten();
    for subnet in devices.filter_map(|device| device.get_mut("subnets")?.as_array_mut()).flatten() {
        match subnet["type"].as_str() {
            Some("dhcp" | "static") => subnet["ipv4"] = true.into(),
            Some("static6") => subnet["type"] = "static".into(),
            _ => {}
        }
    }
}

/// Returns the members that also exist as leaves.
fn leaves(record: &Record) -> Map<String, Value> {
    let mut leaves = Map::new();
    let mut add = |key: &str, value: Value| leaves.insert(key.to_owned(), value);
    add("instance-id", record.numeric_id().into());
    add("hostname", record.hostname.fqdn().into());
    add("availability-zone", record.placement.zone.as_str().into());
    add("region", record.placement.region.as_str().into());
    add("public-keys", public_keys(record));
    if let Some(address) = public_ipv4(record) {
        add("public-ipv4", address.to_string().into());
    }
    leaves
}

/// Returns the document. Vendor-data is a separate piece of its body, which VMs share.
fn whole(record: &Record, document: Map<String, Value>, sheet: &mut RouteBuilder<'_>) -> Response {
    let Some(vendor_data) = payload_text(record.vendor_data.as_ref()) else { return sheet.unread() };
    let text = yaml::document(&document.into());
    if record.vendor_data.is_none() {
        return sheet.found(YAML, text);
    }
    let vendor_data = sheet.yaml_scalar(&vendor_data);
    let newline = Bytes::from_static(b"\n");
    let before = format!("{text}vendor_data: ").into_boxed_str().into_boxed_bytes();
    sheet.own(YAML, Body::join([before.into(), vendor_data, newline]))
}

/// Returns the first address that reaches the VM from outside: a translated one, or its own.
fn public_ipv4(record: &Record) -> Option<IpAddr> {
    let public = given(&record.network).filter(|(n, ..)| record.role(*n) == Role::Public);
    let mut addresses = public.flat_map(|(_, nic, _)| known(nic, IpVersion::V4));
    addresses.find_map(|(address, cidr)| {
        let own =
            |address: IpAddr| matches!(address, IpAddr::V4(v4) if !v4.is_private() && !v4.is_link_local());
        let translated = address.public.map(|public| public.0).filter(IpAddr::is_ipv4);
        translated.or_else(|| Some(cidr.address).filter(|address| own(*address)))
    })
}

/// Returns whether the NIC is listed among the private networks, which support IPv4 only.
fn is_private(record: &Record, n: usize) -> bool {
    private_nics(record).any(|(private, ..)| private == n)
}

fn private_nics(record: &Record) -> impl Iterator<Item = (usize, &Nic, NicMac)> {
    let private = |n, nic| record.role(n) == Role::Private && speaks(nic, IpVersion::V4);
    given(&record.network).filter(move |(n, nic, _)| private(*n, nic))
}

fn private_networks(record: &Record) -> Value {
    let network = |(id, (n, nic, mac)): (usize, (usize, &Nic, NicMac))| {
        let mut addresses = known(nic, IpVersion::V4);
        let mut entry = json!({
            "interface_num": n + 1,
            "mac_address": mac.to_string(),
            "network_id": id + 1,
            "network_name": nic.network_id.as_ref().map_or(nic.id.as_str(), |id| id.as_str()),
        });
        if let Some((address, cidr)) = addresses.next() {
            let network = cidr.network().to_string();
            entry["ip"] = cidr.address.to_string().into();
            entry["gateway"] = gateway(address).into();
            entry["network"] = network.clone().into();
            entry["subnet"] = network.into();
        }
        entry["alias_ips"] = addresses.map(|(_, cidr)| cidr.address.to_string()).collect();
        entry
    };
    private_nics(record).enumerate().map(network).collect()
}
