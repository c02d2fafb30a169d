//! What bounds a stack.

use metadata_common::maps::MAX_SLOTS;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// Octets of a connection's receive buffer, and so the largest window offered.
///
/// A guest with segmentation offload may put everything the window allows into one frame. With the
/// longest headers (14 Ethernet + 60 IPv4 + 60 TCP) and the 256 octets of headroom XDP reserves, that
/// frame still fits a 4 KiB UMEM chunk; a larger one would vanish without a trace.
pub const RECEIVE_BUFFER: usize = 3 * 1024;

/// Octets of a connection's send buffer: what can be in flight at once.
pub const SEND_BUFFER: usize = 16 * 1024;

/// Octets of an IP packet we send: 1460 octets of TCP payload over IPv4, 1440 over IPv6.
pub const MTU: usize = 1500;

/// Free connections kept with their buffers for reuse; more than that go back to the allocator.
pub(super) const SPARE_CONNECTIONS: usize = 1024;

/// Remembered four-tuples in TIME-WAIT of one port; the oldest makes room.
pub const TIME_WAITS_PER_PORT: usize = 128;

/// Stretches of unacknowledged octets with a hop limit of their own that one connection remembers.
/// Neighbours with the same limit are one, so this is reached only by a guest that asks for tokens and other
/// things in turn without reading; further such octets wait until it reads.
pub const STRETCHES_PER_CONNECTION: usize = 64;

const _: () = assert!(RECEIVE_BUFFER + 14 + 60 + 60 + 256 <= 4096, "a full window must fit a UMEM chunk");

/// Limits and addresses of a [`Stack`](super::Stack).
#[derive(Clone, Debug)]
pub struct StackConfig {
    /// The addresses answered for.
    pub served: Vec<IpAddr>,
    /// Next hops on the way to them for which ARP is answered, and nothing else.
    pub arp_only: Vec<Ipv4Addr>,
    /// Slots that may be named: 0 to `slots - 1`.
    pub slots: u32,
    /// Ports with connections or a recent one, at a time. Beyond, the longest idle one makes room.
    pub ports: usize,
    /// Connections of one port.
    pub connections_per_port: usize,
    /// Connections of all ports; each holds [`RECEIVE_BUFFER`] + [`SEND_BUFFER`] octets.
    pub connections: usize,
    /// Seed of the initial sequence numbers: take it from the system's random source.
    pub seed: u64,
    /// When patience ends.
    pub timeouts: Timeouts,
}

impl Default for StackConfig {
    /// 169.254.169.254, every slot, 128 connections a port and 8,192 in all (150 MiB of buffers at most).
    fn default() -> Self {
        Self {
            served: vec![IpAddr::from([169, 254, 169, 254])],
            arp_only: Vec::new(),
            slots: MAX_SLOTS,
            ports: MAX_SLOTS as usize,
            connections_per_port: 128,
            connections: 8192,
            seed: 0,
            timeouts: Timeouts::default(),
        }
    }
}

/// How long a connection or port may stand still.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// From SYN to the end of the handshake. Freed silently.
    pub half_open: Duration,
    /// A half-open connection older than this makes room for a new SYN when a limit is reached.
    pub half_open_grace: Duration,
    /// Without an octet acknowledged while some are outstanding. Reset. Long enough for six
    /// retransmissions, each at twice the distance of the one before (RFC 6298 §5.5).
    pub stall: Duration,
    /// From our FIN acknowledged to the guest's FIN (FIN-WAIT-2). Reset.
    pub linger: Duration,
    /// In TIME-WAIT (RFC 9293 §3.6.1): shorter than 2 MSL, since one tap is all the network there is.
    pub time_wait: Duration,
    /// From a port's last frame to its being freed, when it has no connection.
    pub port_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            half_open: Duration::from_secs(10),
            half_open_grace: Duration::from_secs(1),
            stall: Duration::from_secs(120),
            linger: Duration::from_secs(30),
            time_wait: Duration::from_secs(10),
            port_idle: Duration::from_secs(30),
        }
    }
}
