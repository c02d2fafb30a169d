//! The forms of a record in which every datasource is crawled.

use serde_json::{Value, json};
use support::record::Identity;

/// `#cloud-config\nruncmd:\n- [touch, /run/packed]\n`, compressed with gzip.
pub(super) const GZIP: &str =
    "H4sIAAAAAAACA1NOzskvTdFNzs9Ly0znKirNS85NseLSVYguyS9NztBR0AcK6RckJmenpsRyAQAuDJvZLQAAAA==";
/// Vendor-data of a full record.
pub(super) const VENDOR_DATA: &str = "#cloud-config\n{}\n";
/// The instance id of dialects that use a number; half of them also expect it as the firmware's serial.
pub(super) const NUMBER: &str = "12345";
/// The instance id of EC2.
pub(super) const EC2_ID: &str = "i-0f5e8a1b2c3d4e5f6";
/// The image's default user, who gets the record's keys.
pub(super) const USER: &str = "debian";

/// One form of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Every optional field is set.
    Full,
    /// No user-data, vendor-data, keys, tags or metadata.
    Bare,
    /// User-data compressed with gzip.
    Gzip,
    /// Like `Full`, with session tokens required where the dialect supports them.
    Required,
}

impl Form {
    pub(super) const ALL: [Self; 4] = [Self::Full, Self::Bare, Self::Gzip, Self::Required];

    /// The record of the guest with this UUID.
    pub(super) fn record(self, identity: &Identity, uuid: &str) -> Value {
        let mut record: Value = serde_json::from_str(&identity.record(1)).expect("a record");
        record["vm"]["uuid"] = uuid.into();
        record["vm"]["ec2_id"] = EC2_ID.into();
        record["vm"]["numeric_id"] = NUMBER.parse::<u64>().expect("a number").into();
        record["admin"] = json!({"user": USER});
        record["network"]["dns"] = json!(["10.0.2.3"]);
        match self {
            Self::Bare => {
                let fields = record.as_object_mut().expect("a mapping");
                fields.retain(|name, _| !["user_data", "ssh_keys"].contains(&name.as_str()));
            }
            Self::Full | Self::Gzip | Self::Required => {
                record["vendor_data"] = json!({"text": VENDOR_DATA});
                record["labels"] = json!(["web"]);
                record["metadata"] = json!({"role": "web"});
            }
        }
        match self {
            Self::Gzip => record["user_data"] = json!({"base64": GZIP}),
            Self::Required => record["serve"] = json!({"imdsv2": "required"}),
            Self::Full | Self::Bare => {}
        }
        record
    }
}
