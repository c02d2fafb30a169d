//! The hub's taps: `/dev/net/tun` and its one ioctl (Linux: Documentation/networking/tuntap.rst).
#![expect(unsafe_code, reason = "a tap is made by ioctl, which has no safe form")]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use crate::error::LinkError;

/// What precedes each frame that is written to a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preamble {
    /// Nothing.
    None,
    /// A `virtio_net_hdr` of 10 bytes (virtio 1.2 §5.1.6), which says where the frame is cut into segments.
    VirtioNet,
}

/// Makes tap `name` in the calling thread's namespace: one queue, non-blocking, deleted with its descriptor. `name` has
/// at most 15 bytes.
///
/// The device must not exist: the tap is also the lock between two agents with the same hub name. It ends with its
/// process and so is never left behind.
pub fn create(name: &str, preamble: Preamble) -> Result<OwnedFd, LinkError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .map_err(|source| LinkError::device("open /dev/net/tun (`modprobe tun` may help)", source))?;
    // SAFETY: ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0 whatever the length: the kernel reads a terminated string. A C character is signed on
    // x86_64 and unsigned on aarch64.
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = match preamble {
        Preamble::None => 0,
        Preamble::VirtioNet => libc::IFF_VNET_HDR,
    };
    // The flag word is 16 bits wide and IFF_TUN_EXCL its highest: the cast keeps all of them.
    request.ifr_ifru.ifru_flags =
        (flags | libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL) as libc::c_short;
    // SAFETY: the descriptor is open and the request outlives the call, which reads and writes one ifreq.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if rc < 0 {
        let source = io::Error::last_os_error();
        return Err(match source.raw_os_error() {
            Some(libc::EBUSY) => LinkError::HubInUse { name: name.into() },
            _ => LinkError::device(format!("create tap {name}"), source),
        });
    }
    Ok(file.into())
}
