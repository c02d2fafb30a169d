//! Counters and gauges of a stack.

use super::interfaces::RefusedRequests;

/// Counters since the start, and current gauges.
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
    /// Dropped: truncated, or with contradictory lengths.
    pub dropped_malformed: u64,
    /// Dropped: wrong checksum of an IPv4 header, a TCP segment, an echo request or a neighbour solicitation. The
    /// checksum of a segment or an ICMPv6 message may be partial, as checksum offload leaves it.
    pub dropped_checksum: u64,
    /// Dropped: destination not served, or source address invalid.
    pub dropped_address: u64,
    /// Dropped: IP fragments.
    pub dropped_fragment: u64,
    /// Dropped: neither ARP, neighbour solicitation, TCP nor echo request.
    pub dropped_protocol: u64,
    /// Dropped: the slot is out of range.
    pub dropped_slot: u64,
    /// SYNs answered by the stack; the kernel programs answer most SYNs themselves.
    pub handshakes: u64,
    /// Connections established: first data segments of a handshake that this agent answered.
    pub accepted: u64,
    /// Segments dropped because they arrived before their connection's first segment and are retransmitted after it,
    /// or because their connection is forgotten. Only repeated retransmission distinguishes the two.
    pub dropped_early: u64,
    /// Segments of forgotten connections, retransmitted often enough to be sure. They are answered with RST and also
    /// counted in `unmatched`.
    pub forgotten: u64,
    /// Segments of no known connection, answered with RST (a closed port, or a forgotten connection).
    pub unmatched: u64,
    /// First segments dropped: the port has reached its limit of connections.
    pub refused_port_connections: u64,
    /// First segments dropped: the VM has reached the limit of connections in its record.
    pub refused_vm_connections: u64,
    /// First segments dropped: all connections are taken.
    pub refused_connections: u64,
    /// First segments dropped: all ports are taken and none is idle.
    pub refused_ports: u64,
    /// First segments dropped during a drain: the next agent receives the retransmission.
    pub refused_leaving: u64,
    /// Idle ports replaced by another port.
    pub ports_evicted: u64,
    /// Idle connections reset to make room for another guest's, because all were taken.
    pub connections_evicted: u64,
    /// Slow but not idle connections of a slot above its share, reset to make room for another slot's.
    pub connections_displaced: u64,
    /// Requests that the service refused.
    pub refused: RefusedRequests,
    /// Connections replaced by a new one with the same address and port.
    pub superseded: u64,
    /// Connections reset because the guest acknowledged nothing, or never sent FIN.
    pub stalled: u64,
    /// Times that a guest's acknowledgement was overdue, and the data in flight was sent again.
    pub timed_out: u64,
    /// Connections reset because they did not end within the drain's limit.
    pub cut_short: u64,
    /// Segments of no known connection that were not reset, because they may belong to another agent during a
    /// handover.
    pub spared: u64,
    /// Turns run for waiting connections after a change of their slot.
    pub woken: u64,
    /// Connections that the service aborted.
    pub aborted: u64,
    /// Four-tuples reused out of TIME-WAIT.
    pub time_wait_reused: u64,
    /// Panics in the stack; each cost one slot its connections. Please report them.
    pub faults: u64,
    /// Gauge: ports in use.
    pub ports: u64,
    /// Gauge: open connections.
    pub connections: u64,
}

impl StackStats {
    /// All counters with their names.
    #[must_use]
    pub fn counters(&self) -> [(&'static str, u64); 36] {
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
            ("timed_out", self.timed_out),
            ("cut_short", self.cut_short),
            ("spared", self.spared),
            ("woken", self.woken),
            ("aborted", self.aborted),
            ("time_wait_reused", self.time_wait_reused),
            ("faults", self.faults),
        ]
    }

    /// All gauges with their names.
    #[must_use]
    pub fn gauges(&self) -> [(&'static str, u64); 2] {
        [("ports", self.ports), ("connections", self.connections)]
    }
}

/// What the stack holds for one slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Open connections.
    pub connections: u64,
    /// Connections with a complete request that waits for its answer.
    pub waiting: u64,
}
