//! Attaches each kind of program to a tap in turn, to compare their cost.
#![expect(
    unsafe_code,
    reason = "aya loads programs from ELF objects only, and this one has two instructions"
)]

use anyhow::{Context as _, Result};
use aya::maps::{Array, HashMap, ProgramArray};
use aya::programs::links::FdLink;
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_prog_type};
use metadata_common::maps::{IN_FRONT, Port, PortKey, SERVED, name, program};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use crate::netns::Namespace;
use crate::prog_test::{SharedMaps, object};

/// The number of the tap's namespace.
const NETNS: u32 = 1;

/// The program on a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// No program.
    None,
    /// An empty classifier, which shows the kernel's cost of a call.
    Empty,
    /// The XDP program in the tap's driver (native).
    Native,
    /// The XDP program in the network stack (generic).
    Generic,
    /// The classifier.
    Tcx,
    /// A stub and the classifier behind it, as in a namespace other than the agent's.
    TcxInPod,
}

impl Variant {
    /// All variants. The first has no program.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Empty, Self::Native, Self::Generic, Self::Tcx, Self::TcxInPod];

    /// A short name for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "no program",
            Self::Empty => "empty tcx",
            Self::Native => "XDP native",
            Self::Generic => "XDP generic",
            Self::Tcx => "tcx",
            Self::TcxInPod => "tcx in a pod",
        }
    }
}

/// The loaded programs for one tap, which serve 169.254.169.254.
pub struct Variants<'n> {
    ns: &'n Namespace,
    ifname: String,
    ifindex: u32,
    ebpf: Ebpf,
    stub: Ebpf,
    /// Keeps the program behind the stub loaded.
    _behind: Ebpf,
}

impl<'n> Variants<'n> {
    /// Loads the committed object for a tap of `ns`, with the tap as a registered port.
    ///
    /// # Errors
    /// When there is no such tap, or the kernel refuses the object.
    pub fn load(ns: &'n Namespace, ifname: &str) -> Result<Self> {
        let mut ebpf =
            EbpfLoader::new().override_global(name::NETNS, &NETNS, true).load(&object("xdp-imds")?)?;
        xdp(&mut ebpf)?.load()?;
        classifier(&mut ebpf, program::PORT_TCX)?.load()?;
        let shared = SharedMaps::new()?;
        let mut behind =
            shared.loader().override_global(name::NETNS, &IN_FRONT, true).load(&object("xdp-imds")?)?;
        let mut stub =
            shared.loader().override_global(name::NETNS, &NETNS, true).load(&object("port-stub")?)?;
        classifier(&mut stub, program::PORT_TCX_STUB)?.load()?;
        let port = classifier(&mut behind, program::PORT_TCX)?;
        port.load()?;
        let entry = stub.map_mut(name::PORT_CLASSIFIERS).context(name::PORT_CLASSIFIERS)?;
        ProgramArray::try_from(entry)?.set(0, port.fd()?, 0)?;
        let shown: serde_json::Value = serde_json::from_str(&ns.ip(&format!("-j link show dev {ifname}"))?)?;
        let ifindex = shown[0]["ifindex"].as_u64().context("`ip -j link` shows no ifindex")?.try_into()?;
        for ebpf in [&mut ebpf, &mut behind] {
            serve(ebpf, ifindex)?;
        }
        Ok(Self { ns, ifname: ifname.to_owned(), ifindex, ebpf, stub, _behind: behind })
    }

    /// Runs `f` with a variant attached to the tap, and detaches it afterwards.
    ///
    /// # Errors
    /// When the kernel refuses to attach it (it may lack tcx), or `f` fails.
    pub fn with<T: Send>(&mut self, variant: Variant, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let Self { ns, ifname, ifindex, ebpf, stub, .. } = self;
        ns.run_in(|| {
            let _empty = (variant == Variant::Empty).then(|| attach_empty(*ifindex)).transpose()?;
            let _link: Option<FdLink> = match variant {
                Variant::None | Variant::Empty => None,
                Variant::Native => Some(attach_xdp(ebpf, *ifindex, XdpMode::Driver)?),
                Variant::Generic => Some(attach_xdp(ebpf, *ifindex, XdpMode::Skb)?),
                Variant::Tcx => Some(attach_tcx(ebpf, program::PORT_TCX, ifname)?),
                Variant::TcxInPod => Some(attach_tcx(stub, program::PORT_TCX_STUB, ifname)?),
            };
            f()
        })
    }
}

fn attach_xdp(ebpf: &mut Ebpf, ifindex: u32, mode: XdpMode) -> Result<FdLink> {
    let program = xdp(ebpf)?;
    let id = program.attach_to_if_index(ifindex, mode)?;
    Ok(program.take_link(id)?.try_into()?)
}

/// Serves 169.254.169.254 on the port.
fn serve(ebpf: &mut Ebpf, ifindex: u32) -> Result<()> {
    let served = ebpf.map_mut(name::SERVED_V4).context(name::SERVED_V4)?;
    HashMap::<_, [u8; 4], u32>::try_from(served)?.insert(
        Ipv4Addr::new(169, 254, 169, 254).octets(),
        SERVED,
        0,
    )?;
    let ordinary = ebpf.map_mut(name::ORDINARY).context(name::ORDINARY)?;
    let mut bytes = [1; 256];
    bytes[254] = 0;
    Array::<_, [u8; 256]>::try_from(ordinary)?.set(0, bytes, 0)?;
    let ports = ebpf.map_mut(name::PORTS).context(name::PORTS)?;
    HashMap::<_, [u8; 8], [u8; 72]>::try_from(ports)?.insert(
        PortKey { netns: NETNS, ifindex }.to_bytes(),
        Port::with_limit(10_000, 2_048).to_bytes(),
        0,
    )?;
    Ok(())
}

fn attach_tcx(ebpf: &mut Ebpf, name: &str, ifname: &str) -> Result<FdLink> {
    let program = classifier(ebpf, name)?;
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(ifname, TcAttachType::Ingress, options)?;
    Ok(program.take_link(id)?.try_into()?)
}

fn xdp(ebpf: &mut Ebpf) -> Result<&mut Xdp> {
    Ok(ebpf.program_mut(program::PORT).context(program::PORT)?.try_into()?)
}

fn classifier<'e>(ebpf: &'e mut Ebpf, name: &str) -> Result<&'e mut SchedClassifier> {
    Ok(ebpf.program_mut(name).with_context(|| name.to_owned())?.try_into()?)
}

// An empty tcx classifier, to measure the minimum cost of a program on a tap.

/// `r0 = TC_ACT_UNSPEC` (continue with the next classifier), then `exit` (RFC 9669 §4).
const INSTRUCTIONS: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];

/// Attaches the classifier to an interface of this thread's namespace until the returned link is dropped.
///
/// # Errors
/// When there is no such interface, or the kernel has no tcx classifiers.
pub fn attach_empty(ifindex: u32) -> Result<OwnedFd> {
    let licence = c"GPL";
    // `prog_type` and `insn_cnt`, `insns`, `license` of the kernel's `union bpf_attr`.
    let kind = bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS as u64;
    let count = (INSTRUCTIONS.len() as u64) << 32;
    let mut load = [kind | count, INSTRUCTIONS.as_ptr() as u64, licence.as_ptr() as u64];
    let program = bpf(bpf_cmd::BPF_PROG_LOAD, &mut load).context("cannot load an empty classifier")?;
    // `prog_fd` and `target_ifindex`, `attach_type` and `flags`.
    let place = program.as_raw_fd() as u64 | u64::from(ifindex) << 32;
    let mut create = [place, bpf_attach_type::BPF_TCX_INGRESS as u64];
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut create).context("cannot attach an empty classifier")
}

/// A command that returns a descriptor.
fn bpf(command: bpf_cmd, attributes: &mut [u64]) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads these bytes and the memory they point to, which outlives the call. It keeps no pointer.
    let returned = unsafe {
        libc::syscall(libc::SYS_bpf, command as u32, attributes.as_mut_ptr(), size_of_val(attributes))
    };
    let descriptor =
        i32::try_from(returned).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just made this descriptor for the caller, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
