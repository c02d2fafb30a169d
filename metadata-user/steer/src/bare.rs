//! Answers that XDP cannot redirect: those to devices that accept no redirected frames, such as a veth whose peer has
//! neither XDP nor GRO, long ones, which are cut into segments behind the hub, and in the mode `tcx` all others.
//!
//! In the agent's own namespace such answers are sent through the network stack: the classifier `hub_tcx` sends them to
//! the device like frames of the host itself. On the hub tap `hub` passes it what is for devices that accept no
//! redirected frames, and in the mode `tcx` everything. A tap of several queues then gets answers by the queue on which
//! its guest sent the connection's last frame (`tun_flow_update` in drivers/net/tun.c), as it gets the host's own
//! frames. XDP chooses the queue by the CPU, also one that the guest does not read.
//!
//! The tap for long answers has no XDP program, because the kernel would copy each frame into one piece for it and
//! refuse to redirect a frame above the MTU. Each frame costs a socket buffer. This needs tcx (`features`), and
//! `bpf_redirect` reaches no device of another namespace. Attaching the classifier waits for an RCU grace period, about
//! 15 ms for each tap, when the agent starts.

use aya::Ebpf;
use aya::programs::links::FdLink;
use metadata_common::maps::program;

use super::hub::HubDevice;
use super::ports::AttachedPort;
use super::tables::HomeDevice;
use super::{SteerError, Steering, SteeringMode, loading, mode};
use metadata_common::port::PortName;

/// How answers reach the guest of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerPath {
    /// The device accepts redirected frames, or the kernel does not report whether it does.
    Redirect,
    /// A classifier delivers answers to the device, which accepts no redirected frames.
    Classifier,
    /// Answers do not arrive: the device accepts no redirected frames, and no classifier reaches it.
    None,
}

impl Steering {
    /// How answers reach the guest of a port, as of the last check of its device.
    #[must_use]
    pub fn way_to(&self, port: &PortName) -> AnswerPath {
        match self.ports.get(port) {
            Some(attached) if attached.looks.takes == Some(false) => {
                if self.home_device(attached).is_some() {
                    AnswerPath::Classifier
                } else {
                    AnswerPath::None
                }
            }
            _ => AnswerPath::Redirect,
        }
    }

    /// The device of a port, if the classifier reaches it.
    pub(super) fn home_device(&self, attached: &AttachedPort) -> Option<HomeDevice> {
        let by_classifier = attached.looks.takes == Some(false) || self.mode == SteeringMode::Tcx;
        let device = HomeDevice { ifindex: attached.key.ifindex, by_classifier };
        (self.has_classifiers && attached.cookie == self.home).then_some(device)
    }

    /// Updates how answers reach a port's guests after a change of its device. While another agent owns the port,
    /// nothing changes.
    pub(super) fn enter_home(&mut self, port: &PortName) -> Result<(), SteerError> {
        let Some(attached) = self.ports.get(port).filter(|_| !self.taking_over) else { return Ok(()) };
        let device = self.home_device(attached);
        attached.slots.values().try_for_each(|slot| {
            self.guest_devices.set_takes_long(*slot, device.is_some());
            self.tables.set_home(*slot, device)
        })
    }
}

/// Attaches the classifier to a hub's taps in the calling thread's namespace.
pub(super) fn put_classifier<'t>(
    ebpf: &mut Ebpf,
    taps: impl IntoIterator<Item = &'t HubDevice>,
) -> Result<Vec<FdLink>, SteerError> {
    let classifier = loading::load_classifier(ebpf, program::HUB_TCX)?;
    let mut attach =
        |tap: &HubDevice| mode::attach_tcx(classifier, program::HUB_TCX, &PortName::local(&tap.name));
    taps.into_iter().map(&mut attach).collect()
}
