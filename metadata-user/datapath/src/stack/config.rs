//! What bounds a stack.

use metadata_common::cookie::Key;
use metadata_common::maps::MAX_SLOTS;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::mtu::Mtus;

/// Octets received and not yet taken that one connection holds, and so the largest window offered.
///
/// A guest with segmentation offload may put everything the window allows into one frame. With the
/// longest headers (14 Ethernet + 60 IPv4 + 60 TCP) and the 256 octets of headroom XDP reserves, that
/// frame still fits a 4 KiB UMEM chunk; a larger one would vanish without a trace.
pub const RECEIVE_BUFFER: usize = 3 * 1024;

/// Octets handed over and not acknowledged, from which on an exchange is asked for no more. They are shared
/// and not copied, so this bounds how far a guest that asks ahead is answered ahead, not memory.
pub const SEND_AHEAD: usize = 16 * 1024;

/// Pieces handed over and not acknowledged that one connection keeps; further ones wait.
pub const PIECES_PER_CONNECTION: usize = 64;

/// Segments of one connection on their way at once, and so sent in one turn: what a burst may cost others.
pub const SEGMENTS_IN_FLIGHT: u32 = 128;

/// Octets of an IP packet we send: 1460 octets of TCP payload over IPv4, 1440 over IPv6.
pub const MTU: usize = 1500;

/// How long a port's new connections begin with segments every host takes ([`SEGMENT_UNSAID_V4`], or
/// [`SEGMENT_UNSAID_V6`]) after longer ones were lost and such a one arrived: its link is narrower than its device's
/// MTU says. After that, or with the port, it is forgotten, and found out anew.
///
/// [`SEGMENT_UNSAID_V4`]: metadata_common::answer::SEGMENT_UNSAID_V4
/// [`SEGMENT_UNSAID_V6`]: metadata_common::answer::SEGMENT_UNSAID_V6
pub const NARROW_FOR: Duration = Duration::from_secs(300);

/// Connections that every slot can have, whatever the others hold.
pub const SHARE: usize = 4;

/// Connections of all ports: every slot's share, so that when all are taken some slot has more than its share,
/// unless every one has exactly that.
pub const CONNECTIONS: usize = MAX_SLOTS as usize * SHARE;

/// Remembered four-tuples in TIME-WAIT of one port; the oldest makes room.
pub const TIME_WAITS_PER_PORT: usize = 128;

/// The same of all ports. Beyond, a port remembers no more until some of its own have expired.
pub const TIME_WAITS: usize = 65_536;

const _: () = assert!(RECEIVE_BUFFER + 14 + 60 + 60 + 256 <= 4096, "a full window must fit a UMEM chunk");

/// Limits and addresses of a [`Stack`](super::Stack).
#[derive(Clone)]
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
    /// Connections of all ports. When all are taken an idle one makes room, then one of the slot that has most.
    pub connections: usize,
    /// Connections that a slot keeps when all are taken, unless they are idle. A slot that has fewer gets one more
    /// whatever others hold, as long as `connections` is no less than `share` times `slots`.
    pub share: usize,
    /// Key of the initial sequence numbers: take it from the system's random source, and give the kernel side
    /// the same.
    pub cookie_key: Key,
    /// The MTUs of the guests' devices: no segment is longer than fits. Where none is known it is [`MTU`].
    pub mtus: Mtus,
    /// Resets connections that nobody holds once their guests have tried often enough; `false` while another agent
    /// may hold them.
    pub resets_forgotten: bool,
    /// When patience ends.
    pub timeouts: Timeouts,
}

impl Default for StackConfig {
    /// 169.254.169.254, every slot, 128 connections a port and [`CONNECTIONS`] in all.
    fn default() -> Self {
        Self {
            served: vec![IpAddr::from([169, 254, 169, 254])],
            arp_only: Vec::new(),
            slots: MAX_SLOTS,
            ports: MAX_SLOTS as usize,
            connections_per_port: 128,
            connections: CONNECTIONS,
            share: SHARE,
            cookie_key: Key([0; 2]),
            mtus: Mtus::default(),
            resets_forgotten: true,
            timeouts: Timeouts::default(),
        }
    }
}

impl std::fmt::Debug for StackConfig {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StackConfig")
            .field("served", &self.served)
            .field("arp_only", &self.arp_only)
            .field("slots", &self.slots)
            .field("ports", &self.ports)
            .field("connections_per_port", &self.connections_per_port)
            .field("connections", &self.connections)
            .field("mtus", &self.mtus)
            .field("share", &self.share)
            .field("resets_forgotten", &self.resets_forgotten)
            .field("timeouts", &self.timeouts)
            .finish_non_exhaustive()
    }
}

/// How long a connection or port may stand still.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Without an octet acknowledged while some are outstanding. Reset. Long enough for a dozen
    /// retransmissions (RFC 6298 §5.5, §5.7).
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
            stall: Duration::from_secs(120),
            linger: Duration::from_secs(30),
            time_wait: Duration::from_secs(10),
            port_idle: Duration::from_secs(30),
        }
    }
}
