use metadata_common::addresses::Connection;
use metadata_content::http::{Method, StatusCode};
use metadata_content::record::event::{EventJournal, ScheduledEvent, VmEvents};
use metadata_content::store::{Datasource, Responses, VmState};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::collect::FOLLOW_FOR;
use super::collect::{AuditEntry, CAPACITY, PATH_MAX, RESERVED, RequestPath, Tape};
use super::{AuditConfig, AuditCounts, CHUNKS, Collector, write_json};

const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
/// Far more time than any test needs: only a fault reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

fn entry(slot: u32, status: u16) -> AuditEntry {
    let connection =
        Connection { slot, local: ([169, 254, 169, 254].into(), 80), remote: ([10, 0, 0, 1].into(), 4_711) };
    AuditEntry {
        took: Duration::from_millis(2),
        method: Method::Get,
        path: RequestPath::of("/latest/user-data?token=hunter2"),
        datasource: Datasource::named("ec2"),
        status: StatusCode(status),
        bytes: 42,
        ..AuditEntry::of(&connection, 1_700_000_000)
    }
}

fn counts(collector: &Collector) -> AuditCounts {
    collector.counts().expect("a log is configured")
}

fn file(room: &tempfile::TempDir) -> PathBuf {
    room.path().join("audit.log")
}

fn to(path: &Path) -> AuditConfig {
    AuditConfig { to: Some(path.into()), ..AuditConfig::default() }
}

fn open(config: &AuditConfig) -> (Collector, Arc<Tape>) {
    let collector = Collector::open(config, 1).expect("a log");
    let tape = collector.tape(0).expect("a tape");
    (collector, tape)
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_line_names_client_path_and_result() {
    let room = tempfile::tempdir().expect("a directory");
    let (mut collector, tape) = open(&to(&file(&room)));
    collector.is_now(7, "tap0".into(), "52:54:00:00:00:01".into(), Some((UUID, "web")));
    let responses = Some(Arc::new(Responses::builder(VmState::alone(UUID)).build()));
    tape.note(AuditEntry { responses, ..entry(7, 200) });
    drop(collector);
    let expected = serde_json::json!({
        "time": "2023-11-14T22:13:20Z", "vm": UUID, "name": "web", "port": "tap0", "mac": "52:54:00:00:00:01",
        "client": "10.0.0.1:4711", "server": "169.254.169.254:80", "dialect": "ec2", "method": "GET",
        "path": "/latest/user-data", "status": 200, "bytes": 42, "us": 2_000,
    });
    assert_eq!(lines(&file(&room)), [expected]);
    let mode = fs::metadata(file(&room)).expect("a file").permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
}

#[test]
fn a_line_says_what_a_vm_is_told_and_that_its_guest_acknowledged_it() {
    let room = tempfile::tempdir().expect("a directory");
    let (mut collector, _tape) = open(&to(&file(&room)));
    let journal = EventJournal::default();
    collector.read_events(journal.clone());
    collector.is_now(7, "tap0".into(), "52:54:00:00:00:01".into(), Some((UUID, "web")));
    let (events, other) =
        (VmEvents::noted(journal.clone(), UUID.into()), VmEvents::noted(journal, "off".into()));
    let event = serde_json::json!({"id": "drain-1", "kind": "freeze", "description": "secret plans"});
    let event: ScheduledEvent = serde_json::from_value(event).expect("an event");
    events.note_record("i", std::slice::from_ref(&event), 1_700_000_000);
    events.acknowledge("drain-1", 1_700_000_001);
    other.note_record("i", &[event], 1_700_000_002);
    drop(collector);
    let line = |time: &str, vm: &str, name: Option<&str>, change: &str| {
        let mut line = serde_json::json!({"time": time, "vm": vm, "event": "drain-1", "kind": "freeze", "change": change});
        if let Some(name) = name {
            line["name"] = name.into();
        }
        line
    };
    assert_eq!(
        lines(&file(&room)),
        [
            line("2023-11-14T22:13:20Z", UUID, Some("web"), "scheduled"),
            line("2023-11-14T22:13:21Z", UUID, Some("web"), "acknowledged"),
            line("2023-11-14T22:13:22Z", "off", None, "scheduled"),
        ]
    );
}

#[test]
fn an_answer_belongs_to_its_recipient_even_after_the_slot_is_reused() {
    let room = tempfile::tempdir().expect("a directory");
    let (mut collector, tape) = open(&to(&file(&room)));
    let other = "00000000-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    collector.is_now(7, "tap0".into(), "52:54:00:00:00:01".into(), Some((UUID, "web")));
    tape.note(entry(7, 200));
    // Written before the slot is reused.
    collector.is_now(7, "tap1".into(), "52:54:00:00:00:02".into(), Some((other, "db")));
    // From the responses of the former guest.
    let responses = Some(Arc::new(Responses::builder(VmState::alone(UUID)).build()));
    tape.note(AuditEntry { responses, ..entry(7, 200) });
    tape.note(entry(8, 404));
    drop(collector);
    let lines = lines(&file(&room));
    let of = |line: &Value| ["vm", "name", "port"].map(|field| line[field].as_str().map(str::to_owned));
    let some = |texts: [&str; 3]| texts.map(|text| Some(text.to_owned()));
    assert_eq!(of(&lines[0]), some([UUID, "web", "tap0"]));
    assert_eq!(of(&lines[1]), [Some(UUID.to_owned()), None, Some("tap1".to_owned())], "no other VM's name");
    assert_eq!(of(&lines[2]), [None, None, None], "the slot is unassigned");
}

#[test]
fn an_answer_within_a_turn_takes_as_long_as_the_turn() {
    let room = tempfile::tempdir().expect("a directory");
    let (mut collector, tape) = open(&to(&file(&room)));
    tape.note(AuditEntry { took: Duration::ZERO, ..entry(1, 200) });
    collector.collect(Instant::now());
    assert_eq!(counts(&collector).written, 0, "its turn is not over");
    tape.turned(Duration::from_micros(33));
    tape.turned(Duration::from_micros(44));
    drop(collector);
    assert_eq!(lines(&file(&room)).iter().map(|line| line["us"].as_u64()).collect::<Vec<_>>(), [Some(33)]);
}

#[test]
fn a_path_is_kept_without_secrets_and_within_its_limit() {
    let long = format!("/{}", "a".repeat(2 * PATH_MAX));
    let cases = [
        ("/latest?x=hunter2", "/latest"),
        ("/latest#hunter2", "/latest"),
        ("http://user:hunter2@169.254.169.254/x?y", "/x"),
        ("http://user:hunter2@169.254.169.254", ""),
        ("http://user:hunter2@169.254.169.254?q", ""),
        ("/v1/identity/jwt?audience=https://vault.example.org/hunter2", "/v1/identity/jwt"),
        ("/a%0ab", "/a%0ab"),
        ("*", "*"),
        (long.as_str(), &long[..PATH_MAX]),
    ];
    for (target, expected) in cases {
        assert_eq!(RequestPath::of(target).as_str(), expected, "{target}");
    }
}

#[test]
fn under_load_good_answers_are_sampled_per_vm_and_all_errors_kept() {
    let room = tempfile::tempdir().expect("a directory");
    let config = AuditConfig { sample: 10, ..to(&file(&room)) };
    let (collector, tape) = open(&config);
    (0..CAPACITY / 2).for_each(|_| tape.note(entry(1, 200)));
    for _ in 0..100 {
        for (slot, status) in [(2, 200), (3, 200), (3, 404)] {
            tape.note(AuditEntry { bytes: slot.into(), ..entry(slot, status) });
        }
    }
    drop(collector);
    let lines = lines(&file(&room));
    let of = |slot: u64, status: u16, sampled: Option<u64>| {
        let wanted = |line: &&Value| {
            line["bytes"] == slot && line["status"] == status && line["sampled"].as_u64() == sampled
        };
        lines.iter().filter(wanted).count()
    };
    assert_eq!([of(2, 200, Some(10)), of(3, 200, Some(10)), of(3, 404, None)], [10, 10, 100]);
    assert_eq!(lines.len(), CAPACITY / 2 + 120, "a sampled line states its count");
}

#[test]
fn a_full_tape_drops_good_answers_first_and_counts_them() {
    let config = AuditConfig { sample: 1, ..to(Path::new("/dev/null")) };
    let (mut collector, tape) = open(&config);
    (0..2 * CAPACITY).for_each(|_| tape.note(entry(1, 200)));
    let good = (CAPACITY - RESERVED) as u64;
    let dropped = 2 * CAPACITY as u64 - good;
    assert_eq!(counts(&collector).queue_full, dropped);
    (0..RESERVED).for_each(|_| tape.note(entry(1, 503)));
    assert_eq!(counts(&collector).queue_full, dropped, "errors have reserved room");
    tape.note(entry(1, 503));
    collector.collect(Instant::now());
    until("all recorded lines are written", || counts(&collector).written == CAPACITY as u64);
    assert_eq!(counts(&collector).queue_full, dropped + 1);
}

#[test]
fn a_full_disk_costs_only_lines() {
    let (mut collector, tape) = open(&to(Path::new("/dev/full")));
    for _ in 0..2 {
        tape.note(entry(1, 200));
        collector.collect(Instant::now());
    }
    until("the failures are counted", || counts(&collector).write_failed == 2);
    let expected = AuditCounts { write_failed: 2, ..AuditCounts::default() };
    assert_eq!(counts(&collector), expected);
}

#[test]
fn a_stalled_disk_delays_no_other_thread() {
    let room = tempfile::tempdir().expect("a directory");
    let pipe = room.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
    let reader = fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("a pipe without a reader");
    let (mut collector, tape) = open(&to(&pipe));
    // Chunks of maximum size fill first the pipe and then the queue.
    let begun = Instant::now();
    for _ in 0..CHUNKS + 4 {
        (0..CAPACITY / 4).for_each(|_| tape.note(entry(1, 200)));
        collector.collect(Instant::now());
    }
    assert!(counts(&collector).queue_full > 0, "{:?}", counts(&collector));
    drop(collector);
    assert!(begun.elapsed() < PATIENCE, "the shutdown waited for the disk");
    drop(reader);
}

#[test]
fn a_full_file_is_rotated_and_a_limited_number_of_old_ones_kept() {
    let room = tempfile::tempdir().expect("a directory");
    let path = file(&room);
    let config = AuditConfig { max_megabytes: 1, keep: 2, ..to(&path) };
    let (mut collector, tape) = open(&config);
    let mut noted = 0;
    // A line has about 200 bytes, so this makes about five files.
    while noted < 25_000 {
        (0..500).for_each(|_| tape.note(entry(1, 200)));
        noted += 500;
        collector.collect(Instant::now());
        until("the lines are written", || counts(&collector).written == noted);
    }
    let size = |suffix: &str| fs::metadata(format!("{}{suffix}", path.display())).map(|file| file.len());
    for suffix in [".1", ".2"] {
        let size = size(suffix).expect("an old file");
        assert!((1 << 20..(1 << 20) + 200_000).contains(&size), "{suffix}: {size}");
    }
    assert!(size(".3").is_err() && size("").expect("the current file") < (1 << 20) + 200_000);
}

#[test]
fn a_file_renamed_by_another_program_is_reopened_on_request() {
    let room = tempfile::tempdir().expect("a directory");
    let path = file(&room);
    let (mut collector, tape) = open(&to(&path));
    let mut write = |total: u64, reopen: bool| {
        if reopen {
            collector.reopen();
        }
        tape.note(entry(1, 200));
        collector.collect(Instant::now());
        until("a line is written", || counts(&collector).written == total);
    };
    write(1, false);
    let moved = room.path().join("moved");
    fs::rename(&path, &moved).expect("renamed");
    write(2, false);
    assert_eq!((lines(&moved).len(), path.exists()), (2, false));
    write(3, true);
    assert_eq!((lines(&moved).len(), lines(&path).len()), (2, 1));
}

#[test]
fn without_a_log_answers_are_recorded_only_while_somebody_follows() {
    let (mut collector, tape) = open(&AuditConfig::default());
    assert!(!tape.is_on() && collector.counts().is_none());
    let begun = Instant::now();
    assert_eq!(collector.follow(begun).count(), 0);
    assert!(tape.is_on());
    tape.note(entry(7, 200));
    let followed = collector.follow(begun + FOLLOW_FOR);
    assert_eq!(followed.guest(7).map(|guest| guest.requests), Some(1));
    collector.collect(begun + FOLLOW_FOR);
    assert!(tape.is_on(), "it was renewed");
    collector.collect(begun + 2 * FOLLOW_FOR + Duration::from_millis(1));
    assert!(!tape.is_on() && !collector.is_on());
}

#[test]
fn unprintable_characters_are_escapes_and_the_value_stays() {
    let text = "/a\x1b[2J\u{9b}\u{202e}é\u{e0041}\"\n";
    let mut out = Vec::new();
    write_json(&mut out, &text).expect("JSON");
    let line = String::from_utf8(out).expect("text");
    assert_eq!(line, r#""/a\u001b[2J\u009b\u202eé\udb40\udc41\"\n""#);
    assert_eq!(serde_json::from_str::<String>(&line).expect("JSON"), text);
}
