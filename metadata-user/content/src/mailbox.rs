//! State that a guest writes: passwords, attributes, documents, and its parked requests.
//!
//! A mailbox belongs to a VM, not to a slot: all NICs of the VM share it, and it outlives changes of the VM's record.
//! What is in it belongs to one instance-id of the record: a VM that is rebuilt does not find what its predecessor
//! wrote.
//! Answers rendered in advance never take its lock. All its parts have limits; a VM that reaches every limit occupies
//! about 350 KiB.
//!
//! With a state directory, the passwords' state, guest attributes and documents outlive the agent, in one file per VM.
//! `state::mailboxes` of `metadata-feed` writes these files through [`StoredMailbox`].

#[cfg(test)]
mod tests;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use metadata_common::share::Tenant;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::{fmt, io};

use crate::account::Account;
use crate::record::Dialects;
use crate::record::event::VmEvents;
use crate::record::values::is_uuid;
use crate::record::vm::Sinks;
use crate::sink::{MessageKind, Outbox, VmOutbox};

/// Maximum length of a posted password in bytes (OpenStack accepts 1,020).
pub const PASSWORD_BYTES: usize = 1_020;
/// Maximum length of a document, in bytes.
pub const DOCUMENT_BYTES: usize = 32 << 10;

/// Why a posted password is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PasswordRefused {
    /// The password is empty.
    #[error("expected a password of 1 to {PASSWORD_BYTES} bytes, found none")]
    Empty,
    /// The password is longer than [`PASSWORD_BYTES`].
    #[error("expected a password of at most {PASSWORD_BYTES} bytes, found more")]
    TooLarge,
    /// The guest has already posted a password, which it can do only once.
    #[error("expected the first password of this VM, found one that is already set")]
    AlreadySet,
}

/// A document is larger than [`DOCUMENT_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a document of at most {DOCUMENT_BYTES} bytes, found more")]
pub struct DocumentTooLarge;

/// A document that guests of EVE write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EveDocument {
    /// Document at `/eve/v1/kubeconfig`.
    Kubeconfig,
    /// Document at `/eve/v1/app/appCustomStatus`.
    AppCustomStatus,
}

/// The mailbox of one VM. Its methods never wait for a disk or a sink.
pub struct Mailbox {
    kept: Arc<StoredMailbox>,
    outbox: VmOutbox,
    waits: Mutex<ParkedRequests>,
    noted: Mutex<RecordValues>,
    account: Arc<Account>,
    events: VmEvents,
    /// The bits of [`Dialects`].
    asked: AtomicU32,
}

/// Values from the VM's record.
struct RecordValues {
    name: Arc<str>,
    /// Whose share of the node's limits the guest's messages use.
    tenant: Tenant,
    /// The instance-id; `None` before the first record.
    instance: Option<Box<str>>,
    /// SHA-256 over a salt ([`MailboxState`]) and `admin.password`; empty without a password.
    password: Base64,
    /// The same of the password that the guest was given last; `None` since the start of the agent.
    given: Option<Base64>,
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
        Self::with(StoredMailbox::in_memory(vm), outbox)
    }

    /// Creates the mailbox of a VM from its stored state.
    #[must_use]
    pub fn with(kept: StoredMailbox, outbox: &Outbox) -> Self {
        let events = VmEvents::noted(outbox.journal().clone(), kept.vm().into());
        let outbox = outbox.for_vm(kept.vm());
        let noted = Mutex::new(RecordValues {
            name: "".into(),
            tenant: Tenant::Vm(kept.vm().into()),
            instance: None,
            password: Base64(Bytes::new()),
            given: None,
        });
        Self {
            kept: Arc::new(kept),
            outbox,
            waits: Mutex::default(),
            noted,
            account: Arc::default(),
            events,
            asked: AtomicU32::new(0),
        }
    }

    /// Returns the state that outlives the agent.
    #[must_use]
    pub fn kept(&self) -> &Arc<StoredMailbox> {
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

    /// Returns the events of the VM. Only the control side changes them; workers add acknowledgements.
    #[must_use]
    pub fn events(&self) -> &VmEvents {
        &self.events
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
        let digest = admin_password.map_or_else(|| Base64(Bytes::new()), |password| self.digest(password));
        let mut noted = locked(&self.noted);
        if self.kept.read(|state| state.taken_password.as_ref().is_some_and(|taken| *taken != digest)) {
            self.kept.change(|state| state.taken_password = None);
        }
        (noted.name, noted.password) = (name.into(), digest);
    }

    fn digest(&self, password: &str) -> Base64 {
        let salt = self.kept.read(|state| state.salt.clone());
        let salt = salt.as_deref().unwrap_or(self.vm());
        let salted = Sha256::new().chain_update(salt).chain_update(":").chain_update(password);
        Base64(Bytes::copy_from_slice(&salted.finalize()))
    }

    /// Stores the tenant of the VM's record; without it, the VM is a tenant by itself.
    pub fn note_tenant(&self, tenant: Tenant) {
        locked(&self.noted).tenant = tenant;
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
    /// a password other than the record's, and everything in it if that was of another instance-id.
    pub fn replace(&self, state: MailboxState) {
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

    /// Stores the password that the guest chose, once: 1 to [`PASSWORD_BYTES`] bytes.
    ///
    /// # Errors
    /// [`PasswordRefused`]. The size is checked first.
    pub fn post_password(&self, bytes: &[u8]) -> Result<(), PasswordRefused> {
        if bytes.is_empty() {
            return Err(PasswordRefused::Empty);
        }
        if bytes.len() > PASSWORD_BYTES {
            return Err(PasswordRefused::TooLarge);
        }
        let posted = self.kept.try_change(|state| match &state.posted_password {
            Some(_) => Err(PasswordRefused::AlreadySet),
            None => {
                state.posted_password = Some(Base64(Bytes::copy_from_slice(bytes)));
                Ok(true)
            }
        });
        posted.map(|_| ())
    }

    /// Returns the password that the guest posted; empty if it posted none.
    #[must_use]
    pub fn posted_password(&self) -> Bytes {
        self.kept
            .read(|state| state.posted_password.as_ref().map(|bytes| bytes.0.clone()).unwrap_or_default())
    }

    /// Returns whether the guest confirmed that it saved the record's password.
    #[must_use]
    pub fn password_taken(&self) -> bool {
        self.kept.read(|state| state.taken_password.is_some())
    }

    /// Notes that the guest is given this password.
    pub fn give_password(&self, password: &str) {
        let digest = self.digest(password);
        locked(&self.noted).given = Some(digest);
    }

    /// Records that the guest saved the password that it was given (`saved_password`), or else `rendered`, the one of
    /// the answers that it asks. A password that the record has now and the guest does not have is still served.
    pub fn confirm_password(&self, rendered: &str) {
        let digest = self.digest(rendered);
        let noted = locked(&self.noted);
        if *noted.given.as_ref().unwrap_or(&digest) == noted.password {
            self.take(&noted);
        }
    }

    /// Records that the guest saved the record's password. It is then not served again.
    pub fn take_password(&self) {
        self.take(&locked(&self.noted));
    }

    fn take(&self, noted: &RecordValues) {
        if !self.password_taken() {
            self.kept.change(|state| state.taken_password = Some(noted.password.clone()));
        }
    }

    /// Returns a guest attribute; `None` if it is not set.
    #[must_use]
    pub fn attribute(&self, namespace: &str, key: &str) -> Option<Bytes> {
        self.attribute_value(namespace, key).map(|value| value.bytes)
    }

    /// Returns a guest attribute with its hash; `None` if it is not set.
    #[must_use]
    pub fn attribute_value(&self, namespace: &str, key: &str) -> Option<AttributeValue> {
        self.kept.read(|state| state.attributes.get(namespace, key).cloned())
    }

    /// Sets a guest attribute. Returns false if it already had this value.
    ///
    /// # Errors
    /// [`AttributeRefused`] if a limit would be exceeded; the attribute then does not change.
    pub fn set_attribute(&self, namespace: &str, key: &str, bytes: &[u8]) -> Result<bool, AttributeRefused> {
        self.kept.try_change(|state| state.attributes.set(namespace, key, bytes))
    }

    /// Removes a guest attribute; returns false if there was none.
    #[must_use = "the guest's status depends on it"]
    pub fn delete_attribute(&self, namespace: &str, key: &str) -> bool {
        let removed: Result<bool, ()> =
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
    /// [`DocumentTooLarge`] if it exceeds [`DOCUMENT_BYTES`].
    pub fn store_document(&self, document: EveDocument, bytes: &[u8]) -> Result<(), DocumentTooLarge> {
        if bytes.len() > DOCUMENT_BYTES {
            return Err(DocumentTooLarge);
        }
        self.kept.change_if(|state| {
            let bytes = Base64(Bytes::copy_from_slice(bytes));
            let before = state.documents.insert(document, bytes.clone());
            before != Some(bytes)
        });
        Ok(())
    }

    /// Returns a document that the guest wrote; `None` if it wrote none.
    #[must_use]
    pub fn document(&self, document: EveDocument) -> Option<Bytes> {
        self.kept.read(|state| state.documents.get(&document).map(|bytes| bytes.0.clone()))
    }

    /// Registers one parked request. Dropping the result removes it.
    ///
    /// If [`WAITS_PER_VM`] requests are parked already, ends and counts the oldest.
    #[must_use]
    pub fn wait(&self) -> Arc<ParkedRequest> {
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
        let from = {
            let noted = locked(&self.noted);
            (noted.tenant.clone(), Arc::clone(&noted.name))
        };
        self.outbox.send(sinks, kind, from, body, now_unix);
    }
}

// The part of a VM's mailbox that outlives the agent, and whether it is on disk.

/// Schedules a changed mailbox to be saved. The packet path calls it, so it must not wait.
pub type ScheduleSave = Box<dyn Fn(Arc<StoredMailbox>) + Send + Sync>;

/// The stored state of one VM, and its file.
pub struct StoredMailbox {
    vm: Box<str>,
    changing: Mutex<Changing>,
    /// True from a change until its save begins. So a mailbox is in the queue at most once, and the queue has at most
    /// one entry per VM.
    queued: AtomicBool,
    /// Path of the file, locked while it is written; `None` without a file or after [`detach`](Self::detach).
    file: Mutex<Option<PathBuf>>,
    saver: Option<ScheduleSave>,
}

#[derive(Default)]
struct Changing {
    state: MailboxState,
    /// Grows with each change.
    revision: u64,
    /// The revision on disk.
    saved: u64,
}

impl StoredMailbox {
    /// Creates an empty state without a file for the VM of this owner.
    #[must_use]
    pub fn in_memory(vm: &str) -> Self {
        Self::new(vm, MailboxState::default(), None, None)
    }

    /// Creates the state of the VM of this owner, with its file and the scheduler of saves.
    #[must_use]
    pub fn new(
        vm: &str,
        mut state: MailboxState,
        file: Option<PathBuf>,
        saver: Option<ScheduleSave>,
    ) -> Self {
        state.set_owner(vm);
        let changing = Mutex::new(Changing { state, ..Changing::default() });
        Self { vm: vm.into(), changing, queued: AtomicBool::new(false), file: Mutex::new(file), saver }
    }

    /// Returns the owner of the VM's state.
    #[must_use]
    pub fn vm(&self) -> &str {
        &self.vm
    }

    fn read<T>(&self, get: impl FnOnce(&MailboxState) -> T) -> T {
        get(&locked(&self.changing).state)
    }

    fn change(self: &Arc<Self>, change: impl FnOnce(&mut MailboxState)) {
        self.change_if(|state| {
            change(state);
            true
        });
    }

    /// `change` returns whether the state has to be saved.
    fn change_if(self: &Arc<Self>, change: impl FnOnce(&mut MailboxState) -> bool) {
        let changed: Result<bool, std::convert::Infallible> = self.try_change(|state| Ok(change(state)));
        match changed {
            Ok(_) => {}
        }
    }

    /// `change` returns whether the state has to be saved. Returns the same.
    fn try_change<E>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut MailboxState) -> Result<bool, E>,
    ) -> Result<bool, E> {
        let mut changing = locked(&self.changing);
        if !change(&mut changing.state)? {
            return Ok(false);
        }
        changing.revision += 1;
        drop(changing);
        if let Some(saver) = self.saver.as_ref().filter(|_| !self.queued.swap(true, Ordering::AcqRel)) {
            saver(Arc::clone(self));
        }
        Ok(true)
    }

    /// Replaces the state by the content that another agent wrote to the file.
    fn replace(&self, mut state: MailboxState) {
        state.set_owner(&self.vm);
        let mut changing = locked(&self.changing);
        changing.state = state;
        changing.saved = changing.revision;
    }

    /// Calls `write` with path and new content if there is a file and it is out of date.
    ///
    /// # Errors
    /// The error of `write`; the file then still counts as out of date.
    pub fn save(&self, write: impl FnOnce(&Path, &[u8]) -> io::Result<()>) -> io::Result<()> {
        self.queued.store(false, Ordering::Release);
        let file = locked(&self.file);
        let Some(path) = file.as_deref() else { return Ok(()) };
        // The copy shares the bytes, so a guest that writes meanwhile does not wait for the serialization.
        let (state, revision) = {
            let changing = locked(&self.changing);
            if changing.revision == changing.saved {
                return Ok(());
            }
            (changing.state.clone(), changing.revision)
        };
        let text = serde_json::to_vec(&state)?;
        write(path, &text)?;
        locked(&self.changing).saved = revision;
        Ok(())
    }

    /// Waits for a save in progress and prevents later ones.
    pub fn detach(&self) {
        *locked(&self.file) = None;
    }
}

// Parked requests.

/// Maximum number of parked requests of one VM.
pub const WAITS_PER_VM: usize = 8;

/// One parked request.
#[derive(Debug, Default)]
pub struct ParkedRequest {
    ended: AtomicBool,
}

impl ParkedRequest {
    /// Returns whether a newer request displaced this one, which then gets the current value as its answer.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }
}

/// The parked requests of one VM, oldest first.
#[derive(Debug, Default)]
struct ParkedRequests(VecDeque<Weak<ParkedRequest>>);

impl ParkedRequests {
    /// Adds a request. Returns it, and whether that ended the oldest one.
    fn enter(&mut self) -> (Arc<ParkedRequest>, bool) {
        self.0.retain(|wait| wait.strong_count() > 0);
        let oldest = if self.0.len() < WAITS_PER_VM { None } else { self.0.pop_front() };
        let ended = oldest.and_then(|oldest| oldest.upgrade()).inspect(|wait| wait.end()).is_some();
        let wait = Arc::new(ParkedRequest::default());
        self.0.push_back(Arc::downgrade(&wait));
        (wait, ended)
    }
}

// Guest attributes: bytes by namespace and key.

/// Maximum number of attributes of one VM, over all namespaces.
pub const ATTRIBUTES_PER_VM: usize = 64;
/// Maximum length of an attribute's value, in bytes.
pub const ATTRIBUTE_BYTES: usize = 32 << 10;
/// Maximum total bytes of all attributes of one VM, names included. Guests typically store a few host keys and states.
pub const ATTRIBUTES_BYTES_PER_VM: usize = 256 << 10;
/// Maximum length of a namespace and of a key in characters: letters, digits, `.`, `_`, `:` and `-`.
pub const ATTRIBUTE_NAME_CHARS: usize = 255;

/// Why an attribute is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributeRefused {
    /// The namespace or key is malformed.
    #[error(
        "expected a namespace and a key of 1 to {ATTRIBUTE_NAME_CHARS} letters, digits, `.`, `_`, `:` and `-`"
    )]
    Name,
    /// The value exceeds [`ATTRIBUTE_BYTES`].
    #[error("expected at most {ATTRIBUTE_BYTES} bytes, found more")]
    TooLarge,
    /// All attributes together would exceed [`ATTRIBUTES_BYTES_PER_VM`].
    #[error(
        "expected at most {ATTRIBUTES_BYTES_PER_VM} bytes in all attributes, found more; delete one first"
    )]
    TooMuch,
    /// The VM already has [`ATTRIBUTES_PER_VM`] attributes.
    #[error("expected at most {ATTRIBUTES_PER_VM} attributes, found one more; delete one first")]
    Full,
}

/// The value of an attribute. It is hashed once, when it is set: each write makes all parked requests of the VM look at
/// the values they wait for.
#[derive(Clone)]
pub struct AttributeValue {
    /// The value.
    pub bytes: Bytes,
    /// The first 64 bits of its SHA-256.
    pub hash: u64,
}

impl AttributeValue {
    fn new(bytes: Bytes) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(Sha256::digest(&bytes));
        Self { bytes, hash: u64::from_be_bytes([a, b, c, d, e, f, g, h]) }
    }
}

impl Serialize for AttributeValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Base64(self.bytes.clone()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for AttributeValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Base64::deserialize(deserializer).map(|Base64(bytes)| Self::new(bytes))
    }
}

/// The attributes of one VM.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Attributes {
    namespaces: BTreeMap<String, BTreeMap<String, AttributeValue>>,
    #[serde(skip)]
    version: u64,
}

impl Attributes {
    fn get(&self, namespace: &str, key: &str) -> Option<&AttributeValue> {
        self.namespaces.get(namespace)?.get(key)
    }

    /// Returns whether the value changed.
    fn set(&mut self, namespace: &str, key: &str, bytes: &[u8]) -> Result<bool, AttributeRefused> {
        if !is_name(namespace) || !is_name(key) {
            return Err(AttributeRefused::Name);
        }
        if bytes.len() > ATTRIBUTE_BYTES {
            return Err(AttributeRefused::TooLarge);
        }
        match self.get(namespace, key) {
            Some(before) if before.bytes == bytes => return Ok(false),
            None if self.len() >= ATTRIBUTES_PER_VM => return Err(AttributeRefused::Full),
            _ => {}
        }
        let others = self.bytes() - self.bytes_of(namespace, key);
        if others + namespace.len() + key.len() + bytes.len() > ATTRIBUTES_BYTES_PER_VM {
            return Err(AttributeRefused::TooMuch);
        }
        let value = AttributeValue::new(Bytes::copy_from_slice(bytes));
        self.namespaces.entry(namespace.to_owned()).or_default().insert(key.to_owned(), value);
        self.version += 1;
        Ok(true)
    }

    /// Returns false if there was no such attribute.
    fn remove(&mut self, namespace: &str, key: &str) -> bool {
        let Some(keys) = self.namespaces.get_mut(namespace) else { return false };
        if keys.remove(key).is_none() {
            return false;
        }
        if keys.is_empty() {
            self.namespaces.remove(namespace);
        }
        self.version += 1;
        true
    }

    fn clear(&mut self) {
        self.namespaces.clear();
        self.version += 1;
    }

    fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
    }

    fn list(&self) -> Vec<(String, Vec<String>)> {
        let named = |(namespace, keys): (&String, &BTreeMap<String, AttributeValue>)| {
            (namespace.clone(), keys.keys().cloned().collect())
        };
        self.namespaces.iter().map(named).collect()
    }

    fn version(&self) -> u64 {
        self.version
    }

    /// Returns the bytes of all attributes, names included.
    fn bytes(&self) -> usize {
        let each = self.namespaces.iter().flat_map(|(namespace, keys)| {
            keys.iter().map(|(key, value)| namespace.len() + key.len() + value.bytes.len())
        });
        each.sum()
    }

    fn bytes_of(&self, namespace: &str, key: &str) -> usize {
        self.get(namespace, key).map_or(0, |value| namespace.len() + key.len() + value.bytes.len())
    }

    fn len(&self) -> usize {
        self.namespaces.values().map(BTreeMap::len).sum()
    }
}

fn is_name(text: &str) -> bool {
    (1..=ATTRIBUTE_NAME_CHARS).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
}

// The state that outlives the agent, and its text form.

/// Bytes whose text form is base64.
#[derive(Clone, PartialEq, Eq)]
struct Base64(Bytes);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(text).map_err(|_| de::Error::custom("expected base64"))?;
        Ok(Self(bytes.into()))
    }
}

/// State that one guest wrote or confirmed. It has no `Debug`, because it contains passwords.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MailboxState {
    version: Version,
    /// The owner, unless that is a UUID: the file's name has a hash of it then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<Box<str>>,
    /// With what the digest of the record's password is salted, if not with the owner: an earlier release used the
    /// UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    salt: Option<Box<str>>,
    /// Instance-id of the guest that wrote this; `None` until its record is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance: Option<Box<str>>,
    /// Digest of the record's password that the guest saved.
    taken_password: Option<Base64>,
    posted_password: Option<Base64>,
    attributes: Attributes,
    documents: BTreeMap<EveDocument, Base64>,
}

impl MailboxState {
    /// Returns the owner that the file names; `None` if the file's name is the owner.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    fn set_owner(&mut self, owner: &str) {
        self.owner = (!is_uuid(owner)).then(|| owner.into());
    }

    /// Removes everything that a guest wrote. Returns false if there was nothing.
    fn clear(&mut self) -> bool {
        let Self { version: _, owner: _, salt: _, instance: _, taken_password, posted_password, .. } = &*self;
        let was_empty = taken_password.is_none()
            && posted_password.is_none()
            && self.attributes.is_empty()
            && self.documents.is_empty();
        if was_empty {
            return false;
        }
        (self.taken_password, self.posted_password) = (None, None);
        self.attributes.clear();
        self.documents.clear();
        true
    }

    /// Sets the instance-id of the guest. What a guest of another instance-id wrote is removed; returns true if there
    /// was something. A state without an instance-id keeps what it has.
    fn set_instance(&mut self, instance: &str) -> bool {
        let last = self.instance.replace(instance.into());
        last.is_some_and(|last| *last != *instance) && self.clear()
    }

    /// Returns the state for an owner other than the UUID by which an earlier release kept it. A password that the
    /// guest has confirmed stays confirmed.
    #[must_use]
    pub fn taken_over(mut self, uuid: &str, owner: &str) -> Self {
        self.salt.get_or_insert_with(|| uuid.into());
        self.set_owner(owner);
        self
    }

    /// The version of the file format.
    pub const VERSION: u32 = 1;

    /// The version of a file that begins with these bytes, [`MailboxState::PREFIX`] at most; `None` if they are not a
    /// mailbox's.
    #[must_use]
    pub fn version_of(bytes: &[u8]) -> Option<u32> {
        let digits = bytes.strip_prefix(br#"{"version":"#)?;
        let end = digits.iter().position(|byte| !byte.is_ascii_digit())?;
        std::str::from_utf8(&digits[..end]).ok()?.parse().ok()
    }

    /// Bytes from which [`MailboxState::version_of`] reads the version.
    pub const PREFIX: usize = 32;
}

/// Version of the file format, [`MailboxState::VERSION`].
#[derive(Clone, Default)]
struct Version;

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(MailboxState::VERSION)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            MailboxState::VERSION => Ok(Self),
            _ => Err(de::Error::custom("expected another version")),
        }
    }
}
