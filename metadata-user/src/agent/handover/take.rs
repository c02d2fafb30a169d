//! The agent that takes over.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;
use tracing::{info, warn};

use super::listener::knock;
use super::wire::{Giver, Taker, Told, VERSION, Wire, WireError};
use super::{DRAINING_WITHIN, HELLO_WITHIN, TAKE_WITHIN};
use crate::agent::node::Node;
use metadata_datapath::stack::DRAIN_LIMIT;
use metadata_serve::Question;

/// How long after the other agent should have gone it is waited for.
const GRACE: Duration = Duration::from_secs(10);

/// How often taking the ports is tried.
const ATTEMPTS: u32 = 5;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// What is heard of the agent that was taken over from.
#[derive(Debug)]
pub(in crate::agent) enum Heard {
    /// One of its guests asks something.
    Question(Question),
    /// It has served its guests and ended. Late words of theirs may still come.
    Done,
    /// It has ended in the middle.
    Died,
}

/// A conversation with the agent that runs.
#[derive(Debug)]
pub(in crate::agent) struct Taking {
    wire: Wire,
    side: u32,
    /// When the other agent must be gone, once the ports are ours.
    gone_by: Option<Instant>,
}

impl Taking {
    /// Asks the agent that runs with this run directory; `None` when there is none.
    ///
    /// # Errors
    /// It does not hand over, or cannot be talked to.
    pub(in crate::agent) async fn begin(run: &Path) -> anyhow::Result<Option<Self>> {
        let asking = || format!("asking the agent that runs with {} to hand over", run.display());
        let Some(stream) = knock(run).await.with_context(asking)? else { return Ok(None) };
        let mut wire = Wire::new(stream);
        let release = env!("CARGO_PKG_VERSION").to_owned();
        wire.say(&Taker::Hello { oldest: VERSION, newest: VERSION, release }).await.with_context(asking)?;
        loop {
            match wire.hear_within(HELLO_WITHIN).await.with_context(asking)? {
                Giver::Welcome { version: VERSION, side: side @ 0..=1, release } => {
                    info!(release, "taking over from the agent that runs");
                    return Ok(Some(Self { wire, side, gone_by: None }));
                }
                Giver::No { reason } => anyhow::bail!("the agent that runs does not hand over: {reason}"),
                Giver::Unknown => {}
                word => {
                    anyhow::bail!("expected a welcome of the agent that runs, heard {word:?}: stop it first")
                }
            }
        }
    }

    /// The side that is free.
    pub(in crate::agent) fn side(&self) -> u32 {
        1 - self.side
    }

    /// Takes the ports: everything is ready.
    ///
    /// # Errors
    /// The other agent goes on, or the kernel refuses.
    pub(in crate::agent) async fn take(&mut self, node: &mut Node) -> anyhow::Result<()> {
        let alive = match self.ask().await {
            Ok(()) => true,
            Err(Refused::Died) => false,
            Err(Refused::Not(reason)) => anyhow::bail!("the agent that runs goes on: {reason}"),
        };
        node.ports.workers().spare_unknown(true)?;
        node.reload_state();
        if !(alive && self.promised().await?) {
            warn!("the agent that ran has died: taking its ports without it");
        }
        let mut attempts = ATTEMPTS;
        while let Err(error) = node.take_over() {
            attempts -= 1;
            anyhow::ensure!(attempts > 0, "taking the ports: {error}; they stay closed until the next start");
            warn!("taking the ports: {error}; trying again");
            tokio::time::sleep(PAUSE).await;
        }
        self.gone_by = Some(Instant::now() + DRAIN_LIMIT + GRACE);
        // If it does not hear this, it does not need to.
        let _gone = self.wire.say(&Taker::Serving).await;
        Ok(())
    }

    /// Has the other agent claim its connections and save what guests wrote.
    async fn ask(&mut self) -> Result<(), Refused> {
        self.wire.say(&Taker::Drain).await?;
        loop {
            match self.wire.hear_within(DRAINING_WITHIN + HELLO_WITHIN).await? {
                Giver::Draining { connections } => {
                    info!(connections, "the agent that ran serves what is under way to its end");
                    return Ok(());
                }
                Giver::No { reason } => return Err(Refused::Not(reason)),
                Giver::Unknown => {}
                word => return Err(Refused::Not(format!("it said {word:?}"))),
            }
        }
    }

    /// Has it promise not to go on. False when it has died.
    async fn promised(&mut self) -> anyhow::Result<bool> {
        let promise = async {
            self.wire.say(&Taker::Take).await?;
            loop {
                match self.wire.hear_within(TAKE_WITHIN).await? {
                    Giver::Yours => return Ok(()),
                    Giver::No { reason } => return Err(Refused::Not(reason)),
                    Giver::Unknown => {}
                    word => return Err(Refused::Not(format!("it said {word:?}"))),
                }
            }
        };
        match promise.await {
            Ok(()) => Ok(true),
            Err(Refused::Died) => Ok(false),
            Err(Refused::Not(reason)) => anyhow::bail!("the agent that runs goes on: {reason}"),
        }
    }

    /// What is heard next.
    pub(in crate::agent) async fn recv(&mut self) -> Heard {
        loop {
            let by = self.gone_by.unwrap_or_else(|| Instant::now() + GRACE);
            match tokio::time::timeout_at(by, self.wire.hear()).await {
                Ok(Ok(Giver::Ask(asked))) => {
                    if let Some(question) = asked.question() {
                        return Heard::Question(question);
                    }
                }
                Ok(Ok(Giver::Done { cut })) => {
                    info!(cut, "the agent before has left");
                    return Heard::Done;
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    warn!("the agent before ended before its guests were served: {error}");
                    return Heard::Died;
                }
                Err(_) => {
                    warn!("the agent before does not end: going on without it");
                    return Heard::Died;
                }
            }
        }
    }

    /// Answers a question.
    pub(in crate::agent) async fn answer(&mut self, node: &mut Node, question: &Question) {
        let response = node.ports.answer(question);
        let told = Told::new(question, response.as_ref());
        if let Err(error) = self.wire.say(&Taker::Answer(told)).await {
            warn!("a guest of the agent before is not answered: {error}");
        }
    }
}

/// Why there is no handover.
enum Refused {
    /// The other agent is not there any more.
    Died,
    /// It goes on, and why.
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
