//! Devices that accept no redirected frames, such as a veth whose peer has neither XDP nor GRO.
//!
//! Answers to such devices in the agent's own namespace are sent through the network stack. On the hub tap `hub`
//! passes them to the classifier `hub_tcx`, which sends them to the device like frames of the host itself. Each such
//! frame costs a socket buffer. This needs Linux 6.6, and `bpf_redirect` reaches no device of another namespace.
//! Attaching the classifier waits for an RCU grace period, about 15 ms for each hub, when the agent starts.

use aya::Ebpf;
use aya::programs::links::FdLink;
use metadata_common::maps::program;

use super::ports::Attached;
use super::{SteerError, Steering, loading, mode};
use metadata_base::port::PortName;

/// How answers reach the guest of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The hub redirects answers to the device. Also if the kernel does not report whether the device accepts them.
    Redirect,
    /// A classifier delivers answers to the device, which accepts no redirected frames.
    Classifier,
    /// Answers do not arrive: the device accepts no redirected frames, and no classifier reaches it.
    None,
}

impl Steering {
    /// How answers reach the guest of a port, as of the last check of its device.
    #[must_use]
    pub fn way_to(&self, port: &PortName) -> Way {
        match self.ports.get(port) {
            Some(attached) if self.bare(attached).is_some() => Way::Classifier,
            Some(attached) if attached.looks.takes == Some(false) => Way::None,
            _ => Way::Redirect,
        }
    }

    /// The device of a port, if the classifier must deliver answers to it.
    pub(super) fn bare(&self, attached: &Attached) -> Option<u32> {
        let is_bare = attached.looks.takes == Some(false) && attached.cookie == self.home;
        (self.reaches_bare && is_bare).then_some(attached.key.ifindex)
    }

    /// Updates how answers reach a port's guests after a change of its device. While another agent owns the port,
    /// nothing changes.
    pub(super) fn enter_bare(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port).filter(|_| !self.taking_over) else { return Ok(()) };
        let bare = self.bare(attached);
        attached.slots.values().try_for_each(|slot| self.tables.set_bare(*slot, bare))
    }
}

/// Attaches the classifier behind the XDP program of a hub tap in the calling thread's namespace.
pub(super) fn put_classifier(ebpf: &mut Ebpf, tap: &str) -> Result<FdLink, SteerError> {
    let classifier = loading::load_classifier(ebpf, program::HUB_TCX)?;
    mode::attach_tcx(classifier, program::HUB_TCX, &PortName::local(tap))
}
