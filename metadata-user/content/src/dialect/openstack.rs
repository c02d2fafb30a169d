//! OpenStack's tree as Nova serves it (`nova/api/metadata/base.py`): JSON documents below `/openstack/<version>/`,
//! injected files, and a password that the guest can post once.
//!
//! Every version has the newest documents; clients ignore unknown keys. Only the first version lacks the password.
//! Absent documents are 404, absent vendor-data is `{}`; neither delays cloud-init.

mod network;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use bytes::Bytes;
use serde_json::{Map, Value};

use std::time::Duration;

use super::route_builder::{BYTES, JSON, RouteBuilder, TEXT};
use super::text::text_form;
use super::{Description, Mount};
use crate::dialect::json::json;
use crate::http::{Method, Response, StatusCode};
use crate::mailbox::PasswordRefused;
use crate::record::network::NetworkMode;
use crate::record::values::Secret;
use crate::record::vm::Payload;
use crate::record::{self, Record};
use crate::sink::MessageKind;
use crate::store::path::OPENSTACK_VERSIONS;
use crate::store::{Condition, LiveOutcome, LiveRequest, LiveRoute, Methods, RequestGuard};

/// EVE's guests read the same tree.
pub(super) static DIALECT: Description = Description::new(
    &[Mount::open("/openstack").waits(Duration::from_secs(8))],
    "cloud-init 22.4 booted; `DataSourceOpenStackLocal`",
    render,
)
.also_for(&[record::Dialect::Eve])
.remark("eleven versions, with `password` and `content/`; also EC2's tree");

/// Version without a password; Nova's Grizzly release added it.
const WITHOUT_PASSWORD: &str = OPENSTACK_VERSIONS[0];

/// Refuses requests through a proxy, because the answer contains a password.
static DIRECT: LazyLock<[RequestGuard; 1]> = LazyLock::new(|| {
    [RequestGuard {
        condition: Condition::HeaderAbsent { name: "X-Forwarded-For" },
        otherwise: Response::error(StatusCode(403), &[]),
    }]
});

fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    // A record that serves EVE alone has one version; EVE's guests request no other.
    let versions = match record.serve.serves(record::Dialect::OpenStack) {
        true => format!("{}\nlatest", OPENSTACK_VERSIONS.join("\n")),
        false => "latest\n".to_owned(),
    };
    sheet.text("/openstack", versions);
    let meta_data = sheet.json(&meta_data(record));
    let guards: &[RequestGuard] = if admin_password(record).is_some() { &*DIRECT } else { &[] };
    sheet.guarded("/openstack/latest/meta_data.json", guards, meta_data);
    if let Some(payload) = &record.user_data {
        let response = sheet.payload(payload);
        sheet.open("/openstack/latest/user_data", response);
    }
    for (path, payload) in [
        ("/openstack/latest/vendor_data.json", &record.vendor_data),
        ("/openstack/latest/vendor_data2.json", &record.vendor_data2),
    ] {
        let response = vendor_data(payload.as_ref(), sheet);
        sheet.open(path, response);
    }
    let network = match &record.network.network_data {
        Some(Value::String(text)) if record.network.mode == NetworkMode::Raw => {
            Some(sheet.found(JSON, text.clone()))
        }
        Some(given) if record.network.mode == NetworkMode::Raw => Some(sheet.json(given)),
        _ => network::network_data(record).map(|document| sheet.json(&document)),
    };
    let has_network = network.is_some();
    if let Some(response) = network {
        sheet.open("/openstack/latest/network_data.json", response);
    }
    for (n, file) in record.files.iter().enumerate() {
        let bytes = sheet.bytes(file.base64.0.clone());
        let response = sheet.found(BYTES, bytes);
        sheet.open(format!("/openstack{}", content_path(n)), response);
    }
    let mut listing = |password| {
        let names = names(record.user_data.is_some(), password, has_network);
        sheet.found(TEXT, names.join("\n"))
    };
    let listing = Listing { first: listing(false), later: listing(true) };
    sheet.live("/openstack/latest", Methods::READ, &[], listing);
    let methods = Methods::of(&[Method::Get, Method::Head, Method::Post]);
    sheet.live("/openstack/latest/password", methods, &*DIRECT, Password);
}

/// Returns the names of the documents that exist, for the listing of a version.
fn names(user_data: bool, password: bool, network: bool) -> Vec<&'static str> {
    let names = [
        ("meta_data.json", true),
        ("password", password),
        ("user_data", user_data),
        ("vendor_data.json", true),
        ("network_data.json", network),
        ("vendor_data2.json", true),
    ];
    names.into_iter().filter_map(|(name, is_there)| is_there.then_some(name)).collect()
}

fn content_path(n: usize) -> String {
    format!("/content/{n:04}")
}

fn admin_password(record: &Record) -> Option<&str> {
    record.admin.as_ref()?.password.as_ref().map(Secret::expose)
}

fn meta_data(record: &Record) -> Value {
    let mut document = json!({
        "uuid": record.instance_id(),
        "hostname": record.hostname.fqdn(),
        "name": record.vm.name.as_str(),
        "launch_index": record.vm.launch_index,
        "availability_zone": record.placement.zone.as_str(),
        "project_id": record.vm.project.id.as_str(),
        "devices": devices(record),
        "dedicated_cpus": [],
    });
    let mut add = |key: &str, value: Value| document[key] = value;
    if !record.ssh_keys.is_empty() {
        let keys = record.ssh_keys.iter();
        let named = keys.clone().map(|key| (key.name.to_string(), key.key.as_str().into()));
        add("public_keys", Value::Object(named.collect()));
        let listed =
            keys.map(|key| json!({ "name": key.name.as_str(), "type": "ssh", "data": key.key.as_str() }));
        add("keys", listed.collect());
    }
    let password = admin_password(record);
    let meta = meta(record, password.is_some());
    if !meta.is_empty() {
        add("meta", meta.into());
    }
    if let Some(password) = password {
        add("admin_pass", password.into());
    }
    if let Some(seed) = &record.random_seed {
        add("random_seed", base64(&seed.base64.0).into());
    }
    if !record.files.is_empty() {
        let files = record.files.iter().enumerate();
        let files =
            files.map(|(n, file)| json!({ "path": file.path.as_str(), "content_path": content_path(n) }));
        add("files", files.collect());
    }
    document
}

/// Returns the custom keys without `dsmode`, which would change cloud-init's mode against the operator's choice. Leaves
/// out `admin_pass` if the document has one, because cloudbase-init would prefer the custom key.
fn meta(record: &Record, password: bool) -> Map<String, Value> {
    let entries = record.metadata.0.iter();
    let entries = entries.filter(|(key, _)| *key != "dsmode" && !(password && *key == "admin_pass"));
    entries.map(|(key, value)| (key.clone(), value.as_str().into())).collect()
}

/// Returns the disks. Nova also lists NICs, but only for tags, which records do not have for NICs.
fn devices(record: &Record) -> Value {
    let device = |disk: &record::vm::Disk| {
        let mut device = json!({
            "type": disk.kind.as_str(),
            "bus": disk.bus.as_str(),
            "address": disk.address.as_str(),
            "tags": disk.tags.iter().map(record::values::Line::as_str).collect::<Vec<_>>(),
        });
        if let Some(serial) = &disk.serial {
            device["serial"] = serial.as_str().into();
        }
        device
    };
    record.disks.iter().map(device).collect()
}

/// Renders vendor-data as an object with the only member that cloud-init reads. Many VMs share it. JSON cannot carry
/// bytes that are not text.
fn vendor_data(payload: Option<&Payload>, sheet: &mut RouteBuilder<'_>) -> Response {
    let Some(payload) = payload else { return sheet.found(JSON, "{}") };
    let Some(bytes) = payload.bytes() else { return sheet.unread() };
    let document = text_form(&bytes).map_or_else(|| json!({}), |text| json!({ "cloud-init": text }));
    let body = sheet.document(&document).body();
    sheet.found(JSON, body)
}

fn base64(bytes: &Bytes) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn is_without_password(call: &LiveRequest<'_>) -> bool {
    call.request.target.path.split('/').any(|segment| segment == WITHOUT_PASSWORD)
}

/// Listing of a version's directory, for the first version and for later ones.
#[derive(Debug)]
struct Listing {
    first: Response,
    later: Response,
}

impl LiveRoute for Listing {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let listing = if is_without_password(call) { &self.first } else { &self.later };
        listing.clone().into()
    }

    fn about(&self) -> &'static str {
        "the names of existing documents"
    }
}

/// Serves the password that the guest generated and encrypted for the owner of the VM's key.
#[derive(Debug)]
struct Password;

impl LiveRoute for Password {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let answer = |status: u16| Response::error(StatusCode(status), &[]);
        if is_without_password(call) {
            return answer(404).into();
        }
        let mailbox = &call.vm.mailbox;
        let ok = |bytes: Bytes| Response::new(StatusCode(200), Some(TEXT), &[], bytes);
        if call.request.method != Method::Post {
            return ok(mailbox.posted_password()).into();
        }
        let response = match mailbox.post_password(call.request.body) {
            Ok(()) => {
                let body = call.request.body;
                mailbox.send(&call.vm.sinks, MessageKind::Password, body, call.now.unix_seconds);
                ok(Bytes::new())
            }
            Err(PasswordRefused::Empty | PasswordRefused::TooLarge) => answer(400),
            Err(PasswordRefused::AlreadySet) => answer(409),
        };
        response.into()
    }

    fn about(&self) -> &'static str {
        "the password that the guest posted, once"
    }
}
