//! A node with the eBPF programs, and the outcome each program must give a frame.

use std::net::IpAddr;

use metadata_common::classify::priority_tag;
use metadata_common::mac::Mac;
use metadata_common::maps::{Identity, Port, PortKey, program};
use metadata_common::stamp::stamp;
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::ethernet;
use support::frames::{self, GUEST, NEXT_HOP, SERVED_V4, SERVED_V6};
use support::prog_test::{
    LOOPBACK, Outcome, Programs, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, XDP_DROP, XDP_PASS,
    XDP_REDIRECT,
};

pub(crate) const NETNS: u32 = 3;
pub(crate) const PORT: PortKey = PortKey { netns: NETNS, ifindex: LOOPBACK };
pub(crate) const IDENTITY: Identity = Identity { slot: 0x0102, hub: 1, drain: 0, reserved: 0 };
pub(crate) const UNLIMITED: Port = Port::with_limit(0, 0);

/// A node with one hub. It serves both addresses, answers ARP for the next hop, and has no port yet.
pub(crate) fn node() -> Programs {
    serving(Programs::load(NETNS).expect("the object loads"))
}

pub(crate) fn serving(mut programs: Programs) -> Programs {
    programs.serve(IpAddr::V4(SERVED_V4)).expect("an IPv4 address is served");
    programs.serve(IpAddr::V6(SERVED_V6)).expect("an IPv6 address is served");
    programs.answer_arp(NEXT_HOP).expect("a next hop is answered for");
    programs.place_hub(IDENTITY.hub).expect("the hub has a device");
    programs
}

/// Like [`node`], with one guest on the loopback, the port through which test runs arrive.
pub(crate) fn node_with_guest() -> Programs {
    with_guest(node())
}

pub(crate) fn with_guest(mut programs: Programs) -> Programs {
    programs.own(PORT, UNLIMITED).expect("the port is registered");
    programs.register(PORT, GUEST, IDENTITY).expect("the guest is registered");
    programs
}

/// The programs that give verdicts on the frames of guests: one by XDP, one as a classifier.
pub(crate) const BOTH_WAYS: [&str; 2] = [program::PORT, program::PORT_TCX];

/// The outcome of a frame under `port`: the verdict decides the action and the bytes.
pub(crate) fn outcome(frame: &[u8], verdict: Verdict) -> Outcome {
    outcome_by(program::PORT, frame, verdict)
}

/// Like [`outcome`], under `port` or `port_tcx`.
pub(crate) fn outcome_by(by: &str, frame: &[u8], verdict: Verdict) -> Outcome {
    let plain = if by == program::PORT { without_priority_tag(frame) } else { frame.to_vec() };
    let mut frame = if verdict.fate() == Fate::Pass { frame.to_vec() } else { plain };
    let (pass, drop, redirect) = match by {
        program::PORT => (XDP_PASS, XDP_DROP, XDP_REDIRECT),
        _ => (TC_ACT_UNSPEC, TC_ACT_SHOT, TC_ACT_REDIRECT),
    };
    let action = match verdict.fate() {
        Fate::Pass => pass,
        Fate::Drop => drop,
        Fate::Answer | Fate::Absorb => unreachable!("nothing is answered on this port"),
        Fate::Steer => {
            let source = ethernet::SOURCE..ethernet::SOURCE + Mac::LEN;
            frame[source].copy_from_slice(&stamp(IDENTITY.slot).0);
            redirect
        }
    };
    Outcome { action, frame, counted: vec![(verdict, 1)] }
}

/// The frame as `port` decides about it.
pub(crate) fn without_priority_tag(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if frame.len() >= ethernet::HEADER + ethernet::TAG && priority_tag(&frame[..]).is_some() {
        frame.drain(ethernet::TYPE..ethernet::TYPE + ethernet::TAG);
    }
    frame
}

#[track_caller]
pub(crate) fn assert_verdict(programs: &mut Programs, name: &str, frame: &[u8], verdict: Verdict) {
    assert_verdict_by(program::PORT, programs, name, frame, verdict);
}

#[track_caller]
pub(crate) fn assert_verdict_by(
    by: &str,
    programs: &mut Programs,
    name: &str,
    frame: &[u8],
    verdict: Verdict,
) {
    let found = programs.run(by, frame).expect(name);
    let mut expected = outcome_by(by, frame, verdict);
    if by != program::PORT && verdict == Verdict::PassIpv4 && found.counted.is_empty() {
        // Classifiers do not count ordinary frames.
        expected.counted.clear();
    }
    assert_eq!(found, expected, "{name} by {by}");
}

#[track_caller]
pub(crate) fn assert_known_good(programs: &mut Programs) {
    assert_verdict(programs, "a known-good frame", &frames::known_good(), Verdict::SteerIpv4Tcp);
}
