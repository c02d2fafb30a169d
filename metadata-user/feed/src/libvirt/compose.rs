//! Composes a domain's record from the domain and its files.

use std::path::Path;

use serde_json::{Value, json};

use super::LibvirtError;
use super::domain::Domain;
use crate::part::{DEFAULTS, part, tells_of_network};
use crate::part::{merge, name_nics};

/// Returns the record of a domain, without its generation. Returns `None` if neither its metadata nor a file asks for
/// one, unless `every` is set.
///
/// # Errors
/// A file cannot be read, or is not part of a record. This function does not validate the whole record.
pub fn record(domain: &Domain, files: &Path, every: bool) -> Result<Option<Value>, LibvirtError> {
    let own = part(files, &format!("{}.yaml", domain.uuid), |_| {})?;
    if domain.instance.is_none() && own.is_none() && !every {
        return Ok(None);
    }
    let mut record = domain.implied();
    let parts = [part(files, DEFAULTS, |_| {})?, domain.instance.clone(), own];
    parts.into_iter().flatten().for_each(|part| merge(&mut record, part));
    // libvirt decides the domain's identity: `null` removes an owner, so that the UUID is the owner.
    merge(&mut record, json!({"schema": "vmrecord/1", "vm": {"uuid": domain.uuid, "owner": null}}));
    name_nics(&mut record);
    if !tells_of_network(&record) {
        merge(&mut record, json!({"network": {"mode": "none"}}));
    }
    Ok(Some(record))
}
