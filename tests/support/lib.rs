//! Support code for the tests in this crate.
//!
//! It has three parts, so that a test compiles only the code that it uses:
//! - always: drives the agent's parts in memory with simulated TCP clients and tables of requests;
//! - `privileged`: needs root and the crate `testbed` (namespaces, taps, guests, the agent as a process);
//! - `cluster`: simulates Kubernetes and KubeVirt.
//!
//! `cargo test -p xdp-imds-tests --no-default-features` builds and runs the tests that need only the first part.

pub use testbed::{
    agent, answers, bpffs, eventually, guest, host, netns, packages, privileged, process, pump, recent,
    record, schema, tap, vhost,
};

#[cfg(feature = "privileged")]
pub mod afterburn;
#[cfg(feature = "cluster")]
pub mod apiserver;
#[cfg(feature = "privileged")]
pub mod arena;
#[cfg(feature = "privileged")]
pub mod books;
pub mod checksum;
pub mod client;
#[cfg(feature = "privileged")]
pub mod cloudinit;
pub mod cores;
pub mod cut;
#[cfg(feature = "privileged")]
pub mod empty_classifier;
pub mod exposition;
pub mod frames;
#[cfg(feature = "privileged")]
pub mod inside;
pub mod kernel;
pub mod ledger;
#[cfg(feature = "privileged")]
pub mod libraries;
#[cfg(feature = "privileged")]
pub mod libvirt;
#[cfg(feature = "privileged")]
pub mod mob;
pub mod network;
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
pub mod root;
pub mod seed;
#[cfg(feature = "privileged")]
pub mod station;
#[cfg(feature = "privileged")]
pub mod systemd_imds;
#[cfg(feature = "privileged")]
pub mod tap_client;
pub mod toy;
pub mod typical;
#[cfg(feature = "privileged")]
pub mod variants;
pub mod vectors;
#[cfg(feature = "privileged")]
pub mod waagent;
pub mod wire;
#[cfg(feature = "privileged")]
pub mod witness;
