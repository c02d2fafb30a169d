//! Waits for a condition that another process makes true.

use anyhow::{Context as _, Result};
use std::time::{Duration, Instant};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// Calls `look` every 50 ms until it succeeds.
///
/// # Errors
/// Returns the last error of `look` once `patience` is over.
pub fn eventually<T>(patience: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + patience;
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(error) if Instant::now() >= end => {
                return Err(error).with_context(|| format!("still fails after {patience:?}"));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
