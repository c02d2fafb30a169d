//! Limits and configuration of a stack.

use metadata_common::cookie::CookieKey;
use metadata_common::maps::MAX_SLOTS;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::guest_devices::GuestDevices;

/// Limit of bytes that one connection has received but its exchange has not taken; also the largest window offered.
///
/// A guest with segmentation offload may send a whole window in one frame. With the longest headers (14 Ethernet + 60
/// IPv4 + 60 TCP) and the 256 bytes of headroom that XDP reserves, that frame still fits a 4 KiB UMEM chunk. A
/// larger frame would be dropped without being counted.
pub const RECEIVE_BUFFER: usize = 3 * 1024;

/// Bytes handed over but not acknowledged at which the stack stops asking an exchange for more. They are shared and
/// not copied, so this limits how far ahead a pipelining guest is answered, not memory.
pub const SEND_AHEAD: usize = 16 * 1024;

/// Limit of pieces handed over but not acknowledged per connection; further ones wait.
pub const PIECES_PER_CONNECTION: usize = 64;

/// Limit of segments in flight per connection, and so sent in one turn. It bounds the delay that a burst causes to
/// others.
pub const SEGMENTS_IN_FLIGHT: u32 = 128;

/// Longest IP packet the stack sends, in bytes: 1460 bytes of TCP payload over IPv4, 1440 over IPv6.
pub const MTU: usize = 1500;

/// How long a port's new connections start with segments that every host accepts ([`SEGMENT_UNSAID_V4`] or
/// [`SEGMENT_UNSAID_V6`]), after longer ones were lost and a short one arrived. The port's link is then narrower than
/// its device's MTU. The stack forgets this after the period or with the port, and then detects it again.
///
/// [`SEGMENT_UNSAID_V4`]: metadata_common::answer::SEGMENT_UNSAID_V4
/// [`SEGMENT_UNSAID_V6`]: metadata_common::answer::SEGMENT_UNSAID_V6
pub const NARROW_FOR: Duration = Duration::from_secs(300);

/// Connections that every slot can have, however many the others hold.
pub const SHARE: usize = 4;

/// Limit of connections over all ports: the sum of all shares. When all are taken, some slot holds more than its
/// share, or every slot holds exactly its share.
pub const CONNECTIONS: usize = MAX_SLOTS as usize * SHARE;

/// Limit of four-tuples in TIME-WAIT per port. A new one replaces the oldest.
pub const TIME_WAITS_PER_PORT: usize = 128;

/// Limit of four-tuples in TIME-WAIT over all ports. At the limit a port remembers no more until some of its own
/// expire.
pub const TIME_WAITS: usize = 65_536;

/// Time without an acknowledgement while data is outstanding, before a reset. It is long enough for a dozen
/// retransmissions (RFC 6298 §5.5, §5.7).
pub(super) const STALL: Duration = Duration::from_secs(120);

/// Time from the acknowledgement of our FIN to the guest's FIN (FIN-WAIT-2), before a reset.
pub(super) const LINGER: Duration = Duration::from_secs(30);

/// Time in TIME-WAIT (RFC 9293 §3.6.1). It is shorter than 2 MSL, because one tap is the whole network.
pub const TIME_WAIT: Duration = Duration::from_secs(10);

/// Time from the last frame of a port without connections until the port is freed.
pub(super) const PORT_IDLE: Duration = Duration::from_secs(30);

const _: () = assert!(RECEIVE_BUFFER + 14 + 60 + 60 + 256 <= 4096, "a full window must fit a UMEM chunk");

/// Limits and addresses of a [`Stack`](super::Stack).
#[derive(Clone)]
pub struct StackConfig {
    /// The addresses that the stack answers for.
    pub served: Vec<IpAddr>,
    /// Next hops to these addresses. The stack answers only ARP for them.
    pub arp_only: Vec<Ipv4Addr>,
    /// The number of slots; valid slots are 0 to `slots - 1`.
    pub slots: u32,
    /// Limit of ports with current or recent connections. At the limit a new port replaces the longest idle one.
    pub ports: usize,
    /// Limit of connections per port.
    pub connections_per_port: usize,
    /// Limit of connections over all ports. At the limit a new connection replaces an idle one, else one of the slot
    /// that has most.
    pub connections: usize,
    /// Connections that a slot keeps when all are taken, unless they are idle. A slot with fewer gets another one
    /// whatever others hold, if `connections` is at least `share` times `slots`.
    pub share: usize,
    /// Key of the initial sequence numbers. Take it from the system's random source and give the kernel programs the
    /// same key.
    pub cookie_key: CookieKey,
    /// The guests' devices. Their MTUs limit the segment size; an unknown MTU counts as [`MTU`].
    pub guest_devices: GuestDevices,
}

impl Default for StackConfig {
    /// Serves 169.254.169.254 for all slots, with 128 connections per port and [`CONNECTIONS`] in total.
    fn default() -> Self {
        Self {
            served: vec![IpAddr::from([169, 254, 169, 254])],
            arp_only: Vec::new(),
            slots: MAX_SLOTS,
            ports: MAX_SLOTS as usize,
            connections_per_port: 128,
            connections: CONNECTIONS,
            share: SHARE,
            cookie_key: CookieKey([0; 2]),
            guest_devices: GuestDevices::default(),
        }
    }
}

impl std::fmt::Debug for StackConfig {
    /// Omits the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StackConfig")
            .field("served", &self.served)
            .field("arp_only", &self.arp_only)
            .field("slots", &self.slots)
            .field("ports", &self.ports)
            .field("connections_per_port", &self.connections_per_port)
            .field("connections", &self.connections)
            .field("guest_devices", &self.guest_devices)
            .field("share", &self.share)
            .finish_non_exhaustive()
    }
}
