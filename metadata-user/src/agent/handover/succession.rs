//! After the ports have been taken: the agent before serves its guests to their end, and asks what it does not know.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use super::{Heard, Taking};
use crate::agent::node::Node;
use metadata_datapath::stack::Timeouts;

/// Where a takeover of ours stands.
#[derive(Default)]
pub(in crate::agent) struct Succession {
    /// The agent before, while it serves its guests to their end.
    taking: Option<Taking>,
    /// The kernel's tables still tell its connections from ours.
    unfinished: bool,
    /// When late words of its guests may be reset.
    spare_until: Option<Instant>,
}

impl Succession {
    /// The ports have been taken from an agent that now serves its guests to their end.
    pub(in crate::agent) fn begin(&mut self, taking: Taking) {
        self.taking = Some(taking);
    }

    /// What is heard of the agent before; nothing when there is none.
    pub(in crate::agent) async fn recv(&mut self) -> Heard {
        match &mut self.taking {
            Some(taking) => taking.recv().await,
            None => std::future::pending().await,
        }
    }

    /// Acts on it. True as for [`Succession::finish`].
    #[must_use]
    pub(in crate::agent) async fn on_heard(&mut self, node: &mut Node, heard: Heard) -> bool {
        let late = match heard {
            Heard::Question(question) => {
                if let Some(taking) = &mut self.taking {
                    taking.answer(node, &question).await;
                }
                return false;
            }
            Heard::Done => Timeouts::default().time_wait,
            Heard::Died => Duration::ZERO,
        };
        *self = Self { taking: None, unfinished: true, spare_until: Some(Instant::now() + late) };
        self.finish(node)
    }

    /// Does the remaining work once the previous agent has ended. True when the takeover is complete with this call,
    /// and the next agent may take over.
    #[must_use]
    pub(in crate::agent) fn finish(&mut self, node: &mut Node) -> bool {
        let mut completed = false;
        if self.unfinished {
            match node.ports.finish_take_over() {
                Ok(()) => {
                    self.unfinished = false;
                    completed = true;
                }
                Err(error) => warn!("the tables are not cleared of the agent before yet: {error}"),
            }
        }
        if self.spare_until.is_some_and(|until| until <= Instant::now()) {
            match node.ports.workers().spare_unknown(false) {
                Ok(()) => self.spare_until = None,
                Err(error) => warn!("guests of the agent before are not reset yet: {error}"),
            }
        }
        completed
    }
}
