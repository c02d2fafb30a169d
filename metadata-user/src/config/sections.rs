//! The sections of the file that belong to the agent itself; other crates own the types of the other sections.

use serde::Deserialize;

use metadata_content::record;
use metadata_datapath::sandbox;
use metadata_feed::registry::MAX_RECORDS;

/// What becomes of system calls and capabilities that serving does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// They fail.
    On,
    /// They succeed, and the kernel logs each one (audit type 1326), which shows what a filter lacks.
    Log,
    /// There is no filter, and the agent keeps its capabilities.
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

/// `metadata`: the policy for custom keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetadataLimits {
    /// Keys of one VM, 16 by default, at most [`record::Limits::METADATA_KEYS_MOST`].
    pub keys: usize,
    /// Characters of one key or value, 256 by default, at most [`record::Limits::METADATA_CHARS_MOST`].
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
    /// A group of `/etc/group`, or its number, that may use the control socket: the run directory is then its, with mode
    /// 2750. Default: none; the agent's user and root alone. Members decide what guests are told.
    pub group: Option<String>,
    /// Most VMs that are registered, [`MAX_RECORDS`] by default and at most.
    pub instances: usize,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { group: None, instances: MAX_RECORDS }
    }
}
