//! CloudCIX: a JSON document, and user-data in base64.
//!
//! cloud-init (`DataSourceCloudCIX.py`) applies the document's network unchecked. If that is `null`, it configures the
//! network by itself. User-data must exist, may be empty, and must be base64 of text.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::common::{payload_text, public_keys};
use super::network_config::{Gateways, version_2};
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

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let id = record.numeric_id().to_string();
    // The client reads the id under its older name.
    let document = routes.json(&json!({
        "instance-id": id.as_str(),
        "instance_id": id.as_str(),
        "local-hostname": record.hostname.fqdn(),
        "network": network(&record.network),
        "public-keys": public_keys(record),
    }));
    routes.open("/v1/metadata", document);
    let user_data = match payload_text(record.user_data.as_ref()) {
        Some(text) => {
            let encoded = routes.bytes(STANDARD.encode(text));
            routes.found(TEXT, encoded)
        }
        None => routes.unread(),
    };
    routes.open("/v1/userdata", user_data);
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

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::{Value, json};

    use crate::dialect::tests::{ask_with, full, rendered};
    use crate::http::{Method, Response};

    fn get(record: &Value, path: &str) -> Response {
        ask_with(&rendered(record), Method::Get, path, &[], b"")
    }

    #[test]
    fn the_network_is_the_records_own_or_null() {
        let config = json!({"version": 1, "config": []});
        for (network, served) in [
            (json!({"mode": "none", "nics": full()["network"]["nics"]}), Value::Null),
            (json!({}), Value::Null),
            (json!({"mode": "raw", "raw": config}), config.clone()),
            (json!({"mode": "raw", "raw": {"network": config}}), config.clone()),
            (json!({"mode": "raw", "raw": "# mine\nnetwork:\n  version: 1\n  config: []\n"}), config.clone()),
        ] {
            let mut record = full();
            record["network"] = network.clone();
            let document: Value =
                serde_json::from_slice(&get(&record, "/v1/metadata").body().to_bytes()).expect("JSON");
            assert_eq!(document["network"], served, "{network}");
        }
    }

    #[test]
    fn user_data_is_base64_of_text() {
        let mut record = full();
        let mut decoded = |bytes: &[u8]| {
            record["user_data"] = json!({ "base64": STANDARD.encode(bytes) });
            STANDARD.decode(get(&record, "/v1/userdata").body().to_bytes()).expect("base64")
        };
        assert_eq!(decoded("#é\n".as_bytes()), "#é\n".as_bytes());
        assert!(decoded(&[0x1f, 0x8b, 8, 0]).starts_with(b"MIME-Version: 1.0\n"));
        assert_eq!(decoded(&[0xff, 0]), b"");
        record["user_data"] = json!({"source": {"file": "user-data"}});
        assert_eq!(get(&record, "/v1/userdata").status().0, 503);
    }
}
