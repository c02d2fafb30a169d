//! The feeds of the configuration, and the source of each.

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
use metadata_content::record::RecordLimits;
use metadata_content::source::RecordSource;
use metadata_feed::proxmox::watch::ProxmoxHealth;
use metadata_feed::publisher::Publisher;
use metadata_feed::{FeedError, FeedEvent, directory, libvirt, proxmox};
#[cfg(feature = "kubevirt")]
use metadata_feed::{
    kubevirt,
    kubevirt::core::Services,
    pods::{InletPause, Inlets},
};
#[cfg(feature = "kubevirt")]
use tokio::sync::watch;

/// Limit on queued events of one feed. A feed waits while its queue is full.
pub(super) const FEED_QUEUE: usize = 1_024;

/// How often to retry a directory that cannot be read.
const RETRY: Duration = Duration::from_secs(1);

/// The running feeds.
#[derive(Default)]
pub(super) struct Feeds {
    open: Vec<Open>,
    /// The feed that is polled first next time, so that no feed starves the others.
    turn: usize,
    #[cfg(feature = "kubevirt")]
    inlets: InletPause,
}

struct Open {
    source: RecordSource,
    events: mpsc::Receiver<FeedEvent>,
    /// The source has listed all its records, or they come from the snapshot.
    settled: bool,
}

impl Feeds {
    /// Starts the feeds of a configuration. The feed of a source in `in_snapshot` retries while the source
    /// is unavailable.
    pub(super) fn start(
        config: &Config,
        in_snapshot: &BTreeSet<RecordSource>,
        node: &mut Node,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Self {
        let mut feeds = Self::default();
        if config.records.is_some() {
            let patiently = in_snapshot.contains(&RecordSource::File);
            let publisher = feeds.open(RecordSource::File, patiently, node);
            follow(config, publisher, patiently, tasks);
        }
        feeds.restart_hook(config, node, tasks);
        if let Some(options) = config.proxmox.clone() {
            let settled = in_snapshot.contains(&RecordSource::Proxmox);
            let publisher = feeds.open(RecordSource::Proxmox, settled, node);
            let (limits, outlook) = (config.record_limits(), Arc::new(ProxmoxHealth::default()));
            node.reporter.set_proxmox(options.directory.clone(), Arc::clone(&outlook));
            tasks.spawn(async move {
                proxmox::watch(options, limits, outlook, publisher).await;
                Ok(())
            });
        }
        #[cfg(feature = "kubevirt")]
        if let Some(options) = config.kubevirt.clone() {
            let publisher = feeds.open(RecordSource::Kubevirt, false, node);
            let (limits, state) = (config.record_limits(), config.state.clone());
            let saves = node.catalogue.saves().clone();
            let pause = feeds.inlets.clone();
            let inlets = Inlets { addresses: config.addresses.clone(), stay: config.pins.is_some(), pause };
            let contact = kubevirt::contact();
            if options.watch {
                node.reporter.set_api_server(contact.clone());
            }
            let (told, services) = watch::channel(Services::new());
            node.services = options.events.then_some(told);
            tasks.spawn(async move {
                let state = (state.as_deref(), saves);
                Ok(kubevirt::serve((options, inlets), limits, state, (contact, services), publisher).await?)
            });
        }
        feeds
    }

    /// Leaves alone what the feeds make on the node, because another agent is about to take over.
    pub(super) fn prepare_takeover(&self) {
        #[cfg(feature = "kubevirt")]
        self.inlets.begin();
    }

    /// Opens a queue for the feed of a source. The former feed of the source ends because its queue is closed.
    pub(super) fn open(&mut self, source: RecordSource, settled: bool, node: &mut Node) -> Publisher {
        let (sender, events) = mpsc::channel(FEED_QUEUE);
        self.close(source);
        self.open.push(Open { source, events, settled });
        node.catalogue.begin(source);
        let publisher = Publisher::new(sender, Arc::clone(node.catalogue.room()), source);
        node.reporter.set_outage(source, publisher.outage());
        publisher
    }

    fn close(&mut self, source: RecordSource) {
        self.open.retain(|open| open.source != source);
    }

    /// Starts the feed of hooks, which lists all its records again.
    fn restart_hook(&mut self, config: &Config, node: &mut Node, tasks: &mut JoinSet<anyhow::Result<()>>) {
        let settled = self.open.iter().any(|open| open.source == RecordSource::Hook && open.settled);
        let publisher = self.open(RecordSource::Hook, settled, node);
        let (dir, limits) = (config.run.join(libvirt::DIRECTORY), config.record_limits());
        tasks.spawn(async move { Ok(libvirt::watch(dir, limits, publisher).await?) });
    }

    /// Reads the directories of a configuration from the start.
    pub(super) fn restart(
        &mut self,
        config: &Config,
        node: &mut Node,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) {
        self.restart_hook(config, node, tasks);
        if config.records.is_none() {
            self.close(RecordSource::File);
            node.catalogue.begin(RecordSource::File);
            return node.on_event(RecordSource::File, FeedEvent::Synced);
        }
        let settled = self.open.iter().all(|open| open.source != RecordSource::File || open.settled);
        let publisher = self.open(RecordSource::File, settled, node);
        follow(config, publisher, true, tasks);
    }

    /// Waits for the next event of any feed.
    pub(super) async fn recv(&mut self) -> (RecordSource, FeedEvent) {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(RecordSource, FeedEvent)> {
        let count = self.open.len();
        for n in 0..count {
            let at = (self.turn + n) % count;
            let Open { source, events, .. } = &mut self.open[at];
            // The queue of a feed that has ended stays empty; its task returns the reason.
            if let Poll::Ready(Some(event)) = events.poll_recv(cx) {
                self.turn = at + 1;
                return Poll::Ready((*source, event));
            }
        }
        Poll::Pending
    }

    /// Returns an event and the queued events of the same source, at most [`FEED_QUEUE`] in all.
    pub(super) fn batch(
        &mut self,
        source: RecordSource,
        first: FeedEvent,
    ) -> impl Iterator<Item = FeedEvent> {
        let open = self.open.iter_mut().find(|open| open.source == source);
        let queue = open.map(|open| &mut open.events);
        batch(first, queue)
    }

    /// Marks a source as settled, because it has listed all its records.
    pub(super) fn on_synced(&mut self, source: RecordSource) {
        self.open.iter_mut().filter(|open| open.source == source).for_each(|open| open.settled = true);
    }

    /// True once every source has listed its records, or they come from the snapshot.
    pub(super) fn are_settled(&self) -> bool {
        self.open.iter().all(|open| open.settled)
    }
}

/// Starts the feed of the records directory. With `patiently`, retries while the directory cannot be read.
fn follow(config: &Config, publisher: Publisher, patiently: bool, tasks: &mut JoinSet<anyhow::Result<()>>) {
    let Some(dir) = config.records.clone() else { return };
    let limits = config.record_limits();
    tasks.spawn(async move { Ok(watch(dir, limits, publisher, patiently).await?) });
}

/// Watches a directory like [`directory::watch`]. With `patiently`, retries every [`RETRY`] while it cannot be read.
async fn watch(dir: PathBuf, limits: RecordLimits, tx: Publisher, patiently: bool) -> Result<(), FeedError> {
    loop {
        match directory::watch(dir.clone(), limits.clone(), tx.clone()).await {
            Err(error) if patiently && !tx.is_closed() => {
                debug!("{error}");
                tx.set_outage(Some(format!("{error}; its records stay in force until it can be read again")));
            }
            ended => return ended,
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn batch<T>(first: T, mut queue: Option<&mut mpsc::Receiver<T>>) -> impl Iterator<Item = T> {
    let more = std::iter::from_fn(move || queue.as_mut()?.try_recv().ok());
    std::iter::once(first).chain(more).take(FEED_QUEUE)
}

/// The sources of a configuration that are unavailable, each with the reason.
pub(super) fn away(config: &Config) -> BTreeMap<RecordSource, String> {
    let file = config.records.as_ref().and_then(|dir| directory::names(dir).err());
    let proxmox = config.proxmox.as_ref().and_then(|options| proxmox::reachable(options).err());
    let each = [(RecordSource::File, file), (RecordSource::Proxmox, proxmox)].into_iter();
    // The snapshot has no records of other sources.
    let each = each.filter(|(source, _)| source.is_in_snapshot());
    each.filter_map(|(source, error)| Some((source, error?.to_string()))).collect()
}

#[cfg(test)]
mod tests {
    use super::{FEED_QUEUE, Feeds, Open, batch};
    use metadata_content::source::RecordSource;
    use metadata_feed::FeedEvent;
    use tokio::sync::mpsc;

    #[test]
    fn an_event_beyond_a_batch_stays_for_the_next_batch() {
        let (tx, mut queue) = mpsc::channel(FEED_QUEUE);
        for n in 1..=FEED_QUEUE {
            tx.try_send(n).expect("a place in the queue");
        }
        assert_eq!(batch(0, Some(&mut queue)).count(), FEED_QUEUE);
        assert_eq!(queue.try_recv(), Ok(FEED_QUEUE));
    }

    #[tokio::test]
    async fn a_feed_with_many_events_does_not_starve_the_others() {
        let mut feeds = Feeds::default();
        for source in [RecordSource::File, RecordSource::Kubevirt] {
            let (sender, events) = mpsc::channel(4);
            for key in ["a", "b"] {
                sender.try_send(FeedEvent::Remove { key: key.into() }).expect("room");
            }
            feeds.open.push(Open { source, events, settled: false });
        }
        let mut received = Vec::new();
        for _ in 0..4 {
            received.push(feeds.recv().await.0);
        }
        assert_eq!(
            received,
            [RecordSource::File, RecordSource::Kubevirt, RecordSource::File, RecordSource::Kubevirt]
        );
        assert!(!feeds.are_settled());
        feeds.on_synced(RecordSource::File);
        assert!(!feeds.are_settled(), "one of two has not listed its records");
        feeds.on_synced(RecordSource::Kubevirt);
        assert!(feeds.are_settled());
    }
}
