//! Parked requests.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Maximum number of parked requests of one VM.
pub const WAITS_PER_VM: usize = 8;

/// One parked request.
#[derive(Debug, Default)]
pub struct Wait {
    ended: AtomicBool,
}

impl Wait {
    /// Returns whether a newer request displaced this one, which then gets the current value as its answer.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }
}

/// The parked requests of one VM, oldest first.
#[derive(Debug, Default)]
pub(super) struct Waits(VecDeque<Weak<Wait>>);

impl Waits {
    /// Adds a request. Returns it, and whether that ended the oldest one.
    pub(super) fn enter(&mut self) -> (Arc<Wait>, bool) {
        self.0.retain(|wait| wait.strong_count() > 0);
        let oldest = if self.0.len() < WAITS_PER_VM { None } else { self.0.pop_front() };
        let ended = oldest.and_then(|oldest| oldest.upgrade()).inspect(|wait| wait.end()).is_some();
        let wait = Arc::new(Wait::default());
        self.0.push_back(Arc::downgrade(&wait));
        (wait, ended)
    }
}
