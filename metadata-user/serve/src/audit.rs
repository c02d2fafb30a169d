//! The audit log: a line of JSON for each request that was answered.
//!
//! ```text
//!  worker ── note ──► Tape (bounded, lock-free) ──► Collector ── lines ──► Writer ──► file
//!                      full: counted, dropped       control loop           thread of its own
//! ```
//!
//! Nothing on the way waits for what comes after it: a worker whose tape is full drops the line and answers on, and so
//! does the collector while the disk stands still. While a tape is more than half full only one in
//! `sample` of a VM's good answers is noted, and every error as long as there is room.
//!
//! A line has what [`Line`] has. It tells who asked for which path and how that ended, never with what: no query, no
//! header field, no body, neither way.

mod collect;
mod tape;
mod write;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use collect::{AuditCounts, COLLECT_EVERY, Collector, LINES_AT_ONCE};
pub use tape::{CAPACITY, PATH_MAX, RESERVED, Tape};
pub(crate) use tape::{Entry, Path};
pub use write::{CHUNKS, Target};

/// `audit`: where requests are written down.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditConfig {
    /// A file, made with mode 0600, or `stderr`; `null` (default) writes nothing.
    pub to: Option<PathBuf>,
    /// Under load one in so many good answers of each VM is noted, 16 by default; 1 notes all there is room for.
    pub sample: u32,
    /// Size at which the file is renamed and begun anew, in MiB, 64 by default; 0 leaves that to others, which send
    /// SIGHUP afterwards.
    pub max_megabytes: u32,
    /// Renamed files that are kept (`FILE.1` is the youngest), 4 by default.
    pub keep: u32,
}

impl Default for AuditConfig {
    fn default() -> Self {
        Self { to: None, sample: 16, max_megabytes: 64, keep: 4 }
    }
}

/// A line of the log. Fields that are not known are left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line<'a> {
    /// When it was answered (RFC 3339, UTC).
    pub time: &'a str,
    /// The VM's UUID; none while its record has not come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<&'a str>,
    /// The VM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The port it asked on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<&'a str>,
    /// The MAC it asked with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<&'a str>,
    /// Where the guest says it asks from; no identity.
    pub client: &'a str,
    /// The address and port it asked.
    pub server: &'a str,
    /// The dialect that answered; `none` where nothing is served.
    pub dialect: &'static str,
    /// The method; `?` for an unknown one, and for a request that could not be read.
    pub method: &'static str,
    /// The path without its query, as it was sent, [`PATH_MAX`] octets at most; none where it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<&'a str>,
    /// The status.
    pub status: u16,
    /// Octets of the answer's body.
    pub bytes: u64,
    /// Microseconds from the turn that received the last octet to the answer's being handed to TCP.
    pub us: u64,
    /// The line stands for so many of this VM.
    #[serde(skip_serializing_if = "is_one")]
    pub sampled: u32,
}

fn is_one(sampled: &u32) -> bool {
    *sampled == 1
}
