//! Tests the features of the kernel that need a device, and a whole start, in a network namespace of their own.
#![expect(unsafe_code, reason = "a thread leaves its namespace by unshare(2), which has no safe form")]

use aya::Ebpf;
use aya::programs::links::FdLink;
use aya::programs::xdp::XdpLink;
use aya::programs::{ProgramError, Xdp, XdpMode};
use metadata_common::cookie::CookieKey;
use metadata_common::maps::program;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io;
use std::os::fd::AsFd as _;

use super::super::failure::ProbeError;
use super::super::features::{Feature, ProbeResult};
use super::super::loading;
use super::super::object::Object;
use super::super::{SteerConfig, Steering};
use metadata_common::port::PortName;
use metadata_datapath::afxdp::{Socket, SocketConfig};
use metadata_links::netns;
use metadata_links::tun;

/// The interface index of the loopback, which exists in every new network namespace.
const LOOPBACK_INDEX: u32 = 1;

/// Whether the kernel has each feature. It attaches programs in a network namespace of its own.
#[must_use]
pub fn features() -> Vec<(Feature, ProbeResult)> {
    let staged = alone(|| Ok(links()));
    let staged = |feature| match &staged {
        Ok(found) => found.iter().find(|(of, _)| *of == feature).map_or(Ok(false), |(_, had)| had.clone()),
        Err(failure) => Err(failure.clone()),
    };
    Feature::ALL.map(|feature| (feature, feature.ask().unwrap_or_else(|| staged(feature)))).into()
}

/// The features that need a device: a loopback of a private namespace.
fn links() -> Vec<(Feature, ProbeResult)> {
    let mut found = Vec::new();
    // The programs attached here do not read the namespace's cookie, which an old kernel does not have.
    let home = netns::cookie().unwrap_or(netns::Cookie::from_number(0));
    let mut ebpf = match Object::load(CookieKey([0; 2]), 0, home, None, false) {
        Ok((_, ebpf)) => ebpf,
        Err(error) => {
            let failure = ProbeError::from(error);
            return [Feature::Link, Feature::LinkUpdate].map(|of| (of, Err(failure.clone()))).into();
        }
    };
    match first(&mut ebpf) {
        Ok(link) => {
            found.push((Feature::Link, Ok(true)));
            found.push((Feature::LinkUpdate, second(&mut ebpf, link)));
        }
        Err(failure) => found.push((Feature::Link, failure.map_or(Ok(false), Err))),
    }
    found
}

/// Attaches a program to the loopback through `bpf_link`; `None` if it was attached in another way.
fn first(ebpf: &mut Ebpf) -> Result<FdLink, Option<ProbeError>> {
    let program = loading::load_program(ebpf, program::SOCKET).map_err(|error| Some(error.into()))?;
    let put = |program: &mut Xdp| -> Result<XdpLink, ProgramError> {
        let id = program.attach_to_if_index(LOOPBACK_INDEX, XdpMode::Skb)?;
        program.take_link(id)
    };
    let link = put(program).map_err(|error| Some(ProbeError::of(&error)))?;
    link.try_into().map_err(|_| None)
}

fn second(ebpf: &mut Ebpf, link: FdLink) -> ProbeResult {
    let program = loading::load_program(ebpf, program::HUB).map_err(ProbeError::from)?;
    let link = XdpLink::try_from(link).map_err(|error| ProbeError::of(&error))?;
    program.attach_to_link(link).map_err(|error| ProbeError::of(&error))?;
    Ok(true)
}

/// Runs the first steps of serving in a private network namespace: makes the hub and its sockets, and attaches a tap.
/// Takes about as long as a start.
///
/// # Errors
/// The first failing step, with the error of the kernel.
pub fn rehearse(config: &SteerConfig) -> Result<(), ProbeError> {
    let tap = "rehearsal";
    alone(|| {
        let mut steering = Steering::start(config)?;
        let hubs = steering.hubs().to_vec();
        let mut sockets = Vec::new();
        for hub in &hubs {
            let socket = Socket::bind(hub.inner_ifindex, 0, &SocketConfig::default())
                .map_err(|error| ProbeError::of(&error))?;
            steering.register_socket(hub.number, 0, socket.as_fd())?;
            sockets.push(socket);
        }
        let _guest = tun::create(tap, tun::Preamble::None)?;
        steering.attach(&PortName::local(tap))?;
        Ok(())
    })
}

/// Runs `visit` on a thread in a new network namespace that ends with the thread.
fn alone<T: Send>(visit: impl FnOnce() -> Result<T, ProbeError> + Send) -> Result<T, ProbeError> {
    let inside = || {
        // SAFETY: unsharing the network namespace touches no file descriptor table, which is what the function is
        // unsafe for; it moves this thread alone, which ends below.
        let left = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
        left.map_err(|errno| {
            let error = io::Error::from(errno);
            let text = format!("cannot make a network namespace for the test: {error}");
            ProbeError { text, ..error.into() }
        })?;
        visit()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("probe".into()).spawn_scoped(scope, inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
