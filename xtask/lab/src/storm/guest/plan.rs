//! The plan of a storm: the guests, their requests and the expected answers.
//!
//! The storm writes a plan to a file and gives the generator its path. The generator's replies are lines of JSON.

use anyhow::{Result, ensure};
use metadata_common::mac::Mac;
use rustix::event::epoll;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Instant;
use support::tap::Tap;

use super::super::peer::OWN_MAC;
use super::answer::Expected;
use super::tally::Outcome;

/// The placeholder for the guest's token in a request.
pub(crate) const TOKEN: &str = "{token}";

/// The parts of a case that stay the same from round to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The address of the service.
    pub(crate) server: Ipv4Addr,
    /// The requests of a boot, with their heads. [`TOKEN`] and [`OWN_MAC`] are placeholders in them.
    pub(crate) requests: Vec<String>,
    /// The file with all bodies, one after the other.
    pub(crate) bodies: PathBuf,
    /// The guests, in the order of their taps.
    pub(crate) guests: Vec<Planned>,
}

/// One guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Planned {
    pub(crate) mac: [u8; 6],
    pub(crate) address: Ipv4Addr,
    /// The expected answers, one for each request.
    pub(crate) answers: Vec<Expected>,
}

impl Planned {
    pub(crate) fn mac(&self) -> Mac {
        Mac(self.mac)
    }
}

/// When guests begin to boot.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Arrival {
    AtOnce,
    /// Evenly over this many seconds.
    Ramp(f64),
    /// At random, with this many per second on average.
    Poisson(f64),
    /// One at a time, with a pause between two requests.
    Lone,
}

/// The kind of a flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Flood {
    /// SYNs to the metadata address
    Syn,
    /// Frames of the same size and number to other addresses
    Ordinary,
}

/// The orders for one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Number of guests, counted from the first of the plan.
    pub(crate) guests: usize,
    pub(crate) arrival: Arrival,
    /// Guests boot again until this many seconds have passed. Each guest boots at least once.
    pub(crate) seconds: f64,
    pub(crate) keep_alive: bool,
    /// The service closes each connection first. The requests must ask for it.
    #[serde(default)]
    pub(crate) to_the_end: bool,
    /// The service makes its own documents: answers may have any bytes.
    #[serde(default)]
    pub(crate) any_bytes: bool,
    /// How often a guest repeats a failed request, a second after the failure, as clients in guests do.
    #[serde(default)]
    pub(crate) retries: u8,
    /// The fraction of frames lost in each direction.
    pub(crate) loss: f64,
    /// Number of slow readers, counted from the first guest.
    pub(crate) slow: usize,
    pub(crate) flood: Option<Flood>,
    /// Seconds without progress that count as a stall; 0 turns the check off.
    #[serde(default)]
    pub(crate) stall: f64,
    pub(crate) seed: u64,
}

/// A command to the generator, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Load the plan in this file.
    Load(PathBuf),
    /// Measure the cost of system calls, on a tap that nothing serves.
    Price,
    Storm(Orders),
}

/// A reply of the generator, one per line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The command is done. The first such line reports that the taps are made.
    Done,
    Priced(Prices),
    /// Progress of a storm.
    Progress {
        boots: u64,
        failures: u64,
    },
    Stormed(Box<Outcome>),
}

/// The cost of one call without effect, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Prices {
    pub(crate) write: f64,
    pub(crate) read: f64,
    pub(crate) wait: f64,
}

// Measures the cost of the generator's own system calls.
//
// A guest's `write` to its tap does work for the host: it makes the packet, runs XDP or the bridge, and often the
// server's softirq. The storm measures that work. The generator's own share is only the cost of a call that does
// nothing: a `write` that is refused for its length, a `read` that finds no frame, a wait without events. These prices
// are lower bounds and the same for every subject, so they favour none.

/// Calls of one kind in a trial, and number of trials. The cheapest trial counts, because other work on the machine can
/// only add to the cost.
const CALLS: u32 = 20_000;
const TRIALS: u32 = 7;

/// Measures the prices on a tap that has no frames to read.
pub(super) fn prices(tap: &Tap) -> Result<Prices> {
    let mut buffer = [0; 2_048];
    while tap.receive(0, &mut buffer)?.is_some() {}
    // A tap refuses frames shorter than its own header and Ethernet's (Linux: drivers/net/tun.c).
    ensure!(tap.send(0, &[0]).is_err(), "the tap accepts a frame of one byte");
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&poll, tap, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 8];
    Ok(Prices {
        write: price(|| drop(tap.send(0, &[0]))),
        read: price(|| drop(tap.receive(0, &mut buffer))),
        wait: price(|| {
            // The wait returns at once without events.
            let _ = epoll::wait(&poll, &mut events[..], Some(&none));
        }),
    })
}

fn price(mut call: impl FnMut()) -> f64 {
    let trial = |_| {
        let began = Instant::now();
        (0..CALLS).for_each(|_| call());
        began.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    (0..TRIALS).map(trial).fold(f64::INFINITY, f64::min)
}

// Requests as text with placeholders, which differ between guests only in a MAC and a token.

/// Bytes of a MAC in text.
const MAC_TEXT: usize = 17;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Mac,
    Token,
}

/// The requests of a boot.
#[derive(Clone, Debug)]
pub(super) struct Requests(Vec<Vec<Piece>>);

impl Requests {
    pub(super) fn new(texts: &[String]) -> Self {
        Self(texts.iter().map(|text| pieces(text)).collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the bytes of one request.
    pub(super) fn length(&self, request: usize, token: &[u8]) -> usize {
        let length = |piece: &Piece| match piece {
            Piece::Text(text) => text.len(),
            Piece::Mac => MAC_TEXT,
            Piece::Token => token.len(),
        };
        self.0[request].iter().map(length).sum()
    }

    /// Writes one request.
    pub(super) fn write(&self, out: &mut Vec<u8>, request: usize, mac: Mac, token: &[u8]) {
        for piece in &self.0[request] {
            match piece {
                Piece::Text(text) => out.extend_from_slice(text),
                Piece::Mac => write_mac(out, mac),
                Piece::Token => out.extend_from_slice(token),
            }
        }
    }
}

fn write_mac(out: &mut Vec<u8>, mac: Mac) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (n, byte) in mac.0.into_iter().enumerate() {
        if n > 0 {
            out.push(b':');
        }
        out.extend([DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
}

fn pieces(mut text: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    loop {
        let next = [(OWN_MAC, Piece::Mac), (TOKEN, Piece::Token)].into_iter();
        let next = next.filter_map(|(mark, piece)| Some((text.find(mark)?, mark, piece)));
        let Some((at, mark, piece)) = next.min_by_key(|(at, ..)| *at) else { break };
        pieces.extend([Piece::Text(text[..at].into()), piece]);
        text = &text[at + mark.len()..];
    }
    pieces.push(Piece::Text(text.into()));
    pieces
}

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;

    use super::Requests;

    #[test]
    fn placeholders_are_filled_and_counted() {
        let requests = Requests::new(&["GET /{mac}/x?{mac} t: {token}".into(), "plain".into()]);
        let mac = Mac([0x52, 0x54, 0, 0x0a, 0xbc, 0xff]);
        for (number, expected) in [(0, "GET /52:54:00:0a:bc:ff/x?52:54:00:0a:bc:ff t: secret"), (1, "plain")]
        {
            let mut out = Vec::new();
            requests.write(&mut out, number, mac, b"secret");
            assert_eq!(String::from_utf8_lossy(&out), expected);
            assert_eq!(requests.length(number, b"secret"), expected.len());
        }
    }
}
