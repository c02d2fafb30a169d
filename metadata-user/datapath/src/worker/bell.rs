//! An eventfd that wakes a sleeping worker. It stays readable until the worker resets it.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The control side rings it; the worker resets it.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> Result<Self, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Makes the descriptor readable. The only possible failure, a full counter, means that it already is.
    pub(super) fn ring(&self) {
        let rung = write(&self.0, &1_u64.to_ne_bytes());
        debug_assert!(matches!(rung, Ok(8) | Err(Errno::AGAIN)), "{rung:?}");
    }

    /// Makes the descriptor unreadable again. A sender queues its message before it rings, so read messages after
    /// this call.
    pub(super) fn hear(&self) {
        let heard = read(&self.0, &mut [0_u8; 8]);
        debug_assert!(matches!(heard, Ok(8) | Err(Errno::AGAIN)), "{heard:?}");
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
