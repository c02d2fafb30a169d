//! Attaches an XDP program to a device, in native mode where the driver supports it.

use aya::programs::links::FdLink;
use aya::programs::{Xdp, XdpMode, loaded_programs};
use metadata_common::maps::program;
use rtnetlink::packet_route::link::LinkLayerType;

use super::SteerError;
use super::error::errno;
use metadata_common::port::PortName;
use metadata_links::netlink;

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
        // Whoever takes these programs off ends the service.
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
            "a device carries one XDP program: stop its owner, take it off with `ip link set dev {} xdp off` (`bpftool net` \
             shows it), or set `steer: tcx` to keep it",
            port.ifname
        )
    };
    SteerError::Occupied { port: port.clone(), holder, remedy }
}

/// What to do about a program of another agent.
pub(super) const OTHER_AGENT: &str =
    "stop that xdp-imds, or, if it has ended, remove its pins by `xdp-imds release`";

/// Fails for a device behind which no guest can be.
pub(super) fn check_device(port: &PortName, ifindex: u32) -> Result<(), SteerError> {
    let kind = match netlink::look(&port.ifname, ifindex)?.header.link_layer_type {
        LinkLayerType::Loopback => "the loopback interface",
        LinkLayerType::Ether => return Ok(()),
        _ => "a device without Ethernet frames",
    };
    Err(SteerError::NoGuestDevice { port: port.clone(), kind })
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
