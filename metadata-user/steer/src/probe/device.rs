//! One port's device, and what is on it already.

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage};
use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcOption};

use super::super::{SteerError, devstats};
use super::Failure;
use metadata_base::port::PortName;
use metadata_links::netlink;
use metadata_links::netns::{self, Netns};

/// Classifiers named of one device at most.
const FILTERS_TOLD: usize = 16;

/// A device as it is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its index in its namespace.
    pub ifindex: u32,
    /// `tap`, `veth`, `macvtap`, …; `physical device` when the kernel names no kind.
    pub kind: String,
    /// Frames on it begin with an Ethernet header.
    pub ethernet: bool,
    /// It is up.
    pub up: bool,
    /// Octets of payload a frame may have.
    pub mtu: u32,
    /// Receive queues.
    pub queues: u32,
    /// Frames that wait for its reader at most: of a tap, the length of its ring.
    pub ring: u32,
    /// Frames it has not taken since it was made, whoever's.
    pub refused: u64,
    /// Whether frames can be redirected to it; `None` where the kernel does not say (before Linux 6.3).
    pub takes_redirected: Option<bool>,
    /// Its bridge or other master: name and kind.
    pub master: Option<(String, String)>,
    /// XDP programs on it.
    pub xdp: Vec<Program>,
    /// Classifiers by tcx where its frames come in; `None` when the kernel cannot be asked.
    pub tcx: Option<Vec<Program>>,
    /// Classifiers by a queueing discipline (`clsact`, `ingress`) where its frames come in.
    pub filters: Vec<Filter>,
}

/// A program in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its number.
    pub id: u32,
    /// Its name, where the kernel tells.
    pub name: Option<String>,
}

/// A classifier of the older kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Filter {
    /// `bpf`, `flower`, `matchall`, …
    pub kind: String,
    /// Of `bpf`: what the program is called.
    pub name: Option<String>,
}

/// Looks at a port's device; `None` when its namespace has no such device.
///
/// # Errors
/// When the namespace cannot be opened or entered, or the kernel does not say.
pub fn device(port: &PortName) -> Result<Option<Device>, Failure> {
    let netns = port.netns.as_deref().map_or_else(Netns::own, Netns::open)?;
    Ok(netns.run(|| match netns::index_of(&port.ifname)? {
        Some(ifindex) => look(&port.ifname, ifindex).map(Some),
        None => Ok(None),
    })?)
}

fn look(name: &str, ifindex: u32) -> Result<Device, SteerError> {
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
    Ok(Device {
        ifindex,
        kind: netlink::kind(name, ifindex)?,
        ethernet: message.header.link_layer_type == LinkLayerType::Ether,
        up: message.header.flags.contains(LinkFlags::Up),
        mtu: mtu.unwrap_or_default(),
        queues: queues.unwrap_or(1),
        ring: ring.unwrap_or_default(),
        refused: refused.unwrap_or_default(),
        takes_redirected: devstats::takes_redirected(ifindex),
        master: master(&message),
        xdp: netlink::xdp_programs(name, ifindex)?.into_iter().map(program).collect(),
        tcx: SchedClassifier::query_tcx(name, TcAttachType::Ingress)
            .map(|(_, programs)| programs.iter().map(described).collect())
            .ok(),
        filters: filters(name, ifindex)?,
    })
}

/// A master is in the same namespace, unless it has gone just now.
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
    // The kernel takes a signed number, and gives none that is not positive.
    let index = i32::try_from(ifindex).unwrap_or_default();
    let messages = netlink::talk(
        || format!("list the classifiers on {name}"),
        async |netlink| netlink.traffic_filter(index).get().ingress().execute().try_collect::<Vec<_>>().await,
    );
    // A device without a discipline to hold any has none.
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
    let mut filters: Vec<_> = filters.take(FILTERS_TOLD).collect();
    // The kernel lists each classifier's place as well as the classifier.
    filters.sort();
    filters.dedup();
    if filters.iter().any(|filter| filter.name.is_some()) {
        filters.retain(|filter| filter.kind != "bpf" || filter.name.is_some());
    }
    Ok(filters)
}
