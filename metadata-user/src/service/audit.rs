//! The audit log: a line of JSON for each answered request.
//!
//! ```text
//!  worker ── note ──► Tape (bounded, lock-free) ──► Collector ── lines ──► Writer ──► file
//!                      full: counted, dropped       control loop           thread of its own
//! ```
//!
//! No stage waits for the next one. A worker drops lines while its tape is full, and the collector drops lines while
//! the disk stalls. While a tape is at least half full, the worker records only one in `sample` successful answers of a
//! VM. It records every error as long as there is room.
//!
//! The tapes are off without an audit log, except while somebody [follows](follow) the guests.
//!
//! [`AuditLine`] lists the fields of a line. A line names the client, the path and the result, but no content: no
//! query, header field or body in either direction.

mod collect;
pub mod follow;
pub mod write;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use collect::{AuditCounts, COLLECT_EVERY, Collector, LINES_AT_ONCE};
pub(crate) use collect::{AuditEntry, Path};
pub use collect::{CAPACITY, PATH_MAX, RESERVED, Tape};
pub use write::{AuditTarget, CHUNKS, STDERR};

/// `audit`: destination of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditConfig {
    /// A file, made with mode 0600, or `stderr`; `null` (default) writes nothing.
    pub to: Option<PathBuf>,
    /// Under load, record one in this many successful answers of each VM; 16 by default. 1 records all that fit.
    pub sample: u32,
    /// Size in MiB at which the file is rotated, 64 by default. 0 leaves rotation to another program, which must then
    /// send SIGHUP.
    pub max_megabytes: u32,
    /// Number of rotated files to keep (`FILE.1` is the newest), 4 by default.
    pub keep: u32,
}

impl Default for AuditConfig {
    fn default() -> Self {
        Self { to: None, sample: 16, max_megabytes: 64, keep: 4 }
    }
}

/// A line of the log. Unknown fields are omitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditLine<'a> {
    /// Time of the answer (RFC 3339, UTC).
    pub time: &'a str,
    /// The VM's owner: `vm.owner` of its record, or else the UUID; absent while its record has not arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<&'a str>,
    /// The VM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The port that received the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<&'a str>,
    /// The source MAC of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<&'a str>,
    /// The source address and port that the guest claims; never an identity.
    pub client: &'a str,
    /// The destination address and port.
    pub server: &'a str,
    /// The dialect that answered; `none` if no dialect serves the path.
    pub dialect: &'static str,
    /// The HTTP method; `?` for an unknown one and for an invalid request.
    pub method: &'static str,
    /// The path as sent, without its query, at most [`PATH_MAX`] bytes; absent if it could not be parsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<&'a str>,
    /// The HTTP status.
    pub status: u16,
    /// Bytes of the body of the answer.
    pub bytes: u64,
    /// Microseconds from the turn that received the last byte to passing the answer to TCP.
    pub us: u64,
    /// Number of this VM's answers that the line stands for; absent if 1.
    #[serde(skip_serializing_if = "is_one")]
    pub sampled: u32,
}

/// A line for each identity token and each document that was signed, in addition to the line of its request. Such lines
/// are not sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TokenLine<'a> {
    /// Time of the signature (RFC 3339, UTC).
    pub time: &'a str,
    /// The VM's owner.
    pub vm: &'a str,
    /// The VM's name.
    pub name: &'a str,
    /// The source MAC of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<&'a str>,
    /// What was signed: `token`, `google`, `google_full`, `azure`, `signature`, `pkcs7`, `pkcs7_detached` or
    /// `attested`.
    pub signed: &'static str,
    /// The token's `jti`; absent for a document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<&'a str>,
    /// The `kid` of the key that signed a token, or the thumbprint of the certificate that signed a document.
    pub key: &'a str,
    /// The VM's subject, the `sub` of its tokens.
    pub subject: &'a str,
    /// The token's `aud`; absent for a document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audience: Option<&'a str>,
    /// The end of its validity, in Unix seconds.
    pub expires: u64,
}

fn is_one(sampled: &u32) -> bool {
    *sampled == 1
}
