//! Validates the checksum of a frame that the kernel might answer.
//!
//! Such a frame is a segment without payload or a solicitation with one option, so the checksum covers at
//! most 60 bytes. For any other frame the result is not `Some(true)`, and user space validates the checksum.

use super::{Editor, link::SOLICITATION, sum};
use crate::wire::{ethernet, ipv4, ipv6, neighbour, protocol, tcp};
use core::hint::black_box;

/// Maximum number of 32-bit words in a TCP header.
const WORDS: usize = 15;

/// Offset of the checksum in a TCP header.
const FIELD: usize = 16;

/// Validates a TCP segment over IPv4.
#[inline(always)]
pub(super) fn ipv4(frame: &(impl Editor + ?Sized)) -> Option<bool> {
    let length: [u8; 2] = frame.read(ethernet::HEADER + ipv4::TOTAL_LENGTH)?;
    let [s0, s1, s2, s3, d0, d1, d2, d3]: [u8; 8] = frame.read(ethernet::HEADER + ipv4::SOURCE)?;
    let addresses =
        sum::long(u32::from_be_bytes([s0, s1, s2, s3])) + sum::long(u32::from_be_bytes([d0, d1, d2, d3]));
    let length = (u16::from_be_bytes(length) as usize).checked_sub(ipv4::HEADER)?;
    segment(frame, ethernet::HEADER + ipv4::HEADER, length, addresses)
}

/// Validates a TCP segment over IPv6.
#[inline(always)]
pub(super) fn ipv6(frame: &(impl Editor + ?Sized)) -> Option<bool> {
    let length: [u8; 2] = frame.read(ethernet::HEADER + ipv6::PAYLOAD_LENGTH)?;
    segment(frame, ethernet::HEADER + ipv6::HEADER, u16::from_be_bytes(length) as usize, addresses(frame)?)
}

/// Validates a neighbour solicitation (RFC 4861 §7.1.1).
#[inline(always)]
pub(super) fn neighbour(frame: &(impl Editor + ?Sized)) -> Option<bool> {
    const AT: usize = ethernet::HEADER + ipv6::HEADER;
    let field = frame.read(AT + neighbour::CHECKSUM)?;
    let pseudo = addresses(frame)? + SOLICITATION as u32 + protocol::ICMPV6 as u32;
    Some(sum::is_sound(pseudo, words(frame, AT, SOLICITATION)?, field))
}

/// Validates a TCP segment of `length` bytes at offset `at`; `None` for a segment with payload.
#[inline(always)]
fn segment(frame: &(impl Editor + ?Sized), at: usize, length: usize, addresses: u32) -> Option<bool> {
    let [offset]: [u8; 1] = frame.read(at + tcp::FLAGS - 1)?;
    let field = frame.read(at + FIELD)?;
    let header = (offset >> 4) as usize * 4;
    if header < tcp::HEADER || header != length {
        return None;
    }
    let pseudo = addresses + protocol::TCP as u32 + length as u32;
    Some(sum::is_sound(pseudo, words(frame, at, header)?, field))
}

/// The sum of the source and destination addresses.
#[inline(always)]
fn addresses(frame: &(impl Editor + ?Sized)) -> Option<u32> {
    let guest = frame.read(ethernet::HEADER + ipv6::SOURCE)?;
    let local = frame.read(ethernet::HEADER + ipv6::DESTINATION)?;
    Some(sum::address(guest) + sum::address(local))
}

/// The sum of `length` bytes from `at` on. `length` is a multiple of 4 and at most 60. `None` if the frame
/// ends before.
#[inline(always)]
fn words(frame: &(impl Editor + ?Sized), at: usize, length: usize) -> Option<u32> {
    // The offset is computed back from `end`, and `black_box` hides from the compiler that it depends on the
    // start. The verifier then sees a single loop whose state differs in two numbers only, and verifies the
    // code after it once.
    let end = at + length;
    let mut rest = black_box(length) & 0x3c;
    let mut sum = 0;
    for _ in 0..WORDS {
        if rest == 0 {
            break;
        }
        // Linux 7.3 refuses a pointer below the start of the frame, even if a larger offset is then added to it. A
        // compiler that knew where the offset comes from would subtract `rest` from the pointer.
        let at = black_box(end - rest) & 0x7f;
        sum += sum::long(u32::from_be_bytes(frame.read(at)?));
        rest = black_box(rest - 4) & 0x3c;
    }
    Some(sum)
}
