//! Watches the links of the namespaces where ports are wanted.

use std::collections::{BTreeSet, HashMap};

use metadata_links::devices::{Changed, LinkWatch};
use metadata_links::netns::NetnsId;
use metadata_links::netns::forget_process;
use metadata_steer::SteerError;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, warn};

/// Limit on queued changes of links. A watch waits while the queue is full.
const QUEUE: usize = 64;

/// A change, and the namespace it is in; `None` is the agent's own.
pub(super) type LinkChange = (Option<String>, Changed);

/// The namespaces whose links are watched. A watch keeps its namespace alive, so the watch ends when the namespace's
/// name is removed or reused.
pub(super) struct LinkWatches {
    sender: mpsc::Sender<LinkChange>,
    changes: mpsc::Receiver<LinkChange>,
    open: HashMap<Option<String>, (NetnsId, AbortHandle)>,
    /// The wanted namespaces of the last call of [`LinkWatches::follow`].
    wanted: BTreeSet<Option<String>>,
}

impl LinkWatches {
    /// Creates the state without watched namespaces.
    pub(super) fn new() -> Self {
        let (sender, changes) = mpsc::channel(QUEUE);
        Self { sender, changes, open: HashMap::new(), wanted: BTreeSet::new() }
    }

    /// Waits for the next change in any namespace.
    pub(super) async fn recv(&mut self) -> Option<LinkChange> {
        self.changes.recv().await
    }

    /// Starts a watch for each wanted namespace that has none, and ends those that are no longer wanted or whose
    /// namespace was replaced. Returns the namespaces with a new watch, whose earlier changes were not reported.
    #[must_use]
    pub(super) fn follow(
        &mut self,
        wanted: BTreeSet<Option<String>>,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Vec<Option<String>> {
        // Forget a process only once nothing names it; the PID may be reused.
        self.wanted.difference(&wanted).flatten().for_each(|name| forget_process(name));
        self.open.retain(|netns, (id, task)| {
            let keep = !task.is_finished()
                && wanted.contains(netns)
                && NetnsId::of(netns.as_deref()).is_ok_and(|now| now == *id);
            if !keep {
                task.abort();
            }
            keep
        });
        let mut started = Vec::new();
        for netns in wanted.iter().filter(|netns| !self.open.contains_key(*netns)) {
            let open =
                || Ok::<_, SteerError>((NetnsId::of(netns.as_deref())?, LinkWatch::open(netns.as_deref())?));
            match open() {
                Ok((id, watch)) => {
                    let task = tasks.spawn(forward(watch, netns.clone(), self.sender.clone()));
                    started.push((netns.clone(), (id, task)));
                }
                // The namespace does not exist yet; the timer tries again.
                Err(error) => debug!(?netns, "links are not watched yet: {error}"),
            }
        }
        self.wanted = wanted;
        let names = started.iter().map(|(netns, _)| netns.clone()).collect();
        self.open.extend(started);
        names
    }
}

/// Forwards changes. While the queue is full the kernel buffers them, and reports if it lost some.
async fn forward(
    mut watch: LinkWatch,
    netns: Option<String>,
    changes: mpsc::Sender<LinkChange>,
) -> anyhow::Result<()> {
    loop {
        match watch.changed().await {
            Ok(changed) => {
                if changes.send((netns.clone(), changed)).await.is_err() {
                    return Ok(());
                }
            }
            Err(error) => {
                // The timer opens another watch.
                warn!("links are not watched any more: {error}");
                return Ok(());
            }
        }
    }
}
