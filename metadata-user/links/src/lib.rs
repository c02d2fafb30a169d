//! Devices and network namespaces: find, watch, enter, create and change them; and the mounts of a process.
//!
//! Everything uses rtnetlink, `/proc` and a few system calls, and works in a pod's namespace as in the agent's own.
//! Nothing here depends on eBPF or on the purpose of a device, except [`inlet`], which gives a pod its own device for
//! requests.

pub mod devices;
pub mod error;
pub mod inlet;
pub mod ioctl;
pub mod mounts;
pub mod netlink;
pub mod netns;

/// Limit on namespaces with ports on one node; with KubeVirt every VM has its own.
pub const MAX_NAMESPACES: usize = metadata_common::maps::MAX_PORTS as usize;
