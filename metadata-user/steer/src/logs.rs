//! Turns log records of the eBPF programs into tracing events, and keeps which unregistered senders they name.

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};
use metadata_common::mac::Mac;
use metadata_common::maps::PortKey;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::SteerError;

/// The ring of the eBPF programs' log. All instances share it.
pub(super) struct Logs {
    /// Until the reader starts.
    waiting: Option<EbpfLogger<Relay>>,
    /// Once the reader runs.
    task: Option<JoinHandle<()>>,
    senders: UnknownSenders,
}

impl Logs {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, SteerError> {
        let senders = UnknownSenders::default();
        let relay = Relay(senders.clone());
        let logger = EbpfLogger::init_with_logger(ebpf, relay)
            .map_err(|source| SteerError::load("object's log", source))?;
        Ok(Self { waiting: Some(logger), task: None, senders })
    }

    /// Starts the reading task on the current tokio runtime, once.
    pub(super) fn forward(&mut self) {
        if let Some(logger) = self.waiting.take() {
            self.task = Some(tokio::spawn(read(logger)));
        }
    }

    /// The unregistered senders of each port.
    pub(super) fn senders(&self) -> &UnknownSenders {
        &self.senders
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

async fn read(mut logger: EbpfLogger<Relay>) {
    let mut turn = interval(EVERY);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        logger.flush();
    }
}

/// Most ports of which an unregistered sender is kept.
const MAX_UNKNOWN: usize = 1_024;
/// How long an unregistered sender of a port is kept after it was last reported. Until then no other replaces it, so that
/// a guest that invents MACs causes one report in this time.
const UNKNOWN_FOR: Duration = Duration::from_secs(600);

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
    pub(super) fn all(&self, now: Instant) -> HashMap<PortKey, Mac> {
        let senders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lately =
            senders.iter().filter(|(_, (_, since))| now.saturating_duration_since(*since) < UNKNOWN_FOR);
        lately.map(|(key, (mac, _))| (*key, *mac)).collect()
    }

    /// An unregistered sender on a port, if one was reported lately.
    pub(super) fn on(&self, key: PortKey, now: Instant) -> Option<Mac> {
        let senders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mac, since) = senders.get(&key)?;
        (now.saturating_duration_since(*since) < UNKNOWN_FOR).then_some(*mac)
    }

    /// Forgets a port: another one may get its key.
    pub(super) fn forget(&self, key: PortKey) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }
}

/// Forwards the text of log records, without the fields of the crate `log`, whose file and line are the programs'. Keeps
/// the unregistered senders: the agent says which port and record are concerned.
struct Relay(UnknownSenders);

impl Log for Relay {
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
    use super::{MAX_UNKNOWN, UNKNOWN_FOR, UnknownSenders, unknown_sender};
    use metadata_common::mac::Mac;
    use metadata_common::maps::PortKey;
    use std::time::Instant;

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
        senders.note(key(1), mac(1), start);
        senders.note(key(1), mac(2), start);
        assert_eq!(senders.on(key(1), start), Some(mac(1)));
        assert_eq!(senders.on(key(2), start), None);
        assert_eq!(senders.all(start), [(key(1), mac(1))].into());
        assert_eq!(senders.on(key(1), start + UNKNOWN_FOR), None);
        senders.note(key(1), mac(2), start + UNKNOWN_FOR);
        assert_eq!(senders.on(key(1), start + UNKNOWN_FOR), Some(mac(2)));
        senders.note(key(1), mac(2), start + UNKNOWN_FOR * 3 / 2);
        assert_eq!(senders.on(key(1), start + UNKNOWN_FOR * 2), Some(mac(2)), "it is reported again");
        assert!(senders.all(start + UNKNOWN_FOR * 3).is_empty());
        senders.forget(key(1));
        (0..u32::try_from(2 * MAX_UNKNOWN).expect("small")).for_each(|n| senders.note(key(n), mac(3), start));
        assert_eq!(senders.0.lock().expect("no panic").len(), MAX_UNKNOWN);
    }
}
