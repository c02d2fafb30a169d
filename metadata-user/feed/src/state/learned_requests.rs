//! The requests that the kernel answers. The next agent publishes their answers before any guest asks.

use std::io::{self, Cursor};
use std::path::Path;

use metadata_common::share::Tenant;
use serde::{Deserialize, Serialize};

use crate::state::StateFileKind;
use crate::state::private_file;

/// The file's name in the state directory.
pub const FILE: &str = "requests";

/// At most 256 requests of one segment each.
const FORM: StateFileKind = StateFileKind { kind: "requests", version: 1, oldest: 1, bytes: 1 << 20 };

/// A request that several VMs have sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedRequest {
    /// Whose share of the learned requests it takes.
    pub tenant: Tenant,
    /// Its bytes, with `00:00:00:00:00:00` in place of the VM's MAC.
    pub request: String,
}

/// Neither a namespace nor a VM: the operator's.
#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<String>,
    request: String,
}

/// Replaces the file.
///
/// # Errors
/// The error of the first step that fails; the file is then unchanged.
pub fn write(path: &Path, requests: impl IntoIterator<Item = SavedRequest>) -> io::Result<()> {
    let line = |SavedRequest { tenant, request }| {
        let (namespace, vm) = match tenant {
            Tenant::Operator => (None, None),
            Tenant::Namespace(name) => (Some(name.to_string()), None),
            Tenant::Vm(name) => (None, Some(name.to_string())),
        };
        Ok(serde_json::to_vec(&Line { namespace, vm, request })?)
    };
    let mut bytes = Vec::new();
    FORM.write(requests.into_iter().map(line), &mut bytes)?;
    FORM.spare_other_version(path)?;
    private_file::replace(path, &bytes)
}

/// Reads the file; nothing is learned if there is none.
///
/// # Errors
/// The file is unreadable, damaged, or of another kind.
pub fn read(path: &Path) -> io::Result<Vec<SavedRequest>> {
    let mut requests = Vec::new();
    let Some(bytes) = private_file::read(path, FORM.bytes)? else { return Ok(requests) };
    let take = |line: &[u8]| {
        let Line { namespace, vm, request } =
            serde_json::from_slice(line).map_err(|_| "a request and its tenant")?;
        let tenant = match (namespace, vm) {
            (Some(name), _) => Tenant::Namespace(name.into()),
            (None, Some(name)) => Tenant::Vm(name.into()),
            (None, None) => Tenant::Operator,
        };
        requests.push(SavedRequest { tenant, request });
        Ok(())
    };
    FORM.read(Cursor::new(bytes), take).map_err(io::Error::other)?;
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::{FILE, FORM, SavedRequest, read, write};
    use metadata_common::share::Tenant;
    use std::fs;

    fn requests() -> Vec<SavedRequest> {
        let request = |tenant, path: &str| SavedRequest {
            tenant,
            request: format!("GET {path} HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"),
        };
        vec![
            request(Tenant::Operator, "/v1/meta-data"),
            request(Tenant::namespace("shop"), "/latest/meta-data/"),
            request(Tenant::Vm("7c0f1a52".into()), "/openstack"),
        ]
    }

    #[test]
    fn formats_of_every_release_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        assert_eq!(read(&path).expect("no file is no fault"), []);
        write(&path, requests()).expect("a file");
        golden::check(FILE, FORM.version, &fs::read(&path).expect("bytes"));
        for sample in golden::all(FILE) {
            fs::write(&path, &sample.bytes).expect("a file");
            assert_eq!(read(&path).expect("requests"), requests(), "{}", sample.release);
        }
    }

    #[test]
    fn a_damaged_file_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        write(&path, requests()).expect("a file");
        let bytes = fs::read(&path).expect("bytes");
        fs::write(&path, &bytes[..bytes.len() - 5]).expect("a file");
        read(&path).expect_err("the file is cut");
    }
}
