//! What the agent can observe of a virt-launcher pod on its node: its launcher, its taps, its volumes and its end.
//!
//! Neither a process with a reused PID nor one of another pod is taken for the launcher. When a pod ends, its namespace
//! vanishes.

mod devices;
mod end;
mod fence;
mod finding;
mod node;
