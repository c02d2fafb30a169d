//! Asks the kernel for its features by using each one.
//!
//! No version number decides: a vendor's kernel may have features of later versions, and may lack some of its own. The
//! probes here create nothing that outlives the call, need no device of their own, and take well under a millisecond
//! together. [`Steering::start`](super::Steering::start) runs them once. Doctor also attaches programs, in a network
//! namespace of its own (`probe`).

mod helpers;
mod words;

pub use helpers::missing_helpers;
pub use words::Words;

use aya::maps::MapType;
use aya::programs::{ProgramError, ProgramType, SchedClassifier, TcAttachType};
use aya::sys::{SyscallError, is_map_supported, is_program_supported};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::path::Path;

use super::failure::Failure;
use super::{SteerError, devstats};
use metadata_links::netns;

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
pub type Answer = Result<bool, Failure>;

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
    pub(super) fn ask(self) -> Option<Answer> {
        Some(match self {
            Self::Bpf => map(MapType::Array),
            Self::Xdp => is_program_supported(ProgramType::Xdp).map_err(|error| Failure::of(&error)),
            Self::DeviceMap => map(MapType::DevMapHash),
            Self::SocketMap => map(MapType::XskMap),
            Self::Socket => socket(),
            Self::RingBuffer => map(MapType::RingBuf),
            Self::NetnsCookie => cookie(),
            Self::Btf => Ok(Path::new("/sys/kernel/btf/vmlinux").exists()),
            Self::DeviceReports => Ok(devstats::reports_takers()),
            Self::Tcx => tcx(),
            Self::Link | Self::LinkUpdate => return None,
        })
    }
}

fn map(kind: MapType) -> Answer {
    is_map_supported(kind).map_err(|error: SyscallError| match error.io_error.raw_os_error() {
        Some(libc::ENOSYS) => Failure::new("the kernel has no bpf(2)"),
        _ => Failure::of(&error),
    })
}

fn socket() -> Answer {
    match socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None) {
        Ok(_) => Ok(true),
        Err(Errno::AFNOSUPPORT | Errno::PROTONOSUPPORT) => Ok(false),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}

fn cookie() -> Answer {
    match netns::cookie() {
        Ok(_) => Ok(true),
        Err(error) => match Failure::from(error) {
            Failure { errno: Some(libc::ENOPROTOOPT), .. } => Ok(false),
            failure => Err(failure),
        },
    }
}

/// Lists the classifiers of the loopback. The kernel has had this query for exactly as long as it attaches such
/// classifiers (e420bed02507, kernel/bpf/tcx.c), and one build option provides both.
fn tcx() -> Answer {
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
        Err(error) => Err(Failure::of(&error)),
    }
}

/// What this kernel has, as asked at the start of steering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Features(Vec<(Feature, Answer)>);

impl Features {
    /// Asks the kernel for each feature that needs no device.
    pub(super) fn ask() -> Self {
        Self(Feature::ALL.into_iter().filter_map(|feature| Some((feature, feature.ask()?))).collect())
    }

    /// Whether the kernel has a feature.
    pub(super) fn answer(&self, feature: Feature) -> Answer {
        let found = self.0.iter().find(|(of, _)| *of == feature);
        found.map_or_else(|| Err(Failure::new("it was not tested")), |(_, answer)| answer.clone())
    }

    /// Fails if the kernel lacks a feature that steering cannot do without. An inconclusive test does not count: the
    /// use of the feature then shows the cause.
    pub(super) fn check(&self) -> Result<(), SteerError> {
        let lacks = |(feature, answer): &(Feature, Answer)| {
            let words = feature.words();
            (*answer == Ok(false) && words.without.is_none()).then_some(words)
        };
        let missing: Vec<_> = self.0.iter().filter_map(lacks).collect();
        let list = |pick: fn(&Words) -> &'static str| missing.iter().map(pick).collect::<Vec<_>>().join("; ");
        match missing.is_empty() {
            true => Ok(()),
            false => Err(SteerError::Lacks {
                what: list(|words| words.what),
                comes_with: list(|words| words.comes_with),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Feature, Features};
    use crate::failure::Failure;

    fn all_but(feature: Feature, answer: Answer) -> Features {
        let one = |of| (of, if of == feature { answer.clone() } else { Ok(true) });
        Features(Feature::ALL.map(one).into())
    }

    #[test]
    fn a_start_fails_only_without_a_feature_that_has_no_substitute() {
        use Feature::{Btf, DeviceReports, Tcx};
        for feature in Feature::ALL {
            assert!(all_but(feature, Err(Failure::new("unclear"))).check().is_ok(), "{feature:?}");
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
}
