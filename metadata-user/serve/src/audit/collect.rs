//! The control side of the audit log: turns recorded answers into lines.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use metadata_common::maps::Slot;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::tape::{CAPACITY, Entry, Item};
use super::write::{Target, Writer};
use super::{AuditConfig, Line, Tape, TokenLine};

/// Interval at which the tapes are emptied.
pub const COLLECT_EVERY: Duration = Duration::from_millis(50);
/// Maximum number of items that one collection takes from a tape. They delay the control loop by about 4 ms.
pub const LINES_AT_ONCE: usize = CAPACITY;

/// The identity and VM of a slot.
#[derive(Debug)]
struct Who {
    port: String,
    mac: String,
    vm: Option<(String, String)>,
}

/// Lines by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditCounts {
    /// Written.
    pub written: u64,
    /// Omitted by sampling.
    pub sampled: u64,
    /// Dropped because the worker's tape or the writer's queue was full.
    pub queue_full: u64,
    /// Dropped because the file could not be written.
    pub write_failed: u64,
}

/// Turns the answers that workers recorded into lines.
#[derive(Debug)]
pub struct Collector {
    tapes: Vec<Reel>,
    who: HashMap<Slot, Who>,
    writer: Writer,
    queue_full: u64,
}

/// A tape, and its answers from a turn that has not ended.
#[derive(Debug)]
struct Reel {
    tape: Arc<Tape>,
    fresh: Vec<Entry>,
}

impl Collector {
    /// Opens the log and makes a tape for each of `workers`; `None` if no log is configured.
    ///
    /// # Errors
    /// If the file cannot be opened, or the thread cannot be started.
    pub fn open(config: &AuditConfig, workers: usize) -> anyhow::Result<Option<Self>> {
        let Some(target) = Target::of(config) else { return Ok(None) };
        let writer = Writer::start(target)?;
        let reel = |_| Reel { tape: Tape::new(config.sample), fresh: Vec::new() };
        let tapes = (0..workers).map(reel).collect();
        Ok(Some(Self { tapes, who: HashMap::new(), writer, queue_full: 0 }))
    }

    /// The tape of a worker.
    #[must_use]
    pub fn tape(&self, worker: usize) -> Option<Arc<Tape>> {
        self.tapes.get(worker).map(|reel| Arc::clone(&reel.tape))
    }

    /// Assigns a slot to a guest, after it has made lines of the answers recorded for the former guest.
    pub fn is_now(&mut self, slot: Slot, port: String, mac: String, vm: Option<(&str, &str)>) {
        self.collect();
        let vm = vm.map(|(uuid, name)| (uuid.to_owned(), name.to_owned()));
        self.who.insert(slot, Who { port, mac, vm });
    }

    /// Makes lines of all recorded answers and queues them for writing.
    pub fn collect(&mut self) {
        let Self { tapes, who, writer, queue_full } = self;
        for Reel { tape, fresh } in tapes {
            let (mut chunk, mut lines) = (Vec::new(), 0);
            for _ in 0..LINES_AT_ONCE {
                match tape.pop() {
                    None => break,
                    Some(Item::Answer(entry)) if entry.took.is_zero() => fresh.push(entry),
                    Some(Item::Answer(entry)) => lines += line(&entry, who, entry.took, &mut chunk),
                    Some(Item::Turn(turn)) => {
                        lines +=
                            fresh.drain(..).map(|entry| line(&entry, who, turn, &mut chunk)).sum::<u64>();
                    }
                }
            }
            // The tape had no room for the end of the turn, so its duration is unknown.
            if fresh.len() >= LINES_AT_ONCE {
                lines +=
                    fresh.drain(..).map(|entry| line(&entry, who, Duration::ZERO, &mut chunk)).sum::<u64>();
            }
            if lines > 0 && !writer.write(chunk, lines) {
                *queue_full += lines;
            }
        }
    }

    /// Queues the line of a token that was signed.
    pub fn token_signed(&mut self, line: &TokenLine<'_>) {
        let mut chunk = Vec::new();
        if serde_json::to_writer(&mut chunk, line).is_ok() {
            chunk.push(b'\n');
            self.queue_full += u64::from(!self.writer.write(chunk, 1));
        }
    }

    /// Reopens the file, which may have been renamed.
    pub fn reopen(&self) {
        self.writer.reopen();
    }

    /// Lines by outcome.
    #[must_use]
    pub fn counts(&self) -> AuditCounts {
        let (written, write_failed) = self.writer.counts();
        let tapes = || self.tapes.iter().map(|reel| &reel.tape);
        AuditCounts {
            written,
            sampled: tapes().map(|tape| tape.left_out()).sum(),
            queue_full: self.queue_full + tapes().map(|tape| tape.dropped()).sum::<u64>(),
            write_failed,
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.collect();
    }
}

/// Appends the line of an answer; returns the number of lines appended.
fn line(entry: &Entry, who: &HashMap<Slot, Who>, took: Duration, out: &mut Vec<u8>) -> u64 {
    let seconds = i64::try_from(entry.unix_seconds).unwrap_or_default();
    let time = OffsetDateTime::from_unix_timestamp(seconds).ok().and_then(|at| at.format(&Rfc3339).ok());
    let who = who.get(&entry.slot);
    let known = who.and_then(|who| who.vm.as_ref());
    let uuid = entry.responses.as_ref().map(|responses| &*responses.vm().uuid);
    let vm = uuid.or(known.map(|(uuid, _)| uuid.as_str()));
    let endpoint = |(address, port)| std::net::SocketAddr::new(address, port).to_string();
    let line = Line {
        time: time.as_deref().unwrap_or_default(),
        vm,
        // `who` names the slot's current guest, which may not be the one that was answered.
        name: known.filter(|(uuid, _)| Some(uuid.as_str()) == vm).map(|(_, name)| name.as_str()),
        port: who.map(|who| who.port.as_str()),
        mac: who.map(|who| who.mac.as_str()),
        client: &endpoint(entry.remote),
        server: &endpoint(entry.local),
        dialect: entry.datasource.label(),
        method: entry.method.as_str(),
        path: Some(entry.path.as_str()).filter(|path| !path.is_empty()),
        status: entry.status.0,
        bytes: entry.bytes,
        us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        sampled: entry.sampled,
    };
    let before = out.len();
    if serde_json::to_writer(&mut *out, &line).is_err() {
        out.truncate(before);
        return 0;
    }
    out.push(b'\n');
    1
}
