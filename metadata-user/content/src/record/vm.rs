//! Types of the record's fields other than `network` and `serve`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::metadata::Sink;
use super::owner::Owner;
use super::values::{
    Account, AnyLine, CredentialName, Domain, Ec2Id, KeyName, Label, Line, NumericId, OpaqueBytes, PublicKey,
    RoleName, Secret, SecretText, Timestamp, Uuid,
};

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
    /// that the platform assigned; give the same one here to stand in front of such a VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Display name.
    pub name: Line,
    /// Tenant or Kubernetes namespace.
    pub namespace: Option<AnyLine>,
    /// `instance-id` of NoCloud and OpenStack; the UUID by default. Change it only with a VM that is built anew: its
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
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self(text.into()))
    }
}

impl Serialize for Utf8 {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = std::str::from_utf8(&self.0).map_err(serde::ser::Error::custom)?;
        serializer.serialize_str(text)
    }
}

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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

impl std::fmt::Debug for Metadata {
    /// Prints keys only: a value may be a start-up script that contains passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> serde::de::Visitor<'de> for Entries {
            type Value = Metadata;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a mapping of names to strings")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, Option<String>>()? {
                    let value = value.ok_or_else(|| {
                        serde::de::Error::custom(format_args!(
                            "expected a text in `{}`, found null; quote it if it is the value, or leave the key out",
                            super::values::excerpt(&key)
                        ))
                    })?;
                    if entries.contains_key(&key) {
                        return Err(serde::de::Error::custom(format_args!(
                            "expected each key once, found `{}` twice",
                            super::values::excerpt(&key)
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
