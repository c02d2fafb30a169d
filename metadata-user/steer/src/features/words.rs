//! What each feature is for, in words for operators.

use super::Feature;

/// A feature in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
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
    pub const fn words(self) -> Words {
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
        Words { check, what, gives, without, comes_with }
    }
}
