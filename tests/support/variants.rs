//! The programs that can stand between a tap and the host, put on and taken off one tap, to compare what they
//! cost.

use crate::netns::Namespace;
use crate::prog_test::PREBUILT;
use anyhow::{Context as _, Result};
use aya::maps::{Array, HashMap};
use aya::programs::links::FdLink;
use aya::programs::tc::TcAttachOptions;
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use metadata_common::maps::{Port, PortKey, SERVED, name, program};
use std::net::Ipv4Addr;

/// What stands between a tap and the host's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Nothing.
    None,
    /// The XDP program, run by the tap's driver.
    Native,
    /// The XDP program, run by the network stack.
    Generic,
    /// The classifier.
    Tcx,
}

impl Variant {
    /// Each of them, nothing first.
    pub const ALL: [Self; 4] = [Self::None, Self::Native, Self::Generic, Self::Tcx];

    /// One or two words for a table.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "no program",
            Self::Native => "XDP native",
            Self::Generic => "XDP generic",
            Self::Tcx => "tcx",
        }
    }
}

/// The programs for one tap, loaded, serving 169.254.169.254 there.
pub struct Variants<'n> {
    ns: &'n Namespace,
    ifname: String,
    ifindex: u32,
    ebpf: Ebpf,
}

impl<'n> Variants<'n> {
    /// Loads the committed object for a tap of `ns`, with the tap as a registered port.
    ///
    /// # Errors
    /// When there is no such tap, or the kernel refuses the object.
    pub fn load(ns: &'n Namespace, ifname: &str) -> Result<Self> {
        const NETNS: u32 = 1;
        let object = std::fs::read(PREBUILT).with_context(|| format!("no object at {PREBUILT}"))?;
        let mut ebpf = EbpfLoader::new().override_global(name::NETNS, &NETNS, true).load(&object)?;
        xdp(&mut ebpf)?.load()?;
        classifier(&mut ebpf)?.load()?;
        let shown: serde_json::Value = serde_json::from_str(&ns.ip(&format!("-j link show dev {ifname}"))?)?;
        let ifindex = shown[0]["ifindex"].as_u64().context("`ip -j link` tells no ifindex")?.try_into()?;
        let served = ebpf.map_mut(name::SERVED_V4).context(name::SERVED_V4)?;
        HashMap::<_, [u8; 4], u32>::try_from(served)?.insert(
            Ipv4Addr::new(169, 254, 169, 254).octets(),
            SERVED,
            0,
        )?;
        let last = ebpf.map_mut(name::LAST_OCTETS).context(name::LAST_OCTETS)?;
        Array::<_, u32>::try_from(last)?.set(254, SERVED, 0)?;
        let ports = ebpf.map_mut(name::PORTS).context(name::PORTS)?;
        HashMap::<_, [u8; 8], [u8; 72]>::try_from(ports)?.insert(
            PortKey { netns: NETNS, ifindex }.to_bytes(),
            Port::with_limit(10_000, 2_048).to_bytes(),
            0,
        )?;
        Ok(Self { ns, ifname: ifname.to_owned(), ifindex, ebpf })
    }

    /// Runs `f` with a variant on the tap; it is off again afterwards.
    ///
    /// # Errors
    /// When the kernel refuses to attach it (tcx: Linux 6.6 or later is needed), or `f` fails.
    pub fn with<T: Send>(&mut self, variant: Variant, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let Self { ns, ifname, ifindex, ebpf } = self;
        ns.run_in(|| {
            let _link: Option<FdLink> = match variant {
                Variant::None => None,
                Variant::Native => Some(attach_xdp(ebpf, *ifindex, XdpMode::Driver)?),
                Variant::Generic => Some(attach_xdp(ebpf, *ifindex, XdpMode::Skb)?),
                Variant::Tcx => Some(attach_tcx(ebpf, ifname)?),
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

fn attach_tcx(ebpf: &mut Ebpf, ifname: &str) -> Result<FdLink> {
    let program = classifier(ebpf)?;
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(ifname, TcAttachType::Ingress, options)?;
    Ok(program.take_link(id)?.try_into()?)
}

fn xdp(ebpf: &mut Ebpf) -> Result<&mut Xdp> {
    Ok(ebpf.program_mut(program::PORT).context(program::PORT)?.try_into()?)
}

fn classifier(ebpf: &mut Ebpf) -> Result<&mut SchedClassifier> {
    Ok(ebpf.program_mut(program::PORT_TCX).context(program::PORT_TCX)?.try_into()?)
}
