//! The control socket and the run directory it is in.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use metadata_base::run::SOCKET;
use tokio::net::UnixListener;
use tracing::warn;

/// Mode of the run directory without a group.
const DIRECTORY_MODE: u32 = 0o700;
/// Mode of the run directory with a group, which owns the files created there (inode(7), set-group-ID).
const GROUP_MODE: u32 = 0o2750;
const SOCKET_MODE: u32 = 0o660;

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    /// The run directory does not exist and cannot be created.
    #[error("cannot create the run directory {}: {source}; --run names another", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Other users could replace the socket.
    #[error(
        "the run directory {} has mode {mode:03o}: expected a directory that no other user may write to; run chmod 0700 on it, or name another with --run", path.display()
    )]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Another agent listens there.
    #[error("another agent serves with the run directory {}; --run gives this one its own", path.display())]
    Taken {
        /// The directory.
        path: PathBuf,
    },
    /// The configured group does not exist.
    #[error("api.group: expected the name of a group in /etc/group, or its number, found `{name}`")]
    NoGroup {
        /// The configured name.
        name: String,
    },
    /// The group of the run directory cannot be changed.
    #[error(
        "cannot let group {group} into the run directory {}: {source}; run the agent as a member of it or with CAP_CHOWN, or make the directory beforehand: install -d -m 2750 -g {group} {}", path.display(), path.display()
    )]
    Group {
        /// The directory.
        path: PathBuf,
        /// The group.
        group: String,
        /// The system's error.
        source: io::Error,
    },
    /// The socket cannot be created.
    #[error("cannot listen on {}: {source}; --run names another directory", path.display())]
    Bind {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The path of a listening socket. Dropping it removes the socket, unless another agent has replaced it.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    path: PathBuf,
    inode: (u64, u64),
}

impl ControlSocket {
    /// Listens in the run directory, which is created if necessary. The socket of a dead agent is replaced. With
    /// `succeeds` the socket of a live agent is replaced too, in one step.
    ///
    /// # Errors
    /// [`SocketError`]: the directory or the socket cannot be created.
    pub(crate) fn listen(run: &Path, succeeds: bool) -> Result<(Self, UnixListener), SocketError> {
        Self::listen_as(run, SOCKET, SOCKET_MODE, succeeds)
    }

    /// Like [`ControlSocket::listen`], for a socket of another name and mode.
    pub(in crate::agent) fn listen_as(
        run: &Path,
        name: &str,
        mode: u32,
        succeeds: bool,
    ) -> Result<(Self, UnixListener), SocketError> {
        make_directory(run)?;
        let path = run.join(name);
        if !succeeds && UnixStream::connect(&path).is_ok() {
            return Err(SocketError::Taken { path: run.into() });
        }
        // Bind under another name and rename, so that clients always find a socket with the right mode.
        let aside = run.join(format!(".{name}.{}", std::process::id()));
        let place = || -> io::Result<(Self, UnixListener)> {
            match fs::remove_file(&aside) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(&aside)?;
            fs::set_permissions(&aside, Permissions::from_mode(mode))?;
            let inode = inode(&aside)?;
            fs::rename(&aside, &path)?;
            Ok((Self { path: path.clone(), inode }, listener))
        };
        place().map_err(|source| SocketError::Bind { path: path.clone(), source })
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|there| there == self.inode)
            && let Err(error) = fs::remove_file(&self.path)
        {
            warn!(socket = %self.path.display(), "cannot be removed: {error}");
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Creates the run directory, for its owner alone or also for a group, which then owns the sockets created there. Call
/// it before capabilities are dropped.
///
/// # Errors
/// [`SocketError`]: the group does not exist, or the directory cannot be created or is unsafe.
pub(in crate::agent) fn make_run(run: &Path, group: Option<&str>) -> Result<(), SocketError> {
    make_directory(run)?;
    let Some(group) = group else { return Ok(()) };
    let gid = gid_of(group).ok_or_else(|| SocketError::NoGroup { name: group.into() })?;
    let let_in = || -> io::Result<()> {
        let directory = fs::File::open(run)?;
        if directory.metadata()?.gid() != gid {
            rustix::fs::fchown(&directory, None, Some(rustix::fs::Gid::from_raw(gid)))?;
        }
        directory.set_permissions(Permissions::from_mode(GROUP_MODE))
    };
    let_in().map_err(|source| SocketError::Group { path: run.into(), group: group.into(), source })
}

/// The group ID of a name in `/etc/group` (group(5)), or of a number.
pub(in crate::agent) fn gid_of(group: &str) -> Option<u32> {
    let named = |text: &str| {
        let mut fields = text.lines().map(|line| line.split(':'));
        fields.find_map(|mut fields| (fields.next()? == group).then(|| fields.nth(1)?.parse().ok())?)
    };
    group.parse().ok().or_else(|| named(&fs::read_to_string("/etc/group").ok()?))
}

fn make_directory(path: &Path) -> Result<(), SocketError> {
    let made = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(path);
    let metadata = made.and_then(|()| fs::metadata(path));
    let metadata = metadata.map_err(|source| SocketError::Directory { path: path.into(), source })?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o022 != 0 {
        return Err(SocketError::Open { path: path.into(), mode });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{ControlSocket, SocketError, gid_of, make_run};
    use metadata_base::run::SOCKET;
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn the_socket_is_private_and_is_removed_with_the_agent() {
        let room = tempfile::tempdir().expect("a directory");
        let run = room.path().join("run");
        let (socket, _listener) = ControlSocket::listen(&run, false).expect("a socket");
        let mode = |path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(run.clone()), mode(run.join(SOCKET))), (0o700, 0o660));
        drop(socket);
        assert_eq!(fs::read_dir(&run).expect("listed").count(), 0);
    }

    #[tokio::test]
    async fn the_configured_group_owns_directory_and_socket() {
        let room = tempfile::tempdir().expect("a directory");
        let run = room.path().join("run");
        // A number without a group is valid too. A group other than ours needs privilege.
        let own = rustix::process::getegid().as_raw();
        let gid = if rustix::process::geteuid().is_root() { 60_123 } else { own };
        make_run(&run, Some(&gid.to_string())).expect("a directory");
        let (_socket, _listener) = ControlSocket::listen(&run, false).expect("a socket");
        let of =
            |path| fs::metadata(path).map(|m| (m.gid(), m.permissions().mode() & 0o7777)).expect("there");
        assert_eq!((of(run.clone()), of(run.join(SOCKET))), ((gid, 0o2750), (gid, 0o660)));
        assert_eq!((gid_of("root"), gid_of("17"), gid_of("no-such-group")), (Some(0), Some(17), None));
        let refused = make_run(&run, Some("no-such-group")).expect_err("there is none");
        assert!(matches!(&refused, SocketError::NoGroup { name } if name == "no-such-group"), "{refused}");
    }

    #[tokio::test]
    async fn a_live_agents_socket_is_replaced_only_by_its_successor() {
        let room = tempfile::tempdir().expect("a directory");
        drop(UnixListener::bind(room.path().join(SOCKET)).expect("a socket nobody listens on"));
        fs::set_permissions(room.path(), fs::Permissions::from_mode(0o700)).expect("a mode");
        let (first, _first) = ControlSocket::listen(room.path(), false).expect("a dead agent's is replaced");
        let refused = ControlSocket::listen(room.path(), false).expect_err("the first listens");
        assert!(matches!(refused, SocketError::Taken { .. }), "{refused}");
        let (_second, _listener) = ControlSocket::listen(room.path(), true).expect("its successor's");
        drop(first);
        assert!(room.path().join(SOCKET).exists(), "the first took the second's away");
    }

    #[tokio::test]
    async fn a_directory_that_others_may_write_to_is_refused() {
        let room = tempfile::tempdir().expect("a directory");
        fs::set_permissions(room.path(), fs::Permissions::from_mode(0o770)).expect("a mode");
        let refused = ControlSocket::listen(room.path(), false).expect_err("anybody may write there");
        assert!(matches!(refused, SocketError::Open { mode: 0o770, .. }), "{refused}");
    }
}
