//! Load, attach, fill the maps, detach. The only room that names aya.
//!
//! # The tour
//!
//! ```text
//!  namespace of a pod             the agent's namespace
//!  ┌────────────────────────┐     ┌──────────────────────────────────────────────────────┐
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
//!    which [`LinkWatch`] tells; a tap made anew under the same name is attached again.
//!
//! # What the kernel will not do
//!
//! - Say which namespace a frame came from: hence one instance of `port` per namespace (`object`).
//! - Look up an interface index outside the caller's namespace: hence a thread that enters the namespace
//!   for each attach and bind (`netns`).
//! - Keep an attachment alive after its owner: links are not pinned, so when the agent dies, however it
//!   dies, every guest's own traffic goes on as if it had never been there.
//! - Carry two XDP programs on one device: a port that is taken is an error that names the holder.
//!
//! # Calling it
//!
//! All methods block: for well under a millisecond when ports come and go (one thread start, a few system
//! calls), for some milliseconds of verifying at the first port of a namespace, for about a tenth of a
//! second at start and on drop. They may be called from an async task that holds up nothing urgent.
//! [`Steering`] is `Send` and has one owner.
//!
//! Needs root, or `CAP_NET_ADMIN`, `CAP_BPF`, `CAP_PERFMON` and `CAP_SYS_ADMIN` (to enter namespaces and to
//! make a private bpffs); Linux 5.15 or later; a mounted `/proc`. Each port takes one descriptor, each
//! namespace with ports one more: `start` raises the soft limit on open files to the hard one.

mod attach;
mod counters;
mod error;
mod hub;
mod logs;
mod netlink;
mod netns;
mod object;
mod ports;
mod tables;
mod tun;
mod watch;

pub use counters::Counters;
pub use error::SteerError;
pub use hub::{HUB_MTU, Hub};
pub use netns::{MAX_NAMESPACES, NetnsId};
pub use ports::{Found, exists};
pub use watch::LinkWatch;

use aya::programs::xdp::XdpLink;
use metadata_common::mac::Mac;
use metadata_common::maps::{Slot, program};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::port::PortName;
use hub::Devices;
use logs::Logs;
use netns::Netns;
use object::Object;
use ports::Attached;
use tables::Tables;

/// Octets a hub name may have: interface names have 15, and the longest suffix is `-out`.
pub const HUB_PREFIX_MAX: usize = 11;

const REQUIRED_KERNEL: &str = "; Linux 5.15 or later is needed, with XDP sockets, taps and veth";

/// How much one port may send to the metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Frames per second in the long run; 0 means no limit.
    pub frames_per_second: u32,
    /// Frames at once after a pause.
    pub burst: u32,
}

impl Default for Limits {
    /// 10,000 frames a second and 2,048 at once: far above what booting takes, far below a flood.
    fn default() -> Self {
        Self { frames_per_second: 10_000, burst: 2_048 }
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
}

impl Default for SteerConfig {
    fn default() -> Self {
        Self { hub: "imds".into(), served: Vec::new(), arp_only: Vec::new(), limits: Limits::default() }
    }
}

/// Steering, at work until it is dropped.
pub struct Steering {
    // Dropped in this order: the ports stop steering, the hub's programs go, then its devices.
    ports: BTreeMap<PortName, Attached>,
    _links: [XdpLink; 2],
    tap: Option<OwnedFd>,
    bound: BTreeMap<Slot, (PortName, Mac)>,
    tables: Tables,
    object: Object,
    logs: Logs,
    limits: Limits,
    hub: Hub,
    devices: Guard,
}

/// The hub's devices, removed with this, and the namespace they are in: the agent's own.
struct Guard {
    devices: Devices,
    home: Arc<Netns>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let removed = self.home.run(|| {
            self.devices.remove();
            Ok(())
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "the hub's devices stay behind; the next start removes them");
        }
    }
}

impl Steering {
    /// Makes the hub in the calling thread's namespace, loads the programs and gets ready for ports.
    ///
    /// Devices an agent that was killed left under these names are replaced.
    ///
    /// # Errors
    /// A wrong configuration, a privilege or kernel feature that is missing, a hub name in use. Nothing is
    /// left then.
    pub fn start(config: &SteerConfig) -> Result<Self, SteerError> {
        hub::check_prefix(&config.hub)?;
        tables::check_served(&config.served, &config.arp_only)?;
        raise_descriptor_limit();
        let home = Arc::new(Netns::own()?);
        let (devices, tap) = home.run(|| Devices::create(&config.hub))?;
        let devices = Guard { devices, home: Arc::clone(&home) };
        home.run(|| Self::start_inside(config, devices, tap))
    }

    fn start_inside(config: &SteerConfig, devices: Guard, tap: OwnedFd) -> Result<Self, SteerError> {
        let Devices { outer, inner, tap: tap_device } = &devices.devices;
        let (object, mut ebpf) = Object::load()?;
        let mut tables = Tables::take(&mut ebpf)?;
        let logs = Logs::take(&mut ebpf)?;
        tables.serve(&config.served, &config.arp_only)?;
        let mut put = |name: &'static str, device: &hub::Device| {
            attach::native(object::load_program(&mut ebpf, name)?, device.ifindex)
                .map_err(|refusal| refusal.about(name, &PortName::local(&device.name), device.ifindex))
        };
        let links = [put(program::SOCKET, inner)?, put(program::HUB, tap_device)?];
        tables.set_hub(outer.ifindex)?;
        let hub = Hub { inner_ifindex: inner.ifindex, inner_name: inner.name.clone(), queue: 0 };
        Ok(Self {
            ports: BTreeMap::new(),
            _links: links,
            tap: Some(tap),
            bound: BTreeMap::new(),
            tables,
            object,
            logs,
            limits: config.limits,
            hub,
            devices,
        })
    }

    /// Where to bind the AF_XDP socket.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    /// True while the hub's devices are there, looked for in the calling thread's namespace. Without them
    /// no guest is answered, and nothing else tells.
    ///
    /// # Errors
    /// When the kernel refuses to look.
    pub fn hub_is_whole(&self) -> Result<bool, SteerError> {
        let Devices { outer, inner, tap } = &self.devices.devices;
        for device in [outer, inner, tap] {
            if netns::index_of(&device.name)? != Some(device.ifindex) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The hub tap, for the way out: one `write(2)` per Ethernet frame, without a virtio header,
    /// non-blocking. The frame's destination is the stamp of the slot it is for.
    ///
    /// # Panics
    /// The second time: the tap has one owner.
    pub fn take_tap(&mut self) -> OwnedFd {
        self.tap.take().expect("the hub tap is taken once")
    }

    /// Lets steered frames arrive at this AF_XDP socket, in place of any before it. Until the first is
    /// registered they are dropped and counted.
    ///
    /// # Errors
    /// When `socket` is no AF_XDP socket.
    pub fn register_socket(&mut self, socket: BorrowedFd<'_>) -> Result<(), SteerError> {
        self.tables.set_socket(self.hub.queue, socket)
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
