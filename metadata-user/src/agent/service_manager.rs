//! The service manager: notifications to it (sd_notify(3)), which do nothing without one, and the signals by which it
//! ends the agent.

use sd_notify::NotifyState;
use std::io;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::debug;

/// Notifies that guests are served or that a reload has ended.
pub(super) fn ready() {
    send(&[NotifyState::Ready]);
}

/// Notifies that a reload begins.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => send(&[NotifyState::Reloading, now]),
        Err(error) => debug!("the service manager is not notified of the reload: {error}"),
    }
}

/// Notifies that the agent is ending.
pub(super) fn stopping() {
    send(&[NotifyState::Stopping]);
}

/// Notifies the watchdog that the control loop is alive.
pub(super) fn alive() {
    send(&[NotifyState::Watchdog]);
}

/// How often to call [`alive`]: twice in the watchdog's time. `None` without a watchdog.
pub(super) fn watchdog() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|pause| !pause.is_zero())
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        debug!("the service manager is not notified: {error}");
    }
}

/// Catches SIGTERM and SIGINT from its creation on.
pub(super) struct Stop {
    term: Signal,
    int: Signal,
}

impl Stop {
    /// Catches the signals.
    ///
    /// # Errors
    /// If the runtime cannot install a handler.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal and returns its name.
    pub(super) async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }

    /// Returns the name of a signal that has already come, if there is one.
    pub(super) async fn pending(&mut self) -> Option<&'static str> {
        // The runtime learns of a signal only when it waits for events, which it does before it goes on here.
        tokio::task::yield_now().await;
        tokio::select! {
            biased;
            name = self.recv() => Some(name),
            () = std::future::ready(()) => None,
        }
    }
}
