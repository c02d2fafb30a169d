//! Bigstep: one JSON document, at the URL that the image has in `/var/lib/cloud/data/seed/bigstep/url`.
//!
//! cloud-init (`DataSourceBigstep.py`) fetches the document once, without a timeout and without a retry, so a request
//! waits for its record longer than elsewhere. cloud-init needs all three members of the document, which may be empty.
//! It reads `metadata` under its standard names, but no network configuration.

use std::time::Duration;

use super::common::{payload_texts, public_keys};
use super::route_builder::RouteBuilder;
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::record::Record;

pub(super) static DIALECT: Description =
    Description::new(&[Mount::open(PATH).waits(Duration::from_secs(45))], "`DataSourceBigstep`", render)
        .remark("put `http://169.254.169.254/bigstep/metadata` into the image's `data/seed/bigstep/url`");

const PATH: &str = "/bigstep/metadata";

fn render(record: &Record, routes: &mut RouteBuilder<'_>) {
    let texts = payload_texts(record);
    let document = match texts {
        Some((user_data, vendor_data)) => routes.json(&json!({
            "metadata": {
                "availability-zone": record.placement.zone.as_str(),
                "instance-id": record.vm.uuid.as_str(),
                "instance-type": record.instance_type(),
                "local-hostname": record.hostname.fqdn(),
                "public-keys": public_keys(record),
                "region": record.placement.region.as_str(),
            },
            "userdata_raw": user_data,
            "vendordata_raw": vendor_data,
        })),
        None => routes.unread(),
    };
    routes.open(PATH, document);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::PATH;
    use crate::dialect::tests::{DialectGuest, bare, full};

    #[test]
    fn a_bare_record_has_all_three_members_and_empty_payloads() {
        let document: Value = serde_json::from_str(&DialectGuest::of(&bare()).text(PATH)).expect("JSON");
        assert_eq!((&document["userdata_raw"], &document["vendordata_raw"]), (&json!(""), &json!("")));
        assert_eq!(document["metadata"]["public-keys"], json!([]));
    }

    #[test]
    fn a_document_with_unread_user_data_is_503() {
        let mut record = full();
        record["user_data"] = json!({"source": {"file": "user-data"}});
        assert_eq!(DialectGuest::of(&record).status(PATH, &[]), 503);
    }
}
