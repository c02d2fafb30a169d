//! Hostile guests. Each attacks in one way, as fast as its share of a core allows.

use super::shared::{Shared, add};
use crate::storm::guest::wire::{self, ACK, Ends, Header, Incoming, PSH, RST, SYN};
use anyhow::Result;
use metadata_common::mac::Mac;
use std::time::Duration;
use support::guest::METADATA;
use support::record::Identity;
use support::tap::Tap;

/// Pause between two turns of all hostile guests.
const TURN: Duration = Duration::from_millis(10);
/// Turns of one cycle of a flood.
const TIDE: u64 = 200;
/// Turns of a cycle in which a flood sends. It comes in bursts.
const FLOOD: u64 = 20;
/// Frames per turn of a flood.
const FLOOD_FRAMES: usize = 256;
/// Frames per turn of garbage.
const GARBAGE_FRAMES: usize = 16;
/// Connections opened in a turn.
const OPENED: usize = 2;
/// Connections are opened in one of this many turns.
const OPEN_EVERY: u64 = 5;
/// The most frames read in a turn.
const READ: usize = 64;
/// The receive window of a slow reader, in bytes.
const SLOW_WINDOW: u16 = 1;
/// The destination MAC. Any MAC reaches the service, because frames are steered by their IP destination.
const ANY_MAC: Mac = Mac([0x02, 0, 0xa9, 0xfe, 0, 0]);

/// A way to attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Harm {
    /// SYNs from every port, in bursts.
    Flood,
    /// Malformed frames, mostly to metadata addresses.
    Garbage,
    /// Connections that begin a request and never finish it.
    Hoard,
    /// Requests whose answers are never read.
    Slow,
    /// Endless requests, and resets in the middle of answers.
    Bomb,
}

pub(super) const HARMS: [Harm; 5] = [Harm::Flood, Harm::Garbage, Harm::Hoard, Harm::Slow, Harm::Bomb];

/// A hostile guest and its tap.
pub(super) struct Hostile {
    tap: Tap,
    ends: Ends,
    harm: Harm,
    random: fastrand::Rng,
    frame: Vec<u8>,
}

impl Hostile {
    pub(super) fn new(tap: Tap, identity: &Identity, harm: Harm, seed: u64) -> Self {
        let ends =
            Ends { mac: identity.mac, address: identity.address, server: METADATA, server_mac: ANY_MAC };
        let random = fastrand::Rng::with_seed(seed ^ u64::from(identity.number));
        Self { tap, ends, harm, random, frame: Vec::new() }
    }

    fn turn(&mut self, number: u64, shared: &Shared, buffer: &mut [u8]) {
        let mut sent = 0;
        let mut opened = 0;
        match self.harm {
            Harm::Flood if number % TIDE < FLOOD => {
                for _ in 0..FLOOD_FRAMES {
                    sent += self.syn();
                }
            }
            Harm::Garbage => {
                for _ in 0..GARBAGE_FRAMES {
                    sent += self.garbage();
                }
            }
            Harm::Hoard | Harm::Slow | Harm::Bomb if number.is_multiple_of(OPEN_EVERY) => {
                for _ in 0..OPENED {
                    sent += self.syn();
                    opened += 1;
                }
            }
            _ => {}
        }
        for _ in 0..READ {
            let Ok(Some(length)) = self.tap.receive(0, buffer) else { break };
            sent += self.answer(&buffer[..length]);
        }
        add(&shared.counts.hostile_frames, sent);
        add(&shared.counts.hostile_connections, opened);
    }

    fn syn(&mut self) -> u64 {
        let (port, seq) = (self.random.u16(1_024..), self.random.u32(..));
        self.send(&Header { port, seq, flags: SYN, window: 64_240, timestamps: Some((1, 0)), ack: 0 }, b"")
    }

    fn send(&mut self, header: &Header, payload: &[u8]) -> u64 {
        self.frame.clear();
        wire::segment(&mut self.frame, &self.ends, header, &[], payload, false);
        u64::from(self.tap.send(0, &self.frame).unwrap_or(false))
    }

    /// Sends a frame that was valid before random changes.
    fn garbage(&mut self) -> u64 {
        let header = Header {
            port: self.random.u16(..),
            seq: self.random.u32(..),
            ack: self.random.u32(..),
            flags: self.random.u8(..64),
            window: self.random.u16(..),
            timestamps: self.random.bool().then(|| (self.random.u32(..), self.random.u32(..))),
        };
        let length = self.random.usize(..1_400);
        self.frame.clear();
        match self.random.u8(..8) {
            0 => wire::who_has(&mut self.frame, &self.ends),
            1 => self.frame.extend((0..self.random.usize(14..1_500)).map(|_| self.random.u8(..))),
            _ => {
                let payload = vec![b'x'; length];
                wire::segment(&mut self.frame, &self.ends, &header, &[], &payload, false);
            }
        }
        for _ in 0..self.random.usize(..4) {
            let at = self.random.usize(..self.frame.len());
            self.frame[at] ^= 1 << self.random.u8(..8);
        }
        // A tap accepts no frame without a complete Ethernet header.
        let length = self.frame.len();
        if self.random.u8(..4) == 0 {
            self.frame.truncate(self.random.usize(14..=length));
        }
        u64::from(self.tap.send(0, &self.frame).unwrap_or(false))
    }

    /// Attacks the service in reply to a frame from it.
    fn answer(&mut self, frame: &[u8]) -> u64 {
        let Incoming::Tcp(header, _) = wire::read(frame, &self.ends, false) else { return 0 };
        if header.flags & (SYN | ACK) != SYN | ACK {
            return match self.harm {
                Harm::Bomb if self.random.u8(..4) == 0 => {
                    let (port, seq) = (header.port, header.ack);
                    self.send(&Header { port, seq, flags: RST, ..Header::default() }, b"")
                }
                _ => 0,
            };
        }
        let mut reply = Header {
            port: header.port,
            seq: header.ack,
            ack: header.seq.wrapping_add(1),
            flags: ACK | PSH,
            window: 512,
            timestamps: header.timestamps.map(|(value, _)| (2, value)),
        };
        match self.harm {
            Harm::Hoard => self.send(&reply, b"GET /v1/meta-data HTTP/1.1\r\nHost: metadata\r\nX-Wait: "),
            Harm::Slow => {
                reply.window = SLOW_WINDOW;
                self.send(&reply, b"GET /v1/user-data HTTP/1.1\r\nHost: metadata\r\n\r\n")
            }
            Harm::Bomb => {
                let mut sent = 0;
                for _ in 0..4 {
                    let requests = b"GET /v1/user-data HTTP/1.1\r\nHost: metadata\r\n\r\n".repeat(20);
                    sent += self.send(&reply, &requests);
                    reply.seq = reply.seq.wrapping_add(requests.len() as u32);
                }
                sent
            }
            Harm::Flood | Harm::Garbage => 0,
        }
    }
}

/// Runs all hostile guests until the soak is over.
pub(super) fn harm(shared: &Shared, guests: &mut [Hostile]) -> Result<()> {
    let mut buffer = vec![0; 2_048];
    for number in 0.. {
        if shared.is_over() {
            break;
        }
        {
            let _busy = shared.busy();
            for guest in &mut *guests {
                guest.turn(number, shared, &mut buffer);
            }
        }
        std::thread::sleep(TURN);
    }
    Ok(())
}
