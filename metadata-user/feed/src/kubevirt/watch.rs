//! The two watches of the API server.
//!
//! No field selector works on VMIs, so the watches select by label: one by the node a VMI runs on, one by the node it
//! migrates to. A list returns the VMIs that exist, and a watch returns the changes after it. The server ends each
//! watch after a while, and the next one continues from the last version. If the server no longer has that version
//! (410), or the list is old, the watch lists everything again. No VMI is removed before a list is finished.
//!
//! This module does not use kube-runtime's `watcher`. That one reports the start of a list like a success, restarts a
//! watch that ended at once without a pause, and does not show when the server answered last.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, WatchEvent, WatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::core::VmiOrigin;
use super::run::{Pauses, WatchPacing, between};
use super::vmi::{NODE_LABEL, TARGET_LABEL};
use super::{Vmi, VmiError, client};
use crate::contact::{Contact, ContactError, FailureKind};
use crate::memory_budget;

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
                Ok(Some(event)) => event.map_err(|error| client::failure(&error))?,
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
        Ok(answer) => answer.map_err(|error| client::failure(&error)),
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
        WatchEvent::Error(status) => return Err(client::refused(&status)),
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
        },
        "spec": object.data["spec"].take(),
        "status": object.data.get_mut("status").map(serde_json::Value::take).unwrap_or_else(|| json!({})),
    }));
    match vmi {
        Ok(vmi) => Update::Applied(origin, Box::new(vmi)),
        Err(error) => Update::Unreadable(key, error),
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE, PAGE_BYTES, next_page};

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
}
