//! The agent's TCP, and the worker that drives it, in memory: no privileges, no real time.

mod draining;
mod fair_share;
mod network_simulation;
mod tcp_conditions;
mod tcp_differential;
mod tcp_fuzz;
mod tcp_hop_limit;
mod tcp_kernel;
mod tcp_limits;
mod tcp_long;
mod tcp_scripts;
mod tcp_segments;
mod tcp_waiting;
mod vm_limits;
