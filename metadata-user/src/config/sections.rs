//! The sections whose types belong to this crate. The crates that use the other sections define their types.

use serde::Deserialize;

use metadata_content::record;
use metadata_datapath::sandbox;
use metadata_feed::registry::MAX_RECORDS;

/// How the kernel treats system calls and capabilities that serving does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// The system calls fail, and the agent has dropped the capabilities.
    On,
    /// System calls and capabilities stay available. The kernel logs each call that `on` refuses (audit type 1326).
    Log,
    /// No filter is installed, and the agent keeps its capabilities.
    Off,
}

impl From<Sandbox> for sandbox::Mode {
    fn from(word: Sandbox) -> Self {
        match word {
            Sandbox::On => Self::On,
            Sandbox::Log => Self::Log,
            Sandbox::Off => Self::Off,
        }
    }
}

/// `metadata`: limits of custom keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetadataLimits {
    /// Maximum number of keys of one VM: 16 by default, at most [`record::Limits::METADATA_KEYS_MOST`].
    pub keys: usize,
    /// Maximum length of one key or value, in characters: 256 by default, at most
    /// [`record::Limits::METADATA_CHARS_MOST`].
    pub chars: usize,
}

impl Default for MetadataLimits {
    fn default() -> Self {
        let record::Limits { metadata_keys, metadata_chars, .. } = record::Limits::DEFAULT;
        Self { keys: metadata_keys, chars: metadata_chars }
    }
}

/// `api`: who may register VMs, and how many.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// A group, by its name in `/etc/group` or its number, that may use the control socket. The run directory then
    /// belongs to this group and has mode 2750. Members control the metadata of all guests. Default: none; only the
    /// agent's user and root have access.
    pub group: Option<String>,
    /// Maximum number of registered VMs: [`MAX_RECORDS`] by default, which is also the largest value.
    pub instances: usize,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { group: None, instances: MAX_RECORDS }
    }
}
