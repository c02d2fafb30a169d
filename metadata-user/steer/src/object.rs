//! The eBPF objects: loaded once per hub, and its `port` program for the agent's own namespace and for all others.
//!
//! A program can read the interface of a frame but not its namespace, and interface indexes repeat across namespaces.
//! The agent's own namespace therefore has an instance that reads its number from the constant `NETNS`. Every other
//! namespace has a stub that sets its number and calls one instance behind all stubs. All instances share one set of
//! maps.
//!
//! [`Object`] owns the loader, the programs of each namespace with ports, and the numbers of namespaces. Its invariant:
//! two namespaces never have one number, and a number whose programs may still be attached is not used again.
//!
//! The loader shares maps by pinning only, so it gets a private bpffs. That is mounted nowhere, reached through its
//! descriptor, and goes with the process even if the process is killed. Maps that outlive the process are pinned a
//! second time (`pins`).
//!
//! # Stubs
//!
//! Ports in namespaces other than the agent's have a small program in each namespace, and one shared instance of `port`
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

use aya::maps::{Map, MapData, ProgramArray};
use aya::programs::{ProgramError, ProgramFd, SchedClassifier, Xdp};
use aya::{Ebpf, EbpfLoader};
use aya_obj::programs::XdpAttachType;
use metadata_common::cookie::CookieKey;
use metadata_common::maps::{IN_FRONT, RING_BYTES, name, program};
use metadata_common::siphash::SipKey;
use metadata_links::MAX_NAMESPACES;
use metadata_links::error::LinkError;
use metadata_links::netns::Cookie;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use super::SteerError;
use super::error::errno;
use super::maps::OrdinaryTable;
use super::pins::{PinDirectory, PinsError, inherit_map, layout_of, pin_map};

/// Built from `metadata-ebpf` by `cargo xtask build-ebpf`.
pub(super) static OBJECT: &[u8] =
    aya::include_bytes_aligned!("../../../metadata-ebpf/prebuilt/xdp-imds.bpf.o");

/// Shared maps that outlive the agent: the next one inherits them.
const LASTING: [&str; 18] = [
    name::PORTS,
    name::IDENTITIES,
    name::GUESTS,
    name::GUEST_DEVICES,
    name::HOME_DEVICES,
    name::HUBS,
    name::HUB_DEVICES,
    name::SOCKETS,
    name::SERVED_V4,
    name::SERVED_V6,
    name::ORDINARY,
    name::ALL_SENT,
    name::DRAINING,
    name::AGENT,
    name::COUNTERS,
    name::PORT_PROGRAMS,
    name::PORT_CLASSIFIERS,
    name::RINGS,
];

/// Shared maps that the next agent does not inherit: logs, reports and published documents belong to the agent that loaded
/// the program.
const OWN: [&str; 17] = [
    name::TRACE,
    name::EVENTS,
    name::TRACED,
    name::EDITIONS,
    name::DOCUMENTS,
    name::COMMON_USES,
    name::TOKENS,
    name::BODIES,
    name::LONG_BODIES,
    name::DATE,
    name::ANSWERED,
    name::ANSWER_COUNTS,
    name::ANSWER_RECORDS,
    name::HANDED,
    name::ANSWERING,
    name::REQUEST_PROGRAM,
    // The ring of the eBPF programs' log, by the name in aya-log.
    "AYA_LOGS",
];

/// Maps whose memory is needed only if the kernel answers requests, and their entries otherwise. A ring is at least a page.
const OF_REQUESTS: [(&str, u32); 6] = [
    (name::EDITIONS, 1),
    (name::COMMON_USES, 1),
    (name::TOKENS, 1),
    (name::ANSWERED, 1),
    (name::ANSWER_COUNTS, 1),
    (name::ANSWER_RECORDS, 4_096),
];

/// Maps that the next agent inherits.
fn lasting() -> impl Iterator<Item = &'static str> {
    LASTING.into_iter()
}

/// Maps that the agent pins. No agent inherits `REQUEST_PROGRAM`, but without a pin the kernel would empty it as soon as
/// the agent ends.
pub(super) fn pinned() -> impl Iterator<Item = &'static str> {
    lasting().chain([name::REQUEST_PROGRAM])
}

/// Maps that all instances share: every map of the objects except their constants and the ring that each hub owns.
fn shared() -> impl Iterator<Item = &'static str> {
    LASTING.into_iter().chain(OWN)
}

/// Bytes of the ring in an instance that serves no hub: one page, freed once the program is loaded.
const NO_RING: u32 = 4_096;

/// The number of the instance that has no ports.
const HUB_INSTANCE: usize = 0;

/// Placeholder number: each frame carries the number from its stub.
static BEHIND_STUBS: u32 = IN_FRONT;

/// The loader and the instances it has made.
pub(super) struct Object {
    /// Kept because making a loader parses the kernel's BTF, which takes longer than a load.
    loader: EbpfLoader<'static>,
    pins: Private,
    stubs: Stubs,
    ordinary: OrdinaryTable,
    /// The agent's own namespace.
    home: Cookie,
    /// Another agent still owns the ports: its program stays behind the stubs.
    taking_over: bool,
    instances: BTreeMap<Cookie, Instance>,
    free: Vec<usize>,
    /// Numbers that are not used again.
    retired: usize,
}

/// The programs of one namespace.
struct Instance {
    number: usize,
    /// `port`, or a stub. Loaded for the first port that needs it.
    program: Option<Xdp>,
    /// Loaded for the first port that needs it.
    classifier: Option<SchedClassifier>,
    ports: usize,
    /// The number is not used again after the last port: a program that sends frames with it may still be attached.
    is_retired: bool,
}

impl Object {
    /// Loads the object for the first hub. It uses the inherited maps if `adopted`, and new ones otherwise. If
    /// `taking_over`, the agent that owns the inherited maps still runs. The maps of documents have room if
    /// `answers_requests`.
    pub(super) fn load(
        (key, request_key): (CookieKey, SipKey),
        hub: u32,
        home: Cookie,
        adopted: Option<&PinDirectory>,
        (taking_over, answers_requests): (bool, bool),
    ) -> Result<(Self, Ebpf), SteerError> {
        let pins = Private::create()?;
        if let Some(adopted) = adopted {
            for map in lasting() {
                inherit_map(&adopted.map(map), &pins.path(map))?;
            }
        }
        let mut loader = EbpfLoader::new();
        // Leaked because the loader keeps references: 32 bytes at each start of steering.
        let [key, request_key]: &'static [[u64; 2]; 2] = Box::leak(Box::new([key.0, request_key.0]));
        loader.override_global(name::COOKIE_KEY, key, true);
        loader.override_global(name::REQUEST_KEY, request_key, true);
        loader.override_global(name::ANSWERS_REQUESTS, if answers_requests { &1_u32 } else { &0 }, true);
        for map in shared() {
            loader.map_pin_path(map, pins.path(map));
        }
        for (map, entries) in OF_REQUESTS.iter().filter(|_| !answers_requests) {
            loader.map_max_entries(map, *entries);
        }
        let ordinary = OrdinaryTable::inherit(adopted)?;
        let stubs = Stubs::prepare(&pins, ordinary.clone())?;
        let free = (HUB_INSTANCE + 1..NUMBERS.len()).rev().collect();
        let instances = BTreeMap::new();
        let mut object =
            Self { loader, pins, stubs, ordinary, home, taking_over, instances, free, retired: 0 };
        let hub = object.hub(hub)?;
        Ok((object, hub))
    }

    /// Loads the object again for another hub. It shares every map with the other instances except the ring of its
    /// hub.
    pub(super) fn hub(&mut self, hub: u32) -> Result<Ebpf, SteerError> {
        let number = NUMBERS.get(hub as usize).unwrap_or(&NUMBERS[0]);
        // The object already holds the number of the first hub.
        self.loader.override_global(name::HUB, number, hub > 0);
        self.instantiate(&NUMBERS[HUB_INSTANCE], RING_BYTES)
    }

    fn instantiate(&mut self, number: &'static u32, ring: u32) -> Result<Ebpf, SteerError> {
        self.ordinary.prepare(&mut self.loader);
        self.loader
            .override_global(name::NETNS, number, true)
            .map_max_entries(name::RING, ring)
            .load(OBJECT)
            .map_err(|source| SteerError::load("object", source))
    }

    /// Counts one more port in a namespace and returns the number of the namespace.
    ///
    /// Pair it with [`Object::release`], even when attaching the port fails afterwards.
    pub(super) fn acquire(&mut self, cookie: Cookie) -> Result<u32, SteerError> {
        let number = match self.instances.get(&cookie) {
            Some(instance) => instance.number,
            None => self.free.pop().ok_or(LinkError::TooManyNamespaces)?,
        };
        self.count(cookie, number);
        Ok(NUMBERS[number])
    }

    /// Loads the program behind all stubs unless it is loaded; the verifier takes a tenth of a second. From then on
    /// it receives the frames of inherited stubs. While the previous agent still runs, that starts at the
    /// [takeover](Object::take_over).
    pub(super) fn share(&mut self) -> Result<(), SteerError> {
        if !self.stubs.has_shared() {
            let program = self.port_program(&BEHIND_STUBS)?;
            self.stubs.share(program);
        }
        if self.taking_over { Ok(()) } else { self.stubs.offer() }
    }

    /// Like [`Object::share`], for classifiers.
    pub(super) fn share_classifier(&mut self) -> Result<(), SteerError> {
        if !self.stubs.has_shared_classifier() {
            let classifier = self.port_classifier(&BEHIND_STUBS)?;
            self.stubs.share_classifier(classifier);
        }
        if self.taking_over { Ok(()) } else { self.stubs.offer() }
    }

    /// Puts our programs behind all stubs.
    pub(super) fn take_over(&mut self) -> Result<(), SteerError> {
        self.taking_over = false;
        self.stubs.offer()
    }

    /// Counts one more port in a namespace that the previous agent numbered. False if the number is not available.
    pub(super) fn acquire_as(&mut self, cookie: Cookie, number: u32) -> bool {
        let number = number as usize;
        match self.instances.get(&cookie) {
            Some(instance) if instance.number != number => return false,
            Some(_) => {}
            None => match self.free.iter().rposition(|free| *free == number) {
                Some(at) => drop(self.free.swap_remove(at)),
                None => return false,
            },
        }
        self.count(cookie, number);
        true
    }

    fn count(&mut self, cookie: Cookie, number: usize) {
        let new = || Instance { number, program: None, classifier: None, ports: 0, is_retired: false };
        self.instances.entry(cookie).or_insert_with(new).ports += 1;
    }

    /// The XDP program of a namespace with ports: `port`, or a stub in front of `port`.
    pub(super) fn port(&mut self, cookie: Cookie) -> Result<&mut Xdp, SteerError> {
        let Instance { number, program, .. } = self.instance(cookie)?;
        if program.is_none() {
            let number = *number;
            let loaded = if cookie == self.home {
                self.port_program(&NUMBERS[number])?
            } else {
                self.share()?;
                self.stubs.stub(number, &self.pins)?
            };
            self.instance(cookie)?.program = Some(loaded);
        }
        let loaded = self.instance(cookie)?.program.as_mut();
        loaded.ok_or_else(|| SteerError::load(program::PORT, "it was not kept"))
    }

    /// The classifier of a namespace with ports: `port_tcx`, or a stub in front of `port_tcx`.
    pub(super) fn classifier(&mut self, cookie: Cookie) -> Result<&mut SchedClassifier, SteerError> {
        let Instance { number, classifier, .. } = self.instance(cookie)?;
        if classifier.is_none() {
            let number = *number;
            let loaded = if cookie == self.home {
                self.port_classifier(&NUMBERS[number])?
            } else {
                self.share_classifier()?;
                self.stubs.classifier(number, &self.pins)?
            };
            self.instance(cookie)?.classifier = Some(loaded);
        }
        let loaded = self.instance(cookie)?.classifier.as_mut();
        loaded.ok_or_else(|| SteerError::load(program::PORT_TCX, "it was not kept"))
    }

    /// Unloads the XDP stub of a namespace until a port needs it again. The stub is half of what a namespace costs.
    pub(super) fn unload_stub(&mut self, cookie: Cookie) {
        if cookie != self.home
            && let Some(instance) = self.instances.get_mut(&cookie)
        {
            instance.program = None;
        }
    }

    fn instance(&mut self, cookie: Cookie) -> Result<&mut Instance, SteerError> {
        let absent = || SteerError::load(program::PORT, "the namespace has no ports");
        self.instances.get_mut(&cookie).ok_or_else(absent)
    }

    /// Never gives the number of a namespace to another one: a program there may still be attached, and a later
    /// namespace of that number would get its frames.
    pub(super) fn retire(&mut self, cookie: Cookie) {
        if let Some(instance) = self.instances.get_mut(&cookie)
            && !std::mem::replace(&mut instance.is_retired, true)
        {
            self.retired += 1;
        }
    }

    /// Like [`Object::retire`], by the number, whether a namespace has it or not.
    pub(super) fn retire_number(&mut self, number: u32) {
        let number = number as usize;
        if let Some(instance) = self.instances.values_mut().find(|instance| instance.number == number) {
            self.retired += usize::from(!std::mem::replace(&mut instance.is_retired, true));
        } else if let Some(at) = self.free.iter().rposition(|free| *free == number) {
            self.free.swap_remove(at);
            self.retired += 1;
        }
    }

    /// How many numbers are retired.
    pub(super) fn retired(&self) -> usize {
        self.retired
    }

    /// Counts one port less; the last port of a namespace releases its instance.
    pub(super) fn release(&mut self, cookie: Cookie) {
        let Some(instance) = self.instances.get_mut(&cookie) else { return };
        instance.ports -= 1;
        if instance.ports > 0 {
            return;
        }
        match self.instances.remove(&cookie) {
            Some(Instance { number, is_retired: false, .. }) => self.free.push(number),
            Some(Instance { number, is_retired: true, .. }) => {
                tracing::warn!(
                    number,
                    "the number of a namespace is not used again, because its detachment is not proven"
                );
            }
            None => {}
        }
    }

    fn port_program(&mut self, number: &'static u32) -> Result<Xdp, SteerError> {
        let mut ebpf = self.instantiate(number, NO_RING)?;
        keep_program(&mut ebpf, program::PORT, &self.pins)
    }

    /// Like [`Object::port_program`], for the classifier.
    fn port_classifier(&mut self, number: &'static u32) -> Result<SchedClassifier, SteerError> {
        let mut ebpf = self.instantiate(number, NO_RING)?;
        keep_classifier(&mut ebpf, program::PORT_TCX, &self.pins)
    }
}

impl Object {
    /// The agent's own namespace.
    pub(super) fn home(&self) -> Cookie {
        self.home
    }

    /// The table that all programs share.
    pub(super) fn ordinary(&self) -> &OrdinaryTable {
        &self.ordinary
    }

    /// Pins a map for the next agent, replacing any pin of that name.
    pub(super) fn pin_map(&self, map: &'static str, pins: &PinDirectory) -> Result<(), PinsError> {
        pin_map(&self.pins.path(map), &pins.map(map))
    }

    /// A path on the private bpffs for a moment.
    pub(super) fn private_path(&self, name: &str) -> PathBuf {
        self.pins.path(name)
    }

    /// Pins the maps for the next agent, replacing those pinned there.
    pub(super) fn pin_maps(&self, pins: &PinDirectory) -> Result<(), SteerError> {
        pinned().try_for_each(|map| Ok(self.pin_map(map, pins)?))
    }

    /// Pins the maps that no agent inherits, in place of the previous agent's. The kernel then frees those, and the
    /// documents that the previous agent published.
    pub(super) fn pin_own_maps(&self, pins: &PinDirectory) -> Result<(), SteerError> {
        Ok(self.pin_map(name::REQUEST_PROGRAM, pins)?)
    }
}

/// The maps that outlive the agent: name, and kind, key bytes, value bytes and entries. The error is a fault of the
/// embedded objects.
pub(super) fn layouts() -> Result<Vec<(&'static str, [u32; 4])>, String> {
    let parse = |object| aya_obj::Object::parse(object).map_err(|error| error.to_string());
    let (object, stub) = (parse(OBJECT)?, parse(STUB_OBJECT)?);
    let layout = |name| {
        let map = object.maps.get(name).or_else(|| stub.maps.get(name));
        let map = map.ok_or_else(|| format!("no object has a map {name}"))?;
        Ok((name, [map.map_type(), map.key_size(), map.value_size(), map.max_entries()]))
    };
    lasting().map(layout).collect()
}

/// Compares the pinned maps with the object's; the error describes the first difference.
pub(super) fn compare(pins: &PinDirectory) -> Result<(), String> {
    for (name, expected) in layouts()? {
        let found = layout_of(&pins.map(name)).map_err(|error| error.to_string())?;
        if found != expected {
            return Err(format!(
                "expected {name} of kind, key bytes, value bytes and entries {expected:?}, found {found:?}"
            ));
        }
    }
    Ok(())
}

/// Built from `metadata-ebpf` by `cargo xtask build-ebpf`.
pub(super) static STUB_OBJECT: &[u8] =
    aya::include_bytes_aligned!("../../../metadata-ebpf/prebuilt/port-stub.bpf.o");

/// The loader of the stubs, and the shared programs.
struct Stubs {
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
    fn prepare(pins: &Private, ordinary: OrdinaryTable) -> Result<Self, SteerError> {
        let mut loader = EbpfLoader::new();
        for map in name::OF_STUBS {
            loader.map_pin_path(map, pins.path(map));
        }
        ordinary.prepare(&mut loader);
        loader.load(STUB_OBJECT).map_err(|source| SteerError::load("stub", source))?;
        let program = SharedProgram::open(name::PORT_PROGRAMS, pins)?;
        let classifier = SharedProgram::open(name::PORT_CLASSIFIERS, pins)?;
        Ok(Self { loader, ordinary, program, classifier })
    }

    /// A stub for the namespace with this number.
    fn stub(&mut self, number: usize, pins: &Private) -> Result<Xdp, SteerError> {
        keep_program(&mut self.load(number)?, program::PORT_STUB, pins)
    }

    /// Like [`Stubs::stub`], for classifiers.
    fn classifier(&mut self, number: usize, pins: &Private) -> Result<SchedClassifier, SteerError> {
        keep_classifier(&mut self.load(number)?, program::PORT_TCX_STUB, pins)
    }

    fn load(&mut self, number: usize) -> Result<Ebpf, SteerError> {
        self.ordinary.prepare(&mut self.loader);
        self.loader
            .override_global(name::NETNS, &NUMBERS[number], true)
            .load(STUB_OBJECT)
            .map_err(|source| SteerError::load("stub", source))
    }

    /// The program behind all stubs, if it is loaded.
    fn has_shared(&self) -> bool {
        self.program.shared.is_some()
    }

    /// Like [`Stubs::has_shared`], for classifiers.
    fn has_shared_classifier(&self) -> bool {
        self.classifier.shared.is_some()
    }

    /// Keeps the future program behind all stubs.
    fn share(&mut self, program: Xdp) {
        self.program.share(program);
    }

    /// Like [`Stubs::share`], for classifiers.
    fn share_classifier(&mut self, classifier: SchedClassifier) {
        self.classifier.share(classifier);
    }

    /// Sends the frames of all stubs to our programs from now on, instead of another agent's.
    fn offer(&mut self) -> Result<(), SteerError> {
        self.program.offer(|program| program.fd())?;
        self.classifier.offer(|classifier| classifier.fd())
    }
}

/// Attempts to load a program, as many as libbpf makes.
const ATTEMPTS: u32 = 5;

/// Every number of a namespace, in static memory because the loader keeps a reference to it.
static NUMBERS: [u32; MAX_NAMESPACES + 1] = {
    let mut numbers = [0; MAX_NAMESPACES + 1];
    let mut n = 0;
    while n < numbers.len() {
        numbers[n] = n as u32;
        n += 1;
    }
    numbers
};

/// Loads a program and drops the loader's copy of the object and its map descriptors. They would multiply the memory
/// of each namespace by a hundred.
fn keep_program(ebpf: &mut Ebpf, name: &'static str, pins: &Private) -> Result<Xdp, SteerError> {
    let loaded = load_program(ebpf, name)?;
    let path = pins.path(name);
    let failed = |source| SteerError::load(format!("program {name}"), source);
    loaded.pin(&path).map_err(|source| SteerError::load("program's pin", source))?;
    let program = Xdp::from_pin(&path, XdpAttachType::Interface).map_err(failed);
    std::fs::remove_file(&path).map_err(|source| SteerError::device("remove the program's pin", source))?;
    program
}

/// Like [`keep_program`], for a classifier.
fn keep_classifier(
    ebpf: &mut Ebpf,
    name: &'static str,
    pins: &Private,
) -> Result<SchedClassifier, SteerError> {
    let loaded = load_classifier(ebpf, name)?;
    let path = pins.path(name);
    let failed = |source| SteerError::load(format!("program {name}"), source);
    loaded.pin(&path).map_err(|source| SteerError::load("classifier's pin", source))?;
    let classifier = SchedClassifier::from_pin(&path).map_err(failed);
    std::fs::remove_file(&path)
        .map_err(|source| SteerError::device("remove the classifier's pin", source))?;
    classifier
}

/// Loads one program into the kernel.
pub(super) fn load_program<'e>(ebpf: &'e mut Ebpf, name: &'static str) -> Result<&'e mut Xdp, SteerError> {
    let part = || format!("program {name}");
    let program =
        ebpf.program_mut(name).ok_or_else(|| SteerError::load(part(), "the object has no such program"))?;
    let program: &mut Xdp = program.try_into().map_err(|source| SteerError::load(part(), source))?;
    uninterrupted(|| program.load()).map_err(|source| SteerError::load(part(), source))?;
    Ok(program)
}

/// Like [`load_program`], for a classifier.
pub(super) fn load_classifier<'e>(
    ebpf: &'e mut Ebpf,
    name: &'static str,
) -> Result<&'e mut SchedClassifier, SteerError> {
    let part = || format!("program {name}");
    let program =
        ebpf.program_mut(name).ok_or_else(|| SteerError::load(part(), "the object has no such program"))?;
    let program: &mut SchedClassifier =
        program.try_into().map_err(|source| SteerError::load(part(), source))?;
    uninterrupted(|| program.load()).map_err(|source| SteerError::load(part(), source))?;
    Ok(program)
}

/// Loads a program, again if a signal for this thread ended the verification (`EAGAIN` of `bpf_check`,
/// kernel/bpf/verifier.c).
fn uninterrupted<E: std::error::Error + 'static>(mut load: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    for _ in 1..ATTEMPTS {
        match load() {
            Err(error) if errno(&error) == Some(libc::EAGAIN) => {}
            outcome => return outcome,
        }
    }
    load()
}

/// A private bpffs.
struct Private(OwnedFd);

impl Private {
    fn create() -> Result<Self, SteerError> {
        let mount = || -> io::Result<OwnedFd> {
            let bpffs = fsopen("bpf", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&bpffs)?;
            Ok(fsmount(&bpffs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC)?)
        };
        mount().map(Self).map_err(|source| SteerError::device("make a private bpffs", source))
    }

    fn path(&self, map: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{}", self.0.as_raw_fd(), name::pin(map)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::{ATTEMPTS, NUMBERS, OBJECT, STUB_OBJECT, shared, uninterrupted};
    use metadata_common::maps::name;
    use std::collections::BTreeSet;
    use std::io;

    #[test]
    fn every_map_but_constants_and_hub_rings_is_shared() {
        let objects = [OBJECT, STUB_OBJECT]
            .map(|object| aya_obj::Object::parse(object).expect("the embedded object parses"));
        let names = objects.iter().flat_map(|object| object.maps.keys().map(String::as_str));
        let maps: BTreeSet<&str> = names.filter(|map| !map.starts_with(".rodata")).collect();
        assert_eq!(maps, shared().chain([name::RING]).collect());
    }

    #[test]
    fn both_objects_define_the_maps_of_stubs_alike() {
        let [object, stubs] = [OBJECT, STUB_OBJECT]
            .map(|object| aya_obj::Object::parse(object).expect("the embedded object parses"));
        let of_stubs = stubs.maps.keys().map(String::as_str).filter(|map| !map.starts_with(".rodata"));
        assert_eq!(of_stubs.collect::<BTreeSet<_>>(), name::OF_STUBS.into());
        let layout =
            |map: &aya_obj::Map| (map.map_type(), map.key_size(), map.value_size(), map.max_entries());
        for (name, map) in stubs.maps.iter().filter(|(name, _)| name::OF_STUBS.contains(&name.as_str())) {
            assert!(object.maps.get(name).is_none_or(|other| layout(other) == layout(map)), "{name}");
        }
    }

    #[test]
    fn the_object_accepts_namespace_hub_and_key_as_constants() {
        let mut object = aya_obj::Object::parse(OBJECT).expect("the embedded object parses");
        let number = NUMBERS[7].to_ne_bytes();
        let constants = [
            (name::NETNS, (number.as_slice(), true)),
            (name::HUB, (number.as_slice(), true)),
            (name::ANSWERS_REQUESTS, (number.as_slice(), true)),
            (name::COOKIE_KEY, (&[7; 16][..], true)),
        ];
        let told = object.patch_map_data(constants.into());
        assert!(told.is_ok(), "{told:?}");
    }

    #[test]
    fn every_namespace_has_its_own_number() {
        assert!((0..).zip(NUMBERS).all(|(n, number): (u32, u32)| n == number));
    }

    #[test]
    fn only_an_interrupted_load_is_tried_again_and_not_for_ever() {
        for (errno, interrupted, loads, succeeds) in [
            (libc::EAGAIN, 0, 1, true),
            (libc::EAGAIN, 2, 3, true),
            (libc::EAGAIN, ATTEMPTS, ATTEMPTS, false),
            (libc::EPERM, 1, 1, false),
        ] {
            let mut count = 0;
            let outcome = uninterrupted(|| {
                count += 1;
                if count <= interrupted { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) }
            });
            assert_eq!((count, outcome.is_ok()), (loads, succeeds), "{interrupted} times {errno}");
        }
    }
}
