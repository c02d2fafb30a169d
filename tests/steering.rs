//! Steering: frames for the metadata service reach the hub, answers reach their guest, and everything
//! else goes on as if nothing were there.
//!
//! The test plays both ends: it owns the guests' tap descriptors, as QEMU would, and the hub tap's.

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
