//! Notifications to the service manager (sd_notify(3)). Without a service manager they do nothing.

use std::time::Duration;

use sd_notify::NotifyState;
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
