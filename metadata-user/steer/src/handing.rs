//! State that a departing agent and its successor share through the maps.
//!
//! The departing agent claims its connections ([`Claims`]). The successor sends each slot's frames to a hub of its
//! own, except those of claimed connections ([`Steering::redirect`]), and keeps the same SYN cookie key
//! ([`Steering::agent`]). The kernel decides frame by frame (`metadata_common::drain`).

use aya::maps::{HashMap, MapData};
use metadata_common::maps::{Agent, CLAIMED, Slot, name};

use super::tables::Binding;
use super::{SteerError, Steering};

/// Claims connections for one worker of a departing agent, through its own descriptor.
#[derive(Debug)]
pub struct Claims {
    draining: HashMap<MapData, u64, u32>,
    refused: u64,
}

impl Claims {
    pub(super) fn new(draining: HashMap<MapData, u64, u32>) -> Self {
        Self { draining, refused: 0 }
    }

    /// Claims a connection, by [`Flow::number`](metadata_common::cookie::Flow::number), while its slot drains. A
    /// connection that is already claimed stays claimed. One system call.
    ///
    /// If the table is full ([`MAX_DRAINING`](metadata_common::maps::MAX_DRAINING)), the connection is not claimed:
    /// the next agent gets its frames and resets it. [`Claims::refused`] counts these.
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

impl Steering {
    /// Handles for claiming connections, one for each worker.
    ///
    /// # Errors
    /// If no descriptor is available.
    pub fn claims(&self) -> Result<Claims, SteerError> {
        self.tables.claims()
    }

    /// Removes all claims of a departed agent.
    ///
    /// # Errors
    /// If the kernel refuses to clear the table.
    pub fn clear_claims(&mut self) -> Result<(), SteerError> {
        self.tables.clear_claims()
    }

    /// Sends the frames of a bound slot to a hub, and those of connections claimed by a `leaving` agent to that
    /// agent's hub. The change is atomic for each frame and loses none.
    ///
    /// # Errors
    /// If the slot is not bound, or the kernel refuses the entry.
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

    /// The state of the previous agent, if there was one.
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn agent(&self) -> Result<Option<Agent>, SteerError> {
        self.tables.agent()
    }

    /// Stores this for the next agent.
    ///
    /// # Errors
    /// If the kernel refuses the entry.
    pub fn set_agent(&mut self, agent: Agent) -> Result<(), SteerError> {
        self.tables.set_agent(agent)
    }
}

/// Claims a worker's connections in the kernel's table.
impl metadata_datapath::stack::Claims for Claims {
    fn claim(&mut self, flow: u64) {
        Claims::claim(self, flow);
    }

    fn renounce(&mut self, flow: u64) {
        Claims::renounce(self, flow);
    }
}
