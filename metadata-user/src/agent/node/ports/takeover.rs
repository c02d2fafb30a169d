//! Takes ports over from the previous agent, and hands them over to the next agent.

use std::time::Duration;

use crate::service::HandedRequest;
use metadata_common::maps::Slot;
use metadata_content::http::Response;
use metadata_datapath::worker::ControlError;
use metadata_steer::SteerError;
use tracing::{debug, warn};

use super::NodePorts;
use crate::agent::plan::Plan;

impl NodePorts {
    /// The side of this agent's hubs, 0 or 1.
    #[must_use]
    pub(crate) fn side(&self) -> u32 {
        self.steering.hubs().side()
    }

    /// True while inherited ports remain that have not been attached.
    #[must_use]
    pub(crate) fn has_inherited(&self) -> bool {
        self.steering.takeover().has_inherited()
    }

    /// Releases inherited ports and slots that no record names. Call it once all ports were settled. Releases nothing
    /// while the device of a wanted port cannot be determined.
    pub(crate) fn release_inherited(&mut self, plan: &Plan) {
        if !self.has_inherited() || self.touch_inherited_taps(plan) {
            return;
        }
        let wanted = self.troubles.unsettled().filter(|port| plan.wants(port));
        match self.steering.release_inherited(wanted) {
            Ok(freed) => {
                freed.into_iter().for_each(|slot| self.bindings.release_inherited(&self.steering, slot))
            }
            Err(error) => debug!("ports of the previous agent stay closed: {error}"),
        }
    }

    /// Takes the ports over from the agent that has them. Identities keep their slots. Identities that the plan does
    /// not have are unbound, and missing identities are bound.
    ///
    /// # Errors
    /// If the kernel refuses a change. Another attempt is useful.
    pub(crate) fn take_over(&mut self, plan: &Plan) -> Result<(), SteerError> {
        self.bindings.follow_slots(&mut self.steering)?;
        self.steering.take_over_all()?;
        // The limits in the kernel are still those of the previous agent's configuration.
        self.steering.set_limits(self.steering.maps().limits())?;
        self.bindings.reserve_inherited(&self.steering);
        for port in plan.ports() {
            self.bindings.keep_inherited(&mut self.steering, port, plan);
            self.touched.insert(port.clone());
        }
        Ok(())
    }

    /// Completes a takeover once the previous agent has ended.
    ///
    /// # Errors
    /// If the kernel refuses a change. Another attempt is useful.
    pub(crate) fn finish_take_over(&mut self) -> Result<(), SteerError> {
        self.steering.finish_take_over()
    }

    /// Answers a question that the previous agent passed on; `None` while no answer is known.
    pub(crate) fn answer(&mut self, question: &HandedRequest) -> Option<Response> {
        self.bindings.answer(&self.steering, question)
    }

    /// Drains every worker for at most `limit`. Each worker claims its present connections and those that begin later.
    ///
    /// # Errors
    /// If no file descriptor is available, or a worker cannot be reached. The workers before it drain nevertheless.
    pub(crate) fn drain_and_claim(&self, limit: Duration) -> anyhow::Result<()> {
        self.workers().drain_and_claim(limit, || self.steering.maps().claims())
    }

    /// Ends the drain and drops all claims: this agent keeps its ports.
    ///
    /// # Errors
    /// If a worker cannot be reached. It continues to drain.
    pub(crate) fn resume(&mut self) -> Result<(), ControlError> {
        if let Err(error) = self.steering.maps_mut().clear_claims() {
            warn!("claims stay until the next handover: {error}");
        }
        self.workers().resume()
    }

    /// Records that the next agent has taken the ports.
    pub(crate) fn on_handed_over(&mut self) {
        self.steering.leave_to_pins();
    }

    /// Makes the worker try waiting requests of a slot again.
    pub(crate) fn wake(&mut self, slot: Slot) {
        self.bindings.wake(&self.steering, slot);
    }

    /// Ends this agent's part after the next agent has taken over. Nothing changes on the ports.
    pub(crate) fn leave(self) {
        let Self { bindings, steering, .. } = self;
        // Drop the workers first, because they use what steering closes.
        drop(bindings);
        steering.leave();
    }
}
