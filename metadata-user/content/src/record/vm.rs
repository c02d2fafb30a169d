//! The rest of the record: who the VM is and what it is told.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::sink::Sink;
use super::values::{
    Account, AnyLine, Domain, Ec2Id, KeyName, Label, Line, NumericId, Octets, PublicKey, RoleName, Secret,
    Timestamp, Uuid,
};

/// `schema`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Schema {
    /// The only one so far.
    #[serde(rename = "vmrecord/1")]
    V1,
}

/// `vm`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Vm {
    /// The SMBIOS system UUID.
    pub uuid: Uuid,
    /// Display name.
    pub name: Line,
    /// Tenant, or Kubernetes namespace.
    pub namespace: Option<AnyLine>,
    /// `instance-id` of NoCloud and OpenStack, by default the UUID. Never changes in a VM's life.
    pub instance_id: Option<Line>,
    /// Instance id of EC2 and AliYun, derived by default.
    pub ec2_id: Option<Ec2Id>,
    /// Instance id where ids are numbers, derived by default.
    pub numeric_id: Option<NumericId>,
    /// Index within one launch.
    #[serde(default)]
    pub launch_index: u32,
    /// Whose it is.
    pub project: Project,
}

/// `vm.project`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Project {
    /// Its id.
    pub id: Line,
    /// Its number, for GCE.
    pub number: u64,
    /// Its account, for EC2.
    pub account: Account,
}

/// `hostname`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Hostname {
    /// The first label.
    pub short: Label,
    /// The rest.
    pub domain: Option<Domain>,
}

impl Hostname {
    /// `short`, or `short.domain`.
    #[must_use]
    pub fn fqdn(&self) -> String {
        match &self.domain {
            Some(domain) => format!("{}.{domain}", self.short),
            None => self.short.to_string(),
        }
    }
}

/// `placement`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Placement {
    /// Region.
    pub region: Line,
    /// Zone, best `<region>-<x>`.
    pub zone: Line,
    /// Host, where guests may know it.
    pub host: Option<Line>,
    /// Fault domain.
    pub fault_domain: Option<Line>,
}

/// `image`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Image {
    /// Its id; one that does not start `ami-` is hashed for EC2.
    pub id: Line,
    /// Its name.
    pub name: Option<Line>,
    /// Who publishes it, for Azure; like the three that follow, empty there when it is not set.
    pub publisher: Option<Line>,
    /// The publisher's name for its kind, such as `debian-12`, for Azure.
    pub offer: Option<Line>,
    /// The variant of the offer, such as `12-gen2`, for Azure.
    pub sku: Option<Line>,
    /// Its version, for Azure.
    pub version: Option<Line>,
}

/// `admin`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Admin {
    /// The account's name.
    pub user: Option<Line>,
    /// Its password, given out once.
    pub password: Option<Secret>,
}

/// One of `ssh_keys`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct SshKey {
    /// Its name.
    pub name: KeyName,
    /// The key, in the one-line form of `authorized_keys`.
    pub key: PublicKey,
    /// The account it is for.
    pub user: Option<Line>,
}

/// `user_data`, `vendor_data`, `vendor_data2`: exactly one of the three.
#[derive(Clone, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Payload {
    /// Text; served as its UTF-8 octets.
    text: Option<Utf8>,
    /// Octets in base64.
    base64: Option<Octets>,
    /// Where to read it.
    source: Option<Source>,
}

/// Text as octets that can be shared.
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
            (None, bytes) => write!(f, "Payload({} octets)", bytes.map_or(0, |b| b.len())),
        }
    }
}

impl Payload {
    /// How many of the three forms are there.
    pub(super) fn forms(&self) -> usize {
        usize::from(self.text.is_some())
            + usize::from(self.base64.is_some())
            + usize::from(self.source.is_some())
    }

    /// The text, where it was given as text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        self.text.as_ref().and_then(|text| std::str::from_utf8(&text.0).ok())
    }

    /// The octets; `None` while they are still to be read from [`source`](Self::source).
    #[must_use]
    pub fn bytes(&self) -> Option<Bytes> {
        match (&self.text, &self.base64) {
            (Some(text), _) => Some(text.0.clone()),
            (None, Some(octets)) => Some(octets.0.clone()),
            (None, None) => None,
        }
    }

    /// Length in octets, 0 while unread.
    #[must_use]
    pub fn len(&self) -> usize {
        self.text.as_ref().map(|text| text.0.len()).or(self.base64.as_ref().map(|o| o.0.len())).unwrap_or(0)
    }

    /// True when there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where to read it from, when that is still to be done.
    #[must_use]
    pub fn source(&self) -> Option<&Source> {
        self.source.as_ref()
    }

    /// Puts equal octets in the place of its own.
    pub(super) fn share(&mut self, share: &mut impl FnMut(Bytes) -> Bytes) {
        let text = self.text.as_mut().map(|text| &mut text.0);
        for octets in text.into_iter().chain(self.base64.as_mut().map(|octets| &mut octets.0)) {
            *octets = share(std::mem::take(octets));
        }
    }

    /// Puts in the place of the source what was read from it.
    pub fn resolve(&mut self, octets: Bytes) {
        *self = octets.into();
    }
}

impl From<Bytes> for Payload {
    fn from(octets: Bytes) -> Self {
        Self { text: None, base64: Some(Octets(octets)), source: None }
    }
}

/// `source`: where a value that does not belong into the record is read.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Source {
    /// A file, relative to the record's directory and inside it.
    pub file: PathBuf,
}

/// One of `disks`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Disk {
    /// `disk`, `cdrom`, …
    #[serde(rename = "type")]
    pub kind: Line,
    /// `virtio`, `scsi`, …
    pub bus: Line,
    /// Address on the bus.
    pub address: Line,
    /// Serial number.
    pub serial: Option<Line>,
    /// Tags.
    #[serde(default)]
    pub tags: Vec<Line>,
}

/// One of `files`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct InjectedFile {
    /// Path in the guest.
    pub path: Line,
    /// Content.
    pub base64: Octets,
}

/// `random_seed`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct RandomSeed {
    /// The seed.
    pub base64: Octets,
}

/// `metadata`: keys to values, each key once.
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
pub struct Metadata(pub BTreeMap<String, String>);

impl std::fmt::Debug for Metadata {
    /// Names only: a start-up script is a value, and has passwords in it now and then.
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
                while let Some((key, value)) = map.next_entry::<String, String>()? {
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

/// `credentials`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Credentials {
    /// For EC2.
    pub iam: Option<Iam>,
    /// For kubevirt and GCE.
    pub service_account: Option<ServiceAccount>,
    /// For Azure.
    pub managed_identity: Option<ManagedIdentity>,
    /// For MAAS: checked when set.
    pub maas: Option<Maas>,
}

/// `credentials.iam`: a role with either a source or literal keys. What has been read from the source is in the
/// fields of the literal ones.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Iam {
    /// The role's name.
    pub role: RoleName,
    /// Where keys are read.
    pub source: Option<Source>,
    /// Literal key id.
    pub access_key_id: Option<Line>,
    /// Literal key.
    pub secret_access_key: Option<Secret>,
    /// Literal session token.
    pub session_token: Option<Secret>,
    /// When literal keys expire.
    pub expires: Option<Timestamp>,
    /// When literal keys were made.
    pub updated: Option<Timestamp>,
}

/// `credentials.service_account`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct ServiceAccount {
    /// Kubernetes namespace, by default `vm.namespace`.
    pub namespace: Option<Line>,
    /// Its name.
    pub name: Line,
    /// Its e-mail address, for GCE.
    pub email: Option<Line>,
    /// Its scopes, for GCE.
    #[serde(default)]
    pub scopes: Vec<Line>,
    /// Its token.
    pub token: Option<Token>,
}

/// `credentials.service_account.token`: a source, or text with its expiry. What has been read from the source is
/// in `text`, and `expires` is then the token's own (`exp` of a JWT) unless the record gives one.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Token {
    /// Where it is read.
    pub source: Option<Source>,
    /// The token.
    pub text: Option<Secret>,
    /// When it expires.
    pub expires: Option<Timestamp>,
}

/// `credentials.managed_identity`: a source, or text with its expiry.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct ManagedIdentity {
    /// Client id.
    pub client_id: Line,
    /// Where its token is read.
    pub source: Option<Source>,
    /// Literal token.
    pub text: Option<Secret>,
    /// When the literal token expires.
    pub expires: Option<Timestamp>,
}

/// `credentials.maas`.
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

/// `signing`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Signing {
    /// Where the key is read.
    pub source: Source,
}

/// `sinks`: where messages from the guest go.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields, default)]
pub struct Sinks {
    /// "The guest is ready."
    pub ready: Option<Sink>,
    /// `phone_home` of cloud-init.
    pub phone_home: Option<Sink>,
    /// Progress events.
    pub events: Option<Sink>,
    /// The password the guest chose.
    pub password: Option<Sink>,
}
