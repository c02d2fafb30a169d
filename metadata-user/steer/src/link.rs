//! A link of the kernel by its descriptor, and the commands of bpf(2) for links that aya does not have.
#![expect(unsafe_code, reason = "bpf(2) has no safe form for these commands")]

use aya::programs::links::{FdLink, LinkError};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Commands of bpf(2) (`enum bpf_cmd`, include/uapi/linux/bpf.h).
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_GET_FD_BY_ID: libc::c_long = 30;
const BPF_LINK_DETACH: libc::c_long = 34;

/// Bytes of the part of `struct bpf_link_info` that is read: `type`, `id`, `prog_id`, four bytes of padding, and
/// `ifindex`, with which the part of an XDP link and that of a tcx link begin.
const INFO_BYTES: usize = 20;

/// A descriptor of a link. The program stays on its device while a descriptor or a pin of the link exists.
#[derive(Debug)]
pub(super) struct LinkFd {
    fd: OwnedFd,
    id: u32,
}

/// What the kernel says of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkState {
    /// The number of its program.
    pub(super) program: u32,
    /// The index of its device within the device's namespace; 0 once the link is detached or the device is gone.
    pub(super) ifindex: u32,
}

impl LinkFd {
    /// Opens a link again, because aya does not give its descriptor away.
    pub(super) fn of(link: &FdLink) -> io::Result<Self> {
        let id = link.info().map_err(io_error)?.id();
        Ok(Self { fd: open(BPF_LINK_GET_FD_BY_ID, id)?, id })
    }

    /// The number of the link, which no other link of this boot has.
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Asks the kernel for the program and the device of the link. One system call.
    pub(super) fn state(&self) -> io::Result<LinkState> {
        let mut info = [0_u32; INFO_BYTES / 4];
        let mut attributes = InfoAttributes {
            fd: self.fd.as_raw_fd(),
            length: INFO_BYTES as u32,
            info: info.as_mut_ptr().expose_provenance() as u64,
        };
        // SAFETY: the attributes are those of this command, with the length of `info`, to which the kernel writes at
        // most that many bytes; both live until the call returns.
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                BPF_OBJ_GET_INFO_BY_FD,
                &raw mut attributes,
                size_of::<InfoAttributes>(),
            )
        };
        done(outcome)?;
        let [_, _, program, _, ifindex] = info;
        Ok(LinkState { program, ifindex })
    }

    /// Detaches the program from its device, even if others hold the link, and verifies that it is detached.
    pub(super) fn detach(&self) -> io::Result<()> {
        let mut attributes = [self.fd.as_raw_fd(), 0];
        // SAFETY: the attributes are those of this command, and no pointer is among them.
        let outcome = unsafe {
            libc::syscall(libc::SYS_bpf, BPF_LINK_DETACH, attributes.as_mut_ptr(), size_of_val(&attributes))
        };
        done(outcome)?;
        match self.state()?.ifindex {
            0 => Ok(()),
            ifindex => Err(io::Error::other(format!("the kernel still shows it on interface {ifindex}"))),
        }
    }

    /// Pins the link. The path must be free.
    pub(super) fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }
}

/// Pins a loaded program under a path, which must be free.
pub(super) fn pin_program(id: u32, path: &Path) -> io::Result<()> {
    pin(&open(BPF_PROG_GET_FD_BY_ID, id)?, path)
}

#[repr(C)]
struct InfoAttributes {
    fd: i32,
    length: u32,
    info: u64,
}

#[repr(C)]
struct PinAttributes {
    path: u64,
    fd: i32,
    flags: u32,
}

/// Opens an object by its number, with the command for its kind.
fn open(command: libc::c_long, id: u32) -> io::Result<OwnedFd> {
    let mut attributes = [id, 0, 0, 0];
    // SAFETY: the attributes are those of both commands: a number, zeros, and no pointer.
    let outcome =
        unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size_of_val(&attributes)) };
    let fd = i32::try_from(done(outcome)?).map_err(io::Error::other)?;
    // SAFETY: the call succeeded, so this is a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pin(object: &OwnedFd, path: &Path) -> io::Result<()> {
    let path: CString = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    let name: &CStr = &path;
    let mut attributes =
        PinAttributes { path: name.as_ptr().expose_provenance() as u64, fd: object.as_raw_fd(), flags: 0 };
    // SAFETY: the attributes are those of this command; the path ends with a zero and lives until the call returns.
    let outcome =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_PIN, &raw mut attributes, size_of::<PinAttributes>()) };
    done(outcome).map(drop)
}

fn done(outcome: libc::c_long) -> io::Result<libc::c_long> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) }
}

/// The error of the kernel behind an error of the loader.
fn io_error(error: LinkError) -> io::Error {
    match super::error::errno(&error) {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::other(error),
    }
}
