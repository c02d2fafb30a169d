//! Probes what steering needs, for `xdp-imds doctor`, without lasting changes. A probe that creates something does so
//! in its own network namespace, which goes with the probe's thread even if that is killed.

pub use super::error::ProbeError;
pub use super::features::{Feature, FeatureText, ProbeResult, missing_helpers};

use aya::Ebpf;
use aya::maps::{Map, MapData, PerCpuArray};
use aya::programs::links::{self, FdLink};
use aya::programs::xdp::XdpLink;
use aya::programs::{
    ProgramError, ProgramInfo, SchedClassifier, TcAttachType, Xdp, XdpMode, loaded_programs,
};
use futures_util::TryStreamExt as _;
use metadata_common::cookie::CookieKey;
use metadata_common::maps::{name, program};
use metadata_common::port::PortName;
use metadata_common::siphash::SipKey;
use metadata_common::verdict::Verdict;
use metadata_datapath::afxdp::{Socket, SocketConfig};
use metadata_links::error::LinkError;
use metadata_links::netns::{self, Netns};
use metadata_links::{ioctl, netlink};
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage};
use rtnetlink::packet_route::route::{RouteFlags, RouteMessage, RouteType};
use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcOption};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::hub_devices::{is_as_made, names as hub_names};
use super::object::{Object, load_program};
use super::{HUBS_OF_A_SIDE, SteerConfig, SteerError, Steering, devices, pins};

// A port's device, and the programs on it.

/// Limit on classifiers reported for one device.
const FILTERS_LISTED: usize = 16;

/// State of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    /// Interface index in its namespace.
    pub ifindex: u32,
    /// `tap`, `veth`, `macvtap`, …; `physical device` if the kernel reports no kind.
    pub kind: String,
    /// Its frames begin with an Ethernet header.
    pub ethernet: bool,
    /// The device is up.
    pub up: bool,
    /// MTU in bytes: the longest payload of a frame.
    pub mtu: u32,
    /// Number of receive queues.
    pub queues: u32,
    /// Transmit queue length in frames; for a tap, the length of its ring.
    pub ring: u32,
    /// Frames rejected since the device was made, from any sender.
    pub refused: u64,
    /// Whether it accepts redirected frames; `None` if the kernel does not report it (before Linux 6.3).
    pub takes_redirected: Option<bool>,
    /// Its bridge or other master: name and kind.
    pub master: Option<(String, String)>,
    /// XDP programs on it.
    pub xdp: Vec<Program>,
    /// Classifiers attached through tcx to its ingress; `None` if the kernel has no such query.
    pub tcx: Option<Vec<Program>>,
    /// Classifiers attached by a queueing discipline (`clsact`, `ingress`) to its ingress.
    pub filters: Vec<Filter>,
}

/// An eBPF program in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its number in the kernel.
    pub id: u32,
    /// Its name, if the kernel reports one.
    pub name: Option<String>,
}

/// A classifier attached by a queueing discipline.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Filter {
    /// `bpf`, `flower`, `matchall`, …
    pub kind: String,
    /// The name of the program, for `bpf`.
    pub name: Option<String>,
}

/// Examines a port's device; `None` if its namespace has no such device.
///
/// # Errors
/// If the namespace cannot be opened or entered, or the kernel refuses a query.
pub fn device(port: &PortName) -> Result<Option<DeviceState>, ProbeError> {
    let netns = port.netns.as_deref().map_or_else(Netns::own, Netns::open)?;
    Ok(netns.run(|| match netns::index_of(&port.ifname)? {
        Some(ifindex) => look(&port.ifname, ifindex).map(Some),
        None => Ok(None),
    })?)
}

fn look(name: &str, ifindex: u32) -> Result<DeviceState, SteerError> {
    let message = netlink::link_of(name, ifindex)?;
    let number = |pick: fn(&LinkAttribute) -> Option<u32>| message.attributes.iter().find_map(pick);
    let mtu = number(|attribute| if let LinkAttribute::Mtu(mtu) = attribute { Some(*mtu) } else { None });
    let queues =
        number(|attribute| if let LinkAttribute::NumRxQueues(n) = attribute { Some(*n) } else { None });
    let ring = number(|attribute| if let LinkAttribute::TxQueueLen(n) = attribute { Some(*n) } else { None });
    let refused = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Stats64(counts) => Some(counts.tx_dropped),
        _ => None,
    });
    Ok(DeviceState {
        ifindex,
        kind: netlink::kind(name, ifindex)?,
        ethernet: message.header.link_layer_type == LinkLayerType::Ether,
        up: message.header.flags.contains(LinkFlags::Up),
        mtu: mtu.unwrap_or_default(),
        queues: queues.unwrap_or(1),
        ring: ring.unwrap_or_default(),
        refused: refused.unwrap_or_default(),
        takes_redirected: devices::takes_redirected(ifindex),
        master: master(&message),
        xdp: netlink::xdp_programs(name, ifindex)?.into_iter().map(describe_program).collect(),
        tcx: SchedClassifier::query_tcx(name, TcAttachType::Ingress)
            .map(|(_, programs)| programs.iter().map(described).collect())
            .ok(),
        filters: filters(name, ifindex)?,
    })
}

/// A master is in the same namespace, unless it was just removed.
fn master(message: &LinkMessage) -> Option<(String, String)> {
    let index = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Controller(index) => Some(*index),
        _ => None,
    })?;
    let found = netlink::link_of("the port's master", index).ok()?;
    let name = found.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let kind = netlink::kind(&name, index).ok()?;
    Some((name, kind))
}

fn describe_program(id: u32) -> Program {
    let info = loaded_programs().flatten().find(|info| info.id() == id);
    info.as_ref().map_or(Program { id, name: None }, described)
}

fn described(info: &ProgramInfo) -> Program {
    let name = info.name_as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    Program { id: info.id(), name }
}

fn filters(name: &str, ifindex: u32) -> Result<Vec<Filter>, SteerError> {
    // The kernel expects a signed index, and every index is positive.
    let index = i32::try_from(ifindex).unwrap_or_default();
    let messages = netlink::request(
        || format!("list the classifiers on {name}"),
        async |netlink| netlink.traffic_filter(index).get().ingress().execute().try_collect::<Vec<_>>().await,
    );
    // A device without a queueing discipline has no classifiers.
    let Ok(messages) = messages else { return Ok(Vec::new()) };
    let filters = messages.iter().filter_map(|message| {
        let kind = message.attributes.iter().find_map(|attribute| match attribute {
            TcAttribute::Kind(kind) => Some(kind.clone()),
            _ => None,
        })?;
        let options = message.attributes.iter().filter_map(|attribute| match attribute {
            TcAttribute::Options(options) => Some(options),
            _ => None,
        });
        let name = options.flatten().find_map(|option| match option {
            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => Some(name.clone()),
            _ => None,
        });
        Some(Filter { kind, name })
    });
    let mut filters: Vec<_> = filters.take(FILTERS_LISTED).collect();
    // The kernel lists the hook of each classifier as well as the classifier.
    filters.sort();
    filters.dedup();
    if filters.iter().any(|filter| filter.name.is_some()) {
        filters.retain(|filter| filter.kind != "bpf" || filter.name.is_some());
    }
    Ok(filters)
}

// Features of the kernel that need a device, and a whole start, each in its own network namespace.

/// The interface index of the loopback, which exists in every new network namespace.
const LOOPBACK_INDEX: u32 = 1;

/// Whether the kernel has each feature. It attaches programs in its own network namespace.
#[must_use]
pub fn features() -> Vec<(Feature, ProbeResult)> {
    let staged = alone(|| Ok(staged_features()));
    let staged = |feature| match &staged {
        Ok(found) => found.iter().find(|(of, _)| *of == feature).map_or(Ok(false), |(_, had)| had.clone()),
        Err(failure) => Err(failure.clone()),
    };
    Feature::ALL.map(|feature| (feature, feature.ask().unwrap_or_else(|| staged(feature)))).into()
}

/// The features that need a device: a loopback of a private namespace.
fn staged_features() -> Vec<(Feature, ProbeResult)> {
    let mut found = Vec::new();
    // The programs attached here do not read the namespace's cookie, which an old kernel does not have.
    let home = netns::cookie().unwrap_or(netns::Cookie::from_number(0));
    let mut ebpf = match Object::load((CookieKey([0; 2]), SipKey([0; 2])), 0, home, None, (false, false)) {
        Ok((_, ebpf)) => ebpf,
        Err(error) => {
            let failure = ProbeError::from(error);
            return [Feature::Link, Feature::LinkUpdate].map(|of| (of, Err(failure.clone()))).into();
        }
    };
    match first(&mut ebpf) {
        Ok(link) => {
            found.push((Feature::Link, Ok(true)));
            found.push((Feature::LinkUpdate, second(&mut ebpf, link)));
        }
        Err(failure) => found.push((Feature::Link, failure.map_or(Ok(false), Err))),
    }
    found
}

/// Attaches a program to the loopback through `bpf_link`; `None` if it was attached in another way.
fn first(ebpf: &mut Ebpf) -> Result<FdLink, Option<ProbeError>> {
    let program = load_program(ebpf, program::SOCKET).map_err(|error| Some(error.into()))?;
    let put = |program: &mut Xdp| -> Result<XdpLink, ProgramError> {
        let id = program.attach_to_if_index(LOOPBACK_INDEX, XdpMode::Skb)?;
        program.take_link(id)
    };
    let link = put(program).map_err(|error| Some(ProbeError::of(&error)))?;
    link.try_into().map_err(|_| None)
}

fn second(ebpf: &mut Ebpf, link: FdLink) -> ProbeResult {
    let program = load_program(ebpf, program::HUB).map_err(ProbeError::from)?;
    let link = XdpLink::try_from(link).map_err(|error| ProbeError::of(&error))?;
    program.attach_to_link(link).map_err(|error| ProbeError::of(&error))?;
    Ok(true)
}

/// Runs the first steps of serving in a private network namespace: makes the hub and its sockets, and attaches a tap.
/// Takes about as long as a start.
///
/// # Errors
/// The first failing step, with the error of the kernel.
pub fn rehearse(config: &SteerConfig) -> Result<(), ProbeError> {
    let tap = "rehearsal";
    alone(|| {
        let mut steering = Steering::start(config)?;
        let hubs = steering.hubs().all().to_vec();
        let mut sockets = Vec::new();
        for hub in &hubs {
            let socket = Socket::bind(hub.inner_ifindex, 0, &SocketConfig::default())
                .map_err(|error| ProbeError::of(&error))?;
            steering.maps_mut().register_socket(hub.number, 0, socket.as_fd())?;
            sockets.push(socket);
        }
        let _guest = ioctl::create_tap(tap, ioctl::Preamble::None)?;
        steering.attach(&PortName::local(tap))?;
        Ok(())
    })
}

/// Runs `visit` on a thread in a new network namespace that ends with the thread.
#[expect(unsafe_code, reason = "a thread leaves its namespace by unshare(2), which has no safe form")]
fn alone<T: Send>(visit: impl FnOnce() -> Result<T, ProbeError> + Send) -> Result<T, ProbeError> {
    let inside = || {
        // SAFETY: unsharing the network namespace touches no file descriptor table, which is what the function is
        // unsafe for; it moves this thread alone, which ends below.
        let left = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
        left.map_err(|errno| {
            let error = io::Error::from(errno);
            let text = format!("cannot make a network namespace for the test: {error}");
            ProbeError { text, ..error.into() }
        })?;
        visit()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("probe".into()).spawn_scoped(scope, inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

// Conflicts on the node: devices with the hub's names, owners of served addresses, pins.

/// Limit on pinned links examined.
const LINKS_SEEN: usize = 65_536;

/// How the node itself uses a served address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressUse {
    /// The served address.
    pub address: IpAddr,
    /// The address belongs to the node.
    pub own: bool,
    /// Prefix length in bits of the route to it: 0 for the default route, `None` for no route.
    pub routed: Option<u8>,
    /// The neighbour on the link that answers for it.
    pub neighbour: Option<String>,
}

/// Devices of the calling thread's namespace with a name that a hub would use: name and kind.
///
/// # Errors
/// If the kernel refuses to list devices.
pub fn hub_devices(prefix: &str, hubs: u32) -> Result<Vec<(String, String)>, ProbeError> {
    let mut found = Vec::new();
    // An agent uses either side of the hub numbers.
    let sides = [0, HUBS_OF_A_SIDE];
    let numbers = sides.into_iter().flat_map(|first| first..first + hubs.min(HUBS_OF_A_SIDE));
    for name in numbers.flat_map(|number| hub_names(prefix, number)) {
        if let Some(ifindex) = netns::index_of(&name)? {
            let kind = netlink::kind(&name, ifindex)?;
            found.push((name, kind));
        }
    }
    Ok(found)
}

/// The devices of hubs, as [`hub_devices`] has them, that are down or do not have the MTU that the agent set.
///
/// # Errors
/// If the kernel refuses to list devices.
pub fn hub_devices_down(prefix: &str, hubs: u32) -> Result<Vec<String>, ProbeError> {
    let mut down = Vec::new();
    for (name, kind) in hub_devices(prefix, hubs)? {
        let is_ours = kind == netlink::VETH || kind == netlink::TUN;
        if let Some(ifindex) = netns::index_of(&name)?.filter(|_| is_ours)
            && !is_as_made(&netlink::link_of(&name, ifindex)?)
        {
            down.push(name);
        }
    }
    Ok(down)
}

/// Steered frames that found the rings of the hubs' veths full, since the veths were made.
///
/// # Errors
/// If the kernel refuses the statistics.
pub fn veth_full(prefix: &str, hubs: u32) -> Result<u64, ProbeError> {
    let dropped = devices::dropped()?;
    let numbers = [0, HUBS_OF_A_SIDE].into_iter().flat_map(|first| first..first + hubs.min(HUBS_OF_A_SIDE));
    let mut sum = 0;
    for [outer, ..] in numbers.map(|number| hub_names(prefix, number)) {
        let ifindex = netns::index_of(&outer)?;
        let counts = dropped.iter().find(|(index, _)| Some(*index) == ifindex);
        sum += counts.map_or(0, |(_, counts)| counts.tx);
    }
    Ok(sum)
}

/// Frames of quiet guests in other namespaces that found a hub's ring full, read from an agent's pinned counters; 0
/// without pins.
#[must_use]
pub fn ring_full(pins: &Path) -> u64 {
    let map = MapData::from_pin(pins::map_of(pins, name::COUNTERS)).ok();
    let counters = map.and_then(|map| PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(map)).ok());
    let counted = counters.and_then(|counters| counters.get(&Verdict::RingDropFull.index(), 0).ok());
    counted.map_or(0, |by_cpu| by_cpu.iter().sum())
}

/// How the calling thread's namespace uses these addresses. Nothing is sent.
///
/// # Errors
/// If the kernel refuses to list neighbours.
pub fn address_uses(addresses: &[IpAddr]) -> Result<Vec<AddressUse>, ProbeError> {
    let neighbours = neighbours()?;
    let uses = addresses.iter().map(|address| {
        let route = route(*address).ok();
        AddressUse {
            address: *address,
            own: route.as_ref().is_some_and(|route| route.header.kind == RouteType::Local),
            routed: route.as_ref().map(|route| route.header.destination_prefix_length),
            neighbour: neighbours.get(address).cloned(),
        }
    });
    Ok(uses.collect())
}

/// The route that applies to an address.
fn route(address: IpAddr) -> Result<RouteMessage, LinkError> {
    let mut question = match address {
        IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(v4, 32).build(),
        IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(v6, 128).build(),
    };
    question.header.flags |= RouteFlags::FibMatch;
    netlink::request(
        || format!("look up the route to {address}"),
        async |netlink| {
            let mut answer = std::pin::pin!(netlink.route().get(question).execute());
            answer.try_next().await?.ok_or(rtnetlink::Error::RequestFailed)
        },
    )
}

/// Neighbours on the link with a known MAC address.
fn neighbours() -> Result<BTreeMap<IpAddr, String>, SteerError> {
    let listed = netlink::request(
        || "list the neighbours".to_owned(),
        async |netlink| {
            let mut all = Vec::new();
            for family in [AddressFamily::Inet, AddressFamily::Inet6] {
                let request = netlink.neighbours().get().set_address_family(family);
                all.extend(request.execute().try_collect::<Vec<_>>().await?);
            }
            Ok(all)
        },
    )?;
    Ok(listed.iter().filter_map(known).collect())
}

fn known(message: &NeighbourMessage) -> Option<(IpAddr, String)> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })?;
    let link = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => Some(bytes),
        _ => None,
    })?;
    Some((address, link.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")))
}

/// A link in a bpffs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedLink {
    /// Name of its file.
    pub name: String,
    /// Interface index of its device, 0 once the device is gone; `None` if the kernel does not report it.
    pub ifindex: Option<u32>,
}

/// Whether an agent runs or starts with the pins in a directory, whatever its run directory and its hub are.
///
/// # Errors
/// If the directory may not be examined.
pub fn pins_are_held(pins: &Path) -> Result<bool, ProbeError> {
    pins::are_held(pins).map_err(|error| ProbeError::of(&error))
}

/// The links pinned in a directory of a bpffs; empty if there is no such directory.
///
/// # Errors
/// If the directory cannot be read.
pub fn pinned_links(directory: &Path) -> Result<Vec<PinnedLink>, ProbeError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries.take(LINKS_SEEN) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        found.push(PinnedLink { ifindex: device_of(&entry.path()), name });
    }
    Ok(found)
}

/// The kernel reports a link's device next to its descriptor: `ifindex` in `/proc/self/fdinfo`.
fn device_of(pin: &Path) -> Option<u32> {
    let link: FdLink = links::PinnedLink::from_pin(pin).ok()?.into();
    let number = format!("link_id:\t{}", link.info().ok()?.id());
    let told = fs::read_dir("/proc/self/fdinfo").ok()?.flatten().find_map(|entry| {
        let text = fs::read_to_string(entry.path()).ok()?;
        text.lines().any(|line| line == number).then_some(text)
    })?;
    told.lines().find_map(|line| line.strip_prefix("ifindex:")?.trim().parse().ok())
}

// Other network namespaces, in which a device may be that is not where it was expected.

/// Limit on network namespaces searched.
pub const NAMESPACES_SEARCHED: usize = 2_048;
/// Limit on processes whose namespace is searched.
pub const PROCESSES_SEARCHED: usize = 32_768;
/// Limit on places reported for one name.
pub const PLACES_TOLD: usize = 4;

/// A place where a device of the name exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLocation {
    /// Its namespace as a port may name it; `None` is the agent's own.
    pub netns: Option<String>,
    /// PID and name of a process in that namespace, if the namespace is named through a process.
    pub process: Option<(u32, String)>,
}

/// The result of the search for one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// The first [`PLACES_TOLD`] places.
    pub places: Vec<DeviceLocation>,
    /// The total number of places.
    pub found: usize,
    /// Namespaces and processes that could not be searched, or exceeded the limits.
    pub unseen: usize,
}

/// Searches for devices in all network namespaces that have a name or a process.
#[must_use]
pub fn search(ifnames: &BTreeSet<String>) -> BTreeMap<String, Search> {
    let (namespaces, mut unseen) = namespaces();
    let mut found: BTreeMap<String, Search> =
        ifnames.iter().map(|name| (name.clone(), Search::default())).collect();
    if ifnames.is_empty() {
        return found;
    }
    for (path, place) in namespaces {
        let inside =
            path.map_or_else(Netns::own, |path| Netns::open(&path.to_string_lossy())).and_then(|netns| {
                netns.run(|| {
                    Ok(ifnames.iter().filter(|name| matches!(netns::index_of(name), Ok(Some(_)))).collect())
                })
            });
        let Ok(inside): Result<Vec<&String>, _> = inside else {
            unseen += 1;
            continue;
        };
        for name in inside {
            let Some(search) = found.get_mut(name) else { continue };
            search.found += 1;
            if search.places.len() < PLACES_TOLD {
                search.places.push(place.clone());
            }
        }
    }
    for search in found.values_mut() {
        search.unseen = unseen;
    }
    found
}

/// Each namespace once: the agent's own, then named ones, then those that only processes have. Also the number of
/// those that could not be identified.
fn namespaces() -> (Vec<(Option<PathBuf>, DeviceLocation)>, usize) {
    let mut seen = BTreeSet::new();
    let mut all = vec![(None, DeviceLocation { netns: None, process: None })];
    let mut unseen = 0;
    if let Ok(own) = fs::metadata(netns::OWN) {
        seen.insert((own.dev(), own.ino()));
    }
    for entry in fs::read_dir(netns::RUN_NETNS).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        add(
            entry.path(),
            DeviceLocation { netns: Some(name), process: None },
            &mut seen,
            &mut all,
            &mut unseen,
        );
    }
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for (number, pid) in processes.enumerate() {
        let path = format!("/proc/{pid}/ns/net");
        if number >= PROCESSES_SEARCHED {
            unseen += 1;
            continue;
        }
        let called = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let process = Some((pid, called.trim().to_owned()));
        add(
            path.clone().into(),
            DeviceLocation { netns: Some(path), process },
            &mut seen,
            &mut all,
            &mut unseen,
        );
    }
    (all, unseen)
}

fn add(
    path: PathBuf,
    place: DeviceLocation,
    seen: &mut BTreeSet<(u64, u64)>,
    all: &mut Vec<(Option<PathBuf>, DeviceLocation)>,
    unseen: &mut usize,
) {
    match fs::metadata(&path) {
        Ok(file) if !seen.insert((file.dev(), file.ino())) => {}
        Ok(_) if all.len() >= NAMESPACES_SEARCHED => *unseen += 1,
        Ok(_) => all.push((Some(path), place)),
        // It ended meanwhile; other processes in its namespace still lead to that namespace.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(_) => *unseen += 1,
    }
}

#[cfg(test)]
mod tests {
    use super::search;
    use std::collections::BTreeSet;

    #[test]
    fn a_local_device_is_found_once_and_a_missing_one_not_at_all() {
        let names: BTreeSet<String> = ["lo".into(), "no-such-device".into()].into();
        let found = search(&names);
        let own = found["lo"].places.iter().filter(|place| place.netns.is_none()).count();
        assert_eq!((own, found["no-such-device"].found), (1, 0), "{found:?}");
    }
}
