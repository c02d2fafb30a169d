//! What steering is started with.

use metadata_common::cookie::CookieKey;
use metadata_common::siphash::SipKey;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// Which program steers the ports.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum SteeringMode {
    /// The XDP program: cheapest for the service, most expensive for guests with bulk traffic.
    Xdp,
    /// The classifier: cheapest for guests' bulk traffic. Needs a kernel with tcx.
    Tcx,
    /// XDP while a guest boots (it sends many requests), the classifier alone once it is quiet. XDP where no
    /// classifier is possible.
    #[default]
    Auto,
}

/// How much one port may send to the metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct PortLimits {
    /// Frames per second in the long run, at most [`PortLimits::RATE_MOST`]; 0 means no limit.
    pub frames_per_second: u32,
    /// Frames at once after a pause, at most [`PortLimits::RATE_MOST`].
    pub burst: u32,
    /// New connections per second in the long run, at most [`PortLimits::RATE_MOST`]. Each SYN counts, retransmitted
    /// ones too. 0 means no limit.
    pub connections_per_second: u32,
    /// New connections at once after a pause, at most [`PortLimits::RATE_MOST`].
    pub connection_burst: u32,
}

impl PortLimits {
    /// Largest value of each.
    pub const RATE_MOST: u32 = 100_000_000;
}

impl Default for PortLimits {
    /// 10,000 frames a second and 2,048 at once, 200 connections a second and 512 at once. This is far above what
    /// booting needs (63 connections, each tried up to eight times) and far below a flood.
    fn default() -> Self {
        Self { frames_per_second: 10_000, burst: 2_048, connections_per_second: 200, connection_burst: 512 }
    }
}

/// Configuration of [`Steering::start`](super::Steering::start).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SteerConfig {
    /// Prefix of the hub's device names, 1 to [`HUB_PREFIX_MAX`](super::HUB_PREFIX_MAX) bytes: `imds` makes `imds-out`,
    /// `imds-in`, `imds-tap` and `imds-gso`.
    pub hub: String,
    /// The metadata addresses, at most 32 of each family.
    pub served: Vec<IpAddr>,
    /// Next hops for which ARP is answered but IP passes. They count as served IPv4 addresses.
    pub arp_only: Vec<Ipv4Addr>,
    /// Applied to each port separately.
    pub limits: PortLimits,
    /// What the kernel answers by itself on taps: [`ANSWER_LINK`](metadata_common::maps::ANSWER_LINK),
    /// [`ANSWER_TCP`](metadata_common::maps::ANSWER_TCP), which requires a stack that knows `key`, and
    /// [`ANSWER_REQUESTS`](metadata_common::maps::ANSWER_REQUESTS), which requires the latter.
    pub answers: u64,
    /// The key of SYN cookies, unless one is inherited: see [`Maps::key`](super::Maps::key).
    pub key: CookieKey,
    /// The key of the requests that the kernel answers ([`DocumentTable::hash`](super::DocumentTable::hash)).
    pub request_key: SipKey,
    /// Where links and maps are pinned: a directory on a bpffs. It is made if its parent exists. `None` pins nothing.
    pub pins: Option<PathBuf>,
    /// Whether another agent runs with the same pins.
    pub adopt: PreviousAgent,
    /// Which program steers ports.
    pub mode: SteeringMode,
    /// Number of hubs that share the slots, 1 to [`HUBS_OF_A_SIDE`](super::HUBS_OF_A_SIDE).
    pub hubs: u32,
    /// Receive queues of each hub, 1 to [`HUB_QUEUES`](super::HUB_QUEUES). The ring of a queue holds 256 frames
    /// (`VETH_RING_SIZE`, drivers/net/veth.c), so CPUs that share a queue lose frames under a flood.
    pub queues: u32,
}

impl Default for SteerConfig {
    fn default() -> Self {
        Self {
            hub: "imds".into(),
            served: Vec::new(),
            arp_only: Vec::new(),
            limits: PortLimits::default(),
            answers: 0,
            key: CookieKey([0; 2]),
            request_key: SipKey([0; 2]),
            pins: None,
            adopt: PreviousAgent::Alone,
            mode: SteeringMode::default(),
            hubs: 1,
            queues: 1,
        }
    }
}

/// Whether another agent runs with the same pins at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreviousAgent {
    /// No other agent runs with these pins; finding one is an error. The pins of an ended agent are inherited.
    #[default]
    Alone,
    /// Another agent runs with these pins, on the other side. Take over from it.
    TakeOver {
        /// The free side: 0 or 1.
        side: u32,
    },
}

impl PreviousAgent {
    /// The side on which hubs are made.
    #[must_use]
    pub fn side(self) -> u32 {
        match self {
            Self::Alone => 0,
            Self::TakeOver { side } => side,
        }
    }
}

/// Which taps are closed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum ClosedTaps {
    /// Every tap without a record, as soon as it appears, in the agent's namespace and in those with served ports.
    All,
    /// None: the host's network forwards the frames of a guest without a record.
    #[default]
    None,
}
