//! Laws of the router, which hold for every request to a VM whose record has every field.
//!
//! The fuzz target and the test that replays its corpus share this file. An input is a request as text: a line
//! `method target address port source-port`, a line for each header field, an empty line, and the body.
#![cfg_attr(not(test), no_main)]

use std::net::IpAddr;
use std::sync::{Arc, LazyLock};

use metadata_common::addresses;
use metadata_content::dialect;
use metadata_content::http::parse::{FIELD_COUNT_MAX, TARGET_MAX};
use metadata_content::http::{Method, Response, body::BODY_MAX};
use metadata_content::on_demand::OnDemand;
use metadata_content::record::{Dialects, Record};
use metadata_content::store::path::{HOST_PLUGIN_PORT, PASSWORD_PORT};
use metadata_content::store::{Interner, Responses, Store, VmState};
use serde_json::{Value, json};
use support::question::{Question, slashed};

/// Secrets that only a request with a key field may read, at any path.
const KEYED: [&str; 3] = ["sk-example", "st-example", "eyJhbGciOiJub25lIn0.e30."];
/// Secrets that no request may read through a proxy.
const DIRECT: [&str; 4] = [KEYED[0], KEYED[1], KEYED[2], "admin-example"];
/// Fields that are keys or carry them.
const KEYS: [&str; 8] = [
    "metadata",
    "metadata-flavor",
    "x-google-metadata-request",
    "authorization",
    "metadata-token",
    "x-aws-ec2-metadata-token",
    "x-aliyun-ecs-metadata-token",
    "domu_request",
];

static RECORD: LazyLock<Arc<Record>> = LazyLock::new(|| {
    let mut record: Value = serde_yaml::from_str(support::vectors::RECORD).expect("the record is YAML");
    record["admin"]["password"] = json!("admin-example");
    record["vendor_data2"] = json!({ "text": "#cloud-config\n{}\n" });
    record["files"] = json!([{ "path": "/etc/motd", "base64": "aGVsbG8K" }]);
    record["disks"] = json!([{ "type": "disk", "bus": "virtio", "address": "0000:00:04.0", "serial": "s1" }]);
    Arc::new(Record::parse("full.json", &record.to_string()).expect("a good record").0)
});
/// The VM for requests that change nothing.
static READ: LazyLock<Responses> = LazyLock::new(vm);

/// A fresh VM.
fn vm() -> Responses {
    dialect::render(&RECORD, &mut Interner::new(), VmState::alone(RECORD.vm.uuid.as_str()))
}

/// The VM of [`READ`], whose guest has not asked yet.
fn unasked() -> OnDemand {
    let vm = READ.vm().clone();
    let responses = dialect::render_asked(&RECORD, &mut Interner::new(), vm, Dialects::NONE);
    let content = OnDemand::new(Store::new(1));
    content.store().publish(0, Arc::new(responses)).expect("slot 0");
    content
}

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let Some(question) = question(input) else { return };
    let reads = matches!(question.method, Method::Get | Method::Head);
    let takes = question.fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("DomU_Request"));
    if !reads || takes {
        let vm = vm();
        well_formed(&question, &question.ask(&vm));
        let after = Question { method: Method::Get, ..question };
        well_formed(&after, &after.ask(&vm));
        return;
    }
    let answer = question.clone().by(Method::Get).ask(&READ);
    well_formed(&question, &answer);
    assert_eq!(question.clone().by(Method::Get).ask_on_demand(&unasked()), answer, "on demand: {question:?}");
    assert_eq!(question.clone().by(Method::Head).ask(&READ), answer, "HEAD differs from GET: {question:?}");
    // Extra slashes can turn an invalid target into a path.
    let forms = question.target.starts_with('/').then(|| slashed(&question.target));
    for target in forms.into_iter().flatten().filter(|target| target.len() <= TARGET_MAX) {
        let other = Question { method: Method::Get, target, ..question.clone() }.ask(&READ);
        let same = (other.status(), other.body()) == (answer.status(), answer.body());
        assert!(same, "more slashes give {other:?} instead of {answer:?}: {question:?}");
    }
}

/// Parses the input; `None` where the HTTP parser would refuse the request.
fn question(input: &[u8]) -> Option<Question> {
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let (line, mut rest) = line(input);
    let mut words = text(line)?.split(' ');
    let (method, target) = (Method::from_token(words.next()?), words.next()?);
    let good = (1..=TARGET_MAX).contains(&target.len()) && target.bytes().all(|b| b.is_ascii_graphic());
    let address = words.next().and_then(|word| word.parse().ok());
    let address = address.filter(|to: &IpAddr| addresses::ALL.contains(to)).unwrap_or(addresses::ALL[0]);
    let port = words.next().and_then(|word| word.parse().ok());
    let port = port.filter(|port| [PASSWORD_PORT, HOST_PLUGIN_PORT].contains(port)).unwrap_or(80);
    let source_port = words.next().and_then(|word| word.parse().ok()).unwrap_or(40_000);
    let mut question = Question { to: (address, port), source_port, ..Question::get(target).by(method) };
    while !rest.is_empty() {
        let (field, after) = self::line(rest);
        rest = after;
        if field.is_empty() {
            break;
        }
        let colon = field.iter().position(|byte| *byte == b':')?;
        let (name, value) = (text(&field[..colon])?, &field[colon + 1..]);
        let token = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        if !token || value.iter().any(u8::is_ascii_control) {
            return None;
        }
        question.fields.push((name.to_owned(), value.to_owned()));
    }
    question.body = rest.to_owned();
    let fits = question.fields.len() <= FIELD_COUNT_MAX && question.body.len() <= BODY_MAX;
    (good && fits).then_some(question)
}

/// The first line, and the rest.
fn line(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    (&bytes[..end], bytes.get(end + 1..).unwrap_or_default())
}

fn well_formed(question: &Question, answer: &Response) {
    let status = answer.status().0;
    assert!(status < 500, "{status} to {question:?}");
    let head = std::str::from_utf8(answer.head()).expect("a head is text");
    let mut names = Vec::new();
    for line in head.strip_suffix("\r\n").expect("a head ends its last line").split("\r\n").skip(1) {
        let (name, value) = line.split_once(": ").expect("a field");
        assert!(value.bytes().all(|b| b == b' ' || b.is_ascii_graphic()), "{head:?}");
        let name = name.to_ascii_lowercase();
        assert!(!names.contains(&name), "{name} occurs twice: {head:?}");
        names.push(name);
    }
    let length = answer.field("Content-Length").map(|length| length.parse().expect("a length"));
    assert_eq!(length, (status != 204).then(|| answer.body().len()), "{head:?}");
    assert!(status != 204 || answer.body().is_empty(), "204 with a body: {question:?}");
    assert_eq!(answer.field("Allow").is_some(), status == 405, "{head:?} to {question:?}");
    let sent = |wanted: &[&str]| {
        question.fields.iter().any(|(name, _)| wanted.iter().any(|known| name.eq_ignore_ascii_case(known)))
    };
    let body = answer.body().to_bytes();
    let leaked = |secrets: &[&'static str]| {
        let in_body = |secret: &&&str| body.windows(secret.len()).any(|bytes| bytes == secret.as_bytes());
        secrets.iter().find(in_body).copied()
    };
    if !sent(&KEYS) {
        assert_eq!(leaked(&KEYED), None, "sent to a client without a key: {question:?}");
    }
    if sent(&["X-Forwarded-For"]) {
        assert_eq!(leaked(&DIRECT), None, "sent through a proxy: {question:?}");
    }
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
