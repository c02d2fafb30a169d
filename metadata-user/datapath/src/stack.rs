//! ARP, neighbour discovery, IP and TCP for all ports of a hub. It reads no clock and uses no file descriptor.
//!
//! ```text
//! frame ── frame: Ethernet, destination, protocol ────────┬── ARP, ND, echo ──────────── answer
//!                                                      ├── SYN ─ handshake ────────── answer, and forget
//!                                                      └── segment ─ its flow ┬─ table: a connection ─ turn
//!                                                                             ├─ timewait ─ answer
//!                                                                             └─ its numbers ─ begin, or RST
//!
//! turn ── receive: new bytes ── connection: Exchange ── send: segments ── ledger: all sent
//! ```
//!
//! The stack only responds: it opens no connection, and keeps no state before a guest sends data. The kernel or the
//! stack answers a SYN with a sequence number that encodes all connection parameters ([`metadata_common::cookie`]).
//! The first segment with data returns that number. So there are no half-open connections, and each limit is checked
//! and counted at the first data segment. The stack buffers received data only if the exchange does not take it at
//! once, and copies data to send only into frames. A silent guest costs nothing: [`Stack::step`] visits only
//! connections that are due.

mod connection;
mod frame;
mod interfaces;
mod receive;
mod send;
mod table;
mod tcb;
mod turns;

pub use interfaces::{
    AckLedger, CONNECTIONS, ConnectionAction, DisplacedConnection, Exchange, FramePreview, GuestDevices,
    KernelReceipt, KernelSegment, KernelTurn, LONG_MAX, Long, MTU, NARROW_FOR, NoLedger,
    PIECES_PER_CONNECTION, RECEIVE_BUFFER, RefusedRequests, SEGMENTS_IN_FLIGHT, SEND_AHEAD, SHARE, Service,
    SlotStats, StackConfig, StackStats, TIME_WAIT, TIME_WAITS, TIME_WAITS_PER_PORT, Transmit,
};
pub use turns::{DRAIN_LIMIT, ServedFlows};

use metadata_common::maps::Slot;
use metadata_common::time::Now;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use frame::{DropReason, EthernetAddresses, Inbound, Segment};
use receive::SegmentContext;
use send::FrameBuilder;
use table::{IndexedLists, SlotRanking, StraySegments, Table, Wheel};
use turns::{DrainState, PortTable};

/// The TCP responder for all guests behind one hub.
pub struct Stack<S: Service, L = NoLedger> {
    config: StackConfig,
    service: S,
    ledger: L,
    workshop: FrameBuilder,
    ports: PortTable,
    table: Table<S::Exchange>,
    /// One timer for each connection, followed by one for each port.
    wheel: Wheel,
    /// The next connection to probe when the table is full.
    sweep: u32,
    /// Ranks slots by their number of connections.
    held: SlotRanking,
    /// Ranks slots by their number of idle connections; the idle connections of each slot, the longest idle first.
    idle: SlotRanking,
    idlers: IndexedLists,
    /// Connections that wait only for the guest's FIN.
    lingering: usize,
    /// The connections of each slot with deferred output, and the slots that have some and were not returned by
    /// `owing` yet.
    owed: IndexedLists,
    owing: VecDeque<Slot>,
    draining: Option<DrainState>,
    /// Unknown connections may belong to another agent and are left alone.
    spares: bool,
    forgotten: StraySegments,
    stats: StackStats,
}

impl<S: Service> Stack<S> {
    /// Creates a stack that serves `service` on the configured addresses. Ports and connections are created on a
    /// guest's first frame or data.
    pub fn new(config: StackConfig, service: S) -> Self {
        Self::with_ledger(config, service, NoLedger)
    }
}

impl<S: Service, L: AckLedger> Stack<S, L> {
    /// Like [`new`](Self::new), with a ledger: the kernel then handles acknowledgements of complete answers for the
    /// stack.
    pub fn with_ledger(config: StackConfig, service: S, ledger: L) -> Self {
        let waits = TIME_WAITS.min(config.ports * TIME_WAITS_PER_PORT);
        Self {
            workshop: FrameBuilder::new(),
            ports: PortTable::new(config.slots, config.ports),
            table: Table::new(config.connections, waits),
            wheel: Wheel::new(config.connections + config.slots as usize),
            sweep: 0,
            held: SlotRanking::new(config.slots as usize, config.connections_per_port),
            idle: SlotRanking::new(config.slots as usize, config.connections_per_port),
            idlers: IndexedLists::new(config.slots as usize, config.connections),
            lingering: 0,
            owed: IndexedLists::new(config.slots as usize, config.connections),
            owing: VecDeque::new(),
            draining: None,
            spares: false,
            forgotten: StraySegments::new(),
            stats: StackStats::default(),
            config,
            service,
            ledger,
        }
    }

    /// Processes one Ethernet frame of the guest at `slot` and sends the answers to `out`.
    ///
    /// Answers go to the frame's source address.
    pub fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        self.stats.received += 1;
        if !self.ports.admits(slot) {
            self.stats.dropped_slot += 1;
            return;
        }
        let taken = catch_unwind(AssertUnwindSafe(|| self.take(now, slot, frame, out)));
        self.contain(slot, taken);
    }

    /// Limits the damage of a panic to the slot that caused it. The slot's state is dropped, so that no half-changed
    /// state is used again.
    fn contain(&mut self, slot: Slot, outcome: std::thread::Result<()>) {
        if outcome.is_err() {
            self.stats.faults += 1;
            self.forget(slot);
        }
    }

    fn take(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        let done = match frame::parse(frame, &self.config.served) {
            Err(reason) => Err(reason),
            Ok((route, Inbound::Arp(arp))) => self.arp(arp, route, out),
            Ok((route, Inbound::Solicitation { source, target })) => {
                self.solicited(source, target, route, out)
            }
            Ok((route, Inbound::Echo { source, destination, icmp })) => {
                self.echo(source, destination, icmp, route, out);
                Ok(())
            }
            Ok((route, Inbound::Segment { source, destination, tcp })) => {
                Segment::read(source, destination, tcp).map(|segment| {
                    let flow = segment.tuple.flow(&self.config.cookie_key, slot);
                    self.segment(SegmentContext { now, slot, route, flow }, &segment, out);
                })
            }
        };
        if let Err(reason) = done {
            self.count(reason);
        }
    }

    /// Runs a turn for each connection of a slot that waits ([`ConnectionAction::Wait`]), because something it may wait
    /// for has changed. Costs one turn per connection.
    pub fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let woken = catch_unwind(AssertUnwindSafe(|| self.wake_slot(now, slot, out)));
        self.contain(slot, woken);
    }

    /// Reports the duration of a turn to the service, after the turn's frames and timers.
    pub fn turned(&mut self, turn: Duration) {
        self.service.turned(turn);
    }

    /// The current counters and gauges.
    pub fn stats(&self) -> StackStats {
        StackStats {
            sent: self.workshop.sent,
            ports: self.ports.held() as u64,
            connections: self.table.held() as u64,
            refused: self.service.refused(),
            ..self.stats
        }
    }

    /// What the stack holds for a slot; zeros for a slot without recent traffic.
    #[must_use]
    pub fn look(&self, slot: Slot) -> SlotStats {
        let held = self.ports.get(slot).map(|port| &port.conns[..]).unwrap_or_default();
        let waits = |at: &&u32| self.table.get(**at).is_some_and(|conn| conn.holds_a_request());
        SlotStats { connections: held.len() as u64, waiting: held.iter().filter(waits).count() as u64 }
    }

    /// The number of four-tuples in TIME-WAIT.
    #[must_use]
    pub fn time_waits(&self) -> usize {
        self.table.waits()
    }

    fn count(&mut self, reason: DropReason) {
        let counter = match reason {
            DropReason::Malformed => &mut self.stats.dropped_malformed,
            DropReason::Checksum => &mut self.stats.dropped_checksum,
            DropReason::Address => &mut self.stats.dropped_address,
            DropReason::Fragment => &mut self.stats.dropped_fragment,
            DropReason::Protocol => &mut self.stats.dropped_protocol,
        };
        *counter += 1;
    }

    fn arp(
        &mut self,
        arp: &[u8],
        route: EthernetAddresses,
        out: &mut dyn Transmit,
    ) -> Result<(), DropReason> {
        let config = &self.config;
        let is_ours = |v4| config.served.contains(&IpAddr::V4(v4)) || config.arp_only.contains(&v4);
        if let Some(answer) = frame::answer_arp(arp, is_ours)? {
            self.workshop.send(out, |frame| answer.emit(route.to, frame));
            self.stats.arp_answered += 1;
        }
        Ok(())
    }

    fn solicited(
        &mut self,
        source: Ipv6Addr,
        target: Ipv6Addr,
        route: EthernetAddresses,
        out: &mut dyn Transmit,
    ) -> Result<(), DropReason> {
        if !self.config.served.contains(&IpAddr::V6(target)) {
            return Err(DropReason::Address);
        }
        self.workshop.send(out, |frame| frame::answer_solicitation(source, target, route.to, frame));
        self.stats.neighbours_answered += 1;
        Ok(())
    }

    fn echo(
        &mut self,
        source: IpAddr,
        to: IpAddr,
        icmp: &[u8],
        route: EthernetAddresses,
        out: &mut dyn Transmit,
    ) {
        if send::fits_echo(source, icmp) {
            self.workshop.send(out, |frame| send::echo(source, to, icmp, route, frame));
            self.stats.echoes_answered += 1;
        }
    }
}
