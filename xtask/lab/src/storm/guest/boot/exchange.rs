//! The requests of a guest: it sends them, checks their answers, and closes or resets their connections.

use super::{CLOSING_MOST, FIRST_PORT, Guest, PORTS, RETRY_PAUSE, State};
use crate::storm::guest::answer::{Body, Progress};
use crate::storm::guest::tally::Failure;
use crate::storm::guest::tcp::{Connection, Event, Send};
use crate::storm::guest::wire::{self, Header};
use crate::storm::guest::world::{Scratch, World};

impl Guest {
    /// Begins the next request, on the existing connection or on a new one.
    pub(super) fn ask(&mut self, world: &mut World<'_>) {
        self.state = State::Asking;
        self.answer.reset();
        self.is_answered = false;
        self.progress_at = world.now;
        if self.tries == 0 {
            self.asked_at = world.now;
        }
        if let Some(mut connection) = self.connection.take() {
            self.send_request(&mut connection, world);
            self.connection = Some(connection);
            return;
        }
        self.ports_used = (self.ports_used + 1) % PORTS;
        let port = FIRST_PORT + self.ports_used;
        let mut connection = Connection::new(port, world.random.u32(..), self.slow, world.now);
        self.send(Send::Syn, &mut connection, world);
        self.connection = Some(connection);
    }

    fn send_request(&self, connection: &mut Connection, world: &mut World<'_>) {
        let length = world.requests.length(self.at, self.answer.token());
        connection.ask(length, world.now);
        self.send(Send::Request, connection, world);
    }

    pub(super) fn send(&self, send: Send, connection: &mut Connection, world: &mut World<'_>) {
        let header = connection.header(send, world.now);
        let Scratch { request, sacks, .. } = world.scratch;
        request.clear();
        connection.sacks(sacks);
        if send == Send::Request {
            world.requests.write(request, self.at, self.ends.mac, self.answer.token());
        }
        world.segment(&self.ends, &header);
    }

    pub(super) fn segment(&mut self, header: &Header, payload: &[u8], world: &mut World<'_>) {
        match self.connection.take() {
            Some(mut connection) if connection.port == header.port => {
                let over = self.advance(header, payload, &mut connection, world);
                match over {
                    None => self.connection = Some(connection),
                    Some(outcome) => self.end_request(outcome, connection, world),
                }
            }
            other => {
                self.connection = other;
                self.closing_segment(header, payload, world);
            }
        }
    }

    fn closing_segment(&mut self, header: &Header, payload: &[u8], world: &mut World<'_>) {
        let Some(at) = self.closing.iter().position(|closing| closing.port == header.port) else {
            self.refuse(header, world);
            return;
        };
        let mut connection = self.closing.swap_remove(at);
        let (event, acknowledge) = connection.segment(header, payload, world.now);
        if acknowledge {
            self.send(Send::Ack, &mut connection, world);
        }
        if event != Event::Reset && !connection.is_over() {
            self.closing.push(connection);
        }
    }

    /// Resets a connection that the guest does not know (RFC 9293 §3.10.7.1). Otherwise a server would match its old
    /// state with the next connection from the same port.
    fn refuse(&self, header: &Header, world: &mut World<'_>) {
        if header.flags & wire::ACK != 0 && header.flags & wire::RST == 0 {
            let (port, seq) = (header.port, header.ack);
            world.scratch.request.clear();
            world.scratch.sacks.clear();
            world.segment(&self.ends, &Header { port, seq, flags: wire::RST, ..Header::default() });
        }
    }

    /// Handles a segment of the current connection. Returns the outcome of the request if it ended.
    fn advance(
        &mut self,
        header: &Header,
        payload: &[u8],
        connection: &mut Connection,
        world: &mut World<'_>,
    ) -> Option<Result<bool, Failure>> {
        let (event, mut acknowledge) = connection.segment(header, payload, world.now);
        let mut outcome = None;
        match event {
            // The segment belongs to an old connection from the same port (RFC 9293 §3.10.7.3). The SYN will be sent
            // again.
            Event::Nothing if connection.is_opening() => self.refuse(header, world),
            Event::Nothing => {}
            Event::Reset if connection.is_opening() => return Some(Err(Failure::Connect)),
            Event::Reset => return Some(Err(Failure::Reset)),
            Event::Opened => {
                self.progress_at = world.now;
                self.send(Send::Ack, connection, world);
                self.send_request(connection, world);
                acknowledge = false;
            }
            Event::Data { skip } => {
                let octets = &payload[skip..];
                outcome = self.feed(octets, world);
                acknowledge |= connection.took(octets.len(), world.now);
                while let (None, Some((seq, octets))) = (outcome, connection.ripe()) {
                    let ripe = Header { seq, flags: wire::ACK, ..*header };
                    if let (Event::Data { skip }, _) = connection.segment(&ripe, &octets, world.now) {
                        outcome = self.feed(&octets[skip..], world);
                    }
                    acknowledge = true;
                }
            }
            Event::Ended => {}
        }
        if matches!(outcome, Some(Ok(_))) && world.manner.to_the_end && !connection.is_ended() {
            self.is_answered = true;
            outcome = None;
        } else if connection.is_ended() && outcome.is_none() {
            outcome = Some(if self.is_answered { Ok(false) } else { Err(Failure::Cut) });
        }
        if acknowledge {
            self.send(Send::Ack, connection, world);
        }
        outcome
    }

    fn feed(&mut self, octets: &[u8], world: &mut World<'_>) -> Option<Result<bool, Failure>> {
        self.progress_at = world.now;
        let mut expected = self.plan.answers[self.at];
        if world.manner.any_octets {
            expected.body = Body::Any;
        }
        match self.answer.feed(octets, &expected, world.bodies) {
            Progress::More => None,
            Progress::Done { keep } => Some(Ok(keep)),
            Progress::Wrong(failure) => Some(Err(failure)),
        }
    }

    fn end_request(&mut self, outcome: Result<bool, Failure>, connection: Connection, world: &mut World<'_>) {
        match outcome {
            Ok(keep) => {
                world.tally.requests += 1;
                world.tally.request.add(world.now - self.asked_at);
                if keep && world.manner.keep_alive && !connection.is_ended() {
                    self.connection = Some(connection);
                } else {
                    self.close(connection, world);
                }
                self.go_on(world);
            }
            Err(failure) => {
                let reset = !matches!(failure, Failure::Reset | Failure::Connect);
                self.connection = Some(connection);
                self.fail(failure, reset, world);
            }
        }
    }

    /// Gives the current request up, and repeats it or continues with the next one.
    pub(super) fn fail(&mut self, failure: Failure, reset: bool, world: &mut World<'_>) {
        if let Some(mut connection) = self.connection.take()
            && reset
        {
            self.send(Send::Reset, &mut connection, world);
        }
        if self.tries < world.manner.retries {
            self.tries += 1;
            world.tally.retries += 1;
            world.tally.note(failure);
            self.state = State::Pausing;
            self.on_at = world.now + RETRY_PAUSE;
            return;
        }
        world.tally.fail(failure);
        self.failed = true;
        self.go_on(world);
    }

    pub(super) fn close(&mut self, mut connection: Connection, world: &mut World<'_>) {
        connection.close(world.now);
        self.send(Send::Fin, &mut connection, world);
        if self.closing.len() == CLOSING_MOST {
            self.closing.remove(0);
        }
        self.closing.push(connection);
    }
}
