//! Composes a domain's record from the domain and its files.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::domain::Domain;
use super::merge::{merge, name_nics};
use super::{DEFAULTS, LibvirtError, PAYLOADS, io_error};
use metadata_content::record::{Limits, USER_DATA_MAX};

/// Most octets of a file with a part of a record.
pub const FILE_OCTETS: usize = Limits::DEFAULT.record_octets;

/// Returns the record of a domain, without its generation. Returns `None` if neither its metadata nor a file asks for
/// one, unless `every` is set.
///
/// # Errors
/// A file cannot be read, or is not part of a record. This function does not validate the whole record.
pub fn record(domain: &Domain, files: &Path, every: bool) -> Result<Option<Value>, LibvirtError> {
    let own = part(files, &format!("{}.yaml", domain.uuid))?;
    if domain.instance.is_none() && own.is_none() && !every {
        return Ok(None);
    }
    let mut record = domain.implied();
    let parts = [part(files, DEFAULTS)?, domain.instance.clone(), own];
    parts.into_iter().flatten().for_each(|part| merge(&mut record, part));
    // libvirt decides the domain's identity.
    merge(&mut record, json!({"schema": "vmrecord/1", "vm": {"uuid": domain.uuid}}));
    name_nics(&mut record);
    if !tells_of_network(&record) {
        merge(&mut record, json!({"network": {"mode": "none"}}));
    }
    Ok(Some(record))
}

/// False if no source configures addresses. The guest then falls back to its defaults, mostly DHCP on its first NIC,
/// instead of disabling every NIC.
fn tells_of_network(record: &Value) -> bool {
    let network = &record["network"];
    let nics = network["nics"].as_array().map(Vec::as_slice).unwrap_or_default();
    !network["mode"].is_null() || nics.iter().any(|nic| !nic["addresses"].is_null())
}

/// Reads a part of a record from a file, with its payloads' sources resolved; `None` if the file does not exist.
fn part(files: &Path, name: &str) -> Result<Option<Value>, LibvirtError> {
    let path = files.join(name);
    let unreadable = |error| io_error(&path, "a file that can be read", error);
    let Some(octets) = read(&path, FILE_OCTETS).map_err(unreadable)? else { return Ok(None) };
    let wrong = |expected, found: &str| {
        Err(LibvirtError::File { path: path.clone(), expected, found: found.to_owned() })
    };
    if octets.len() > FILE_OCTETS {
        return wrong("at most 4 MiB; keep large user-data in a file of its own, named by `source`", "more");
    }
    let mut value = match serde_yaml::from_slice(&octets) {
        Ok(value @ Value::Object(_)) => value,
        // An empty file asks for a record, and adds nothing to it.
        Ok(Value::Null) => json!({}),
        Ok(_) => return wrong("a mapping, part of a record", "something else"),
        // The parser's message could repeat the content.
        Err(error) => {
            let at = error.location().map_or(0, |at| at.line());
            return wrong("a mapping in YAML", &format!("something else, from line {at} on"));
        }
    };
    for field in PAYLOADS {
        let Some(source) = value[field]["source"]["file"].as_str() else { continue };
        let octets = payload(files, source)?;
        value[field] = json!({"base64": STANDARD.encode(octets)});
    }
    Ok(Some(value))
}

/// Reads the source of a payload. It follows links, but not out of the directory.
fn payload(files: &Path, source: &str) -> Result<Vec<u8>, LibvirtError> {
    let path = files.join(source);
    let unreadable = |error| io_error(&path, "a file that can be read, named by `source`", error);
    let real = path.canonicalize().map_err(unreadable)?;
    let wrong = |expected, found: &str| {
        Err(LibvirtError::File { path: path.clone(), expected, found: found.to_owned() })
    };
    if !real.starts_with(files.canonicalize().map_err(unreadable)?) {
        return wrong("a file inside the directory of the part that names it", "a way out of it");
    }
    let most = USER_DATA_MAX as usize;
    match read(&real, most).map_err(unreadable)? {
        Some(octets) if octets.len() <= most => Ok(octets),
        Some(_) => wrong("at most 1 MiB; gzip is taken by cloud-init", "more"),
        None => Err(unreadable(io::ErrorKind::NotFound.into())),
    }
}

/// Reads at most `limit + 1` octets of a regular file; `None` if it does not exist.
pub(super) fn read(path: &Path, limit: usize) -> io::Result<Option<Vec<u8>>> {
    // A FIFO must not block a domain: open without blocking, then check the file's type.
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut octets = Vec::new();
    File::take(file, limit as u64 + 1).read_to_end(&mut octets)?;
    Ok(Some(octets))
}
