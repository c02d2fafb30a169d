//! The control side of the tapes: turns recorded answers into lines of the audit log, and shows them to anyone who
//! follows the guests.

use crossbeam_queue::ArrayQueue;
use metadata_common::addresses::Connection;
use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_content::http::{Method, StatusCode};
use metadata_content::record::event::{EventJournal, EventNews};
use metadata_content::record::values::Timestamp;
use metadata_content::store::{Datasource, Responses};
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{AuditConfig, AuditLine, AuditTarget, EventLine, TokenLine, Writer};
use crate::service::audit;

/// Interval at which the tapes are emptied.
pub const COLLECT_EVERY: Duration = Duration::from_millis(50);
/// Maximum number of items that one collection takes from a tape. They delay the control loop by about 4 ms.
pub const LINES_AT_ONCE: usize = CAPACITY;

/// The identity and VM of a slot.
#[derive(Debug)]
struct SlotOwner {
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

/// Takes the answers that workers recorded. The tapes are on while there is an audit log or somebody follows guests.
#[derive(Debug)]
pub struct Collector {
    tapes: Vec<TurnTape>,
    log: Option<Log>,
    /// The changes of the events of all VMs.
    events: EventJournal,
    following: Option<FollowedGuests>,
}

/// The audit log.
#[derive(Debug)]
struct Log {
    who: HashMap<Slot, SlotOwner>,
    writer: Writer,
    queue_full: u64,
}

/// A tape, and its answers from a turn that has not ended.
#[derive(Debug)]
struct TurnTape {
    tape: Arc<Tape>,
    fresh: Vec<AuditEntry>,
}

impl Collector {
    /// Makes a tape for each of `workers`, and opens the log if one is configured.
    ///
    /// # Errors
    /// If the file cannot be opened, or the thread cannot be started.
    pub fn open(config: &AuditConfig, workers: usize) -> anyhow::Result<Self> {
        let writer = AuditTarget::of(config).map(Writer::start).transpose()?;
        let log = writer.map(|writer| Log { who: HashMap::new(), writer, queue_full: 0 });
        let turns = |_| TurnTape { tape: Tape::new(config.sample), fresh: Vec::new() };
        let tapes: Vec<_> = (0..workers).map(turns).collect();
        if log.is_some() {
            for turns in &tapes {
                turns.tape.turn_on();
            }
        }
        Ok(Self { tapes, log, events: EventJournal::default(), following: None })
    }

    /// Writes lines of the changes in this journal, too.
    pub fn read_events(&mut self, events: EventJournal) {
        if self.has_log() {
            events.turn_on();
        }
        self.events = events;
    }

    /// The tape of a worker.
    #[must_use]
    pub fn tape(&self, worker: usize) -> Option<Arc<Tape>> {
        self.tapes.get(worker).map(|turns| Arc::clone(&turns.tape))
    }

    /// True while answers are recorded, and [`collect`](Self::collect) has to be called.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.log.is_some() || self.following.is_some()
    }

    /// True if there is an audit log.
    #[must_use]
    pub fn has_log(&self) -> bool {
        self.log.is_some()
    }

    /// Follows the guests until [`FOLLOW_FOR`] after the last call.
    pub fn follow(&mut self, now: Instant) -> &FollowedGuests {
        self.collect(now);
        if self.following.is_none() {
            for turns in &self.tapes {
                turns.tape.turn_on();
            }
        }
        let following = self.following.get_or_insert_with(|| FollowedGuests::new(now));
        following.renew(now);
        following
    }

    /// What guests have asked, while somebody follows them.
    #[must_use]
    pub fn following(&self) -> Option<&FollowedGuests> {
        self.following.as_ref()
    }

    /// Assigns a slot to a guest, after it has made lines of the answers recorded for the former guest.
    pub fn is_now(&mut self, slot: Slot, port: String, mac: String, vm: Option<(&str, &str)>) {
        self.collect(Instant::now());
        let vm = vm.map(|(owner, name)| (owner.to_owned(), name.to_owned()));
        if let Some(log) = &mut self.log {
            log.who.insert(slot, SlotOwner { port, mac, vm });
        }
    }

    /// Takes all recorded answers: queues their lines for writing, and notes them for those who follow. Ends the
    /// following if nobody has renewed it.
    pub fn collect(&mut self, now: Instant) {
        let Self { tapes, log, following, events } = self;
        if let Some(log) = log {
            log.events_noted(events);
        }
        for turns in tapes {
            let (mut chunk, mut lines) = (Vec::new(), 0);
            turns.take(|entry, took| {
                if let Some(following) = following.as_mut() {
                    following.note(entry, took, now);
                }
                if let Some(log) = log.as_ref() {
                    lines += line(entry, &log.who, took, &mut chunk);
                }
            });
            if let Some(log) = log.as_mut().filter(|_| lines > 0)
                && !log.writer.write(chunk, lines)
            {
                log.queue_full += lines;
            }
        }
        if self.following.as_ref().is_some_and(|following| following.is_over(now)) {
            self.following = None;
            if self.log.is_none() {
                self.tapes.iter_mut().for_each(TurnTape::stop);
            }
        }
    }

    /// Queues the line of a token that was signed.
    pub fn token_signed(&mut self, line: &TokenLine<'_>) {
        let Some(log) = &mut self.log else { return };
        let mut chunk = Vec::new();
        if audit::write_json(&mut chunk, line).is_ok() {
            chunk.push(b'\n');
            log.queue_full += u64::from(!log.writer.write(chunk, 1));
        }
    }

    /// Reopens the file, which may have been renamed.
    pub fn reopen(&self) {
        if let Some(log) = &self.log {
            log.writer.reopen();
        }
    }

    /// Lines by outcome; `None` without a log.
    #[must_use]
    pub fn counts(&self) -> Option<AuditCounts> {
        let log = self.log.as_ref()?;
        let (written, write_failed) = log.writer.counts();
        let tapes = || self.tapes.iter().map(|turns| &turns.tape);
        Some(AuditCounts {
            written,
            sampled: tapes().map(|tape| tape.left_out()).sum(),
            queue_full: log.queue_full
                + self.events.dropped()
                + tapes().map(|tape| tape.dropped()).sum::<u64>(),
            write_failed,
        })
    }
}

impl Log {
    /// Queues the lines of changed events.
    fn events_noted(&mut self, events: &EventJournal) {
        let notes = events.take();
        let (mut chunk, mut lines) = (Vec::new(), 0);
        for note in &notes {
            let time = i64::try_from(note.unix_seconds).ok().and_then(Timestamp::at);
            let vms = self.who.values().filter_map(|who| who.vm.as_ref());
            let line = EventLine {
                time: time.as_ref().map_or("", Timestamp::as_str),
                vm: &note.vm,
                name: vms.clone().find(|(owner, _)| **owner == *note.vm).map(|(_, name)| name.as_str()),
                event: note.id.as_str(),
                kind: note.kind.name(),
                change: match note.news {
                    EventNews::State(state) => state.name(),
                    EventNews::Withdrawn => "withdrawn",
                    EventNews::Acknowledged => "acknowledged",
                },
            };
            if audit::write_json(&mut chunk, &line).is_ok() {
                chunk.push(b'\n');
                lines += 1;
            }
        }
        if lines > 0 && !self.writer.write(chunk, lines) {
            self.queue_full += lines;
        }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.collect(Instant::now());
    }
}

impl TurnTape {
    /// Turns the tape off. Drops what is left, which keeps responses of VMs in memory.
    fn stop(&mut self) {
        self.tape.turn_off();
        self.fresh.clear();
        while self.tape.pop().is_some() {}
    }

    /// Takes the recorded answers whose turn is over, with their durations.
    fn take(&mut self, mut each: impl FnMut(&AuditEntry, Duration)) {
        let Self { tape, fresh } = self;
        for _ in 0..LINES_AT_ONCE {
            match tape.pop() {
                None => break,
                Some(Item::Answer(entry)) if entry.took.is_zero() => fresh.push(entry),
                Some(Item::Answer(entry)) => each(&entry, entry.took),
                Some(Item::Turn(turn)) => fresh.drain(..).for_each(|entry| each(&entry, turn)),
            }
        }
        // The tape had no room for the end of the turn, so its duration is unknown.
        if fresh.len() >= LINES_AT_ONCE {
            fresh.drain(..).for_each(|entry| each(&entry, Duration::ZERO));
        }
    }
}

/// Appends the line of an answer; returns the number of lines appended.
fn line(entry: &AuditEntry, who: &HashMap<Slot, SlotOwner>, took: Duration, out: &mut Vec<u8>) -> u64 {
    let seconds = i64::try_from(entry.unix_seconds).unwrap_or_default();
    let time = OffsetDateTime::from_unix_timestamp(seconds).ok().and_then(|at| at.format(&Rfc3339).ok());
    let who = who.get(&entry.slot);
    let known = who.and_then(|who| who.vm.as_ref());
    let owner = entry.responses.as_ref().map(|responses| &*responses.vm().owner);
    let vm = owner.or(known.map(|(owner, _)| owner.as_str()));
    let endpoint = |(address, port)| std::net::SocketAddr::new(address, port).to_string();
    let line = AuditLine {
        time: time.as_deref().unwrap_or_default(),
        vm,
        // `who` names the slot's current guest, which may not be the one that was answered.
        name: known.filter(|(owner, _)| Some(owner.as_str()) == vm).map(|(_, name)| name.as_str()),
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
    if audit::write_json(out, &line).is_err() {
        out.truncate(before);
        return 0;
    }
    out.push(b'\n');
    1
}

// A bounded, lock-free queue from a worker to the control side, without allocation on the worker's side.

/// Capacity of a tape: about 50 ms of lines at the highest load, in 1 MiB.
pub const CAPACITY: usize = 4_096;
/// Part of the capacity that is reserved for errors.
pub const RESERVED: usize = CAPACITY / 8;
/// Number of queued items at which sampling of successful answers begins.
const LOADED: usize = CAPACITY / 2;
/// Longest path kept, in bytes.
pub const PATH_MAX: usize = 120;

/// An answer for the audit log.
#[derive(Debug)]
pub(crate) struct AuditEntry {
    pub(crate) slot: Slot,
    pub(crate) unix_seconds: u64,
    pub(crate) local: (IpAddr, u16),
    pub(crate) remote: (IpAddr, u16),
    /// Duration of the wait; zero for an answer in the turn that received the request.
    pub(crate) took: Duration,
    pub(crate) method: Method,
    pub(crate) path: RequestPath,
    pub(crate) datasource: Datasource,
    pub(crate) status: StatusCode,
    pub(crate) bytes: u64,
    /// The VM's responses. They name the right VM even if the slot is reused before the line is written.
    pub(crate) responses: Option<Arc<Responses>>,
    /// Set when the entry is recorded: the number of answers it stands for.
    pub(crate) sampled: u32,
}

impl AuditEntry {
    /// Sets slot, endpoints and time; the other fields are empty.
    pub(crate) fn of(connection: &Connection, unix_seconds: u64) -> Self {
        let Connection { slot, local, remote } = *connection;
        Self {
            slot,
            unix_seconds,
            local,
            remote,
            took: Duration::ZERO,
            method: Method::Other,
            path: RequestPath::default(),
            datasource: Datasource::NONE,
            status: StatusCode(0),
            bytes: 0,
            responses: None,
            sampled: 1,
        }
    }
}

/// The beginning of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestPath {
    bytes: [u8; PATH_MAX],
    length: u8,
}

impl Default for RequestPath {
    fn default() -> Self {
        Self { bytes: [0; PATH_MAX], length: 0 }
    }
}

impl RequestPath {
    /// The path of a request target as sent. Scheme, authority and query are left out, because they may hold secrets.
    pub(crate) fn of(target: &str) -> Self {
        // A URL may also be in the query of a path.
        let target = match target.split_once("://").filter(|_| !target.starts_with('/')) {
            Some((_, rest)) => rest.find(['/', '?']).map_or("", |at| &rest[at..]),
            None => target,
        };
        let end = target.find(['?', '#']).unwrap_or(target.len());
        let end = target[..end].floor_char_boundary(PATH_MAX);
        let mut path = Self { length: u8::try_from(end).unwrap_or_default(), ..Self::default() };
        path.bytes[..end].copy_from_slice(&target.as_bytes()[..end]);
        path
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.length.into()]).unwrap_or_default()
    }
}

/// An item of a worker's tape, in order.
#[derive(Debug)]
pub(super) enum Item {
    Answer(AuditEntry),
    /// Duration of a turn that answered requests it received.
    Turn(Duration),
}

/// The tape of one worker. While it is off, which it is at first, it keeps nothing and has no memory.
#[derive(Debug)]
pub struct Tape {
    is_on: AtomicBool,
    /// Made when the tape is first turned on.
    room: OnceLock<TapeRoom>,
    sample: u32,
    /// Answers without a wait were recorded since the end of the last turn.
    fresh: AtomicBool,
    dropped: AtomicU64,
    left_out: AtomicU64,
}

#[derive(Debug)]
struct TapeRoom {
    items: ArrayQueue<Item>,
    /// Per slot: successful answers under load, modulo `sample`.
    counts: Box<[AtomicU16]>,
}

impl Tape {
    /// An empty tape that is off. Under load, one in `sample` answers is recorded.
    #[must_use]
    pub fn new(sample: u32) -> Arc<Self> {
        Arc::new(Self {
            is_on: AtomicBool::new(false),
            room: OnceLock::new(),
            sample: sample.max(1),
            fresh: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        })
    }

    /// Records answers from now on. Allocates on the first call.
    pub fn turn_on(&self) {
        self.room.get_or_init(|| TapeRoom {
            items: ArrayQueue::new(CAPACITY),
            counts: (0..MAX_SLOTS).map(|_| AtomicU16::new(0)).collect(),
        });
        // Relaxed: the worker may see it a turn late, and `room` has its own synchronisation.
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Records no further answers.
    pub fn turn_off(&self) {
        self.is_on.store(false, Ordering::Relaxed);
    }

    /// True if answers are recorded.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Records an answer if there is room. Never waits. Only the worker calls it.
    pub(crate) fn note(&self, mut entry: AuditEntry) {
        let Some(TapeRoom { items, counts }) = self.room.get() else { return };
        let (waiting, is_good) = (items.len(), entry.status < StatusCode(400));
        if is_good && waiting >= LOADED && self.sample > 1 {
            if !self.is_next(counts, entry.slot) {
                return count(&self.left_out);
            }
            entry.sampled = self.sample;
        }
        let has_room = !is_good || waiting < CAPACITY - RESERVED;
        let fresh = entry.took.is_zero();
        if !has_room || items.push(Item::Answer(entry)).is_err() {
            return count(&self.dropped);
        }
        if fresh {
            self.fresh.store(true, Ordering::Relaxed);
        }
    }

    /// Called after each turn of the worker with its duration.
    pub(crate) fn turned(&self, turn: Duration) {
        if self.fresh.load(Ordering::Relaxed) {
            self.fresh.store(false, Ordering::Relaxed);
            if let Some(room) = self.room.get() {
                // If there is no room, the answers get the duration of the next turn that is recorded.
                let _ = room.items.push(Item::Turn(turn));
            }
        }
    }

    /// True for one in `sample` answers of a slot.
    fn is_next(&self, counts: &[AtomicU16], slot: Slot) -> bool {
        let Some(count) = usize::try_from(slot).ok().and_then(|slot| counts.get(slot)) else {
            return true;
        };
        let seen = count.load(Ordering::Relaxed);
        let sample = u16::try_from(self.sample).unwrap_or(u16::MAX);
        count.store((seen + 1) % sample, Ordering::Relaxed);
        seen == 0
    }

    pub(super) fn pop(&self) -> Option<Item> {
        self.room.get()?.items.pop()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }
}

/// Adds one. Only the owning thread may call it.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

// What guests have asked while somebody follows them: `xdp-imds top`, or a viewer of the page.
//
// It lives on the control side and is filled from the workers' tapes. While nobody follows, there is no
// [`FollowedGuests`], and the tapes are off unless there is an audit log.

/// How long guests are followed after a viewer has asked for the last time.
pub const FOLLOW_FOR: Duration = Duration::from_secs(30);
/// Number of last requests that are kept of each guest, 2 KiB together.
pub const LAST_REQUESTS: usize = 16;

/// After this long without a request the next one begins a boot, and so does one for user-data after this long a boot.
/// Guests that ask more often all the time do not boot each time.
pub const BOOT_PAUSE: Duration = Duration::from_secs(60);

/// The guests that have sent requests since somebody began to follow them.
#[derive(Debug)]
pub struct FollowedGuests {
    since: Instant,
    until: Instant,
    /// One for each slot at most, so the number of slots limits them.
    guests: HashMap<Slot, FollowedGuest>,
}

/// What one guest has asked.
#[derive(Debug)]
pub struct FollowedGuest {
    /// The owner of its VM; `None` while its record has not arrived.
    pub vm: Option<Box<str>>,
    /// When its first answer was collected.
    pub first: Instant,
    /// When the first answer of its last boot was collected: see [`BOOT_PAUSE`].
    pub boot: Instant,
    /// When its last answer was collected.
    pub last: Instant,
    /// Number of its requests.
    pub requests: u64,
    /// Number of requests that were answered with a status of 429 or at least 500.
    pub failed: u64,
    /// The dialect that first answered with success. A client may ask others later, as cloud-init asks OpenStack's EC2
    /// tree.
    pub dialect: Option<Datasource>,
    /// It has got user-data.
    pub has_user_data: bool,
    /// Its last requests, the newest last; at most [`LAST_REQUESTS`].
    pub lately: VecDeque<FollowedRequest>,
}

/// An answered request.
#[derive(Debug)]
pub struct FollowedRequest {
    /// When the answer was collected.
    pub at: Instant,
    /// The method.
    pub method: &'static str,
    /// The path as sent, without its query.
    pub path: Box<str>,
    /// The dialect that answered.
    pub dialect: Datasource,
    /// The HTTP status.
    pub status: u16,
    /// Bytes of the body.
    pub bytes: u64,
    /// Time from the turn that received the last byte until TCP had the answer.
    pub took: Duration,
}

impl FollowedGuests {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, until: now, guests: HashMap::new() }
    }

    pub(crate) fn renew(&mut self, now: Instant) {
        self.until = now + FOLLOW_FOR;
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now > self.until
    }

    /// When the following began.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// What the guest of a slot has asked.
    #[must_use]
    pub fn guest(&self, slot: Slot) -> Option<&FollowedGuest> {
        self.guests.get(&slot)
    }

    /// Number of guests that have asked.
    #[must_use]
    pub fn count(&self) -> usize {
        self.guests.len()
    }

    pub(crate) fn note(&mut self, entry: &AuditEntry, took: Duration, now: Instant) {
        let vm = entry.responses.as_ref().map(|responses| &*responses.vm().owner);
        // The slot has another guest now.
        if let (Some(guest), Some(vm)) = (self.guests.get(&entry.slot), vm)
            && guest.vm.as_deref().is_some_and(|former| former != vm)
        {
            self.guests.remove(&entry.slot);
        }
        let guest = self.guests.entry(entry.slot).or_insert_with(|| FollowedGuest::new(now));
        guest.note(entry, vm, took, now);
    }
}

impl FollowedGuest {
    fn new(now: Instant) -> Self {
        Self {
            vm: None,
            first: now,
            boot: now,
            last: now,
            requests: 0,
            failed: 0,
            dialect: None,
            has_user_data: false,
            lately: VecDeque::new(),
        }
    }

    fn note(&mut self, entry: &AuditEntry, vm: Option<&str>, took: Duration, now: Instant) {
        let (status, times, path) = (entry.status.0, u64::from(entry.sampled), entry.path.as_str());
        let is_good = (200..300).contains(&status);
        if self.vm.is_none() {
            self.vm = vm.map(Into::into);
        }
        let is_user_data = is_user_data(path);
        let begun = if is_user_data { self.boot } else { self.last };
        if now.saturating_duration_since(begun) >= BOOT_PAUSE {
            self.boot = now;
        }
        self.last = now;
        self.requests += times;
        self.failed += if status == 429 || status >= 500 { times } else { 0 };
        if self.dialect.is_none()
            && is_good
            && ![Datasource::NONE, Datasource::ANY].contains(&entry.datasource)
        {
            self.dialect = Some(entry.datasource);
        }
        self.has_user_data |= is_good && is_user_data;
        if self.lately.len() == LAST_REQUESTS {
            self.lately.pop_front();
        }
        self.lately.push_back(FollowedRequest {
            at: now,
            method: entry.method.as_str(),
            path: path.into(),
            dialect: entry.datasource,
            status,
            bytes: entry.bytes,
            took,
        });
    }
}

/// True for a path whose last part is a cloud's spelling of user-data: `user-data`, `user_data`, `userdata`,
/// `userData`.
fn is_user_data(path: &str) -> bool {
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let letters =
        last.bytes().filter(|byte| !matches!(byte, b'-' | b'_')).map(|byte| byte.to_ascii_lowercase());
    letters.eq(b"userdata".iter().copied())
}

#[cfg(test)]
mod tests {
    use metadata_common::addresses::Connection;
    use metadata_content::http::{Method, StatusCode};
    use metadata_content::store::{Datasource, Responses, VmState};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::{FollowedGuests, LAST_REQUESTS, is_user_data};
    use crate::service::audit::{AuditEntry, RequestPath};

    fn entry(slot: u32, path: &str, status: u16, dialect: &str) -> AuditEntry {
        let (local, remote) = (([169, 254, 169, 254].into(), 80), ([10, 0, 0, 1].into(), 4_711));
        let connection = Connection { slot, local, remote };
        let (path, status) = (RequestPath::of(path), StatusCode(status));
        let datasource = Datasource::named(dialect);
        AuditEntry { method: Method::Get, path, datasource, status, ..AuditEntry::of(&connection, 1) }
    }

    #[test]
    fn a_guest_has_found_the_dialect_that_first_answered_with_success() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        for (path, status, dialect, found, user_data) in [
            ("/latest/meta-data", 404, "none", None, false),
            ("/", 200, "every dialect", None, false),
            ("/v1/user-data", 404, "nocloud", None, false),
            ("/v1/meta-data", 200, "nocloud", Some("nocloud"), false),
            ("/v1/user-data?x", 200, "nocloud", Some("nocloud"), true),
            ("/openstack", 200, "openstack", Some("nocloud"), true),
        ] {
            following.note(&entry(3, path, status, dialect), Duration::ZERO, now);
            let guest = following.guest(3).expect("followed");
            let label = guest.dialect.map(Datasource::label);
            assert_eq!((label, guest.has_user_data), (found, user_data), "after {path}");
        }
        assert_eq!(following.guest(3).map(|guest| guest.requests), Some(6));
    }

    #[test]
    fn sampled_answers_count_as_often_as_they_stand_for() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        following.note(&AuditEntry { sampled: 16, ..entry(3, "/", 200, "ec2") }, Duration::ZERO, now);
        following.note(&entry(3, "/", 503, "ec2"), Duration::ZERO, now);
        let guest = following.guest(3).expect("followed");
        assert_eq!((guest.requests, guest.failed, guest.lately.len()), (17, 1, 2));
    }

    #[test]
    fn only_the_last_requests_are_kept() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        let paths: Vec<_> = (0..2 * LAST_REQUESTS).map(|number| format!("/{number}")).collect();
        for path in &paths {
            following.note(&entry(3, path, 200, "ec2"), Duration::ZERO, now);
        }
        let guest = following.guest(3).expect("followed");
        assert!(guest.lately.iter().map(|request| &*request.path).eq(&paths[LAST_REQUESTS..]));
    }

    #[test]
    fn the_next_guest_of_a_slot_begins_anew() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        for (vm, requests) in [("a", 1), ("a", 2), ("b", 1)] {
            let responses = Some(Arc::new(Responses::builder(VmState::alone(vm)).build()));
            following.note(&AuditEntry { responses, ..entry(3, "/", 200, "ec2") }, Duration::ZERO, now);
            assert_eq!(following.guest(3).map(|guest| guest.requests), Some(requests), "{vm}");
        }
    }

    #[test]
    fn a_boot_begins_after_a_pause_or_with_user_data_and_not_with_each_poll() {
        let start = Instant::now();
        let mut following = FollowedGuests::new(start);
        // Each row: when a request comes, its path, and when the boot it belongs to began, in seconds.
        for (at, path, boot) in [
            (0, "/v1/meta-data", 0),
            (5, "/v1/user-data", 0),
            (50, "/poll", 0),
            (100, "/poll", 0),
            // It polls until it reboots, and begins again within the minute.
            (130, "/v1/meta-data", 0),
            (131, "/v1/user-data", 131),
            (135, "/v1/user-data", 131),
            (194, "/poll", 131),
            (254, "/v1/meta-data", 254),
        ] {
            let now = start + Duration::from_secs(at);
            following.note(&entry(3, path, 200, "nocloud"), Duration::ZERO, now);
            let guest = following.guest(3).expect("followed");
            assert_eq!(guest.boot, start + Duration::from_secs(boot), "{path} after {at} s");
        }
        assert_eq!(following.guest(3).map(|guest| guest.first), Some(start));
    }

    #[test]
    fn user_data_has_the_spelling_of_any_cloud() {
        let cases = [
            ("/latest/user-data", true),
            ("/openstack/latest/user_data", true),
            ("/computeMetadata/v1/instance/attributes/user-data", true),
            ("/hetzner/v1/userdata", true),
            ("/metadata/instance/compute/userData/", true),
            ("/user-data/x", false),
            ("/latest/meta-data", false),
            ("/", false),
        ];
        for (path, is) in cases {
            assert_eq!(is_user_data(path), is, "{path}");
        }
    }
}
