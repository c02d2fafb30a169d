//! Links and maps pinned on a bpffs: the state in the kernel that outlives the agent.
//!
//! ```text
//!  PINS/v1/maps/IDENTITIES …                    every map the programs share, by its name in the object
//!  PINS/v1/links/port-3-1a2b-17                 a program on a device: program, number and cookie (hex) of the
//!                                               namespace, interface index
//! ```
//!
//! A pinned link keeps its program on the device whichever process dies. The next agent opens the link and replaces
//! the program in place (`BPF_LINK_UPDATE`), so a port is never open in between. Files have mode 0600, directories
//! 0700. `v1` is the layout version: an agent of another layout uses a directory of its own and leaves this one
//! alone, except for links on a port that it attaches. It neither starts beside an agent of another layout nor takes
//! over from one.
//!
//! The directory `v1` is locked (flock(2)): shared by every agent that runs with it (two during a takeover), and
//! exclusively by an agent that starts alone or by a release.

use aya::maps::{MapData, MapInfo};
use aya::programs::links::{FdLink, PinnedLink};
use metadata_common::maps::name;
use rustix::fs::{FlockOperation, StatFs, flock, statfs};
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use metadata_links::netns::Cookie;

/// Version of the layout: the names of pins, and the contract between maps and programs.
pub const PINS_VERSION: &str = "v1";
/// `BPF_FS_MAGIC` (include/uapi/linux/magic.h).
const BPF_FS: u32 = 0xcafe_4a11;
/// Limit on links read from one directory, four for each port. More than that means another fault.
const MAX_LINKS: usize = 4 * metadata_common::maps::MAX_PORTS as usize;

/// Why the pins cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinsError {
    /// The directory is not on a bpffs.
    #[error(
        "expected {} on a bpffs, found another file system or nothing: `mount -t bpf bpf /sys/fs/bpf`, or pin nothing \
         with --no-pins, which leaves every port open while no agent runs", path.display()
    )]
    NoBpffs {
        /// The configured directory.
        path: PathBuf,
    },
    /// Others may write to the directory.
    #[error(
        "expected {} to belong to this user and to be writable for no one else, found owner {owner} and mode {mode:o}; \
         `chmod 0700` it if it is yours, or choose another with --pins", path.display()
    )]
    Exposed {
        /// The configured directory.
        path: PathBuf,
        /// The user ID of its owner.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// Another agent runs with these pins.
    #[error(
        "another xdp-imds runs with the pins in {}: stop it, take over from it with --takeover, or give this one its \
         own --pins and --run", path.display()
    )]
    InUse {
        /// The configured directory.
        path: PathBuf,
    },
    /// A starting agent, or `xdp-imds release`, holds the lock.
    #[error("{} is locked by a starting agent or by `xdp-imds release`; try again", path.display())]
    Busy {
        /// The configured directory.
        path: PathBuf,
    },
    /// There is nothing to take over.
    #[error(
        "cannot take over the pins in {}: {reason}; the running agent goes on: to replace it, stop it and start this \
         one without --takeover (ports stay closed in between)", path.display()
    )]
    NothingToTakeOver {
        /// The configured directory.
        path: PathBuf,
        /// What is missing or different.
        reason: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action; completes "cannot".
        action: &'static str,
        /// The affected path.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// An operation on a pinned object failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Object {
        /// The attempted action; completes "cannot".
        action: &'static str,
        /// The affected path.
        path: PathBuf,
        /// The error of the kernel or the loader.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Which program a pinned link keeps on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum On {
    /// `port`, on a tap.
    Xdp,
    /// `port_tcx`, on a tap.
    Tcx,
    /// `socket`, on the inner end of a hub. Without it, a frame steered while no agent runs would enter the network
    /// stack of the host.
    Hub,
}

impl On {
    const ALL: [Self; 3] = [Self::Xdp, Self::Tcx, Self::Hub];

    pub(super) fn name(self) -> &'static str {
        use metadata_common::maps::program;
        match self {
            Self::Xdp => program::PORT,
            Self::Tcx => program::PORT_TCX,
            Self::Hub => program::SOCKET,
        }
    }
}

/// The file name of a pinned link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LinkName {
    pub(super) on: On,
    /// The number of the namespace in the keys of maps.
    pub(super) netns: u32,
    pub(super) cookie: Cookie,
    pub(super) ifindex: u32,
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { on, netns, cookie, ifindex } = self;
        write!(f, "{}-{netns}-{:x}-{ifindex}", on.name(), cookie.number())
    }
}

impl LinkName {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let program = parts.next()?;
        let on = On::ALL.into_iter().find(|on| on.name() == program)?;
        let netns = parts.next()?.parse().ok()?;
        let cookie = Cookie::from_number(u64::from_str_radix(parts.next()?, 16).ok()?);
        let name = Self { on, netns, cookie, ifindex: parts.next()?.parse().ok()? };
        // Each link has exactly one name: reject `+3` for `3`.
        (parts.next().is_none() && name.to_string() == text).then_some(name)
    }
}

/// The directory of this version's pins, locked.
pub(super) struct Pins {
    /// The configured directory.
    pins: PathBuf,
    /// Open for its lock.
    lock: File,
}

impl Pins {
    /// Opens the directory for a starting agent and makes it if needed. With `alone`, any other lock is an error.
    pub(super) fn open(pins: &Path, alone: bool) -> Result<Self, PinsError> {
        check_bpffs(pins)?;
        let others = other_versions(pins);
        if !alone && !pins.join(PINS_VERSION).exists() {
            let found = if others.is_empty() { "none".into() } else { others.join(", ") };
            let reason = format!("expected pins of version {PINS_VERSION}, found {found}");
            return Err(PinsError::NothingToTakeOver { path: pins.into(), reason });
        }
        // A running agent of another version has the lock of its own directory.
        for version in others.iter().filter(|_| alone) {
            if lock(pins, version, FlockOperation::NonBlockingLockExclusive)?.is_none() {
                return Err(PinsError::InUse { path: pins.into() });
            }
        }
        for directory in [pins.into(), pins.join(PINS_VERSION), links_of(pins), maps_of(pins)] {
            make(&directory)?;
        }
        check_private(pins)?;
        let lock =
            lock(pins, PINS_VERSION, if alone { FlockOperation::NonBlockingLockExclusive } else { SHARED })?;
        let in_use = |pins: &Path| match alone {
            true => PinsError::InUse { path: pins.into() },
            false => PinsError::Busy { path: pins.into() },
        };
        Ok(Self { lock: lock.ok_or_else(|| in_use(pins))?, pins: pins.into() })
    }

    /// The configured directory.
    pub(super) fn directory(&self) -> &Path {
        &self.pins
    }

    /// Downgrades the lock, so that another agent may join for a takeover.
    pub(super) fn share(&self) -> Result<(), PinsError> {
        flock(&self.lock, SHARED).map_err(|source| PinsError::io("lock", &self.pins, source.into()))
    }

    /// The path of the pin of a link.
    pub(super) fn link(&self, name: LinkName) -> PathBuf {
        links_of(&self.pins).join(name.to_string())
    }

    /// The path of the pin of a map.
    pub(super) fn map(&self, map: &str) -> PathBuf {
        map_of(&self.pins, map)
    }

    /// The pinned links, sorted. Other files are logged and left alone.
    pub(super) fn links(&self) -> Result<Vec<LinkName>, PinsError> {
        let mut names = Vec::new();
        for file in list(&links_of(&self.pins))?.into_iter().take(MAX_LINKS) {
            match file.to_str().and_then(LinkName::parse) {
                Some(name) => names.push(name),
                None => {
                    tracing::warn!(file = %file.display(), "this file is not a link of this version and is left alone")
                }
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Links that other versions of the agent pinned on a device: version, program and path of each.
    pub(super) fn foreign(&self, cookie: Cookie, ifindex: u32) -> Vec<(String, On, PathBuf)> {
        let mut found = Vec::new();
        for version in other_versions(&self.pins) {
            let links = self.pins.join(&version).join("links");
            for file in list(&links).unwrap_or_default().into_iter().take(MAX_LINKS) {
                if let Some(name) = file.to_str().and_then(LinkName::parse)
                    && (name.cookie, name.ifindex) == (cookie, ifindex)
                {
                    found.push((version.clone(), name.on, links.join(file)));
                }
            }
        }
        found
    }

    /// The directory names of other versions.
    pub(super) fn other_versions(&self) -> Vec<String> {
        other_versions(&self.pins)
    }

    /// The error of an impossible takeover.
    pub(super) fn nothing_to_take_over(&self, reason: String) -> PinsError {
        PinsError::NothingToTakeOver { path: self.pins.clone(), reason }
    }
}

impl PinsError {
    fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }

    fn object(
        action: &'static str,
        path: &Path,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Object { action, path: path.into(), source: source.into() }
    }
}

/// What [`release`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Programs detached from devices.
    pub links: usize,
    /// Maps unpinned.
    pub maps: usize,
}

/// Unpins every link and map of this layout version, which restores the taps. Finding none is not an error.
///
/// # Errors
/// If an agent runs with these pins, unless `force`; if a pin cannot be removed.
pub fn release(pins: &Path, force: bool) -> Result<Released, PinsError> {
    let mut released = Released::default();
    if !pins.join(PINS_VERSION).exists() {
        return Ok(released);
    }
    check_bpffs(pins)?;
    let held = lock(pins, PINS_VERSION, FlockOperation::NonBlockingLockExclusive)?;
    if held.is_none() && !force {
        return Err(PinsError::InUse { path: pins.into() });
    }
    // Remove links first: a program works on without pinned maps, but release exists to open the ports.
    for (directory, count) in [(links_of(pins), &mut released.links), (maps_of(pins), &mut released.maps)] {
        for file in list(&directory)? {
            unpin(&directory.join(file))?;
            *count += 1;
        }
        remove_directory(&directory)?;
    }
    remove_directory(&pins.join(PINS_VERSION))?;
    drop(held);
    // The directory may hold other versions or be the mount point, so a failure is expected.
    let _ = std::fs::remove_dir(pins);
    Ok(released)
}

/// The sorted names of directories of other versions: `v` and a number.
fn other_versions(pins: &Path) -> Vec<String> {
    let is_version = |name: &String| {
        name.strip_prefix('v').is_some_and(|number| number.parse::<u32>().is_ok()) && name != PINS_VERSION
    };
    let names = list(pins).unwrap_or_default().into_iter().filter_map(|name| name.into_string().ok());
    let mut versions: Vec<_> = names.filter(is_version).collect();
    versions.sort();
    versions
}

/// The path of a map's pin in a configured directory.
pub(super) fn map_of(pins: &Path, map: &str) -> PathBuf {
    maps_of(pins).join(name::pin(map))
}

fn links_of(pins: &Path) -> PathBuf {
    pins.join(PINS_VERSION).join("links")
}

fn maps_of(pins: &Path) -> PathBuf {
    pins.join(PINS_VERSION).join("maps")
}

const SHARED: FlockOperation = FlockOperation::NonBlockingLockShared;

/// How often to try a lock that another process holds, and the pause in between. An ending agent releases it shortly,
/// and so does a child process between fork and exec, which inherits it.
const LOCK_ATTEMPTS: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Locks the directory of a version; `None` if another process holds the lock.
fn lock(pins: &Path, version: &str, how: FlockOperation) -> Result<Option<File>, PinsError> {
    let directory = pins.join(version);
    let file = File::open(&directory).map_err(|source| PinsError::io("open", &directory, source))?;
    for attempt in 0..LOCK_ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(LOCK_PAUSE);
        }
        match flock(&file, how) {
            Ok(()) => return Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(source) => return Err(PinsError::io("lock", &directory, source.into())),
        }
    }
    Ok(None)
}

/// Fails unless the directory, or its parent if it does not exist, is on a bpffs.
fn check_bpffs(pins: &Path) -> Result<(), PinsError> {
    let is_bpffs = |path: &Path| statfs(path).map(|StatFs { f_type, .. }| f_type as u32 == BPF_FS);
    let there = match is_bpffs(pins) {
        Err(rustix::io::Errno::NOENT) => pins.parent().map_or(Ok(false), is_bpffs),
        known => known,
    };
    match there {
        Ok(true) => Ok(()),
        Ok(false) | Err(rustix::io::Errno::NOENT) => Err(PinsError::NoBpffs { path: pins.into() }),
        Err(source) => Err(PinsError::io("examine", pins, source.into())),
    }
}

/// Fails if another user could plant links or maps. A bpffs is often writable for everyone, as /tmp is.
fn check_private(pins: &Path) -> Result<(), PinsError> {
    let found = std::fs::metadata(pins).map_err(|source| PinsError::io("examine", pins, source))?;
    let (owner, mode) = (found.uid(), found.permissions().mode() & 0o7777);
    if owner != rustix::process::geteuid().as_raw() || mode & 0o022 != 0 {
        return Err(PinsError::Exposed { path: pins.into(), owner, mode });
    }
    Ok(())
}

fn make(directory: &Path) -> Result<(), PinsError> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(PinsError::io("make", directory, error))
        }
        _ => Ok(()),
    }
}

fn remove_directory(directory: &Path) -> Result<(), PinsError> {
    match std::fs::remove_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(PinsError::io("remove", directory, error))
        }
        _ => Ok(()),
    }
}

/// The names in a directory; empty if there is no such directory.
fn list(directory: &Path) -> Result<Vec<std::ffi::OsString>, PinsError> {
    let failed = |source| PinsError::io("list", directory, source);
    match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name()).map_err(failed)).collect(),
    }
}

/// Removes a pin. A missing pin is not an error.
pub(super) fn unpin(path: &Path) -> Result<(), PinsError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(PinsError::io("remove", path, error)),
        _ => Ok(()),
    }
}

/// Pins a link, replacing any pin of that name. On failure the link ends.
pub(super) fn pin_link(link: FdLink, path: &Path) -> Result<FdLink, PinsError> {
    unpin(path)?;
    let pinned = link.pin(path).map_err(|source| PinsError::object("pin a link as", path, source))?;
    Ok(pinned.into())
}

/// Opens a pinned link.
pub(super) fn open_link(path: &Path) -> Result<FdLink, PinsError> {
    let opened = PinnedLink::from_pin(path);
    opened.map(FdLink::from).map_err(|source| PinsError::object("open the link", path, source))
}

/// Pins a map under a second name, replacing any pin of that name.
pub(super) fn pin_map(from: &Path, to: &Path) -> Result<(), PinsError> {
    unpin(to)?;
    let map = MapData::from_pin(from).map_err(|source| PinsError::object("open the map", from, source))?;
    map.pin(to).map_err(|source| PinsError::object("pin a map as", to, source))
}

/// The definition of a map: kind, octets of a key and of a value, number of entries.
pub(super) fn layout_of(path: &Path) -> Result<[u32; 4], PinsError> {
    let failed = |source| PinsError::object("examine the map", path, source);
    let info = MapInfo::from_pin(path).map_err(failed)?;
    let kind = info.map_type().map_err(failed)?;
    Ok([kind as u32, info.key_size(), info.value_size(), info.max_entries()])
}

#[cfg(test)]
mod tests {
    use super::{Cookie, LinkName, On, Pins, PinsError, release};

    #[test]
    fn a_link_name_holds_program_namespace_and_device() {
        let name = LinkName { on: On::Tcx, netns: 3, cookie: Cookie::from_number(0x1a2b), ifindex: 17 };
        assert_eq!(name.to_string(), "port_tcx-3-1a2b-17");
        for on in On::ALL {
            let name = LinkName { on, ..name };
            assert_eq!(LinkName::parse(&name.to_string()), Some(name));
        }
    }

    #[test]
    fn a_foreign_name_does_not_parse_as_a_link() {
        for text in [
            "",
            "port",
            "port-3-1a2b",
            "port-3-1a2b-17-9",
            "port-+3-1a2b-17",
            "hub-3-1a2b-17",
            "port-3-1A2B-17",
        ] {
            assert_eq!(LinkName::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_directory_on_another_file_system_is_refused_with_a_remedy() {
        let room = tempfile::tempdir().expect("a directory");
        for pins in [room.path().to_owned(), room.path().join("pins"), room.path().join("none/pins")] {
            let error = Pins::open(&pins, true).err().expect("a refusal");
            assert!(matches!(error, PinsError::NoBpffs { .. }), "{error}");
            let said = error.to_string();
            assert!(said.contains("mount -t bpf bpf /sys/fs/bpf") && said.contains("--no-pins"), "{said}");
        }
    }

    #[test]
    fn where_nothing_is_pinned_there_is_nothing_to_release() {
        let room = tempfile::tempdir().expect("a directory");
        assert_eq!(release(&room.path().join("pins"), false).expect("no error"), super::Released::default());
    }
}
