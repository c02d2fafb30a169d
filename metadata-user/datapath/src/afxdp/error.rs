//! Why a socket could not be set up. Once it stands, nothing in this room fails: bad input is counted.

use rustix::io::Errno;
use std::time::Duration;

/// A socket that could not be opened, sized or bound.
#[derive(Debug, thiserror::Error)]
pub enum AfxdpError {
    /// A size in [`SocketConfig`](super::SocketConfig) the kernel or this room cannot work with.
    #[error("expected {what} to be {expected}, found {found}: correct the socket's configuration")]
    Size {
        /// The field.
        what: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it was.
        found: u32,
    },
    /// `socket(2)` refused: no privilege, or a kernel without AF_XDP.
    #[error("cannot open an AF_XDP socket: {0}; it takes CAP_NET_RAW and a kernel with CONFIG_XDP_SOCKETS=y")]
    Open(Errno),
    /// The frame memory could not be mapped, or not be pinned.
    #[error(
        "cannot give the kernel {bytes} bytes of frame memory: {source}; grant CAP_IPC_LOCK, raise the limit \
         on locked memory (LimitMEMLOCK=), or configure fewer chunks"
    )]
    Memory {
        /// Size of the region.
        bytes: usize,
        /// What the kernel said.
        source: Errno,
    },
    /// A step of the set-up between opening and binding failed.
    #[error("AF_XDP set-up failed at {step}: {source}; Linux 5.9 or newer is expected")]
    Setup {
        /// The option or mapping, by the kernel's name.
        step: &'static str,
        /// What the kernel said.
        source: Errno,
    },
    /// The kernel described a ring that does not fit the memory it mapped for it.
    #[error("the kernel's layout of the {ring} ring does not fit its mapping: report this with `uname -a`")]
    Layout {
        /// Which ring.
        ring: &'static str,
    },
    /// Another socket holds the queue, or held it until just now and the kernel has not let go yet.
    #[error(
        "queue {queue} of interface {ifindex} still belongs to another AF_XDP socket after {waited:?}: stop \
         the other holder (`ss --xdp` names it)"
    )]
    Busy {
        /// The interface.
        ifindex: u32,
        /// Its receive queue.
        queue: u32,
        /// How long it was tried.
        waited: Duration,
    },
    /// `bind(2)` refused for any other reason.
    #[error(
        "cannot bind to queue {queue} of interface {ifindex}: {source}; expected an interface of this \
         namespace that has this receive queue"
    )]
    Bind {
        /// The interface.
        ifindex: u32,
        /// Its receive queue.
        queue: u32,
        /// What the kernel said.
        source: Errno,
    },
    /// The counters could not be read.
    #[error("cannot read XDP_STATISTICS: {0}; Linux 5.9 or newer is expected")]
    Statistics(Errno),
}
