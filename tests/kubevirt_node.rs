//! A KubeVirt node end to end: the real agent gets VMs from an API server, finds their launchers, and serves guests
//! behind taps in their pods' namespaces.
//!
//! The API server, launchers, control groups and kubelet come from `support`; everything else is production code.

#[path = "kubevirt_node/coming.rs"]
mod coming;
#[path = "kubevirt_node/content.rs"]
mod content;
#[path = "kubevirt_node/hooked.rs"]
mod hooked;
#[path = "kubevirt_node/moving.rs"]
mod moving;
#[path = "kubevirt_node/node.rs"]
mod node;
#[path = "kubevirt_node/outages.rs"]
mod outages;
#[path = "kubevirt_node/passt.rs"]
mod passt;
#[path = "kubevirt_node/sharing.rs"]
mod sharing;
#[path = "kubevirt_node/state.rs"]
mod state;
