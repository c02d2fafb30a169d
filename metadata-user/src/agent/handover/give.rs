//! The previous agent's part of a takeover.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::wire::{NextAgentMessage, PreviousAgentMessage, Wire, WireError, WireRequest};
use super::{DRAINING_WITHIN, SERVING_WITHIN, TAKE_WITHIN};
use crate::agent::node::Node;
use crate::agent::service_manager;
use crate::agent::service_manager::Stop;
use crate::service::audit::COLLECT_EVERY;
use crate::service::{AnswerStage, HandedRequest, HandoverAnswers};
use metadata_datapath::stack::DRAIN_LIMIT;

/// How often to check the progress of workers.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// How long frames steered to this agent may still arrive after the next agent has taken the ports.
const LAST_FRAMES: Duration = Duration::from_millis(100);

/// How long after [`DRAIN_LIMIT`] to wait for the workers.
const GRACE: Duration = Duration::from_secs(1);

/// The result of a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoverResult {
    /// The handover failed, and this agent continues as before.
    Stays,
    /// The handover failed because a signal stops this agent.
    Stopped(&'static str),
    /// The next agent has the ports, and all connections here have ended or were cut off.
    TakenOver,
}

/// The state of a handover outside the node.
pub(crate) struct HandoverState {
    pub(crate) handing: std::sync::Arc<HandoverAnswers>,
    pub(crate) questions: mpsc::Receiver<HandedRequest>,
}

/// Hands over to the agent at the other end, which is ready. Calls `close` before that agent listens on the addresses
/// of this one.
pub(crate) async fn hand_over(
    node: &mut Node,
    handover: &mut HandoverState,
    mut wire: Wire,
    stop: &mut Stop,
    close: impl AsyncFnOnce(),
) -> HandoverResult {
    // This comes first, so that no answer changes state here after workers have claimed their connections.
    handover.handing.set(AnswerStage::Frozen);
    let begun = Instant::now();
    let outcome = tokio::select! {
        outcome = promise(node, &mut wire, close) => outcome.map(|()| None),
        name = stop.recv() => Ok(Some(name)),
    };
    match outcome {
        Ok(None) => {}
        Ok(Some(name)) => {
            stay(node, handover, &mut wire, &format!("it received {name}")).await;
            return HandoverResult::Stopped(name);
        }
        Err(error) => {
            warn!("not handed over: {error:#}");
            stay(node, handover, &mut wire, &format!("{error:#}")).await;
            return HandoverResult::Stays;
        }
    }
    serve_out(node, handover, &mut wire, stop, begun + DRAIN_LIMIT + GRACE).await;
    HandoverResult::TakenOver
}

/// The steps before the point of no return.
async fn promise(node: &Node, wire: &mut Wire, close: impl AsyncFnOnce()) -> anyhow::Result<()> {
    node.ports.drain_and_claim(DRAIN_LIMIT)?;
    let end = Instant::now() + DRAINING_WITHIN;
    let connections = loop {
        if let Some(remaining) = node.ports.workers().remaining() {
            break remaining;
        }
        anyhow::ensure!(
            Instant::now() < end,
            "workers did not claim their connections within {DRAINING_WITHIN:?}"
        );
        tokio::time::sleep(CHECK_EVERY).await;
    };
    // No write is under way: each worker has had a turn since answers were frozen. The next agent reads what guests
    // wrote from the disk, so it would lose what is not there.
    if let Some(unsaved) = node.catalogue.save() {
        anyhow::bail!("{unsaved}; then take over again, or stop this agent to give up what is not on disk");
    }
    close().await;
    info!(connections, "another agent takes over: serving the connections here until they end");
    wire.send(&PreviousAgentMessage::Draining { connections }).await?;
    loop {
        match wire.recv_within(TAKE_WITHIN).await? {
            NextAgentMessage::Take => break,
            NextAgentMessage::Unknown => {}
            message => anyhow::bail!("expected the next agent to take the ports, received {message:?}"),
        }
    }
    // The next agent does not take the ports before it has received this.
    wire.send(&PreviousAgentMessage::Yours).await?;
    Ok(())
}

/// Ends the handover; the agent continues as before.
async fn stay(node: &mut Node, handover: &HandoverState, wire: &mut Wire, reason: &str) {
    let _gone = wire.send(&PreviousAgentMessage::No { reason: reason.into() }).await;
    if let Err(error) = node.ports.resume() {
        warn!("a worker closes connections after their answer: {error}");
    }
    handover.handing.set(AnswerStage::Here);
    let end = Instant::now() + DRAINING_WITHIN;
    while !node.ports.workers().are_resumed() && Instant::now() < end {
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

/// Serves connections to their end, and passes on questions that only the next agent can answer.
async fn serve_out(
    node: &mut Node,
    handover: &mut HandoverState,
    wire: &mut Wire,
    stop: &mut Stop,
    end: Instant,
) {
    let mut departure =
        DepartingAgent { node, handover, wire, taken: None, is_connected: true, remaining: 0 };
    departure.serve(stop, end).await;
    let cut = departure.remaining;
    if cut > 0 {
        warn!(
            connections = cut,
            "connections cut off before they ended; a takeover waits for them for at most {DRAIN_LIMIT:?}"
        );
    }
    let _gone = wire.send(&PreviousAgentMessage::Done { cut }).await;
    info!("no longer serving connections: stopping");
}

/// The previous agent after it has given up its ports, until its connections have ended.
struct DepartingAgent<'a> {
    node: &'a mut Node,
    handover: &'a mut HandoverState,
    wire: &'a mut Wire,
    /// When the next agent took the ports.
    taken: Option<Instant>,
    /// The next agent is connected.
    is_connected: bool,
    /// Number of connections at the last check that found any; 0 once all have ended in time.
    remaining: u64,
}

impl DepartingAgent<'_> {
    /// Serves until all connections have ended, until `end`, or until a signal.
    async fn serve(&mut self, stop: &mut Stop, end: Instant) {
        let mut check = tokio::time::interval(CHECK_EVERY);
        let mut alive = tokio::time::interval(Duration::from_secs(1));
        let mut collect = tokio::time::interval(COLLECT_EVERY);
        let late = Instant::now() + SERVING_WITHIN;
        loop {
            let passes_on = self.is_connected && self.taken.is_some();
            tokio::select! {
                message = self.wire.recv::<NextAgentMessage>(), if self.is_connected => self.on_message(message),
                Some(question) = self.handover.questions.recv(), if passes_on => self.pass_on(&question).await,
                _ = alive.tick() => service_manager::alive(),
                _ = collect.tick() => self.node.collect(),
                name = stop.recv() => return warn!("{name}: not waiting for connections"),
                now = check.tick() => if self.is_over(now, late, end) { return; },
            }
        }
    }

    fn on_message(&mut self, message: Result<NextAgentMessage, WireError>) {
        match message {
            Ok(NextAgentMessage::Serving) => {
                self.node.ports.on_handed_over();
                self.handover.handing.set(AnswerStage::Away);
                self.taken = Some(Instant::now());
            }
            Ok(NextAgentMessage::Answer(answer)) => {
                let (connection, mark, answer) = answer.answer();
                if let Some(slot) = self.handover.handing.answered(&connection, mark, answer) {
                    self.node.ports.wake(slot);
                }
            }
            Ok(message) => debug!("ignored: {message:?}"),
            Err(error) => {
                self.is_connected = false;
                warn!("the connection to the next agent is lost: {error}");
            }
        }
    }

    /// Passes a question on to the next agent. If that fails, the worker asks again.
    async fn pass_on(&mut self, question: &HandedRequest) {
        if let Err(error) = self.wire.send(&PreviousAgentMessage::Ask(WireRequest::from(question))).await {
            self.is_connected = !matches!(error, WireError::Gone);
            self.handover.handing.answered(&question.connection, question.mark, None);
            debug!("a question will be passed on again: {error}");
        }
    }

    /// Counts the remaining connections. Returns true if none remains and no more frames can arrive, or at `end`.
    fn is_over(&mut self, now: Instant, late: Instant, end: Instant) -> bool {
        let remaining = self.node.ports.workers().remaining().unwrap_or(0);
        if remaining == 0 && self.taken.unwrap_or(late) + LAST_FRAMES <= now {
            // At the limit the workers cut off what remains, so 0 at that time does not mean that all have ended.
            if now < end {
                self.remaining = 0;
            }
            return true;
        }
        if remaining > 0 {
            self.remaining = remaining;
        }
        now >= end
    }
}
