//! Types of the record's fields other than `network`, `serve` and `identity`, and the restrictions on `metadata`.

use bytes::Bytes;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path, PathBuf};

use super::dialects::{DateTree, Dialect};
use super::identity::Owner;
use super::validate::{ValidationResult, Validator};
use super::values::{
    Account, AnyLine, CredentialName, Domain, Ec2Id, KeyName, LINE_CHARS, Label, Line, NumericId,
    OpaqueBytes, PublicKey, RoleName, Secret, SecretText, TextForm, Timestamp, Uuid, excerpt, readable,
    writable,
};
use super::{Record, way};

/// `schema`: version of the record format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Schema {
    /// Version 1, the only one.
    #[serde(rename = "vmrecord/1")]
    V1,
}

/// `vm`: names and ids of the VM.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Vm {
    /// SMBIOS system UUID.
    pub uuid: Uuid,
    /// Owner of what the agent keeps and derives for the VM: what its guest wrote, its session tokens, ids and subject.
    /// The UUID by default. Set it if others than you choose UUIDs. Records of KubeVirt and Proxmox VE have the owner
    /// that the platform assigned; give the same one here to take precedence over such a VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Display name.
    pub name: Line,
    /// Tenant or Kubernetes namespace.
    pub namespace: Option<AnyLine>,
    /// `instance-id` of NoCloud and OpenStack; the UUID by default. Change it only with a VM that is rebuilt: its
    /// guest then runs cloud-init as at a first boot, and what its predecessor wrote is removed.
    pub instance_id: Option<Line>,
    /// Instance id of EC2 and AliYun; derived from the owner by default.
    pub ec2_id: Option<Ec2Id>,
    /// Instance id of dialects with numeric ids; derived from the owner by default.
    pub numeric_id: Option<NumericId>,
    /// Index of the VM among those launched together, from 0; 0 by default.
    #[serde(default)]
    pub launch_index: u32,
    /// Project that owns the VM.
    pub project: Project,
}

/// `vm.project`: owner of the VM.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Project {
    /// Project id.
    pub id: Line,
    /// Project number, for GCE.
    pub number: u64,
    /// Account number, for EC2.
    pub account: Account,
}

/// `hostname`: host name of the guest.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Hostname {
    /// First label of the host name.
    pub short: Label,
    /// Domain that follows the first label.
    pub domain: Option<Domain>,
}

impl Hostname {
    /// Returns `short.domain`; `short` if no domain is set.
    #[must_use]
    pub fn fqdn(&self) -> String {
        match &self.domain {
            Some(domain) => format!("{}.{domain}", self.short),
            None => self.short.to_string(),
        }
    }
}

/// `placement`: where the VM runs.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Placement {
    /// Region name.
    pub region: Line,
    /// Zone name, preferably `<region>-<x>`.
    pub zone: Line,
    /// Name of the hypervisor node, if guests may know it.
    pub host: Option<Line>,
    /// Fault domain, for Azure and Oracle; the zone by default on Azure.
    pub fault_domain: Option<Line>,
}

/// `image`: image from which the VM was created.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Image {
    /// Image id. EC2 serves it unchanged if it starts with `ami-`, else `ami-` and a hash of it.
    pub id: Line,
    /// Image name.
    pub name: Option<Line>,
    /// Publisher of the image, for Azure; empty by default.
    pub publisher: Option<Line>,
    /// Offer of the publisher, such as `debian-12`, for Azure; empty by default.
    pub offer: Option<Line>,
    /// Variant of the offer, such as `12-gen2`, for Azure; empty by default.
    pub sku: Option<Line>,
    /// Image version, for Azure; empty by default.
    pub version: Option<Line>,
}

/// `admin`: administrator account of the guest.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Admin {
    /// Account name.
    pub user: Option<Line>,
    /// Password. The password server of CloudStack and Exoscale serves it until the guest confirms it.
    pub password: Option<Secret>,
}

/// An entry of `ssh_keys`: one public key.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct SshKey {
    /// Name of the key.
    pub name: KeyName,
    /// Public key in the one-line form of `authorized_keys`.
    pub key: PublicKey,
    /// Account that accepts the key.
    pub user: Option<Line>,
}

/// `user_data`, `vendor_data`, `vendor_data2`: set exactly one of `text`, `base64` and `source`.
#[derive(Clone, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Payload {
    /// Content as text, served as UTF-8.
    text: Option<Utf8>,
    /// Content in standard base64 (RFC 4648 §4).
    base64: Option<OpaqueBytes>,
    /// File to read the content from.
    source: Option<FileSource>,
}

// Bytes, so that records can share them. The book shows the next line as the type of a field.
/// Text in UTF-8.
#[derive(Clone, PartialEq)]
struct Utf8(Bytes);

impl<'de> Deserialize<'de> for Utf8 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self(text.into()))
    }
}

impl Serialize for Utf8 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = std::str::from_utf8(&self.0).map_err(serde::ser::Error::custom)?;
        serializer.serialize_str(text)
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.source, self.bytes()) {
            (Some(source), _) => write!(f, "Payload({source:?})"),
            (None, bytes) => write!(f, "Payload({} bytes)", bytes.map_or(0, |b| b.len())),
        }
    }
}

impl Payload {
    /// Counts which of the three forms are set.
    pub(super) fn forms(&self) -> usize {
        usize::from(self.text.is_some())
            + usize::from(self.base64.is_some())
            + usize::from(self.source.is_some())
    }

    /// Returns the text; `None` if the record gives the payload in another form.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        self.text.as_ref().and_then(|text| std::str::from_utf8(&text.0).ok())
    }

    /// Returns the bytes; `None` until they are read from [`source`](Self::source).
    #[must_use]
    pub fn bytes(&self) -> Option<Bytes> {
        match (&self.text, &self.base64) {
            (Some(text), _) => Some(text.0.clone()),
            (None, Some(bytes)) => Some(bytes.0.clone()),
            (None, None) => None,
        }
    }

    /// Returns the length in bytes; 0 until the source is read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.text.as_ref().map(|text| text.0.len()).or(self.base64.as_ref().map(|o| o.0.len())).unwrap_or(0)
    }

    /// Returns whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the source; `None` if there is none or it is already read.
    #[must_use]
    pub fn source(&self) -> Option<&FileSource> {
        self.source.as_ref()
    }

    /// Replaces the bytes by the result of `share`.
    pub(super) fn share(&mut self, share: &mut impl FnMut(Bytes) -> Bytes) {
        let text = self.text.as_mut().map(|text| &mut text.0);
        for bytes in text.into_iter().chain(self.base64.as_mut().map(|bytes| &mut bytes.0)) {
            *bytes = share(std::mem::take(bytes));
        }
    }

    /// Replaces the source by the bytes read from it.
    pub fn resolve(&mut self, bytes: Bytes) {
        *self = bytes.into();
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self { text: None, base64: Some(OpaqueBytes(bytes)), source: None }
    }
}

/// An entry of `systemd_credentials`: one credential for the guest's service manager. Set exactly one of `text`, `data`
/// and `encrypted`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct SystemdCredential {
    /// Name, such as `passwd.hashed-password.root`.
    pub name: CredentialName,
    /// Content as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<SecretText>,
    /// Content in standard base64 (RFC 4648 §4).
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<OpaqueBytes>,
    /// Content as `systemd-creds encrypt` wrote it, in base64. Only the guest can decrypt it.
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted: Option<OpaqueBytes>,
}

impl SystemdCredential {
    /// Counts which of the three forms are set.
    pub(super) fn forms(&self) -> usize {
        usize::from(self.text.is_some())
            + usize::from(self.data.is_some())
            + usize::from(self.encrypted.is_some())
    }

    /// Returns whether `data` or `encrypted` is empty, which the client refuses.
    pub(super) fn is_void(&self) -> bool {
        [&self.data, &self.encrypted].into_iter().flatten().any(|bytes| bytes.0.is_empty())
    }
}

/// `source`: file with a value that is not in the record itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct FileSource {
    /// File path, relative to the record's directory and inside it.
    pub file: PathBuf,
}

/// An entry of `disks`: one disk that the guest sees.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Disk {
    /// Device type, such as `disk` or `cdrom`.
    #[serde(rename = "type")]
    pub kind: Line,
    /// Bus, such as `virtio` or `scsi`.
    pub bus: Line,
    /// Address on the bus.
    pub address: Line,
    /// Serial number.
    pub serial: Option<Line>,
    /// Tags for the guest, in OpenStack's `devices`.
    #[serde(default)]
    pub tags: Vec<Line>,
}

/// An entry of `files`: one file for the guest.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct InjectedFile {
    /// Path of the file in the guest.
    pub path: Line,
    /// Content in standard base64 (RFC 4648 §4).
    pub base64: OpaqueBytes,
}

/// `random_seed`: seed for the guest's random number generator.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct RandomSeed {
    /// Seed in standard base64 (RFC 4648 §4).
    pub base64: OpaqueBytes,
}

/// `metadata`: custom keys and values, each key once.
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
pub struct Metadata(pub BTreeMap<String, String>);

impl fmt::Debug for Metadata {
    /// Prints keys only: a value may be a start-up script that contains passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> serde::de::Visitor<'de> for Entries {
            type Value = Metadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping of names to strings")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, Option<String>>()? {
                    let value = value.ok_or_else(|| {
                        serde::de::Error::custom(format_args!(
                            "expected a text in `{}`, found null; quote it if it is the value, or leave the key out",
                            excerpt(&key)
                        ))
                    })?;
                    if entries.contains_key(&key) {
                        return Err(serde::de::Error::custom(format_args!(
                            "expected each key once, found `{}` twice",
                            excerpt(&key)
                        )));
                    }
                    entries.insert(key, value);
                }
                Ok(Metadata(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// `credentials`: credentials that dialects hand to the guest.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Credentials {
    /// IAM role and its keys, for EC2.
    pub iam: Option<Box<Iam>>,
    /// Service account and its token, for KubeVirt and GCE.
    pub service_account: Option<Box<ServiceAccount>>,
    /// Managed identity and its token, for Azure.
    pub managed_identity: Option<Box<ManagedIdentity>>,
    /// OAuth credentials that a MAAS client must present. Without this field the dialect accepts every client.
    pub maas: Option<Box<Maas>>,
}

/// `credentials.iam`: a role with either a source file or literal keys. The agent stores keys that it reads from the
/// file in the fields of the literal keys.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Iam {
    /// Role name.
    pub role: RoleName,
    /// File to read the keys from.
    pub source: Option<FileSource>,
    /// Access key id.
    pub access_key_id: Option<Line>,
    /// Secret access key.
    pub secret_access_key: Option<Secret>,
    /// Session token.
    pub session_token: Option<Secret>,
    /// Time when the keys expire (RFC 3339).
    pub expires: Option<Timestamp>,
    /// Time when the keys were issued (RFC 3339).
    pub updated: Option<Timestamp>,
}

/// `credentials.service_account`: service account of the VM.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct ServiceAccount {
    /// Kubernetes namespace; `vm.namespace` by default.
    pub namespace: Option<Line>,
    /// Name of the service account.
    pub name: Line,
    /// E-mail address, for GCE.
    pub email: Option<Line>,
    /// OAuth scopes, for GCE.
    #[serde(default)]
    pub scopes: Vec<Line>,
    /// Token of the service account.
    pub token: Option<AccessToken>,
}

/// `credentials.service_account.token`: a source file, or text with its expiry. The agent stores a token that it reads
/// from the file in `text`. Unless the record sets `expires`, it stores the token's expiry there (`exp` of a JWT).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct AccessToken {
    /// File to read the token from.
    pub source: Option<FileSource>,
    /// Token on one line.
    pub text: Option<Secret>,
    /// Time when the token expires (RFC 3339); required with `text`.
    pub expires: Option<Timestamp>,
}

/// `credentials.managed_identity`: a token's source file, or its text with the expiry. With neither, the guest gets
/// tokens of the node's issuer.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct ManagedIdentity {
    /// Client id of the identity.
    pub client_id: Line,
    /// File to read the token from.
    pub source: Option<FileSource>,
    /// Token on one line.
    pub text: Option<Secret>,
    /// Time when the token expires (RFC 3339); required with `text`.
    pub expires: Option<Timestamp>,
}

impl ManagedIdentity {
    /// Returns whether the record says where the token is from, even if it has not been read yet.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.source.is_some() || self.text.is_some()
    }
}

/// `credentials.maas`: OAuth credentials of the guest.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Maas {
    /// OAuth consumer key.
    pub consumer_key: Line,
    /// OAuth token key.
    pub token_key: Line,
    /// OAuth token secret.
    pub token_secret: Secret,
}

/// `signing`: key that signs identity documents.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct SigningSettings {
    /// File to read the key from.
    pub source: FileSource,
}

/// `sinks`: destinations of the guest's messages. A message without a sink is dropped.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Sinks {
    /// Readiness reports (Azure's health report, Scaleway's state).
    pub ready: Option<Box<Sink>>,
    /// Requests of cloud-init's `phone_home` module.
    pub phone_home: Option<Box<Sink>>,
    /// Progress events of cloud-init and MAAS.
    pub events: Option<Box<Sink>>,
    /// Password that the guest posts.
    pub password: Option<Box<Sink>>,
}

// `metadata`: custom keys of a VM, and the restrictions that dialects put on them.

/// Keys that NoCloud's meta-data reserves. It omits entries of `metadata` with these names.
pub const RESERVED_KEYS: [&str; 9] = [
    "instance-id",
    "local-hostname",
    "public-keys",
    "dsmode",
    "seedfrom",
    "network-interfaces",
    "availability-zone",
    "region",
    "instance-type",
];

/// Keys that Oracle's `metadata` reserves. It omits entries of the record's `metadata` with these names.
pub const ORACLE_KEYS: [&str; 2] = ["ssh_authorized_keys", "user_data"];

/// Attributes that GCE reserves. It omits entries of `metadata` with these names.
pub const GCE_ATTRIBUTES: [&str; 3] = ["ssh-keys", "user-data", "user-data-encoding"];

/// Returns whether a key can be the last segment of a URL path. GCE serves each attribute at such a path.
#[must_use]
pub fn is_segment(key: &str) -> bool {
    !matches!(key, "." | "..")
}

/// Maximum length of a `metadata` key that EC2 serves as an instance tag, in characters.
const TAG_CHARS: usize = 128;

/// Returns whether EC2 can serve an entry of `metadata` as an instance tag.
///
/// A key must fit a listing and a path, and a value must be one line. Clients parse a listed `0=name` as a public key
/// and a value of several lines as a list.
#[must_use]
pub fn is_instance_tag(key: &str, value: &str) -> bool {
    let clean = |b: u8| b.is_ascii_alphanumeric() || b"+-=.,_:@".contains(&b);
    let numbered = key.split_once('=').is_some_and(|(number, _)| number.bytes().all(|b| b.is_ascii_digit()));
    (1..=TAG_CHARS).contains(&key.len())
        && key.bytes().all(clean)
        && !numbered
        && !matches!(key, "." | ".." | "_index")
        && !value.contains('\n')
}

impl Validator<'_> {
    /// Checks keys and values against the limits. Warns of each entry that a dialect omits.
    pub(super) fn metadata(&mut self, record: &Record) -> ValidationResult {
        let entries = &record.metadata.0;
        let has_password = record.admin.as_ref().is_some_and(|admin| admin.password.is_some());
        self.at_most(&way!["metadata"], self.limits.metadata_keys, entries.len(), "keys")?;
        for (key, value) in entries {
            let here = way!["metadata", key.as_str()];
            let named = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
            if key.is_empty() || key.len() > self.limits.metadata_chars || !key.bytes().all(named) {
                let found = format!("`{}`", excerpt(key));
                let expected =
                    format!("a key of 1 to {} letters, digits, `.`, `_` and `-`", self.limits.metadata_chars);
                return self.refuse(&here, expected, found, "rename it");
            }
            self.at_most(&here, self.limits.metadata_chars, value.chars().count(), "characters")?;
            if RESERVED_KEYS.contains(&key.as_str()) {
                let message = "NoCloud's meta-data reserves this key and omits this value; rename it";
                self.warn(&here, message);
            }
            if key == "admin_pass" && has_password && record.serve.serves(Dialect::OpenStack) {
                let message =
                    "left out of OpenStack's meta: admin.password is served as `admin_pass`; rename it";
                self.warn(&here, message);
            }
            if ORACLE_KEYS.contains(&key.as_str()) && record.serve.serves(Dialect::Oracle) {
                let message = "Oracle's metadata reserves this key and omits this value; rename it";
                self.warn(&here, message);
            }
            if GCE_ATTRIBUTES.contains(&key.as_str()) && record.serve.serves(Dialect::Gce) {
                let message = "GCE reserves this attribute and omits this value; rename it";
                self.warn(&here, message);
            }
            if !is_segment(key) && record.serve.serves(Dialect::Gce) {
                self.warn(&here, "left out of GCE's attributes: no URL path can end in this key; rename it");
            }
            let tree = record.serve.date_tree == DateTree::Ec2 && record.serve.serves(Dialect::Ec2);
            if tree && !is_instance_tag(key, value) {
                let message = format!(
                    "not served as an instance tag by ec2: expected a key of at most {TAG_CHARS} characters other \
                     than `.`, `..` and `_index`, and a value of one line"
                );
                self.warn(&here, message);
            }
        }
        Ok(())
    }
}

// Destinations of the guest's messages.

/// Maximum length of a Unix socket's path in bytes (`sun_path` of unix(7) is 108 with the final zero).
const SOCKET_BYTES: usize = 107;

/// A value of `sinks`: a file or a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Sink {
    /// Appends lines of JSON to a file: `file:/var/log/guests.jsonl`, or the path alone.
    File(PathBuf),
    /// Sends HTTP POST over a Unix socket: `unix:/run/sink.sock`, or `unix:/run/sink.sock:/path`.
    Unix {
        /// Path of the socket.
        socket: PathBuf,
        /// Path of the HTTP request; `/` by default.
        path: String,
    },
}

impl TextForm for Sink {
    const EXPECTED: &'static str = "`file:` or `unix:` and an absolute path, such as \
        `file:/var/log/xdp-imds/guests.jsonl`, `unix:/run/guests.sock` or `unix:/run/guests.sock:/http/path`";

    fn read(text: &str) -> Option<Self> {
        if text.chars().count() > LINE_CHARS || text.chars().any(char::is_control) {
            return None;
        }
        match text.strip_prefix("unix:") {
            Some(address) => unix(address),
            None => absolute(text.strip_prefix("file:").unwrap_or(text)).map(Self::File),
        }
    }
}

fn unix(address: &str) -> Option<Sink> {
    let (socket, path) = match address.split_once(":/") {
        Some((socket, rest)) => (socket, format!("/{rest}")),
        None => (address, "/".to_owned()),
    };
    let good = socket.len() <= SOCKET_BYTES && path.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
    absolute(socket).filter(|_| good).map(|socket| Sink::Unix { socket, path })
}

/// Returns the path if it is absolute, names a file and has no `..`.
fn absolute(text: &str) -> Option<PathBuf> {
    let path = Path::new(text);
    let straight = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let file = path.file_name().is_some() && !text.ends_with('/');
    (path.is_absolute() && straight && file).then(|| path.to_owned())
}

impl fmt::Display for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Unix { socket, path } => write!(f, "unix:{}:{path}", socket.display()),
        }
    }
}

readable!(Sink);
writable!(Sink);

#[cfg(test)]
mod tests {
    use super::Sink;
    use crate::record::values::TextForm as _;

    #[test]
    fn a_sink_is_a_file_or_a_unix_socket() {
        let file = |path: &str| Some(Sink::File(path.into()));
        let unix =
            |socket: &str, path: &str| Some(Sink::Unix { socket: socket.into(), path: path.to_owned() });
        let long = format!("unix:/{}", "s".repeat(107));
        let cases = [
            ("file:/var/log/guests.jsonl", file("/var/log/guests.jsonl")),
            ("/var/log/guests.jsonl", file("/var/log/guests.jsonl")),
            ("unix:/run/s.sock", unix("/run/s.sock", "/")),
            ("unix:/run/s.sock:/", unix("/run/s.sock", "/")),
            ("unix:/run/s.sock:/v1/ready?a=b", unix("/run/s.sock", "/v1/ready?a=b")),
            ("", None),
            ("guests.jsonl", None),
            ("file:guests.jsonl", None),
            ("file:///var/log/guests.jsonl", file("/var/log/guests.jsonl")),
            ("/", None),
            ("/var/log/", None),
            ("/var/log/..", None),
            ("/var/../etc/passwd", None),
            ("unix:run/s.sock", None),
            ("unix:/run/s.sock:/a b", None),
            ("unix:", None),
            ("http://127.0.0.1/", None),
            (long.as_str(), None),
        ];
        for (text, expected) in cases {
            let read = Sink::read(text);
            // Paths that differ only in repeated slashes are equal, so `file:///x` is `file:/x`.
            assert_eq!(read, expected, "{text}");
            if let Some(sink) = read {
                assert_eq!(Sink::read(&sink.to_string()), Some(sink), "{text} does not read back");
            }
        }
    }
}
