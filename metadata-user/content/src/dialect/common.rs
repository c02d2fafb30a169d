//! What belongs to no dialect: the root `/`, the paths for a guest's reports, and how cloud-init is recognised.

use super::gce;
use super::route_builder::{RouteBuilder, TEXT, computed};
use crate::http::{Method, Request, Response, StatusCode};
use crate::record::{Dialect, Record};
use crate::sink::MessageKind;
use crate::store::{EVERY_DIALECT, LiveRequest, Methods};

/// Names that `/` lists: every date that EC2 has used as a version of its tree. Several clients recognise a metadata
/// service by a non-empty 200 at `/`.
const VERSIONS: [&str; 26] = [
    "1.0",
    "2007-01-19",
    "2007-03-01",
    "2007-08-29",
    "2007-10-10",
    "2007-12-15",
    "2008-02-01",
    "2008-09-01",
    "2009-04-04",
    "2011-01-01",
    "2011-05-01",
    "2012-01-12",
    "2014-02-25",
    "2014-11-05",
    "2015-10-20",
    "2016-04-19",
    "2016-06-30",
    "2016-09-02",
    "2018-03-28",
    "2018-08-17",
    "2018-09-24",
    "2019-10-01",
    "2020-10-27",
    "2021-01-03",
    "2021-03-23",
    "latest",
];

/// Adds `/` for every record; `serve.gce_root` gives it to GCE.
pub(super) fn render_root(record: &Record, routes: &mut RouteBuilder<'_>) {
    let has_gce = record.serve.serves(Dialect::Gce);
    if record.serve.gce_root && has_gce {
        routes.begin(Dialect::Gce.as_str());
        let google = gce::root(routes);
        return routes.open("/", google);
    }
    routes.begin(EVERY_DIALECT);
    let versions = routes.found(TEXT, VERSIONS.join("\n"));
    if has_gce {
        // Google's client libraries recognise GCE by its root.
        let google = gce::root(routes);
        let about = "the versions of EC2's tree; GCE's root for requests with Metadata-Flavor";
        routes.either("/", &[], about, gce::has_flavour, google, versions);
    } else {
        routes.open("/", versions);
    }
}

// Paths to which a guest of any cloud can report its boot.
//
// cloud-init's `phone_home` and webhook reporting post to any URL in their configuration. `/v1/phone-home` and
// `/v1/events` (module `events`) forward the body to the record's sinks. The answer is 413 to a body that is too large,
// else a success, even if the message is dropped: a guest would only retry after an error.

const POST: Methods = Methods::of(&[Method::Post]);

/// Adds the path of `phone_home` for every record.
pub(super) fn render_reports(routes: &mut RouteBuilder<'_>) {
    routes.begin(EVERY_DIALECT);
    let about = "forwards phone_home's form, at most 16 KiB";
    routes.live("/v1/phone-home", POST, &[], computed(about, |call| forward(call, MessageKind::PhoneHome)));
}

/// Forwards a guest's message to the sink of its kind.
pub(super) fn forward(call: &LiveRequest<'_>, kind: MessageKind) -> Response {
    let body = call.request.body;
    if body.len() > kind.most_bytes() {
        return Response::error(StatusCode(413), &[]);
    }
    call.vm.mailbox.send(&call.vm.sinks, kind, body, call.now.unix_seconds);
    Response::new(StatusCode(200), Some(TEXT), &[], "OK")
}

// cloud-init by its `User-Agent`, for the few documents that need a different form for some versions.

/// Returns year and number of cloud-init's version (`Cloud-Init/22.4.2-1+deb12u4`).
pub(super) fn cloud_init(request: &Request<'_>) -> Option<(u32, u32)> {
    let agent = std::str::from_utf8(request.headers.get("User-Agent")?).ok()?;
    let version = agent.strip_prefix("Cloud-Init/")?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns whether the client is cloud-init of any version.
pub(super) fn is_cloud_init(request: &Request<'_>) -> bool {
    request.headers.get("User-Agent").is_some_and(|agent| agent.starts_with(b"Cloud-Init/"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::{cloud_init, is_cloud_init};
    use crate::dialect::tests::{ask_with, full, parse};
    use crate::http::{Headers, Method, Request, RequestTarget};
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
                (Method::Get, "/v1/events", b"", 200),
                (Method::Put, "/v1/events", b"", 405),
                (Method::Put, "/v1/phone-home", b"", 405),
            ] {
                let answer = ask_with(&responses, method, path, &[], body);
                assert_eq!(answer.status().0, status, "{method:?} {path}");
            }
            assert_eq!(outbox.counts().waiting, waiting);
        }
    }

    #[test]
    fn the_version_is_year_and_number() {
        for (agent, version) in [
            ("Cloud-Init/22.4.2", Some((22, 4))),
            ("Cloud-Init/22.4.2-1+deb12u4 - OS: debian", Some((22, 4))),
            ("Cloud-Init/25.1", Some((25, 1))),
            ("Cloud-Init/next", None),
            ("Cloud-Init/22", None),
            ("curl/8 Cloud-Init/22.4", None),
            ("", None),
        ] {
            let fields = [httparse::Header { name: "user-agent", value: agent.as_bytes() }];
            let target = RequestTarget { path: "/", query: "" };
            let request = Request { method: Method::Get, target, headers: Headers::new(&fields), body: b"" };
            assert_eq!(cloud_init(&request), version, "{agent}");
            assert_eq!(is_cloud_init(&request), agent.starts_with("Cloud"), "{agent}");
        }
    }
}
