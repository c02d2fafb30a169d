//! What wakes a sleeping worker: an eventfd, which stays rung until it is heard.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Rung by the control side, heard by the worker.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> Result<Self, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Makes the descriptor readable. The only failure possible, a full counter, means it is so already.
    pub(super) fn ring(&self) {
        let rung = write(&self.0, &1_u64.to_ne_bytes());
        debug_assert!(matches!(rung, Ok(8) | Err(Errno::AGAIN)), "{rung:?}");
    }

    /// Makes it unreadable again. Whoever rings writes the message first, so read messages after this.
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
