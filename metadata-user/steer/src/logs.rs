//! What the kernel side logs, as tracing events.

use aya::Ebpf;
use aya_log::EbpfLogger;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tracing_log::LogTracer;

use super::SteerError;

/// The ring of the kernel side's log; one for all instances, since they share the map.
pub(super) struct Logs {
    /// Until it is read.
    waiting: Option<EbpfLogger<LogTracer>>,
    /// Once it is read.
    task: Option<JoinHandle<()>>,
}

impl Logs {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, SteerError> {
        let logger = EbpfLogger::init_with_logger(ebpf, LogTracer::new())
            .map_err(|source| SteerError::load("object's log", source))?;
        Ok(Self { waiting: Some(logger), task: None })
    }

    /// Starts the reading task on the current tokio runtime, once.
    pub(super) fn forward(&mut self) {
        if let Some(logger) = self.waiting.take() {
            self.task = Some(tokio::spawn(read(logger)));
        }
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// How often the ring is read. It holds far more than the kernel side, which thins its lines out, writes
/// meanwhile; what would not fit is lost there, never waited for.
const EVERY: Duration = Duration::from_millis(250);

async fn read(mut logger: EbpfLogger<LogTracer>) {
    let mut turn = interval(EVERY);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        logger.flush();
    }
}
