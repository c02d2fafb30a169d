//! What belongs to no dialect: the root `/`, the paths for a guest's reports, and how cloud-init is recognised.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv6Addr};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::gce;
use super::route_builder::{RouteBuilder, TEXT, computed};
use crate::http::{Method, Request, Response, StatusCode};
use crate::record::network::{Address, Network};
use crate::record::values::{Cidr, NicMac};
use crate::record::vm::Payload;
use crate::record::{Dialect, Nic, Record, Role};
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

// Values of a record in the forms that several dialects use.

/// Returns the NICs that the hypervisor provides, with index and MAC. The guest creates VLANs and bonds itself, and few
/// dialects can describe them.
pub(super) fn given(network: &Network) -> impl Iterator<Item = (usize, &Nic, NicMac)> {
    let nics = network.nics.iter().enumerate();
    nics.filter(move |(_, nic)| nic.is_physical()).filter_map(|(n, nic)| Some((n, nic, nic.mac?)))
}

/// Returns the known addresses of one version, including the expected leases of DHCP.
pub(super) fn known(nic: &Nic, version: IpVersion) -> impl Iterator<Item = (&Address, Cidr)> {
    let known = nic.addresses.iter().filter_map(|address| Some((address, address.address?)));
    known.filter(move |(_, cidr)| IpVersion::of(cidr.address) == version)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IpVersion {
    V4,
    V6,
}

impl IpVersion {
    fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the version of an entry whose address may be unknown.
    pub(super) fn of_entry(entry: &Address) -> Self {
        if entry.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// Returns whether the NIC has addresses of this version, known or not.
pub(super) fn speaks(nic: &Nic, version: IpVersion) -> bool {
    nic.addresses.iter().any(|address| IpVersion::of_entry(address) == version)
}

/// Returns whether the VM has IPv6 addresses only. Its documents then omit all IPv4 members.
pub(super) fn only_ipv6(network: &Network) -> bool {
    let any = |version| network.nics.iter().any(|nic| speaks(nic, version));
    any(IpVersion::V6) && !any(IpVersion::V4)
}

/// Returns the link-local address that IPv6 derives from the MAC (RFC 4291 appendix A).
pub(super) fn link_local(mac: NicMac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0.0;
    let identifier = [a ^ 2, b, c, 0xff, 0xfe, d, e, f];
    Ipv6Addr::from(0xfe80 << 112 | u128::from(u64::from_be_bytes(identifier)))
}

/// Returns the gateway; empty without one.
pub(super) fn gateway(address: &Address) -> String {
    address.gateway.map(|gateway| gateway.to_string()).unwrap_or_default()
}

/// Returns `public` or `private`.
pub(super) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Public => "public",
        Role::Private => "private",
    }
}

/// Returns the resolvers as a list of strings.
pub(super) fn resolvers(network: &Network) -> Value {
    network.dns.iter().map(ToString::to_string).collect()
}

/// Returns the public keys as a list of strings.
pub(super) fn public_keys(record: &Record) -> Value {
    record.ssh_keys.iter().map(|key| key.key.as_str()).collect()
}

/// Returns the public keys, one a line, without a final newline.
pub(super) fn public_key_lines(record: &Record) -> String {
    record.ssh_keys.iter().map(|key| key.key.as_str()).collect::<Vec<_>>().join("\n")
}

/// Returns the labels as a list of strings.
pub(super) fn labels(record: &Record) -> Value {
    record.labels.iter().map(|label| label.as_str()).collect()
}

// Payloads as text, for documents that cannot carry other bytes.

/// First bytes of gzip (RFC 1952 section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Returns a payload as text: UTF-8 unchanged, gzip as a MIME part in base64, which cloud-init unpacks to the same
/// content; `None` for other bytes.
pub(super) fn text_form(bytes: &[u8]) -> Option<Cow<'_, str>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text.into()),
        Err(_) if bytes.starts_with(&GZIP) => {
            let head =
                "MIME-Version: 1.0\nContent-Type: application/gzip\nContent-Transfer-Encoding: base64\n\n";
            Some(format!("{head}{}\n", STANDARD.encode(bytes)).into())
        }
        Err(_) => None,
    }
}

/// Returns a payload in [`text_form`]; empty text if there is no payload or it has no such form, of which validation
/// warns. Returns `None` until the payload's source has been read.
pub(super) fn payload_text(payload: Option<&Payload>) -> Option<String> {
    let Some(payload) = payload else { return Some(String::new()) };
    let bytes = payload.bytes()?;
    Some(text_form(&bytes).map(Cow::into_owned).unwrap_or_default())
}

/// Returns user-data and vendor-data as [`payload_text`] does; `None` until the sources of both have been read.
pub(super) fn payload_texts(record: &Record) -> Option<(String, String)> {
    payload_text(record.user_data.as_ref()).zip(payload_text(record.vendor_data.as_ref()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use serde_json::json;

    use super::{cloud_init, is_cloud_init, payload_text, text_form};
    use crate::dialect::tests::{ask_with, full, parse};
    use crate::http::{Headers, Method, Request, RequestTarget};
    use crate::mailbox::Mailbox;
    use crate::record::vm::Payload;
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

    #[test]
    fn text_stays_gzip_is_wrapped_and_other_bytes_have_no_form() {
        assert_eq!(text_form("#é\n".as_bytes()).as_deref(), Some("#é\n"));
        let wrapped = "MIME-Version: 1.0\nContent-Type: application/gzip\n\
                   Content-Transfer-Encoding: base64\n\nH4sI\n";
        assert_eq!(text_form(&[0x1f, 0x8b, 0x08]).as_deref(), Some(wrapped));
        assert_eq!(text_form(&[0xff, 0xfe]), None);
    }

    #[test]
    fn a_payload_that_is_absent_or_has_no_text_form_is_empty() {
        let payload = |bytes: &'static [u8]| Payload::from(Bytes::from_static(bytes));
        assert_eq!(payload_text(None).as_deref(), Some(""));
        assert_eq!(payload_text(Some(&payload(b"\xff\xfe"))).as_deref(), Some(""));
        assert_eq!(payload_text(Some(&payload(b"#x\n"))).as_deref(), Some("#x\n"));
    }
}
