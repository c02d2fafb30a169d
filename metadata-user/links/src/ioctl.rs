//! Changes of devices that only an ioctl(2) makes: the hub's taps, and generic receive offload.
#![expect(unsafe_code, reason = "these ioctls have no safe form")]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixDatagram;

use crate::error::LinkError;

/// What precedes each frame that is written to a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preamble {
    /// Nothing.
    None,
    /// A `virtio_net_hdr` of 10 bytes (virtio 1.2 §5.1.6), which says where the frame is cut into segments.
    VirtioNet,
}

/// Makes tap `name` (`/dev/net/tun`, Linux: Documentation/networking/tuntap.rst) in the calling thread's namespace: one queue, non-blocking, deleted with its descriptor. `name` has
/// at most 15 bytes.
///
/// The device must not exist: the tap is also the lock between two agents with the same hub name. It ends with its
/// process and so is never left behind.
pub fn create_tap(name: &str, preamble: Preamble) -> Result<OwnedFd, LinkError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .map_err(|source| LinkError::device("open /dev/net/tun (`modprobe tun` may help)", source))?;
    let mut request = request_for(name);
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

const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_SGRO: u32 = 0x2c;

/// `struct ethtool_value`.
#[repr(C)]
struct Setting {
    command: u32,
    value: u32,
}

/// Turns generic receive offload of a device of the calling thread's namespace on, as `ethtool -K IFNAME gro on` does
/// (linux/ethtool.h). `name` has at most 15 bytes.
pub(crate) fn turn_gro_on(name: &str) -> Result<(), LinkError> {
    let set = || -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        let mut setting = Setting { command: ETHTOOL_SGRO, value: 1 };
        let mut request = request_for(name);
        request.ifr_ifru.ifru_data = (&raw mut setting).cast();
        // SAFETY: the descriptor is open; the request and the setting it points to outlive the call, which reads both.
        let rc = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    set().map_err(|source| LinkError::device(format!("turn GRO of {name} on"), source))
}

/// A request about the device of this name.
fn request_for(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0 whatever the length: the kernel reads a terminated string. A C character is signed on
    // x86_64 and unsigned on aarch64.
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request
}
