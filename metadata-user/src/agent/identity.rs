//! The control loop's side of identity tokens.

use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;

pub(super) use crate::identity::SigningEvent;
use crate::identity::{Publication, SigningClient};

use super::node::Node;

/// The ends of orders, and the public keys.
pub(super) struct TokenEvents {
    events: UnboundedReceiver<SigningEvent>,
    publication: Arc<Publication>,
}

impl TokenEvents {
    /// Starts to pass orders to the signer.
    pub(super) fn start(
        signing: SigningClient,
        node: &mut Node,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Self {
        let publication = Arc::clone(signing.publication());
        node.reporter.set_identity(signing.issuer().clone(), Arc::clone(&publication));
        // The issuer bounds the number of orders, and so of events.
        let (sender, events) = unbounded_channel();
        tasks.spawn(signing.run(sender));
        Self { events, publication }
    }

    pub(super) fn publication(&self) -> &Arc<Publication> {
        &self.publication
    }
}

/// Waits for the end of an order; for ever on a node that issues no tokens.
pub(super) async fn next(identity: &mut Option<TokenEvents>) -> SigningEvent {
    let Some(identity) = identity else { return std::future::pending().await };
    match identity.events.recv().await {
        Some(event) => event,
        None => std::future::pending().await,
    }
}
