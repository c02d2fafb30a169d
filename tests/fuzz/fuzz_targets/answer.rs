//! Laws between the kernel's answers and user space's: for any frame, both would give the same answer.
//!
//! The fuzz target and the test that replays its corpus share this file. The first byte of an input says how to
//! complete the frame, which a fuzzer rarely does by chance (1: correct the checksums; 2: set the registered guest as
//! source). The other bytes are the frame.
#![cfg_attr(not(test), no_main)]

use std::net::IpAddr;

use metadata_common::answer::{Reply, answer};
use metadata_common::classify::classify;
use metadata_common::maps::{ANSWER_LINK, ANSWER_TCP};
use metadata_common::stamp::stamp;
use metadata_common::verdict::{Fate, Verdict};
use metadata_datapath::stack::StackConfig;
use support::frames::{Both, NEXT_HOP, SERVED_V4, SERVED_V6};
use support::kernel::{Book, KEY};
use support::raw::{self, Raw};
use support::{checksum, toy};

const SLOT: u32 = 7;
const ETHERNET: usize = 14;
/// Where a solicitation's options begin.
const OPTION: usize = ETHERNET + 40 + 24;

/// Asserts every law on one input.
///
/// # Panics
/// If a law is broken; the message says which.
pub(crate) fn assert_all(input: &[u8]) {
    let Some((how, frame)) = input.split_first() else { return };
    let mut frame = frame.to_vec();
    if how & 1 != 0 {
        complete(&mut frame);
    }
    if let Some(source) = frame.get_mut(6..12).filter(|_| how & 2 != 0) {
        // The kernel stamps the slot over the source before user space sees the frame; here both see the stamp.
        source.copy_from_slice(&stamp(SLOT).0);
    }
    let steered = classify(&frame[..], &Both);
    if steered.fate() != Fate::Steer {
        return;
    }
    if steered == Verdict::SteerNeighbour {
        // The kernel does not check two parts of a solicitation: the version in the IPv6 header and the option that
        // every stack sends. User space drops frames with errors there, so correct both parts.
        if let Some(packet) = frame.get_mut(ETHERNET..=OPTION + 1) {
            packet[0] = 0x60 | packet[0] & 0x0f;
            packet[OPTION - ETHERNET..].copy_from_slice(&[1, 1]);
        }
        if how & 1 != 0 {
            checksum::complete(&mut frame);
        }
    }
    let mut after = frame.clone();
    let reply = answer(&mut after[..], steered, SLOT, ANSWER_LINK | ANSWER_TCP, &Book::default());
    let user = user_space(&frame);
    match reply {
        None => assert_eq!(after, frame, "a frame for user space was changed"),
        Some(Reply::Absorb(verdict)) => {
            assert_eq!(verdict, Verdict::AbsorbAck);
            assert!(user.is_empty(), "user space answers what the kernel absorbs: {user:02x?}");
        }
        Some(Reply::Send(verdict, length)) => {
            assert!(length <= frame.len(), "{verdict:?} is longer than what it answers");
            let [user] = &user[..] else { panic!("{verdict:?}, and user space sends {} frames", user.len()) };
            assert_same_answer(verdict, &after[..length], user);
        }
    }
}

/// The frames that a new user-space stack sends in response to this frame.
fn user_space(frame: &[u8]) -> Vec<Vec<u8>> {
    let config = StackConfig {
        served: vec![IpAddr::V4(SERVED_V4), IpAddr::V6(SERVED_V6)],
        arp_only: vec![NEXT_HOP],
        cookie_key: KEY,
        slots: SLOT + 1,
        ports: 1,
        connections: 1,
        ..StackConfig::default()
    };
    let mut raw = Raw::new(toy::stack(config).0);
    raw.slot = SLOT;
    let sent = raw.frame(frame);
    assert_eq!(raw.stack.stats().faults, 0, "an internal fault");
    sent
}

/// Asserts that both answers are the same, except for differences a guest cannot observe.
fn assert_same_answer(verdict: Verdict, kernel: &[u8], user: &[u8]) {
    match verdict {
        Verdict::AnswerArp | Verdict::AnswerNeighbour => assert_eq!(kernel, user, "{verdict:?}"),
        // The options and the padding may differ.
        Verdict::AnswerSyn | Verdict::AnswerFin => {
            assert_eq!(raw::Reply::read(kernel), raw::Reply::read(user), "{verdict:?}");
        }
        other => panic!("{other:?} is no answer"),
    }
}

/// Corrects the checksums of an IPv4 header and of the segment or message behind it.
fn complete(frame: &mut [u8]) {
    checksum::header(frame);
    checksum::complete(frame);
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|input: &[u8]| assert_all(input));
