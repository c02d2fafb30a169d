//! The hubs: the programs on their devices, and the rings and taps of their workers.
//!
//! A hub has a veth pair for inbound frames, a tap for outbound frames, and a tap for long outbound frames
//! (`hub_devices`). [`Hubs`] owns all of them, with the links of their programs and the agent's own namespace
//! ([`Home`]), which contains them. It knows which hub serves a slot, and no port.
//!
//! Its invariant: a hub is entered for steering only once `socket` is on its inner end, and leaves the maps only after
//! its programs are detached; its devices are removed last.
//!
//! ```text
//!  ports ══ XDP redirect ══▶ PREFIX-out │ PREFIX-in ── XDP `socket` ──▶ AF_XDP
//!  ports ◀── tcx `request_tcx` ◀───────── PREFIX-in    answers that `request` has begun
//!  ports ◀══ XDP redirect ══ `hub` XDP ── PREFIX-tap ◀── write() of one frame
//!  ports ◀── tcx `hub_tcx` ────────────── PREFIX-gso ◀── write() of one frame of many segments
//!  classifiers of other namespaces ── `ring` ── RING ──────────────────────────▶ worker
//! ```
//!
//! # Answers that XDP cannot redirect
//!
//! They are those to devices that accept no redirected frames, such as a veth whose peer has neither XDP nor GRO, long
//! ones, which are cut into segments behind the hub, and in the mode `tcx` all others.
//!
//! In the agent's own namespace such answers are sent through the network stack: the classifier `hub_tcx` sends them to
//! the device like frames of the host itself. On the hub tap `hub` passes it what is for devices that accept no
//! redirected frames, and in the mode `tcx` everything. A tap of several queues then gets answers by the queue on which
//! its guest sent the connection's last frame (`tun_flow_update` in drivers/net/tun.c), as it gets the host's own
//! frames. XDP chooses the queue by the CPU, including one that the guest does not read.
//!
//! The tap for long answers has no XDP program, because the kernel would copy each frame into one piece for it and
//! refuse to redirect a frame above the MTU. Each frame costs a socket buffer. This needs tcx (`features`), and
//! `bpf_redirect` reaches no device of another namespace. Attaching the classifier waits for an RCU grace period, about
//! 15 ms for each tap, when the agent starts.
//!
//! # Rings
//!
//! They bring frames of quiet guests in other namespaces to a hub's worker: a classifier cannot redirect a frame out of
//! its namespace. `port_tcx` behind the stubs (`object`) therefore calls `ring`, of which each hub has an instance with
//! its own BPF ring buffer. The worker reads frames from the ring as it does from the AF_XDP sockets. Answers leave
//! through the hub tap.
//!
//! The buffer belongs to the agent. If the agent is killed, guests' frames fill the buffer; further frames are
//! dropped and counted, so ports stay closed. The next agent replaces the buffer.

use aya::Ebpf;
use aya::maps::{MapData, RingBuf};
use aya::programs::links::FdLink;
use aya::programs::{SchedClassifier, Xdp};
use aya_obj::programs::XdpAttachType;
use metadata_common::maps::{ANSWER_REQUESTS, RING_HEADER, Slot, name, program};
use metadata_common::port::PortName;
use metadata_datapath::afxdp::SocketStats;
use metadata_datapath::link::FrameSource;
use metadata_links::devices::DeviceEvent;
use metadata_links::error::LinkError;
use metadata_links::netlink;
use metadata_links::netns::{self, Netns};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use super::attach::{self, AttachmentFault, HeldLink, LinkFault};
use super::config::SteerConfig;
use super::devices::{DroppedFrames, Home, HubLosses};
use super::hub_devices::{HUB_MTU, HubDevice, HubDevices, HubGuard, is_as_made};
use super::link;
use super::maps::{self, Maps};
use super::object::{Object, load_classifier, load_program};
use super::pins::{LinkName, Pin, PinDirectory, PinnedProgram};
use super::{HUB_QUEUES, HUBS_OF_A_SIDE, SteerError};

/// Receive queues of each hub: one for each CPU this process may use, up to [`HUB_QUEUES`].
#[must_use]
pub fn hub_queues() -> u32 {
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    cpus.clamp(1, HUB_QUEUES)
}

/// The inner end of a hub's veth pair, where the AF_XDP sockets are bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hub {
    /// The number of the hub, from 0.
    pub number: u32,
    /// Interface index of the inner end, in the namespace in which steering was started.
    pub inner_ifindex: u32,
    /// Name of the inner end.
    pub inner_name: String,
    /// Number of receive queues, each with its own veth ring and socket. The kernel picks the queue by the sender's
    /// CPU number modulo this number.
    pub queues: u32,
}

/// A program on a device of a hub.
struct HubLink {
    held: HeldLink,
    /// The program's name in the object.
    program: &'static str,
    device: HubDevice,
    /// The name of the pin of a link that outlives the agent.
    pin: Option<LinkName>,
}

/// The hubs of this agent.
pub struct Hubs {
    links: Vec<HubLink>,
    rings: Vec<Option<Ring>>,
    hubs: Vec<Hub>,
    side: u32,
    completes_answers: bool,
    /// Frames lost at each hub, as of the last poll.
    losses: Vec<HubLosses>,
    home: Home,
    devices: HubGuard,
}

impl Hubs {
    /// The hubs, with the devices to bind AF_XDP sockets to, sorted by number.
    #[must_use]
    pub fn all(&self) -> &[Hub] {
        &self.hubs
    }

    /// True if the device is one of a hub.
    pub(crate) fn has(&self, device: &DeviceEvent) -> bool {
        let mut devices = self.devices.devices.iter().flat_map(HubDevices::each);
        devices.any(|own| own.ifindex == device.ifindex && own.name == device.name)
    }

    /// Sets the hubs' devices up again. This does not cover a device that was deleted: the agent ends then.
    pub(crate) fn check_devices(&self, mut note: impl FnMut(AttachmentFault, &str, Result<(), SteerError>)) {
        let look = |device: &HubDevice| -> Result<bool, LinkError> {
            Ok(is_as_made(&netlink::link_of(&device.name, device.ifindex)?))
        };
        let examine = |device: &HubDevice| match look(device) {
            Ok(true) => None,
            Ok(false) => {
                let repaired = netlink::quiet_and_up(&device.name, device.ifindex, HUB_MTU);
                Some((AttachmentFault::Down, device.name.clone(), repaired.map_err(SteerError::from)))
            }
            Err(LinkError::Device { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => None,
            Err(error) => Some((AttachmentFault::Unknown, device.name.clone(), Err(error.into()))),
        };
        let examined = self.devices.home.run(|| {
            let all = self.devices.devices.iter().flat_map(HubDevices::each);
            Ok::<Vec<_>, LinkError>(all.filter_map(examine).collect())
        });
        match examined {
            Ok(found) => {
                for (fault, device, repaired) in found {
                    note(fault, &device, repaired);
                }
            }
            Err(error) => note(AttachmentFault::Unknown, "the hub", Err(error.into())),
        }
    }

    /// The side of the hubs: 0 or 1.
    #[must_use]
    pub fn side(&self) -> u32 {
        self.side
    }

    /// The number of the hub that serves a slot. It never changes for a slot.
    #[must_use]
    pub fn hub_of(&self, slot: Slot) -> u32 {
        self.side * HUBS_OF_A_SIDE + slot % u32::try_from(self.hubs.len()).unwrap_or(1).max(1)
    }

    /// Index in [`Hubs::all`] of the hub that serves a slot, counted from 0 on either side.
    #[must_use]
    pub fn worker_of(&self, slot: Slot) -> usize {
        (self.hub_of(slot) % HUBS_OF_A_SIDE) as usize
    }

    /// True while the hubs' devices exist in the calling thread's namespace. Without them no guest gets an answer,
    /// and no other call reports it.
    ///
    /// # Errors
    /// If the kernel refuses the lookup.
    pub fn are_whole(&self) -> Result<bool, SteerError> {
        for device in self.devices.devices.iter().flat_map(HubDevices::each) {
            if netns::index_of(&device.name)? != Some(device.ifindex) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The tap of a hub, for sending: one `write(2)` per Ethernet frame, without a virtio header, non-blocking. The
    /// destination address of a frame is the stamp of the slot that it is for.
    ///
    /// # Panics
    /// If called twice for a hub (the tap has one owner), or if there is no such hub.
    pub fn take_tap(&mut self, hub: u32) -> OwnedFd {
        self.devices
            .taps
            .get_mut((hub % HUBS_OF_A_SIDE) as usize)
            .and_then(|taps| taps.tap.take())
            .expect("the hub tap is taken once")
    }

    /// The tap of a hub for frames of many segments: one `write(2)` per `virtio_net_hdr` and Ethernet frame,
    /// non-blocking. Send them only to slots whose device
    /// [takes them](metadata_datapath::stack::GuestDevices::takes_long). `None` if the kernel lacks what it
    /// needs (tcx), and on a second call.
    pub fn take_long_tap(&mut self, hub: u32) -> Option<OwnedFd> {
        self.devices.taps.get_mut((hub % HUBS_OF_A_SIDE) as usize)?.long_tap.take()
    }

    /// The ring of a hub, for its worker. Returns it once; `None` if the kernel could not provide one.
    pub fn take_ring(&mut self, hub: u32) -> Option<Ring> {
        self.rings.get_mut((hub % HUBS_OF_A_SIDE) as usize).and_then(Option::take)
    }
}

impl Hubs {
    /// Attaches the hubs' programs to their devices and enters the hubs for steering; called in the agent's own
    /// namespace. `ebpf` is the instance of the first hub.
    pub(super) fn start(
        config: &SteerConfig,
        has_tcx: bool,
        devices: HubGuard,
        object: &mut Object,
        mut ebpf: Ebpf,
        maps: &mut Maps,
        pins: Option<&PinDirectory>,
    ) -> Result<Self, SteerError> {
        let (side, home) = (config.adopt.side(), object.home());
        let first = side * HUBS_OF_A_SIDE;
        let put = |ebpf: &mut Ebpf, name: &'static str, device: &HubDevice| {
            attach::native(load_program(ebpf, name)?, device.ifindex)
                .map_err(|refusal| refusal.about(name, &PortName::local(&device.name), device.ifindex))
        };
        let (mut links, mut hubs, mut rings) = (Vec::new(), Vec::new(), Vec::new());
        let mut has_classifiers = has_tcx;
        let mut completes_answers = has_tcx && config.answers & ANSWER_REQUESTS != 0;
        for (number, HubDevices { outer, inner, tap, long_tap }) in (first..).zip(&devices.devices) {
            if number > first {
                // `socket` reads the number of its hub from a constant.
                ebpf = object.hub(number)?;
            }
            // The veth outlives a killed agent. The pin keeps steered frames out of the host's network stack.
            let pin = LinkName { on: PinnedProgram::Hub, netns: 0, cookie: home, ifindex: inner.ifindex };
            let mut hold = |link, program, device: &HubDevice, pin: Option<LinkName>| {
                let held = HeldLink::new(link, pin.and_then(|name| Some(pins?.link(name))))?;
                links.push(HubLink { held, program, device: device.clone(), pin });
                Ok::<_, SteerError>(())
            };
            hold(put(&mut ebpf, program::SOCKET, inner)?, program::SOCKET, inner, Some(pin))?;
            if completes_answers {
                match put_classifier(&mut ebpf, program::REQUEST_TCX, [inner]) {
                    // Like `socket`, it goes on while no agent runs.
                    Ok(put) => {
                        let pin = LinkName { on: PinnedProgram::HubTcx, ..pin };
                        for link in put {
                            hold(link, program::REQUEST_TCX, inner, Some(pin))?;
                        }
                    }
                    Err(error) => {
                        completes_answers = false;
                        tracing::warn!(
                            "workers answer where a guest's frame has no room for the answer: {error}"
                        );
                    }
                }
            }
            hold(put(&mut ebpf, program::HUB, tap)?, program::HUB, tap, None)?;
            let taps = [tap].into_iter().chain(long_tap);
            let put_taps = || put_classifier(&mut ebpf, program::HUB_TCX, taps.clone());
            match has_classifiers.then(put_taps).transpose() {
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
            rings.push(has_tcx.then(|| Ring::create_if_possible(&mut ebpf, maps, number)).flatten());
            maps.set_hub(number, outer.ifindex)?;
            hubs.push(Hub {
                number,
                inner_ifindex: inner.ifindex,
                inner_name: inner.name.clone(),
                queues: config.queues,
            });
        }
        let has_rings = rings.iter().all(Option::is_some);
        let home = Home::new(Arc::clone(&devices.home), home, has_classifiers, has_rings);
        let losses = vec![HubLosses::default(); hubs.len()];
        Ok(Self { links, rings, hubs, side, completes_answers, losses, home, devices })
    }

    /// The agent's own namespace, which contains the hubs.
    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    /// What the names of the hubs' devices begin with.
    pub(super) fn prefix(&self) -> &str {
        &self.devices.prefix
    }

    /// True for the index of a hub's device in the calling thread's namespace.
    pub(super) fn has_device(&self, ifindex: u32) -> bool {
        self.devices.has(ifindex)
    }

    /// True if the kernel completes answers that have no room in the frame of their request.
    pub(super) fn completes_answers(&self) -> bool {
        self.completes_answers
    }

    /// True if a hub of this number is on this agent's side.
    pub(super) fn is_ours(&self, hub: u32) -> bool {
        hub / HUBS_OF_A_SIDE == self.side
    }

    /// Frames lost at each hub, as of the last poll.
    pub(super) fn losses(&self) -> &[HubLosses] {
        &self.losses
    }

    /// Records what a device of the agent's own namespace dropped, if it is a hub's.
    pub(super) fn note(&mut self, ifindex: u32, counts: DroppedFrames) {
        for (devices, losses) in self.devices.devices.iter().zip(&mut self.losses) {
            if devices.outer.ifindex == ifindex {
                losses.veth_full = counts.tx;
            } else if devices.tap.ifindex == ifindex {
                losses.tap_dropped = counts.rx;
            }
        }
    }

    /// Takes the hubs' programs off their devices.
    pub(super) fn detach(&mut self) {
        for HubLink { held, .. } in self.links.drain(..) {
            // The number of a hub belongs to this side, whose next agent makes devices of its own.
            drop(held.detach_and_unpin());
        }
    }

    /// Compares each program with the kernel's view of it, and repairs what another program has changed. Calls `note`
    /// for each fault. `private` is a free path on the private bpffs.
    pub(super) fn check(
        &mut self,
        pins: Option<&PinDirectory>,
        private: &Path,
        mut note: impl FnMut(AttachmentFault, &str, Result<(), SteerError>),
    ) {
        for hub in &mut self.links {
            let pin = hub.pin.and_then(|name| Some(pins?.link(name)));
            match hub.held.fault(pin.as_ref()) {
                Ok(None) => {}
                Ok(Some(fault)) => {
                    let repaired = hub.repair(fault, pin, &self.devices.home, private);
                    note(fault.into(), &hub.device.name, repaired);
                }
                Err(source) => {
                    let error =
                        SteerError::device(format!("examine the link of {}", hub.device.name), source);
                    note(AttachmentFault::Unknown, &hub.device.name, Err(error));
                }
            }
        }
    }
}

impl HubLink {
    fn repair(
        &mut self,
        fault: LinkFault,
        pin: Option<Pin>,
        home: &Netns,
        path: &Path,
    ) -> Result<(), SteerError> {
        if fault == LinkFault::Unpinned {
            return pin.map_or(Ok(()), |pin| Ok(self.held.pin_again(pin)?));
        }
        // A detached link still has its program, and a replaced one does not: then only a restart makes another.
        let failed = |source| SteerError::device("get the hub's program back; restart the agent", source);
        link::pin_program(self.held.program(), path).map_err(failed)?;
        if fault == LinkFault::Replaced {
            self.held.detach().map_err(failed)?;
        }
        let (name, HubDevice { name: device, ifindex }) = (self.program, &self.device);
        let port = PortName::local(device);
        let put = || match name {
            program::HUB_TCX | program::REQUEST_TCX => {
                let load = |source| SteerError::load(name, source);
                let mut classifier = SchedClassifier::from_pin(path).map_err(load)?;
                attach::tcx(&mut classifier, name, &port)
            }
            _ => {
                let load = |source| SteerError::load(name, source);
                let mut program = Xdp::from_pin(path, XdpAttachType::Interface).map_err(load)?;
                attach::native(&mut program, *ifindex).map_err(|refusal| refusal.about(name, &port, *ifindex))
            }
        };
        let link = home.run(put);
        if let Err(error) = std::fs::remove_file(path) {
            tracing::debug!(%error, "a pin on the private bpffs stays");
        }
        self.held = HeldLink::new(link?, pin)?;
        Ok(())
    }
}

/// Attaches a classifier to devices of a hub in the calling thread's namespace.
fn put_classifier<'d>(
    ebpf: &mut Ebpf,
    name: &'static str,
    devices: impl IntoIterator<Item = &'d HubDevice>,
) -> Result<Vec<FdLink>, SteerError> {
    let classifier = load_classifier(ebpf, name)?;
    let mut attach = |device: &HubDevice| attach::tcx(classifier, name, &PortName::local(&device.name));
    devices.into_iter().map(&mut attach).collect()
}

/// The reading end of a hub's ring. It has one owner.
pub struct Ring {
    buffer: RingBuf<MapData>,
    stats: SocketStats,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

/// The frame in a record; `None` for a record that `ring` has not written.
fn frame_in(record: &[u8]) -> Option<&[u8]> {
    let (length, rest) = record.split_first_chunk::<RING_HEADER>()?;
    rest.get(..usize::try_from(u64::from_ne_bytes(*length)).ok()?)
}

impl FrameSource for Ring {
    fn receive(&mut self, max: usize, mut f: impl FnMut(&[&[u8]])) -> usize {
        let mut lent = 0;
        while lent < max {
            let Some(record) = self.buffer.next() else { break };
            // An empty frame is a runt, which the link drops and counts.
            let frame = frame_in(&record).unwrap_or_default();
            lent += 1;
            self.stats.frames += 1;
            self.stats.bytes += frame.len() as u64;
            f(&[frame]);
        }
        lent
    }

    /// The kernel side counts frames without room (`ring_drop_full`).
    fn stats(&self) -> Option<SocketStats> {
        Some(self.stats)
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffer.as_fd()
    }
}

impl Ring {
    /// Makes the ring of a hub from the hub's instance of the object, and enters it for `port_tcx`.
    fn create(ebpf: &mut Ebpf, maps: &mut Maps, hub: u32) -> Result<Self, SteerError> {
        let ring = Self { buffer: maps::take(ebpf, name::RING)?, stats: SocketStats::default() };
        let loaded = load_classifier(ebpf, program::RING)?;
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| {
            SteerError::map(name::RINGS, format!("enter hub {hub}"), source)
        };
        maps.set_ring(hub, loaded.fd().map_err(|error| failed(error.into()))?)?;
        Ok(ring)
    }

    /// Like [`Ring::create`], but logs a failure: on such a kernel, ports in other namespaces keep XDP.
    fn create_if_possible(ebpf: &mut Ebpf, maps: &mut Maps, hub: u32) -> Option<Self> {
        Self::create(ebpf, maps, hub)
            .inspect_err(|error| tracing::warn!("ports of other namespaces keep XDP: {error}"))
            .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::frame_in;

    #[test]
    fn a_record_yields_exactly_the_frame_of_its_length() {
        let record = |length: u64, bytes: &[u8]| [&length.to_ne_bytes(), bytes].concat();
        assert_eq!(frame_in(&record(3, b"abcdef")), Some(&b"abc"[..]));
        assert_eq!(frame_in(&record(0, b"abc")), Some(&b""[..]));
        for wrong in [record(4, b"abc"), record(u64::MAX, b"abc"), vec![0; 7], Vec::new()] {
            assert_eq!(frame_in(&wrong), None, "{wrong:?}");
        }
    }
}
