//! The programs in the kernel give every frame the verdict the policy promises, and count it.

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
