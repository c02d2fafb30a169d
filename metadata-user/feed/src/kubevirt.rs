//! The feed of KubeVirt: one record for each VM on this node.
//!
//! ```text
//!  API server ── VMIs running or arriving here ───────┐
//!  virt-handler ── node hook: a VMI is about to run ──┼─▶ core ─▶ Upsert, Expect, Remove
//!  feed::pods ── namespace, taps, volumes, the end ───┘    │
//!                                                          └─▶ Events on the VMI
//! ```
//!
//! A VMI gives the VM's configuration and lists its pods. The pod gives the taps and the content of Secrets.
//! [`translate`] makes a record of both. The feed removes nothing because the API server is unreachable.

mod client;
pub mod core;
mod events;
pub mod hook;
mod kept;
pub mod options;
mod run;
mod source;
pub mod translate;
pub mod vmi;
pub mod volumes;
mod watch;

pub use client::access;
pub use kept::FILE as KEPT;
pub use options::{DEFAULT_KUBELET, InstanceId, KubevirtOptions, NODE_VARIABLE, Passt};
pub use run::{Feed, Launchers, PATIENCE, contact, follow, node, serve};
pub use run::{SPREAD, WatchPacing};
pub use source::KubevirtSource;
pub use vmi::{Vmi, VmiError};
pub use volumes::VolumeCache;
