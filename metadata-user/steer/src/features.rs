//! Asks the kernel for its features by using each one.
//!
//! No version number decides: a vendor's kernel may have features of later versions, and may lack some of its own. The
//! probes here create nothing that outlives the call, need no device of their own, and take well under a millisecond
//! together. [`Steering::start`](super::Steering::start) runs them once. Doctor also attaches programs, in
//! its own network namespace (`probe`).

use aya::maps::MapType;
use aya::programs::{ProgramError, ProgramType, SchedClassifier, TcAttachType};
use aya::sys::{BpfHelper, SyscallError, is_helper_supported, is_map_supported, is_program_supported};
use metadata_links::netns;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::path::Path;

use super::{SteerError, devices};
use crate::error::ProbeError;

/// The loopback device, which every network namespace has.
pub(super) const LOOPBACK: &str = "lo";

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
    /// Cookies of network namespaces.
    NetnsCookie,
    /// The kernel's own type information (BTF).
    Btf,
    /// Reports on which devices accept redirected frames.
    DeviceReports,
    /// Classifiers attached through `bpf_link`.
    Tcx,
    /// XDP programs attached through a descriptor (`bpf_link`).
    Link,
    /// Atomic replacement of an attached program.
    LinkUpdate,
}

/// Whether the kernel has a feature; an error if the test was inconclusive.
pub type ProbeResult = Result<bool, ProbeError>;

impl Feature {
    /// Each feature once, after the features it depends on.
    pub const ALL: [Self; 12] = [
        Self::Bpf,
        Self::Xdp,
        Self::DeviceMap,
        Self::SocketMap,
        Self::Socket,
        Self::RingBuffer,
        Self::NetnsCookie,
        Self::Btf,
        Self::DeviceReports,
        Self::Tcx,
        Self::Link,
        Self::LinkUpdate,
    ];

    /// Asks the kernel. `None` for features that need a device to attach to.
    pub(super) fn ask(self) -> Option<ProbeResult> {
        Some(match self {
            Self::Bpf => map(MapType::Array),
            Self::Xdp => is_program_supported(ProgramType::Xdp).map_err(|error| ProbeError::of(&error)),
            Self::DeviceMap => map(MapType::DevMapHash),
            Self::SocketMap => map(MapType::XskMap),
            Self::Socket => socket(),
            Self::RingBuffer => map(MapType::RingBuf),
            Self::NetnsCookie => cookie(),
            Self::Btf => Ok(Path::new("/sys/kernel/btf/vmlinux").exists()),
            Self::DeviceReports => Ok(devices::reports_takers()),
            Self::Tcx => tcx(),
            Self::Link | Self::LinkUpdate => return None,
        })
    }
}

fn map(kind: MapType) -> ProbeResult {
    is_map_supported(kind).map_err(|error: SyscallError| match error.io_error.raw_os_error() {
        Some(libc::ENOSYS) => ProbeError::new("the kernel has no bpf(2)"),
        _ => ProbeError::of(&error),
    })
}

fn socket() -> ProbeResult {
    match socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None) {
        Ok(_) => Ok(true),
        Err(Errno::AFNOSUPPORT | Errno::PROTONOSUPPORT) => Ok(false),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}

fn cookie() -> ProbeResult {
    match netns::cookie() {
        Ok(_) => Ok(true),
        Err(error) => match ProbeError::from(error) {
            ProbeError { errno: Some(libc::ENOPROTOOPT), .. } => Ok(false),
            failure => Err(failure),
        },
    }
}

/// Lists the classifiers of the loopback. The kernel has had this query for exactly as long as it attaches such
/// classifiers (e420bed02507, kernel/bpf/tcx.c), and one build option provides both.
fn tcx() -> ProbeResult {
    const QUERY: &str = "bpf_prog_query";
    match SchedClassifier::query_tcx(LOOPBACK, TcAttachType::Ingress) {
        Ok(_) => Ok(true),
        Err(ProgramError::SyscallError(SyscallError { call: QUERY, io_error }))
            if io_error.raw_os_error() == Some(libc::EINVAL) =>
        {
            Ok(false)
        }
        // The query itself succeeded: only the description of a classifier that another program put there is refused.
        Err(ProgramError::SyscallError(SyscallError { call, .. })) if call != QUERY => Ok(true),
        Err(error) => Err(ProbeError::of(&error)),
    }
}

/// What this kernel has, as asked at the start of steering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Features(Vec<(Feature, ProbeResult)>);

impl Features {
    /// Asks the kernel for each feature that needs no device.
    pub(super) fn ask() -> Self {
        Self(Feature::ALL.into_iter().filter_map(|feature| Some((feature, feature.ask()?))).collect())
    }

    /// Whether the kernel has a feature.
    pub(super) fn answer(&self, feature: Feature) -> ProbeResult {
        let found = self.0.iter().find(|(of, _)| *of == feature);
        found.map_or_else(|| Err(ProbeError::new("it was not tested")), |(_, answer)| answer.clone())
    }

    /// Fails if the kernel lacks a feature that steering cannot do without. An inconclusive test does not count: the
    /// use of the feature then shows the cause.
    pub(super) fn check(&self) -> Result<(), SteerError> {
        let lacks = |(feature, answer): &(Feature, ProbeResult)| {
            let words = feature.words();
            (*answer == Ok(false) && words.without.is_none()).then_some(words)
        };
        let missing: Vec<_> = self.0.iter().filter_map(lacks).collect();
        let list =
            |pick: fn(&FeatureText) -> &'static str| missing.iter().map(pick).collect::<Vec<_>>().join("; ");
        match missing.is_empty() {
            true => Ok(()),
            false => Err(SteerError::Lacks {
                what: list(|words| words.what),
                comes_with: list(|words| words.comes_with),
            }),
        }
    }
}

// The kernel's functions that the eBPF programs call (bpf-helpers(7)).

const BOTH: &[ProgramType] = &[ProgramType::Xdp, ProgramType::SchedClassifier];
const XDP: &[ProgramType] = &[ProgramType::Xdp];
const CLASSIFIER: &[ProgramType] = &[ProgramType::SchedClassifier];

/// Each function that the programs call, and the kinds of programs that call it.
const CALLED: [(&str, BpfHelper, &[ProgramType]); 15] = {
    use aya_obj::generated::bpf_func_id::*;
    [
        ("bpf_map_lookup_elem", BPF_FUNC_map_lookup_elem, BOTH),
        ("bpf_ktime_get_ns", BPF_FUNC_ktime_get_ns, BOTH),
        ("bpf_skb_store_bytes", BPF_FUNC_skb_store_bytes, CLASSIFIER),
        ("bpf_skb_change_tail", BPF_FUNC_skb_change_tail, CLASSIFIER),
        ("bpf_tail_call", BPF_FUNC_tail_call, BOTH),
        ("bpf_redirect", BPF_FUNC_redirect, CLASSIFIER),
        ("bpf_skb_load_bytes", BPF_FUNC_skb_load_bytes, CLASSIFIER),
        ("bpf_xdp_adjust_head", BPF_FUNC_xdp_adjust_head, XDP),
        ("bpf_redirect_map", BPF_FUNC_redirect_map, XDP),
        ("bpf_xdp_adjust_tail", BPF_FUNC_xdp_adjust_tail, XDP),
        ("bpf_ringbuf_output", BPF_FUNC_ringbuf_output, BOTH),
        ("bpf_ringbuf_reserve", BPF_FUNC_ringbuf_reserve, BOTH),
        ("bpf_ringbuf_submit", BPF_FUNC_ringbuf_submit, BOTH),
        ("bpf_ringbuf_discard", BPF_FUNC_ringbuf_discard, BOTH),
        ("bpf_ringbuf_query", BPF_FUNC_ringbuf_query, BOTH),
    ]
};

/// The names of those functions that the kernel lacks for a kind of program that calls them. Loads one small program
/// for each function and kind, and keeps none.
///
/// # Errors
/// If the kernel does not load a program for another reason.
pub fn missing_helpers() -> Result<Vec<&'static str>, ProbeError> {
    let mut missing = Vec::new();
    for (name, helper, kinds) in CALLED {
        for kind in kinds {
            if !is_helper_supported(*kind, helper).map_err(|error| ProbeError::of(&error))? {
                missing.push(name);
                break;
            }
        }
    }
    Ok(missing)
}

// What each feature is for, in words for operators.

/// A feature in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureText {
    /// The name of its check in `xdp-imds doctor`.
    pub check: &'static str,
    /// The feature.
    pub what: &'static str,
    /// What the agent does with it; completes "for".
    pub gives: &'static str,
    /// What happens without it; `None` if the agent does not start.
    pub without: Option<&'static str>,
    /// The build option that provides it, or the version of Linux it first came with. A hint: vendors port features
    /// back, and leave options out.
    pub comes_with: &'static str,
}

impl Feature {
    /// The feature in words.
    #[must_use]
    pub const fn words(self) -> FeatureText {
        let (check, what, gives, without, comes_with) = match self {
            Self::Bpf => ("kernel.bpf", "bpf(2)", "eBPF programs and maps", None, "CONFIG_BPF_SYSCALL"),
            Self::Xdp => (
                "kernel.xdp",
                "XDP programs",
                "steering the frames of ports",
                None,
                "CONFIG_BPF_SYSCALL and CONFIG_NET",
            ),
            Self::DeviceMap => (
                "kernel.devmap_hash",
                "maps of type DEVMAP_HASH",
                "redirecting answers to a guest's device",
                None,
                "Linux 5.4",
            ),
            Self::SocketMap => (
                "kernel.xskmap",
                "maps of type XSKMAP",
                "redirecting requests to the agent",
                None,
                "CONFIG_XDP_SOCKETS",
            ),
            Self::Socket => {
                ("kernel.af_xdp", "AF_XDP sockets", "receiving requests", None, "CONFIG_XDP_SOCKETS")
            }
            Self::RingBuffer => (
                "kernel.ring_buffer",
                "BPF ring buffers",
                "reports of the eBPF programs, and frames of quiet guests in other namespaces",
                None,
                "Linux 5.8",
            ),
            Self::NetnsCookie => (
                "kernel.netns_cookie",
                "cookies of network namespaces (SO_NETNS_COOKIE)",
                "telling apart devices of different namespaces",
                None,
                "Linux 5.14",
            ),
            Self::Btf => (
                "kernel.btf",
                "BTF type information",
                "tools such as bpftool, which show the fields of the maps by it",
                Some("such tools cannot show the fields of the maps"),
                "CONFIG_DEBUG_INFO_BTF",
            ),
            Self::DeviceReports => (
                "kernel.netdev",
                "reports on which devices accept redirected frames (netdev)",
                "reporting a port whose device accepts none",
                Some("a port counts as served even if its device accepts none and its guest gets no answer"),
                "Linux 6.3",
            ),
            Self::Tcx => (
                "kernel.tcx",
                "tcx classifiers",
                "steering quiet guests at almost no cost for their bulk traffic, sending large answers in long \
                 frames, and serving veths whose peer has no GRO",
                Some(
                    "XDP steers each guest also after it has booted, so its bulk traffic costs more CPU time; large \
                     answers go out segment by segment",
                ),
                "Linux 6.6 with CONFIG_NET_XGRESS",
            ),
            Self::Link => (
                "kernel.xdp_link",
                "XDP attachment by bpf_link",
                "keeping ports closed while no agent runs",
                None,
                "Linux 5.9",
            ),
            Self::LinkUpdate => (
                "kernel.link_update",
                "atomic replacement of an XDP program",
                "taking ports over without opening them",
                None,
                "Linux 5.9",
            ),
        };
        FeatureText { check, what, gives, without, comes_with }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{CALLED, Feature, Features, ProbeResult};
    use crate::error::ProbeError;
    use crate::object;

    fn all_but(feature: Feature, answer: ProbeResult) -> Features {
        let one = |of| (of, if of == feature { answer.clone() } else { Ok(true) });
        Features(Feature::ALL.map(one).into())
    }

    #[test]
    fn a_start_fails_only_without_a_feature_that_has_no_substitute() {
        use Feature::{Btf, DeviceReports, Tcx};
        for feature in Feature::ALL {
            assert!(all_but(feature, Err(ProbeError::new("unclear"))).check().is_ok(), "{feature:?}");
            let outcome = all_but(feature, Ok(false)).check();
            let is_optional = [Btf, DeviceReports, Tcx].contains(&feature);
            assert_eq!(outcome.is_ok(), is_optional, "{feature:?}");
            let Err(error) = outcome else { continue };
            let (text, words) = (error.to_string(), feature.words());
            for part in [words.what, words.comes_with, "xdp-imds doctor"] {
                assert!(text.contains(part), "no `{part}` in: {text}");
            }
        }
    }

    #[test]
    fn a_start_asks_for_each_feature_that_needs_no_device() {
        let asked: Vec<_> = Features::ask().0.into_iter().map(|(feature, _)| feature).collect();
        assert_eq!(asked, Feature::ALL[..10]);
        assert!(Features(Vec::new()).answer(Feature::Tcx).is_err());
    }

    /// BPF_JMP | BPF_CALL (RFC 9669 §4.3.1). The source register is 0 for a helper by number.
    const CALL: u8 = 0x85;

    #[test]
    fn the_table_holds_each_function_that_the_programs_call() {
        let mut called = BTreeSet::new();
        for bytes in [object::OBJECT, object::STUB_OBJECT] {
            let object = aya_obj::Object::parse(bytes).expect("the embedded object parses");
            let instructions = object.functions.values().flat_map(|function| &function.instructions);
            called
                .extend(instructions.filter(|one| one.code == CALL && one.src_reg() == 0).map(|one| one.imm));
        }
        let table: BTreeSet<_> = CALLED.iter().map(|(_, helper, _)| *helper as i32).collect();
        assert_eq!(table, called);
        for (name, helper, _) in CALLED {
            assert_eq!(name.replacen("bpf", "BPF_FUNC", 1), format!("{helper:?}"));
        }
    }
}
