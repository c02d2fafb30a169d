//! The table by which classifiers pass ordinary traffic at once: the last bytes of addresses that are not served.
//!
//! The programs read the table without a look-up, because it is a data section of their objects. All objects of all
//! agents share it. A zero means that the program looks closer, so an empty table costs time and no safety.

use std::sync::{Arc, Mutex, PoisonError};

use aya::maps::{Array, Map, MapData, MapError};
use aya::{Ebpf, EbpfLoader};
use metadata_common::maps::name;

use super::SteerError;
use super::pins::PinDirectory;

/// One byte for each last byte of an address: 1 if no served address ends with it.
pub(super) type LastBytes = [u8; 256];

/// Nothing is ordinary.
static NOTHING: LastBytes = [0; 256];

/// What the table holds, or will hold once it is loaded. Clones share it.
#[derive(Clone)]
pub(super) struct OrdinaryTable(Arc<Mutex<State>>);

struct State {
    map: Option<Array<MapData, LastBytes>>,
    /// The table while no trace includes passing frames.
    untraced: &'static LastBytes,
    is_traced: bool,
}

impl State {
    fn wanted(&self) -> &'static LastBytes {
        if self.is_traced { &NOTHING } else { self.untraced }
    }

    fn write(&mut self) -> Result<(), SteerError> {
        let wanted = self.wanted();
        let Some(map) = &mut self.map else { return Ok(()) };
        map.set(0, *wanted, 0).map_err(|source| failed("change", source))
    }
}

fn failed(action: &'static str, source: MapError) -> SteerError {
    SteerError::map(name::ORDINARY, action, source)
}

/// Keeps a table for as long as the process runs, because a loader holds references. An agent keeps two or three.
fn keep(bytes: LastBytes) -> &'static LastBytes {
    Box::leak(Box::new(bytes))
}

impl OrdinaryTable {
    /// Begins with the previous agent's table, or with nothing.
    pub(super) fn inherit(adopted: Option<&PinDirectory>) -> Result<Self, SteerError> {
        let untraced = match adopted {
            None => &NOTHING,
            Some(pins) => {
                let map =
                    MapData::from_pin(pins.map(name::ORDINARY).path()).map_err(|e| failed("open", e))?;
                let map = Array::try_from(Map::Array(map)).map_err(|e| failed("open", e))?;
                keep(map.get(&0, 0).map_err(|e| failed("read", e))?)
            }
        };
        Ok(Self(Arc::new(Mutex::new(State { map: None, untraced, is_traced: false }))))
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the next load write the present table: a load overwrites data sections, also shared ones.
    pub(super) fn prepare(&self, loader: &mut EbpfLoader<'static>) {
        loader.override_global(name::ORDINARY_SYMBOL, self.with(|state| state.wanted()), true);
    }

    /// Takes the map out of a loaded object.
    pub(super) fn take(&self, ebpf: &mut Ebpf) -> Result<(), SteerError> {
        let map = ebpf
            .take_map(name::ORDINARY)
            .ok_or_else(|| SteerError::map(name::ORDINARY, "find", "the object has no such map"))?;
        let map = map.try_into().map_err(|source| failed("take", source))?;
        self.with(|state| state.map = Some(map));
        Ok(())
    }

    /// Changes the table to all bytes but these.
    pub(super) fn all_but(&self, served: impl Iterator<Item = u8>) -> Result<(), SteerError> {
        let mut bytes = [1; 256];
        served.for_each(|last| bytes[usize::from(last)] = 0);
        self.with(|state| {
            state.untraced = keep(bytes);
            state.write()
        })
    }

    /// Begins a trace that includes passing frames: classifiers look at every frame.
    pub(super) fn begin_trace(&self) -> Result<(), SteerError> {
        self.with(|state| {
            state.is_traced = true;
            state.write()
        })
    }

    /// Ends a trace. A table that another agent has written since stays.
    pub(super) fn end_trace(&self) -> Result<(), SteerError> {
        self.with(|state| {
            state.is_traced = false;
            let Some(map) = &state.map else { return Ok(()) };
            let is_ours = map.get(&0, 0).map_err(|source| failed("read", source))? == NOTHING;
            if is_ours { state.write() } else { Ok(()) }
        })
    }
}
