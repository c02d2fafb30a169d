//! Ports in other namespaces than the agent's: a small program in each namespace, and one shared instance of `port`
//! and of `port_tcx` behind them all.
//!
//! ```text
//!  tap in a pod ── port_stub (the namespace's number in front of the frame) ─┐
//!  tap in a pod ── port_stub ────────────────────────────────────────────────┼─ PORT_PROGRAMS ── port
//!
//!  tap in a pod ── port_tcx_stub (the number in the control block) ──────────── PORT_CLASSIFIERS ── port_tcx
//! ```
//!
//! A classifier's stub passes ordinary frames itself, because a call of the second program costs more than the check.
//! The check needs maps of `port_tcx`, which the stub shares.
//!
//! All maps are pinned with the others, and a stub finds the shared program only through its map. An agent that
//! inherits the maps therefore replaces the program of all namespaces by changing one entry.
//!
//! On Linux 6.18 such a map (one entry, empty) leaks until reboot if its last descriptor or pin goes at the very
//! moment at which a process lists maps by opening each, as `bpftool map` does.

use aya::EbpfLoader;
use aya::maps::{Map, MapData, ProgramArray};
use aya::programs::{ProgramError, ProgramFd, SchedClassifier, Xdp};
use metadata_common::maps::{name, program};

use super::SteerError;
use super::loading::{NUMBERS, Private, keep_classifier, keep_program};
use super::ordinary::OrdinaryTable;

/// Built from `metadata-ebpf` by `cargo xtask build-ebpf`.
pub(super) static OBJECT: &[u8] =
    aya::include_bytes_aligned!("../../../metadata-ebpf/prebuilt/port-stub.bpf.o");

/// The loader of the stubs, and the shared programs.
pub(super) struct Stubs {
    loader: EbpfLoader<'static>,
    ordinary: OrdinaryTable,
    program: SharedProgram<Xdp>,
    classifier: SharedProgram<SchedClassifier>,
}

/// The shared program behind all stubs of one kind.
struct SharedProgram<P> {
    map: &'static str,
    entry: ProgramArray<MapData>,
    /// Loaded for the first namespace that needs it.
    shared: Option<P>,
    /// Stubs call the program in `shared`.
    is_offered: bool,
}

impl<P> SharedProgram<P> {
    fn open(map: &'static str, pins: &Private) -> Result<Self, SteerError> {
        let failed = |source| SteerError::load(format!("map {map}"), source);
        let data = MapData::from_pin(pins.path(map)).map_err(failed)?;
        let entry = Map::ProgramArray(data).try_into().map_err(failed)?;
        Ok(Self { map, entry, shared: None, is_offered: false })
    }

    fn share(&mut self, program: P) {
        self.shared = Some(program);
        self.is_offered = false;
    }

    fn offer(&mut self, fd: impl Fn(&P) -> Result<&ProgramFd, ProgramError>) -> Result<(), SteerError> {
        let Some(shared) = self.shared.as_ref().filter(|_| !self.is_offered) else { return Ok(()) };
        let part = || format!("map {}", self.map);
        let descriptor = fd(shared).map_err(|error| SteerError::load(part(), error))?;
        self.entry.set(0, descriptor, 0).map_err(|error| SteerError::load(part(), error))?;
        self.is_offered = true;
        Ok(())
    }
}

impl Stubs {
    /// Makes the maps between stubs and shared programs unless they exist. It loads no program yet.
    pub(super) fn prepare(pins: &Private, ordinary: OrdinaryTable) -> Result<Self, SteerError> {
        let mut loader = EbpfLoader::new();
        for map in name::OF_STUBS {
            loader.map_pin_path(map, pins.path(map));
        }
        ordinary.prepare(&mut loader);
        loader.load(OBJECT).map_err(|source| SteerError::load("stub", source))?;
        let program = SharedProgram::open(name::PORT_PROGRAMS, pins)?;
        let classifier = SharedProgram::open(name::PORT_CLASSIFIERS, pins)?;
        Ok(Self { loader, ordinary, program, classifier })
    }

    /// A stub for the namespace with this number.
    pub(super) fn stub(&mut self, number: usize, pins: &Private) -> Result<Xdp, SteerError> {
        keep_program(&mut self.load(number)?, program::PORT_STUB, pins)
    }

    /// Like [`Stubs::stub`], for classifiers.
    pub(super) fn classifier(
        &mut self,
        number: usize,
        pins: &Private,
    ) -> Result<SchedClassifier, SteerError> {
        keep_classifier(&mut self.load(number)?, program::PORT_TCX_STUB, pins)
    }

    fn load(&mut self, number: usize) -> Result<aya::Ebpf, SteerError> {
        self.ordinary.prepare(&mut self.loader);
        self.loader
            .override_global(name::NETNS, &NUMBERS[number], true)
            .load(OBJECT)
            .map_err(|source| SteerError::load("stub", source))
    }

    /// The program behind all stubs, if it is loaded.
    pub(super) fn has_shared(&self) -> bool {
        self.program.shared.is_some()
    }

    /// Like [`Stubs::has_shared`], for classifiers.
    pub(super) fn has_shared_classifier(&self) -> bool {
        self.classifier.shared.is_some()
    }

    /// Keeps the future program behind all stubs.
    pub(super) fn share(&mut self, program: Xdp) {
        self.program.share(program);
    }

    /// Like [`Stubs::share`], for classifiers.
    pub(super) fn share_classifier(&mut self, classifier: SchedClassifier) {
        self.classifier.share(classifier);
    }

    /// Sends the frames of all stubs to our programs from now on, instead of another agent's.
    pub(super) fn offer(&mut self) -> Result<(), SteerError> {
        self.program.offer(|program| program.fd())?;
        self.classifier.offer(|classifier| classifier.fd())
    }
}
