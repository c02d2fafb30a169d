//! A program on a device, and the pin that keeps it there.

use aya::programs::links::{FdLink, LinkError};
use aya::programs::tc::SchedClassifierLink;
use aya::programs::xdp::XdpLink;
use aya::programs::{SchedClassifier, Xdp};
use std::path::{Path, PathBuf};

use super::attach::Refusal;
use super::pins::{self, PinsError};

/// A link. Dropped without a pin it takes its program off the device; with one it stays until [`Held::take_off`].
pub(super) struct Held {
    /// None once only the pin holds it.
    link: Option<FdLink>,
    pin: Option<PathBuf>,
}

impl Held {
    /// Keeps a link, pinned if there is a place for it. A link that cannot be pinned ends.
    pub(super) fn new(link: FdLink, pin: Option<PathBuf>) -> Result<Self, PinsError> {
        let link = match &pin {
            Some(path) => pins::pin_link(link, path)?,
            None => link,
        };
        Ok(Self { link: Some(link), pin })
    }

    /// A link that is pinned, with the program it has.
    pub(super) fn open(pin: PathBuf) -> Result<Self, PinsError> {
        Ok(Self { link: Some(pins::open_link(&pin)?), pin: Some(pin) })
    }

    /// A link that was pinned there before and has had its program replaced.
    pub(super) fn replaced(link: FdLink, pin: PathBuf) -> Self {
        Self { link: Some(link), pin: Some(pin) }
    }

    /// Leaves a pinned link to its pin: whoever takes that away takes the program off, however long we live.
    pub(super) fn leave_to_pin(&mut self) {
        if self.pin.is_some() {
            self.link = None;
        }
    }

    /// Takes the program off its device. On the way out there is nobody to act on an error but the log's reader.
    pub(super) fn take_off(self) {
        drop(self.link);
        if let Some(Err(error)) = self.pin.as_deref().map(pins::unpin) {
            tracing::warn!("a program stays on its device: {error}");
        }
    }
}

/// What is pinned under a link's name may be no link of that kind: it holds nothing on the device then.
fn no_such_link(error: LinkError) -> Refusal {
    match error {
        LinkError::InvalidLink | LinkError::UnknownLinkType(_) => Refusal::Gone,
        error => Refusal::of(error),
    }
}

/// Replaces the XDP program of a pinned link by this one, between two frames (`BPF_LINK_UPDATE`).
pub(super) fn replace_xdp(pin: &Path, program: &mut Xdp) -> Result<FdLink, Refusal> {
    let link = XdpLink::try_from(pins::open_link(pin).map_err(Refusal::of)?).map_err(no_such_link)?;
    let id = program.attach_to_link(link).map_err(Refusal::of)?;
    FdLink::try_from(program.take_link(id).map_err(Refusal::of)?).map_err(Refusal::of)
}

/// As [`replace_xdp`], for the classifier.
pub(super) fn replace_tcx(pin: &Path, program: &mut SchedClassifier) -> Result<FdLink, Refusal> {
    let link = pins::open_link(pin).map_err(Refusal::of)?;
    let link = SchedClassifierLink::try_from(link).map_err(no_such_link)?;
    let id = program.attach_to_link(link).map_err(Refusal::of)?;
    FdLink::try_from(program.take_link(id).map_err(Refusal::of)?).map_err(Refusal::of)
}
