//! Probes what steering needs, for `xdp-imds doctor`, without lasting changes. A probe that creates something does so
//! in a network namespace of its own, which goes with the probe's thread even if that is killed.

mod device;
mod kernel;
mod node;
mod search;

pub use device::{Device, Filter, Program, device};
pub use kernel::{features, rehearse};
pub use node::{AddressUse, PinnedLink, address_uses, hub_devices, pinned_links, ring_full, veth_full};
pub use search::{NAMESPACES_SEARCHED, PLACES_TOLD, PROCESSES_SEARCHED, Place, Search, search};

pub use super::failure::Failure;
pub use super::features::{Answer, Feature, Words, missing_helpers};
