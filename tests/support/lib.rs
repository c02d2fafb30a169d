//! Namespaces, taps and pretend guests for the statements in this crate, the demo and the lab.
//!
//! ```text
//!  guest namespace (kernel client)          host namespace
//!  ┌──────────────────┐                     ┌───────────────────────────────┐
//!  │ eth0 (a tap)     │     pump: what      │ tap0 ── XDP `port`            │
//!  │   └─ fd ─────────┼── QEMU does between ┼─ fd        │                  │
//!  └──────────────────┘   NIC and tap       │           br0 10.0.2.2/16     │
//!  user-space client ─────────────────────── ─ fd of tap1                   │
//!  (smoltcp owns the fd)                    │ xdp-imds (the agent)          │
//!                                           └───────────────────────────────┘
//! ```
//!
//! Everything happens inside network namespaces made here, and goes away with their guards.

pub mod afterburn;
pub mod agent;
pub mod answers;
pub mod apiserver;
pub mod arena;
pub mod books;
pub mod bpffs;
pub mod checksum;
pub mod client;
pub mod cloudinit;
pub mod empty_classifier;
pub mod eventually;
pub mod exposition;
pub mod frames;
pub mod guest;
pub mod host;
pub mod inside;
pub mod kernel;
pub mod ledger;
pub mod libraries;
pub mod libvirt;
pub mod mob;
pub mod netns;
pub mod network;
pub mod objects;
pub mod packages;
pub mod pattern;
pub mod pod;
pub mod privilege;
pub mod privileged;
pub mod process;
pub mod prog_test;
pub mod pump;
pub mod question;
pub mod raw;
pub mod recent;
pub mod record;
pub mod root;
pub mod schema;
pub mod seed;
pub mod station;
pub mod systemd_imds;
pub mod tap;
pub mod tap_client;
pub mod toy;
pub mod typical;
pub mod variants;
pub mod vectors;
pub mod waagent;
pub mod wire;
pub mod witness;
