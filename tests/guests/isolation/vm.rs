//! VMs with unique values in every field of their records, and the marks that identify them.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use metadata_common::mac::Mac;
use serde_json::{Value, json};
use support::agent::{self, Agent, PortArgument};
use support::host::Host;
use support::question::{Question, TOKENS};
use support::record::replace;
use support::station::{Station, answer};
use support::tap::Shape;
use support::typical;

/// A VM derived from its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vm(pub(crate) u32);

/// The VM that tries to read another's data.
pub(crate) const SPY: Vm = Vm(0x0012_3457);
/// The VM whose data must stay private.
pub(crate) const VICTIM: Vm = Vm(0x00c4_d5e6);

impl Vm {
    pub(crate) fn mac(self, nic: u8) -> Mac {
        let [_, a, b, c] = self.0.to_be_bytes();
        Mac([0x52, 0x54, nic, a, b, c])
    }

    /// IPv4 address.
    pub(crate) fn address(self) -> Ipv4Addr {
        let [_, a, b, c] = self.0.to_be_bytes();
        Ipv4Addr::new(10, a, b, c)
    }

    fn address_v6(self) -> String {
        format!("2001:db8::{:x}:{:x}", self.0 >> 16, self.0 & 0xffff)
    }

    pub(crate) fn uuid(self) -> String {
        format!("7c0f1a52-3b5e-4d1a-9d2c-{:012x}", self.0)
    }

    /// The VM's record, with a unique secret in every field that may hold one.
    pub(crate) fn record(self) -> Value {
        let number = self.0;
        let mut record = typical::record(number, None);
        record["network"]["nics"][0]["addresses"][1]["address"] = json!(format!("{}/64", self.address_v6()));
        record["vendor_data"] = json!({ "text": format!("#cloud-config\n# vendor-data of {number}\n") });
        record["vendor_data2"] = json!({ "text": format!("#cloud-config\n# more of {number}\n") });
        record["admin"]["password"] = json!(format!("password-{number}"));
        record["random_seed"] =
            json!({ "base64": STANDARD.encode(format!("seed of {number} and no other")) });
        record["metadata"]["note"] = json!(format!("note of {number}"));
        record["labels"] = json!([format!("label-{number}")]);
        record["files"] =
            json!([{ "path": "/etc/secret", "base64": STANDARD.encode(format!("file of {number}")) }]);
        record["credentials"]["iam"]["session_token"] = json!(format!("session-{number}"));
        record["serve"] = json!({ "limits": { "burst": 1_000_000, "rps": 1_000_000 } });
        record
    }

    /// Writes the record with a change.
    pub(crate) fn write(self, records: &std::path::Path, change: impl FnOnce(&mut Value)) -> Result<()> {
        let mut record = self.record();
        change(&mut record);
        replace(&self.path(records), &record.to_string())
    }

    /// File of the record.
    pub(crate) fn path(self, records: &std::path::Path) -> std::path::PathBuf {
        records.join(format!("vm-{}.json", self.0))
    }

    /// Texts that no other VM may receive: the number that the record repeats everywhere, in plain and in base64, and
    /// the parts of its addresses and UUID.
    pub(crate) fn marks(self) -> Marks {
        let Self(number) = self;
        let [_, a, b, c] = number.to_be_bytes();
        let text = number.to_string();
        let plain = vec![
            text.clone(),
            format!("{number:06x}"),
            format!("{a:02x}:{b:02x}:{c:02x}"),
            format!("{a}.{b}.{c}"),
            self.address_v6(),
        ];
        // A base64 group may start 0, 1 or 2 bytes before the text; drop edge characters shared with other bytes.
        let encoded = (0..3).map(|before| {
            let bytes = [vec![b'?'; before], text.clone().into_bytes(), vec![b'?'; 3]].concat();
            let whole = STANDARD.encode(bytes);
            let (first, last) = ((before * 8).div_ceil(6), (before + text.len()) * 8 / 6);
            whole[first..last].to_owned()
        });
        Marks { plain, encoded: encoded.collect() }
    }
}

/// Texts that identify a VM.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    plain: Vec<String>,
    encoded: Vec<String>,
}

impl Marks {
    pub(crate) fn add(&mut self, mark: impl Into<String>) {
        self.plain.push(mark.into());
    }

    /// The first mark found in these bytes.
    pub(crate) fn within(&self, bytes: &[u8]) -> Option<&str> {
        let text: String = bytes.iter().map(|byte| char::from(*byte)).collect();
        let lower = text.to_ascii_lowercase();
        let plain = self.plain.iter().find(|mark| lower.contains(&mark.to_ascii_lowercase()));
        plain.or_else(|| self.encoded.iter().find(|mark| text.contains(mark.as_str()))).map(String::as_str)
    }
}

/// A node for two VMs with a tap each.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) host: Host,
    pub(crate) records: tempfile::TempDir,
}

impl Node {
    /// Creates a node without records.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { host: Host::new()?, records: tempfile::tempdir()? })
    }

    /// Creates a VM's tap on the bridge.
    pub(crate) fn station(&self, name: &str, mac: Mac, address: Ipv4Addr, shape: Shape) -> Result<Station> {
        let tap = support::tap::Tap::create(self.host.ns(), name, shape)?;
        self.host.ns().ip(&format!("link set {name} master br0 up"))?;
        Ok(Station::new(std::sync::Arc::new(tap), mac, address))
    }

    /// Starts an agent that serves these ports.
    pub(crate) fn agent(&self, ports: &[PortArgument]) -> Result<Agent<'_>> {
        Agent::start(self.host.ns(), self.records.path(), ports)
    }

    /// Like [`Node::agent`], with `--steer`.
    pub(crate) fn agent_steering(&self, mode: &str, ports: &[PortArgument]) -> Result<Agent<'_>> {
        let mut words = agent::arguments(self.records.path(), ports);
        words.extend(["--steer".into(), mode.into()]);
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }
}

/// A request as bytes, with more fields. Adds a `Host` unless a field has that name.
pub(crate) fn bytes(question: &Question, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut request = format!("{} {} HTTP/1.1\r\n", question.method.as_str(), question.target).into_bytes();
    if fields.iter().all(|(name, _)| *name != "Host") {
        request.extend(b"Host: x\r\n");
    }
    let mut field = |name: &str, value: &[u8]| {
        request.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
    };
    question.fields.iter().for_each(|(name, value)| field(name, value));
    fields.iter().for_each(|(name, value)| field(name, value.as_bytes()));
    if !question.body.is_empty() {
        field("Content-Length", question.body.len().to_string().as_bytes());
    }
    field("Connection", b"close");
    request.extend(b"\r\n");
    request.extend(&question.body);
    request
}

/// Sends a request; returns status and body.
pub(crate) fn ask(
    station: &mut Station,
    question: &Question,
    fields: &[(&str, &str)],
) -> Result<(u16, Vec<u8>)> {
    let mut talk = station.talk(question.to);
    if question.source_port < 1024 {
        talk.local.1 = question.source_port;
    }
    let request = bytes(question, fields);
    let received = station.exchange(&mut talk, &request);
    let received = received.with_context(|| String::from_utf8_lossy(&request).into_owned())?;
    answer(received).with_context(|| format!("{} {}", question.method.as_str(), question.target))
}

/// One token of each kind, valid for `seconds`: a request that needs it, the field that carries it, and the token.
pub(crate) fn tokens(station: &mut Station, seconds: u32) -> Result<Vec<(Question, &'static str, String)>> {
    TOKENS
        .iter()
        .map(|(host, field, path, age)| {
            let put = Question::get(*path).by(metadata_content::http::Method::Put).at(*host);
            let (status, body) = ask(station, &put.with(age, seconds.to_string()), &[])?;
            if status != 200 {
                bail!("no token by {path}: {status}");
            }
            let good_at = match *field {
                "Metadata-Token" => "/v1/instance",
                _ => "/latest/meta-data/instance-id",
            };
            Ok((Question::get(good_at).at(*host), *field, String::from_utf8(body)?))
        })
        .collect()
}
