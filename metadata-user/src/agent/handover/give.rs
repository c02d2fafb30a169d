//! The previous agent's part of a takeover.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::wire::{FromNext, FromPrevious, PassedQuestion, Wire, WireError};
use super::{DRAINING_WITHIN, SERVING_WITHIN, TAKE_WITHIN};
use crate::agent::node::Node;
use crate::agent::notify;
use crate::agent::signals::Stop;
use metadata_datapath::stack::DRAIN_LIMIT;
use metadata_serve::audit::COLLECT_EVERY;
use metadata_serve::{Handing, Question, Stage};

/// How often to check the progress of workers.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// How long frames that were steered here may still arrive after the ports have been taken.
const LAST_FRAMES: Duration = Duration::from_millis(100);

/// How long after [`DRAIN_LIMIT`] to wait for the workers.
const GRACE: Duration = Duration::from_secs(1);

/// The result of a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) enum End {
    /// It failed: the agent continues as before.
    Stays,
    /// It failed because a signal ends this agent.
    Stopped(&'static str),
    /// The next agent has the ports, and all guests of this one are served.
    TakenOver,
}

/// What a handover needs beside the node.
pub(in crate::agent) struct HandoverState {
    pub(in crate::agent) handing: std::sync::Arc<Handing>,
    pub(in crate::agent) questions: mpsc::Receiver<Question>,
}

/// Hands over to the agent at the other end, which is ready. Calls `close` when that agent is about to need the addresses
/// this one listens on.
pub(in crate::agent) async fn hand_over(
    node: &mut Node,
    handover: &mut HandoverState,
    mut wire: Wire,
    stop: &mut Stop,
    close: impl AsyncFnOnce(),
) -> End {
    // First, so that no answer changes state here once workers have claimed their connections.
    handover.handing.set(Stage::Frozen);
    let begun = Instant::now();
    let outcome = tokio::select! {
        outcome = promise(node, &mut wire, close) => outcome.map(|()| None),
        name = stop.recv() => Ok(Some(name)),
    };
    match outcome {
        Ok(None) => {}
        Ok(Some(name)) => {
            stay(node, handover, &mut wire, &format!("it received {name}")).await;
            return End::Stopped(name);
        }
        Err(error) => {
            warn!("not handed over: {error:#}");
            stay(node, handover, &mut wire, &format!("{error:#}")).await;
            return End::Stays;
        }
    }
    serve_out(node, handover, &mut wire, stop, begun + DRAIN_LIMIT + GRACE).await;
    End::TakenOver
}

/// The part before the point of no return.
async fn promise(node: &Node, wire: &mut Wire, close: impl AsyncFnOnce()) -> anyhow::Result<()> {
    node.ports.drain_and_claim(DRAIN_LIMIT)?;
    let end = Instant::now() + DRAINING_WITHIN;
    let connections = loop {
        if let Some(remaining) = node.ports.workers().remaining() {
            break remaining;
        }
        anyhow::ensure!(
            Instant::now() < end,
            "workers did not claim their connections in {DRAINING_WITHIN:?}"
        );
        tokio::time::sleep(CHECK_EVERY).await;
    };
    // No write is under way: each worker has had a turn since answers were frozen.
    node.catalogue.save();
    close().await;
    info!(connections, "another agent takes over: connections here are served to their end");
    wire.send(&FromPrevious::Draining { connections }).await?;
    loop {
        match wire.recv_within(TAKE_WITHIN).await? {
            FromNext::Take => break,
            FromNext::Unknown => {}
            message => anyhow::bail!("expected it to take the ports, received {message:?}"),
        }
    }
    // The next agent does not take the ports before it has received this.
    wire.send(&FromPrevious::Yours).await?;
    Ok(())
}

/// Ends the handover; the agent continues as before.
async fn stay(node: &mut Node, handover: &HandoverState, wire: &mut Wire, reason: &str) {
    let _gone = wire.send(&FromPrevious::No { reason: reason.into() }).await;
    if let Err(error) = node.ports.resume() {
        warn!("a worker closes connections after their answer: {error}");
    }
    handover.handing.set(Stage::Here);
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
    let mut taken: Option<Instant> = None;
    let mut is_there = true;
    let mut last = 0;
    let mut check = tokio::time::interval(CHECK_EVERY);
    let mut alive = tokio::time::interval(Duration::from_secs(1));
    let mut collect = tokio::time::interval(COLLECT_EVERY);
    let late = Instant::now() + SERVING_WITHIN;
    loop {
        tokio::select! {
            message = wire.recv::<FromNext>(), if is_there => match message {
                Ok(FromNext::Serving) => {
                    node.ports.on_handed_over();
                    handover.handing.set(Stage::Away);
                    taken = Some(Instant::now());
                }
                Ok(FromNext::Answer(answer)) => {
                    let (connection, mark, answer) = answer.answer();
                    if let Some(slot) = handover.handing.answered(&connection, mark, answer) {
                        node.ports.wake(slot);
                    }
                }
                Ok(message) => debug!("ignored: {message:?}"),
                Err(error) => {
                    is_there = false;
                    warn!("the connection to the next agent is lost: {error}");
                }
            },
            Some(question) = handover.questions.recv(), if is_there && taken.is_some() => {
                if let Err(error) = wire.send(&FromPrevious::Ask(PassedQuestion::from(&question))).await {
                    is_there = !matches!(error, WireError::Gone);
                    handover.handing.answered(&question.connection, question.mark, None);
                    debug!("a question will be passed on again: {error}");
                }
            }
            _ = alive.tick() => notify::alive(),
            _ = collect.tick() => node.ports.answers().collect_audit(),
            name = stop.recv() => {
                warn!("{name}: not waiting for connections");
                break;
            }
            now = check.tick() => {
                let remaining = node.ports.workers().remaining().unwrap_or(0);
                if remaining == 0 && taken.unwrap_or(late) + LAST_FRAMES <= now {
                    last = if now >= end { last } else { 0 };
                    break;
                }
                if remaining > 0 {
                    last = remaining;
                }
                if now >= end {
                    break;
                }
            }
        }
    }
    if last > 0 {
        warn!(connections = last, "cut off: they did not end in {DRAIN_LIMIT:?}");
    }
    let _gone = wire.send(&FromPrevious::Done { cut: last }).await;
    info!("all guests here are served: leaving");
}
