//! One XDP program onto one device, with the driver's help if it gives any.

use aya::programs::links::FdLink;
use aya::programs::{Xdp, XdpMode, loaded_programs};

use super::SteerError;
use super::error::errno;
use metadata_base::port::PortName;
use metadata_links::netlink;

/// Why a program did not go on a device.
pub(super) enum Refusal {
    /// Another program is there.
    Occupied,
    /// The link that was to be replaced has lost its device, or is not there.
    Gone,
    /// Anything else.
    Error(Box<dyn std::error::Error + Send + Sync>),
}

impl Refusal {
    pub(super) fn of(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let error = error.into();
        match errno(error.as_ref()) {
            // A link is there (EBUSY), or a program without a link, or one in the other mode (EEXIST).
            Some(libc::EBUSY | libc::EEXIST) => Self::Occupied,
            // What is replaced has no device any more (ENOLINK), or no pin.
            Some(libc::ENOLINK | libc::ENOENT) => Self::Gone,
            _ => Self::Error(error),
        }
    }
}

/// Attaches natively. The link detaches when it is dropped, and when this process dies, unless it is pinned.
pub(super) fn native(program: &mut Xdp, ifindex: u32) -> Result<FdLink, Refusal> {
    attach(program, ifindex, XdpMode::Driver)
}

/// Attaches natively, as every tap can, or generically where the driver cannot (a veth with an MTU above
/// one page).
pub(super) fn native_or_generic(program: &mut Xdp, ifindex: u32, port: &PortName) -> Result<FdLink, Refusal> {
    match native(program, ifindex) {
        Err(Refusal::Error(error)) if driver_cannot(error.as_ref()) => {
            let link = attach(program, ifindex, XdpMode::Skb)?;
            tracing::warn!(
                %port, %error,
                "the device's driver runs no XDP: steering generically, at more cost a frame; answers arrive \
                 only if the driver takes redirected frames or a classifier reaches it"
            );
            Ok(link)
        }
        other => other,
    }
}

fn attach(program: &mut Xdp, ifindex: u32, mode: XdpMode) -> Result<FdLink, Refusal> {
    let link = program.attach_to_if_index(ifindex, mode).and_then(|id| program.take_link(id));
    FdLink::try_from(link.map_err(Refusal::of)?).map_err(Refusal::of)
}

/// Errors by which drivers say no to native XDP.
fn driver_cannot(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(errno(error), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE | libc::E2BIG))
}

impl Refusal {
    /// As an error about a port of the calling thread's namespace.
    pub(super) fn about(self, program: &'static str, port: &PortName, ifindex: u32) -> SteerError {
        match self {
            Self::Occupied => {
                SteerError::Occupied { port: port.clone(), holder: holder(&port.ifname, ifindex) }
            }
            Self::Gone => SteerError::PortGone { port: port.clone(), found: "another device or none".into() },
            Self::Error(source) => SteerError::Attach { program, device: port.to_string(), source },
        }
    }
}

/// The programs on a device, as a person would look for them.
fn holder(ifname: &str, ifindex: u32) -> String {
    let ids = netlink::xdp_programs(ifname, ifindex).unwrap_or_default();
    let described = ids.iter().map(|id| {
        let info = loaded_programs().flatten().find(|info| info.id() == *id);
        match info.as_ref().and_then(|info| info.name_as_str()) {
            Some(name) if !name.is_empty() => format!("`{name}` (number {id})"),
            _ => format!("number {id}"),
        }
    });
    match described.collect::<Vec<_>>().join(" and ") {
        none if none.is_empty() => "another XDP program".into(),
        some => format!("XDP program {some}"),
    }
}
