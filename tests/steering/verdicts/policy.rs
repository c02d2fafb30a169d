//! The programs give each frame the verdict of `classify`, for named, mutated and enumerated frames.

use metadata_common::classify::classify;
use metadata_common::maps::{ANSWER_LINK, ANSWER_TCP, Port, program};
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::{ethernet, ipv4, ipv6, protocol};
use support::frames::{self, Both, SERVED_V4, SERVED_V6};
use support::prog_test::{XDP_PASS, in_empty_namespace};
use support::{privileged, seed};

use super::node::{
    PORT, UNLIMITED, assert_known_good, assert_verdict, assert_verdict_by, node_with_guest, outcome,
    without_priority_tag,
};

#[test]
fn every_named_frame_gets_its_verdict() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_priority_tag_changes_no_verdict_and_no_answer_and_stays_on_frames_that_pass() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn the_kernel_and_the_policy_agree_on_mutated_frames() {
    const ROUNDS: usize = 20_000;
    if !privileged::or_skip() {
        return;
    }
    let mut random = fastrand::Rng::with_seed(seed::seed());
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

#[test]
fn only_ip_arp_and_tagged_ethertypes_are_parsed() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn all_tcp_ports_of_a_served_address_are_steered() {
    if !privileged::or_skip() {
        return;
    }
    let frame = |port| frames::frame(&[], ethernet::IPV4, &frames::syn(SERVED_V4, port));
    in_empty_namespace(|| assert_totals(0..=u16::MAX, frame, &[(Verdict::SteerIpv4Tcp, 65_536)]));
}

#[test]
fn tcp_and_icmp_are_the_only_ipv4_protocols_served() {
    if !privileged::or_skip() {
        return;
    }
    let totals = [
        (Verdict::SteerIpv4Tcp, 1),
        (Verdict::SteerIpv4Icmp, 1),
        (Verdict::DropIpv4Udp, 1),
        (Verdict::DropIpv4Protocol, 253),
    ];
    let frame = |n| frames::frame(&[], ethernet::IPV4, &frames::datagram(SERVED_V4, n));
    in_empty_namespace(|| assert_totals(0..=u8::MAX, frame, &totals));
}

#[test]
fn tcp_and_icmpv6_are_the_only_ipv6_next_headers_served() {
    if !privileged::or_skip() {
        return;
    }
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
