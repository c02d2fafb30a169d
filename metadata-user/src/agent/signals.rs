//! The signals that end the agent.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

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
}
