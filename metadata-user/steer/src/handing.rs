//! State that a departing agent and its successor share through the maps.
//!
//! The departing agent claims its connections ([`Claims`]). The successor sends each slot's frames to a hub of its
//! own, except those of claimed connections ([`Steering::redirect`]), and keeps the same SYN cookie key
//! ([`Steering::agent`]). The kernel decides frame by frame (`metadata_common::drain`).

use metadata_common::maps::{Agent, Slot, name};

use super::tables::Binding;
use super::{Claims, SteerError, Steering};

impl Steering {
    /// Returns a handle for claiming connections. Each worker needs its own.
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

    /// Stores the state that the next agent inherits.
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
