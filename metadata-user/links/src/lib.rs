//! Devices and network namespaces: look for them, follow them, enter, make and change them.
//!
//! All by rtnetlink and a few system calls, in the namespace of a pod as in the agent's own. Nothing here knows eBPF or
//! what the devices are for; [`inlet`] alone knows that a pod needs a way in.

pub mod devices;
pub mod error;
pub mod inlet;
pub mod netlink;
pub mod netns;
pub mod processes;
pub mod tun;
pub mod watch;
