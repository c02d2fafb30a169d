//! Answers a request with a document that user space has published for the sender.
//!
//! The key of a document is its slot, the edition of the slot, and a keyed hash of the whole request. The bytes after
//! the request line are the same for every VM of one image, and all VMs of an image ask for the same targets. User space
//! learns both from requests that it has answered itself, and then publishes the answer of each VM. The request takes one
//! segment and the answer another, and no worker runs.
//!
//! The kernel owns such a connection in `ALL_SENT` ([`FIN_ENDS_BOTH_KERNEL`]) until it ends or its next request is steered.
//! User space then adopts it by the numbers in that entry.
//!
//! - *Withdrawal.* An edition is valid while its number is odd. User space makes it even before a record changes, and no
//!   document of another edition is ever served again.
//! - *Loss.* A repeated request gets the same bytes, from the same edition. If there is another edition, user space resets
//!   the connection, because a different answer must not continue the first one.
//! - *Limits.* The frame and the connection are charged as any other. The request takes a token of the slot's bucket, or is
//!   steered.
//! - *Recording.* If answers are recorded and there is no room for a record, the request is steered.
//! - *Tokens.* A worker that has accepted a session token enters it for its slot, with its distance from the end of the
//!   request. A request with the same bytes in that place is hashed with zeros in place of the token, so that all VMs of
//!   an image send the same bytes again. Documents for such requests have keys of their own, so no request without the
//!   token finds them.
//! - *Length.* XDP cannot lengthen a frame of a tap beyond what the tap leaves around it. A longer answer is begun here, and
//!   completed in a socket buffer ([`long`]).

pub mod long;

use super::{Editor, Entry, HOP_LIMIT, Ledger, PORT, WINDOW, put, sum};
use crate::bucket;
use crate::cookie::{self, CookieCheck, CookieKey, Flow, TcpOptions};
use crate::mac::Mac;
use crate::maps::{
    AllSent, AnswerRecord, AnsweredConnection, Document, Edition, FIN_ENDS_BOTH_KERNEL, LONG_RESPONSE_BYTES,
    RESPONSE_BYTES, ServedDate, Slot, TOKEN_BYTES,
};
use crate::siphash::{SipHash13, SipKey};
use crate::wire::{ethernet, ipv4, protocol, tcp};
use core::fmt;
use core::hint::black_box;

/// Bytes of the longest segment with a request that the kernel answers.
pub const REQUEST_BYTES: usize = 448;

/// Bytes of the shortest request. The hash reads whole words.
pub const REQUEST_MIN: usize = 16;

/// Bytes of the shortest response. The copy reads whole words.
pub const RESPONSE_MIN: usize = 64;

/// The bits of a window's shift, which is at most 14. The mask tells the verifier so.
const SCALE_BITS: u8 = 15;

/// Words of a session token.
const TOKEN_WORDS: usize = TOKEN_BYTES / 8;

/// Offset of the TCP header in the frame.
const AT: usize = ethernet::HEADER + ipv4::HEADER;

/// The only address at which the kernel answers requests: other addresses have answers of their own.
const METADATA: u32 = u32::from_be_bytes([169, 254, 169, 254]);

/// What user space has published.
pub trait PublishedDocuments: Ledger {
    /// The bytes of a response.
    type Bytes: Words;
    /// An entry of `ANSWERED`.
    type Connection: ConnectionEntry;
    /// An entry of `EDITIONS`.
    type Edition: EditionEntry;
    /// An entry of `TOKENS`.
    type Token: TokenEntry;
    /// The key of the requests' hashes.
    fn request_key(&self) -> SipKey;
    /// The entry of `EDITIONS` of a slot.
    fn edition(&self, slot: Slot) -> Option<Self::Edition>;
    /// The entry of `TOKENS` of a slot.
    fn token(&self, slot: Slot) -> Option<Self::Token>;
    /// The document for a request with or without a token, by its hash.
    fn document(&self, slot: Slot, edition: u32, request: u64, has_token: bool) -> Option<Document>;
    /// The bytes of a document.
    fn bytes(&self, document: &Document) -> Option<Self::Bytes>;
    /// The value of `Date`.
    fn date(&self) -> Option<ServedDate>;
    /// The entry of `ANSWERED` at an index.
    fn connection(&self, index: u32) -> Option<Self::Connection>;
    /// Returns whether there is room for a record of another answer.
    fn has_room(&self) -> bool;
    /// Records an answer.
    fn record(&self, record: AnswerRecord);
    /// Adds one to a counter of answers.
    fn count(&self, counter: u16);
}

/// An entry of `EDITIONS`.
pub trait EditionEntry {
    /// The current value.
    fn load(&self) -> Edition;
    /// Writes [`Edition::full_at_ns`].
    fn charge(&self, full_at_ns: u64);
}

/// An entry of `TOKENS`.
pub trait TokenEntry {
    /// [`SlotToken::until_ns`](crate::maps::SlotToken::until_ns).
    fn until_ns(&self) -> u64;
    /// [`SlotToken::edition`](crate::maps::SlotToken::edition).
    fn edition(&self) -> u32;
    /// [`SlotToken::from_end`](crate::maps::SlotToken::from_end).
    fn distance_from_end(&self) -> u32;
    /// A word of the token, by its number.
    fn word(&self, number: usize) -> u64;
}

/// An entry of `ANSWERED`.
pub trait ConnectionEntry {
    /// The current value.
    fn load(&self) -> AnsweredConnection;
    /// Replaces the value.
    fn store(&self, connection: AnsweredConnection);
}

/// Bytes that are copied word by word.
pub trait Words {
    /// Eight bytes at an offset of at most [`RESPONSE_BYTES`] - 8.
    fn word(&self, offset: usize) -> [u8; 8];
}

/// A request that has an answer.
#[derive(Clone, Copy, Default)]
pub struct AnswerableRequest {
    document: Document,
    date: ServedDate,
    ports: [u8; 4],
    guest: [u8; 4],
    mac: [u8; 6],
    /// The sequence number after the request, and the number that the response begins with.
    next: u32,
    ack: u32,
    flow: Flow,
    turn: Turn,
    edition: u32,
    slot: Slot,
    now_ns: u64,
    /// When the bucket of the slot is full again after this request.
    full_at_ns: u64,
    /// Where it stands in the frame.
    at: u16,
    length: u16,
    /// Bytes of the longest answer that the guest accepts.
    longest: u16,
    /// What the kernel has sent on the connection.
    sent: u32,
    /// The token that is hidden, and where it stands in the frame; 0 if none is.
    token: [u64; TOKEN_WORDS],
    token_at: usize,
}

/// Why it is the kernel's turn on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Turn {
    /// It is the connection's first request, or the next one, of a guest with these abilities. The connection's first
    /// request has this sequence number.
    New(TcpOptions, u32),
    /// The guest has repeated its request.
    #[default]
    Repeated,
}

impl fmt::Debug for AnswerableRequest {
    /// Omits the token, which is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerableRequest").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl AnswerableRequest {
    /// Bytes of the frame with the answer.
    #[inline(always)]
    #[must_use]
    pub const fn frame_length(&self) -> usize {
        AT + tcp::HEADER + self.document.length as usize
    }

    /// Where the request stands in the frame, and its length, within bounds that the verifier sees.
    #[inline(always)]
    const fn place(&self) -> (usize, usize) {
        (self.at as usize & 0x7f, self.length as usize & 0x1ff)
    }

    /// Returns whether the answer may have no room in the frame of its request, so that it must be [begun](long::begin).
    #[inline(always)]
    #[must_use]
    pub const fn is_long(&self) -> bool {
        self.document.length as usize > RESPONSE_BYTES
    }
}

/// Finds the answer to a request over IPv4 at a monotonic time in nanoseconds. `classify` has excluded options and
/// fragments. The frame is afterwards as it was before. If there is no answer, the content of `request` is undefined.
#[cfg(feature = "std")]
pub fn find(
    frame: &mut (impl Editor + ?Sized),
    slot: Slot,
    now_ns: u64,
    documents: &impl PublishedDocuments,
    request: &mut AnswerableRequest,
) -> Option<()> {
    prove(frame, slot, now_ns, documents, request)?;
    hide_token(frame, documents, request);
    let found = look_up(frame, documents, request);
    show_token(frame, request);
    found
}

// The parts of `find`. A program calls one after the other, because its stack has no room for all.

/// Checks that the segment is a request and that it is the kernel's turn.
#[inline(always)]
pub fn prove(
    frame: &(impl Editor + ?Sized),
    slot: Slot,
    now_ns: u64,
    documents: &impl PublishedDocuments,
    request: &mut AnswerableRequest,
) -> Option<()> {
    let ip: [u8; ipv4::HEADER] = frame.read(ethernet::HEADER)?;
    let [v0, v1, l0, l1, i0, i1, f0, f1, t0, p0, c0, c1, s0, s1, s2, s3, d0, d1, d2, d3] = ip;
    let (guest, local) = ([s0, s1, s2, s3], [d0, d1, d2, d3]);
    let length = u16::from_be_bytes([l0, l1]) as usize;
    let addresses = sum::long(u32::from_be_bytes(guest)) + sum::long(u32::from_be_bytes(local));
    let whole = sum::long(u32::from_be_bytes([v0, v1, l0, l1]))
        + sum::long(u32::from_be_bytes([i0, i1, f0, f1]))
        + sum::long(u32::from_be_bytes([t0, p0, c0, c1]))
        + addresses;
    if u32::from_be_bytes(local) != METADATA
        || sum::fold(whole) != 0xffff
        || !super::tcp::is_station_v4(guest)
    {
        return None;
    }
    let [p0, p1, p2, p3, s0, s1, s2, s3, a0, a1, a2, a3, offset, flags]: [u8; 14] = frame.read(AT)?;
    let [w0, w1, c0, c1]: [u8; 4] = frame.read(AT + 14)?;
    let ports = [p0, p1, p2, p3];
    let header = (offset >> 4) as usize * 4;
    let segment = length.wrapping_sub(ipv4::HEADER);
    let payload = segment.wrapping_sub(header);
    if header < tcp::HEADER
        || segment > REQUEST_BYTES
        || !(REQUEST_MIN..=REQUEST_BYTES).contains(&payload)
        || u16::from_be_bytes([p2, p3]) != PORT
        || (p0 | p1) == 0
        || flags & (tcp::URG | tcp::ACK | tcp::RST | tcp::SYN | tcp::FIN) != tcp::ACK
    {
        return None;
    }
    let entry = documents.edition(slot)?.load();
    let (edition, full_at_ns) = (entry.number, bucket::take_request(entry, now_ns)?);
    // Values go straight into `request`, because 512 bytes of stack have no room for them.
    request.date = documents.date()?;
    let date = &request.date;
    if edition & 1 == 0 || date.until_ns < now_ns || date.records != 0 && !documents.has_room() {
        return None;
    }
    request.ports = ports;
    request.guest = guest;
    request.edition = edition;
    request.slot = slot;
    request.now_ns = now_ns;
    request.full_at_ns = full_at_ns;
    let (seq, ack) = (u32::from_be_bytes([s0, s1, s2, s3]), u32::from_be_bytes([a0, a1, a2, a3]));
    let next = seq.wrapping_add(payload as u32);
    request.next = next;
    request.ack = ack;
    let key = documents.key();
    let flow = Flow::v4(&key, slot, guest, local, ports);
    request.flow = flow;
    let (turn, sent, options) = turn(documents, &key, flow, (seq, next, ack), edition, now_ns)?;
    request.turn = turn;
    let pseudo = addresses + protocol::TCP as u32 + segment as u32;
    if u16::from_be_bytes([c0, c1]) != sum::fold(pseudo)
        && sum::fold(pseudo + words(frame, AT, segment)?) != 0xffff
    {
        return None;
    }
    request.at = (AT + header) as u16;
    request.length = payload as u16;
    // Linux shifts by up to 10 bits, and then announces 63 for 64 KiB (RFC 7323 section 2.3).
    let scale = match options.scale {
        Some(scale) => scale & SCALE_BITS,
        None => 0,
    };
    let window = (u16::from_be_bytes([w0, w1]) as u32) << scale;
    request.longest = if (options.segment as u32) < window { options.segment } else { window as u16 };
    request.sent = sent;
    request.mac = frame.read(ethernet::SOURCE)?;
    Some(())
}

/// Finds the document for a request that [`prove`] has accepted, and whose token is [hidden](hide_token).
#[inline(always)]
pub fn look_up(
    frame: &(impl Editor + ?Sized),
    documents: &impl PublishedDocuments,
    request: &mut AnswerableRequest,
) -> Option<()> {
    let (at, length) = request.place();
    let hash = hash_request(frame, at, length, &documents.request_key())?;
    request.document = documents.document(request.slot, request.edition, hash, request.token_at != 0)?;
    let length = request.document.length;
    // A repeated request must get its first answer.
    if length > request.longest
        || length as usize > LONG_RESPONSE_BYTES
        || (length as usize) < RESPONSE_MIN
        || matches!(request.turn, Turn::Repeated) && request.sent != request.ack.wrapping_add(length as u32)
    {
        return None;
    }
    Some(())
}

/// Whether it is the kernel's turn on a connection: at its first segment, at the next request of a connection that the
/// kernel owns, or at a repeated one. Also returns what the kernel has sent, and the guest's abilities.
#[inline(always)]
fn turn(
    documents: &impl PublishedDocuments,
    key: &CookieKey,
    flow: Flow,
    (seq, next, ack): (u32, u32, u32),
    edition: u32,
    now_ns: u64,
) -> Option<(Turn, u32, TcpOptions)> {
    let posted = documents.entry(flow.index())?.load();
    let answered = documents.connection(flow.index())?.load();
    let is_kernels = posted.finished == FIN_ENDS_BOTH_KERNEL;
    let is_over = is_kernels && posted.closed == posted.sent;
    let is_known = answered.flow == posted.flow;
    if posted.flow == flow.number() && !is_over {
        if !is_kernels {
            return None;
        }
        // A previous agent's programs may have answered, for which there is no entry.
        let (options, first) = if is_known {
            (answered.options(), answered.first)
        } else {
            (AnsweredConnection::LEAST.options(), seq)
        };
        if posted.received == seq && posted.sent == ack {
            return Some((Turn::New(options, first), posted.sent, options));
        }
        let is_repeated = posted.received == next && posted.acknowledged == ack && posted.sent != ack;
        if is_repeated && is_known && answered.edition == edition {
            return Some((Turn::Repeated, posted.sent, options));
        }
    }
    // A guest may begin again with the same ports.
    let differs = posted.opened == flow.mark() || is_known && answered.first != seq;
    let is_anew = is_kernels && posted.flow == flow.number() && differs;
    let is_idle = is_kernels && is_known && answered.is_idle(now_ns);
    if posted.held != 0 || posted.flow != 0 && !is_over && !is_idle && !is_anew {
        return None;
    }
    let CookieCheck::First(options) = cookie::check(key, flow, seq, ack) else {
        return None;
    };
    Some((Turn::New(options, seq), ack, options))
}

/// Replaces the slot's token in a request that [`prove`] has accepted by zeros, if it has the token.
#[inline(always)]
pub fn hide_token(
    frame: &mut (impl Editor + ?Sized),
    documents: &impl PublishedDocuments,
    request: &mut AnswerableRequest,
) {
    request.token_at = 0;
    let Some(start) = find_token(frame, documents, request) else {
        return;
    };
    request.token_at = start;
    put_token(frame, start, &[0; TOKEN_WORDS]);
}

/// Restores what [`hide_token`] has replaced.
#[inline(always)]
pub fn show_token(frame: &mut (impl Editor + ?Sized), request: &AnswerableRequest) {
    if request.token_at != 0 {
        put_token(frame, black_box(request.token_at) & 0x3ff, &request.token);
    }
}

/// Copies the slot's token, and returns where it begins in the frame; `None` if the request does not have it.
#[inline(always)]
fn find_token(
    frame: &(impl Editor + ?Sized),
    documents: &impl PublishedDocuments,
    request: &mut AnswerableRequest,
) -> Option<usize> {
    let token = documents.token(request.slot)?;
    let ((at, length), from_end) = (request.place(), token.distance_from_end() as usize);
    if token.edition() != request.edition
        || token.until_ns() <= request.now_ns
        || from_end < TOKEN_BYTES
        || from_end > length
    {
        return None;
    }
    let start = black_box(at + length - from_end) & 0x3ff;
    let mut differs = 0;
    for number in 0..TOKEN_WORDS {
        // User space may change the entry meanwhile, and the frame must get its own bytes again.
        let word = token.word(number);
        request.token[number] = word;
        differs |= u64::from_ne_bytes(frame.read(start + 8 * number)?) ^ word;
    }
    (differs == 0).then_some(start)
}

/// Writes words in place of a token, whose bytes have been read.
#[inline(always)]
fn put_token(frame: &mut (impl Editor + ?Sized), start: usize, words: &[u64; TOKEN_WORDS]) {
    for (number, word) in words.iter().enumerate() {
        frame.write(start + 8 * number, word.to_ne_bytes());
    }
}

/// The hash of a request. A request that one tenant makes the agent learn is looked for by it in the requests of all others,
/// so nobody may find two requests with one hash: it is a pseudo-random function, and its key is for nothing else.
#[inline(always)]
fn hash_request(frame: &(impl Editor + ?Sized), at: usize, length: usize, key: &SipKey) -> Option<u64> {
    let end = at + length;
    let mut hash = SipHash13::new(key);
    // A number of which the verifier knows nothing, as in `words`.
    let mut rest = black_box(length) & 0x1ff;
    for _ in 0..REQUEST_BYTES / 8 {
        if rest < 8 {
            break;
        }
        hash.add(u64::from_le_bytes(frame.read(black_box(end - rest) & 0x3ff)?));
        rest = black_box(rest - 8) & 0x1ff;
    }
    // The last eight bytes, of which all but the last `rest` are hashed already.
    let last = u64::from_le_bytes(frame.read(black_box(end - 8) & 0x3ff)?);
    Some(hash.end(last >> 1 >> (63 - 8 * (rest & 7)), length))
}

/// The hash of a request, as the kernel computes it; `None` if the kernel would not answer one of this length.
#[cfg(feature = "std")]
#[must_use]
pub fn hash_of(request: &[u8], key: &SipKey) -> Option<u64> {
    if (REQUEST_MIN..=REQUEST_BYTES - tcp::HEADER).contains(&request.len()) {
        hash_request(request, 0, request.len(), key)
    } else {
        None
    }
}

/// The sum of `length` bytes from `at` on, as a sum of 16-bit words in wire order.
#[inline(always)]
fn words(frame: &(impl Editor + ?Sized), at: usize, length: usize) -> Option<u32> {
    let end = at + length;
    let mut rest = black_box(length) & 0x1ff;
    // The sums of both halves begin with a number of which the verifier knows nothing. From 0 their ranges would grow
    // with each turn, and the verifier would follow what comes after the loop once for each.
    let seed = u64::from_ne_bytes(frame.read(at)?);
    let (mut high, mut low) = (seed, seed);
    for _ in 0..REQUEST_BYTES / 8 + 1 {
        if rest < 8 {
            break;
        }
        let word = u64::from_be_bytes(frame.read(black_box(end - rest) & 0x3ff)?);
        high = high.wrapping_add(word >> 32);
        low = low.wrapping_add(word & 0xffff_ffff);
        rest = black_box(rest - 8) & 0x1ff;
    }
    if rest != 0 {
        let word = u64::from_be_bytes(frame.read(black_box(end - 8) & 0x3ff)?);
        // The bytes that count are the last; an odd number of bytes in all ends with a zero byte.
        let word = (word & ((1_u64 << (8 * (rest & 7))) - 1)) << (8 * (length & 1));
        high = high.wrapping_add(word >> 32);
        low = low.wrapping_add(word & 0xffff_ffff);
    }
    let sum = high.wrapping_sub(seed).wrapping_add(low.wrapping_sub(seed));
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    Some(sum::fold64(sum).into())
}

/// Writes the answer into a frame of its length, and makes the connection the kernel's. `None` if the frame is too short.
#[inline(always)]
pub fn write(
    frame: &mut (impl Editor + ?Sized),
    request: &AnswerableRequest,
    documents: &impl PublishedDocuments,
) -> Option<()> {
    let AnswerableRequest { document, date, .. } = *request;
    let bytes = documents.bytes(&document)?;
    let length = document.length as usize;
    let at = write_headers(frame, request, request.mac, date_sum(&date, document.date))?;
    let mut rest = black_box(length) & 0x3ff;
    for _ in 0..RESPONSE_BYTES / 8 {
        if rest < 8 {
            break;
        }
        copy(frame, at, &bytes, length - rest)?;
        rest = black_box(rest - 8) & 0x3ff;
    }
    // The last eight bytes, some of which are copied already.
    copy(frame, at, &bytes, length - 8)?;
    let date_at = black_box(at + document.date as usize) & 0x3ff;
    if !frame.write(date_at, date.text) {
        return None;
    }
    if let Turn::New(options, first) = request.turn {
        own(documents, request, options, first)?;
    }
    Some(())
}

/// Writes the headers of the answer, whose payload has the sum of the document and `date_sum`. Returns the offset after
/// them.
#[inline(always)]
fn write_headers(
    frame: &mut (impl Editor + ?Sized),
    request: &AnswerableRequest,
    destination: [u8; 6],
    date_sum: u16,
) -> Option<usize> {
    let AnswerableRequest { document, ports, guest, next, ack, .. } = *request;
    let [p0, p1, p2, p3] = ports;
    let length = document.length as usize;
    let total = (ipv4::HEADER + tcp::HEADER + length) as u16;
    let addresses = sum::long(u32::from_be_bytes(guest)) + sum::long(METADATA);
    let ttl = [HOP_LIMIT, protocol::TCP];
    let ip_sum = ((ipv4::VERSION_IHL as u32) << 8)
        + total as u32
        + ipv4::DONT_FRAGMENT as u32
        + u16::from_be_bytes(ttl) as u32
        + addresses;
    let offset = [(tcp::HEADER as u8 / 4) << 4, tcp::ACK | tcp::PSH];
    let tcp_sum = addresses
        + protocol::TCP as u32
        + (tcp::HEADER + length) as u32
        + sum::long(u32::from_be_bytes(ports))
        + sum::long(ack)
        + sum::long(next)
        + u16::from_be_bytes(offset) as u32
        + WINDOW as u32
        + document.sum as u32
        + date_sum as u32;
    let mut at = put(frame, ethernet::DESTINATION, destination)?;
    at = put(frame, at, Mac::SERVICE.0)?;
    at = put(frame, at, ethernet::IPV4.to_be_bytes())?;
    at = put(frame, at, [ipv4::VERSION_IHL, 0])?;
    at = put(frame, at, total.to_be_bytes())?;
    at = put(frame, at, [0; 2])?;
    at = put(frame, at, ipv4::DONT_FRAGMENT.to_be_bytes())?;
    at = put(frame, at, ttl)?;
    at = put(frame, at, sum::finish(ip_sum))?;
    at = put(frame, at, METADATA.to_be_bytes())?;
    at = put(frame, at, guest)?;
    at = put(frame, at, [p2, p3, p0, p1])?;
    at = put(frame, at, ack.to_be_bytes())?;
    at = put(frame, at, next.to_be_bytes())?;
    at = put(frame, at, offset)?;
    at = put(frame, at, WINDOW.to_be_bytes())?;
    at = put(frame, at, sum::finish(tcp_sum))?;
    put(frame, at, [0; 2])
}

/// The sum of the value of `Date` at this offset in a response.
#[inline(always)]
const fn date_sum(date: &ServedDate, offset: u16) -> u16 {
    if offset & 1 == 0 { date.sum } else { date.sum.swap_bytes() }
}

/// Copies eight bytes of a response, which begins at `start` in the frame.
#[inline(always)]
fn copy(frame: &mut (impl Editor + ?Sized), start: usize, bytes: &impl Words, offset: usize) -> Option<()> {
    let offset = black_box(offset) & 0x1ff;
    let is_inside = offset <= RESPONSE_BYTES - 8;
    (is_inside && frame.write(black_box(start + offset) & 0x3ff, bytes.word(offset))).then_some(())
}

/// Makes the connection the kernel's, and records and counts the answer.
#[inline(always)]
fn own(
    documents: &impl PublishedDocuments,
    request: &AnswerableRequest,
    options: TcpOptions,
    first: u32,
) -> Option<()> {
    let AnswerableRequest { document, next, ack, flow, .. } = *request;
    let sent = ack.wrapping_add(document.length as u32);
    let connection = AnsweredConnection::new(flow.number(), request.now_ns, request.edition, options, first);
    documents.connection(flow.index())?.store(connection);
    documents.entry(flow.index())?.own(AllSent {
        flow: flow.number(),
        sent,
        received: next,
        finished: FIN_ENDS_BOTH_KERNEL,
        opened: 0,
        held: 0,
        acknowledged: ack,
        closed: sent.wrapping_sub(1),
    });
    documents.edition(request.slot)?.charge(request.full_at_ns);
    documents.count(document.counter);
    if request.date.records != 0 {
        let [p0, p1, _, _] = request.ports;
        documents.record(AnswerRecord {
            slot: request.slot,
            counter: document.counter,
            content: document.content,
            guest: request.guest,
            port: [p0, p1],
            reserved: [0; 2],
        });
    }
    Some(())
}

#[cfg(test)]
mod tests;
