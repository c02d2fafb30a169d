//! The next agent's part of a takeover.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;
use tracing::{info, warn};

use super::listener::connect;
use super::wire::{NextAgentMessage, OLDEST, PreviousAgentMessage, REMEDY, VERSION, Wire, WireError};
use super::{DRAINING_WITHIN, HELLO_WITHIN, TAKE_WITHIN};
use crate::agent::node::Node;
use crate::service::HandedRequest;
use metadata_datapath::stack::DRAIN_LIMIT;

/// How long to wait for the previous agent after the limit of its drain.
const GRACE: Duration = Duration::from_secs(10);

/// Number of attempts to take the ports.
const ATTEMPTS: u32 = 5;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// An event of the previous agent.
#[derive(Debug)]
pub(crate) enum PreviousEvent {
    /// A guest of the previous agent has a question that only this agent can answer.
    Question(HandedRequest),
    /// The previous agent has ended after its connections. Late segments of these connections may still arrive.
    Done,
    /// The previous agent ended before its connections did, or does not end in time.
    Died,
}

/// The connection to the previous agent.
#[derive(Debug)]
pub(crate) struct Takeover {
    wire: Wire,
    side: u32,
    /// When the previous agent must have ended. Set once the ports are taken.
    gone_by: Option<Instant>,
}

impl Takeover {
    /// Asks the agent that runs with this run directory to hand over. Returns `None` if no agent runs.
    ///
    /// # Errors
    /// If that agent refuses, or the connection fails.
    pub(crate) async fn begin(run: &Path) -> anyhow::Result<Option<Self>> {
        let asking = || format!("asking the agent that runs with {} to hand over", run.display());
        let Some(stream) = connect(run).await.with_context(asking)? else { return Ok(None) };
        let mut wire = Wire::new(stream);
        let release = env!("CARGO_PKG_VERSION").to_owned();
        wire.send(&NextAgentMessage::Hello { oldest: OLDEST, newest: VERSION, release })
            .await
            .with_context(asking)?;
        loop {
            match wire.recv_within(HELLO_WITHIN).await.with_context(asking)? {
                PreviousAgentMessage::Welcome {
                    version: version @ OLDEST..=VERSION,
                    side: side @ 0..=1,
                    release,
                } => {
                    info!(release, "taking over from the agent that runs");
                    wire.set_version(version);
                    return Ok(Some(Self { wire, side, gone_by: None }));
                }
                PreviousAgentMessage::Welcome { version, side, .. } => anyhow::bail!(
                    "expected version {OLDEST} to {VERSION} of the takeover protocol and side 0 or 1, found version \
                     {version} and side {side}: {REMEDY}"
                ),
                PreviousAgentMessage::No { reason } => {
                    anyhow::bail!("the agent that runs does not hand over: {reason}")
                }
                PreviousAgentMessage::Unknown => {}
                message => {
                    anyhow::bail!(
                        "expected a welcome from the agent that runs, received {message:?}: {REMEDY}"
                    )
                }
            }
        }
    }

    /// The free side of hubs, 0 or 1.
    pub(crate) fn side(&self) -> u32 {
        1 - self.side
    }

    /// Takes the ports. Call it once every record is rendered.
    ///
    /// # Errors
    /// If the previous agent continues to serve, or the kernel refuses.
    pub(crate) async fn take(&mut self, node: &mut Node) -> anyhow::Result<()> {
        let alive = match self.request_drain().await {
            Ok(()) => true,
            Err(Refused::Died) => false,
            Err(Refused::Not(reason)) => anyhow::bail!("the agent that runs continues: {reason}"),
        };
        node.ports.workers().spare_unknown(true)?;
        node.reload_state();
        if !(alive && self.request_promise().await?) {
            warn!("the previous agent has died: taking its ports without it");
        }
        let mut attempts = ATTEMPTS;
        while let Err(error) = node.take_over() {
            attempts -= 1;
            anyhow::ensure!(attempts > 0, "taking the ports: {error}; they stay closed until the next start");
            warn!("taking the ports: {error}; trying again");
            tokio::time::sleep(PAUSE).await;
        }
        self.gone_by = Some(Instant::now() + DRAIN_LIMIT + GRACE);
        // If this fails, the previous agent has ended.
        let _gone = self.wire.send(&NextAgentMessage::Serving).await;
        Ok(())
    }

    /// Makes the previous agent claim its connections and save what guests wrote.
    async fn request_drain(&mut self) -> Result<(), Refused> {
        self.wire.send(&NextAgentMessage::Drain).await?;
        loop {
            match self.wire.recv_within(DRAINING_WITHIN + HELLO_WITHIN).await? {
                PreviousAgentMessage::Draining { connections } => {
                    info!(connections, "the previous agent serves its connections until they end");
                    return Ok(());
                }
                PreviousAgentMessage::No { reason } => return Err(Refused::Not(reason)),
                PreviousAgentMessage::Unknown => {}
                message => return Err(Refused::Not(format!("it sent {message:?}"))),
            }
        }
    }

    /// Makes the previous agent promise not to continue. Returns false if it has died.
    async fn request_promise(&mut self) -> anyhow::Result<bool> {
        let promise = async {
            self.wire.send(&NextAgentMessage::Take).await?;
            loop {
                match self.wire.recv_within(TAKE_WITHIN).await? {
                    PreviousAgentMessage::Yours => return Ok(()),
                    PreviousAgentMessage::No { reason } => return Err(Refused::Not(reason)),
                    PreviousAgentMessage::Unknown => {}
                    message => return Err(Refused::Not(format!("it sent {message:?}"))),
                }
            }
        };
        match promise.await {
            Ok(()) => Ok(true),
            Err(Refused::Died) => Ok(false),
            Err(Refused::Not(reason)) => anyhow::bail!("the agent that runs continues: {reason}"),
        }
    }

    /// Waits for the next event of the previous agent.
    pub(crate) async fn recv(&mut self) -> PreviousEvent {
        loop {
            let by = self.gone_by.unwrap_or_else(|| Instant::now() + GRACE);
            match tokio::time::timeout_at(by, self.wire.recv()).await {
                Ok(Ok(PreviousAgentMessage::Ask(question))) => {
                    if let Some(question) = question.question() {
                        return PreviousEvent::Question(question);
                    }
                }
                Ok(Ok(PreviousAgentMessage::Done { cut })) => {
                    info!(cut, "the previous agent has ended");
                    return PreviousEvent::Done;
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    warn!("the previous agent ended before its connections did: {error}");
                    return PreviousEvent::Died;
                }
                Err(_) => {
                    warn!("the previous agent does not end: continuing without it");
                    return PreviousEvent::Died;
                }
            }
        }
    }

    /// Answers a question of the previous agent's guest.
    pub(crate) async fn answer(&mut self, node: &mut Node, question: &HandedRequest) {
        let response = node.ports.answer(question);
        if let Err(error) = self.wire.send_answer(question, response.as_ref()).await {
            warn!("a guest of the previous agent is not answered: {error}");
        }
    }
}

/// Why the previous agent does not hand over.
enum Refused {
    /// It has ended.
    Died,
    /// It continues, for this reason.
    Not(String),
}

impl From<WireError> for Refused {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Gone => Self::Died,
            error => Self::Not(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests;
