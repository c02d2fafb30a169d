//! NWCS: one JSON document, and the instance id as a text.
//!
//! cloud-init (`DataSourceNWCS.py`) requires a MAC and a name in every item of the network. So all items are NICs, and
//! the resolvers are in their subnets.

#[cfg(test)]
mod tests;

use super::network_config::{Resolvers, version_1};
use super::record_values::{payload_texts, public_keys};
use super::route_builder::RouteBuilder;
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::record::Record;

pub(super) static DIALECT: Description =
    Description::new(&[Mount::open("/api/v1/metadata")], "`DataSourceNWCS`", render);

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let texts = payload_texts(record);
    let whole = match texts {
        Some((user_data, vendor_data)) => sheet.json(&json!({
            "hostname": record.hostname.short.as_str(),
            "instance-id": record.vm.uuid.as_str(),
            "machine_type": record.instance_type(),
            "network": version_1(&record.network, Resolvers::Subnets, |_, nic| nic.is_physical()),
            "public-keys": public_keys(record),
            "userdata": user_data,
            "vendordata": vendor_data,
        })),
        None => sheet.unread(),
    };
    sheet.open("/api/v1/metadata", whole);
    sheet.text("/api/v1/metadata/instance-id", record.vm.uuid.as_str());
}
