//! The orderly stop: guests get complete answers to requests they have begun.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::node::Workers;

/// How often to check how many connections remain.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// How long to wait for workers after the drain's limit. At the limit they cut off the remaining connections.
const GRACE: Duration = Duration::from_millis(250);

/// The result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drained {
    /// Every connection has ended in time.
    Whole,
    /// Number of connections that remained at the limit or at a second signal; 0 if they were not drained.
    Cut(u64),
}

/// Serves open connections for at most `limit`, or until `enough` completes. New connections are left to the next
/// agent. Returns at once if `limit` is zero.
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
        warn!("open requests are not answered: {error}");
        return Drained::Cut(0);
    }
    tokio::pin!(enough);
    let mut last = 0;
    loop {
        let remaining = workers.remaining();
        match remaining {
            // At the limit the workers cut off what remains.
            Some(0) if Instant::now() >= end => return Drained::Cut(last),
            Some(0) => return Drained::Whole,
            Some(connections) => {
                if last == 0 {
                    info!(connections, "waiting at most {limit:?} until open requests are answered");
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
