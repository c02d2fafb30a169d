//! Ports in other namespaces than the agent's: a small program in each, and one instance of `port` behind them all.
//!
//! ```text
//!  tap in a pod ── port_stub (the namespace's number in front of the frame) ─┐
//!  tap in a pod ── port_stub ────────────────────────────────────────────────┼─ PORT_PROGRAMS ── port
//! ```
//!
//! `PORT_PROGRAMS` is pinned with the other maps, and stubs find `port` in it by nothing else: an agent that goes on with
//! what one before left replaces the program of all namespaces by one change of an entry.
//!
//! Linux 6.18 keeps such a map (one entry, empty) until it boots again when somebody lists maps by opening each, as
//! `bpftool map` does, in the very moment its last descriptor or pin goes.

use aya::EbpfLoader;
use aya::maps::{MapData, ProgramArray};
use aya::programs::Xdp;
use metadata_common::maps::{name, program};

use super::SteerError;
use super::object::{NUMBERS, Private, keep_program};

/// Built from `metadata-ebpf` by `cargo xtask build-ebpf`.
pub(super) static OBJECT: &[u8] =
    aya::include_bytes_aligned!("../../../metadata-ebpf/prebuilt/port-stub.bpf.o");

/// The stubs' loader, and what is behind them.
pub(super) struct Stubs {
    loader: EbpfLoader<'static>,
    programs: ProgramArray<MapData>,
    /// Loaded when the first namespace wants it.
    shared: Option<Xdp>,
    /// Stubs go on in `shared`.
    offered: bool,
}

impl Stubs {
    /// Makes the map that is between the two, unless it is there; no program is loaded yet.
    pub(super) fn prepare(pins: &Private) -> Result<Self, SteerError> {
        let mut loader = EbpfLoader::new();
        let path = pins.path(name::PORT_PROGRAMS);
        loader.map_pin_path(name::PORT_PROGRAMS, path.clone());
        let failed = |source| SteerError::load("map PORT_PROGRAMS", source);
        loader.load(OBJECT).map_err(|source| SteerError::load("stub", source))?;
        let map = MapData::from_pin(&path).map_err(failed)?;
        let programs = aya::maps::Map::ProgramArray(map).try_into().map_err(failed)?;
        Ok(Self { loader, programs, shared: None, offered: false })
    }

    /// A stub for the namespace of a number.
    pub(super) fn stub(&mut self, number: usize, pins: &Private) -> Result<Xdp, SteerError> {
        let mut ebpf = self
            .loader
            .override_global(name::NETNS, &NUMBERS[number], true)
            .load(OBJECT)
            .map_err(|source| SteerError::load("stub", source))?;
        keep_program(&mut ebpf, program::PORT_STUB, pins)
    }

    /// The program behind all stubs, if it is loaded.
    pub(super) fn has_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Keeps the program that is to be behind all stubs.
    pub(super) fn share(&mut self, program: Xdp) {
        self.shared = Some(program);
        self.offered = false;
    }

    /// From now on frames of all stubs go to our program, in the place of another agent's.
    pub(super) fn offer(&mut self) -> Result<(), SteerError> {
        let Some(shared) = self.shared.as_ref().filter(|_| !self.offered) else { return Ok(()) };
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| SteerError::load("map PORT_PROGRAMS", source);
        let descriptor = shared.fd().map_err(|error| failed(error.into()))?;
        self.programs.set(0, descriptor, 0).map_err(|error| failed(error.into()))?;
        self.offered = true;
        Ok(())
    }
}
