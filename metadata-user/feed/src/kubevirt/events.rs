//! Kubernetes Events on VMIs, which report to the owner how the VM is served.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Event;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tracing::debug;

use super::core::Report;
use metadata_base::printable::printable;
use metadata_content::record::values::Timestamp;

/// Most reports that wait to be written; the caller drops the rest.
pub(super) const QUEUE: usize = 1_024;
/// The pause between two Events. It limits the API requests when many VMs boot at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Most octets of an Event's message that the API accepts.
const MESSAGE: usize = 1_024;

/// Writes each report as an Event. It drops a refused one: Events are optional, and the agent may lack the right to
/// write them.
pub(super) async fn write(client: Client, node: String, mut reports: mpsc::Receiver<Report>) {
    while let Some(report) = reports.recv().await {
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

fn event(report: &Report, node: &str, now: Option<Timestamp>) -> Option<Event> {
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
    use super::{MESSAGE, event};
    use crate::kubevirt::core::{Reason, Report};
    use metadata_content::record::values::Timestamp;

    fn report(message: String) -> Report {
        let (namespace, name, uid) = ("shop".into(), "web".into(), "u".into());
        Report { namespace, name, uid, reason: Reason::Degraded, message }
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
