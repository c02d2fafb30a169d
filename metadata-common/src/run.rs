//! Paths at which clients find a running agent.

use std::io;
use std::path::Path;

/// The default run directory; the configuration or `--run` overrides it.
pub const DEFAULT_RUN: &str = "/run/xdp-imds";
/// What to do about a directory that only the service's sandbox makes read-only.
pub const UNIT_WRITES: &str = "The package's unit lets the agent write to /run/xdp-imds, /var/lib/xdp-imds and \
     /var/log/xdp-imds; for another directory, add `ReadWritePaths=` by `systemctl edit xdp-imds`";
/// What to do about a path that only the service's sandbox hides.
pub const UNIT_HIDES: &str = "The package's unit hides /root, /home and /run/user from the agent (`ProtectHome=yes`): use another \
     path, or set `ProtectHome=read-only`, or `no`, by `systemctl edit xdp-imds`";

/// True for a path in or below a directory that the unit hides.
#[must_use]
pub fn is_home(path: &Path) -> bool {
    ["/root", "/home", "/run/user"].iter().any(|home| path.starts_with(home))
}

/// Returns [`UNIT_HIDES`] for the end of an error about such a path, which may be there for everybody else; empty for other
/// paths and errors.
#[must_use]
pub fn home_hint(path: &Path, source: &io::Error) -> String {
    let is_hidden = matches!(
        source.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
    );
    if is_hidden && is_home(path) { format!(". {UNIT_HIDES}") } else { String::new() }
}

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

#[cfg(test)]
mod tests {
    use super::{UNIT_HIDES, home_hint};
    use std::io;
    use std::path::Path;

    #[test]
    fn only_errors_about_paths_that_the_unit_hides_say_so() {
        use io::ErrorKind::{InvalidData, NotFound, ReadOnlyFilesystem};
        for (path, kind, is_hinted) in [
            ("/home/me/records", NotFound, true),
            ("/home/me/audit.log", ReadOnlyFilesystem, true),
            ("/run/user/0", NotFound, true),
            ("/rooted", NotFound, false),
            ("/srv/recs", NotFound, false),
            ("/home/me/records", InvalidData, false),
        ] {
            let hint = home_hint(Path::new(path), &kind.into());
            assert_eq!(hint.contains(UNIT_HIDES), is_hinted, "{path} {kind:?}");
        }
    }
}
