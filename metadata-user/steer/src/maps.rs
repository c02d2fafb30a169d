//! The maps of the eBPF programs, and what user space has to know of their content.
//!
//! [`Maps`] owns the handles of all maps but those of traces, and what is written to them for every port: limits, what
//! the kernel answers, the served addresses and the key of SYN cookies. Beside the kernel's table of slots it keeps
//! [`GuestDevices`], by which the stacks know the same slots. It does not know which ports are attached.
//!
//! Its invariant: no order of updates sends a frame to the wrong guest. An identity is entered after the guest and its
//! device, and removed before them.

use aya::maps::{
    Array, DevMap, DevMapHash, HashMap, IterableMap as _, Map, MapData, MapError, PerCpuArray, ProgramArray,
    XskMap,
};
use aya::programs::ProgramFd;
use aya::{Ebpf, EbpfLoader};
use metadata_common::cookie::CookieKey;
use metadata_common::mac::Mac;
use metadata_common::maps::{
    ANSWER_REQUESTS, ARP_ONLY, BARE, CLAIMED, Guest, Identity, IdentityKey, InheritedState, MAX_HUBS,
    MAX_SERVED, MAX_SLOTS, Port, PortKey, SERVED, Slot, answers_within, name, socket_index,
};
use metadata_common::verdict::Verdict;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::errno;
use super::pins::PinDirectory;
use super::{HUBS_OF_A_SIDE, PortLimits, SteerConfig, SteerError};
use metadata_common::port::PortName;
use metadata_datapath::afxdp::AllSentTable;
use metadata_datapath::stack::GuestDevices;
use metadata_links::netlink;

/// Update flag: only replace an existing entry (`BPF_EXIST` in linux/bpf.h).
const BPF_EXIST: u64 = 2;

/// The maps of the eBPF programs. Keys and values are byte and integer arrays whose layouts `metadata-common` asserts.
pub struct Maps {
    ports: HashMap<MapData, [u32; 2], [u64; 9]>,
    identities: HashMap<MapData, [u8; 16], [u32; 4]>,
    guests: Array<MapData, u64>,
    guest_devices: DevMapHash<MapData>,
    home_devices: Array<MapData, u32>,
    hubs: DevMap<MapData>,
    hub_devices: Array<MapData, u32>,
    sockets: XskMap<MapData>,
    rings: ProgramArray<MapData>,
    served_v4: HashMap<MapData, [u8; 4], u32>,
    served_v6: HashMap<MapData, [u8; 16], u32>,
    all_sent: Array<MapData, [u64; 4]>,
    draining: HashMap<MapData, u64, u32>,
    /// The connections that the kernel has answered; `None` if it answers no requests.
    answered: Option<Array<MapData, [u64; 3]>>,
    agent: Array<MapData, [u64; 4]>,
    counters: PerCpuArray<MapData, u64>,
    ordinary: OrdinaryTable,
    /// Shared with the stacks, which answer what the kernel does not.
    shared_devices: GuestDevices,
    limits: PortLimits,
    /// What the kernel answers by itself on taps.
    answers: u64,
    served: Vec<IpAddr>,
    arp_only: Vec<Ipv4Addr>,
    key: CookieKey,
}

/// A slot, and the identity it is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotBinding {
    pub(super) slot: Slot,
    pub(super) port: PortKey,
    pub(super) mac: Mac,
}

impl Maps {
    /// The key of the kernel's SYN cookies. It is inherited from the previous agent if there was one, so that
    /// connections begun under it remain valid. The stack needs the same key.
    #[must_use]
    pub fn key(&self) -> CookieKey {
        self.key
    }

    /// What the stacks need to know of the devices that guests are bound on, kept up to date.
    #[must_use]
    pub fn guest_devices(&self) -> GuestDevices {
        self.shared_devices.clone()
    }

    /// The limits of every port.
    #[must_use]
    pub fn limits(&self) -> PortLimits {
        self.limits
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
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| {
            SteerError::map(name::SOCKETS, format!("enter a socket for queue {queue} of hub {hub}"), source)
        };
        let index = socket_index(hub, queue).ok_or_else(|| failed("no hub has such a queue".into()))?;
        self.sockets.set(index, socket.as_raw_fd(), 0).map_err(|source| failed(source.into()))
    }

    /// The table in which user space and the kernel record what each has sent on a connection. Each worker needs its
    /// own mapping.
    ///
    /// # Errors
    /// If the kernel refuses the mapping.
    pub fn all_sent(&self) -> Result<AllSentTable, SteerError> {
        let failed = |map| move |source| SteerError::map(map, "map into memory", io::Error::from(source));
        let table = AllSentTable::map(self.all_sent.map().fd().as_fd()).map_err(failed(name::ALL_SENT))?;
        match &self.answered {
            None => Ok(table),
            Some(answered) => table.and_answered(answered.map().fd().as_fd()).map_err(failed(name::ANSWERED)),
        }
    }

    /// Frames by verdict, summed over all ports and hubs.
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn counters(&self) -> Result<Counters, SteerError> {
        let read = |verdict: &Verdict| {
            let per_cpu = self.counters.get(&verdict.index(), 0).map_err(|source| {
                SteerError::map(name::COUNTERS, format!("read {}", verdict.name()), source)
            })?;
            Ok(per_cpu.iter().copied().fold(0, u64::wrapping_add))
        };
        Verdict::ALL.iter().map(read).collect::<Result<_, _>>().map(Counters::new)
    }

    /// Returns a handle for claiming connections, for a separate thread. Each worker needs its own.
    ///
    /// # Errors
    /// If no descriptor is available.
    pub fn claims(&self) -> Result<FlowClaimer, SteerError> {
        let failed = |source| SteerError::map(name::DRAINING, "duplicate the descriptor", source);
        let fd = self.draining.map().fd().as_fd().try_clone_to_owned().map_err(failed)?;
        let map = MapData::from_fd(fd).map_err(|source| SteerError::map(name::DRAINING, "open", source))?;
        let map = HashMap::try_from(Map::HashMap(map))
            .map_err(|source| SteerError::map(name::DRAINING, "open", source))?;
        Ok(FlowClaimer::new(map))
    }

    /// Removes all claims of a departed agent.
    ///
    /// # Errors
    /// If the kernel refuses to clear the table.
    pub fn clear_claims(&mut self) -> Result<(), SteerError> {
        let failed = |source| SteerError::map(name::DRAINING, "clear", source);
        // Read the keys first: the kernel restarts a walk whose current key is removed.
        let flows: Vec<u64> = self.draining.keys().collect::<Result<_, _>>().map_err(failed)?;
        flows.iter().try_for_each(|flow| absent_is_fine(self.draining.remove(flow))).map_err(failed)
    }

    /// The state of the previous agent, if there was one.
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn inherited_state(&self) -> Result<Option<InheritedState>, SteerError> {
        let [a, b, side, reserved] =
            self.agent.get(&0, 0).map_err(|source| SteerError::map(name::AGENT, "read", source))?;
        Ok(([a, b] != [0; 2]).then_some(InheritedState { key: CookieKey([a, b]), side, reserved }))
    }
}

impl Maps {
    /// Takes the maps out of a loaded object.
    pub(super) fn take(
        ebpf: &mut Ebpf,
        config: &SteerConfig,
        key: CookieKey,
        ordinary: OrdinaryTable,
    ) -> Result<Self, SteerError> {
        let answers_requests = config.answers & ANSWER_REQUESTS != 0;
        let answered = answers_requests.then(|| take(ebpf, name::ANSWERED)).transpose()?;
        Ok(Self {
            answered,
            ports: take(ebpf, name::PORTS)?,
            identities: take(ebpf, name::IDENTITIES)?,
            guests: take(ebpf, name::GUESTS)?,
            guest_devices: take(ebpf, name::GUEST_DEVICES)?,
            home_devices: take(ebpf, name::HOME_DEVICES)?,
            hubs: take(ebpf, name::HUBS)?,
            hub_devices: take(ebpf, name::HUB_DEVICES)?,
            sockets: take(ebpf, name::SOCKETS)?,
            rings: take(ebpf, name::RINGS)?,
            served_v4: take(ebpf, name::SERVED_V4)?,
            served_v6: take(ebpf, name::SERVED_V6)?,
            all_sent: take(ebpf, name::ALL_SENT)?,
            draining: take(ebpf, name::DRAINING)?,
            agent: take(ebpf, name::AGENT)?,
            counters: take(ebpf, name::COUNTERS)?,
            ordinary,
            shared_devices: GuestDevices::new(MAX_SLOTS),
            limits: config.limits,
            answers: config.answers,
            served: config.served.clone(),
            arp_only: config.arp_only.clone(),
            key,
        })
    }

    /// Enters the metadata addresses and the next hops towards them.
    pub(super) fn serve(&mut self) -> Result<(), SteerError> {
        let (served, arp_only) = (&self.served, &self.arp_only);
        check_served(served, arp_only)?;
        let next_hops = arp_only.iter().map(|v4| (IpAddr::V4(*v4), ARP_ONLY));
        // Served addresses come last, so that an address in both lists is served.
        for (address, value) in next_hops.chain(served.iter().map(|address| (*address, SERVED))) {
            let (map, outcome) = match address {
                IpAddr::V4(v4) => (name::SERVED_V4, self.served_v4.insert(v4.octets(), value, 0)),
                IpAddr::V6(v6) => (name::SERVED_V6, self.served_v6.insert(v6.octets(), value, 0)),
            };
            outcome.map_err(|source| SteerError::map(map, format!("enter {address}"), source))?;
        }
        // This step makes programs look the addresses up.
        let next_hops = arp_only.iter().map(|v4| IpAddr::V4(*v4));
        self.ordinary.all_but(served.iter().copied().chain(next_hops).map(last_byte))?;
        self.serve_no_others()
    }

    /// Removes addresses that the previous agent served and this one does not.
    fn serve_no_others(&mut self) -> Result<(), SteerError> {
        let (served, arp_only) = (&self.served, &self.arp_only);
        let wanted = |address: IpAddr| {
            served.contains(&address) || arp_only.iter().any(|v4| IpAddr::V4(*v4) == address)
        };
        let failed = |map| move |source: MapError| SteerError::map(map, "remove an address", source);
        let v4: Vec<[u8; 4]> =
            self.served_v4.keys().collect::<Result<_, _>>().map_err(failed(name::SERVED_V4))?;
        for bytes in v4.iter().filter(|bytes| !wanted(IpAddr::from(**bytes))) {
            absent_is_fine(self.served_v4.remove(bytes)).map_err(failed(name::SERVED_V4))?;
        }
        let v6: Vec<[u8; 16]> =
            self.served_v6.keys().collect::<Result<_, _>>().map_err(failed(name::SERVED_V6))?;
        for bytes in v6.iter().filter(|bytes| !wanted(IpAddr::from(**bytes))) {
            absent_is_fine(self.served_v6.remove(bytes)).map_err(failed(name::SERVED_V6))?;
        }
        Ok(())
    }

    /// Removes a hub's device for classifiers, and its ring. The kernel removes the device for XDP by itself.
    pub(super) fn clear_hub(&mut self, hub: u32) -> Result<(), SteerError> {
        let clearing = || format!("clear hub {hub}");
        self.hub_devices
            .set(hub, 0, 0)
            .map_err(|source| SteerError::map(name::HUB_DEVICES, clearing(), source))?;
        absent_is_fine(self.rings.clear_index(&hub))
            .map_err(|source| SteerError::map(name::RINGS, clearing(), source))
    }

    /// Enters what this agent serves, and clears what an ended agent left behind. While another agent runs, only the hubs
    /// of this side are cleared, which begin with this number.
    pub(super) fn begin(&mut self, only_from: Option<u32>) -> Result<(), SteerError> {
        match only_from {
            None => {
                self.serve()?;
                (0..MAX_HUBS).try_for_each(|hub| self.clear_hub(hub))?;
                self.release_connections()
            }
            // An agent of this side that was killed may have left its ring behind a number that is ours now.
            Some(first) => (first..first + HUBS_OF_A_SIDE).try_for_each(|hub| self.clear_hub(hub)),
        }
    }

    /// Passes frames for a hub to this instance of `ring` where no redirect reaches the hub.
    pub(super) fn set_ring(&mut self, hub: u32, ring: &ProgramFd) -> Result<(), SteerError> {
        self.rings
            .set(hub, ring, 0)
            .map_err(|source| SteerError::map(name::RINGS, format!("enter hub {hub}"), source))
    }

    /// Sends frames steered to a hub to this device of the calling thread's namespace.
    pub(super) fn set_hub(&mut self, hub: u32, outer_ifindex: u32) -> Result<(), SteerError> {
        let entering = || format!("enter device {outer_ifindex}");
        self.hubs
            .set(hub, outer_ifindex, None, 0)
            .map_err(|source| SteerError::map(name::HUBS, entering(), source))?;
        self.hub_devices
            .set(hub, outer_ifindex, 0)
            .map_err(|source| SteerError::map(name::HUB_DEVICES, entering(), source))
    }

    /// Adds a port to the table, closed or with its limits and full buckets, replacing any entry; called in its
    /// namespace. Returns what it found of its device.
    pub(super) fn enter(
        &mut self,
        port: &PortName,
        key: PortKey,
        closed: bool,
    ) -> Result<PortDevice, SteerError> {
        let device = PortDevice::look(port, key.ifindex)?;
        let entry =
            if closed { Port::closed() } else { Port { answers: self.answers_on(device), ..self.limited() } };
        self.add_port(key, entry).map(|()| device)
    }

    /// What the kernel answers on a device, and the device's MTU.
    fn answers_on(&self, device: PortDevice) -> u64 {
        answers_within(if device.sends_back { self.answers } else { 0 }, device.mtu)
    }

    /// Adds a port with the current limits, for which the kernel answers nothing by itself.
    pub(super) fn enter_limited(&mut self, key: PortKey) -> Result<(), SteerError> {
        self.add_port(key, self.limited())
    }

    /// A table entry with the current limits, for which the kernel answers nothing by itself.
    fn limited(&self) -> Port {
        let PortLimits { frames_per_second, burst, connections_per_second, connection_burst } = self.limits;
        Port::with_limit(frames_per_second, burst).and_connections(connections_per_second, connection_burst)
    }

    /// Sets the limits of these ports, and of all that are added later.
    pub(super) fn set_limits(&mut self, limits: PortLimits, ports: &[PortKey]) -> Result<(), SteerError> {
        self.limits = limits;
        let limit = self.limited();
        ports.iter().try_for_each(|key| self.limit_port(*key, limit))
    }

    /// Adds a port, with full buckets.
    fn add_port(&mut self, key: PortKey, port: Port) -> Result<(), SteerError> {
        self.ports
            .insert(port_key(key), port_words(port), 0)
            .map_err(|source| SteerError::map(name::PORTS, format!("enter {key:?}"), source))
    }

    /// Sets the limits of a port from now on; the content of its buckets does not change.
    fn limit_port(&mut self, key: PortKey, limit: Port) -> Result<(), SteerError> {
        let failed = |source| SteerError::map(name::PORTS, format!("limit {key:?}"), source);
        let [_, _, full_at_ns, answers, steered, _, _, connections_full_at_ns, guarded] =
            self.ports.get(&port_key(key), 0).map_err(failed)?;
        self.add_port(key, Port { full_at_ns, answers, steered, connections_full_at_ns, guarded, ..limit })
    }

    /// Sets the MTU of a port's device and nothing else. A port without an entry is ignored.
    pub(super) fn fit_port(&mut self, key: PortKey, mtu: u32) -> Result<(), SteerError> {
        self.change_answers(key, |answers| answers_within(answers, mtu))
    }

    /// Makes the kernel answer what this agent has it answer on a port that another agent entered, and sets the MTU. A
    /// closed port has no answers before it is opened. A port without an entry is ignored.
    pub(super) fn adopt_port(&mut self, key: PortKey, device: PortDevice) -> Result<(), SteerError> {
        let answers = self.answers_on(device);
        if self.is_closed(key) { Ok(()) } else { self.change_answers(key, |_| answers) }
    }

    /// Changes [`Port::answers`] of a port and nothing else. A port without an entry is ignored.
    fn change_answers(&mut self, key: PortKey, change: impl FnOnce(u64) -> u64) -> Result<(), SteerError> {
        let failed = |source| SteerError::map(name::PORTS, format!("change the answers of {key:?}"), source);
        let mut words = match self.ports.get(&port_key(key), 0) {
            Err(MapError::KeyNotFound) => return Ok(()),
            found => found.map_err(failed)?,
        };
        let [_, _, _, answers, ..] = &mut words;
        let changed = change(*answers);
        if *answers == changed {
            return Ok(());
        }
        *answers = changed;
        absent_is_fine(self.ports.insert(port_key(key), words, BPF_EXIST)).map_err(failed)
    }

    /// Frames steered since the port was added; `None` if it has no entry.
    pub(super) fn steered(&self, key: PortKey) -> Option<u64> {
        self.ports.get(&port_key(key), 0).ok().map(|[_, _, _, _, steered, ..]| steered)
    }

    /// True for a closed port.
    pub(super) fn is_closed(&self, key: PortKey) -> bool {
        self.ports.get(&port_key(key), 0).is_ok_and(|[.., guarded]| guarded != 0)
    }

    /// Removes a port.
    pub(super) fn remove_port(&mut self, key: PortKey) -> Result<(), SteerError> {
        absent_is_fine(self.ports.remove(&port_key(key)))
            .map_err(|source| SteerError::map(name::PORTS, format!("remove {key:?}"), source))
    }

    /// Sets the MTU of the device that a slot is bound on, for the stacks.
    pub(super) fn set_mtu(&self, slot: Slot, mtu: u32) {
        self.shared_devices.set_mtu(slot, mtu);
    }

    /// Sets the device to which the hub's classifier delivers a slot's answers, for the programs and the stacks. With
    /// `None` it delivers none.
    pub(super) fn set_home(&mut self, slot: Slot, device: Option<HomeDevice>) -> Result<(), SteerError> {
        self.shared_devices.set_takes_long(slot, device.is_some());
        self.write_home(slot, device)
    }

    /// Binds a free slot. Call it in the port's namespace, where its interface index is valid.
    ///
    /// Writes guest and device before identity, so answers have a path before the first frame enters. On an error
    /// nothing remains.
    pub(super) fn bind(&mut self, binding: SlotBinding, hub: u32) -> Result<(), SteerError> {
        self.try_bind(binding, hub).inspect_err(|_| {
            if let Err(error) = self.unbind(binding) {
                tracing::warn!(%error, slot = binding.slot, "a slot that could not be bound keeps entries");
            }
        })
    }

    fn try_bind(&mut self, binding: SlotBinding, hub: u32) -> Result<(), SteerError> {
        let SlotBinding { slot, port, mac } = binding;
        let entering = || format!("enter slot {slot}");
        self.guests
            .set(slot, guest_word(Guest { mac: mac.0, live: 1 }), 0)
            .map_err(|source| SteerError::map(name::GUESTS, entering(), source))?;
        self.guest_devices
            .insert(slot, port.ifindex, None, 0)
            .map_err(|source| SteerError::map(name::GUEST_DEVICES, entering(), source))?;
        let identity = identity_words(Identity { slot, hub, ..Identity::default() });
        self.identities
            .insert(identity_key(port, mac), identity, 0)
            .map_err(|source| SteerError::map(name::IDENTITIES, entering(), source))
    }

    fn write_home(&mut self, slot: Slot, device: Option<HomeDevice>) -> Result<(), SteerError> {
        self.home_devices
            .set(slot, device.map_or(0, HomeDevice::word), 0)
            .map_err(|source| SteerError::map(name::HOME_DEVICES, format!("enter slot {slot}"), source))
    }

    /// Sends the frames of an existing binding to a hub, and those of connections claimed by a departing agent to
    /// that agent's hub.
    pub(super) fn redirect(
        &mut self,
        binding: SlotBinding,
        hub: u32,
        leaving: Option<u32>,
    ) -> Result<(), SteerError> {
        let SlotBinding { slot, port, mac } = binding;
        let drain = leaving.map_or(0, |hub| hub.saturating_add(1));
        let identity = identity_words(Identity { slot, hub, drain, reserved: 0 });
        // Only replace an existing entry: a removed guest must not reappear.
        self.identities.insert(identity_key(port, mac), identity, BPF_EXIST).map_err(|source| {
            SteerError::map(name::IDENTITIES, format!("send slot {slot} to hub {hub}"), source)
        })
    }

    /// Stores the state that the next agent inherits: the key, and the side of this agent's hubs.
    pub(super) fn set_inherited_state(&mut self, side: u32) -> Result<(), SteerError> {
        let InheritedState { key: CookieKey([a, b]), side, reserved } =
            InheritedState { key: self.key, side: side.into(), reserved: 0 };
        self.agent
            .set(0, [a, b, side, reserved], 0)
            .map_err(|source| SteerError::map(name::AGENT, "write", source))
    }

    /// Frees a slot: first inbound (identity), then outbound (device, guest). Tries all and returns the first error.
    /// The kernel removes the entries of a deleted device by itself.
    pub(super) fn unbind(&mut self, SlotBinding { slot, port, mac }: SlotBinding) -> Result<(), SteerError> {
        let failed = |map| move |source: MapError| SteerError::map(map, format!("free slot {slot}"), source);
        let identity = absent_is_fine(self.identities.remove(&identity_key(port, mac)))
            .map_err(failed(name::IDENTITIES));
        let device = absent_is_fine(self.guest_devices.remove(slot)).map_err(failed(name::GUEST_DEVICES));
        let guest = self.guests.set(slot, 0, 0).map_err(failed(name::GUESTS));
        identity.and(device).and(guest).and(self.write_home(slot, None))
    }

    /// Resets the counts of connections that an ended agent held.
    fn release_connections(&self) -> Result<(), SteerError> {
        self.all_sent().map(|table| table.release_all())
    }
}

impl Maps {
    /// The ports in the table.
    pub(super) fn ports(&self) -> Result<Vec<PortKey>, SteerError> {
        let key = |[netns, ifindex]: [u32; 2]| PortKey { netns, ifindex };
        let keys = self.ports.keys().map(|found| found.map(key));
        keys.collect::<Result<_, _>>().map_err(|source| SteerError::map(name::PORTS, "read", source))
    }

    /// All bound identities, with their slots.
    pub(super) fn identities(&self) -> Result<Vec<(PortKey, Mac, Identity)>, SteerError> {
        let entry = |(key, words): ([u8; 16], _)| {
            let [a, b, c, d, e, f, g, h, mac @ .., _, _] = key;
            let port = PortKey {
                netns: u32::from_ne_bytes([a, b, c, d]),
                ifindex: u32::from_ne_bytes([e, f, g, h]),
            };
            (port, Mac(mac), identity_of(words))
        };
        let entries = self.identities.iter().map(|found| found.map(entry));
        entries.collect::<Result<_, _>>().map_err(|source| SteerError::map(name::IDENTITIES, "read", source))
    }

    /// The binding of an identity, if there is one.
    pub(super) fn identity(&self, port: PortKey, mac: Mac) -> Result<Option<Identity>, SteerError> {
        match self.identities.get(&identity_key(port, mac), 0) {
            Ok(words) => Ok(Some(identity_of(words))),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(source) => Err(SteerError::map(name::IDENTITIES, "read", source)),
        }
    }
}

/// The key of SYN cookies of the agent that owns these maps.
pub(super) fn pinned_key(agent: &std::path::Path) -> Result<Option<CookieKey>, SteerError> {
    let failed = |source| SteerError::map(name::AGENT, "read", source);
    let map = MapData::from_pin(agent).map_err(failed)?;
    let map: Array<_, [u64; 4]> = Array::try_from(Map::Array(map)).map_err(failed)?;
    let [a, b, ..] = map.get(&0, 0).map_err(failed)?;
    Ok(([a, b] != [0; 2]).then_some(CookieKey([a, b])))
}

/// Rejects more addresses than the tables hold.
pub(super) fn check_served(served: &[IpAddr], arp_only: &[Ipv4Addr]) -> Result<(), SteerError> {
    for (family, next_hops) in [(4, arp_only.len()), (6, 0)] {
        let found = next_hops + served.iter().filter(|address| address.is_ipv4() == (family == 4)).count();
        if found > MAX_SERVED as usize {
            return Err(SteerError::TooManyServed { family, found });
        }
    }
    Ok(())
}

pub(super) fn take<M: TryFrom<Map, Error = MapError>>(
    ebpf: &mut Ebpf,
    map: &'static str,
) -> Result<M, SteerError> {
    let taken =
        ebpf.take_map(map).ok_or_else(|| SteerError::map(map, "find", "the object has no such map"))?;
    M::try_from(taken).map_err(|source| SteerError::map(map, "take", source))
}

/// Ignores a missing entry: the kernel removes the entries of a deleted device by itself.
pub(super) fn absent_is_fine(outcome: Result<(), MapError>) -> Result<(), MapError> {
    match outcome {
        Err(error) if errno(&error) == Some(libc::ENOENT) => Ok(()),
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
    }
}

fn last_byte(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    }
}

fn port_words(port: Port) -> [u64; 9] {
    [
        port.frame_ns,
        port.depth_ns,
        port.full_at_ns,
        port.answers,
        port.steered,
        port.connection_ns,
        port.connection_depth_ns,
        port.connections_full_at_ns,
        port.guarded,
    ]
}

fn port_key(PortKey { netns, ifindex }: PortKey) -> [u32; 2] {
    [netns, ifindex]
}

fn identity_key(port: PortKey, mac: Mac) -> [u8; 16] {
    let IdentityKey { port: PortKey { netns, ifindex }, mac, reserved } =
        IdentityKey { port, mac: mac.0, reserved: [0; 2] };
    let mut key = [0; 16];
    key[..4].copy_from_slice(&netns.to_ne_bytes());
    key[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    key[8..14].copy_from_slice(&mac);
    key[14..].copy_from_slice(&reserved);
    key
}

fn identity_of([slot, hub, drain, reserved]: [u32; 4]) -> Identity {
    Identity { slot, hub, drain, reserved }
}

fn identity_words(Identity { slot, hub, drain, reserved }: Identity) -> [u32; 4] {
    [slot, hub, drain, reserved]
}

/// A guest is one word, so that the kernel reads it atomically.
fn guest_word(Guest { mac: [a, b, c, d, e, f], live }: Guest) -> u64 {
    let [x, y] = live.to_ne_bytes();
    u64::from_ne_bytes([a, b, c, d, e, f, x, y])
}

/// What the entry of a port has from its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortDevice {
    /// MTU: bytes of the longest IP packet.
    pub(super) mtu: u32,
    /// It can send a frame back, so that the kernel can answer on it.
    sends_back: bool,
}

impl PortDevice {
    /// Asks for the device of a port; called in its namespace.
    pub(super) fn look(port: &PortName, ifindex: u32) -> Result<Self, SteerError> {
        let (kind, mtu) = netlink::kind_and_mtu(&port.ifname, ifindex)?;
        Ok(Self { mtu, sends_back: sends_back(&kind) })
    }
}

/// A port's device in the agent's own namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HomeDevice {
    pub(super) ifindex: u32,
    /// The classifier sends it all answers, because it accepts no redirected frames or because the mode is `tcx`.
    pub(super) by_classifier: bool,
}

impl HomeDevice {
    /// The entry of the kernel's table.
    pub(super) fn word(self) -> u32 {
        self.ifindex | if self.by_classifier { BARE } else { 0 }
    }
}

/// True for a kind of device that can send a frame back (`XDP_TX`): a tap. A veth can only while its peer, which the
/// guest's side controls, accepts such frames, and the kernel does not report that.
fn sends_back(kind: &str) -> bool {
    kind == netlink::TUN
}

/// Frames by verdict since steering started, summed over CPUs. Each count wraps at 2⁶⁴.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    frames: Vec<u64>,
}

impl Counters {
    /// Takes the counts of [`Verdict::ALL`], in that order.
    fn new(frames: Vec<u64>) -> Self {
        Self { frames }
    }

    /// The number of frames with this verdict.
    #[must_use]
    pub fn get(&self, verdict: Verdict) -> u64 {
        usize::try_from(verdict.index()).ok().and_then(|index| self.frames.get(index)).copied().unwrap_or(0)
    }

    /// Every verdict with its number of frames.
    pub fn iter(&self) -> impl Iterator<Item = (Verdict, u64)> {
        Verdict::ALL.iter().copied().zip(self.frames.iter().copied())
    }
}

/// Claims connections for one worker of a departing agent, through its own descriptor.
#[derive(Debug)]
pub struct FlowClaimer {
    draining: HashMap<MapData, u64, u32>,
    refused: u64,
}

impl FlowClaimer {
    fn new(draining: HashMap<MapData, u64, u32>) -> Self {
        Self { draining, refused: 0 }
    }

    /// Claims a connection, by [`Flow::number`](metadata_common::cookie::Flow::number), while its slot drains. A
    /// connection that is already claimed stays claimed. One system call.
    ///
    /// If the table is full ([`MAX_DRAINING`](metadata_common::maps::MAX_DRAINING)), the connection is not claimed:
    /// the next agent gets its frames and resets it. [`FlowClaimer::refused`] counts these.
    pub fn claim(&mut self, flow: u64) {
        self.refused += u64::from(self.draining.insert(flow, CLAIMED, 0).is_err());
    }

    /// Drops the claim on a connection, if any: the next agent gets its frames. One system call.
    pub fn renounce(&mut self, flow: u64) {
        // A missing entry means the connection already belongs to the next agent.
        let _absent = self.draining.remove(&flow);
    }

    /// Number of connections that found the table full.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

/// Claims a worker's connections in the kernel's table.
impl metadata_datapath::stack::ServedFlows for FlowClaimer {
    fn claim(&mut self, flow: u64) {
        FlowClaimer::claim(self, flow);
    }

    fn renounce(&mut self, flow: u64) {
        FlowClaimer::renounce(self, flow);
    }
}

/// One byte for each last byte of an address: 1 if no served address ends with it.
type LastBytes = [u8; 256];

/// Nothing is ordinary.
static NOTHING: LastBytes = [0; 256];

/// The table by which classifiers pass ordinary traffic at once: the last bytes of addresses that are not served.
///
/// The programs read the table without a look-up, because it is a data section of their objects. All objects of all
/// agents share it. A zero means that the program looks closer, so an empty table costs time and no safety. This is what
/// the table holds, or will hold once it is loaded; clones share it.
#[derive(Clone)]
pub(super) struct OrdinaryTable(Arc<Mutex<OrdinaryState>>);

struct OrdinaryState {
    map: Option<Array<MapData, LastBytes>>,
    /// The table while no trace includes passing frames.
    untraced: &'static LastBytes,
    is_traced: bool,
}

impl OrdinaryState {
    fn wanted(&self) -> &'static LastBytes {
        if self.is_traced { &NOTHING } else { self.untraced }
    }

    fn write(&mut self) -> Result<(), SteerError> {
        let wanted = self.wanted();
        let Some(map) = &mut self.map else { return Ok(()) };
        map.set(0, *wanted, 0).map_err(|source| table_failed("change", source))
    }
}

fn table_failed(action: &'static str, source: MapError) -> SteerError {
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
                let map = MapData::from_pin(pins.map(name::ORDINARY).path())
                    .map_err(|e| table_failed("open", e))?;
                let map = Array::try_from(Map::Array(map)).map_err(|e| table_failed("open", e))?;
                keep(map.get(&0, 0).map_err(|e| table_failed("read", e))?)
            }
        };
        Ok(Self(Arc::new(Mutex::new(OrdinaryState { map: None, untraced, is_traced: false }))))
    }

    fn with<T>(&self, f: impl FnOnce(&mut OrdinaryState) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes the next load write the present table: a load overwrites data sections, including shared ones.
    pub(super) fn prepare(&self, loader: &mut EbpfLoader<'static>) {
        loader.override_global(name::ORDINARY_SYMBOL, self.with(|state| state.wanted()), true);
    }

    /// Takes the map out of a loaded object.
    pub(super) fn take(&self, ebpf: &mut Ebpf) -> Result<(), SteerError> {
        let map = ebpf
            .take_map(name::ORDINARY)
            .ok_or_else(|| SteerError::map(name::ORDINARY, "find", "the object has no such map"))?;
        let map = map.try_into().map_err(|source| table_failed("take", source))?;
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
            let is_ours = map.get(&0, 0).map_err(|source| table_failed("read", source))? == NOTHING;
            if is_ours { state.write() } else { Ok(()) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Counters, check_served, guest_word, identity_key, port_words};
    use crate::SteerError;
    use metadata_common::mac::Mac;
    use metadata_common::maps::{Guest, IdentityKey, MAX_SERVED, Port, PortKey};
    use metadata_common::verdict::Verdict;
    use std::mem::offset_of;
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    const MAC: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

    #[test]
    fn an_identity_key_has_the_layout_the_kernel_side_reads() {
        let key = identity_key(PortKey { netns: 0x0102_0304, ifindex: 0x0506_0708 }, MAC);
        let port = offset_of!(IdentityKey, port);
        let ifindex = port + offset_of!(PortKey, ifindex);
        assert_eq!(key[port..][..4], 0x0102_0304_u32.to_ne_bytes());
        assert_eq!(key[ifindex..][..4], 0x0506_0708_u32.to_ne_bytes());
        assert_eq!(key[offset_of!(IdentityKey, mac)..][..6], MAC.0);
        assert_eq!(key[offset_of!(IdentityKey, reserved)..], [0, 0]);
    }

    #[test]
    fn a_guest_has_the_layout_the_kernel_side_reads() {
        let word = guest_word(Guest { mac: MAC.0, live: 1 }).to_ne_bytes();
        assert_eq!(word[offset_of!(Guest, mac)..][..6], MAC.0);
        assert_eq!(word[offset_of!(Guest, live)..], 1_u16.to_ne_bytes());
    }

    #[test]
    fn a_port_has_the_layout_the_kernel_side_reads() {
        let port = Port { guarded: 7, ..Port::with_limit(1_000, 2).and_connections(10, 3) };
        let bytes: Vec<u8> = port_words(port).into_iter().flat_map(u64::to_ne_bytes).collect();
        assert_eq!(bytes, port.to_bytes());
    }

    #[test]
    fn served_addresses_are_limited_by_family() {
        let v4 = |n: u32| IpAddr::from(Ipv4Addr::from(n));
        let v6 = |n: u32| IpAddr::from(Ipv6Addr::from(u128::from(n)));
        let full: Vec<IpAddr> = (0..MAX_SERVED).map(v4).chain((0..MAX_SERVED).map(v6)).collect();
        assert!(check_served(&full, &[]).is_ok());
        let one_hop = check_served(&full, &[Ipv4Addr::new(62, 210, 0, 1)]).expect_err("one too many");
        assert!(matches!(one_hop, SteerError::TooManyServed { family: 4, found: 33 }), "{one_hop}");
        for (one_more, family) in [(v4(MAX_SERVED), 4), (v6(MAX_SERVED), 6)] {
            let mut over = full.clone();
            over.push(one_more);
            let error = check_served(&over, &[]).expect_err("one too many");
            assert!(
                matches!(error, SteerError::TooManyServed { family: f, found: 33 } if f == family),
                "{error}"
            );
        }
    }

    #[test]
    fn each_verdict_has_its_own_count() {
        let counters = Counters::new((0..u64::from(Verdict::COUNT)).map(|n| n * 10).collect());
        for (verdict, frames) in counters.iter() {
            assert_eq!(frames, u64::from(verdict.index()) * 10, "{verdict:?}");
            assert_eq!(counters.get(verdict), frames, "{verdict:?}");
        }
        assert_eq!(counters.iter().count(), Verdict::ALL.len());
    }
}
