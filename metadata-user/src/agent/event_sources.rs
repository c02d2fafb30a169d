//! What the control loop waits for beside feeds and timers: the sockets that the agent listens on, signed identity
//! tokens, and changes of links.

pub(super) use crate::identity::SigningEvent;

use anyhow::Context as _;
use axum::Router;
use metadata_links::devices::{Changed, LinkWatch};
use metadata_links::netns::{NetnsId, forget_process};
use metadata_steer::SteerError;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Interval, MissedTickBehavior};
use tracing::{debug, warn};

use super::endpoint::{self, ControlRequest, ControlRequests, ControlSocket, PageHosts, Registrar, Routers};
use super::handover::{TakeoverCall, TakeoverListener, TakeoverRequest};
use super::health::Health;
use super::node::Node;
use crate::config::Config;
use crate::identity::{self, Publication, SigningClient};

/// Number of attempts to listen on the metrics address, which the previous agent may still use, and the pause between
/// them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);
/// How often the agent looks whether somebody removed its sockets.
const LOOK_FOR_SOCKETS: Duration = Duration::from_secs(2);

/// The listeners of an agent that serves.
pub(super) struct Listeners {
    requests: ControlRequests,
    takeover: TakeoverListener,
    metrics: (Router, Option<AbortHandle>),
    socket: ControlSocket,
    /// When to look whether the sockets are still there.
    look: Interval,
}

impl Listeners {
    /// Listens on the control and the takeover socket, and on the metrics address if there is one. With `succeeds`, the
    /// sockets of the previous agent are replaced.
    ///
    /// # Errors
    /// If a socket cannot be created or the metrics address cannot be bound.
    pub(super) async fn new(
        config: &Config,
        (health, registrar, publication): (&Arc<Health>, &Arc<Registrar>, Option<&Arc<Publication>>),
        side: u32,
        succeeds: bool,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<Self> {
        let page = config.page.then(|| PageHosts::new(&config.page_hosts));
        let Routers { metrics, control, requests } =
            Routers::new(Arc::clone(health), Arc::clone(registrar), page);
        let metrics = match publication {
            Some(publication) => metrics.merge(identity::routes(Arc::clone(publication))),
            None => metrics,
        };
        let (socket, listener) = ControlSocket::listen(&config.run, config.api().group.as_deref(), succeeds)?;
        tasks.spawn(endpoint::serve(listener, control));
        let takeover = TakeoverListener::new(&config.run, side, succeeds, tasks)?;
        let mut look = tokio::time::interval(LOOK_FOR_SOCKETS);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut listeners = Self { requests, takeover, metrics: (metrics, None), socket, look };
        listeners.open_metrics(config, tasks).await?;
        Ok(listeners)
    }

    /// Listens on the metrics address, unless it does so already: a takeover may fail before the address is closed.
    /// Tries for 2 s while the address is in use.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub(super) async fn open_metrics(
        &mut self,
        config: &Config,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        let Some(addr) = config.metrics.filter(|_| self.metrics.1.is_none()) else { return Ok(()) };
        let mut attempts = ATTEMPTS;
        let listener = loop {
            match TcpListener::bind(addr).await {
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && attempts > 0 => {
                    attempts -= 1;
                    tokio::time::sleep(PAUSE).await;
                }
                bound => break bound.with_context(|| format!("listening for metrics on {addr}"))?,
            }
        };
        self.metrics.1 = Some(tasks.spawn(endpoint::serve(listener, self.metrics.0.clone())));
        Ok(())
    }

    /// Closes the metrics address, so that the next agent can listen there.
    pub(super) async fn close_metrics(&mut self) {
        if let Some(task) = self.metrics.1.take() {
            task.abort();
            while !task.is_finished() {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Allows the next agent to take over.
    pub(super) fn allow_takeover(&self) {
        self.takeover.allow();
    }
}

/// Waits for the next request or takeover; for ever while there are no listeners.
pub(super) async fn next(listeners: &mut Option<Listeners>) -> Incoming {
    let Some(listeners) = listeners else { return std::future::pending().await };
    loop {
        tokio::select! {
            Some(request) = listeners.requests.recv() => return Incoming::Request(request),
            call = listeners.takeover.call() => return match call {
                TakeoverCall::Prepare(done) => Incoming::PrepareTakeover(done),
                TakeoverCall::Ready(call) => Incoming::TakeOver(call),
            },
            _ = listeners.look.tick() => {
                listeners.socket.restore();
                listeners.takeover.restore();
            }
        }
    }
}

/// What arrives at the listeners.
pub(super) enum Incoming {
    /// A request to the control loop.
    Request(ControlRequest),
    /// An agent that is about to look for pins.
    PrepareTakeover(oneshot::Sender<()>),
    /// An agent that is ready to take over.
    TakeOver(TakeoverRequest),
}

/// The ends of orders, and the public keys.
pub(super) struct TokenEvents {
    events: UnboundedReceiver<SigningEvent>,
    publication: Arc<Publication>,
}

impl TokenEvents {
    /// Starts to pass orders to the signer.
    pub(super) fn start(
        signing: SigningClient,
        node: &mut Node,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Self {
        let publication = Arc::clone(signing.publication());
        node.reporter.set_identity(signing.issuer().clone(), Arc::clone(&publication));
        // The issuer bounds the number of orders, and so of events.
        let (sender, events) = unbounded_channel();
        tasks.spawn(signing.run(sender));
        Self { events, publication }
    }

    pub(super) fn publication(&self) -> &Arc<Publication> {
        &self.publication
    }
}

/// Waits for the end of an order; for ever on a node that issues no tokens.
pub(super) async fn next_token(identity: &mut Option<TokenEvents>) -> SigningEvent {
    let Some(identity) = identity else { return std::future::pending().await };
    match identity.events.recv().await {
        Some(event) => event,
        None => std::future::pending().await,
    }
}

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
