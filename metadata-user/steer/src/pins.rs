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
//!
//! A running agent finds its pins by the descriptor of that directory ([`Pin::path`]), not by the configured path: a
//! file system that is mounted over the path later hides the pins from the next agent, but not from this one.

use aya::maps::{MapData, MapInfo};
use aya::programs::links::{FdLink, PinnedLink};
use metadata_common::maps::name;
use rustix::fs::{AtFlags, FlockOperation, Mode, StatFs, flock, mkdirat, statat, statfs};
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::{Chain, errno};
use super::link::LinkFd;
use super::mounts::{PinCover, PinMounts};
use metadata_links::netns::Cookie;

/// Version of the layout: the names of pins, and the contract between maps and programs.
pub const PINS_VERSION: &str = "v1";
/// `BPF_FS_MAGIC` (include/uapi/linux/magic.h).
const BPF_FS: u32 = 0xcafe_4a11;
/// Limit on links read from one directory, four for each port. More than that means another fault.
const MAX_LINKS: usize = 4 * metadata_common::maps::MAX_PORTS as usize;

/// The mount point of the bpffs that systemd and the kernel's tools use.
const BPFFS: &str = "/sys/fs/bpf";

/// How a directory of pins comes to be on a bpffs.
fn way_to_bpffs(pins: &Path) -> &'static str {
    match pins.starts_with(BPFFS) {
        true => "`mount -t bpf bpf /sys/fs/bpf`",
        false => "name a directory below /sys/fs/bpf with `pins` or --pins",
    }
}

/// Why the pins cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinsError {
    /// The directory is not on a bpffs.
    #[error(
        "expected {} on a bpffs, found another file system or nothing: {}, or pin nothing with --no-pins, which leaves \
         every port open while no agent runs", path.display(), way_to_bpffs(path)
    )]
    NoBpffs {
        /// The configured directory.
        path: PathBuf,
    },
    /// Others may write to the directory.
    #[error(
        "{} is writable by users other than its owner (mode {mode:04o}), who could plant programs there; run \
         `chmod 0700 {0}` if it is yours, or choose another with --pins", path.display()
    )]
    Exposed {
        /// The configured directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The directory belongs to another user, as after the agent's user was changed.
    #[error(
        "{} belongs to user {owner}, and this agent runs as user {user}; if an agent of that user made it and has \
         ended, run `chown -R {user}: {0}`, otherwise choose another with --pins", path.display()
    )]
    Foreign {
        /// The configured directory.
        path: PathBuf,
        /// The user ID of its owner.
        owner: u32,
        /// The user ID of this process.
        user: u32,
    },
    /// Another agent runs with these pins.
    #[error(
        "another xdp-imds runs with the pins in {}: if it is the package's unit, it has your records already, and \
         `systemctl reload xdp-imds` lets it read a new configuration; otherwise stop it, take over from it with \
         --takeover, or give this one its own --pins and --run", path.display()
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
        "cannot take over the pins in {}: {reason}; the running agent continues: to replace it, stop it and start this \
         one again; in a DaemonSet, delete the pod of the running one (ports that are pinned stay closed in between)",
        path.display()
    )]
    NothingToTakeOver {
        /// The configured directory.
        path: PathBuf,
        /// What is missing or different.
        reason: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}: {source}{}", path.display(), remedy(source.raw_os_error()))]
    Io {
        /// The attempted action; completes "cannot".
        action: &'static str,
        /// The affected path.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// An operation on a pinned object failed.
    #[error("cannot {action} {}: {}{}", path.display(), Chain(.source.as_ref()), remedy(errno(.source.as_ref())))]
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
pub(super) enum PinnedProgram {
    /// `port`, on a tap.
    Xdp,
    /// `port_tcx`, on a tap.
    Tcx,
    /// `socket`, on the inner end of a hub. Without it, a frame steered while no agent runs would enter the network
    /// stack of the host.
    Hub,
    /// `request_tcx`, on the inner end of a hub.
    HubTcx,
}

impl PinnedProgram {
    const ALL: [Self; 4] = [Self::Xdp, Self::Tcx, Self::Hub, Self::HubTcx];

    pub(super) fn name(self) -> &'static str {
        use metadata_common::maps::program;
        match self {
            Self::Xdp => program::PORT,
            Self::Tcx => program::PORT_TCX,
            Self::Hub => program::SOCKET,
            Self::HubTcx => program::REQUEST_TCX,
        }
    }

    /// True for a program on a hub, not on a port.
    pub(super) fn is_on_hub(self) -> bool {
        matches!(self, Self::Hub | Self::HubTcx)
    }
}

/// The file name of a pinned link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LinkName {
    pub(super) on: PinnedProgram,
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
        let on = PinnedProgram::ALL.into_iter().find(|on| on.name() == program)?;
        let netns = parts.next()?.parse().ok()?;
        let cookie = Cookie::from_number(u64::from_str_radix(parts.next()?, 16).ok()?);
        let name = Self { on, netns, cookie, ifindex: parts.next()?.parse().ok()? };
        // Each link has exactly one name: reject `+3` for `3`.
        (parts.next().is_none() && name.to_string() == text).then_some(name)
    }
}

/// What to do about an error of the kernel on a pin.
fn remedy(errno: Option<i32>) -> &'static str {
    match errno {
        Some(libc::EROFS) => "; the bpffs is mounted read-only: `mount -o remount,rw` it",
        Some(libc::ENOENT) => {
            "; the directory was removed: a running agent recreates it within a minute, or ten minutes after `xdp-imds \
             release --force`, and at once on SIGHUP"
        }
        Some(libc::EPERM | libc::EACCES) => {
            "; this needs root, or CAP_BPF (and CAP_SYS_ADMIN for links), and no security module may forbid it"
        }
        Some(libc::ENOSPC | libc::ENOMEM) => "; free memory: pins and links are in the kernel's memory",
        Some(libc::ENOTDIR | libc::EINVAL) => {
            "; the directory must be on a bpffs: `mount -t bpf bpf /sys/fs/bpf`"
        }
        _ => "",
    }
}

/// The opened directory of one version of the layout.
#[derive(Debug)]
struct Directory {
    /// Also holds the lock.
    file: File,
    /// Its path when it was opened, for messages.
    shown: PathBuf,
}

/// What is pinned.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Link(LinkName),
    Map(&'static str),
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(link) => write!(f, "{LINKS}/{link}"),
            Self::Map(map) => write!(f, "{MAPS}/{}", name::pin(map)),
        }
    }
}

/// A place for a pin, below an opened directory. Displayed as the path that an operator knows.
#[derive(Clone, Debug)]
pub(super) struct Pin {
    directory: Arc<Directory>,
    entry: Entry,
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.directory.shown.display(), self.entry)
    }
}

impl Pin {
    /// The path by the descriptor of the directory, valid for this process.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}/{}", self.directory.file.as_raw_fd(), self.entry).into()
    }

    fn shown(&self) -> PathBuf {
        self.to_string().into()
    }

    /// The inode number of the pin; `None` if there is none. Each pin has its own.
    pub(super) fn inode(&self) -> Result<Option<u64>, PinsError> {
        match statat(&self.directory.file, self.entry.to_string(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(found.st_ino)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(source) => Err(PinsError::io("examine", &self.shown(), source.into())),
        }
    }

    /// Removes the pin. A missing pin is not an error.
    pub(super) fn remove(&self) -> Result<(), PinsError> {
        match std::fs::remove_file(self.path()) {
            // A read-only file system refuses before it looks whether there is a pin.
            Err(error) if error.kind() != io::ErrorKind::NotFound && !matches!(self.inode(), Ok(None)) => {
                Err(PinsError::io("remove", &self.shown(), error))
            }
            _ => Ok(()),
        }
    }

    /// Pins a link here, in place of any pin, and returns the pin's inode number.
    pub(super) fn put(&self, link: &LinkFd) -> Result<u64, PinsError> {
        self.remove()?;
        link.pin(&self.path()).map_err(|source| PinsError::io("pin a link as", &self.shown(), source))?;
        self.inode().map(Option::unwrap_or_default)
    }
}

/// Where the directory of the pins is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PinLocation {
    /// At its path.
    There,
    /// It was removed.
    Removed,
    /// Its path leads elsewhere: another file system is mounted over it, or its own is unmounted.
    Hidden,
}

/// The place of the directory, and what covers it.
pub(super) type PinsView = (Option<PinLocation>, Option<PinCover>);

/// The directory of this version's pins, locked.
pub(super) struct PinDirectory {
    /// The configured directory.
    pins: PathBuf,
    directory: Arc<Directory>,
    mounts: PinMounts,
    /// When this agent noticed that `xdp-imds release --force` removed the directory.
    released: Option<Instant>,
}

impl PinDirectory {
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
        let file = lock.ok_or_else(|| in_use(pins))?;
        forget_release(pins)?;
        let directory = Directory { file, shown: pins.join(PINS_VERSION) };
        let held = directory.file.metadata().map_err(|source| PinsError::io("examine", pins, source))?;
        let mounts = PinMounts::of(&directory.shown, held.dev());
        Ok(Self { directory: Arc::new(directory), pins: pins.into(), mounts, released: None })
    }

    /// True while nothing is to be pinned: a forced release came before an end of this agent that may still come.
    pub(super) fn are_released(&self) -> bool {
        self.released.is_some()
    }

    /// Notices a forced release. Nothing is pinned afterwards, until [`RELEASE_GRACE`] is over or
    /// [`PinDirectory::end_release`] is called. Returns true if the release is over, so that all pins are to be made
    /// again.
    pub(super) fn note_release(&mut self, now: Instant) -> bool {
        match self.released {
            Some(since) if now.saturating_duration_since(since) >= RELEASE_GRACE => {
                return self.end_release();
            }
            Some(_) => {}
            None if self.pins.join(RELEASED).is_dir() => self.released = Some(now),
            None => {}
        }
        false
    }

    /// Forgets a forced release: this agent goes on, so its pins have to be recreated. Returns true if there was one.
    pub(super) fn end_release(&mut self) -> bool {
        let was_released = self.released.take().is_some() || self.pins.join(RELEASED).is_dir();
        if let Err(error) = forget_release(&self.pins) {
            tracing::warn!("{error}");
        }
        was_released
    }

    /// Removes what a forced release left, once this agent ends.
    pub(super) fn clear_release(&self) {
        if matches!(self.place(), Ok(PinLocation::Removed)) && forget_release(&self.pins).is_ok() {
            // Other versions may have pins there.
            let _ = std::fs::remove_dir(&self.pins);
        }
    }

    /// Where the directory is now. Two system calls.
    ///
    /// # Errors
    /// If the kernel refuses to examine it.
    pub(super) fn place(&self) -> Result<PinLocation, PinsError> {
        let shown = &self.directory.shown;
        let failed = |source| PinsError::io("examine", shown, source);
        let held = self.directory.file.metadata().map_err(failed)?;
        match std::fs::metadata(shown) {
            Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => Ok(PinLocation::There),
            Ok(_) | Err(_) if held.nlink() == 0 => Ok(PinLocation::Removed),
            Ok(_) => Ok(PinLocation::Hidden),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(PinLocation::Hidden),
            Err(error) => Err(failed(error)),
        }
    }

    /// Where the directory is, and what covers it. What cannot be examined has no place.
    pub(super) fn look(&self) -> PinsView {
        (self.place().ok(), self.cover().unwrap_or_default())
    }

    /// Why the path leads elsewhere, for this agent or the next one; `None` if it does not.
    ///
    /// # Errors
    /// If the kernel refuses to examine it.
    pub(super) fn cover(&self) -> Result<Option<PinCover>, PinsError> {
        let shown = &self.directory.shown;
        Ok(match self.place()? {
            PinLocation::Hidden => Some(self.mounts.cover(shown)),
            PinLocation::There | PinLocation::Removed => self.mounts.cover_for_next(shown),
        })
    }

    /// Recreates the directories that were removed. Pins that were in them have to be recreated.
    ///
    /// # Errors
    /// If the place is no longer a bpffs or belongs to somebody else, or the kernel refuses.
    pub(super) fn make_again(&mut self) -> Result<(), PinsError> {
        if self.place()? == PinLocation::Removed {
            check_bpffs(&self.pins)?;
            for directory in [self.pins.clone(), self.directory.shown.clone()] {
                make(&directory)?;
            }
            check_private(&self.pins)?;
            let busy = || PinsError::Busy { path: self.pins.clone() };
            let file = lock(&self.pins, PINS_VERSION, SHARED)?.ok_or_else(busy)?;
            self.directory = Arc::new(Directory { file, shown: self.directory.shown.clone() });
        }
        for name in [LINKS, MAPS] {
            match mkdirat(&self.directory.file, name, Mode::RWXU) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(source) => {
                    return Err(PinsError::io("make", &self.directory.shown.join(name), source.into()));
                }
            }
        }
        Ok(())
    }

    /// The configured directory.
    pub(super) fn directory(&self) -> &Path {
        &self.pins
    }

    /// Downgrades the lock, so that another agent may join for a takeover.
    pub(super) fn share(&self) -> Result<(), PinsError> {
        flock(&self.directory.file, SHARED).map_err(|source| PinsError::io("lock", &self.pins, source.into()))
    }

    /// The pin of a link.
    pub(super) fn link(&self, name: LinkName) -> Pin {
        Pin { directory: Arc::clone(&self.directory), entry: Entry::Link(name) }
    }

    /// The pin of a map.
    pub(super) fn map(&self, map: &'static str) -> Pin {
        Pin { directory: Arc::clone(&self.directory), entry: Entry::Map(map) }
    }

    /// The pinned links, sorted. Other files are logged and left alone.
    pub(super) fn links(&self) -> Result<Vec<LinkName>, PinsError> {
        let mut names = Vec::new();
        let links = format!("/proc/self/fd/{}/{LINKS}", self.directory.file.as_raw_fd());
        for file in list(Path::new(&links))?.into_iter().take(MAX_LINKS) {
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

    /// Links that other versions of the agent pinned on a device: version, program and pin of each.
    pub(super) fn foreign(&self, cookie: Cookie, ifindex: u32) -> Vec<(String, PinnedProgram, Pin)> {
        let mut found = Vec::new();
        for version in other_versions(&self.pins) {
            let shown = self.pins.join(&version);
            let Ok(file) = File::open(&shown) else { continue };
            let directory = Arc::new(Directory { file, shown });
            let links = directory.shown.join(LINKS);
            for file in list(&links).unwrap_or_default().into_iter().take(MAX_LINKS) {
                if let Some(name) = file.to_str().and_then(LinkName::parse)
                    && (name.cookie, name.ifindex) == (cookie, ifindex)
                {
                    let pin = Pin { directory: Arc::clone(&directory), entry: Entry::Link(name) };
                    found.push((version.clone(), name.on, pin));
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
pub struct ReleaseSummary {
    /// Number of links whose pins were removed. If an agent runs, it holds them, and their programs stay attached.
    pub links: usize,
    /// Maps unpinned.
    pub maps: usize,
    /// An agent runs with these pins: its programs stay until it ends.
    pub agent_runs: bool,
}

/// The directory that a forced release leaves for the running agent: it ends soon, and then taps are to be open.
const RELEASED: &str = "released";

/// How long after a forced release the running agent pins nothing. If it still runs then, the release is taken as
/// abandoned, and everything is pinned again.
pub const RELEASE_GRACE: Duration = Duration::from_secs(600);

fn forget_release(pins: &Path) -> Result<(), PinsError> {
    let released = pins.join(RELEASED);
    if released.is_dir() { remove_directory(&released) } else { Ok(()) }
}

/// Unpins every link and map of this layout version, which restores the taps. Finding none is not an error. If an agent
/// runs, it pins nothing for [`RELEASE_GRACE`], and its taps are open once it ends.
///
/// # Errors
/// If an agent runs with these pins, unless `force`; if a pin cannot be removed.
pub fn release(pins: &Path, force: bool) -> Result<ReleaseSummary, PinsError> {
    let mut released = ReleaseSummary::default();
    let version = pins.join(PINS_VERSION);
    // What may not be examined need not be absent: /sys/fs/bpf is closed to other users.
    match std::fs::metadata(&version) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(released),
        found => found.map_err(|source| PinsError::io("examine", &version, source))?,
    };
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
    if held.is_none() {
        released.agent_runs = true;
        make(&pins.join(RELEASED))?;
    }
    remove_directory(&pins.join(PINS_VERSION))?;
    drop(held);
    // The directory may hold other versions or be the mount point, so a failure is expected.
    let _ = std::fs::remove_dir(pins);
    Ok(released)
}

/// True for the name of a layout's directory: `v` and a number.
#[must_use]
pub fn is_pins_version(name: &str) -> bool {
    name.strip_prefix('v').is_some_and(|number| number.parse::<u32>().is_ok())
}

/// The sorted names of directories of other versions.
fn other_versions(pins: &Path) -> Vec<String> {
    let is_version = |name: &String| is_pins_version(name) && name != PINS_VERSION;
    let names = list(pins).unwrap_or_default().into_iter().filter_map(|name| name.into_string().ok());
    let mut versions: Vec<_> = names.filter(is_version).collect();
    versions.sort();
    versions
}

/// The path of a map's pin in a configured directory.
pub(super) fn map_of(pins: &Path, map: &str) -> PathBuf {
    maps_of(pins).join(name::pin(map))
}

/// The directories of links and of maps.
const LINKS: &str = "links";
const MAPS: &str = "maps";

fn links_of(pins: &Path) -> PathBuf {
    pins.join(PINS_VERSION).join(LINKS)
}

fn maps_of(pins: &Path) -> PathBuf {
    pins.join(PINS_VERSION).join(MAPS)
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

/// Whether an agent runs or starts with these pins, of this version of the layout or another: it has the lock. If none
/// does, the lock is taken and given back at once.
pub(super) fn are_held(pins: &Path) -> Result<bool, PinsError> {
    let own = pins.join(PINS_VERSION).is_dir().then(|| PINS_VERSION.to_owned());
    for version in own.into_iter().chain(other_versions(pins)) {
        if lock(pins, &version, FlockOperation::NonBlockingLockExclusive)?.is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a path is on a bpffs.
pub(super) fn is_bpffs(path: &Path) -> Result<bool, rustix::io::Errno> {
    statfs(path).map(|StatFs { f_type, .. }| f_type as u32 == BPF_FS)
}

/// Fails unless the directory, or its parent if it does not exist, is on a bpffs.
fn check_bpffs(pins: &Path) -> Result<(), PinsError> {
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
    let user = rustix::process::geteuid().as_raw();
    if owner != user {
        return Err(PinsError::Foreign { path: pins.into(), owner, user });
    }
    if mode & 0o022 != 0 {
        return Err(PinsError::Exposed { path: pins.into(), mode });
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
fn unpin(path: &Path) -> Result<(), PinsError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(PinsError::io("remove", path, error)),
        _ => Ok(()),
    }
}

/// Opens a pinned link.
pub(super) fn open_link(pin: &Pin) -> Result<FdLink, PinsError> {
    let opened = PinnedLink::from_pin(pin.path());
    opened.map(FdLink::from).map_err(|source| PinsError::object("open the link", &pin.shown(), source))
}

/// Pins a map of the private bpffs for the next agent, replacing any pin of that name.
pub(super) fn pin_map(from: &Path, to: &Pin) -> Result<(), PinsError> {
    to.remove()?;
    let map = MapData::from_pin(from).map_err(|source| PinsError::object("open the map", from, source))?;
    map.pin(to.path()).map_err(|source| PinsError::object("pin a map as", &to.shown(), source))
}

/// Pins a map of the previous agent on the private bpffs.
pub(super) fn inherit_map(from: &Pin, to: &Path) -> Result<(), PinsError> {
    let map = MapData::from_pin(from.path())
        .map_err(|source| PinsError::object("open the map", &from.shown(), source))?;
    map.pin(to).map_err(|source| PinsError::object("pin a map as", to, source))
}

/// The definition of a map: kind, bytes of a key and of a value, number of entries.
pub(super) fn layout_of(pin: &Pin) -> Result<[u32; 4], PinsError> {
    let failed = |source| PinsError::object("examine the map", &pin.shown(), source);
    let info = MapInfo::from_pin(pin.path()).map_err(failed)?;
    let kind = info.map_type().map_err(failed)?;
    Ok([kind as u32, info.key_size(), info.value_size(), info.max_entries()])
}

#[cfg(test)]
mod tests {
    use super::super::object;
    use super::{
        Cookie, FlockOperation, LinkName, PINS_VERSION, PinDirectory, PinnedProgram, PinsError, SHARED,
        are_held, check_private, lock, name, release,
    };
    use metadata_common::maps::{AllSent, Guest, Identity, IdentityKey, InheritedState, Port, PortKey};
    use std::fmt::Write as _;
    use std::mem::offset_of;

    #[test]
    fn a_link_name_holds_program_namespace_and_device() {
        let name =
            LinkName { on: PinnedProgram::Tcx, netns: 3, cookie: Cookie::from_number(0x1a2b), ifindex: 17 };
        assert_eq!(name.to_string(), "port_tcx-3-1a2b-17");
        for on in PinnedProgram::ALL {
            let name = LinkName { on, ..name };
            assert_eq!(LinkName::parse(&name.to_string()), Some(name));
        }
    }

    #[test]
    fn a_directory_of_another_user_or_open_to_others_is_refused_with_its_own_remedy() {
        use std::os::unix::fs::PermissionsExt as _;
        let room = tempfile::tempdir().expect("a directory");
        let user = rustix::process::geteuid().as_raw();
        assert!(check_private(room.path()).is_ok());
        std::fs::set_permissions(room.path(), std::fs::Permissions::from_mode(0o722)).expect("a mode");
        let error = check_private(room.path()).expect_err("others may write").to_string();
        assert!(error.contains("mode 0722") && error.contains("`chmod 0700 "), "{error}");
        // Only root can give a directory away.
        if std::os::unix::fs::chown(room.path(), Some(user + 999), None).is_ok() {
            let error = check_private(room.path()).expect_err("another owner").to_string();
            let remedy = format!("`chown -R {user}: {}`", room.path().display());
            assert!(error.contains(&format!("user {}", user + 999)) && error.contains(&remedy), "{error}");
            assert!(!error.contains("chmod"), "{error}");
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
            let error = PinDirectory::open(&pins, true).err().expect("a refusal");
            assert!(matches!(error, PinsError::NoBpffs { .. }), "{error}");
            let said = error.to_string();
            assert!(said.contains("below /sys/fs/bpf with `pins`") && said.contains("--no-pins"), "{said}");
        }
        let said = PinsError::NoBpffs { path: "/sys/fs/bpf/xdp-imds".into() }.to_string();
        assert!(said.contains("`mount -t bpf bpf /sys/fs/bpf`, or"), "{said}");
    }

    #[test]
    fn where_nothing_is_pinned_there_is_nothing_to_release() {
        let room = tempfile::tempdir().expect("a directory");
        assert_eq!(
            release(&room.path().join("pins"), false).expect("no error"),
            super::ReleaseSummary::default()
        );
    }

    #[test]
    fn pins_are_held_while_an_agent_has_the_lock_of_any_version() {
        let room = tempfile::tempdir().expect("a directory");
        let pins = room.path();
        assert!(!are_held(&pins.join("none")).expect("known"), "no directory of pins");
        assert!(!are_held(pins).expect("known"), "no pins");
        for version in [PINS_VERSION, "v9"] {
            std::fs::create_dir(pins.join(version)).expect("a directory");
            assert!(!are_held(pins).expect("known"), "{version} of an agent that has ended");
            for how in [SHARED, FlockOperation::NonBlockingLockExclusive] {
                let held = lock(pins, version, how).expect("a lock").expect("a free one");
                assert!(are_held(pins).expect("known"), "{version} of an agent that runs, {how:?}");
                drop(held);
                assert!(!are_held(pins).expect("known"), "{version} after its end");
            }
        }
    }

    // What the agents of two releases share in the kernel changes only with `PINS_VERSION`.

    /// A key or value of each kind with a different number in each field, as bytes.
    fn values() -> [(&'static str, Vec<u8>); 5] {
        let port = PortKey { netns: 1, ifindex: 2 };
        let limits = Port {
            frame_ns: 1,
            depth_ns: 2,
            full_at_ns: 3,
            answers: 4,
            steered: 5,
            connection_ns: 6,
            connection_depth_ns: 7,
            connections_full_at_ns: 8,
            guarded: 9,
        };
        let mac = [3, 4, 5, 6, 7, 8];
        [
            ("PortKey", port.to_bytes().into()),
            ("Port", limits.to_bytes().into()),
            ("IdentityKey", IdentityKey { port, mac, reserved: [0; 2] }.to_bytes().into()),
            ("Identity", Identity { slot: 1, hub: 2, drain: 3, reserved: 0 }.to_bytes().into()),
            ("Guest", Guest { mac, live: 1 }.to_bytes().into()),
        ]
    }

    /// The values that one agent writes and another maps or copies: fields with their offsets.
    fn offsets() -> [(&'static str, Vec<(&'static str, usize)>); 2] {
        macro_rules! fields {
            ($of:ident: $($field:ident)+) => { (stringify!($of), vec![$((stringify!($field), offset_of!($of, $field))),+]) };
        }
        [
            fields!(InheritedState: key side reserved),
            fields!(AllSent: flow sent received finished opened held acknowledged closed),
        ]
    }

    #[test]
    fn formats_of_pins_change_only_with_their_version() {
        let mut text = String::new();
        // Versions that do not know a kind of link leave it alone, so later kinds need no new version.
        for on in [PinnedProgram::Xdp, PinnedProgram::Tcx, PinnedProgram::Hub] {
            let link = LinkName { on, netns: 3, cookie: Cookie::from_number(0x1a2b), ifindex: 17 };
            writeln!(text, "links/{link}").expect("memory");
        }
        for (map, [kind, key, value, entries]) in object::layouts().expect("the objects parse") {
            let map = name::pin(map);
            writeln!(text, "maps/{map}: kind {kind}, key {key}, value {value}, entries {entries}")
                .expect("memory");
        }
        for (value, bytes) in values() {
            let bytes: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "{value}: {bytes}").expect("memory");
        }
        for (value, fields) in offsets() {
            let fields: Vec<_> = fields.iter().map(|(field, at)| format!("{field} at {at}")).collect();
            writeln!(text, "{value}: {}", fields.join(", ")).expect("memory");
        }
        let version = PINS_VERSION.strip_prefix('v').and_then(|number| number.parse().ok());
        golden::check("pins", version.expect("a number"), text.as_bytes());
    }
}
