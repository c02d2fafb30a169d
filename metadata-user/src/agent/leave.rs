//! The clean end: guests with a question under way get whole answers first.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::node::Node;

/// How often to look whether all is said.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How long after their time the workers are waited for.
const GRACE: Duration = Duration::from_millis(250);

/// How an agent that stops has left its guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// All answers are with those who asked.
    Whole,
    /// Connections that were still there when the time was over, or somebody said it was enough.
    Cut(u64),
}

/// Serves what is going on to its end, for `limit` at most or until `enough`; connections that would begin are left to
/// the next agent. Without any the agent ends at once.
pub(super) async fn cleanly(
    node: &Node,
    limit: Duration,
    enough: impl Future<Output = &'static str>,
) -> Left {
    let end = Instant::now() + limit;
    if limit.is_zero() {
        return Left::Cut(0);
    }
    if let Err(error) = node.drain(limit) {
        warn!("guests are not served to the end: {error}");
        return Left::Cut(0);
    }
    tokio::pin!(enough);
    let mut last = 0;
    loop {
        let left = node.left();
        match left {
            // At the end of their time the workers cut off what is left.
            Some(0) if Instant::now() >= end => return Left::Cut(last),
            Some(0) => return Left::Whole,
            Some(left) => {
                if last == 0 {
                    info!(
                        connections = left,
                        "waiting {limit:?} at most until all that was asked is answered"
                    );
                }
                last = left;
            }
            None => {}
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            name = &mut enough => {
                warn!("{name} again: stopping at once");
                return Left::Cut(left.unwrap_or(0));
            }
        }
        if Instant::now() >= end + GRACE {
            return Left::Cut(node.left().unwrap_or(0));
        }
    }
}
