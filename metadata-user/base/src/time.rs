//! Time, as an argument.
//!
//! Only `worker` reads a clock. All other modules of the data path receive the time as an argument.

use std::time::Duration;

/// A moment, by the two clocks of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Time since an arbitrary start, monotonic: for deadlines and retransmission.
    pub mono: Duration,
    /// Seconds since 1970-01-01 UTC: for the `Date` header.
    pub unix_seconds: u64,
}
