use super::{Entry, Ledger, PORT, Reply, WINDOW, answer, segment_v6, sum, tcp};
use crate::cookie::{CookieCheck, CookieKey, Flow, TcpOptions, check};
use crate::maps::{ANSWER_LINK, ANSWER_TCP, AllSent, FIN_ENDS, FIN_ENDS_BOTH, FIN_IS_NEWS, answers_within};
use crate::verdict::Verdict::{self, *};
use crate::wire::{ethernet, ipv4, protocol, tcp as header};
use core::cell::Cell;
use std::vec;
use std::vec::Vec;

pub(super) const KEY: CookieKey = CookieKey([0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]);
pub(super) const SLOT: u32 = 7;
pub(super) const GUEST: [u8; 4] = [10, 0, 2, 15];
const LOCAL: [u8; 4] = [169, 254, 169, 254];
const MACS: [u8; 12] = [0x02, 0xa9, 0xfe, 0xa9, 0xfe, 0xfe, 0x52, 0x54, 0, 0, 0, 1];
pub(super) const FROM: u16 = 40_000;
/// The guest's initial sequence number, close to wrapping.
pub(super) const ISN: u32 = u32::MAX;
const BOTH: u64 = ANSWER_LINK | ANSWER_TCP;

/// A table with one entry for every index.
#[derive(Default)]
struct Book(Cell<AllSent>);

impl<'a> Ledger for &'a Book {
    type Entry = &'a Cell<AllSent>;

    fn key(&self) -> CookieKey {
        KEY
    }

    fn entry(&self, _: u32) -> Option<&'a Cell<AllSent>> {
        Some(&self.0)
    }
}

impl Entry for &Cell<AllSent> {
    fn load(&self) -> AllSent {
        self.get()
    }

    fn acknowledge(&self, sent: u32) {
        self.set(AllSent { acknowledged: sent, ..self.get() });
    }

    fn close(&self, sent: u32) {
        self.set(AllSent { closed: sent, ..self.get() });
    }

    fn open(&self, mark: u16) {
        self.set(AllSent { opened: mark, ..self.get() });
    }

    fn own(&self, posted: AllSent) {
        self.set(AllSent { held: self.get().held, ..posted });
    }
}

pub(super) fn flow() -> Flow {
    let ports = [FROM.to_be_bytes(), PORT.to_be_bytes()].concat();
    Flow::v4(&KEY, SLOT, GUEST, LOCAL, ports.try_into().expect("four bytes"))
}

/// A segment from the guest, in its frame.
pub(super) fn segment(flags: u8, seq: u32, ack: u32, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut options = options.to_vec();
    options.resize(options.len().next_multiple_of(4), header::END_OF_OPTIONS);
    let length = (ipv4::HEADER + header::HEADER + options.len() + payload.len()) as u16;
    let mut ip = vec![ipv4::VERSION_IHL, 0];
    ip.extend(length.to_be_bytes());
    ip.extend([0x12, 0x34, 0x40, 0, 64, protocol::TCP, 0, 0]);
    ip.extend(GUEST);
    ip.extend(LOCAL);
    complete(&mut ip);
    let mut frame = MACS.to_vec();
    frame.extend(ethernet::IPV4.to_be_bytes());
    frame.extend(ip);
    frame.extend([FROM.to_be_bytes(), PORT.to_be_bytes()].concat());
    frame.extend(seq.to_be_bytes());
    frame.extend(ack.to_be_bytes());
    frame.extend([((header::HEADER + options.len()) as u8 / 4) << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    frame.extend(options);
    frame.extend(payload);
    complete_tcp(&mut frame);
    frame
}

/// Offset of the TCP checksum.
const FIELD: core::ops::Range<usize> = 50..52;

/// The sum of the pseudo-header for `length` bytes.
fn pseudo(frame: &[u8], length: usize) -> u32 {
    sum_of(&frame[26..34]) + u32::from(protocol::TCP) + length as u32
}

/// Completes the TCP checksum over the length of the packet or the frame, whichever is less.
fn complete_tcp(frame: &mut [u8]) {
    let length = usize::from(u16::from_be_bytes([frame[16], frame[17]])).saturating_sub(ipv4::HEADER);
    let length = length.min(frame.len() - 34);
    if length >= header::HEADER {
        frame[FIELD].fill(0);
        let sum = pseudo(frame, length) + sum_of(&frame[34..34 + length]);
        frame[FIELD].copy_from_slice(&sum::finish(sum));
    }
}

fn complete(ip: &mut [u8]) {
    ip[ipv4::CHECKSUM..ipv4::SOURCE].fill(0);
    let sum = sum_of(&ip[..ipv4::HEADER]);
    ip[ipv4::CHECKSUM..ipv4::SOURCE].copy_from_slice(&sum::finish(sum));
}

/// The sum of bytes as RFC 1071 §1 defines it.
pub(super) fn sum_of(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum()
}

fn ask(frame: &mut [u8], book: &Book) -> Option<Reply> {
    answer(frame, SteerIpv4Tcp, SLOT, BOTH, &book)
}

/// The options that Linux sends: MSS 1460 and a shift of 7.
pub(super) const LINUX: &[u8] = &[2, 4, 0x05, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];

fn syn(options: &[u8]) -> Vec<u8> {
    segment(header::SYN, ISN, 0, options, &[])
}

/// The answer to a SYN, truncated to its length, and the abilities in its number.
#[track_caller]
pub(super) fn answer_to(options: &[u8]) -> (Vec<u8>, TcpOptions) {
    let mut frame = syn(options);
    let Some(Reply::Send(AnswerSyn, length)) = ask(&mut frame, &Book::default()) else {
        panic!("{options:02x?} was not answered");
    };
    frame.truncate(length);
    let number = u32::from_be_bytes(frame[38..42].try_into().expect("a sequence number"));
    let back = check(&KEY, flow(), ISN.wrapping_add(1), number.wrapping_add(1));
    let CookieCheck::First(abilities) = back else { panic!("{back:?}") };
    (frame, abilities)
}

#[test]
fn a_syn_is_answered_with_a_syn_cookie() {
    let (frame, abilities) = answer_to(LINUX);
    assert_eq!(abilities, TcpOptions { segment: 1460, scale: Some(7) });
    assert_eq!(frame[..12], [&MACS[6..], &MACS[..6]].concat());
    let (ip, tcp) = frame[14..].split_at(ipv4::HEADER);
    assert_eq!(sum::fold(sum_of(ip)), 0xffff, "the header's checksum");
    assert_eq!([&ip[12..16], &ip[16..20]], [LOCAL, GUEST]);
    assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), frame.len() - 14);
    assert_eq!(ip[ipv4::TTL], 64);
    let pseudo = sum_of(&[&ip[12..], &[0, 6, 0, tcp.len() as u8]].concat());
    assert_eq!(sum::fold(pseudo + sum_of(tcp)), 0xffff, "the segment's checksum");
    assert_eq!(tcp[..4], [PORT.to_be_bytes(), FROM.to_be_bytes()].concat());
    assert_eq!(tcp[8..12], ISN.wrapping_add(1).to_be_bytes());
    assert_eq!(tcp[12..14], [7 << 4, header::SYN | header::ACK]);
    assert_eq!(tcp[14..16], WINDOW.to_be_bytes());
    assert_eq!(tcp[20..], [2, 4, 0x05, 0xb4, 1, 3, 3, 0]);
}

#[test]
fn congestion_bits_do_not_change_the_answer_to_a_syn() {
    let [first, again] = [answer_to(LINUX), answer_to(LINUX)];
    assert_eq!(first, again);
    let mut congested = segment(header::SYN | 0xc0, ISN, 0, LINUX, &[]);
    assert_eq!(ask(&mut congested, &Book::default()), Some(Reply::Send(AnswerSyn, first.0.len())));
    assert_eq!(congested[..first.0.len()], first.0);
}

#[test]
fn options_are_found_in_any_order() {
    const SIZE: &[u8] = &[2, 4, 0x02, 0x18];
    let cases: [(&str, Vec<u8>, TcpOptions); 11] = [
        ("size alone", SIZE.into(), TcpOptions { segment: 536, scale: None }),
        ("a size of 0", vec![2, 4, 0, 0], TcpOptions { segment: 536, scale: None }),
        ("a jumbo's size", vec![2, 4, 0x23, 0], TcpOptions { segment: 1460, scale: None }),
        ("linux", LINUX.into(), TcpOptions { segment: 1460, scale: Some(7) }),
        ("scale first", vec![3, 3, 14, 2, 4, 5, 0xb4], TcpOptions { segment: 1460, scale: Some(14) }),
        ("scale alone", vec![1, 3, 3, 2, 1, 1, 1, 1], TcpOptions { segment: 536, scale: Some(2) }),
        ("a shift too far", vec![3, 3, 15, 2, 4, 5, 0xb4], TcpOptions { segment: 1460, scale: Some(14) }),
        ("the largest", vec![3, 3, 255, 2, 4, 5, 0xb4], TcpOptions { segment: 1460, scale: Some(14) }),
        ("behind the end", vec![1, 1, 1, 0, 2, 4, 5, 0xb4], TcpOptions { segment: 536, scale: None }),
        ("unknown ones", vec![254, 6, 1, 2, 3, 4, 2, 4, 5, 0xb4], TcpOptions { segment: 1460, scale: None }),
        (
            "macos",
            vec![2, 4, 5, 0xb4, 1, 3, 3, 6, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 4, 2, 0, 0],
            TcpOptions { segment: 1460, scale: Some(6) },
        ),
    ];
    for (name, options, expected) in cases {
        assert_eq!(answer_to(&options).1, expected, "{name}");
    }
}

/// Asserts that a frame is left to user space unchanged.
#[track_caller]
fn assert_steered(name: &str, frame: &[u8], book: &Book) {
    let mut after = frame.to_vec();
    assert_eq!(ask(&mut after, book), None, "{name}");
    assert_eq!(after, frame, "{name}");
}

#[test]
fn unusual_syns_are_left_to_user_space_unchanged() {
    let long = |count: usize| [vec![header::NO_OPERATION; count], vec![2, 4, 5, 0xb4]].concat();
    let mut cases = vec![
        ("no room for the answer's option", syn(&[])),
        ("an option of no length", syn(&[254, 0, 2, 4, 5, 0xb4, 0, 0])),
        ("an option that leads out of the header", syn(&[2, 4, 5, 0xb4, 254, 5])),
        ("a size of the wrong length", syn(&[2, 3, 5, 0xb4])),
        ("a scale of the wrong length", syn(&[3, 4, 5, 0xb4])),
        ("an option too many", syn(&long(tcp::OPTIONS_MAX))),
        ("payload", segment(header::SYN, ISN, 0, LINUX, b"early")),
        ("pushed", segment(header::SYN | header::PSH, ISN, 0, LINUX, &[])),
        ("urgent", segment(header::SYN | header::URG, ISN, 0, LINUX, &[])),
        ("reset", segment(header::RST, ISN, 0, LINUX, &[])),
        ("syn and fin", segment(header::SYN | header::FIN, ISN, 0, LINUX, &[])),
        ("syn and ack", segment(header::SYN | header::ACK, ISN, 0, LINUX, &[])),
        ("no flags", segment(0, ISN, 0, LINUX, &[])),
    ];
    let mut set = |name, at: usize, bytes: &[u8], sum: bool| {
        let mut frame = syn(LINUX);
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        if sum {
            complete(&mut frame[ethernet::HEADER..]);
        }
        complete_tcp(&mut frame);
        cases.push((name, frame));
    };
    set("another port", 36, &81u16.to_be_bytes(), false);
    set("from port 0", 34, &[0, 0], false);
    set("a header too short", 46, &[0x40], false);
    set("a header longer than the packet", 46, &[0xf0], false);
    set("a broken IP header", 24, &[0, 0], false);
    set("from the unspecified address", 26, &[0; 4], true);
    set("from the broadcast address", 26, &[255; 4], true);
    set("from a group", 26, &[224, 0, 0, 1], true);
    set("a packet shorter than its header", 16, &[0, 19], true);
    set("a packet longer than its header", 16, &[0, 200], true);
    for (name, frame) in &cases {
        assert_steered(name, frame, &Book::default());
    }
    let whole = syn(LINUX);
    for length in 0..whole.len() {
        assert_steered("cut short", &whole[..length], &Book::default());
    }
}

/// Every kind of segment the kernel handles, each with the posted entry.
fn dealt_with() -> [(&'static str, Vec<u8>, AllSent); 4] {
    let nothing = AllSent::default();
    [
        ("syn", syn(LINUX), nothing),
        ("the longest syn", syn(&[LINUX, &[header::END_OF_OPTIONS; 20]].concat()), nothing),
        ("ack", segment(header::ACK, RECEIVED, SENT, &[], &[]), posted()),
        ("fin", segment(header::FIN | header::ACK, RECEIVED, SENT, &[], &[]), posted()),
    ]
}

#[test]
fn a_partial_checksum_gets_the_same_answer_as_a_complete_one() {
    for (name, frame, entry) in dealt_with() {
        let mut partial = frame.clone();
        let length = frame.len() - 34;
        partial[FIELD].copy_from_slice(&sum::fold(pseudo(&frame, length)).to_be_bytes());
        assert_ne!(partial, frame, "{name}");
        let [mut whole, mut left] = [frame, partial];
        let answers = [ask(&mut whole, &book(entry)), ask(&mut left, &book(entry))];
        assert!(answers[0].is_some(), "{name}");
        assert_eq!(answers[0], answers[1], "{name}");
        if let Some(Reply::Send(_, length)) = answers[0] {
            assert_eq!(whole[..length], left[..length], "{name}");
        }
    }
}

#[test]
fn a_segment_with_one_wrong_bit_is_left_to_user_space() {
    for (name, frame, entry) in dealt_with() {
        // The IPv4 header has its own checksum; the last bytes of the pseudo-header are in it.
        for bit in 34 * 8..frame.len() * 8 {
            let mut wrong = frame.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let book = book(entry);
            assert_steered(name, &wrong, &book);
            assert_eq!(book.0.get(), entry, "{name}, bit {bit}");
        }
    }
}

#[test]
fn a_partial_checksum_of_another_length_or_address_is_wrong() {
    let frame = syn(LINUX);
    let length = frame.len() - 34;
    let mut elsewhere = frame.clone();
    elsewhere[29] ^= 1;
    for (name, sum) in [
        ("of no length", pseudo(&frame, 0)),
        ("of a longer segment", pseudo(&frame, length + 4)),
        ("of another guest", pseudo(&elsewhere, length)),
    ] {
        let mut wrong = frame.clone();
        wrong[FIELD].copy_from_slice(&sum::fold(sum).to_be_bytes());
        assert_steered(name, &wrong, &Book::default());
    }
    let mut nothing = frame;
    nothing[FIELD].fill(0);
    assert_steered("no checksum at all", &nothing, &Book::default());
}

#[test]
fn offered_and_encoded_segment_sizes_fit_the_mtu() {
    let cases = [
        (0, 1460, 1460, 1460),
        (68, 1460, 536, 536),
        (576, 1460, 536, 536),
        (1_280, 1460, 1240, 1220),
        (1_400, 1460, 1360, 1360),
        (1_442, 1460, 1402, 1400),
        (1_450, 1460, 1410, 1400),
        (1_450, 1220, 1410, 1220),
        (1_500, 1460, 1460, 1460),
        (9_000, 8960, 1460, 1460),
        (u32::MAX, 1460, 1460, 1460),
    ];
    for (mtu, asked, offered, remembered) in cases {
        let [high, low] = u16::to_be_bytes(asked);
        let mut frame = syn(&[2, 4, high, low]);
        let answers = answers_within(BOTH, mtu);
        let found = answer(&mut frame[..], SteerIpv4Tcp, SLOT, answers, &&Book::default());
        assert_eq!(found, Some(Reply::Send(AnswerSyn, 58)), "{mtu}");
        assert_eq!(frame[54..58], [&[2, 4][..], &u16::to_be_bytes(offered)].concat(), "{mtu}");
        let number = u32::from_be_bytes(frame[38..42].try_into().expect("a sequence number"));
        let back = check(&KEY, flow(), ISN.wrapping_add(1), number.wrapping_add(1));
        assert_eq!(back, CookieCheck::First(TcpOptions { segment: remembered, scale: None }), "{mtu}");
    }
    for (mtu, size) in [(0, 1440), (68, 1220), (1_280, 1220), (1_450, 1390), (1_500, 1440), (9_000, 1440)] {
        assert_eq!(segment_v6(mtu), size, "{mtu} over IPv6");
    }
}

#[test]
fn padding_after_a_packet_is_ignored() {
    let mut frame = segment(header::SYN, ISN, 0, &[2, 4, 5, 0xb4], &[]);
    frame.resize(100, 0xa5);
    assert_eq!(ask(&mut frame, &Book::default()), Some(Reply::Send(AnswerSyn, 58)));
}

#[test]
fn only_what_the_port_allows_is_answered() {
    for (answers, expected) in [(0, false), (ANSWER_LINK, false), (ANSWER_TCP, true), (BOTH, true)] {
        let found = answer(&mut syn(LINUX)[..], SteerIpv4Tcp, SLOT, answers, &&Book::default());
        assert_eq!(found.is_some(), expected, "{answers}");
    }
    for verdict in Verdict::ALL.iter().filter(|verdict| !matches!(verdict, SteerIpv4Tcp | SteerIpv6Tcp)) {
        let mut frame = syn(LINUX);
        let before = frame.clone();
        let found = answer(&mut frame[..], *verdict, SLOT, ANSWER_TCP, &&Book::default());
        assert_eq!((found, frame), (None, before), "{verdict:?}");
    }
}

const SENT: u32 = 5_000;
const RECEIVED: u32 = 700;

/// What user space posts after it has sent everything and FIN.
fn posted() -> AllSent {
    AllSent {
        flow: flow().number(),
        sent: SENT,
        received: RECEIVED,
        finished: FIN_ENDS,
        opened: 0,
        held: 1,
        acknowledged: !SENT,
        closed: !SENT,
    }
}

fn book(entry: AllSent) -> Book {
    Book(Cell::new(entry))
}

#[test]
fn an_acknowledgement_of_everything_sent_is_noted_and_absorbed() {
    for flags in [header::ACK, header::ACK | header::PSH] {
        let book = book(posted());
        let found = ask(&mut segment(flags, RECEIVED, SENT, &[], &[]), &book);
        assert_eq!(found, Some(Reply::Absorb(AbsorbAck)));
        assert_eq!(book.0.get(), AllSent { acknowledged: SENT, ..posted() });
    }
}

#[test]
fn a_repeated_fin_is_acknowledged_again() {
    let book = book(posted());
    let mut frames: [Vec<u8>; 2] = core::array::from_fn(|_| {
        let mut frame = segment(header::FIN | header::ACK, RECEIVED, SENT, &[], &[]);
        assert_eq!(ask(&mut frame, &book), Some(Reply::Send(AnswerFin, 54)));
        assert_eq!(book.0.get(), AllSent { acknowledged: SENT, closed: SENT, ..posted() });
        frame
    });
    assert_eq!(frames[0], frames[1]);
    let tcp = &frames[0].split_off(34);
    assert_eq!(tcp[4..12], [SENT.to_be_bytes(), (RECEIVED + 1).to_be_bytes()].concat());
    assert_eq!(tcp[12..16], [5 << 4, header::ACK, 0x0c, 0x00]);
}

#[test]
fn a_guest_that_closes_first_gets_our_fin_with_the_acknowledgement() {
    let idle = AllSent { finished: FIN_ENDS_BOTH, ..posted() };
    let ended = AllSent { acknowledged: SENT, closed: SENT, ..idle };
    let book = book(idle);
    for _ in 0..2 {
        let mut frame = segment(header::FIN | header::ACK, RECEIVED, SENT, &[], &[]);
        assert_eq!(ask(&mut frame, &book), Some(Reply::Send(AnswerFin, 54)));
        assert_eq!(frame[38..46], [SENT.to_be_bytes(), (RECEIVED + 1).to_be_bytes()].concat());
        assert_eq!(frame[46..48], [5 << 4, header::FIN | header::ACK]);
        assert_eq!(book.0.get(), ended);
    }
    let mut last = segment(header::ACK, RECEIVED + 1, SENT + 1, &[], &[]);
    assert_eq!(ask(&mut last, &book), Some(Reply::Absorb(AbsorbAck)));
    assert_eq!(book.0.get(), ended);
}

#[test]
fn other_segments_of_a_posted_connection_go_to_user_space() {
    const ACK: u8 = header::ACK;
    const FIN: u8 = header::FIN | header::ACK;
    let bare = |flags, seq, ack| segment(flags, seq, ack, &[], &[]);
    let open = AllSent { finished: FIN_IS_NEWS, ..posted() };
    let idle = AllSent { finished: FIN_ENDS_BOTH, ..posted() };
    let half = AllSent { flow: flow().number() ^ 1, ..posted() };
    let cases = [
        ("payload", segment(ACK, RECEIVED, SENT, &[], b"GET"), posted()),
        ("payload and fin", segment(FIN, RECEIVED, SENT, &[], b"GET"), posted()),
        ("an acknowledgement of less", bare(ACK, RECEIVED, SENT - 1), posted()),
        ("an acknowledgement of more", bare(ACK, RECEIVED, SENT + 1), posted()),
        ("a keep-alive probe", bare(ACK, RECEIVED - 1, SENT), posted()),
        ("a segment ahead", bare(ACK, RECEIVED + 1, SENT), posted()),
        ("urgent", bare(ACK | header::URG, RECEIVED, SENT), posted()),
        ("reset", bare(ACK | header::RST, RECEIVED, SENT), posted()),
        ("a fin before ours", bare(FIN, RECEIVED, SENT), open),
        ("of a FIN that is not sent", bare(ACK, RECEIVED + 1, SENT + 1), idle),
        (
            "of a FIN that only the guest sends",
            bare(ACK, RECEIVED + 1, SENT + 1),
            AllSent { closed: SENT, ..posted() },
        ),
        ("a fin with an unknown `finished`", bare(FIN, RECEIVED, SENT), AllSent { finished: 4, ..posted() }),
        ("a fin that does not acknowledge ours", bare(FIN, RECEIVED, SENT - 1), posted()),
        ("a fin ahead", bare(FIN, RECEIVED + 1, SENT), posted()),
        ("a fin without acknowledgement", bare(header::FIN, RECEIVED, SENT), posted()),
        ("a fin on another flow's entry", bare(FIN, RECEIVED, SENT), half),
        ("an acknowledgement on another flow's entry", bare(ACK, RECEIVED, SENT), half),
        ("a fin on an empty entry", bare(FIN, 0, 0), AllSent::default()),
    ];
    for (name, frame, entry) in cases {
        let book = book(entry);
        assert_steered(name, &frame, &book);
        assert_eq!(book.0.get(), entry, "{name}");
    }
}

#[test]
fn an_ack_that_ends_a_handshake_is_absorbed_if_no_connection_is_held() {
    let (frame, _) = answer_to(LINUX);
    let next = u32::from_be_bytes(frame[38..42].try_into().expect("a number")).wrapping_add(1);
    let first = |seq, ack| segment(header::ACK, seq, ack, &[], &[]);
    let absorbed = |entry| ask(&mut first(0, next), &book(entry));
    assert_eq!(absorbed(AllSent::default()), Some(Reply::Absorb(AbsorbAck)));
    assert_eq!(absorbed(AllSent { held: 0, flow: 1, ..posted() }), Some(Reply::Absorb(AbsorbAck)));
    let unknown = Book::default();
    assert_steered("on a posted connection", &first(0, next), &book(posted()));
    assert_steered("on another flow's entry", &first(0, next), &book(AllSent { flow: 1, ..posted() }));
    assert_steered("while one is held", &first(0, next), &book(AllSent { held: 1, ..AllSent::default() }));
    assert_steered("a keep-alive probe", &first(u32::MAX, next), &unknown);
    assert_steered("a later segment", &first(400, next), &unknown);
    assert_steered("of no handshake of ours", &first(0, next ^ 1 << 30), &unknown);
    assert_steered("with the first request", &segment(header::ACK, 0, next, &[], b"GET"), &unknown);
    assert_steered("with a fin", &segment(header::ACK | header::FIN, 0, next, &[], &[]), &unknown);
}

#[test]
fn a_syn_is_noted_unless_user_space_holds_a_connection() {
    let syn = || segment(header::SYN, ISN, 0, LINUX, &[]);
    let empty = Book::default();
    assert!(matches!(ask(&mut syn(), &empty), Some(Reply::Send(AnswerSyn, _))));
    assert_eq!(empty.0.get(), AllSent { opened: flow().mark(), ..AllSent::default() });
    for entry in [posted(), AllSent { flow: 1, ..posted() }, AllSent { held: 3, ..AllSent::default() }] {
        let book = book(entry);
        assert_steered("a connection is held", &syn(), &book);
        assert_eq!(book.0.get(), entry);
    }
}
