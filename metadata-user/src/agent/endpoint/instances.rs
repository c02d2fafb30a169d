//! `/v1/instances`: registers, shows and removes VMs.
//!
//! | Request | Effect |
//! |---|---|
//! | `GET /v1/instances` | lists the records of all sources in pages: `?source=`, `?after=` |
//! | `PUT /v1/instances/NAME` | registers a record under the name: `?wait=attached`, `?timeout=5s` |
//! | `GET /v1/instances/NAME` | shows the record without its secrets: `?source=` |
//! | `DELETE /v1/instances/NAME` | removes the record |
//! | `DELETE /v1/guest-data/NAME` | removes what the guest of the record's VM wrote: `?source=` |
//! | `GET /v1/events/NAME` | shows the events of the record's VM: `?source=`, `?id=`, `?wait=acknowledged`, `?timeout=30s` |
//! | `PUT /v1/events/NAME` | adds an event, or changes the one of its id: `?source=` |
//! | `DELETE /v1/events/NAME?id=ID` | cancels an event: `?source=` |
//! | `GET /v1/openapi.json` | shows the OpenAPI document |
//!
//! A page has at most [`PAGE`](metadata_control::instances::PAGE) records.
//!
//! Changes are made one after the other. A change is checked by the control loop, written to disk, and then put into
//! force, so a record answered with 200 or 201 survives the agent. A change is completed even if its client
//! disconnects.

mod representation;
mod request;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodRouter, delete, get};
use metadata_content::parser;
use metadata_content::record::RecordLimits;
use metadata_content::record::event::{EventRefused, ScheduledEvent};
use metadata_control::instances::{ApiProblem, Instance, RegistrationOutcome};
use metadata_feed::hold::{self, GuestReadiness};
use metadata_feed::registry::RecordId;
use metadata_feed::state::save_queue::StateFile;
#[cfg(test)]
use representation::BODY_MAX;
use representation::{
    ProblemResponse, absent, bad_request, busy, clash, event_refused, event_still_unwritten, invalid_event,
    json, not_acknowledged, not_attached, not_kept, still_on_disk, too_many, too_many_wait_for_guests,
};
use request::{Named, NamedEvent, PortWait, RequestConditions, read_event};
use tokio::sync::{Mutex, Semaphore, oneshot};
use tokio::time::Instant;
use tracing::info;

use super::listen::{EVENT_WAITS, EvictionGuard, Peer, WAITS};
use super::{Agent, ControlRequest};
use crate::agent::node::{ChangedEvents, ClearedData, EventChange, TaggedRecord, etag};
use crate::agent::registration_store::RegistrationStore;
use crate::config::Config;
pub(super) use representation::{RefusalReason, no_method, no_path};
pub(crate) use request::{CheckedRegistration, InstanceRequest};

/// How long a client waits by default.
pub(crate) const WAIT: Duration = Duration::from_secs(5);
/// Limit on the time that a client may wait.
pub(crate) const WAIT_MOST: Duration = Duration::from_secs(60);

const PREFIX: &str = "/v1/instances/";
const GUEST_DATA: &str = "/v1/guest-data/";
const EVENTS: &str = "/v1/events/";
/// The OpenAPI document.
const OPENAPI: &str = include_str!("instances/openapi.json");

/// Shared by all requests that change instances.
#[derive(Debug)]
pub(crate) struct Registrar {
    store: RegistrationStore,
    limits: ArcSwap<RecordLimits>,
    /// Held during a change.
    turn: Mutex<()>,
    waits: Semaphore,
    /// Clients that wait for a guest to acknowledge an event.
    event_waits: Semaphore,
}

impl Registrar {
    /// Stores records below the state directory of the configuration.
    pub(crate) fn new(config: &Config) -> Arc<Self> {
        Arc::new(Self {
            store: RegistrationStore::below(config.state.as_deref()),
            limits: ArcSwap::from_pointee(config.record_limits()),
            turn: Mutex::default(),
            waits: Semaphore::new(WAITS),
            event_waits: Semaphore::new(EVENT_WAITS),
        })
    }

    /// Applies the limits of a configuration.
    pub(crate) fn configure(&self, config: &Config) {
        self.limits.store(config.record_limits().into());
    }

    /// Where records are stored.
    pub(crate) fn shelf(&self) -> RegistrationStore {
        self.store.clone()
    }
}

/// The routes and their handlers.
pub(super) fn routes() -> [(&'static str, MethodRouter<Agent>); 5] {
    [
        ("/v1/instances", get(list)),
        ("/v1/instances/{*name}", get(show).put(put).delete(remove)),
        ("/v1/guest-data/{*name}", delete(clear)),
        ("/v1/events/{*name}", get(show_events).put(add).delete(cancel)),
        ("/v1/openapi.json", get(async || ([(header::CONTENT_TYPE, super::JSON)], OPENAPI))),
    ]
}

async fn list(State(agent): State<Agent>, uri: Uri) -> Result<Response, ProblemResponse> {
    let (source, after) = request::range(&uri)?;
    let page = agent
        .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::List { source, after, reply }))
        .await?;
    Ok(json(StatusCode::OK, &page))
}

async fn show(State(agent): State<Agent>, uri: Uri, head: HeaderMap) -> Result<Response, ProblemResponse> {
    let Named { id, .. } = request::read(&uri, &Method::GET)?;
    let conditions = RequestConditions::read(&head)?;
    let found = agent
        .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::Look { id: id.clone(), reply }))
        .await?;
    let (mut instance, held) = found.ok_or_else(|| absent(&id))?;
    let tag = instance.etag.clone();
    if conditions.is_known(tag.as_deref()) {
        return Ok(tagged(StatusCode::NOT_MODIFIED.into_response(), tag.as_deref()));
    }
    if let Some(held) = held {
        let (shown, withheld) = representation::shown(&held);
        (instance.record, instance.withheld) = (Some(shown), Some(withheld));
    }
    Ok(tagged(json(StatusCode::OK, &instance), tag.as_deref()))
}

async fn put(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    axum::Extension(stay): axum::Extension<EvictionGuard>,
    uri: Uri,
    head: HeaderMap,
    body: Body,
) -> Result<Response, ProblemResponse> {
    let Named { id, wait } = request::read(&uri, &Method::PUT)?;
    let conditions = RequestConditions::read(&head)?;
    let limits = agent.registrar.limits.load_full();
    let record = representation::read(&head, body, &limits, peer).await?;
    let registrar = Arc::clone(&agent.registrar);
    let _place = match &wait {
        Some(_) => Some(registrar.waits.try_acquire().map_err(|_| too_many())?),
        None => None,
    };
    let _stay = wait.map(|_| stay.hold());
    let until = wait.map(|PortWait { timeout }| (timeout, Instant::now() + timeout));
    let change = ChangeRequest { agent: agent.clone(), id: id.clone(), conditions, peer };
    // The change has its own task, so that it is completed even if the client disconnects.
    let changed = tokio::spawn(change.put(record, wait.is_some())).await;
    let (change, instance) = changed.map_err(|_| busy())??;
    let instance = match until {
        Some((timeout, until)) => attached(&agent, id, instance, timeout, until).await?,
        None => instance,
    };
    let instance = Instance { change: Some(change), ..instance };
    let status = if change == RegistrationOutcome::Registered { StatusCode::CREATED } else { StatusCode::OK };
    let tag = instance.etag.clone();
    Ok(tagged(json(status, &instance), tag.as_deref()))
}

async fn remove(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    uri: Uri,
    head: HeaderMap,
) -> Result<Response, ProblemResponse> {
    let Named { id, .. } = request::read(&uri, &Method::DELETE)?;
    let conditions = RequestConditions::read(&head)?;
    let change = ChangeRequest { agent, id, conditions, peer };
    tokio::spawn(change.remove()).await.map_err(|_| busy())??;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Removes what the guest of a record's VM wrote, of any source. The answer comes once the disk has it.
async fn clear(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    uri: Uri,
) -> Result<Response, ProblemResponse> {
    let id = request::read_guest_data(&uri)?;
    let about = id.clone();
    let cleared = agent
        .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::Clear { id: about, reply }))
        .await?;
    let ClearedData { vm, found, saves } = cleared.ok_or_else(|| absent(&id))?;
    if found {
        info!(by = %peer, record = %id, vm = vm.as_str(), "removed what the guest wrote");
    }
    let file = StateFile::Mailbox(vm.as_str().into());
    let unsaved = blocking(move || {
        saves.flush();
        saves.unsaved(|unsaved| *unsaved == file)
    });
    match unsaved.await? {
        None => Ok(StatusCode::NO_CONTENT.into_response()),
        Some(unsaved) => Err(still_on_disk(&unsaved).into()),
    }
}

/// Waits until the ports of a record are attached.
async fn attached(
    agent: &Agent,
    id: RecordId,
    instance: Instance,
    timeout: Duration,
    until: Instant,
) -> Result<Instance, ApiProblem> {
    let (reply, answer) = oneshot::channel();
    let wait = ControlRequest::Instances(InstanceRequest::Wait { id: id.clone(), reply });
    let waited = tokio::time::timeout_at(until, async {
        agent.requests.send(wait).await.ok()?;
        answer.await.ok()
    });
    match waited.await {
        Ok(Some(instance)) => Ok(instance),
        // Another client has removed the record, or the agent is ending.
        Ok(None) => Err(absent(&id)),
        Err(_) => {
            let now = agent
                .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::Look { id, reply }))
                .await;
            let instance = now.ok().flatten().map_or(instance, |(instance, _)| instance);
            Err(not_attached(instance, timeout))
        }
    }
}

/// A change of the record that is registered under a name.
struct ChangeRequest {
    agent: Agent,
    id: RecordId,
    conditions: RequestConditions,
    peer: Peer,
}

impl ChangeRequest {
    async fn put(
        self,
        record: representation::ValidRecord,
        waits: bool,
    ) -> Result<(RegistrationOutcome, Instance), ApiProblem> {
        let registrar = Arc::clone(&self.agent.registrar);
        let _turn = registrar.turn.lock().await;
        let Self { agent, id, conditions, peer } = self;
        let representation::ValidRecord { record, json } = record;
        let tagged = tag(&record)?;
        let (about, held) = (id.clone(), Arc::clone(&record));
        let CheckedRegistration { tag: former, owner, admitted } = agent
            .ask_in_turn(|reply| {
                ControlRequest::Instances(InstanceRequest::Check { id: about, record: held, waits, reply })
            })
            .await?;
        conditions.check(&id, former.as_deref())?;
        admitted.map_err(|reason| clash(&id, reason))?;
        let change = match &former {
            None => RegistrationOutcome::Registered,
            Some(former) if *former == tagged.etag => RegistrationOutcome::Unchanged,
            Some(_) if owner.is_none_or(|owner| owner == record.owner_text()) => {
                RegistrationOutcome::Replaced
            }
            Some(_) => RegistrationOutcome::ReplacedAnother,
        };
        let changes = change != RegistrationOutcome::Unchanged;
        let (store, about) = (registrar.store.clone(), id.clone());
        // Somebody may have removed the file of an unchanged record. Its client was promised that it outlives the agent.
        let put = move || if changes || !store.has(&about) { store.put(&about, json) } else { Ok(()) };
        blocking(put).await?.map_err(|error| not_kept(&error))?;
        let (about, vm) = (id.clone(), record.owner());
        let ask = |reply| ControlRequest::Instances(InstanceRequest::Put { id: about, tagged, reply });
        let instance = agent.ask_patiently(ask).await?;
        if changes {
            info!(by = %peer, record = %id, vm = vm.as_str(), "{}", change.words());
        }
        Ok((change, instance))
    }

    async fn remove(self) -> Result<(), ApiProblem> {
        let registrar = Arc::clone(&self.agent.registrar);
        let _turn = registrar.turn.lock().await;
        let Self { agent, id, conditions, peer } = self;
        let about = id.clone();
        let former = agent
            .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::Tag { id: about, reply }))
            .await?;
        conditions.check(&id, former.as_deref())?;
        let (store, about) = (registrar.store.clone(), id.clone());
        blocking(move || store.remove(&about)).await?.map_err(|error| not_kept(&error))?;
        if former.is_some() {
            let about = id.clone();
            agent
                .ask_patiently(|reply| {
                    ControlRequest::Instances(InstanceRequest::Remove { id: about, reply })
                })
                .await?;
            info!(by = %peer, record = %id, "removed");
        }
        Ok(())
    }
}

fn tag(record: &Arc<metadata_content::record::Record>) -> Result<TaggedRecord, ApiProblem> {
    let etag = etag(record).map_err(|error| not_kept(&error.into()))?;
    Ok(TaggedRecord { record: Arc::clone(record), etag })
}

/// Runs work that blocks or takes long on another thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiProblem> {
    tokio::task::spawn_blocking(work).await.map_err(|_| busy())
}

fn tagged(mut response: Response, etag: Option<&str>) -> Response {
    if let Some(etag) = etag.and_then(|etag| HeaderValue::from_str(etag).ok()) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}

// `/v1/events`: the events of a record's VM.

/// Limit on an event in a request, in bytes.
const EVENT_BODY_MAX: usize = 4 << 10;

async fn change(agent: &Agent, id: &RecordId, change: EventChange) -> Result<ChangedEvents, ApiProblem> {
    let about = id.clone();
    let done = agent
        .ask_in_turn(|reply| ControlRequest::Instances(InstanceRequest::Events { id: about, change, reply }))
        .await?;
    done.ok_or_else(|| absent(id))?.map_err(|refused| event_refused(&refused))
}

/// Shows the events, or one that the guest has acknowledged or that is over.
async fn show_events(
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
async fn add(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    uri: Uri,
    body: Body,
) -> Result<Response, ProblemResponse> {
    let NamedEvent { id, .. } = read_event(&uri, &Method::PUT)?;
    let bytes = to_bytes(body, EVENT_BODY_MAX).await;
    let bytes =
        bytes.map_err(|_| bad_request(&format!("an event of at most {EVENT_BODY_MAX} bytes"), "more"))?;
    let event: ScheduledEvent = parser::json(&bytes).map_err(|error| invalid_event(&error.to_string()))?;
    let (name, kind, state) = (event.id.to_string(), event.kind.name(), event.state.name());
    let done = change(&agent, &id, EventChange::Add(event)).await?;
    if done.changed {
        info!(by = %peer, record = %id, vm = done.vm.as_str(), event = name, kind, state, "event");
    }
    written(done).await
}

/// Cancels an event. The answer comes once the disk has it.
async fn cancel(
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
