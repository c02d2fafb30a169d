//! What tests, the demo and the lab run the agent on: namespaces, taps, guests that are Linux network stacks, their
//! records, and the agent as a process.
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
//! Everything happens inside network namespaces made here, and goes away with their guards. Nearly all of it needs root;
//! [`privileged`] tells tests whether they may go on.

pub mod agent;
pub mod answers;
pub mod bpffs;
pub mod eventually;
pub mod guest;
pub mod host;
pub mod netns;
pub mod privileged;
pub mod process;
pub mod pump;
pub mod recent;
pub mod record;
#[cfg(feature = "schema")]
pub mod schema;
pub mod tap;
