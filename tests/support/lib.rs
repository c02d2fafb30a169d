//! Support code for the tests in this crate.
//!
//! It has three parts, so that a test compiles only the code that it uses:
//! - always: drives the agent's parts in memory with simulated TCP clients and tables of requests;
//! - `privileged`: needs root and the crate `testbed` (namespaces, taps, guests, the agent as a process);
//! - `cluster`: simulates Kubernetes and KubeVirt.
//!
//! `cargo test -p xdp-imds-tests --no-default-features` builds and runs the tests that need only the first part.

pub use testbed::{
    agent, answers, bpffs, eventually, guest, host, netns, packages, privileged, process, pump, record,
    schema, tap, vhost,
};

#[cfg(feature = "cluster")]
pub mod apiserver;
#[cfg(feature = "privileged")]
pub mod arena;
pub mod checksum;
#[cfg(feature = "privileged")]
pub mod cloudinit;
pub mod cores;
pub mod exposition;
pub mod frames;
#[cfg(feature = "privileged")]
pub mod inside;
pub mod kernel;
#[cfg(feature = "privileged")]
pub mod libvirt;
#[cfg(feature = "privileged")]
pub mod objects;
pub mod pattern;
#[cfg(feature = "cluster")]
pub mod pod;
#[cfg(feature = "privileged")]
pub mod privilege;
#[cfg(feature = "privileged")]
pub mod prog_test;
pub mod question;
pub mod raw;
#[cfg(feature = "privileged")]
pub mod scene;
#[cfg(feature = "privileged")]
pub mod station;
#[cfg(feature = "privileged")]
pub mod tap_client;
pub mod toy;
#[cfg(feature = "privileged")]
pub mod variants;
pub mod vectors;
pub mod wire;

/// The variable that sets the seed, to repeat a run.
pub const SEED: &str = shell::variables::SEED;

/// The seed of this run: the value of [`SEED`], or a new number. Prints it, so that a failed test's output contains it.
///
/// # Panics
/// When [`SEED`] is not a number.
#[must_use]
pub fn seed() -> u64 {
    seed_or(fastrand::u64(..))
}

/// Like [`seed`], with another number instead of a new one. For tests of programs that are not ours, whose known faults
/// are listed.
///
/// # Panics
/// When [`SEED`] is not a number.
#[must_use]
pub fn seed_or(other: u64) -> u64 {
    let seed = match std::env::var(SEED) {
        Ok(text) => {
            text.parse().unwrap_or_else(|_| panic!("{SEED} is a number from 0 to 2^64-1, not `{text}`"))
        }
        Err(_) => other,
    };
    eprintln!("{SEED}={seed}");
    seed
}
