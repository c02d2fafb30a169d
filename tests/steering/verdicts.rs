//! The eBPF programs give every frame the verdict that the policy defines, and count it.

mod hub;
mod node;
mod policy;
mod ports;
mod stubs;
