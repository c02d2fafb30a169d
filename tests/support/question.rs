//! Requests to a VM's [`Responses`] without a connection.

use metadata_common::addresses;
use metadata_common::addresses::Connection;
use metadata_common::time::Now;
use metadata_content::http::target::{TargetError, normalise};
use metadata_content::http::{Headers, Method, Request, Response, StatusCode};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::Dialect;
use metadata_content::store::path::{HOST_PLUGIN_PORT, PASSWORD_PORT};
use metadata_content::store::{Host, LiveOutcome, ParkedCall, Responses, SlotState};
use serde_json::{Value, json};
use std::net::IpAddr;
use std::time::SystemTime;

/// Time of the requests, in Unix seconds: 2026-11-21T00:00:00Z.
pub const NOW_UNIX: u64 = 1_795_219_200;

/// One request.
#[derive(Clone, Debug)]
pub struct Question {
    /// The method.
    pub method: Method,
    /// The request target.
    pub target: String,
    /// Destination address and port.
    pub to: (IpAddr, u16),
    /// The source port.
    pub source_port: u16,
    /// Header fields.
    pub fields: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Vec<u8>,
    /// The time, in seconds since 1970.
    pub unix_seconds: u64,
}

impl Question {
    /// A GET of a target at 169.254.169.254.
    #[must_use]
    pub fn get(target: impl Into<String>) -> Self {
        let to = (IpAddr::V4(addresses::METADATA), 80);
        let target = target.into();
        let (fields, body) = (Vec::new(), Vec::new());
        Self { method: Method::Get, target, to, source_port: 40_000, fields, body, unix_seconds: NOW_UNIX }
    }

    /// The destination host.
    #[must_use]
    pub fn host(&self) -> Host {
        Host::at(self.to)
    }

    /// Changes the method.
    #[must_use]
    pub fn by(self, method: Method) -> Self {
        Self { method, ..self }
    }

    /// Asks at this machine's time, for what other programs have made now.
    #[must_use]
    pub fn now(self) -> Self {
        let since = SystemTime::UNIX_EPOCH.elapsed().expect("a clock after 1970");
        Self { unix_seconds: since.as_secs(), ..self }
    }

    /// Changes the host, and the source port as that host requires.
    #[must_use]
    pub fn at(self, host: Host) -> Self {
        let v4 = |address| (IpAddr::V4(address), 80);
        let (to, source_port) = match host {
            Host::Metadata => (v4(addresses::METADATA), 40_000),
            Host::Wireserver => (v4(addresses::AZURE_WIRESERVER), 40_000),
            // Scaleway gives user-data only to root, which a low source port proves.
            Host::Scaleway => (v4(addresses::SCALEWAY), 1),
            Host::AliYun => (v4(addresses::ALIYUN), 40_000),
            Host::Password => ((IpAddr::V4(addresses::METADATA), PASSWORD_PORT), 40_000),
            Host::HostPlugin => ((IpAddr::V4(addresses::AZURE_WIRESERVER), HOST_PLUGIN_PORT), 40_000),
        };
        Self { to, source_port, ..self }
    }

    /// Adds a header field.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.fields.push((name.to_owned(), value.into()));
        self
    }

    /// Sets the body.
    #[must_use]
    pub fn saying(self, body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// The answer. A parked request is repeated when its time is over.
    ///
    /// # Panics
    /// When the request is parked twice.
    #[must_use]
    pub fn ask(&self, responses: &Responses) -> Response {
        self.ask_of(|now, connection, request, parked| responses.answer(now, connection, request, parked))
    }

    /// The answer of slot 0, which has a record.
    ///
    /// # Panics
    /// As [`ask`](Self::ask), or when the slot has no record.
    #[must_use]
    pub fn ask_on_demand(&self, content: &OnDemand) -> Response {
        self.ask_of(|now, connection, request, parked| {
            let SlotState::Ready(responses) = content.store().get(0) else { panic!("slot 0 has a record") };
            content.answer_with(responses, now, connection, request, parked).0
        })
    }

    fn ask_of(
        &self,
        answer: impl Fn(Now, &Connection, &Request<'_>, Option<&ParkedCall>) -> LiveOutcome,
    ) -> Response {
        let target = match normalise(&self.target) {
            Ok(target) => target,
            Err(TargetError::Malformed) => return Response::error(StatusCode(400), &[]),
            Err(TargetError::NotText) => return Response::error(StatusCode(404), &[]),
        };
        let fields: Vec<_> =
            self.fields.iter().map(|(name, value)| httparse::Header { name, value }).collect();
        let headers = Headers::new(&fields);
        let request = Request { method: self.method, target: target.target(), headers, body: &self.body };
        let remote = "10.0.2.15".parse().expect("an address");
        let connection = Connection { slot: 0, local: self.to, remote: (remote, self.source_port) };
        let mut now = Now { mono: std::time::Duration::ZERO, unix_seconds: self.unix_seconds };
        let parked = match answer(now, &connection, &request, None) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => return response,
            LiveOutcome::Park(parked) => parked,
        };
        now.unix_seconds += parked.until.as_secs();
        now.mono = parked.until;
        match answer(now, &connection, &request, Some(&parked)) {
            LiveOutcome::Ready(response) | LiveOutcome::Changed(response) => response,
            LiveOutcome::Park(again) => panic!("{} is parked again: {again:?}", self.target),
        }
    }
}

/// Header fields that all dialects require, without tokens. Akamai's fields are also absent, because they change the
/// meaning of some paths.
pub const KEYS: [(&str, &str); 4] = [
    ("Metadata", "true"),
    ("Metadata-Flavor", "Google"),
    ("Authorization", "Bearer Oracle"),
    ("x-ms-version", "2012-11-30"),
];

/// The host of a token, its field, the path that creates it, and the field of its lifetime.
pub const TOKENS: [(Host, &str, &str, &str); 3] = [
    (Host::Metadata, "X-aws-ec2-metadata-token", "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds"),
    (
        Host::AliYun,
        "X-aliyun-ecs-metadata-token",
        "/latest/api/token",
        "X-aliyun-ecs-metadata-token-ttl-seconds",
    ),
    (Host::Metadata, "Metadata-Token", "/v1/token", "Metadata-Token-Expiry-Seconds"),
];

/// A guest with every token and the fields of [`KEYS`].
#[derive(Clone, Debug)]
pub struct Insider<'r> {
    responses: &'r Responses,
    tokens: Vec<(Host, &'static str, Vec<u8>)>,
}

impl<'r> Insider<'r> {
    /// A guest of this VM with one token of each kind that the VM grants.
    #[must_use]
    pub fn of(responses: &'r Responses) -> Self {
        let fetch = |(host, field, path, seconds): &(Host, &'static str, &str, &str)| {
            let put = Question::get(*path).by(Method::Put).at(*host).with(seconds, "300");
            let answer = put.ask(responses);
            (answer.status() == StatusCode(200)).then(|| (*host, *field, answer.body().to_bytes().to_vec()))
        };
        Self { responses, tokens: TOKENS.iter().filter_map(fetch).collect() }
    }

    /// Its tokens, by host and field.
    #[must_use]
    pub fn tokens(&self) -> &[(Host, &'static str, Vec<u8>)] {
        &self.tokens
    }

    /// A request with the fields of [`KEYS`] and the host's tokens, except Akamai's.
    #[must_use]
    pub fn question(&self, host: Host, target: &str) -> Question {
        let question = Question::get(target).at(host);
        let keyed = KEYS.iter().fold(question, |question, (name, value)| question.with(name, *value));
        let tokens = self.tokens.iter().filter(|(of, field, _)| *of == host && *field != "Metadata-Token");
        tokens.fold(keyed, |question, (_, field, token)| question.with(field, token.clone()))
    }

    /// The answer to a GET of [`question`](Self::question).
    #[must_use]
    pub fn get(&self, host: Host, target: &str) -> Response {
        self.question(host, target).ask(self.responses)
    }
}

/// Encodes a path for a target.
#[must_use]
pub fn quoted(path: &str) -> String {
    path.bytes()
        .map(|byte| match byte {
            b'%' | b'?' | b'#' => format!("%{byte:02x}"),
            0x21..=0x7e => char::from(byte).into(),
            _ => format!("%{byte:02x}"),
        })
        .collect()
}

/// Targets with additional slashes, which mean the same as the original.
#[must_use]
pub fn slashed(target: &str) -> [String; 4] {
    let (before, origin) = match target.split_once("://") {
        Some((scheme, rest)) => target.split_at(scheme.len() + 3 + rest.find('/').unwrap_or(rest.len())),
        None => ("", target),
    };
    let (path, query) = origin.split_at(origin.find('?').unwrap_or(origin.len()));
    let forms = [path.replace('/', "//"), path.replace('/', "///"), format!("{path}/"), format!("{path}//")];
    forms.map(|path| format!("{before}{path}{query}"))
}

// The record of a typical VM: its own name, keys, MACs, addresses and 300 bytes of user-data, and 16 KiB of
// vendor-data that all VMs share.

const USER_DATA: usize = 300;
const VENDOR_DATA: usize = 16 << 10;

/// The record of VM `number`, for these dialects or for all.
#[must_use]
pub fn typical_record(number: u32, dialects: Option<&[Dialect]>) -> Value {
    let user_data = format!("#cloud-config\n# of VM {number}\n{:x<USER_DATA$}", "- ");
    let vendor_data = format!("#cloud-config\n{}", "# the same for every \"VM\"\n".repeat(VENDOR_DATA));
    let [_, a, b, c] = number.to_be_bytes();
    let key = |name: &str| {
        let bytes = format!("AAAAC3NzaC1lZDI1NTE5AAAAI{name:0<8}{number:035}");
        json!({ "name": name, "key": format!("ssh-ed25519 {bytes} {name}@{number}") })
    };
    let nic = |n: usize, network: &str, addresses: Value| {
        json!({
            "id": format!("n{n}"), "name": format!("eth{n}"), "mtu": 1500, "network_id": network,
            "mac": format!("52:54:{n:02x}:{a:02x}:{b:02x}:{c:02x}"), "addresses": addresses,
        })
    };
    let mut record = json!({
        "schema": "vmrecord/1",
        "generation": 1,
        "vm": {
            "uuid": format!("7c0f1a52-3b5e-4d1a-9d2c-{number:012x}"),
            "name": format!("web-{number}"),
            "namespace": "default",
            "project": { "id": "p1", "number": 1, "account": "000000000000" },
        },
        "hostname": { "short": format!("web-{number}"), "domain": "example.internal" },
        "placement": { "region": "local", "zone": "local-a", "fault_domain": "0" },
        "instance_type": "std.small",
        "image": { "id": "debian-13" },
        "admin": { "user": "alice" },
        "ssh_keys": [key("alice")],
        "user_data": { "text": &user_data[..USER_DATA] },
        "vendor_data": { "text": &vendor_data[..VENDOR_DATA] },
        "network": {
            "dns": ["10.0.2.3"],
            "search": ["example.internal"],
            "nics": [
                nic(0, "net-a", json!([
                    {
                        "method": "dhcp4", "address": format!("10.{a}.{b}.{c}/8"), "gateway": "10.0.0.1",
                        "public": format!("203.{a}.{b}.{c}"),
                    },
                    {
                        "method": "static", "address": format!("2001:db8::{number:x}/64"),
                        "gateway": "fe80::1",
                    },
                ])),
                nic(1, "net-b", json!([{ "method": "static", "address": format!("192.{a}.{b}.{c}/16") }])),
            ],
        },
        "metadata": { "role": "web", "owner": format!("team-{number}") },
        "labels": ["web"],
        "disks": [
            { "type": "disk", "bus": "virtio", "address": "0000:00:04.0", "serial": format!("d{number}") },
        ],
        "credentials": {
            "iam": {
                "role": "app", "access_key_id": format!("AKID{number}"),
                "secret_access_key": format!("secret-{number}"), "expires": "2030-01-01T00:00:00Z",
            },
            "service_account": {
                "name": "web", "email": format!("web-{number}@p1.local"), "scopes": ["cloud-platform"],
                "token": {
                    "text": format!("eyJhbGciOiJub25lIn0.{number}."), "expires": "2030-01-01T00:00:00Z",
                },
            },
        },
    });
    if let Some(dialects) = dialects {
        record["serve"] = json!({ "dialects": dialects.iter().map(|d| d.as_str()).collect::<Vec<_>>() });
    }
    record
}
