//! The tree of a VM whose platform has a metadata service of its own: every path is answered by that service, but for
//! those of dialects that the record lists, and `/v1`.

use super::route_builder::{RouteBuilder, computed};
use super::tokens::EVERY_METHOD;
use crate::http::{Response, StatusCode};
use crate::record::Dialect;
use crate::store::{LiveOutcome, LiveRequest, ParkedCall};
use crate::upstream::{ANSWERED_WITHIN, UpstreamOutcome};

/// Adds the tree.
pub(super) fn render(routes: &mut RouteBuilder<'_>) {
    routes.begin(Dialect::OpenStack.as_str());
    let about = "the answer of the platform's metadata service";
    routes.live_below("/", EVERY_METHOD, &[], computed(about, answer));
}

fn answer(call: &LiveRequest<'_>) -> LiveOutcome {
    let unavailable = || Response::error(StatusCode(503), &[("Retry-After", "1")]).into();
    let Some(upstream) = &call.vm.upstream else { return unavailable() };
    let order = call.parked.map(|parked| parked.state);
    let slot = call.connection.slot;
    let state = match upstream.answer(slot, call.request, call.now.unix_seconds, order) {
        UpstreamOutcome::Ready(response) => return response.into(),
        UpstreamOutcome::Unavailable => return unavailable(),
        UpstreamOutcome::Awaited(order) => order,
    };
    let (until, wait) = match call.parked {
        Some(parked) if call.now.mono >= parked.until || parked.wait.is_ended() => return unavailable(),
        Some(parked) => (parked.until, parked.wait.clone()),
        None => (call.now.mono + ANSWERED_WITHIN, call.vm.mailbox.wait()),
    };
    LiveOutcome::Park(ParkedCall { until, has_answer: false, state, wait })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use metadata_common::mac::Mac;
    use metadata_common::time::Now;
    use serde_json::{Value, json};

    use crate::dialect::render;
    use crate::dialect::tests::{NOW, TestRequest, full, parse};
    use crate::http::{Method, Response, StatusCode};
    use crate::store::{Interner, LiveOutcome, ParkedCall, Responses, VmState};
    use crate::upstream::{
        ANSWERED_WITHIN, ANSWERS_PER_VM, FAILED_SECONDS, KEPT_SECONDS, ORDERS_PER_VM, Upstream,
        UpstreamAnswer, UpstreamOrder,
    };

    const MAC: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x57]);
    const META_DATA: &str = "/openstack/latest/meta_data.json";

    /// A VM, its guest, and the orders that its service gets.
    struct Guest {
        responses: Responses,
        orders: Arc<Mutex<Vec<UpstreamOrder>>>,
        now: u64,
    }

    impl Guest {
        fn new(ahead: &'static [&'static str], dialects: Value) -> Self {
            let orders = Arc::new(Mutex::new(Vec::new()));
            let list = Arc::clone(&orders);
            let upstream = Upstream::new(ahead, move |order| {
                list.lock().expect("sound").push(order);
                true
            });
            let mut record = full();
            record["serve"]["dialects"] = dialects;
            let record = parse(&record);
            let vm = VmState::alone(record.owner_text()).answered_by(&upstream, &record);
            vm.set_nic(0, MAC, NOW);
            Self { responses: render(&record, &mut Interner::new(), vm), orders, now: NOW }
        }

        fn alone() -> Self {
            Self::new(&[], json!([]))
        }

        fn send(&self, method: Method, target: &str, body: &str, parked: Option<&ParkedCall>) -> LiveOutcome {
            let fields = [("X-Instance-ID", "another"), ("X-Forwarded-For", "10.9.9.9")];
            let now = Now { mono: Duration::from_secs(self.now - NOW), unix_seconds: self.now };
            let request = TestRequest::new(method, target, &fields);
            TestRequest { body: body.as_bytes(), parked, now, ..request }.send(&self.responses)
        }

        /// The status and body of an answer that is there.
        fn said(&self, method: Method, target: &str) -> (u16, String) {
            said(&self.send(method, target, "", None))
        }

        fn park(&self, method: Method, target: &str, body: &str) -> ParkedCall {
            match self.send(method, target, body, None) {
                LiveOutcome::Park(parked) => parked,
                other => panic!("{target} is answered: {other:?}"),
            }
        }

        fn order(&self) -> UpstreamOrder {
            self.orders.lock().expect("sound").pop().expect("an order")
        }

        fn has_orders(&self) -> bool {
            !self.orders.lock().expect("sound").is_empty()
        }

        /// Asks, and has the service answer.
        fn fetch(&self, method: Method, target: &str, status: u16, text: &str) -> (u16, String) {
            let parked = self.park(method, target, "");
            assert_eq!(self.order().answered(answer(status, text), self.now), [0]);
            said(&self.send(method, target, "", Some(&parked)))
        }
    }

    fn answer(status: u16, text: &str) -> UpstreamAnswer {
        let content_type = Some("text/plain; charset=UTF-8".to_owned());
        UpstreamAnswer { status: StatusCode(status), content_type, body: text.to_owned().into() }
    }

    fn text(response: &Response) -> (u16, String) {
        (response.status().0, String::from_utf8_lossy(&response.body().to_bytes()).into_owned())
    }

    fn said(outcome: &LiveOutcome) -> (u16, String) {
        match outcome {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => text(response),
            LiveOutcome::Park(parked) => panic!("parked: {parked:?}"),
        }
    }

    #[test]
    fn an_order_names_what_the_platform_assigned_and_nothing_of_the_guests_headers() {
        let guest = Guest::alone();
        let _parked = guest.park(Method::Post, "/openstack/latest/password?a=%20b", "secret");
        let order = guest.order();
        assert_eq!((order.instance(), order.project()), ("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d", "p1"));
        assert_eq!(order.address().to_string(), "192.168.7.5", "the fixed address of the NIC that asks");
        assert_eq!((order.method(), order.path()), (Method::Post, "/openstack/latest/password"));
        assert_eq!((order.query(), &order.body()[..]), ("a=%20b", &b"secret"[..]));
        assert!(!format!("{order:?}").contains("secret"));
    }

    #[test]
    fn every_path_is_the_services_but_for_listed_dialects_and_v1() {
        let guest = Guest::new(&[], json!(["hetzner"]));
        for path in ["/", "/openstack", "/latest/meta-data", "/2009-04-04/user-data", "/of/no/dialect"] {
            assert_eq!(guest.fetch(Method::Get, path, 200, path), (200, path.to_owned()));
        }
        assert_eq!(guest.said(Method::Get, "/v1/events").0, 200);
        assert_eq!(guest.said(Method::Get, "/hetzner/v1/metadata/hostname").0, 200);
        assert!(!guest.has_orders());
    }

    #[test]
    fn an_answer_is_kept_for_its_time_by_what_was_asked() {
        for (method, target, status, is_kept) in [
            (Method::Get, "/openstack/latest/user_data", 200, true),
            (Method::Get, "/openstack/latest/user_data?x", 200, true),
            (Method::Get, "/openstack/latest/vendor_data.json", 404, true),
            (Method::Get, "/openstack/latest/vendor_data2.json", 500, false),
            (Method::Get, "/openstack/latest/password", 200, false),
            (Method::Post, "/openstack/latest/password", 200, false),
            (Method::Put, "/latest/api/token", 404, false),
        ] {
            let mut guest = Guest::alone();
            assert_eq!(guest.fetch(method, target, status, "once").0, status, "{method:?} {target}");
            guest.now += KEPT_SECONDS - 1;
            match is_kept {
                true => {
                    let all = [Method::Get, Method::Head].map(|method| guest.said(method, target).0);
                    assert_eq!(all, [status; 2], "{target}");
                    guest.now += 1;
                    let _parked = guest.park(method, target, "");
                }
                false => drop(guest.park(method, target, "")),
            }
            assert!(guest.has_orders(), "{method:?} {target}");
        }
    }

    #[test]
    fn all_who_ask_for_the_same_wait_for_one_order() {
        let guest = Guest::alone();
        let parked = [Method::Get, Method::Head, Method::Get].map(|method| guest.park(method, META_DATA, ""));
        let order = guest.order();
        assert!(!guest.has_orders());
        let _woken = order.answered(answer(200, "{}"), NOW);
        for parked in &parked {
            assert_eq!(said(&guest.send(Method::Get, META_DATA, "", Some(parked))).1, "{}");
        }
    }

    #[test]
    fn a_write_is_sent_once_whatever_becomes_of_its_answer() {
        let guest = Guest::alone();
        let parked = guest.park(Method::Post, "/openstack/latest/password", "p");
        // Another agent passes the same request on while it waits.
        let _same = guest.park(Method::Post, "/openstack/latest/password", "p");
        drop(guest.order());
        assert!(!guest.has_orders());
        let lost = said(&guest.send(Method::Post, "/openstack/latest/password", "p", Some(&parked)));
        assert_eq!((lost.0, guest.has_orders()), (503, false));
    }

    #[test]
    fn a_seed_is_fresh_in_each_answer_and_nothing_else_changes() {
        let seed = STANDARD.encode([7; 512]);
        let document = format!(r#"{{"meta": {{"random_seed": "x"}}, "random_seed": "{seed}", "name": "ä"}}"#);
        let guest = Guest::alone();
        let first = guest.fetch(Method::Get, META_DATA, 200, &document).1;
        let second = guest.said(Method::Get, META_DATA).1;
        let seeds = [&first, &second].map(|text| {
            let value: Value = serde_json::from_str(text).expect("JSON");
            let seed = value["random_seed"].as_str().expect("a seed").to_owned();
            assert_eq!(STANDARD.decode(&seed).expect("base64").len(), 512);
            assert_eq!(text.replace(&seed, "@"), document.replace(&*STANDARD.encode([7; 512]), "@"));
            seed
        });
        assert!(seeds[0] != seeds[1] && !seeds.contains(&seed));
        assert_eq!(second.len(), document.len());
    }

    #[test]
    fn a_document_whose_seed_cannot_be_replaced_is_not_kept() {
        for document in ["no JSON", r#"{"random_seed": "short"}"#, r#"{"random_seed": 7}"#] {
            let guest = Guest::alone();
            assert_eq!(guest.fetch(Method::Get, META_DATA, 200, document), (200, document.to_owned()));
            let _parked = guest.park(Method::Get, META_DATA, "");
        }
    }

    #[test]
    fn a_failure_is_told_to_all_who_wait_and_the_next_request_asks_anew() {
        let mut guest = Guest::alone();
        let parked = [Method::Get, Method::Head].map(|method| guest.park(method, META_DATA, ""));
        assert_eq!(guest.order().failed(NOW), [0]);
        for parked in &parked {
            assert_eq!(said(&guest.send(Method::Get, META_DATA, "", Some(parked))).0, 503);
        }
        guest.now += FAILED_SECONDS;
        let parked = guest.park(Method::Get, META_DATA, "");
        guest.now += ANSWERED_WITHIN.as_secs();
        assert_eq!(said(&guest.send(Method::Get, META_DATA, "", Some(&parked))).0, 503, "it is late");
    }

    #[test]
    fn an_order_is_forgotten_once_no_request_can_wait_for_it() {
        // More than a worker's clock may be late.
        let gone = ANSWERED_WITHIN.as_secs() + 10;
        for (method, target) in [(Method::Get, META_DATA), (Method::Post, "/openstack/latest/password")] {
            let mut guest = Guest::alone();
            let _parked = guest.park(method, target, "");
            let order = guest.order().if_awaited(NOW + ANSWERED_WITHIN.as_secs()).expect("it is awaited");
            guest.now += 20;
            // It asks again, as cloud-init does after 10 s.
            let _again = guest.park(method, target, "");
            assert!(!guest.has_orders(), "{target}");
            let order = order.if_awaited(NOW + gone).expect("it was asked for again");
            assert!(order.if_awaited(NOW + 20 + gone).is_none(), "{target}");
            guest.now += gone;
            let _anew = guest.park(method, target, "");
            assert!(guest.has_orders(), "{target}");
        }
        let guest = Guest::new(&[META_DATA], json!([]));
        let order = guest.order().if_awaited(NOW + 10 * gone).expect("no guest has asked for it yet");
        assert!(order.is_ahead());
    }

    #[test]
    fn one_vm_has_a_limit_of_orders_and_of_answers() {
        let guest = Guest::alone();
        let asked = |n: usize| guest.send(Method::Get, &format!("/{n}"), "", None);
        let parked = (0..ORDERS_PER_VM + 3).filter(|n| matches!(asked(*n), LiveOutcome::Park(_))).count();
        assert_eq!(parked, ORDERS_PER_VM);
        for order in std::mem::take(&mut *guest.orders.lock().expect("sound")) {
            let _woken = order.answered(answer(200, ""), NOW);
        }
        for n in ORDERS_PER_VM..ANSWERS_PER_VM + 1 {
            guest.fetch(Method::Get, &format!("/{n}"), 200, "");
        }
        assert_eq!(guest.said(Method::Get, "/1").0, 200);
        let _oldest_is_forgotten = guest.park(Method::Get, "/0", "");
    }

    #[test]
    fn what_a_guest_will_ask_first_is_asked_ahead_once() {
        let guest = Guest::new(&["/openstack", META_DATA], json!([]));
        let orders = std::mem::take(&mut *guest.orders.lock().expect("sound"));
        let paths: Vec<_> = orders.iter().map(UpstreamOrder::path).collect();
        assert_eq!(
            (paths, orders.iter().all(UpstreamOrder::is_ahead)),
            (vec!["/openstack", META_DATA], true)
        );
        let parked = guest.park(Method::Get, META_DATA, "");
        for order in orders {
            let _woken = order.answered(answer(200, "{}"), NOW);
        }
        assert_eq!(said(&guest.send(Method::Get, META_DATA, "", Some(&parked))), (200, "{}".to_owned()));
        guest.responses.vm().set_nic(0, MAC, NOW);
        assert!(!guest.has_orders());
    }
}
