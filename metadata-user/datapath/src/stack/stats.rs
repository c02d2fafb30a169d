//! What a stack has seen and done.

use super::seam::Refused;

/// Counters since the start, and gauges of the present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackStats {
    /// Frames received.
    pub received: u64,
    /// Frames sent.
    pub sent: u64,
    /// ARP requests answered.
    pub arp_answered: u64,
    /// Neighbour solicitations answered.
    pub neighbours_answered: u64,
    /// Echo requests answered.
    pub echoes_answered: u64,
    /// Dropped: truncated, or lengths that contradict one another.
    pub dropped_malformed: u64,
    /// Dropped: wrong checksum of an IPv4 header, a TCP segment, an echo request or a neighbour solicitation. That of a
    /// segment or an ICMPv6 message may be partial, as checksum offload leaves it.
    pub dropped_checksum: u64,
    /// Dropped: for an address not served, or from one nobody can have.
    pub dropped_address: u64,
    /// Dropped: IP fragments.
    pub dropped_fragment: u64,
    /// Dropped: neither ARP, neighbour solicitation, TCP nor echo request.
    pub dropped_protocol: u64,
    /// Dropped: a slot this stack has no room for.
    pub dropped_slot: u64,
    /// SYNs answered here; the kernel answers most itself.
    pub handshakes: u64,
    /// Connections established: first segments of a handshake we answered.
    pub accepted: u64,
    /// Segments dropped that came before their connection's first, and will come again after it; or after its last,
    /// of a connection forgotten, which nothing tells from the former until they come again and again.
    pub dropped_early: u64,
    /// Segments of connections that are forgotten, come so often that it is certain; answered with RST, and in
    /// `unmatched` too.
    pub forgotten: u64,
    /// Segments for no connection of ours, answered with RST (a closed port, or a connection forgotten).
    pub unmatched: u64,
    /// First segments dropped: the port has as many connections as it may.
    pub refused_port_connections: u64,
    /// First segments dropped: the VM has as many connections as its record lets it have.
    pub refused_vm_connections: u64,
    /// First segments dropped: all connections are taken.
    pub refused_connections: u64,
    /// First segments dropped: all ports are taken and none is idle.
    pub refused_ports: u64,
    /// First segments dropped because the service leaves: the next agent hears them again.
    pub refused_leaving: u64,
    /// Idle ports that made room for another.
    pub ports_evicted: u64,
    /// Idle connections reset to make room for another guest's, when all were taken.
    pub connections_evicted: u64,
    /// Connections of a greedy slot, not idle but slow, reset to make room for another's.
    pub connections_displaced: u64,
    /// What the service refused.
    pub refused: Refused,
    /// Connections replaced by a new one from the same address and port.
    pub superseded: u64,
    /// Connections reset because the guest acknowledged nothing, or never closed its side.
    pub stalled: u64,
    /// Connections cut off because a drain took too long for them.
    pub cut_short: u64,
    /// Segments for no connection of ours that were not reset: another agent's guests were being handed over.
    pub spared: u64,
    /// Turns given to waiting connections because something of their slot changed.
    pub woken: u64,
    /// Connections given up by the service.
    pub aborted: u64,
    /// Four-tuples in TIME-WAIT taken into use again.
    pub time_wait_reused: u64,
    /// Faults of ours, each of which cost one slot its connections: please report them.
    pub faults: u64,
    /// Gauge: ports held.
    pub ports: u64,
    /// Gauge: connections held.
    pub connections: u64,
}

impl StackStats {
    /// The counters, by name.
    #[must_use]
    pub fn counters(&self) -> [(&'static str, u64); 35] {
        [
            ("received", self.received),
            ("sent", self.sent),
            ("arp_answered", self.arp_answered),
            ("neighbours_answered", self.neighbours_answered),
            ("echoes_answered", self.echoes_answered),
            ("dropped_malformed", self.dropped_malformed),
            ("dropped_checksum", self.dropped_checksum),
            ("dropped_address", self.dropped_address),
            ("dropped_fragment", self.dropped_fragment),
            ("dropped_protocol", self.dropped_protocol),
            ("dropped_slot", self.dropped_slot),
            ("handshakes", self.handshakes),
            ("accepted", self.accepted),
            ("dropped_early", self.dropped_early),
            ("forgotten", self.forgotten),
            ("unmatched", self.unmatched),
            ("refused_port_connections", self.refused_port_connections),
            ("refused_vm_connections", self.refused_vm_connections),
            ("refused_connections", self.refused_connections),
            ("refused_ports", self.refused_ports),
            ("refused_leaving", self.refused_leaving),
            ("ports_evicted", self.ports_evicted),
            ("connections_evicted", self.connections_evicted),
            ("connections_displaced", self.connections_displaced),
            ("refused_held", self.refused.held),
            ("refused_buffered", self.refused.buffered),
            ("refused_computed", self.refused.computed),
            ("superseded", self.superseded),
            ("stalled", self.stalled),
            ("cut_short", self.cut_short),
            ("spared", self.spared),
            ("woken", self.woken),
            ("aborted", self.aborted),
            ("time_wait_reused", self.time_wait_reused),
            ("faults", self.faults),
        ]
    }

    /// The gauges, by name.
    #[must_use]
    pub fn gauges(&self) -> [(&'static str, u64); 2] {
        [("ports", self.ports), ("connections", self.connections)]
    }
}

/// What is held for one slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Connections.
    pub connections: u64,
    /// Of these, how many have a complete request that waits for its answer.
    pub waiting: u64,
}
