//! Programs behind a stub give the verdicts that they give when they are attached themselves.

use metadata_common::maps::{ANSWER_LINK, ANSWER_TCP, Port, PortKey, program};
use metadata_common::verdict::Verdict;
use metadata_common::wire::{ethernet, ipv6, tcp};
use support::frames::{self, SERVED_V4};
use support::privileged;
use support::prog_test::{
    Outcome, Programs, TC_ACT_REDIRECT, TC_ACT_SHOT, TC_ACT_UNSPEC, XDP_PASS, in_empty_namespace,
};

use super::node::{NETNS, PORT, UNLIMITED, node_with_guest, serving, with_guest};

#[test]
fn programs_behind_a_stub_give_the_same_verdicts_in_their_namespace() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_guest_of_another_namespace_is_unknown_behind_a_stub() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_stub_with_nothing_behind_it_passes_frames_unchanged() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn a_classifiers_stub_passes_ordinary_frames_itself() {
    if !privileged::or_skip() {
        return;
    }
    let frame = frames::frame(&[], ethernet::IPV4, &frames::syn(frames::OTHER_V4, 80));
    in_empty_namespace(|| {
        let mut programs = serving(Programs::load_behind_stub(NETNS).expect("the objects load"));
        programs.take_from_behind().expect("the entry is removed");
        let outcome = programs.run(program::PORT_TCX_STUB, &frame).expect("a run");
        assert_eq!(outcome, Outcome { action: TC_ACT_UNSPEC, frame, counted: vec![] });
    });
}
