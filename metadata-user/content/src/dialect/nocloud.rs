//! NoCloud over HTTP: four documents below `/v1/`, for the seed `ds=nocloud;dsmode=net;s=http://169.254.169.254/v1/`.
//!
//! Clients retry a 404 ten times, one second apart, and fail the boot without user-data. So absent documents are 204
//! unless the record asks for 404. NoCloud's clients cannot send a special header field, so these paths require none.

use serde_json::{Map, Value};

use super::common::{cloud_init, public_keys};
use super::network_config::{self, Gateways, ROUTES_SINCE};
use super::route_builder::{RouteBuilder, YAML};
use super::{Description, Mount, yaml};
use crate::http::{Request, Response, StatusCode};
use crate::record::network::NetworkMode;
use crate::record::vm::Payload;
use crate::record::{AbsentSeed, RESERVED_KEYS, Record};

pub(super) static DIALECT: Description = Description::new(
    &[
        Mount::open("/v1/meta-data"),
        Mount::open("/v1/user-data"),
        Mount::open("/v1/vendor-data"),
        Mount::open("/v1/network-config"),
    ],
    "cloud-init 22.4 booted, including under libvirt; `DataSourceNoCloudNet`; curl",
    render,
);

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let meta_data = routes.found(YAML, yaml::document(&meta_data(record)));
    routes.open("/v1/meta-data", meta_data);
    for (path, payload) in [("/v1/user-data", &record.user_data), ("/v1/vendor-data", &record.vendor_data)] {
        let response = payload.as_ref().map(|payload: &Payload| routes.payload(payload));
        let response = response.unwrap_or_else(|| absent(record, routes));
        routes.open(path, response);
    }
    let network = match network_config(record, Gateways::Members) {
        Some(text) => routes.found(YAML, text),
        None => absent(record, routes),
    };
    match network_config(record, Gateways::Routes) {
        Some(text) if network.body().to_bytes() != text.as_bytes() => {
            let newer = routes.found(YAML, text);
            let about = "the network; default gateways as routes for cloud-init from 25.3 on";
            routes.either("/v1/network-config", &[], about, reads_routes, newer, network);
        }
        _ => routes.open("/v1/network-config", network),
    }
}

/// Returns whether the client is a cloud-init that gets the form which is not deprecated. Others get the one that every
/// client understands.
fn reads_routes(request: &Request<'_>) -> bool {
    cloud_init(request).is_some_and(|version| version >= ROUTES_SINCE)
}

fn absent(record: &Record, routes: &mut RouteBuilder<'_>) -> Response {
    routes.share(match record.serve.absent_seed {
        AbsentSeed::NoContent => Response::new(StatusCode(204), None, &[], ""),
        AbsentSeed::NotFound => Response::error(StatusCode(404), &[]),
    })
}

fn meta_data(record: &Record) -> Value {
    let mut document = Map::new();
    for (key, value) in &record.metadata.0 {
        if !RESERVED_KEYS.contains(&key.as_str()) {
            document.insert(key.clone(), value.as_str().into());
        }
    }
    let mut own = |key: &str, value: Value| document.insert(key.to_owned(), value);
    own("instance-id", record.instance_id().into());
    own("local-hostname", record.hostname.fqdn().into());
    own("instance-type", record.instance_type().into());
    own("availability-zone", record.placement.zone.as_str().into());
    own("region", record.placement.region.as_str().into());
    if !record.ssh_keys.is_empty() {
        own("public-keys", public_keys(record));
    }
    if record.serve.legacy_eni && record.network.mode == NetworkMode::Auto && !record.network.nics.is_empty()
    {
        own("network-interfaces", network_config::interfaces(&record.network).into());
    }
    document.into()
}

/// Returns the network document; `None` if the guest configures its network without one.
fn network_config(record: &Record, form: Gateways) -> Option<String> {
    let network = &record.network;
    match (network.mode, &network.raw) {
        (NetworkMode::Auto, _) if !network.nics.is_empty() => {
            Some(yaml::document(&network_config::version_2(network, form)))
        }
        (NetworkMode::Raw, Some(Value::String(text))) => Some(text.clone()),
        (NetworkMode::Raw, Some(mapping)) => Some(yaml::document(mapping)),
        _ => None,
    }
}
