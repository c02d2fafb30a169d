//! Traces one guest: sets the filter of the eBPF programs and reads the ring of their reports.
//!
//! Only one trace runs at a time, because the filter has one entry. The holder of the [`Watch`] owns it. Dropping the
//! watch clears the filter, however its holder ends. The next start clears a filter that a killed agent left behind.

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use metadata_common::mac::Mac;
use metadata_common::maps::{EVENT_BYTES, PortKey, name};
use metadata_common::trace::{Event, PASSING_TOO, Scratch, Trace};
use std::fmt;
use std::sync::Arc;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::ordinary::Ordinary;
use super::{SteerError, Steering, tables};
use metadata_base::port::PortName;

/// Size of a CPU's [`Scratch`] in 64-bit words.
const WORDS: usize = size_of::<Scratch>() / 8;
/// Upper bound on the number of events in the ring.
const EVENTS_MOST: usize = EVENT_BYTES as usize / size_of::<Event>() + 1;

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
struct Maps {
    filter: Array<MapData, [u32; 5]>,
    ordinary: Ordinary,
    events: RingBuf<MapData>,
    scratch: PerCpuArray<MapData, [u64; WORDS]>,
}

/// The maps, while no trace runs.
pub(super) struct Traces(Arc<Mutex<Maps>>);

impl Traces {
    /// Takes the maps out of a loaded object, and clears the filter.
    pub(super) fn take(ebpf: &mut Ebpf, ordinary: Ordinary) -> Result<Self, SteerError> {
        let mut maps = Maps {
            filter: tables::take(ebpf, name::TRACE)?,
            ordinary,
            events: tables::take(ebpf, name::EVENTS)?,
            scratch: tables::take(ebpf, name::TRACED)?,
        };
        maps.set(Trace::default())?;
        Ok(Self(Arc::new(Mutex::new(maps))))
    }
}

impl Maps {
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

    fn next(&mut self) -> Option<Event> {
        // An event of another length would need another object, and there is none.
        Event::from_bytes(&self.events.next()?)
    }
}

/// A trace of one guest, until it is dropped.
pub struct Watch {
    maps: OwnedMutexGuard<Maps>,
    lost: u64,
}

impl Watch {
    fn begin(mut maps: OwnedMutexGuard<Maps>, trace: Trace) -> Result<Self, SteerError> {
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
    pub fn next_event(&mut self) -> Option<Event> {
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

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.maps.set(Trace::default()) {
            tracing::warn!(%error, "cannot clear the filter of the ended trace");
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Steering {
    /// Traces a port, a MAC, or a MAC on a port: frames for the service, with `passing` all others too. A trace of a
    /// port alone does not show answers from user space.
    ///
    /// # Errors
    /// [`TraceError::Busy`] if a trace is running; if the port is not attached or the kernel refuses.
    pub fn watch(
        &self,
        port: Option<&PortName>,
        mac: Option<Mac>,
        passing: bool,
    ) -> Result<Watch, TraceError> {
        let key = match port {
            Some(port) => {
                let attached = self.ports.get(port);
                Some(attached.ok_or_else(|| SteerError::NotAttached { port: port.clone() })?.key)
            }
            None => None,
        };
        let maps = Arc::clone(&self.traces.0).try_lock_owned().map_err(|_| TraceError::Busy)?;
        let flags = if passing { PASSING_TOO } else { 0 };
        Ok(Watch::begin(maps, Trace::of(key, mac.map(|mac| mac.0), flags))?)
    }

    /// Names of attached ports in events.
    pub fn port_keys(&self) -> impl Iterator<Item = (PortKey, &PortName)> {
        self.ports.iter().map(|(name, attached)| (attached.key, name))
    }
}
