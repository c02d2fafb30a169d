//! One TCP connection and the exchange held over it.

use bytes::{Buf, Bytes};
use smoltcp::socket::tcp::State;
use smoltcp::wire::TcpControl;
use std::net::IpAddr;
use std::time::Duration;

use super::bare;
use super::config::{SEND_BUFFER, StackConfig, Timeouts};
use super::device::Wire;
use super::engine::{Engine, instant, moment};
use super::frame::Route;
use super::pool::Tcp;
use super::reach::{HOP_LIMIT, Reach};
use super::seam::{Connection, Exchange, Service, Step, Transmit};
use crate::time::Now;
use metadata_common::maps::Slot;

/// Exchange steps taken for one frame or timer: far more than a full receive buffer of the shortest
/// requests asks for. What is left over is done on the next turn.
const STEPS_PER_TURN: usize = 2048;

/// Segments sent for one frame or timer: a full send buffer in the smallest segments (48 octets), twice.
const SEGMENTS_PER_TURN: usize = 2 * SEND_BUFFER / 48;

/// How soon a turn that was cut short goes on.
const NEXT_TURN: Duration = Duration::from_millis(1);

/// First distance between two of our own repetitions of a FIN; it doubles, as retransmissions do.
const FIN_REPEAT: Duration = Duration::from_secs(1);

/// The four-tuple of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuple {
    pub(super) remote: (IpAddr, u16),
    pub(super) local: (IpAddr, u16),
}

/// What has become of a connection after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Live,
    /// It is over.
    Gone,
    /// Both sides have closed, we first: our next sequence number and the guest's are to be remembered.
    TimeWait((u32, u32)),
}

/// What a turn did, for the counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    pub(super) accepted: bool,
    pub(super) aborted: bool,
    pub(super) stalled: bool,
    pub(super) half_open_expired: bool,
    /// The exchange changed something others of its slot may wait for.
    pub(super) stirred: bool,
}

/// Everything a turn needs beside the connection.
pub(super) struct Scene<'a, S> {
    pub(super) now: Now,
    pub(super) slot: Slot,
    pub(super) config: &'a StackConfig,
    pub(super) service: &'a mut S,
    pub(super) engine: &'a mut Engine,
    pub(super) out: &'a mut dyn Transmit,
}

/// A connection and its exchange.
pub(super) struct Conn<E> {
    pub(super) tuple: Tuple,
    pub(super) tcp: Tcp,
    /// How its guest is reached: taken from each frame, so a changed gateway is followed.
    pub(super) route: Route,
    /// The guest's initial sequence number: a SYN with another one is a new conversation.
    pub(super) initial: u32,
    pub(super) opened: Duration,
    /// When it next wants a turn.
    pub(super) deadline: Option<Duration>,
    /// Boxed, because it is taken out for each turn.
    exchange: Option<Box<E>>,
    /// Handed over by the exchange, not yet all in the send buffer.
    pending: Bytes,
    /// The hop limit of `pending`, where it has one of its own.
    within: Option<u8>,
    /// Our sequence number after the last octet put into the send buffer.
    queued: u32,
    /// Which octets of the send buffer may not travel far.
    reach: Reach,
    until: Option<Duration>,
    /// The exchange is over: what still comes in is thrown away, so that the guest can finish sending and
    /// read our answer instead of a reset (RFC 9112 §9.6).
    closing: bool,
    finished: bool,
    /// When the guest last acknowledged something or changed its mind.
    progress: Duration,
    unacknowledged: usize,
    state: State,
    last_sent: Option<(u32, u32)>,
    /// When to repeat the FIN ourselves, and the distance to the next time.
    fin_repeat: Option<(Duration, Duration)>,
}

impl<E: Exchange> Conn<E> {
    /// A connection whose SYN is about to be processed.
    pub(super) fn new(tuple: Tuple, mut tcp: Tcp, route: Route, initial: u32, now: Duration) -> Self {
        let (address, port) = tuple.local;
        let listening = tcp.socket_mut().listen((smoltcp::wire::IpAddress::from(address), port));
        debug_assert!(listening.is_ok(), "a pooled connection is closed and port 0 is never listened on");
        Self {
            tuple,
            tcp,
            route,
            initial,
            opened: now,
            deadline: None,
            exchange: None,
            pending: Bytes::new(),
            within: None,
            queued: 0,
            reach: Reach::default(),
            until: None,
            closing: false,
            finished: false,
            progress: now,
            unacknowledged: 0,
            state: State::Listen,
            last_sent: None,
            fin_repeat: None,
        }
    }

    pub(super) fn is_half_open(&self) -> bool {
        self.tcp.socket().state() == State::SynReceived
    }

    /// True when the exchange has nothing to hand over and waits, so that a turn may make a difference.
    pub(super) fn waits(&self) -> bool {
        self.exchange.is_some() && !self.closing && self.pending.is_empty()
    }

    /// One turn: takes in `packet`, runs the exchange, sends, and sets the next deadline.
    pub(super) fn turn<S>(&mut self, scene: &mut Scene<'_, S>, packet: Option<&[u8]>) -> (Fate, Turn)
    where
        S: Service<Exchange = E>,
    {
        let now = scene.now;
        let at = instant(now.mono);
        let mut turn = Turn::default();
        let Engine { interface, scratch, sent, .. } = &mut *scene.engine;
        let mut wire = Wire::new(packet, self.route, scratch, &mut *scene.out);
        if packet.is_some() {
            interface.poll_ingress_single(at, &mut wire, &mut self.tcp.set);
        }
        self.note_progress(now.mono, true);
        if let Some(limit) = self.patience(&scene.config.timeouts)
            && now.mono >= limit
        {
            if self.is_half_open() {
                turn.half_open_expired = true;
                return (Fate::Gone, turn);
            }
            turn.stalled = true;
            self.tcp.socket_mut().abort();
        }
        let complete = self.converse(now, scene.slot, scene.service, &mut turn);
        wire.reach = std::mem::take(&mut self.reach);
        for _ in 0..SEGMENTS_PER_TURN {
            match interface.poll_egress(at, &mut wire, &mut self.tcp.set) {
                smoltcp::iface::PollResult::None => break,
                smoltcp::iface::PollResult::SocketStateChanged => {}
            }
        }
        self.reach = std::mem::take(&mut wire.reach);
        self.queued = wire.first.unwrap_or(self.queued);
        self.last_sent = wire.last.or(self.last_sent);
        self.note_progress(now.mono, false);
        let timer = interface.poll_at(at, &self.tcp.set).map(moment);
        self.repeat_fin(now.mono, timer, &mut wire);
        *sent += wire.sent;
        let fin = self.fin_repeat.map(|(at, _)| at);
        self.deadline = [timer, fin, self.until, self.patience(&scene.config.timeouts)]
            .into_iter()
            .chain((!complete).then_some(Some(now.mono)))
            .flatten()
            .min()
            .map(|at| at.max(now.mono + NEXT_TURN));
        (self.fate(), turn)
    }

    /// Repeats a FIN that smoltcp has given up on.
    ///
    /// Three duplicate ACKs make smoltcp (0.14) retransmit the first unacknowledged data at once, and stop
    /// its retransmission timer until it has. With nothing but the FIN outstanding there is no data, and
    /// the FIN would never be sent again.
    fn repeat_fin(&mut self, now: Duration, timer: Option<Duration>, wire: &mut Wire<'_>) {
        let outstanding = matches!(self.state, State::FinWait1 | State::Closing | State::LastAck);
        if !outstanding || self.unacknowledged > 0 || timer.is_some() {
            self.fin_repeat = None;
            return;
        }
        let (at, distance) = self.fin_repeat.unwrap_or((now + FIN_REPEAT, FIN_REPEAT));
        self.fin_repeat = Some((at, distance));
        if let Some((next, ack)) = self.last_sent.filter(|_| at <= now) {
            let numbers = (next.wrapping_sub(1), ack);
            let length = bare::emit(&self.tuple, self.route, TcpControl::Fin, numbers, wire.scratch);
            wire.out.send(&wire.scratch[..length]);
            wire.sent += 1;
            self.fin_repeat = Some((now + distance * 2, distance * 2));
        }
    }

    fn fate(&self) -> Fate {
        match (self.tcp.socket().state(), self.last_sent) {
            // Back to LISTEN: the guest took its SYN back (RFC 9293 §3.10.7.4).
            (State::Closed | State::Listen, _) => Fate::Gone,
            (State::TimeWait, Some(next)) => Fate::TimeWait(next),
            _ => Fate::Live,
        }
    }

    /// Moves the patience mark: when the guest has acknowledged something or moved the state on, and when
    /// we start to wait for it. A FIN of ours behind data it ignores is no progress.
    fn note_progress(&mut self, now: Duration, guest_spoke: bool) {
        let (queued, state) = (self.tcp.socket().send_queue(), self.tcp.socket().state());
        let nothing_due = self.unacknowledged == 0;
        let moved = state != self.state && (guest_spoke || nothing_due);
        if moved || queued < self.unacknowledged || (nothing_due && queued > 0) {
            self.progress = now;
        }
        self.unacknowledged = queued;
        self.state = state;
    }

    /// When waiting for the guest ends, if we wait for it.
    fn patience(&self, timeouts: &Timeouts) -> Option<Duration> {
        match self.tcp.socket().state() {
            State::SynReceived => Some(self.opened + timeouts.half_open),
            State::FinWait2 => Some(self.progress + timeouts.linger),
            State::FinWait1 | State::Closing | State::LastAck => Some(self.progress + timeouts.stall),
            _ => (self.unacknowledged > 0).then(|| self.progress + timeouts.stall),
        }
    }

    /// Lets the exchange and the guest talk until one has to wait for the other. False when the turn was
    /// cut short.
    fn converse<S>(&mut self, now: Now, slot: Slot, service: &mut S, turn: &mut Turn) -> bool
    where
        S: Service<Exchange = E>,
    {
        if self.closing {
            self.discard();
            return true;
        }
        if !self.tcp.socket().may_send() {
            return true;
        }
        let mut exchange = match self.exchange.take() {
            Some(exchange) => exchange,
            None => {
                turn.accepted = true;
                let (local, remote) = (self.tuple.local, self.tuple.remote);
                Box::new(service.open(now, Connection { slot, local, remote }))
            }
        };
        self.until = None;
        self.reach.acknowledged(self.queued.wrapping_sub(self.tcp.socket().send_queue() as u32));
        let complete = self.steps(now, &mut exchange, turn);
        turn.stirred = exchange.stirs();
        self.exchange = Some(exchange);
        complete
    }

    fn steps(&mut self, now: Now, exchange: &mut E, turn: &mut Turn) -> bool {
        self.offer(now, exchange);
        for _ in 0..STEPS_PER_TURN {
            if !self.flush() {
                return true;
            }
            match exchange.next(now) {
                Step::Send(bytes) => (self.pending, self.within) = (bytes, None),
                Step::SendWithin { bytes, hop_limit } => {
                    self.pending = bytes;
                    self.within = Some(hop_limit.clamp(1, HOP_LIMIT));
                }
                Step::Wait { until } => {
                    if !self.offer(now, exchange) {
                        self.until = until;
                        return true;
                    }
                }
                Step::Close => {
                    self.closing = true;
                    self.tcp.socket_mut().close();
                    self.discard();
                    return true;
                }
                Step::Abort => {
                    turn.aborted = true;
                    self.closing = true;
                    self.tcp.socket_mut().abort();
                    return true;
                }
            }
        }
        false
    }

    /// Copies pending bytes into the send buffer. True when none are left.
    fn flush(&mut self) -> bool {
        while !self.pending.is_empty() {
            if self.within.is_some() && !self.reach.has_room() {
                return false;
            }
            let taken = match self.tcp.socket_mut().send_slice(&self.pending) {
                Ok(taken) if taken > 0 => taken,
                _ => return false,
            };
            if let Some(hop_limit) = self.within {
                self.reach.add(self.queued, taken, hop_limit);
            }
            self.queued = self.queued.wrapping_add(taken as u32);
            self.pending.advance(taken);
        }
        true
    }

    /// Offers received bytes, then the end of them. True when the exchange took anything.
    fn offer(&mut self, now: Now, exchange: &mut E) -> bool {
        let mut moved = false;
        while self.tcp.socket().can_recv() {
            let taken = self.tcp.socket_mut().recv(|bytes| {
                let taken = exchange.receive(now, bytes).min(bytes.len());
                (taken, taken)
            });
            match taken {
                Ok(taken) if taken > 0 => moved = true,
                _ => return moved,
            }
        }
        if !self.finished && !self.tcp.socket().may_recv() {
            self.finished = true;
            exchange.finish(now);
            moved = true;
        }
        moved
    }

    fn discard(&mut self) {
        while self.tcp.socket().can_recv() {
            if self.tcp.socket_mut().recv(|bytes| (bytes.len(), ())).is_err() {
                break;
            }
        }
    }
}
