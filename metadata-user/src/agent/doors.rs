//! What the agent listens on: opened when it serves, and closed for the agent that takes over.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::endpoint::{self, ControlSocket, Doors, Keeper, Request};
use super::handover::{Call, Door};
use super::health::Health;
use crate::config::Config;

/// How often and for how long the metrics address is tried while the agent before may still have it.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// The doors of an agent that serves.
pub(super) struct Opened {
    requests: mpsc::Receiver<Request>,
    door: Door,
    metrics: (Router, Option<AbortHandle>),
    _socket: ControlSocket,
}

impl Opened {
    /// Listens on the control and the takeover socket, and on the metrics address if there is one. With `succeeds`, in the
    /// place of the agent that was taken over from.
    pub(super) async fn new(
        config: &Config,
        (health, keeper): (&Arc<Health>, &Arc<Keeper>),
        side: u32,
        succeeds: bool,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<Self> {
        let Doors { metrics, control, requests } = Doors::new(Arc::clone(health), Arc::clone(keeper));
        let (socket, listener) = ControlSocket::listen(&config.run, succeeds)?;
        tasks.spawn(endpoint::serve(listener, control));
        let door = Door::new(&config.run, side, succeeds, tasks)?;
        let mut opened = Self { requests, door, metrics: (metrics, None), _socket: socket };
        opened.open_metrics(config, tasks).await?;
        Ok(opened)
    }

    /// Listens for metrics.
    pub(super) async fn open_metrics(
        &mut self,
        config: &Config,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        let Some(addr) = config.metrics else { return Ok(()) };
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

    /// Ends that, so that another agent can.
    pub(super) async fn close_metrics(&mut self) {
        if let Some(task) = self.metrics.1.take() {
            task.abort();
            while !task.is_finished() {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Lets other agents take over.
    pub(super) fn open_door(&self) {
        self.door.open();
    }
}

/// The next question, or somebody who takes over; never while there are no doors.
pub(super) async fn asked(opened: &mut Option<Opened>) -> Asked {
    let Some(opened) = opened else { return std::future::pending().await };
    tokio::select! {
        Some(request) = opened.requests.recv() => Asked::Request(request),
        call = opened.door.call() => Asked::TakeOver(call),
    }
}

/// What comes in by the doors.
pub(super) enum Asked {
    /// A question.
    Request(Request),
    /// Somebody who has everything ready to take over.
    TakeOver(Call),
}
