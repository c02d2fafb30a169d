//! Looks at the files in turns, and publishes what changes.

use futures_util::{StreamExt as _, stream};
use metadata_common::share::Tenant;
use metadata_content::record::values::excerpt;
use metadata_content::record::{RecordError, RecordLimits};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::load::{DirectoryScan, FileStamps, LoadOutcome, VmDigest, VmFiles};
use super::{LOOK, ProxmoxOptions, ProxmoxTranslation, load};
use crate::publisher::Publisher;
use crate::record_part::PartError;
use crate::source::FailureStreak;
use crate::{FeedError, FeedEvent, blocking};

/// Most VMs of a node.
pub const MAX_VMS: usize = 4_096;

/// Most VMs whose files are read at once.
const LOADS_AT_ONCE: usize = 8;

/// How long a look may take before status says so. The feed keeps waiting for it.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// How often to read files again after they changed. pmxcfs counts whole seconds, so two changes within one of them may
/// look alike.
const CALM: u8 = 3;

/// Watches a node's VMs and publishes their records until the receiver is dropped. Refuses records beyond `limits`.
///
/// Publishes all records first, then [`FeedEvent::Synced`], then changes. While the directory cannot be read, it waits
/// and removes nothing.
pub async fn watch(
    options: ProxmoxOptions,
    limits: RecordLimits,
    outlook: Arc<ProxmoxHealth>,
    tx: impl Into<Publisher>,
) {
    watch_every(LOOK, options, limits, outlook, tx.into()).await;
}

pub(super) async fn watch_every(
    pause: Duration,
    options: ProxmoxOptions,
    limits: RecordLimits,
    outlook: Arc<ProxmoxHealth>,
    tx: Publisher,
) {
    let closing = tx.clone();
    let mut feed = Feed {
        options: options.into(),
        limits: limits.into(),
        outlook,
        tx,
        known: BTreeMap::new(),
        is_synced: false,
        has_others: false,
    };
    let turns = async {
        while feed.turn().await.is_ok() {
            tokio::time::sleep(pause).await;
        }
    };
    // A look may wait for the cluster without end.
    tokio::select! {
        () = closing.closed() => {}
        () = turns => {}
    }
}

/// The receiver of events was dropped.
struct ReceiverDropped;

/// What the feed remembers of one VM.
#[derive(Default)]
struct KnownVm {
    seen: FileStamps,
    /// Turns since its files last changed, at most [`CALM`].
    calm: u8,
    /// Digest of what was last read.
    digest: Option<VmDigest>,
    /// A record or a refusal of it is published.
    is_published: bool,
    /// The free bytes that its record needs, if there was no room for it.
    wants: Option<usize>,
}

impl KnownVm {
    /// True if the files are to be read in this turn. `free` are the bytes free for records.
    fn is_due(&mut self, has_changed: bool, free: usize) -> bool {
        if has_changed {
            self.calm = 0;
        }
        let is_due = self.calm < CALM || self.wants.is_some_and(|bytes| bytes <= free);
        self.calm = (self.calm + 1).min(CALM);
        is_due
    }
}

struct Feed {
    options: Arc<ProxmoxOptions>,
    limits: Arc<RecordLimits>,
    outlook: Arc<ProxmoxHealth>,
    tx: Publisher,
    known: BTreeMap<u32, KnownVm>,
    is_synced: bool,
    /// The node has more VMs than the feed reads.
    has_others: bool,
}

impl Feed {
    /// Looks once at all files.
    async fn turn(&mut self) -> Result<(), ReceiverDropped> {
        let seen: HashMap<u32, FileStamps> =
            self.known.iter().map(|(vmid, known)| (*vmid, Arc::clone(&known.seen))).collect();
        let directory = self.options.directory.clone();
        let look = self.patiently(blocking(move || load::look(&directory, &seen))).await;
        let DirectoryScan { vms, read_only } = match look {
            Ok(look) => look,
            Err(error) => {
                if self.outlook.failed(error.to_string(), Instant::now()) {
                    tracing::warn!(
                        "{error}; the records of its VMs stay in force until it can be read again"
                    );
                }
                return Ok(());
            }
        };
        self.complain_of_others(vms.len());
        let vms: Vec<_> = vms.into_iter().take(MAX_VMS).collect();
        let gone: Vec<u32> = self
            .known
            .keys()
            .filter(|vmid| vms.binary_search_by_key(*vmid, |(n, _)| *n).is_err())
            .copied()
            .collect();
        for vmid in gone {
            self.remove(vmid).await?;
        }
        let wanted = self.wanted(vms);
        self.load(wanted).await?;
        self.tell(self.outlook.looked(read_only, Instant::now()), read_only);
        if !std::mem::replace(&mut self.is_synced, true) {
            self.publish(FeedEvent::Synced).await?;
        }
        Ok(())
    }

    /// Logs once that the node has more VMs than the feed reads.
    fn complain_of_others(&mut self, vms: usize) {
        let has_others = vms > MAX_VMS;
        if has_others && !self.has_others {
            let directory = self.options.directory.display();
            tracing::warn!(
                "{directory}: expected at most {MAX_VMS} VMs, found {vms}; those with the highest numbers are not served"
            );
        }
        self.has_others = has_others;
    }

    /// Waits for work on the files, and reports when it takes long.
    async fn patiently<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        if let Ok(done) = tokio::time::timeout(PATIENCE, &mut work).await {
            return done;
        }
        let reason = format!(
            "no answer for {} s from {}, or from the storage of a file that `cicustom` names",
            PATIENCE.as_secs(),
            self.options.directory.display()
        );
        if self.outlook.failed(reason.clone(), Instant::now()) {
            tracing::warn!("{reason}; the last records stay in force");
        }
        work.await
    }

    fn tell(&self, news: ScanChanges, read_only: bool) {
        let directory = self.options.directory.display();
        if news.is_back {
            tracing::info!("{directory} can be read again");
        }
        match (news.quorum, read_only) {
            (true, true) => {
                tracing::warn!("{directory} is read-only: the cluster has no quorum, and changes no VM");
            }
            (true, false) => tracing::info!("{directory} can be written again"),
            (false, _) => {}
        }
    }

    /// The VMs whose files are to be read.
    fn wanted(&mut self, vms: Vec<(u32, bool)>) -> Vec<u32> {
        let mut wanted = Vec::new();
        for (vmid, has_changed) in vms {
            let free = self.tx.free_for(&Tenant::Vm(vmid.to_string().into()));
            if self.known.entry(vmid).or_default().is_due(has_changed, free) {
                wanted.push(vmid);
            }
        }
        wanted
    }

    async fn load(&mut self, wanted: Vec<u32>) -> Result<(), ReceiverDropped> {
        let (options, limits) = (Arc::clone(&self.options), Arc::clone(&self.limits));
        let mut loads = stream::iter(wanted)
            .map(move |vmid| {
                let (options, limits) = (Arc::clone(&options), Arc::clone(&limits));
                blocking(move || (vmid, load::load(vmid, &options, &limits)))
            })
            .buffered(LOADS_AT_ONCE);
        while let Some((vmid, loaded)) = self.patiently(loads.next()).await {
            self.take_in(vmid, loaded).await?;
        }
        Ok(())
    }

    /// Publishes what the files of one VM make.
    async fn take_in(&mut self, vmid: u32, loaded: VmFiles) -> Result<(), ReceiverDropped> {
        let known = self.known.entry(vmid).or_default();
        known.seen = loaded.seen;
        if matches!(loaded.outcome, LoadOutcome::Unreadable(_)) {
            known.calm = 0;
        }
        if known.digest == Some(loaded.digest) && known.wants.is_none() {
            return Ok(());
        }
        known.digest = Some(loaded.digest);
        known.wants = None;
        let was_published = known.is_published;
        known.is_published = !matches!(loaded.outcome, LoadOutcome::Template);
        let key = vmid.to_string();
        match loaded.outcome {
            LoadOutcome::Record(made) => self.admitted(vmid, *made).await,
            LoadOutcome::Refused(error) | LoadOutcome::Unreadable(error) => {
                self.publish(FeedEvent::Rejected { key, error }).await
            }
            LoadOutcome::Template if was_published => self.publish(FeedEvent::Remove { key }).await,
            LoadOutcome::Template => Ok(()),
            // The next look says whether it is gone.
            LoadOutcome::Gone => {
                known.is_published = was_published;
                known.digest = None;
                Ok(())
            }
        }
    }

    /// Publishes a record if there is memory for it.
    async fn admitted(&mut self, vmid: u32, made: ProxmoxTranslation) -> Result<(), ReceiverDropped> {
        let ProxmoxTranslation { record, problems } = made;
        for problem in problems {
            tracing::warn!(vmid, vm = %record.vm.name, "{problem}");
        }
        let key = vmid.to_string();
        let event = match self.tx.admit(&key, &record) {
            Ok(()) => FeedEvent::Upsert { key, record: record.into() },
            Err(no_room) => {
                self.known.entry(vmid).or_default().wants = Some(no_room.wants);
                FeedEvent::Rejected { key, error: FeedError::Room(no_room) }
            }
        };
        self.publish(event).await
    }

    async fn remove(&mut self, vmid: u32) -> Result<(), ReceiverDropped> {
        match self.known.remove(&vmid) {
            Some(known) if known.is_published => {
                self.publish(FeedEvent::Remove { key: vmid.to_string() }).await
            }
            _ => Ok(()),
        }
    }

    async fn publish(&self, event: FeedEvent) -> Result<(), ReceiverDropped> {
        self.tx.publish(event).await.map_err(|_| ReceiverDropped)
    }
}

// How the feed's looks at the directory go. The feed writes it; status reads it.

/// The state of the looks.
#[derive(Debug)]
pub struct ProxmoxHealth {
    since: Instant,
    inner: Mutex<HealthState>,
}

#[derive(Debug, Default)]
struct HealthState {
    /// When the directory was last read whole.
    looked: Option<Instant>,
    /// When the consecutive failures began, and the last of them.
    failing: Option<(Instant, String)>,
    /// The directory cannot be written: the cluster has no quorum.
    read_only: bool,
}

/// The state at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct ProxmoxReport {
    /// Seconds since the first look.
    pub asked_for: f64,
    /// Seconds since the directory was last read whole; `None` before the first time.
    pub looked: Option<f64>,
    /// The failure, if the last look failed.
    pub failing: Option<FailureStreak>,
    /// The cluster has no quorum, so Proxmox VE changes no configuration.
    pub read_only: bool,
}

/// What is new after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScanChanges {
    /// Looks failed before, and no longer do.
    pub(super) is_back: bool,
    /// The quorum was lost or found.
    pub(super) quorum: bool,
}

impl ProxmoxHealth {
    /// The state before the first look.
    #[must_use]
    pub fn new(since: Instant) -> Self {
        Self { since, inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HealthState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the directory was read whole.
    pub(super) fn looked(&self, read_only: bool, now: Instant) -> ScanChanges {
        let mut inner = self.lock();
        inner.looked = Some(now);
        let quorum = std::mem::replace(&mut inner.read_only, read_only) != read_only;
        ScanChanges { is_back: inner.failing.take().is_some(), quorum }
    }

    /// Notes a failure. Returns true if the look before did not fail.
    pub(super) fn failed(&self, reason: String, now: Instant) -> bool {
        let mut inner = self.lock();
        let since = inner.failing.as_ref().map(|(since, _)| *since);
        inner.failing = Some((since.unwrap_or(now), reason));
        since.is_none()
    }

    /// The current state.
    #[must_use]
    pub fn report(&self, now: Instant) -> ProxmoxReport {
        let inner = self.lock();
        let ago = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        let failing = inner.failing.as_ref();
        ProxmoxReport {
            asked_for: ago(self.since),
            looked: inner.looked.map(ago),
            failing: failing.map(|(since, reason)| FailureStreak {
                since: ago(*since),
                reason: reason.clone(),
                ..FailureStreak::default()
            }),
            read_only: inner.read_only,
        }
    }
}

// Why a configuration, or a part of it, is not used.

/// A fault of a VM's configuration. No text repeats a secret.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProxmoxProblem {
    /// The file as a whole.
    #[error("expected {expected}, found {found}")]
    File {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A setting of the file.
    #[error("`{key}`: expected {expected}, found {found}; change it with `qm set`")]
    Setting {
        /// The setting.
        key: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A file that `cicustom` names.
    #[error("`cicustom`, {part}: expected {expected}, found {found}")]
    Custom {
        /// Which document.
        part: &'static str,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The block in the description.
    #[error("the description's block ```imds: expected {expected}, found {found}")]
    Block {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A file beside the configuration.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The template of the subject lets a tenant choose another VM's subject.
    #[error(
        "{part}: identity.subject: expected `{{owner}}` beside `{value}`, which anyone who may change a VM's options \
         can choose; add it, or leave `subject` out"
    )]
    Subject {
        /// The part that has the template.
        part: String,
        /// The value in the template.
        value: &'static str,
    },
    /// The record that all of these make.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl ProxmoxProblem {
    pub(super) fn file(expected: impl Display, found: impl Display) -> Self {
        Self::File { expected: expected.to_string(), found: found.to_string() }
    }

    pub(super) fn setting(key: impl Display, expected: impl Display, found: impl Display) -> Self {
        Self::Setting { key: key.to_string(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A setting whose value is not a secret, and is repeated.
    pub(super) fn value(key: impl Display, expected: impl Display, found: &str) -> Self {
        Self::setting(key, expected, format_args!("`{}`", excerpt(found)))
    }

    /// True if a NIC is left out.
    pub(super) fn is_of_nic(&self) -> bool {
        matches!(self, Self::Setting { key, .. } if key.starts_with("net"))
    }

    pub(super) fn custom(part: &'static str, expected: impl Display, found: impl Display) -> Self {
        Self::Custom { part, expected: expected.to_string(), found: found.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::{CALM, KnownVm};

    #[test]
    fn files_are_read_again_while_a_coarse_clock_may_hide_a_change() {
        let mut known = KnownVm::default();
        let mut due = |changed| known.is_due(changed, 0);
        for round in 0..2 {
            assert!(due(true), "round {round}");
            for _ in 1..CALM {
                assert!(due(false), "round {round}");
            }
            assert!(!due(false) && !due(false), "round {round}");
        }
    }

    #[test]
    fn a_record_without_room_is_read_again_once_there_is_room() {
        let mut known = KnownVm { calm: CALM, wants: Some(10), ..KnownVm::default() };
        assert!(!known.is_due(false, 9));
        assert!(known.is_due(false, 10));
    }
}
