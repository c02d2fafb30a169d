//! Watching one guest: the filter the kernel side goes by, and the ring it reports through.
//!
//! One trace at a time: the filter has one entry. Whoever has the [`Watch`] has it, and with the watch the filter is
//! cleared, however its holder ends. What outlived an agent that was killed is cleared when the next one starts.

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use metadata_common::mac::Mac;
use metadata_common::maps::{EVENT_BYTES, PortKey, name};
use metadata_common::trace::{Event, PASSING_TOO, Scratch, Trace};
use std::fmt;
use std::sync::Arc;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::{SteerError, Steering, tables};
use metadata_base::port::PortName;

/// Words of what one CPU keeps.
const WORDS: usize = size_of::<Scratch>() / 8;
/// Events the ring can hold, and more.
const EVENTS_MOST: usize = EVENT_BYTES as usize / size_of::<Event>() + 1;

/// Why nobody is watched.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Somebody watches already.
    #[error("another trace is at work, and there is one at a time; end it first")]
    Busy,
    /// The kernel refuses.
    #[error(transparent)]
    Steer(#[from] SteerError),
}

/// The maps of the kernel side's reports.
struct Maps {
    filter: Array<MapData, [u32; 5]>,
    passing: Array<MapData, u32>,
    events: RingBuf<MapData>,
    scratch: PerCpuArray<MapData, [u64; WORDS]>,
}

/// The maps, while nobody watches.
pub(super) struct Traces(Arc<Mutex<Maps>>);

impl Traces {
    /// Takes the maps out of a loaded object, and clears the filter.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, SteerError> {
        let mut maps = Maps {
            filter: tables::take(ebpf, name::TRACE)?,
            passing: tables::take(ebpf, name::TRACE_PASSING)?,
            events: tables::take(ebpf, name::EVENTS)?,
            scratch: tables::take(ebpf, name::TRACED)?,
        };
        maps.set(Trace::default())?;
        Ok(Self(Arc::new(Mutex::new(maps))))
    }
}

impl Maps {
    fn set(&mut self, trace: Trace) -> Result<(), SteerError> {
        let passing = u32::from(trace.flags & PASSING_TOO != 0);
        self.passing
            .set(0, passing, 0)
            .map_err(|source| SteerError::map(name::TRACE_PASSING, "set the filter", source))?;
        self.filter
            .set(0, trace.to_words(), 0)
            .map_err(|source| SteerError::map(name::TRACE, "set the filter", source))
    }

    /// Events without room since the map was made.
    fn lost(&self) -> Result<u64, SteerError> {
        let all = self.scratch.get(&0, 0).map_err(|source| SteerError::map(name::TRACED, "read", source))?;
        Ok(all.iter().fold(0, |sum, [lost, ..]| sum.wrapping_add(*lost)))
    }

    fn next(&mut self) -> Option<Event> {
        // An event of another length would be of another object; there is none.
        Event::from_bytes(&self.events.next()?)
    }
}

/// One guest under watch, until this is dropped.
pub struct Watch {
    maps: OwnedMutexGuard<Maps>,
    lost: u64,
}

impl Watch {
    fn begin(mut maps: OwnedMutexGuard<Maps>, trace: Trace) -> Result<Self, SteerError> {
        // What an earlier watch left.
        for _ in 0..EVENTS_MOST {
            if maps.next().is_none() {
                break;
            }
        }
        let lost = maps.lost()?;
        maps.set(trace)?;
        Ok(Self { maps, lost })
    }

    /// The next event, if there is one. The ring holds some 800: look every few hundredths of a second.
    pub fn next_event(&mut self) -> Option<Event> {
        self.maps.next()
    }

    /// How many events found no room since last asked.
    ///
    /// # Errors
    /// When the kernel refuses to read the table.
    pub fn newly_lost(&mut self) -> Result<u64, SteerError> {
        let lost = self.maps.lost()?;
        Ok(lost.wrapping_sub(std::mem::replace(&mut self.lost, lost)))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.maps.set(Trace::default()) {
            tracing::warn!(%error, "the trace goes on, unread");
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Steering {
    /// Watches a port, a MAC, or a MAC on a port: frames for the service, with `passing` all others too. Of a port
    /// alone the answers from user space are not seen.
    ///
    /// # Errors
    /// [`TraceError::Busy`] while somebody watches; the port is not attached; the kernel refuses.
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

    /// What attached ports are called in events.
    pub fn port_keys(&self) -> impl Iterator<Item = (PortKey, &PortName)> {
        self.ports.iter().map(|(name, attached)| (attached.key, name))
    }
}
