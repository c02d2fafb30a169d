//! The plan of a storm: the guests, their requests and the expected answers.
//!
//! The storm writes a plan to a file and gives the generator its path. The generator's replies are lines of JSON.

use super::answer::Expected;
use super::tally::Outcome;
use metadata_common::mac::Mac;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// The placeholder for the guest's token in a request.
pub(crate) const TOKEN: &str = "{token}";

/// The parts of a case that stay the same from round to round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The address of the service.
    pub(crate) server: Ipv4Addr,
    /// The requests of a boot, with their heads. [`TOKEN`] and [`OWN_MAC`](super::super::peer::OWN_MAC) are
    /// placeholders in them.
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
    /// The service makes its own documents: answers may have any octets.
    #[serde(default)]
    pub(crate) any_octets: bool,
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
