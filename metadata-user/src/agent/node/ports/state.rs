//! The states of ports and guests, for reports.

use metadata_base::port::PortName;
use metadata_control::status::{GuestState, PortState};
use metadata_datapath::stack::SlotStats;
use metadata_steer::{By, Way};
use tokio::sync::oneshot;

use super::NodePorts;
use crate::agent::node::answers::Serves;
use crate::agent::slots::IdentityName;

/// The reason of a port whose interface does not exist.
pub(super) const ABSENT: &str = "no such interface yet; it is attached as soon as it appears";

/// The reason of a port whose network namespace does not exist.
pub(super) const NO_NAMESPACE: &str = "no such network namespace yet (a name under /run/netns, or a path such as \
     /proc/PID/ns/net); the port is attached as soon as its interface appears there";

/// The reason of a port whose guest gets no answer.
pub(super) const UNREACHABLE: &str = "answers do not reach the guest: the device accepts no redirected \
     frames. For a veth, turn on GRO at its other end (`ethtool -K PEER gro on`); otherwise give the guest a tap. The port \
     is served as soon as its device accepts them";

/// The note on a port that is served by the classifier.
const BY_CLASSIFIER: &str = "served at a higher cost per frame: the device accepts no redirected frames, so a \
     classifier delivers the answers. For a veth, turn on GRO at its other end (`ethtool -K PEER gro on`)";

impl NodePorts {
    /// The state of a wanted port, and the reason.
    #[must_use]
    pub(in crate::agent::node) fn state_of(&self, port: &PortName) -> (PortState, Option<&str>) {
        match self.troubles.reason(port) {
            Some(reason @ (ABSENT | NO_NAMESPACE)) => (PortState::Waiting, Some(reason)),
            Some(reason) => (PortState::Error, Some(reason)),
            None if self.steering.is_attached(port) => {
                let by_classifier = self.steering.way_to(port) == Way::Classifier;
                (PortState::Attached, by_classifier.then_some(BY_CLASSIFIER))
            }
            None => (PortState::Waiting, Some("not settled yet")),
        }
    }

    /// The program that steers a port.
    #[must_use]
    pub(in crate::agent::node) fn program_of(&self, port: &PortName) -> Option<String> {
        let by = self.steering.steered_by(port)?;
        Some(if by == By::Xdp { "xdp" } else { "tcx" }.into())
    }

    /// What an identity's requests get.
    #[must_use]
    pub(in crate::agent::node) fn guest_state(&self, who: &IdentityName) -> GuestState {
        self.state_when(&who.port, self.bindings.get(who).map(|(_, serves)| serves))
    }

    /// Like `guest_state`, for a caller that has already looked up what the guest's slot serves.
    #[must_use]
    pub(in crate::agent::node) fn state_when(&self, port: &PortName, serves: Option<&Serves>) -> GuestState {
        match serves {
            Some(_) if self.steering.way_to(port) == Way::None => GuestState::Unreachable,
            Some(Serves::Responses(_)) => GuestState::Served,
            Some(Serves::Awaited) => GuestState::Awaited,
            Some(Serves::Gone) => GuestState::Gone,
            None => GuestState::Unbound,
        }
    }

    /// Asks the worker of an identity how many connections and requests it holds; `None` if the identity is not bound.
    #[must_use]
    pub(in crate::agent::node) fn ask_held(
        &self,
        who: &IdentityName,
    ) -> Option<oneshot::Receiver<SlotStats>> {
        let (slot, _) = self.bindings.get(who)?;
        self.workers().ask_held(self.steering.worker_of(slot), slot)
    }
}
