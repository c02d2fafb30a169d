//! After this agent has taken the ports, the previous agent serves its connections until they end, and passes on
//! questions that only this agent can answer.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use super::{PreviousEvent, Takeover};
use crate::agent::node::Node;
use metadata_datapath::stack::TIME_WAIT;

/// The state of a takeover by this agent, from taking the ports to the end of the previous agent.
#[derive(Default)]
pub(in crate::agent) struct Succession {
    /// The connection to the previous agent, while that agent serves its connections.
    taking: Option<Takeover>,
    /// The kernel's tables still have the claims of the previous agent.
    unfinished: bool,
    /// When late segments of the previous agent's connections may be reset.
    spare_until: Option<Instant>,
}

impl Succession {
    /// Begins the succession, after the ports have been taken from the previous agent.
    pub(in crate::agent) fn begin(&mut self, taking: Takeover) {
        self.taking = Some(taking);
    }

    /// Waits for the next event of the previous agent; for ever if there is none.
    pub(in crate::agent) async fn recv(&mut self) -> PreviousEvent {
        match &mut self.taking {
            Some(taking) => taking.recv().await,
            None => std::future::pending().await,
        }
    }

    /// Answers a question, or ends the succession. Returns true like [`Succession::finish`].
    #[must_use]
    pub(in crate::agent) async fn on_event(&mut self, node: &mut Node, event: PreviousEvent) -> bool {
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
    pub(in crate::agent) fn finish(&mut self, node: &mut Node) -> bool {
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
