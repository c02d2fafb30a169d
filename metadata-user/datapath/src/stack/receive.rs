//! Processes a segment of a connection (RFC 9293 §3.10.7.4, RFC 5961).
//!
//! Out-of-order segments are not buffered: the guest gets an acknowledgement of what is missing at once, and
//! retransmits. Requests are only a segment or two long.

use metadata_common::addresses::Connection;
use metadata_common::answer::{SEGMENT_UNSAID_V4, SEGMENT_UNSAID_V6, segment_v4, segment_v6};
use metadata_common::cookie::{CookieCheck, CookieKey, Flow, SCALE_MAX, TcpOptions, again, check, issue};
use metadata_common::maps::Slot;
use metadata_common::time::Now;
use metadata_common::wire::{ethernet, ipv4, ipv6, protocol, tcp};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::Stack;
use super::connection::{StackConnection, TurnCause};
use super::frame::{ACK, EthernetAddresses, FIN, RST, SYN, Segment, Tuple, before};
use super::interfaces::{
    AckLedger, FramePreview, KernelSegment, KernelTurn, RECEIVE_BUFFER, Service, TIME_WAIT, Transmit,
};
use super::send::Header;
use super::table::TimeWait;
use super::tcb::Tcb;
use crate::GROUP;

/// The result of a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SegmentOutcome<'a> {
    /// The next bytes in sequence, possibly none.
    Taken(&'a [u8]),
    /// The guest has reset the connection.
    Reset,
}

const NOTHING: SegmentOutcome<'_> = SegmentOutcome::Taken(&[]);

impl Tcb {
    /// Whether a segment's numbers are plausible for this connection.
    pub(super) fn expects(&self, segment: &Segment<'_>) -> bool {
        let acknowledges = segment.ack.is_none_or(|ack| !before(ack, self.una) && !before(self.max, ack));
        self.accepts(segment) && acknowledges
    }

    /// The acceptability test (RFC 9293 §3.10.7.4, first step). A segment that starts at the next byte is accepted
    /// even if the window is closed.
    fn accepts(&self, segment: &Segment<'_>) -> bool {
        let ahead = segment.seq.wrapping_sub(self.rcv);
        let end = segment.seq.wrapping_add(segment.length());
        ahead < self.receive_window().max(1) || (before(segment.seq, self.rcv) && before(self.rcv, end))
    }

    /// Processes a segment of this connection.
    pub(super) fn arrived<'a>(&mut self, segment: &Segment<'a>, now: Duration) -> SegmentOutcome<'a> {
        let accepted = self.accepts(segment);
        if segment.has(RST) {
            // RFC 5961 §3.2: only a reset with exactly the next number is valid.
            if segment.seq == self.rcv {
                return SegmentOutcome::Reset;
            }
            if accepted {
                self.challenge(now);
            }
            return NOTHING;
        }
        if !accepted || segment.has(SYN) {
            if segment.length() == 0 || segment.has(SYN) {
                self.challenge(now);
            } else {
                self.ack_due = true;
            }
            return NOTHING;
        }
        let Some(ack) = segment.ack else { return NOTHING };
        if before(self.max, ack) {
            self.challenge(now);
            return NOTHING;
        }
        if !before(ack, self.una) {
            self.on_acknowledgement(ack, segment, now);
        }
        self.take(segment, now)
    }

    /// Processes an acknowledgement and its window.
    fn on_acknowledgement(&mut self, ack: u32, segment: &Segment<'_>, now: Duration) {
        let window = u32::from(segment.window) << self.scale;
        let advances = before(self.una, ack);
        if advances {
            self.acknowledged(ack, now);
        } else if segment.flags & (ACK | FIN) == ACK
            && segment.payload.is_empty()
            && window == self.window
            && self.nxt != self.una
        {
            self.resend |= self.recovery.duplicate(self.una, self.max, self.flight());
        }
        // A segment that acknowledges more has the newer window, whatever its own sequence number. Linux does the
        // same.
        if advances || !before(segment.seq, self.window_seq) {
            if window > self.window && self.nxt == self.una {
                self.timer = None;
                self.recovery.reopened();
            }
            self.window_seq = segment.seq;
            self.window = window;
            self.largest = self.largest.max(window);
        }
    }

    /// Records that the guest has received everything before `ack`.
    pub(super) fn acknowledged(&mut self, ack: u32, now: Duration) {
        let acked = ack.wrapping_sub(self.una);
        self.una = ack;
        if before(self.nxt, ack) {
            self.nxt = ack;
        }
        self.outbox.acknowledged(ack);
        self.progress = now;
        self.timer = None;
        let flight = self.flight();
        self.resend = self.recovery.acknowledged(ack, acked, flight, now) && flight > 0;
    }

    /// Processes payload and FIN.
    fn take<'a>(&mut self, segment: &Segment<'a>, now: Duration) -> SegmentOutcome<'a> {
        let length = segment.length();
        if length == 0 {
            return NOTHING;
        }
        self.ack_due = true;
        // Earlier bytes are missing, or the segment lies after a FIN.
        if before(self.rcv, segment.seq) || self.guest_finished {
            return NOTHING;
        }
        let known = self.rcv.wrapping_sub(segment.seq) as usize;
        let payload = segment.payload.get(known..).unwrap_or_default();
        let fits = &payload[..payload.len().min(self.receive_window() as usize)];
        self.rcv = self.rcv.wrapping_add(fits.len() as u32);
        if segment.has(FIN) && fits.len() == payload.len() {
            self.finished(now);
        }
        SegmentOutcome::Taken(fits)
    }

    /// Records that the guest's FIN is next in sequence.
    pub(super) fn finished(&mut self, now: Duration) {
        self.rcv = self.rcv.wrapping_add(1);
        self.guest_finished = true;
        self.progress = now;
    }
}

// Answers a SYN without keeping state.
//
// The kernel programs answer most SYNs by the same rules, so a SYN and its retransmissions get the same number from
// either. SYNs whose four-tuple has a connection always come to the stack.

const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;
const WINDOW_SCALE: u8 = 3;

/// Limit of payload bytes per segment to a device with this MTU; an MTU of 0 means unknown.
pub(super) const fn largest_segment(is_ipv4: bool, mtu: u32) -> u16 {
    if is_ipv4 { segment_v4(mtu) } else { segment_v6(mtu) }
}

/// Payload bytes that every host accepts over IPv4 and every link over IPv6 (RFC 9293 §3.7.1).
pub(super) const fn safe_segment(is_ipv4: bool) -> u16 {
    if is_ipv4 { SEGMENT_UNSAID_V4 } else { SEGMENT_UNSAID_V6 }
}

/// Reads a SYN's options, for a link that takes segments of `largest` bytes. A missing size or size 0 means the size
/// every host accepts. The last of several sizes counts, as in the kernel programs.
pub(super) fn abilities(segment: &Segment<'_>, largest: u16) -> TcpOptions {
    let is_ipv4 = segment.tuple.remote.0.is_ipv4();
    let mut said = TcpOptions { segment: safe_segment(is_ipv4), scale: None };
    let mut rest = segment.options;
    // The loop is bounded: each option takes at least one byte, and there are at most 40.
    while let [kind, after @ ..] = rest {
        match *kind {
            END => break,
            NO_OPERATION => {
                rest = after;
                continue;
            }
            _ => {}
        }
        let Some(option) = after.first().and_then(|length| rest.get(..usize::from(*length))) else { break };
        match option {
            [MAXIMUM_SEGMENT_SIZE, 4, high, low] => {
                said.segment = match u16::from_be_bytes([*high, *low]) {
                    0 => safe_segment(is_ipv4),
                    size => size.min(largest),
                };
            }
            [WINDOW_SCALE, 3, shift] => said.scale = Some((*shift).min(SCALE_MAX)),
            // The option is shorter than its own header, so the next one cannot be found.
            [] | [_] => break,
            _ => {}
        }
        rest = &rest[option.len()..];
    }
    said
}

/// The sequence number that answers a SYN. `largest` is the limit of payload bytes in both directions. The number is
/// never `taken`, the initial number of the flow's current connection.
pub(super) fn number(
    key: &CookieKey,
    flow: Flow,
    largest: u16,
    segment: &Segment<'_>,
    taken: Option<u32>,
) -> u32 {
    let number = issue(key, flow, segment.seq, abilities(segment, largest));
    if taken == Some(number) { again(number) } else { number }
}

/// Builds the SYN-ACK with this sequence number and a maximum segment size of `largest` bytes (RFC 9293 §3.10.7.2).
/// Returns the frame's length.
pub(super) fn answer(
    number: u32,
    largest: u16,
    segment: &Segment<'_>,
    route: EthernetAddresses,
    frame: &mut [u8],
) -> usize {
    let said = abilities(segment, largest);
    let [high, low] = largest.to_be_bytes();
    let options = [MAXIMUM_SEGMENT_SIZE, 4, high, low, NO_OPERATION, WINDOW_SCALE, 3, 0];
    let header = Header {
        seq: number,
        ack: Some(segment.seq.wrapping_add(1)),
        flags: SYN,
        window: RECEIVE_BUFFER as u16,
        // Window scale is offered only if the guest offers it (RFC 7323 §2.2); ours is 0.
        options: if said.scale.is_some() { &options } else { &options[..4] },
    };
    header.emit(&segment.tuple, route, frame)
}

// Assigns a segment to a connection, to one in TIME-WAIT, or to a new one.

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
        let next = segment.seq.wrapping_add(segment.length());
        let numbers = KernelSegment { seq: segment.seq, next, ack: segment.ack, resets: segment.has(RST) };
        match self.ledger.kernel_turn(source.flow, numbers) {
            KernelTurn::Unknown => {}
            KernelTurn::Adopted(abilities) => {
                // Without room the kernel keeps the connection, until the guest repeats the segment.
                if self.admits(source, out) && self.ledger.take_over(source.flow, numbers) {
                    self.open(source, segment, abilities, out);
                }
                return;
            }
            KernelTurn::Reset => {
                if self.ledger.take_over(source.flow, numbers) {
                    self.refuse(source, segment, out);
                }
                return;
            }
            // The guest has begun again with the same ports.
            KernelTurn::Kernels { first, is_idle } if self.begins(source.flow, segment, first, is_idle) => {
                self.ledger.withdraw(source.flow);
            }
            KernelTurn::Kernels { .. } => {
                self.stats.dropped_early += 1;
                return;
            }
            KernelTurn::Probed { next: (seq, ack) } => {
                return self.acknowledge(source, segment, (seq, 0), ack, out);
            }
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
        self.ledger.reopen(source.flow);
        let key = &self.config.cookie_key;
        let held = self.table.find(source.flow.number()).and_then(|at| self.table.get(at));
        let taken = held.map(|conn| conn.tcb.initial.1);
        let largest =
            largest_segment(segment.tuple.remote.0.is_ipv4(), self.config.guest_devices.mtu(source.slot));
        let number = number(key, source.flow, largest, segment, taken);
        self.workshop.send(out, |frame| answer(number, largest, segment, source.route, frame));
        self.stats.handshakes += 1;
    }

    /// Whether a segment begins a connection in place of one whose first request had the sequence number `first`.
    fn begins(&self, flow: Flow, segment: &Segment<'_>, first: Option<u32>, is_idle: bool) -> bool {
        let is_first = matches!(self.check(flow, segment), Some((CookieCheck::First(_), _)));
        let differs =
            is_idle || self.ledger.is_opened(flow) || first.is_some_and(|first| first != segment.seq);
        segment.length() > 0 && is_first && differs
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
        self.acknowledge(source, segment, (seq, flags), ack, out);
    }

    /// Acknowledges what a guest has sent on a connection that has no state.
    fn acknowledge(
        &mut self,
        source: SegmentContext,
        segment: &Segment<'_>,
        (seq, flags): (u32, u8),
        ack: u32,
        out: &mut dyn Transmit,
    ) {
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
        if self.admits(source, out) {
            self.open(source, segment, abilities, out);
        }
    }

    /// Whether there may be one more connection.
    fn admits(&mut self, source: SegmentContext, out: &mut dyn Transmit) -> bool {
        let SegmentContext { now, slot, flow, .. } = source;
        !self.turns_away(now, flow.number()) && self.has_room(now.mono, slot, out)
    }

    /// Creates a connection that was admitted.
    fn open(
        &mut self,
        source: SegmentContext,
        segment: &Segment<'_>,
        abilities: TcpOptions,
        out: &mut dyn Transmit,
    ) {
        let SegmentContext { now, slot, route, flow } = source;
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
            return safe_segment(is_ipv4);
        }
        largest_segment(is_ipv4, self.config.guest_devices.mtu(slot))
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
const NO_FRAME: FramePreview<'_> =
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
        let (mut glimpses, mut flows) = ([NO_FRAME; GROUP], [None; GROUP]);
        for ((slot, frame), place) in group.iter().zip(0..) {
            let seen = self.glimpse(*slot, frame);
            glimpses[place] = seen.map_or(FramePreview { slot: *slot, ..NO_FRAME }, |(glimpse, _)| glimpse);
            flows[place] = seen.map(|(_, flow)| flow);
        }
        let glimpses = &glimpses[..group.len()];
        self.read_ports(glimpses, &flows);
        let (mut asking, mut count) = ([NO_FRAME; GROUP], 0);
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

#[cfg(test)]
mod tests {
    use metadata_common::cookie::TcpOptions;
    use std::net::IpAddr;

    use super::abilities;
    use crate::stack::frame::{SYN, Segment, Tuple};

    #[test]
    fn options_are_read_up_to_the_first_malformed_one() {
        let v4 = IpAddr::from([10, 0, 0, 1]);
        let v6 = IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 1]);
        type Case = (&'static str, IpAddr, &'static [u8], (u16, Option<u8>));
        let cases: [Case; 14] = [
            ("none", v4, &[], (536, None)),
            ("none over IPv6", v6, &[], (1220, None)),
            ("a size", v4, &[2, 4, 5, 180], (1460, None)),
            ("an excessive size", v4, &[2, 4, 255, 255], (1460, None)),
            ("an excessive size over IPv6", v6, &[2, 4, 5, 180], (1440, None)),
            ("size 0", v4, &[2, 4, 0, 0], (536, None)),
            ("two sizes", v4, &[2, 4, 5, 180, 2, 4, 4, 0], (1024, None)),
            ("a size, then size 0", v4, &[2, 4, 5, 180, 2, 4, 0, 0], (536, None)),
            ("Linux", v4, &[2, 4, 5, 180, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7], (1460, Some(7))),
            ("an excessive shift", v4, &[3, 3, 200, 0], (536, Some(14))),
            ("after the end", v4, &[0, 2, 4, 5, 180, 0, 0, 0], (536, None)),
            ("length 0", v4, &[9, 0, 2, 4, 5, 180, 0, 0], (536, None)),
            ("length 1", v4, &[9, 1, 2, 4, 5, 180, 0, 0], (536, None)),
            ("truncated", v4, &[1, 1, 2, 4], (536, None)),
        ];
        for (name, guest, options, (size, scale)) in cases {
            let tuple = Tuple { remote: (guest, 1), local: (guest, 80) };
            let segment = Segment { tuple, seq: 1, ack: None, window: 1, flags: SYN, options, payload: &[] };
            let largest = super::largest_segment(guest.is_ipv4(), 0);
            assert_eq!(abilities(&segment, largest), TcpOptions { segment: size, scale }, "{name}");
        }
    }

    #[test]
    fn the_largest_segment_fits_the_mtu() {
        assert_eq!(super::largest_segment(true, 0) as usize, crate::stack::MTU - 40);
        assert_eq!(super::largest_segment(false, 0) as usize, crate::stack::MTU - 60);
    }
}
