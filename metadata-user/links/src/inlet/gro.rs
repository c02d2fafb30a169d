//! Generic receive offload of a device, as `ethtool -K IFNAME gro on` turns it on (linux/ethtool.h).
#![expect(unsafe_code, reason = "a device's offloads are set by ioctl, which has no safe form")]

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixDatagram;

use crate::error::LinkError;

const SIOCETHTOOL: libc::Ioctl = 0x8946;
const ETHTOOL_SGRO: u32 = 0x2c;

/// `struct ethtool_value`.
#[repr(C)]
struct Setting {
    command: u32,
    value: u32,
}

/// Enables it on a device of the calling thread's namespace. `name` has at most 15 bytes.
pub(super) fn turn_on(name: &str) -> Result<(), LinkError> {
    let set = || -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        let mut setting = Setting { command: ETHTOOL_SGRO, value: 1 };
        // SAFETY: ifreq is plain data for which all zeroes is a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays 0 whatever the length: the kernel reads a terminated string.
        for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        request.ifr_ifru.ifru_data = (&raw mut setting).cast();
        // SAFETY: the descriptor is open; the request and the setting it points to outlive the call, which reads both.
        let rc = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    set().map_err(|source| LinkError::device(format!("turn GRO of {name} on"), source))
}
