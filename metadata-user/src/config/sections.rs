//! The sections whose types belong to this crate. The crates that use the other sections define their types.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use metadata_content::record;
use metadata_datapath::sandbox;
use metadata_feed::registry::MAX_RECORDS;
use metadata_signer::jwt::LIFETIME_MOST;
use metadata_signer::{Algorithm, CertificateFiles};

/// How the kernel treats system calls and capabilities that serving does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// The system calls fail, and the agent has dropped the capabilities.
    On,
    /// System calls and capabilities stay available. The kernel logs each call that `on` refuses (audit type 1326).
    Log,
    /// No filter is installed, and the agent keeps its capabilities.
    Off,
}

impl Sandbox {
    /// Returns the word for it in the configuration and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Log => "log",
            Self::Off => "off",
        }
    }
}

impl From<Sandbox> for sandbox::SandboxMode {
    fn from(word: Sandbox) -> Self {
        match word {
            Sandbox::On => Self::On,
            Sandbox::Log => Self::Log,
            Sandbox::Off => Self::Off,
        }
    }
}

/// `metadata`: limits of custom keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetadataLimits {
    /// Maximum number of keys of one VM: 16 by default, at most [`record::RecordLimits::METADATA_KEYS_MOST`].
    pub keys: usize,
    /// Maximum length of one key or value, in characters: 256 by default, at most
    /// [`record::RecordLimits::METADATA_CHARS_MOST`].
    pub chars: usize,
}

impl Default for MetadataLimits {
    fn default() -> Self {
        let record::RecordLimits { metadata_keys, metadata_chars, .. } = record::RecordLimits::DEFAULT;
        Self { keys: metadata_keys, chars: metadata_chars }
    }
}

/// `api`: who may register VMs, and how many.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// A group, by its name in `/etc/group` or its number, that may use the control socket. The access
    /// control lists of the run directory and the socket then name it. Members control the metadata of all guests.
    /// Default: none; only the agent's user and root have access.
    pub group: Option<String>,
    /// Maximum number of registered VMs: [`MAX_RECORDS`] by default, which is also the largest value.
    pub instances: usize,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { group: None, instances: MAX_RECORDS }
    }
}

/// `identity`: tokens by which others recognise a VM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct IdentityConfig {
    /// URL of the issuer, `iss` of tokens. Verifiers fetch its public keys below this URL, which begins with
    /// `https://`.
    pub issuer: String,
    /// Directory of private keys: files `*.pem` with mode 0600, in PKCS#8. Only the signer, a process of its own, reads
    /// it.
    pub keys: PathBuf,
    /// Trust domain of SPIFFE. With it the subject of a token is a SPIFFE ID, and the token is a JWT-SVID. Default:
    /// none.
    #[serde(default)]
    pub trust_domain: Option<String>,
    /// Algorithm of the keys; `ES256` by default.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// URL of the public keys; `/.well-known/jwks.json` below `issuer` by default.
    #[serde(default)]
    pub jwks_uri: Option<String>,
    /// Lifetime of tokens in seconds, 10 to 3600; 3600 by default.
    #[serde(default = "lifetime_seconds")]
    pub lifetime_seconds: u32,
    /// Age in hours at which a key begins to sign, so that verifiers know it by then: 0 to 720, 24 by default. A key's
    /// age counts from the time in its file name (`20261123T100000Z.pem`), else from the file's modification time.
    #[serde(default = "publish_hours")]
    pub publish_hours: u32,
    /// Age in days of the newest key at which the signer makes another; 0 (default) leaves keys to others.
    #[serde(default)]
    pub rotate_days: u32,
    /// The certificate that signs documents in the form of EC2 and Azure. Default: none, and no such documents.
    #[serde(default)]
    pub certificate: Option<CertificateFiles>,
}

const fn lifetime_seconds() -> u32 {
    LIFETIME_MOST
}

const fn publish_hours() -> u32 {
    24
}

impl IdentityConfig {
    /// Returns the URL of the public keys.
    #[must_use]
    pub fn jwks_uri(&self) -> String {
        let default = || format!("{}/.well-known/jwks.json", self.issuer.trim_end_matches('/'));
        self.jwks_uri.clone().unwrap_or_else(default)
    }
}
