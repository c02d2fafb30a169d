//! A program on a device, and the pin that keeps it there.

use aya::programs::links::{FdLink, LinkError};
use aya::programs::tc::SchedClassifierLink;
use aya::programs::xdp::XdpLink;
use aya::programs::{SchedClassifier, Xdp};
use std::path::{Path, PathBuf};

use super::attach::Refusal;
use super::pins::{self, PinsError};

/// A link. On drop, an unpinned link detaches its program; a pinned one stays until [`Held::take_off`].
pub(super) struct Held {
    /// `None` once only the pin holds the link.
    link: Option<FdLink>,
    pin: Option<PathBuf>,
}

impl Held {
    /// Keeps a link and pins it if a path is given. If pinning fails, the link ends.
    pub(super) fn new(link: FdLink, pin: Option<PathBuf>) -> Result<Self, PinsError> {
        let link = match &pin {
            Some(path) => pins::pin_link(link, path)?,
            None => link,
        };
        Ok(Self { link: Some(link), pin })
    }

    /// Opens a pinned link without changing its program.
    pub(super) fn open(pin: PathBuf) -> Result<Self, PinsError> {
        Ok(Self { link: Some(pins::open_link(&pin)?), pin: Some(pin) })
    }

    /// Keeps a pinned link whose program was replaced.
    pub(super) fn replaced(link: FdLink, pin: PathBuf) -> Self {
        Self { link: Some(link), pin: Some(pin) }
    }

    /// Drops our reference to a pinned link. Removing the pin then detaches the program, even while this process
    /// lives.
    pub(super) fn leave_to_pin(&mut self) {
        if self.pin.is_some() {
            self.link = None;
        }
    }

    /// Detaches the program from its device. Callers cannot act on an error, so it is logged.
    pub(super) fn take_off(self) {
        drop(self.link);
        if let Some(Err(error)) = self.pin.as_deref().map(pins::unpin) {
            tracing::warn!("cannot detach a program from its device: {error}");
        }
    }
}

/// Maps an error of opening a pin. A pin that is no link of the expected kind holds nothing on the device.
fn no_such_link(error: LinkError) -> Refusal {
    match error {
        LinkError::InvalidLink | LinkError::UnknownLinkType(_) => Refusal::Gone,
        error => Refusal::of(error),
    }
}

/// Replaces the XDP program of a pinned link with this one, between two frames (`BPF_LINK_UPDATE`).
pub(super) fn replace_xdp(pin: &Path, program: &mut Xdp) -> Result<FdLink, Refusal> {
    let link = XdpLink::try_from(pins::open_link(pin).map_err(Refusal::of)?).map_err(no_such_link)?;
    let id = program.attach_to_link(link).map_err(Refusal::of)?;
    FdLink::try_from(program.take_link(id).map_err(Refusal::of)?).map_err(Refusal::of)
}

/// Like [`replace_xdp`], for the classifier.
pub(super) fn replace_tcx(pin: &Path, program: &mut SchedClassifier) -> Result<FdLink, Refusal> {
    let link = pins::open_link(pin).map_err(Refusal::of)?;
    let link = SchedClassifierLink::try_from(link).map_err(no_such_link)?;
    let id = program.attach_to_link(link).map_err(Refusal::of)?;
    FdLink::try_from(program.take_link(id).map_err(Refusal::of)?).map_err(Refusal::of)
}
