//! The orderly end: guests get whole answers to what they have asked.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::node::Workers;

/// How often to check how many connections remain.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// How long after their limit to wait for the workers.
const GRACE: Duration = Duration::from_millis(250);

/// How connections have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drained {
    /// Every guest has its answer.
    Whole,
    /// This many connections remained when the time was over or a second signal came.
    Cut(u64),
}

/// Serves what is under way for at most `limit`, or until `enough`. New connections are left to the next agent. A limit
/// of zero ends the agent at once.
pub(super) async fn drain(
    workers: &Workers,
    limit: Duration,
    enough: impl Future<Output = &'static str>,
) -> Drained {
    let end = Instant::now() + limit;
    if limit.is_zero() {
        return Drained::Cut(0);
    }
    if let Err(error) = workers.drain(limit) {
        warn!("guests are not served to the end: {error}");
        return Drained::Cut(0);
    }
    tokio::pin!(enough);
    let mut last = 0;
    loop {
        let remaining = workers.remaining();
        match remaining {
            // At the end of their time the workers cut off what remains.
            Some(0) if Instant::now() >= end => return Drained::Cut(last),
            Some(0) => return Drained::Whole,
            Some(connections) => {
                if last == 0 {
                    info!(connections, "waiting {limit:?} at most until all that was asked is answered");
                }
                last = connections;
            }
            None => {}
        }
        tokio::select! {
            () = tokio::time::sleep(CHECK_EVERY) => {}
            name = &mut enough => {
                warn!("{name} again: stopping at once");
                return Drained::Cut(remaining.unwrap_or(0));
            }
        }
        if Instant::now() >= end + GRACE {
            return Drained::Cut(workers.remaining().unwrap_or(0));
        }
    }
}
