//! Files of a release that named them by the VM's UUID, which tenants choose on some platforms.
//!
//! A file is taken over by the record that had its UUID, and only if that was one record: what two VMs could write is
//! given to neither. Which records had a UUID is known from what the earlier agent left ([`FormerRecords`]).
//!
//! ```text
//!  one record had the UUID, and it      <uuid>.json ─▶ former-<hash>.json ─▶ kubevirt-<hash of the owner>.json
//!  is of a platform's tenants                      take_charge()        its record arrives
//!  several VMs had it                   <uuid>.json ─▶ <uuid>.json.shared, with a warning
//!  it was of an operator's record       <uuid>.json stays
//! ```
//!
//! Until [`Mailboxes::take_charge`] the earlier agent may still run and write `<uuid>.json`.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use metadata_common::printable::hex;
use metadata_content::mailbox::MailboxState;
use metadata_content::record::Owner;
use metadata_content::source::RecordSource;
use sha2::{Digest as _, Sha256};

use super::{FormerFile, Mailboxes, StateFileError, locked, read, read_any};
use crate::state::private_file;

/// The beginning of the names of files that wait for their record.
pub(super) const KIND: &str = "former";

/// The records that had each UUID while an earlier release ran.
#[derive(Debug, Default)]
pub struct FormerRecords(HashMap<String, Claim>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Claim {
    /// Operators' records, which stand in front of each other by their UUID.
    Operator,
    /// One record of a platform's tenants, by its key.
    Tenant(RecordSource, String),
    /// Records of several VMs.
    Several,
}

impl FormerRecords {
    /// Notes a record that had this UUID and no owner besides.
    pub fn note(&mut self, uuid: &str, source: RecordSource, key: &str) {
        let claim = match source.is_of_tenants() {
            true => Claim::Tenant(source, vm_of(key).to_owned()),
            false => Claim::Operator,
        };
        let known = self.0.entry(uuid.to_owned()).or_insert_with(|| claim.clone());
        if *known != claim {
            *known = Claim::Several;
        }
    }

    fn is_of(&self, uuid: &str, source: RecordSource, key: &str) -> bool {
        matches!(self.0.get(uuid), Some(Claim::Tenant(of, vm)) if *of == source && vm == vm_of(key))
    }
}

/// The part of a record's key that names the VM. A VM of KubeVirt that migrates within its node has a second record,
/// whose key ends in `@` and the pod.
fn vm_of(key: &str) -> &str {
    key.split_once('@').map_or(key, |(vm, _)| vm)
}

/// The name of the file that waits for a record. It names no VM, so that only a record of all three finds it.
pub(super) fn former_file(uuid: &str, source: RecordSource, key: &str) -> String {
    let digest = Sha256::digest(format!("{uuid}/{}/{}", source.name(), vm_of(key)));
    format!("{KIND}-{}.json", hex(&digest))
}

impl Mailboxes {
    /// Notes which records had the UUIDs by which an earlier release named files. Call it before the first record
    /// arrives.
    pub fn set_former(&self, records: FormerRecords) {
        *locked(&self.former) = records;
    }

    /// Takes charge of the files: no other agent writes to them any more. Takes the files of an earlier release from
    /// the UUIDs that name them. The call blocks on the disk.
    pub fn take_charge(&self) {
        let Some(disk) = &self.disk else { return };
        if self.in_charge.swap(true, Ordering::Relaxed) {
            return;
        }
        for (uuid, claim) in &locked(&self.former).0 {
            let file = disk.directory.join(format!("{uuid}.json"));
            if !file.exists() {
                continue;
            }
            let moved = match claim {
                Claim::Operator => continue,
                Claim::Tenant(source, key) => {
                    std::fs::rename(&file, disk.directory.join(former_file(uuid, *source, key)))
                }
                Claim::Several => self.set_aside_shared(uuid, &file),
            };
            if let Err(error) = moved {
                tracing::warn!(file = %file.display(), "cannot rename what an earlier release kept: {error}");
            }
        }
        let pending: Vec<_> = locked(&self.pending).drain().collect();
        for (owner, former) in pending {
            let path = disk.file(owner.as_str());
            if let Err(error) = take_over(&owner, &former, &path) {
                self.loads_failed.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(vm = owner.as_str(), %error, "cannot take over what an earlier release kept");
            }
        }
    }

    /// Renames a file that several VMs may have written.
    fn set_aside_shared(&self, uuid: &str, file: &Path) -> io::Result<()> {
        self.loads_failed.fetch_add(1, Ordering::Relaxed);
        let aside = file.with_extension("json.shared");
        std::fs::rename(file, &aside)?;
        tracing::warn!(
            uuid,
            "several VMs had this UUID, so an earlier release kept what their guests wrote in one file; none of them gets \
             it: let the guests write again, and remove {}",
            aside.display()
        );
        Ok(())
    }

    /// The file that an earlier release kept for a record's VM.
    pub(super) fn former_of(
        &self,
        owner: &Owner,
        source: RecordSource,
        key: &str,
        uuid: &str,
    ) -> Option<FormerFile> {
        let disk = self.disk.as_ref().filter(|_| source.is_of_tenants() && !owner.is_uuid())?;
        let waiting = disk.directory.join(former_file(uuid, source, key));
        let is_its_own = waiting.exists() || locked(&self.former).is_of(uuid, source, key);
        is_its_own.then(|| FormerFile { uuid: uuid.to_owned(), waiting })
    }

    /// Returns whether the file that this owner's UUID names was of other VMs than an operator's.
    pub(super) fn is_anothers(&self, owner: &Owner) -> bool {
        let in_charge = self.in_charge.load(Ordering::Relaxed);
        let former = locked(&self.former);
        former.0.get(owner.as_str()).is_some_and(|claim| !in_charge && *claim != Claim::Operator)
    }

    /// Reads what an earlier release kept of a VM, and takes it over if this agent is in charge of the files.
    pub(super) fn read_former(
        &self,
        owner: &Owner,
        former: FormerFile,
        path: &Path,
    ) -> Result<MailboxState, StateFileError> {
        if self.in_charge.load(Ordering::Relaxed) {
            take_over(owner, &former, path)?;
            return read(path, owner.as_str());
        }
        let named = path.with_file_name(format!("{}.json", former.uuid));
        let found = match read_any(&former.waiting)? {
            None => read_any(&named)?,
            found => found,
        };
        let uuid = former.uuid.clone();
        locked(&self.pending).insert(owner.clone(), former);
        match found {
            Some(state) => Ok(state.taken_over(&uuid, owner.as_str())),
            None => read(path, owner.as_str()).map(|state| state.taken_over(&uuid, owner.as_str())),
        }
    }
}

/// Writes a file of an earlier release under the name of its owner, and removes the former name.
fn take_over(owner: &Owner, former: &FormerFile, path: &Path) -> Result<(), StateFileError> {
    let Some(state) = read_any(&former.waiting)? else { return Ok(()) };
    let state = state.taken_over(&former.uuid, owner.as_str());
    private_file::replace(path, &serde_json::to_vec(&state).map_err(io::Error::from)?)?;
    private_file::remove(&former.waiting)?;
    tracing::info!(vm = owner.as_str(), uuid = former.uuid, "took over what an earlier release kept by UUID");
    Ok(())
}
