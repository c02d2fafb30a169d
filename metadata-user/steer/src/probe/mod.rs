//! Probes what steering needs, for `xdp-imds doctor`, without lasting changes. A probe that creates something does so
//! in a network namespace of its own, which goes with the probe's thread even if that is killed.

mod device;
mod kernel;
mod node;
mod search;

pub use device::{Device, Filter, Program, device};
pub use kernel::{Feature, KERNEL, TCX_KERNEL, features, rehearse};
pub use node::{AddressUse, PinnedLink, address_uses, hub_devices, pinned_links, ring_full, veth_full};
pub use search::{NAMESPACES_SEARCHED, PLACES_TOLD, PROCESSES_SEARCHED, Place, Search, search};

use std::fmt;
use std::io;

use super::SteerError;
use super::error::{Chain, errno};
use metadata_links::error::LinkError;

/// Why a probe failed: the error of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The errno, if there is one.
    pub errno: Option<i32>,
    /// The error with its causes.
    pub text: String,
}

impl Failure {
    /// A failure without an errno.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self { errno: None, text: text.into() }
    }

    /// True if the kernel denied permission, rather than lacking the feature.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self.errno, Some(libc::EPERM | libc::EACCES))
    }

    fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        Self { errno: errno(error), text: Chain(error).to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self { errno: error.raw_os_error(), text: error.to_string() }
    }
}

impl From<LinkError> for Failure {
    fn from(error: LinkError) -> Self {
        Self::of(&error)
    }
}

impl From<SteerError> for Failure {
    fn from(error: SteerError) -> Self {
        Self::of(&error)
    }
}
