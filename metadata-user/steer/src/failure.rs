//! Why a test of the kernel or of a device had no result.

use std::fmt;
use std::io;

use super::SteerError;
use super::error::{Chain, errno};
use metadata_links::error::LinkError;

/// Why a probe failed: the error of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeError {
    /// The errno, if there is one.
    pub errno: Option<i32>,
    /// The error with its causes.
    pub text: String,
}

impl ProbeError {
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

    pub(super) fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        Self { errno: errno(error), text: Chain(error).to_string() }
    }
}

impl fmt::Display for ProbeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<io::Error> for ProbeError {
    fn from(error: io::Error) -> Self {
        Self { errno: error.raw_os_error(), text: error.to_string() }
    }
}

impl From<LinkError> for ProbeError {
    fn from(error: LinkError) -> Self {
        Self::of(&error)
    }
}

impl From<SteerError> for ProbeError {
    fn from(error: SteerError) -> Self {
        Self::of(&error)
    }
}
