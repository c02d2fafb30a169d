//! Probes what steering needs, for `xdp-imds doctor`, without lasting changes. A probe that creates something does so
//! in a network namespace of its own, which goes with the probe's thread even if that is killed.

mod kernel;
mod node;
mod search;

pub use super::failure::ProbeError;
pub use super::features::{Feature, FeatureText, ProbeResult, missing_helpers};
pub use kernel::{features, rehearse};
pub use node::{
    AddressUse, PinnedLink, address_uses, hub_devices, hub_devices_down, pinned_links, ring_full, veth_full,
};
pub use search::{DeviceLocation, NAMESPACES_SEARCHED, PLACES_TOLD, PROCESSES_SEARCHED, Search, search};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use futures_util::TryStreamExt as _;
use metadata_common::port::PortName;
use metadata_links::netns::Netns;
use metadata_links::{netlink, netns};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage};
use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcOption};

use super::{SteerError, counters};

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
    /// Frames rejected since the device was made, whoever sent them.
    pub refused: u64,
    /// Whether it accepts redirected frames; `None` if the kernel does not report it (before Linux 6.3).
    pub takes_redirected: Option<bool>,
    /// Its bridge or other master: name and kind.
    pub master: Option<(String, String)>,
    /// XDP programs on it.
    pub xdp: Vec<Program>,
    /// Classifiers attached by tcx to its ingress; `None` if the kernel has no such query.
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
    let message = netlink::look(name, ifindex)?;
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
        takes_redirected: counters::takes_redirected(ifindex),
        master: master(&message),
        xdp: netlink::xdp_programs(name, ifindex)?.into_iter().map(program).collect(),
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
    let found = netlink::look("the port's master", index).ok()?;
    let name = found.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let kind = netlink::kind(&name, index).ok()?;
    Some((name, kind))
}

fn program(id: u32) -> Program {
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
    let messages = netlink::talk(
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
