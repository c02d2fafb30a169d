//! The VMs of KubeVirt on this node, as records.
//!
//! ```text
//!  API server ── VMIs that run here, VMIs that come ──┐
//!  virt-handler ── node hook: a VMI is about to run ──┼─▶ core ─▶ Upsert, Expect, Remove
//!  feed::pods ── namespace, taps, volumes, the end ───┘    │
//!                                                          └─▶ Events on the VMI
//! ```
//!
//! A VMI says what the VM is told and which pods it has, the pod where it is reached and what its Secrets hold.
//! [`translate`] makes a record of both. Nothing here deletes anything because the API server cannot be reached.

pub mod annotations;
mod bearer;
mod client;
pub mod core;
mod events;
pub mod hook;
mod kept;
mod options;
mod pace;
mod run;
pub mod translate;
pub mod vmi;
mod watch;

pub use client::access;
pub use kept::FILE as KEPT;
pub use options::{DEFAULT_KUBELET, InstanceId, NODE_VARIABLE, Options, Passt};
pub use pace::{Pace, SPREAD};
pub use run::{Feed, Launchers, PATIENCE, contact, follow, node, serve};
pub use vmi::{Vmi, VmiError};
