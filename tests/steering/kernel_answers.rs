//! The policy answers link requests as user space does, and the kernel answers every frame as the policy does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use metadata_common::answer::{self, Reply};
use metadata_common::classify::classify;
use metadata_common::cookie::{self, CookieCheck, Flow};
use metadata_common::mac::Mac;
use metadata_common::maps::{
    ANSWER_LINK, ANSWER_TCP, AllSent, FIN_ENDS, FIN_ENDS_BOTH, Identity, Port, PortKey, Slot, program,
};
use metadata_common::stamp::stamp;
use metadata_common::verdict::{Fate, Verdict};
use metadata_common::wire::{arp, ethernet, ipv6};
use metadata_datapath::stack::StackConfig;
use metadata_steer::probe::{Feature, features};
use smoltcp::wire::TcpControl;
use support::frames::{self, Both, GATEWAY, GUEST, NEXT_HOP, SERVED_V4, SERVED_V6, SOLICITED};
use support::kernel::Book;
use support::prog_test::{
    KEY, LOOPBACK, Outcome, Programs, XDP_DROP, XDP_REDIRECT, XDP_TX, in_empty_namespace,
};
use support::raw::{self, Raw, Segment};
use support::{checksum, privileged, seed, toy};

const NETNS: u32 = 3;
const PORT: PortKey = PortKey { netns: NETNS, ifindex: LOOPBACK };
const IDENTITY: Identity = Identity { slot: 0x0102, hub: 1, drain: 0, reserved: 0 };
const ALL: u64 = ANSWER_LINK | ANSWER_TCP;
const OPEN_PORT: Port = Port { answers: ALL, ..Port::with_limit(0, 0) };
const ADDRESS_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 15));
const ADDRESS_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe12, 0x3456));
const FROM: u16 = 40_000;
const SEQ: u32 = 77;

/// A node with one guest, on a port whose device can send frames back.
fn node() -> Programs {
    let mut programs = Programs::load(NETNS).expect("the object loads");
    programs.serve(IpAddr::V4(SERVED_V4)).expect("an IPv4 address is served");
    programs.serve(IpAddr::V6(SERVED_V6)).expect("an IPv6 address is served");
    programs.answer_arp(NEXT_HOP).expect("a next hop is answered for");
    programs.place_hub(IDENTITY.hub).expect("the hub has a device");
    programs.own(PORT, OPEN_PORT).expect("the port is registered");
    programs.register(PORT, GUEST, IDENTITY).expect("the guest is registered");
    programs
}

/// The policy's answer to a frame; `None` if it goes to user space.
fn policy(frame: &[u8], book: &Book) -> Option<(Verdict, Option<Vec<u8>>)> {
    let mut answer = frame.to_vec();
    let verdict = classify(frame, &Both);
    match answer::answer(&mut answer[..], verdict, IDENTITY.slot, ALL, book)? {
        Reply::Absorb(verdict) => Some((verdict, None)),
        Reply::Send(verdict, length) => {
            answer.truncate(length);
            Some((verdict, Some(answer)))
        }
    }
}

/// The kernel's expected outcome for a frame.
fn outcome(frame: &[u8], book: &Book) -> Outcome {
    let (verdict, action, frame) = match policy(frame, book) {
        Some((verdict, Some(answer))) => (verdict, XDP_TX, answer),
        Some((verdict, None)) => (verdict, XDP_DROP, frame.to_vec()),
        None => {
            let verdict = classify(frame, &Both);
            let mut after = frame.to_vec();
            let action = match verdict.fate() {
                Fate::Pass => support::prog_test::XDP_PASS,
                Fate::Drop => XDP_DROP,
                Fate::Steer | Fate::Answer | Fate::Absorb => {
                    after[ethernet::SOURCE..ethernet::TYPE].copy_from_slice(&stamp(IDENTITY.slot).0);
                    XDP_REDIRECT
                }
            };
            (verdict, action, after)
        }
    };
    Outcome { action, frame, counted: vec![(verdict, 1)] }
}

/// Addresses of guest and service in each family.
fn families() -> [(IpAddr, IpAddr); 2] {
    [(ADDRESS_V4, SERVED_V4.into()), (ADDRESS_V6, SERVED_V6.into())]
}

/// A segment from the guest to its gateway's MAC, with an MSS option in a SYN.
fn segment(
    (guest, local): (IpAddr, IpAddr),
    control: TcpControl,
    seq: u32,
    ack: Option<u32>,
    payload: &[u8],
) -> Vec<u8> {
    let segment = Segment {
        to: GATEWAY,
        source: (guest, FROM),
        destination: (local, 80),
        control,
        seq,
        ack,
        mss: (control == TcpControl::Syn).then_some(1400),
        ..Segment::syn(FROM, seq).with(payload)
    };
    frames::with(segment.frame(IDENTITY.slot), ethernet::SOURCE, &GUEST.0)
}

fn flow((guest, local): (IpAddr, IpAddr), slot: Slot) -> Flow {
    let ports = [FROM.to_be_bytes(), 80u16.to_be_bytes()].concat().try_into().expect("four bytes");
    match (guest, local) {
        (IpAddr::V4(guest), IpAddr::V4(local)) => Flow::v4(&KEY, slot, guest.octets(), local.octets(), ports),
        (IpAddr::V6(guest), IpAddr::V6(local)) => Flow::v6(&KEY, slot, guest.octets(), local.octets(), ports),
        _ => panic!("one family"),
    }
}

/// The entry of a connection on which user space has sent everything, including its FIN.
fn posted(flow: Flow) -> AllSent {
    let (sent, received) = (5_000, 900);
    AllSent {
        flow: flow.number(),
        sent,
        received,
        finished: FIN_ENDS,
        opened: 0,
        held: 1,
        acknowledged: !sent,
        closed: !sent,
    }
}

/// A solicitation with the source link-layer option that hosts send.
fn solicitation(destination: Ipv6Addr) -> Vec<u8> {
    frames::frame(&[], ethernet::IPV6, &frames::introduced(destination, SERVED_V6))
}

#[test]
fn arp_and_solicitations_get_the_same_bytes_as_from_user_space() {
    let config = StackConfig {
        served: vec![SERVED_V4.into(), SERVED_V6.into()],
        arp_only: vec![NEXT_HOP],
        ..StackConfig::default()
    };
    let mut user = Raw::new(toy::stack(config).0);
    let request = frames::arp_request(SERVED_V4);
    let group = |frame: Vec<u8>| frames::with(frame, ethernet::DESTINATION, &Mac::BROADCAST.0);
    let arp = |packet: &[u8]| group(frames::frame(&[], ethernet::ARP, packet));
    let probe = frames::with(request.clone(), arp::SENDER_IP, &[0; 4]);
    let cases = [
        ("a request", arp(&request), Verdict::AnswerArp),
        ("a request without padding", arp(&request)[..42].to_vec(), Verdict::AnswerArp),
        ("for a next hop", arp(&frames::arp_request(NEXT_HOP)), Verdict::AnswerArp),
        ("to the service alone", frames::frame(&[], ethernet::ARP, &request), Verdict::AnswerArp),
        ("a probe", arp(&probe), Verdict::AnswerArp),
        ("a solicitation", group(solicitation(SOLICITED)), Verdict::AnswerNeighbour),
    ];
    for (name, frame, verdict) in cases {
        let reply = user.frame(&frame);
        let [reply] = &reply[..] else { panic!("{name}: user space sent {} frames", reply.len()) };
        assert_eq!(policy(&frame, &Book::default()), Some((verdict, Some(reply.clone()))), "{name}");
    }
}

#[test]
fn unusual_link_requests_are_left_to_user_space() {
    let reply = frames::with(frames::arp_request(SERVED_V4), arp::OPERATION, &[0, 2]);
    let from = |source: &[u8]| {
        let mut frame = frames::with(solicitation(SOLICITED), ethernet::HEADER + ipv6::SOURCE, source);
        checksum::complete(&mut frame);
        frame
    };
    let (from_nowhere, from_group) = (from(&[0; 16]), from(&[0xff, 2]));
    let bare = frames::frame(&[], ethernet::IPV6, &frames::solicitation(SOLICITED, SERVED_V6));
    let mut cases = vec![
        ("an ARP reply", frames::frame(&[], ethernet::ARP, &reply)),
        ("duplicate address detection", from_nowhere),
        ("from a group", from_group),
        ("without an option", bare),
    ];
    let whole = solicitation(SOLICITED);
    let wrong = |at: usize| frames::with(whole.clone(), at, &[whole[at] ^ 1]);
    cases.extend((ethernet::HEADER + ipv6::HEADER..whole.len()).map(|at| ("with a wrong bit", wrong(at))));
    cases.extend((0..whole.len()).map(|length| ("cut short", whole[..length].to_vec())));
    for (name, frame) in cases {
        assert_eq!(policy(&frame, &Book::default()), None, "{name}, {} bytes", frame.len());
    }
}

#[test]
fn a_handshake_over_either_family_is_complete_and_its_options_are_kept() {
    for family in families() {
        let book = Book::default();
        let syn = segment(family, TcpControl::Syn, SEQ, None, &[]);
        let Some((Verdict::AnswerSyn, Some(answer))) = policy(&syn, &book) else { panic!("{family:?}") };
        // `read` asserts complete checksums.
        let reply = raw::Reply::read(&answer);
        assert_eq!(reply.macs, (GUEST, GATEWAY));
        assert_eq!((reply.addresses, reply.ports), ((family.1, family.0), (80, FROM)));
        assert_eq!((reply.ttl, reply.flags, reply.ack), (64, raw::SYN_ACK, SEQ + 1));
        let (size, segment_size) = if family.0.is_ipv4() { (1460, 1400) } else { (1440, 1400) };
        assert_eq!((reply.mss, reply.window, reply.payload.len()), (Some(size), 3_072, 0));

        let next = reply.seq.wrapping_add(1);
        let ack = segment(family, TcpControl::None, SEQ + 1, Some(next), &[]);
        assert_eq!(policy(&ack, &book), Some((Verdict::AbsorbAck, None)), "{family:?}");
        let request = segment(family, TcpControl::None, SEQ + 1, Some(next), b"GET / HTTP/1.0\r\n\r\n");
        assert_eq!(policy(&request, &book), None);
        let check = cookie::check(&KEY, flow(family, IDENTITY.slot), SEQ + 1, next);
        let CookieCheck::First(abilities) = check else { panic!("{check:?}") };
        assert_eq!((abilities.segment, abilities.scale), (segment_size, None));
    }
}

#[test]
fn the_end_of_a_connection_over_either_family_is_acknowledged_and_recorded() {
    for family in families() {
        let flow = flow(family, IDENTITY.slot);
        let entry = posted(flow);
        let book = Book::default();
        book.post(flow, entry);
        let ack = segment(family, TcpControl::None, entry.received, Some(entry.sent), &[]);
        assert_eq!(policy(&ack, &book), Some((Verdict::AbsorbAck, None)));
        assert_eq!(book.posted(flow), AllSent { acknowledged: entry.sent, ..entry });
        let fin = segment(family, TcpControl::Fin, entry.received, Some(entry.sent), &[]);
        let Some((Verdict::AnswerFin, Some(answer))) = policy(&fin, &book) else { panic!("{family:?}") };
        let reply = raw::Reply::read(&answer);
        assert_eq!((reply.flags, reply.seq, reply.ack), (raw::ACK, entry.sent, entry.received + 1));
        assert_eq!((reply.window, reply.mss, reply.macs), (3_072, None, (GUEST, GATEWAY)));
        assert_eq!(book.posted(flow), AllSent { acknowledged: entry.sent, closed: entry.sent, ..entry });
    }
}

/// Frames of every kind that the kernel handles, in both families: link requests, the segments of a posted connection
/// and a new handshake.
fn scenes(programs: &mut Programs, book: &Book) -> Vec<(String, Vec<u8>)> {
    let mut scenes: Vec<(String, Vec<u8>)> = vec![
        ("arp".into(), frames::frame(&[], ethernet::ARP, &frames::arp_request(SERVED_V4))),
        ("solicitation".into(), solicitation(SOLICITED)),
    ];
    for family in families() {
        let flow = flow(family, IDENTITY.slot);
        let finished = if family.0.is_ipv4() { FIN_ENDS } else { FIN_ENDS_BOTH };
        let entry = AllSent { finished, ..posted(flow) };
        programs.post(flow, entry).expect("an entry");
        book.post(flow, entry);
        let (seq, ack) = (entry.received, Some(entry.sent));
        let name = |what: &str| format!("{what} from {}", family.0);
        scenes.extend([
            (name("syn"), segment(family, TcpControl::Syn, SEQ, None, &[])),
            (name("request"), segment(family, TcpControl::None, SEQ + 1, ack, b"GET / HTTP/1.0\r\n\r\n")),
            (name("ack"), segment(family, TcpControl::None, seq, ack, &[])),
            (name("fin"), segment(family, TcpControl::Fin, seq, ack, &[])),
            (name("reset"), segment(family, TcpControl::Rst, seq, ack, &[])),
        ]);
        // Another port of the guest opens a connection, which is not posted.
        let mut syn = segment(family, TcpControl::Syn, SEQ, None, &[]);
        let at = if family.0.is_ipv4() { 34 } else { 54 };
        syn[at] ^= 1;
        checksum::complete(&mut syn);
        let (_, answer) = policy(&syn, book).expect("an answer");
        let next = raw::Reply::read(&answer.expect("a frame")).seq.wrapping_add(1);
        let mut ack = segment(family, TcpControl::None, SEQ + 1, Some(next), &[]);
        ack[at] ^= 1;
        checksum::complete(&mut ack);
        scenes.extend([(name("another syn"), syn), (name("the handshake's ack"), ack)]);
    }
    scenes
}

#[privileged::test]
fn the_kernel_follows_the_policy() {
    in_empty_namespace(|| {
        let mut programs = node();
        let book = Book::default();
        let mut verdicts = Vec::new();
        for (name, frame) in scenes(&mut programs, &book) {
            let expected = outcome(&frame, &book);
            verdicts.push(expected.counted[0].0);
            assert_eq!(programs.run(program::PORT, &frame).expect("a run"), expected, "{name}");
        }
        // `port` hands requests to `request`, which answers from published documents (`requests_on_a_tap`).
        let of_port =
            |v: &&Verdict| matches!(v.fate(), Fate::Answer | Fate::Absorb) && **v != Verdict::AnswerRequest;
        let answers = Verdict::ALL.iter().filter(of_port);
        for verdict in answers {
            assert!(verdicts.contains(verdict), "no scene for {verdict:?}");
        }
        for family in families() {
            let flow = flow(family, IDENTITY.slot);
            assert_eq!(programs.posted(flow).expect("an entry"), book.posted(flow));
            assert_eq!(book.posted(flow).closed, posted(flow).sent);
        }
    });
}

#[privileged::test]
fn the_kernel_and_the_policy_agree_on_mutated_segments() {
    const ROUNDS: usize = 20_000;
    let mut random = fastrand::Rng::with_seed(seed());
    in_empty_namespace(|| {
        let mut programs = node();
        let book = Book::default();
        let scenes = scenes(&mut programs, &book);
        let mut answered = 0;
        for _ in 0..ROUNDS {
            let (name, frame) = &scenes[random.usize(..scenes.len())];
            let mut frame = frame.clone();
            for _ in 0..random.usize(..3) {
                let at = random.usize(ethernet::TYPE..frame.len());
                frame[at] = random.u8(..);
            }
            // Random options and padding.
            if random.bool() {
                let more = random.usize(..48);
                frame.extend(std::iter::repeat_with(|| random.u8(..8)).take(more));
            }
            if random.u8(..4) == 0 {
                frame.truncate(random.usize(ethernet::HEADER..=frame.len()));
            }
            // Without a correct checksum, most mutations would only be dropped.
            if random.u8(..4) != 0 {
                checksum::complete(&mut frame);
            }
            let expected = outcome(&frame, &book);
            answered += usize::from(expected.action == XDP_TX);
            let (action, found) = programs.run_uncounted(program::PORT, &frame).expect(name);
            assert_eq!((action, found), (expected.action, expected.frame), "{name}: {frame:02x?}");
        }
        assert!(answered > ROUNDS / 20, "only {answered} of {ROUNDS} were answered");
    });
}

#[privileged::test]
fn a_port_that_cannot_send_back_has_every_frame_steered() {
    in_empty_namespace(|| {
        let mut programs = node();
        programs.own(PORT, Port { answers: 0, ..OPEN_PORT }).expect("a port without answers, such as a veth");
        for (name, frame) in scenes(&mut programs, &Book::default()) {
            let found = programs.run(program::PORT, &frame).expect("a run");
            assert_eq!((found.action, found.frame.len()), (XDP_REDIRECT, frame.len()), "{name}");
            assert_eq!(found.counted[0].0.fate(), Fate::Steer, "{name}");
        }
    });
}

#[privileged::test]
fn the_kernel_answers_neither_strangers_nor_floods() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let syn = segment(families()[0], TcpControl::Syn, SEQ, None, &[]);
    in_empty_namespace(|| {
        let mut programs = node();
        let stranger = frames::with(syn.clone(), ethernet::SOURCE, &[0x52, 0x54, 0, 0xba, 0xdb, 0xad]);
        let found = programs.run(program::PORT, &stranger).expect("a run");
        assert_eq!((found.action, found.counted), (XDP_DROP, vec![(Verdict::DropUnknownMac, 1)]));
        assert_eq!(found.frame, stranger);

        let two_an_hour = Port { frame_ns: HOUR_NS, depth_ns: 2 * HOUR_NS, ..OPEN_PORT };
        programs.own(PORT, two_an_hour).expect("the port is limited");
        let actions: Vec<u32> =
            (0..4).map(|_| programs.run(program::PORT, &syn).expect("a run").action).collect();
        assert_eq!(actions, [XDP_TX, XDP_TX, XDP_DROP, XDP_DROP]);
    });
}

#[test]
fn the_verifier_is_far_from_its_limit() {
    // The verifier's limit is 1,000,000. Each namespace with ports waits once for the verification.
    const MOST: u32 = 180_000;
    /// On a kernel without tcx, whose verifier recognises fewer of the paths that it has followed before: 6.1 follows
    /// most of the program once with and once without a priority tag.
    const MOST_WITHOUT_TCX: u32 = 240_000;
    if !privileged::or_skip() {
        return;
    }
    in_empty_namespace(|| {
        let has_tcx = features().contains(&(Feature::Tcx, Ok(true)));
        let most = if has_tcx { MOST } else { MOST_WITHOUT_TCX };
        for program in [
            program::PORT,
            program::PORT_TCX,
            program::REQUEST,
            program::REQUEST_TCX,
            program::SOCKET,
            program::HUB,
            program::HUB_TCX,
        ] {
            let verified = node().verified(program).expect("a count");
            println!("{program}: {verified} instructions");
            assert!(verified < most, "{program}: {verified} instructions");
        }
    });
}
