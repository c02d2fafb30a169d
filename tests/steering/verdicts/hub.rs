//! Frames reach the hub and its socket, and answers leave the hub for their guest.

use metadata_common::drain;
use metadata_common::mac::Mac;
use metadata_common::maps::{ANSWER_TCP, BARE, Guest, Identity, Port, program};
use metadata_common::stamp::stamp;
use metadata_common::verdict::Verdict;
use metadata_common::wire::{ethernet, ipv4, protocol, tcp};
use support::frames::{self, GUEST, SERVED_V4, SERVED_V6};
use support::privileged;
use support::prog_test::{
    KEY, LOOPBACK, Outcome, Programs, TC_ACT_REDIRECT, TC_ACT_SHOT, XDP_DROP, XDP_PASS, XDP_REDIRECT,
    in_empty_namespace,
};

use super::node::{
    BOTH_WAYS, IDENTITY, PORT, UNLIMITED, assert_known_good, assert_verdict, node, node_with_guest,
};

#[test]
fn a_departing_agents_hub_gets_only_the_connections_it_claimed() {
    const GONE: u32 = 9;
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn the_kernel_keeps_answering_while_an_agent_departs() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn metadata_frames_are_dropped_without_a_hub_and_others_pass() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn answers_leave_the_hub_for_the_guest_they_are_stamped_with() {
    const GUEST_AT: Guest = Guest { mac: GUEST.0, live: 1 };
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn the_hubs_classifier_delivers_to_devices_of_its_own_namespace_that_are_still_there() {
    const GUEST_AT: Guest = Guest { mac: GUEST.0, live: 1 };
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn frames_reach_the_socket_of_their_queue_or_are_dropped() {
    if !privileged::or_skip() {
        return;
    }
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
