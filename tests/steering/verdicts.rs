//! The eBPF programs give every frame the verdict that the policy defines, and count it.

use metadata_common::answer::request::long::{AnswerRest, CONTENT_AT, SUM_AT};
use metadata_common::classify::{classify, priority_tag};
use metadata_common::drain;
use metadata_common::mac::Mac;
use metadata_common::maps::{
    ANSWER_LINK, ANSWER_TCP, BARE, DATE_BYTES, Guest, Identity, LONG_RESPONSE_BYTES, Port, PortKey,
    ServedDate, program,
};
use metadata_common::stamp::stamp;
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::{ethernet, ipv4, ipv6, protocol, tcp};
use std::net::IpAddr;
use support::frames::{Both, GUEST, NEXT_HOP, SERVED_V4, SERVED_V6};
use support::prog_test::{
    KEY, LOOPBACK, Outcome, Programs, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, XDP_DROP, XDP_PASS,
    XDP_REDIRECT, in_empty_namespace,
};
use support::{frames, privileged, seed};

// A node with the eBPF programs, and the outcome each program must give a frame.

const NETNS: u32 = 3;
const PORT: PortKey = PortKey { netns: NETNS, ifindex: LOOPBACK };
const IDENTITY: Identity = Identity { slot: 0x0102, hub: 1, drain: 0, reserved: 0 };
const UNLIMITED: Port = Port::with_limit(0, 0);

/// A node with one hub. It serves both addresses, answers ARP for the next hop, and has no port yet.
fn node() -> Programs {
    serving(Programs::load(NETNS).expect("the object loads"))
}

fn serving(mut programs: Programs) -> Programs {
    programs.serve(IpAddr::V4(SERVED_V4)).expect("an IPv4 address is served");
    programs.serve(IpAddr::V6(SERVED_V6)).expect("an IPv6 address is served");
    programs.answer_arp(NEXT_HOP).expect("a next hop is answered for");
    programs.place_hub(IDENTITY.hub).expect("the hub has a device");
    programs
}

/// Like [`node`], with one guest on the loopback, the port through which test runs arrive.
fn node_with_guest() -> Programs {
    with_guest(node())
}

fn with_guest(mut programs: Programs) -> Programs {
    programs.own(PORT, UNLIMITED).expect("the port is registered");
    programs.register(PORT, GUEST, IDENTITY).expect("the guest is registered");
    programs
}

/// The programs that give verdicts on the frames of guests: one by XDP, one as a classifier.
const BOTH_WAYS: [&str; 2] = [program::PORT, program::PORT_TCX];

/// The outcome of a frame under `port`: the verdict decides the action and the bytes.
fn outcome(frame: &[u8], verdict: Verdict) -> Outcome {
    outcome_by(program::PORT, frame, verdict)
}

/// Like [`outcome`], under `port` or `port_tcx`.
fn outcome_by(by: &str, frame: &[u8], verdict: Verdict) -> Outcome {
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
fn without_priority_tag(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if frame.len() >= ethernet::HEADER + ethernet::TAG && priority_tag(&frame[..]).is_some() {
        frame.drain(ethernet::TYPE..ethernet::TYPE + ethernet::TAG);
    }
    frame
}

#[track_caller]
fn assert_verdict(programs: &mut Programs, name: &str, frame: &[u8], verdict: Verdict) {
    assert_verdict_by(program::PORT, programs, name, frame, verdict);
}

#[track_caller]
fn assert_verdict_by(by: &str, programs: &mut Programs, name: &str, frame: &[u8], verdict: Verdict) {
    let found = programs.run(by, frame).expect(name);
    let mut expected = outcome_by(by, frame, verdict);
    if by != program::PORT && verdict == Verdict::PassIpv4 && found.counted.is_empty() {
        // Classifiers do not count ordinary frames.
        expected.counted.clear();
    }
    assert_eq!(found, expected, "{name} by {by}");
}

#[track_caller]
fn assert_known_good(programs: &mut Programs) {
    assert_verdict(programs, "a known-good frame", &frames::known_good(), Verdict::SteerIpv4Tcp);
}

// The programs give each frame the verdict of `classify`, for named, mutated and enumerated frames.

#[privileged::test]
fn every_named_frame_gets_its_verdict() {
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        for case in frames::cases() {
            assert_known_good(&mut programs);
            assert_verdict(&mut programs, case.name, &case.frame, case.verdict);
            // The kernel takes no buffer that ends in an IP header for a test run.
            if case.frame.len() >= ethernet::HEADER + ipv6::HEADER {
                assert_verdict_by(program::PORT_TCX, &mut programs, case.name, &case.frame, case.verdict);
            }
        }
        assert_known_good(&mut programs);
    });
}

#[privileged::test]
fn a_priority_tag_changes_no_verdict_and_no_answer_and_stays_on_frames_that_pass() {
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        for answers in [0, ANSWER_LINK | ANSWER_TCP] {
            programs.own(PORT, Port { answers, ..UNLIMITED }).expect("the port is registered");
            for (n, case) in frames::cases().into_iter().enumerate() {
                let untagged = programs.run(program::PORT, &case.frame).expect(case.name);
                // Each priority, with and without the bit for frames that may be dropped.
                let tag = [[0x81, 0, (n << 4) as u8, 0], [0x88, 0xa8, (n << 4) as u8, 0]][n / 16 % 2];
                let mut tagged = case.frame.clone();
                tagged.splice(ethernet::TYPE..ethernet::TYPE, tag);
                let mut expected = untagged;
                if expected.action == XDP_PASS {
                    expected.frame = tagged.clone();
                }
                let found = programs.run(program::PORT, &tagged).expect(case.name);
                assert_eq!(found, expected, "{} after {tag:x?}", case.name);
                // Of two such tags the second hides a frame as any tag does.
                let mut twice = tagged.clone();
                twice.splice(ethernet::TYPE..ethernet::TYPE, tag);
                let hidden = classify(&tagged[..], &Both);
                let found = programs.run(program::PORT, &twice).expect(case.name).counted;
                assert_eq!(found, [(hidden, 1)], "{} after two tags", case.name);
                assert!(hidden.fate() != Fate::Steer, "{}", case.name);
            }
        }
    });
}

#[privileged::test]
fn the_kernel_and_the_policy_agree_on_mutated_frames() {
    const ROUNDS: usize = 20_000;
    let mut random = fastrand::Rng::with_seed(seed());
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        let cases = frames::cases();
        let mut expected = programs.counters().expect("counters");
        for _ in 0..ROUNDS {
            let case = &cases[random.usize(..cases.len())];
            let mut frame = case.frame.clone();
            // The MAC addresses stay: `ports` tests how senders are identified.
            for _ in 0..random.usize(1..4) {
                let at = random.usize(ethernet::TYPE..frame.len());
                frame[at] = random.u8(..);
            }
            frame.truncate(random.usize(ethernet::HEADER..=frame.len()));
            let verdict = classify(&without_priority_tag(&frame)[..], &Both);
            expected[verdict.index() as usize] += 1;
            let (action, found) = programs.run_uncounted(program::PORT, &frame).expect(case.name);
            let wanted = outcome(&frame, verdict);
            assert_eq!((action, found), (wanted.action, wanted.frame), "{verdict:?} of {frame:02x?}");
        }
        assert_eq!(programs.counters().expect("counters"), expected);
    });
}

/// Runs one frame for each number and asserts the totals by verdict. A known-good frame runs at intervals.
fn assert_totals<N: Copy + Into<u32>>(
    numbers: impl Iterator<Item = N>,
    frame_of: impl Fn(N) -> Vec<u8>,
    totals: &[(Verdict, u64)],
) {
    const KNOWN_GOOD_EVERY: u32 = 4_096;
    let mut programs = node_with_guest();
    let mut expected = vec![0; Verdict::ALL.len()];
    for (verdict, total) in totals {
        expected[verdict.index() as usize] += total;
    }
    for number in numbers {
        if number.into() % KNOWN_GOOD_EVERY == 0 {
            assert_known_good(&mut programs);
            expected[Verdict::SteerIpv4Tcp.index() as usize] += 1;
        }
        let frame = frame_of(number);
        let wanted = outcome(&frame, classify(&without_priority_tag(&frame)[..], &Both));
        let (action, found) = programs.run_uncounted(program::PORT, &frame).expect("a run");
        assert_eq!((action, found), (wanted.action, wanted.frame), "number {}", number.into());
    }
    assert_eq!(programs.counters().expect("counters"), expected);
}

#[privileged::test]
fn only_ip_arp_and_tagged_ethertypes_are_parsed() {
    // Each frame is a SYN to the service with another EtherType. The packet is no valid ARP or IPv6. After a VLAN
    // EtherType, its first bytes are read as a tag and another EtherType. After a length, it lacks LLC and SNAP.
    let totals = [
        (Verdict::SteerIpv4Tcp, 1),
        (Verdict::PassArpFormat, 1),
        (Verdict::PassTruncated, 1),
        (Verdict::PassVlan, 3),
        (Verdict::PassEthertype, 65_536 - 6),
    ];
    let syn = frames::syn(SERVED_V4, 80);
    in_empty_namespace(|| assert_totals(0..=u16::MAX, |n| frames::frame(&[], n, &syn), &totals));
}

#[privileged::test]
fn all_tcp_ports_of_a_served_address_are_steered() {
    let frame = |port| frames::frame(&[], ethernet::IPV4, &frames::syn(SERVED_V4, port));
    in_empty_namespace(|| assert_totals(0..=u16::MAX, frame, &[(Verdict::SteerIpv4Tcp, 65_536)]));
}

#[privileged::test]
fn tcp_and_icmp_are_the_only_ipv4_protocols_served() {
    let totals = [
        (Verdict::SteerIpv4Tcp, 1),
        (Verdict::SteerIpv4Icmp, 1),
        (Verdict::DropIpv4Udp, 1),
        (Verdict::DropIpv4Protocol, 253),
    ];
    let frame = |n| frames::frame(&[], ethernet::IPV4, &frames::datagram(SERVED_V4, n));
    in_empty_namespace(|| assert_totals(0..=u8::MAX, frame, &totals));
}

#[privileged::test]
fn tcp_and_icmpv6_are_the_only_ipv6_next_headers_served() {
    let extensions = (0..=u8::MAX).filter(|n| protocol::is_extension(*n)).count() as u64;
    assert_eq!(extensions, 10);
    let totals = [
        (Verdict::SteerIpv6Tcp, 1),
        (Verdict::SteerIpv6Icmp, 1),
        (Verdict::DropIpv6Udp, 1),
        (Verdict::DropIpv6Fragment, 1),
        (Verdict::DropIpv6Extension, extensions),
        (Verdict::DropIpv6Protocol, 256 - 4 - extensions),
    ];
    let frame = |n| frames::frame(&[], ethernet::IPV6, &frames::datagram6(SERVED_V6, n));
    in_empty_namespace(|| assert_totals(0..=u8::MAX, frame, &totals));
}

#[test]
fn the_frames_of_these_tests_are_valid_ip_packets() {
    let frame = frames::known_good();
    let ip = &frame[ethernet::HEADER..];
    assert_eq!(ip[ipv4::DESTINATION..ipv4::HEADER], SERVED_V4.octets());
    let packet = smoltcp::wire::Ipv4Packet::new_checked(ip).expect("smoltcp reads it as IPv4");
    assert!(packet.verify_checksum());
    let packet = frames::datagram6(SERVED_V6, protocol::TCP);
    let packet = smoltcp::wire::Ipv6Packet::new_checked(&packet[..]).expect("smoltcp reads it as IPv6");
    assert_eq!(packet.total_len(), ipv6::HEADER + 24);
}

// What a port registers and limits decides which of its frames are served.

#[privileged::test]
fn port_and_mac_together_identify_a_guest() {
    let elsewhere = [PortKey { netns: NETNS + 1, ..PORT }, PortKey { ifindex: LOOPBACK + 1, ..PORT }];
    in_empty_namespace(|| {
        let mut programs = node();
        let syn = frames::known_good();
        for key in elsewhere {
            programs.own(key, UNLIMITED).expect("another port is registered");
            programs.register(key, GUEST, IDENTITY).expect("the same MAC is registered there");
            assert_verdict(&mut programs, "on an unregistered port", &syn, Verdict::PassForeignPort);
        }
        programs.own(PORT, UNLIMITED).expect("the port is registered");
        assert_verdict(&mut programs, "a MAC of another port", &syn, Verdict::DropUnknownMac);
        programs.register(PORT, GUEST, IDENTITY).expect("the guest is registered");
        assert_known_good(&mut programs);

        let senders = [
            ("one bit off", Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x57])),
            ("an all-zero MAC", Mac([0; 6])),
            ("a stamp", stamp(IDENTITY.slot)),
            ("the service itself", Mac::SERVICE),
            ("the broadcast MAC", Mac::BROADCAST),
        ];
        for (name, mac) in senders {
            let frame = frames::with(syn.clone(), ethernet::SOURCE, &mac.0);
            assert_verdict(&mut programs, name, &frame, Verdict::DropUnknownMac);
            assert_known_good(&mut programs);
        }
        programs.register(PORT, Mac::BROADCAST, IDENTITY).expect("a wrong entry is written");
        let frame = frames::with(syn, ethernet::SOURCE, &Mac::BROADCAST.0);
        assert_verdict(&mut programs, "a registered group", &frame, Verdict::DropUnknownMac);
    });
}

#[test]
fn a_frame_gets_no_slot_of_another_guest() {
    if !privileged::or_skip() {
        return;
    }
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        assert_known_good(&mut programs);
        // What a program reads if its entry became another guest's after the look-up.
        let other = Guest { mac: [0x52, 0x54, 0, 0, 0, 9], live: 1 };
        for (name, guest) in [("another guest", other), ("none", Guest { mac: GUEST.0, live: 0 })] {
            programs.place_guest(IDENTITY.slot, guest).expect("an entry");
            for by in BOTH_WAYS {
                let found = programs.run(by, &frames::known_good()).expect(name).counted;
                assert_eq!(found, [(Verdict::DropUnknownMac, 1)], "{name} by {by}");
            }
        }
    });
}

#[test]
fn a_flood_from_unknown_macs_is_counted_in_full_and_logged_sparsely() {
    const STRANGERS: u64 = 10_000;
    // One line for each power of two up to 10,000, on each CPU that the test ran on.
    const LINES_PER_CPU: usize = 14;
    if !privileged::or_skip() {
        return;
    }
    let stranger = frames::with(frames::known_good(), ethernet::SOURCE, &[2; 6]);
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        for _ in 0..STRANGERS {
            let (action, _) = programs.run_uncounted(program::PORT, &stranger).expect("a run");
            assert_eq!(action, XDP_DROP);
        }
        let counted = programs.counters().expect("counters")[Verdict::DropUnknownMac.index() as usize];
        assert_eq!(counted, STRANGERS);
        let cpus = std::thread::available_parallelism().expect("a number of CPUs").get();
        let lines = programs.take_log().expect("a log");
        assert!((LINES_PER_CPU..=LINES_PER_CPU * cpus).contains(&lines), "{lines} lines");
    });
}

#[privileged::test]
fn a_port_over_its_frame_limit_is_throttled_while_other_traffic_passes() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        let two_an_hour = Port { frame_ns: HOUR_NS, depth_ns: 2 * HOUR_NS, ..UNLIMITED };
        programs.own(PORT, two_an_hour).expect("the port is limited");
        assert_known_good(&mut programs);
        assert_known_good(&mut programs);
        let syn = frames::known_good();
        for _ in 0..3 {
            assert_verdict(&mut programs, "a third within the hour", &syn, Verdict::DropOverLimit);
            let elsewhere = frames::frame(&[], ethernet::IPV4, &frames::syn(frames::OTHER_V4, 80));
            assert_verdict(&mut programs, "to elsewhere", &elsewhere, Verdict::PassIpv4);
        }
        programs.own(PORT, two_an_hour).expect("the bucket is filled");
        assert_known_good(&mut programs);
    });
}

#[privileged::test]
fn a_port_over_its_connection_limit_keeps_its_open_connections() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let v4 = |flags| frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, flags));
    let v6 = |flags| frames::frame(&[], ethernet::IPV6, &frames::tcp6(SERVED_V6, flags));
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        let two_an_hour = Port { connection_ns: HOUR_NS, connection_depth_ns: 2 * HOUR_NS, ..UNLIMITED };
        for by in BOTH_WAYS {
            programs.own(PORT, two_an_hour).expect("the port is limited");
            assert_verdict_by(by, &mut programs, "a first", &v4(tcp::SYN), Verdict::SteerIpv4Tcp);
            assert_verdict_by(by, &mut programs, "a second", &v6(tcp::SYN), Verdict::SteerIpv6Tcp);
            for syn in [v4(tcp::SYN), v6(tcp::SYN)] {
                let refused = Verdict::DropOverConnectionLimit;
                assert_verdict_by(by, &mut programs, "a third within the hour", &syn, refused);
            }
            for flags in [tcp::ACK, tcp::FIN | tcp::ACK, tcp::RST] {
                assert_verdict_by(by, &mut programs, "an open connection", &v4(flags), Verdict::SteerIpv4Tcp);
                assert_verdict_by(by, &mut programs, "an open connection", &v6(flags), Verdict::SteerIpv6Tcp);
            }
        }
    });
}

#[privileged::test]
fn a_closed_port_serves_nothing_and_passes_all_other_traffic() {
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        programs.own(PORT, Port::closed()).expect("the port is closed");
        for case in frames::cases() {
            let next_hop = case.name == "arp_for_next_hop";
            let verdict = match case.verdict.fate() {
                _ if next_hop => Verdict::PassArp,
                Fate::Pass => case.verdict,
                _ => Verdict::DropGuarded,
            };
            assert_verdict(&mut programs, case.name, &case.frame, verdict);
            if case.frame.len() >= ethernet::HEADER + ipv6::HEADER {
                assert_verdict_by(program::PORT_TCX, &mut programs, case.name, &case.frame, verdict);
            }
        }
    });
}

// Frames reach the hub and its socket, and answers leave the hub for their guest.

#[privileged::test]
fn a_departing_agents_hub_gets_only_the_connections_it_claimed() {
    const GONE: u32 = 9;
    let v4 = |flags| frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, flags));
    let v6 = |flags| frames::frame(&[], ethernet::IPV6, &frames::tcp6(SERVED_V6, flags));
    let other_port = frames::with(v4(tcp::ACK), ethernet::HEADER + ipv4::HEADER, &[7, 7]);
    let ping = frames::frame(&[], ethernet::IPV4, &frames::datagram(SERVED_V4, protocol::ICMP));
    let flows = [
        drain::flow(&v4(0)[..], Verdict::SteerIpv4Tcp, IDENTITY.slot, &KEY),
        drain::flow(&v6(0)[..], Verdict::SteerIpv6Tcp, IDENTITY.slot, &KEY),
    ];
    // Hub `GONE` has no device, so the verdict `DropNoHub` shows that it was chosen.
    let table = [
        ("claimed, IPv4", v4(tcp::ACK), true, Verdict::SteerIpv4Tcp),
        ("claimed, IPv4, a reset", v4(tcp::RST), true, Verdict::SteerIpv4Tcp),
        ("claimed, IPv6", v6(tcp::ACK), true, Verdict::SteerIpv6Tcp),
        ("another connection", other_port, false, Verdict::SteerIpv4Tcp),
        ("no connection", ping, false, Verdict::SteerIpv4Icmp),
    ];
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        for flow in flows {
            programs.claim(flow.expect("TCP")).expect("a claim");
        }
        for (identity, leaving) in [
            (Identity { hub: IDENTITY.hub, drain: 1 + GONE, ..IDENTITY }, false),
            (Identity { hub: GONE, drain: 1 + IDENTITY.hub, ..IDENTITY }, true),
            (IDENTITY, true),
        ] {
            programs.register(PORT, GUEST, identity).expect("the identity is replaced");
            for (name, frame, claimed, verdict) in &table {
                for by in BOTH_WAYS {
                    let found = programs.run(by, frame).expect(name).counted;
                    let arrives = identity.drain == 0 || *claimed == leaving;
                    let wanted = if arrives { *verdict } else { Verdict::DropNoHub };
                    assert_eq!(found, [(wanted, 1)], "{name} by {by} as {identity:?}");
                }
            }
        }
    });
}

#[privileged::test]
fn the_kernel_keeps_answering_while_an_agent_departs() {
    let syn = frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, tcp::SYN));
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        programs.own(PORT, Port { answers: ANSWER_TCP, ..UNLIMITED }).expect("a tap");
        let answer = programs.run(program::PORT, &syn).expect("a run");
        let flow = drain::flow(&syn[..], Verdict::SteerIpv4Tcp, IDENTITY.slot, &KEY).expect("TCP");
        programs.claim(flow).expect("a claim");
        let leaving = Identity { drain: 1 + IDENTITY.hub, ..IDENTITY };
        programs.register(PORT, GUEST, leaving).expect("the identity is replaced");
        assert_eq!(answer.counted, [(Verdict::AnswerSyn, 1)]);
        assert_eq!(programs.run(program::PORT, &syn).expect("a run"), answer);
    });
}

#[privileged::test]
fn metadata_frames_are_dropped_without_a_hub_and_others_pass() {
    in_empty_namespace(|| {
        let mut programs = node_with_guest();
        for hub in [IDENTITY.hub + 1, u32::MAX] {
            programs.register(PORT, GUEST, Identity { hub, ..IDENTITY }).expect("an absent hub is named");
            let found = programs.run(program::PORT, &frames::known_good()).expect("a run");
            assert_eq!((found.action, found.counted), (XDP_DROP, vec![(Verdict::DropNoHub, 1)]));
            let elsewhere = frames::frame(&[], ethernet::IPV6, &frames::datagram6(frames::OTHER_V6, 6));
            assert_verdict(&mut programs, "to elsewhere", &elsewhere, Verdict::PassIpv6);
        }
        programs.register(PORT, GUEST, IDENTITY).expect("the hub is back");
        assert_known_good(&mut programs);
    });
}

#[privileged::test]
fn answers_leave_the_hub_for_the_guest_they_are_stamped_with() {
    const GUEST_AT: Guest = Guest { mac: GUEST.0, live: 1 };
    in_empty_namespace(|| {
        let mut programs = node();
        programs.place_guest(7, GUEST_AT).expect("a guest with a device");
        programs.place_guest_device(7).expect("its device");
        programs.place_guest(8, GUEST_AT).expect("a guest without");
        programs.place_guest(9, Guest { live: 0, ..GUEST_AT }).expect("a departed guest");
        programs.place_guest_device(9).expect("its device");
        let drop = |verdict| (XDP_DROP, None, verdict);
        let table = [
            ("a guest with a device", stamp(7), (XDP_REDIRECT, Some(GUEST), Verdict::HubDelivered)),
            ("a guest without a device", stamp(8), (XDP_DROP, Some(GUEST), Verdict::HubDropNoDevice)),
            ("a departed guest", stamp(9), drop(Verdict::HubDropNoGuest)),
            ("a slot never used", stamp(0), drop(Verdict::HubDropNoGuest)),
            ("a slot out of range", stamp(u32::MAX), drop(Verdict::HubDropNoGuest)),
            ("a plain MAC", GUEST, drop(Verdict::HubDropUnstamped)),
            ("the broadcast MAC", Mac::BROADCAST, drop(Verdict::HubDropUnstamped)),
        ];
        for (name, destination, (action, arrives_as, verdict)) in table {
            let sent = frames::with(frames::known_good(), ethernet::DESTINATION, &destination.0);
            let frame = match arrives_as {
                Some(mac) => frames::with(sent.clone(), ethernet::DESTINATION, &mac.0),
                None => sent.clone(),
            };
            let found = programs.run(program::HUB, &sent).expect(name);
            assert_eq!(found, Outcome { action, frame, counted: vec![(verdict, 1)] }, "{name}");
        }
    });
}

#[privileged::test]
fn the_hubs_classifier_delivers_to_devices_of_its_own_namespace_that_are_still_there() {
    const GUEST_AT: Guest = Guest { mac: GUEST.0, live: 1 };
    in_empty_namespace(|| {
        let mut programs = node();
        for slot in 4..9 {
            programs.place_guest(slot, GUEST_AT).expect("a guest");
            programs.place_guest_device(slot).expect("its device");
        }
        programs.place_guest(10, GUEST_AT).expect("a guest whose device was deleted");
        programs.place_guest(8, Guest { live: 0, ..GUEST_AT }).expect("a departed guest");
        for (slot, entry) in [
            (7, LOOPBACK | BARE),
            (6, (LOOPBACK + 1) | BARE),
            (8, LOOPBACK | BARE),
            (10, LOOPBACK | BARE),
            (4, LOOPBACK),
        ] {
            programs.place_home_device(slot, entry).expect("a device");
        }
        let (dropped, shot) = ((XDP_DROP, false), (TC_ACT_SHOT, false));
        let gone = Some(Verdict::HubDropNoGuest);
        let no_device = Some(Verdict::HubDropNoDevice);
        let delivered = Some(Verdict::HubDelivered);
        let unstamped = Some(Verdict::HubDropUnstamped);
        let handed = ((TC_ACT_REDIRECT, true), delivered);
        let table = [
            ("bare", stamp(7), ((XDP_PASS, false), None), handed),
            ("accepts redirected frames", stamp(4), ((XDP_REDIRECT, true), delivered), handed),
            ("another device now", stamp(6), ((XDP_REDIRECT, true), delivered), (shot, no_device)),
            ("in another namespace", stamp(5), ((XDP_REDIRECT, true), delivered), (shot, no_device)),
            ("its device was deleted", stamp(10), ((XDP_DROP, true), no_device), (shot, no_device)),
            ("a departed guest", stamp(8), (dropped, gone), (shot, gone)),
            ("a slot never used", stamp(0), (dropped, gone), (shot, gone)),
            ("a slot out of range", stamp(u32::MAX), (dropped, gone), (shot, gone)),
            ("a plain MAC", GUEST, (dropped, unstamped), (shot, unstamped)),
            ("the broadcast MAC", Mac::BROADCAST, (dropped, unstamped), (shot, unstamped)),
        ];
        for (name, destination, by_hub, by_classifier) in table {
            let sent = frames::with(frames::known_good(), ethernet::DESTINATION, &destination.0);
            let arrived = frames::with(sent.clone(), ethernet::DESTINATION, &GUEST.0);
            for (by, expected) in [(program::HUB, by_hub), (program::HUB_TCX, by_classifier)] {
                let ((action, is_the_guests), verdict) = expected;
                let frame = if is_the_guests { arrived.clone() } else { sent.clone() };
                let counted = verdict.map(|verdict| (verdict, 1)).into_iter().collect();
                let found = programs.run(by, &sent).expect(name);
                assert_eq!(found, Outcome { action, frame, counted }, "{name} by {by}");
            }
        }
    });
}

#[privileged::test]
fn only_a_begun_answer_leaves_the_hub_completed_and_only_for_its_guest() {
    const GUEST_AT: Guest = Guest { mac: GUEST.0, live: 1 };
    const LENGTH: u16 = LONG_RESPONSE_BYTES as u16;
    let date = ServedDate { text: [b'D'; DATE_BYTES], sum: 0x1234, ..ServedDate::default() };
    let response: [u8; LONG_RESPONSE_BYTES] = std::array::from_fn(|at| at as u8);
    let begun = |slot, body: u64, length: u16, date: u16| {
        let mut frame = frames::with(frames::known_good(), ethernet::DESTINATION, &stamp(slot).0);
        frame = frames::with(frame, ethernet::SOURCE, &Mac::SERVICE.0);
        frame = frames::with(frame, ethernet::HEADER + ipv4::TOTAL_LENGTH, &(length + 40).to_be_bytes());
        frame.truncate(CONTENT_AT);
        frame.extend(body.to_ne_bytes());
        frame.extend(date.to_ne_bytes());
        // The rest of the request.
        frame.resize(200, b'x');
        frame
    };
    let completed = |frame: &[u8], length: usize, at: usize| {
        let checksum = AnswerRest::read(frame).expect("a begun answer").checksum(&date);
        let mut frame = frames::with(frame.to_vec(), ethernet::DESTINATION, &GUEST.0);
        frame = frames::with(frame, SUM_AT, &checksum);
        frame.truncate(CONTENT_AT);
        frame.extend(&response[..length]);
        frames::with(frame, CONTENT_AT + at, &date.text)
    };
    let of_a_guest = frames::with(begun(4, 7, 600, 100), ethernet::SOURCE, &stamp(4).0);
    let table = [
        ("of 513 bytes", begun(4, 7, 513, 100), Some((513, 100))),
        ("the longest, with an odd offset", begun(4, 7, LENGTH, 101), Some((LONG_RESPONSE_BYTES, 101))),
        ("with the date at its end", begun(4, 7, 600, 571), Some((600, 571))),
        ("shorter than the request", begun(4, 7, 60, 9), Some((60, 9))),
        ("with a date beyond its end", begun(4, 7, 600, 572), None),
        ("too long", begun(4, 7, LENGTH + 1, 100), None),
        ("of no bytes", begun(4, 7, 0, 0), None),
        ("whose response was withdrawn", begun(4, 8, 600, 100), None),
        ("for a slot without a guest", begun(5, 7, 600, 100), None),
        ("for a departed guest", begun(6, 7, 600, 100), None),
        ("for a guest whose device no classifier reaches", begun(9, 7, 600, 100), None),
        ("with a guest's stamp", of_a_guest, None),
        ("cut short", begun(4, 7, 600, 100)[..CONTENT_AT + 9].to_vec(), None),
    ];
    in_empty_namespace(|| {
        let mut programs = node();
        for slot in [4, 6, 9] {
            programs.place_guest(slot, GUEST_AT).expect("a guest");
            programs.place_guest_device(slot).expect("its device");
        }
        programs.place_guest(6, Guest { live: 0, ..GUEST_AT }).expect("a departed guest");
        for slot in [4, 6] {
            programs.place_home_device(slot, LOOPBACK).expect("a device");
        }
        programs.place_response(7, response, date).expect("a response");
        for (name, frame, expected) in &table {
            let found = programs.run(program::REQUEST_TCX, frame).expect(name);
            let counted = vec![(Verdict::DropUnwritable, 1)];
            match expected {
                Some((length, at)) => {
                    let frame = completed(frame, *length, *at);
                    assert_eq!(found, Outcome { action: TC_ACT_REDIRECT, frame, counted: vec![] }, "{name}");
                }
                None => assert_eq!((found.action, found.counted), (TC_ACT_SHOT, counted), "{name}"),
            }
        }
        let (begun, stamped) = (&table[0].1, &table[11].1);
        let by_socket =
            [begun, stamped].map(|frame| programs.run(program::SOCKET, frame).expect("a run").action);
        assert_eq!(by_socket, [XDP_PASS, XDP_DROP], "only a begun answer becomes a socket buffer");
    });
}

#[privileged::test]
fn frames_reach_the_socket_of_their_queue_or_are_dropped() {
    in_empty_namespace(|| {
        let mut programs = node();
        let frame = frames::known_good();
        let run = |programs: &mut Programs| programs.run(program::SOCKET, &frame).expect("a run");
        let dropped =
            Outcome { action: XDP_DROP, frame: frame.clone(), counted: vec![(Verdict::SocketDropAbsent, 1)] };
        assert_eq!(run(&mut programs), dropped);
        let socket = programs.place_socket(0).expect("a socket on the queue");
        let delivered = Outcome {
            action: XDP_REDIRECT,
            frame: frame.clone(),
            counted: vec![(Verdict::SocketDelivered, 1)],
        };
        assert_eq!(run(&mut programs), delivered);
        drop(socket);
        assert_eq!(run(&mut programs), dropped);
    });
}

// Programs behind a stub give the verdicts that they give when they are attached themselves.

#[privileged::test]
fn programs_behind_a_stub_give_the_same_verdicts_in_their_namespace() {
    in_empty_namespace(|| {
        let mut direct = node_with_guest();
        let mut behind = with_guest(serving(Programs::load_behind_stub(NETNS).expect("the objects load")));
        for answers in [0, ANSWER_LINK | ANSWER_TCP] {
            for programs in [&mut direct, &mut behind] {
                programs.own(PORT, Port { answers, ..UNLIMITED }).expect("the port is registered");
            }
            let cases = frames::cases();
            let tagged = cases.iter().map(|case| {
                let mut frame = case.frame.clone();
                frame.splice(ethernet::TYPE..ethernet::TYPE, [0x81, 0, 0x60, 0]);
                frames::Case { frame, ..*case }
            });
            for case in
                tagged.chain(cases.iter().map(|case| frames::Case { frame: case.frame.clone(), ..*case }))
            {
                let frame = &case.frame;
                for (port, stub) in
                    [(program::PORT, program::PORT_STUB), (program::PORT_TCX, program::PORT_TCX_STUB)]
                {
                    // The kernel takes no buffer that ends in an IP header for a test run.
                    if port == program::PORT_TCX && frame.len() < ethernet::HEADER + ipv6::HEADER {
                        continue;
                    }
                    let mut expected = direct.run(port, frame).expect("a run");
                    if expected.action == TC_ACT_REDIRECT {
                        // A redirect cannot leave the namespace, so the frame goes to the ring buffer and is dropped.
                        expected.action = TC_ACT_SHOT;
                        expected.counted.push((Verdict::RingDelivered, 1));
                    }
                    assert_eq!(behind.run(stub, frame).expect("a run"), expected, "{port}: {}", case.name);
                }
            }
        }
    });
}

#[privileged::test]
fn a_guest_of_another_namespace_is_unknown_behind_a_stub() {
    let frame = frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, tcp::SYN));
    in_empty_namespace(|| {
        let mut programs =
            with_guest(serving(Programs::load_behind_stub(NETNS + 1).expect("the objects load")));
        let elsewhere = PortKey { netns: NETNS + 1, ..PORT };
        programs.own(elsewhere, UNLIMITED).expect("the port is registered");
        for stub in [program::PORT_STUB, program::PORT_TCX_STUB] {
            let found = programs.run(stub, &frame).expect("a run");
            assert_eq!(found.counted, [(Verdict::DropUnknownMac, 1)], "{stub}");
        }
    });
}

#[privileged::test]
fn a_stub_with_nothing_behind_it_passes_frames_unchanged() {
    let frame = frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, tcp::SYN));
    in_empty_namespace(|| {
        let mut programs = Programs::load_behind_stub(NETNS).expect("the objects load");
        programs.take_from_behind().expect("the entry is removed");
        for (stub, pass) in [(program::PORT_STUB, XDP_PASS), (program::PORT_TCX_STUB, TC_ACT_UNSPEC)] {
            let (action, found) = programs.run_uncounted(stub, &frame).expect("a run");
            assert_eq!((action, found), (pass, frame.clone()), "{stub}");
        }
    });
}

#[privileged::test]
fn a_classifiers_stub_passes_ordinary_frames_itself() {
    let frame = frames::frame(&[], ethernet::IPV4, &frames::syn(frames::OTHER_V4, 80));
    in_empty_namespace(|| {
        let mut programs = serving(Programs::load_behind_stub(NETNS).expect("the objects load"));
        programs.take_from_behind().expect("the entry is removed");
        let outcome = programs.run(program::PORT_TCX_STUB, &frame).expect("a run");
        assert_eq!(outcome, Outcome { action: TC_ACT_UNSPEC, frame, counted: vec![] });
    });
}
