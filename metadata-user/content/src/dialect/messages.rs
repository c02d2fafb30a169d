//! Paths to which a guest of any cloud can report its boot.
//!
//! cloud-init's `phone_home` and webhook reporting post to any URL in their configuration. These two paths forward
//! the body to the record's sinks. The answer is 413 to a body that is too large, else a success, even if the message
//! is dropped: a guest would only retry after an error.

use super::route_builder::{RouteBuilder, TEXT};
use crate::http::{Method, Response, StatusCode};
use crate::sink::MessageKind;
use crate::store::{EVERY_DIALECT, LiveOutcome, LiveRequest, LiveRoute, Methods};

const POST: Methods = Methods::of(&[Method::Post]);

/// Adds the two paths for every record.
pub(super) fn render(sheet: &mut RouteBuilder<'_>) {
    sheet.begin(EVERY_DIALECT);
    sheet.live("/v1/phone-home", POST, &[], Message(MessageKind::PhoneHome));
    sheet.live("/v1/events", POST, &[], Message(MessageKind::Event));
}

#[derive(Debug)]
struct Message(MessageKind);

impl LiveRoute for Message {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        let body = call.request.body;
        if body.len() > self.0.most_bytes() {
            return Response::error(StatusCode(413), &[]).into();
        }
        call.vm.mailbox.send(&call.vm.sinks, self.0, body, call.now.unix_seconds);
        Response::new(StatusCode(200), Some(TEXT), &[], "OK").into()
    }

    fn about(&self) -> &'static str {
        match self.0 {
            MessageKind::PhoneHome => "forwards phone_home's form, at most 16 KiB",
            _ => "forwards an event",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use crate::dialect::tests::{ask_with, full, parse};
    use crate::http::Method;
    use crate::mailbox::Mailbox;
    use crate::sink::unattended;
    use crate::store::{Interner, VmState};
    use crate::token::Keyring;

    #[test]
    fn messages_are_accepted_with_and_without_a_sink() {
        let long = vec![b'x'; (16 << 10) + 1];
        for (sinks, waiting) in
            [(json!({"phone_home": "/nowhere/p", "events": "/nowhere/e"}), 3), (json!({}), 0)]
        {
            let mut record = full();
            record["sinks"] = sinks;
            let record = parse(&record);
            let outbox = unattended();
            let mailbox = Arc::new(Mailbox::new(record.vm.uuid.as_str(), &outbox));
            let vm = VmState::of(&record, Arc::new(Keyring::ephemeral()), mailbox);
            let responses = crate::dialect::render(&record, &mut Interner::new(), vm);
            for (method, path, body, status) in [
                (Method::Post, "/v1/phone-home", &b"hostname=web-1&fqdn=N%2FA"[..], 200),
                (Method::Post, "/v1/phone-home", &long[..], 413),
                (Method::Post, "/v1/events", &long[..], 200),
                (Method::Post, "/v1/events", br#"{"name":"init-local"}"#, 200),
                (Method::Get, "/v1/events", b"", 405),
                (Method::Put, "/v1/phone-home", b"", 405),
            ] {
                let answer = ask_with(&responses, method, path, &[], body);
                assert_eq!(answer.status().0, status, "{method:?} {path}");
            }
            assert_eq!(outbox.counts().waiting, waiting);
        }
    }
}
