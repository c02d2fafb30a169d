//! Attaches each kind of program to a tap in turn, to compare their cost.

use crate::empty_classifier;
use crate::netns::Namespace;
use crate::prog_test::{SharedMaps, object};
use anyhow::{Context as _, Result};
use aya::maps::{Array, HashMap, ProgramArray};
use aya::programs::links::FdLink;
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use metadata_common::maps::{IN_FRONT, Port, PortKey, SERVED, name, program};
use std::net::Ipv4Addr;

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
            let _empty =
                (variant == Variant::Empty).then(|| empty_classifier::attach(*ifindex)).transpose()?;
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
