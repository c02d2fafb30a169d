//! The word that something waits in a queue, so that a worker looks into none in vain.
//!
//! A model of threads includes this file as it stands, with atomics that try every order the memory model allows.

use super::sync::{AtomicBool, Ordering};

/// Said by whoever has queued a message, and taken by the worker before it looks.
#[derive(Debug)]
pub(super) struct Told(AtomicBool);

impl Told {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Says it: after the message is in its queue, and before the bell is rung.
    pub(super) fn tell(&self) {
        // Release, pairing with `take`: who takes the word finds the message. A swap and not a store: of two that
        // say it one after the other, the latter would hide the former's message from who takes both words as one.
        self.0.swap(true, Ordering::Release);
    }

    /// Takes the word, if it was said; the queues are to be looked into after that, not before.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Acquire)
    }

    /// Says it once more to oneself: the queues may hold more than was taken out of them.
    pub(super) fn keep(&self) {
        // Relaxed: it brings no message itself. A swap, since a store would hide those of a word said meanwhile, as
        // in `tell`.
        self.0.swap(true, Ordering::Relaxed);
    }
}
