//! The entry of the kernel's table of devices that the hub's classifier reaches.

use metadata_common::maps::BARE;

/// A port's device in the agent's own namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HomeDevice {
    pub(super) ifindex: u32,
    /// The classifier sends it all answers, because it accepts no redirected frames or because the mode is `tcx`.
    pub(super) by_classifier: bool,
}

impl HomeDevice {
    /// The entry of the kernel's table.
    pub(super) fn word(self) -> u32 {
        self.ifindex | if self.by_classifier { BARE } else { 0 }
    }
}
