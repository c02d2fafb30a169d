//! What an agent that is leaving and the one that follows tell each other through the maps.
//!
//! The one that is leaving claims its connections ([`Claims`]); the one that follows sends each slot's frames to a
//! hub of its own, except those ([`Steering::redirect`]), and goes on with the same key of handshakes
//! ([`Steering::agent`]). The kernel decides frame by frame (`metadata_common::drain`).

use aya::maps::{HashMap, MapData};
use metadata_common::maps::{Agent, CLAIMED, Slot, name};

use super::tables::Binding;
use super::{SteerError, Steering};

/// A way to claim connections, for one worker of an agent that is leaving: a descriptor of its own.
#[derive(Debug)]
pub struct Claims {
    draining: HashMap<MapData, u64, u32>,
    refused: u64,
}

impl Claims {
    pub(super) fn new(draining: HashMap<MapData, u64, u32>) -> Self {
        Self { draining, refused: 0 }
    }

    /// Keeps a connection, by [`Flow::number`](metadata_common::cookie::Flow::number), while its slot drains. One
    /// that is claimed already stays so. One system call.
    ///
    /// When the table is full ([`MAX_DRAINING`](metadata_common::maps::MAX_DRAINING)) the connection is not kept:
    /// the next agent gets its frames, and resets it. [`Claims::refused`] counts those.
    pub fn claim(&mut self, flow: u64) {
        self.refused += u64::from(self.draining.insert(flow, CLAIMED, 0).is_err());
    }

    /// Gives a connection up that may have been claimed: the next agent gets its frames. One system call.
    pub fn renounce(&mut self, flow: u64) {
        // Not there: then it is the next agent's already.
        let _absent = self.draining.remove(&flow);
    }

    /// Connections the table did not take.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

impl Steering {
    /// Handles to claim connections with, one for each worker.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn claims(&self) -> Result<Claims, SteerError> {
        self.tables.claims()
    }

    /// Forgets all claims, those of an agent that has left.
    ///
    /// # Errors
    /// When the kernel refuses to clear the table.
    pub fn clear_claims(&mut self) -> Result<(), SteerError> {
        self.tables.clear_claims()
    }

    /// Sends what comes for a bound slot to a hub, and the connections claimed by an agent that is `leaving` to
    /// that one's hub. Takes effect from one frame to the next; nothing is lost in between.
    ///
    /// # Errors
    /// When the slot is not bound, or the kernel refuses the entry.
    pub fn redirect(&mut self, slot: Slot, hub: u32, leaving: Option<u32>) -> Result<(), SteerError> {
        let bound = self.bound.get(&slot);
        let found = bound.and_then(|(port, mac)| Some((self.ports.get(port)?.key, *mac)));
        let Some((port, mac)) = found else {
            return Err(SteerError::map(
                name::IDENTITIES,
                format!("redirect slot {slot}"),
                "it is not bound",
            ));
        };
        self.tables.redirect(Binding { slot, port, mac, hub }, leaving)
    }

    /// What the agent before left, if there was one.
    ///
    /// # Errors
    /// When the kernel refuses to read the table.
    pub fn agent(&self) -> Result<Option<Agent>, SteerError> {
        self.tables.agent()
    }

    /// Leaves this for the next agent.
    ///
    /// # Errors
    /// When the kernel refuses the entry.
    pub fn set_agent(&mut self, agent: Agent) -> Result<(), SteerError> {
        self.tables.set_agent(agent)
    }
}

/// A worker that claims its connections does so in the kernel's table.
impl metadata_datapath::stack::Claims for Claims {
    fn claim(&mut self, flow: u64) {
        Claims::claim(self, flow);
    }

    fn renounce(&mut self, flow: u64) {
        Claims::renounce(self, flow);
    }
}
