//! The entry of the kernel's table of devices that the hub's classifier reaches.

use metadata_common::maps::BARE;

/// A port's device in the agent's own namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HomeDevice {
    pub(super) ifindex: u32,
    /// It accepts no redirected frames.
    pub(super) is_bare: bool,
}

impl HomeDevice {
    /// The entry of the kernel's table.
    pub(super) fn word(self) -> u32 {
        self.ifindex | if self.is_bare { BARE } else { 0 }
    }
}
