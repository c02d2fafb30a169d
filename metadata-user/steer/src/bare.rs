//! Devices that take no redirected frames, as a veth whose other end has neither XDP nor GRO.
//!
//! Answers to those in the agent's own namespace go through the network stack's door: on the hub tap `hub` passes them on
//! to the classifier `hub_tcx`, which sends them to the device as the host sends its own. That costs a socket buffer for
//! each frame. It takes Linux 6.6, and `bpf_redirect` reaches no device of another namespace. To put the classifier on waits
//! for an RCU grace period, some 15 ms for each hub, when the agent starts.

use aya::Ebpf;
use aya::programs::links::FdLink;
use metadata_common::maps::program;

use super::ports::Attached;
use super::{SteerError, Steering, mode, object};
use metadata_base::port::PortName;

/// How answers get to the guest of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// They are redirected to its device, or the kernel does not say whether they can be.
    Redirect,
    /// A classifier hands them to its device, which takes no redirected frames.
    Classifier,
    /// They do not: its device takes no redirected frames, and no classifier reaches it.
    None,
}

impl Steering {
    /// How answers get to the guest of a port, by the last look at its device.
    #[must_use]
    pub fn way_to(&self, port: &PortName) -> Way {
        match self.ports.get(port) {
            Some(attached) if self.bare(attached).is_some() => Way::Classifier,
            Some(attached) if attached.looks.takes == Some(false) => Way::None,
            _ => Way::Redirect,
        }
    }

    /// The device of a port, if the classifier has to hand answers to it.
    pub(super) fn bare(&self, attached: &Attached) -> Option<u32> {
        let is_bare = attached.looks.takes == Some(false) && attached.cookie == self.home;
        (self.reaches_bare && is_bare).then_some(attached.key.ifindex)
    }

    /// Has answers to a port's guests go the way that its device takes. While another agent has the port, they go as that
    /// one has them go.
    pub(super) fn enter_bare(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port).filter(|_| !self.taking_over) else { return Ok(()) };
        let bare = self.bare(attached);
        attached.slots.values().try_for_each(|slot| self.tables.set_bare(*slot, bare))
    }
}

/// Puts the classifier behind the XDP program of a hub tap of the calling thread's namespace.
pub(super) fn put_classifier(ebpf: &mut Ebpf, tap: &str) -> Result<FdLink, SteerError> {
    let classifier = object::load_classifier(ebpf, program::HUB_TCX)?;
    mode::attach_tcx(classifier, program::HUB_TCX, &PortName::local(tap))
}
