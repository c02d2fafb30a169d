//! `/v1/events`: the events of a record's VM.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use metadata_content::parser;
use metadata_content::record::event::{EventRefused, ScheduledEvent};
use metadata_control::instances::ApiProblem;
use metadata_feed::hold::{self, GuestReadiness};
use metadata_feed::registry::RecordId;
use metadata_feed::state::save_queue::StateFile;
use tracing::info;

use super::super::listen::{EvictionGuard, Peer};
use super::super::{Agent, ControlRequest};
use super::blocking;
use super::representation::{
    ProblemResponse, absent, bad_request, event_refused, event_still_unwritten, invalid_event, json,
    not_acknowledged, too_many_wait_for_guests,
};
use super::request::{InstanceRequest, NamedEvent, read_event};
use crate::agent::node::{ChangedEvents, EventChange};

/// Limit on an event in a request, in bytes.
const BODY_MAX: usize = 4 << 10;

async fn change(agent: &Agent, id: &RecordId, change: EventChange) -> Result<ChangedEvents, ApiProblem> {
    let about = id.clone();
    let done = agent
        .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::Events { id: about, change, reply }))
        .await?;
    done.ok_or_else(|| absent(id))?.map_err(|refused| event_refused(&refused))
}

/// Shows the events, or one that the guest has acknowledged or that is over.
pub(super) async fn show(
    State(agent): State<Agent>,
    axum::Extension(stay): axum::Extension<EvictionGuard>,
    uri: Uri,
) -> Result<Response, ProblemResponse> {
    let NamedEvent { id, event, wait } = read_event(&uri, &Method::GET)?;
    let mailbox = change(&agent, &id, EventChange::Look).await?.mailbox;
    if let (Some(event), Some(wait)) = (&event, wait) {
        let registrar = Arc::clone(&agent.registrar);
        // The place is free again when the client has gone, because that drops this future.
        let _place = registrar.event_waits.try_acquire().map_err(|_| too_many_wait_for_guests())?;
        let _stay = stay.hold();
        let told = hold::within(wait, || {
            let said = GuestReadiness::of(mailbox.events(), event);
            (said != GuestReadiness::Awaited).then_some(())
        });
        told.await.ok_or_else(|| not_acknowledged(event, wait))?;
    }
    let mut document = mailbox.events().document();
    if let Some(event) = event {
        document.events.retain(|known| known.event.id.as_str() == event);
        if document.events.is_empty() {
            return Err(event_refused(&EventRefused::Unknown(event)).into());
        }
    }
    Ok(json(StatusCode::OK, &document))
}

/// Adds an event, or changes the one of its id. The answer comes once the disk has it.
pub(super) async fn add(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    uri: Uri,
    body: Body,
) -> Result<Response, ProblemResponse> {
    let NamedEvent { id, .. } = read_event(&uri, &Method::PUT)?;
    let bytes = to_bytes(body, BODY_MAX).await;
    let bytes = bytes.map_err(|_| bad_request(&format!("an event of at most {BODY_MAX} bytes"), "more"))?;
    let event: ScheduledEvent = parser::json(&bytes).map_err(|error| invalid_event(&error.to_string()))?;
    let (name, kind, state) = (event.id.to_string(), event.kind.name(), event.state.name());
    let done = change(&agent, &id, EventChange::Add(event)).await?;
    if done.changed {
        info!(by = %peer, record = %id, vm = done.vm.as_str(), event = name, kind, state, "event");
    }
    written(done).await
}

/// Cancels an event. The answer comes once the disk has it.
pub(super) async fn cancel(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    uri: Uri,
) -> Result<Response, ProblemResponse> {
    let NamedEvent { id, event, .. } = read_event(&uri, &Method::DELETE)?;
    let event = event.unwrap_or_default();
    let done = change(&agent, &id, EventChange::Cancel(event.clone())).await?;
    if done.changed {
        info!(by = %peer, record = %id, vm = done.vm.as_str(), event, "event cancelled");
    }
    written(done).await
}

/// Answers with the events once they are on disk.
async fn written(done: ChangedEvents) -> Result<Response, ProblemResponse> {
    let ChangedEvents { mailbox, saves, .. } = done;
    let unsaved = blocking(move || {
        saves.flush();
        saves.unsaved(|file| *file == StateFile::Events)
    });
    match unsaved.await? {
        None => Ok(json(StatusCode::OK, &mailbox.events().document())),
        Some(unsaved) => Err(event_still_unwritten(&unsaved).into()),
    }
}
