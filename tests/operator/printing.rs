//! What a tenant, a guest or a server wrote reaches no terminal as it is: each verb is run against an agent whose every
//! text is hostile, and on records with hostile names.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use metadata_common::printable::is_printable;
use metadata_common::run::SOCKET;
use metadata_content::source::RecordSource;
use metadata_control::instances::{self, ApiProblem, Instance, InstanceVm, Name};
use metadata_control::status::{
    AgentStatus, ExpectedMac, FailedReads, GuestState, GuestStatus, GuestWay, InstanceState, IssuerState,
    MacMismatch, OnDemandStatus, PortState, PortStatus, RecentWarning, RefusedRecord, ShadowedRecord,
    SharedUuid, SourceStatus, WorkerStatus,
};
use metadata_control::top::{DropCount, SeenRequest, Top, VmPage, VmRow};
use metadata_control::trace::{self, TraceLine};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use support::agent;

/// Clears the screen in three ways, sets a title, reorders, hides, and begins a line of its own.
const HOSTILE: &str =
    "x\u{1b}[2J\u{9b}2J\u{1b}]0;t\u{7}\u{202e}\u{2066}\u{200b}\u{feff}\r\u{2028}\u{e0041}\nFORGED";

/// Replaces every text of a document by [`HOSTILE`], but where its type allows only some words.
fn hostile<T: Serialize + DeserializeOwned>(document: &T) -> Value {
    fn places(value: &Value, at: &str, found: &mut Vec<String>) {
        match value {
            Value::String(_) => found.push(at.to_owned()),
            Value::Array(values) => {
                values.iter().enumerate().for_each(|(n, one)| places(one, &format!("{at}/{n}"), found));
            }
            Value::Object(fields) => {
                fields.iter().for_each(|(name, one)| places(one, &format!("{at}/{name}"), found));
            }
            _ => {}
        }
    }
    let mut document = serde_json::to_value(document).expect("JSON");
    let mut found = Vec::new();
    places(&document, "", &mut found);
    for at in found {
        let place = document.pointer_mut(&at).expect("it was there");
        let before = std::mem::replace(place, HOSTILE.into());
        if serde_json::from_value::<T>(document.clone()).is_err() {
            *document.pointer_mut(&at).expect("it was there") = before;
        }
    }
    document
}

fn text() -> String {
    "t".into()
}

fn status() -> AgentStatus {
    AgentStatus {
        version: text(),
        troubles: vec![text()],
        workers: vec![WorkerStatus { device: text(), ..WorkerStatus::default() }],
        ports: metadata_control::status::PortSummary {
            listed: vec![PortStatus {
                name: text(),
                state: PortState::Error,
                reason: Some(text()),
                program: Some(text()),
                way: GuestWay::Device,
                identities: 1,
            }],
            ..Default::default()
        },
        instances: vec![metadata_control::status::Instances {
            source: text(),
            state: InstanceState::Served,
            count: 1,
        }],
        conflicts: vec![text()],
        refused: vec![RefusedRecord { record: text(), reason: text() }],
        mac_mismatches: vec![MacMismatch {
            port: text(),
            mac: text(),
            expected: vec![ExpectedMac { mac: text(), record: Some(text()) }],
            ago: Some(40.0),
        }],
        shared_uuids: vec![SharedUuid { uuid: text(), records: vec![text()], unlisted: 1 }],
        shadowed: vec![ShadowedRecord { record: text(), by: text() }],
        sources: vec![SourceStatus {
            reads: text(),
            on_demand: Some(OnDemandStatus { name: text(), ..OnDemandStatus::default() }),
            failing: Some(FailedReads { since: 1.0, kind: text(), reason: text() }),
            notes: vec![text()],
            ..SourceStatus::default()
        }],
        identity: Some(IssuerState {
            issuer: text(),
            algorithm: text(),
            signs: Some(text()),
            ..IssuerState::default()
        }),
        lately: vec![RecentWarning { level: text(), ago: 1.0, times: 2, text: text() }],
        counters: [(HOSTILE.to_owned(), 1)].into(),
        ..AgentStatus::default()
    }
}

fn guest() -> GuestStatus {
    let some = || Some(text());
    GuestStatus {
        port: text(),
        mac: text(),
        record: some(),
        vm: some(),
        uuid: some(),
        owner: some(),
        state: GuestState::Unbound,
        reason: some(),
        problem: some(),
        slot: None,
        hub: None,
        program: some(),
        way: GuestWay::Device,
        held: None,
        events: Vec::new(),
    }
}

fn name() -> Name {
    Name { source: RecordSource::File, name: text() }
}

fn instance() -> Instance {
    Instance {
        name: text(),
        source: RecordSource::Api,
        state: InstanceState::Contested,
        in_force: true,
        shadowed_by: Some(name()),
        refused: Some(text()),
        etag: Some(text()),
        generation: None,
        vm: Some(InstanceVm { name: text(), uuid: text(), owner: text() }),
        ports: vec![instances::InstancePort {
            port: text(),
            mac: text(),
            state: GuestState::Unbound,
            held_by: Some(name()),
            reason: Some(text()),
        }],
        change: None,
        record: Some(json!({"labels": {"a": "b"}})),
        withheld: Some(vec![text()]),
    }
}

fn row() -> VmRow {
    let some = || Some(text());
    VmRow {
        vm: some(),
        uuid: some(),
        port: text(),
        mac: text(),
        waits_for: some(),
        dialect: some(),
        path: some(),
        ..VmRow::default()
    }
}

/// An agent that answers with documents, by the beginning of the request's target.
fn pretend(run: &Path) {
    let top = Top {
        version: text(),
        node: text(),
        troubles: vec![text()],
        drops: vec![DropCount { reason: text(), count: 1, per_second: 1.0 }],
        parked: [(HOSTILE.to_owned(), 1)].into(),
        vms: vec![row()],
        matching: 1,
        ..Top::default()
    };
    let request = SeenRequest { method: text(), path: text(), dialect: text(), ..SeenRequest::default() };
    let page = VmPage {
        row: row(),
        record: Some(text()),
        program: Some(text()),
        requests: vec![request],
        ..VmPage::default()
    };
    let begin = TraceLine::Begin {
        schema: trace::SCHEMA.into(),
        who: HOSTILE.into(),
        unseen: Some(HOSTILE.into()),
        problem: Some(HOSTILE.into()),
        monotonic_ns: 0,
        unix_ns: 0,
    };
    let frame = trace::TracedFrame {
        verdict: HOSTILE.into(),
        mac: HOSTILE.into(),
        message: Some(HOSTILE.into()),
        ..trace::TracedFrame::default()
    };
    let lines =
        [begin, TraceLine::Frame(frame)].map(|line| serde_json::to_string(&line).expect("JSON") + "\n");
    let list = instances::Page { instances: vec![instance()], next: None };
    let problem = ApiProblem {
        kind: text(),
        title: text(),
        status: 404,
        detail: text(),
        conflict: Some(name()),
        registered: None,
    };
    let documents = [
        ("GET /v1/status?guest=refused", 503, HOSTILE.to_owned()),
        ("GET /v1/status?guest", 200, hostile(&vec![guest()]).to_string()),
        ("GET /v1/status", 200, hostile(&status()).to_string()),
        ("GET /v1/top?", 200, hostile(&top).to_string()),
        ("GET /v1/trace", 200, lines.concat()),
        ("GET /v1/instances/gone", 404, hostile(&problem).to_string()),
        ("GET /v1/instances/", 200, hostile(&instance()).to_string()),
        ("GET /v1/instances", 200, hostile(&list).to_string()),
        ("PUT /v1/instances", 409, hostile(&problem).to_string()),
        ("DELETE /v1/guest-data", 404, hostile(&problem).to_string()),
        ("DELETE /v1/instances", 404, hostile(&problem).to_string()),
    ];
    let pages = hostile(&vec![page]).to_string();
    let listener = UnixListener::bind(run.join(SOCKET)).expect("a socket");
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut head = Vec::new();
            let mut piece = [0; 4_096];
            while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                match stream.read(&mut piece) {
                    Ok(length @ 1..) => head.extend_from_slice(&piece[..length]),
                    _ => break,
                }
            }
            let head = String::from_utf8_lossy(&head).into_owned();
            let is_page = head.starts_with("GET /v1/top") && head.contains("guest=");
            let found = documents.iter().find(|(start, ..)| head.starts_with(start));
            let (status, body) = match found {
                _ if is_page => (200, &pages),
                Some((_, status, body)) => (*status, body),
                None => (404, &pages),
            };
            // The client may have gone.
            _ = stream.write_all(format!("HTTP/1.0 {status} X\r\n\r\n{body}").as_bytes());
        }
    });
}

/// Runs a verb, and checks what it writes.
fn check(words: &[&str], run: Option<&Path>) -> Result<()> {
    let mut command = Command::new(agent::binary()?);
    command.args(words).stdin(Stdio::null()).env("LC_ALL", "C.UTF-8");
    if let Some(run) = run {
        command.arg("--run").arg(run);
    }
    let output = command.output()?;
    for (which, bytes) in [("output", output.stdout), ("error", output.stderr)] {
        let text = String::from_utf8(bytes).with_context(|| format!("standard {which}"))?;
        let raw = text.chars().find(|c| !is_printable(*c) && *c != '\n');
        ensure!(raw.is_none(), "{raw:?} in standard {which}: {text:?}");
        ensure!(!text.lines().any(|line| line.starts_with("FORGED")), "a line of its own: {text}");
        ensure!(which == "error" || !words.contains(&"--json") || is_json(&text), "no JSON: {text}");
    }
    Ok(())
}

fn is_json(text: &str) -> bool {
    text.trim().is_empty() || serde_json::from_str::<Value>(text).is_ok()
}

#[test]
fn no_verb_prints_controls_or_lines_that_others_wrote() {
    let room = tempfile::tempdir().expect("a directory");
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o700)).expect("a mode");
    pretend(room.path());
    let record = room.path().join("web.yaml");
    fs::write(&record, include_str!("../vectors/record.yaml")).expect("a record");
    let record = record.to_str().expect("text");
    let verbs: [&[&str]; 18] = [
        &["status"],
        &["status", "--all"],
        &["status", "--json"],
        &["status", "vm"],
        &["status", "vm", "--json"],
        &["status", "refused"],
        &["ls"],
        &["ls", "--json"],
        &["get", "vm"],
        &["get", "vm", "--json"],
        &["get", "gone"],
        &["rm", "vm"],
        &["clear", "vm"],
        &["register", "-f", record],
        &["top", "--once"],
        &["top", "--once", "vm"],
        &["top", "--json"],
        &["trace", "vm", "--count", "1"],
    ];
    for words in verbs {
        check(words, Some(room.path())).unwrap_or_else(|error| panic!("{words:?}: {error:#}"));
    }
}

#[test]
fn records_with_hostile_names_are_checked_and_explained_in_plain_text() {
    let room = tempfile::tempdir().expect("a directory");
    let good = include_str!("../vectors/record.yaml");
    let directory = room.path().join(HOSTILE);
    fs::create_dir(&directory).expect("a directory");
    for (name, text) in [
        (format!("{HOSTILE}.yaml"), good.to_owned()),
        (format!("{HOSTILE}2.yaml"), good.to_owned()),
        ("bad.yaml".into(), format!("{good}\n{}: 1\n", serde_json::to_string(HOSTILE).expect("JSON"))),
    ] {
        fs::write(directory.join(name), text).expect("a record");
    }
    let records = directory.to_str().expect("text");
    let record = directory.join(format!("{HOSTILE}.yaml"));
    let record = record.to_str().expect("text");
    let verbs: [&[&str]; 5] = [
        &["check", records],
        &["check", "--paths", records],
        &["explain", record, "GET", "/latest/user-data"],
        &["explain", record, "GET", "/openstack/latest/meta_data.json"],
        &["explain", record, HOSTILE, "/x"],
    ];
    for words in verbs {
        check(words, None).unwrap_or_else(|error| panic!("{words:?}: {error:#}"));
    }
}
