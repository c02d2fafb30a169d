//! Collects the directories, the pins, and the agent that uses the run directory.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{StatVfsMountFlags, statfs, statvfs};

use super::super::facts::{AgentSilence, Directory, ExposedFile, FileSystem, PathFacts, PinFacts};
use crate::config::Config;
use metadata_control::status::{self, AgentStatus, ClientError};
use metadata_feed::libvirt;
use metadata_feed::record_part::open_mode;
use metadata_steer::PINS_VERSION;
use metadata_steer::probe::{ProbeError, pinned_links};

/// `BPF_FS_MAGIC` (`linux/magic.h`).
const BPFFS: u64 = 0xcafe_4a11;
/// Maximum number of versions kept.
const VERSIONS_TOLD: usize = 16;
/// The names of an agent's sockets in its run directory.
const SOCKETS: [&str; 2] = ["control.sock", "takeover.sock"];

pub(super) fn pins(path: &Path) -> PinFacts {
    let versions = fs::read_dir(path).into_iter().flatten().flatten();
    let mut versions: Vec<_> =
        versions.take(VERSIONS_TOLD).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    versions.sort();
    let links = pinned_links(&path.join(PINS_VERSION).join("links"));
    let owner = fs::metadata(path).ok().map(|found| found.uid());
    PinFacts { path: path.into(), owner, file_system: file_system(path), versions, links }
}

/// Returns the configured directories with their purposes.
pub(super) fn directories(config: &Config) -> Vec<(&'static str, Directory)> {
    let records = config.records.as_deref().map(|path| ("records", path));
    let state = config.state.as_deref().map(|path| ("state", path));
    let all = records.into_iter().chain(state).chain([("run", &*config.run)]);
    all.map(|(what, path)| (what, directory(path))).collect()
}

/// Most files of a directory with parts of records that are looked at: two for each record of a full node.
const PARTS_MOST: usize = 1 << 15;
/// The package's explanation of such a directory: no part of a record.
const README: &str = "README";
/// Maximum number of exposed files kept.
const EXPOSED_TOLD: usize = 3;

/// Returns the directories with parts of records that others may read. The hook of libvirt has no configuration here, so
/// that only its default directory is known.
pub(super) fn exposed(config: &Config) -> Vec<ExposedFile> {
    let sources = config.sources();
    let parts = sources.iter().filter_map(|source| source.parts());
    let directories = [Path::new(libvirt::DEFAULT_FILES)].into_iter().chain(parts);
    directories.filter_map(exposed_in).collect()
}

/// Returns the files of a directory that others may read; `None` if there are none.
fn exposed_in(directory: &Path) -> Option<ExposedFile> {
    let entries = fs::read_dir(directory).ok()?.take(PARTS_MOST).flatten();
    let files = entries.filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        // The package's own file, which everybody may read.
        if name == README { None } else { Some((name, open_mode(&entry.path())?)) }
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    let count = files.len();
    files.truncate(EXPOSED_TOLD);
    (count > 0).then(|| ExposedFile { directory: directory.into(), files, count })
}

pub(super) fn directory(path: &Path) -> Directory {
    let found = match fs::metadata(path) {
        Ok(found) => {
            Ok(Some(PathFacts { directory: found.is_dir(), mode: found.mode() & 0o7777, owner: found.uid() }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    };
    Directory { path: path.into(), found, file_system: file_system(path) }
}

/// Returns the file system of `path`. If `path` does not exist, returns that of its nearest ancestor that exists.
fn file_system(path: &Path) -> Result<FileSystem, ProbeError> {
    let here = |at: &Path| if at.as_os_str().is_empty() { PathBuf::from(".") } else { at.to_owned() };
    let at = path.ancestors().map(here).find(|at| at.exists()).unwrap_or_else(|| "/".into());
    let failed = |errno: rustix::io::Errno| ProbeError::from(io::Error::from(errno));
    let kind = statfs(&at).map_err(failed)?;
    let room = statvfs(&at).map_err(failed)?;
    Ok(FileSystem {
        bpf: u64::try_from(kind.f_type).is_ok_and(|kind| kind == BPFFS),
        read_only: room.f_flag.contains(StatVfsMountFlags::RDONLY),
        free: room.f_bavail.saturating_mul(room.f_frsize),
        at,
    })
}

/// The process that listens on a socket in the run directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ListeningProcess {
    /// Its ID; 0 if the kernel does not report it.
    pub(super) pid: u32,
    /// The user ID that it had when it began to listen, if the kernel reports it.
    pub(super) user: Option<u32>,
}

/// Returns the process that listens on a socket in the run directory. If no process listens, returns the path of a socket
/// that exists there, if there is one.
pub(super) fn agent(run: &Path) -> (Option<ListeningProcess>, Option<PathBuf>) {
    let mut stale = None;
    for path in SOCKETS.map(|name| run.join(name)) {
        match UnixStream::connect(&path) {
            Ok(stream) => {
                let peer = rustix::net::sockopt::socket_peercred(&stream).ok();
                let process = peer.map(|peer| ListeningProcess {
                    pid: peer.pid.as_raw_nonzero().get().unsigned_abs(),
                    user: Some(peer.uid.as_raw()),
                });
                return (Some(process.unwrap_or_default()), None);
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => stale = Some(path),
            Err(_) => {}
        }
    }
    (None, stale)
}

/// Longest wait for the agent's status: an agent that hangs must not hide what else is wrong.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the status of the agent of a run directory with all its ports, or why it gives none.
pub(super) fn status(run: &Path) -> Result<AgentStatus, AgentSilence> {
    let refused = |reason: String| AgentSilence { hangs: false, reason };
    let status = status::get_within(run, "/v1/status?ports=all", STATUS_TIMEOUT).map_err(|error| {
        AgentSilence { hangs: matches!(error, ClientError::Mute(_)), reason: error.to_string() }
    })?;
    serde_json::from_slice(&status)
        .map_err(|error| refused(format!("its status is of a different version than this command: {error}")))
}

#[cfg(test)]
mod tests {
    use super::super::super::facts::ExposedFile;
    use super::{EXPOSED_TOLD, ListeningProcess, agent, directory, exposed_in, file_system};
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    #[test]
    fn the_file_system_of_a_missing_path_is_that_of_its_nearest_ancestor() {
        let room = tempfile::tempdir().expect("a directory");
        let found = file_system(&room.path().join("a/b/c")).expect("a file system");
        assert_eq!((found.at.as_path(), found.bpf), (room.path(), false));
        assert_eq!(file_system(Path::new("no/such/directory")).expect("a file system").at, Path::new("."));
        let seen = directory(&room.path().join("a"));
        assert_eq!(seen.found, Ok(None));
    }

    #[test]
    fn parts_of_records_that_others_may_read_are_found_and_counted() {
        let room = tempfile::tempdir().expect("a directory");
        let write = |name: &str, mode| {
            fs::write(room.path().join(name), "").expect("written");
            fs::set_permissions(room.path().join(name), fs::Permissions::from_mode(mode)).expect("a mode");
        };
        assert_eq!(exposed_in(&room.path().join("nowhere")), None);
        fs::create_dir(room.path().join("directory")).expect("a directory");
        for (name, mode) in [("own.yaml", 0o600), ("group.yaml", 0o640), ("README", 0o644)] {
            write(name, mode);
        }
        assert_eq!(exposed_in(room.path()), None);
        for (name, mode) in [("a", 0o644), ("b.yaml", 0o602), ("c", 0o660), ("d", 0o604)] {
            write(name, mode);
        }
        let found = exposed_in(room.path()).expect("exposed files");
        let files = [("a", 0o644), ("b.yaml", 0o602), ("c", 0o660)].map(|(name, mode)| (name.into(), mode));
        assert_eq!(files.len(), EXPOSED_TOLD);
        assert_eq!(found, ExposedFile { directory: room.path().into(), files: files.into(), count: 4 });
    }

    #[test]
    fn an_agent_that_hangs_is_told_from_one_that_refuses() {
        use super::status;
        use std::io::{Read as _, Write as _};
        let room = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(room.path().join("control.sock")).expect("a socket");
        let silence = status(room.path()).expect_err("nobody answers");
        assert!(silence.hangs && silence.reason.contains("is silent"), "{silence:?}");
        let serving = std::thread::spawn(move || {
            // The first is that of the request above.
            for (mut stream, _) in (0..2).map(|_| listener.accept().expect("a client")) {
                _ = stream.read(&mut [0; 512]);
                _ = stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\n\r\n");
            }
        });
        let silence = status(room.path()).expect_err("a refusal");
        assert!(!silence.hangs && silence.reason.contains("cannot answer now"), "{silence:?}");
        serving.join().expect("served");
    }

    #[test]
    fn a_socket_shows_whether_a_process_listens_and_which() {
        let room = tempfile::tempdir().expect("a directory");
        assert_eq!(agent(room.path()), (None, None));
        let path = room.path().join("control.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let user = Some(rustix::process::geteuid().as_raw());
        let this = ListeningProcess { pid: std::process::id(), user };
        assert_eq!(agent(room.path()), (Some(this), None));
        drop(listener);
        assert_eq!(agent(room.path()), (None, Some(path)));
    }
}
