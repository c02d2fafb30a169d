//! Each test reaches a limit, checks its counter, and checks that the stack recovers.

use std::sync::Arc;
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_common::mac::Mac;
use metadata_common::stamp::stamp;
use metadata_common::time::Now;
use metadata_content::http::{Request, Response, StatusCode};
use metadata_content::store::ParkedCall;
use metadata_datapath::stack::{Service, Stack, StackConfig, TIME_WAITS, TIME_WAITS_PER_PORT};
use metadata_user::service::{Answer, AnswerOrigin, AnswerSource, MetadataService};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::TcpControl::{Fin, Rst};
use smoltcp::wire::{Icmpv4Packet, Icmpv4Repr, Ipv4Packet, Ipv4Repr};
use support::pattern::{Pattern, stack};
use support::raw::{FIN_ACK, Raw, Reply, SYN_ACK, Segment};
use support::{checksum, toy};

fn raw(config: StackConfig) -> Raw<MetadataService<Pattern>> {
    let (stack, _) = stack(config);
    Raw::new(stack)
}

#[test]
fn a_port_at_its_connection_limit_drops_first_segments_until_one_ends() {
    let mut raw = raw(StackConfig { connections_per_port: 128, ..StackConfig::default() });
    for port in 1..=128 {
        raw.open(port);
    }
    let next = raw.connect(200);
    let first = Segment::ack(200, 1001, next).with(b"\n");
    assert!(raw.send(&first).is_empty());
    assert_eq!((raw.stack.stats().refused_port_connections, raw.stack.stats().connections), (1, 128));
    raw.send(&Segment::ack(5, 1002, 0).control(Rst));
    assert_eq!(raw.send(&first)[0].ack, 1002, "the retransmission is accepted");
    raw.slot += 1;
    raw.open(1);
}

#[test]
fn a_full_connection_table_refuses_all_ports_until_a_connection_ends() {
    let mut raw = raw(StackConfig { connections: 3, ..StackConfig::default() });
    for port in 1..=3 {
        raw.open(port);
    }
    raw.slot += 1;
    let next = raw.connect(1);
    let first = Segment::ack(1, 1001, next).with(b"\n");
    assert!(raw.send(&first).is_empty());
    assert_eq!(raw.stack.stats().refused_connections, 1);
    raw.stack.forget(raw.slot - 1);
    assert_eq!(raw.stack.stats().connections, 0);
    assert_eq!(raw.send(&first)[0].ack, 1002);
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";

/// Opens a connection and leaves it idle after its first answer. Returns the service's next sequence number.
fn idle<S: Service>(raw: &mut Raw<S>, port: u16, said: &[u8]) -> u32 {
    let next = raw.connect(port);
    let replies = raw.send(&Segment::ack(port, 1001, next).with(said));
    let answer: usize = replies.iter().map(|reply| reply.payload.len()).sum();
    assert!(answer > 0, "{replies:?}");
    let end = next.wrapping_add(answer as u32);
    raw.send(&Segment::ack(port, 1001 + said.len() as u32, end));
    end
}

/// The guest's ports of all connections that were reset.
fn resets(replies: &[Reply]) -> Vec<u16> {
    replies.iter().filter(|reply| reply.flags.3).map(|reply| reply.ports.1).collect()
}

#[test]
fn idle_connections_of_others_never_lock_a_newcomer_out() {
    for (guests, each) in [(8, 8), (64, 1), (1, 64), (16, 4), (32, 2)] {
        let mut raw = raw(StackConfig { connections: 64, ..StackConfig::default() });
        for slot in 0..guests {
            raw.slot = slot;
            (1..=each).for_each(|port| _ = idle(&mut raw, port, GET));
        }
        assert_eq!(raw.stack.stats().connections, 64);
        for newcomer in 100..164 {
            raw.slot = newcomer;
            let next = raw.connect(1);
            let replies = raw.send(&Segment::ack(1, 1001, next).with(GET));
            let answered = replies.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 404"));
            assert!(answered, "{guests} guests with {each} each, {newcomer}: {replies:?}");
        }
        let stats = raw.stack.stats();
        assert_eq!((stats.connections_evicted, stats.refused_connections), (64, 0));
    }
}

#[test]
fn the_evicted_connection_is_the_longest_idle_of_the_largest_slot() {
    let mut raw = raw(StackConfig { connections: 9, ..StackConfig::default() });
    let mut ends = Vec::new();
    for (slot, port) in [(1, 1), (2, 11), (3, 21), (2, 12), (1, 2), (2, 13), (1, 3), (2, 14), (3, 22)] {
        raw.slot = slot;
        ends.push(idle(&mut raw, port, GET));
    }
    // The first connection of slot 2 sends another request, so its second one is now idle for longest.
    raw.slot = 2;
    let said = 1001 + GET.len() as u32;
    let replies = raw.send(&Segment::ack(11, said, ends[1]).with(GET));
    let answer: usize = replies.iter().map(|reply| reply.payload.len()).sum();
    raw.send(&Segment::ack(11, said + GET.len() as u32, ends[1].wrapping_add(answer as u32)));
    for (newcomer, gone) in (50..).zip([12, 1, 13, 21]) {
        raw.slot = newcomer;
        let next = raw.connect(1);
        assert_eq!(resets(&raw.send(&Segment::ack(1, 1001, next).with(b"\n"))), [gone]);
    }
}

/// Orders of the other slots in [`every_slot_gets_its_share_no_matter_what_others_hold`].
const HOLDINGS: [&[u8]; 4] = [b"far 10\n", b"f", b"far 9000\n", b"park 60\n"];

#[test]
fn every_slot_gets_its_share_no_matter_what_others_hold() {
    const SLOTS: u32 = 16;
    const SHARE: usize = 4;
    let connections = SLOTS as usize * SHARE;
    for kind in 0..=HOLDINGS.len() {
        let config = StackConfig { connections, share: SHARE, slots: SLOTS, ..StackConfig::default() };
        let mut raw = Raw::new(toy::stack(config).0);
        // All slots except the last fill the table unevenly.
        for n in 0..connections as u32 {
            raw.slot = if n < 20 { 0 } else { n % (SLOTS - 1) };
            let said = HOLDINGS[if kind < HOLDINGS.len() { kind } else { n as usize % HOLDINGS.len() }];
            let next = raw.connect(1 + n as u16);
            raw.send(&Segment::ack(1 + n as u16, 1001, next).with(said));
        }
        assert_eq!(raw.stack.stats().connections, connections as u64);
        raw.slot = SLOTS - 1;
        for port in 1..=SHARE as u16 {
            let next = raw.connect(port);
            let replies = raw.send(&Segment::ack(port, 1001, next).with(b"park 60\n"));
            assert_eq!(resets(&replies).len(), 1, "holdings {kind}, {port}: {replies:?}");
        }
        assert_eq!(raw.stack.look(raw.slot).connections, SHARE as u64, "holdings {kind}");
        let least = (0..SLOTS).map(|slot| raw.stack.look(slot).connections).min();
        assert!(least >= Some(2), "every slot keeps connections: {least:?}");
    }
}

#[test]
fn the_default_limits_give_every_slot_its_share() {
    let StackConfig { connections, share, slots, ports, .. } = StackConfig::default();
    assert!(share >= 1 && connections >= share * slots as usize && ports >= slots as usize);
}

#[test]
fn waiting_requests_are_displaced_last_and_only_by_a_slot_below_its_share() {
    let (stack, _) = toy::stack(StackConfig { connections: 20, share: 3, ..StackConfig::default() });
    let mut raw = Raw::new(stack);
    for port in 1..=20 {
        let next = raw.connect(port);
        let said: &[u8] = if port == 20 { b"park" } else { b"park 60\n" };
        assert_eq!(raw.send(&Segment::ack(port, 1001, next).with(said)).len(), 1);
        raw.now += Duration::from_millis(1);
    }
    raw.slot += 1;
    for (port, gone) in [(1, Some(20)), (2, Some(1)), (3, Some(2)), (4, None)] {
        let next = raw.connect(port);
        let replies = raw.send(&Segment::ack(port, 1001, next).with(b"park 60\n"));
        assert_eq!(resets(&replies), Vec::from_iter(gone), "{port}");
    }
    let stats = raw.stack.stats();
    assert_eq!((stats.connections_displaced, stats.refused_connections), (3, 1));
}

#[test]
fn a_slot_at_its_own_limit_gives_up_its_longest_idle_connection() {
    let mut raw = raw(StackConfig { connections_per_port: 4, ..StackConfig::default() });
    (1..=4).for_each(|port| _ = idle(&mut raw, port, GET));
    let other = raw.slot + 1;
    raw.slot = other;
    idle(&mut raw, 1, GET);
    raw.slot -= 1;
    for gone in 1..=4 {
        let next = raw.connect(100 + gone);
        assert_eq!(resets(&raw.send(&Segment::ack(100 + gone, 1001, next).with(b"\n"))), [gone]);
    }
    let next = raw.connect(200);
    assert!(raw.send(&Segment::ack(200, 1001, next).with(b"\n")).is_empty(), "four requests are incomplete");
    let stats = raw.stack.stats();
    assert_eq!((stats.connections_evicted, stats.refused_port_connections), (4, 1));
    assert_eq!(raw.stack.look(other).connections, 1, "the connection of another slot is untouched");
}

#[test]
fn a_port_with_only_idle_connections_is_evicted_for_another() {
    let mut raw = raw(StackConfig { ports: 2, ..StackConfig::default() });
    for slot in [1, 2] {
        raw.slot = slot;
        raw.now += Duration::from_secs(1);
        idle(&mut raw, 1, GET);
    }
    raw.slot = 3;
    let next = raw.connect(5);
    let replies = raw.send(&Segment::ack(5, 1001, next).with(GET));
    assert!(replies.iter().any(|reply| reply.payload.starts_with(b"HTTP/1.1 404")), "{replies:?}");
    let stats = raw.stack.stats();
    assert_eq!((stats.ports_evicted, stats.connections_evicted, stats.refused_ports), (1, 1, 0));
}

#[test]
fn expired_time_waits_are_freed_while_a_connection_remains() {
    let mut raw = raw(StackConfig::default());
    raw.open(1000);
    for port in 1..=5 {
        let next = raw.connect(port);
        raw.send(&Segment::ack(port, 1001, next).control(Fin));
        raw.send(&Segment::ack(port, 1002, next.wrapping_add(1)));
    }
    assert_eq!((raw.stack.time_waits(), raw.stack.stats().connections), (5, 1));
    raw.wait(Duration::from_secs(11));
    assert_eq!((raw.stack.time_waits(), raw.stack.stats().connections), (0, 1));
}

#[test]
fn a_flood_of_handshakes_holds_no_state_and_others_are_served() {
    let mut raw = raw(StackConfig { connections: 1, ..StackConfig::default() });
    for port in 1..=10_000 {
        assert_eq!(raw.send(&Segment::syn(port, u32::from(port)))[0].flags, SYN_ACK);
    }
    let stats = raw.stack.stats();
    assert_eq!((stats.handshakes, stats.connections, stats.ports), (10_000, 0, 0));
    raw.slot += 1;
    raw.open(1);
}

#[test]
fn a_full_port_table_evicts_the_longest_idle_port_or_refuses() {
    let mut raw = raw(StackConfig { ports: 2, ..StackConfig::default() });
    for slot in [1, 2] {
        raw.slot = slot;
        raw.now += Duration::from_secs(1);
        raw.open(1);
    }
    raw.slot = 3;
    let next = raw.connect(1);
    assert!(raw.send(&Segment::ack(1, 1001, next).with(b"\n")).is_empty());
    assert_eq!(raw.stack.stats().refused_ports, 1);
    for slot in [2, 1] {
        raw.slot = slot;
        raw.now += Duration::from_secs(1);
        raw.send(&Segment::ack(1, 1002, 0).control(Rst));
    }
    raw.slot = 3;
    raw.open(1);
    let stats = raw.stack.stats();
    assert_eq!((stats.ports_evicted, stats.ports), (1, 2));
    raw.slot = 1;
    raw.open(1);
    assert_eq!(raw.stack.stats().ports_evicted, 1, "slot 2 was idle for longest and was evicted");
}

#[test]
fn an_idle_port_is_freed_and_leaves_no_timer() {
    let mut raw = raw(StackConfig::default());
    raw.open(1);
    raw.send(&Segment::ack(1, 1002, 0).control(Rst));
    assert_eq!(raw.stack.stats().ports, 1);
    raw.wait(Duration::from_secs(29));
    assert_eq!(raw.stack.stats().ports, 1);
    raw.wait(Duration::from_secs(2));
    assert_eq!(raw.stack.stats().ports, 0);
    let mut sent = support::wire::Sent::default();
    assert_eq!(raw.stack.step(support::wire::at(raw.now), &mut sent), None);
}

#[test]
fn time_waits_are_bounded_and_the_oldest_is_forgotten() {
    let mut raw = raw(StackConfig::default());
    let get = b"GET / HTTP/1.0\r\n\r\n";
    for port in 1..=TIME_WAITS_PER_PORT as u16 + 10 {
        let next = raw.connect(port);
        let replies = raw.send(&Segment::ack(port, 1001, next).with(get));
        let last = replies.last().expect("an answer");
        assert_eq!(last.flags, FIN_ACK);
        let end = last.seq.wrapping_add(last.payload.len() as u32 + 1);
        raw.send(&Segment::ack(port, 1001 + get.len() as u32, end).control(Fin));
    }
    let stats = raw.stack.stats();
    assert_eq!((raw.stack.time_waits(), stats.connections), (TIME_WAITS_PER_PORT, 0));
}

#[test]
fn time_waits_of_all_ports_are_bounded_and_connections_still_work() {
    const PORTS: u32 = (TIME_WAITS / TIME_WAITS_PER_PORT) as u32 + 2;
    let mut raw = raw(StackConfig::default());
    for slot in 0..PORTS {
        raw.slot = slot;
        for port in 1..=TIME_WAITS_PER_PORT as u16 {
            let next = raw.connect(port);
            raw.send(&Segment::ack(port, 1001, next).control(Fin));
            raw.send(&Segment::ack(port, 1002, next.wrapping_add(1)));
        }
    }
    let stats = raw.stack.stats();
    assert_eq!((raw.stack.time_waits(), stats.connections), (TIME_WAITS, 0));
    assert_eq!(stats.accepted, u64::from(PORTS) * TIME_WAITS_PER_PORT as u64);
    raw.wait(Duration::from_secs(60));
    assert_eq!((raw.stack.time_waits(), raw.stack.stats().ports), (0, 0));
}

#[test]
fn answers_are_not_produced_far_ahead_of_a_guest_that_reads_nothing() {
    let (stack, board) = toy::stack(StackConfig::default());
    let mut raw = Raw::new(stack);
    let next = raw.connect(1);
    let orders = b"far 10000\nfar 10000\nwrite 5\n";
    let mut replies = raw.send(&Segment::ack(1, 1001, next).with(orders));
    assert_eq!(board.read(raw.slot), 0, "the service pauses after 20,000 unread bytes");
    let end = |replies: &[Reply]| replies.last().map(|r| r.seq.wrapping_add(r.payload.len() as u32));
    while let Some(ack) = end(&replies) {
        replies = raw.send(&Segment::ack(1, 1001 + orders.len() as u32, ack));
    }
    assert_eq!(board.read(raw.slot), 5);
}

#[test]
fn a_slot_beyond_the_table_is_dropped_and_counted() {
    let mut raw = raw(StackConfig { slots: 8, ..StackConfig::default() });
    raw.slot = 8;
    assert!(raw.send(&Segment::syn(1, 1)).is_empty());
    assert_eq!(raw.stack.stats().dropped_slot, 1);
}

#[test]
fn forgetting_a_slot_sends_nothing_and_frees_everything() {
    let mut raw = raw(StackConfig::default());
    raw.open(1);
    raw.open(2);
    raw.stack.forget(raw.slot);
    raw.stack.forget(raw.slot);
    raw.stack.forget(u32::MAX);
    assert_eq!((raw.stack.stats().connections, raw.stack.stats().ports), (0, 0));
    assert!(raw.wait(Duration::from_secs(5)).is_empty());
}

fn arp(operation: u8, sender: [u8; 4], target: [u8; 4], to: Mac) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend(to.0);
    frame.extend(stamp(7).0);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, operation]);
    frame.extend([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
    frame.extend(sender);
    frame.extend([0; 6]);
    frame.extend(target);
    frame
}

#[test]
fn arp_for_served_addresses_is_answered_to_any_sender() {
    let service = [169, 254, 169, 254];
    for (sender, to) in [
        ([169, 254, 10, 1], Mac::BROADCAST),
        ([10, 0, 2, 15], Mac::BROADCAST),
        ([0; 4], Mac::BROADCAST),
        (service, Mac::BROADCAST),
        ([169, 254, 10, 1], Mac::SERVICE),
    ] {
        let mut raw = raw(StackConfig::default());
        let answers = raw.frame(&arp(1, sender, service, to));
        let mut expected = Vec::new();
        expected.extend(stamp(7).0);
        expected.extend(Mac::SERVICE.0);
        expected.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        expected.extend(Mac::SERVICE.0);
        expected.extend(service);
        expected.extend([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        expected.extend(sender);
        assert_eq!(answers, [expected], "request from {sender:?}");
        assert_eq!((raw.stack.stats().arp_answered, raw.stack.stats().ports), (1, 0));
    }
}

#[test]
fn a_next_hop_is_answered_for_arp_only() {
    let next_hop = [62, 210, 0, 1];
    let mut raw = raw(StackConfig { arp_only: vec![next_hop.into()], ..StackConfig::default() });
    let answers = raw.frame(&arp(1, [10, 0, 2, 15], next_hop, Mac::BROADCAST));
    assert_eq!((&answers[0][22..28], &answers[0][28..32]), (&Mac::SERVICE.0[..], &next_hop[..]));
    assert!(raw.send(&Segment { destination: (next_hop.into(), 80), ..Segment::syn(1, 1) }).is_empty());
    assert_eq!((raw.stack.stats().arp_answered, raw.stack.stats().dropped_address), (1, 1));
}

#[test]
fn arp_for_others_and_arp_replies_are_left_alone() {
    let mut raw = raw(StackConfig::default());
    assert!(raw.frame(&arp(1, [10, 0, 2, 15], [10, 0, 2, 2], Mac::BROADCAST)).is_empty());
    assert!(raw.frame(&arp(2, [10, 0, 2, 15], [169, 254, 169, 254], Mac::SERVICE)).is_empty());
    assert!(raw.frame(&arp(1, [1; 4], [169, 254, 169, 254], Mac::BROADCAST)[..30]).is_empty());
    assert_eq!((raw.stack.stats().dropped_address, raw.stack.stats().dropped_malformed), (1, 1));
}

#[test]
fn neighbour_solicitations_are_answered_with_hop_limit_255() {
    let service: std::net::Ipv6Addr = "fd00:ec2::254".parse().expect("an address");
    for source in ["fe80::1", "::"] {
        let source: std::net::Ipv6Addr = source.parse().expect("an address");
        let mut raw = raw(StackConfig { served: vec![service.into()], ..StackConfig::default() });
        let mut frame = vec![0x33, 0x33, 0xff, 0, 2, 0x54];
        frame.extend(stamp(7).0);
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 24, 58, 255]);
        frame.extend(source.octets());
        frame.extend("ff02::1:ff00:254".parse::<std::net::Ipv6Addr>().expect("an address").octets());
        frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend(service.octets());
        assert!(raw.frame(&frame).is_empty(), "a solicitation without a checksum");
        checksum::complete(&mut frame);
        let answers = raw.frame(&frame);
        let answer = &answers[0];
        assert_eq!((&answer[..6], &answer[6..12]), (&stamp(7).0[..], &Mac::SERVICE.0[..]));
        assert_eq!((answer[20], answer[21]), (58, 255));
        let to = if source.is_unspecified() { "ff02::1".parse().expect("an address") } else { source };
        assert_eq!((&answer[22..38], &answer[38..54]), (&service.octets()[..], &to.octets()[..]));
        assert_eq!((answer[54], answer[58]), (136, if source.is_unspecified() { 0x20 } else { 0x60 }));
        assert_eq!(&answer[78..86], [&[2, 1][..], &Mac::SERVICE.0].concat());
        frame[60] ^= 1;
        assert!(raw.frame(&frame).is_empty(), "a corrupted solicitation");
        frame[60] ^= 1;
        frame[21] = 254;
        assert!(raw.frame(&frame).is_empty(), "a solicitation that crossed a router");
        assert_eq!(raw.stack.stats().dropped_checksum, 2);
    }
}

fn echo(data: &[u8]) -> Vec<u8> {
    let sums = ChecksumCapabilities::default();
    let icmp = Icmpv4Repr::EchoRequest { ident: 1, seq_no: 2, data };
    let ip = Ipv4Repr {
        src_addr: [10, 0, 2, 15].into(),
        dst_addr: [169, 254, 169, 254].into(),
        next_header: smoltcp::wire::IpProtocol::Icmp,
        payload_len: icmp.buffer_len(),
        hop_limit: 64,
    };
    let mut frame = vec![0; 34 + icmp.buffer_len()];
    frame[..6].copy_from_slice(&Mac::SERVICE.0);
    frame[6..12].copy_from_slice(&stamp(7).0);
    frame[12..14].copy_from_slice(&[8, 0]);
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut frame[14..]), &sums);
    icmp.emit(&mut Icmpv4Packet::new_unchecked(&mut frame[34..]), &sums);
    frame
}

#[test]
fn echo_requests_up_to_the_mtu_are_answered() {
    let mut raw = raw(StackConfig::default());
    assert_eq!(raw.frame(&echo(b"hello"))[0][34], 0, "an echo reply");
    assert_eq!(raw.frame(&echo(&[0; 1472])).len(), 1);
    assert!(raw.frame(&echo(&[0; 1473])).is_empty());
    assert_eq!((raw.stack.stats().echoes_answered, raw.stack.stats().ports), (2, 0));
}

#[test]
fn echo_requests_with_a_wrong_bit_are_dropped_and_counted() {
    let service: std::net::Ipv6Addr = "fd00:ec2::254".parse().expect("an address");
    let guest: std::net::Ipv6Addr = "fe80::1".parse().expect("an address");
    let mut over_v6 = [&Mac::SERVICE.0[..], &stamp(7).0].concat();
    over_v6.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 12, 58, 64]);
    over_v6.extend([guest.octets(), service.octets()].concat());
    over_v6.extend([128, 0, 0, 0, 0, 1, 0, 2, b'p', b'i', b'n', b'g']);
    checksum::complete(&mut over_v6);
    let served = vec![[169, 254, 169, 254].into(), service.into()];
    for (name, whole, message) in [("ICMP", echo(b"hello"), 34), ("ICMPv6", over_v6, 54)] {
        let mut raw = raw(StackConfig { served: served.clone(), ..StackConfig::default() });
        assert_eq!(raw.frame(&whole).len(), 1, "{name}");
        for at in message + 1..whole.len() {
            let mut wrong = whole.clone();
            wrong[at] ^= 1;
            assert!(raw.frame(&wrong).is_empty(), "{name}, byte {at}");
        }
        let stats = raw.stack.stats();
        let dropped = (whole.len() - message - 1) as u64;
        assert_eq!((stats.echoes_answered, stats.dropped_checksum), (1, dropped), "{name}");
    }
}

/// A service that panics on `/fault`.
struct Faulty;

impl AnswerSource for Faulty {
    fn answer(
        &self,
        _: Now,
        _: &Connection,
        request: &Request<'_>,
        _: Option<&ParkedCall>,
    ) -> (Answer, AnswerOrigin) {
        assert_ne!(request.target.path, "/fault", "the intended fault");
        (Answer::Known(Response::new(StatusCode(200), None, &[], "fine").into()), AnswerOrigin::NONE)
    }
}

#[test]
fn a_fault_closes_the_connections_of_its_slot_only() {
    let stack = Stack::new(StackConfig::default(), MetadataService::new(Arc::new(Faulty)));
    let mut raw = Raw::new(stack);
    let faulty = raw.slot;
    let mine = raw.open(1);
    raw.open(2);
    raw.slot += 1;
    let others = raw.open(1);
    raw.slot = faulty;
    raw.send(&Segment::ack(1, 1002, mine).with(b"GET /fault HTTP/1.1\r\nHost: x\r\n\r\n"));
    assert_eq!((raw.stack.stats().faults, raw.stack.stats().connections), (1, 1));
    raw.slot += 1;
    let replies = raw.send(&Segment::ack(1, 1002, others).with(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
    assert!(replies.iter().any(|reply| reply.payload.ends_with(b"fine")), "{replies:?}");
    raw.slot = faulty;
    raw.open(3);
}
