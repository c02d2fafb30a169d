//! Answers that have no room in the frame of their request.
//!
//! `request` has done all but the content: it has found the document, made the connection the kernel's, and counted and
//! recorded the answer. It writes the headers, and behind them an [`AnswerRest`] in place of the content. The frame then
//! takes the way of any frame to the hub, but on the hub's inner veth it goes on as a socket buffer, which can be
//! lengthened. There `request_tcx` writes the content and the value of `Date`, and sends the frame to the guest.
//!
//! Frames of guests carry a stamp as their source on that veth, so no guest can send what looks like a begun answer. If
//! the frame is lost on its way, the guest repeats its request.

use super::{AT, AnswerableRequest, PublishedDocuments, Turn, own, sum, write_headers};
use crate::answer::{CHECKSUM_AT, Editor, put};
use crate::classify::Reader;
use crate::mac::Mac;
use crate::maps::{DATE_BYTES, LONG_RESPONSE_BYTES, ServedDate};
use crate::stamp::stamp;
use crate::wire::{ethernet, ipv4, tcp};

/// Offset of the content in the frame.
pub const CONTENT_AT: usize = AT + tcp::HEADER;

/// Offset of the checksum in the frame.
pub const SUM_AT: usize = AT + CHECKSUM_AT;

/// Begins an answer in the frame of its request, and makes the connection the kernel's. `None` if the frame is too short.
#[inline(always)]
pub fn begin(
    frame: &mut (impl Editor + ?Sized),
    request: &AnswerableRequest,
    documents: &impl PublishedDocuments,
) -> Option<()> {
    let document = request.document;
    let at = write_headers(frame, request, stamp(request.slot).0, 0)?;
    let at = put(frame, at, document.body.to_ne_bytes())?;
    put(frame, at, document.date.to_ne_bytes())?;
    if let Turn::New(options, first) = request.turn {
        own(documents, request, options, first)?;
    }
    Some(())
}

/// Returns whether a frame to the hub is a begun answer.
#[inline(always)]
pub fn is_begun(frame: &(impl Reader + ?Sized)) -> bool {
    let source = frame.read(ethernet::SOURCE);
    source.is_some_and(|source| number(source) == number(Mac::SERVICE.0))
}

/// An address as a number, because the compiler would compare arrays by a call.
#[inline(always)]
const fn number([a, b, c, d, e, f]: [u8; Mac::LEN]) -> u64 {
    u64::from_be_bytes([0, 0, a, b, c, d, e, f])
}

/// What is missing in a begun answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerRest {
    /// The key of its bytes in `LONG_BODIES`.
    pub body: u64,
    /// The length of the response in bytes, at most [`LONG_RESPONSE_BYTES`].
    pub length: usize,
    /// The offset of the value of `Date` in the response.
    pub date: usize,
    /// The checksum, in which that value counts as zeros.
    sum: u16,
}

impl AnswerRest {
    /// Reads what is missing in a frame; `None` if it is no begun answer.
    #[inline(always)]
    pub fn read(frame: &(impl Reader + ?Sized)) -> Option<Self> {
        if !is_begun(frame) {
            return None;
        }
        let total: [u8; 2] = frame.read(ethernet::HEADER + ipv4::TOTAL_LENGTH)?;
        let length = (u16::from_be_bytes(total) as usize).checked_sub(ipv4::HEADER + tcp::HEADER)?;
        let date: [u8; 2] = frame.read(CONTENT_AT + size_of::<u64>())?;
        let date = u16::from_ne_bytes(date) as usize;
        if length > LONG_RESPONSE_BYTES || date + DATE_BYTES > length {
            return None;
        }
        let body = u64::from_ne_bytes(frame.read(CONTENT_AT)?);
        Some(Self { body, length, date, sum: u16::from_be_bytes(frame.read(SUM_AT)?) })
    }

    /// The checksum of the answer with this date, in wire order (RFC 1624 §3).
    #[inline(always)]
    #[must_use]
    pub const fn checksum(&self, date: &ServedDate) -> [u8; 2] {
        sum::finish(!self.sum as u32 + super::date_sum(date, self.date as u16) as u32)
    }
}
