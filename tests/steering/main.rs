//! Steering: frames for the metadata service reach the hub, answers reach their guest, and all other traffic is
//! unaffected.
//!
//! The tests play both ends: they own the descriptors of the guests' taps, as QEMU would, and of the hub's tap.

mod afxdp_socket;
mod bare_veths;
mod checking;
mod features;
mod guarding;
mod identity;
mod inherited;
mod kernel_answers;
mod life;
mod losses;
mod many_namespaces;
mod modes;
mod node;
mod numbers;
mod pins;
mod ports_come_and_go;
mod refusals;
mod rings;
mod takeover;
mod tap_queues;
mod trace_events;
mod verdicts;
mod watching;
