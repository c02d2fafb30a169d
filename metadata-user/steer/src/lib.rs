//! Loads and attaches the eBPF programs, fills their maps, and detaches them. The only crate that depends on aya.
//!
//! # How it works
//!
//! ```text
//!  namespace of a pod             the agent's namespace
//!  ┌────────────────────────┐     ┌──────────────────────────────────────────────────────┐
//!  │ tap1 ── `port_tcx` #2 ─┼─────┼──────────────────────── `ring` ──── RING ───▶ worker │
//!  │ tap0 ── `port` #2 ─────┼─────┼▶ imds-out ══ imds-in ── `socket` ── SOCKETS ▶ AF_XDP │
//!  │   ▲  PORTS, IDENTITIES │HUBS │                                                      │
//!  │   └────────────────────┼─────┼── `hub` ── imds-tap ◀── write() of one frame         │
//!  └────────────────────────┘     │   GUESTS, GUEST_DEVICES                              │
//!                                 │ tap7 ◀── `hub_tcx` ── imds-gso ◀── write() of 64 KiB │
//!                                 │   GUESTS, HOME_DEVICES                               │
//!                                 │ tap7 ── `port` #1 ─▶ the same hub                    │
//!                                 └──────────────────────────────────────────────────────┘
//! ```
//!
//! 1. [`Steering::start`] makes the hub's devices (`hub`), loads the object (`object`) and attaches `socket` to the
//!    inner veth. Only then does it enter the hub in `HUBS`, because a veth accepts redirected frames only while its
//!    peer runs XDP. It attaches `hub` to the hub tap. No port is steered yet.
//! 2. [`Steering::attach`] makes a tap a port: the tap gets an instance of `port` that knows the number of its
//!    namespace, and a token bucket. The port now drops every frame for a metadata address, because no identity is
//!    bound on it.
//! 3. [`Steering::bind`] binds a MAC on a port to a slot. It writes the outbound entries first and the inbound entry
//!    last. [`Steering::unbind`] clears them in reverse order (`tables`).
//! 4. [`Steering::detach`] frees the slots and removes the programs from the tap. It also cleans up after a deleted
//!    tap, which [`LinkWatch`](metadata_links::watch::LinkWatch) reports. A new tap of the same name is attached
//!    again.
//!
//! # Limits of the kernel
//!
//! - A program cannot read which namespace a frame came from. Each namespace has a stub that sets the number and
//!   calls the one shared `port` (`stubs`).
//! - An interface index can be looked up only from within its namespace. A thread enters the other namespace for each
//!   attach and bind there (`netns` of metadata-links).
//! - An attachment ends with its owner unless it is pinned (`pins`). Pinned ports stay closed when the agent dies for
//!   any reason, and the next agent inherits them (`adopt`). Without pins, guests' traffic flows as if there were no
//!   agent.
//! - Not every device can send a frame back (`XDP_TX`). A tap can; a veth can only while its peer accepts such
//!   frames, which the kernel does not report. The kernel therefore answers by itself ([`SteerConfig::answers`]) on
//!   taps only; on other devices every frame goes to the worker.
//! - A full ring is not reported: a redirect or `XDP_TX` without room counts as success. The devices' own counters
//!   are read every few seconds (`losses`), and each CPU, up to eight, has its own queue of the hub.
//! - A frame cannot be redirected to a device whose driver is not ready for it (a veth whose peer has neither XDP nor
//!   GRO), nor if it is longer than the device's MTU. A classifier delivers frames for such a device and long frames,
//!   within the agent's own namespace only (`bare`).
//! - XDP on a large frame has a cost. A classifier serves guests that have booted (`mode`).
//! - A classifier cannot redirect a frame to another namespace. It sends such frames to the worker through a ring
//!   (`rings`).
//! - A device carries one XDP program. A port with another program is an error that names the program.
//!
//! # Calling it
//!
//! All methods block. Attach, bind, unbind and detach take well under a millisecond (a few system calls, plus a
//! thread start for another namespace). The first port of a namespace takes some tens of milliseconds for the
//! verifier. Start and drop take about a tenth of a second. An async task may call them if nothing urgent waits for
//! that task. [`Steering`] is `Send` and has one owner.
//!
//! # Requirements
//!
//! Root, or `CAP_NET_ADMIN`, `CAP_BPF` and `CAP_SYS_ADMIN` (to enter namespaces and to make a private bpffs; it
//! includes `CAP_BPF` and `CAP_PERFMON`), and `CAP_SYS_PTRACE` for namespaces of another user's process; a kernel with
//! the features that `features` tests, whatever its version; a mounted `/proc`. Each port needs one file descriptor,
//! each namespace with ports one more; `start` raises the soft limit on open files to the hard limit.

mod adopt;
mod attach;
mod bare;
mod check;
mod claims;
mod config;
mod counters;
mod error;
mod failure;
mod features;
#[cfg(test)]
mod formats;
mod guard;
mod held_link;
mod hub;
mod link;
mod loading;
mod mode;
mod object;
mod ordinary;
mod pins;
mod ports;
pub mod probe;
mod rings;
mod stubs;
mod tables;
mod takeover;
mod trace;

pub use adopt::{BoundIdentity, PreviousAgent};
pub use bare::AnswerPath;
pub use check::{AttachmentCheck, AttachmentFault, CHECK_EVERY, CHECKED_AT_ONCE};
pub use claims::FlowClaimer;
pub use config::{PortLimits, SteerConfig};
pub use counters::Counters;
pub use counters::{HubLosses, Losses, NAMESPACES_AT_ONCE};
pub use error::SteerError;
pub use guard::{ClosedTaps, is_hub_tap};
pub use hub::{HUB_MTU, Hub, hub_queues, release_hubs};
pub use mode::{BUSY, LOOKS_AT_ONCE, QUIET, SWITCHES_AT_ONCE, SteeringMode, SteeringProgram};
pub use pins::{PINS_VERSION, PinsError, RELEASE_GRACE, ReleaseSummary, is_pins_version, release};
pub use ports::{DeviceLookup, exists};
pub use rings::Ring;
pub use trace::{TraceError, TraceSession, UnknownSender};

use aya::Ebpf;
use metadata_common::cookie::CookieKey;
use metadata_common::mac::Mac;
pub use metadata_common::maps::HUB_QUEUES;
use metadata_common::maps::{MAX_HUBS, MAX_SLOTS, Slot, name, program};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use adopt::InheritedPort;
use check::{Checks, HubLink};
use failure::ProbeError;
use features::{Feature, Features};
use held_link::HeldLink;
use hub::{HubDevices, HubGuard, HubTaps};
use metadata_common::port::PortName;
use metadata_datapath::afxdp::AllSentTable;
use metadata_datapath::guest_devices::GuestDevices;
use metadata_links::netns::{self, Cookie, Netns};
use object::Object;
use pins::{LinkName, PinDirectory, PinnedProgram};
use ports::AttachedPort;
use tables::MapHandles;
use trace::Logs;
use trace::Traces;

/// Hubs of one agent. Hub numbers are unique on a node, and an agent uses one side of them: 0 to 31 or 32 to 63. The
/// agent that takes over uses the other side.
pub const HUBS_OF_A_SIDE: u32 = MAX_HUBS / 2;

/// Longest hub name, in bytes. Interface names have at most 15, and the longest suffix is `-out`.
pub const HUB_PREFIX_MAX: usize = 11;

/// Steers ports to the hubs until it is dropped.
pub struct Steering {
    // Fields drop in this order: ports stop steering (unless pinned), then the hub's programs are detached, then its
    // devices are removed.
    ports: BTreeMap<PortName, AttachedPort>,
    /// The ports by namespace and interface index.
    places: HashMap<(Cookie, u32), PortName>,
    /// Inherited ports that have not been attached yet, by namespace and interface index.
    inherited: BTreeMap<(Cookie, u32), InheritedPort>,
    /// Another agent still owns the ports.
    taking_over: bool,
    links: Vec<HubLink>,
    checks: Checks,
    taps: Vec<HubTaps>,
    rings: Vec<Option<Ring>>,
    bound: BTreeMap<Slot, (PortName, Mac)>,
    /// Shared with the stacks, which answer what the kernel does not.
    guest_devices: GuestDevices,
    tables: MapHandles,
    object: Object,
    logs: Logs,
    traces: Traces,
    limits: PortLimits,
    answers: u64,
    served: (Vec<IpAddr>, Vec<Ipv4Addr>),
    key: CookieKey,
    side: u32,
    mode: SteeringMode,
    /// Every hub has the classifiers that send what XDP cannot redirect.
    has_classifiers: bool,
    /// Every hub has a ring, so a classifier can steer ports of other namespaces.
    has_rings: bool,
    /// The last port examined, if the round is not complete.
    last_examined: Option<PortName>,
    /// The last port of another namespace whose devices were examined, if the round is not complete.
    last_polled: Option<PortName>,
    /// Frames that devices lost, as of the last reading.
    losses: Losses,
    /// The agent's own namespace, which contains the hub.
    home: Cookie,
    hubs: Vec<Hub>,
    devices: HubGuard,
    /// Dropped last: its lock shows that an agent runs.
    pins: Option<PinDirectory>,
}

/// With pins, ports keep their programs but deliver nowhere, so no frame for a metadata address leaves them.
impl Drop for Steering {
    fn drop(&mut self) {
        for HubLink { held, .. } in self.links.drain(..) {
            // The number of a hub belongs to this side, whose next agent makes devices of its own.
            drop(held.detach_and_unpin());
        }
        self.pins.iter().for_each(PinDirectory::clear_release);
        for Hub { number, .. } in &self.hubs {
            if let Err(error) = self.tables.clear_hub(*number) {
                tracing::warn!("{error}");
            }
        }
    }
}

impl Steering {
    /// Makes the hub in the calling thread's namespace and loads the programs. Ports can be attached afterwards.
    ///
    /// It replaces hub devices that a killed agent left behind, and inherits what that agent pinned. With
    /// [`PreviousAgent::TakeOver`] the pins belong to a running agent until [`Steering::take_over_all`].
    ///
    /// # Errors
    /// A wrong configuration, a missing privilege or kernel feature, or a hub name or pins in use. Nothing remains
    /// then, and the pins are unchanged.
    pub fn start(config: &SteerConfig) -> Result<Self, SteerError> {
        hub::check_prefix(&config.hub)?;
        let features = Features::ask();
        features.check()?;
        let tcx = features.answer(Feature::Tcx);
        let mode = config.mode.on(&tcx)?;
        if mode != config.mode {
            let found = tcx
                .as_ref()
                .map_or_else(ProbeError::to_string, |_| "this kernel has no tcx classifiers".into());
            tracing::info!(found, "XDP steers each guest also after it has booted");
        }
        let has_tcx = tcx.unwrap_or_default();
        tables::check_served(&config.served, &config.arp_only)?;
        raise_descriptor_limit();
        let home = Arc::new(Netns::own()?);
        if !(1..=HUBS_OF_A_SIDE).contains(&config.hubs) {
            return Err(SteerError::Hubs { found: config.hubs });
        }
        if !(1..=HUB_QUEUES).contains(&config.queues) {
            return Err(SteerError::Queues { found: config.queues });
        }
        if config.adopt.side() > 1 {
            return Err(SteerError::Side { found: config.adopt.side() });
        }
        let alone = config.adopt == PreviousAgent::Alone;
        let pins = config.pins.as_deref().map(|pins| PinDirectory::open(pins, alone)).transpose()?;
        let mut devices = HubGuard::new(Arc::clone(&home));
        let taps = home.run(|| devices.create(config, has_tcx))?;
        let steering = home.run(|| Self::start_inside(config, (mode, has_tcx), pins, devices, taps))?;
        if let Some(pins) = &steering.pins {
            pins.share()?;
        }
        Ok(steering)
    }

    fn start_inside(
        config: &SteerConfig,
        (mode, has_tcx): (SteeringMode, bool),
        pins: Option<PinDirectory>,
        devices: HubGuard,
        taps: Vec<HubTaps>,
    ) -> Result<Self, SteerError> {
        let taking_over = config.adopt != PreviousAgent::Alone;
        let home = netns::cookie()?;
        let found = adopt::AdoptablePins::look(pins.as_ref())?;
        if taking_over && let Err(reason) = &found.maps {
            let no_pins = || SteerError::TakeOverWithoutPins;
            return Err(pins
                .as_ref()
                .map_or_else(no_pins, |p| p.nothing_to_take_over(reason.clone()).into()));
        }
        let adopted = pins.as_ref().filter(|_| found.maps.is_ok());
        let key =
            adopted.map(|pins| tables::pinned_key(&pins.map(name::AGENT).path())).transpose()?.flatten();
        let key = key.unwrap_or(config.key);
        let side = config.adopt.side();
        let first = side * HUBS_OF_A_SIDE;
        let (mut object, mut ebpf) = Object::load(key, first, home, adopted, taking_over)?;
        let ordinary = object.ordinary().clone();
        let mut tables = MapHandles::take(&mut ebpf)?;
        let logs = Logs::take(&mut ebpf)?;
        ordinary.take(&mut ebpf)?;
        let traces = Traces::take(&mut ebpf, ordinary.clone())?;
        if !taking_over {
            tables.serve(&config.served, &config.arp_only, &ordinary)?;
            (0..MAX_HUBS).try_for_each(|hub| tables.clear_hub(hub))?;
            tables.release_connections()?;
        } else {
            // An agent of this side that was killed may have left its ring behind a number that is ours now.
            (first..first + HUBS_OF_A_SIDE).try_for_each(|hub| tables.clear_hub(hub))?;
        }
        let put = |ebpf: &mut Ebpf, name: &'static str, device: &hub::HubDevice| {
            attach::native(loading::load_program(ebpf, name)?, device.ifindex)
                .map_err(|refusal| refusal.about(name, &PortName::local(&device.name), device.ifindex))
        };
        let (mut links, mut hubs, mut rings) = (Vec::new(), Vec::new(), Vec::new());
        let mut has_classifiers = has_tcx;
        for (number, HubDevices { outer, inner, tap, long_tap }) in (first..).zip(&devices.devices) {
            if number > first {
                // `socket` reads the number of its hub from a constant.
                ebpf = object.hub(number)?;
            }
            // The veth outlives a killed agent. The pin keeps steered frames out of the host's network stack.
            let pin = LinkName { on: PinnedProgram::Hub, netns: 0, cookie: home, ifindex: inner.ifindex };
            let mut hold = |link, program, device: &hub::HubDevice, pin: Option<LinkName>| {
                let held = HeldLink::new(link, pin.and_then(|name| Some(pins.as_ref()?.link(name))))?;
                links.push(HubLink { held, program, device: (device.name.clone(), device.ifindex), pin });
                Ok::<_, SteerError>(())
            };
            hold(put(&mut ebpf, program::SOCKET, inner)?, program::SOCKET, inner, Some(pin))?;
            hold(put(&mut ebpf, program::HUB, tap)?, program::HUB, tap, None)?;
            let taps = [tap].into_iter().chain(long_tap);
            match has_classifiers.then(|| bare::put_classifier(&mut ebpf, taps.clone())).transpose() {
                Ok(put) => {
                    for (link, tap) in put.into_iter().flatten().zip(taps) {
                        hold(link, program::HUB_TCX, tap, None)?;
                    }
                }
                Err(error) => {
                    has_classifiers = false;
                    tracing::warn!(
                        "ports that accept no redirected frames are not served, and long answers are sent segment by \
                         segment: {error}"
                    );
                }
            }
            rings.push(has_tcx.then(|| rings::put_if_possible(&mut ebpf, &mut tables, number)).flatten());
            tables.set_hub(number, outer.ifindex)?;
            hubs.push(Hub {
                number,
                inner_ifindex: inner.ifindex,
                inner_name: inner.name.clone(),
                queues: config.queues,
            });
        }
        let mut steering = Self {
            ports: BTreeMap::new(),
            places: HashMap::new(),
            inherited: BTreeMap::new(),
            taking_over,
            links,
            checks: Checks::default(),
            taps,
            has_rings: rings.iter().all(Option::is_some),
            rings,
            bound: BTreeMap::new(),
            guest_devices: GuestDevices::new(MAX_SLOTS),
            tables,
            object,
            logs,
            traces,
            limits: config.limits,
            answers: config.answers,
            served: (config.served.clone(), config.arp_only.clone()),
            key,
            side,
            mode,
            has_classifiers,
            last_examined: None,
            last_polled: None,
            losses: Losses { hubs: vec![HubLosses::default(); hubs.len()], ports: 0 },
            home,
            hubs,
            devices,
            pins,
        };
        steering.adopt(found)?;
        Ok(steering)
    }

    /// Loads what ports in other namespaces need. Otherwise the first attach there takes a tenth of a second longer.
    ///
    /// # Errors
    /// If the kernel refuses the program.
    pub fn prepare_for_namespaces(&mut self) -> Result<(), SteerError> {
        self.object.share()
    }

    /// The key of the kernel's SYN cookies. It is inherited from the previous agent if there was one,
    /// so that connections begun under it remain valid. The stack needs the same key.
    #[must_use]
    pub fn key(&self) -> CookieKey {
        self.key
    }

    /// What the stacks need to know of the devices that guests are bound on, kept up to date.
    #[must_use]
    pub fn guest_devices(&self) -> GuestDevices {
        self.guest_devices.clone()
    }

    /// The side of the hubs: 0 or 1.
    #[must_use]
    pub fn side(&self) -> u32 {
        self.side
    }

    /// The directory of pins, if anything is pinned.
    #[must_use]
    pub fn pins(&self) -> Option<&Path> {
        self.pins.as_ref().map(PinDirectory::directory)
    }

    /// The hubs, with the devices to bind AF_XDP sockets to, sorted by number.
    #[must_use]
    pub fn hubs(&self) -> &[Hub] {
        &self.hubs
    }

    /// The number of the hub that serves a slot. It never changes for a slot.
    #[must_use]
    pub fn hub_of(&self, slot: Slot) -> u32 {
        self.side * HUBS_OF_A_SIDE + slot % u32::try_from(self.hubs.len()).unwrap_or(1).max(1)
    }

    /// Index in [`Steering::hubs`] of the hub that serves a slot, counted from 0 on either side.
    #[must_use]
    pub fn worker_of(&self, slot: Slot) -> usize {
        (self.hub_of(slot) % HUBS_OF_A_SIDE) as usize
    }

    /// True while the hubs' devices exist in the calling thread's namespace. Without them no guest gets an answer,
    /// and no other call reports it.
    ///
    /// # Errors
    /// If the kernel refuses the lookup.
    pub fn hub_is_whole(&self) -> Result<bool, SteerError> {
        for device in self.devices.devices.iter().flat_map(HubDevices::each) {
            if netns::index_of(&device.name)? != Some(device.ifindex) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The tap of a hub, for sending: one `write(2)` per Ethernet frame, without a virtio header, non-blocking. The
    /// destination address of the frame is the stamp of the receiving slot.
    ///
    /// # Panics
    /// If called twice for a hub (the tap has one owner), or if there is no such hub.
    pub fn take_tap(&mut self, hub: u32) -> OwnedFd {
        self.taps
            .get_mut((hub % HUBS_OF_A_SIDE) as usize)
            .and_then(|taps| taps.tap.take())
            .expect("the hub tap is taken once")
    }

    /// The tap of a hub for frames of many segments: one `write(2)` per `virtio_net_hdr` and Ethernet frame,
    /// non-blocking. Send them only to slots whose device [takes them](GuestDevices::takes_long). `None` if the kernel
    /// lacks what it needs (tcx), and on a second call.
    pub fn take_long_tap(&mut self, hub: u32) -> Option<OwnedFd> {
        self.taps.get_mut((hub % HUBS_OF_A_SIDE) as usize)?.long_tap.take()
    }

    /// Delivers frames of a hub's queue to this AF_XDP socket, in place of any earlier one. Frames are dropped and
    /// counted until the first socket is registered.
    ///
    /// # Errors
    /// If `socket` is not an AF_XDP socket, or no hub has such a queue.
    pub fn register_socket(
        &mut self,
        hub: u32,
        queue: u32,
        socket: BorrowedFd<'_>,
    ) -> Result<(), SteerError> {
        self.tables.set_socket(hub, queue, socket)
    }

    /// The table in which user space and the kernel record what each has sent on a connection. Each worker needs its
    /// own mapping.
    ///
    /// # Errors
    /// If the kernel refuses the mapping.
    pub fn all_sent(&self) -> Result<AllSentTable, SteerError> {
        self.tables.all_sent()
    }

    /// Frames by verdict, summed over all ports and hubs.
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn counters(&self) -> Result<Counters, SteerError> {
        self.tables.counters()
    }

    /// A MAC from which frames to the metadata addresses arrive on an attached port, although it is not registered
    /// there: they are dropped. `None` if none was noticed lately.
    #[must_use]
    pub fn unknown_sender_on(&self, port: &PortName) -> Option<UnknownSender> {
        let attached = self.ports.get(port)?;
        let sender = self.logs.senders().on(attached.key, std::time::Instant::now());
        sender.filter(|sender| !attached.slots.contains_key(&sender.mac))
    }

    /// The attached ports on which such a MAC was noticed lately, each with the MAC.
    #[must_use]
    pub fn unknown_senders(&self) -> Vec<(&PortName, UnknownSender)> {
        let senders = self.logs.senders().all(std::time::Instant::now());
        if senders.is_empty() {
            return Vec::new();
        }
        let known = self.ports.iter().filter_map(|(port, attached)| {
            let sender = senders.get(&attached.key);
            let sender = sender.filter(|sender| !attached.slots.contains_key(&sender.mac));
            sender.map(|sender| (port, *sender))
        });
        known.collect()
    }

    /// Starts a task that turns log records of the eBPF programs into tracing events. It ends when this value is
    /// dropped.
    ///
    /// # Panics
    /// Outside a tokio runtime, or in one without a timer.
    pub fn forward_logs(&mut self) {
        self.logs.forward();
    }
}

/// Raises the soft limit on open files. Thousands of ports need thousands of descriptors, and the usual soft limit is
/// 1,024. That limit exists for `select(2)`, which is not used here.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the soft limit on open files");
    }
}
