//! Connects the core with the watches, the pods, the hook and the clock.

use metadata_common::mac::Mac;
use metadata_common::share::ShareReport;
use metadata_content::record::{Record, RecordLimits};
use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::client::{ApiWatch, Reports, Update};
use super::core::{Action, Core, JobResult, VmiOrigin};
use super::hook::{HookCall, MigrationHold, Point};
use super::volumes::ReadVolumes;
use super::{KubevirtOptions, NODE_VARIABLE, VolumeCache, client, hook, kept};
use crate::contact::Contact;
use crate::pods::{Inlets, PodDirectories, PodEvent, PodUid, Pods, PodsError, Volumes};
use crate::publisher::{MemoryFreed, Publisher};
use crate::source::Services;
use crate::state::mailboxes::Mailboxes;
use crate::state::save_queue::{SaveQueue, StateFile};
use crate::{FeedError, FeedEvent};

/// Most events of a watch that wait for the feed; a full queue makes the watch wait.
const QUEUE: usize = 256;
/// How long a start waits for the API server's list. The agent then serves the VMIs of the kept file.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the feed then waits for launcher discovery. Reporting [`FeedEvent::Synced`] earlier would release taps the
/// previous agent left closed.
const LOOKS: Duration = Duration::from_secs(60);
/// How often to report who holds how much of the feed's limits.
const SHARES_EVERY: Duration = Duration::from_secs(1);
/// How often contents of volumes that no VM uses any more are released.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How long VMIs must stay unchanged before the feed writes the kept file.
const SETTLE: Duration = Duration::from_secs(2);

/// The parts of a feed.
pub struct Feed {
    /// The section `kubevirt` of the configuration.
    pub options: KubevirtOptions,
    /// The limits of a record.
    pub limits: RecordLimits,
    /// The kept file, from which the feed starts without the API server ([`KEPT`](super::KEPT) in the state directory).
    pub kept: Option<PathBuf>,
    /// Writes the kept file.
    pub saves: SaveQueue,
    /// The pods' volumes.
    pub volumes: Volumes,
    /// Finds the launchers of pods.
    pub launchers: Box<dyn Launchers>,
    /// The events of pods.
    pub pod_events: mpsc::Receiver<(PodUid, PodEvent)>,
    /// Calls of the node hook.
    pub hook: mpsc::Receiver<HookCall>,
    /// The limits of requests to the API server.
    pub pace: WatchPacing,
    /// Where the feed reports the state of the API server.
    pub contact: Arc<Contact>,
    /// How the agent serves the records, which Events report. Without it every record counts as served.
    pub services: Option<watch::Receiver<Services>>,
}

/// Finds the launchers of pods; [`Pods`] implements it.
pub trait Launchers: Send {
    /// Watches a pod and these of its volumes.
    ///
    /// # Errors
    /// A limit of pods or volumes is reached.
    fn watch(&mut self, pod: &PodUid, volumes: BTreeSet<String>) -> Result<(), PodsError>;

    /// Creates the pod's inlet with this source MAC, or removes it. The default does nothing.
    fn inlet(&mut self, _pod: &PodUid, _mac: Option<Mac>) {}

    /// Stops watching a pod.
    fn forget(&mut self, pod: &PodUid);
}

impl Launchers for Pods {
    fn watch(&mut self, pod: &PodUid, volumes: BTreeSet<String>) -> Result<(), PodsError> {
        Self::watch(self, pod, volumes)
    }

    fn inlet(&mut self, pod: &PodUid, mac: Option<Mac>) {
        Self::inlet(self, pod, mac);
    }

    fn forget(&mut self, pod: &PodUid) {
        Self::forget(self, pod);
    }
}

/// Runs the whole feed: the watches, the pods and the hook.
///
/// # Errors
/// The errors of [`follow`]; kubelet's directory has no pods directory, volumes cannot be watched, or the hook's socket
/// cannot be opened.
pub async fn serve(
    (options, inlets): (KubevirtOptions, Inlets),
    limits: RecordLimits,
    (state, saves, mailboxes): (Option<&Path>, SaveQueue, Arc<Mailboxes>),
    (contact, services): (Arc<Contact>, watch::Receiver<Services>),
    tx: impl Into<Publisher>,
) -> Result<(), FeedError> {
    let places = places(&options)?;
    let (calls, hook) = mpsc::channel(hook::CALLS);
    let mut doors = JoinSet::new();
    if let Some(path) = &options.hook {
        let hold = Arc::new(MigrationHold::new(options.hold(), mailboxes));
        doors.spawn(hook::serve(hook::open(path)?, calls, hold));
    }
    let volumes = Volumes::new(&places.pods);
    let (pods, pod_events) =
        Pods::start_with(places, inlets).map_err(|error| FeedError::Vm { reason: error.to_string() })?;
    let kept = state.map(|state| state.join(kept::FILE));
    let (launchers, pace) = (Box::new(pods), WatchPacing::DEFAULT);
    let services = Some(services);
    let feed =
        Feed { options, limits, kept, saves, volumes, launchers, pod_events, hook, pace, contact, services };
    follow(feed, tx).await
}

/// The directories where pods are found. No VM can be served without kubelet's directory of pods.
fn places(options: &KubevirtOptions) -> Result<PodDirectories, FeedError> {
    let pods = options.pods();
    let found = match std::fs::metadata(&pods) {
        Ok(found) if found.is_dir() => return Ok(PodDirectories { pods, cgroups: options.cgroups.clone() }),
        Ok(_) => "something else".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(FeedError::Vm {
        reason: format!(
            "kubevirt.kubelet: expected kubelet's directory of pods at {}, found: {found}; name kubelet's root directory as \
             the agent sees it",
            pods.display()
        ),
    })
}

/// A contact for this feed's watches before their first request.
#[must_use]
pub fn contact() -> Arc<Contact> {
    Arc::new(Contact::new(VmiOrigin::WATCHES.map(VmiOrigin::name), std::time::Instant::now()))
}

/// Returns the node's name.
///
/// # Errors
/// Neither the configuration nor the environment names the node.
pub fn node(options: &KubevirtOptions) -> Result<String, FeedError> {
    let named = options.node.clone().or_else(|| std::env::var(NODE_VARIABLE).ok());
    named.filter(|name| !name.is_empty()).ok_or_else(|| FeedError::Vm {
        reason: format!(
            "expected the node's name in kubevirt.node or the variable {NODE_VARIABLE}, found none"
        ),
    })
}

/// Runs the feed until the receiver of its events is dropped.
///
/// # Errors
/// The node has no name, or the client cannot be configured. An unreachable server is not an error.
pub async fn follow(feed: Feed, tx: impl Into<Publisher>) -> Result<(), FeedError> {
    let tx = tx.into();
    let Feed { options, limits, kept, saves, volumes, launchers, pod_events, hook, pace, contact, services } =
        feed;
    let node = node(&options)?;
    let writes_events = options.watch && options.events;
    let volumes = Arc::new(VolumeCache::new(volumes));
    let mut tasks = JoinSet::new();
    let (updates_tx, updates) = mpsc::channel(QUEUE);
    let reports = Reports::new();
    let mut unlisted = BTreeSet::new();
    if options.watch {
        let client = client::open(&options).await?;
        for origin in VmiOrigin::WATCHES {
            unlisted.insert(origin);
            let (contact, updates) = (Arc::clone(&contact), updates_tx.clone());
            tasks.spawn(ApiWatch::new((origin, &node), client.clone(), pace, contact, updates).follow());
        }
        if options.events {
            tasks.spawn(client::write(client, node.clone(), reports.clone()));
        }
    }
    let admitting = tx.clone();
    let admit = Box::new(move |key: &str, record: &Record| admitting.admit(key, record));
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let generation = u64::try_from(since.as_millis()).unwrap_or(0);
    let now = Instant::now();
    let forgets_by = (!options.watch).then(|| options.pods());
    let core = Core::new(node, options, limits, generation, Arc::clone(&volumes) as Arc<dyn ReadVolumes>);
    let core = if services.is_some() { core.told_of_services() } else { core };
    let mut run = Run {
        core: core.admitting(admit),
        services,
        freed: tx.freed(),
        tx,
        writes: writes_events,
        reports,
        launchers,
        unlisted,
        waiting: Vec::new(),
        synced: false,
        sync_by: now + LIST_TIMEOUT,
        kept,
        saves,
        keep_at: None,
        translating: None,
        volumes,
        shares_at: None,
        sweep_at: now + SWEEP_EVERY,
        forgets_by,
        podless: BTreeSet::new(),
    };
    run.restore();
    // A feed without watches keeps a sender, so that the channel stays open.
    let _updates_tx = updates_tx;
    run.turn(updates, pod_events, hook).await;
    Ok(())
}

struct Run {
    core: Core,
    /// How the agent serves the records.
    services: Option<watch::Receiver<Services>>,
    tx: Publisher,
    freed: MemoryFreed,
    /// The reports to write as Events.
    reports: Reports,
    /// True if Events are written.
    writes: bool,
    launchers: Box<dyn Launchers>,
    /// Watches that have not finished their first list.
    unlisted: BTreeSet<VmiOrigin>,
    /// Calls of the hook that wait for a record, [`hook::CALLS`] at most.
    waiting: Vec<(String, oneshot::Sender<()>)>,
    synced: bool,
    /// When to publish [`FeedEvent::Synced`] at the latest.
    sync_by: Instant,
    kept: Option<PathBuf>,
    saves: SaveQueue,
    keep_at: Option<Instant>,
    /// The translation that runs, one at a time, on a thread that may wait for files.
    translating: Option<JoinHandle<JobResult>>,
    volumes: Arc<VolumeCache>,
    /// When to report next who holds how much.
    shares_at: Option<Instant>,
    /// When to release contents of volumes that no VM uses any more.
    sweep_at: Instant,
    /// kubelet's directory of pods, by which VMIs are forgotten without a watch.
    forgets_by: Option<PathBuf>,
    /// VMIs whose pods the last sweep did not find.
    podless: BTreeSet<String>,
}

/// The receiver of events was dropped.
struct ReceiverDropped;

/// The result of the running translation; never returns if none runs.
async fn ended(translating: &mut Option<JoinHandle<JobResult>>) -> JobResult {
    match translating {
        Some(running) => match running.await {
            Ok(result) => result,
            // The task is never cancelled: what is left is its panic.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        },
        None => std::future::pending().await,
    }
}

/// The next state of the agent's service; never returns if the agent does not say.
async fn next(services: &mut Option<watch::Receiver<Services>>) -> Services {
    if let Some(receiver) = services
        && receiver.changed().await.is_ok()
    {
        return receiver.borrow_and_update().clone();
    }
    std::future::pending().await
}

impl Run {
    /// Starts with the VMIs of the kept file.
    fn restore(&mut self) {
        let Some(path) = &self.kept else { return };
        match kept::read(path) {
            Ok(vmis) => {
                let now = std::time::Instant::now();
                for vmi in vmis {
                    self.core.applied(VmiOrigin::Kept, vmi, now);
                }
                self.core.has_changed();
            }
            Err(error) => {
                warn!("{}: {error}; the API server must name the VMs first", path.display())
            }
        }
    }

    async fn turn(
        &mut self,
        mut updates: mpsc::Receiver<Update>,
        mut pods: mpsc::Receiver<(PodUid, PodEvent)>,
        mut hook: mpsc::Receiver<HookCall>,
    ) {
        let tx = self.tx.clone();
        loop {
            if self.act().await.is_err() {
                return;
            }
            let due = self.due();
            tokio::select! {
                () = tx.closed() => return,
                result = ended(&mut self.translating) => {
                    self.translating = None;
                    self.core.translated(result, Instant::now().into_std());
                }
                services = next(&mut self.services) => self.core.served(services, Instant::now().into_std()),
                () = self.freed.wait() => {
                    self.core.freed(|tenant| self.tx.free_for(tenant), Instant::now().into_std());
                }
                Some(update) = updates.recv() => self.apply(update),
                event = pods.recv() => match event {
                    Some((uid, event)) => self.core.pod(&uid, event, Instant::now().into_std()),
                    None => return,
                },
                Some(call) = hook.recv() => self.call(call),
                () = tokio::time::sleep_until(due) => self.core.tick(Instant::now().into_std()),
            }
        }
    }

    fn apply(&mut self, update: Update) {
        let now = Instant::now().into_std();
        match update {
            Update::Applied(origin, vmi) => self.core.applied(origin, *vmi, now),
            Update::Gone(origin, key) => self.core.gone(origin, &key, now),
            Update::Unreadable(key, error) => self.core.unreadable(&key, &error),
            Update::Listed(origin, keys) => {
                self.core.listed(origin, &keys, now);
                self.unlisted.remove(&origin);
                if self.unlisted.is_empty() {
                    // Both watches have listed every VMI: those only in the kept file are gone.
                    self.core.listed(VmiOrigin::Kept, &BTreeSet::new(), now);
                }
            }
            Update::Back(origin) => info!(watch = origin.name(), "the API server is back"),
            Update::HistoryGone(origin) => {
                info!(
                    watch = origin.name(),
                    "the API server's history is gone; the feed lists everything again"
                );
            }
            Update::Failed { origin, failure, first: true } => {
                warn!(
                    watch = origin.name(),
                    "the API server cannot be used; VMs keep their records: {failure}"
                );
            }
            Update::Failed { origin, failure, first: false } => debug!(watch = origin.name(), "{failure}"),
        }
    }

    fn call(&mut self, HookCall { vmi, point, done }: HookCall) {
        let now = Instant::now().into_std();
        let key = vmi.key();
        match point {
            Point::Starts | Point::Comes => self.core.applied(VmiOrigin::Hook, *vmi, now),
            Point::Stopped => self.core.stopped(&vmi, now),
            // The hook waits by itself.
            Point::Leaves => {}
        }
        self.waiting.push((key, done));
    }

    /// Carries out the core's actions.
    async fn act(&mut self) -> Result<(), ReceiverDropped> {
        let mut actions = VecDeque::from(self.core.actions());
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Publish(event) => self.tx.publish(event).await.map_err(|_| ReceiverDropped)?,
                Action::Watch(uid, volumes) => {
                    if let Err(error) = self.launchers.watch(&uid, volumes) {
                        self.core.unfollowed(&uid, &error, Instant::now().into_std());
                        actions.extend(self.core.actions());
                    }
                }
                Action::Inlet(uid, mac) => self.launchers.inlet(&uid, mac),
                Action::Leave(uid) => self.launchers.forget(&uid),
                Action::Report(report) if self.writes => self.reports.add(report),
                Action::Report(_) => {}
            }
        }
        let core = &self.core;
        for (key, done) in self.waiting.extract_if(.., |(key, done)| !core.awaits(key) || done.is_closed()) {
            // The hook takes a call that is dropped for a VM that is not served.
            if !core.refuses(&key) {
                _ = done.send(());
            }
        }
        self.sync().await?;
        self.keep();
        self.report_shares();
        self.sweep();
        if self.translating.is_none() {
            let job = self.core.next_job(Instant::now().into_std());
            self.translating = job.map(|job| tokio::task::spawn_blocking(|| job.run()));
        }
        Ok(())
    }

    /// Reports who holds how much of the feed's limits, at most once a second.
    fn report_shares(&mut self) {
        let now = Instant::now();
        if self.shares_at.is_some_and(|at| now < at) {
            return;
        }
        self.shares_at = Some(now + SHARES_EVERY);
        let shares = self.core.shares();
        self.tx.report(ShareReport::of("vmis", &shares.vmis));
        self.tx.report(ShareReport::of("vmi_bytes", &shares.bytes));
        self.tx.report(ShareReport::of("pods", &shares.pods));
        self.tx.report(self.volumes.share());
        self.tx.report(self.reports.share());
    }

    fn sweep(&mut self) {
        let now = Instant::now();
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP_EVERY;
            self.volumes.sweep();
            self.forget_ended();
        }
    }

    /// Without a watch, forgets the VMIs that ended while no agent ran: nobody says so. kubelet has no directory of
    /// their pods any more. The next sweep must find the same, because the hook may name a VMI before its pod.
    fn forget_ended(&mut self) {
        let Some(pods) = &self.forgets_by else { return };
        let is_gone = |uid: &PodUid| {
            let found = std::fs::symlink_metadata(pods.join(uid.as_str()));
            found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        };
        let podless = self.core.idle().filter(|(_, pods)| pods.iter().all(is_gone));
        let podless: BTreeSet<String> = podless.map(|(key, _)| key.clone()).collect();
        for key in podless.intersection(&self.podless) {
            info!(vmi = key, "forgotten: its pod is gone");
            self.core.forget(key);
        }
        self.podless = podless;
    }

    /// Publishes [`FeedEvent::Synced`] once, after everything that existed at the start.
    async fn sync(&mut self) -> Result<(), ReceiverDropped> {
        let now = Instant::now();
        let listed = self.unlisted.is_empty() || now >= self.sync_by;
        let looked = self.core.is_settled() || now >= self.sync_by + LOOKS;
        if !self.synced && listed && looked {
            self.synced = true;
            self.tx.publish(FeedEvent::Synced).await.map_err(|_| ReceiverDropped)?;
        }
        Ok(())
    }

    /// Writes the kept file once the VMIs have changed and then stayed unchanged.
    fn keep(&mut self) {
        if self.core.has_changed() && self.kept.is_some() {
            self.keep_at.get_or_insert_with(|| Instant::now() + SETTLE);
        }
        let Some(path) = self.kept.clone().filter(|_| self.keep_at.is_some_and(|at| at <= Instant::now()))
        else {
            return;
        };
        self.keep_at = None;
        let vmis = self.core.shared_vmis();
        // Encoding takes long, too: the VMIs have up to 32 MiB.
        self.saves.submit(StateFile::Vmis, move || {
            kept::encode(vmis.iter().map(Arc::as_ref)).and_then(|bytes| kept::write(&path, &bytes))
        });
    }

    /// When to run next if no event arrives.
    fn due(&self) -> Instant {
        let core = self.core.deadline().map(Instant::from_std);
        let keep = self.keep_at;
        let sync =
            [self.sync_by, self.sync_by + LOOKS].into_iter().find(|at| !self.synced && *at > Instant::now());
        let job = self.core.next_job_at().filter(|_| self.translating.is_none()).map(Instant::from_std);
        let far = Instant::now() + Duration::from_secs(3_600);
        let (shares, sweep) = (self.shares_at, Some(self.sweep_at));
        [core, keep, sync, job, shares, sweep].into_iter().flatten().fold(far, Instant::min)
    }
}

// How often a watch may send requests to the API server.
//
// A thousand agents share one API server. Each failure in a row doubles the pause before the next request. Half of
// each pause is random, so that agents which lost the server together do not return together. Only a finished list or
// a working watch resets the pause, because a server may accept requests long before it can answer them.

/// The limits of one watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchPacing {
    /// The longest pause after the first failure.
    pub first: Duration,
    /// The longest pause after any failure.
    pub longest: Duration,
    /// The longest pause before the next watch after the server ended one. A server that shuts down ends the watches of
    /// all agents at once.
    pub ended: Duration,
    /// The interval of full lists, ± 10 %. They correct what a watch has missed.
    pub relist: Duration,
    /// How long the server keeps one watch open, in whole seconds; the watch adds up to 10 %.
    pub watch: Duration,
    /// A watch that ends sooner and without an event counts as a failure.
    pub short: Duration,
}

/// The shortest pause is the longest one divided by this.
pub const SPREAD: u32 = 2;

impl WatchPacing {
    /// The limits of the agent.
    pub const DEFAULT: Self = Self {
        first: Duration::from_millis(200),
        longest: Duration::from_secs(30),
        ended: Duration::from_millis(500),
        relist: Duration::from_secs(600),
        watch: Duration::from_secs(120),
        short: Duration::from_secs(1),
    };

    /// The longest pause after this many failures in a row, at least one.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(doubled).min(self.longest)
    }
}

/// The state of one watch's pauses.
#[derive(Debug)]
pub(super) struct Pauses {
    pace: WatchPacing,
    /// Failures in a row.
    failures: u32,
    /// Set while a watch has failed since the last one worked.
    unwatched: bool,
    /// Set while the server's history was gone since the last watch worked.
    gone: bool,
}

impl Pauses {
    pub(super) fn new(pace: WatchPacing) -> Self {
        Self { pace, failures: 0, unwatched: false, gone: false }
    }

    /// Ends consecutive failures of lists. Those of watches continue.
    pub(super) fn listed(&mut self) {
        if !self.unwatched && !self.gone {
            self.failures = 0;
        }
    }

    /// Ends the consecutive failures: the watch delivered an event, or lasted.
    pub(super) fn works(&mut self) {
        (self.failures, self.unwatched, self.gone) = (0, false, false);
    }

    /// Returns the pause after a failed list.
    pub(super) fn list_failed(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let longest = self.pace.pause(self.failures);
        between(longest / SPREAD, longest)
    }

    /// Returns the pause after a failed watch.
    pub(super) fn watch_failed(&mut self) -> Duration {
        self.unwatched = true;
        self.list_failed()
    }

    /// Returns the pause before a list after the server lost the history. The first loss is not a failure and needs no
    /// pause. Another loss before a watch works counts as a failure.
    pub(super) fn history_is_gone(&mut self) -> Option<Duration> {
        std::mem::replace(&mut self.gone, true).then(|| self.watch_failed())
    }

    /// Returns the pause after the server ended a working watch.
    pub(super) fn ended(&self) -> Duration {
        between(Duration::ZERO, self.pace.ended)
    }
}

/// A random duration between two bounds.
pub(super) fn between(least: Duration, most: Duration) -> Duration {
    least + most.saturating_sub(least).mul_f64(rand::random())
}

#[cfg(test)]
mod tests {
    use metadata_content::record::RecordLimits;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;
    use tokio::sync::oneshot::error::TryRecvError;
    use tokio::sync::{mpsc, oneshot};

    use super::{
        Core, HookCall, Instant, LIST_TIMEOUT, Launchers, Pauses, PodEvent, PodUid, PodsError, Point,
        Publisher, ReadVolumes, Reports, Run, SPREAD, SWEEP_EVERY, SaveQueue, WatchPacing,
    };
    use crate::FeedEvent;
    use crate::kubevirt::client::Update;
    use crate::kubevirt::core::{VMIS_BYTES, VmiOrigin};
    use crate::kubevirt::translate::VolumeFiles;
    use crate::kubevirt::{ENABLED, KubevirtOptions, Vmi, VolumeCache};
    use crate::pods::{Pod, Tap, TapKind, Volumes};

    struct NoLaunchers;

    impl Launchers for NoLaunchers {
        fn watch(&mut self, _: &PodUid, _: BTreeSet<String>) -> Result<(), PodsError> {
            Ok(())
        }

        fn forget(&mut self, _: &PodUid) {}
    }

    /// A feed of node `n` without watches.
    fn run_with(read: Arc<dyn ReadVolumes>, tx: Publisher) -> Run {
        Run {
            core: Core::new("n".into(), KubevirtOptions::default(), RecordLimits::DEFAULT, 0, read),
            services: None,
            freed: tx.freed(),
            tx,
            reports: Reports::new(),
            writes: false,
            launchers: Box::new(NoLaunchers),
            unlisted: BTreeSet::new(),
            waiting: Vec::new(),
            synced: false,
            sync_by: Instant::now() + LIST_TIMEOUT,
            kept: None,
            saves: SaveQueue::default(),
            keep_at: None,
            translating: None,
            volumes: Arc::new(VolumeCache::new(Volumes::new("/nowhere"))),
            shares_at: None,
            sweep_at: Instant::now() + SWEEP_EVERY,
            forgets_by: None,
            podless: BTreeSet::new(),
        }
    }

    /// A feed whose volumes are empty.
    fn run_without_volumes() -> (Run, mpsc::Receiver<FeedEvent>) {
        let (tx, events) = mpsc::channel(1_024);
        let read = |_: &PodUid, _: &str| -> Result<Option<VolumeFiles>, String> { Ok(None) };
        (run_with(Arc::new(read), Publisher::from(tx)), events)
    }

    fn vmi_of(namespace: &str, name: &str, uid: &str, change: impl FnOnce(&mut Value)) -> Vmi {
        let mut vmi = json!({
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "spec": {"domain": {"devices": {"interfaces": [{"name": "default", "masquerade": {}}]}}},
            "status": {"phase": "Running", "activePods": {"p": "n"}},
        });
        change(&mut vmi);
        Vmi::from_value(vmi).expect("a VMI")
    }

    #[tokio::test]
    async fn the_hook_lets_no_vm_start_that_is_refused_and_each_that_is_not_to_be_served() {
        type Change = fn(&mut Value);
        let off = |vmi: &mut Value| vmi["metadata"]["annotations"] = json!({ENABLED: "false"});
        let large =
            |vmi: &mut Value| vmi["metadata"]["annotations"] = json!({"note": "x".repeat(VMIS_BYTES)});
        let foreign = |vmi: &mut Value| vmi["metadata"]["uid"] = "other".into();
        for (what, change, answer) in [
            ("not to be served", off as Change, Ok(())),
            ("too large", large as Change, Err(TryRecvError::Closed)),
            ("names the pod of another", foreign as Change, Err(TryRecvError::Closed)),
        ] {
            let (mut run, _events) = run_without_volumes();
            let (done, mut told) = oneshot::channel();
            let vmi = Box::new(vmi_of("shop", "web", "own", change));
            run.call(HookCall { vmi, point: Point::Starts, done });
            let uid: PodUid = "p".parse().expect("a uid");
            let pod = Pod {
                uid: uid.clone(),
                pid: 1,
                vmi: "own".into(),
                netns: "/proc/1/ns/net".into(),
                taps: Vec::new(),
                nics: Vec::new(),
            };
            run.core.pod(&uid, PodEvent::Found(pod), Instant::now().into_std());
            assert!(run.act().await.is_ok(), "{what}");
            assert_eq!(told.try_recv(), answer, "{what}");
        }
    }

    #[tokio::test]
    async fn without_a_watch_vmis_are_forgotten_whose_pods_are_gone_twice() {
        let pods = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(pods.path().join("p")).expect("a pod");
        let (mut run, _events) = run_without_volumes();
        run.forgets_by = Some(pods.path().into());
        let vmi =
            |name: &str, pods: Value| vmi_of("shop", name, name, |vmi| vmi["status"]["activePods"] = pods);
        let now = Instant::now().into_std();
        run.core.applied(VmiOrigin::Kept, vmi("ended", json!({"gone": "n"})), now);
        run.core.applied(VmiOrigin::Kept, vmi("runs", json!({"p": "n"})), now);
        run.core.applied(VmiOrigin::Hook, vmi("comes", json!({})), now);
        let sweep = |run: &mut Run| {
            run.sweep_at = Instant::now();
            run.sweep();
            run.core.vmis().map(|vmi| vmi.metadata.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(sweep(&mut run), ["comes", "ended", "runs"]);
        // The hook names its pod meanwhile.
        run.core.applied(VmiOrigin::Hook, vmi("comes", json!({"p2": "n"})), now);
        std::fs::create_dir(pods.path().join("p2")).expect("a pod");
        assert_eq!(sweep(&mut run), ["comes", "runs"]);
        std::fs::remove_dir(pods.path().join("p")).expect("removed");
        assert_eq!(sweep(&mut run), ["comes", "runs"]);
        assert_eq!(sweep(&mut run), ["comes"]);
        run.forgets_by = None;
        std::fs::remove_dir(pods.path().join("p2")).expect("removed");
        for _ in 0..3 {
            assert_eq!(sweep(&mut run), ["comes"], "a watch says what has ended");
        }
    }

    #[tokio::test]
    async fn the_runtimes_thread_is_free_while_volumes_are_read() {
        let (began, mut begins) = mpsc::unbounded_channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = Mutex::new(released);
        let read = move |_: &PodUid, _: &str| {
            began.send(()).expect("the test runs");
            // Fails if the test, which shares the runtime's thread, cannot run meanwhile.
            let released = released.lock().expect("no panic").recv_timeout(Duration::from_secs(20));
            released.map_err(|error| error.to_string())?;
            Ok(Some(VolumeFiles::from([("userdata".to_owned(), "#one".into())])))
        };
        let (tx, mut events) = mpsc::channel(64);
        let tx = Publisher::from(tx);
        let mut run = run_with(Arc::new(read), tx);
        let (updates, from_watches) = mpsc::channel(8);
        let (pods, from_pods) = mpsc::channel(8);
        let (_calls, hook) = mpsc::channel(1);
        let feed = tokio::spawn(async move { run.turn(from_watches, from_pods, hook).await });
        let vmi = json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "b5e7c9d2-0c3f-4a52-8f2e-3d9a1c7b6e10"},
            "spec": {
                "domain": {"devices": {"interfaces": [
                    {"name": "default", "masquerade": {}, "macAddress": "02:00:00:00:00:01"},
                ]}},
                "networks": [{"name": "default", "pod": {}}],
                "volumes": [{"name": "ci", "cloudInitNoCloud": {"secretRef": {"name": "s"}}}],
            },
            "status": {"phase": "Running", "activePods": {"p": "n"}},
        });
        let vmi = Box::new(Vmi::from_value(vmi).expect("a VMI"));
        let vmi_uid = vmi.metadata.uid.clone();
        updates.send(Update::Applied(VmiOrigin::Here, vmi)).await.expect("the feed runs");
        tokio::task::yield_now().await;
        let uid: PodUid = "p".parse().expect("a uid");
        let mac = metadata_common::mac::Mac::default();
        let taps = vec![Tap { ifname: "tap0".into(), kind: TapKind::Tap, mac, queues: 1 }];
        let netns = "/proc/1/ns/net".into();
        let pod = Pod { uid: uid.clone(), pid: 1, vmi: vmi_uid, netns, taps, nics: Vec::new() };
        while feed.is_finished() || begins.is_empty() {
            assert!(!feed.is_finished());
            _ = pods.try_send((uid.clone(), PodEvent::Found(pod.clone())));
            tokio::task::yield_now().await;
        }
        begins.recv().await.expect("it began");
        for _ in 0..64 {
            _ = release.send(());
        }
        let record = async {
            loop {
                match events.recv().await.expect("the feed runs") {
                    FeedEvent::Upsert { record, .. } => return record,
                    FeedEvent::Rejected { error, .. } => panic!("{error}"),
                    _ => {}
                }
            }
        };
        let record = record.await;
        assert_eq!(record.user_data.as_ref().and_then(|data| data.bytes()).as_deref(), Some(&b"#one"[..]));
        feed.abort();
    }

    const PACE: WatchPacing = WatchPacing::DEFAULT;

    #[test]
    fn pauses_double_to_a_limit_and_are_random_by_half() {
        let mut pauses = Pauses::new(PACE);
        let mut longest = PACE.first;
        for n in 1..=70 {
            let pause = if n % 2 == 0 { pauses.list_failed() } else { pauses.watch_failed() };
            assert!(pause >= longest / SPREAD && pause <= longest, "{n}: {pause:?} of {longest:?}");
            longest = (longest * 2).min(PACE.longest);
        }
        let all: BTreeSet<_> = (0..8).map(|_| pauses.list_failed()).collect();
        assert!(all.len() > 1, "{all:?}");
        assert_eq!(
            (PACE.pause(0), PACE.pause(1), PACE.pause(u32::MAX)),
            (PACE.first, PACE.first, PACE.longest)
        );
    }

    #[test]
    fn a_row_of_failures_ends_once_the_failed_operation_works() {
        let row = |fail: fn(&mut Pauses) -> Duration| {
            let mut pauses = Pauses::new(PACE);
            (0..9).for_each(|_| _ = fail(&mut pauses));
            pauses
        };
        for (fail, ends) in [
            (Pauses::list_failed as fn(&mut Pauses) -> Duration, Pauses::listed as fn(&mut Pauses)),
            (Pauses::list_failed, Pauses::works),
            (Pauses::watch_failed, Pauses::works),
        ] {
            let mut pauses = row(fail);
            ends(&mut pauses);
            assert!(pauses.list_failed() <= PACE.first);
        }
        let mut pauses = row(Pauses::watch_failed);
        pauses.listed();
        assert!(pauses.watch_failed() > PACE.first, "a list does not reset a watch");
    }

    #[test]
    fn a_history_lost_twice_before_a_watch_works_causes_a_pause() {
        let mut pauses = Pauses::new(PACE);
        assert_eq!(pauses.history_is_gone(), None);
        for failures in 1..20 {
            pauses.listed();
            let pause = pauses.history_is_gone().expect("a pause");
            assert!(pause >= PACE.pause(failures) / SPREAD, "lists in between do not shorten pauses");
        }
        pauses.works();
        assert_eq!(pauses.history_is_gone(), None);
    }
}
