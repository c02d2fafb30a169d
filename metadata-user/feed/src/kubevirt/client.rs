//! The client of the cluster's API server: its credentials, the watches of VMIs, Events and ConfigMaps.

use futures_util::StreamExt as _;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::api::{
    ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams, WatchEvent,
    WatchParams,
};
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::{Api, Client};
use metadata_common::printable::printable;
use metadata_common::share::{FairQueue, ShareReport, Tenant};
use metadata_content::record::values::Timestamp;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::runtime::Builder;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tower::BoxError;
use tower::filter::{FilterLayer, Predicate};
use tracing::debug;

use super::core::{VmiEvent, VmiOrigin};
use super::run::{Pauses, WatchPacing, between};
use super::vmi::{NODE_LABEL, TARGET_LABEL};
use super::{KubevirtOptions, Vmi, VmiError};
use crate::contact::{Contact, ContactError, FailureKind};
use crate::{FeedError, memory_budget};

/// Longest time to establish a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// The meaning of 404 for a list or a watch: the API lacks the kind. Neither request names a single object.
const LACKS: &str =
    "; the cluster has no CustomResourceDefinition `virtualmachineinstances.kubevirt.io`: install KubeVirt";

/// Opens a client for the cluster the agent runs in, or for the cluster of `kubeconfig`.
///
/// # Errors
/// Neither is available, or the file asks for a credential program.
pub(super) async fn open(options: &KubevirtOptions) -> Result<Client, FeedError> {
    let (config, bearer) = configured(options).await?;
    client(config, bearer)
}

/// Checks the client's configuration without a request: address, certificates and token.
///
/// # Errors
/// A part is missing or unreadable, or no header can carry the token.
pub fn access(options: &KubevirtOptions) -> Result<(), FeedError> {
    let failed = |error: &dyn Error| FeedError::Vm { reason: error.to_string() };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| failed(&error))?;
    runtime.block_on(async {
        let (config, bearer) = configured(options).await?;
        if let Some(bearer) = &bearer {
            bearer.header(Instant::now()).map_err(|error| failed(&error))?;
        }
        client(config, bearer).map(drop)
    })
}

/// Returns the client's configuration, and its token file, which kube would send unchanged.
async fn configured(options: &KubevirtOptions) -> Result<(kube::Config, Option<Bearer>), FeedError> {
    let failed = |reason: String| FeedError::Vm { reason };
    let mut config = match &options.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(|error| match error {
                // kube's words have the path a second time, as a type of Rust.
                KubeconfigError::ReadConfig(error, _) => {
                    failed(format!("kubevirt.kubeconfig: cannot read {}: {error}", path.display()))
                }
                error => failed(format!("kubevirt.kubeconfig: {}: {error}", path.display())),
            })?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(|error| failed(format!("kubevirt.kubeconfig: {}: {error}", path.display())))?
        }
        None => kube::Config::incluster().map_err(|error| {
            failed(format!(
                "no access to the cluster's API: {error}; run in a pod, where KUBERNETES_SERVICE_HOST and \
                 KUBERNETES_SERVICE_PORT are set, or set kubevirt.kubeconfig"
            ))
        })?,
    };
    if config.auth_info.exec.is_some() {
        let reason =
            "kubevirt.kubeconfig: expected a token or a certificate, found a program to run (`exec`)";
        return Err(failed(reason.into()));
    }
    config.connect_timeout = Some(CONNECT);
    // kube would retry by itself, with pauses of minutes and without reports. `Pauses` retries here instead.
    config.default_retry = false;
    let auth = &mut config.auth_info;
    // Keep any credential that kube prefers to a token file.
    let file = auth
        .token_file
        .take_if(|_| auth.token.is_none() && auth.username.is_none() && auth.auth_provider.is_none());
    let bearer = file.map(|file| {
        Bearer::open(file.clone().into())
            .map_err(|error| failed(format!("no access to the cluster's API: token file {file}: {error}")))
    });
    Ok((config, bearer.transpose()?))
}

fn client(config: kube::Config, bearer: Option<Bearer>) -> Result<Client, FeedError> {
    let builder = ClientBuilder::try_from(config)
        .map_err(|error| FeedError::Vm { reason: format!("no client for the cluster's API: {error}") })?;
    Ok(match bearer {
        Some(bearer) => builder.with_layer(&FilterLayer::new(bearer)).build(),
        None => builder.build(),
    })
}

/// Classifies a failed request.
pub(super) fn failure(error: &kube::Error) -> ContactError {
    match error {
        kube::Error::Api(status) => refused(status),
        kube::Error::Service(cause) if cause.is::<InvalidToken>() => {
            ContactError { kind: FailureKind::Forbidden, reason: cause.to_string() }
        }
        kube::Error::SerdeError(_)
        | kube::Error::FromUtf8(_)
        | kube::Error::LinesCodecMaxLineLengthExceeded => {
            ContactError { kind: FailureKind::Unreadable, reason: with_causes(error) }
        }
        _ => ContactError { kind: FailureKind::Unreachable, reason: with_causes(error) },
    }
}

/// Classifies a status other than success.
pub(super) fn refused(status: &Status) -> ContactError {
    let Status { code, reason, message, .. } = status;
    let text = if message.is_empty() { reason } else { message };
    let kind = FailureKind::of_status(*code);
    // A response without a Status object is text, which may begin with the code.
    let text = text.trim();
    let text = text.strip_prefix(&format!("{code} ")).unwrap_or(text);
    let lacks = if kind == FailureKind::NotFound { LACKS } else { "" };
    ContactError { kind, reason: format!("{code} {text}{lacks}") }
}

/// The error with its causes, which kube names only in the error's sources.
fn with_causes(error: &kube::Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        let reason = error.to_string();
        // Some errors repeat their source.
        if !text.contains(&reason) {
            text = format!("{text}: {reason}");
        }
        cause = error.source();
    }
    text
}

// The bearer token from a file, added to each request to the API server.
//
// kube sends the file's content unchanged, and a newline at its end makes the header invalid. [`Bearer`] removes
// white space at both ends, as client-go does. It reads the file again every minute, because kubelet renews mounted
// tokens.

/// How long a token is sent before its file is read again.
const FRESH: Duration = Duration::from_secs(60);
/// Longest token in bytes. API servers accept 1 MiB of headers in all; service account tokens have about 1 KiB.
const BYTES: u64 = 64 << 10;

/// A token that no header can carry. The message names the file and repeats nothing of its content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: expected a token of one line, found {found}", path.display())]
pub(super) struct InvalidToken {
    path: PathBuf,
    found: &'static str,
}

/// Adds the token from a file to requests.
#[derive(Clone, Debug)]
pub(super) struct Bearer(Arc<Mutex<Token>>);

#[derive(Debug)]
struct Token {
    path: PathBuf,
    header: Result<HeaderValue, InvalidToken>,
    read: Instant,
}

impl Bearer {
    /// Reads the file, which must exist. A token that cannot be sent fails each request.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let header = read(&path)?;
        Ok(Self(Arc::new(Mutex::new(Token { path, header, read: Instant::now() }))))
    }

    /// The `Authorization` header of a request made at `now`.
    pub(super) fn header(&self, now: Instant) -> Result<HeaderValue, InvalidToken> {
        let mut token = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(token.read) >= FRESH {
            // If the file is gone, the last token stays in use, as with client-go.
            if let Ok(header) = read(&token.path) {
                token.header = header;
            }
            token.read = now;
        }
        token.header.clone()
    }
}

impl Predicate<Request<Body>> for Bearer {
    type Request = Request<Body>;

    fn check(&mut self, mut request: Request<Body>) -> Result<Request<Body>, BoxError> {
        request.headers_mut().insert(AUTHORIZATION, self.header(Instant::now())?);
        Ok(request)
    }
}

fn read(path: &PathBuf) -> io::Result<Result<HeaderValue, InvalidToken>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(BYTES + 1).read_to_end(&mut bytes)?;
    let token = bytes.trim_ascii();
    let unusable = |found| Err(InvalidToken { path: path.clone(), found });
    if token.is_empty() {
        return Ok(unusable("nothing"));
    }
    if u64::try_from(bytes.len()).is_ok_and(|found| found > BYTES) {
        return Ok(unusable("more than 64 KiB"));
    }
    Ok(match HeaderValue::from_bytes(&[b"Bearer ", token].concat()) {
        Ok(mut header) => {
            header.set_sensitive(true);
            Ok(header)
        }
        Err(_) => unusable("a control character"),
    })
}

// Writes a ConfigMap of the cluster.

/// The name under which the API server keeps who wrote a field.
const MANAGER: &str = "xdp-imds-identity";

/// Replaces these keys of a ConfigMap, as a program in a pod of the cluster or by `kubeconfig`. Others stay as they
/// are.
///
/// # Errors
/// The API server cannot be reached or refuses; the error says what the role lacks.
pub fn replace_config_map(
    kubeconfig: Option<PathBuf>,
    namespace: &str,
    name: &str,
    data: &BTreeMap<&str, String>,
) -> Result<(), FeedError> {
    let options = KubevirtOptions { kubeconfig, ..KubevirtOptions::default() };
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data});
    let refused = |error: &kube::Error| FeedError::Vm {
        reason: format!(
            "ConfigMap {namespace}/{name}: {}; expected a ConfigMap of this name, and a role that may `patch` it",
            failure(error).reason
        ),
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| FeedError::Vm { reason: error.to_string() })?;
    runtime.block_on(async {
        let maps: Api<ConfigMap> = Api::namespaced(open(&options).await?, namespace);
        let parameters = PatchParams::apply(MANAGER).force();
        maps.patch(name, &parameters, &Patch::Apply(object)).await.map(drop).map_err(|error| refused(&error))
    })
}

// The two watches of the API server.
//
// No field selector works on VMIs, so the watches select by label: one by the node a VMI runs on, one by the node it
// migrates to. A list returns the VMIs that exist, and a watch returns the changes after it. The server ends each
// watch after a while, and the next one continues from the last version. If the server no longer has that version
// (410), or the list is old, the watch lists everything again. No VMI is removed before a list is finished.
//
// kube-runtime's `watcher` is not used. It reports the start of a list like a success, restarts a
// watch that ended at once without a pause, and does not show when the server answered last.

/// Most objects on a page of a list.
const PAGE: u32 = 500;
/// Most objects on the first page, while their size is unknown.
const FIRST_PAGE: u32 = 32;
/// Target size of a page in bytes; the size of one page determines the next request. Parsed objects take three times
/// that.
const PAGE_BYTES: usize = 4 << 20;
/// Longest wait for a page of a list, or for the start of a watch.
const ANSWER: Duration = Duration::from_secs(30);
/// How much later than requested the server may end a watch before the feed treats it as silent.
const OVERDUE: Duration = Duration::from_secs(10);

/// A change of a watch, for the feed.
#[derive(Debug)]
pub(super) enum Update {
    /// A VMI is new or has changed.
    Applied(VmiOrigin, Box<Vmi>),
    /// A VMI has left this watch.
    Gone(VmiOrigin, String),
    /// A list is finished; these are all its keys.
    Listed(VmiOrigin, BTreeSet<String>),
    /// A VMI cannot be decoded.
    Unreadable(String, VmiError),
    /// The watch works again after failures.
    Back(VmiOrigin),
    /// The server no longer has the version to continue from. A list follows at once.
    HistoryGone(VmiOrigin),
    /// A request failed.
    Failed {
        /// The watch of the request.
        origin: VmiOrigin,
        /// The reason.
        failure: ContactError,
        /// True for the first of consecutive failures.
        first: bool,
    },
}

/// One of the two watches.
pub(super) struct ApiWatch {
    origin: VmiOrigin,
    api: Api<DynamicObject>,
    selector: String,
    pace: WatchPacing,
    contact: Arc<Contact>,
    updates: mpsc::Sender<Update>,
}

/// Why a list or a watch has ended.
enum End {
    /// The server has closed the watch.
    Closed,
    /// The time for the next full list has come.
    Relist,
    /// A request failed.
    Failed(ContactError),
    /// The feed's receiver was dropped.
    FeedEnded,
}

impl From<ContactError> for End {
    fn from(failure: ContactError) -> Self {
        Self::Failed(failure)
    }
}

impl ApiWatch {
    /// Creates a watch of a node's VMIs; `origin` selects the label.
    pub(super) fn new(
        (origin, node): (VmiOrigin, &str),
        client: Client,
        pace: WatchPacing,
        contact: Arc<Contact>,
        updates: mpsc::Sender<Update>,
    ) -> Self {
        let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "VirtualMachineInstance");
        let resource = ApiResource::from_gvk_with_plural(&kind, "virtualmachineinstances");
        let label = if origin == VmiOrigin::Coming { TARGET_LABEL } else { NODE_LABEL };
        let api = Api::all_with(client, &resource);
        Self { origin, api, selector: format!("{label}={node}"), pace, contact, updates }
    }

    /// Publishes VMIs until the feed ends.
    pub(super) async fn follow(self) {
        let mut pauses = Pauses::new(self.pace);
        let mut version = None;
        let mut relist = Instant::now();
        loop {
            if Instant::now() >= relist {
                version = None;
            }
            let listing = version.is_none();
            let end = match &mut version {
                Some(version) => self.watch(version, relist, &mut pauses).await,
                None => match self.list().await {
                    Ok(listed) => {
                        version = Some(listed);
                        pauses.listed();
                        relist = Instant::now() + self.pace.relist.mul_f64(0.9 + 0.2 * rand::random::<f64>());
                        continue;
                    }
                    Err(end) => end,
                },
            };
            let pause = match end {
                End::FeedEnded => return,
                End::Relist => Duration::ZERO,
                End::Closed => pauses.ended(),
                End::Failed(failure) => {
                    // An unreadable event would repeat with each watch from the same version.
                    if matches!(failure.kind, FailureKind::Gone | FailureKind::Unreadable) {
                        version = None;
                    }
                    let Some(pause) = self.failed(failure, listing, &mut pauses).await else { return };
                    pause
                }
            };
            sleep(pause).await;
        }
    }

    /// Lists all VMIs, page by page. Returns the version after which a watch continues.
    async fn list(&self) -> Result<String, End> {
        let mut listed = BTreeSet::new();
        let mut params = ListParams::default().labels(&self.selector).limit(FIRST_PAGE);
        loop {
            let page = answer(self.api.list(&params)).await?;
            self.contact.answered(self.origin.name(), Instant::now().into_std());
            let bytes: usize = page.items.iter().map(memory_budget::length).sum();
            params.limit = Some(next_page(page.items.len(), bytes));
            for object in page.items {
                listed.insert(key(&object));
                self.send(applied(self.origin, object)).await?;
            }
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let version = versioned(page.metadata.resource_version)?;
                self.send(Update::Listed(self.origin, listed)).await?;
                return Ok(version);
            }
        }
    }

    /// Publishes the changes after a version, and advances the version.
    async fn watch(&self, version: &mut String, relist: Instant, pauses: &mut Pauses) -> End {
        match self.changes(version, relist, pauses).await {
            Ok(end) | Err(end) => end,
        }
    }

    async fn changes(&self, version: &mut String, relist: Instant, pauses: &mut Pauses) -> Result<End, End> {
        // Agents that began together do not ask for the next watch together.
        let open = between(self.pace.watch, self.pace.watch.mul_f64(1.1));
        let seconds = u32::try_from(open.as_secs()).unwrap_or(u32::MAX).max(1);
        let params = WatchParams::default().labels(&self.selector).timeout(seconds);
        let mut events = pin!(answer(self.api.watch(&params, version)).await?);
        let begun = Instant::now();
        let silent = begun + Duration::from_secs(seconds.into()) + OVERDUE;
        let lasts = begun + self.pace.short;
        let mut works = false;
        loop {
            let until = if works { silent } else { lasts.min(silent) }.min(relist);
            // A started response proves nothing: an overloaded server accepts watches and drops them.
            let event = match timeout_at(until, events.next()).await {
                Ok(Some(event)) => event.map_err(|error| failure(&error))?,
                Ok(None) if works || begun.elapsed() >= self.pace.short => {
                    self.works(pauses).await?;
                    return Ok(End::Closed);
                }
                Ok(None) => return Err(cut_short(begun.elapsed()).into()),
                Err(_) if Instant::now() >= relist => return Ok(End::Relist),
                Err(_) if Instant::now() >= silent => return Err(silence(begun.elapsed()).into()),
                Err(_) => {
                    works = true;
                    self.works(pauses).await?;
                    continue;
                }
            };
            let (now_at, update) = understand(self.origin, event)?;
            *version = now_at;
            works = true;
            self.works(pauses).await?;
            if let Some(update) = update {
                self.send(update).await?;
            }
        }
    }

    /// Notes that the watch works.
    async fn works(&self, pauses: &mut Pauses) -> Result<(), End> {
        pauses.works();
        if self.contact.works(self.origin.name(), Instant::now().into_std()) {
            self.send(Update::Back(self.origin)).await?;
        }
        Ok(())
    }

    /// Reports a failure. Returns the pause after it, or nothing when the feed has ended.
    async fn failed(&self, failure: ContactError, listing: bool, pauses: &mut Pauses) -> Option<Duration> {
        let pause = match failure.kind {
            FailureKind::Gone => pauses.history_is_gone(),
            _ if listing => Some(pauses.list_failed()),
            _ => Some(pauses.watch_failed()),
        };
        let update = match pause {
            None => {
                self.contact.history_is_gone();
                Update::HistoryGone(self.origin)
            }
            Some(_) => {
                let now = Instant::now().into_std();
                let first = self.contact.failed(self.origin.name(), failure.clone(), now);
                Update::Failed { origin: self.origin, failure, first }
            }
        };
        self.send(update).await.ok()?;
        Some(pause.unwrap_or_default())
    }

    async fn send(&self, update: Update) -> Result<(), End> {
        self.updates.send(update).await.map_err(|_| End::FeedEnded)
    }
}

/// The number of objects to request, after a page of `objects` objects and `bytes` bytes.
fn next_page(objects: usize, bytes: usize) -> u32 {
    let each = bytes.checked_div(objects).unwrap_or(0).max(1);
    u32::try_from(PAGE_BYTES / each).unwrap_or(PAGE).clamp(1, PAGE)
}

/// The response to a request, or a failure after [`ANSWER`].
async fn answer<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, ContactError> {
    match timeout(ANSWER, request).await {
        Ok(answer) => answer.map_err(|error| failure(&error)),
        Err(_) => Err(silence(ANSWER)),
    }
}

fn silence(time: Duration) -> ContactError {
    let reason = format!("no answer within {} s", time.as_secs());
    ContactError { kind: FailureKind::Unreachable, reason }
}

fn cut_short(time: Duration) -> ContactError {
    let reason = format!("the server ended the watch after {} ms without an event", time.as_millis());
    ContactError { kind: FailureKind::CutShort, reason }
}

/// The version of a response; the API server always sends one.
fn versioned(version: Option<String>) -> Result<String, ContactError> {
    version.filter(|version| !version.is_empty()).ok_or_else(|| {
        let reason = "expected a resourceVersion, found none".into();
        ContactError { kind: FailureKind::Unreadable, reason }
    })
}

/// The version after an event, and the event for the feed; a bookmark has only a version.
fn understand(
    origin: VmiOrigin,
    event: WatchEvent<DynamicObject>,
) -> Result<(String, Option<Update>), ContactError> {
    let at = |object: &DynamicObject| versioned(object.metadata.resource_version.clone());
    Ok(match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object) => {
            (at(&object)?, Some(applied(origin, object)))
        }
        WatchEvent::Deleted(object) => (at(&object)?, Some(Update::Gone(origin, key(&object)))),
        WatchEvent::Bookmark(mark) => (versioned(Some(mark.metadata.resource_version))?, None),
        WatchEvent::Error(status) => return Err(refused(&status)),
    })
}

fn key(object: &DynamicObject) -> String {
    let meta = &object.metadata;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", text(&meta.namespace), text(&meta.name))
}

fn applied(origin: VmiOrigin, mut object: DynamicObject) -> Update {
    let key = key(&object);
    let meta = &object.metadata;
    let vmi = Vmi::from_value(json!({
        "metadata": {
            "name": meta.name, "namespace": meta.namespace, "uid": meta.uid,
            "labels": meta.labels, "annotations": meta.annotations,
            "ownerReferences": meta.owner_references, "deletionTimestamp": meta.deletion_timestamp,
        },
        "spec": object.data["spec"].take(),
        "status": object.data.get_mut("status").map(serde_json::Value::take).unwrap_or_else(|| json!({})),
    }));
    match vmi {
        Ok(vmi) => Update::Applied(origin, Box::new(vmi)),
        Err(error) => Update::Unreadable(key, error),
    }
}

// Kubernetes Events on VMIs, which report to the owner how the VM is served.

/// Most reports that wait to be written; the rest is dropped. A namespace has at most half of what others leave.
pub(super) const QUEUE: usize = 1_024;
/// Reports that each namespace may have in the queue while it is not full.
const QUEUE_FLOOR: usize = 16;
/// The pause between two Events. It limits the API requests when many VMs boot at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Most bytes of an Event's message that the API accepts.
const MESSAGE: usize = 1_024;

/// The reports that wait to be written. Namespaces take turns.
#[derive(Clone)]
pub(super) struct Reports(Arc<Waiting>);

struct Waiting {
    queue: Mutex<FairQueue<VmiEvent>>,
    added: Notify,
}

impl Reports {
    pub(super) fn new() -> Self {
        let queue = Mutex::new(FairQueue::new(QUEUE, QUEUE_FLOOR));
        Self(Arc::new(Waiting { queue, added: Notify::new() }))
    }

    /// Adds a report in place of one on the same VMI that still waits. Drops it if its namespace has its share of the
    /// queue.
    pub(super) fn add(&self, report: VmiEvent) {
        let tenant = Tenant::namespace(&report.namespace);
        let mut queue = self.queue();
        if let Some(waiting) = queue.of(&tenant).find(|waiting| waiting.uid == report.uid) {
            *waiting = report;
            return;
        }
        _ = queue.push(&tenant, report);
        drop(queue);
        self.0.added.notify_one();
    }

    /// How namespaces share the queue.
    pub(super) fn share(&self) -> ShareReport {
        ShareReport::of("events", self.queue().share())
    }

    async fn next(&self) -> VmiEvent {
        loop {
            let next = self.queue().pop();
            match next {
                Some((_, report)) => return report,
                None => self.0.added.notified().await,
            }
        }
    }

    fn queue(&self) -> MutexGuard<'_, FairQueue<VmiEvent>> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes each report as an Event. It drops a refused one: Events are optional, and the agent may lack the right to
/// write them.
pub(super) async fn write(client: Client, node: String, reports: Reports) {
    loop {
        let report = reports.next().await;
        let api: Api<Event> = Api::namespaced(client.clone(), &report.namespace);
        let Some(event) = event(&report, &node, now()) else { continue };
        if let Err(error) = api.create(&PostParams::default(), &event).await {
            debug!(vmi = report.name, "the Event was not written: {error}");
        }
        sleep(PAUSE).await;
    }
}

fn now() -> Option<Timestamp> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Timestamp::at(i64::try_from(since.as_secs()).ok()?)
}

fn event(report: &VmiEvent, node: &str, now: Option<Timestamp>) -> Option<Event> {
    let text = printable(&report.message);
    let message = text.char_indices().find(|(at, char)| at + char.len_utf8() > MESSAGE);
    let message = message.map_or(text.as_str(), |(at, _)| &text[..at]);
    let now = now.as_ref().map(Timestamp::as_str);
    serde_json::from_value(json!({
        "metadata": { "generateName": format!("{}.", report.name), "namespace": report.namespace },
        "involvedObject": {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "name": report.name,
            "namespace": report.namespace,
            "uid": report.uid,
        },
        "reason": report.reason.as_str(),
        "type": report.reason.kind(),
        "message": message,
        "source": { "component": "xdp-imds", "host": node },
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }))
    .ok()
}

#[cfg(test)]
mod tests {
    use metadata_content::record::values::Timestamp;
    use std::fs;
    use tokio::time::Instant;

    use super::{
        BYTES, Bearer, FRESH, MESSAGE, PAGE, PAGE_BYTES, QUEUE, Reports, Update, applied, event, next_page,
    };
    use crate::kubevirt::Vmi;
    use crate::kubevirt::core::{EventReason, VmiEvent, VmiOrigin};

    #[test]
    fn a_renewed_token_is_sent_within_a_minute_and_a_lost_one_stays() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token");
        fs::write(&path, "one\n").expect("written");
        let bearer = Bearer::open(path.clone()).expect("it is there");
        let begun = Instant::now();
        let sent = |minutes: u32| bearer.header(begun + FRESH * minutes).expect("a header");
        fs::write(&path, "two\n").expect("written");
        assert_eq!(sent(0), "Bearer one");
        assert_eq!(sent(1), "Bearer two");
        assert!(sent(1).is_sensitive(), "no log shows it");
        fs::remove_file(&path).expect("removed");
        assert_eq!(sent(2), "Bearer two");
        fs::write(&path, "\n").expect("written");
        bearer.header(begun + FRESH * 3).expect_err("nothing to send");
    }

    #[test]
    fn a_token_beyond_the_limit_is_refused_and_a_missing_file_is_an_error() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("token");
        Bearer::open(path.clone()).expect_err("no file");
        let limit = usize::try_from(BYTES).expect("it fits");
        for (bytes, fits) in [(limit, true), (limit + 1, false)] {
            fs::write(&path, "a".repeat(bytes)).expect("written");
            let bearer = Bearer::open(path.clone()).expect("it is there");
            assert_eq!(bearer.header(Instant::now()).is_ok(), fits, "{bytes}");
        }
    }

    #[test]
    fn the_length_of_the_next_page_follows_the_size_of_objects() {
        for (objects, bytes, expected) in [
            (0, 0, PAGE),
            (32, 32 * 1_000, PAGE),
            (32, PAGE_BYTES, 32),
            (500, 10 * PAGE_BYTES, 50),
            (1, 2 * PAGE_BYTES, 1),
        ] {
            assert_eq!(next_page(objects, bytes), expected, "{objects} objects of {bytes} bytes");
        }
    }

    #[test]
    fn a_watched_vmi_has_every_field_that_the_feed_reads() {
        let text = include_str!("translate/fixtures/vmi.json");
        let mut sent: serde_json::Value = serde_json::from_str(text).expect("JSON");
        sent["metadata"]["ownerReferences"] = serde_json::json!([{
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "web-1", "uid": "vm-uid",
            "controller": true, "blockOwnerDeletion": true,
        }]);
        sent["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z".into();
        let read = Vmi::from_value(sent.clone()).expect("a VMI");
        let object = serde_json::from_value(sent).expect("an object");
        let Update::Applied(VmiOrigin::Here, watched) = applied(VmiOrigin::Here, object) else {
            panic!("it is readable")
        };
        // The pieces first, because the debug form of a VMI shows its name alone.
        assert_eq!(watched.metadata.owner_references, read.metadata.owner_references);
        assert_eq!(watched.metadata.deletion_timestamp, read.metadata.deletion_timestamp);
        assert_eq!(watched.owner().as_str(), "kubevirt/shop/web-1/vm-uid");
        assert_eq!(*watched, read);
    }

    fn report(message: String) -> VmiEvent {
        let (namespace, name, uid) = ("shop".into(), "web".into(), "u".into());
        VmiEvent { namespace, name, uid, reason: EventReason::Degraded, message }
    }

    #[tokio::test]
    async fn a_namespace_full_of_reports_delays_no_other_and_keeps_one_for_each_vmi() {
        let reports = Reports::new();
        let of = |namespace: &str, uid: usize, message: &str| VmiEvent {
            namespace: namespace.into(),
            uid: uid.to_string(),
            ..report(message.into())
        };
        for round in ["first", "last"] {
            (0..2 * QUEUE).for_each(|vm| reports.add(of("hostile", vm, round)));
        }
        reports.add(of("modest", 0, "ready"));
        assert_eq!(reports.share().used, QUEUE / 2 + 1);
        let (one, two) = (reports.next().await, reports.next().await);
        assert_eq!((one.message.as_str(), two.namespace.as_str()), ("last", "modest"));
    }

    #[test]
    fn an_event_is_on_the_vmi() {
        let event = event(&report("no".into()), "n", Timestamp::at(0)).expect("an Event");
        let on = &event.involved_object;
        assert_eq!(on.kind.as_deref(), Some("VirtualMachineInstance"));
        assert_eq!((on.name.as_deref(), on.uid.as_deref()), (Some("web"), Some("u")));
        assert_eq!(
            (event.reason.as_deref(), event.type_.as_deref()),
            (Some("ImdsDegraded"), Some("Warning"))
        );
        assert!(event.first_timestamp.is_some());
    }

    #[test]
    fn a_message_shows_what_others_wrote_as_text() {
        let event = event(&report("tap \x1b[2J\n\u{202e}".into()), "n", None).expect("an Event");
        assert_eq!(event.message.as_deref(), Some("tap \\u{1b}[2J\\u{a}\\u{202e}"));
    }

    #[test]
    fn a_message_is_cut_where_a_character_ends() {
        let event = event(&report("ä".repeat(MESSAGE)), "n", None).expect("an Event");
        assert_eq!(event.message.map(|message| message.len()), Some(MESSAGE));
    }
}
