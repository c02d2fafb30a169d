//! What is said over a connection: which slot asks, what it is answered, and for how long it is asked to
//! wait.

mod talk;

use metadata_common::maps::Slot;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::addresses;
use crate::http::{Method, Request, Response, Status};
use crate::stack::{Connection, Service};
use crate::store::{Entry, Store};
use crate::time::Now;

pub use talk::Talk;

/// What there is to say to a request.
#[derive(Clone, Debug)]
pub enum Answer {
    /// This.
    Ready(Response),
    /// The slot is known, but its record is not here yet.
    NotYet,
    /// The slot has asked more often than it may.
    TooMany,
    /// Nothing is known of the slot.
    Unknown,
}

/// Where answers come from.
pub trait Answers {
    /// The answer to one request of one slot. Must not wait.
    fn answer(&self, now: Now, slot: Slot, request: &Request<'_>) -> Answer;
}

impl Answers for Store {
    fn answer(&self, now: Now, slot: Slot, request: &Request<'_>) -> Answer {
        match self.get(slot) {
            // Never a token's PUT: a client that is refused there gives up its datasource for good.
            Entry::Ready(responses)
                if request.method != Method::Put && !self.admit(slot, responses.limit(), now.mono) =>
            {
                Answer::TooMany
            }
            Entry::Ready(responses) => Answer::Ready(responses.answer(request)),
            Entry::Expected => Answer::NotYet,
            Entry::Unknown => Answer::Unknown,
        }
    }
}

/// The port of every dialect, on every address served.
const HTTP: u16 = 80;
/// The port where clients of CloudStack and Exoscale ask for a password.
const PASSWORDS: u16 = 8080;
/// The only addresses [`PASSWORDS`] is open on.
const PASSWORD_SERVERS: [IpAddr; 2] =
    [IpAddr::V4(addresses::METADATA), IpAddr::V6(addresses::METADATA_LINK_LOCAL)];

/// How patiently to serve.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// From the first octet of a request (of a connection, for its first) to the end of its head.
    pub head_timeout: Duration,
    /// From the end of a head to the end of the body.
    pub body_timeout: Duration,
    /// Between two requests.
    pub idle_timeout: Duration,
    /// How often a request that waits for its record or its turn looks again.
    pub look_again: Duration,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            look_again: Duration::from_millis(50),
        }
    }
}

/// How long a request may wait for its record, or for its turn: a little less than the clients of its path wait for an
/// answer. `path` is normalised.
#[must_use]
pub fn hold(path: &str) -> Duration {
    Duration::from_millis(match path {
        "/metadata/v1.json" => 1500,
        _ if path.starts_with("/hetzner") => 1500,
        _ if path.starts_with("/openstack") => 8000,
        _ => 4000,
    })
}

/// Methods answered somewhere, for `OPTIONS *`.
const ALLOW: &str = "GET, HEAD, OPTIONS";

/// What all exchanges of one service share.
#[derive(Debug)]
struct Shared<A> {
    answers: Arc<A>,
    config: ServeConfig,
    /// Answers that depend on nothing, rendered once.
    errors: Vec<Response>,
    not_ready: Response,
    too_many: Response,
    options: Response,
}

impl<A> Shared<A> {
    fn new(answers: Arc<A>, config: ServeConfig) -> Self {
        let errors = [400, 404, 408, 413, 414, 417, 431, 501, 505];
        Self {
            answers,
            config,
            errors: errors.into_iter().map(|status| Response::error(Status(status), &[])).collect(),
            not_ready: Response::error(Status(503), &[("Retry-After", "1")]),
            too_many: Response::error(Status(429), &[("Retry-After", "1")]),
            options: Response::new(Status(204), None, &[("Allow", ALLOW)], bytes::Bytes::new()),
        }
    }

    fn error(&self, status: Status) -> Response {
        let rendered = self.errors.iter().find(|response| response.status() == status);
        rendered.cloned().unwrap_or_else(|| Response::error(status, &[]))
    }
}

/// The metadata service, as the stack sees it.
#[derive(Debug)]
pub struct Serve<A = Store> {
    shared: Arc<Shared<A>>,
}

impl<A: Answers> Serve<A> {
    /// A service that answers from `answers`.
    #[must_use]
    pub fn new(answers: Arc<A>, config: ServeConfig) -> Self {
        Self { shared: Arc::new(Shared::new(answers, config)) }
    }
}

impl<A: Answers> Service for Serve<A> {
    type Exchange = Talk<A>;

    fn listens(&self, (address, port): (IpAddr, u16)) -> bool {
        port == HTTP || (port == PASSWORDS && PASSWORD_SERVERS.contains(&address))
    }

    fn open(&mut self, now: Now, connection: Connection) -> Talk<A> {
        Talk::new(Arc::clone(&self.shared), connection, now)
    }
}

/// A stack is made on the control side and moved to its worker's thread.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<crate::stack::Stack<Serve>>();
};
