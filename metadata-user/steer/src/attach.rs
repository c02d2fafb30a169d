//! Attaches an XDP program to a device, in native mode where the driver supports it.

use aya::programs::links::FdLink;
use aya::programs::{Xdp, XdpMode, loaded_programs};

use super::SteerError;
use super::error::errno;
use metadata_base::port::PortName;
use metadata_links::netlink;

/// Why a program could not be attached.
pub(super) enum Refusal {
    /// Another program is attached.
    Occupied,
    /// The link to be replaced has lost its device, or does not exist.
    Gone,
    /// Any other failure.
    Error(Box<dyn std::error::Error + Send + Sync>),
}

impl Refusal {
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
pub(super) fn native(program: &mut Xdp, ifindex: u32) -> Result<FdLink, Refusal> {
    attach(program, ifindex, XdpMode::Driver)
}

/// Attaches in native mode, which every tap supports, or in generic mode where the driver refuses (a veth with an MTU
/// above one page).
pub(super) fn native_or_generic(program: &mut Xdp, ifindex: u32, port: &PortName) -> Result<FdLink, Refusal> {
    match native(program, ifindex) {
        Err(Refusal::Error(error)) if driver_cannot(error.as_ref()) => {
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

fn attach(program: &mut Xdp, ifindex: u32, mode: XdpMode) -> Result<FdLink, Refusal> {
    let link = program.attach_to_if_index(ifindex, mode).and_then(|id| program.take_link(id));
    FdLink::try_from(link.map_err(Refusal::of)?).map_err(Refusal::of)
}

/// Errors by which drivers refuse native XDP.
fn driver_cannot(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(errno(error), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE | libc::E2BIG))
}

impl Refusal {
    /// Converts to an error about a port of the calling thread's namespace.
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

/// Describes the programs on a device for an error text.
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
