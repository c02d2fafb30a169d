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
pub(crate) const TOKEN: &str = "{token}";

/// Everything about one case that stays from round to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// Who is asked.
    pub(crate) server: Ipv4Addr,
    /// Requests of a boot, heads and all, with [`TOKEN`] and
    /// [`OWN_MAC`](super::super::peer::OWN_MAC) where those go.
    pub(crate) requests: Vec<String>,
    /// The bodies, one after the other.
    pub(crate) bodies: PathBuf,
    /// In the order of the taps.
    pub(crate) guests: Vec<Planned>,
}

/// One guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Planned {
    pub(crate) mac: [u8; 6],
    pub(crate) address: Ipv4Addr,
    /// One for each request.
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
    /// Evenly over so many seconds.
    Ramp(f64),
    /// At random, so many per second.
    Poisson(f64),
    /// One guest after the other has finished, with a pause between two requests.
    Lone,
}

/// What floods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Flood {
    /// SYNs for the metadata address.
    Syn,
    /// Frames as large and as many that are for somebody else.
    Ordinary,
}

/// One round's storm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Of the guests, these many from the first on.
    pub(crate) guests: usize,
    pub(crate) arrival: Arrival,
    /// Guests boot again until so much time is over; every one boots at least once.
    pub(crate) seconds: f64,
    pub(crate) keep_alive: bool,
    /// The service closes each connection first; requests have to ask for that.
    #[serde(default)]
    pub(crate) to_the_end: bool,
    /// Times a guest asks again, a second after its request has failed; clients in guests do.
    #[serde(default)]
    pub(crate) retries: u8,
    /// Share of frames lost in either direction.
    pub(crate) loss: f64,
    /// Guests that read slowly, the first ones.
    pub(crate) slow: usize,
    pub(crate) flood: Option<Flood>,
    /// Seconds without progress that make a stall; 0 watches nothing.
    #[serde(default)]
    pub(crate) stall: f64,
    pub(crate) seed: u64,
}

/// What the generator is told, a line each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Take this plan.
    Load(PathBuf),
    /// Price the system calls, on this tap that nobody serves.
    Price,
    Storm(Orders),
}

/// What it replies, a line each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
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
pub(crate) struct Prices {
    pub(crate) write: f64,
    pub(crate) read: f64,
    pub(crate) wait: f64,
}
