//! Errors of steering, with a remedy in each, and why a test of the kernel or of a device had no result.

use metadata_common::maps::{MAX_PORTS, MAX_SERVED, MAX_SLOTS, Slot};
use std::fmt;
use std::io;

use super::{HUB_PREFIX_MAX, HUB_QUEUES, HUBS_OF_A_SIDE};
use metadata_common::port::PortName;
use metadata_links::error::{LinkError, advice};

/// Why steering failed. No change is left half done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SteerError {
    /// A failure on a device or a network namespace.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A failure in the directory of pins.
    #[error(transparent)]
    Pins(#[from] super::PinsError),
    /// A program could not be kept, and the kernel does not confirm that it is off its device.
    #[error(
        "{reason}; the program that was to be detached may still be on its device: {source}; the number of its \
         namespace is not used again"
    )]
    StillAttached {
        /// Why the program could not be kept.
        reason: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The ports belong to the agent that this one takes over from, and that agent may still change them.
    #[error("{port} cannot change during a takeover from another agent; it is tried again afterwards")]
    TakingOver {
        /// The port.
        port: PortName,
    },
    /// Only pinned links and maps can be taken over.
    #[error("cannot take over without pins: give both agents the same --pins, or stop the other one first")]
    TakeOverWithoutPins,
    /// A takeover alternates between two sides.
    #[error("expected side 0 or 1, found {found}")]
    Side {
        /// The requested side.
        found: u32,
    },
    /// The hub prefix cannot form an interface name.
    #[error(
        "expected a hub name of 1 to {HUB_PREFIX_MAX} bytes without spaces, `/` and `:`, found `{found}`; \
         interface names have at most 15"
    )]
    HubName {
        /// The configured prefix.
        found: String,
    },
    /// More served addresses of one family than the table holds.
    #[error("expected at most {MAX_SERVED} served IPv{family} addresses, found {found}; serve fewer")]
    TooManyServed {
        /// 4 or 6.
        family: u8,
        /// The configured number.
        found: usize,
    },
    /// A device of another kind has the name of a hub device.
    #[error(
        "expected no device named {name}, or a veth of an earlier run, found a {kind}; rename it or \
         choose another hub name"
    )]
    NotOurs {
        /// The contested name.
        name: String,
        /// The kind of device found.
        kind: String,
    },
    /// The object or one of its programs cannot be loaded.
    #[error("cannot load the eBPF {part}: {}{}", Chain(.source.as_ref()), advise(.source.as_ref()))]
    Load {
        /// `object`, or `program` and its name.
        part: String,
        /// The error of the kernel or the loader.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A program cannot be attached.
    #[error(
        "cannot attach XDP program `{program}` to {device}: {}{}",
        Chain(.source.as_ref()), advise(.source.as_ref())
    )]
    Attach {
        /// The program's name in the object.
        program: &'static str,
        /// The device, as named by the caller.
        device: String,
        /// The error of the kernel or the loader.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Another program is on the port.
    #[error("cannot attach to {port}: {holder} is already attached to it; {remedy}")]
    Occupied {
        /// The occupied port.
        port: PortName,
        /// The program found there: kind, name, number, as far as the kernel reports them.
        holder: String,
        /// What to do about a program of this kind.
        remedy: String,
    },
    /// The port is a device of a hub.
    #[error(
        "{port} is a device of an xdp-imds hub, which carries the frames of all guests, so it is not a port; name the \
         tap of one VM instead (`ip -brief link` lists them), and leave the programs on {port} where they are"
    )]
    HubDevice {
        /// The port.
        port: PortName,
    },
    /// No guest can be behind the port.
    #[error(
        "{port} is {kind}, behind which there is no guest; name the tap of one VM instead (`ip -brief link` lists them)"
    )]
    NoGuestDevice {
        /// The port.
        port: PortName,
        /// What it is.
        kind: &'static str,
    },
    /// A map operation failed.
    #[error("cannot {action} in map {map}: {}{}", Chain(.source.as_ref()), advise(.source.as_ref()))]
    Map {
        /// The map's name in the object.
        map: &'static str,
        /// The attempted action; completes "cannot".
        action: String,
        /// The error of the kernel or the loader.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel has no tcx links.
    #[error(
        "`steer: tcx` needs a kernel with tcx classifiers (CONFIG_NET_XGRESS), and {found}; set `steer: auto` or \
         `steer: xdp`"
    )]
    NoTcx {
        /// What the kernel answered.
        found: String,
    },
    /// The kernel lacks features that have no substitute.
    #[error("the kernel lacks {what}; boot one with {comes_with} (`xdp-imds doctor` lists each feature)")]
    Lacks {
        /// The missing features.
        what: String,
        /// Build options or versions that provide them.
        comes_with: String,
    },
    /// The classifier cannot reach the hub from the namespace of the port.
    #[error(
        "cannot steer {port} with tcx: from another network namespace this needs a ring, which this kernel did not \
         provide (see the log); set `steer: auto`, which keeps XDP for such ports, or `steer: xdp`"
    )]
    TcxElsewhere {
        /// The port that needs the ring.
        port: PortName,
    },
    /// The port's device does not exist, or is not the device that was attached.
    #[error("expected a device {port}, found {found}; it is attached once the device exists")]
    PortGone {
        /// The attached port.
        port: PortName,
        /// What was found instead.
        found: String,
    },
    /// One device is named in two ways.
    #[error("{port} is the same device as {other}, which is already attached; use one name only")]
    SamePort {
        /// The new name of the port.
        port: PortName,
        /// The name under which it is attached.
        other: PortName,
    },
    /// The port is not attached.
    #[error("{port} is not attached; attach it before binding a guest to it")]
    NotAttached {
        /// The missing port.
        port: PortName,
    },
    /// Zero receive queues, or too many.
    #[error("expected 1 to {HUB_QUEUES} receive queues of a hub, found {found}")]
    Queues {
        /// The requested number.
        found: u32,
    },
    /// Zero hubs, or too many.
    #[error("expected 1 to {HUBS_OF_A_SIDE} hubs, found {found}; `workers` sets the number")]
    Hubs {
        /// The requested number.
        found: u32,
    },
    /// The slot number exceeds the tables.
    #[error("expected a slot below {MAX_SLOTS}, found {slot}; this node is full")]
    Slot {
        /// The requested slot.
        slot: Slot,
    },
    /// A group address cannot identify a guest.
    #[error("expected a guest's own MAC address, found the group address {mac}; correct the VM's record")]
    GroupMac {
        /// The group address.
        mac: metadata_common::mac::Mac,
    },
    /// The table of ports is full.
    #[error("{MAX_PORTS} ports are attached, the most that one node can own")]
    TooManyPorts,
}

impl SteerError {
    /// True if the device went away while a program was attached to it.
    #[must_use]
    pub fn is_device_gone(&self) -> bool {
        let gone = [Some(libc::ENODEV), Some(libc::ENXIO)];
        matches!(self, Self::Attach { source, .. } if gone.contains(&errno(source.as_ref())))
    }

    pub(super) fn device(action: impl Into<String>, source: io::Error) -> Self {
        Self::Link(LinkError::device(action, source))
    }

    pub(super) fn load(
        part: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Load { part: part.into(), source: source.into() }
    }

    pub(super) fn map(
        map: &'static str,
        action: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Map { map, action: action.into(), source: source.into() }
    }
}

/// Formats an error and its causes on one line, each text once. The loader's errors hold the errno two levels deep.
pub(super) struct Chain<'a>(pub(super) &'a (dyn std::error::Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.0.to_string();
        let mut next = self.0.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if !shown.contains(&text) {
                shown = format!("{shown}: {text}");
            }
            next = cause.source();
        }
        f.write_str(&shown)
    }
}

/// The errno anywhere in a chain of causes.
pub(super) fn errno(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut next = Some(error);
    while let Some(cause) = next {
        let found = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::raw_os_error)
            // aya's netlink error hides its cause but exposes the errno.
            .or_else(|| cause.downcast_ref::<aya::sys::NetlinkError>()?.raw_os_error());
        if found.is_some() {
            return found;
        }
        next = cause.source();
    }
    None
}

fn advise(error: &(dyn std::error::Error + 'static)) -> &'static str {
    errno(error).map_or("", |errno| advice(&io::Error::from_raw_os_error(errno)))
}

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

#[cfg(test)]
mod tests {
    use super::{SteerError, errno};
    use std::io;

    #[test]
    fn a_device_that_went_away_is_no_other_failure_to_attach() {
        for (errno, is_gone) in [(libc::ENODEV, true), (libc::ENXIO, true), (libc::EPERM, false)] {
            let source = Box::new(io::Error::from_raw_os_error(errno));
            let error = SteerError::Attach { program: "port", device: "vnet0".into(), source };
            assert_eq!(error.is_device_gone(), is_gone, "{error}");
        }
        assert!(!SteerError::TooManyPorts.is_device_gone());
    }

    #[test]
    fn the_errno_is_found_below_other_errors() {
        let cause = aya::sys::SyscallError {
            call: "bpf_link_create",
            io_error: io::Error::from_raw_os_error(libc::EBUSY),
        };
        let error = aya::programs::ProgramError::SyscallError(cause);
        assert_eq!(errno(&error), Some(libc::EBUSY));
        let error = SteerError::load("object", error);
        assert!(error.to_string().contains("bpf_link_create"), "{error}");
        assert_eq!(error.to_string().matches("os error 16").count(), 1, "{error}");
    }
}
