//! Handles SYN, acknowledgement and FIN (RFC 9293) where no connection state is needed.

use super::{
    Editor, Entry, HOP_LIMIT, Ledger, PORT, Reply, SEGMENT_UNSAID_V4, SEGMENT_UNSAID_V6, WINDOW, put,
    segment_v4, segment_v6, sum,
};
use crate::cookie::{self, CookieCheck, Flow, SCALE_MAX, TcpOptions};
use crate::maps::{FIN_ENDS, FIN_ENDS_BOTH, FIN_ENDS_BOTH_KERNEL, Slot};
use crate::verdict::Verdict;
use crate::wire::{ethernet, ipv4, ipv6, protocol, tcp};
use core::hint::black_box;

/// Offset of the TCP header in the frame.
const AT_V4: usize = ethernet::HEADER + ipv4::HEADER;
const AT_V6: usize = ethernet::HEADER + ipv6::HEADER;

/// Maximum number of options parsed in a SYN. Linux sends five, macOS eight. A SYN with more is steered.
pub(super) const OPTIONS_MAX: usize = 9;

/// The fields of a segment without payload.
struct Segment {
    flow: Flow,
    /// Source and destination port, in wire order.
    ports: [u8; 4],
    seq: u32,
    ack: u32,
    flags: u8,
    /// Length in bytes of its header with options: 20 to 60.
    header: usize,
}

/// The segment of the answer.
struct Response {
    verdict: Verdict,
    seq: u32,
    ack: u32,
    flags: u8,
    window: u16,
    options: Options,
}

/// The TCP options of an answer.
enum Options {
    None,
    /// The largest segment we accept, in bytes.
    Segment(u16),
    /// The largest segment, and a window scale of 0.
    SegmentAndScale(u16),
}

/// What to do with a segment.
enum Action {
    Send(Response),
    Absorb,
}

/// Handles a segment over IPv4. `classify` has excluded IP options and fragments.
#[inline(always)]
pub(super) fn ipv4(
    frame: &mut (impl Editor + ?Sized),
    slot: Slot,
    mtu: u32,
    ledger: &impl Ledger,
) -> Option<Reply> {
    let ip: [u8; ipv4::HEADER] = frame.read(ethernet::HEADER)?;
    let [v0, v1, l0, l1, i0, i1, f0, f1, t0, p0, c0, c1, s0, s1, s2, s3, d0, d1, d2, d3] = ip;
    let (guest, local) = ([s0, s1, s2, s3], [d0, d1, d2, d3]);
    let head = u32::from_be_bytes([v0, v1, l0, l1]);
    let rest = [u32::from_be_bytes([i0, i1, f0, f1]), u32::from_be_bytes([t0, p0, c0, c1])];
    let addresses = sum::long(u32::from_be_bytes(guest)) + sum::long(u32::from_be_bytes(local));
    let whole = sum::long(head) + sum::long(rest[0]) + sum::long(rest[1]) + addresses;
    if sum::fold(whole) != 0xffff || !is_station_v4(guest) {
        return None;
    }
    let length = u16::from_be_bytes([l0, l1]) as usize;
    let segment = segment(frame, AT_V4, length.checked_sub(ipv4::HEADER)?, |ports| {
        Flow::v4(&ledger.key(), slot, guest, local, ports)
    })?;
    let answer = match act_on(frame, AT_V4, &segment, (segment_v4(mtu), SEGMENT_UNSAID_V4), ledger)? {
        Action::Absorb => return Some(Reply::Absorb(Verdict::AbsorbAck)),
        Action::Send(answer) => answer,
    };
    let payload = tcp::HEADER + answer.options.len();
    // The identification is 0, because the datagram is never fragmented (RFC 6864 §4.1).
    let head = [ipv4::VERSION_IHL, 0, 0, (ipv4::HEADER + payload) as u8];
    let ttl = [HOP_LIMIT, protocol::TCP];
    let header = sum::long(u32::from_be_bytes(head))
        + ipv4::DONT_FRAGMENT as u32
        + u16::from_be_bytes(ttl) as u32
        + addresses;
    let mut at = swap(frame, AT_V4 + payload)?;
    at = put(frame, at, head)?;
    at = put(frame, at, [0; 2])?;
    at = put(frame, at, ipv4::DONT_FRAGMENT.to_be_bytes())?;
    at = put(frame, at, ttl)?;
    at = put(frame, at, sum::finish(header))?;
    at = put(frame, at, local)?;
    at = put(frame, at, guest)?;
    emit(frame, at, addresses, &segment, &answer)
}

/// Handles a segment over IPv6. `classify` has excluded extension headers.
#[inline(always)]
pub(super) fn ipv6(
    frame: &mut (impl Editor + ?Sized),
    slot: Slot,
    mtu: u32,
    ledger: &impl Ledger,
) -> Option<Reply> {
    let length: [u8; 2] = frame.read(ethernet::HEADER + ipv6::PAYLOAD_LENGTH)?;
    let guest: [u8; 16] = frame.read(ethernet::HEADER + ipv6::SOURCE)?;
    let local: [u8; 16] = frame.read(ethernet::HEADER + ipv6::DESTINATION)?;
    if !is_station_v6(guest) {
        return None;
    }
    let segment = segment(frame, AT_V6, u16::from_be_bytes(length) as usize, |ports| {
        Flow::v6(&ledger.key(), slot, guest, local, ports)
    })?;
    let answer = match act_on(frame, AT_V6, &segment, (segment_v6(mtu), SEGMENT_UNSAID_V6), ledger)? {
        Action::Absorb => return Some(Reply::Absorb(Verdict::AbsorbAck)),
        Action::Send(answer) => answer,
    };
    let payload = tcp::HEADER + answer.options.len();
    let mut at = swap(frame, AT_V6 + payload)?;
    at = put(frame, at, [ipv6::VERSION << 4, 0, 0, 0])?;
    at = put(frame, at, [0, payload as u8, protocol::TCP, HOP_LIMIT])?;
    at = put(frame, at, local)?;
    at = put(frame, at, guest)?;
    emit(frame, at, sum::address(guest) + sum::address(local), &segment, &answer)
}

/// Parses a segment of `length` bytes at offset `at`; `None` for a segment with payload.
#[inline(always)]
fn segment(
    frame: &(impl Editor + ?Sized),
    at: usize,
    length: usize,
    flow: impl FnOnce([u8; 4]) -> Flow,
) -> Option<Segment> {
    let header: [u8; 14] = frame.read(at)?;
    let [p0, p1, p2, p3, s0, s1, s2, s3, a0, a1, a2, a3, offset, flags] = header;
    let header = (offset >> 4) as usize * 4;
    if header < tcp::HEADER || length != header || (p0 | p1) == 0 || (p2 | p3) == 0 {
        return None;
    }
    let ports = [p0, p1, p2, p3];
    Some(Segment {
        flow: flow(ports),
        ports,
        seq: u32::from_be_bytes([s0, s1, s2, s3]),
        ack: u32::from_be_bytes([a0, a1, a2, a3]),
        flags,
        header,
    })
}

/// Decides what to do with a segment. `None` leaves it to user space, for example if the frame ends before
/// the header does. The congestion bits (RFC 3168) are ignored.
#[inline(always)]
fn act_on(
    frame: &(impl Editor + ?Sized),
    at: usize,
    segment: &Segment,
    sizes: (u16, u16),
    ledger: &impl Ledger,
) -> Option<Action> {
    const FIN_ACK: u8 = tcp::FIN | tcp::ACK;
    // This check comes after the answer is known. If it came first, the compiler would remove the bounds
    // checks of reads inside the header, which the verifier requires.
    let whole = || byte_after(frame, at + segment.header - 2);
    match segment.flags & (tcp::URG | tcp::ACK | tcp::RST | tcp::SYN | tcp::FIN) {
        tcp::SYN if segment.flags & tcp::PSH == 0 => {
            let answer = syn(frame, at, segment, sizes, ledger)?;
            whole().map(|_| Action::Send(answer))
        }
        tcp::ACK => whole().and_then(|_| ack(segment, ledger).then_some(Action::Absorb)),
        FIN_ACK => whole().and_then(|_| fin(segment, ledger).map(Action::Send)),
        _ => None,
    }
}

/// Answers a SYN with a SYN cookie.
#[inline(always)]
fn syn(
    frame: &(impl Editor + ?Sized),
    at: usize,
    segment: &Segment,
    (largest, default): (u16, u16),
    ledger: &impl Ledger,
) -> Option<Response> {
    let [_, _, p2, p3] = segment.ports;
    if u16::from_be_bytes([p2, p3]) != PORT {
        return None;
    }
    // User space may hold a connection of this flow, which the SYN replaces.
    let entry = ledger.entry(segment.flow.index())?;
    if entry.load().held != 0 {
        return None;
    }
    let abilities = abilities(frame, at + segment.header, segment.header - tcp::HEADER, (largest, default))?;
    entry.open(segment.flow.mark());
    let options = match abilities.scale {
        Some(_) => Options::SegmentAndScale(largest),
        None => Options::Segment(largest),
    };
    Some(Response {
        verdict: Verdict::AnswerSyn,
        seq: cookie::issue(&ledger.key(), segment.flow, segment.seq, abilities),
        ack: segment.seq.wrapping_add(1),
        flags: tcp::SYN | tcp::ACK,
        window: WINDOW,
        options,
    })
}

/// Parses the options of a SYN, which are the last `rest` bytes before `end`. `None` for more than
/// [`OPTIONS_MAX`] options and for invalid lengths. A segment size of 0 counts as absent, because RFC 9293
/// §3.7.1 does not define it.
#[inline(always)]
fn abilities(
    frame: &(impl Editor + ?Sized),
    end: usize,
    rest: usize,
    (largest, default): (u16, u16),
) -> Option<TcpOptions> {
    const ABSENT: u16 = u16::MAX;
    // The verifier follows each path through the loop whose state differs. The offset is therefore computed
    // back from `end`, and `black_box` hides from the compiler that it depends on the start. Everything that
    // depends on the values found comes after the loop.
    let mut rest = black_box(rest);
    let (mut size, mut scale) = (0, ABSENT);
    for _ in 0..OPTIONS_MAX {
        if rest == 0 {
            break;
        }
        // The byte before the option, at most 53 + 60; the mask shows this to the verifier. `black_box` as in
        // `sum_words`.
        let before = black_box(end - 1 - rest) & 0x7f;
        let kind = byte_after(frame, before)?;
        if kind == tcp::END_OF_OPTIONS {
            rest = 0;
            break;
        }
        if kind == tcp::NO_OPERATION {
            // Without `black_box`, the compiler makes a separate loop for a run of these, with as many exits
            // as turns.
            rest = black_box(rest - 1) & 0x3f;
            continue;
        }
        let length = byte_after(frame, before + 1)? as usize;
        if length < 2 || length > rest {
            return None;
        }
        // The mask shows the verifier that the number stays small, however the compiler translates the
        // comparison.
        rest = black_box(rest - length) & 0x3f;
        if kind == tcp::SEGMENT_SIZE {
            if length != 4 {
                return None;
            }
            size = u16::from_be_bytes(frame.read(before + 3)?);
        } else if kind == tcp::WINDOW_SCALE {
            if length != 3 {
                return None;
            }
            scale = byte_after(frame, before + 2)?.into();
        }
    }
    if rest != 0 {
        return None;
    }
    let segment = if size == 0 { default } else { size.min(largest) };
    let scale = if scale == ABSENT { None } else { Some((scale as u8).min(SCALE_MAX)) };
    Some(TcpOptions { segment, scale })
}

/// Reads the byte after a variable offset, together with the byte at it. A compiler turns the read of a
/// single byte into a comparison of the pointer with the end of the frame, from which the verifier derives
/// no bound. The offset is that of the first byte, because Linux 7.3 refuses a pointer below the start of
/// the frame.
#[inline(always)]
fn byte_after(frame: &(impl Editor + ?Sized), before: usize) -> Option<u8> {
    frame.read::<2>(before).map(|[_, byte]| byte)
}

/// True for an acknowledgement that user space does not need.
///
/// On a posted connection, this is an acknowledgement of everything sent, by user space or by [`fin`]. If
/// user space holds no connection with this index, it is the acknowledgement that ends a handshake, because
/// the first segment with payload repeats its numbers. On any other connection user space needs every
/// acknowledgement. One in the middle of a transfer can look like the end of a handshake, because the hash in
/// [`cookie`] has only 16 bits, and the guest repeats it with the same number.
#[inline(always)]
fn ack(segment: &Segment, ledger: &impl Ledger) -> bool {
    let Some(entry) = ledger.entry(segment.flow.index()) else {
        return false;
    };
    let posted = entry.load();
    if posted.flow == segment.flow.number() {
        let all = posted.sent == segment.ack && posted.received == segment.seq;
        if all {
            entry.acknowledge(posted.sent);
        }
        let ended =
            (FIN_ENDS_BOTH..=FIN_ENDS_BOTH_KERNEL).contains(&posted.finished) && posted.closed == posted.sent;
        let last =
            posted.sent.wrapping_add(1) == segment.ack && posted.received.wrapping_add(1) == segment.seq;
        return all || ended && last;
    }
    if posted.held != 0 {
        return false;
    }
    let found = cookie::check(&ledger.key(), segment.flow, segment.seq, segment.ack);
    matches!(found, CookieCheck::First(_))
}

/// Acknowledges the FIN, or a repeated FIN, of a guest that has received everything, and sends our FIN with
/// it if it is not sent yet. If the answer is lost, the guest repeats its FIN and gets the same answer,
/// either from here or from user space after it has withdrawn the entry.
#[inline(always)]
fn fin(segment: &Segment, ledger: &impl Ledger) -> Option<Response> {
    let entry = ledger.entry(segment.flow.index())?;
    let posted = entry.load();
    let ends =
        posted.flow == segment.flow.number() && posted.sent == segment.ack && posted.received == segment.seq;
    let flags = match posted.finished {
        FIN_ENDS if ends => tcp::ACK,
        FIN_ENDS_BOTH..=FIN_ENDS_BOTH_KERNEL if ends => tcp::FIN | tcp::ACK,
        _ => return None,
    };
    entry.acknowledge(posted.sent);
    entry.close(posted.sent);
    Some(Response {
        verdict: Verdict::AnswerFin,
        seq: posted.sent,
        ack: posted.received.wrapping_add(1),
        flags,
        window: WINDOW,
        options: Options::None,
    })
}

impl Options {
    #[inline(always)]
    const fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Segment(_) => 4,
            Self::SegmentAndScale(_) => 8,
        }
    }

    /// The two words in the header; 0 for an absent one.
    #[inline(always)]
    const fn words(&self) -> (u32, u32) {
        const SIZE: u32 = u32::from_be_bytes([tcp::SEGMENT_SIZE, 4, 0, 0]);
        const SCALE: u32 = u32::from_be_bytes([tcp::NO_OPERATION, tcp::WINDOW_SCALE, 3, 0]);
        match self {
            Self::None => (0, 0),
            Self::Segment(size) => (SIZE | *size as u32, 0),
            Self::SegmentAndScale(size) => (SIZE | *size as u32, SCALE),
        }
    }
}

/// Swaps the MAC addresses of a frame of at least `length` bytes. Returns the offset of the IP header.
#[inline(always)]
fn swap(frame: &mut (impl Editor + ?Sized), length: usize) -> Option<usize> {
    byte_after(frame, length - 2)?;
    let to: [u8; 6] = frame.read(ethernet::SOURCE)?;
    let from: [u8; 6] = frame.read(ethernet::DESTINATION)?;
    let at = put(frame, ethernet::DESTINATION, to)?;
    put(frame, at, from)?;
    Some(ethernet::HEADER)
}

/// Writes the TCP header of the answer at offset `at`.
#[inline(always)]
fn emit(
    frame: &mut (impl Editor + ?Sized),
    at: usize,
    addresses: u32,
    segment: &Segment,
    answer: &Response,
) -> Option<Reply> {
    let [p0, p1, p2, p3] = segment.ports;
    let (size, scale) = answer.options.words();
    let length = tcp::HEADER + answer.options.len();
    let offset = [(length as u8 / 4) << 4, answer.flags];
    let sum = addresses
        + protocol::TCP as u32
        + length as u32
        + sum::long(u32::from_be_bytes(segment.ports))
        + sum::long(answer.seq)
        + sum::long(answer.ack)
        + u16::from_be_bytes(offset) as u32
        + answer.window as u32
        + sum::long(size)
        + sum::long(scale);
    let end = at + length;
    let mut at = put(frame, at, [p2, p3, p0, p1])?;
    at = put(frame, at, answer.seq.to_be_bytes())?;
    at = put(frame, at, answer.ack.to_be_bytes())?;
    at = put(frame, at, offset)?;
    at = put(frame, at, answer.window.to_be_bytes())?;
    at = put(frame, at, sum::finish(sum))?;
    at = put(frame, at, [0; 2])?;
    if size != 0 {
        at = put(frame, at, size.to_be_bytes())?;
    }
    if scale != 0 {
        put(frame, at, scale.to_be_bytes())?;
    }
    Some(Reply::Send(answer.verdict, end))
}

/// True for a unicast address: neither unspecified nor a group (RFC 1122 §3.2.1.3).
#[inline(always)]
pub(super) const fn is_station_v4(address: [u8; 4]) -> bool {
    u32::from_be_bytes(address) != 0 && address[0] & 0xf0 != 0xe0 && u32::from_be_bytes(address) != u32::MAX
}

/// True for an IPv6 unicast address (RFC 4291 §2.5.2, §2.7).
#[inline(always)]
pub(super) const fn is_station_v6(address: [u8; 16]) -> bool {
    u128::from_be_bytes(address) != 0 && address[0] != 0xff
}
