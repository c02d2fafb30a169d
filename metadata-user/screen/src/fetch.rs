//! Asks the agent for what the view shows.

use std::path::Path;

use metadata_control::status::ClientError;
use metadata_control::top;

use crate::{Documents, ViewQuery};

/// Asks the agent of a run directory.
///
/// # Errors
/// [`ClientError`] without an answer.
pub fn fetch(run: &Path, asked: &ViewQuery) -> Result<Documents, ClientError> {
    let top = top::fetch(run, &asked.node)?;
    let vm = match &asked.vm {
        Some(query) => Some((query.guest.clone().unwrap_or_default(), top::fetch(run, query)?)),
        None => None,
    };
    Ok(Documents { top, vm })
}
