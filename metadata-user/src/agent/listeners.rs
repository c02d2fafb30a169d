//! The sockets the agent listens on: opened when it serves, and closed for the next agent.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};

use super::endpoint::{self, ControlRequest, ControlSocket, PageHosts, Registrar, Routers};
use super::handover::{TakeoverCall, TakeoverListener, TakeoverRequest};
use super::health::Health;
use crate::config::Config;
use crate::identity::{self, Publication};

/// Number of attempts to listen on the metrics address, which the previous agent may still use, and the pause between
/// them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// The listeners of an agent that serves.
pub(super) struct Listeners {
    requests: mpsc::Receiver<ControlRequest>,
    takeover: TakeoverListener,
    metrics: (Router, Option<AbortHandle>),
    _socket: ControlSocket,
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
        let mut listeners = Self { requests, takeover, metrics: (metrics, None), _socket: socket };
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
    tokio::select! {
        Some(request) = listeners.requests.recv() => Incoming::Request(request),
        call = listeners.takeover.call() => match call {
            TakeoverCall::Prepare(done) => Incoming::PrepareTakeover(done),
            TakeoverCall::Ready(call) => Incoming::TakeOver(call),
        },
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
