//! One agent takes over the ports of another while guests are served: `xdp-imds serve --takeover`.
//!
//! ```text
//!  the previous agent ([`give`])                         the next agent ([`take`])
//!                                    ◀── hello ────────  makes hubs on the other side, reads all records,
//!  serves as before                  ─── welcome ──────▶ renders them under the slots in the pinned maps
//!  claims its connections,           ◀── drain ────────  is ready
//!  freezes and saves what guests
//!  wrote, changes no port any more   ─── draining ─────▶ reads what was saved
//!  promises not to continue          ◀── take ─────────
//!                                    ─── yours ────────▶ steers all frames to its hubs, except those of claimed
//!                                    ◀── serving ──────  connections, and replaces each port's program
//!  passes on questions of its guests ─── ask ──────────▶
//!                                    ◀── answer ───────
//!  ends, and its hubs with it        ─── done ─────────▶ forgets the claims
//! ```
//!
//! Until `yours`, the previous agent continues as before if either agent gives up or the next agent dies. After `yours`
//! the ports belong to the next agent. If it dies before it serves, the ports stay closed, and the next start adopts
//! what is pinned. If the previous agent dies at any point, the next agent takes over at once.
//!
//! Every wait has a limit. The socket is `<run>/takeover.sock`, mode 0600, and its peer must be root or the agent's own
//! user.

mod give;
mod listener;
mod take;
mod wire;

pub(super) use give::{HandoverResult, HandoverState, hand_over};
pub(super) use listener::{TakeoverCall, TakeoverListener, TakeoverRequest};
pub(super) use take::{PreviousEvent, Takeover};

use metadata_datapath::stack::TIME_WAIT;
use std::time::Duration;
use tokio::time::Instant;
use tracing::warn;

use crate::agent::node::Node;

/// The socket's name in the run directory.
const SOCKET: &str = "takeover.sock";

/// Time limit from a connection to its first message, and from that message to the answer.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Time limit from the welcome until the next agent has rendered every record and is ready.
const READY_WITHIN: Duration = Duration::from_secs(900);
/// Time limit for workers to claim their connections and for the agent to save what guests wrote.
const DRAINING_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for the next agent to read what was saved.
const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for the next agent to take all ports.
const SERVING_WITHIN: Duration = Duration::from_secs(30);

// After this agent has taken the ports, the previous agent serves its connections until they end, and passes on
// questions that only this agent can answer.

/// The state of a takeover by this agent, from taking the ports to the end of the previous agent.
#[derive(Default)]
pub(crate) struct Succession {
    /// The connection to the previous agent, while that agent serves its connections.
    taking: Option<Takeover>,
    /// The kernel's tables still have the claims of the previous agent.
    unfinished: bool,
    /// When late segments of the previous agent's connections may be reset.
    spare_until: Option<Instant>,
}

impl Succession {
    /// Begins the succession, after the ports have been taken from the previous agent.
    pub(crate) fn begin(&mut self, taking: Takeover) {
        self.taking = Some(taking);
    }

    /// Waits for the next event of the previous agent; for ever if there is none.
    pub(crate) async fn recv(&mut self) -> PreviousEvent {
        match &mut self.taking {
            Some(taking) => taking.recv().await,
            None => std::future::pending().await,
        }
    }

    /// Answers a question, or ends the succession. Returns true like [`Succession::finish`].
    #[must_use]
    pub(crate) async fn on_event(&mut self, node: &mut Node, event: PreviousEvent) -> bool {
        let late = match event {
            PreviousEvent::Question(question) => {
                if let Some(taking) = &mut self.taking {
                    taking.answer(node, &question).await;
                }
                return false;
            }
            PreviousEvent::Done => TIME_WAIT,
            PreviousEvent::Died => Duration::ZERO,
        };
        *self = Self { taking: None, unfinished: true, spare_until: Some(Instant::now() + late) };
        self.finish(node)
    }

    /// Does the remaining work once the previous agent has ended. Returns true if this call completes the takeover, so
    /// that the next agent may take over.
    #[must_use]
    pub(crate) fn finish(&mut self, node: &mut Node) -> bool {
        let mut completed = false;
        if self.unfinished {
            match node.ports.finish_take_over() {
                Ok(()) => {
                    self.unfinished = false;
                    completed = true;
                }
                Err(error) => warn!("claims of the previous agent are not cleared yet: {error}"),
            }
        }
        if self.spare_until.is_some_and(|until| until <= Instant::now()) {
            match node.ports.workers().spare_unknown(false) {
                Ok(()) => self.spare_until = None,
                Err(error) => warn!("connections of the previous agent are not reset yet: {error}"),
            }
        }
        completed
    }
}
