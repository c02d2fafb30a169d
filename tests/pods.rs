//! What of a virt-launcher pod can be seen on its node: its launcher, which no reused number and no other pod can
//! stand in for; its taps as they come and go; its end, with which its namespace goes; its volumes.

#[path = "pods/devices.rs"]
mod devices;
#[path = "pods/end.rs"]
mod end;
#[path = "pods/fence.rs"]
mod fence;
#[path = "pods/finding.rs"]
mod finding;
#[path = "pods/node.rs"]
mod node;
