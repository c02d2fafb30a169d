//! The flag for waiting messages. It saves the worker a check of each queue on every turn.
//!
//! A thread model includes this file unchanged, with atomics that try every order the memory model allows.

use super::sync::{AtomicBool, Ordering};

/// Set by the sender of a message, cleared by the worker before it reads the queues.
#[derive(Debug)]
pub(super) struct Pending(AtomicBool);

impl Pending {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Sets the flag. Call it after the message is in its queue and before the bell rings.
    pub(super) fn set(&self) {
        // Release, pairs with `take`: a thread that takes the flag finds the message. This is a swap because a second
        // store would end the first sender's release sequence, and one `take` would then miss the first message.
        self.0.swap(true, Ordering::Release);
    }

    /// Clears the flag and returns whether it was set. Read the queues after this call, not before.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Acquire)
    }

    /// Sets the flag again, because the queues may hold more than the worker has taken.
    pub(super) fn set_again(&self) {
        // Relaxed: this call brings no message. This is a swap because a store would hide the messages of a
        // concurrent `set`.
        self.0.swap(true, Ordering::Relaxed);
    }
}
