//! State that a guest writes: passwords, attributes, documents, and its parked requests.
//!
//! A mailbox belongs to a VM, not to a slot: all NICs of the VM share it, and it outlives changes of the VM's record.
//! What is in it belongs to one instance-id of the record: a VM that is built anew does not find what its predecessor
//! wrote.
//! Answers rendered in advance never take its lock. All its parts have limits; a VM that reaches every limit occupies
//! about 350 KiB.
//!
//! With a state directory, the passwords' state, guest attributes and documents outlive the agent, in one file per VM.
//! `mailboxes` of `metadata-state` writes these files through [`Kept`].

mod attributes;
mod kept;
mod state;
#[cfg(test)]
mod tests;
mod wait;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use crate::account::Account;
use crate::record::Dialects;
use crate::record::vm::Sinks;
use crate::sink::{MessageKind, Outbox, VmOutbox};
use state::Octets;
use wait::Waits;

pub use attributes::{
    ATTRIBUTE_OCTETS, ATTRIBUTES_OCTETS_PER_VM, ATTRIBUTES_PER_VM, AttributeRefused,
    NAME_CHARS as ATTRIBUTE_NAME_CHARS,
};
pub use kept::{Kept, Saver};
pub use state::State;
pub use wait::{WAITS_PER_VM, Wait};

/// Maximum length of a posted password in octets (OpenStack accepts 1,020).
pub const PASSWORD_OCTETS: usize = 1_020;
/// Maximum length of a document, in octets.
pub const DOCUMENT_OCTETS: usize = 32 << 10;

/// Why a posted password is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PasswordRefused {
    /// The password is empty.
    #[error("expected a password of 1 to {PASSWORD_OCTETS} octets, found none")]
    Empty,
    /// The password is longer than [`PASSWORD_OCTETS`].
    #[error("expected a password of at most {PASSWORD_OCTETS} octets, found more")]
    TooLarge,
    /// The guest has already posted a password, which it can do only once.
    #[error("expected the first password of this VM, found one that is already set")]
    AlreadySet,
}

/// A document is larger than [`DOCUMENT_OCTETS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a document of at most {DOCUMENT_OCTETS} octets, found more")]
pub struct DocumentTooLarge;

/// A document that guests of EVE write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Document {
    /// Document at `/eve/v1/kubeconfig`.
    Kubeconfig,
    /// Document at `/eve/v1/app/appCustomStatus`.
    AppCustomStatus,
}

/// The mailbox of one VM. Its methods never wait for a disk or a sink.
pub struct Mailbox {
    kept: Arc<Kept>,
    outbox: VmOutbox,
    waits: Mutex<Waits>,
    noted: Mutex<Noted>,
    account: Arc<Account>,
    /// The bits of [`Dialects`].
    asked: AtomicU32,
}

/// Values from the VM's record.
struct Noted {
    name: Arc<str>,
    /// The instance-id; `None` before the first record.
    instance: Option<Box<str>>,
    /// SHA-256 over a salt ([`State`]) and `admin.password`; empty without a password.
    password: Octets,
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("vm", &self.kept.vm()).finish_non_exhaustive()
    }
}

/// Locks the mutex, ignoring poison: every change below is complete or has not started.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mailbox {
    /// Creates an empty mailbox, in memory only, for the VM of this owner.
    #[must_use]
    pub fn new(vm: &str, outbox: &Outbox) -> Self {
        Self::with(Kept::in_memory(vm), outbox)
    }

    /// Creates the mailbox of a VM from its stored state.
    #[must_use]
    pub fn with(kept: Kept, outbox: &Outbox) -> Self {
        let outbox = outbox.for_vm(kept.vm());
        let noted = Mutex::new(Noted { name: "".into(), instance: None, password: Octets(Bytes::new()) });
        Self {
            kept: Arc::new(kept),
            outbox,
            waits: Mutex::default(),
            noted,
            account: Arc::default(),
            asked: AtomicU32::new(0),
        }
    }

    /// Returns the state that outlives the agent.
    #[must_use]
    pub fn kept(&self) -> &Arc<Kept> {
        &self.kept
    }

    /// Returns the owner of the VM's state.
    #[must_use]
    pub fn vm(&self) -> &str {
        self.kept.vm()
    }

    /// Returns the VM's account of memory and connections.
    #[must_use]
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Returns the dialects that the guest has asked for.
    #[must_use]
    pub fn asked(&self) -> Dialects {
        Dialects::from_bits(self.asked.load(Ordering::Relaxed))
    }

    /// Notes that the guest has asked for these dialects.
    pub fn note_asked(&self, dialects: Dialects) {
        self.asked.fetch_or(dialects.bits(), Ordering::Relaxed);
    }

    /// Stores `vm.name`, for messages, and `admin.password` of the VM's record. A changed password is served again
    /// even if the guest confirmed the former one.
    pub fn note_record(&self, name: &str, admin_password: Option<&str>) {
        let digest = Octets(admin_password.map_or_else(Bytes::new, |password| {
            let salt = self.kept.read(|state| state.salt.clone());
            let salt = salt.as_deref().unwrap_or(self.vm());
            let salted = Sha256::new().chain_update(salt).chain_update(":").chain_update(password);
            Bytes::copy_from_slice(&salted.finalize())
        }));
        let mut noted = locked(&self.noted);
        if self.kept.read(|state| state.taken_password.as_ref().is_some_and(|taken| *taken != digest)) {
            self.kept.change(|state| state.taken_password = None);
        }
        (noted.name, noted.password) = (name.into(), digest);
    }

    /// Stores the instance-id of the VM's record. What a guest of another instance-id wrote is removed; returns true if
    /// there was something.
    pub fn note_instance(&self, instance: &str) -> bool {
        let mut noted = locked(&self.noted);
        noted.instance = Some(instance.into());
        self.bind(instance)
    }

    /// Binds the state to an instance-id. The file is written only if something was removed: until then it may be
    /// another agent's.
    fn bind(&self, instance: &str) -> bool {
        let mut removed = false;
        self.kept.change_if(|state| {
            removed = state.set_instance(instance);
            removed
        });
        removed
    }

    /// Removes everything that the guest wrote or confirmed. Returns false if there was nothing.
    pub fn clear(&self) -> bool {
        let mut removed = false;
        self.kept.change_if(|state| {
            removed = state.clear();
            removed
        });
        removed
    }

    /// Replaces the state by the one that another agent stored. Drops the guest's confirmation in it if that was for
    /// another password than the record's, and everything in it if that was of another instance-id.
    pub fn replace(&self, state: State) {
        self.kept.replace(state);
        let noted = locked(&self.noted);
        if let Some(instance) = noted.instance.as_deref() {
            self.bind(instance);
        }
        if self.kept.read(|state| state.taken_password.as_ref().is_some_and(|taken| *taken != noted.password))
        {
            self.kept.change(|state| state.taken_password = None);
        }
    }

    /// Stores the password that the guest chose, once: 1 to [`PASSWORD_OCTETS`] octets.
    ///
    /// # Errors
    /// [`PasswordRefused`]. The size is checked first.
    pub fn post_password(&self, octets: &[u8]) -> Result<(), PasswordRefused> {
        if octets.is_empty() {
            return Err(PasswordRefused::Empty);
        }
        if octets.len() > PASSWORD_OCTETS {
            return Err(PasswordRefused::TooLarge);
        }
        self.kept.try_change(|state| match &state.posted_password {
            Some(_) => Err(PasswordRefused::AlreadySet),
            None => {
                state.posted_password = Some(Octets(Bytes::copy_from_slice(octets)));
                Ok(true)
            }
        })
    }

    /// Returns the password that the guest posted; empty if it posted none.
    #[must_use]
    pub fn posted_password(&self) -> Bytes {
        self.kept
            .read(|state| state.posted_password.as_ref().map(|octets| octets.0.clone()).unwrap_or_default())
    }

    /// Returns whether the guest confirmed that it saved the record's password.
    #[must_use]
    pub fn password_taken(&self) -> bool {
        self.kept.read(|state| state.taken_password.is_some())
    }

    /// Records that the guest saved the record's password (`saved_password`). It is then not served again.
    pub fn take_password(&self) {
        let noted = locked(&self.noted);
        if !self.password_taken() {
            self.kept.change(|state| state.taken_password = Some(noted.password.clone()));
        }
    }

    /// Returns a guest attribute; `None` if it is not set.
    #[must_use]
    pub fn attribute(&self, namespace: &str, key: &str) -> Option<Bytes> {
        self.kept.read(|state| state.attributes.get(namespace, key))
    }

    /// Sets a guest attribute.
    ///
    /// # Errors
    /// [`AttributeRefused`] if a limit would be exceeded; the attribute then does not change.
    pub fn set_attribute(&self, namespace: &str, key: &str, octets: &[u8]) -> Result<(), AttributeRefused> {
        self.kept.try_change(|state| state.attributes.set(namespace, key, octets))
    }

    /// Removes a guest attribute; returns false if there was none.
    #[must_use = "the guest's status depends on it"]
    pub fn delete_attribute(&self, namespace: &str, key: &str) -> bool {
        let removed: Result<(), ()> =
            self.kept.try_change(|state| state.attributes.remove(namespace, key).then_some(true).ok_or(()));
        removed.is_ok()
    }

    /// Returns the namespaces with their keys, all sorted.
    #[must_use]
    pub fn attributes(&self) -> Vec<(String, Vec<String>)> {
        self.kept.read(|state| state.attributes.list())
    }

    /// Returns a number that grows with each change of a guest attribute and starts at 0 with the agent.
    #[must_use]
    pub fn attributes_version(&self) -> u64 {
        self.kept.read(|state| state.attributes.version())
    }

    /// Stores a document and replaces the former one.
    ///
    /// # Errors
    /// [`DocumentTooLarge`] if it exceeds [`DOCUMENT_OCTETS`].
    pub fn store_document(&self, document: Document, octets: &[u8]) -> Result<(), DocumentTooLarge> {
        if octets.len() > DOCUMENT_OCTETS {
            return Err(DocumentTooLarge);
        }
        self.kept.try_change(|state| {
            let octets = Octets(Bytes::copy_from_slice(octets));
            let before = state.documents.insert(document, octets.clone());
            Ok(before != Some(octets))
        })
    }

    /// Returns a document that the guest wrote; `None` if it wrote none.
    #[must_use]
    pub fn document(&self, document: Document) -> Option<Bytes> {
        self.kept.read(|state| state.documents.get(&document).map(|octets| octets.0.clone()))
    }

    /// Registers one parked request. Dropping the result removes it.
    ///
    /// If [`WAITS_PER_VM`] requests are parked already, ends and counts the oldest.
    #[must_use]
    pub fn wait(&self) -> Arc<Wait> {
        let (wait, ended) = locked(&self.waits).enter();
        if ended {
            self.outbox.count_ended_wait();
        }
        wait
    }

    /// Queues a message of the guest for the sink that the record names for its kind, if any.
    ///
    /// Never waits and never fails: a message without room is counted ([`crate::sink::SinkCounts::dropped`]).
    pub fn send(&self, sinks: &Sinks, kind: MessageKind, body: &[u8], now_unix: u64) {
        let name = Arc::clone(&locked(&self.noted).name);
        self.outbox.send(sinks, kind, name, body, now_unix);
    }
}
