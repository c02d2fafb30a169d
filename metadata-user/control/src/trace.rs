//! The lines of a trace, as the agent writes them: `GET /v1/trace` on the control socket sends one JSON object per line;
//! and the description of the frames in them.
//!
//! An empty line shows that the agent is still alive. A reader ignores lines of a kind it does not know.

use etherparse::{LaxLinkExtSlice, LaxNetSlice, LaxSlicedPacket, TcpSlice, TransportSlice};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::net::IpAddr;

/// The version of the format.
pub const SCHEMA: &str = "trace/1";

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TraceLine {
    /// The first line.
    Begin {
        /// [`SCHEMA`].
        schema: String,
        /// A description of the traced guests.
        who: String,
        /// A description of what the trace misses.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unseen: Option<String>,
        /// Why the guests get no answers, if the agent knows it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
        /// The kernel's monotonic clock in nanoseconds, at the start.
        monotonic_ns: u64,
        /// The time of day at the start, in nanoseconds since 1970.
        unix_ns: u64,
    },
    /// A frame.
    Frame(TracedFrame),
    /// Frames lost before the next line, because the buffer was full.
    Lost {
        /// The number of lost frames.
        frames: u64,
    },
    /// The last line, if the agent ends the trace.
    End {
        /// The reason.
        reason: String,
    },
}

/// A frame and its verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedFrame {
    /// The time of the frame on the kernel's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// True for a frame to the guest, false for one from it.
    pub to_guest: bool,
    /// The verdict by its name in the metrics.
    pub verdict: String,
    /// Length of the whole frame in bytes.
    pub length: u32,
    /// The port in the form of the command line; `None` for a frame from user space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The guest's MAC.
    pub mac: String,
    /// The frame's headers, or everything captured if the reader asked for it, in hexadecimal.
    pub bytes: String,
    /// The request or status line, if a message starts in the captured bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Parses hexadecimal digits; `None` for any other text.
#[must_use]
pub fn parse_hex(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?, 16).ok()
        })
        .collect()
}

// The first line of an HTTP message, reduced to what may be shown.
//
// Header fields, bodies and queries may contain tokens and passwords. The output has the path, and a mark for a query.

/// Most bytes of a path to show.
const PATH_MOST: usize = 120;
/// The methods of guests. Other text may be the middle of a body.
const METHODS: [&str; 7] = ["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH"];
/// Digits of a status.
const STATUS: usize = 3;

/// The first line of a message that starts here: the status line if it goes to the guest, else the request line.
#[must_use]
pub fn message_line(payload: &[u8], to_guest: bool) -> Option<String> {
    if to_guest { status(payload) } else { request(payload) }
}

fn status(payload: &[u8]) -> Option<String> {
    let rest = payload.strip_prefix(b"HTTP/1.")?;
    let [minor @ (b'0' | b'1'), b' ', digits @ ..] = rest else { return None };
    let digits = digits.get(..STATUS).filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    Some(format!("HTTP/1.{} {}", char::from(*minor), std::str::from_utf8(digits).ok()?))
}

fn request(payload: &[u8]) -> Option<String> {
    let space = payload.iter().take(8).position(|byte| *byte == b' ')?;
    let (method, rest) = payload.split_at(space);
    let method = METHODS.into_iter().find(|known| known.as_bytes() == method)?;
    let rest = &rest[1..];
    // The capture may cut the path, but only a complete line is certainly a request.
    let end = rest.iter().position(|byte| *byte == b'\r' || *byte == b'\n');
    let target = match end {
        Some(end) => {
            let line = &rest[..end];
            let version = line.iter().rposition(|byte| *byte == b' ')?;
            line[version..].starts_with(b" HTTP/1.").then_some(&line[..version])?
        }
        None => rest.split(|byte| *byte == b' ').next()?,
    };
    let path = path(std::str::from_utf8(target).ok()?)?;
    let cut = if end.is_none() { "…" } else { "" };
    Some(format!("{method} {path}{cut}"))
}

/// The path of a request target. It omits the authority of an absolute URL, which may contain a user and a password.
fn path(target: &str) -> Option<String> {
    let path = match target.split_once("://") {
        Some(("http" | "https", rest)) => rest.find('/').map_or("/", |at| &rest[at..]),
        _ if target.starts_with('/') => target,
        _ => return None,
    };
    let (path, query) = path.split_once('?').map_or((path, ""), |(path, _)| (path, "?…"));
    if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
        return None;
    }
    Some(match path.get(..PATH_MOST) {
        Some(beginning) if beginning.len() < path.len() => format!("{beginning}…"),
        _ => format!("{path}{query}"),
    })
}

// Describes a frame in one line, and finds the end of its headers.
//
// A guest may send any bytes, and the kernel side copies only the start of a frame. The functions skip whatever they
// cannot parse.

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Bytes of an ARP packet for IPv4 over Ethernet.
const ARP: usize = 28;
/// Bytes of the header of an ICMP message.
const ICMP: usize = 8;

/// The headers of a frame.
#[must_use]
pub fn frame_headers(bytes: &[u8]) -> &[u8] {
    let end = LaxSlicedPacket::from_ethernet(bytes).map_or(ETHERNET, |packet| end_of_headers(bytes, &packet));
    bytes.get(..end).unwrap_or(bytes)
}

fn end_of_headers(bytes: &[u8], packet: &LaxSlicedPacket<'_>) -> usize {
    // The parsed slices point into the frame: their distance from its start is the length before them.
    let before =
        |rest: &[u8]| (rest.as_ptr() as usize).saturating_sub(bytes.as_ptr() as usize).min(bytes.len());
    match (&packet.transport, &packet.net) {
        (Some(TransportSlice::Tcp(tcp)), _) => before(tcp.payload()),
        (Some(TransportSlice::Udp(udp)), _) => before(udp.payload()),
        (Some(TransportSlice::Icmpv4(icmp)), _) => before(icmp.slice()) + ICMP,
        (Some(TransportSlice::Icmpv6(icmp)), _) => before(icmp.slice()) + icmp_headers(icmp.slice()),
        (_, Some(LaxNetSlice::Arp(arp))) => before(arp.slice()) + ARP,
        (_, Some(net)) => net.ip_payload_ref().map_or(ETHERNET, |payload| before(payload.payload)),
        (_, None) => packet.link_exts.iter().map(LaxLinkExtSlice::header_len).sum::<usize>() + ETHERNET,
    }
}

/// Bytes of an ICMP message's header. Neighbour discovery has no payload (RFC 4861 §4).
fn icmp_headers(message: &[u8]) -> usize {
    if matches!(message.first(), Some(133..=137)) { message.len() } else { ICMP }
}

/// The bytes after the headers.
#[must_use]
pub fn frame_payload(bytes: &[u8]) -> &[u8] {
    bytes.get(frame_headers(bytes).len()..).unwrap_or_default()
}

/// Addresses, ports and flags in one line.
#[must_use]
pub fn describe_frame(bytes: &[u8]) -> String {
    let Ok(packet) = LaxSlicedPacket::from_ethernet(bytes) else {
        return "less than an Ethernet header".into();
    };
    let mut text = String::new();
    for tag in &packet.link_exts {
        if let LaxLinkExtSlice::Vlan(vlan) = tag {
            _ = write!(text, "vlan {} ", vlan.vlan_identifier().value());
        }
    }
    text.push_str(&match &packet.net {
        Some(LaxNetSlice::Ipv4(ip)) => {
            let header = ip.header();
            let (from, to) = (header.source_addr().into(), header.destination_addr().into());
            let length = usize::from(header.total_len()).saturating_sub(header.slice().len());
            above(from, to, length, ip.is_payload_fragmented(), &packet)
        }
        Some(LaxNetSlice::Ipv6(ip)) => {
            let header = ip.header();
            let (from, to) = (header.source_addr().into(), header.destination_addr().into());
            above(from, to, usize::from(header.payload_length()), ip.is_payload_fragmented(), &packet)
        }
        Some(LaxNetSlice::Arp(arp)) => address_resolution(arp),
        None => packet
            .ether_payload()
            .map_or_else(String::new, |it| format!("ethertype {:#06x}", it.ether_type.0)),
    });
    text
}

fn address_resolution(arp: &etherparse::ArpPacketSlice<'_>) -> String {
    let v4 = |address: &[u8]| {
        address.first_chunk::<4>().map_or_else(|| "?".into(), |it| IpAddr::from(*it).to_string())
    };
    let (sender, target) = (v4(arp.sender_protocol_addr()), v4(arp.target_protocol_addr()));
    match arp.operation().0 {
        1 => format!("arp who has {target}? tell {sender}"),
        2 => format!("arp {sender} is here"),
        other => format!("arp operation {other}"),
    }
}

/// Describes the content of an IP packet of `length` bytes.
fn above(from: IpAddr, to: IpAddr, length: usize, fragment: bool, packet: &LaxSlicedPacket<'_>) -> String {
    let pair = |source: u16, destination: u16| match from {
        IpAddr::V4(_) => format!("{from}:{source} → {to}:{destination}"),
        IpAddr::V6(_) => format!("[{from}]:{source} → [{to}]:{destination}"),
    };
    match &packet.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            let length = length.saturating_sub(tcp.header_slice().len());
            format!("{} {}", pair(tcp.source_port(), tcp.destination_port()), segment(tcp, length))
        }
        Some(TransportSlice::Udp(udp)) => {
            let length = udp.length().saturating_sub(8);
            format!("{} udp {length}", pair(udp.source_port(), udp.destination_port()))
        }
        Some(TransportSlice::Icmpv4(icmp)) => {
            format!("{from} → {to} icmp {}/{}", icmp.type_u8(), icmp.code_u8())
        }
        Some(TransportSlice::Icmpv6(icmp)) => {
            let what = match icmp.type_u8() {
                135 => "neighbour solicitation".into(),
                136 => "neighbour advertisement".into(),
                other => format!("icmp6 {other}/{}", icmp.code_u8()),
            };
            format!("{from} → {to} {what}")
        }
        Some(TransportSlice::Igmp(_)) => format!("{from} → {to} igmp"),
        None => {
            let number =
                packet.net.as_ref().and_then(LaxNetSlice::ip_payload_ref).map_or(0, |it| it.ip_number.0);
            let fragment = if fragment { " fragment" } else { "" };
            format!("{from} → {to} protocol {number}{fragment}")
        }
    }
}

fn segment(tcp: &TcpSlice<'_>, length: usize) -> String {
    let flags = [
        (tcp.syn(), "SYN"),
        (tcp.fin(), "FIN"),
        (tcp.rst(), "RST"),
        (tcp.psh(), "PSH"),
        (tcp.ack(), "ACK"),
        (tcp.urg(), "URG"),
    ];
    let set: Vec<_> = flags.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
    let flags = if set.is_empty() { "no flags".into() } else { set.join(" ") };
    let (sequence, window) = (tcp.sequence_number(), tcp.window_size());
    format!("{flags} seq {sequence} ack {} win {window} len {length}", tcp.acknowledgment_number())
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use metadata_common::printable::hex;
    use proptest::prelude::*;

    use super::{
        TraceLine, TracedFrame, describe_frame, frame_headers, frame_payload, message_line, parse_hex,
    };

    #[test]
    fn lines_keep_their_form() {
        let frame = TracedFrame {
            time_ns: 7,
            verdict: "steer_arp".into(),
            length: 42,
            mac: "m".into(),
            bytes: "00ff".into(),
            ..TracedFrame::default()
        };
        let cases = [
            (TraceLine::Lost { frames: 3 }, r#"{"kind":"lost","frames":3}"#),
            (
                TraceLine::Frame(frame),
                r#"{"kind":"frame","time_ns":7,"to_guest":false,"verdict":"steer_arp","length":42,"mac":"m","bytes":"00ff"}"#,
            ),
        ];
        for (line, text) in cases {
            assert_eq!(serde_json::to_string(&line).expect("JSON"), text);
            assert_eq!(serde_json::from_str::<TraceLine>(text).expect("a line"), line);
        }
    }

    #[test]
    fn only_hexadecimal_digits_are_parsed_as_bytes() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(parse_hex(&hex(&all)), Some(all));
        for bad in ["0", "0g", "zz", "é"] {
            assert_eq!(parse_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_request_shows_method_and_path_and_nothing_else() {
        let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(200));
        let cut = format!("GET /{}…", "a".repeat(119));
        let cases: [(&str, Option<&str>); 14] = [
            (
                "GET /latest/meta-data/ HTTP/1.1\r\nX-aws-ec2-metadata-token: SECRET\r\n\r\n",
                Some("GET /latest/meta-data/"),
            ),
            ("PUT /latest/api/token HTTP/1.1\r\n", Some("PUT /latest/api/token")),
            ("GET /a?token=SECRET HTTP/1.1\r\n", Some("GET /a?…")),
            ("GET http://user:SECRET@169.254.169.254/a HTTP/1.1\r\n", Some("GET /a")),
            ("GET http://user:SECRET@host HTTP/1.1\r\n", Some("GET /")),
            ("GET /openstack/latest/meta_da", Some("GET /openstack/latest/meta_da…")),
            (&long, Some(&cut)),
            ("POST password=SECRET", None),
            ("GET user:SECRET@host HTTP/1.1\r\n", None),
            ("password: SECRET\n", None),
            ("GET /SECRET of a body\n", None),
            ("GET /\u{1b}[2J HTTP/1.1\r\n", None),
            ("HTTP/1.1 200 OK\r\n", None),
            ("", None),
        ];
        for (payload, expected) in cases {
            let shown = message_line(payload.as_bytes(), false);
            assert_eq!(shown.as_deref(), expected, "{payload:?}");
            assert!(!shown.unwrap_or_default().contains("SECRET"), "{payload:?}");
        }
    }

    #[test]
    fn an_answer_shows_its_status() {
        let cases = [
            ("HTTP/1.1 200 OK\r\nServer: x\r\n\r\nSECRET", Some("HTTP/1.1 200")),
            ("HTTP/1.0 404 Not Found\r\n", Some("HTTP/1.0 404")),
            ("HTTP/1.1 2", None),
            ("HTTP/1.1 SEC", None),
            ("SECRET", None),
            ("GET / HTTP/1.1\r\n", None),
        ];
        for (payload, expected) in cases {
            assert_eq!(message_line(payload.as_bytes(), true).as_deref(), expected, "{payload:?}");
        }
    }

    const GUEST: [u8; 4] = [10, 0, 0, 5];
    const SERVED: [u8; 4] = [169, 254, 169, 254];
    const SERVED_V6: [u8; 16] = [0xfd, 0, 0x0e, 0xc2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0x54];

    fn built(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut frame = Vec::new();
        write(&mut frame);
        frame
    }

    fn arp() -> Vec<u8> {
        let mut frame = vec![0xff; 6];
        frame.extend([2; 6]);
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([2; 6]);
        frame.extend(GUEST);
        frame.extend([0; 6]);
        frame.extend(SERVED);
        frame
    }

    #[test]
    fn a_frame_is_described_in_a_line_and_split_from_its_payload() {
        let ethernet = || PacketBuilder::ethernet2([2; 6], [4; 6]);
        let vlan = || ethernet().single_vlan(7.try_into().expect("a VLAN"));
        let data = b"secret";
        let cases = [
            (
                built(|frame| {
                    ethernet()
                        .ipv4(GUEST, SERVED, 64)
                        .tcp(40_000, 80, 7, 512)
                        .syn()
                        .write(frame, &[])
                        .expect("a frame")
                }),
                54,
                "10.0.0.5:40000 → 169.254.169.254:80 SYN seq 7 ack 0 win 512 len 0",
            ),
            (
                built(|frame| {
                    vlan()
                        .ipv4(GUEST, SERVED, 64)
                        .tcp(1, 80, 7, 512)
                        .psh()
                        .ack(9)
                        .write(frame, data)
                        .expect("a frame")
                }),
                58,
                "vlan 7 10.0.0.5:1 → 169.254.169.254:80 PSH ACK seq 7 ack 9 win 512 len 6",
            ),
            (
                built(|frame| {
                    ethernet().ipv6(SERVED_V6, SERVED_V6, 64).udp(1, 53).write(frame, data).expect("a frame")
                }),
                62,
                "[fd00:ec2::254]:1 → [fd00:ec2::254]:53 udp 6",
            ),
            (
                built(|frame| {
                    ethernet()
                        .ipv4(GUEST, SERVED, 64)
                        .icmpv4_echo_request(1, 2)
                        .write(frame, data)
                        .expect("a frame")
                }),
                42,
                "10.0.0.5 → 169.254.169.254 icmp 8/0",
            ),
            (arp(), 42, "arp who has 169.254.169.254? tell 10.0.0.5"),
            ([&[2; 12][..], &[0x88, 0xb5], &data[..]].concat(), 14, "ethertype 0x88b5"),
            (vec![1; 5], 5, "less than an Ethernet header"),
        ];
        for (frame, head, text) in cases {
            assert_eq!(describe_frame(&frame), text);
            assert_eq!(frame_headers(&frame).len(), head, "{text}");
            assert_eq!(frame_payload(&frame).len(), frame.len() - head, "{text}");
        }
    }

    #[test]
    fn a_cut_frame_is_described_with_its_whole_length() {
        let whole = built(|frame| {
            let tcp =
                PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4(GUEST, SERVED, 64).tcp(1, 80, 7, 512).ack(1);
            tcp.write(frame, &[0; 1_000]).expect("a frame");
        });
        assert!(describe_frame(&whole[..256]).ends_with("len 1000"), "{}", describe_frame(&whole[..256]));
        assert_eq!(frame_headers(&whole[..256]).len(), 54);
    }

    proptest! {
        #[test]
        fn whatever_a_guest_sends_can_be_told(bytes in proptest::collection::vec(any::<u8>(), 0..256), kind in 0_usize..5) {
            let mut bytes = bytes;
            let types: [[u8; 2]; 5] = [[8, 0], [0x86, 0xdd], [8, 6], [0x81, 0], [0x88, 0xa8]];
            if let Some(place) = bytes.get_mut(12..14) {
                place.copy_from_slice(&types[kind]);
            }
            if let Some(version) = bytes.get_mut(14) {
                *version = if kind == 1 { 0x60 } else { 0x45 };
            }
            prop_assert!(describe_frame(&bytes).len() < 300, "a line stays one");
            prop_assert_eq!([frame_headers(&bytes), frame_payload(&bytes)].concat(), bytes);
        }
    }
}
