//! A program on a device, and the pin that keeps it there.

use aya::programs::links::{FdLink, LinkError};
use aya::programs::tc::SchedClassifierLink;
use aya::programs::xdp::XdpLink;
use aya::programs::{SchedClassifier, Xdp};
use metadata_common::maps::{InheritedState, Slot, name};
use std::io;

use super::attach::AttachError;
use super::error::errno;
use super::link::{LinkFd, LinkState};
use super::pins::{Pin, PinsError};
use super::tables::SlotBinding;
use super::{FlowClaimer, SteerError, Steering, pins};

/// A link. On drop, an unpinned link detaches its program; a pinned one stays until [`HeldLink::detach_and_unpin`].
pub(super) struct HeldLink {
    /// `None` once only the pin holds the link.
    link: Option<LinkFd>,
    /// The number of the program that the link has to have.
    program: u32,
    /// The pin and its inode number, by which a pin that somebody else made is told apart.
    pin: Option<(Pin, u64)>,
}

/// What is wrong with a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkFault {
    /// It is on no device.
    Detached,
    /// It has another program.
    Replaced,
    /// Its pin is missing, or another object has the pin's name.
    Unpinned,
}

impl HeldLink {
    /// Keeps a link and pins it if a pin is given. If pinning fails, the program is taken off the device.
    pub(super) fn new(link: FdLink, pin: Option<Pin>) -> Result<Self, SteerError> {
        let link = LinkFd::of(&link).map_err(|source| SteerError::device("open a link again", source))?;
        match Self::keep(&link, pin) {
            Ok((program, pin)) => Ok(Self { link: Some(link), program, pin }),
            Err(error) => match link.detach() {
                Ok(()) => Err(error),
                Err(source) => Err(SteerError::StillAttached { reason: error.to_string(), source }),
            },
        }
    }

    /// Keeps a link that another pin holds, and pins it here too. After an error the program stays on its device.
    pub(super) fn moved(link: FdLink, pin: Option<Pin>) -> Result<Self, SteerError> {
        let link = LinkFd::of(&link).map_err(|source| SteerError::device("open a link again", source))?;
        let (program, pin) = Self::keep(&link, pin)?;
        Ok(Self { link: Some(link), program, pin })
    }

    fn keep(link: &LinkFd, pin: Option<Pin>) -> Result<(u32, Option<(Pin, u64)>), SteerError> {
        let state = link.state().map_err(|source| SteerError::device("examine a link", source))?;
        let pin = pin.map(|pin| Ok::<_, PinsError>((pin.clone(), pin.put(link)?))).transpose()?;
        Ok((state.program, pin))
    }

    /// Opens a pinned link without changing its program.
    pub(super) fn open(pin: Pin) -> Result<Self, SteerError> {
        let link = pins::open_link(&pin)?;
        Self::replaced(link, pin)
    }

    /// Keeps a pinned link whose program was replaced.
    pub(super) fn replaced(link: FdLink, pin: Pin) -> Result<Self, SteerError> {
        let failed = |source| SteerError::device(format!("examine the link {pin}"), source);
        let link = LinkFd::of(&link).map_err(failed)?;
        let program = link.state().map_err(failed)?.program;
        let inode = pin.inode()?.unwrap_or_default();
        Ok(Self { link: Some(link), program, pin: Some((pin, inode)) })
    }

    /// Drops our reference to a pinned link. Removing the pin then detaches the program, even while this process
    /// lives.
    pub(super) fn leave_to_pin(&mut self) {
        if self.pin.is_some() {
            self.link = None;
        }
    }

    /// Takes the program off its device and removes the pin. Returns itself unless both are proven: the numbers that
    /// the program sends frames with must then not be used again.
    #[must_use = "numbers are free only after the detachment is proven"]
    pub(super) fn detach_and_unpin(mut self) -> Option<Self> {
        match self.try_detach() {
            Ok(()) => None,
            Err(error) => {
                tracing::warn!("cannot prove that a program is off its device: {error}");
                Some(self)
            }
        }
    }

    fn try_detach(&mut self) -> Result<(), SteerError> {
        if self.link.is_none()
            && let Some((pin, _)) = &self.pin
        {
            self.link = Self::open(pin.clone())?.link;
        }
        if let Some(link) = &self.link {
            link.detach().map_err(|source| {
                SteerError::device(format!("detach the program from its device (link {})", link.id()), source)
            })?;
        }
        if let Some((pin, _)) = &self.pin {
            pin.remove()?;
        }
        Ok(())
    }

    /// Takes the program off its device and keeps the pin.
    pub(super) fn detach(&self) -> io::Result<()> {
        self.link.as_ref().map_or(Ok(()), LinkFd::detach)
    }

    /// True if nothing is left that another [`HeldLink::detach_and_unpin`] could act on.
    pub(super) fn is_out_of_reach(&self) -> bool {
        self.link.is_none() && self.pin.as_ref().is_none_or(|(pin, _)| matches!(pin.inode(), Ok(None)))
    }

    /// Compares the link with the kernel's view of it; `pin` is the pin that it has to have. Two system calls.
    /// `None` also for a link that another agent owns now.
    ///
    /// # Errors
    /// If the kernel refuses to show the link.
    pub(super) fn fault(&self, pin: Option<&Pin>) -> io::Result<Option<LinkFault>> {
        let Some(link) = &self.link else { return Ok(None) };
        let LinkState { program, ifindex } = link.state()?;
        if ifindex == 0 {
            return Ok(Some(LinkFault::Detached));
        }
        if program != self.program {
            return Ok(Some(LinkFault::Replaced));
        }
        let expected = self.pin.as_ref().map(|(_, inode)| *inode);
        let is_pinned = match pin {
            Some(pin) => pin.inode().is_ok_and(|found| found.is_some() && found == expected),
            None => true,
        };
        Ok((!is_pinned).then_some(LinkFault::Unpinned))
    }

    /// Pins the link again.
    ///
    /// # Errors
    /// If the kernel refuses. The program stays on its device as long as this process lives.
    pub(super) fn pin_again(&mut self, pin: Pin) -> Result<(), PinsError> {
        let Some(link) = &self.link else { return Ok(()) };
        let inode = pin.put(link)?;
        self.pin = Some((pin, inode));
        Ok(())
    }

    /// The number of the program that the link has to have.
    pub(super) fn program(&self) -> u32 {
        self.program
    }
}

/// Maps an error of opening a pin. A pin that is no link of the expected kind holds nothing on the device.
fn no_such_link(error: LinkError) -> AttachError {
    match error {
        LinkError::InvalidLink | LinkError::UnknownLinkType(_) => AttachError::Gone,
        error => AttachError::of(error),
    }
}

/// Replaces the XDP program of a pinned link with this one, between two frames (`BPF_LINK_UPDATE`).
pub(super) fn replace_xdp(pin: &Pin, program: &mut Xdp) -> Result<FdLink, AttachError> {
    let link = XdpLink::try_from(pins::open_link(pin).map_err(AttachError::of)?).map_err(no_such_link)?;
    let id = program.attach_to_link(link).map_err(AttachError::of)?;
    FdLink::try_from(program.take_link(id).map_err(AttachError::of)?).map_err(AttachError::of)
}

/// Like [`replace_xdp`], for the classifier.
pub(super) fn replace_tcx(pin: &Pin, program: &mut SchedClassifier) -> Result<FdLink, AttachError> {
    let link = pins::open_link(pin).map_err(AttachError::of)?;
    let link = SchedClassifierLink::try_from(link).map_err(no_such_link)?;
    let id = program.attach_to_link(link).map_err(AttachError::of)?;
    FdLink::try_from(program.take_link(id).map_err(AttachError::of)?).map_err(AttachError::of)
}

/// True if a pin does not exist.
pub(super) fn is_missing(error: &SteerError) -> bool {
    errno(error) == Some(libc::ENOENT)
}

// State that a departing agent and its successor share through the maps.
//
// The departing agent claims its connections ([`FlowClaimer`]). The successor sends each slot's frames to a hub of its
// own, except those of claimed connections ([`Steering::redirect`]), and keeps the same SYN cookie key
// ([`Steering::agent`]). The kernel decides frame by frame (`metadata_common::drain`).

impl Steering {
    /// Returns a handle for claiming connections. Each worker needs its own.
    ///
    /// # Errors
    /// If no descriptor is available.
    pub fn claims(&self) -> Result<FlowClaimer, SteerError> {
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
        self.tables.redirect(SlotBinding { slot, port, mac, hub }, leaving)
    }

    /// The state of the previous agent, if there was one.
    ///
    /// # Errors
    /// If the kernel refuses to read the table.
    pub fn agent(&self) -> Result<Option<InheritedState>, SteerError> {
        self.tables.agent()
    }

    /// Stores the state that the next agent inherits.
    ///
    /// # Errors
    /// If the kernel refuses the entry.
    pub fn set_agent(&mut self, agent: InheritedState) -> Result<(), SteerError> {
        self.tables.set_agent(agent)
    }
}

/// Claims a worker's connections in the kernel's table.
impl metadata_datapath::stack::ServedFlows for FlowClaimer {
    fn claim(&mut self, flow: u64) {
        FlowClaimer::claim(self, flow);
    }

    fn renounce(&mut self, flow: u64) {
        FlowClaimer::renounce(self, flow);
    }
}
