//! A departing agent claims its connections in the maps, so that their frames stay its own.

use aya::maps::{HashMap, MapData};
use metadata_common::maps::CLAIMED;

/// Claims connections for one worker of a departing agent, through its own descriptor.
#[derive(Debug)]
pub struct FlowClaimer {
    draining: HashMap<MapData, u64, u32>,
    refused: u64,
}

impl FlowClaimer {
    pub(super) fn new(draining: HashMap<MapData, u64, u32>) -> Self {
        Self { draining, refused: 0 }
    }

    /// Claims a connection, by [`Flow::number`](metadata_common::cookie::Flow::number), while its slot drains. A
    /// connection that is already claimed stays claimed. One system call.
    ///
    /// If the table is full ([`MAX_DRAINING`](metadata_common::maps::MAX_DRAINING)), the connection is not claimed:
    /// the next agent gets its frames and resets it. [`FlowClaimer::refused`] counts these.
    pub fn claim(&mut self, flow: u64) {
        self.refused += u64::from(self.draining.insert(flow, CLAIMED, 0).is_err());
    }

    /// Drops the claim on a connection, if any: the next agent gets its frames. One system call.
    pub fn renounce(&mut self, flow: u64) {
        // A missing entry means the connection already belongs to the next agent.
        let _absent = self.draining.remove(&flow);
    }

    /// Number of connections that found the table full.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}
