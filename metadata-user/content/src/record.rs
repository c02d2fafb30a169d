//! The VM record: its types, how it is parsed and validated, and the values derived from it.
//!
//! Each VM has one record, in YAML or JSON. It does not depend on a cloud: a dialect takes its values from the record's
//! fields or derives them. The parser refuses unknown fields and bad values and reports file, line and field. So a typo
//! cannot silently remove a VM's user-data.

mod credentials;
mod dialects;
pub mod event;
pub mod identity;
pub mod network;
mod validate;
pub mod values;
pub mod vm;

#[cfg(test)]
mod tests;

pub use crate::parser::PathStep;
pub(crate) use credentials::SYSTEMD_ATTRIBUTE;
pub use credentials::{CREDENTIAL_BYTES, Credential, CredentialError};
pub use dialects::{
    AbsentSeed, DateTree, Dialect, Dialects, Imdsv2, OnOff, PayloadEncoding, ServeLimits, ServeSettings,
    Smbios, USER_DATA_DEFAULT, USER_DATA_MAX,
};
pub use identity::{OWNER_BYTES, Owner};
pub use network::{Nic, Role};
pub use validate::{is_network_config, is_network_data};
pub use vm::{GCE_ATTRIBUTES, ORACLE_KEYS, RESERVED_KEYS, Sink, is_instance_tag, is_segment};

use bytes::Bytes;
use event::ScheduledEvent;
use identity::IdentitySettings;
use metadata_common::mac::Mac;
use metadata_common::port::PortName;
use network::Network;
use serde::{Deserialize, Serialize};
use std::fmt;
use values::Line;
use vm::{
    Admin, Credentials, Disk, Hostname, Image, InjectedFile, Metadata, Payload, Placement, RandomSeed,
    Schema, SigningSettings, Sinks, SshKey, SystemdCredential, Vm,
};

use crate::parser;
use crate::parser::Syntax;

/// Limits on the size of a record. The parser refuses a record that exceeds one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordLimits {
    /// Maximum length of the record's text, in bytes.
    pub record_bytes: usize,
    /// Maximum number of NICs.
    pub nics: usize,
    /// Maximum number of addresses per NIC.
    pub addresses: usize,
    /// Maximum number of routes per NIC.
    pub routes: usize,
    /// Maximum number of resolvers, and of search domains.
    pub names: usize,
    /// Maximum number of public keys.
    pub keys: usize,
    /// Maximum number of labels.
    pub labels: usize,
    /// Maximum number of disks.
    pub disks: usize,
    /// Maximum number of injected files.
    pub files: usize,
    /// Maximum total size of the injected files, in bytes.
    pub files_bytes: usize,
    /// Maximum number of `metadata` keys; configurable.
    pub metadata_keys: usize,
    /// Maximum length of a `metadata` key or value, in characters; configurable.
    pub metadata_chars: usize,
}

impl RecordLimits {
    /// Upper bound of the `metadata_keys` setting; some dialects serve one or more paths per key.
    pub const METADATA_KEYS_MOST: usize = 256;
    /// Upper bound of the `metadata_chars` setting.
    pub const METADATA_CHARS_MOST: usize = 4096;

    /// The limits that apply when none are configured.
    pub const DEFAULT: Self = Self {
        record_bytes: 4 << 20,
        nics: 32,
        addresses: 32,
        routes: 64,
        names: 16,
        keys: 128,
        labels: 64,
        disks: 64,
        files: 64,
        files_bytes: 1 << 20,
        metadata_keys: 16,
        metadata_chars: 256,
    };
}

impl Default for RecordLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Everything the agent knows about one VM.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Record {
    /// Version of the record format: `vmrecord/1`.
    pub schema: Schema,
    /// Revision of the record; a source increases it with every change.
    pub generation: u64,
    /// Names and ids of the VM.
    pub vm: Vm,
    /// Host name of the guest.
    pub hostname: Hostname,
    /// Region and zone in which the VM runs.
    pub placement: Placement,
    /// Instance type (flavour); `unknown` by default.
    pub instance_type: Option<Line>,
    /// CPU architecture; `x86_64` by default.
    pub arch: Option<Line>,
    /// Image from which the VM was created.
    pub image: Option<Image>,
    /// Administrator account of the guest.
    pub admin: Option<Admin>,
    /// SSH public keys.
    #[serde(default)]
    pub ssh_keys: Vec<SshKey>,
    /// User-data, served unchanged.
    pub user_data: Option<Payload>,
    /// Vendor-data, served unchanged.
    pub vendor_data: Option<Payload>,
    /// OpenStack's second vendor-data, served unchanged.
    pub vendor_data2: Option<Payload>,
    /// Network configuration of the guest.
    #[serde(default)]
    pub network: Network,
    /// Custom keys and values.
    #[serde(default)]
    pub metadata: Metadata,
    /// Labels, which dialects serve as tags.
    #[serde(default)]
    pub labels: Vec<Line>,
    /// Disks that the guest sees.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// Files that OpenStack's dialect injects into the guest.
    #[serde(default)]
    pub files: Vec<InjectedFile>,
    /// Credentials for the guest's service manager, which `systemd-imds` imports (systemd 261 and later): GCE's
    /// attribute `systemd-userdata`, and user-data if the record has no other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub systemd_credentials: Vec<SystemdCredential>,
    /// Seed for the guest's random number generator.
    pub random_seed: Option<RandomSeed>,
    /// Credentials that dialects hand to the guest.
    #[serde(default)]
    pub credentials: Credentials,
    /// Key that signs identity documents.
    pub signing: Option<SigningSettings>,
    /// What tokens that others verify say about the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Box<IdentitySettings>>,
    /// What the host will do to the VM, as its guest is told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<ScheduledEvent>,
    /// Which dialects serve the record, and how.
    #[serde(default)]
    pub serve: ServeSettings,
    /// Destinations of the guest's messages.
    #[serde(default)]
    pub sinks: Sinks,
}

impl Record {
    /// Parses and validates a record under [`RecordLimits::DEFAULT`].
    ///
    /// Errors and warnings name the record by `source_name`. Text whose name ends in `.json` is parsed as JSON, any
    /// other text as YAML.
    ///
    /// # Errors
    /// Returns the first violation, with its place in the text.
    pub fn parse(source_name: &str, text: &str) -> Result<(Self, Vec<Warning>), RecordError> {
        Self::parse_within(&RecordLimits::DEFAULT, source_name, text)
    }

    /// Like [`parse`](Self::parse), under the given limits.
    ///
    /// # Errors
    /// Returns the first violation, with its place in the text.
    pub fn parse_within(
        limits: &RecordLimits,
        source_name: &str,
        text: &str,
    ) -> Result<(Self, Vec<Warning>), RecordError> {
        if text.len() > limits.record_bytes {
            return Err(RecordError::TooLarge {
                source_name: source_name.to_owned(),
                limit: limits.record_bytes,
            });
        }
        let text = RecordText { source: source_name, text };
        let mut record = text.read()?;
        record.network.parse_raw();
        record.fill_user_data();
        let warnings = validate::validate(&record, text, limits)?;
        Ok((record, warnings))
    }

    /// Finds a field in a record's text. If the field is absent, returns the place of its nearest ancestor.
    #[must_use]
    pub fn locate(source_name: &str, text: &str, field: &[PathStep]) -> FieldPosition {
        RecordText { source: source_name, text }.place(field)
    }

    /// Returns `instance_type`; `unknown` if it is not set.
    #[must_use]
    pub fn instance_type(&self) -> &str {
        self.instance_type.as_ref().map_or("unknown", Line::as_str)
    }

    /// Returns `arch`; `x86_64` if it is not set.
    #[must_use]
    pub fn arch(&self) -> &str {
        self.arch.as_ref().map_or("x86_64", Line::as_str)
    }

    /// Returns `vm.namespace`; the empty string if it is not set.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.vm.namespace.as_ref().map_or("", values::AnyLine::as_str)
    }

    /// Returns the role of the NIC at `index`. By default the first NIC is public and the others are private.
    #[must_use]
    pub fn role(&self, index: usize) -> Role {
        let default = if index == 0 { Role::Public } else { Role::Private };
        self.network.nics.get(index).and_then(|nic| nic.role).unwrap_or(default)
    }

    /// Returns the ports and MACs of the NICs that name a port.
    #[must_use]
    pub fn identities(&self) -> Vec<(PortName, Mac)> {
        let nics = self.network.nics.iter();
        nics.filter_map(|nic| Some((nic.port.as_ref()?.into(), nic.mac?.0))).collect()
    }

    /// Reduces the record's memory. Replaces the bytes of payloads and files by the result of `share`, so that records
    /// can share equal bytes. Shrinks lists to their length.
    pub fn compact(&mut self, mut share: impl FnMut(Bytes) -> Bytes) {
        for payload in self.payloads_mut().into_iter().filter_map(|(_, payload)| payload) {
            payload.share(&mut share);
        }
        for file in &mut self.files {
            file.base64.0 = share(std::mem::take(&mut file.base64.0));
        }
        for nic in &mut self.network.nics {
            nic.addresses.shrink_to_fit();
            nic.routes.shrink_to_fit();
        }
        self.network.nics.shrink_to_fit();
        self.ssh_keys.shrink_to_fit();
        self.labels.shrink_to_fit();
        self.disks.shrink_to_fit();
        self.files.shrink_to_fit();
        self.systemd_credentials.shrink_to_fit();
        self.events.shrink_to_fit();
    }

    /// Serializes the record as JSON with the values read from its source files, secrets among them. Write the result
    /// only to files as private as the record itself.
    ///
    /// # Errors
    /// Fails if a path in the record is not UTF-8.
    pub fn to_json(&self) -> serde_json::Result<String> {
        let mut whole = self.clone();
        whole.credentials.settle();
        serde_json::to_string(&whole)
    }
}

/// Lists the fields that are payloads.
macro_rules! payloads {
    ($($field:ident),+) => {
        impl Record {
            /// The names of the fields that are payloads: user-data and both vendor-data.
            pub const PAYLOADS: &[&str] = &[$(stringify!($field)),+];

            /// Returns the payloads with their field names.
            #[must_use]
            pub fn payloads(&self) -> [(&'static str, Option<&Payload>); Self::PAYLOADS.len()] {
                [$((stringify!($field), self.$field.as_ref())),+]
            }

            /// Like [`payloads`](Self::payloads), mutable: the caller stores what it read from the sources.
            pub fn payloads_mut(&mut self) -> [(&'static str, Option<&mut Payload>); Self::PAYLOADS.len()] {
                [$((stringify!($field), self.$field.as_mut())),+]
            }
        }
    };
}

payloads!(user_data, vendor_data, vendor_data2);

// Errors and warnings about a record, with their place in its text.

/// Place of a field in a record's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldPosition {
    /// Source of the record, such as its file name.
    pub source: String,
    /// Line and column, counted from 1; `None` if the parser reports none.
    pub position: Option<(usize, usize)>,
    /// Field path, such as `network.nics[0].mac`; empty for the whole record.
    pub field: String,
}

impl fmt::Display for FieldPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)?;
        if let Some((line, column)) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        Ok(())
    }
}

/// Why the parser refuses a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The text exceeds [`record_bytes`](RecordLimits::record_bytes).
    #[error(
        "{source_name}: expected at most {limit} bytes, found more; move large user-data to a separate file \
         and name that in `source: {{file: …}}`"
    )]
    TooLarge {
        /// Source of the record, such as its file name.
        source_name: String,
        /// Maximum size in bytes.
        limit: usize,
    },
    /// The text is not YAML or JSON, or a value has the wrong form.
    #[error("{place}: {reason}")]
    Unreadable {
        /// Place of the problem.
        place: Box<FieldPosition>,
        /// The parser's message: what it expected and what it found.
        reason: String,
    },
    /// Each value has the right form, but it contradicts another value or exceeds a limit.
    #[error("{place}: expected {expected}, found {found}; {remedy}")]
    Refused {
        /// Place of the problem.
        place: Box<FieldPosition>,
        /// What the record should contain.
        expected: String,
        /// What it contains.
        found: String,
        /// How to correct it.
        remedy: &'static str,
    },
}

impl RecordError {
    /// The path of the field that the error is about; empty for the whole record.
    #[must_use]
    pub fn field(&self) -> &str {
        match self {
            Self::TooLarge { .. } => "",
            Self::Unreadable { place, .. } | Self::Refused { place, .. } => &place.field,
        }
    }

    /// The error of a record that is composed of parts: names the part in place of a position in a text that nobody
    /// wrote.
    #[must_use]
    pub fn in_part(mut self, part: &str) -> Self {
        match &mut self {
            Self::TooLarge { source_name, .. } => part.clone_into(source_name),
            Self::Unreadable { place, .. } | Self::Refused { place, .. } => {
                part.clone_into(&mut place.source);
                place.position = None;
            }
        }
        self
    }
}

/// A probable mistake in a record that the agent serves nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Place of the problem.
    pub place: FieldPosition,
    /// What the agent does, and how to change it.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

// Parses a record's text, and maps a field back to its line and column.

/// A record's text and its source.
#[derive(Clone, Copy)]
struct RecordText<'a> {
    source: &'a str,
    text: &'a str,
}

/// Builds a path into a document from its steps.
macro_rules! way {
    ($($step:expr),* $(,)?) => { [$($crate::record::PathStep::from($step)),*] };
}
use way;

impl RecordText<'_> {
    fn syntax(&self) -> Syntax {
        let json =
            std::path::Path::new(self.source).extension().is_some_and(|ext| ext.eq_ignore_ascii_case("json"));
        if json { Syntax::Json } else { Syntax::Yaml }
    }

    /// Parses the record. Checks the form of each value, not whether values are consistent with each other.
    fn read(&self) -> Result<Record, RecordError> {
        parser::parse(self.syntax(), self.text).map_err(|error| {
            let mut reason = bare(&error.reason, &error.field);
            if may_be_secret(&error.field) {
                reason = without_value(&reason);
            }
            let reason = parser::plain(&reason);
            RecordError::Unreadable { place: Box::new(self.place_at(error.position, error.field)), reason }
        })
    }

    fn place_at(&self, position: Option<(usize, usize)>, field: String) -> FieldPosition {
        FieldPosition { source: self.source.to_owned(), position, field }
    }

    /// Returns the place of a field without its line and column.
    fn name(&self, path: &[PathStep]) -> FieldPosition {
        self.place_at(None, name(path))
    }

    /// Finds a field; returns the place of its nearest ancestor if it is absent.
    fn place(&self, path: &[PathStep]) -> FieldPosition {
        self.place_at(parser::locate(self.syntax(), self.text, path), name(path))
    }
}

/// Formats a path, such as `network.nics[0].mac`.
fn name(path: &[PathStep]) -> String {
    use fmt::Write as _;
    let mut name = String::new();
    for step in path {
        let dot = if name.is_empty() { "" } else { "." };
        match step {
            PathStep::Key(key) => write!(name, "{dot}{}", values::excerpt(key)),
            PathStep::Index(index) => write!(name, "[{index}]"),
        }
        .expect("writing to a String cannot fail");
    }
    name
}

/// Fields that may contain secrets, besides the payloads. Errors do not repeat their values or values below them.
const SECRET: [&str; 4] = ["admin", "credentials", "random_seed", "systemd_credentials"];

/// Returns whether a field is in or below a payload or one of [`SECRET`]. An unknown field counts as secret.
fn may_be_secret(field: &str) -> bool {
    let first = field.split(['.', '[']).next().unwrap_or_default();
    first.is_empty() || SECRET.contains(&first) || Record::PAYLOADS.contains(&first)
}

/// Removes the value from serde's `invalid type: string "value", expected …`.
fn without_value(reason: &str) -> String {
    let found = ["invalid type: ", "invalid value: "].into_iter().find(|start| reason.starts_with(start));
    let end = reason.rfind(", expected ");
    let (Some(start), Some(end)) = (found, end.filter(|end| *end >= found.map_or(0, str::len))) else {
        return reason.to_owned();
    };
    let kind = reason[start.len()..end].split(['"', '`']).next().unwrap_or_default().trim_end();
    format!("{start}{kind}{}", &reason[end..])
}

/// Removes the field from a parser's message, because the [`FieldPosition`] has it.
fn bare(text: &str, field: &str) -> String {
    let mut outer = field;
    loop {
        if let Some(rest) = text.strip_prefix(outer).and_then(|rest| rest.strip_prefix(": ")) {
            return rest.to_owned();
        }
        match outer.rfind(['.', '[']) {
            Some(end) => outer = &outer[..end],
            None => return text.to_owned(),
        }
    }
}
