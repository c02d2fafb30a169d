//! A guest without a network, for unit tests: it sends requests to its VM's responses.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use super::render;
use crate::http::{Headers, Method, Request, RequestTarget, Response};
use crate::identity::{IssuedToken, Issuer, Order, SigningJob};
use crate::record::Record;
use crate::store::{Interner, LiveOutcome, ParkedCall, Responses, VmState};
use metadata_common::addresses::Connection;
use metadata_common::time::Now;

const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");

/// Time of the guest's requests, in Unix seconds: 2026-01-01.
pub(super) const NOW: u64 = 1_767_225_600;

/// Returns the full record as a value that a test can change.
pub(super) fn full() -> Value {
    serde_yaml::from_str(FULL).expect("the full record is YAML")
}

/// Returns the full record without its optional fields.
pub(super) fn bare() -> Value {
    let mut record = full();
    let members = record.as_object_mut().expect("a record is a mapping");
    members.retain(|field, _| {
        matches!(field.as_str(), "schema" | "generation" | "vm" | "hostname" | "placement")
    });
    record
}

/// Parses a record.
pub(super) fn parsed(record: &Value) -> Record {
    Record::parse("test.json", &record.to_string()).expect("a good record").0
}

/// Orders that wait for their signature.
pub(super) type Orders = Arc<Mutex<Vec<Order>>>;

/// Returns the guest of a VM whose node has an issuer, and its orders.
pub(super) fn issued(record: &Value, signs_documents: bool) -> (DialectGuest, Orders) {
    let orders = Orders::default();
    let list = Arc::clone(&orders);
    let issuer = Issuer::new(None, move |order| {
        list.lock().expect("sound").push(*order);
        true
    });
    issuer.set_signs_documents(signs_documents);
    let record = parsed(record);
    let vm = VmState::alone(record.vm.uuid.as_str()).issued_by(&issuer, &record);
    (DialectGuest::with(&record, vm), orders)
}

/// Takes the last order, which must exist.
pub(super) fn ordered(orders: &Orders) -> Order {
    orders.lock().expect("sound").pop().expect("an order")
}

/// Signs an order with this text, for a minute.
pub(super) fn sign(order: Order, text: &'static str) {
    order.signed(IssuedToken { text: text.into(), issued: NOW, expires: NOW + 60 });
}

/// The guest of one VM.
pub(super) struct DialectGuest {
    responses: Responses,
    pub(super) now: u64,
}

impl DialectGuest {
    pub(super) fn of(record: &Value) -> Self {
        let record = parsed(record);
        Self::with(&record, VmState::alone(record.vm.uuid.as_str()))
    }

    pub(super) fn with(record: &Record, vm: VmState) -> Self {
        Self { responses: render(record, &mut Interner::new(), vm), now: NOW }
    }

    /// Returns the guest of the same VM after a change of its record.
    pub(super) fn changed(&self, record: &Value) -> Self {
        Self::with(&parsed(record), self.responses.vm().clone())
    }

    /// Sends a request to an address and port.
    pub(super) fn ask_at(
        &self,
        local: (&str, u16),
        method: Method,
        path: &str,
        fields: &[(&str, &str)],
    ) -> Response {
        self.ask_query(local, method, RequestTarget { path, query: "" }, fields)
    }

    /// Like [`ask_at`](Self::ask_at), with a query.
    pub(super) fn ask_query(
        &self,
        local: (&str, u16),
        method: Method,
        target: RequestTarget<'_>,
        fields: &[(&str, &str)],
    ) -> Response {
        let fields: Vec<_> =
            fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
        let path = target.path;
        let request = Request { method, target, headers: Headers::new(&fields), body: b"" };
        let address: IpAddr = local.0.parse().expect("an address");
        let remote = ("10.0.2.15".parse().expect("an address"), 40_000);
        let connection = Connection { slot: 0, local: (address, local.1), remote };
        let now = Now { mono: Duration::ZERO, unix_seconds: self.now };
        match self.responses.answer(now, &connection, &request, None) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
            LiveOutcome::Park(parked) => panic!("{path} is parked: {parked:?}"),
        }
    }

    /// Sends a GET for a target to 169.254.169.254, or repeats one that was parked.
    pub(super) fn get(
        &self,
        target: &str,
        fields: &[(&str, &str)],
        parked: Option<&ParkedCall>,
    ) -> LiveOutcome {
        self.get_at("169.254.169.254", target, fields, parked)
    }

    /// Like [`get`](Self::get), at another address.
    pub(super) fn get_at(
        &self,
        address: &str,
        target: &str,
        fields: &[(&str, &str)],
        parked: Option<&ParkedCall>,
    ) -> LiveOutcome {
        let fields: Vec<_> =
            fields.iter().map(|(name, value)| httparse::Header { name, value: value.as_bytes() }).collect();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let (target, headers) = (RequestTarget { path, query }, Headers::new(&fields));
        let at = |address: &str, port| (address.parse().expect("an address"), port);
        let connection = Connection { slot: 0, local: at(address, 80), remote: at("10.0.2.15", 40_000) };
        let request = Request { method: Method::Get, target, headers, body: b"" };
        let now = Now { mono: Duration::ZERO, unix_seconds: self.now };
        self.responses.answer(now, &connection, &request, parked)
    }

    /// Returns the answer to a GET that is not parked.
    pub(super) fn got(&self, target: &str, fields: &[(&str, &str)]) -> Response {
        match self.get(target, fields, None) {
            LiveOutcome::Ready(response) => response,
            other => panic!("{target}: {other:?}"),
        }
    }

    /// Returns the answer to a GET that waits for what it orders, and the order.
    pub(super) fn served(
        &self,
        target: &str,
        fields: &[(&str, &str)],
        orders: &Orders,
    ) -> (SigningJob, Response) {
        let LiveOutcome::Park(parked) = self.get(target, fields, None) else {
            panic!("{target} does not wait")
        };
        let order = ordered(orders);
        let work = order.work();
        sign(order, "SIGNED");
        match self.get(target, fields, Some(&parked)) {
            LiveOutcome::Ready(response) => (work, response),
            other => panic!("{target}: {other:?}"),
        }
    }

    /// Sends a request to 169.254.169.254.
    pub(super) fn ask(&self, method: Method, path: &str, fields: &[(&str, &str)]) -> Response {
        self.ask_at(("169.254.169.254", 80), method, path, fields)
    }

    /// Returns the status of a GET.
    pub(super) fn status(&self, path: &str, fields: &[(&str, &str)]) -> u16 {
        self.ask(Method::Get, path, fields).status().0
    }

    /// Returns the body of a GET that must succeed.
    pub(super) fn text(&self, path: &str) -> String {
        let response = self.ask(Method::Get, path, &[]);
        assert_eq!(response.status().0, 200, "{path}");
        text(&response)
    }

    pub(super) fn responses(&self) -> &Responses {
        &self.responses
    }
}

/// Returns a body as text.
pub(super) fn text(response: &Response) -> String {
    String::from_utf8(response.body().to_bytes().to_vec()).expect("the body is text")
}

/// Returns a NIC with a unique MAC and these addresses.
pub(super) fn nic(number: usize, addresses: &Value) -> Value {
    json!({
        "id": format!("n{number}"),
        "mac": format!("52:54:00:00:00:{number:02x}"),
        "addresses": addresses,
    })
}
