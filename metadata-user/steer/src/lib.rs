//! Load, attach, fill the maps, detach. The only room that names aya.
//!
//! # The tour
//!
//! ```text
//!  namespace of a pod             the agent's namespace
//!  ┌────────────────────────┐     ┌──────────────────────────────────────────────────────┐
//!  │ tap1 ── `port_tcx` #2 ─┼─────┼──────────────────────── `ring` ──── RING ───▶ worker │
//!  │ tap0 ── `port` #2 ─────┼─────┼▶ imds-out ══ imds-in ── `socket` ── SOCKETS ▶ AF_XDP │
//!  │   ▲  PORTS, IDENTITIES │HUBS │                                                      │
//!  │   └────────────────────┼─────┼── `hub` ── imds-tap ◀── write() of one frame         │
//!  └────────────────────────┘     │   GUESTS, GUEST_DEVICES                              │
//!                                 │ tap7 ── `port` #1 ─▶ the same hub                    │
//!                                 └──────────────────────────────────────────────────────┘
//! ```
//!
//! 1. [`Steering::start`] makes the hub's devices (`hub`), loads the object (`object`), puts
//!    `socket` on the inner veth *before* the hub is entered in `HUBS` (a veth takes redirected frames only
//!    while its peer runs XDP), and `hub` on the hub tap. Nothing is steered yet.
//! 2. [`Steering::attach`] makes a tap a port: it gets an instance of `port` that knows its namespace's
//!    number, and a token bucket. From here on what is for a metadata address is dropped, because nobody
//!    is known on the port.
//! 3. [`Steering::bind`] lets one MAC speak on a port, as a slot: the way back first, the way in last.
//!    [`Steering::unbind`] goes the other way round (`tables`).
//! 4. [`Steering::detach`] frees the slots and gives the tap back. It also serves when the tap has gone,
//!    which [`LinkWatch`](metadata_links::watch::LinkWatch) tells; a tap made anew under the same name is attached again.
//!
//! # What the kernel will not do
//!
//! - Say which namespace a frame came from: hence a stub in each namespace that says its
//!   number and goes on in one `port` behind all (`stubs`).
//! - Look up an interface index outside the caller's namespace: hence a thread that enters another namespace
//!   for each attach and bind there (`netns` of metadata-links).
//! - Keep an attachment alive after its owner, unless it is pinned (`pins`): then ports stay closed when the agent
//!   dies, however it dies, and the next one goes on with them (`adopt`). Without pins every guest's traffic goes on as if the
//!   agent had never been there.
//! - Send a frame back where it came from (`XDP_TX`) on every device: a tap can, a veth only while its peer takes
//!   such frames in, which nobody tells. Hence what the kernel answers itself ([`SteerConfig::answers`]) it
//!   answers on taps; elsewhere all is steered.
//! - Say that a ring was full: a redirect or `XDP_TX` that finds no room counts as done. Hence the devices' own counters
//!   are read every few seconds (`losses`), and each CPU has a queue of the hub to itself, as far as there are eight.
//! - Redirect a frame to a device whose driver is not ready for it (a veth whose other end has neither XDP nor GRO). Hence
//!   a classifier behind `hub` that hands such a device its frames, within the agent's own namespace (`bare`).
//! - Look at a large frame by XDP at no cost: hence a classifier for guests that have booted (`mode`).
//! - Redirect a frame out of its namespace from a classifier: hence a ring to the worker for those (`rings`).
//! - Carry two XDP programs on one device: a port that is taken is an error that names the holder.
//!
//! # Calling it
//!
//! All methods block: for well under a millisecond when ports come and go (a few system calls, and in another
//! namespace a thread start), for some tens of milliseconds of verifying at the first port of a namespace, for about a tenth of a
//! second at start and on drop. They may be called from an async task that holds up nothing urgent.
//! [`Steering`] is `Send` and has one owner.
//!
//! Needs root, or `CAP_NET_ADMIN`, `CAP_BPF` and `CAP_SYS_ADMIN` (to enter namespaces and to make a private
//! bpffs; it includes `CAP_BPF` and `CAP_PERFMON`), `CAP_SYS_PTRACE` for namespaces of another user's process; Linux 5.15 or later; a mounted `/proc`. Each port takes one descriptor, each
//! namespace with ports one more: `start` raises the soft limit on open files to the hard one.

mod adopt;
mod attach;
mod bare;
mod counters;
mod devstats;
mod error;
mod guard;
mod handing;
mod held;
mod hub;
mod logs;
mod losses;
mod mode;
mod object;
mod pins;
mod ports;
pub mod probe;
mod rings;
mod stubs;
mod tables;
mod takeover;
mod trace;

pub use adopt::{Adopt, BoundIdentity};
pub use bare::Way;
pub use counters::Counters;
pub use error::SteerError;
pub use guard::{Guarded, is_hub_tap};
pub use handing::Claims;
pub use hub::{HUB_MTU, HUBS_OF_A_SIDE, Hub, hub_queues};
pub use losses::{HubLosses, Losses, NAMESPACES_AT_ONCE};
pub use mode::{BUSY, By, LOOKS_AT_ONCE, Mode, QUIET, SWITCHES_AT_ONCE};
pub use pins::{PinsError, Released, release};
pub use ports::{Found, exists};
pub use rings::Ring;
pub use trace::{TraceError, Watch};

use aya::Ebpf;
use metadata_common::cookie::Key;
use metadata_common::mac::Mac;
pub use metadata_common::maps::HUB_QUEUES;
use metadata_common::maps::{MAX_HUBS, MAX_SLOTS, Slot, name, program};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use adopt::Left;
use held::Held;
use hub::Devices;
use logs::Logs;
use metadata_base::port::PortName;
use metadata_datapath::afxdp::AllSentTable;
use metadata_datapath::mtu::Mtus;
use metadata_links::error::LinkError;
use metadata_links::netns::{self, Cookie, Netns};
use object::Object;
use pins::{LinkName, On, Pins};
use ports::Attached;
use tables::Tables;
use trace::Traces;

/// Octets a hub name may have: interface names have 15, and the longest suffix is `-out`.
pub const HUB_PREFIX_MAX: usize = 11;

/// How much one port may send to the metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Frames per second in the long run; 0 means no limit.
    pub frames_per_second: u32,
    /// Frames at once after a pause.
    pub burst: u32,
    /// New connections per second in the long run, each SYN being one, also one that is sent again; 0 means no limit.
    pub connections_per_second: u32,
    /// New connections at once after a pause.
    pub connection_burst: u32,
}

impl Default for Limits {
    /// 10,000 frames a second and 2,048 at once, 200 connections a second and 512 at once: far above what booting takes
    /// (63 connections, should each be tried eight times), far below a flood.
    fn default() -> Self {
        Self { frames_per_second: 10_000, burst: 2_048, connections_per_second: 200, connection_burst: 512 }
    }
}

/// What steering is set up with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteerConfig {
    /// Prefix of the hub's device names, 1 to [`HUB_PREFIX_MAX`] octets: `imds` makes `imds-out`, `imds-in`
    /// and `imds-tap`.
    pub hub: String,
    /// The metadata addresses, at most 32 of each family.
    pub served: Vec<IpAddr>,
    /// Next hops for which ARP is answered, while IP sent to them passes. They count as served IPv4 addresses.
    pub arp_only: Vec<Ipv4Addr>,
    /// For each port alike.
    pub limits: Limits,
    /// What the kernel answers itself on taps: [`ANSWER_LINK`](metadata_common::maps::ANSWER_LINK) and
    /// [`ANSWER_TCP`](metadata_common::maps::ANSWER_TCP), the latter only for a stack that knows `key`.
    pub answers: u64,
    /// The key of handshakes, unless an agent before left one: see [`Steering::key`].
    pub key: Key,
    /// Where links and maps are pinned: a directory on a bpffs, made if its parent is there. `None` pins nothing.
    pub pins: Option<PathBuf>,
    /// Whether another agent runs on the pins.
    pub adopt: Adopt,
    /// Which program ports are steered by.
    pub mode: Mode,
    /// How many hubs share the slots, 1 to [`HUBS_OF_A_SIDE`].
    pub hubs: u32,
    /// Receive queues of each hub, 1 to [`HUB_QUEUES`]. A queue's ring holds 256 frames (`VETH_RING_SIZE`,
    /// drivers/net/veth.c), so CPUs that share one lose frames under a flood.
    pub queues: u32,
}

impl Default for SteerConfig {
    fn default() -> Self {
        Self {
            hub: "imds".into(),
            served: Vec::new(),
            arp_only: Vec::new(),
            limits: Limits::default(),
            answers: 0,
            key: Key([0; 2]),
            pins: None,
            adopt: Adopt::Alone,
            mode: Mode::default(),
            hubs: 1,
            queues: 1,
        }
    }
}

/// Steering, at work until it is dropped.
pub struct Steering {
    // Dropped in this order: the ports stop steering (unless they are pinned), the hub's programs go, then its devices.
    ports: BTreeMap<PortName, Attached>,
    /// The ports by where they are.
    places: HashMap<(Cookie, u32), PortName>,
    /// Ports of an agent before, by where they are, that have not been named yet.
    left: BTreeMap<(Cookie, u32), Left>,
    /// Another agent has the ports.
    taking_over: bool,
    links: Vec<Held>,
    taps: Vec<Option<OwnedFd>>,
    rings: Vec<Option<Ring>>,
    bound: BTreeMap<Slot, (PortName, Mac)>,
    /// For the stacks, which answer what the kernel leaves to them.
    mtus: Mtus,
    tables: Tables,
    object: Object,
    logs: Logs,
    traces: Traces,
    limits: Limits,
    answers: u64,
    served: (Vec<IpAddr>, Vec<Ipv4Addr>),
    key: Key,
    side: u32,
    mode: Mode,
    /// Every hub has the classifier that hands answers to devices which take no redirected frames.
    reaches_bare: bool,
    /// Every hub has a ring, so ports of other namespaces can be steered by a classifier.
    has_rings: bool,
    /// The port last looked at, while there are more behind it.
    looked_at: Option<PortName>,
    /// The port of another namespace whose devices were looked at last, while there are more behind it.
    looked_into: Option<PortName>,
    /// What devices lost, by the last look at them.
    losses: Losses,
    /// The agent's own namespace, which the hub is in.
    home: Cookie,
    hubs: Vec<Hub>,
    devices: Guard,
    /// Given up last: the lock on them says that an agent runs.
    pins: Option<Pins>,
}

/// With pins, ports stay as they are and steer to nobody, so that nothing for a metadata address leaves them.
impl Drop for Steering {
    fn drop(&mut self) {
        self.links.drain(..).for_each(Held::take_off);
        for Hub { number, .. } in &self.hubs {
            if let Err(error) = self.tables.clear_hub(*number) {
                tracing::warn!("{error}");
            }
        }
    }
}

/// The hubs' devices, removed with this, and the namespace they are in: the agent's own.
struct Guard {
    devices: Vec<Devices>,
    home: Arc<Netns>,
}

impl Guard {
    /// Makes the devices of all hubs. What was made before an error goes with this.
    fn create(&mut self, config: &SteerConfig) -> Result<Vec<OwnedFd>, SteerError> {
        let mut taps = Vec::new();
        let first = config.adopt.side() * HUBS_OF_A_SIDE;
        if config.adopt == Adopt::Alone {
            hub::check_absent(&config.hub, config.hubs..MAX_HUBS)?;
        }
        for number in first..first + config.hubs {
            let (devices, tap) = Devices::create(&config.hub, number, config.queues)?;
            self.devices.push(devices);
            taps.push(tap);
        }
        let last = if config.adopt == Adopt::Alone { MAX_HUBS } else { first + HUBS_OF_A_SIDE };
        hub::remove_left_over_hubs(&config.hub, first + config.hubs..last)?;
        Ok(taps)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let removed = self.home.run(|| {
            self.devices.iter().for_each(Devices::remove);
            Ok::<_, LinkError>(())
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "the hub's devices stay behind; the next start removes them");
        }
    }
}

impl Steering {
    /// Makes the hub in the calling thread's namespace, loads the programs and gets ready for ports.
    ///
    /// Devices an agent that was killed left under these names are replaced, and what it pinned is gone on with. With
    /// [`Adopt::TakeOver`] what is pinned belongs to an agent that runs, and stays its own for now.
    ///
    /// # Errors
    /// A wrong configuration, a privilege or kernel feature that is missing, a hub name or pins in use. Nothing is
    /// left then, and what was pinned stays as it was.
    pub fn start(config: &SteerConfig) -> Result<Self, SteerError> {
        hub::check_prefix(&config.hub)?;
        mode::check(config.mode)?;
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
        let alone = config.adopt == Adopt::Alone;
        let pins = config.pins.as_deref().map(|pins| Pins::open(pins, alone)).transpose()?;
        let mut devices = Guard { devices: Vec::new(), home: Arc::clone(&home) };
        let taps = home.run(|| devices.create(config))?;
        let steering = home.run(|| Self::start_inside(config, pins, devices, taps))?;
        if let Some(pins) = &steering.pins {
            pins.share()?;
        }
        Ok(steering)
    }

    fn start_inside(
        config: &SteerConfig,
        pins: Option<Pins>,
        devices: Guard,
        taps: Vec<OwnedFd>,
    ) -> Result<Self, SteerError> {
        let taking_over = config.adopt != Adopt::Alone;
        let home = netns::cookie()?;
        let found = adopt::Found::look(pins.as_ref())?;
        if taking_over && let Err(reason) = &found.maps {
            let no_pins = || SteerError::TakeOverWithoutPins;
            return Err(pins
                .as_ref()
                .map_or_else(no_pins, |p| p.nothing_to_take_over(reason.clone()).into()));
        }
        let adopted = pins.as_ref().filter(|_| found.maps.is_ok());
        let key = adopted.map(|pins| tables::pinned_key(&pins.map(name::AGENT))).transpose()?.flatten();
        let key = key.unwrap_or(config.key);
        let side = config.adopt.side();
        let first = side * HUBS_OF_A_SIDE;
        let (mut object, mut ebpf) = Object::load(key, first, home, adopted, taking_over)?;
        let mut tables = Tables::take(&mut ebpf)?;
        let logs = Logs::take(&mut ebpf)?;
        let traces = Traces::take(&mut ebpf)?;
        if !taking_over {
            tables.serve(&config.served, &config.arp_only)?;
            (0..MAX_HUBS).try_for_each(|hub| tables.clear_hub(hub))?;
            tables.release_connections()?;
        }
        let put = |ebpf: &mut Ebpf, name: &'static str, device: &hub::Device| {
            attach::native(object::load_program(ebpf, name)?, device.ifindex)
                .map_err(|refusal| refusal.about(name, &PortName::local(&device.name), device.ifindex))
        };
        let (mut links, mut hubs, mut rings) = (Vec::new(), Vec::new(), Vec::new());
        let mut reaches_bare = mode::has_tcx();
        for (number, Devices { outer, inner, tap }) in (first..).zip(&devices.devices) {
            if number > first {
                // `socket` knows its hub by a constant.
                ebpf = object.hub(number)?;
            }
            // The veth outlives an agent that is killed, and while ports steer to it nothing may come out there.
            let pin = LinkName { on: On::Hub, netns: 0, cookie: home, ifindex: inner.ifindex };
            let pin = pins.as_ref().map(|pins| pins.link(pin));
            links.push(Held::new(put(&mut ebpf, program::SOCKET, inner)?, pin)?);
            links.push(Held::new(put(&mut ebpf, program::HUB, tap)?, None)?);
            match reaches_bare.then(|| bare::put_classifier(&mut ebpf, &tap.name)).transpose() {
                Ok(link) => links.extend(link.map(|link| Held::new(link, None)).transpose()?),
                Err(error) => {
                    reaches_bare = false;
                    tracing::warn!("ports that take no redirected frames are not served: {error}");
                }
            }
            rings.push(rings::put_if_possible(&mut ebpf, &mut tables, number));
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
            left: BTreeMap::new(),
            taking_over,
            links,
            taps: taps.into_iter().map(Some).collect(),
            has_rings: rings.iter().all(Option::is_some),
            rings,
            bound: BTreeMap::new(),
            mtus: Mtus::new(MAX_SLOTS),
            tables,
            object,
            logs,
            traces,
            limits: config.limits,
            answers: config.answers,
            served: (config.served.clone(), config.arp_only.clone()),
            key,
            side,
            mode: config.mode,
            reaches_bare,
            looked_at: None,
            looked_into: None,
            losses: Losses { hubs: vec![HubLosses::default(); hubs.len()], ports: 0 },
            home,
            hubs,
            devices,
            pins,
        };
        steering.adopt(found)?;
        Ok(steering)
    }

    /// Gets ready for ports in other namespaces than the agent's: without it attaching the first takes a tenth of a second
    /// longer.
    ///
    /// # Errors
    /// When the kernel refuses the program.
    pub fn prepare_for_namespaces(&mut self) -> Result<(), SteerError> {
        self.object.share()
    }

    /// The key of handshakes the kernel answers with: that of an agent before, if there was one, so that the connections it
    /// began are good. The stack needs the same.
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }

    /// The MTUs of the devices guests are bound on, as they are and will be. The stacks need the same table.
    #[must_use]
    pub fn mtus(&self) -> Mtus {
        self.mtus.clone()
    }

    /// The side the hubs are on: 0 or 1.
    #[must_use]
    pub fn side(&self) -> u32 {
        self.side
    }

    /// Where to bind the AF_XDP sockets, by the hub's number.
    #[must_use]
    pub fn hubs(&self) -> &[Hub] {
        &self.hubs
    }

    /// The number of the hub that serves a slot: always the same one.
    #[must_use]
    pub fn hub_of(&self, slot: Slot) -> u32 {
        self.side * HUBS_OF_A_SIDE + slot % u32::try_from(self.hubs.len()).unwrap_or(1).max(1)
    }

    /// Which of [`Steering::hubs`] serves a slot, counted from 0 on either side.
    #[must_use]
    pub fn worker_of(&self, slot: Slot) -> usize {
        (self.hub_of(slot) % HUBS_OF_A_SIDE) as usize
    }

    /// True while the hubs' devices are there, looked for in the calling thread's namespace. Without them
    /// no guest is answered, and nothing else tells.
    ///
    /// # Errors
    /// When the kernel refuses to look.
    pub fn hub_is_whole(&self) -> Result<bool, SteerError> {
        let devices = self.devices.devices.iter();
        for device in devices.flat_map(|Devices { outer, inner, tap }| [outer, inner, tap]) {
            if netns::index_of(&device.name)? != Some(device.ifindex) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A hub's tap, for the way out: one `write(2)` per Ethernet frame, without a virtio header,
    /// non-blocking. The frame's destination is the stamp of the slot it is for.
    ///
    /// # Panics
    /// The second time: the tap has one owner. And when there is no such hub.
    pub fn take_tap(&mut self, hub: u32) -> OwnedFd {
        self.taps
            .get_mut((hub % HUBS_OF_A_SIDE) as usize)
            .and_then(Option::take)
            .expect("the hub tap is taken once")
    }

    /// Lets frames of a hub's queue arrive at this AF_XDP socket, in place of any before it. Until the first is
    /// registered they are dropped and counted.
    ///
    /// # Errors
    /// When `socket` is no AF_XDP socket, or no hub has such a queue.
    pub fn register_socket(
        &mut self,
        hub: u32,
        queue: u32,
        socket: BorrowedFd<'_>,
    ) -> Result<(), SteerError> {
        self.tables.set_socket(hub, queue, socket)
    }

    /// Where user space and the kernel tell each other what has been said on connections: a mapping of its
    /// own for each worker.
    ///
    /// # Errors
    /// When the kernel refuses the mapping.
    pub fn all_sent(&self) -> Result<AllSentTable, SteerError> {
        self.tables.all_sent()
    }

    /// Frames by verdict, all ports and the hub together.
    ///
    /// # Errors
    /// When the kernel refuses to read the table.
    pub fn counters(&self) -> Result<Counters, SteerError> {
        self.tables.counters()
    }

    /// Starts a task that turns what the kernel side logs into tracing events; it ends with this value.
    ///
    /// # Panics
    /// Outside a tokio runtime, or one without a clock.
    pub fn forward_logs(&mut self) {
        self.logs.forward();
    }
}

/// Thousands of ports take thousands of descriptors, and the usual soft limit is 1,024. It exists for
/// `select(2)`, which nothing here uses.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the soft limit on open files stays as it is");
    }
}
