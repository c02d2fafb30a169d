//! What the service manager is told (sd_notify(3)); nothing where there is none.

use std::time::Duration;

use sd_notify::NotifyState;
use tracing::debug;

/// Guests are served, or are again after a reload.
pub(super) fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The configuration is being read again.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => debug!("the service manager does not hear of the reload: {error}"),
    }
}

/// The agent ends.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// The control side is alive.
pub(super) fn alive() {
    tell(&[NotifyState::Watchdog]);
}

/// How often to say so, if the service manager wants to hear: twice in the time it waits.
pub(super) fn watchdog() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|pause| !pause.is_zero())
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        debug!("the service manager does not hear us: {error}");
    }
}
