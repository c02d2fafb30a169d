//! One message and its JSON.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{MessageKind, Place};
use crate::parser;
use crate::record::Sink;

/// Maximum number of form fields that are parsed; cloud-init sends seven.
const FORM_FIELDS: usize = 64;

/// One message to be delivered.
pub struct Message {
    pub(super) sink: Sink,
    pub(super) vm: Arc<str>,
    pub(super) name: Arc<str>,
    pub(super) kind: MessageKind,
    pub(super) time_unix: u64,
    pub(super) body: Bytes,
    /// Held until the message is delivered or lost.
    pub(super) place: Place,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("vm", &self.vm).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Message {
    /// Returns the destination.
    #[must_use]
    pub fn sink(&self) -> &Sink {
        &self.sink
    }

    /// Counts the message as delivered or failed and frees its place.
    pub fn end(self, delivered: bool) {
        let counters = &self.place.counters;
        let counter = if delivered { &counters.delivered } else { &counters.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the message as one line of JSON without a newline. It is at most six times as long as the body (the
    /// escape of a control character), plus a few hundred octets.
    #[must_use]
    pub fn json(&self) -> String {
        let seconds = i64::try_from(self.time_unix).unwrap_or(i64::MAX);
        let time =
            OffsetDateTime::from_unix_timestamp(seconds).ok().and_then(|time| time.format(&Rfc3339).ok());
        json!({
            "vm": &*self.vm,
            "name": &*self.name,
            "kind": self.kind.name(),
            "time": time,
            "body": body(self.kind, &self.body),
        })
        .to_string()
    }
}

/// Converts a body: a form to its fields, JSON objects and arrays unchanged, other text to a string, and anything else
/// to `{"base64": …}`.
fn body(kind: MessageKind, octets: &[u8]) -> Value {
    match kind {
        MessageKind::PhoneHome => form(octets),
        MessageKind::Password => text(octets),
        MessageKind::Ready | MessageKind::Event => match parser::json(octets) {
            Ok(value @ (Value::Object(_) | Value::Array(_))) => value,
            _ => text(octets),
        },
    }
}

fn text(octets: &[u8]) -> Value {
    match std::str::from_utf8(octets) {
        Ok(text) => text.into(),
        Err(_) => json!({ "base64": STANDARD.encode(octets) }),
    }
}

/// Parses `application/x-www-form-urlencoded`. If two fields have one name, the first is kept.
fn form(octets: &[u8]) -> Value {
    let mut fields = Map::new();
    for (name, value) in form_urlencoded::parse(octets).take(FORM_FIELDS) {
        fields.entry(name).or_insert_with(|| value.into_owned().into());
    }
    fields.into()
}
