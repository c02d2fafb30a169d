//! Why a socket could not be set up. After set-up nothing in this module fails: bad input is counted.

use rustix::io::Errno;
use std::time::Duration;

/// Why a socket could not be opened, sized or bound.
#[derive(Debug, thiserror::Error)]
pub enum AfxdpError {
    /// A size in [`SocketConfig`](super::SocketConfig) that the kernel or this module does not support.
    #[error("expected {what} to be {expected}, found {found}: correct the socket's configuration")]
    Size {
        /// The field of the configuration.
        what: &'static str,
        /// The valid values.
        expected: &'static str,
        /// The configured value.
        found: u32,
    },
    /// `socket(2)` failed: a missing privilege, or a kernel without AF_XDP.
    #[error("cannot open an AF_XDP socket: {0}; it needs CAP_NET_RAW and a kernel with CONFIG_XDP_SOCKETS=y")]
    Open(Errno),
    /// The frame memory could not be mapped or pinned.
    #[error(
        "cannot give the kernel {bytes} bytes of frame memory: {source}; grant CAP_IPC_LOCK, raise the limit \
         on locked memory (LimitMEMLOCK=), or configure fewer chunks"
    )]
    Memory {
        /// Size of the region in octets.
        bytes: usize,
        /// The kernel's error.
        source: Errno,
    },
    /// A step of the set-up between opening and binding failed.
    #[error("AF_XDP set-up failed at {step}: {source}; is this kernel's AF_XDP older than that?")]
    Setup {
        /// The kernel's name of the option or mapping.
        step: &'static str,
        /// The kernel's error.
        source: Errno,
    },
    /// The kernel's layout of a ring does not fit the memory it mapped for it.
    #[error("the kernel's layout of the {ring} ring does not fit its mapping: report this with `uname -a`")]
    Layout {
        /// The ring's name.
        ring: &'static str,
    },
    /// Another socket owns the queue, or owned it until now and the kernel has not released it yet.
    #[error(
        "queue {queue} of interface {ifindex} still belongs to another AF_XDP socket after {waited:?}: stop \
         the other holder (`ss --xdp` names it)"
    )]
    Busy {
        /// The interface's index.
        ifindex: u32,
        /// The receive queue.
        queue: u32,
        /// How long the bind was retried.
        waited: Duration,
    },
    /// `bind(2)` failed for another reason.
    #[error(
        "cannot bind to queue {queue} of interface {ifindex}: {source}; expected an interface of this \
         namespace that has this receive queue"
    )]
    Bind {
        /// The interface's index.
        ifindex: u32,
        /// The receive queue.
        queue: u32,
        /// The kernel's error.
        source: Errno,
    },
    /// The kernel's counters could not be read.
    #[error("cannot read XDP_STATISTICS: {0}; is this kernel's AF_XDP older than that?")]
    Statistics(Errno),
}
