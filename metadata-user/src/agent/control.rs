//! The control loop: handles one event after another, and settles ports in between.

use metadata_common::maps::Slot;
use metadata_content::source::RecordSource;
use metadata_control::status::GuestUsage;
use metadata_datapath::stack::SlotStats;
use metadata_feed::FeedEvent;
use metadata_feed::registry::RecordId;
use metadata_feed::source::Source;
use metadata_links::devices::Changed;
use metadata_steer::PinWatch;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::Signal;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tracing::{error, info, warn};

use super::drain::DrainResult;
use super::endpoint::Registrar;
use super::event_sources::{self, Incoming, LinkWatches, Listeners, TokenEvents};
use super::feeds::{FeedHost, Feeds};
use super::handover::{
    HandoverResult, HandoverState, PreviousEvent, Succession, Takeover, TakeoverRequest, hand_over,
};
use super::node::RegistrationConfig;
use super::reload::ConfigSource;
use super::service_manager::Stop;
use super::snapshots::Snapshots;
use super::state::BackgroundTasks;
use super::{drain, reload};
use crate::agent::endpoint::ControlRequest;
use crate::agent::health::Health;
use crate::agent::node::Node;
use crate::agent::service_manager;
use crate::config::Config;
use crate::identity::SigningClient;
use crate::service::audit::COLLECT_EVERY;

/// Maximum time for settling ports before the next event is handled.
const PASS: Duration = Duration::from_millis(5);

/// What the control loop starts with.
pub(super) struct StartState {
    /// The sources of the configuration.
    pub(super) sources: Vec<Arc<dyn Source>>,
    pub(super) node: Node,
    pub(super) handover: HandoverState,
    pub(super) errands: BackgroundTasks,
    /// The connection to the previous agent, if its ports are to be taken over.
    pub(super) taking: Option<Takeover>,
    /// The agent's side of the signer, if the node issues identity tokens.
    pub(super) identity: Option<SigningClient>,
}

/// Why an agent has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndReason {
    /// A signal ended it.
    Stopped,
    /// The next agent has taken its ports.
    TakenOver,
}

/// The effect of an event.
enum Turn {
    /// Records or ports may have changed.
    Changed,
    /// Neither records nor ports have changed.
    Unchanged,
    /// The agent ends.
    Ended(EndReason),
}

/// The state that events change. Fields are dropped in order of declaration: the listeners first, so that the next
/// agent can listen, and the ports last.
pub(super) struct ControlLoop {
    /// `None` while the ports are still to be taken over.
    listeners: Option<Listeners>,
    links: LinkWatches,
    pins: PinWatch,
    timers: Timers,
    succession: Succession,
    /// `None` on a node that issues no identity tokens.
    identity: Option<TokenEvents>,
    /// Slots whose waiting requests have an answer of their platform's metadata service.
    wakes: UnboundedReceiver<Vec<Slot>>,
    /// Tasks that start together with the listeners; `None` once they have started.
    errands: Option<BackgroundTasks>,
    health: Arc<Health>,
    feeds: Feeds,
    snapshots: Snapshots,
    registrar: Arc<Registrar>,
    tasks: JoinSet<anyhow::Result<()>>,
    /// The connection to the previous agent, until its ports are taken over.
    taking: Option<Takeover>,
    config: Config,
    origin: ConfigSource,
    stop: Stop,
    hup: Signal,
    handover: HandoverState,
    node: Node,
    /// Every source has listed its records, or its records come from the snapshot.
    synced: bool,
    /// All ports have been settled once.
    serving: bool,
}

impl ControlLoop {
    /// Starts feeds and, unless ports are to be taken over first, the listeners.
    ///
    /// # Errors
    /// If the metrics address cannot be bound or a socket cannot be created.
    pub(super) async fn start(
        config: Config,
        origin: ConfigSource,
        started: StartState,
        (stop, hup): (Stop, Signal),
    ) -> anyhow::Result<Self> {
        let StartState { sources, mut node, handover, errands, taking, identity } = started;
        let mut tasks = JoinSet::new();
        let identity = identity.map(|signing| TokenEvents::start(signing, &mut node, &mut tasks));
        let registrar = Registrar::new(&config);
        let (limits, most) = (config.record_limits(), config.api().instances);
        node.set_shelf(RegistrationConfig { shelf: registrar.shelf(), limits, most });
        let mut snapshots = Snapshots::new(&config, node.catalogue.saves().clone());
        for (RecordId { source, key }, record) in snapshots.read_for_absent_sources(&config) {
            let key = key.as_ref().into();
            // An earlier release kept records of tenants without the owner that the platform assigned: they stay
            // expected.
            let event = match record.owner().fits(source) {
                true => FeedEvent::Upsert { key, record: record.into() },
                false => FeedEvent::Expect { key, identities: record.identities() },
            };
            node.on_event(source, event);
        }
        node.reporter.set_from_snapshot(snapshots.are_served());
        let host =
            FeedHost { catalogue: &mut node.catalogue, reporter: &mut node.reporter, tasks: &mut tasks };
        // The sources limit how many answers are under way, and so these.
        let (woken, wakes) = unbounded_channel();
        let (feeds, services) = Feeds::start(&config, sources, snapshots.sources(), woken, host);
        node.services = services;
        let health = Health::new(node.ports.workers().heartbeats());
        health.set_adopting(node.ports.has_inherited());
        let mut control = Self {
            listeners: None,
            links: LinkWatches::new(),
            pins: PinWatch::open(node.ports.steering().attachments().pins()),
            timers: Timers::new(config.audit.to.is_some()),
            succession: Succession::default(),
            identity,
            errands: Some(errands),
            wakes,
            health,
            synced: feeds.are_settled(),
            feeds,
            snapshots,
            registrar,
            tasks,
            taking,
            config,
            origin,
            stop,
            hup,
            handover,
            node,
            serving: false,
        };
        if control.taking.is_none() {
            control.listen(false).await?;
            control.allow_takeover();
        }
        if control.synced {
            control.health.set_records_read();
        }
        Ok(control)
    }

    /// Runs until SIGTERM or SIGINT, or until another agent has taken over.
    ///
    /// # Errors
    /// If a feed, an endpoint or a worker ends, a device of the hub is deleted, or the takeover fails.
    pub(super) async fn run(mut self) -> anyhow::Result<EndReason> {
        loop {
            let turn = match self.turn().await? {
                // Whoever stops an agent that prepares a takeover wants the previous one to go on.
                Turn::Changed if self.taking.is_some() => match self.stop.pending().await {
                    Some(name) => self.on_stop(name).await,
                    None => Turn::Changed,
                },
                turn => turn,
            };
            match turn {
                Turn::Changed => {
                    if let Some(ended) = self.on_changed().await? {
                        return Ok(ended);
                    }
                }
                Turn::Unchanged => {}
                Turn::Ended(ended) => {
                    if ended == EndReason::TakenOver {
                        self.node.ports.leave();
                    }
                    return Ok(ended);
                }
            }
        }
    }

    /// Waits for an event and handles it.
    async fn turn(&mut self) -> anyhow::Result<Turn> {
        let may_settle = self.synced && self.node.ports.has_work();
        tokio::select! {
            (source, event) = self.feeds.recv() => Ok(self.on_feed(source, event)),
            Some((netns, changed)) = self.links.recv() => Ok(self.on_links(netns.as_deref(), &changed)),
            incoming = event_sources::next(&mut self.listeners) => self.on_incoming(incoming).await,
            () = self.pins.changed() => Ok(self.on_pins_changed()),
            event = self.succession.recv() => Ok(self.on_previous_agent(event).await),
            timer = self.timers.next() => self.on_timer(timer),
            event = event_sources::next_token(&mut self.identity) => Ok(self.on_token(&event)),
            Some(slots) = self.wakes.recv() => Ok(self.on_answers(slots)),
            () = tokio::task::yield_now(), if may_settle => Ok(self.settle_some()),
            Some(ended) = self.tasks.join_next(), if !self.tasks.is_empty() => on_task_ended(ended),
            Some(()) = self.hup.recv() => Ok(self.on_reload()),
            name = self.stop.recv() => Ok(self.on_stop(name).await),
        }
    }

    /// Applies an event and the queued events of the same source.
    fn on_feed(&mut self, source: RecordSource, first: FeedEvent) -> Turn {
        let mut synced = false;
        for event in self.feeds.batch(source, first) {
            self.snapshots.on_event(source, &event);
            synced |= matches!(event, FeedEvent::Synced);
            self.node.on_event(source, event);
        }
        if synced {
            self.feeds.on_synced(source);
            self.snapshots.on_synced(source);
            self.node.reporter.set_from_snapshot(self.snapshots.are_served());
        }
        self.node.catalogue.log_new_conflicts();
        if !self.synced && self.feeds.are_settled() {
            self.synced = true;
            self.health.set_records_read();
        }
        // Watch before settling, so that no change in between is missed.
        self.watch_links();
        Turn::Changed
    }

    fn on_links(&mut self, netns: Option<&str>, changed: &Changed) -> Turn {
        self.node.on_links_changed(netns, changed);
        Turn::Changed
    }

    /// Looks at once at what is reported within 30 seconds otherwise.
    fn on_pins_changed(&mut self) -> Turn {
        if self.taking.is_none() {
            self.node.ports.check_pins(Instant::now());
        }
        Turn::Unchanged
    }

    async fn on_incoming(&mut self, incoming: Incoming) -> anyhow::Result<Turn> {
        Ok(match incoming {
            Incoming::PrepareTakeover(done) => {
                self.feeds.prepare_takeover();
                self.node.ports.pin_everything(Instant::now());
                // The next agent may be gone.
                _ = done.send(());
                Turn::Unchanged
            }
            Incoming::TakeOver(call) => return self.on_takeover(call).await,
            Incoming::Request(ControlRequest::Instances(ask)) => {
                if !ask.answer(&mut self.node) {
                    return Ok(Turn::Unchanged);
                }
                self.watch_links();
                Turn::Changed
            }
            Incoming::Request(request) => {
                answer(&self.node, &self.health, request);
                self.timers.set_collecting(self.node.ports.answers().are_recorded());
                Turn::Unchanged
            }
        })
    }

    /// Hands over to an agent that is ready to take over.
    async fn on_takeover(&mut self, TakeoverRequest { wire, turn }: TakeoverRequest) -> anyhow::Result<Turn> {
        let Some(listeners) = &mut self.listeners else { return Ok(Turn::Unchanged) };
        // Others are refused until this is dropped.
        let _turn = turn;
        let close = async || listeners.close_metrics().await;
        match hand_over(&mut self.node, &mut self.handover, wire, &mut self.stop, close).await {
            HandoverResult::TakenOver => Ok(Turn::Ended(EndReason::TakenOver)),
            HandoverResult::Stopped(name) => {
                self.drain(name).await;
                Ok(Turn::Ended(EndReason::Stopped))
            }
            HandoverResult::Stays => {
                listeners.open_metrics(&self.config, &mut self.tasks).await?;
                Ok(Turn::Changed)
            }
        }
    }

    async fn on_previous_agent(&mut self, event: PreviousEvent) -> Turn {
        if self.succession.on_event(&mut self.node, event).await {
            self.allow_takeover();
        }
        Turn::Unchanged
    }

    /// Wakes the request that waits for a token, and notes the token in the audit log.
    fn on_token(&mut self, event: &event_sources::SigningEvent) -> Turn {
        if let Some(signed) = &event.signed {
            self.node.ports.answers().token_signed(signed);
        }
        self.node.ports.wake(event.slot);
        Turn::Unchanged
    }

    /// Wakes the requests that wait for the answer of their platform's metadata service.
    fn on_answers(&mut self, slots: Vec<Slot>) -> Turn {
        for slot in slots {
            self.node.ports.wake(slot);
        }
        Turn::Unchanged
    }

    fn on_timer(&mut self, timer: Timer) -> anyhow::Result<Turn> {
        let is_ours = self.taking.is_none();
        match timer {
            Timer::Retry => return self.on_retry().map(|()| Turn::Changed),
            Timer::Guests(now) if is_ours => {
                self.node.follow_guests(now);
                self.node.tell_services();
            }
            Timer::Tend if is_ours && self.synced => self.node.tend(),
            Timer::Guests(_) | Timer::Tend => {}
            Timer::Collect => {
                self.node.collect();
                self.timers.set_collecting(self.node.ports.answers().are_recorded());
            }
            Timer::Watchdog => service_manager::alive(),
        }
        Ok(Turn::Unchanged)
    }

    fn on_retry(&mut self) -> anyhow::Result<()> {
        self.node.ports.check_path()?;
        self.node.ports.retry();
        self.node.catalogue.log_held_refusals(Instant::now());
        if self.synced {
            self.snapshots.write_if_due(|| self.node.catalogue.snapshot_records());
        }
        self.watch_links();
        if self.succession.finish(&mut self.node) {
            self.allow_takeover();
        }
        Ok(())
    }

    fn settle_some(&mut self) -> Turn {
        self.node.proceed(PASS);
        Turn::Changed
    }

    /// Reads the configuration again, and applies the fields that can change.
    fn on_reload(&mut self) -> Turn {
        service_manager::reloading();
        let changes = reload::read(&self.origin, &self.config);
        self.node.reporter.on_reload(
            changes.as_ref().map(|changes| changes.refused_at_restart.clone()).map_err(Clone::clone),
        );
        self.node.ports.answers().reopen_audit();
        if let Ok(changes) = changes {
            self.config = changes.now;
            (self.origin.applied)(&self.config);
            self.node.configure(&self.config);
            let host = FeedHost {
                catalogue: &mut self.node.catalogue,
                reporter: &mut self.node.reporter,
                tasks: &mut self.tasks,
            };
            for gone in self.feeds.restart(&self.config, host) {
                self.node.on_event(gone, FeedEvent::Synced);
            }
            self.snapshots.on_reload(&self.config);
        }
        if self.taking.is_none() {
            self.node.check_attachments(Instant::now());
        }
        service_manager::ready();
        self.registrar.configure(&self.config);
        Turn::Changed
    }

    async fn on_stop(&mut self, name: &str) -> Turn {
        if self.synced {
            self.snapshots.write(|| self.node.catalogue.snapshot_records());
        }
        self.drain(name).await;
        Turn::Ended(EndReason::Stopped)
    }

    /// Replies to waiting clients. Once all ports are settled, takes over from the previous agent. Without a takeover,
    /// releases inherited ports and slots that no record names, and reports that guests are served.
    async fn on_changed(&mut self) -> anyhow::Result<Option<EndReason>> {
        self.node.notify_waiting();
        if !self.synced || self.node.ports.has_work() {
            return Ok(None);
        }
        if let Some(taking) = self.taking.take() {
            return self.take_over(taking).await;
        }
        // The snapshot may be outdated, so a port that it does not name may have a record.
        if !self.snapshots.are_served() {
            self.node.release_inherited();
        }
        if !self.serving && !self.node.ports.has_work() {
            self.on_serving();
        }
        Ok(None)
    }

    fn on_serving(&mut self) {
        self.serving = true;
        self.health.set_ports_settled();
        self.health.set_adopting(false);
        service_manager::ready();
        let ports = &self.node.ports;
        info!(ports = ports.count(), identities = ports.identity_count(), "serving");
    }

    async fn take_over(&mut self, mut taking: Takeover) -> anyhow::Result<Option<EndReason>> {
        if let Some(name) = taking.take(&mut self.node, &mut self.stop).await? {
            self.on_stop(name).await;
            return Ok(Some(EndReason::Stopped));
        }
        self.listen(true).await?;
        self.succession.begin(taking);
        Ok(None)
    }

    /// Starts the waiting tasks and the listeners. With `succeeds`, the listeners replace those of the previous agent.
    async fn listen(&mut self, succeeds: bool) -> anyhow::Result<()> {
        self.errands.take().into_iter().for_each(|errands| errands.start(&mut self.tasks));
        let publication = self.identity.as_ref().map(TokenEvents::publication);
        let shared = (&self.health, &self.registrar, publication);
        let side = self.node.ports.side();
        self.listeners = Some(Listeners::new(&self.config, shared, side, succeeds, &mut self.tasks).await?);
        Ok(())
    }

    /// Allows the next agent to take over.
    fn allow_takeover(&self) {
        self.listeners.iter().for_each(Listeners::allow_takeover);
    }

    fn watch_links(&mut self) {
        let wanted = self.node.catalogue.plan().watched_namespaces();
        for netns in self.links.follow(wanted, &mut self.tasks) {
            self.node.on_links_changed(netns.as_deref(), &Changed::Unknown);
        }
    }

    /// Drains the workers, answers requests during the drain, and saves what guests wrote.
    async fn drain(&mut self, name: &str) {
        info!("{name}: stopping");
        service_manager::stopping();
        self.health.set_draining();
        let limit = Duration::from_secs(self.config.drain_seconds.into());
        let drained = tokio::select! {
            drained = drain::drain(self.node.ports.workers(), limit, self.stop.recv()) => drained,
            never = answer_all(&self.node, &self.health, &mut self.listeners) => match never {},
        };
        if let DrainResult::Cut(connections @ 1..) = drained {
            warn!(
                connections,
                "connections cut off; `drain_seconds` limits how long the agent waits for guests"
            );
        }
        if let Some(unsaved) = self.node.catalogue.save() {
            error!("lost at the end of the agent: {unsaved}");
        }
        self.node.collect();
    }
}

/// Ends the agent if an endpoint or feed has failed, so that it is restarted: without that task it would look alive.
fn on_task_ended(ended: Result<anyhow::Result<()>, JoinError>) -> anyhow::Result<Turn> {
    match ended {
        Ok(result) => result?,
        Err(error) if error.is_cancelled() => {}
        Err(error) => return Err(anyhow::Error::new(error).context("a task of the control loop panicked")),
    }
    Ok(Turn::Unchanged)
}

/// How often to retry what failed, if no link event arrives.
const RETRY: Duration = Duration::from_secs(2);

/// How often to check how guests use their ports.
const GUESTS: Duration = Duration::from_secs(2);

/// How often to check the age of token keys and of mailboxes without a record.
const TEND: Duration = Duration::from_secs(60);

/// The interval of a timer that is not used.
const NEVER: Duration = Duration::from_secs(86_400);

/// A timer that has fired.
enum Timer {
    /// Retry what failed.
    Retry,
    /// Check how guests use their ports.
    Guests(Instant),
    /// Rotate old token keys and delete unused mailboxes.
    Tend,
    /// Take the answers that workers have recorded.
    Collect,
    /// Notify the watchdog of the service manager.
    Watchdog,
}

/// The timers. Each fires for the first time immediately.
struct Timers {
    retry: Interval,
    guests: Interval,
    tend: Interval,
    /// `None` while workers record no answers.
    collect: Option<Interval>,
    watchdog: Interval,
}

impl Timers {
    fn new(collects: bool) -> Self {
        Self {
            retry: delayed(RETRY),
            guests: delayed(GUESTS),
            tend: interval(TEND),
            collect: collects.then(|| delayed(COLLECT_EVERY)),
            watchdog: interval(service_manager::watchdog().unwrap_or(NEVER)),
        }
    }

    /// Sets whether workers record answers.
    fn set_collecting(&mut self, collects: bool) {
        if collects != self.collect.is_some() {
            self.collect = collects.then(|| delayed(COLLECT_EVERY));
        }
    }

    /// Waits for the next timer. Nothing is lost when this is cancelled.
    async fn next(&mut self) -> Timer {
        tokio::select! {
            _ = self.retry.tick() => Timer::Retry,
            now = self.guests.tick() => Timer::Guests(now.into_std()),
            _ = self.tend.tick() => Timer::Tend,
            () = tick(&mut self.collect) => Timer::Collect,
            _ = self.watchdog.tick() => Timer::Watchdog,
        }
    }
}

fn delayed(every: Duration) -> Interval {
    let mut interval = interval(every);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Waits for ever without an interval.
async fn tick(interval: &mut Option<Interval>) {
    match interval {
        Some(interval) => _ = interval.tick().await,
        None => std::future::pending().await,
    }
}

/// Limit on the time until a worker reports the connections and requests of a guest. An idle worker reports within a
/// second.
const WORKER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Answers a request. The answer is dropped if the client has disconnected.
fn answer(node: &Node, health: &Health, request: ControlRequest) {
    match request {
        ControlRequest::Metrics(reply) => _ = reply.send(node.metrics(health)),
        ControlRequest::Status(about, reply) => _ = reply.send(Box::new(node.status(about, health))),
        ControlRequest::Top(query, reply) => _ = reply.send(Box::new(node.top(&query, health))),
        ControlRequest::VmPages(name, reply) => {
            let pages = node.vm_pages(&name);
            tokio::spawn(async move {
                reply.send(collect_held(pages, |page, held| page.held = Some(held)).await)
            });
        }
        ControlRequest::Trace(target, reply) => _ = reply.send(node.view().trace(&target).map(Box::new)),
        // The agent is ending; the next agent registers records.
        ControlRequest::Instances(_) => {}
        ControlRequest::Guests(name, reply) => {
            let asked = node.view().guests(&name);
            // Workers answer after their next turn, and the loop does not wait for them.
            tokio::spawn(async move {
                reply.send(collect_held(asked, |guest, held| guest.held = Some(held)).await)
            });
        }
    }
}

/// Answers requests and writes audit lines while the agent drains. Ignores takeovers.
async fn answer_all(node: &Node, health: &Health, listeners: &mut Option<Listeners>) -> Infallible {
    let mut audit = interval(COLLECT_EVERY);
    loop {
        tokio::select! {
            incoming = event_sources::next(listeners) => match incoming {
                Incoming::Request(request) => answer(node, health, request),
                Incoming::TakeOver(_) | Incoming::PrepareTakeover(_) => {}
            },
            _ = audit.tick() => node.collect(),
        }
    }
}

/// Sets what workers hold for each guest; nothing is set if a worker does not answer in time.
async fn collect_held<T>(
    asked: Vec<(T, Option<oneshot::Receiver<SlotStats>>)>,
    set: impl Fn(&mut T, GuestUsage),
) -> Vec<T> {
    let until = tokio::time::Instant::now() + WORKER_ANSWERS_WITHIN;
    let mut guests = Vec::with_capacity(asked.len());
    for (mut guest, answer) in asked {
        if let Some(answer) = answer
            && let Ok(Ok(held)) = tokio::time::timeout_at(until, answer).await
        {
            set(&mut guest, GuestUsage { connections: held.connections, requests: held.waiting });
        }
        guests.push(guest);
    }
    guests
}
