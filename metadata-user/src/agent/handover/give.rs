//! The agent that runs, while another takes over.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::wire::{Asked, Giver as Word, Taker, Wire, WireError};
use super::{DRAINING_WITHIN, SERVING_WITHIN, TAKE_WITHIN};
use crate::agent::node::Node;
use crate::agent::notify;
use crate::agent::signals::Stop;
use metadata_datapath::stack::DRAIN_LIMIT;
use metadata_serve::audit::COLLECT_EVERY;
use metadata_serve::{Handing, Question, Stage};

/// How often to look how far workers are.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How long after the ports have been taken frames may be on their way here that were steered before.
const LAST_FRAMES: Duration = Duration::from_millis(100);

/// How long after [`DRAIN_LIMIT`] the workers are waited for.
const GRACE: Duration = Duration::from_secs(1);

/// What has become of a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) enum End {
    /// It came to nothing: the agent goes on as before.
    Stays,
    /// It came to nothing because a signal ends this agent.
    Stopped(&'static str),
    /// The ports are another agent's, and all guests here are served.
    TakenOver,
}

/// What handing over takes beside the node.
pub(in crate::agent) struct Giver {
    pub(in crate::agent) handing: std::sync::Arc<Handing>,
    pub(in crate::agent) questions: mpsc::Receiver<Question>,
}

/// Hands over to the agent at the other end, which has everything ready; `close` is called once it will need the
/// addresses this one listens on.
pub(in crate::agent) async fn hand_over(
    node: &mut Node,
    giver: &mut Giver,
    mut wire: Wire,
    stop: &mut Stop,
    close: impl AsyncFnOnce(),
) -> End {
    // First: what workers answer once they have claimed their connections changes nothing here.
    giver.handing.set(Stage::Frozen);
    let begun = Instant::now();
    let outcome = tokio::select! {
        outcome = promise(node, &mut wire, close) => outcome.map(|()| None),
        name = stop.recv() => Ok(Some(name)),
    };
    match outcome {
        Ok(None) => {}
        Ok(Some(name)) => {
            stay(node, giver, &mut wire, &format!("it was told to stop ({name})")).await;
            return End::Stopped(name);
        }
        Err(error) => {
            warn!("not handed over: {error:#}");
            stay(node, giver, &mut wire, &format!("{error:#}")).await;
            return End::Stays;
        }
    }
    serve_out(node, giver, &mut wire, stop, begun + DRAIN_LIMIT + GRACE).await;
    End::TakenOver
}

/// Up to the point of no return.
async fn promise(node: &Node, wire: &mut Wire, close: impl AsyncFnOnce()) -> anyhow::Result<()> {
    node.ports.drain_and_claim(DRAIN_LIMIT)?;
    let end = Instant::now() + DRAINING_WITHIN;
    let connections = loop {
        if let Some(left) = node.ports.workers().remaining() {
            break left;
        }
        anyhow::ensure!(
            Instant::now() < end,
            "workers did not claim their connections in {DRAINING_WITHIN:?}"
        );
        tokio::time::sleep(LOOK_EVERY).await;
    };
    // No worker is in the middle of a write any more: each has had a turn since answers were frozen.
    node.catalogue.save();
    close().await;
    info!(connections, "another agent takes over: what is under way is served to its end here");
    wire.say(&Word::Draining { connections }).await?;
    loop {
        match wire.hear_within(TAKE_WITHIN).await? {
            Taker::Take => break,
            Taker::Unknown => {}
            word => anyhow::bail!("expected it to take the ports, heard {word:?}"),
        }
    }
    // Whoever cannot hear this does not act on it.
    wire.say(&Word::Yours).await?;
    Ok(())
}

/// Goes on as before.
async fn stay(node: &mut Node, giver: &Giver, wire: &mut Wire, reason: &str) {
    let _gone = wire.say(&Word::No { reason: reason.into() }).await;
    if let Err(error) = node.ports.resume() {
        warn!("a worker closes connections after their answer: {error}");
    }
    giver.handing.set(Stage::Here);
    let end = Instant::now() + DRAINING_WITHIN;
    while !node.ports.workers().are_resumed() && Instant::now() < end {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Serves what is under way to its end.
async fn serve_out(node: &mut Node, giver: &mut Giver, wire: &mut Wire, stop: &mut Stop, end: Instant) {
    let mut taken: Option<Instant> = None;
    let mut is_there = true;
    let mut last = 0;
    let mut look = tokio::time::interval(LOOK_EVERY);
    let mut alive = tokio::time::interval(Duration::from_secs(1));
    let mut collect = tokio::time::interval(COLLECT_EVERY);
    let late = Instant::now() + SERVING_WITHIN;
    loop {
        tokio::select! {
            word = wire.hear::<Taker>(), if is_there => match word {
                Ok(Taker::Serving) => {
                    node.ports.on_handed_over();
                    giver.handing.set(Stage::Away);
                    taken = Some(Instant::now());
                }
                Ok(Taker::Answer(told)) => {
                    let (connection, mark, answer) = told.answer();
                    if let Some(slot) = giver.handing.answered(&connection, mark, answer) {
                        node.ports.wake(slot);
                    }
                }
                Ok(word) => debug!("ignored: {word:?}"),
                Err(error) => {
                    is_there = false;
                    warn!("the agent that takes over is not heard of any more: {error}");
                }
            },
            Some(question) = giver.questions.recv(), if is_there && taken.is_some() => {
                if let Err(error) = wire.say(&Word::Ask(Asked::from(&question))).await {
                    is_there = !matches!(error, WireError::Gone);
                    giver.handing.answered(&question.connection, question.mark, None);
                    debug!("a question is asked again: {error}");
                }
            }
            _ = alive.tick() => notify::alive(),
            _ = collect.tick() => node.ports.answers().collect_audit(),
            name = stop.recv() => {
                warn!("{name}: not waiting for what is under way");
                break;
            }
            now = look.tick() => {
                let left = node.ports.workers().remaining().unwrap_or(0);
                if left == 0 && taken.unwrap_or(late) + LAST_FRAMES <= now {
                    last = if now >= end { last } else { 0 };
                    break;
                }
                if left > 0 {
                    last = left;
                }
                if now >= end {
                    break;
                }
            }
        }
    }
    if last > 0 {
        warn!(connections = last, "cut off: not over in {DRAIN_LIMIT:?}");
    }
    let _gone = wire.say(&Word::Done { cut: last }).await;
    info!("all guests here are served: leaving");
}
