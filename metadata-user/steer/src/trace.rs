//! What the eBPF programs report: traces of one guest, and their log.
//!
//! [`ProgramReports`] owns the filter of traces, the ring of traced frames and the ring of the log. A [`TraceSession`] sets
//! the filter and reads the ring.
//!
//! Only one trace runs at a time, because the filter has one entry. The holder of the [`TraceSession`] owns it.
//! Dropping it clears the filter, however its holder ends. The next start clears a filter that a killed agent
//! left behind.

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};
use metadata_common::mac::Mac;
use metadata_common::maps::{EVENT_BYTES, PortKey, name};
use metadata_common::trace::{PASSING_TOO, Scratch, Trace, TraceEvent};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::maps::OrdinaryTable;
use super::{SteerError, maps};

/// Size of a CPU's [`Scratch`] in 64-bit words.
const WORDS: usize = size_of::<Scratch>() / 8;
/// Upper bound on the number of events in the ring.
const EVENTS_MOST: usize = EVENT_BYTES as usize / size_of::<TraceEvent>() + 1;

/// Why a trace cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Another trace is running.
    #[error("another trace is running, and only one can run at a time; end it first")]
    Busy,
    /// The kernel refuses the filter.
    #[error(transparent)]
    Steer(#[from] SteerError),
}

/// The maps of the eBPF programs' reports.
struct TraceMaps {
    filter: Array<MapData, [u32; 5]>,
    ordinary: OrdinaryTable,
    events: RingBuf<MapData>,
    scratch: PerCpuArray<MapData, [u64; WORDS]>,
}

/// What the eBPF programs report.
pub struct ProgramReports {
    logs: Logs,
    traces: Traces,
}

impl ProgramReports {
    /// Takes the maps out of a loaded object.
    pub(super) fn take(ebpf: &mut Ebpf, ordinary: OrdinaryTable) -> Result<Self, SteerError> {
        let logs = Logs::take(ebpf)?;
        ordinary.take(ebpf)?;
        Ok(Self { logs, traces: Traces::take(ebpf, ordinary)? })
    }

    /// Starts a task that turns log records of the eBPF programs into tracing events. It ends when this value is
    /// dropped.
    ///
    /// # Panics
    /// Outside a tokio runtime, or in one without a timer.
    pub fn forward_logs(&mut self) {
        self.logs.forward();
    }

    /// The unregistered senders of each port.
    pub(super) fn senders(&self) -> UnknownSenders {
        self.logs.senders.clone()
    }

    /// Begins a trace of a port, a MAC, or a MAC on a port.
    pub(super) fn trace(
        &self,
        port: Option<PortKey>,
        mac: Option<Mac>,
        passing: bool,
    ) -> Result<TraceSession, TraceError> {
        let maps = Arc::clone(&self.traces.0).try_lock_owned().map_err(|_| TraceError::Busy)?;
        let flags = if passing { PASSING_TOO } else { 0 };
        Ok(TraceSession::begin(maps, Trace::of(port, mac.map(|mac| mac.0), flags))?)
    }
}

/// The maps, while no trace runs.
struct Traces(Arc<AsyncMutex<TraceMaps>>);

impl Traces {
    /// Takes the maps out of a loaded object, and clears the filter.
    fn take(ebpf: &mut Ebpf, ordinary: OrdinaryTable) -> Result<Self, SteerError> {
        let mut maps = TraceMaps {
            filter: maps::take(ebpf, name::TRACE)?,
            ordinary,
            events: maps::take(ebpf, name::EVENTS)?,
            scratch: maps::take(ebpf, name::TRACED)?,
        };
        maps.set(Trace::default())?;
        Ok(Self(Arc::new(AsyncMutex::new(maps))))
    }
}

impl TraceMaps {
    fn set(&mut self, trace: Trace) -> Result<(), SteerError> {
        match trace.flags & PASSING_TOO {
            0 => self.ordinary.end_trace()?,
            _ => self.ordinary.begin_trace()?,
        }
        self.filter
            .set(0, trace.to_words(), 0)
            .map_err(|source| SteerError::map(name::TRACE, "set the filter", source))
    }

    /// Events that found no room since the map was made.
    fn lost(&self) -> Result<u64, SteerError> {
        let all = self.scratch.get(&0, 0).map_err(|source| SteerError::map(name::TRACED, "read", source))?;
        Ok(all.iter().fold(0, |sum, [lost, ..]| sum.wrapping_add(*lost)))
    }

    fn next(&mut self) -> Option<TraceEvent> {
        // An event of another length would need another object, and there is none.
        TraceEvent::from_bytes(&self.events.next()?)
    }
}

/// A trace of one guest, until it is dropped.
pub struct TraceSession {
    maps: OwnedMutexGuard<TraceMaps>,
    lost: u64,
}

impl TraceSession {
    fn begin(mut maps: OwnedMutexGuard<TraceMaps>, trace: Trace) -> Result<Self, SteerError> {
        // Events of an earlier trace.
        for _ in 0..EVENTS_MOST {
            if maps.next().is_none() {
                break;
            }
        }
        let lost = maps.lost()?;
        maps.set(trace)?;
        Ok(Self { maps, lost })
    }

    /// The next event, if there is one. The ring holds about 800: poll every few hundredths of a second.
    pub fn next_event(&mut self) -> Option<TraceEvent> {
        self.maps.next()
    }

    /// The number of events that found no room since the last call.
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn newly_lost(&mut self) -> Result<u64, SteerError> {
        let lost = self.maps.lost()?;
        Ok(lost.wrapping_sub(std::mem::replace(&mut self.lost, lost)))
    }
}

impl Drop for TraceSession {
    fn drop(&mut self) {
        if let Err(error) = self.maps.set(Trace::default()) {
            tracing::warn!(%error, "cannot clear the filter of the ended trace");
        }
    }
}

impl fmt::Debug for TraceSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

// Turns log records of the eBPF programs into tracing events, and keeps which unregistered senders they name.

/// The ring of the eBPF programs' log. All instances share it.
struct Logs {
    /// Until the reader starts.
    waiting: Option<EbpfLogger<LogRelay>>,
    /// Once the reader runs.
    task: Option<JoinHandle<()>>,
    senders: UnknownSenders,
}

impl Logs {
    fn take(ebpf: &mut Ebpf) -> Result<Self, SteerError> {
        let senders = UnknownSenders::default();
        let relay = LogRelay(senders.clone());
        let logger = EbpfLogger::init_with_logger(ebpf, relay)
            .map_err(|source| SteerError::load("object's log", source))?;
        Ok(Self { waiting: Some(logger), task: None, senders })
    }

    /// Starts the reading task on the current tokio runtime, once.
    fn forward(&mut self) {
        if let Some(logger) = self.waiting.take() {
            self.task = Some(tokio::spawn(read(logger)));
        }
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// How often to read the ring. The programs limit their log rate, so it holds far more than they write in this time.
/// A record that does not fit is lost; programs never wait.
const EVERY: Duration = Duration::from_millis(250);

async fn read(mut logger: EbpfLogger<LogRelay>) {
    let mut turn = interval(EVERY);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        logger.flush();
    }
}

/// Most ports of which an unregistered sender is kept.
const MAX_UNKNOWN: usize = 1_024;
/// How long an unregistered sender of a port is kept after it was last reported. Until then no other replaces it, so
/// that a guest that invents MACs causes one report in this time.
const UNKNOWN_FOR: Duration = Duration::from_secs(600);

/// A MAC from which frames to the metadata addresses arrive on a port, although it is not registered there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownSender {
    /// The MAC.
    pub mac: Mac,
    /// Time since the programs last reported it.
    pub ago: Duration,
}

impl UnknownSender {
    fn of((mac, since): (Mac, Instant), now: Instant) -> Option<Self> {
        let ago = now.saturating_duration_since(since);
        (ago < UNKNOWN_FOR).then_some(Self { mac, ago })
    }
}

/// An unregistered sender of each port: frames to the metadata addresses come from it and are dropped.
///
/// The programs report the first, second, fourth, eighth… such frame of a CPU, whatever its port. On a node where many
/// were dropped before, a sender may therefore be noticed late.
#[derive(Clone, Debug, Default)]
pub(super) struct UnknownSenders(Arc<Mutex<HashMap<PortKey, (Mac, Instant)>>>);

impl UnknownSenders {
    fn note(&self, key: PortKey, mac: Mac, now: Instant) {
        let mut senders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        senders.retain(|_, (_, since)| now.saturating_duration_since(*since) < UNKNOWN_FOR);
        let has_room = senders.len() < MAX_UNKNOWN;
        match senders.entry(key) {
            Entry::Occupied(mut known) if known.get().0 == mac => known.get_mut().1 = now,
            Entry::Vacant(place) if has_room => _ = place.insert((mac, now)),
            Entry::Occupied(_) | Entry::Vacant(_) => {}
        }
    }

    /// The unregistered senders that were reported lately.
    pub(super) fn all(&self, now: Instant) -> HashMap<PortKey, UnknownSender> {
        let senders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        senders.iter().filter_map(|(key, noted)| Some((*key, UnknownSender::of(*noted, now)?))).collect()
    }

    /// An unregistered sender on a port, if one was reported lately.
    pub(super) fn on(&self, key: PortKey, now: Instant) -> Option<UnknownSender> {
        let senders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        UnknownSender::of(*senders.get(&key)?, now)
    }

    /// Forgets a port: another one may get its key.
    pub(super) fn forget(&self, key: PortKey) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }
}

/// Forwards the text of log records, without the fields of the crate `log`, whose file and line are the programs'.
/// Keeps the unregistered senders: the agent says which port and record are concerned.
struct LogRelay(UnknownSenders);

impl Log for LogRelay {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let text = record.args().to_string();
        if let Some((key, mac)) = unknown_sender(&text) {
            if !mac.is_group() {
                self.0.note(key, mac, Instant::now());
            }
            return tracing::debug!("{text}");
        }
        match record.level() {
            Level::Error => tracing::error!("{text}"),
            Level::Warn => tracing::warn!("{text}"),
            Level::Info => tracing::info!("{text}"),
            Level::Debug => tracing::debug!("{text}"),
            Level::Trace => tracing::trace!("{text}"),
        }
    }

    fn flush(&self) {}
}

/// Parses the message of `report_unknown` in the programs.
fn unknown_sender(message: &str) -> Option<(PortKey, Mac)> {
    let (ifindex, rest) = message.strip_prefix("interface ")?.split_once(" of namespace ")?;
    let (netns, rest) = rest.split_once(": ")?;
    let (mac, _) = rest.split_once(" is not registered there")?;
    let key = PortKey { netns: netns.parse().ok()?, ifindex: ifindex.parse().ok()? };
    Some((key, mac.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;
    use metadata_common::maps::PortKey;
    use std::time::{Duration, Instant};

    use super::{MAX_UNKNOWN, UNKNOWN_FOR, UnknownSender, UnknownSenders, unknown_sender};

    #[test]
    fn a_message_about_an_unregistered_sender_is_understood_and_no_other() {
        let text = "interface 3 of namespace 7: 56:a1:a7:6f:a2:ac is not registered there: 4 frames dropped";
        let key = PortKey { netns: 7, ifindex: 3 };
        assert_eq!(unknown_sender(text), Some((key, Mac([0x56, 0xa1, 0xa7, 0x6f, 0xa2, 0xac]))));
        for other in
            ["", "interface 3 of namespace 7", &text.replace("56:", "5g:"), &text.replace(" 3 ", " x ")]
        {
            assert_eq!(unknown_sender(other), None, "{other}");
        }
    }

    #[test]
    fn the_first_unregistered_sender_of_a_port_is_kept_for_a_while_and_their_number_is_limited() {
        let (senders, start) = (UnknownSenders::default(), Instant::now());
        let key = |ifindex| PortKey { netns: 0, ifindex };
        let mac = |last| Mac([2, 0, 0, 0, 0, last]);
        let on = |key, now| senders.on(key, now).map(|UnknownSender { mac, ago }| (mac, ago));
        let zero = Duration::ZERO;
        senders.note(key(1), mac(1), start);
        senders.note(key(1), mac(2), start);
        assert_eq!(on(key(1), start), Some((mac(1), zero)));
        assert_eq!(on(key(2), start), None);
        let later = Duration::from_secs(40);
        assert_eq!(senders.all(start + later), [(key(1), UnknownSender { mac: mac(1), ago: later })].into());
        assert_eq!(on(key(1), start + UNKNOWN_FOR), None);
        senders.note(key(1), mac(2), start + UNKNOWN_FOR);
        assert_eq!(on(key(1), start + UNKNOWN_FOR), Some((mac(2), zero)));
        senders.note(key(1), mac(2), start + UNKNOWN_FOR * 3 / 2);
        assert_eq!(
            on(key(1), start + UNKNOWN_FOR * 2),
            Some((mac(2), UNKNOWN_FOR / 2)),
            "it is reported again"
        );
        assert!(senders.all(start + UNKNOWN_FOR * 3).is_empty());
        senders.forget(key(1));
        (0..u32::try_from(2 * MAX_UNKNOWN).expect("small")).for_each(|n| senders.note(key(n), mac(3), start));
        assert_eq!(senders.0.lock().expect("no panic").len(), MAX_UNKNOWN);
    }
}
