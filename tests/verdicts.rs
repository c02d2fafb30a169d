//! The eBPF programs give every frame the verdict that the policy defines, and count it.

#[path = "verdicts/hub.rs"]
mod hub;
#[path = "verdicts/node.rs"]
mod node;
#[path = "verdicts/policy.rs"]
mod policy;
#[path = "verdicts/ports.rs"]
mod ports;
#[path = "verdicts/stubs.rs"]
mod stubs;
