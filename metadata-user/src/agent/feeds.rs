//! The feeds of the configuration, each with the source it tells of.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::debug;

use super::node::Node;
use crate::config::Config;
use metadata_content::record::Limits;
use metadata_content::source::Source;
use metadata_feed::teller::Teller;
use metadata_feed::{FeedError, FeedEvent, directory, libvirt};
#[cfg(feature = "kubevirt")]
use metadata_feed::{kubevirt, pods::Inlets};

/// Events of one feed that wait for the agent; a feed that is ahead of it waits.
pub(super) const FEED_QUEUE: usize = 1_024;

/// How often to retry a directory that cannot be read.
const RETRY: Duration = Duration::from_secs(1);

/// Feeds that tell.
#[derive(Default)]
pub(super) struct Feeds {
    open: Vec<Open>,
    /// The one that is asked first next time, so that none keeps the others waiting.
    turn: usize,
}

struct Open {
    source: Source,
    events: mpsc::Receiver<FeedEvent>,
    /// It has told all it has, or the snapshot stands in for it.
    settled: bool,
}

impl Feeds {
    /// The feeds of a configuration, which have told nothing yet. Those the snapshot stands in for are waited for.
    pub(super) fn start(
        config: &Config,
        stood_in: &BTreeSet<Source>,
        node: &mut Node,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Self {
        let mut feeds = Self::default();
        if config.records.is_some() {
            let patiently = stood_in.contains(&Source::File);
            let told = feeds.open(Source::File, patiently, node);
            follow(config, told, patiently, tasks);
        }
        feeds.restart_hook(config, node, tasks);
        #[cfg(feature = "kubevirt")]
        if let Some(options) = config.kubevirt.clone() {
            let told = feeds.open(Source::Kubevirt, false, node);
            let (limits, state) = (config.record_limits(), config.state.clone());
            let inlets = Inlets { addresses: config.addresses.clone(), stay: config.pins.is_some() };
            let contact = kubevirt::contact();
            if options.watch {
                node.reporter.set_api_server(contact.clone());
            }
            tasks.spawn(async move {
                Ok(kubevirt::serve((options, inlets), limits, state.as_deref(), contact, told).await?)
            });
        }
        feeds
    }

    /// Has a source tell anew, in the place of the feed before, which ends for want of a listener.
    pub(super) fn open(&mut self, source: Source, settled: bool, node: &mut Node) -> Teller {
        let (told, events) = mpsc::channel(FEED_QUEUE);
        self.close(source);
        self.open.push(Open { source, events, settled });
        node.catalogue.begin(source);
        Teller::new(told, Arc::clone(node.catalogue.room()), source)
    }

    fn close(&mut self, source: Source) {
        self.open.retain(|open| open.source != source);
    }

    /// The directory that hooks write to, from the start.
    fn restart_hook(&mut self, config: &Config, node: &mut Node, tasks: &mut JoinSet<anyhow::Result<()>>) {
        let settled = self.open.iter().any(|open| open.source == Source::Hook && open.settled);
        let told = self.open(Source::Hook, settled, node);
        let (dir, limits) = (config.run.join(libvirt::DIRECTORY), config.record_limits());
        tasks.spawn(async move { Ok(libvirt::watch(dir, limits, told).await?) });
    }

    /// The directories of a configuration from the start.
    pub(super) fn restart(
        &mut self,
        config: &Config,
        node: &mut Node,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) {
        self.restart_hook(config, node, tasks);
        if config.records.is_none() {
            self.close(Source::File);
            node.catalogue.begin(Source::File);
            return node.on_event(Source::File, FeedEvent::Synced);
        }
        let settled = self.open.iter().all(|open| open.source != Source::File || open.settled);
        let told = self.open(Source::File, settled, node);
        follow(config, told, true, tasks);
    }

    /// The next event of any feed; never while there are none.
    pub(super) async fn recv(&mut self) -> (Source, FeedEvent) {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(Source, FeedEvent)> {
        let count = self.open.len();
        for n in 0..count {
            let at = (self.turn + n) % count;
            let Open { source, events, .. } = &mut self.open[at];
            // A feed that has ended tells nothing more; its task says why.
            if let Poll::Ready(Some(event)) = events.poll_recv(cx) {
                self.turn = at + 1;
                return Poll::Ready((*source, event));
            }
        }
        Poll::Pending
    }

    /// An event and those of its source that wait behind it, [`FEED_QUEUE`] at most; the others stay in the queue.
    pub(super) fn batch(&mut self, source: Source, first: FeedEvent) -> impl Iterator<Item = FeedEvent> {
        let open = self.open.iter_mut().find(|open| open.source == source);
        let queue = open.map(|open| &mut open.events);
        batch(first, queue)
    }

    /// A source has told all it has.
    pub(super) fn on_synced(&mut self, source: Source) {
        self.open.iter_mut().filter(|open| open.source == source).for_each(|open| open.settled = true);
    }

    /// True when every source has told all it has once, or the snapshot stands in for it.
    pub(super) fn are_settled(&self) -> bool {
        self.open.iter().all(|open| open.settled)
    }
}

/// Follows the directory of a configuration; `patiently`, one that is away at the start is waited for.
fn follow(config: &Config, told: Teller, patiently: bool, tasks: &mut JoinSet<anyhow::Result<()>>) {
    let Some(dir) = config.records.clone() else { return };
    let limits = config.record_limits();
    tasks.spawn(async move { Ok(watch(dir, limits, told, patiently).await?) });
}

/// Watches a directory like [`directory::watch`]. With `patiently`, retries every [`RETRY`] while it cannot be read.
async fn watch(dir: PathBuf, limits: Limits, tx: Teller, patiently: bool) -> Result<(), FeedError> {
    loop {
        match directory::watch(dir.clone(), limits.clone(), tx.clone()).await {
            Err(error) if patiently && !tx.is_closed() => debug!("{error}"),
            ended => return ended,
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn batch<T>(first: T, mut queue: Option<&mut mpsc::Receiver<T>>) -> impl Iterator<Item = T> {
    let more = std::iter::from_fn(move || queue.as_mut()?.try_recv().ok());
    std::iter::once(first).chain(more).take(FEED_QUEUE)
}

/// The sources of a configuration that cannot tell now, with the reason: what the snapshot stands in for.
pub(super) fn away(config: &Config) -> BTreeMap<Source, String> {
    let file = config.records.as_ref().and_then(|dir| directory::names(dir).err());
    file.into_iter().map(|error| (Source::File, error.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::{FEED_QUEUE, Feeds, Open, batch};
    use metadata_content::source::Source;
    use metadata_feed::FeedEvent;
    use tokio::sync::mpsc;

    #[test]
    fn an_event_beyond_a_batch_is_left_for_the_next() {
        let (tx, mut queue) = mpsc::channel(FEED_QUEUE);
        for n in 1..=FEED_QUEUE {
            tx.try_send(n).expect("a place in the queue");
        }
        assert_eq!(batch(0, Some(&mut queue)).count(), FEED_QUEUE);
        assert_eq!(queue.try_recv(), Ok(FEED_QUEUE));
    }

    #[tokio::test]
    async fn a_feed_that_talks_on_and_on_does_not_silence_the_others() {
        let mut feeds = Feeds::default();
        for source in [Source::File, Source::Kubevirt] {
            let (told, events) = mpsc::channel(4);
            for key in ["a", "b"] {
                told.try_send(FeedEvent::Remove { key: key.into() }).expect("room");
            }
            feeds.open.push(Open { source, events, settled: false });
        }
        let mut heard = Vec::new();
        for _ in 0..4 {
            heard.push(feeds.recv().await.0);
        }
        assert_eq!(heard, [Source::File, Source::Kubevirt, Source::File, Source::Kubevirt]);
        assert!(!feeds.are_settled());
        feeds.on_synced(Source::File);
        assert!(!feeds.are_settled(), "of two one has not told all");
        feeds.on_synced(Source::Kubevirt);
        assert!(feeds.are_settled());
    }
}
