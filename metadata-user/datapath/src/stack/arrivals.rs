//! Assigns a segment to a connection, to one in TIME-WAIT, or to a new one.

use metadata_common::addresses::Connection;
use metadata_common::cookie::{CookieCheck, Flow, TcpOptions, check};
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use metadata_common::wire::{ethernet, ipv4, ipv6, protocol, tcp};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::config::{RECEIVE_BUFFER, TIME_WAIT};
use super::connection::{StackConnection, TurnCause};
use super::emit::Header;
use super::frame::{EthernetAddresses, FIN, RST, SYN, Segment, Tuple, before};
use super::interfaces::{AckLedger, FramePreview, Service, Transmit};
use super::tcb::Tcb;
use super::timewait::TimeWait;
use super::{Stack, receive};
use crate::GROUP;

/// The context of a segment.
#[derive(Clone, Copy)]
pub(super) struct SegmentContext {
    pub(super) now: Now,
    pub(super) slot: Slot,
    pub(super) route: EthernetAddresses,
    pub(super) flow: Flow,
}

impl<S: Service, L: AckLedger> Stack<S, L> {
    /// Processes one segment.
    pub(super) fn segment(&mut self, source: SegmentContext, segment: &Segment<'_>, out: &mut dyn Transmit) {
        if segment.opens() {
            return self.handshake(source, segment, out);
        }
        if let Some(at) = self.table.find(source.flow.number()) {
            return self.held(source, at, segment, out);
        }
        match self.table.wait(source.flow.number()) {
            Some(wait) if wait.until > source.now.mono => self.closed(source, wait, segment, out),
            Some(_) => {
                self.forget_wait(source.slot, source.flow);
                self.unknown(source, segment, out);
            }
            None => self.unknown(source, segment, out),
        }
    }

    /// Answers a SYN from its own content. The four-tuple may have a connection, if the guest has forgotten it or the
    /// SYN is late. The answer's number then differs from that connection's, so that the first segment of the new
    /// connection is never taken for one of the old.
    fn handshake(&mut self, source: SegmentContext, segment: &Segment<'_>, out: &mut dyn Transmit) {
        if !self.service.listens(source.slot, segment.tuple.local) {
            return self.refuse(source, segment, out);
        }
        if let Some(wait) = self.table.wait_mut(source.flow) {
            wait.reopened = true;
        }
        let key = &self.config.cookie_key;
        let held = self.table.find(source.flow.number()).and_then(|at| self.table.get(at));
        let taken = held.map(|conn| conn.tcb.initial.1);
        let largest = receive::largest_segment(
            segment.tuple.remote.0.is_ipv4(),
            self.config.guest_devices.mtu(source.slot),
        );
        let number = receive::number(key, source.flow, largest, segment, taken);
        self.workshop.send(out, |frame| receive::answer(number, largest, segment, source.route, frame));
        self.stats.handshakes += 1;
    }

    /// Checks a segment's numbers. Also returns the initial numbers, which are correct if the segment is a
    /// connection's first.
    fn check(&self, flow: Flow, segment: &Segment<'_>) -> Option<(CookieCheck, (u32, u32))> {
        let ack = segment.ack.filter(|_| !segment.has(SYN | RST))?;
        let initial = (segment.seq.wrapping_sub(1), ack.wrapping_sub(1));
        Some((check(&self.config.cookie_key, flow, segment.seq, ack), initial))
    }

    /// Processes a segment whose four-tuple has a connection. The segment usually belongs to that connection. If the
    /// guest has forgotten the connection, the segment may be the first of a new one. Only the guest can send on its
    /// port, so the segment is trusted.
    fn held(&mut self, source: SegmentContext, at: u32, segment: &Segment<'_>, out: &mut dyn Transmit) {
        let Some(conn) = self.table.get_mut(at) else { return };
        // Two connections have the same flow number. The second one has to wait for the first to end.
        if conn.slot != source.slot || conn.tcb.tuple != segment.tuple {
            return;
        }
        if conn.tcb.expects(segment) {
            conn.tcb.route = source.route;
            return self.turn_and_stir(source.now, at, TurnCause::Segment(segment), out);
        }
        let numbers = conn.numbers();
        match self.check(source.flow, segment).filter(|_| !numbers.cover(segment)) {
            Some((CookieCheck::First(abilities), _)) => {
                if segment.length() > 0 {
                    self.stats.superseded += 1;
                    self.remove_connection(source.now.mono, at);
                    self.begin(source, segment, abilities, out);
                }
            }
            _ => self.turn_and_stir(source.now, at, TurnCause::Segment(segment), out),
        }
    }

    /// Processes a segment whose four-tuple is in TIME-WAIT.
    fn closed(
        &mut self,
        source: SegmentContext,
        wait: TimeWait,
        segment: &Segment<'_>,
        out: &mut dyn Transmit,
    ) {
        // RST is ignored in this state (RFC 1337 §3), and a bare ACK needs no answer.
        if segment.length() == 0 || segment.has(RST) {
            return;
        }
        if let Some((CookieCheck::First(abilities), initial)) = self.check(source.flow, segment) {
            let is_repeated = wait.numbers.initial == initial;
            let is_new = self.ledger.is_opened(source.flow) || wait.gives_way(source.now.mono, TIME_WAIT);
            if is_repeated && !is_new && !segment.payload.is_empty() {
                // A retransmission needs no answer. The guest may also have started again with the same numbers, in a
                // SYN that we missed. It would then take an answer for an acknowledgement of its request. Without an
                // answer it retransmits.
                return;
            }
            if is_new && is_repeated || !wait.numbers.cover(segment) {
                self.stats.time_wait_reused += 1;
                self.forget_wait(source.slot, source.flow);
                return self.begin(source, segment, abilities, out);
            }
        }
        if segment.has(FIN)
            && let Some(wait) = self.table.wait_mut(source.flow)
        {
            wait.until = source.now.mono + TIME_WAIT;
        }
        let (next, ack) = wait.numbers.next;
        // The guest may not have received our FIN, because the kernel sent it and the frame may be lost. Without FIN,
        // an answer to a late segment would acknowledge the guest's FIN, and the guest would never ask for ours
        // again.
        let is_fin_missing = segment.ack.is_none_or(|ack| before(ack, next));
        let (seq, flags) = if is_fin_missing { (next.wrapping_sub(1), FIN) } else { (next, 0) };
        let window = RECEIVE_BUFFER as u16;
        let answer = Header { seq, ack: Some(ack), flags, window, options: &[] };
        self.workshop.send(out, |frame| answer.emit(&segment.tuple, source.route, frame));
    }

    /// Processes a segment of an unknown four-tuple. Its numbers decide whether it belongs to a handshake of ours.
    fn unknown(&mut self, source: SegmentContext, segment: &Segment<'_>, out: &mut dyn Transmit) {
        if let Some(port) = self.ports.get_mut(source.slot) {
            port.heard = source.now.mono;
        }
        let listens = self.service.listens(source.slot, segment.tuple.local);
        match self.check(source.flow, segment).filter(|_| listens) {
            // The end of a handshake: data will follow.
            Some((CookieCheck::First(_) | CookieCheck::Later, _)) if segment.length() == 0 => {}
            Some((CookieCheck::First(abilities), _)) => self.begin(source, segment, abilities, out),
            Some((CookieCheck::Later, _)) => self.early(source, segment, out),
            Some((CookieCheck::Foreign, _)) | None if self.spares && listens => {
                self.leave_alone(source, segment, out)
            }
            Some((CookieCheck::Foreign, _)) | None => self.refuse(source, segment, out),
        }
    }

    /// Processes a segment that arrived before its connection's first segment, or whose connection is forgotten.
    fn early(&mut self, source: SegmentContext, segment: &Segment<'_>, out: &mut dyn Transmit) {
        let SegmentContext { now, flow, .. } = source;
        // During a handover another agent may hold the connection.
        let is_ours = !self.spares && self.draining.is_none();
        if is_ours && self.forgotten.is_certain(now.mono, flow, segment.seq) {
            self.stats.forgotten += 1;
            return self.refuse(source, segment, out);
        }
        self.stats.dropped_early += 1;
    }

    /// Creates a connection from its first segment, if there is room.
    fn begin(
        &mut self,
        source: SegmentContext,
        segment: &Segment<'_>,
        abilities: TcpOptions,
        out: &mut dyn Transmit,
    ) {
        let SegmentContext { now, slot, route, flow } = source;
        if self.turns_away(now, flow.number()) || !self.has_room(now.mono, slot, out) {
            return;
        }
        self.forget_wait(slot, flow);
        let (local, remote) = (segment.tuple.local, segment.tuple.remote);
        let mut exchange = self.service.open(now, Connection { slot, local, remote });
        self.claim(now, flow.number(), &mut exchange);
        let largest = self.largest_segment(now.mono, slot, remote.0.is_ipv4());
        let port = self.ports.get_or_make(slot, now.mono);
        let mut tcb = Tcb::new(segment, abilities, largest, route, now.mono);
        tcb.takes_long = self.config.guest_devices.takes_long(slot);
        self.ledger.hold(flow);
        let at = self.table.insert(StackConnection::new(tcb, flow, slot, port.conns.len(), exchange));
        port.conns.push(at);
        self.held.set(slot, port.conns.len());
        self.stats.accepted += 1;
        self.turn_and_stir(now, at, TurnCause::Segment(segment), out);
    }

    /// Limit of payload bytes per segment to a slot's guest: what its device's MTU allows, or less if longer
    /// segments were lost recently.
    pub(super) fn largest_segment(&self, now: Duration, slot: Slot, is_ipv4: bool) -> u16 {
        if self.ports.get(slot).is_some_and(|port| port.is_narrow(now)) {
            return receive::safe_segment(is_ipv4);
        }
        receive::largest_segment(is_ipv4, self.config.guest_devices.mtu(slot))
    }

    fn refuse(&mut self, source: SegmentContext, segment: &Segment<'_>, out: &mut dyn Transmit) {
        // A reset is never answered (RFC 9293 §3.10.7.1).
        if !segment.has(RST) {
            let answer = Header::refusal(segment);
            self.workshop.send(out, |frame| answer.emit(&segment.tuple, source.route, frame));
            self.stats.unmatched += 1;
        }
    }
}

// Reads ahead what the frames of a group will touch.
//
// In a boot storm each frame is another guest's, and nothing of that guest is in the CPU's cache. Its state lies behind
// chains of pointers, and one frame after the other would wait for memory at each of them. Here each pointer is
// followed for all frames of the group before the next one, so that their reads overlap.
//
// All of it is a hint: a wrong one costs time and nothing else.

/// Bytes of a cache line of most CPUs.
const LINE: usize = 64;

/// A look at a frame that shows nothing.
const NOTHING: FramePreview<'_> =
    FramePreview { slot: 0, local: (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0), payload: &[] };

impl<S: Service, L: AckLedger> Stack<S, L> {
    /// Reads ahead what [`receive`](Self::receive) will touch for these frames. Changes nothing.
    pub fn read_ahead(&self, group: &[(Slot, &[u8])]) {
        if group.len() < 2 {
            return;
        }
        let group = &group[..group.len().min(GROUP)];
        for (slot, frame) in group {
            black_box(frame.iter().step_by(LINE).fold(0, |seen, byte| seen ^ byte));
            black_box(self.ports.get(*slot).is_some());
        }
        let (mut glimpses, mut flows) = ([NOTHING; GROUP], [None; GROUP]);
        for ((slot, frame), place) in group.iter().zip(0..) {
            let seen = self.glimpse(*slot, frame);
            glimpses[place] = seen.map_or(FramePreview { slot: *slot, ..NOTHING }, |(glimpse, _)| glimpse);
            flows[place] = seen.map(|(_, flow)| flow);
        }
        let glimpses = &glimpses[..group.len()];
        self.read_ports(glimpses, &flows);
        let (mut asking, mut count) = ([NOTHING; GROUP], 0);
        for glimpse in glimpses.iter().filter(|glimpse| !glimpse.payload.is_empty()) {
            asking[count] = *glimpse;
            count += 1;
        }
        self.service.read_ahead(&asking[..count]);
    }

    /// Reads the entries of the frames' flows. For each port it also reads what the next request of a guest cleans up:
    /// its last connection, which the kernel has ended, and its oldest flow in TIME-WAIT.
    fn read_ports(&self, glimpses: &[FramePreview<'_>], flows: &[Option<Flow>]) {
        let (mut conns, mut oldest) = ([None; GROUP], [None; GROUP]);
        for (glimpse, place) in glimpses.iter().zip(0..) {
            let Some(port) = self.ports.get(glimpse.slot) else { continue };
            conns[place] = port.conns.last().copied();
            oldest[place] = port.waits.front().map(|(flow, _)| *flow);
        }
        for flow in flows.iter().flatten() {
            black_box(self.table.find(flow.number()));
            black_box(self.ledger.is_opened(*flow));
        }
        let numbers = flows.iter().flatten().map(|flow| flow.number());
        for number in numbers.chain(oldest.into_iter().flatten()) {
            black_box(self.table.wait(number));
        }
        let conns = conns.map(|at| self.table.get(at?));
        for conn in conns.iter().flatten() {
            black_box(conn.touch());
        }
        for conn in conns.iter().flatten() {
            black_box(self.ledger.look(conn.flow));
        }
    }

    /// Looks at a frame without checks. `None` unless it looks like a TCP segment without IP options or extensions.
    fn glimpse<'f>(&self, slot: Slot, frame: &'f [u8]) -> Option<(FramePreview<'f>, Flow)> {
        let packet = frame.get(ethernet::HEADER..)?;
        let (remote, local, segment): (IpAddr, IpAddr, _) = match packet.first()? {
            &ipv4::VERSION_IHL if packet.get(ipv4::PROTOCOL)? == &protocol::TCP => {
                let address = |at| array::<4>(packet, at);
                (
                    address(ipv4::SOURCE)?.into(),
                    address(ipv4::DESTINATION)?.into(),
                    packet.get(ipv4::HEADER..)?,
                )
            }
            _ if packet.get(ipv6::NEXT_HEADER)? == &protocol::TCP => {
                let address = |at| array::<16>(packet, at);
                (
                    address(ipv6::SOURCE)?.into(),
                    address(ipv6::DESTINATION)?.into(),
                    packet.get(ipv6::HEADER..)?,
                )
            }
            _ => return None,
        };
        let port = |at| array(segment, at).map(u16::from_be_bytes);
        let (remote, local) = ((remote, port(0)?), (local, port(2)?));
        let flow = Tuple { remote, local }.flow(&self.config.cookie_key, slot);
        // The byte before the flags has the length of the header in words of four bytes (RFC 9293 §3.1).
        let header = usize::from(segment.get(tcp::FLAGS - 1)? >> 4) * 4;
        let payload = segment.get(header..).unwrap_or_default();
        Some((FramePreview { slot, local, payload }, flow))
    }
}

/// The bytes at a place.
fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
