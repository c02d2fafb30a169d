//! One guest: it resolves the metadata address by ARP, then makes one request after the other, each on a new connection
//! unless kept alive.

mod exchange;

use super::answer::Answer;
use super::plan::Planned;
use super::tally::Failure;
use super::tcp::{Connection, Due, MILLISECOND, Nanos, SECOND};
use super::wire::{self, Ends, Incoming};
use super::world::{NEEDS_CHECKSUM, VNET, World};
use metadata_common::mac::Mac;
use std::net::Ipv4Addr;

/// The pause before ARP is repeated (Linux's retrans_time).
const ARP_AGAIN: Nanos = SECOND;
/// The number of tries of ARP.
const ARP_TRIES: u8 = 5;
/// An answer is given up after this time without an octet. cloud-init's own limits are 2 to 50 s.
const SILENCE: Nanos = 10 * SECOND;
/// The most closed connections whose end the guest awaits. Beyond it the oldest is dropped.
const CLOSING_MOST: usize = 64;
/// The first port a guest connects from (Linux's ip_local_port_range).
const FIRST_PORT: u16 = 32_768;
/// The number of ports a guest connects from.
const PORTS: u16 = 28_232;
/// The pause before a failed request is repeated.
const RETRY_PAUSE: Nanos = SECOND;
/// The pause between two requests of a lone guest.
const LONE_PAUSE: Nanos = 2 * MILLISECOND;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The guest has not begun, or has finished.
    Off,
    /// ARP has been sent this many times.
    Resolving(u8),
    Asking,
    /// The guest waits before the next request.
    Pausing,
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) plan: Planned,
    ends: Ends,
    slow: bool,
    state: State,
    /// The index of the current request.
    at: usize,
    answer: Answer,
    /// The answer is complete, and the guest awaits the end of the connection.
    is_answered: bool,
    connection: Option<Connection>,
    closing: Vec<Connection>,
    ports_used: u16,
    began_at: Nanos,
    /// Some request of this boot has failed.
    failed: bool,
    /// How often the current request was repeated.
    tries: u8,
    asked_at: Nanos,
    progress_at: Nanos,
    /// The time at which [`State::Resolving`] or [`State::Pausing`] continues.
    on_at: Nanos,
    /// The time at which [`Guest::due`] must be called.
    pub(super) wake_at: Nanos,
}

impl Guest {
    pub(super) fn new(plan: Planned, server: Ipv4Addr) -> Self {
        let ends = Ends { mac: plan.mac(), address: plan.address, server, server_mac: Mac([0; 6]) };
        Self {
            plan,
            ends,
            slow: false,
            state: State::Off,
            at: 0,
            answer: Answer::default(),
            is_answered: false,
            connection: None,
            closing: Vec::new(),
            ports_used: 0,
            began_at: 0,
            failed: false,
            tries: 0,
            asked_at: 0,
            progress_at: 0,
            on_at: 0,
            wake_at: Nanos::MAX,
        }
    }

    /// Whether the guest is not booting.
    pub(super) fn is_off(&self) -> bool {
        self.state == State::Off
    }

    /// Returns the time of the last progress of the current answer, and the port; `None` if the guest waits for no
    /// answer.
    pub(super) fn waits(&self) -> Option<(Nanos, u16)> {
        let connection = self.connection.as_ref().filter(|_| self.state == State::Asking)?;
        Some((self.progress_at, connection.port))
    }

    /// Returns the number of requests of this boot that have ended.
    pub(super) fn answered(&self) -> u64 {
        self.at as u64
    }

    /// Whether none of the guest's connections is open.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_off() && self.closing.is_empty()
    }

    /// Drops the state of earlier storms. The next subject has no state of them either.
    pub(super) fn forget(&mut self, slow: bool, random: &mut fastrand::Rng) {
        self.closing.clear();
        self.connection = None;
        self.state = State::Off;
        self.slow = slow;
        self.ports_used = random.u16(..PORTS);
        self.wake_at = Nanos::MAX;
    }

    /// Starts a boot.
    pub(super) fn boot(&mut self, world: &mut World<'_>) {
        world.tally.boots += 1;
        self.began_at = world.now;
        self.failed = false;
        self.tries = 0;
        self.at = 0;
        self.state = State::Resolving(0);
        self.resolve(0, world);
        self.plan_wake();
    }

    fn resolve(&mut self, tries: u8, world: &mut World<'_>) {
        if tries == ARP_TRIES {
            for _ in 0..world.requests.len() {
                world.tally.fail(Failure::Arp);
            }
            self.failed = true;
            self.finish(world);
            return;
        }
        if tries > 0 {
            world.tally.retransmissions += 1;
        }
        self.state = State::Resolving(tries + 1);
        self.on_at = world.now + ARP_AGAIN;
        let ends = self.ends;
        world.arp(|out| wire::who_has(out, &ends));
    }

    /// Handles a frame from the tap.
    pub(super) fn receive(&mut self, frame: &[u8], world: &mut World<'_>) {
        let (partial, frame) = if world.manner.vnet {
            let Some((head, frame)) = frame.split_at_checked(VNET) else { return };
            (head[0] & NEEDS_CHECKSUM != 0, frame)
        } else {
            (false, frame)
        };
        match wire::read(frame, &self.ends, partial) {
            Incoming::WhoHas(mac, address) => {
                let ends = self.ends;
                world.arp(|out| wire::is_at(out, &ends, mac, address));
            }
            Incoming::IsAt(mac) => {
                self.ends.server_mac = mac;
                if matches!(self.state, State::Resolving(_)) {
                    self.ask(world);
                }
            }
            Incoming::Tcp(header, payload) => self.segment(&header, payload, world),
            Incoming::Damaged => world.tally.note(Failure::Checksum),
            Incoming::Other => {}
        }
        self.plan_wake();
    }

    /// Handles the timers that have expired.
    pub(super) fn due(&mut self, world: &mut World<'_>) {
        match self.state {
            State::Resolving(tries) if self.on_at <= world.now => self.resolve(tries, world),
            State::Pausing if self.on_at <= world.now => self.ask(world),
            State::Asking if self.progress_at + SILENCE <= world.now => {
                let opening = self.connection.as_ref().is_some_and(Connection::is_opening);
                self.fail(if opening { Failure::Connect } else { Failure::Silence }, true, world);
            }
            _ => {}
        }
        if let Some(mut connection) = self.connection.take() {
            match connection.due(world.now) {
                Due::GiveUp => {
                    self.connection = Some(connection);
                    self.fail(Failure::Connect, false, world);
                }
                due => {
                    self.send_due(due, &mut connection, world);
                    self.connection = Some(connection);
                }
            }
        }
        let mut closing = std::mem::take(&mut self.closing);
        closing.retain_mut(|connection| {
            let due = connection.due(world.now);
            self.send_due(due, connection, world);
            due != Due::GiveUp
        });
        self.closing = closing;
        self.plan_wake();
    }

    fn send_due(&self, due: Due, connection: &mut Connection, world: &mut World<'_>) {
        match due {
            Due::Nothing | Due::GiveUp => {}
            Due::Send(send) => self.send(send, connection, world),
            Due::Again(send) => {
                world.tally.retransmissions += 1;
                self.send(send, connection, world);
            }
        }
    }

    fn plan_wake(&mut self) {
        let own = match self.state {
            State::Off => Nanos::MAX,
            State::Resolving(_) | State::Pausing => self.on_at,
            State::Asking => self.progress_at + SILENCE,
        };
        let connections = self.connection.iter().chain(&self.closing).map(Connection::wake_at);
        self.wake_at = connections.fold(own, Nanos::min);
    }

    fn go_on(&mut self, world: &mut World<'_>) {
        self.at += 1;
        self.tries = 0;
        if self.at == world.requests.len() {
            if !self.failed {
                world.tally.boot.add(world.now - self.began_at);
            }
            self.finish(world);
        } else if world.manner.lone {
            self.state = State::Pausing;
            self.on_at = world.now + LONE_PAUSE;
        } else {
            self.ask(world);
        }
    }

    fn finish(&mut self, world: &mut World<'_>) {
        self.state = State::Off;
        if let Some(connection) = self.connection.take() {
            self.close(connection, world);
        }
        if !self.failed {
            world.tally.finished.push(world.now);
        }
    }
}
