//! State that outlives the agent (token keys, mailboxes), and messages from guests to sinks.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use rustix::fs::{StatVfsMountFlags, statvfs};
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::documents::LearnedFile;
use super::registration_store::RegistrationStore;
use crate::config::Config;
use crate::delivery::{self, Deliveries};
use crate::metrics;
use metadata_common::printable::counted;
use metadata_content::identity::Issuer;
use metadata_content::record::event::EventJournal;
use metadata_content::record::{Owner, Record, RecordLimits};
use metadata_content::sink::{MessageLoss, Outbox, SinkCounts};
use metadata_content::source::RecordSource;
use metadata_content::store::VmState;
use metadata_content::token::{Keyring, KeysInUse};
use metadata_content::upstream::Upstream;
use metadata_feed::registry::RecordId;
use metadata_feed::snapshot::{self, SnapshotError};
use metadata_feed::state::asked_dialects::{self, DialectsByUuid};
use metadata_feed::state::learned_requests;
use metadata_feed::state::mailboxes::{self, FormerRecords, Mailboxes};
use metadata_feed::state::save_queue::{SaveQueue, StateFile, UnsavedFiles};
use metadata_feed::state::token_file;
use metadata_feed::state::vm_events::{self, EventsByOwner};

/// The key file's name in the state directory.
pub(super) const KEY_FILE: &str = "token.key";
/// The directory of mailboxes in the state directory.
const MAILBOXES: &str = "vms";

/// How long the mailbox of a VM without a record is kept, so that no password is lost if a record is removed and
/// created again, or if a directory is mounted late.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// How long a lost message is a problem of the status.
const RECENT_LOSS: Duration = Duration::from_secs(600);

/// Token keys, mailboxes and the queue to the sinks.
#[derive(Debug)]
pub struct NodeState {
    /// The state directory, if there is one.
    directory: Option<PathBuf>,
    keyring: Arc<Keyring>,
    key_file: Option<PathBuf>,
    /// The file of token keys that the operator maintains (`token_key`).
    given_key: Option<GivenKey>,
    rotate_after: Duration,
    mailboxes: Arc<Mailboxes>,
    /// Writes the files of the state directory.
    saves: SaveQueue,
    /// No other agent writes the files. False while this one prepares a takeover.
    in_charge: AtomicBool,
    /// The file of dialects that guests have asked for, and what was last queued for it.
    asked: Option<(PathBuf, Mutex<DialectsByUuid>)>,
    /// The file of events.
    events: Option<Arc<EventsFile>>,
    outbox: Outbox,
    /// The issuer of identity tokens, if the node has one.
    issuer: Option<Issuer>,
    /// The metadata services of platforms that have one.
    upstreams: HashMap<RecordSource, Upstream>,
    /// VMs without a record, and since when.
    without: HashMap<Owner, Instant>,
    /// When to remove mailbox files without a record. `None` once they are removed.
    sweep_at: Option<Instant>,
}

/// A file of token keys that the operator maintains.
#[derive(Debug)]
struct GivenKey {
    path: PathBuf,
    /// Its keys are in use. Until the file exists, a key of this node is.
    is_used: bool,
    /// The file is missing, and its keys stay in use.
    is_gone: bool,
    /// Why the keys that were read last stay in use.
    problem: Option<String>,
}

impl GivenKey {
    /// Reads the keys again.
    fn follow(&mut self, keyring: &Keyring) {
        let read = token_file::follow(keyring, &self.path);
        self.is_gone = self.is_used && matches!(read, Ok(false));
        let problem = match read {
            Ok(true) => {
                if !std::mem::replace(&mut self.is_used, true) {
                    let path = self.path.display();
                    info!(file = %path, "the file of `token_key` is there: its keys are used from now on");
                }
                None
            }
            // That it is not there yet was logged at the start.
            Ok(false) => self.is_gone.then(|| token_file::missing(&self.path, true)),
            Err(error) => Some(error.to_string()),
        };
        if let Some(problem) = problem.as_ref().filter(|problem| self.problem.as_ref() != Some(problem)) {
            warn!("the token key stays unchanged: {problem}");
        }
        self.problem = problem;
    }
}

/// The file of the events of all VMs.
#[derive(Debug)]
struct EventsFile {
    path: PathBuf,
    /// What it holds.
    written: Mutex<EventsByOwner>,
}

impl EventsFile {
    /// Reads the file.
    fn read(&self) -> EventsByOwner {
        let known = read_events(&self.path);
        self.written.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&known);
        known
    }

    /// Replaces the file, unless it holds the same.
    fn write(&self, events: EventsByOwner) -> io::Result<()> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if *written != events {
            vm_events::write(&self.path, &events)?;
            *written = events;
        }
        Ok(())
    }
}

/// Tasks that run beside the control loop: delivery to sinks, and writing files of the state directory.
#[derive(Debug)]
pub struct BackgroundTasks {
    deliveries: Deliveries,
    saves: SaveQueue,
}

impl BackgroundTasks {
    /// Starts the tasks.
    pub fn start(self, tasks: &mut JoinSet<anyhow::Result<()>>) {
        tasks.spawn(async move {
            delivery::deliver(self.deliveries).await;
            Ok(())
        });
        tasks.spawn(async move {
            self.saves.run().await;
            Ok(())
        });
    }
}

/// Reads the keys that the operator maintains. Returns `None` if the file does not exist yet.
fn given(path: &Path) -> anyhow::Result<Option<Keyring>> {
    let keyring = token_file::given(path).context("reading `token_key` of the configuration")?;
    if keyring.is_none() {
        warn!("{}", token_file::missing(path, false));
    }
    Ok(keyring)
}

/// Finds out which records had the UUIDs by which an earlier release named mailboxes. None if the snapshot was written
/// by this release, which names them by owner.
fn former_records(state: &Path) -> FormerRecords {
    let mut former = FormerRecords::default();
    let records = snapshot::uuids_as_owners(&state.join(snapshot::FILE)).unwrap_or_else(|error| {
        if !matches!(error, SnapshotError::Absent { .. }) {
            warn!("what an earlier release kept of VMs by their UUIDs cannot be taken over: {error}");
        }
        Vec::new()
    });
    if !records.iter().any(|(id, _)| id.source.is_of_tenants()) {
        return former;
    }
    let registered = RegistrationStore::below(Some(state)).read(&RecordLimits::DEFAULT);
    let registered = registered.into_iter().filter(|(_, record)| record.vm.owner.is_none());
    let registered = registered.map(|(id, record)| (id, record.vm.uuid.to_string()));
    for (RecordId { source, key }, uuid) in records.into_iter().chain(registered) {
        former.note(&uuid, source, &key);
    }
    former
}

/// Reads which dialects guests use. Without the file, each is rendered when its guest asks for it.
fn read_asked(path: &Path) -> DialectsByUuid {
    asked_dialects::read(path).unwrap_or_else(|error| {
        warn!(file = %path.display(), "cannot read the dialects that guests asked for before: {error}; \
            each is rendered when its guest asks again");
        DialectsByUuid::new()
    })
}

/// Reads the events of VMs. Without the file, those that operators added are lost.
fn read_events(path: &Path) -> EventsByOwner {
    vm_events::read(path).unwrap_or_else(|error| {
        warn!(file = %path.display(), "cannot read the events of VMs: {error}; add again those that are still to come");
        EventsByOwner::new()
    })
}

pub(super) fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl NodeState {
    /// Opens the state directory of the configuration. Without one, the state is lost when the agent ends.
    ///
    /// # Errors
    /// The directory or a file in it cannot be created or read, or other users may change it.
    pub fn open(config: &Config) -> anyhow::Result<(Self, BackgroundTasks)> {
        let (outbox, deliveries) = delivery::outbox();
        let saves = SaveQueue::default();
        let (keyring, key_file, mailboxes) = match &config.state {
            Some(directory) => {
                let hint = || {
                    format!("cannot open the state directory {}; --state names another", directory.display())
                };
                let mailboxes =
                    Mailboxes::open(&directory.join(MAILBOXES), outbox.clone(), &saves).with_context(hint)?;
                mailboxes.set_former(former_records(directory));
                let key_file = directory.join(KEY_FILE);
                let keyring = token_file::open(&key_file, unix_now()).with_context(hint)?;
                (keyring, Some(key_file), mailboxes)
            }
            None => (Keyring::ephemeral(), None, Mailboxes::in_memory(outbox.clone())),
        };
        let asked = config.state.as_ref().map(|directory| {
            let path = directory.join(asked_dialects::FILE);
            let known = read_asked(&path);
            mailboxes.remember(known.clone());
            (path, Mutex::new(known))
        });
        let events = config.state.as_ref().map(|directory| {
            let path = directory.join(vm_events::FILE);
            let file = EventsFile { path, written: Mutex::default() };
            mailboxes.restore_events(file.read(), unix_now());
            Arc::new(file)
        });
        let given = config.token_key.as_deref().map(given).transpose()?.flatten();
        let is_used = given.is_some();
        let keyring = given.unwrap_or(keyring);
        let given_key = config.token_key.clone();
        let given_key = given_key.map(|path| GivenKey { path, is_used, is_gone: false, problem: None });
        let state = Self {
            directory: config.state.clone(),
            keyring: Arc::new(keyring),
            key_file,
            given_key,
            rotate_after: Duration::from_secs(u64::from(config.rotate_token_key_days) * 86_400),
            mailboxes: Arc::new(mailboxes),
            saves: saves.clone(),
            in_charge: AtomicBool::new(false),
            asked,
            events,
            outbox,
            issuer: None,
            upstreams: HashMap::new(),
            without: HashMap::new(),
            sweep_at: Some(Instant::now() + FORGET_AFTER),
        };
        Ok((state, BackgroundTasks { deliveries, saves }))
    }

    /// Takes charge of the files: no other agent writes to them. [`reload`](Self::reload) does so too.
    pub fn take_charge(&self) {
        self.in_charge.store(true, Ordering::Relaxed);
        self.mailboxes.take_charge();
    }

    /// Returns the VM of a record in force, for answers that are computed per request. Its events become the record's.
    #[must_use]
    pub fn vm(&self, id: &RecordId, record: &Record) -> VmState {
        let mailbox = self.mailboxes.for_record(id.source, &id.key, record);
        mailbox.events().note_record(record.instance_id(), &record.events, unix_now());
        let vm = VmState::of(record, Arc::clone(&self.keyring), mailbox);
        let vm = match self.upstreams.get(&id.source) {
            Some(upstream) => vm.answered_by(upstream, record),
            None => vm,
        };
        match &self.issuer {
            Some(issuer) => vm.issued_by(issuer, record),
            None => vm,
        }
    }

    /// Sets the issuer of identity tokens. Call it before the first record is rendered.
    pub fn set_issuer(&mut self, issuer: Issuer) {
        self.issuer = Some(issuer);
    }

    /// Sets the metadata service of a platform. Call it before the first record of its source is rendered.
    pub fn set_upstream(&mut self, source: RecordSource, upstream: Upstream) {
        self.upstreams.insert(source, upstream);
    }

    /// Sets the age in days at which token keys are replaced.
    pub fn set_rotate_after(&mut self, days: u32) {
        self.rotate_after = Duration::from_secs(u64::from(days) * 86_400);
    }

    /// Reads the keys that the operator maintains again.
    pub fn follow_given_key(&mut self) {
        if let Some(given) = &mut self.given_key {
            given.follow(&self.keyring);
        }
    }

    /// The file of the operator's token keys, if it is missing while its keys stay in use.
    #[must_use]
    pub fn missing_given_key(&self) -> Option<&Path> {
        self.given_key.as_ref().filter(|given| given.is_gone).map(|given| &*given.path)
    }

    /// The file of this node's own token keys, unless the operator's are in use.
    fn own_key_file(&self) -> Option<&Path> {
        let is_own = self.given_key.as_ref().is_none_or(|given| !given.is_used);
        self.key_file.as_deref().filter(|_| is_own)
    }

    /// Removes what a VM's guest wrote. Returns whether there was something.
    #[must_use]
    pub fn clear(&self, vm: &Owner) -> bool {
        self.mailboxes.clear(vm)
    }

    /// Notes that a VM no longer has a record.
    pub fn on_vm_removed(&mut self, vm: Owner) {
        self.without.insert(vm, Instant::now());
    }

    /// Replaces the token key if it is old, or reads the key that the operator maintains again. Deletes the mailboxes
    /// of VMs that have been without a record for ten minutes. Writes which dialects guests use. Call it about once a
    /// minute.
    pub fn tend(&mut self, known: &HashSet<&str>) {
        self.follow_given_key();
        if let Some(path) = self.own_key_file() {
            let (keyring, path, age) = (Arc::clone(&self.keyring), path.to_owned(), self.rotate_after);
            // By the time of the write, the keys that the operator maintains may be in use.
            let in_use = keyring.in_use();
            self.saves.submit(StateFile::TokenKeys, move || rotate(&keyring, &in_use, &path, age));
        }
        let now = Instant::now();
        let (mailboxes, due) = (&self.mailboxes, |since: &Instant| now >= *since + FORGET_AFTER);
        self.without.retain(|vm, since| {
            let is_known = known.contains(vm.as_str());
            if due(since) && !is_known {
                warn_of(mailboxes.forget(vm));
            }
            !due(since) && !is_known
        });
        self.save_asked();
        self.save_events();
        if self.sweep_at.is_some_and(|at| now >= at) {
            let swept = mailboxes.sweep(known.iter().copied());
            self.sweep_at = swept.is_err().then(|| now + FORGET_AFTER);
            warn_of(swept);
        }
    }

    /// Reads keys and mailboxes again after the previous agent has saved them.
    pub fn reload(&self) {
        self.in_charge.store(true, Ordering::Relaxed);
        if let Some(path) = self.own_key_file()
            && let Err(error) = token_file::rotate_if_older(&self.keyring, path, Duration::MAX, unix_now())
        {
            warn!("the token key is still the one that this agent started with: {error}");
        }
        self.mailboxes.reload();
        if let Some((path, _)) = &self.asked {
            self.mailboxes.remember(read_asked(path));
        }
        if let Some(file) = &self.events {
            self.mailboxes.restore_events(file.read(), unix_now());
        }
    }

    /// The changes of the events of all VMs.
    #[must_use]
    pub fn journal(&self) -> &EventJournal {
        self.outbox.journal()
    }

    /// The mailboxes of all VMs.
    #[must_use]
    pub fn mailboxes(&self) -> &Arc<Mailboxes> {
        &self.mailboxes
    }

    /// The file of the requests that the kernel answers, if there is a state directory.
    #[must_use]
    pub(crate) fn learned_file(&self) -> Option<LearnedFile> {
        let path = self.directory.as_ref()?.join(learned_requests::FILE);
        Some(LearnedFile::new(path, self.saves.clone()))
    }

    /// The queue that writes the files of the state directory.
    #[must_use]
    pub fn saves(&self) -> &SaveQueue {
        &self.saves
    }

    /// Writes everything that is not on disk yet, before the agent ends or hands over. Returns what the disk refused and
    /// nobody can deliver again. Before this agent takes charge it writes nothing: its view is older than what the
    /// running agent has written since.
    pub fn save(&self) -> Option<UnsavedFiles> {
        if !self.in_charge.load(Ordering::Relaxed) {
            return None;
        }
        self.save_asked();
        self.save_events();
        self.saves.flush();
        self.saves.unsaved(StateFile::is_irreplaceable)
    }

    /// Queues a write of the list of dialects that guests have used, if the list has grown since the last write.
    fn save_asked(&self) {
        let Some((path, queued)) = &self.asked else { return };
        let asked = self.mailboxes.asked();
        let mut queued = queued.lock().unwrap_or_else(PoisonError::into_inner);
        if *queued != asked {
            queued.clone_from(&asked);
            let path = path.clone();
            self.saves.submit(StateFile::Dialects, move || asked_dialects::write(&path, &asked));
        }
    }

    /// Queues a write of the events of VMs. They are collected only when it is their turn: one write has all changes that
    /// were queued before it, and the control loop looks at no other VM.
    pub fn save_events(&self) {
        let Some(file) = &self.events else { return };
        let (file, mailboxes) = (Arc::clone(file), Arc::clone(&self.mailboxes));
        self.saves.submit(StateFile::Events, move || file.write(mailboxes.events()));
    }

    /// Troubles with the state directory, for the operator.
    #[must_use]
    pub fn troubles(&self) -> Vec<String> {
        let unsaved = self.saves.unsaved(|_| true).map(|unsaved| unsaved.to_string());
        let given = self.given_key.as_ref().and_then(|given| given.problem.clone());
        let given = given.map(|problem| format!("the token key stays unchanged: {problem}"));
        let aside = self.own_key_file().map(token_file::aside).filter(|aside| aside.exists());
        let aside = aside.map(|aside| {
            format!(
                "the file of token keys was unusable: it was set aside as {} and written again, with the former key if an \
                 agent had it in memory; guests whose tokens are refused fetch new ones; remove that file once you know what happened to it",
                aside.display()
            )
        });
        let lost = self.outbox.last_loss().and_then(|loss| lost_messages(self.outbox.counts(), &loss));
        let read_only = self.directory.as_deref().and_then(read_only);
        unsaved.into_iter().chain(read_only).chain(given).chain(aside).chain(lost).collect()
    }

    /// Counts of messages to sinks and of mailbox files.
    #[must_use]
    pub fn counts(&self) -> metrics::BackgroundCounters {
        let unsaved = self.saves.unsaved_count() as u64;
        metrics::BackgroundCounters {
            messages: self.outbox.counts(),
            mailboxes: self.mailboxes.counts(),
            unsaved,
        }
    }
}

/// What to say of a state directory that takes no changes, before anything is to be written there.
fn read_only(directory: &Path) -> Option<String> {
    let is_read_only = statvfs(directory).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY));
    is_read_only.then(|| {
        format!(
            "the state directory {} is on a read-only file system: registrations are refused, and what guests write is kept \
             only in memory; make it writable",
            directory.display()
        )
    })
}

/// What to say of messages that were lost, while the last loss is recent.
fn lost_messages(counts: SinkCounts, last: &MessageLoss) -> Option<String> {
    let ago = last.at.elapsed();
    let lost = counted(counts.failed + counts.dropped, "message");
    (ago < RECENT_LOSS).then(|| {
        format!(
            "{lost} of guests did not reach a sink, the last one {} s ago: {}",
            ago.as_secs(),
            last.reason
        )
    })
}

/// Replaces the token key if it is older than `age`.
fn rotate(keyring: &Keyring, in_use: &KeysInUse, path: &Path, age: Duration) -> io::Result<()> {
    if token_file::rotate_in_use(keyring, in_use, path, age, unix_now()).map_err(io::Error::other)? {
        info!("token key replaced; tokens of the previous key stay valid until they expire");
    }
    Ok(())
}

fn warn_of<T>(result: Result<T, mailboxes::MailboxError>) {
    if let Err(error) = result {
        warn!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Config, MessageLoss, NodeState, RECENT_LOSS, SinkCounts, StateFile, given, lost_messages, read_only,
        token_file, unix_now,
    };
    use crate::logging::LogCollector;
    use metadata_content::token::TokenKind;
    use metadata_feed::state::private_file;
    use std::collections::HashSet;
    use std::time::Instant;

    #[test]
    fn a_directory_on_a_read_only_file_system_is_a_problem() {
        let writable = tempfile::tempdir().expect("a directory");
        assert_eq!(read_only(writable.path()), None);
        assert_eq!(read_only(&writable.path().join("none")), None);
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("the mounts");
        let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        // Most nodes have one, such as that of a snap or of a container's files.
        let is_read_only = |options: &str| options.split(',').any(|option| option == "ro");
        let found = fields.filter(|fields| is_read_only(fields[3])).map(|fields| fields[1].to_owned()).next();
        if let Some(problem) = found.and_then(|path| read_only(path.as_ref())) {
            assert!(problem.contains("read-only") && problem.contains("make it writable"), "{problem}");
        }
    }

    #[test]
    fn an_agent_that_gives_up_before_it_takes_over_writes_no_file_of_the_running_one() {
        let room = tempfile::tempdir().expect("a directory");
        let config = Config { state: Some(room.path().to_owned()), ..Config::default() };
        let open = || NodeState::open(&config).expect("a state directory").0;
        let (running, next) = (open(), open());
        let path = room.path().join("snapshot");
        let save = |state: &NodeState, text: &'static str| {
            let path = path.clone();
            state.saves().submit(StateFile::Snapshot, move || std::fs::write(&path, text));
            assert_eq!(state.save(), None, "{text}");
        };
        let found = || std::fs::read_to_string(&path).expect("a file");
        running.take_charge();
        save(&running, "running");
        save(&next, "preparing");
        assert_eq!(found(), "running");
        next.reload();
        save(&next, "taken over");
        assert_eq!(found(), "taken over");
    }

    #[test]
    fn a_file_of_token_keys_that_goes_while_its_keys_are_used_is_named_until_it_is_back() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token.key");
        let config = Config { state: None, token_key: Some(path.clone()), ..Config::default() };
        let follow = |state: &mut NodeState| {
            state.follow_given_key();
            let gone = token_file::missing(&path, true);
            let is_named = state.missing_given_key() == Some(&*path);
            assert_eq!(state.troubles().iter().any(|trouble| trouble.contains(&gone)), is_named);
            is_named
        };
        let (mut state, _) = NodeState::open(&config).expect("a state");
        assert!(!follow(&mut state), "it was never there");
        let keys = room.path().join("keys");
        token_file::open(&keys, unix_now()).expect("keys");
        std::fs::copy(&keys, &path).expect("the file");
        let (mut state, _) = NodeState::open(&config).expect("a state");
        assert!(!follow(&mut state), "it is there");
        std::fs::remove_file(&path).expect("removed");
        assert!(follow(&mut state), "it has gone");
        std::fs::copy(&keys, &path).expect("the file");
        assert!(!follow(&mut state), "it is back");
    }

    #[test]
    fn a_file_of_token_keys_that_is_not_there_at_the_start_is_a_warning() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token.key");
        let log = LogCollector::default();
        let writer = log.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let keys = tracing::subscriber::with_default(lines, || given(&path)).expect("no error");
        let text = log.text();
        assert!(keys.is_none() && text.contains("WARN"), "{text}");
        assert!(
            text.contains(&format!("{}, the file of `token_key`, does not exist", path.display())),
            "{text}"
        );
    }

    #[test]
    fn a_rotation_that_waits_for_the_disk_does_not_replace_the_operators_key() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("operator.key");
        let (directory, token_key) = (Some(room.path().to_owned()), Some(path.clone()));
        let config = Config { state: directory, token_key, ..Config::default() };
        let (mut state, _tasks) = NodeState::open(&config).expect("a state directory");
        state.tend(&HashSet::new());
        let text = token_file::generate(None, unix_now()).expect("a key");
        private_file::replace(&path, text.as_bytes()).expect("written");
        state.follow_given_key();
        state.saves.flush();
        let operators = token_file::given(&path).expect("read").expect("it is there");
        let token = operators.mint(TokenKind::Aws, "vm", 60, unix_now());
        assert!(state.keyring.verify(TokenKind::Aws, "vm", token.as_bytes(), unix_now()));
    }

    #[test]
    fn lost_messages_are_a_problem_while_the_last_loss_is_recent() {
        let counts = SinkCounts { failed: 2, dropped: 1, ..SinkCounts::default() };
        let now = Instant::now();
        let loss = MessageLoss { at: now, reason: "/run/sink: expected a receiver".into() };
        let told = lost_messages(counts, &loss).expect("recent");
        assert!(told.starts_with("3 messages of guests did not reach a sink, the last one "), "{told}");
        assert!(told.ends_with(" s ago: /run/sink: expected a receiver"), "{told}");
        if let Some(at) = now.checked_sub(RECENT_LOSS) {
            assert_eq!(lost_messages(counts, &MessageLoss { at, ..loss }), None);
        }
    }
}
