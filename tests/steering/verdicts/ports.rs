//! What a port registers and limits decides which of its frames are served.

use metadata_common::mac::Mac;
use metadata_common::maps::{Port, PortKey, program};
use metadata_common::stamp::stamp;
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::{ethernet, ipv6, tcp};
use support::frames::{self, GUEST, SERVED_V4, SERVED_V6};
use support::privileged;
use support::prog_test::{LOOPBACK, XDP_DROP, in_empty_namespace};

use super::node::{
    BOTH_WAYS, IDENTITY, NETNS, PORT, UNLIMITED, assert_known_good, assert_verdict, assert_verdict_by, node,
    node_with_guest,
};

#[test]
fn port_and_mac_together_identify_a_guest() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_port_over_its_frame_limit_is_throttled_while_other_traffic_passes() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_port_over_its_connection_limit_keeps_its_open_connections() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_closed_port_serves_nothing_and_passes_all_other_traffic() {
    if !privileged::or_skip() {
        return;
    }
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
