//! The control side: joins feed, store and steer.
//!
//! Every event (a record, a link that came or went, a timer) says which ports it touches, and [`Node`] brings
//! those from the present state to the one [`Plan`] wants, a few at a time. There is no other way a port or a
//! response changes.

mod attaching;
mod doors;
mod endpoint;
mod feeds;
mod handover;
mod health;
mod keeping;
mod leave;
mod linger;
mod node;
mod notify;
mod plan;
mod reload;
mod shelf;
mod slots;
mod start;
mod state;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, info, warn};

use doors::{Asked, Opened};
use endpoint::Keeper;
pub use endpoint::{
    ANSWER_WITHIN, Ask, BODY_MAX, CONNECTIONS, Checked, ControlSocket, HEAD_MAX, HEAD_WITHIN, LIFE, Lasting,
    Peer, QUEUE, Request, SocketError, WAIT, WAIT_MOST, WAITS,
};
use feeds::Feeds;
pub use health::{Health, Trouble};
use keeping::Keeping;
pub use node::{Clash, Node, Tagged, TraceRefusal, TraceTarget, Traced};
pub use plan::{Conflict, Plan, Records};
pub use reload::Origin;
pub use slots::{IdentityName, SLOT_REST, Slots, SlotsExhausted};
pub use start::{Entry, serve};
pub use state::{Errands, State};

use crate::config::Config;
use handover::{End, Giver, Succession, Taking, hand_over};
use leave::Left;
use metadata_content::source::Source;
use metadata_control::status::{Guest, Held};
use metadata_datapath::stack::SlotStats;
use metadata_feed::FeedEvent;
use metadata_feed::registry::RecordId;
use metadata_links::netns::NetnsId;
use metadata_links::processes::forget as forget_process;
use metadata_links::watch::Changed;
use metadata_links::watch::LinkWatch;
use metadata_serve::audit::COLLECT_EVERY;
use metadata_steer::SteerError;

/// Changes of links waiting for the agent, by namespace; a watch that is ahead of it waits.
const LINK_QUEUE: usize = 64;

/// Longest time ports are looked at before signals, metrics and the other tasks have their turn.
const PASS: Duration = Duration::from_millis(5);

/// How often to try again what the kernel refused or has not got yet, should no link event tell.
const RETRY: Duration = Duration::from_secs(2);

/// How often ports are looked at, a few at a time, for guests that have booted or boot again.
const LOOK: Duration = Duration::from_secs(2);

/// The pause of a timer that nobody wants.
const NEVER: Duration = Duration::from_secs(86_400);

/// How often keys and mailboxes are looked after.
const TEND: Duration = Duration::from_secs(60);

/// Reads the configuration again, and puts in force what can be.
fn reload(
    config: &mut Config,
    origin: &Origin,
    node: &mut Node,
    feeds: &mut Feeds,
    tasks: &mut JoinSet<anyhow::Result<()>>,
) {
    notify::reloading();
    let changes = reload::read(origin, config);
    node.count_reload(changes.is_some());
    node.reopen_audit();
    if let Some(changes) = changes {
        *config = changes.now;
        (origin.applied)(config);
        node.configure(config);
        node.limit_registered(config.record_limits(), config.api().instances);
        feeds.restart(config, node, tasks);
    }
    notify::ready();
}

/// Longest a worker may take to say what it holds for a guest: it comes round every second.
const WORKER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// What an agent starts with.
struct Started {
    node: Node,
    giver: Giver,
    errands: Errands,
    /// The agent whose ports are to be taken over.
    taking: Option<Taking>,
}

/// Why an agent has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// By a signal.
    Stopped,
    /// Another has its ports.
    TakenOver,
}

/// Runs until SIGTERM or SIGINT, until another agent has taken over, or until the worker has died.
///
/// # Errors
/// The metrics address or the control socket cannot be had, the worker stopped, the hub was taken away, or there is
/// no taking over.
async fn run(
    mut config: Config,
    origin: Origin,
    started: Started,
    (mut stop, mut hup): (Stop, Signal),
) -> anyhow::Result<Ended> {
    let Started { mut node, mut giver, errands, mut taking } = started;
    let mut tasks = JoinSet::new();
    let keeper = Keeper::new(&config);
    node.keeps(keeper.shelf(), config.record_limits(), config.api().instances);
    let mut keeping = Keeping::new(&config);
    for (RecordId { source, key }, record) in keeping.stand_in(&config) {
        node.hear(source, FeedEvent::Upsert { key: key.as_ref().into(), record: record.into() });
    }
    node.served_from_snapshot(keeping.stands_in());
    let mut feeds = Feeds::start(&config, keeping.sources(), &mut node, &mut tasks);
    let mut synced = feeds.are_settled();
    let health = Health::new(node.heartbeats());
    health.adopting(node.has_left());
    let (mut errands, mut opened) = (Some(errands), None);
    let mut succession = Succession::default();
    if taking.is_none() {
        errands.take().into_iter().for_each(|errands| errands.start(&mut tasks));
        let doors = Opened::new(&config, (&health, &keeper), node.side(), false, &mut tasks).await?;
        doors.open_door();
        opened = Some(doors);
    }
    if synced {
        health.records_read();
    }
    let (link_tx, mut links) = mpsc::channel(LINK_QUEUE);
    let mut watched = Watched { links: link_tx, namespaces: HashMap::new(), named: BTreeSet::new() };
    let mut retry = tokio::time::interval(RETRY);
    retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut tend = tokio::time::interval(TEND);
    let mut watchdog = tokio::time::interval(notify::watchdog().unwrap_or(NEVER));
    let audits = config.audit.to.is_some();
    let mut collect = tokio::time::interval(if audits { COLLECT_EVERY } else { NEVER });
    collect.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut serving = false;

    loop {
        tokio::select! {
            told = feeds.recv() => {
                take(&mut node, told, &mut feeds, &mut keeping);
                if !synced && feeds.are_settled() {
                    synced = true;
                    health.records_read();
                }
                // Watched before looked at: what changes meanwhile is told.
                watched.follow(&mut node, &mut tasks);
            }
            Some((netns, changed)) = links.recv() => node.touch(netns.as_deref(), &changed),
            asked = doors::asked(&mut opened) => match (asked, &mut opened) {
                (Asked::TakeOver(call), Some(doors)) => {
                    let _turn = call.turn;
                    let close = async || doors.close_metrics().await;
                    match hand_over(&mut node, &mut giver, call.wire, &mut stop, close).await {
                        End::Left => { node.leave(); return Ok(Ended::TakenOver); }
                        End::Stopped(name) => {
                            stopped(name, &config, &node, &health, &mut opened, &mut stop).await;
                            return Ok(Ended::Stopped);
                        }
                        End::Stays => doors.open_metrics(&config, &mut tasks).await?,
                    }
                }
                (Asked::Request(Request::Instances(ask)), _) => {
                    if !ask.answer(&mut node) { continue; }
                    watched.follow(&mut node, &mut tasks);
                }
                (Asked::Request(request), _) => { answer(&node, &health, request); continue; }
                (_, None) => {}
            },
            heard = succession.hear() => {
                if succession.act(&mut node, heard).await { opened.iter().for_each(Opened::open_door); }
                continue;
            }
            _ = retry.tick() => {
                node.check_path()?;
                node.retry();
                if synced { keeping.keep(|| node.records()); }
                watched.follow(&mut node, &mut tasks);
                if succession.finish(&mut node) { opened.iter().for_each(Opened::open_door); }
            }
            now = look.tick() => { if taking.is_none() { node.follow_guests(now.into_std()); } continue; }
            () = tokio::task::yield_now(), if synced && node.has_work() => { node.proceed(PASS); }
            _ = tend.tick() => { if synced && taking.is_none() { node.tend(); } continue; }
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => { ended_well(ended)?; continue; }
            Some(()) = hup.recv() => {
                reload(&mut config, &origin, &mut node, &mut feeds, &mut tasks);
                keeper.configure(&config);
            }
            _ = collect.tick() => { node.audit(); continue; }
            _ = watchdog.tick() => { notify::alive(); continue; }
            name = stop.recv() => {
                stopped(name, &config, &node, &health, &mut opened, &mut stop).await;
                if synced { keeping.keep_now(|| node.records()).await; }
                return Ok(Ended::Stopped);
            }
        }
        node.tell_waiting();
        if !synced || node.has_work() {
            continue;
        }
        if let Some(mut other) = taking.take() {
            other.take(&mut node).await?;
            errands.take().into_iter().for_each(|errands| errands.start(&mut tasks));
            opened = Some(Opened::new(&config, (&health, &keeper), node.side(), true, &mut tasks).await?);
            succession.taking = Some(other);
            continue;
        }
        // A snapshot may be old: what it does not name may have a record all the same.
        if !keeping.stands_in() {
            node.give_up_left();
        }
        if !serving && !node.has_work() {
            serving = true;
            health.ports_settled();
            health.adopting(false);
            notify::ready();
            info!(ports = node.port_count(), identities = node.identity_count(), "serving");
        }
    }
}

/// Brings what guests are at to an end, and saves what they wrote; answers questions meanwhile.
async fn stopped(
    name: &str,
    config: &Config,
    node: &Node,
    health: &Health,
    opened: &mut Option<Opened>,
    stop: &mut Stop,
) {
    info!("{name}: stopping");
    notify::stopping();
    health.draining();
    tokio::select! {
        () = leave(config, node, stop) => {}
        () = answer_all(node, health, opened) => {}
    }
    node.save();
    node.audit();
}

async fn leave(config: &Config, node: &Node, stop: &mut Stop) {
    let limit = Duration::from_secs(config.drain_seconds.into());
    if let Left::Cut(left @ 1..) = leave::cleanly(node, limit, stop.recv()).await {
        warn!(connections = left, "cut off; `drain_seconds` says how long guests are waited for");
    }
}

/// Answers questions and keeps the audit log while the agent leaves, in which nobody takes over.
async fn answer_all(node: &Node, health: &Health, opened: &mut Option<Opened>) {
    let mut collect = tokio::time::interval(COLLECT_EVERY);
    loop {
        tokio::select! {
            asked = doors::asked(opened) => match asked {
                Asked::Request(request) => answer(node, health, request),
                Asked::TakeOver(_) => {}
            },
            _ = collect.tick() => node.audit(),
        }
    }
}

/// Answers a question; whoever asked may have gone away.
fn answer(node: &Node, health: &Health, request: Request) {
    match request {
        Request::Metrics(reply) => _ = reply.send(node.metrics()),
        Request::Status(about, reply) => _ = reply.send(Box::new(node.status(about, health))),
        Request::Trace(target, reply) => _ = reply.send(node.trace(&target).map(Box::new)),
        // The agent leaves: what is registered now is for the next one.
        Request::Instances(_) => {}
        Request::Guests(name, reply) => {
            let asked = node.guests(&name);
            // Workers answer after their next turn, and the loop does not wait for them.
            tokio::spawn(async move { reply.send(collect(asked).await) });
        }
    }
}

/// The guests with what their workers say they hold; one that is silent says nothing.
async fn collect(asked: Vec<(Guest, Option<oneshot::Receiver<SlotStats>>)>) -> Vec<Guest> {
    let until = Instant::now() + WORKER_ANSWERS_WITHIN;
    let mut guests = Vec::with_capacity(asked.len());
    for (mut guest, answer) in asked {
        if let Some(answer) = answer
            && let Ok(Ok(held)) = tokio::time::timeout_at(until, answer).await
        {
            guest.held = Some(Held { connections: held.connections, requests: held.waiting });
        }
        guests.push(guest);
    }
    guests
}

/// Applies an event and those of its source that wait behind it.
fn take(node: &mut Node, (source, first): (Source, FeedEvent), feeds: &mut Feeds, keeping: &mut Keeping) {
    let mut settled = false;
    for event in feeds.batch(source, first) {
        keeping.hear(&event);
        settled |= matches!(event, FeedEvent::Synced);
        node.hear(source, event);
    }
    if settled {
        feeds.settle(source);
        keeping.settled(source);
        node.served_from_snapshot(keeping.stands_in());
    }
    node.tell_conflicts();
}

/// A feed or an endpoint that fails takes the agent with it, to be restarted: half an agent looks alive.
fn ended_well(ended: Result<anyhow::Result<()>, JoinError>) -> anyhow::Result<()> {
    match ended {
        Ok(result) => result,
        Err(error) if error.is_cancelled() => Ok(()),
        Err(error) => Err(anyhow::Error::new(error).context("a control task died")),
    }
}

/// The namespaces whose links are being watched. A watch holds its namespace alive, so one whose name is
/// gone, or means another namespace now, must be let go.
struct Watched {
    links: mpsc::Sender<(Option<String>, Changed)>,
    namespaces: HashMap<Option<String>, (NetnsId, AbortHandle)>,
    /// Those that were wanted last.
    named: BTreeSet<Option<String>>,
}

impl Watched {
    /// Starts a watch for each namespace that has none, ends those nobody needs or that were replaced. One that
    /// was started tells nothing of what changed before, so the ports there are to be looked at.
    fn follow(&mut self, node: &mut Node, tasks: &mut JoinSet<anyhow::Result<()>>) {
        let wanted = node.namespaces();
        // Only what nobody names any more may mean another process when it is named again.
        self.named.difference(&wanted).flatten().for_each(|name| forget_process(name));
        self.named.clone_from(&wanted);
        self.namespaces.retain(|netns, (id, task)| {
            let keep = !task.is_finished()
                && wanted.contains(netns)
                && NetnsId::of(netns.as_deref()).is_ok_and(|now| now == *id);
            if !keep {
                task.abort();
            }
            keep
        });
        for netns in wanted {
            if self.namespaces.contains_key(&netns) {
                continue;
            }
            let open =
                || Ok::<_, SteerError>((NetnsId::of(netns.as_deref())?, LinkWatch::open(netns.as_deref())?));
            match open() {
                Ok((id, watch)) => {
                    node.touch(netns.as_deref(), &Changed::Unknown);
                    let task = tasks.spawn(forward(watch, netns.clone(), self.links.clone()));
                    self.namespaces.insert(netns, (id, task));
                }
                // The namespace is not there yet; the timer asks again.
                Err(error) => debug!(?netns, "links are not watched yet: {error}"),
            }
        }
    }
}

/// Passes changes on; while nobody takes them the kernel keeps them, and says so when it lost some.
async fn forward(
    mut watch: LinkWatch,
    netns: Option<String>,
    links: mpsc::Sender<(Option<String>, Changed)>,
) -> anyhow::Result<()> {
    loop {
        match watch.changed().await {
            Ok(changed) => {
                if links.send((netns.clone(), changed)).await.is_err() {
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

/// The signals that end the agent.
struct Stop {
    term: Signal,
    int: Signal,
}

impl Stop {
    fn new() -> io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}
