//! Network namespaces: opened by name, entered on a thread of their own, identified by their cookie.
//!
//! A visit to another namespace than the caller's starts a thread that ends with the visit, so no thread of the agent
//! is ever in the wrong namespace. No namespace except the agent's own stays open after a visit: an open namespace
//! would outlive its pod, together with its taps.
#![expect(unsafe_code, reason = "the namespace cookie is read by getsockopt, which rustix lacks")]

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::error::LinkError;
use crate::processes::{self, NamespaceReservation};

/// Directory in which iproute2 keeps names of namespaces.
pub const RUN_NETNS: &str = "/run/netns";
/// The calling thread's own namespace, which may differ from its process's.
pub const OWN: &str = "/proc/thread-self/ns/net";

/// Number of a namespace in this kernel. It is never reused, even after the namespace is gone, and does not depend on
/// the name of the namespace. (Inode numbers are reused.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cookie(u64);

impl Cookie {
    /// The number, for maps and for names of pins.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// A cookie from the number in a map or in the name of a pin.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }
}

/// Device and inode number of the file that a namespace's name refers to; one system call returns both.
///
/// Compare it only with one of a namespace that is still open, for example by a
/// [`LinkWatch`](crate::watch::LinkWatch): the inode number of a namespace that is gone is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetnsId {
    device: u64,
    inode: u64,
}

impl NetnsId {
    /// The place of a namespace by name, or of the calling thread's own.
    ///
    /// # Errors
    /// If the namespace does not exist.
    pub fn of(name: Option<&str>) -> Result<Self, LinkError> {
        let failed = |source| LinkError::Namespace { name: name.unwrap_or("own").into(), source };
        let path = name.map_or_else(|| Some(OWN.into()), path_of);
        let path = path.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        name.map_or(Ok(()), |name| processes::unchanged(&path, name))?;
        let file = std::fs::metadata(path).map_err(failed)?;
        Ok(Self { device: file.dev(), inode: file.ino() })
    }
}

/// An open network namespace.
#[derive(Debug)]
pub struct Netns {
    file: File,
    name: String,
    id: NetnsId,
}

impl Netns {
    /// The calling thread's namespace.
    pub fn own() -> Result<Self, LinkError> {
        Self::open_path(Path::new(OWN), "own")
    }

    /// A namespace by name under `/run/netns` or by absolute path.
    pub fn open(name: &str) -> Result<Self, LinkError> {
        let path = path_of(name).ok_or_else(|| LinkError::Namespace {
            name: name.into(),
            source: io::ErrorKind::InvalidInput.into(),
        })?;
        Self::open_path(&path, name)
    }

    /// Opens the namespace of a process that the caller has found. The name may still be in use for an earlier
    /// process.
    pub fn of_process(process: &NamespaceReservation) -> Result<Self, LinkError> {
        Self::open_if(Path::new(process.name()), process.name(), || process.still())
    }

    fn open_path(path: &Path, name: &str) -> Result<Self, LinkError> {
        Self::open_if(path, name, || processes::unchanged(path, name))
    }

    fn open_if(
        path: &Path,
        name: &str,
        unchanged: impl Fn() -> Result<(), LinkError>,
    ) -> Result<Self, LinkError> {
        unchanged()?;
        // Non-blocking: a record may name a FIFO, and opening that would wait for a writer.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let failed = |source| LinkError::Namespace { name: name.into(), source };
        let file = file.map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        // The process of the name did not change while its namespace was opened, so the file is the right one.
        unchanged()?;
        let id = NetnsId { device: found.dev(), inode: found.ino() };
        Ok(Self { file, name: name.into(), id })
    }

    /// True for the calling thread's namespace.
    pub fn is_here(&self) -> bool {
        NetnsId::of(None).is_ok_and(|here| here == self.id)
    }

    /// Runs `visit` on a new thread inside this namespace. Interface indexes, sockets, netlink and `/proc/sys/net`
    /// used there are those of the namespace.
    ///
    /// If the caller is already inside, `visit` runs on the caller's thread: a new thread costs ten times the usual
    /// visit, and on a busy node waits for a CPU. A panic of `visit` continues in the caller.
    ///
    /// # Errors
    /// The error of `visit`, or [`LinkError`] if no thread can be started or it cannot enter.
    pub fn run<T: Send, E: From<LinkError> + Send>(
        &self,
        visit: impl FnOnce() -> Result<T, E> + Send,
    ) -> Result<T, E> {
        if self.is_here() {
            return visit();
        }
        let inside = || {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|errno| LinkError::Enter { name: self.name.clone(), source: errno.into() })?;
            visit()
        };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("netns".into())
                .spawn_scoped(scope, inside)
                .map_err(|source| LinkError::Thread { source })?
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// The path of a namespace's file; `None` for a name that is neither a plain file name nor an absolute path.
fn path_of(name: &str) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.is_absolute() {
        return Some(path.into());
    }
    // A relative path would depend on the working directory, and `..` would leave the directory of names.
    (path.file_name().is_some_and(|file| file == name)).then(|| Path::new(RUN_NETNS).join(name))
}

/// The cookie of the calling thread's namespace (`SO_NETNS_COOKIE`, Linux 5.14).
pub fn cookie() -> Result<Cookie, LinkError> {
    let socket = any_socket().map_err(|source| LinkError::device("open a socket", source))?;
    let mut cookie: u64 = 0;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and both pointers are to live variables of the size `len` states.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(LinkError::device("read the cookie of the namespace", io::Error::last_os_error()));
    }
    Ok(Cookie(cookie))
}

/// The interface index of a name in the calling thread's namespace, or `None` if there is no such device.
pub fn index_of(ifname: &str) -> Result<Option<u32>, LinkError> {
    let find = || rustix::net::netdevice::name_to_index(any_socket()?, ifname).map_err(io::Error::from);
    match find() {
        Ok(ifindex) => Ok(Some(ifindex)),
        // A name too long for the kernel names no device; rustix returns ENODEV for it too.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(source) => Err(LinkError::device(format!("look up device {ifname}"), source)),
    }
}

fn any_socket() -> io::Result<std::os::fd::OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

#[cfg(test)]
mod tests {
    use super::{Netns, cookie, index_of, path_of};
    use crate::error::LinkError;
    use std::path::Path;

    #[test]
    fn names_and_absolute_paths_map_to_a_file() {
        for (name, path) in [
            ("vm-4242", Some("/run/netns/vm-4242")),
            ("/proc/4242/ns/net", Some("/proc/4242/ns/net")),
            ("", None),
            (".", None),
            ("..", None),
            ("a/b", None),
            ("../../proc/1/ns/net", None),
            ("a/", None),
        ] {
            assert_eq!(path_of(name).as_deref(), path.map(Path::new), "{name:?}");
        }
    }

    #[test]
    fn opening_a_missing_namespace_names_the_expected_forms() {
        let error = Netns::open("no-such-namespace-4242").expect_err("no such namespace");
        assert!(matches!(error, LinkError::Namespace { .. }));
        assert!(error.to_string().contains("/run/netns"), "{error}");
    }

    #[test]
    fn a_cookie_does_not_change() {
        assert_eq!(cookie().expect("a cookie"), cookie().expect("a cookie"));
    }

    #[test]
    fn a_missing_device_has_no_index() {
        for name in ["no-such-device", "a-name-much-longer-than-fifteen-bytes"] {
            assert_eq!(index_of(name).expect("a look-up"), None, "{name}");
        }
    }
}
