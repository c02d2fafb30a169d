//! The mailboxes of all VMs and their files. A task off the packet path writes a VM's data to disk.

#[cfg(test)]
mod tests;

use metadata_common::printable::hex;
use metadata_common::run::unit_hint;
use metadata_content::mailbox::{Mailbox, MailboxState, StoredMailbox};
use metadata_content::record::values::{Secret, is_uuid};
use metadata_content::record::{Owner, Record};
use metadata_content::sink::Outbox;
use metadata_content::source::RecordSource;
use sha2::{Digest as _, Sha256};
use std::collections::{HashMap, HashSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use crate::state::asked_dialects::DialectsByUuid;
use crate::state::save_queue::{SaveQueue, StateFile};
use crate::state::vm_events::EventsByOwner;
use crate::state::{OtherVersion, private_file, set_aside};

/// Most bytes to read from a VM's file: all attributes, documents and names, as base64.
const FILE_BYTES: usize = 4 << 20;

/// Why mailboxes cannot be stored.
#[derive(Debug, thiserror::Error)]
#[error(
    "expected to {action} {path}, found: {source}; check the state directory and its permissions{}",
    unit_hint(source)
)]
pub struct MailboxError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

fn error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MailboxError {
    move |source| MailboxError { action, path: path.to_owned(), source }
}

/// Failures with files since the start, and the VMs' events now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MailboxCounts {
    /// Attempts to write a file of the state directory that failed.
    pub saves_failed: u64,
    /// Files that could not be read, or whose VM is unknown; their VMs start with an empty mailbox.
    pub loads_failed: u64,
    /// Events of VMs that are scheduled or have begun.
    pub pending_events: u64,
}

/// The mailboxes of all VMs by owner, each loaded on first use. Loading reads files, so only the control side may use
/// this.
#[derive(Debug)]
pub struct Mailboxes {
    outbox: Outbox,
    disk: Option<Disk>,
    table: Mutex<HashMap<String, Arc<Mailbox>>>,
    /// The dialects that VMs asked the previous agent for, until their mailboxes are loaded.
    asked: Mutex<DialectsByUuid>,
    /// The events that the previous agent stored, until the mailboxes of their VMs are loaded.
    events: Mutex<EventsByOwner>,
    loads_failed: AtomicU64,
    /// The records of the UUIDs by which an earlier release named files.
    former: Mutex<FormerRecords>,
    /// Files of an earlier release that are loaded and not taken over yet, by owner.
    pending: Mutex<HashMap<Owner, FormerFile>>,
    /// No other agent writes to the files any more.
    in_charge: AtomicBool,
}

/// A file that an earlier release named by the VM's UUID.
#[derive(Clone, Debug)]
struct FormerFile {
    uuid: String,
    /// Where the file waits for its record.
    waiting: PathBuf,
}

#[derive(Debug)]
struct Disk {
    directory: PathBuf,
    saves: SaveQueue,
}

impl Mailboxes {
    /// Mailboxes without files; they end with the agent.
    #[must_use]
    pub fn in_memory(outbox: Outbox) -> Self {
        Self {
            outbox,
            disk: None,
            table: Mutex::default(),
            asked: Mutex::default(),
            events: Mutex::default(),
            loads_failed: AtomicU64::new(0),
            former: Mutex::default(),
            pending: Mutex::default(),
            in_charge: AtomicBool::new(false),
        }
    }

    /// Mailboxes stored in `directory`, which this function creates with mode 0700 if needed. Changes are written by
    /// `saves`.
    ///
    /// # Errors
    /// [`MailboxError`] if the directory cannot be created or read.
    pub fn open(directory: &Path, outbox: Outbox, saves: &SaveQueue) -> Result<Self, MailboxError> {
        private_file::make_directory(directory).map_err(error("make", directory))?;
        fs::read_dir(directory).map_err(error("list", directory))?;
        let mut mailboxes = Self::in_memory(outbox);
        mailboxes.disk = Some(Disk { directory: directory.to_owned(), saves: saves.clone() });
        Ok(mailboxes)
    }

    /// The mailbox of the VM of this owner.
    ///
    /// Renames an unreadable file to end in `.json.bad` with a warning; the VM then starts with an empty mailbox.
    #[must_use]
    pub fn get(&self, owner: &Owner) -> Arc<Mailbox> {
        self.get_or_take_over(owner, None)
    }

    fn get_or_take_over(&self, owner: &Owner, former: Option<FormerFile>) -> Arc<Mailbox> {
        let mut table = locked(&self.table);
        if let Some(mailbox) = table.get(owner.as_str()) {
            return Arc::clone(mailbox);
        }
        let names = [Some(owner.as_str().to_owned()), former.as_ref().map(|former| former.uuid.clone())];
        let mailbox = Arc::new(Mailbox::with(self.load(owner, former), &self.outbox));
        for name in names.iter().flatten() {
            mailbox.note_asked(locked(&self.asked).remove(name).unwrap_or_default());
        }
        if let Some(events) = locked(&self.events).remove(owner.as_str()) {
            mailbox.events().restore(events, 0);
        }
        table.insert(owner.as_str().to_owned(), Arc::clone(&mailbox));
        mailbox
    }

    /// The mailbox of the VM of this owner, if it is in use. Reads no file.
    #[must_use]
    pub fn loaded(&self, owner: &Owner) -> Option<Arc<Mailbox>> {
        locked(&self.table).get(owner.as_str()).map(Arc::clone)
    }

    /// Notes the dialects that VMs asked the previous agent for.
    pub fn remember(&self, asked: DialectsByUuid) {
        let table = locked(&self.table);
        let mut later = locked(&self.asked);
        for (vm, dialects) in asked {
            match table.get(&vm) {
                Some(mailbox) => mailbox.note_asked(dialects),
                None => _ = later.insert(vm, dialects),
            }
        }
    }

    /// Takes over the events that the previous agent stored. `now_unix` is the time in Unix seconds.
    pub fn restore_events(&self, stored: EventsByOwner, now_unix: u64) {
        let table = locked(&self.table);
        let mut later = locked(&self.events);
        for (vm, events) in stored {
            match table.get(&vm) {
                Some(mailbox) => mailbox.events().restore(events, now_unix),
                None => _ = later.insert(vm, events),
            }
        }
    }

    /// The events of all VMs that have some.
    #[must_use]
    pub fn events(&self) -> EventsByOwner {
        let table = locked(&self.table);
        let mut events = locked(&self.events).clone();
        let loaded = table.iter().filter_map(|(vm, mailbox)| Some((vm.clone(), mailbox.events().stored()?)));
        events.extend(loaded);
        events
    }

    /// The dialects that VMs have asked this agent and the previous ones for.
    #[must_use]
    pub fn asked(&self) -> DialectsByUuid {
        let table = locked(&self.table);
        let mut asked = locked(&self.asked).clone();
        let loaded = table.iter().map(|(vm, mailbox)| (vm.clone(), mailbox.asked()));
        asked.extend(loaded.filter(|(_, dialects)| !dialects.is_empty()));
        asked
    }

    /// The mailbox of a record's VM, updated from the record ([`Mailbox::note_instance`], [`Mailbox::note_record`]).
    /// Call this for each record that is rendered.
    #[must_use]
    pub fn for_record(&self, source: RecordSource, key: &str, record: &Record) -> Arc<Mailbox> {
        let owner = record.owner();
        let former = self.former_of(&owner, source, key, record.vm.uuid.as_str());
        let mailbox = self.get_or_take_over(&owner, former);
        let password = record.admin.as_ref().and_then(|admin| admin.password.as_ref()).map(Secret::expose);
        if mailbox.note_instance(record.instance_id()) {
            let instance = record.instance_id();
            tracing::info!(
                vm = owner.as_str(),
                instance,
                "another instance-id: removed what the former guest wrote"
            );
        }
        mailbox.note_record(record.vm.name.as_str(), password);
        mailbox
    }

    /// Removes what a VM's guest wrote, in memory and from the disk as soon as `saves` has written. Returns false if
    /// there was nothing.
    pub fn clear(&self, owner: &Owner) -> bool {
        self.get(owner).clear()
    }

    /// Forgets a VM after its record is gone, and removes its file. A later VM of that owner starts with an empty
    /// mailbox.
    ///
    /// # Errors
    /// [`MailboxError`] if the file cannot be removed now. Its removal is tried again, and nobody reads it meanwhile.
    pub fn forget(&self, vm: &Owner) -> Result<(), MailboxError> {
        // The lock stays held, so that nothing loads the file during its removal.
        let mut table = locked(&self.table);
        locked(&self.asked).remove(vm.as_str());
        locked(&self.events).remove(vm.as_str());
        if let Some(mailbox) = table.remove(vm.as_str()) {
            mailbox.kept().detach();
        }
        let Some(disk) = &self.disk else { return Ok(()) };
        let path = disk.file(vm.as_str());
        remove(&path).map_err(|source| {
            let (again, file) = (path.clone(), StateFile::Mailbox(vm.as_str().into()));
            disk.saves.submit_failed(file, &source, move || remove(&again));
            error("remove", &path)(source)
        })
    }

    /// Removes the files of VMs that ended while no agent ran. A VM has ended if it is not loaded and `known` does not
    /// have its owner. Returns the number of removed files.
    ///
    /// # Errors
    /// [`MailboxError`] if the directory cannot be listed, or a file cannot be removed.
    pub fn sweep<'a>(&self, known: impl IntoIterator<Item = &'a str>) -> Result<usize, MailboxError> {
        let Some(disk) = &self.disk else { return Ok(0) };
        let table = locked(&self.table);
        let known: HashSet<&str> = known.into_iter().collect();
        locked(&self.asked).retain(|vm, _| known.contains(&**vm));
        locked(&self.events).retain(|vm, _| known.contains(&**vm));
        let stems: HashSet<String> =
            known.into_iter().chain(table.keys().map(|vm| &**vm)).map(stem).collect();
        let mut removed = 0;
        for entry in fs::read_dir(&disk.directory).map_err(error("list", &disk.directory))? {
            let path = entry.map_err(error("list", &disk.directory))?.path();
            let Some(stem) = path.file_name().and_then(|name| stem_of(name.to_str()?)) else {
                continue;
            };
            if stems.contains(stem) {
                continue;
            }
            private_file::remove(&path).map_err(error("remove", &path))?;
            removed += 1;
        }
        Ok(removed)
    }

    /// Takes charge of the files, and reads that of each loaded mailbox again, because another agent wrote it until
    /// now. An unreadable file leaves its mailbox unchanged. The call blocks on the disk.
    pub fn reload(&self) {
        self.take_charge();
        let Some(disk) = &self.disk else { return };
        for mailbox in locked(&self.table).values() {
            match read(&disk.file(mailbox.vm()), mailbox.vm()) {
                Ok(state) => mailbox.replace(state),
                Err(error) => {
                    self.loads_failed.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(vm = mailbox.vm(), %error, "cannot read the VM's mailbox again");
                }
            }
        }
    }

    /// Failures with files since the start, and the VMs' events now.
    #[must_use]
    pub fn counts(&self) -> MailboxCounts {
        MailboxCounts {
            saves_failed: self.disk.as_ref().map_or(0, |disk| disk.saves.failed()),
            loads_failed: self.loads_failed.load(Ordering::Relaxed),
            pending_events: locked(&self.table).values().map(|mailbox| mailbox.events().pending()).sum(),
        }
    }

    fn load(&self, owner: &Owner, former: Option<FormerFile>) -> StoredMailbox {
        let vm = owner.as_str();
        let Some(disk) = &self.disk else { return StoredMailbox::in_memory(vm) };
        let path = disk.file(vm);
        // The file of a former VM may still wait for its removal.
        let is_removed = disk.saves.is_unsaved(&StateFile::Mailbox(vm.into()));
        let found = match former {
            Some(former) => self.read_former(owner, former, &path),
            None if is_removed || self.is_anothers(owner) => Ok(MailboxState::default()),
            None => read(&path, vm),
        };
        let state = found.unwrap_or_else(|error| {
            self.loads_failed.fetch_add(1, Ordering::Relaxed);
            if let StateFileError::Version(error) = &error {
                tracing::warn!(vm, %error, "the VM's mailbox starts empty");
                return MailboxState::default();
            }
            let kept = fs::rename(&path, bad(&path));
            tracing::warn!(vm, %error, aside = kept.is_ok(), "cannot read the VM's mailbox; it starts empty");
            MailboxState::default()
        });
        let saves = disk.saves.clone();
        let save = move |kept: Arc<StoredMailbox>| {
            saves.submit(StateFile::Mailbox(kept.vm().into()), move || write(&kept));
        };
        StoredMailbox::new(vm, state, Some(path), Some(Box::new(save)))
    }
}

impl Disk {
    fn file(&self, vm: &str) -> PathBuf {
        self.directory.join(format!("{}.json", stem(vm)))
    }
}

/// The name of the file of a VM's state, without its ending, by the VM's owner: the owner itself if that is a UUID, or
/// else a hash of it, because an owner may be any text. The file then names the owner.
fn stem(owner: &str) -> String {
    if is_uuid(owner) {
        return owner.to_owned();
    }
    let kind = owner.split_once('/').map_or("", |(kind, _)| kind);
    let kind = RecordSource::of(kind).map_or("owner", RecordSource::name);
    format!("{kind}-{}", hex(&Sha256::digest(owner)))
}

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
enum StateFileError {
    /// It cannot be read, or is not a mailbox.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is not the file of this VM.
    #[error("expected the mailbox of this VM, found another's")]
    Owner,
    /// Another release wrote it, in a version that this one does not read. It stays where it is, because that release
    /// may still run: this one may be about to take over from it.
    #[error(transparent)]
    Version(OtherVersion),
}

/// Reads the state file of an owner; a missing file is an empty state.
fn read(path: &Path, owner: &str) -> Result<MailboxState, StateFileError> {
    let Some(state) = read_any(path)? else { return Ok(MailboxState::default()) };
    let is_its_own = state.owner() == Some(owner).filter(|owner| !is_uuid(owner));
    if is_its_own { Ok(state) } else { Err(StateFileError::Owner) }
}

fn read_any(path: &Path) -> Result<Option<MailboxState>, StateFileError> {
    let Some(text) = private_file::read(path, FILE_BYTES)? else { return Ok(None) };
    if let Some(found) = MailboxState::version_of(&text).filter(|found| *found != MailboxState::VERSION) {
        let (oldest, newest) = (MailboxState::VERSION, MailboxState::VERSION);
        return Err(StateFileError::Version(OtherVersion { kind: "a mailbox", found, oldest, newest }));
    }
    // The parser's message could repeat a password.
    let place = |error: serde_json::Error| {
        let place = format!("expected a mailbox, found something else at line {}", error.line());
        io::Error::new(io::ErrorKind::InvalidData, format!("{place}, column {}", error.column()))
    };
    Ok(Some(serde_json::from_slice(&text).map_err(place)?))
}

/// Removes a VM's file, and the unreadable one that was set aside.
fn remove(path: &Path) -> io::Result<()> {
    [path, &bad(path)].into_iter().try_for_each(|path| private_file::remove(path).map(drop))
}

/// The path of an unreadable file after its rename.
fn bad(path: &Path) -> PathBuf {
    path.with_extension("json.bad")
}

/// The name of a state file without its ending; `None` for any other file in the directory.
fn stem_of(name: &str) -> Option<&str> {
    let (stem, rest) = name.split_once(".json")?;
    let is_version = |rest: &str| rest.strip_prefix(".v").is_some_and(|number| number.parse::<u32>().is_ok());
    if !(matches!(rest, "" | ".bad") || is_version(rest)) {
        return None;
    }
    let is_hash = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_hashed = || {
        let (kind, hash) = stem.rsplit_once('-')?;
        Some(is_hash(hash) && (kind == "owner" || kind == KIND || RecordSource::of(kind).is_some()))
    };
    let is_lower = !stem.bytes().any(|byte| byte.is_ascii_uppercase());
    (is_lower && (is_uuid(stem) || is_hashed() == Some(true))).then_some(stem)
}

/// Locks, even after a panic elsewhere: no operation leaves the table inconsistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(kept: &StoredMailbox) -> io::Result<()> {
    kept.save(|path, bytes| {
        spare_other_version(path)?;
        private_file::replace(path, bytes)
    })
}

/// Keeps a file of another version, which a write would replace.
fn spare_other_version(path: &Path) -> io::Result<()> {
    let Some(file) = private_file::open(path)? else { return Ok(()) };
    let mut bytes = Vec::new();
    file.take(MailboxState::PREFIX as u64).read_to_end(&mut bytes)?;
    match MailboxState::version_of(&bytes) {
        Some(found) if found != MailboxState::VERSION => set_aside(path, found),
        _ => Ok(()),
    }
}

// Files of a release that named them by the VM's UUID, which tenants choose on some platforms.
//
// A file is taken over by the record that had its UUID, and only if that was one record: what two VMs could write is
// given to neither. Which records had a UUID is known from what the earlier agent left ([`FormerRecords`]).
//
// ```text
//  one record had the UUID, and it      <uuid>.json ─▶ former-<hash>.json ─▶ kubevirt-<hash of the owner>.json
//  is of a platform's tenants                      take_charge()        its record arrives
//  several VMs had it                   <uuid>.json ─▶ <uuid>.json.shared, with a warning
//  it was of an operator's record       <uuid>.json stays
// ```
//
// Until [`Mailboxes::take_charge`] the earlier agent may still run and write `<uuid>.json`.

/// The beginning of the names of files that wait for their record.
const KIND: &str = "former";

/// The records that had each UUID while an earlier release ran.
#[derive(Debug, Default)]
pub struct FormerRecords(HashMap<String, Claim>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Claim {
    /// Operators' records, which take precedence over each other by their UUID.
    Operator,
    /// One record of a platform's tenants, by its key.
    Tenant(RecordSource, String),
    /// Records of several VMs.
    Several,
}

impl FormerRecords {
    /// Notes a record that had this UUID and no owner besides.
    pub fn note(&mut self, uuid: &str, source: RecordSource, key: &str) {
        let claim = if source.is_of_tenants() {
            Claim::Tenant(source, vm_of(key).to_owned())
        } else {
            Claim::Operator
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
fn former_file(uuid: &str, source: RecordSource, key: &str) -> String {
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
                    fs::rename(&file, disk.directory.join(former_file(uuid, *source, key)))
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
        fs::rename(file, &aside)?;
        tracing::warn!(
            uuid,
            "several VMs had this UUID, so an earlier release kept what their guests wrote in one file; none of them gets \
             it: let the guests write again, and remove {}",
            aside.display()
        );
        Ok(())
    }

    /// The file that an earlier release kept for a record's VM.
    fn former_of(&self, owner: &Owner, source: RecordSource, key: &str, uuid: &str) -> Option<FormerFile> {
        let disk = self.disk.as_ref().filter(|_| source.is_of_tenants() && !owner.is_uuid())?;
        let waiting = disk.directory.join(former_file(uuid, source, key));
        let is_its_own = waiting.exists() || locked(&self.former).is_of(uuid, source, key);
        is_its_own.then(|| FormerFile { uuid: uuid.to_owned(), waiting })
    }

    /// Returns whether the file that this owner's UUID names was of VMs other than an operator's.
    fn is_anothers(&self, owner: &Owner) -> bool {
        let in_charge = self.in_charge.load(Ordering::Relaxed);
        let former = locked(&self.former);
        former.0.get(owner.as_str()).is_some_and(|claim| !in_charge && *claim != Claim::Operator)
    }

    /// Reads what an earlier release kept of a VM, and takes it over if this agent is in charge of the files.
    fn read_former(
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
