//! The feeds of the configuration, and the source of each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::node::{RecordCatalogue, Reporter};
use crate::config::Config;
use metadata_common::maps::Slot;
use metadata_content::source::RecordSource;
use metadata_feed::FeedEvent;
use metadata_feed::publisher::{Outage, Publisher};
use metadata_feed::source::{ServiceSender, Services, Source, SourceContext, TakeoverPause};

/// Limit on queued events of one feed. A feed waits while its queue is full.
pub(super) const FEED_QUEUE: usize = 1_024;

/// The running feeds.
pub(super) struct Feeds {
    open: Vec<OpenFeed>,
    /// The feed that is polled first next time, so that no feed starves the others.
    turn: usize,
    pause: TakeoverPause,
    /// Takes the slots whose waiting requests have an answer.
    wakes: UnboundedSender<Vec<Slot>>,
}

struct OpenFeed {
    source: RecordSource,
    events: mpsc::Receiver<FeedEvent>,
    /// The source has listed all its records, or they come from the snapshot.
    settled: bool,
    /// A reload of the configuration reads everything again.
    is_reread: bool,
}

/// The parts of the agent that feeds are connected with.
pub(super) struct FeedHost<'a> {
    pub(super) catalogue: &'a mut RecordCatalogue,
    pub(super) reporter: &'a mut Reporter,
    pub(super) tasks: &'a mut JoinSet<anyhow::Result<()>>,
}

impl Feeds {
    fn new(wakes: UnboundedSender<Vec<Slot>>) -> Self {
        Self { open: Vec::new(), turn: 0, pause: TakeoverPause::default(), wakes }
    }

    /// Starts the sources of a configuration. A source in `in_snapshot` retries while it is unavailable. `wakes` takes
    /// the slots whose waiting requests have an answer of the platform's metadata service.
    pub(super) fn start(
        config: &Config,
        sources: Vec<Arc<dyn Source>>,
        in_snapshot: &BTreeSet<RecordSource>,
        wakes: UnboundedSender<Vec<Slot>>,
        mut host: FeedHost<'_>,
    ) -> (Self, Vec<ServiceSender>) {
        let (mut feeds, mut services) = (Self::new(wakes), Vec::new());
        for source in &sources {
            let is_in_snapshot = in_snapshot.contains(&source.kind());
            services.extend(feeds.run(config, &**source, (is_in_snapshot, is_in_snapshot), &mut host));
        }
        host.reporter.set_records(config.records.as_deref());
        host.reporter.set_sources(sources);
        (feeds, services)
    }

    /// Runs a source in place of its former feed. Returns where it is told how its records are served, if it asks.
    fn run(
        &mut self,
        config: &Config,
        source: &dyn Source,
        (settled, is_patient): (bool, bool),
        host: &mut FeedHost<'_>,
    ) -> Option<ServiceSender> {
        let kind = source.kind();
        let (sender, events) = mpsc::channel(FEED_QUEUE);
        // The former feed ends because its queue is closed.
        self.close(kind);
        self.open.push(OpenFeed { source: kind, events, settled, is_reread: source.is_reread() });
        host.catalogue.begin(kind);
        let publisher = Publisher::new(sender, Arc::clone(host.catalogue.room()), kind);
        host.reporter.set_outage(kind, publisher.outage());
        let (told, services) = watch::channel(Services::new());
        let context = SourceContext {
            limits: config.record_limits(),
            is_patient,
            addresses: config.addresses.clone(),
            state: config.state.clone(),
            saves: host.catalogue.saves().clone(),
            stays: config.pins.is_some(),
            pause: self.pause.clone(),
            services,
            mailboxes: Arc::clone(host.catalogue.mailboxes()),
            wakes: self.wakes.clone(),
        };
        let work = source.run(context, publisher);
        host.tasks.spawn(async move { Ok(work.await?) });
        source.follows_services().then_some((kind, told))
    }

    /// Leaves alone what the sources make on the node, because another agent is about to take over.
    pub(super) fn prepare_takeover(&self) {
        self.pause.begin();
    }

    fn close(&mut self, source: RecordSource) {
        self.open.retain(|open| open.source != source);
    }

    /// Reads again the sources that a reload concerns. Returns those that are no longer configured.
    pub(super) fn restart(&mut self, config: &Config, mut host: FeedHost<'_>) -> Vec<RecordSource> {
        host.reporter.set_records(config.records.as_deref());
        let reread: Vec<_> = config.sources().into_iter().filter(|source| source.is_reread()).collect();
        for source in &reread {
            let settled = self.open.iter().all(|open| open.source != source.kind() || open.settled);
            // No source that is read again follows the services of its records.
            _ = self.run(config, &**source, (settled, true), &mut host);
        }
        let is_gone =
            |open: &OpenFeed| open.is_reread && reread.iter().all(|source| source.kind() != open.source);
        let gone: Vec<_> = self.open.iter().filter(|open| is_gone(open)).map(|open| open.source).collect();
        for kind in &gone {
            self.close(*kind);
            host.catalogue.begin(*kind);
            host.reporter.set_outage(*kind, Outage::default());
        }
        gone
    }

    /// Waits for the next event of any feed.
    pub(super) async fn recv(&mut self) -> (RecordSource, FeedEvent) {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(RecordSource, FeedEvent)> {
        let count = self.open.len();
        for n in 0..count {
            let at = (self.turn + n) % count;
            let OpenFeed { source, events, .. } = &mut self.open[at];
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

fn batch<T>(first: T, mut queue: Option<&mut mpsc::Receiver<T>>) -> impl Iterator<Item = T> {
    let more = std::iter::from_fn(move || queue.as_mut()?.try_recv().ok());
    std::iter::once(first).chain(more).take(FEED_QUEUE)
}

/// The sources of a configuration that are unavailable, each with the reason. The snapshot has no records of others.
pub(super) fn away(config: &Config) -> BTreeMap<RecordSource, String> {
    let sources = config.sources().into_iter().filter(|source| source.kind().is_in_snapshot());
    sources.filter_map(|source| Some((source.kind(), source.try_read().err()?.to_string()))).collect()
}

#[cfg(test)]
mod tests {
    use super::{FEED_QUEUE, FeedHost, Feeds, OpenFeed, batch};
    use crate::agent::node::{RecordCatalogue, Reporter};
    use crate::agent::state::NodeState;
    use crate::config::Config;
    use metadata_content::record::Record;
    use metadata_content::source::RecordSource;
    use metadata_feed::FeedEvent;
    use metadata_feed::check::Check;
    use metadata_feed::memory_budget::MemoryBudget;
    use metadata_feed::publisher::Publisher;
    use metadata_feed::source::{FailureStreak, Source, SourceContext, SourceHealth, SourceTask};
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::sync::mpsc;
    use tokio::task::JoinSet;

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
        let mut feeds = Feeds::new(mpsc::unbounded_channel().0);
        for source in [RecordSource::File, RecordSource::Kubevirt] {
            let (sender, events) = mpsc::channel(4);
            for key in ["a", "b"] {
                sender.try_send(FeedEvent::Remove { key: key.into() }).expect("room");
            }
            feeds.open.push(OpenFeed { source, events, settled: false, is_reread: false });
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

    /// All that another platform's source has to bring.
    struct ToySource {
        is_away: AtomicBool,
    }

    impl Source for ToySource {
        fn kind(&self) -> RecordSource {
            RecordSource::Proxmox
        }

        fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
            let text = "schema: vmrecord/1\ngeneration: 1\nvm: {uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: toy, \
                        project: {id: p, number: 1, account: '000000000000'}}\nhostname: {short: toy}\n\
                        placement: {region: r, zone: z}\n";
            Box::pin(async move {
                assert_eq!(context.services.borrow().len(), 0);
                context.wakes.send(vec![7]).expect("the agent listens");
                let record = Record::parse_within(&context.limits, "toy", text).map(|(record, _)| record);
                let mut record = record.map_err(metadata_feed::FeedError::from)?;
                record.vm.owner = Some(metadata_content::record::Owner::proxmox("c", 7, "1"));
                let (key, record) = ("7".to_owned(), Arc::new(record));
                // Nobody receives events once the agent ends.
                let published = async {
                    publisher.publish(FeedEvent::Upsert { key, record }).await?;
                    publisher.publish(FeedEvent::Synced).await
                };
                _ = published.await;
                publisher.closed().await;
                Ok(())
            })
        }

        fn health(&self) -> Option<SourceHealth> {
            let failing = self.is_away.load(Ordering::Relaxed);
            let failing =
                failing.then(|| FailureStreak { reason: "no toys".into(), ..FailureStreak::default() });
            Some(SourceHealth { reads: "the toy box".into(), failing, ..SourceHealth::default() })
        }

        fn preflight(&self) -> Vec<Check> {
            vec![Check::fail("toy.box", "there is no box", "a box of toys", "Buy one")]
        }

        fn follows_services(&self) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn another_source_needs_nothing_but_its_implementation() {
        let config = Config { state: None, ..Config::default() };
        let (state, _background) = NodeState::open(&config).expect("a state in memory");
        let mut catalogue = RecordCatalogue::new(state, MemoryBudget::new(config.record_bytes()), &[]);
        let (mut reporter, mut tasks) = (Reporter::new(Vec::new()), JoinSet::new());
        let toy = Arc::new(ToySource { is_away: AtomicBool::new(false) });
        let host = FeedHost { catalogue: &mut catalogue, reporter: &mut reporter, tasks: &mut tasks };
        let sources: Vec<Arc<dyn Source>> = vec![Arc::<ToySource>::clone(&toy)];
        let (woken, mut wakes) = mpsc::unbounded_channel();
        let (mut feeds, services) = Feeds::start(&config, sources, &BTreeSet::new(), woken, host);
        let followed: Vec<_> = services.iter().map(|(source, _)| *source).collect();
        assert_eq!(followed, [RecordSource::Proxmox], "it is told how its records are served");
        // Its records arrive, and then that they are all.
        let (source, event) = feeds.recv().await;
        assert_eq!(source, RecordSource::Proxmox);
        assert!(matches!(event, FeedEvent::Upsert { key, .. } if key == "7"));
        let (source, event) = feeds.recv().await;
        assert!(matches!(event, FeedEvent::Synced));
        feeds.on_synced(source);
        assert!(feeds.are_settled());
        assert_eq!(wakes.recv().await, Some(vec![7]), "what its guests wait for is there");
        // Status says how it is read.
        let failing = |reporter: &Reporter| {
            let [status] = &reporter.source_reports()[..] else { panic!("one source") };
            assert_eq!((status.source, &*status.reads), (RecordSource::Proxmox, "the toy box"));
            status.failing.as_ref().map(|failing| failing.reason.clone())
        };
        assert_eq!(failing(&reporter), None);
        toy.is_away.store(true, Ordering::Relaxed);
        assert_eq!(failing(&reporter), Some("no toys".to_owned()));
        assert_eq!(toy.preflight().len(), 1, "doctor adds the checks of each source");
        // Its work ends with the agent.
        drop(feeds);
        assert!(tasks.join_next().await.expect("a task").expect("no panic").is_ok());
    }
}
