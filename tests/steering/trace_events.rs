//! A trace reports each frame of the watched guest with its verdict, and no frame of another guest.

use metadata_common::mac::Mac;
use metadata_common::maps::{ANSWER_LINK, ANSWER_TCP, Guest, Identity, Port, PortKey, program};
use metadata_common::stamp::stamp;
use metadata_common::trace::{BYTES, FROM_GUEST, NO_SLOT, PASSING_TOO, TO_GUEST, Trace, TraceEvent};
use metadata_common::verdict::Verdict;
use metadata_common::wire::{ethernet, protocol, tcp};
use support::frames::{self, GUEST, OTHER_V4, SERVED_V4};
use support::privileged;
use support::prog_test::{LOOPBACK, Programs, in_empty_namespace};

const PORT: PortKey = PortKey { netns: 3, ifindex: LOOPBACK };
const IDENTITY: Identity = Identity { slot: 7, hub: 1, drain: 0, reserved: 0 };
const BOTH_WAYS: [&str; 2] = [program::PORT, program::PORT_TCX];

/// A node with one guest on a tap.
fn node() -> Programs {
    with_guest(Programs::load(PORT.netns).expect("the object loads"))
}

/// Like [`node`], with the tap in another namespace.
fn node_of_pods() -> Programs {
    with_guest(Programs::load_behind_stub(PORT.netns).expect("the objects load"))
}

fn with_guest(mut programs: Programs) -> Programs {
    programs.serve(SERVED_V4.into()).expect("an address is served");
    programs.place_hub(IDENTITY.hub).expect("the hub has a device");
    programs.own(PORT, Port { answers: ANSWER_LINK, ..Port::with_limit(0, 0) }).expect("a port");
    programs.register(PORT, GUEST, IDENTITY).expect("a guest");
    programs.place_guest(IDENTITY.slot, Guest { mac: GUEST.0, live: 1 }).expect("an entry for answers");
    programs.place_guest_device(IDENTITY.slot).expect("its device");
    programs
}

fn steered() -> Vec<u8> {
    frames::known_good()
}

fn dropped() -> Vec<u8> {
    frames::frame(&[], ethernet::IPV4, &frames::datagram(SERVED_V4, protocol::UDP))
}

fn passing() -> Vec<u8> {
    frames::frame(&[], ethernet::IPV4, &frames::syn(OTHER_V4, 80))
}

/// Runs a frame and returns the reported events.
fn reported(programs: &mut Programs, by: &str, frame: &[u8]) -> Vec<TraceEvent> {
    programs.run(by, frame).expect("a run");
    programs.take_events().expect("events")
}

/// Runs a frame of the guest. Asserts that exactly one event reports it, and returns its verdict and slot.
#[track_caller]
fn verdict_and_slot(programs: &mut Programs, by: &str, frame: &[u8]) -> (Verdict, u32) {
    let events = reported(programs, by, frame);
    let [event] = &events[..] else { panic!("{} events by {by}", events.len()) };
    let length = frame.len() as u32;
    assert_eq!((event.netns, event.ifindex, event.mac), (PORT.netns, PORT.ifindex, GUEST.0), "by {by}");
    assert_eq!((event.direction, event.length), (FROM_GUEST, length), "by {by}");
    assert_eq!(event.frame(), &frame[..frame.len().min(BYTES)], "by {by}");
    assert_ne!(event.time_ns, 0);
    (Verdict::from_index(event.verdict).expect("a verdict"), event.slot)
}

#[privileged::test]
fn each_frame_of_a_guest_is_reported_as_it_was_sent_with_its_verdict() {
    let traces = [
        Trace::of(Some(PORT), None, PASSING_TOO),
        Trace::of(None, Some(GUEST.0), PASSING_TOO),
        Trace::of(Some(PORT), Some(GUEST.0), PASSING_TOO),
    ];
    in_empty_namespace(|| {
        let (mut node, mut pods) = (node(), node_of_pods());
        for trace in traces {
            node.watch(trace).expect("a watch");
            pods.watch(trace).expect("a watch");
            for by in [program::PORT, program::PORT_TCX, program::PORT_STUB, program::PORT_TCX_STUB] {
                let is_stub = matches!(by, program::PORT_STUB | program::PORT_TCX_STUB);
                let programs = if is_stub { &mut pods } else { &mut node };
                let slot = IDENTITY.slot;
                assert_eq!(verdict_and_slot(programs, by, &steered()), (Verdict::SteerIpv4Tcp, slot));
                assert_eq!(verdict_and_slot(programs, by, &dropped()), (Verdict::DropIpv4Udp, NO_SLOT));
                assert_eq!(verdict_and_slot(programs, by, &passing()), (Verdict::PassIpv4, NO_SLOT));
            }
        }
    });
}

#[privileged::test]
fn the_first_bytes_of_a_frame_of_any_length_are_reported() {
    in_empty_namespace(|| {
        let mut programs = node();
        programs.watch(Trace::of(Some(PORT), None, 0)).expect("a watch");
        for length in (60..=80).chain(BYTES - 9..=BYTES + 9).chain([1_514]) {
            let mut frame = steered();
            frame.extend((frame.len()..length).map(|n| n as u8));
            frame.truncate(length);
            for by in BOTH_WAYS {
                assert_eq!(
                    verdict_and_slot(&mut programs, by, &frame).0,
                    Verdict::SteerIpv4Tcp,
                    "{length} bytes"
                );
            }
        }
    });
}

#[privileged::test]
fn only_frames_of_the_watched_guest_are_reported() {
    let elsewhere = PortKey { ifindex: LOOPBACK + 1, ..PORT };
    let other = Mac([0x52, 0x54, 0, 0, 0, 1]).0;
    let other_filters = [
        ("an empty filter", Trace::default()),
        ("another port", Trace::of(Some(elsewhere), None, PASSING_TOO)),
        ("another namespace", Trace::of(Some(PortKey { netns: 4, ..PORT }), None, PASSING_TOO)),
        ("another MAC", Trace::of(None, Some(other), PASSING_TOO)),
        ("another MAC on the port", Trace::of(Some(PORT), Some(other), PASSING_TOO)),
        ("the MAC on another port", Trace::of(Some(elsewhere), Some(GUEST.0), PASSING_TOO)),
    ];
    in_empty_namespace(|| {
        let mut programs = node();
        for (name, trace) in other_filters {
            programs.watch(trace).expect("a watch");
            for (by, frame) in
                BOTH_WAYS.iter().flat_map(|by| [steered(), dropped(), passing()].map(|f| (by, f)))
            {
                assert_eq!(reported(&mut programs, by, &frame), [], "{name} by {by}");
            }
        }
        programs.watch(Trace::of(Some(PORT), None, 0)).expect("a watch");
        for by in BOTH_WAYS {
            assert_eq!(reported(&mut programs, by, &passing()), [], "the filter excludes passing frames");
            assert_eq!(reported(&mut programs, by, &dropped()).len(), 1);
        }
    });
}

#[privileged::test]
fn an_answer_of_the_kernel_is_reported_after_its_request() {
    let arp = frames::frame(&[], ethernet::ARP, &frames::arp_request(SERVED_V4));
    let syn = frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, tcp::SYN));
    in_empty_namespace(|| {
        let mut programs = node();
        let answers = ANSWER_LINK | ANSWER_TCP;
        programs.own(PORT, Port { answers, ..Port::with_limit(0, 0) }).expect("a port");
        programs.watch(Trace::of(Some(PORT), Some(GUEST.0), 0)).expect("a watch");
        for (frame, verdict) in [(arp, Verdict::AnswerArp), (syn, Verdict::AnswerSyn)] {
            let answer = programs.run(program::PORT, &frame).expect("a run").frame;
            let events = programs.take_events().expect("events");
            let seen: Vec<_> = events.iter().map(|event| (event.direction, event.frame())).collect();
            assert_eq!(seen, [(FROM_GUEST, &frame[..]), (TO_GUEST, &answer[..])], "{verdict:?}");
            for event in events {
                assert_eq!((event.verdict, event.slot), (verdict.index(), IDENTITY.slot));
                assert_eq!(event.mac, GUEST.0);
            }
        }
    });
}

#[privileged::test]
fn an_answer_of_user_space_is_reported_as_the_guest_receives_it() {
    let sent = frames::with(steered(), ethernet::DESTINATION, &stamp(IDENTITY.slot).0);
    let received = frames::with(steered(), ethernet::DESTINATION, &GUEST.0);
    in_empty_namespace(|| {
        let mut programs = node();
        for (trace, matches) in [
            (Trace::of(None, Some(GUEST.0), 0), true),
            (Trace::of(Some(PORT), Some(GUEST.0), 0), true),
            (Trace::of(None, Some(frames::GATEWAY.0), 0), false),
            (Trace::of(Some(PORT), None, 0), false),
        ] {
            programs.watch(trace).expect("a watch");
            for (by, entry) in [(program::HUB, 0), (program::HUB_TCX, LOOPBACK)] {
                programs.place_home_device(IDENTITY.slot, entry).expect("a device");
                let events = reported(&mut programs, by, &sent);
                assert_eq!(events.len(), usize::from(matches), "{trace:?} {by}");
                for event in events {
                    assert_eq!((event.verdict, event.slot), (Verdict::HubDelivered.index(), IDENTITY.slot));
                    assert_eq!((event.direction, event.mac), (TO_GUEST, GUEST.0));
                    assert_eq!(event.frame(), received);
                }
            }
        }
    });
}

#[privileged::test]
fn unread_events_are_lost_and_counted() {
    const FRAMES: usize = 2_000;
    in_empty_namespace(|| {
        let mut programs = node();
        programs.watch(Trace::of(Some(PORT), None, 0)).expect("a watch");
        for _ in 0..FRAMES {
            programs.run_uncounted(program::PORT, &dropped()).expect("a run");
        }
        let lost = programs.lost_events().expect("a count");
        let read = programs.take_events().expect("events").len();
        assert!(lost > 0, "the ring holds all {FRAMES}");
        assert_eq!(read + lost as usize, FRAMES);
        assert_eq!(reported(&mut programs, program::PORT, &dropped()).len(), 1, "there is room again");
    });
}
