//! A virt-launcher pod as its node sees it: a network namespace with a tap, a listening launcher process, the volumes
//! that kubelet has written, and a control group named by the pod's uid.
//!
//! ```text
//!  node's namespace        pod's namespace, masquerade          pod's namespace, bridge
//!  ┌──────────────┐        ┌──────────────────────────┐         ┌─────────────────────────────┐
//!  │ veth7 ───────┼────────┼─ eth0     k6t-eth0 ─ tap0│         │ eth0-nic ─ k6t-eth0 ─ tap0  │
//!  └──────────────┘        └──────────────────────────┘         │ eth0 (dummy, the pod's MAC) │
//!                                                               └─────────────────────────────┘
//! ```
//!
//! The node's end of the veth pair is deleted with the pod's namespace. Tests use this to detect the end of the
//! namespace.

pub mod cgroups;
pub mod kubelet;
pub mod launcher;
pub mod network;

pub use cgroups::{Cgroups, Driver};
pub use kubelet::{Kubelet, Plugin};
pub use launcher::{How, Launcher};
pub use network::{Binding, PodNetwork};

use std::sync::atomic::{AtomicU32, Ordering};

/// A uid that no other pod of this test run has.
#[must_use]
pub fn fresh_uid() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:08x}-8a55-4c8e-9d53-{number:012x}", std::process::id())
}
