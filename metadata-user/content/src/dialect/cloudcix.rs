//! CloudCIX: a JSON document, and user-data in base64.
//!
//! cloud-init (`DataSourceCloudCIX.py`) applies the document's network unchecked. If that is `null`, it configures the
//! network by itself. User-data must exist, may be empty, and must be base64 of text.

#[cfg(test)]
mod tests;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::network_config::{Gateways, version_2};
use super::record_values::{payload_text, public_keys};
use super::route_builder::{RouteBuilder, TEXT};
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::record::Record;
use crate::record::network::{Network, NetworkMode};

pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/v1/metadata"), Mount::open("/v1/userdata")],
    "`DataSourceCloudCIX`",
    render,
);

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let id = record.numeric_id().to_string();
    // The client reads the id under its older name.
    let document = sheet.json(&json!({
        "instance-id": id.as_str(),
        "instance_id": id.as_str(),
        "local-hostname": record.hostname.fqdn(),
        "network": network(&record.network),
        "public-keys": public_keys(record),
    }));
    sheet.open("/v1/metadata", document);
    let user_data = match payload_text(record.user_data.as_ref()) {
        Some(text) => {
            let encoded = sheet.bytes(STANDARD.encode(text));
            sheet.found(TEXT, encoded)
        }
        None => sheet.unread(),
    };
    sheet.open("/v1/userdata", user_data);
}

fn network(network: &Network) -> Value {
    match network.mode {
        NetworkMode::Auto if !network.nics.is_empty() => version_2(network, Gateways::Members),
        NetworkMode::Raw => network.raw_document().map_or(Value::Null, bare),
        _ => Value::Null,
    }
}

/// Returns the configuration inside a `network` member, if there is one.
fn bare(config: &Value) -> Value {
    match config.get("network") {
        Some(inner @ Value::Object(_)) => inner.clone(),
        _ => config.clone(),
    }
}
