//! TCP segments that no client sends.

use metadata_common::verdict::Verdict::*;
use metadata_common::wire::{ethernet, ipv4, tcp};
use support::arena::{Case, Kind};
use support::checksum;
use support::frames::{self, SERVED_V4, with};

use super::make::{sized, v4};

/// Offsets of the TCP flags and of the data offset in an IPv4 packet.
const FLAGS: usize = ipv4::HEADER + 13;
const OFFSET: usize = ipv4::HEADER + 12;
/// Offset of the TCP checksum in a frame.
const SUM: usize = ethernet::HEADER + ipv4::HEADER + 16;

pub(crate) fn cases() -> Vec<Case> {
    let with_flags = |flags: u8| vec![v4(&with(frames::tcp(SERVED_V4, tcp::ACK), FLAGS, &[flags]))];
    let offset = |words: u8| vec![v4(&with(frames::tcp(SERVED_V4, tcp::SYN), OFFSET, &[words << 4]))];
    let optioned = |options: &[u8]| {
        let mut packet = frames::tcp(SERVED_V4, tcp::SYN);
        packet.truncate(ipv4::HEADER + tcp::HEADER);
        packet.extend(options);
        packet[OFFSET] = ((tcp::HEADER + options.len()) as u8 / 4) << 4;
        vec![v4(&sized(packet))]
    };
    let wrong = |flags| vec![with(v4(&frames::tcp(SERVED_V4, flags)), SUM, &[0xde, 0xad])];
    let mut partial = v4(&frames::tcp(SERVED_V4, tcp::SYN));
    checksum::partial(&mut partial);
    let one = |name: &str, frames| Case::of(name, frames, SteerIpv4Tcp);
    let reset = |name: &str, frames| one(name, frames).answered(&[(Kind::Reset, 1)]);
    let opened = |name: &str, frames| {
        Case::of(name, frames, AnswerSyn).by_tcx(SteerIpv4Tcp).answered(&[(Kind::SynAck, 1)])
    };
    let steered_syn = |name: &str, frames| one(name, frames).answered(&[(Kind::SynAck, 1)]);
    vec![
        reset("no flag at all", with_flags(0)),
        reset("an acknowledgement of nothing", with_flags(tcp::ACK)),
        reset("a fin for no connection", with_flags(tcp::FIN | tcp::ACK)),
        reset("a syn that acknowledges", with_flags(tcp::SYN | tcp::ACK)),
        one("a reset for no connection", with_flags(tcp::RST)),
        one("a reset that acknowledges nothing", with_flags(tcp::RST | tcp::ACK)),
        one("syn and reset", with_flags(tcp::SYN | tcp::RST)),
        one("every flag at once", with_flags(0xff)),
        reset("syn and fin", with_flags(tcp::SYN | tcp::FIN)),
        one("a header of 4 words", offset(4)),
        one("a header beyond the segment", offset(15)),
        opened("an mss of 0", optioned(&[2, 4, 0, 0])),
        opened("an mss of 1", optioned(&[2, 4, 0, 1])),
        opened("a window shifted by 255", optioned(&[2, 4, 5, 180, 3, 3, 255, 0])),
        steered_syn("an option of length 0", optioned(&[2, 0, 0, 0])),
        steered_syn("an option beyond the header", optioned(&[2, 40, 0, 0])),
        one("a syn with a wrong checksum", wrong(tcp::SYN)),
        one("an acknowledgement with a wrong checksum", wrong(tcp::ACK)),
        one("a fin with a wrong checksum", wrong(tcp::FIN | tcp::ACK)),
        opened("a syn with a partial checksum", vec![partial]),
        one("a syn from port 0", vec![v4(&with(frames::tcp(SERVED_V4, tcp::SYN), ipv4::HEADER, &[0, 0]))]),
    ]
}
