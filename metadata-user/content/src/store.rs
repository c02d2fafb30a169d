//! Finds the responses of a slot. Readers never wait.
//!
//! The control side renders a VM's record into [`Responses`] and publishes them under the VM's slot. The packet path
//! looks up the slot and gets bytes ready to send. A new record replaces the old one by one pointer swap: an exchange
//! in progress keeps the responses it started with, and readers take no lock. The [`Interner`] stores equal responses
//! of different VMs once.

mod intern;
pub mod path;
mod responses;
mod table;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::share::Tenant;
use metadata_common::time::Now;

use crate::http::{Request, Response, StatusCode};
use crate::identity::{Issuer, VmIssuer};
use crate::mailbox::{Mailbox, ParkedRequest};
use crate::record::vm::Sinks;
use crate::record::{Dialect, Record};
use crate::sink::Outbox;
use crate::token::{Keyring, TokenKind};
use crate::upstream::{Upstream, VmUpstream};
pub use intern::Interner;
pub(crate) use intern::Notation;
pub use path::{Endpoint, Host, Methods, Route};
pub(crate) use responses::UnrenderedDialects;
pub use responses::{LookupExplanation, RequestLimit, Responses, ResponsesBuilder};
pub use table::{MAX_SLOTS, RequestHint, SlotOutOfRange, SlotState, Store};

/// Dialect name of routes that all dialects share.
pub(crate) const EVERY_DIALECT: &str = "every dialect";

// The dialect of an answer as a small number, so that the packet path can count by array index.

/// Number of a dialect, or one of the special values below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Datasource(u8);

impl Datasource {
    /// No route matched: the record serves nothing at the path.
    pub const NONE: Self = Self(0);
    /// A route that all dialects share, such as `/`.
    pub const ANY: Self = Self(1);
    /// A route of a dialect that records cannot list.
    const OTHER: Self = Self(2);
    const FIRST: usize = 3;

    /// Number of values.
    pub const COUNT: usize = Self::FIRST + Dialect::ALL.len();

    /// Returns the number of a dialect by the name that [`Route::dialect`](Route::dialect) returns.
    #[must_use]
    pub fn named(name: &str) -> Self {
        if name == EVERY_DIALECT {
            return Self::ANY;
        }
        let number = Dialect::ALL.iter().position(|dialect| dialect.as_str() == name);
        let number = number.and_then(|number| u8::try_from(Self::FIRST + number).ok());
        number.map_or(Self::OTHER, Self)
    }

    /// Returns the number, less than [`COUNT`](Self::COUNT).
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// Returns all values in the order of their numbers.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).take(Self::COUNT).map(Self)
    }

    /// Returns the name in metrics and in the audit log.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NONE => "none",
            Self::ANY => "any",
            _ => Dialect::ALL.get(self.index().wrapping_sub(Self::FIRST)).map_or("other", |d| d.as_str()),
        }
    }
}

// Answers computed per request (tokens, writes, long polls, and answers that depend on the query or the connection),
// and the conditions that a request must satisfy before its route answers it.

/// State of the VM for live answers.
#[derive(Clone, Debug)]
pub struct VmState {
    /// Owner of the VM's state; tokens are bound to it.
    pub owner: Box<str>,
    /// Keys that issue and check tokens.
    pub keyring: Arc<Keyring>,
    /// State that the guest wrote or confirmed.
    pub mailbox: Arc<Mailbox>,
    /// Destinations of the guest's messages.
    pub sinks: Sinks,
    /// Issues the VM's identity tokens; `None` on a node without an issuer.
    pub issuer: Option<Arc<VmIssuer>>,
    /// The answers of the platform's own metadata service; `None` for a VM that is served from its record.
    pub upstream: Option<Arc<VmUpstream>>,
    /// Whose share of the node's limits the VM's requests use: its namespace's, or else its own.
    pub tenant: Tenant,
}

impl VmState {
    /// Builds the state from a record. Sets the VM's connection limit to the record's.
    #[must_use]
    pub fn of(record: &Record, keyring: Arc<Keyring>, mailbox: Arc<Mailbox>) -> Self {
        let owner = record.owner_text().into();
        mailbox.account().allow_connections(record.serve.limits.conns as usize);
        let tenant = record.tenant();
        mailbox.note_tenant(tenant.clone());
        let sinks = record.sinks.clone();
        Self { owner, keyring, mailbox, sinks, issuer: None, upstream: None, tenant }
    }

    /// Returns the VM with the answers of its platform's metadata service.
    #[must_use]
    pub fn answered_by(mut self, upstream: &Upstream, record: &Record) -> Self {
        self.upstream = Some(Arc::new(VmUpstream::new(upstream, record)));
        self
    }

    /// Sets which NIC has a slot.
    pub fn set_nic(&self, slot: Slot, mac: Mac, now_unix: u64) {
        if let Some(issuer) = &self.issuer {
            issuer.set_nic(slot, mac);
        }
        if let Some(upstream) = &self.upstream {
            upstream.set_nic(slot, mac, now_unix);
        }
    }

    /// Returns the VM with an issuer of its identity tokens.
    #[must_use]
    pub fn issued_by(mut self, issuer: &Issuer, record: &Record) -> Self {
        self.issuer = Some(Arc::new(VmIssuer::new(issuer, record)));
        self
    }

    /// Builds a VM with its own key and mailbox, to inspect a record without serving it.
    #[must_use]
    pub fn alone(owner: &str) -> Self {
        let mailbox = Arc::new(Mailbox::new(owner, &Outbox::detached()));
        Self {
            owner: owner.into(),
            keyring: Arc::new(Keyring::ephemeral()),
            mailbox,
            sinks: Sinks::default(),
            issuer: None,
            upstream: None,
            tenant: Tenant::Vm(owner.into()),
        }
    }
}

/// One request to a live route.
#[derive(Clone, Copy, Debug)]
pub struct LiveRequest<'a> {
    /// Time of the answer.
    pub now: Now,
    /// Connection of the request: the VM's slot and both endpoints.
    pub connection: &'a Connection,
    /// The request.
    pub request: &'a Request<'a>,
    /// Part of the path below the route: empty, or `/a/b`.
    pub rest: &'a str,
    /// VM that sent the request.
    pub vm: &'a VmState,
    /// The previous outcome of this request, if that was [`LiveOutcome::Park`].
    pub parked: Option<&'a ParkedCall>,
}

/// Result of a call.
#[derive(Clone, Debug)]
pub enum LiveOutcome {
    /// The response.
    Ready(Response),
    /// The response; the call changed state that parked requests of the VM may wait for.
    Changed(Response),
    /// No response yet. Call again when the VM's record or mailbox changes, at the latest at the given time.
    Park(ParkedCall),
}

impl From<Response> for LiveOutcome {
    fn from(response: Response) -> Self {
        Self::Ready(response)
    }
}

/// A request that waits for a change.
#[derive(Clone, Debug)]
pub struct ParkedCall {
    /// Latest time of the next call (`Now::mono`).
    pub until: Duration,
    /// The answer can be given now, too: the client only wants to know when it changes. Without this the answer is
    /// still being made.
    pub has_answer: bool,
    /// The state that the client knows; the request waits until it changes. The dialect defines its form.
    pub state: u64,
    /// Shared with the VM's mailbox, which ends it when a newer request displaces this one.
    pub wait: Arc<ParkedRequest>,
}

/// Computes a route's answers per request.
///
/// The packet path calls it: an implementation must not wait, and its allocations must have a limit.
pub trait LiveRoute: Debug + Send + Sync {
    /// Answers one call.
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome;

    /// Returns the answers below the route that never change, as pairs of path (`/a/b`) and text; none by default.
    fn leaves(&self) -> Vec<(&str, &str)> {
        Vec::new()
    }

    /// Returns whether the record and the request alone decide the answer, and giving it changes nothing. Such an answer
    /// may be given to every equal request while these responses are published.
    fn is_lasting(&self) -> bool {
        false
    }

    /// Describes what the answer demands of this request beyond the guards of its route and does not find, in the words
    /// of [`Condition::demand`], with the status that refuses it; none by default.
    fn lacks(&self, _call: &LiveRequest<'_>) -> Option<(String, StatusCode)> {
        None
    }

    /// Describes the answer for people, such as `token for 1 to 21600 s`.
    fn about(&self) -> &'static str;
}

// Conditions.

/// A condition on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// A header field must have this value. Name and value are compared case-insensitively.
    HeaderIs {
        /// Field name.
        name: &'static str,
        /// Required value.
        value: &'static str,
    },
    /// At least one of these header fields must have its value, compared case-insensitively.
    HeaderIsOneOf(&'static [(&'static str, &'static str)]),
    /// A header field must be absent; an empty one counts as present.
    HeaderAbsent {
        /// Field name.
        name: &'static str,
    },
    /// A header field must be absent, or contain a token of this VM that has not expired.
    TokenGood {
        /// Field name.
        name: &'static str,
        /// Kind of token, one per dialect.
        kind: TokenKind,
    },
    /// A header field must contain a token of this VM that has not expired.
    TokenNeeded {
        /// Field name.
        name: &'static str,
        /// Kind of token, one per dialect.
        kind: TokenKind,
    },
}

impl Condition {
    /// Returns whether the call satisfies the condition.
    #[must_use]
    pub fn holds(self, call: &LiveRequest<'_>) -> bool {
        let headers = &call.request.headers;
        let is = |(name, value): &(&str, &str)| {
            headers.get(name).is_some_and(|found| found.eq_ignore_ascii_case(value.as_bytes()))
        };
        let good =
            |kind, token: &[u8]| call.vm.keyring.verify(kind, &call.vm.owner, token, call.now.unix_seconds);
        match self {
            Self::HeaderIs { name, value } => is(&(name, value)),
            Self::HeaderIsOneOf(fields) => fields.iter().any(is),
            Self::HeaderAbsent { name } => !headers.contains(name),
            Self::TokenGood { name, kind } => headers.get(name).is_none_or(|token| good(kind, token)),
            Self::TokenNeeded { name, kind } => headers.get(name).is_some_and(|token| good(kind, token)),
        }
    }
}

impl Condition {
    /// Returns whether a request without any header field satisfies the condition.
    #[must_use]
    pub fn asks_for_nothing(self) -> bool {
        matches!(self, Self::HeaderAbsent { .. } | Self::TokenGood { .. })
    }

    /// Returns what a request must have, or must not have, to satisfy the condition.
    #[must_use]
    pub fn demand(self) -> String {
        match self {
            Self::HeaderIs { name, value } => format!("the field `{name}: {value}`"),
            Self::HeaderIsOneOf(fields) => {
                let fields: Vec<_> =
                    fields.iter().map(|(name, value)| format!("`{name}: {value}`")).collect();
                format!("the field {}", fields.join(" or "))
            }
            Self::HeaderAbsent { name } => format!("no field `{name}`"),
            Self::TokenGood { name, .. } => format!("no field `{name}`, or a valid token in it"),
            Self::TokenNeeded { name, .. } => format!("a valid token in the field `{name}`"),
        }
    }
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HeaderIs { name, value } => write!(f, "needs {name}: {value}"),
            Self::HeaderIsOneOf(fields) => {
                for (n, (name, value)) in fields.iter().enumerate() {
                    write!(f, "{} {name}: {value}", if n == 0 { "needs" } else { " or" })?;
                }
                Ok(())
            }
            Self::HeaderAbsent { name } => write!(f, "refused with {name}"),
            Self::TokenGood { name, .. } => write!(f, "refused with a bad {name}"),
            Self::TokenNeeded { name, .. } => write!(f, "needs {name}"),
        }
    }
}

/// A condition, and the answer to requests that do not satisfy it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestGuard {
    /// Condition on the request.
    pub condition: Condition,
    /// Answer if the condition does not hold.
    pub otherwise: Response,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::Datasource;
    use crate::record::Dialect;

    #[test]
    fn every_dialect_has_a_number_and_a_label_of_its_own() {
        let labels: HashSet<_> = Datasource::all().map(Datasource::label).collect();
        assert_eq!(labels.len(), Datasource::COUNT);
        for dialect in Dialect::ALL {
            assert_eq!(Datasource::named(dialect.as_str()).label(), dialect.as_str());
        }
        assert_eq!(Datasource::named("every dialect").label(), "any");
        assert_eq!(Datasource::named("test").label(), "other");
        assert!(Datasource::all().enumerate().all(|(number, datasource)| datasource.index() == number));
    }
}
