//! What one VM has written, and what it has taken.
//!
//! A mailbox belongs to a VM, not to a slot: all its NICs share it, and it stays when the VM's record is
//! rendered anew. Guests reach it only by requests that write, or wait; so its lock is not on the way of
//! ready bytes. Everything in it is bounded: a VM that fills all of it holds about 350 KiB.
//!
//! With a state directory, the password, the one-shot state, guest attributes and documents outlive the
//! agent, one file per VM: `mailboxes` of `metadata-state` writes what [`Kept`] hands it.

mod attributes;
mod kept;
mod state;
#[cfg(test)]
mod tests;
mod wait;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use crate::account::Account;
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

/// Most octets of a posted password (OpenStack's `Password` takes 1,020).
pub const PASSWORD_OCTETS: usize = 1_020;
/// Most octets of a document.
pub const DOCUMENT_OCTETS: usize = 32 << 10;

/// Why a posted password is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PasswordRefused {
    /// There is nothing in it.
    #[error("expected a password of 1 to {PASSWORD_OCTETS} octets, found none")]
    Empty,
    /// It is longer than is kept.
    #[error("expected a password of at most {PASSWORD_OCTETS} octets, found more")]
    TooLarge,
    /// There is one, and it is written once.
    #[error("expected the first password of this VM, found one that is already set")]
    AlreadySet,
}

/// A document larger than [`DOCUMENT_OCTETS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a document of at most {DOCUMENT_OCTETS} octets, found more")]
pub struct DocumentTooLarge;

/// A document that EVE's guests write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Document {
    /// `/eve/v1/kubeconfig`.
    Kubeconfig,
    /// `/eve/v1/app/appCustomStatus`.
    AppCustomStatus,
}

/// The mailbox of one VM. Its methods never wait for a disk or a receiver.
pub struct Mailbox {
    kept: Arc<Kept>,
    outbox: VmOutbox,
    waits: Mutex<Waits>,
    noted: Mutex<Noted>,
    account: Arc<Account>,
}

/// What is taken from the VM's record.
struct Noted {
    name: Arc<str>,
    /// SHA-256 over the VM's UUID and `admin.password`; empty without a password.
    password: Octets,
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("vm", &self.kept.vm()).finish_non_exhaustive()
    }
}

/// The lock's content, also after a panic elsewhere: every change below is whole or not begun.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mailbox {
    /// An empty mailbox for the VM with this UUID, in memory only.
    #[must_use]
    pub fn new(vm: &str, outbox: &Outbox) -> Self {
        Self::with(Kept::in_memory(vm), outbox)
    }

    /// The mailbox of a VM with what was kept of it.
    #[must_use]
    pub fn with(kept: Kept, outbox: &Outbox) -> Self {
        let outbox = outbox.for_vm(kept.vm());
        let noted = Mutex::new(Noted { name: "".into(), password: Octets(Bytes::new()) });
        Self { kept: Arc::new(kept), outbox, waits: Mutex::default(), noted, account: Arc::default() }
    }

    /// What outlives the agent.
    #[must_use]
    pub fn kept(&self) -> &Arc<Kept> {
        &self.kept
    }

    /// The VM's UUID.
    #[must_use]
    pub fn vm(&self) -> &str {
        self.kept.vm()
    }

    /// What the VM holds of the agent's memory.
    #[must_use]
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Takes from the VM's record what messages say (`vm.name`) and what the one-shot state hangs on
    /// (`admin.password`): with another password, it begins anew.
    pub fn note_record(&self, name: &str, admin_password: Option<&str>) {
        let digest = Octets(admin_password.map_or_else(Bytes::new, |password| {
            let salted = Sha256::new().chain_update(self.vm()).chain_update(":").chain_update(password);
            Bytes::copy_from_slice(&salted.finalize())
        }));
        let mut noted = locked(&self.noted);
        if self.kept.read(|state| state.taken_password.as_ref().is_some_and(|taken| *taken != digest)) {
            self.kept.change(|state| state.taken_password = None);
        }
        *noted = Noted { name: name.into(), password: digest };
    }

    /// Takes what another agent kept of the VM, and looks again whether the record's password is still the one that
    /// was taken.
    pub fn replace(&self, state: State) {
        self.kept.replace(state);
        let noted = locked(&self.noted);
        if self.kept.read(|state| state.taken_password.as_ref().is_some_and(|taken| *taken != noted.password))
        {
            self.kept.change(|state| state.taken_password = None);
        }
    }

    /// Keeps the password the guest chose, once: 1 to [`PASSWORD_OCTETS`] octets.
    ///
    /// # Errors
    /// [`PasswordRefused`]; the size is looked at first.
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

    /// The password the guest chose; empty when it chose none.
    #[must_use]
    pub fn posted_password(&self) -> Bytes {
        self.kept
            .read(|state| state.posted_password.as_ref().map(|octets| octets.0.clone()).unwrap_or_default())
    }

    /// True after the guest said that it saved the record's password.
    #[must_use]
    pub fn password_taken(&self) -> bool {
        self.kept.read(|state| state.taken_password.is_some())
    }

    /// The guest has saved the record's password (`saved_password`): it is not given again.
    pub fn take_password(&self) {
        let noted = locked(&self.noted);
        if !self.password_taken() {
            self.kept.change(|state| state.taken_password = Some(noted.password.clone()));
        }
    }

    /// A guest attribute.
    #[must_use]
    pub fn attribute(&self, namespace: &str, key: &str) -> Option<Bytes> {
        self.kept.read(|state| state.attributes.get(namespace, key))
    }

    /// Sets a guest attribute.
    ///
    /// # Errors
    /// [`AttributeRefused`] beyond a limit; what was there stays.
    pub fn set_attribute(&self, namespace: &str, key: &str, octets: &[u8]) -> Result<(), AttributeRefused> {
        self.kept.try_change(|state| state.attributes.set(namespace, key, octets))
    }

    /// Removes a guest attribute; false when there was none.
    #[must_use = "the guest hears whether there was one"]
    pub fn delete_attribute(&self, namespace: &str, key: &str) -> bool {
        let removed: Result<(), ()> =
            self.kept.try_change(|state| state.attributes.remove(namespace, key).then_some(true).ok_or(()));
        removed.is_ok()
    }

    /// The namespaces with their keys, all sorted.
    #[must_use]
    pub fn attributes(&self) -> Vec<(String, Vec<String>)> {
        self.kept.read(|state| state.attributes.list())
    }

    /// Grows with each change of a guest attribute; begins at 0 with the agent.
    #[must_use]
    pub fn attributes_version(&self) -> u64 {
        self.kept.read(|state| state.attributes.version())
    }

    /// Keeps a document in the place of the one before.
    ///
    /// # Errors
    /// [`DocumentTooLarge`] beyond [`DOCUMENT_OCTETS`].
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

    /// A document the guest wrote.
    #[must_use]
    pub fn document(&self, document: Document) -> Option<Bytes> {
        self.kept.read(|state| state.documents.get(&document).map(|octets| octets.0.clone()))
    }

    /// Registers one parked request; its place is free again when the result is dropped.
    ///
    /// Beyond [`WAITS_PER_VM`] the oldest is ended, and counted.
    #[must_use]
    pub fn wait(&self) -> Arc<Wait> {
        let (wait, ended) = locked(&self.waits).enter();
        if ended {
            self.outbox.count_ended_wait();
        }
        wait
    }

    /// Hands what the guest said to the sink the record names for it, if any.
    ///
    /// Never waits and never fails: what cannot be handed on is counted ([`crate::sink::SinkCounts`]).
    pub fn tell(&self, sinks: &Sinks, kind: MessageKind, body: &[u8], now_unix: u64) {
        let name = Arc::clone(&locked(&self.noted).name);
        self.outbox.tell(sinks, kind, name, body, now_unix);
    }
}
