//! The stack's answers to single segments, including ones that no well-behaved client sends.

use std::net::IpAddr;
use std::time::Duration;

use metadata_common::addresses;
use metadata_common::mac::Mac;
use metadata_common::stamp::stamp;
use metadata_datapath::stack::{GuestDevices, RECEIVE_BUFFER, StackConfig};
use metadata_user::service::MetadataService;
use smoltcp::wire::TcpControl::{Fin, None as Plain, Rst, Syn};
use support::pattern::{Pattern, stack};
use support::raw::{ACK, FIN_ACK, GATEWAY, Raw, Reply, SYN_ACK, Segment};
use support::{checksum, frames};

/// The [`Reply::flags`] of a reset that refuses a SYN.
const RST_ACK: (bool, bool, bool, bool) = (false, true, false, true);

const GET: &[u8] = b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\n\r\n";
const GET_AND_CLOSE: &[u8] = b"GET /bytes/10 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

fn raw() -> Raw<MetadataService<Pattern>> {
    let served: Vec<IpAddr> =
        vec![[169, 254, 169, 254].into(), "fe80::a9fe:a9fe".parse().expect("an address")];
    let (stack, _) = stack(StackConfig { served, ..StackConfig::default() });
    Raw::new(stack)
}

/// Asserts that the stack frees every connection and port after the guest stops sending.
fn settles(mut raw: Raw<MetadataService<Pattern>>) {
    raw.wait(Duration::from_secs(600));
    let stats = raw.stack.stats();
    assert_eq!((stats.connections, stats.ports, raw.stack.time_waits()), (0, 0, 0), "{stats:?}");
}

fn text(replies: &[Reply]) -> String {
    replies.iter().map(|reply| String::from_utf8_lossy(&reply.payload).into_owned()).collect()
}

#[test]
fn a_syn_is_answered_with_mss_window_and_ttl_as_promised() {
    let mut raw = raw();
    let replies = raw.send(&Segment::syn(40_000, 1000));
    assert_eq!(replies.len(), 1);
    let Reply { flags, ack, mss, ttl, window, macs, .. } = replies[0].clone();
    assert_eq!((flags, ack, mss, ttl), (SYN_ACK, 1001, Some(1460), 64));
    assert_eq!(usize::from(window), RECEIVE_BUFFER);
    assert_eq!(macs, (stamp(raw.slot), Mac::SERVICE));
    settles(raw);
}

#[test]
fn answers_come_from_the_mac_that_the_guest_sent_to() {
    let mut raw = raw();
    for (to, from) in [(GATEWAY, GATEWAY), (Mac::SERVICE, Mac::SERVICE), (Mac::BROADCAST, Mac::SERVICE)] {
        let replies = raw.send(&Segment { to, ..Segment::syn(40_000, u32::from(to.0[0])) });
        assert_eq!(replies[0].macs, (stamp(raw.slot), from), "sent to {to}");
    }
    settles(raw);
}

#[test]
fn a_guest_that_changes_gateway_is_answered_by_the_new_one() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let replies = raw.send(&Segment { to: GATEWAY, ..Segment::ack(40_000, 1001, next).with(GET) });
    assert_eq!(replies[0].macs.1, GATEWAY);
}

#[test]
fn the_mss_in_a_syn_ack_fits_the_mtu_of_the_device() {
    for (mtu, v4, v6) in [(0, 1460, 1440), (1_280, 1240, 1220), (1_450, 1410, 1390), (9_000, 1460, 1440)] {
        let served = families().map(|(_, service)| service).to_vec();
        let devices = GuestDevices::new(8);
        let (stack, _) =
            stack(StackConfig { served, guest_devices: devices.clone(), ..StackConfig::default() });
        let mut raw = Raw::new(stack);
        devices.set_mtu(raw.slot, mtu);
        for ((guest, service), size) in families().into_iter().zip([v4, v6]) {
            let (source, destination) = ((guest, 40_000), (service, 80));
            let reply = raw.send(&Segment { source, destination, ..Segment::syn(40_000, 1000) });
            assert_eq!(reply[0].mss, Some(size), "an MTU of {mtu} from {guest}");
        }
    }
}

/// A request on a connection of either family, as a frame.
fn request((guest, service): (IpAddr, IpAddr), raw: &mut Raw<MetadataService<Pattern>>) -> Vec<u8> {
    let (source, destination) = ((guest, 40_000), (service, 80));
    let syn = Segment { source, destination, ..Segment::syn(40_000, 1000) };
    let next = raw.send(&syn)[0].seq.wrapping_add(1);
    Segment { source, destination, ..Segment::ack(40_000, 1001, next).with(GET) }.frame(raw.slot)
}

/// A guest and the service, over IPv4 and over IPv6.
fn families() -> [(IpAddr, IpAddr); 2] {
    let v6 = |text: &str| IpAddr::V6(text.parse().expect("an address"));
    [
        ([10, 0, 2, 15].into(), [169, 254, 169, 254].into()),
        (v6("fe80::5054:ff:fe12:3456"), v6("fe80::a9fe:a9fe")),
    ]
}

#[test]
fn complete_and_partial_checksums_are_accepted() {
    for family in families() {
        for partial in [false, true] {
            let mut raw = raw();
            let mut frame = request(family, &mut raw);
            if partial {
                let whole = frame.clone();
                checksum::partial(&mut frame);
                assert_ne!(frame, whole);
            }
            assert!(!raw.frame(&frame).is_empty(), "{family:?}, partial: {partial}");
            assert_eq!((raw.stack.stats().accepted, raw.stack.stats().dropped_checksum), (1, 0));
        }
    }
}

#[test]
fn a_segment_with_a_wrong_bit_or_no_checksum_is_dropped_and_counted() {
    for family in families() {
        let tcp = if family.0.is_ipv4() { 34 } else { 54 };
        let mut raw = raw();
        let whole = request(family, &mut raw);
        let syn = raw.stack.stats().sent;
        // Ports and header length stay unchanged, because a wrong one makes the segment malformed.
        let places = (tcp + 4..whole.len()).filter(|at| *at != tcp + 12);
        let mut wrong: Vec<Vec<u8>> =
            places.map(|at| frames::with(whole.clone(), at, &[whole[at] ^ 0x10])).collect();
        wrong.push(frames::with(whole.clone(), tcp + 16, &[0, 0]));
        let mut other =
            Segment { source: (family.0, 40_000), destination: (family.1, 80), ..Segment::syn(40_000, 7) }
                .frame(raw.slot);
        other[tcp + 17] ^= 1;
        wrong.push(other);
        for frame in &wrong {
            assert!(raw.frame(frame).is_empty(), "{family:?}: {frame:02x?}");
        }
        let stats = raw.stack.stats();
        assert_eq!((stats.dropped_checksum, stats.accepted, stats.sent), (wrong.len() as u64, 0, syn));
        assert!(!raw.frame(&whole).is_empty(), "{family:?}: the unchanged frame");
    }
}

#[test]
fn a_wrong_ipv4_header_checksum_is_dropped_and_counted() {
    let mut raw = raw();
    let mut frame = Segment::syn(40_000, 1000).frame(raw.slot);
    frame[14 + 10] ^= 0xff;
    assert!(raw.frame(&frame).is_empty());
    assert_eq!(raw.stack.stats().dropped_checksum, 1);
}

#[test]
fn a_closed_port_answers_with_a_reset_and_holds_no_state() {
    let mut raw = raw();
    let replies =
        raw.send(&Segment { destination: ([169, 254, 169, 254].into(), 443), ..Segment::syn(40_000, 1000) });
    assert_eq!(replies[0].flags, RST_ACK);
    assert_eq!(replies[0].ack, 1001);
    assert_eq!(raw.stack.stats().ports, 0);
}

#[test]
fn a_segment_of_no_connection_is_reset_unless_it_is_a_reset() {
    let mut raw = raw();
    let replies = raw.send(&Segment::ack(40_000, 5, 77).with(b"x"));
    assert_eq!((replies[0].flags.3, replies[0].seq), (true, 77));
    assert!(raw.send(&Segment::ack(40_000, 5, 77).control(Rst)).is_empty());
    assert!(raw.send(&Segment::ack(40_000, 5, 77).control(Syn))[0].flags.3);
    settles(raw);
}

#[test]
fn an_unserved_address_is_not_answered() {
    let mut raw = raw();
    assert!(
        raw.send(&Segment { destination: ([10, 0, 0, 1].into(), 80), ..Segment::syn(40_000, 1) }).is_empty()
    );
    assert_eq!(raw.stack.stats().dropped_address, 1);
}

#[test]
fn a_handshake_holds_no_state_and_its_answer_is_not_retransmitted() {
    let mut raw = raw();
    raw.send(&Segment::syn(40_000, 1000));
    let next = raw.connect(40_001);
    let stats = raw.stack.stats();
    assert_eq!((stats.handshakes, stats.accepted, stats.connections, stats.ports), (2, 0, 0, 0));
    assert!(raw.wait(Duration::from_secs(20)).is_empty());
    let replies = raw.send(&Segment::ack(40_001, 1001, next).with(GET));
    assert!(text(&replies).starts_with("HTTP/1.1 200 OK\r\n"), "even a late request is answered");
    settles(raw);
}

#[test]
fn a_repeated_syn_gets_the_same_answer_until_there_is_a_connection() {
    let mut raw = raw();
    let first = raw.send(&Segment::syn(40_000, 1000));
    assert_eq!(raw.send(&Segment::syn(40_000, 1000)), first);
    let replies = raw.send(&Segment::ack(40_000, 1001, first[0].seq.wrapping_add(1)).with(GET));
    assert!(text(&replies).starts_with("HTTP/1.1 200 OK\r\n"));
    let over = raw.send(&Segment::syn(40_000, 1000));
    assert_eq!(over, raw.send(&Segment::syn(40_000, 1000)), "on an open connection");
    assert_ne!(over[0].seq, first[0].seq, "a new connection needs another sequence number");
    assert_eq!(over, [Reply { seq: over[0].seq, ..first[0].clone() }]);
    assert_eq!(raw.stack.stats().accepted, 1);
}

#[test]
fn a_segment_that_overtook_the_first_one_is_dropped() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let (start, end) = GET.split_at(10);
    let second = Segment::ack(40_000, 1011, next).with(end);
    assert!(raw.send(&second).is_empty());
    assert_eq!((raw.stack.stats().dropped_early, raw.stack.stats().connections), (1, 0));
    raw.send(&Segment::ack(40_000, 1001, next).with(start));
    assert!(text(&raw.send(&second)).starts_with("HTTP/1.1 200 OK\r\n"));
}

#[test]
fn the_third_segment_of_a_forgotten_connection_is_reset() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let replies = raw.send(&Segment::ack(40_000, 1001, next).with(GET));
    let acknowledged =
        replies.last().map(|last| last.seq.wrapping_add(last.payload.len() as u32)).expect("an answer");
    raw.stack.forget(raw.slot);
    let again = Segment::ack(40_000, 1001 + GET.len() as u32, acknowledged).with(GET);
    for _ in 0..2 {
        assert!(raw.send(&again).is_empty());
        raw.wait(Duration::from_millis(200));
    }
    let replies = raw.send(&again);
    assert_eq!((replies.len(), replies[0].flags.3, replies[0].seq), (1, true, acknowledged), "{replies:?}");
    let stats = raw.stack.stats();
    assert_eq!((stats.dropped_early, stats.forgotten, stats.unmatched), (2, 1, 1));
}

#[test]
fn a_connection_that_may_still_exist_is_not_reset() {
    // Three situations: sequence numbers change each time, pauses are long, or the agent took over another agent's
    // guests.
    let cases = [
        ("new bytes each time", 1, Duration::from_millis(200)),
        ("a minute apart", 0, Duration::from_secs(61)),
    ];
    for (name, step, pause) in cases {
        let mut raw = raw();
        let next = raw.connect(40_000);
        for n in 0..10 {
            assert!(raw.send(&Segment::ack(40_000, 5000 + n * step, next).with(b"x")).is_empty(), "{name}");
            raw.wait(pause);
        }
        assert_eq!(raw.stack.stats().forgotten, 0, "{name}");
    }
    let mut raw = raw();
    raw.stack.spare_unknown(true);
    let next = raw.connect(40_000);
    for _ in 0..10 {
        assert!(raw.send(&Segment::ack(40_000, 5000, next).with(b"x")).is_empty(), "after a takeover");
    }
}

#[test]
fn a_reset_after_a_syn_leaves_no_connection() {
    let mut raw = raw();
    raw.send(&Segment::syn(40_000, 1000));
    assert!(raw.send(&Segment { ack: None, ..Segment::ack(40_000, 1001, 0) }.control(Rst)).is_empty());
    assert_eq!(raw.stack.stats().connections, 0);
    settles(raw);
}

#[test]
fn a_guest_that_closes_without_a_request_gets_a_fin() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let replies = raw.send(&Segment::ack(40_000, 1001, next).control(Fin));
    assert_eq!((replies[0].flags, replies[0].ack), (FIN_ACK, 1002));
    assert!(raw.send(&Segment::ack(40_000, 1002, next.wrapping_add(1))).is_empty());
    assert_eq!((raw.stack.stats().connections, raw.stack.stats().accepted), (0, 1));
    settles(raw);
}

/// Runs a connection that the service closes first. Returns the guest's next sequence and acknowledgement numbers.
fn to_time_wait(raw: &mut Raw<MetadataService<Pattern>>) -> (u32, u32) {
    let next = raw.connect(1);
    let replies = raw.send(&Segment::ack(1, 1001, next).with(GET_AND_CLOSE));
    let last = replies.last().expect("an answer");
    assert_eq!(last.flags, FIN_ACK, "the FIN is in the last segment of the answer");
    let (seq, ack) =
        (1001 + GET_AND_CLOSE.len() as u32, last.seq.wrapping_add(last.payload.len() as u32 + 1));
    let replies = raw.send(&Segment::ack(1, seq, ack).control(Fin));
    assert_eq!((replies[0].flags, replies[0].ack), (ACK, seq + 1));
    assert_eq!((raw.stack.stats().connections, raw.stack.time_waits()), (0, 1));
    (seq + 1, ack)
}

#[test]
fn a_syn_for_a_four_tuple_in_time_wait_starts_a_new_connection() {
    for initial in [1000, 1001, 77_000, 0x8000_0000] {
        let mut raw = raw();
        to_time_wait(&mut raw);
        let opened = raw.send(&Segment::syn(1, initial));
        assert_eq!((opened[0].flags, opened[0].ack), (SYN_ACK, initial.wrapping_add(1)));
        let (seq, next) = (initial.wrapping_add(1), opened[0].seq.wrapping_add(1));
        assert!(raw.send(&Segment::ack(1, seq, next)).is_empty());
        let replies = raw.send(&Segment::ack(1, seq, next).with(GET));
        assert!(text(&replies).starts_with("HTTP/1.1 200 OK\r\n"), "from {initial}");
        assert_eq!((raw.stack.stats().time_wait_reused, raw.stack.time_waits()), (1, 0));
        settles(raw);
    }
}

#[test]
fn a_client_with_one_source_port_is_answered_each_time_at_once() {
    // Scaleway's client uses port 1 for every fetch over both families, and the service closes first.
    let pairs: [(IpAddr, IpAddr); 2] = [
        (addresses::SCALEWAY.into(), [10, 0, 2, 15].into()),
        (addresses::SCALEWAY_V6.into(), "fd00:42::10".parse().expect("an address")),
    ];
    for (service, guest) in pairs {
        let (stack, _) = stack(StackConfig { served: vec![service], ..StackConfig::default() });
        let mut raw = Raw::new(stack);
        let from = |segment| Segment { source: (guest, 1), destination: (service, 80), ..segment };
        for fetch in 0..4_u32 {
            // The last initial sequence number repeats the first one, as after a restart of the client.
            let initial = 1000 + fetch % 3 * 64_000;
            let opened = raw.send(&from(Segment::syn(1, initial)));
            assert_eq!((opened[0].flags, opened[0].ack), (SYN_ACK, initial + 1), "{service}, fetch {fetch}");
            let next = opened[0].seq.wrapping_add(1);
            let replies = raw.send(&from(Segment::ack(1, initial + 1, next).with(GET_AND_CLOSE)));
            assert!(text(&replies).starts_with("HTTP/1.1 200 OK\r\n"), "{service}, fetch {fetch}");
            let last = replies.last().expect("an answer");
            assert_eq!(last.flags, FIN_ACK, "the FIN is in the segment with the data");
            let (seq, end) = (initial + 1 + GET_AND_CLOSE.len() as u32, last.payload.len() as u32 + 1);
            raw.send(&from(Segment::ack(1, seq, last.seq.wrapping_add(end)).control(Fin)));
            let stats = raw.stack.stats();
            assert_eq!((stats.connections, stats.time_wait_reused), (0, u64::from(fetch)), "{service}");
        }
        settles(raw);
    }
}

#[test]
fn the_password_port_is_open_on_the_general_addresses_only() {
    let served = addresses::ALL.to_vec();
    let (stack, _) = stack(StackConfig { served, ..StackConfig::default() });
    let mut raw = Raw::new(stack);
    for (address, port) in addresses::ALL.into_iter().flat_map(|address| [(address, 80), (address, 8080)]) {
        let guest: IpAddr =
            if address.is_ipv4() { [10, 0, 2, 15].into() } else { "fe80::10".parse().unwrap() };
        let general = [addresses::METADATA.into(), addresses::METADATA_LINK_LOCAL.into()].contains(&address);
        let opened = raw.send(&Segment {
            source: (guest, 40_000),
            destination: (address, port),
            ..Segment::syn(40_000, 1000)
        });
        let expected = if port == 80 || general { SYN_ACK } else { RST_ACK };
        assert_eq!((opened.len(), opened[0].flags), (1, expected), "{address} port {port}");
        assert_eq!(opened[0].ports.0, port);
    }
    settles(raw);
}

#[test]
fn time_wait_answers_a_repeated_fin_and_ignores_resets() {
    let mut raw = raw();
    let (seq, ack) = to_time_wait(&mut raw);
    let replies = raw.send(&Segment::ack(1, seq - 1, ack).control(Fin));
    assert_eq!((replies[0].flags, replies[0].seq, replies[0].ack), (ACK, ack, seq));
    assert!(raw.send(&Segment::ack(1, seq, ack).control(Rst)).is_empty());
    assert!(raw.send(&Segment::ack(1, seq, ack)).is_empty());
    assert_eq!(raw.stack.time_waits(), 1);
    raw.wait(Duration::from_secs(11));
    assert!(raw.send(&Segment::ack(1, seq, ack).with(b"x")).is_empty(), "TIME-WAIT has expired");
    assert_eq!((raw.stack.time_waits(), raw.stack.stats().dropped_early), (0, 1));
    settles(raw);
}

#[test]
fn time_wait_lasts_from_the_last_fin() {
    let mut raw = raw();
    let (seq, ack) = to_time_wait(&mut raw);
    raw.wait(Duration::from_secs(8));
    assert_eq!(raw.send(&Segment::ack(1, seq - 1, ack).control(Fin)).len(), 1);
    raw.wait(Duration::from_secs(9));
    assert_eq!(raw.stack.time_waits(), 1);
    raw.wait(Duration::from_secs(2));
    assert_eq!(raw.stack.time_waits(), 0);
    settles(raw);
}

#[test]
fn a_new_connection_replaces_the_old_one_of_its_four_tuple_with_its_first_data() {
    let mut raw = raw();
    raw.open(40_000);
    let opened = raw.send(&Segment::syn(40_000, 9_000_000));
    assert_eq!((opened[0].flags, opened[0].ack), (SYN_ACK, 9_000_001));
    let next = opened[0].seq.wrapping_add(1);
    assert!(raw.send(&Segment::ack(40_000, 9_000_001, next)).is_empty());
    assert_eq!((raw.stack.stats().superseded, raw.stack.stats().connections), (0, 1));
    let replies = raw.send(&Segment::ack(40_000, 9_000_001, next).with(GET));
    assert!(text(&replies).starts_with("HTTP/1.1 200 OK\r\n"));
    assert_eq!((raw.stack.stats().superseded, raw.stack.stats().connections), (1, 1));
    settles(raw);
}

#[test]
fn a_repeated_syn_does_not_disturb_its_connection() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    raw.send(&Segment::syn(40_000, 1000));
    let replies = raw.send(&Segment::ack(40_000, 1001, next).with(GET));
    assert!(text(&replies).contains("200 OK"));
    assert_eq!(raw.stack.stats().superseded, 0);
}

#[test]
fn segments_fit_the_announced_mss_but_never_shrink_below_the_minimum() {
    const BODY: usize = 4000;
    let families: [([IpAddr; 2], u16, u16); 2] = [
        ([[10, 0, 2, 15].into(), [169, 254, 169, 254].into()], 536, 1460),
        (["fe80::10", "fe80::a9fe:a9fe"].map(|address| address.parse().expect("an address")), 1220, 1440),
    ];
    for ([guest, service], least, largest) in families {
        for mss in
            [None, Some(0), Some(1), Some(48), Some(64), Some(536), Some(1220), Some(1460), Some(65_535)]
        {
            let mut raw = raw();
            let from = |segment| Segment { source: (guest, 40_000), destination: (service, 80), ..segment };
            let first = raw.send(&from(Segment { mss, ..Segment::syn(40_000, 1000) }));
            let next = first[0].seq.wrapping_add(1);
            let get = format!("GET /bytes/{BODY} HTTP/1.1\r\nHost: x\r\n\r\n");
            let replies = raw.send(&from(Segment::ack(40_000, 1001, next).with(get.as_bytes())));
            let most = replies.iter().map(|reply| reply.payload.len()).max().expect("an answer");
            let limit = usize::from(mss.unwrap_or(0).clamp(least, largest));
            assert_eq!(most, limit, "{service}, {mss:?}");
            // The service sends ten segments at first (RFC 6928), or a shorter answer as a whole.
            let sent: usize = replies.iter().map(|reply| reply.payload.len()).sum();
            assert!(sent >= BODY.min(10 * limit), "{service}, {mss:?}: {sent}");
        }
    }
}

#[test]
fn a_closed_window_is_probed_and_the_answer_continues_when_it_opens() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let ask = Segment { window: 0, ..Segment::ack(40_000, 1001, next).with(GET) };
    assert!(text(&raw.send(&ask)).is_empty(), "nothing fits a closed window");
    let probes = raw.wait(Duration::from_secs(4));
    assert!(probes.iter().any(|probe| probe.payload.len() == 1), "{probes:?}");
    let seq = 1001 + GET.len() as u32;
    let mut replies = raw.send(&Segment::ack(40_000, seq, next));
    replies.extend(raw.wait(Duration::from_secs(3)));
    assert!(text(&replies).contains("200 OK"), "{replies:?}");
}

#[test]
fn a_fin_is_retransmitted_after_three_duplicate_acknowledgements() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let replies = raw.send(&Segment::ack(40_000, 1001, next).with(GET_AND_CLOSE));
    let last = replies.last().expect("an answer");
    let fin = last.seq.wrapping_add(last.payload.len() as u32);
    let seq = 1001 + GET_AND_CLOSE.len() as u32;
    for _ in 0..5 {
        raw.send(&Segment::ack(40_000, seq, fin));
    }
    let repeated = raw.wait(Duration::from_secs(10));
    assert!(repeated.iter().any(|reply| reply.flags == FIN_ACK && reply.seq == fin), "{repeated:?}");
    assert!(raw.send(&Segment::ack(40_000, seq, fin.wrapping_add(1)).control(Fin))[0].flags == ACK);
    settles(raw);
}

#[test]
fn a_guest_that_never_closes_its_side_is_reset() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let replies = raw.send(&Segment::ack(40_000, 1001, next).with(GET_AND_CLOSE));
    let last = replies.last().expect("an answer");
    let end = last.seq.wrapping_add(last.payload.len() as u32 + 1);
    raw.send(&Segment::ack(40_000, 1001 + GET_AND_CLOSE.len() as u32, end));
    let after = raw.wait(Duration::from_secs(31));
    assert!(after.iter().any(|reply| reply.flags.3), "{after:?}");
    assert_eq!((raw.stack.stats().stalled, raw.stack.stats().connections), (1, 0));
    settles(raw);
}

#[test]
fn the_connection_of_a_vanished_guest_is_freed() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    raw.send(&Segment::ack(40_000, 1001, next).with(GET));
    raw.wait(Duration::from_secs(119));
    assert_eq!(raw.stack.stats().connections, 1);
    raw.wait(Duration::from_secs(2));
    assert_eq!((raw.stack.stats().connections, raw.stack.stats().stalled), (0, 1));
}

#[test]
fn an_offloaded_segment_as_large_as_the_window_is_accepted_whole() {
    let mut raw = raw();
    let next = raw.connect(40_000);
    let head = b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3000\r\n\r\n";
    let mut payload = head.to_vec();
    payload.resize(RECEIVE_BUFFER, b'x');
    let replies = raw.send(&Segment::ack(40_000, 1001, next).with(&payload));
    assert_eq!(replies.last().map(|reply| reply.ack), Some(1001 + RECEIVE_BUFFER as u32));
}

#[test]
fn ipv6_guests_are_served_with_an_mss_that_fits() {
    let mut raw = raw();
    let guest: IpAddr = "fe80::5054:ff:fe12:3456".parse().expect("an address");
    let service: IpAddr = "fe80::a9fe:a9fe".parse().expect("an address");
    let six = |segment: Segment| Segment { source: (guest, 40_000), destination: (service, 80), ..segment };
    let replies = raw.send(&six(Segment::syn(40_000, 1000)));
    assert_eq!((replies[0].flags, replies[0].mss), (SYN_ACK, Some(1440)));
    let next = replies[0].seq.wrapping_add(1);
    let replies = raw.send(&six(Segment::ack(40_000, 1001, next).with(GET)));
    assert!(text(&replies).starts_with("HTTP/1.1 200 OK\r\n"));
    assert_eq!(replies[0].addresses, (service, guest));
    settles(raw);
}

#[test]
fn a_segment_that_opens_no_connection_creates_no_port() {
    let mut raw = raw();
    raw.send(&Segment::ack(40_000, 1, 1).control(Plain));
    assert_eq!(raw.stack.stats().ports, 0);
}
