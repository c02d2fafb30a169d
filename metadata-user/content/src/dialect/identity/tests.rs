use std::sync::{Arc, Mutex};
use std::time::Duration;

use metadata_base::connection::Connection;
use metadata_base::time::Now;

use super::{LINE, PATH, SIGN_WITHIN, lines};
use crate::dialect::tests::{DialectGuest, NOW, full, parse};
use crate::http::{Headers, Method, Request, RequestTarget, Response};
use crate::identity::{IssuedToken, Issuer, Order};
use crate::store::{LiveOutcome, ParkedCall, VmState};

type Orders = Arc<Mutex<Vec<Order>>>;

const HELD: [(&str, &str); 1] = [("Metadata", "true")];

fn guest() -> (DialectGuest, Orders) {
    let orders: Orders = Arc::default();
    let list = Arc::clone(&orders);
    let issuer = Issuer::new(None, move |order| {
        list.lock().expect("sound").push(*order);
        true
    });
    let mut record = full();
    record["identity"] = serde_json::json!({"audiences": ["vault", "https://a/b?c=d"]});
    let record = parse(&record);
    let vm = VmState::alone(record.vm.uuid.as_str()).issued_by(&issuer, &record);
    (DialectGuest::with(&record, vm), orders)
}

fn ask(
    guest: &DialectGuest,
    mono: Duration,
    query: &str,
    fields: &[(&str, &str)],
    parked: Option<&ParkedCall>,
) -> LiveOutcome {
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
    let target = RequestTarget { path: PATH, query };
    let request = Request { method: Method::Get, target, headers: Headers::new(&fields), body: b"" };
    let at = |address: &str, port| (address.parse().expect("an address"), port);
    let connection =
        Connection { slot: 0, local: at("169.254.169.254", 80), remote: at("10.0.2.15", 40_000) };
    guest.responses().answer(Now { mono, unix_seconds: NOW }, &connection, &request, parked)
}

fn parked(outcome: LiveOutcome) -> ParkedCall {
    let LiveOutcome::Park(parked) = outcome else { panic!("{outcome:?}") };
    parked
}

fn ready(outcome: LiveOutcome) -> Response {
    let LiveOutcome::Ready(response) = outcome else { panic!("{outcome:?}") };
    response
}

#[test]
fn a_request_waits_for_its_token_which_travels_one_hop() {
    let (guest, orders) = guest();
    let query = "format=full&audience=https%3A%2F%2Fa%2Fb%3Fc%3Dd";
    let first = parked(ask(&guest, Duration::ZERO, query, &HELD, None));
    assert_eq!(first.until, SIGN_WITHIN);
    let again = parked(ask(&guest, SIGN_WITHIN / 2, query, &HELD, Some(&first)));
    assert_eq!(again.until, SIGN_WITHIN, "the time is that of the first attempt");
    let order = orders.lock().expect("sound").pop().expect("an order");
    assert_eq!(order.audience(), Some("https://a/b?c=d"));
    order.signed(IssuedToken { text: "a.b.c".into(), issued: NOW, expires: NOW + 60 });
    let answer = ready(ask(&guest, SIGN_WITHIN / 2, query, &HELD, Some(&again)));
    assert_eq!((answer.status().0, answer.hop_limit()), (200, Some(1)));
    assert_eq!(
        (answer.field("Content-Type"), &*answer.body().to_bytes()),
        (Some("application/jwt"), &b"a.b.c"[..])
    );
}

#[test]
fn a_request_whose_record_is_replaced_meanwhile_orders_again() {
    let orders: Orders = Arc::default();
    let list = Arc::clone(&orders);
    let issuer = Issuer::new(None, move |order| {
        list.lock().expect("sound").push(*order);
        true
    });
    let record = parse(&full());
    let of_version =
        || DialectGuest::with(&record, VmState::alone(record.vm.uuid.as_str()).issued_by(&issuer, &record));
    let (old, new) = (of_version(), of_version());
    let first = parked(ask(&old, Duration::ZERO, "audience=vault", &HELD, None));
    orders.lock().expect("sound").clear();
    let again = parked(ask(&new, SIGN_WITHIN / 2, "audience=vault", &HELD, Some(&first)));
    assert_eq!((again.until, orders.lock().expect("sound").len()), (SIGN_WITHIN, 1));
}

#[test]
fn a_request_that_waited_long_enough_is_to_come_again() {
    let (guest, orders) = guest();
    let first = parked(ask(&guest, Duration::ZERO, "audience=vault", &HELD, None));
    let late = ready(ask(&guest, SIGN_WITHIN, "audience=vault", &HELD, Some(&first)));
    assert_eq!((late.status().0, late.field("Retry-After")), (503, Some("1")));
    orders.lock().expect("sound").clear();
    let failed = ready(ask(&guest, Duration::ZERO, "audience=vault", &HELD, Some(&first)));
    assert_eq!(failed.status().0, 503);
}

#[test]
fn a_request_needs_the_field_and_one_allowed_audience() {
    let (guest, orders) = guest();
    let long = format!("audience={}", "x".repeat(256));
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], u16);
    let cases: [Case<'_>; 10] = [
        ("audience=vault", &[], 400),
        ("audience=vault", &[("Metadata", "false")], 400),
        ("audience=vault", &[("Metadata", "true"), ("X-Forwarded-For", "10.0.0.1")], 403),
        ("", &HELD, 400),
        ("audience=", &HELD, 400),
        ("audience=a%20b", &HELD, 400),
        ("audience=%ff", &HELD, 400),
        ("audience=vault&audience=other", &HELD, 400),
        (&long, &HELD, 400),
        ("audience=other", &HELD, 403),
    ];
    for (query, fields, status) in cases {
        let answer = ready(ask(&guest, Duration::ZERO, query, fields, None));
        assert_eq!(answer.status().0, status, "{query} {fields:?}");
    }
    assert!(orders.lock().expect("sound").is_empty(), "a refused request orders nothing");
}

#[test]
fn a_node_without_an_issuer_has_no_such_path() {
    assert_eq!(DialectGuest::of(&full()).status(PATH, &HELD), 404);
}

#[test]
fn lines_are_those_of_pem() {
    for (bytes, expected) in [(0, 0), (1, 1), (LINE, 1), (LINE + 1, 2), (3 * LINE, 3)] {
        let text = lines(&vec![b'A'; bytes]);
        let found: Vec<_> = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
        assert_eq!(found.len(), expected);
        assert!(found.iter().all(|line| line.len() <= LINE) && !text.ends_with(b"\n"));
    }
}
