//! Renders a record's tree as JSON.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use std::fmt;

use super::super::document::{DocumentNode, PartKind};
use super::super::events::utc;
use crate::dialect::json::json;
use crate::http::Body;
use crate::record::event::{AnnouncedEvent, EventDocument, EventKind, EventState};
use crate::record::network::Nic;
use crate::record::vm::{Payload, ServiceAccount};
use crate::record::{GCE_ATTRIBUTES, Record, SYSTEMD_ATTRIBUTE, is_segment};

/// Account of keys that name none, for cloud-init. It gives keys of this account to the image's default account and
/// ignores all other keys.
const CLOUD_INIT_USER: &str = "cloudinit";

/// Returns the tree without computed values (tokens) and without guest attributes, which the real server also omits
/// from larger documents.
pub(super) fn whole(record: &Record, events: &EventDocument) -> Value {
    json!({
        "instance": instance(record, events),
        "oslogin": { "authenticate": {} },
        "project": {
            "attributes": {},
            "numericProjectId": record.vm.project.number,
            "projectId": record.vm.project.id.as_str(),
        },
    })
}

/// Returns the attributes for cloud-init; `None` if they are the same for every client. Google's guest agent creates
/// an account per name, so it must not get [`CLOUD_INIT_USER`] if the record names another.
pub(super) fn for_cloud_init(record: &Record) -> Option<Value> {
    let nameless = record.ssh_keys.iter().any(|key| key.user.is_none());
    (nameless && key_user(record) != CLOUD_INIT_USER)
        .then(|| json!({ "instance": { "attributes": attributes(record, CLOUD_INIT_USER) } }))
}

/// Returns the account of keys that name none.
fn key_user(record: &Record) -> &str {
    let user = record.admin.as_ref().and_then(|admin| admin.user.as_ref());
    user.map_or(CLOUD_INIT_USER, |user| user.as_str())
}

fn instance(record: &Record, events: &EventDocument) -> Value {
    let labels: Vec<&str> = record.labels.iter().map(|label| label.as_str()).collect();
    let nics = record.network.nics.iter().filter(|nic| nic.is_physical());
    let is_preempted = events.pending().any(|known| known.event.kind == EventKind::Preempt);
    // Only one event can be shown: a reboot or a stop matters more than a migration.
    let maintenance = events
        .pending()
        .filter(|known| known.event.kind != EventKind::Preempt)
        .min_by_key(|known| known.event.kind == EventKind::Freeze);
    let mut instance = json!({
        "attributes": attributes(record, key_user(record)),
        "cpuPlatform": "",
        "description": "",
        "disks": disks(record),
        "guestAttributes": {},
        "hostname": record.hostname.fqdn(),
        "id": record.numeric_id(),
        "image": record.image.as_ref().map_or("", |image| image.id.as_str()),
        "machineType": record.gce_machine_type(),
        "maintenanceEvent": maintenance.map_or("NONE", |known| maintenance_event(known.event.kind)),
        "name": record.vm.name.as_str(),
        "networkInterfaces": nics.map(|nic| interface(record, nic)).collect::<Vec<_>>(),
        "preempted": if is_preempted { "TRUE" } else { "FALSE" },
        "region": record.gce_region(),
        "remainingCpuTime": -1,
        "scheduling": {
            "automaticRestart": "TRUE",
            "onHostMaintenance": "MIGRATE",
            "preemptible": "FALSE",
        },
        "serviceAccounts": accounts(record),
        "tags": labels,
        "virtualClock": { "driftToken": "0" },
        "zone": record.gce_zone(),
    });
    if let Some(known) = maintenance {
        instance["upcomingMaintenance"] = upcoming_maintenance(known);
    }
    instance
}

// Events: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.

/// Returns the value of `maintenance-event` while an event is pending.
fn maintenance_event(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Freeze => "MIGRATE_ON_HOST_MAINTENANCE",
        EventKind::Reboot | EventKind::Redeploy | EventKind::Terminate | EventKind::Preempt => {
            "TERMINATE_ON_HOST_MAINTENANCE"
        }
    }
}

/// Returns `upcoming-maintenance`, which exists while an event is pending. Its names have underscores, as Google's. The
/// end of the window is not known.
fn upcoming_maintenance(known: &AnnouncedEvent) -> Value {
    let time = utc(&known.time());
    let is_started = known.event.state == EventState::Started;
    json!({
        "can_reschedule": "false",
        "latest_window_start_time": time.clone(),
        "maintenance_status": if is_started { "ONGOING" } else { "PENDING" },
        "type": "SCHEDULED",
        "window_start_time": time,
    })
}

/// Returns `attributes`: generated ones, then the record's metadata. Keys without an account belong to `user`.
fn attributes(record: &Record, user: &str) -> Value {
    let custom = record
        .metadata
        .0
        .iter()
        .filter(|(key, _)| is_segment(key) && !GCE_ATTRIBUTES.contains(&key.as_str()));
    let mut attributes: Map<String, Value> =
        custom.map(|(key, value)| (key.clone(), value.as_str().into())).collect();
    if !record.ssh_keys.is_empty() {
        let line = |key: &crate::record::vm::SshKey| {
            format!("{}:{}", key.user.as_ref().map_or(user, |user| user.as_str()), key.key)
        };
        let lines: Vec<String> = record.ssh_keys.iter().map(line).collect();
        attributes.insert("ssh-keys".to_owned(), lines.join("\n").into());
    }
    if let Some(bytes) = record.user_data.as_ref().and_then(Payload::bytes) {
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text.into(),
            Err(_) => {
                attributes.insert("user-data-encoding".to_owned(), "base64".into());
                STANDARD.encode(&bytes).into()
            }
        };
        attributes.insert("user-data".to_owned(), text);
    }
    if let Some(document) = record.systemd_document() {
        attributes.insert(SYSTEMD_ATTRIBUTE.to_owned(), document.into());
    }
    attributes.into()
}

fn disks(record: &Record) -> Value {
    let disk = |(n, disk): (usize, &crate::record::vm::Disk)| {
        let name = disk.serial.as_ref().map_or_else(|| format!("disk-{n}"), ToString::to_string);
        json!({
            "deviceName": name,
            "index": n,
            "interface": disk.bus.as_str().to_uppercase(),
            "mode": if disk.kind.as_str() == "cdrom" { "READ_ONLY" } else { "READ_WRITE" },
            "type": "PERSISTENT",
        })
    };
    record.disks.iter().enumerate().map(disk).collect()
}

/// Returns a NIC, for information: guests configure NICs by DHCP. Without an IPv4 address, `ip`, `subnetmask` and
/// `gateway` are absent.
fn interface(record: &Record, nic: &Nic) -> Value {
    let of_family = |v4: bool| {
        nic.addresses.iter().filter_map(move |entry| {
            Some((entry, entry.address.filter(|cidr| cidr.address.is_ipv4() == v4)?))
        })
    };
    let external = nic.addresses.iter().filter_map(|entry| entry.public);
    let access =
        |ip: crate::record::values::Ip| json!({ "externalIp": ip.to_string(), "type": "ONE_TO_ONE_NAT" });
    let servers: Vec<String> = record.network.dns.iter().map(ToString::to_string).collect();
    let v6: Vec<String> = of_family(false).map(|(_, cidr)| cidr.address.to_string()).collect();
    let mut members = json!({
        "accessConfigs": external.filter(|ip| ip.0.is_ipv4()).map(access).collect::<Vec<_>>(),
        "dnsServers": servers,
        "forwardedIps": [],
        "ipAliases": [],
        "targetInstanceIps": [],
    });
    let mut set = |name: &str, value: Value| members[name] = value;
    if let Some((entry, cidr)) = of_family(true).next() {
        set("ip", cidr.address.to_string().into());
        set("subnetmask", cidr.netmask().to_string().into());
        set("gateway", entry.gateway.map_or_else(String::new, |ip| ip.to_string()).into());
    }
    if !v6.is_empty() {
        set("ipv6s", v6.into());
    }
    if let Some(mac) = nic.mac {
        set("mac", mac.to_string().into());
    }
    if let Some(mtu) = nic.mtu {
        set("mtu", mtu.get().into());
    }
    if let Some(network) = &nic.network_id {
        set("network", format!("projects/{}/networks/{network}", record.vm.project.number).into());
    }
    members
}

/// Returns the service account, under `default` and under its e-mail address.
fn accounts(record: &Record) -> Value {
    let mut accounts = Map::new();
    if let Some(account) = &record.credentials.service_account {
        let ServiceAccount { name, email, scopes, .. } = &**account;
        let email = email.as_ref().unwrap_or(name).as_str();
        let scopes: Vec<&str> = scopes.iter().map(|scope| scope.as_str()).collect();
        let value = json!({ "aliases": ["default"], "email": email, "scopes": scopes });
        accounts.insert(email.to_owned(), value.clone());
        accounts.insert("default".to_owned(), value);
    }
    accounts.into()
}

// Nodes of the tree, with the names that paths use.

/// Hash of a value: the first 64 bits of SHA-256 of its JSON, in hex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Etag(pub(super) u64);

impl Etag {
    pub(super) fn of(body: &Body) -> Self {
        #[cfg(test)]
        HASHED.set(HASHED.get() + body.len());
        let mut hash = Sha256::new();
        body.pieces().iter().for_each(|piece| hash.update(piece));
        let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(hash.finalize());
        Self(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

#[cfg(test)]
thread_local! {
    /// The bytes that this test has hashed.
    pub(super) static HASHED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl fmt::Display for Etag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// How a node is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeShape {
    /// Directory: one name per line.
    Directory,
    /// List of strings: one per line.
    List,
    /// List of strings: a JSON array unless the request asks for text.
    Array,
    /// Single value.
    Leaf,
}

/// A readable node.
pub(super) trait TreeNode: Sized {
    fn shape(&self) -> NodeShape;
    /// Returns the children in order, with the names that paths use.
    fn children(&self) -> Vec<(String, Self)>;
    /// Returns the node and everything below it as JSON.
    fn json(&self) -> Body;
    /// Returns a leaf as text.
    fn text(&self) -> Body;
    /// Returns the listed names whose values are computed per request.
    fn computed(&self) -> &'static [&'static str] {
        &[]
    }
}

/// Meaning of the names in a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameKind {
    /// Camel case in JSON, hyphens in paths.
    Usual,
    /// The same in JSON and paths.
    Verbatim,
    /// Service accounts.
    Accounts,
    /// Members of a service account.
    Account,
    /// Strings of a list.
    List,
    /// Strings of the tags, the only list that is JSON by default.
    Tags,
}

impl NameKind {
    /// Returns the meaning of the names in a child.
    fn of_member(self, name: &str) -> Self {
        match (self, name) {
            (Self::Usual, "attributes") => Self::Verbatim,
            (Self::Usual, "serviceAccounts") => Self::Accounts,
            (Self::Usual, "tags") => Self::Tags,
            (Self::Usual, "dnsServers" | "ipv6s") => Self::List,
            (Self::Usual, _) => Self::Usual,
            (Self::Accounts, _) => Self::Account,
            (Self::Account, "aliases" | "scopes") => Self::List,
            (Self::Verbatim | Self::Account | Self::List | Self::Tags, _) => Self::Verbatim,
        }
    }

    /// Returns the name of a member in paths.
    fn in_paths(self, name: &str) -> String {
        if self != Self::Usual {
            return name.to_owned();
        }
        let mut path = String::with_capacity(name.len() + 4);
        for letter in name.chars() {
            if letter.is_ascii_uppercase() {
                path.push('-');
            }
            path.push(letter.to_ascii_lowercase());
        }
        path
    }
}

/// A node of the document.
pub(super) struct TreeView<'a> {
    pub(super) node: DocumentNode<'a>,
    place: NameKind,
    /// Text of the leaf, if it is already available unescaped.
    pub(super) verbatim: Option<Bytes>,
    /// Names in a service account whose values are computed per request.
    computed: &'static [&'static str],
}

impl<'a> TreeView<'a> {
    pub(super) fn root(node: DocumentNode<'a>, computed: &'static [&'static str]) -> Self {
        Self { node, place: NameKind::Usual, verbatim: None, computed }
    }

    fn member(&self, name: &str, node: DocumentNode<'a>) -> Self {
        Self { node, place: self.place.of_member(name), verbatim: None, computed: self.computed }
    }

    /// Returns the child that a path segment names.
    pub(super) fn child(&self, segment: &str) -> Option<Self> {
        let mut members = self.node.members().into_iter();
        let (name, node) = members.find(|(name, _)| self.place.in_paths(name) == segment)?;
        Some(self.member(&name, node))
    }
}

impl TreeNode for TreeView<'_> {
    fn shape(&self) -> NodeShape {
        match (self.node.form(), self.place) {
            (PartKind::Scalar, _) => NodeShape::Leaf,
            (PartKind::Array, NameKind::List) => NodeShape::List,
            (PartKind::Array, NameKind::Tags) => NodeShape::Array,
            (PartKind::Array | PartKind::Object, _) => NodeShape::Directory,
        }
    }

    fn children(&self) -> Vec<(String, Self)> {
        let named = |(name, node): (std::borrow::Cow<'_, str>, _)| {
            (self.place.in_paths(&name), self.member(&name, node))
        };
        self.node.members().into_iter().map(named).collect()
    }

    fn json(&self) -> Body {
        self.node.json()
    }

    fn text(&self) -> Body {
        self.verbatim.clone().map_or_else(|| self.node.text(), Body::from)
    }

    fn computed(&self) -> &'static [&'static str] {
        if self.place == NameKind::Account { self.computed } else { &[] }
    }
}
