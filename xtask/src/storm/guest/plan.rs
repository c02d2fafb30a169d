//! What guests are told: who they are, what to ask, what must come back.
//!
//! The storm writes a plan to a file and names it to its generator, whose replies are lines of JSON.

use super::answer::Expected;
use super::tally::Outcome;
use metadata_common::mac::Mac;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// Stands for the guest's token in a request.
pub(in super::super) const TOKEN: &str = "{token}";

/// Everything about one case that stays from round to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in super::super) struct Plan {
    /// Who is asked.
    pub(in super::super) server: Ipv4Addr,
    /// Requests of a boot, heads and all, with [`TOKEN`] and
    /// [`OWN_MAC`](super::super::peer::OWN_MAC) where those go.
    pub(in super::super) requests: Vec<String>,
    /// The bodies, one after the other.
    pub(in super::super) bodies: PathBuf,
    /// In the order of the taps.
    pub(in super::super) guests: Vec<Planned>,
}

/// One guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in super::super) struct Planned {
    pub(in super::super) mac: [u8; 6],
    pub(in super::super) address: Ipv4Addr,
    /// One for each request.
    pub(in super::super) answers: Vec<Expected>,
}

impl Planned {
    pub(super) fn mac(&self) -> Mac {
        Mac(self.mac)
    }
}

/// When guests begin to boot.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) enum Arrival {
    AtOnce,
    /// Evenly over so many seconds.
    Ramp(f64),
    /// At random, so many per second.
    Poisson(f64),
    /// One guest after the other has finished, with a pause between two requests.
    Lone,
}

/// What floods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(in super::super) enum Flood {
    /// SYNs for the metadata address.
    Syn,
    /// Frames as large and as many that are for somebody else.
    Ordinary,
}

/// One round's storm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Orders {
    /// Of the guests, these many from the first on.
    pub(in super::super) guests: usize,
    pub(in super::super) arrival: Arrival,
    /// Guests boot again until so much time is over; every one boots at least once.
    pub(in super::super) seconds: f64,
    pub(in super::super) keep_alive: bool,
    /// Share of frames lost in either direction.
    pub(in super::super) loss: f64,
    /// Guests that read slowly, the first ones.
    pub(in super::super) slow: usize,
    pub(in super::super) flood: Option<Flood>,
    pub(in super::super) seed: u64,
}

/// What the generator is told, a line each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in super::super) enum Command {
    /// Take this plan.
    Load(PathBuf),
    /// Price the system calls, on this tap that nobody serves.
    Price,
    Storm(Orders),
}

/// What it replies, a line each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in super::super) enum Reply {
    /// The command is done; the first such line says that the taps are there.
    Done,
    Priced(Prices),
    /// A storm goes on.
    Progress {
        boots: u64,
        failures: u64,
    },
    Stormed(Box<Outcome>),
}

/// Nanoseconds of one call that does nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in super::super) struct Prices {
    pub(in super::super) write: f64,
    pub(in super::super) read: f64,
    pub(in super::super) wait: f64,
}
