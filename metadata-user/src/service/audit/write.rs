//! The thread that writes lines, so that a slow disk delays no other thread.

use anyhow::Context as _;
use metadata_common::printable::{is_printable, json_units};
use metadata_feed::state::private_file::PRIVATE;
use rustix::fs::{OFlags, fcntl_setfl};
use serde::Serialize;
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

use super::AuditConfig;

/// Limit on chunks of lines that wait to be written.
pub const CHUNKS: usize = 64;
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

    /// Renames the file to number 1 and each rotated file to the next number, which replaces the last one.
    fn rotate(&self) -> io::Result<()> {
        let Self::File { path, keep, .. } = self else { return Ok(()) };
        let numbered = |number: u32| {
            let mut name = path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        if *keep == 0 {
            return fs::remove_file(path);
        }
        for number in (1..*keep).rev() {
            match fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(path, numbered(1))
    }

    fn is_full(&self, size: u64) -> bool {
        matches!(self, Self::File { limit: Some(limit), .. } if size >= *limit)
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
pub(super) struct Writer {
    /// `None` once the shutdown has begun.
    chunks: Option<SyncSender<(Vec<u8>, u64)>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Opens the target and starts the thread.
    pub(super) fn start(target: AuditTarget) -> anyhow::Result<Self> {
        let sink = target.open().with_context(|| format!("opening the audit log {target:?}"))?;
        let (chunks, lines) = sync_channel(CHUNKS);
        let shared = Arc::new(Shared::default());
        let its = Arc::clone(&shared);
        let body =
            move || LineWriter { target, sink: Some(sink), shared: its, is_failing: false }.run(&lines);
        let thread = std::thread::Builder::new().name("imds-audit".into()).spawn(body)?;
        Ok(Self { chunks: Some(chunks), shared, thread: Some(thread) })
    }

    /// Queues lines for writing; false if the queue is full. Never waits.
    pub(super) fn write(&self, chunk: Vec<u8>, lines: u64) -> bool {
        self.chunks.as_ref().is_some_and(|chunks| chunks.try_send((chunk, lines)).is_ok())
    }

    pub(super) fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Relaxed);
    }

    /// Lines written, and lines lost to write errors.
    pub(super) fn counts(&self) -> (u64, u64) {
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
                warn!("cannot write the audit log, its lines are dropped: {error}");
            }
            self.is_failing = outcome.is_err();
        }
    }

    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.shared.reopen.swap(false, Ordering::Relaxed) {
            self.sink = None;
        }
        if self.sink.as_ref().is_some_and(|sink| self.target.is_full(sink.size)) {
            self.target.rotate()?;
            self.sink = None;
        }
        let sink = match &mut self.sink {
            Some(sink) => sink,
            none => none.insert(self.target.open()?),
        };
        sink.write(lines)
    }
}

// JSON whose strings a terminal shows as they are.

/// Appends a document on one line. Guests choose paths, and tenants names; serde_json escapes only what RFC 8259 §7
/// requires, which leaves the controls beyond ASCII that rewrite a terminal or reorder its text.
///
/// # Errors
/// The document cannot be serialized.
pub fn write(out: &mut Vec<u8>, document: &impl Serialize) -> serde_json::Result<()> {
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
    use super::write;

    #[test]
    fn unprintable_characters_are_escapes_and_the_value_stays() {
        let text = "/a\x1b[2J\u{9b}\u{202e}é\u{e0041}\"\n";
        let mut out = Vec::new();
        write(&mut out, &text).expect("JSON");
        let line = String::from_utf8(out).expect("text");
        assert_eq!(line, r#""/a\u001b[2J\u009b\u202eé\udb40\udc41\"\n""#);
        assert_eq!(serde_json::from_str::<String>(&line).expect("JSON"), text);
    }
}
