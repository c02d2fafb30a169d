//! Time, as an argument.
//!
//! Only `worker` reads a clock; every other room on the path is told what time it is.

use std::time::Duration;

/// A moment, by both clocks the path needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Since an arbitrary start, monotonic: deadlines, retransmission.
    pub mono: Duration,
    /// Seconds since 1970-01-01 UTC: the `Date` header.
    pub unix_seconds: u64,
}
