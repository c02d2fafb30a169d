//! Answers to requests from the endpoints.

use std::convert::Infallible;
use std::time::Duration;

use crate::service::audit::COLLECT_EVERY;
use metadata_control::status::GuestUsage;
use metadata_datapath::stack::SlotStats;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::agent::endpoint::ControlRequest;
use crate::agent::health::Health;
use crate::agent::listeners::{self, Incoming, Listeners};
use crate::agent::node::Node;

/// Limit on the time until a worker reports the connections and requests of a guest. An idle worker reports within a
/// second.
const WORKER_ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Answers a request. The answer is dropped if the client has disconnected.
pub(super) fn answer(node: &Node, health: &Health, request: ControlRequest) {
    match request {
        ControlRequest::Metrics(reply) => _ = reply.send(node.metrics(health)),
        ControlRequest::Status(about, reply) => _ = reply.send(Box::new(node.status(about, health))),
        ControlRequest::Top(query, reply) => _ = reply.send(Box::new(node.top(&query, health))),
        ControlRequest::VmPages(name, reply) => {
            let pages = node.vm_pages(&name);
            tokio::spawn(async move {
                reply.send(collect_held(pages, |page, held| page.held = Some(held)).await)
            });
        }
        ControlRequest::Trace(target, reply) => _ = reply.send(node.view().trace(&target).map(Box::new)),
        // The agent is ending; the next agent registers records.
        ControlRequest::Instances(_) => {}
        ControlRequest::Guests(name, reply) => {
            let asked = node.view().guests(&name);
            // Workers answer after their next turn, and the loop does not wait for them.
            tokio::spawn(async move {
                reply.send(collect_held(asked, |guest, held| guest.held = Some(held)).await)
            });
        }
    }
}

/// Answers requests and writes audit lines while the agent drains. Ignores takeovers.
pub(super) async fn answer_all(
    node: &Node,
    health: &Health,
    listeners: &mut Option<Listeners>,
) -> Infallible {
    let mut audit = tokio::time::interval(COLLECT_EVERY);
    loop {
        tokio::select! {
            incoming = listeners::next(listeners) => match incoming {
                Incoming::Request(request) => answer(node, health, request),
                Incoming::TakeOver(_) | Incoming::PrepareTakeover(_) => {}
            },
            _ = audit.tick() => node.collect(),
        }
    }
}

/// Sets what workers hold for each guest; nothing is set if a worker does not answer in time.
async fn collect_held<T>(
    asked: Vec<(T, Option<oneshot::Receiver<SlotStats>>)>,
    set: impl Fn(&mut T, GuestUsage),
) -> Vec<T> {
    let until = Instant::now() + WORKER_ANSWERS_WITHIN;
    let mut guests = Vec::with_capacity(asked.len());
    for (mut guest, answer) in asked {
        if let Some(answer) = answer
            && let Ok(Ok(held)) = tokio::time::timeout_at(until, answer).await
        {
            set(&mut guest, GuestUsage { connections: held.connections, requests: held.waiting });
        }
        guests.push(guest);
    }
    guests
}
