//! The mailboxes of all VMs, and their files: what a VM wrote is put on disk off the packet path.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use metadata_content::mailbox::{Kept, Mailbox, State};
use metadata_content::record::Record;
use metadata_content::record::values::{Secret, Uuid, is_uuid};
use metadata_content::sink::Outbox;

use crate::private_file;

/// Changes are gathered for this long, so that a guest cannot have its file written more often.
const SAVE_PAUSE: Duration = Duration::from_millis(250);
/// Most octets of a VM's file that are read: all attributes, documents and names, as base64.
const FILE_OCTETS: usize = 4 << 20;

/// Why mailboxes cannot be kept.
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

/// What went wrong with files, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MailboxCounts {
    /// Files that could not be written.
    pub saves_failed: u64,
    /// Files that could not be read: their VMs began with an empty mailbox.
    pub loads_failed: u64,
}

/// The mailboxes of all VMs, by UUID, each loaded on first use. For the control side: it reads files.
#[derive(Debug)]
pub struct Mailboxes {
    outbox: Outbox,
    disk: Option<Disk>,
    table: Mutex<HashMap<String, Arc<Mailbox>>>,
    saves: Arc<Outcomes>,
    loads_failed: AtomicU64,
}

#[derive(Debug)]
struct Disk {
    directory: PathBuf,
    saver: UnboundedSender<Arc<Kept>>,
}

impl Mailboxes {
    /// Mailboxes that end with the agent.
    #[must_use]
    pub fn in_memory(outbox: Outbox) -> Self {
        Self {
            outbox,
            disk: None,
            table: Mutex::default(),
            saves: Arc::default(),
            loads_failed: AtomicU64::new(0),
        }
    }

    /// Mailboxes kept in `directory`, which is made with mode 0700 when it is not there; the second part is
    /// for [`save()`].
    ///
    /// # Errors
    /// [`MailboxError`] when the directory cannot be made or read.
    pub fn open(directory: &Path, outbox: Outbox) -> Result<(Self, Saves), MailboxError> {
        private_file::make_directory(directory).map_err(error("make", directory))?;
        fs::read_dir(directory).map_err(error("list", directory))?;
        let (saver, queue) = unbounded_channel();
        let mut mailboxes = Self::in_memory(outbox);
        mailboxes.disk = Some(Disk { directory: directory.to_owned(), saver });
        let outcomes = Arc::clone(&mailboxes.saves);
        Ok((mailboxes, Saves { queue, outcomes }))
    }

    /// The mailbox of the VM with this UUID.
    ///
    /// A file that cannot be read is put aside as `<uuid>.json.bad`, with a warning, and the VM begins anew.
    #[must_use]
    pub fn get(&self, vm: &Uuid) -> Arc<Mailbox> {
        let mut table = locked(&self.table);
        if let Some(mailbox) = table.get(vm.as_str()) {
            return Arc::clone(mailbox);
        }
        let mailbox = Arc::new(Mailbox::with(self.load(vm.as_str()), &self.outbox));
        table.insert(vm.as_str().to_owned(), Arc::clone(&mailbox));
        mailbox
    }

    /// The mailbox of the record's VM, told of the record ([`Mailbox::note_record`]). Call it whenever a
    /// record is rendered.
    #[must_use]
    pub fn for_record(&self, record: &Record) -> Arc<Mailbox> {
        let mailbox = self.get(&record.vm.uuid);
        let password = record.admin.as_ref().and_then(|admin| admin.password.as_ref()).map(Secret::expose);
        mailbox.note_record(record.vm.name.as_str(), password);
        mailbox
    }

    /// Forgets a VM whose record is gone, and removes its file: the next VM of that UUID begins anew.
    ///
    /// # Errors
    /// [`MailboxError`] when the file cannot be removed.
    pub fn forget(&self, vm: &Uuid) -> Result<(), MailboxError> {
        // Held to the end, so that nobody loads what is being removed.
        let mut table = locked(&self.table);
        if let Some(mailbox) = table.remove(vm.as_str()) {
            mailbox.kept().detach();
        }
        let Some(disk) = &self.disk else { return Ok(()) };
        let path = disk.file(vm.as_str());
        [&path, &bad(&path)]
            .into_iter()
            .try_for_each(|path| private_file::remove(path).map(drop).map_err(error("remove", path)))
    }

    /// Removes the files of VMs that went away while no agent ran: those that are not loaded and that
    /// `is_known` does not know by UUID. Returns how many.
    ///
    /// # Errors
    /// [`MailboxError`] when the directory cannot be listed, or a file cannot be removed.
    pub fn sweep(&self, is_known: impl Fn(&str) -> bool) -> Result<usize, MailboxError> {
        let Some(disk) = &self.disk else { return Ok(0) };
        let table = locked(&self.table);
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

    /// Reads the file of every mailbox in memory again: another agent kept it until now. A file that cannot be read leaves
    /// its mailbox as it is. It waits for the disk.
    pub fn reload(&self) {
        let Some(disk) = &self.disk else { return };
        for mailbox in locked(&self.table).values() {
            match read(&disk.file(mailbox.vm())) {
                Ok(state) => mailbox.replace(state),
                Err(error) => {
                    self.loads_failed.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(vm = mailbox.vm(), %error, "what the VM wrote last cannot be read");
                }
            }
        }
    }

    /// Writes every file that is behind, now: for the end of the agent. It waits for the disk.
    pub fn save_all(&self) {
        let mailboxes: Vec<_> = locked(&self.table).values().cloned().collect();
        mailboxes.iter().for_each(|mailbox| self.saves.save(mailbox.kept()));
    }

    /// What went wrong with files.
    #[must_use]
    pub fn counts(&self) -> MailboxCounts {
        MailboxCounts {
            saves_failed: self.saves.failed.load(Ordering::Relaxed),
            loads_failed: self.loads_failed.load(Ordering::Relaxed),
        }
    }

    fn load(&self, vm: &str) -> Kept {
        let Some(disk) = &self.disk else { return Kept::in_memory(vm) };
        let path = disk.file(vm);
        let state = read(&path).unwrap_or_else(|error| {
            self.loads_failed.fetch_add(1, Ordering::Relaxed);
            let kept = fs::rename(&path, bad(&path));
            tracing::warn!(vm, %error, aside = kept.is_ok(), "what the VM wrote cannot be read; it begins anew");
            State::default()
        });
        let queue = disk.saver.clone();
        // Once nobody saves any more the agent is ending, and saves what is left by itself.
        Kept::new(vm, state, Some(path), Some(Box::new(move |kept| _ = queue.send(kept))))
    }
}

impl Disk {
    fn file(&self, vm: &str) -> PathBuf {
        self.directory.join(format!("{vm}.json"))
    }
}

/// The state in a file; an empty one when there is no file.
fn read(path: &Path) -> io::Result<State> {
    let Some(text) = private_file::read(path, FILE_OCTETS)? else { return Ok(State::default()) };
    // The parser's own words may repeat a password.
    let place = |error: serde_json::Error| {
        let place = format!("expected a mailbox, found something else at line {}", error.line());
        io::Error::new(io::ErrorKind::InvalidData, format!("{place}, column {}", error.column()))
    };
    serde_json::from_slice(&text).map_err(place)
}

/// Where a file that cannot be read is put.
fn bad(path: &Path) -> PathBuf {
    path.with_extension("json.bad")
}

/// Whose file this is; none for files that are not ours, whatever else is in the directory.
fn vm_of(name: &str) -> Option<&str> {
    let vm = name.strip_suffix(".json").or_else(|| name.strip_suffix(".json.bad"))?;
    (is_uuid(vm) && !vm.bytes().any(|b| b.is_ascii_uppercase())).then_some(vm)
}

/// The lock's content, also after a panic elsewhere: the table is whole at any time.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(kept: &Kept) -> io::Result<()> {
    kept.save(private_file::replace)
}

/// What became of saves.
#[derive(Debug, Default)]
struct Outcomes {
    failed: AtomicU64,
    /// The last one failed, and was logged: guests cannot fill the log.
    failing: AtomicBool,
}

impl Outcomes {
    fn save(&self, kept: &Kept) {
        match write(kept) {
            Ok(()) => self.failing.store(false, Ordering::Relaxed),
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                if !self.failing.swap(true, Ordering::Relaxed) {
                    let vm = kept.vm();
                    tracing::warn!(vm, %error, "what VMs write is not on disk; check the state directory");
                }
            }
        }
    }
}

/// Mailboxes to save. For [`save()`].
#[derive(Debug)]
pub struct Saves {
    queue: UnboundedReceiver<Arc<Kept>>,
    outcomes: Arc<Outcomes>,
}

/// Saves changed mailboxes, one after the other, until their [`Mailboxes`] is gone.
///
/// What cannot be written is counted, and tried again with that VM's next change.
pub async fn save(mut saves: Saves) {
    while let Some(first) = saves.queue.recv().await {
        tokio::time::sleep(SAVE_PAUSE).await;
        let mut batch = vec![first];
        while let Ok(next) = saves.queue.try_recv() {
            batch.push(next);
        }
        let outcomes = Arc::clone(&saves.outcomes);
        // The task ends early only with the runtime, and the agent saves what is left by itself.
        let _ = tokio::task::spawn_blocking(move || batch.iter().for_each(|kept| outcomes.save(kept))).await;
    }
}
