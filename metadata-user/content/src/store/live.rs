//! Answers that cannot be computed before they are asked for: tokens, writes, long-polls, what depends on
//! the query or the connection.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::http::{Request, Response};
use crate::mailbox::{Mailbox, Wait};
use crate::record::Record;
use crate::record::vm::Sinks;
use crate::sink::Outbox;
use crate::token::Keyring;
use metadata_base::connection::Connection;
use metadata_base::time::Now;

/// What a live answer may know of the VM beside what its dialect computed.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Its UUID: tokens are bound to it.
    pub uuid: Box<str>,
    /// What makes and checks tokens.
    pub keyring: Arc<Keyring>,
    /// What its guest has written and taken.
    pub mailbox: Arc<Mailbox>,
    /// Where its guest's messages go.
    pub sinks: Sinks,
}

impl Vm {
    /// The VM of a record.
    #[must_use]
    pub fn of(record: &Record, keyring: Arc<Keyring>, mailbox: Arc<Mailbox>) -> Self {
        let uuid = record.vm.uuid.as_str().into();
        mailbox.account().allow_connections(record.serve.limits.conns as usize);
        Self { uuid, keyring, mailbox, sinks: record.sinks.clone() }
    }

    /// A VM by itself, with a key and a mailbox of its own: to look at a record without serving it.
    #[must_use]
    pub fn alone(uuid: &str) -> Self {
        let mailbox = Arc::new(Mailbox::new(uuid, &Outbox::detached()));
        Self { uuid: uuid.into(), keyring: Arc::new(Keyring::ephemeral()), mailbox, sinks: Sinks::default() }
    }
}

/// One request to a live route.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// When it is answered.
    pub now: Now,
    /// Who asked, from which of its ports, at which of our addresses.
    pub connection: &'a Connection,
    /// The request.
    pub request: &'a Request<'a>,
    /// What of the path lies below the route: empty, or `/a/b`.
    pub rest: &'a str,
    /// The VM.
    pub vm: &'a Vm,
    /// What the last answer to this very request was, if that was to wait.
    pub parked: Option<&'a Parked>,
}

/// What there is to say to a call.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// This.
    Ready(Response),
    /// This; and something has changed that other requests of the VM may wait for.
    Changed(Response),
    /// Nothing yet: ask again when the VM's record or mailbox has changed, and at the latest at a given time.
    Park(Parked),
}

impl From<Response> for Outcome {
    fn from(response: Response) -> Self {
        Self::Ready(response)
    }
}

/// A request that waits for a change.
#[derive(Clone, Debug)]
pub struct Parked {
    /// When to ask again at the latest (`Now::mono`).
    pub until: Duration,
    /// The state it waits to see the end of, in a form of the dialect's own.
    pub state: u64,
    /// Its place among the VM's waits.
    pub wait: Arc<Wait>,
}

/// Answers a route's requests when they come.
///
/// Asked on the packet path: must not wait, and what it allocates must have a limit.
pub trait Live: Debug + Send + Sync {
    /// The answer to one call.
    fn answer(&self, call: &Call<'_>) -> Outcome;

    /// What it always says below its route, path (`/a/b`) and text; nothing unless it knows beforehand.
    fn leaves(&self) -> Vec<(&str, &str)> {
        Vec::new()
    }

    /// What it does, for people: `token for 1 to 21600 s`.
    fn about(&self) -> &'static str;
}
