//! Events in the forms that several dialects share, and `/v1/events`, which every VM has.
//!
//! | Request | Answer |
//! |---|---|
//! | `GET /v1/events` | the [`EventDocument`] as JSON |
//! | `GET /v1/events?incarnation=N&timeout=SECONDS` | the same, once its incarnation is not `N` |
//! | `GET /v1/events/ID` | one event |
//! | `POST /v1/events/ID` | acknowledges a pending event |
//! | `POST /v1/events` | forwards a message to the sink `events` |

use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

use super::common::forward;
use super::route_builder::{JSON, RouteBuilder, computed};
use crate::dialect::json::json;
use crate::http::{Method, Response, StatusCode};
use crate::record::event::{Acknowledgement, EventDocument};
use crate::record::values::Timestamp;
use crate::sink::MessageKind;
use crate::store::{EVERY_DIALECT, LiveOutcome, LiveRequest, Methods, ParkedCall};

/// How long a request waits for a change by default.
const WAIT_DEFAULT: Duration = Duration::from_secs(60);
/// Maximum time a request may wait for a change.
const WAIT_MOST: Duration = Duration::from_secs(600);
const PATH: &str = "/v1/events";
const METHODS: Methods = Methods::of(&[Method::Get, Method::Head, Method::Post]);

static FORBIDDEN: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(403), &[]));
static NOT_FOUND: LazyLock<Response> = LazyLock::new(|| Response::error(StatusCode(404), &[]));

/// Adds the path for every record.
pub(super) fn render(routes: &mut RouteBuilder<'_>) {
    routes.begin(EVERY_DIALECT);
    let about =
        "what the host will do; with `incarnation`, after a change; POST forwards or acknowledges an event";
    routes.live_below(PATH, METHODS, &[], computed(about, answer));
}

fn answer(call: &LiveRequest<'_>) -> LiveOutcome {
    let reads = Methods::READ.contain(call.request.method);
    match (call.rest.trim_matches('/'), reads) {
        ("", false) => forward(call, MessageKind::Event).into(),
        ("", true) => document(call),
        (id, true) => match call.vm.mailbox.events().document().find(id) {
            Some(event) => found(event).into(),
            None => NOT_FOUND.clone().into(),
        },
        // Somebody outside must not acknowledge through a proxy of the guest.
        (_, false) if call.request.headers.contains("X-Forwarded-For") => FORBIDDEN.clone().into(),
        (id, false) => match acknowledge(call, id) {
            Acknowledgement::Unknown => NOT_FOUND.clone().into(),
            Acknowledgement::Noted | Acknowledgement::Repeated => {
                Response::new(StatusCode(204), None, &[], "").into()
            }
        },
    }
}

fn found(value: &impl serde::Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => Response::new(StatusCode(200), Some(JSON), &[], text),
        Err(_) => Response::error(StatusCode(500), &[]),
    }
}

/// Answers with all events, or parks a request that knows them until they change.
fn document(call: &LiveRequest<'_>) -> LiveOutcome {
    let now = call.vm.mailbox.events().document();
    match wait(call, &now) {
        Some(parked) => LiveOutcome::Park(parked),
        None => found(&now).into(),
    }
}

fn wait(call: &LiveRequest<'_>, now: &EventDocument) -> Option<ParkedCall> {
    if let Some(parked) = call.parked {
        let is_over = parked.state != u64::from(now.incarnation)
            || call.now.mono >= parked.until
            || parked.wait.is_ended();
        return (!is_over).then(|| parked.clone());
    }
    let (mut known, mut timeout) = (None, WAIT_DEFAULT);
    for (name, value) in form_urlencoded::parse(call.request.target.query.as_bytes()) {
        match &*name {
            "incarnation" => known = value.parse().ok(),
            "timeout" => timeout = value.parse().map_or(timeout, Duration::from_secs),
            _ => {}
        }
    }
    (known == Some(now.incarnation)).then(|| ParkedCall {
        until: call.now.mono + timeout.min(WAIT_MOST),
        has_answer: true,
        state: now.incarnation.into(),
        wait: call.vm.mailbox.wait(),
    })
}

/// Notes that the guest acknowledges an event, and tells the sink `events` the first time.
pub(super) fn acknowledge(call: &LiveRequest<'_>, id: &str) -> Acknowledgement {
    let done = call.vm.mailbox.events().acknowledge(id, call.now.unix_seconds);
    if done == Acknowledgement::Noted {
        let message = json!({ "acknowledged": id }).to_string();
        call.vm.mailbox.send(&call.vm.sinks, MessageKind::Event, message.as_bytes(), call.now.unix_seconds);
    }
    done
}

/// Formats a time as HTTP does (RFC 9110 §5.6.7): `Sun, 06 Nov 1994 08:49:37 GMT`.
pub(super) fn imf_fixdate(time: &Timestamp) -> String {
    // Years before 1970 and after 9999 cannot be expressed.
    let seconds = u64::try_from(time.unix_seconds()).unwrap_or(0).min(253_402_300_799);
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds))
}

/// Formats a time in UTC and whole seconds (RFC 3339): `1994-11-06T08:49:37Z`.
pub(super) fn utc(time: &Timestamp) -> String {
    Timestamp::at(time.unix_seconds()).map_or_else(|| time.as_str().to_owned(), |utc| utc.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use metadata_common::time::Now;
    use serde_json::{Value, json};

    use crate::dialect::render;
    use crate::dialect::tests::{NOW, TestRequest, full, parse};
    use crate::http::{Method, Response};
    use crate::record::event::ScheduledEvent;
    use crate::store::{Interner, LiveOutcome, Responses, VmState};

    const AZURE: (&str, &str) = ("Metadata", "true");
    const GOOGLE: (&str, &str) = ("Metadata-Flavor", "Google");
    const SCHEDULED: &str = "/metadata/scheduledevents?api-version=2020-07-01";
    const GCE: &str = "/computeMetadata/v1/instance";

    /// A VM without session tokens, and its guest.
    struct Guest {
        record: Value,
        vm: VmState,
        responses: Responses,
    }

    impl Guest {
        fn new(events: &Value) -> Self {
            let mut record = full();
            record["serve"]["imdsv2"] = "off".into();
            record["events"] = events.clone();
            let parsed = parse(&record);
            let vm = VmState::alone(parsed.owner_text());
            let responses = render(&parsed, &mut Interner::new(), vm.clone());
            Self { record, vm, responses }
        }

        /// Publishes the record with other events.
        fn publish(&mut self, events: Value) {
            self.record["events"] = events;
            self.responses = render(&parse(&self.record), &mut Interner::new(), self.vm.clone());
        }

        fn send(&self, request: TestRequest<'_>) -> Response {
            request.answer(&self.responses)
        }

        fn get(&self, target: &str) -> Response {
            let fields = [AZURE, GOOGLE];
            self.send(TestRequest::new(Method::Get, target, &fields))
        }

        fn text(&self, target: &str) -> String {
            let response = self.get(target);
            assert_eq!(response.status().0, 200, "{target}");
            String::from_utf8(response.body().to_bytes().to_vec()).expect("text")
        }

        fn json(&self, target: &str) -> Value {
            serde_json::from_str(&self.text(target)).expect("JSON")
        }

        fn post(&self, target: &str, body: &str) -> u16 {
            let request = TestRequest::new(Method::Post, target, &[AZURE]);
            self.send(TestRequest { body: body.as_bytes(), ..request }).status().0
        }

        fn acknowledged(&self, id: &str) -> bool {
            let document = self.vm.mailbox.events().document();
            document.find(id).is_some_and(|known| known.acknowledged.is_some())
        }
    }

    fn event(kind: &str, state: &str) -> Value {
        json!([{
            "id": "drain-1", "kind": kind, "state": state, "not_before": "2026-11-26T10:30:00+02:00",
            "description": "the host is replaced",
        }])
    }

    #[test]
    fn azure_lists_pending_events_with_their_time_until_they_start() {
        for (kind, name) in [
            ("freeze", "Freeze"),
            ("reboot", "Reboot"),
            ("redeploy", "Redeploy"),
            ("terminate", "Terminate"),
            ("preempt", "Preempt"),
        ] {
            for (state, status, not_before) in
                [("scheduled", "Scheduled", "Thu, 26 Nov 2026 08:30:00 GMT"), ("started", "Started", "")]
            {
                let expected = json!({
                    "DocumentIncarnation": 2,
                    "Events": [{
                        "Description": "the host is replaced", "DurationInSeconds": -1, "EventId": "drain-1",
                        "EventSource": "Platform", "EventStatus": status, "EventType": name,
                        "NotBefore": not_before, "ResourceType": "VirtualMachine", "Resources": ["web-1"],
                    }],
                });
                assert_eq!(Guest::new(&event(kind, state)).json(SCHEDULED), expected, "{kind} {state}");
            }
        }
        for state in ["completed", "cancelled"] {
            let events = Guest::new(&event("reboot", state)).json(SCHEDULED);
            assert_eq!(events, json!({"DocumentIncarnation": 2, "Events": []}), "{state}");
        }
        assert_eq!(Guest::new(&json!([])).json(SCHEDULED), json!({"DocumentIncarnation": 1, "Events": []}));
        let soon = Guest::new(&json!([{"id": "soon", "kind": "reboot"}])).json(SCHEDULED);
        assert_eq!(soon["Events"][0]["NotBefore"], "Thu, 01 Jan 1970 00:00:00 GMT", "when it was announced");
    }

    #[test]
    fn azures_guest_acknowledges_all_events_of_a_body_or_none() {
        let mut two = event("freeze", "scheduled");
        two.as_array_mut()
            .expect("a list")
            .push(json!({"id": "over", "kind": "reboot", "state": "completed"}));
        let guest = Guest::new(&two);
        let start = |ids: &[&str]| {
            let requests: Vec<_> = ids.iter().map(|id| json!({"EventId": id})).collect();
            json!({"StartRequests": requests}).to_string()
        };
        for refused in [
            start(&["drain-1", "other"]),
            start(&["over"]),
            start(&[]),
            "{}".into(),
            String::new(),
            "[".repeat(9_999),
        ] {
            assert_eq!(guest.post(SCHEDULED, &refused), 400, "{refused:.40}");
            assert!(!guest.acknowledged("drain-1"), "{refused:.40}");
        }
        assert_eq!(guest.post(SCHEDULED, &start(&["drain-1"])), 200);
        assert!(guest.acknowledged("drain-1"));
        assert_eq!(guest.post(SCHEDULED, &start(&["drain-1"])), 200, "it may repeat that");
    }

    #[test]
    fn ec2_has_paths_of_events_while_there_are_some() {
        let meta = "/latest/meta-data";
        let maintenance_of = |guest: &Guest| {
            let list = |name| guest.json(&format!("{meta}/events/maintenance/{name}"));
            (list("scheduled"), list("history"))
        };
        let maintenance = |kind, state| maintenance_of(&Guest::new(&event(kind, state)));
        let date = "26 Nov 2026 08:30:00 GMT";
        for (kind, code) in
            [("reboot", "system-reboot"), ("redeploy", "instance-stop"), ("terminate", "instance-retirement")]
        {
            for (state, name, mark) in [
                ("scheduled", "active", ""),
                ("started", "active", ""),
                ("completed", "completed", "[Completed] "),
                ("cancelled", "canceled", "[Canceled] "),
            ] {
                let expected = json!([{
                    "Code": code, "Description": format!("{mark}the host is replaced"), "EventId": "drain-1",
                    "NotAfter": date, "NotBefore": date, "State": name,
                }]);
                let (scheduled, history) = maintenance(kind, state);
                let (found, other) =
                    if name == "active" { (scheduled, history) } else { (history, scheduled) };
                assert_eq!((found, other), (expected, json!([])), "{kind} {state}");
            }
        }
        let preempted = Guest::new(&event("preempt", "scheduled"));
        let time = "2026-11-26T08:30:00Z";
        assert_eq!(preempted.text(&format!("{meta}/spot/termination-time")), time);
        let action = preempted.json(&format!("{meta}/spot/instance-action"));
        assert_eq!(action, json!({"action": "terminate", "time": time}));
        let rebalance = preempted.json(&format!("{meta}/events/recommendations/rebalance"));
        assert_eq!(rebalance, json!({"noticeTime": "1970-01-01T00:00:00Z"}), "when it was announced");
        assert!(preempted.text(meta).lines().any(|name| name == "spot/"));
        let lifecycle = "autoscaling/target-lifecycle-state";
        let ending = Guest::new(&event("terminate", "started"));
        assert_eq!(ending.text(&format!("{meta}/{lifecycle}")), "Terminated");
        for events in [json!([]), event("freeze", "started"), event("terminate", "scheduled")] {
            let quiet = Guest::new(&events);
            for path in ["events", "spot/instance-action", "spot/termination-time", lifecycle] {
                assert_eq!(quiet.get(&format!("{meta}/{path}")).status().0, 404, "{path} {events}");
            }
        }
        // Their absence would be a fault, a live migration a reason to leave, and their names a longer crawl at boot.
        for events in [json!([]), event("freeze", "started")] {
            let quiet = Guest::new(&events);
            assert_eq!(maintenance_of(&quiet), (json!([]), json!([])), "{events}");
            assert!(!quiet.text(meta).contains("events"), "{events}");
        }
    }

    #[test]
    fn gce_tells_of_maintenance_and_preemption_and_wakes_who_waits_for_them() {
        let mut guest = Guest::new(&json!([]));
        let value = |guest: &Guest, name: &str| guest.text(&format!("{GCE}/{name}"));
        assert_eq!(value(&guest, "maintenance-event"), "NONE");
        let none = guest.get(&format!("{GCE}/upcoming-maintenance"));
        let text = r#"{ "error": "no notifications have been received yet, try again later" }"#;
        assert_eq!(
            (none.status().0, &*none.body().to_bytes()),
            (503, text.as_bytes()),
            "as Google's agents expect"
        );
        let waiting = format!("{GCE}/maintenance-event?wait_for_change=true");
        let fields = [GOOGLE];
        let request = TestRequest::new(Method::Get, &waiting, &fields);
        let LiveOutcome::Park(parked) = request.send(&guest.responses) else { panic!("nothing has changed") };
        guest.publish(event("freeze", "scheduled"));
        let told = guest.send(TestRequest { parked: Some(&parked), ..request });
        assert_eq!(&*told.body().to_bytes(), b"MIGRATE_ON_HOST_MAINTENANCE");
        let upcoming = guest.json(&format!("{GCE}/upcoming-maintenance?recursive=true&alt=json"));
        let time = "2026-11-26T08:30:00Z";
        assert_eq!(
            upcoming,
            json!({
                "can_reschedule": "false", "latest_window_start_time": time, "maintenance_status": "PENDING",
                "type": "SCHEDULED", "window_start_time": time,
            })
        );
        guest.publish(event("freeze", "started"));
        assert_eq!(value(&guest, "upcoming-maintenance/maintenance_status"), "ONGOING");
        guest.publish(event("terminate", "scheduled"));
        assert_eq!(value(&guest, "maintenance-event"), "TERMINATE_ON_HOST_MAINTENANCE");
        assert_eq!(value(&guest, "preempted"), "FALSE");
        guest.publish(event("preempt", "scheduled"));
        assert_eq!((&*value(&guest, "preempted"), &*value(&guest, "maintenance-event")), ("TRUE", "NONE"));
        let mut both = event("freeze", "started");
        both.as_array_mut().expect("a list").push(json!({"id": "end", "kind": "terminate"}));
        guest.publish(both);
        assert_eq!(value(&guest, "maintenance-event"), "TERMINATE_ON_HOST_MAINTENANCE", "it matters more");
        guest.publish(event("freeze", "completed"));
        assert_eq!(value(&guest, "maintenance-event"), "NONE");
    }

    #[test]
    fn aliyun_has_the_time_of_a_preemption() {
        let ask = |events: &Value| {
            let guest = Guest::new(events);
            let request =
                TestRequest::new(Method::Get, "/latest/meta-data/instance/spot/termination-time", &[]);
            let response = guest.send(TestRequest { local: ("100.100.100.200", 80), ..request });
            (response.status().0, String::from_utf8_lossy(&response.body().to_bytes()).into_owned())
        };
        assert_eq!(ask(&event("preempt", "scheduled")), (200, "2026-11-26T08:30:00Z".to_owned()));
        assert_eq!(ask(&event("reboot", "scheduled")).0, 404);
    }

    #[test]
    fn every_guest_reads_and_acknowledges_events_without_a_cloud() {
        let guest = Guest::new(&event("freeze", "scheduled"));
        let found = guest.json("/v1/events");
        assert_eq!(found["incarnation"], 2);
        let mut expected = event("freeze", "scheduled")[0].clone();
        expected["announced"] = "1970-01-01T00:00:00Z".into();
        assert_eq!(found["events"][0], expected);
        assert_eq!(guest.json("/v1/events/drain-1"), found["events"][0]);
        for (path, status) in
            [("/v1/events/other", 404), ("/v1/events/drain-1", 204), ("/v1/events/drain-1", 204)]
        {
            assert_eq!(guest.post(path, ""), status, "{path}");
        }
        assert!(guest.acknowledged("drain-1"));
        assert_eq!(guest.json("/v1/events/drain-1")["acknowledged"], "2026-11-21T00:00:00Z");
        assert_eq!(guest.get("/v1/events/other").status().0, 404);
        let forwarded = [("X-Forwarded-For", "192.0.2.1")];
        let request = TestRequest::new(Method::Post, "/v1/events/drain-1", &forwarded);
        assert_eq!(guest.send(request).status().0, 403, "somebody outside asks through a proxy of the guest");
    }

    #[test]
    fn a_request_waits_while_it_knows_the_events_and_no_longer_than_it_says() {
        let guest = Guest::new(&event("freeze", "scheduled"));
        let at = |seconds| Now { mono: Duration::from_secs(seconds), unix_seconds: NOW };
        let waiting = TestRequest::new(Method::Get, "/v1/events?incarnation=2&timeout=9", &[]);
        let LiveOutcome::Park(parked) = waiting.send(&guest.responses) else { panic!("nothing has changed") };
        let again = TestRequest { parked: Some(&parked), now: at(8), ..waiting };
        assert!(matches!(again.send(&guest.responses), LiveOutcome::Park(_)), "8 s of 9");
        let late = guest.send(TestRequest { now: at(9), ..again });
        assert_eq!(late.status().0, 200, "an answer without news");
        let more: ScheduledEvent =
            serde_json::from_value(json!({"id": "b", "kind": "reboot"})).expect("an event");
        let instance = parse(&guest.record).instance_id().to_owned();
        assert_eq!(guest.vm.mailbox.events().add(&instance, more, 0), Ok(true));
        let told = guest.send(again);
        let told: Value = serde_json::from_slice(&told.body().to_bytes()).expect("JSON");
        assert_eq!((&told["incarnation"], &told["events"][1]["id"]), (&json!(3), &json!("b")));
        let other = TestRequest::new(Method::Get, "/v1/events?incarnation=1", &[]);
        assert_eq!(guest.send(other).status().0, 200, "it knows another incarnation");
        let LiveOutcome::Park(parked) =
            TestRequest::new(Method::Get, "/v1/events?incarnation=3&timeout=86400", &[])
                .send(&guest.responses)
        else {
            panic!("nothing has changed");
        };
        assert_eq!(parked.until, super::WAIT_MOST, "the longest wait");
    }
}
