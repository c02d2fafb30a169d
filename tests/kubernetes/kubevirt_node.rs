//! A KubeVirt node end to end: the real agent gets VMs from an API server, finds their launchers, and serves guests
//! behind taps in their pods' namespaces.
//!
//! The API server, launchers, control groups and kubelet come from `support`; everything else is production code.

mod coming;
mod content;
mod hooked;
mod moving;
mod node;
mod outages;
mod passt;
mod sharing;
mod state;
