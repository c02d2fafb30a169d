//! The audit log: a line of JSON for each answered request.
//!
//! ```text
//!  worker ── note ──► Tape (bounded, lock-free) ──► Collector ── lines ──► Writer ──► file
//!                      full: counted, dropped       control loop           thread of its own
//! ```
//!
//! No stage waits for the next one. A worker drops lines while its tape is full, and the collector drops lines while
//! the disk stalls. While a tape is at least half full, the worker records only one in `sample` successful answers of a
//! VM. It records every error as long as there is room.
//!
//! The tapes are off without an audit log, except while somebody [follows](collect::FollowedGuests) the guests.
//!
//! [`AuditLine`] lists the fields of a line. A line names the client, the path and the result, but no content: no
//! query, header field or body in either direction.

pub mod collect;

pub use collect::{AuditCounts, CAPACITY, COLLECT_EVERY, Collector, LINES_AT_ONCE, PATH_MAX, RESERVED, Tape};
pub(crate) use collect::{AuditEntry, RequestPath};

use anyhow::Context as _;
use metadata_common::printable::{is_printable, json_units};
use metadata_feed::state::private_file::PRIVATE;
use rustix::fs::{OFlags, fcntl_setfl};
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, Serializer};
use std::fs::{File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, io};
use tracing::warn;

/// `audit`: destination of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditConfig {
    /// A file, made with mode 0600, or `stderr`; `null` (default) writes nothing.
    pub to: Option<PathBuf>,
    /// Under load, record one in this many successful answers of each VM, 1 to [`AuditConfig::SAMPLE_MOST`]; 16 by
    /// default. 1 records all that fit.
    pub sample: u32,
    /// Size in MiB at which the file is rotated, 64 by default, at most [`AuditConfig::MEGABYTES_MOST`]. 0 leaves
    /// rotation to another program, which must then send SIGHUP.
    pub max_megabytes: u32,
    /// Number of rotated files to keep (`FILE.1` is the newest), 4 by default, at most [`AuditConfig::KEEP_MOST`].
    pub keep: u32,
}

impl AuditConfig {
    /// Largest value of `sample`.
    pub const SAMPLE_MOST: u32 = 65_535;
    /// Largest value of `max_megabytes`.
    pub const MEGABYTES_MOST: u32 = 1_000_000;
    /// Largest value of `keep`.
    pub const KEEP_MOST: u32 = 1_000;
}

impl Default for AuditConfig {
    fn default() -> Self {
        Self { to: None, sample: 16, max_megabytes: 64, keep: 4 }
    }
}

/// A line of the log. Unknown fields are omitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AuditLine<'a> {
    /// Time of the answer (RFC 3339, UTC).
    pub time: &'a str,
    /// The VM's owner: `vm.owner` of its record, or else the UUID; absent while its record has not arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<&'a str>,
    /// The VM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The port that received the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<&'a str>,
    /// The source MAC of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<&'a str>,
    /// The source address and port that the guest claims; never an identity.
    pub client: &'a str,
    /// The destination address and port.
    pub server: &'a str,
    /// The dialect that answered; `none` if no dialect serves the path.
    pub dialect: &'static str,
    /// The HTTP method; `?` for an unknown one and for an invalid request.
    pub method: &'static str,
    /// The path as sent, without its query, at most [`PATH_MAX`] bytes; absent if it could not be parsed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<&'a str>,
    /// The HTTP status.
    pub status: u16,
    /// Bytes of the body of the answer.
    pub bytes: u64,
    /// Microseconds from the turn that received the last byte to passing the answer to TCP; 0 if the kernel has answered.
    pub us: u64,
    /// Number of this VM's answers that the line stands for; absent if 1.
    #[serde(skip_serializing_if = "is_one")]
    pub sampled: u32,
}

/// A line for each identity token and each document that was signed, in addition to the line of its request. Such lines
/// are not sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TokenLine<'a> {
    /// Time of the signature (RFC 3339, UTC).
    pub time: &'a str,
    /// The VM's owner.
    pub vm: &'a str,
    /// The VM's name.
    pub name: &'a str,
    /// The source MAC of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<&'a str>,
    /// What was signed: `token`, `google`, `google_full`, `azure`, `signature`, `pkcs7`, `pkcs7_detached` or
    /// `attested`.
    pub signed: &'static str,
    /// The token's `jti`; absent for a document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<&'a str>,
    /// The `kid` of the key that signed a token, or the thumbprint of the certificate that signed a document.
    pub key: &'a str,
    /// The VM's subject, the `sub` of its tokens.
    pub subject: &'a str,
    /// The token's `aud`; absent for a document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audience: Option<&'a str>,
    /// The end of its validity, in Unix seconds.
    pub expires: u64,
}

/// A line for each change of the events that a VM is told of: what the host announces, and that the guest acknowledges it.
/// Such lines are not sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EventLine<'a> {
    /// Time of the change (RFC 3339, UTC).
    pub time: &'a str,
    /// The VM's owner.
    pub vm: &'a str,
    /// The VM's name; absent for a VM that is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The event's id.
    pub event: &'a str,
    /// Its kind: `freeze`, `reboot`, `redeploy`, `terminate` or `preempt`.
    pub kind: &'static str,
    /// `scheduled`, `started`, `completed` or `cancelled` as the host announces it, `withdrawn` if its source no longer has
    /// it, or `acknowledged` by the guest.
    pub change: &'static str,
}

fn is_one(sampled: &u32) -> bool {
    *sampled == 1
}

// The thread that writes lines, so that a slow disk delays no other thread.

/// Limit on chunks of lines that wait to be written.
pub const CHUNKS: usize = 64;
/// How many times its limit a file may have while it cannot be rotated. Beyond that, lines are dropped.
const OVERFULL: u64 = 2;
/// How long the agent's exit waits for queued lines to be written.
const EXIT_WAIT: Duration = Duration::from_secs(1);
/// The configuration value for standard error.
pub const STDERR: &str = "stderr";

/// The destination of lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditTarget {
    /// Standard error.
    Stderr,
    /// A file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes at which the file is rotated; `None` leaves rotation to another program.
        limit: Option<u64>,
        /// Number of rotated files to keep.
        keep: u32,
    },
}

impl AuditTarget {
    /// The configured target; `None` for no log.
    #[must_use]
    pub fn of(config: &AuditConfig) -> Option<Self> {
        let path = config.to.clone()?;
        if path == Path::new(STDERR) {
            return Some(Self::Stderr);
        }
        let limit = Some(u64::from(config.max_megabytes) << 20).filter(|limit| *limit > 0);
        Some(Self::File { path, limit, keep: config.keep })
    }

    fn open(&self) -> io::Result<Sink> {
        let Self::File { path, .. } = self else {
            return Ok(Sink { file: None, size: 0, torn: false });
        };
        // NONBLOCK makes opening a pipe without a reader fail instead of block. Writes may block this thread.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file =
            OpenOptions::new().append(true).create(true).mode(PRIVATE).custom_flags(flags).open(path)?;
        fcntl_setfl(&file, OFlags::APPEND)?;
        let metadata = file.metadata()?;
        if metadata.is_file() && metadata.permissions().mode() & 0o777 != PRIVATE {
            file.set_permissions(Permissions::from_mode(PRIVATE))?;
        }
        Ok(Sink { size: if metadata.is_file() { metadata.len() } else { 0 }, file: Some(file), torn: false })
    }

    /// Renames the file to number 1 and each rotated file to the next number, which replaces the last one. Files above
    /// the first free number stay: a rotation that is tried again and again must not remove them. A file that is not
    /// there any more, because somebody moved or removed it, is as good as rotated.
    fn rotate(&self) -> io::Result<()> {
        let Self::File { path, keep, .. } = self else { return Ok(()) };
        let numbered = |number: u32| {
            let mut name = path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        let done = |outcome: io::Result<()>| match outcome {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        if *keep == 0 {
            return done(fs::remove_file(path));
        }
        let free = (1..*keep).find(|number| fs::symlink_metadata(numbered(*number)).is_err());
        for number in (1..free.unwrap_or(*keep)).rev() {
            done(fs::rename(numbered(number), numbered(number + 1)))?;
        }
        done(fs::rename(path, numbered(1)))
    }

    fn is_full(&self, size: u64) -> bool {
        matches!(self, Self::File { limit: Some(limit), .. } if size >= *limit)
    }

    /// Returns whether a file that cannot be rotated may grow no more.
    fn is_overfull(&self, size: u64) -> bool {
        matches!(self, Self::File { limit: Some(limit), .. } if size / OVERFULL >= *limit)
    }
}

/// The open target.
struct Sink {
    /// `None` for standard error.
    file: Option<File>,
    size: u64,
    /// The last line was cut off.
    torn: bool,
}

impl Sink {
    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        if std::mem::replace(&mut self.torn, true) {
            self.put(b"\n")?;
        }
        self.put(lines)?;
        self.torn = false;
        self.size += lines.len() as u64;
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.file {
            Some(file) => file.write_all(bytes),
            None => io::stderr().lock().write_all(bytes),
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    written: AtomicU64,
    failed: AtomicU64,
    reopen: AtomicBool,
}

/// The control side's handle of the thread.
#[derive(Debug)]
struct Writer {
    /// `None` once the shutdown has begun.
    chunks: Option<SyncSender<(Vec<u8>, u64)>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Opens the target and starts the thread.
    fn start(target: AuditTarget) -> anyhow::Result<Self> {
        let sink = target.open().with_context(|| match &target {
            AuditTarget::Stderr => "cannot open the audit log on standard error".to_owned(),
            AuditTarget::File { path, .. } => format!("cannot open the audit log {}", path.display()),
        })?;
        let (chunks, lines) = sync_channel(CHUNKS);
        let shared = Arc::new(Shared::default());
        let its = Arc::clone(&shared);
        let writer =
            LineWriter { target, sink: Some(sink), shared: its, is_failing: false, is_rotatable: true };
        let body = move || writer.run(&lines);
        let thread = std::thread::Builder::new().name("imds-audit".into()).spawn(body)?;
        Ok(Self { chunks: Some(chunks), shared, thread: Some(thread) })
    }

    /// Queues lines for writing; false if the queue is full. Never waits.
    fn write(&self, chunk: Vec<u8>, lines: u64) -> bool {
        self.chunks.as_ref().is_some_and(|chunks| chunks.try_send((chunk, lines)).is_ok())
    }

    fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Relaxed);
    }

    /// Lines written, and lines lost to write errors.
    fn counts(&self) -> (u64, u64) {
        (self.shared.written.load(Ordering::Relaxed), self.shared.failed.load(Ordering::Relaxed))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.chunks = None;
        let Some(thread) = self.thread.take() else { return };
        let begun = Instant::now();
        while !thread.is_finished() && begun.elapsed() < EXIT_WAIT {
            std::thread::sleep(Duration::from_millis(5));
        }
        if thread.is_finished() {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        } else {
            warn!("the last lines of the audit log are not written: the disk does not respond");
        }
    }
}

/// State of the thread.
struct LineWriter {
    target: AuditTarget,
    /// `None` if it must be opened.
    sink: Option<Sink>,
    shared: Arc<Shared>,
    /// The last write failed; the log has one warning about it.
    is_failing: bool,
    /// False after a failed rotation; the log has one warning about it.
    is_rotatable: bool,
}

impl LineWriter {
    fn run(mut self, chunks: &Receiver<(Vec<u8>, u64)>) {
        for (chunk, lines) in chunks {
            let outcome = self.write(&chunk);
            let counter = if outcome.is_ok() { &self.shared.written } else { &self.shared.failed };
            counter.fetch_add(lines, Ordering::Relaxed);
            if let Err(error) = &outcome
                && !self.is_failing
            {
                warn!("cannot write the audit log; its lines are dropped: {error}");
            }
            self.is_failing = outcome.is_err();
        }
    }

    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.shared.reopen.swap(false, Ordering::Relaxed) {
            self.sink = None;
        }
        if let Some(size) = self.sink.as_ref().map(|sink| sink.size).filter(|size| self.target.is_full(*size))
        {
            self.rotate(size)?;
        }
        let sink = match &mut self.sink {
            Some(sink) => sink,
            none => none.insert(self.target.open()?),
        };
        sink.write(lines)
    }

    /// Rotates a full file. One that cannot be rotated is written further for a while: lines are worth more than its
    /// size.
    fn rotate(&mut self, size: u64) -> io::Result<()> {
        match self.target.rotate() {
            Ok(()) => (self.sink, self.is_rotatable) = (None, true),
            Err(error) if self.target.is_overfull(size) => return Err(error),
            Err(error) => {
                if std::mem::replace(&mut self.is_rotatable, false) {
                    warn!(
                        "cannot rotate the audit log; it grows to at most {OVERFULL} times its limit, then its lines \
                         are dropped: {error}"
                    );
                }
            }
        }
        Ok(())
    }
}

// JSON whose strings a terminal shows as they are.

/// Appends a document on one line. Guests choose paths, and tenants names; serde_json escapes only what RFC 8259 §7
/// requires, which leaves the controls beyond ASCII that rewrite a terminal or reorder its text.
///
/// # Errors
/// The document cannot be serialized.
pub fn write_json(out: &mut Vec<u8>, document: &impl Serialize) -> serde_json::Result<()> {
    document.serialize(&mut Serializer::with_formatter(out, PrintableFormatter))
}

struct PrintableFormatter;

impl Formatter for PrintableFormatter {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some(at) = rest.find(|c| !is_printable(c)) {
            let (plain, escaped) = rest.split_at(at);
            out.write_all(plain.as_bytes())?;
            let mut chars = escaped.chars();
            for unit in chars.next().iter().flat_map(|c| json_units(*c)) {
                write!(out, "\\u{unit:04x}")?;
            }
            rest = chars.as_str();
        }
        out.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
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

    use super::collect::{AuditEntry, CAPACITY, FOLLOW_FOR, PATH_MAX, RESERVED, RequestPath, Tape};
    use super::{AuditConfig, AuditCounts, CHUNKS, Collector, write_json};

    const UUID: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    /// Far more time than any test needs: only a fault reaches it.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn entry(slot: u32, status: u16) -> AuditEntry {
        let connection = Connection {
            slot,
            local: ([169, 254, 169, 254].into(), 80),
            remote: ([10, 0, 0, 1].into(), 4_711),
        };
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
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
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
        assert_eq!(
            of(&lines[1]),
            [Some(UUID.to_owned()), None, Some("tap1".to_owned())],
            "no other VM's name"
        );
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
        assert_eq!(
            lines(&file(&room)).iter().map(|line| line["us"].as_u64()).collect::<Vec<_>>(),
            [Some(33)]
        );
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
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a pipe");
        let reader =
            fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("a pipe without a reader");
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
    fn a_file_that_somebody_moved_or_removed_is_made_anew_once_it_is_full() {
        for (keep, is_moved) in [(0, true), (0, false), (2, true), (2, false)] {
            let room = tempfile::tempdir().expect("a directory");
            let path = file(&room);
            let (mut collector, tape) = open(&AuditConfig { max_megabytes: 1, keep, ..to(&path) });
            let case = format!("keep {keep}, moved {is_moved}");
            let mut noted = 0;
            while noted < 15_000 {
                (0..500).for_each(|_| tape.note(entry(1, 200)));
                noted += 500;
                collector.collect(Instant::now());
                until(&case, || counts(&collector).written + counts(&collector).write_failed == noted);
                if noted == 500 {
                    match is_moved {
                        true => fs::rename(&path, room.path().join("moved")).expect("moved"),
                        false => fs::remove_file(&path).expect("removed"),
                    }
                }
            }
            assert_eq!(counts(&collector).write_failed, 0, "{case}");
            assert!(path.exists(), "{case}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_rotated_is_written_to_twice_its_limit() {
        let room = tempfile::tempdir().expect("a directory");
        let path = file(&room);
        let of = |number: u32| PathBuf::from(format!("{}.{number}", path.display()));
        // A file cannot replace a directory.
        fs::create_dir(of(2)).expect("a directory");
        fs::write(of(1), "former").expect("a file");
        let (mut collector, tape) = open(&AuditConfig { max_megabytes: 1, keep: 2, ..to(&path) });
        let mut noted = 0;
        while noted < 15_000 {
            (0..500).for_each(|_| tape.note(entry(1, 200)));
            noted += 500;
            collector.collect(Instant::now());
            let sum = || counts(&collector).written + counts(&collector).write_failed;
            until("the lines are written or dropped", || sum() == noted);
        }
        let size = fs::metadata(&path).expect("the file").len();
        assert!((2 << 20..(2 << 20) + 200_000).contains(&size), "{size}");
        assert!(counts(&collector).write_failed > 0, "a third MiB is refused");
        assert_eq!(fs::read_to_string(of(1)).expect("the former file"), "former");
        fs::remove_dir(of(2)).expect("removed");
        tape.note(entry(1, 200));
        collector.collect(Instant::now());
        until("it is rotated", || lines(&path).len() == 1);
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
}
