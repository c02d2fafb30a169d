//! Accepts connections to the endpoints, within limits on their number, duration and size.
//!
//! A slow client occupies one connection for a limited time. At the limit on connections, one that waits for its client
//! is closed. Probes and scrapers are therefore served, however many slow clients there are.

pub(super) use crate::http_connection::LongLivedAnswer;
pub(crate) use metadata_feed::listen::EvictionGuard;

use axum::Router;
use axum::http::Method;
use hyper::Request;
use hyper::body::Incoming;
use metadata_common::run::{SOCKET, unit_hint};
use metadata_feed::listen::{ConnectionHolder, ConnectionLimit, Listener, WhenFull};
use rustix::fs::{XattrFlags, setxattr};
use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::http_connection::{self, HttpLimits};

/// Limit on connections of the metrics address. Beyond it one that waits for its client is closed.
pub(super) const CONNECTIONS: usize = 32;
/// Limit on clients that wait until their ports are attached. Further clients are refused.
pub(super) const WAITS: usize = 16;
/// Limit on clients that wait for a guest to acknowledge an event. Further clients are refused.
pub(super) const EVENT_WAITS: usize = 64;
/// Limit on connections of the control socket. Clients that wait leave the others as many as the metrics address has.
pub(super) const CONTROL_CONNECTIONS: usize = CONNECTIONS + WAITS + EVENT_WAITS;
/// Time limit from the start of a connection, or the end of an answer, to the end of the next request's head.
pub(super) const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// Limit on a request's head, in bytes.
pub(super) const HEAD_MAX: usize = 16 << 10;
/// Limit on the duration of a connection, unless its answer is [`LongLivedAnswer`].
pub(super) const LIFE: Duration = Duration::from_secs(30);

/// Limit on the time to finish the present request at the end of [`LIFE`].
pub(super) const END_WITHIN: Duration = Duration::from_secs(5);

const LIMITS: HttpLimits =
    HttpLimits { head_within: HEAD_WITHIN, head_max: HEAD_MAX, life: LIFE, end_within: END_WITHIN };

/// The peer of a connection, in every request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A client on the network.
    Network,
    /// A process of this machine, by its credentials (unix(7), `SO_PEERCRED`).
    Process {
        uid: u32,
        gid: u32,
        /// Its PID, if it is visible in the agent's PID namespace.
        pid: Option<i32>,
    },
}

impl Peer {
    /// True for root and the agent's own user, who can read the agent's memory and write its files anyway.
    #[must_use]
    pub(crate) fn is_owner(self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        matches!(self, Self::Process { uid, .. } if uid == 0 || uid == own)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network => f.write_str("the network"),
            Self::Process { uid, gid, pid } => {
                write!(f, "user {uid}, group {gid}, process {}", pid.unwrap_or_default())
            }
        }
    }
}

/// A listener that knows the peers of its connections.
pub(crate) trait PeerListener: Listener<Stream: AsyncRead + AsyncWrite + Unpin> {
    /// Its name in the log.
    const NAME: &str;
    /// Limit on its connections.
    const MOST: usize;

    /// The peer of a connection.
    fn peer(stream: &Self::Stream) -> Peer;
}

impl PeerListener for TcpListener {
    const NAME: &str = "the metrics address";
    const MOST: usize = CONNECTIONS;

    fn peer(_: &TcpStream) -> Peer {
        Peer::Network
    }
}

impl PeerListener for SocketListener {
    const NAME: &str = "the control socket";
    const MOST: usize = CONTROL_CONNECTIONS;

    fn peer(stream: &UnixStream) -> Peer {
        stream.peer_cred().map_or(Peer::Network, |peer| Peer::Process {
            uid: peer.uid(),
            gid: peer.gid(),
            pid: peer.pid(),
        })
    }
}

/// Serves the connections of a listener until the task ends. Handlers find [`Peer`], [`EvictionGuard`] and the
/// connection's [`Holder`](metadata_feed::listen::ConnectionHolder) in a request's extensions.
pub(crate) async fn serve<L: PeerListener>(listener: L, app: Router) -> anyhow::Result<()> {
    let places = ConnectionLimit { name: L::NAME, most: L::MOST, when_full: WhenFull::Evict };
    let attend = |stream, stay: EvictionGuard| {
        let (peer, holder) = (L::peer(&stream), L::holder(&stream));
        let for_handlers = stay.clone();
        let prepare = move |request: &mut Request<Incoming>| {
            if is_logged(peer, request.method()) {
                let path = beginning(request.uri().path());
                info!(by = %peer, method = %request.method(), path, "request for a change");
            }
            let extensions = request.extensions_mut();
            extensions.insert(peer);
            extensions.insert(holder);
            extensions.insert(for_handlers.clone());
        };
        http_connection::serve(stream, app.clone(), LIMITS, stay, prepare)
    };
    match metadata_feed::listen::serve(&listener, places, attend).await {}
}

/// Limit on a path in the log, in bytes.
const LOGGED_PATH: usize = 256;

/// Returns whether a request is logged. The network cannot change anything, and must not fill the log.
fn is_logged(peer: Peer, method: &Method) -> bool {
    matches!(peer, Peer::Process { .. }) && !matches!(*method, Method::GET | Method::HEAD)
}

/// The beginning of a path, for the log.
pub(super) fn beginning(path: &str) -> &str {
    &path[..path.floor_char_boundary(LOGGED_PATH)]
}

// The control socket and the run directory it is in.

const DIRECTORY_MODE: u32 = 0o700;
const SOCKET_MODE: u32 = 0o660;

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    /// The run directory does not exist and cannot be created.
    #[error(
        "cannot create the run directory {}: {source}; --run names another{}", path.display(), unit_hint(source)
    )]
    Directory { path: PathBuf, source: io::Error },
    /// Other users could replace the socket.
    #[error(
        "the run directory {} has mode {mode:03o}: expected a directory that no other user may write to; run chmod 0700 on it, or name another with --run", path.display()
    )]
    Open { path: PathBuf, mode: u32 },
    /// Another agent listens there.
    #[error("another agent runs with the run directory {}; --run gives this one its own", path.display())]
    Taken { path: PathBuf },
    /// The configured group does not exist.
    #[error("api.group: expected the name of a group in /etc/group, or its number, found `{name}`")]
    NoGroup {
        /// The configured name.
        name: String,
    },
    /// The access control list of the run directory or the socket cannot be set.
    #[error(
        "cannot let the group of `api.group` use {}: {source}; set `run` to a directory that the agent's user owns, on a file system with access control lists, such as the tmpfs of /run", path.display()
    )]
    Group {
        /// The directory or the socket.
        path: PathBuf,
        source: io::Error,
    },
    /// The socket cannot be created.
    #[error("cannot listen on {}: {source}; --run names another directory{}", path.display(), unit_hint(source))]
    Bind { path: PathBuf, source: io::Error },
}

/// A listening socket of the run directory. Dropping it removes the socket, unless another agent has replaced it.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    run: PathBuf,
    name: &'static str,
    /// The mode, and a group that may use it.
    access: (u32, Option<u32>),
    path: PathBuf,
    inode: (u64, u64),
    listener: watch::Sender<Arc<UnixListener>>,
    /// Another agent has replaced it, or it could not be made again, and the log says so.
    is_given_up: bool,
}

/// Accepts the connections of a [`ControlSocket`], also after it was made again.
#[derive(Debug)]
pub(crate) struct SocketListener(watch::Receiver<Arc<UnixListener>>);

impl Listener for SocketListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        let mut current = self.0.clone();
        loop {
            let listener = Arc::clone(&current.borrow_and_update());
            tokio::select! {
                accepted = listener.accept() => return accepted.map(|(stream, _)| stream),
                Ok(()) = current.changed() => {}
            }
        }
    }

    fn holder(stream: &UnixStream) -> ConnectionHolder {
        UnixListener::holder(stream)
    }
}

#[cfg(test)]
impl From<UnixListener> for SocketListener {
    fn from(listener: UnixListener) -> Self {
        Self(watch::channel(Arc::new(listener)).1)
    }
}

impl ControlSocket {
    /// Listens in the run directory, which is created if necessary, for the agent's user and a group. The socket of a
    /// dead agent is replaced. With `succeeds` the socket of a live agent is replaced too, in one step.
    ///
    /// # Errors
    /// [`SocketError`]: the directory or the socket cannot be created.
    pub(crate) fn listen(
        run: &Path,
        group: Option<&str>,
        succeeds: bool,
    ) -> Result<(Self, SocketListener), SocketError> {
        let gid = group.map(gid_or_error).transpose()?;
        Self::listen_as(run, SOCKET, (SOCKET_MODE, gid), succeeds)
    }

    /// Like [`ControlSocket::listen`], for a socket of another name, mode and group.
    pub(crate) fn listen_as(
        run: &Path,
        name: &'static str,
        access: (u32, Option<u32>),
        succeeds: bool,
    ) -> Result<(Self, SocketListener), SocketError> {
        let path = run.join(name);
        if !succeeds && std::os::unix::net::UnixStream::connect(&path).is_ok() {
            return Err(SocketError::Taken { path: run.into() });
        }
        let (inode, listener) = bind(run, name, access)?;
        let (listener, accepting) = watch::channel(Arc::new(listener));
        let socket = Self { run: run.into(), name, access, path, inode, listener, is_given_up: false };
        Ok((socket, SocketListener(accepting)))
    }

    /// Makes the socket again if somebody removed it: clients would take the agent for dead.
    pub(crate) fn restore(&mut self) {
        match inode(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.is_given_up => {}
            // Another agent, which removes its socket when it ends.
            Ok(found) if found != self.inode => return self.is_given_up = true,
            _ => return,
        }
        match bind(&self.run, self.name, self.access) {
            Ok((inode, listener)) => {
                warn!(socket = %self.path.display(), "somebody removed it; the agent made it again");
                self.inode = inode;
                self.listener.send_replace(Arc::new(listener));
            }
            Err(error) => {
                warn!("{error}; somebody removed the socket: restart the agent once that is mended");
                self.is_given_up = true;
            }
        }
    }
}

/// Listens on a socket of the run directory, which is created if necessary. Replaces the socket that is there.
fn bind(
    run: &Path,
    name: &str,
    (mode, gid): (u32, Option<u32>),
) -> Result<((u64, u64), UnixListener), SocketError> {
    make_directory(run)?;
    if let Some(gid) = gid {
        let_into_run(run, gid)?;
    }
    // Bind under another name and rename, so that clients always find a socket with the right mode.
    let (path, aside) = (run.join(name), run.join(format!(".{name}.{}", std::process::id())));
    let place = || {
        match fs::remove_file(&aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&aside)?;
        fs::set_permissions(&aside, Permissions::from_mode(mode))?;
        if let Some(gid) = gid {
            let_in(&aside, gid, (OWNER_RW, RW))?;
        }
        let inode = inode(&aside)?;
        fs::rename(&aside, &path)?;
        Ok((inode, listener))
    };
    place().map_err(|source| SocketError::Bind { path: path.clone(), source })
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

/// Creates the run directory, for its owner, or for a group as well.
///
/// # Errors
/// [`SocketError`]: the group does not exist, or the directory cannot be created or is unsafe.
pub(crate) fn make_run(run: &Path, group: Option<&str>) -> Result<(), SocketError> {
    make_directory(run)?;
    group.map_or(Ok(()), |group| let_into_run(run, gid_or_error(group)?))
}

fn let_into_run(run: &Path, gid: u32) -> Result<(), SocketError> {
    let_in(run, gid, (OWNER_RWX, RX)).map_err(|source| SocketError::Group { path: run.into(), source })
}

/// Permissions of the owner and of the group in an access control list: 4 reads, 2 writes, 1 enters.
const OWNER_RWX: u16 = 7;
const OWNER_RW: u16 = 6;
const RX: u16 = 5;
const RW: u16 = 6;

/// Gives a group access to a file of ours, by its access control list (acl(5)). That needs no capability and no
/// membership of the group, unlike a change of the file's own group; systemd resets only the latter's permissions.
fn let_in(path: &Path, gid: u32, (owner, group): (u16, u16)) -> io::Result<()> {
    /// The version of the format (include/uapi/linux/posix_acl_xattr.h).
    const VERSION: u32 = 2;
    /// Entries without an id have this one.
    const NO_ID: u32 = u32::MAX;
    // The tags of include/uapi/linux/posix_acl.h, in the order that the kernel expects: the owner, the file's own
    // group, a named group, the mask of both groups, others.
    let entries =
        [(0x01, owner, NO_ID), (0x04, 0, NO_ID), (0x08, group, gid), (0x10, group, NO_ID), (0x20, 0, NO_ID)];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend(u16::to_le_bytes(tag));
        list.extend(u16::to_le_bytes(permissions));
        list.extend(u32::to_le_bytes(id));
    }
    Ok(setxattr(path, "system.posix_acl_access", &list, XattrFlags::empty())?)
}

fn gid_or_error(group: &str) -> Result<u32, SocketError> {
    gid_of(group).ok_or_else(|| SocketError::NoGroup { name: group.into() })
}

/// The group ID of a name in `/etc/group` (group(5)), or of a number.
pub(crate) fn gid_of(group: &str) -> Option<u32> {
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
    use metadata_common::run::SOCKET;
    use metadata_feed::listen::Listener as _;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use axum::http::Method;

    use super::{ControlSocket, LOGGED_PATH, Peer, SocketError, beginning, gid_of, is_logged, make_run};

    #[test]
    fn only_requests_of_processes_for_a_change_are_logged_and_their_paths_are_cut() {
        let process = Peer::Process { uid: 0, gid: 0, pid: None };
        for (peer, method, expected) in [
            (process, Method::PUT, true),
            (process, Method::DELETE, true),
            (process, Method::GET, false),
            (process, Method::HEAD, false),
            (Peer::Network, Method::PUT, false),
            (Peer::Network, Method::OPTIONS, false),
            (Peer::Network, Method::GET, false),
        ] {
            assert_eq!(is_logged(peer, &method), expected, "{peer} {method}");
        }
        let long = format!("/v1/instances/{}", "x".repeat(16 << 10));
        assert_eq!(
            (beginning(&long).len(), beginning("/v1/instances/web")),
            (LOGGED_PATH, "/v1/instances/web")
        );
    }

    #[tokio::test]
    async fn the_socket_is_private_and_is_removed_with_the_agent() {
        let room = tempfile::tempdir().expect("a directory");
        let run = room.path().join("run");
        let (socket, _listener) = ControlSocket::listen(&run, None, false).expect("a socket");
        let mode = |path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(run.clone()), mode(run.join(SOCKET))), (0o700, 0o660));
        drop(socket);
        assert_eq!(fs::read_dir(&run).expect("listed").count(), 0);
    }

    /// A group without members, which is not ours.
    const GROUP: &str = "60123";

    #[tokio::test]
    async fn the_configured_group_may_use_directory_and_socket() {
        let room = tempfile::tempdir().expect("a directory");
        let run = room.path().join("run");
        // Twice: the next agent finds the directory.
        for _ in 0..2 {
            make_run(&run, Some(GROUP)).expect("a directory");
            let (_socket, _listener) = ControlSocket::listen(&run, Some(GROUP), false).expect("a socket");
            let list = |path: &Path| {
                let mut bytes = [0; 64];
                let length =
                    rustix::fs::getxattr(path, "system.posix_acl_access", &mut bytes).expect("a list");
                let entries = bytes[4..length].as_chunks::<8>().0;
                entries
                    .iter()
                    .map(|entry| {
                        (entry[0], entry[2], u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]))
                    })
                    .collect::<Vec<_>>()
            };
            let named =
                |path: &Path| list(path).into_iter().filter(|(_, _, id)| *id != u32::MAX).collect::<Vec<_>>();
            assert_eq!((named(&run), named(&run.join(SOCKET))), (vec![(8, 5, 60_123)], vec![(8, 6, 60_123)]));
            let of = |path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
            // The bits of the group show the mask.
            assert_eq!((of(run.clone()), of(run.join(SOCKET))), (0o750, 0o660));
        }
        assert_eq!((gid_of("root"), gid_of("17"), gid_of("no-such-group")), (Some(0), Some(17), None));
        let refused = make_run(&run, Some("no-such-group")).expect_err("there is none");
        assert!(matches!(&refused, SocketError::NoGroup { name } if name == "no-such-group"), "{refused}");
    }

    #[tokio::test]
    async fn a_live_agents_socket_is_replaced_only_by_its_successor() {
        let room = tempfile::tempdir().expect("a directory");
        drop(UnixListener::bind(room.path().join(SOCKET)).expect("a socket nobody listens on"));
        fs::set_permissions(room.path(), fs::Permissions::from_mode(0o700)).expect("a mode");
        let (first, _first) =
            ControlSocket::listen(room.path(), None, false).expect("a dead agent's is replaced");
        let refused = ControlSocket::listen(room.path(), None, false).expect_err("the first listens");
        assert!(matches!(refused, SocketError::Taken { .. }), "{refused}");
        let (_second, _listener) = ControlSocket::listen(room.path(), None, true).expect("its successor's");
        drop(first);
        assert!(room.path().join(SOCKET).exists(), "the first took the second's away");
    }

    #[tokio::test]
    async fn a_socket_that_somebody_removed_is_made_again_until_another_agent_has_it() {
        let room = tempfile::tempdir().expect("a directory");
        let run = room.path().join("run");
        let (mut socket, listener) = ControlSocket::listen(&run, None, false).expect("a socket");
        let path = run.join(SOCKET);
        socket.restore();
        // Who waits for a connection gets that of the next socket too.
        let accepted = tokio::spawn(async move { listener.accept().await.map(|_| listener) });
        fs::remove_dir_all(&run).expect("a removed directory");
        socket.restore();
        tokio::net::UnixStream::connect(&path).await.expect("a client is served again");
        let _listener = accepted.await.expect("no panic").expect("a connection");
        let (next, _listening) = ControlSocket::listen(&run, None, true).expect("its successor's");
        socket.restore();
        drop(next);
        socket.restore();
        assert!(!path.exists(), "its successor ended");
    }

    #[tokio::test]
    async fn a_directory_that_others_may_write_to_is_refused() {
        let room = tempfile::tempdir().expect("a directory");
        fs::set_permissions(room.path(), fs::Permissions::from_mode(0o770)).expect("a mode");
        let refused = ControlSocket::listen(room.path(), None, false).expect_err("anybody may write there");
        assert!(matches!(refused, SocketError::Open { mode: 0o770, .. }), "{refused}");
    }
}
