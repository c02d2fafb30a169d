//! Turns log records of the eBPF programs into tracing events.

use aya::Ebpf;
use aya_log::EbpfLogger;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tracing_log::LogTracer;

use super::SteerError;

/// The ring of the eBPF programs' log. All instances share it.
pub(super) struct Logs {
    /// Until the reader starts.
    waiting: Option<EbpfLogger<LogTracer>>,
    /// Once the reader runs.
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

/// How often to read the ring. The programs limit their log rate, so it holds far more than they write in this time.
/// A record that does not fit is lost; programs never wait.
const EVERY: Duration = Duration::from_millis(250);

async fn read(mut logger: EbpfLogger<LogTracer>) {
    let mut turn = interval(EVERY);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        logger.flush();
    }
}
