//! Properties that the vectors do not cover.

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
