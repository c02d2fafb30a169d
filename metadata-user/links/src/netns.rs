//! Network namespaces: opened by name, entered on a thread of their own, identified by their cookie.
//!
//! A visit to a namespace other than the caller's starts a thread that ends with the visit, so no thread of the agent
//! is ever in the wrong namespace. No namespace except the agent's own stays open after a visit: an open namespace
//! would outlive its pod, together with its taps.
//!
//! # Namespaces named by a process
//!
//! `/proc/PID/ns/net` is bound to the process that first had the PID. The kernel reuses a PID once its process has
//! ended. The record of a dead VM could then refer to another VM's pod, whose guest would be identified by the MAC in
//! the wrong record. The start time of a process distinguishes it from every other process with its PID (proc(5),
//! `starttime`, in ticks since boot). Unlike a pidfd, it needs no descriptor for each pod.

use rustix::fs::{Mode, OFlags, fstatfs};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

use crate::MAX_NAMESPACES;
use crate::error::LinkError;

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
/// [`LinkWatch`](crate::devices::LinkWatch): the inode number of a namespace that is gone is reused.
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
        name.map_or(Ok(()), |name| unchanged(&path, name))?;
        let file = fs::metadata(path).map_err(failed)?;
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
        Self::open_if(path, name, || unchanged(path, name))
    }

    fn open_if(
        path: &Path,
        name: &str,
        unchanged: impl Fn() -> Result<(), LinkError>,
    ) -> Result<Self, LinkError> {
        unchanged()?;
        let failed = |source| LinkError::Namespace { name: name.into(), source };
        let file = open_namespace(path).map_err(failed)?;
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

/// File system of namespaces (magic.h, `NSFS_MAGIC`).
const NSFS: u64 = 0x6e73_6673;

/// Opens the file of a namespace. Who may register a VM names the path: the agent, as root, must not open anything else,
/// because opening alone has an effect on some devices, and waits for the other end of a FIFO. With `O_PATH` nothing is
/// opened, and what was found is then opened by its descriptor.
fn open_namespace(path: &Path) -> io::Result<File> {
    let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    if !u64::try_from(fstatfs(&found)?.f_type).is_ok_and(|kind| kind == NSFS) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no namespace"));
    }
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
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
#[expect(unsafe_code, reason = "the namespace cookie is read by getsockopt, which rustix lacks")]
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

/// Start time of the process behind a namespace, by name of the namespace.
static STARTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// Start time of the process that a name must refer to, and the number of [`NamespaceReservation`] that require it.
static MEANT: Mutex<BTreeMap<String, (u64, usize)>> = Mutex::new(BTreeMap::new());

/// Index of the start time in `/proc/PID/stat`, counted from the field after the name.
const START_TIME: usize = 19;

/// Reserves a namespace's name for one process until this value is dropped. A caller that has found the process creates
/// it before it passes the name on.
#[derive(Debug)]
pub struct NamespaceReservation {
    name: String,
    process: u32,
    started: u64,
}

impl NamespaceReservation {
    /// Reserves the namespace of the process that has this PID now; `None` if there is none.
    ///
    /// Hold a pidfd of the process and check afterwards that it still runs: otherwise the PID may belong to another
    /// process.
    ///
    /// # Errors
    /// If another user of the name still expects the process that had the PID before. Try again: the error goes away
    /// once that user notices that the process has ended.
    pub fn of(process: u32) -> Result<Option<Self>, LinkError> {
        let name = format!("/proc/{process}/ns/net");
        let Some(now) = started(process) else { return Ok(None) };
        let used = STARTS.lock().unwrap_or_else(PoisonError::into_inner).get(&name).copied();
        let mut meant = MEANT.lock().unwrap_or_else(PoisonError::into_inner);
        if used.or_else(|| meant.get(&name).map(|(first, _)| *first)).is_some_and(|first| first != now) {
            return Err(LinkError::AnotherProcess { name });
        }
        if meant.len() >= MAX_NAMESPACES {
            return Err(LinkError::TooManyNamespaces);
        }
        meant.entry(name.clone()).or_insert((now, 0)).1 += 1;
        Ok(Some(Self { name, process, started: now }))
    }

    /// The name of the namespace, `/proc/PID/ns/net`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fails once another process has the PID.
    pub fn still(&self) -> Result<(), LinkError> {
        match started(self.process) {
            Some(now) if now != self.started => Err(LinkError::AnotherProcess { name: self.name.clone() }),
            _ => Ok(()),
        }
    }
}

impl Drop for NamespaceReservation {
    fn drop(&mut self) {
        let mut meant = MEANT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, count)) = meant.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                meant.remove(&self.name);
            }
        }
    }
}

/// Fails unless a name refers to the process of its first use, or to the one that a [`NamespaceReservation`] reserves.
///
/// # Errors
/// If the name refers to another process now. A process that has ended is not an error: opening the name fails anyway.
fn unchanged(path: &Path, name: &str) -> Result<(), LinkError> {
    let Some(now) = process(path).and_then(started) else { return Ok(()) };
    let meant = MEANT.lock().unwrap_or_else(PoisonError::into_inner).get(name).map(|(first, _)| *first);
    if meant.is_some_and(|first| first != now) {
        return Err(LinkError::AnotherProcess { name: name.into() });
    }
    let mut starts = STARTS.lock().unwrap_or_else(PoisonError::into_inner);
    match starts.get(name) {
        Some(first) if *first != now => Err(LinkError::AnotherProcess { name: name.into() }),
        Some(_) => Ok(()),
        None if starts.len() >= MAX_NAMESPACES => Err(LinkError::TooManyNamespaces),
        None => {
            starts.insert(name.into(), now);
            Ok(())
        }
    }
}

/// Forgets the process of a name that is no longer used; the PID may be reused.
pub fn forget_process(name: &str) {
    STARTS.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
}

/// The PID in `/proc/PID/…`.
fn process(path: &Path) -> Option<u32> {
    let below = path.strip_prefix("/proc").ok()?;
    below.iter().next()?.to_str()?.parse().ok()
}

/// The start time of a process; `None` if there is no such process.
fn started(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the process may contain spaces and brackets.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(START_TIME)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::PoisonError;

    use super::{
        MEANT, NamespaceReservation, Netns, STARTS, cookie, forget_process, index_of, path_of, process,
        started, unchanged,
    };
    use crate::error::LinkError;

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
    fn a_path_is_opened_only_if_it_is_a_namespace() {
        for name in ["/proc/thread-self/ns/net", "/proc/self/ns/net"] {
            assert!(Netns::open(name).expect("a namespace").is_here(), "{name}");
        }
        for name in ["/dev/null", "/dev/zero", "/proc/self/stat", "/proc/self", "/"] {
            let error = Netns::open(name).expect_err("no namespace").to_string();
            assert!(error.contains("it is no namespace"), "{name}: {error}");
        }
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

    #[test]
    fn only_numbers_below_proc_are_processes() {
        for (path, number) in [
            ("/proc/4242/ns/net", Some(4242)),
            ("/proc/4242/task/4243/ns/net", Some(4242)),
            ("/proc/self/ns/net", None),
            ("/proc/thread-self/ns/net", None),
            ("/run/netns/4242", None),
        ] {
            assert_eq!(process(Path::new(path)), number, "{path}");
        }
    }

    #[test]
    fn the_start_time_of_a_process_does_not_change() {
        let own = std::process::id();
        assert!(started(own).is_some_and(|at| at > 0 && started(own) == Some(at)));
        assert_eq!(started(u32::MAX), None);
    }

    #[test]
    fn a_name_refers_to_its_first_process_until_it_is_forgotten() {
        let name = format!("/proc/{}/ns/net", std::process::id());
        let path = Path::new(&name);
        unchanged(path, &name).expect("the first");
        unchanged(path, &name).expect("the same");
        // As if the PID had been reused.
        let was = STARTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), 1);
        assert!(was.is_some());
        let error = unchanged(path, &name).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        forget_process(&name);
        unchanged(path, &name).expect("named again");
        forget_process(&name);
    }

    /// A process that ends with the test.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn new() -> (Self, String) {
            let child = std::process::Command::new("sleep").arg("60").spawn().expect("a process");
            let name = format!("/proc/{}/ns/net", child.id());
            (Self(child), name)
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().and_then(|()| self.0.wait()).expect("it ends");
        }
    }

    #[test]
    fn a_reserved_name_refers_to_no_other_process_before_its_first_use() {
        let (process, name) = Sleeper::new();
        let meant = NamespaceReservation::of(process.0.id()).expect("unused").expect("it runs");
        assert_eq!(meant.name(), name);
        unchanged(Path::new(&name), &name).expect("the reserved process");
        forget_process(&name);
        // As if the PID had been reused.
        MEANT.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), (1, 1));
        let error = unchanged(Path::new(&name), &name).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        let error = NamespaceReservation::of(process.0.id()).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        drop(meant);
        unchanged(Path::new(&name), &name).expect("no reservation remains");
        forget_process(&name);
    }

    #[test]
    fn a_name_in_use_cannot_be_reserved_for_another_process() {
        let (process, name) = Sleeper::new();
        STARTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), 1);
        let error = NamespaceReservation::of(process.0.id()).expect_err("in use");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        forget_process(&name);
        let (first, second) =
            (NamespaceReservation::of(process.0.id()), NamespaceReservation::of(process.0.id()));
        drop(first.expect("free").expect("it runs"));
        assert!(
            MEANT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&name),
            "the second holds it"
        );
        drop(second.expect("the same process").expect("it runs"));
        assert!(!MEANT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&name));
        assert!(NamespaceReservation::of(u32::MAX).expect("no error").is_none(), "no such process");
    }
}
