//! ARP, neighbour discovery, IP and TCP for every port of a hub: no clock, no file descriptor.
//!
//! ```text
//! frame ── frame.rs: Ethernet, whose address, what kind ──┬── ARP, ND ───────────── answer
//!                                                         ├── echo, no connection ─ smoltcp answers (RST)
//!                                                         └── four-tuple → connection.rs
//!                                                               smoltcp's state machine ↔ Exchange
//! ```
//!
//! smoltcp runs each connection's state machine; who it belongs to, when it starts and when its time is
//! over is decided here. There are no listening sockets: a SYN for a port the service listens on is given
//! a connection from the pool, so it can only be missed at a limit, and every limit is counted. A guest's
//! silence costs nothing: [`Stack::step`] touches the connections that are due and no others.

mod bare;
mod config;
mod connection;
mod deadlines;
mod device;
mod engine;
mod frame;
mod pool;
mod port;
mod reach;
mod seam;
mod stats;
mod timewait;

pub use config::{
    MTU, RECEIVE_BUFFER, SEND_BUFFER, STRETCHES_PER_CONNECTION, StackConfig, TIME_WAITS_PER_PORT, Timeouts,
};
pub use seam::{Connection, Exchange, Service, Step, Transmit};
pub use stats::StackStats;

use metadata_common::maps::Slot;
use smoltcp::wire::{TcpControl, TcpPacket};
use std::net::{IpAddr, Ipv6Addr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use connection::{Conn, Scene, Tuple};
use deadlines::Deadlines;
use engine::Engine;
use frame::{Drop, Inbound, Route};
use pool::Pool;
use port::{Port, Ports};

use crate::time::Now;

/// TCP for every guest behind one hub.
pub struct Stack<S: Service> {
    config: StackConfig,
    service: S,
    engine: Engine,
    ports: Ports<S::Exchange>,
    pool: Pool,
    deadlines: Deadlines,
    stats: StackStats,
}

/// What of a TCP header decides whom a segment is for.
#[derive(Clone, Copy)]
struct Segment<'a> {
    tuple: Tuple,
    packet: &'a [u8],
    sequence: u32,
    /// SYN and none of ACK, RST, FIN: someone wants to talk.
    opens: bool,
    reset: bool,
    /// It carries payload or FIN, so its sender waits for an answer.
    occupies: bool,
    finishes: bool,
}

impl<S: Service> Stack<S> {
    /// A stack that serves `service` on the configured addresses. Ports and connections are made when a
    /// guest first speaks.
    pub fn new(config: StackConfig, service: S) -> Self {
        Self {
            engine: Engine::new(config.seed),
            ports: Ports::new(config.slots, config.ports),
            pool: Pool::new(config.connections),
            deadlines: Deadlines::new(config.slots),
            stats: StackStats::default(),
            config,
            service,
        }
    }

    /// Takes one Ethernet frame of a guest and sends whatever follows from it.
    ///
    /// The frame's source address is where answers go; `slot` is who it is from.
    pub fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        self.stats.received += 1;
        if !self.ports.admits(slot) {
            self.stats.dropped_slot += 1;
            return;
        }
        let taken = catch_unwind(AssertUnwindSafe(|| self.take(now, slot, frame, out)));
        self.contain(slot, taken);
    }

    /// A fault of the TCP implementation costs the slot that met it, not the node: what it held is let go,
    /// so nothing half-changed is looked at again.
    fn contain(&mut self, slot: Slot, outcome: std::thread::Result<()>) {
        if outcome.is_err() {
            self.stats.faults += 1;
            self.forget(slot);
            self.deadlines.set(slot, None);
        }
    }

    fn take(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        let done = match frame::parse(frame, &self.config.served) {
            Err(reason) => Err(reason),
            Ok((route, Inbound::Arp(arp))) => self.arp(arp, route, out),
            Ok((route, Inbound::Solicitation { source, target })) => {
                self.solicited(source, target, route, out)
            }
            Ok((route, Inbound::Echo(packet))) => {
                self.stats.echoes_answered += u64::from(self.engine.answer(now.mono, packet, route, out));
                Ok(())
            }
            Ok((route, Inbound::Segment { source, destination, packet, tcp })) => {
                segment(source, destination, packet, tcp).map(|s| self.segment(now, slot, route, s, out))
            }
        };
        if let Err(reason) = done {
            self.count(reason);
        }
    }

    /// Does what time demands: retransmissions, timeouts, held requests, freeing of idle ports.
    ///
    /// Returns when to call again at the latest, by the clock of [`Now::mono`]; `None` when nothing waits.
    pub fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration> {
        for _ in 0..self.ports.held() {
            match self.deadlines.first() {
                Some((at, slot)) if at <= now.mono => {
                    let stepped = catch_unwind(AssertUnwindSafe(|| self.step_port(now, slot, out)));
                    self.contain(slot, stepped);
                }
                _ => break,
            }
        }
        self.deadlines.first().map(|(at, _)| at)
    }

    /// Gives every connection of a slot that waits ([`Step::Wait`]) a turn: something it may wait for has
    /// changed. Costs one turn for each.
    pub fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let woken = catch_unwind(AssertUnwindSafe(|| {
            self.with_port(now, slot, out, |port, scene, pool, stats| port.stir(scene, pool, stats));
            self.reschedule(slot);
        }));
        self.contain(slot, woken);
    }

    /// Forgets a slot: its connections end without a word, since nobody is there to hear it.
    pub fn forget(&mut self, slot: Slot) {
        if let Some(mut port) = self.ports.remove(slot) {
            while !port.conns.is_empty() {
                port.bury(0, &mut self.pool);
            }
            self.deadlines.set(slot, None);
        }
    }

    /// Counters and gauges.
    pub fn stats(&self) -> StackStats {
        StackStats {
            sent: self.engine.sent,
            ports: self.ports.held() as u64,
            connections: self.pool.lent() as u64,
            spare_connections: self.pool.spare() as u64,
            ..self.stats
        }
    }

    /// Four-tuples remembered in TIME-WAIT. Walks every slot: not for each turn.
    #[must_use]
    pub fn time_waits(&self) -> usize {
        self.ports.time_waits()
    }

    fn count(&mut self, reason: Drop) {
        let counter = match reason {
            Drop::Malformed => &mut self.stats.dropped_malformed,
            Drop::Checksum => &mut self.stats.dropped_checksum,
            Drop::Address => &mut self.stats.dropped_address,
            Drop::Fragment => &mut self.stats.dropped_fragment,
            Drop::Protocol => &mut self.stats.dropped_protocol,
        };
        *counter += 1;
    }

    fn arp(&mut self, arp: &[u8], route: Route, out: &mut dyn Transmit) -> Result<(), Drop> {
        let Self { config, engine: Engine { scratch, sent, .. }, .. } = self;
        let is_ours = |v4| config.served.contains(&IpAddr::V4(v4)) || config.arp_only.contains(&v4);
        if let Some(length) = frame::answer_arp(arp, route.to, is_ours, scratch)? {
            out.send(&scratch[..length]);
            *sent += 1;
            self.stats.arp_answered += 1;
        }
        Ok(())
    }

    fn solicited(
        &mut self,
        source: Ipv6Addr,
        target: Ipv6Addr,
        route: Route,
        out: &mut dyn Transmit,
    ) -> Result<(), Drop> {
        if !self.config.served.contains(&IpAddr::V6(target)) {
            return Err(Drop::Address);
        }
        let Engine { scratch, sent, .. } = &mut self.engine;
        let length = frame::answer_solicitation(source, target, route.to, scratch);
        out.send(&scratch[..length]);
        *sent += 1;
        self.stats.neighbours_answered += 1;
        Ok(())
    }

    fn segment(&mut self, now: Now, slot: Slot, route: Route, segment: Segment<'_>, out: &mut dyn Transmit) {
        let found = self.ports.get(slot).and_then(|port| {
            port.heard = now.mono;
            port.find(&segment.tuple).map(|at| (at, port.conns[at].initial))
        });
        match found {
            // A guest that opens again has forgotten what we remember. Nobody but the guest can speak on
            // its port, so there is no need for the challenge of RFC 5961 §4.
            Some((at, initial)) if segment.opens && segment.sequence != initial => {
                self.stats.superseded += 1;
                if let Some(port) = self.ports.get(slot) {
                    port.bury(at, &mut self.pool);
                }
                self.open(now, slot, route, segment, out);
            }
            Some((at, _)) => self.turn(now, slot, at, route, Some(segment.packet), out),
            None if segment.opens => self.open(now, slot, route, segment, out),
            None => self.unmatched(now, slot, route, segment, out),
        }
        self.reschedule(slot);
    }

    /// A SYN for no connection we hold.
    fn open(&mut self, now: Now, slot: Slot, route: Route, segment: Segment<'_>, out: &mut dyn Transmit) {
        if !self.service.listens(segment.tuple.local) {
            self.refuse(now, route, segment, out);
            return;
        }
        if !self.ports.has_room(slot) && !self.evict_port() {
            self.stats.refused_ports += 1;
            return;
        }
        let port = self.ports.get_or_make(slot, now.mono);
        self.stats.time_wait_reused += u64::from(port.waits.remove(&segment.tuple));
        let grace = self.config.timeouts.half_open_grace;
        if port.conns.len() >= self.config.connections_per_port {
            if !port.evict_half_open(now.mono, grace, &mut self.pool) {
                self.stats.refused_port_connections += 1;
                return;
            }
            self.stats.half_open_evicted += 1;
        }
        let tcp = match self.pool.take() {
            Some(tcp) => tcp,
            None if port.evict_half_open(now.mono, grace, &mut self.pool) => {
                self.stats.half_open_evicted += 1;
                let Some(tcp) = self.pool.take() else { return };
                tcp
            }
            None => {
                self.stats.refused_connections += 1;
                return;
            }
        };
        port.conns.push(Conn::new(segment.tuple, tcp, route, segment.sequence, now.mono));
        let at = port.conns.len() - 1;
        self.turn(now, slot, at, route, Some(segment.packet), out);
    }

    fn evict_port(&mut self) -> bool {
        let idle = self.ports.longest_idle();
        if let Some(slot) = idle {
            self.forget(slot);
            self.stats.ports_evicted += 1;
        }
        idle.is_some()
    }

    /// A segment for no connection, that opens none: perhaps of one that is in TIME-WAIT.
    fn unmatched(
        &mut self,
        now: Now,
        slot: Slot,
        route: Route,
        segment: Segment<'_>,
        out: &mut dyn Transmit,
    ) {
        let time_wait = self.config.timeouts.time_wait;
        if let Some(port) = self.ports.get(slot) {
            port.waits.expire(now.mono);
            if let Some(wait) = port.waits.find(&segment.tuple) {
                // RST is ignored in this state (RFC 1337 §3), a bare ACK needs no answer.
                if segment.occupies && !segment.reset {
                    if segment.finishes {
                        wait.until = now.mono + time_wait;
                    }
                    let Engine { scratch, sent, .. } = &mut self.engine;
                    let length = bare::emit(&wait.tuple, route, TcpControl::None, wait.next, scratch);
                    out.send(&scratch[..length]);
                    *sent += 1;
                }
                return;
            }
        }
        self.refuse(now, route, segment, out);
    }

    fn refuse(&mut self, now: Now, route: Route, segment: Segment<'_>, out: &mut dyn Transmit) {
        self.stats.unmatched += u64::from(self.engine.answer(now.mono, segment.packet, route, out));
    }

    fn turn(
        &mut self,
        now: Now,
        slot: Slot,
        at: usize,
        route: Route,
        packet: Option<&[u8]>,
        out: &mut dyn Transmit,
    ) {
        self.with_port(now, slot, out, |port, scene, pool, stats| {
            port.conns[at].route = route;
            if port.turn(at, scene, packet, pool, stats) {
                port.stir(scene, pool, stats);
            }
        });
    }

    fn step_port(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        let idle = self.with_port(now, slot, out, |port, scene, pool, stats| {
            port.step(scene, pool, stats);
            port.waits.expire(now.mono);
            port.conns.is_empty() && port.heard + scene.config.timeouts.port_idle <= now.mono
        });
        if idle == Some(true) {
            self.forget(slot);
        } else {
            self.reschedule(slot);
        }
    }

    /// Calls `f` with a port and all that its connections' turns need; `None` when there is no such port.
    fn with_port<T>(
        &mut self,
        now: Now,
        slot: Slot,
        out: &mut dyn Transmit,
        f: impl FnOnce(&mut Port<S::Exchange>, &mut Scene<'_, S>, &mut Pool, &mut StackStats) -> T,
    ) -> Option<T> {
        let Self { config, service, engine, ports, pool, stats, .. } = self;
        let port = ports.get(slot)?;
        let mut scene = Scene { now, slot, config, service, engine, out };
        Some(f(port, &mut scene, pool, stats))
    }

    fn reschedule(&mut self, slot: Slot) {
        if let Some(port) = self.ports.get(slot) {
            self.deadlines.set(slot, port.deadline(self.config.timeouts.port_idle));
        }
    }
}

/// Reads what decides whom a segment is for (RFC 9293 §3.1).
fn segment<'a>(
    source: IpAddr,
    destination: IpAddr,
    packet: &'a [u8],
    tcp: &[u8],
) -> Result<Segment<'a>, Drop> {
    let header = TcpPacket::new_checked(tcp).map_err(|_| Drop::Malformed)?;
    if header.src_port() == 0 || header.dst_port() == 0 {
        return Err(Drop::Malformed);
    }
    Ok(Segment {
        tuple: Tuple { remote: (source, header.src_port()), local: (destination, header.dst_port()) },
        packet,
        sequence: header.seq_number().0 as u32,
        opens: header.syn() && !header.ack() && !header.rst() && !header.fin(),
        reset: header.rst(),
        occupies: header.fin() || !header.payload().is_empty(),
        finishes: header.fin(),
    })
}
