//! Programs on devices: attaching, replacing and detaching one, and the pin that keeps it there.
//!
//! An XDP program is attached in native mode where the driver supports it; a classifier before all others of its device.
//! A [`HeldLink`] is a program on its device. All functions act on devices of the calling thread's namespace.

use aya::programs::links::{FdLink, LinkError};
use aya::programs::tc::{SchedClassifierLink, TcAttachOptions};
use aya::programs::xdp::XdpLink;
use aya::programs::{LinkOrder, ProgramInfo, SchedClassifier, TcAttachType, Xdp, XdpMode, loaded_programs};
use metadata_common::maps::program;
use metadata_common::port::PortName;
use metadata_links::netlink;
use rtnetlink::packet_route::link::LinkLayerType;
use std::io;

use super::SteerError;
use super::error::errno;
use super::link::{LinkFd, LinkState};
use super::pins::{self, Pin, PinsError};

/// Why a program could not be attached.
pub(super) enum AttachError {
    /// Another program is attached.
    Occupied,
    /// The link to be replaced has lost its device, or does not exist.
    Gone,
    /// Any other failure.
    Error(Box<dyn std::error::Error + Send + Sync>),
}

impl AttachError {
    pub(super) fn of(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let error = error.into();
        match errno(error.as_ref()) {
            // A link is attached (EBUSY), or a program without a link or in the other mode (EEXIST).
            Some(libc::EBUSY | libc::EEXIST) => Self::Occupied,
            // The replaced link has no device any more (ENOLINK), or no pin.
            Some(libc::ENOLINK | libc::ENOENT) => Self::Gone,
            _ => Self::Error(error),
        }
    }
}

/// Attaches in native mode. Unless it is pinned, the link detaches on drop and when this process dies.
pub(super) fn native(program: &mut Xdp, ifindex: u32) -> Result<FdLink, AttachError> {
    attach(program, ifindex, XdpMode::Driver)
}

/// Attaches in native mode, which every tap supports, or in generic mode where the driver refuses (a veth with an MTU
/// above one page).
pub(super) fn native_or_generic(
    program: &mut Xdp,
    ifindex: u32,
    port: &PortName,
) -> Result<FdLink, AttachError> {
    match native(program, ifindex) {
        Err(AttachError::Error(error)) if driver_cannot(error.as_ref()) => {
            let link = attach(program, ifindex, XdpMode::Skb)?;
            tracing::warn!(
                %port, %error,
                "the device's driver does not support XDP: using generic mode, at a higher cost per frame; answers \
                 arrive only if the driver accepts redirected frames or a classifier reaches the device"
            );
            Ok(link)
        }
        other => other,
    }
}

fn attach(program: &mut Xdp, ifindex: u32, mode: XdpMode) -> Result<FdLink, AttachError> {
    let link = program.attach_to_if_index(ifindex, mode).and_then(|id| program.take_link(id));
    FdLink::try_from(link.map_err(AttachError::of)?).map_err(AttachError::of)
}

/// Errors by which drivers refuse native XDP.
fn driver_cannot(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(errno(error), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE | libc::E2BIG))
}

/// Attaches the classifier to a device's ingress in the calling thread's namespace, before all other classifiers
/// there.
pub(super) fn tcx(
    program: &mut SchedClassifier,
    name: &'static str,
    port: &PortName,
) -> Result<FdLink, SteerError> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| SteerError::Attach {
        program: name,
        device: port.to_string(),
        source,
    };
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id = program
        .attach_with_options(&port.ifname, TcAttachType::Ingress, options)
        .map_err(|error| failed(error.into()))?;
    let link = program.take_link(id).map_err(|error| failed(error.into()))?;
    link.try_into().map_err(|error: LinkError| failed(error.into()))
}

/// Fails if another agent's classifier is on the port: the two would share the guest's frames.
pub(super) fn check_vacant(port: &PortName) -> Result<(), SteerError> {
    // A failed query does not block the port: the kernel has no such classifiers, or attaching reports the cause
    // better.
    let Ok((_, programs)) = SchedClassifier::query_tcx(&port.ifname, TcAttachType::Ingress) else {
        return Ok(());
    };
    let ours = [program::PORT_TCX, program::PORT_TCX_STUB];
    let name_of = |info: &ProgramInfo| ours.into_iter().find(|name| info.name_as_str() == Some(name));
    match programs.iter().find_map(|info| Some((name_of(info)?, info.id()))) {
        Some((name, id)) => Err(SteerError::Occupied {
            port: port.clone(),
            holder: format!("classifier `{name}` (number {id}) of another agent"),
            remedy: OTHER_AGENT.into(),
        }),
        None => Ok(()),
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

impl AttachError {
    /// Converts to an error about a port of the calling thread's namespace.
    pub(super) fn about(self, program: &'static str, port: &PortName, ifindex: u32) -> SteerError {
        match self {
            Self::Occupied => occupied(port, &programs_on(&port.ifname, ifindex)),
            Self::Gone => SteerError::PortGone { port: port.clone(), found: "another device or none".into() },
            Self::Error(source) => SteerError::Attach { program, device: port.to_string(), source },
        }
    }
}

/// A program on a device: its number, and its name if the kernel reports one.
type OnDevice = (u32, Option<String>);

fn programs_on(ifname: &str, ifindex: u32) -> Vec<OnDevice> {
    let ids = netlink::xdp_programs(ifname, ifindex).unwrap_or_default();
    let name = |id| {
        let info = loaded_programs().flatten().find(|info| info.id() == id)?;
        info.name_as_str().filter(|name| !name.is_empty()).map(str::to_owned)
    };
    ids.into_iter().map(|id| (id, name(id))).collect()
}

/// The error of a port with these XDP programs, and what to do about them.
fn occupied(port: &PortName, programs: &[OnDevice]) -> SteerError {
    let named = |names: &[&str]| {
        programs.iter().any(|(_, name)| name.as_deref().is_some_and(|name| names.contains(&name)))
    };
    if named(&[program::SOCKET, program::HUB]) {
        // Anyone who detaches these programs ends the service.
        return SteerError::HubDevice { port: port.clone() };
    }
    let described = programs.iter().map(|(id, name)| match name {
        Some(name) => format!("`{name}` (number {id})"),
        None => format!("number {id}"),
    });
    let holder = match described.collect::<Vec<_>>().join(" and ") {
        none if none.is_empty() => "another XDP program".into(),
        some => format!("XDP program {some}"),
    };
    let remedy = if named(&[program::PORT, program::PORT_STUB]) {
        OTHER_AGENT.to_owned()
    } else {
        format!(
            "a device carries one XDP program: stop its owner, detach it with `ip link set dev {} xdp off` (`bpftool \
             net` shows it), or set `steer: tcx` to keep it",
            port.ifname
        )
    };
    SteerError::Occupied { port: port.clone(), holder, remedy }
}

/// What to do about a program of another agent.
pub(super) const OTHER_AGENT: &str =
    "stop that xdp-imds, or, if it has ended, remove its pins with `xdp-imds release`";

/// What a loopback device is called.
pub(super) const LOOPBACK_KIND: &str = "the loopback interface";

/// Fails for a device behind which no guest can be.
pub(super) fn check_device(port: &PortName, ifindex: u32) -> Result<(), SteerError> {
    let kind = match netlink::link_of(&port.ifname, ifindex)?.header.link_layer_type {
        LinkLayerType::Loopback => LOOPBACK_KIND,
        LinkLayerType::Ether => return Ok(()),
        _ => "a device without Ethernet frames",
    };
    Err(SteerError::NoGuestDevice { port: port.clone(), kind })
}

/// A link. On drop, an unpinned link detaches its program; a pinned one stays until [`HeldLink::detach_and_unpin`].
pub(super) struct HeldLink {
    /// `None` once only the pin holds the link.
    link: Option<LinkFd>,
    /// The number of the program that the link has to have.
    program: u32,
    /// The pin and its inode number, by which a pin that another program made is told apart.
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
    /// Keeps a link and pins it if a pin is given. If pinning fails, the program is detached from the device.
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
                tracing::warn!("cannot prove that a program is detached from its device: {error}");
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

/// A kind of fault that a check finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttachmentFault {
    /// Somebody detached a program.
    Detached,
    /// Somebody replaced the program of a link.
    Replaced,
    /// Somebody removed or replaced a pin.
    Unpinned,
    /// The path of the pins leads elsewhere.
    Hidden,
    /// `xdp-imds release --force` removed the pins.
    Released,
    /// Somebody set a device of a hub down, or changed its MTU, as network managers do with devices that they find.
    Down,
    /// The kernel refuses to show a link or a pin.
    Unknown,
}

impl From<LinkFault> for AttachmentFault {
    fn from(fault: LinkFault) -> Self {
        match fault {
            LinkFault::Detached => Self::Detached,
            LinkFault::Replaced => Self::Replaced,
            LinkFault::Unpinned => Self::Unpinned,
        }
    }
}

impl AttachmentFault {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Detached,
        Self::Replaced,
        Self::Unpinned,
        Self::Hidden,
        Self::Released,
        Self::Down,
        Self::Unknown,
    ];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Detached => "detached",
            Self::Replaced => "replaced",
            Self::Unpinned => "unpinned",
            Self::Hidden => "hidden",
            Self::Released => "released",
            Self::Down => "down",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{OTHER_AGENT, occupied};
    use crate::SteerError;
    use metadata_common::maps::program;
    use metadata_common::port::PortName;

    #[test]
    fn a_program_on_a_port_is_named_with_the_remedy_of_its_kind() {
        let port = PortName::local("tap0");
        for (name, remedy) in [
            (Some("xdp_filter"), "`ip link set dev tap0 xdp off`"),
            (None, "`ip link set dev tap0 xdp off`"),
            (Some(program::PORT), OTHER_AGENT),
        ] {
            let error = occupied(&port, &[(7, name.map(Into::into))]);
            assert!(matches!(error, SteerError::Occupied { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(remedy) && text.contains("number 7"), "{text}");
        }
        for name in [program::SOCKET, program::HUB] {
            let text = occupied(&PortName::local("imds-in"), &[(7, Some(name.into()))]).to_string();
            assert!(text.contains("imds-in is a device of an xdp-imds hub"), "{text}");
            assert!(
                !text.contains("xdp off") && !text.contains("detach"),
                "it would end the service: {text}"
            );
        }
    }
}
