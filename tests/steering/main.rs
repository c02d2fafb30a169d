//! Steering: frames for the metadata service reach the hub, answers reach their guest, and all other traffic is
//! unaffected.
//!
//! The tests play both ends: they own the descriptors of the guests' taps, as QEMU would, and of the hub's tap.

mod afxdp_socket;
mod bare_veths;
mod guarding;
mod kernel_answers;
mod life;
mod modes;
mod node;
mod ports_come_and_go;
mod rings;
mod tap_queues;
mod trace_events;
mod verdicts;
mod watching;
