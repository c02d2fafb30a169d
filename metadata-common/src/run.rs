//! Paths at which clients find a running agent.

use std::io;

/// The default run directory; the configuration or `--run` overrides it.
pub const DEFAULT_RUN: &str = "/run/xdp-imds";
/// What to do about a directory that only the service's sandbox makes read-only.
pub const UNIT_WRITES: &str = "The package's unit lets the agent write to /run/xdp-imds, /var/lib/xdp-imds and \
     /var/log/xdp-imds; for another directory, add `ReadWritePaths=` by `systemctl edit xdp-imds`";
/// Returns [`UNIT_WRITES`] for the end of an error of a read-only file system; empty for other errors. Outside the unit
/// the directory may be writable, so nothing else says what is wrong.
#[must_use]
pub fn unit_hint(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::ReadOnlyFilesystem => format!(". {UNIT_WRITES}"),
        _ => String::new(),
    }
}

/// Name of the control socket in the run directory.
pub const SOCKET: &str = "control.sock";
