//! Steering: frames for the metadata service reach the hub, answers reach their guest, and all other traffic is
//! unaffected.
//!
//! The tests play both ends: they own the descriptors of the guests' taps, as QEMU would, and of the hub's tap.

#[path = "steering/checking.rs"]
mod checking;
#[path = "steering/features.rs"]
mod features;
#[path = "steering/identity.rs"]
mod identity;
#[path = "steering/inherited.rs"]
mod inherited;
#[path = "steering/life.rs"]
mod life;
#[path = "steering/losses.rs"]
mod losses;
#[path = "steering/modes.rs"]
mod modes;
#[path = "steering/node.rs"]
mod node;
#[path = "steering/numbers.rs"]
mod numbers;
#[path = "steering/pins.rs"]
mod pins;
#[path = "steering/refusals.rs"]
mod refusals;
#[path = "steering/rings.rs"]
mod rings;
#[path = "steering/takeover.rs"]
mod takeover;
#[path = "steering/watching.rs"]
mod watching;
