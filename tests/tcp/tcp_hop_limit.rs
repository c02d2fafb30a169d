//! Segments with a token have hop limit 1, so that no router forwards them. All other segments, including handshakes
//! and acknowledgements, have the usual hop limit.

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use metadata_common::addresses;
use metadata_datapath::stack::{PIECES_PER_CONNECTION, StackConfig};
use support::raw::{Raw, Reply, SYN_ACK, Segment};
use support::toy::{self, NEAR, Toy};
use support::wire::{CLIENT_V6, Client, Faults, Habits, SERVICE, World};

const USUAL: u8 = 64;

fn config() -> StackConfig {
    let served = vec![addresses::METADATA.into(), addresses::METADATA_LINK_LOCAL.into()];
    StackConfig { served, ..StackConfig::default() }
}

/// Addresses of the service and the guest, for both IP families.
fn families() -> [(IpAddr, IpAddr); 2] {
    let v4 = (IpAddr::from(SERVICE), IpAddr::from(support::wire::CLIENT));
    [v4, (addresses::METADATA_LINK_LOCAL.into(), CLIENT_V6.into())]
}

/// A guest with one connection.
struct Guest {
    raw: Raw<Toy>,
    service: IpAddr,
    own: IpAddr,
    /// The next sequence numbers: the guest's and the service's.
    seq: u32,
    next: u32,
}

impl Guest {
    fn connect((service, own): (IpAddr, IpAddr)) -> Self {
        let raw = Raw::new(toy::stack(config()).0);
        let mut guest = Self { raw, service, own, seq: 1001, next: 0 };
        let replies = guest.send(Segment::syn(40_000, 1000));
        assert_eq!((replies[0].flags, replies[0].ttl), (SYN_ACK, USUAL));
        guest.next = replies[0].seq.wrapping_add(1);
        guest.send(Segment::ack(40_000, 1001, guest.next));
        guest
    }

    fn send(&mut self, segment: Segment) -> Vec<Reply> {
        let (source, destination) = ((self.own, 40_000), (self.service, 80));
        self.raw.send(&Segment { source, destination, ..segment })
    }

    /// Sends orders to the toy service. Returns its immediate replies, without acknowledging them.
    fn order(&mut self, orders: &str) -> Vec<Reply> {
        let replies = self.send(Segment::ack(40_000, self.seq, self.next).with(orders.as_bytes()));
        self.seq += orders.len() as u32;
        replies
    }

    /// Acknowledges everything up to the end of these replies.
    fn acknowledge(&mut self, replies: &[Reply]) -> Vec<Reply> {
        let last = replies.last().expect("something to acknowledge");
        self.next = last.seq.wrapping_add(last.payload.len() as u32);
        self.send(Segment::ack(40_000, self.seq, self.next))
    }
}

/// Bytes and hop limit of each reply.
fn shape(replies: &[Reply]) -> Vec<(usize, u8)> {
    replies.iter().map(|reply| (reply.payload.len(), reply.ttl)).collect()
}

#[test]
fn a_token_has_hop_limit_1_and_the_next_answer_the_usual_one() {
    for family in families() {
        let mut guest = Guest::connect(family);
        let answer = guest.order("near 300\n");
        assert_eq!(shape(&answer), [(300, NEAR)], "{family:?}");
        assert_eq!(shape(&guest.acknowledge(&answer)), []);
        let answer = guest.order("far 300\n");
        assert_eq!(shape(&answer), [(300, USUAL)], "{family:?}");
        guest.acknowledge(&answer);
        assert_eq!(shape(&guest.order("near 5\n")), [(5, NEAR)], "{family:?}");
    }
}

#[test]
fn an_acknowledgement_without_an_answer_has_the_usual_hop_limit() {
    for family in families() {
        let mut guest = Guest::connect(family);
        // Half an order is acknowledged and not yet answered.
        let acknowledged = guest.order("near 3");
        assert_eq!(shape(&acknowledged), [(0, USUAL)], "{family:?}");
        assert_eq!(shape(&guest.order("00\n")), [(300, NEAR)], "{family:?}");
        // The service answers a segment outside the window with a repeated ACK.
        let stray = guest.send(Segment::ack(40_000, 1, guest.next).with(b"x"));
        assert_eq!(shape(&stray), [(0, USUAL)], "{family:?}");
    }
}

#[test]
fn a_retransmitted_token_keeps_its_low_hop_limit() {
    for family in families() {
        let mut guest = Guest::connect(family);
        let first = guest.order("near 300\n");
        let again = guest.raw.wait(Duration::from_secs(4));
        assert!(again.len() >= 2, "{again:?}");
        for reply in again {
            assert_eq!((reply.seq, reply.payload.len(), reply.ttl), (first[0].seq, 300, NEAR), "{family:?}");
        }
    }
}

#[test]
fn a_fin_sent_alone_after_a_token_has_the_usual_hop_limit() {
    for family in families() {
        let mut guest = Guest::connect(family);
        let answer = guest.order("near 300\n");
        guest.acknowledge(&answer);
        let fin = Segment::ack(40_000, guest.seq, guest.next).control(smoltcp::wire::TcpControl::Fin);
        let replies = guest.send(fin);
        assert!(replies.iter().any(|reply| reply.flags.2), "{replies:?}");
        assert!(replies.iter().all(|reply| reply.ttl == USUAL), "{replies:?}");
    }
}

#[test]
fn a_segment_with_any_byte_of_a_token_has_the_low_hop_limit() {
    for family in families() {
        let mut guest = Guest::connect(family);
        let most = if family.0.is_ipv4() { 1460 } else { 1440 };
        let replies = guest.order("far 2000\nnear 10\nfar 3000\n");
        let expected = [(most, USUAL), (most, NEAR), (most, USUAL), (5010 - 3 * most, USUAL)];
        assert_eq!(shape(&replies), expected, "{family:?}");
    }
}

#[test]
fn the_hop_limit_changes_exactly_at_the_boundary_between_segments() {
    for family in families() {
        let most = if family.0.is_ipv4() { 1460 } else { 1440 };
        let mut guest = Guest::connect(family);
        let replies = guest.order(&format!("near {most}\nfar 10\n"));
        assert_eq!(shape(&replies), [(most, NEAR), (10, USUAL)], "{family:?}");
        let mut guest = Guest::connect(family);
        let replies = guest.order(&format!("far {most}\nnear 10\n"));
        assert_eq!(shape(&replies), [(most, USUAL), (10, NEAR)], "{family:?}");
    }
}

#[test]
fn pieces_beyond_the_limit_wait_until_the_guest_has_read_others() {
    const ORDERS: usize = PIECES_PER_CONNECTION / 2 + 10;
    let mut guest = Guest::connect(families()[0]);
    let replies = guest.order(&"near 10\nfar 10\n".repeat(ORDERS));
    let sent = |replies: &[Reply]| replies.iter().map(|reply| reply.payload.len()).sum::<usize>();
    assert_eq!(sent(&replies), PIECES_PER_CONNECTION * 10);
    let rest = guest.acknowledge(&replies);
    assert_eq!(sent(&rest), 10 * 20);
    assert!(replies.iter().chain(&rest).all(|reply| reply.ttl == NEAR), "each segment has some of both");
}

/// Asserts that every segment has the hop limit of its bytes. Returns how many segments carried bytes of `near` for
/// the first time, and how many repeated them. Offsets count from the start of the stream.
fn assert_limits(frames: &[Vec<u8>], near: &[Range<u32>], context: &str) -> (usize, usize) {
    let replies = frames.iter().filter(|frame| is_tcp(frame)).map(|frame| Reply::read(frame));
    let (mut first, mut end) = (None, 0);
    let (mut sent, mut again) = (0, 0);
    for reply in replies {
        if reply.flags == SYN_ACK {
            // The answer to a late SYN has another sequence number.
            first = first.or(Some(reply.seq.wrapping_add(1)));
        }
        let start = reply.seq.wrapping_sub(first.unwrap_or(reply.seq));
        let bytes = start..start.wrapping_add(reply.payload.len() as u32);
        let touches = |near: &Range<u32>| near.start < bytes.end && bytes.start < near.end;
        let is_near = !bytes.is_empty() && near.iter().any(touches);
        assert_eq!(reply.ttl, if is_near { NEAR } else { USUAL }, "{context}: {bytes:?} {:?}", reply.flags);
        if is_near {
            if bytes.start < end { again += 1 } else { sent += 1 }
        }
        if !bytes.is_empty() {
            end = end.max(bytes.end);
        }
    }
    (sent, again)
}

fn is_tcp(frame: &[u8]) -> bool {
    match u16::from_be_bytes([frame[12], frame[13]]) {
        0x0800 => frame[14 + 9] == 6,
        0x86dd => frame[14 + 6] == 6,
        _ => false,
    }
}

#[test]
fn every_segment_has_the_hop_limit_of_its_bytes_over_any_link() {
    const SEEDS: u64 = 20;
    const ORDERS: [(&str, u32); 7] = [
        ("far", 4000),
        ("near", 200),
        ("far", 30_000),
        ("near", 3000),
        ("near", 7),
        ("far", 1),
        ("near", 9000),
    ];
    let orders: String = ORDERS.iter().map(|(word, bytes)| format!("{word} {bytes}\n")).collect();
    let mut near: Vec<Range<u32>> = Vec::new();
    let mut end = 0;
    for (word, bytes) in ORDERS {
        if word == "near" {
            near.push(end..end + bytes);
        }
        end += bytes;
    }
    let faults = Faults { loss: 15, duplicate: 5, reorder: 10, ..Faults::NONE };
    let mut repeated = 0;
    for (service, _) in families() {
        for seed in 0..SEEDS {
            let context = format!("{service}, seed {seed}");
            let client = Client::new(3, Habits::default());
            let mut world = World::new(toy::stack(config()).0, client, faults, seed);
            world.sent = Some(Vec::new());
            let talk = world.client.begin_to((service, 80), 40_000, orders.as_bytes());
            let whole = |world: &mut World<Toy>| world.client.talks[talk].received.len() == end as usize;
            assert!(world.run(Duration::from_secs(600), whole), "{context}: the answer is incomplete");
            let (sent, again) = assert_limits(&world.sent.unwrap_or_default(), &near, &context);
            assert!(sent >= near.len() - 1, "{context}: {sent} segments; two `near` ranges are adjacent");
            repeated += again;
        }
    }
    assert!(repeated > 0, "no token was ever sent again: the link was too good");
}
