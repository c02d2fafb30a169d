//! Kubernetes Events on VMIs, which report to the owner how the VM is served.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Event;
use kube::api::PostParams;
use kube::{Api, Client};
use metadata_common::share::{FairQueue, ShareReport, Tenant};
use serde_json::json;
use tokio::sync::Notify;
use tracing::debug;

use super::core::VmiEvent;
use metadata_common::printable::printable;
use metadata_content::record::values::Timestamp;

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
        tokio::time::sleep(PAUSE).await;
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
    use super::{MESSAGE, QUEUE, Reports, event};
    use crate::kubevirt::core::{EventReason, VmiEvent};
    use metadata_content::record::values::Timestamp;

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
