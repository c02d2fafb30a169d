//! The mailboxes of all VMs and their files. A task off the packet path writes a VM's data to disk.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metadata_content::mailbox::{Kept, Mailbox, State};
use metadata_content::record::Record;
use metadata_content::record::values::{Secret, Uuid, is_uuid};
use metadata_content::sink::Outbox;

use crate::asked::Asked;
use crate::form::{OtherVersion, set_aside};
use crate::private_file;
use crate::save_queue::{SaveQueue, StateFile};

/// Most octets to read from a VM's file: all attributes, documents and names, as base64.
const FILE_OCTETS: usize = 4 << 20;

/// Why mailboxes cannot be stored.
#[derive(Debug, thiserror::Error)]
#[error("expected to {action} {path}, found: {source}; check the state directory and its rights")]
pub struct MailboxError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

fn error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MailboxError {
    move |source| MailboxError { action, path: path.to_owned(), source }
}

/// Failures with files since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MailboxCounts {
    /// Attempts to write a file of the state directory that failed.
    pub saves_failed: u64,
    /// Files that could not be read; their VMs start with an empty mailbox.
    pub loads_failed: u64,
}

/// The mailboxes of all VMs by UUID, each loaded on first use. Loading reads files, so only the control side may use
/// this.
#[derive(Debug)]
pub struct Mailboxes {
    outbox: Outbox,
    disk: Option<Disk>,
    table: Mutex<HashMap<String, Arc<Mailbox>>>,
    /// The dialects that VMs asked the previous agent for, until their mailboxes are loaded.
    asked: Mutex<Asked>,
    loads_failed: AtomicU64,
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
            loads_failed: AtomicU64::new(0),
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

    /// The mailbox of the VM with this UUID.
    ///
    /// Renames an unreadable file to `<uuid>.json.bad` with a warning; the VM then starts with an empty mailbox.
    #[must_use]
    pub fn get(&self, vm: &Uuid) -> Arc<Mailbox> {
        let mut table = locked(&self.table);
        if let Some(mailbox) = table.get(vm.as_str()) {
            return Arc::clone(mailbox);
        }
        let mailbox = Arc::new(Mailbox::with(self.load(vm.as_str()), &self.outbox));
        mailbox.note_asked(locked(&self.asked).remove(vm.as_str()).unwrap_or_default());
        table.insert(vm.as_str().to_owned(), Arc::clone(&mailbox));
        mailbox
    }

    /// Notes the dialects that VMs asked the previous agent for.
    pub fn remember(&self, asked: Asked) {
        let table = locked(&self.table);
        let mut later = locked(&self.asked);
        for (vm, dialects) in asked {
            match table.get(&vm) {
                Some(mailbox) => mailbox.note_asked(dialects),
                None => _ = later.insert(vm, dialects),
            }
        }
    }

    /// The dialects that VMs have asked this agent and the previous ones for.
    #[must_use]
    pub fn asked(&self) -> Asked {
        let table = locked(&self.table);
        let mut asked = locked(&self.asked).clone();
        let loaded = table.iter().map(|(vm, mailbox)| (vm.clone(), mailbox.asked()));
        asked.extend(loaded.filter(|(_, dialects)| !dialects.is_empty()));
        asked
    }

    /// The mailbox of a record's VM, updated from the record ([`Mailbox::note_record`]). Call this for each record that
    /// is rendered.
    #[must_use]
    pub fn for_record(&self, record: &Record) -> Arc<Mailbox> {
        let mailbox = self.get(&record.vm.uuid);
        let password = record.admin.as_ref().and_then(|admin| admin.password.as_ref()).map(Secret::expose);
        mailbox.note_record(record.vm.name.as_str(), password);
        mailbox
    }

    /// Forgets a VM after its record is gone, and removes its file. A later VM of that UUID starts with an empty
    /// mailbox.
    ///
    /// # Errors
    /// [`MailboxError`] if the file cannot be removed now. Its removal is tried again, and nobody reads it meanwhile.
    pub fn forget(&self, vm: &Uuid) -> Result<(), MailboxError> {
        // The lock stays held, so that nothing loads the file during its removal.
        let mut table = locked(&self.table);
        locked(&self.asked).remove(vm.as_str());
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

    /// Removes the files of VMs that ended while no agent ran. A VM has ended if it is not loaded and
    /// `is_known` returns false for its UUID. Returns the number of removed files.
    ///
    /// # Errors
    /// [`MailboxError`] if the directory cannot be listed, or a file cannot be removed.
    pub fn sweep(&self, is_known: impl Fn(&str) -> bool) -> Result<usize, MailboxError> {
        let Some(disk) = &self.disk else { return Ok(0) };
        let table = locked(&self.table);
        locked(&self.asked).retain(|vm, _| is_known(vm));
        let mut removed = 0;
        for entry in fs::read_dir(&disk.directory).map_err(error("list", &disk.directory))? {
            let path = entry.map_err(error("list", &disk.directory))?.path();
            let Some(vm) = path.file_name().and_then(|name| vm_of(name.to_str()?)) else {
                continue;
            };
            if table.contains_key(vm) || is_known(vm) {
                continue;
            }
            private_file::remove(&path).map_err(error("remove", &path))?;
            removed += 1;
        }
        Ok(removed)
    }

    /// Reads the file of each loaded mailbox again, because another agent wrote it until now. An unreadable file leaves
    /// its mailbox unchanged. The call blocks on the disk.
    pub fn reload(&self) {
        let Some(disk) = &self.disk else { return };
        for mailbox in locked(&self.table).values() {
            match read(&disk.file(mailbox.vm())) {
                Ok(state) => mailbox.replace(state),
                Err(error) => {
                    self.loads_failed.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(vm = mailbox.vm(), %error, "cannot read the VM's mailbox again");
                }
            }
        }
    }

    /// Failures with files since the start.
    #[must_use]
    pub fn counts(&self) -> MailboxCounts {
        MailboxCounts {
            saves_failed: self.disk.as_ref().map_or(0, |disk| disk.saves.failed()),
            loads_failed: self.loads_failed.load(Ordering::Relaxed),
        }
    }

    fn load(&self, vm: &str) -> Kept {
        let Some(disk) = &self.disk else { return Kept::in_memory(vm) };
        let path = disk.file(vm);
        // The file of a former VM may still wait for its removal.
        let is_removed = disk.saves.is_unsaved(&StateFile::Mailbox(vm.into()));
        let found = if is_removed { Ok(State::default()) } else { read(&path) };
        let state = found.unwrap_or_else(|error| {
            self.loads_failed.fetch_add(1, Ordering::Relaxed);
            if let Unreadable::Version(error) = &error {
                tracing::warn!(vm, %error, "the VM's mailbox starts empty");
                return State::default();
            }
            let kept = fs::rename(&path, bad(&path));
            tracing::warn!(vm, %error, aside = kept.is_ok(), "cannot read the VM's mailbox; it starts empty");
            State::default()
        });
        let saves = disk.saves.clone();
        let save = move |kept: Arc<Kept>| {
            saves.submit(StateFile::Mailbox(kept.vm().into()), move || write(&kept));
        };
        Kept::new(vm, state, Some(path), Some(Box::new(save)))
    }
}

impl Disk {
    fn file(&self, vm: &str) -> PathBuf {
        self.directory.join(format!("{vm}.json"))
    }
}

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
enum Unreadable {
    /// It cannot be read, or is no mailbox.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Another release wrote it, in a version that this one does not read. It stays where it is, because that release
    /// may still run: this one may be about to take over from it.
    #[error(transparent)]
    Version(OtherVersion),
}

/// Reads a state file; a missing file is an empty state.
fn read(path: &Path) -> Result<State, Unreadable> {
    let Some(text) = private_file::read(path, FILE_OCTETS)? else { return Ok(State::default()) };
    if let Some(found) = State::version_of(&text).filter(|found| *found != State::VERSION) {
        let (oldest, newest) = (State::VERSION, State::VERSION);
        return Err(Unreadable::Version(OtherVersion { kind: "a mailbox", found, oldest, newest }));
    }
    // The parser's message could repeat a password.
    let place = |error: serde_json::Error| {
        let place = format!("expected a mailbox, found something else at line {}", error.line());
        io::Error::new(io::ErrorKind::InvalidData, format!("{place}, column {}", error.column()))
    };
    Ok(serde_json::from_slice(&text).map_err(place)?)
}

/// Removes a VM's file, and the unreadable one that was set aside.
fn remove(path: &Path) -> io::Result<()> {
    [path, &bad(path)].into_iter().try_for_each(|path| private_file::remove(path).map(drop))
}

/// The path of an unreadable file after its rename.
fn bad(path: &Path) -> PathBuf {
    path.with_extension("json.bad")
}

/// The VM of a state file; `None` for any other file in the directory.
fn vm_of(name: &str) -> Option<&str> {
    let (vm, rest) = name.split_once(".json")?;
    let is_version = |rest: &str| rest.strip_prefix(".v").is_some_and(|number| number.parse::<u32>().is_ok());
    if !(matches!(rest, "" | ".bad") || is_version(rest)) {
        return None;
    }
    (is_uuid(vm) && !vm.bytes().any(|b| b.is_ascii_uppercase())).then_some(vm)
}

/// Locks, even after a panic elsewhere: no operation leaves the table inconsistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(kept: &Kept) -> io::Result<()> {
    kept.save(|path, octets| {
        spare_other_version(path)?;
        private_file::replace(path, octets)
    })
}

/// Keeps a file of another version, which a write would replace.
fn spare_other_version(path: &Path) -> io::Result<()> {
    let Some(file) = private_file::open(path)? else { return Ok(()) };
    let mut octets = Vec::new();
    file.take(State::PREFIX as u64).read_to_end(&mut octets)?;
    match State::version_of(&octets) {
        Some(found) if found != State::VERSION => set_aside(path, found),
        _ => Ok(()),
    }
}
