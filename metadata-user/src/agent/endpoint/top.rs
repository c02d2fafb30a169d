//! `GET /v1/top`: the live view of the node, or of the VMs of one name.

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use metadata_control::top::{TopQuery, WORDS_MOST};

use super::{Agent, ControlLoopBusy, ControlRequest, TEXT, json};

pub(super) async fn top(
    State(agent): State<Agent>,
    Query(query): Query<TopQuery>,
) -> Result<Response, ControlLoopBusy> {
    if let Some(refusal) = refusal(&query) {
        return Ok(refusal);
    }
    Ok(match query.guest.clone() {
        Some(name) => json(&agent.ask(|reply| ControlRequest::VmPages(name, reply)).await?),
        None => json(&agent.ask(|reply| ControlRequest::Top(query, reply)).await?),
    })
}

/// The answer to a query that is too long.
pub(super) fn refusal(query: &TopQuery) -> Option<Response> {
    let longest = query.filter.len().max(query.guest.as_ref().map_or(0, String::len));
    let text = format!("expected a filter or a VM of at most {WORDS_MOST} bytes\n");
    (longest > WORDS_MOST)
        .then(|| (StatusCode::BAD_REQUEST, [(header::CONTENT_TYPE, TEXT)], text).into_response())
}
