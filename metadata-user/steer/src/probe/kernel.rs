//! Tests the features of the kernel by using them.
#![expect(unsafe_code, reason = "a thread leaves its namespace by unshare(2), which has no safe form")]

use aya::Ebpf;
use aya::maps::MapType;
use aya::programs::links::FdLink;
use aya::programs::xdp::XdpLink;
use aya::programs::{ProgramError, ProgramType, SchedClassifier, Xdp, XdpMode};
use aya::sys::{SyscallError, is_map_supported, is_program_supported};
use metadata_common::cookie::Key;
use metadata_common::maps::program;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use super::super::loading;
use super::super::object::Object;
use super::super::{SteerConfig, SteerError, Steering, mode};
use super::Failure;
use metadata_base::port::PortName;
use metadata_datapath::afxdp::{Socket, SocketConfig};
use metadata_links::netns;
use metadata_links::tun;

/// Oldest supported kernel: major and minor number.
pub const KERNEL: (u32, u32) = (5, 15);
/// The first kernel with tcx links (e420bed02507).
pub const TCX_KERNEL: (u32, u32) = (6, 6);

/// The loopback device, which exists in every new network namespace.
const LOOPBACK: u32 = 1;

/// A feature of the kernel, tested by using it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// bpf(2) itself.
    Bpf,
    /// XDP programs.
    Xdp,
    /// Device maps by hash, through which answers reach their tap.
    DeviceMap,
    /// Maps of AF_XDP sockets.
    SocketMap,
    /// AF_XDP sockets.
    Socket,
    /// Ring buffers, through which the eBPF programs report.
    RingBuffer,
    /// The kernel's own type information (BTF).
    Btf,
    /// XDP programs attached through a descriptor (`bpf_link`).
    Link,
    /// Atomic replacement of an attached program.
    LinkUpdate,
    /// Classifiers attached through `bpf_link`.
    Tcx,
}

impl Feature {
    /// Each feature once, after the features it depends on.
    pub const ALL: [Self; 10] = [
        Self::Bpf,
        Self::Xdp,
        Self::DeviceMap,
        Self::SocketMap,
        Self::Socket,
        Self::RingBuffer,
        Self::Btf,
        Self::Link,
        Self::LinkUpdate,
        Self::Tcx,
    ];
}

/// Whether the kernel has each feature: `Ok(false)` if it lacks it, an error if the test was inconclusive.
#[must_use]
pub fn features() -> Vec<(Feature, Result<bool, Failure>)> {
    let staged = alone(|| Ok(links()));
    let staged = |feature| match &staged {
        Ok(found) => found.iter().find(|(of, _)| *of == feature).map_or(Ok(false), |(_, had)| had.clone()),
        Err(failure) => Err(failure.clone()),
    };
    let probe = |feature| match feature {
        Feature::Bpf => map(MapType::Array),
        Feature::Xdp => is_program_supported(ProgramType::Xdp).map_err(|error| Failure::of(&error)),
        Feature::DeviceMap => map(MapType::DevMapHash),
        Feature::SocketMap => map(MapType::XskMap),
        Feature::Socket => {
            known(socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None))
        }
        Feature::RingBuffer => map(MapType::RingBuf),
        Feature::Btf => Ok(Path::new("/sys/kernel/btf/vmlinux").exists()),
        Feature::Link | Feature::LinkUpdate | Feature::Tcx => staged(feature),
    };
    Feature::ALL.map(|feature| (feature, probe(feature))).into()
}

fn map(kind: MapType) -> Result<bool, Failure> {
    is_map_supported(kind).map_err(|error: SyscallError| match error.io_error.raw_os_error() {
        Some(libc::ENOSYS) => Failure::new("the kernel has no bpf(2)"),
        _ => Failure::of(&error),
    })
}

fn known<T>(made: rustix::io::Result<T>) -> Result<bool, Failure> {
    match made {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::AFNOSUPPORT | rustix::io::Errno::PROTONOSUPPORT) => Ok(false),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}

/// The features that need a device: a loopback of a private namespace.
fn links() -> Vec<(Feature, Result<bool, Failure>)> {
    let mut found = Vec::new();
    let mut ebpf = match netns::cookie()
        .map_err(SteerError::from)
        .and_then(|home| Object::load(Key([0; 2]), 0, home, None, false))
    {
        Ok((_, ebpf)) => ebpf,
        Err(error) => {
            let failure = Failure::from(error);
            return [Feature::Link, Feature::LinkUpdate, Feature::Tcx]
                .map(|of| (of, Err(failure.clone())))
                .into();
        }
    };
    match first(&mut ebpf) {
        Ok(link) => {
            found.push((Feature::Link, Ok(true)));
            found.push((Feature::LinkUpdate, second(&mut ebpf, link)));
        }
        Err(failure) => found.push((Feature::Link, failure.map_or(Ok(false), Err))),
    }
    found.push((Feature::Tcx, classifier(&mut ebpf)));
    found
}

/// Attaches a program to the loopback through `bpf_link`; `None` if it was attached in another way.
fn first(ebpf: &mut Ebpf) -> Result<FdLink, Option<Failure>> {
    let program = loading::load_program(ebpf, program::SOCKET).map_err(|error| Some(error.into()))?;
    let put = |program: &mut Xdp| -> Result<XdpLink, ProgramError> {
        let id = program.attach_to_if_index(LOOPBACK, XdpMode::Skb)?;
        program.take_link(id)
    };
    let link = put(program).map_err(|error| Some(Failure::of(&error)))?;
    link.try_into().map_err(|_| None)
}

fn second(ebpf: &mut Ebpf, link: FdLink) -> Result<bool, Failure> {
    let program = loading::load_program(ebpf, program::HUB).map_err(Failure::from)?;
    let link = XdpLink::try_from(link).map_err(|error| Failure::of(&error))?;
    program.attach_to_link(link).map_err(|error| Failure::of(&error))?;
    Ok(true)
}

fn classifier(ebpf: &mut Ebpf) -> Result<bool, Failure> {
    if !mode::has_tcx() {
        return Ok(false);
    }
    let absent = || Failure::new("the object has no classifier");
    let program: &mut SchedClassifier =
        ebpf.program_mut(program::PORT_TCX).ok_or_else(absent)?.try_into().map_err(|_| absent())?;
    loading::uninterrupted(|| program.load()).map_err(|error| Failure::of(&error))?;
    mode::attach_tcx(program, program::PORT_TCX, &PortName::local("lo"))?;
    Ok(true)
}

/// Runs the first steps of serving in a private network namespace: makes the hub and its sockets, and attaches a tap.
/// Takes about as long as a start.
///
/// # Errors
/// The first failing step, with the error of the kernel.
pub fn rehearse(config: &SteerConfig) -> Result<(), Failure> {
    let tap = "rehearsal";
    alone(|| {
        let mut steering = Steering::start(config)?;
        let hubs = steering.hubs().to_vec();
        let mut sockets = Vec::new();
        for hub in &hubs {
            let socket = Socket::bind(hub.inner_ifindex, 0, &SocketConfig::default())
                .map_err(|error| Failure::of(&error))?;
            steering.register_socket(hub.number, 0, socket.as_fd())?;
            sockets.push(socket);
        }
        let _guest = tun::create(tap, tun::Preamble::None)?;
        steering.attach(&PortName::local(tap))?;
        Ok(())
    })
}

/// Runs `visit` on a thread in a new network namespace that ends with the thread.
fn alone<T: Send>(visit: impl FnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
    let inside = || {
        // SAFETY: unsharing the network namespace touches no file descriptor table, which is what the function is
        // unsafe for; it moves this thread alone, which ends below.
        let left = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
        left.map_err(|errno| {
            let error = io::Error::from(errno);
            let text = format!("cannot make a network namespace for the test: {error}");
            Failure { text, ..error.into() }
        })?;
        visit()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("probe".into()).spawn_scoped(scope, inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
