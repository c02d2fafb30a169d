//! The VM record, its validation and derivations.
//!
//! One neutral record per VM, in YAML or JSON. Nothing in it names a cloud: what a dialect needs is a field
//! here or derived from one. Unknown fields and bad values are refused with file, line and field, so that a
//! typo cannot quietly take a VM's user-data away.

mod credentials;
mod derive;
mod error;
mod metadata;
pub mod network;
mod parse;
mod serving;
mod sink;
mod validate;
pub mod values;
pub mod vm;

#[cfg(test)]
mod tests;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use credentials::{CREDENTIAL_OCTETS, Credential, CredentialError};
pub use error::{Place, RecordError, Warning};
pub use metadata::{GCE_ATTRIBUTES, ORACLE_KEYS, RESERVED_KEYS, is_instance_tag, is_segment};
pub use network::{Nic, Role};
pub use parse::Step;
pub use serving::{
    AbsentSeed, DateTree, Dialect, Imdsv2, Serve, ServeLimits, Smbios, Switch, USER_DATA_DEFAULT,
    USER_DATA_MAX,
};
pub use sink::Sink;
pub use validate::{is_network_config, is_network_data};

use network::Network;
use values::Line;
use vm::{
    Admin, Credentials, Disk, Hostname, Image, InjectedFile, Metadata, Payload, Placement, RandomSeed,
    Schema, Signing, Sinks, SshKey, Vm,
};

/// How much a record may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The record's text, in octets.
    pub record_octets: usize,
    /// NICs.
    pub nics: usize,
    /// Addresses of one NIC.
    pub addresses: usize,
    /// Routes of one NIC.
    pub routes: usize,
    /// Resolvers, and search domains.
    pub names: usize,
    /// Public keys.
    pub keys: usize,
    /// Labels.
    pub labels: usize,
    /// Disks.
    pub disks: usize,
    /// Injected files.
    pub files: usize,
    /// Injected files' octets in all.
    pub files_octets: usize,
    /// Keys of `metadata` (policy).
    pub metadata_keys: usize,
    /// Characters of one `metadata` key or value (policy).
    pub metadata_chars: usize,
}

impl Limits {
    /// The most `metadata_keys` may be configured to: each is a path or more in some dialects.
    pub const METADATA_KEYS_MOST: usize = 256;
    /// The most `metadata_chars` may be configured to.
    pub const METADATA_CHARS_MOST: usize = 4096;

    /// The limits when nothing else is configured.
    pub const DEFAULT: Self = Self {
        record_octets: 4 << 20,
        nics: 32,
        addresses: 32,
        routes: 64,
        names: 16,
        keys: 128,
        labels: 64,
        disks: 64,
        files: 64,
        files_octets: 1 << 20,
        metadata_keys: 16,
        metadata_chars: 256,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Everything known about one VM.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(expecting = "a mapping", deny_unknown_fields)]
pub struct Record {
    /// The record's form.
    pub schema: Schema,
    /// Grows with every change.
    pub generation: u64,
    /// Who the VM is.
    pub vm: Vm,
    /// Its host name.
    pub hostname: Hostname,
    /// Where it runs.
    pub placement: Placement,
    /// Its type, `unknown` by default.
    pub instance_type: Option<Line>,
    /// Its architecture, `x86_64` by default.
    pub arch: Option<Line>,
    /// Its image.
    pub image: Option<Image>,
    /// Its administrator.
    pub admin: Option<Admin>,
    /// Public keys.
    #[serde(default)]
    pub ssh_keys: Vec<SshKey>,
    /// User-data: octets, never looked into.
    pub user_data: Option<Payload>,
    /// Vendor-data, likewise.
    pub vendor_data: Option<Payload>,
    /// OpenStack's second vendor-data, likewise.
    pub vendor_data2: Option<Payload>,
    /// Its network.
    #[serde(default)]
    pub network: Network,
    /// Custom keys.
    #[serde(default)]
    pub metadata: Metadata,
    /// Labels.
    #[serde(default)]
    pub labels: Vec<Line>,
    /// Disks.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// Injected files.
    #[serde(default)]
    pub files: Vec<InjectedFile>,
    /// A seed for the guest's random number generator.
    pub random_seed: Option<RandomSeed>,
    /// Credentials.
    #[serde(default)]
    pub credentials: Credentials,
    /// The key that signs identity documents.
    pub signing: Option<Signing>,
    /// How it is served.
    #[serde(default)]
    pub serve: Serve,
    /// Where messages from the guest go.
    #[serde(default)]
    pub sinks: Sinks,
}

impl Record {
    /// Reads and checks a record under [`Limits::DEFAULT`].
    ///
    /// `source_name` is named in errors and warnings; a name that ends in `.json` is read as JSON, anything
    /// else as YAML.
    ///
    /// # Errors
    /// The first thing that is wrong with it, with its place.
    pub fn parse(source_name: &str, text: &str) -> Result<(Self, Vec<Warning>), RecordError> {
        Self::parse_within(&Limits::DEFAULT, source_name, text)
    }

    /// Reads and checks a record under other limits.
    ///
    /// # Errors
    /// The first thing that is wrong with it, with its place.
    pub fn parse_within(
        limits: &Limits,
        source_name: &str,
        text: &str,
    ) -> Result<(Self, Vec<Warning>), RecordError> {
        if text.len() > limits.record_octets {
            return Err(RecordError::TooLarge {
                source_name: source_name.to_owned(),
                found: text.len(),
                limit: limits.record_octets,
            });
        }
        let text = parse::Text { source: source_name, text };
        let record = text.read()?;
        let warnings = validate::validate(&record, text, limits)?;
        Ok((record, warnings))
    }

    /// The place of a field in a record's text, or of the nearest thing around it.
    #[must_use]
    pub fn locate(source_name: &str, text: &str, field: &[Step]) -> Place {
        parse::Text { source: source_name, text }.place(field)
    }

    /// `instance_type`, or `unknown`.
    #[must_use]
    pub fn instance_type(&self) -> &str {
        self.instance_type.as_ref().map_or("unknown", Line::as_str)
    }

    /// `arch`, or `x86_64`.
    #[must_use]
    pub fn arch(&self) -> &str {
        self.arch.as_ref().map_or("x86_64", Line::as_str)
    }

    /// `vm.namespace`, or nothing.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.vm.namespace.as_ref().map_or("", values::AnyLine::as_str)
    }

    /// The role of the NIC at `index`: its own, or public for the first and private for the others.
    #[must_use]
    pub fn role(&self, index: usize) -> Role {
        let default = if index == 0 { Role::Public } else { Role::Private };
        self.network.nics.get(index).and_then(|nic| nic.role).unwrap_or(default)
    }

    /// The payloads with their field names.
    #[must_use]
    pub fn payloads(&self) -> [(&'static str, Option<&Payload>); 3] {
        [
            ("user_data", self.user_data.as_ref()),
            ("vendor_data", self.vendor_data.as_ref()),
            ("vendor_data2", self.vendor_data2.as_ref()),
        ]
    }

    /// Makes it as small as it can be kept: equal octets, which other records may hold too, come in the place
    /// of payloads and files, and lists have no room left.
    pub fn compact(&mut self, mut share: impl FnMut(Bytes) -> Bytes) {
        let payloads = [&mut self.user_data, &mut self.vendor_data, &mut self.vendor_data2];
        payloads.into_iter().flatten().for_each(|payload| payload.share(&mut share));
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
    }

    /// The record as JSON that reads back without the files beside it, secrets and all: for files as private as its own.
    ///
    /// # Errors
    /// A path in it is no UTF-8.
    pub fn to_json(&self) -> serde_json::Result<String> {
        let mut whole = self.clone();
        whole.credentials.settle();
        serde_json::to_string(&whole)
    }

    /// The payloads with their field names, to put in what was read from their sources.
    pub fn payloads_mut(&mut self) -> [(&'static str, Option<&mut Payload>); 3] {
        [
            ("user_data", self.user_data.as_mut()),
            ("vendor_data", self.vendor_data.as_mut()),
            ("vendor_data2", self.vendor_data2.as_mut()),
        ]
    }
}
