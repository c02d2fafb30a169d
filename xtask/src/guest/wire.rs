//! What went over the guest's NIC, read from QEMU's dump of it (libpcap file format 2.4).
//!
//! QEMU sees the frames before XDP and after it, so this is the exchange as the guest and the server had it,
//! whichever server that was.

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use smoltcp::wire::{EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, TcpPacket, UdpPacket};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::Duration;
use support::guest::METADATA;

const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;
/// Little-endian file, times in microseconds.
const MAGIC: u32 = 0xa1b2_c3d4;
/// Lengths of the virtio header that some versions of QEMU leave in front of a dumped frame.
const PREFIXES: [usize; 3] = [0, 10, 12];
const HTTP: u16 = 80;
const DHCP_SERVER: u16 = 67;

/// One request and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// The request line.
    pub(super) request: String,
    /// The status line, when an answer came.
    pub(super) answer: Option<String>,
    /// From the segment with the request to the first segment of the answer.
    pub(super) took: Duration,
}

/// Everything the report tells of the wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    /// Requests to the metadata address in the order they were made.
    pub(super) exchanges: Vec<Exchange>,
    /// Connections the guest opened to it.
    pub(super) connections: usize,
    /// SYNs it had to send again.
    pub(super) repeated_syns: usize,
    /// DHCP messages, both ways.
    pub(super) dhcp: usize,
}

/// Reads a dump of the NIC with this MAC.
pub(super) fn read(dump: &[u8], nic: Mac) -> Result<Traffic> {
    let magic = word(dump, 0).context("the packet dump is empty")?;
    ensure!(magic == MAGIC, "the packet dump starts with {magic:#x}, not with {MAGIC:#x}");
    let mut reader = Reader { nic, ..Reader::default() };
    let mut at = FILE_HEADER;
    // QEMU may have been stopped in the middle of the last record.
    while let (Some(seconds), Some(micros), Some(len)) =
        (word(dump, at), word(dump, at + 4), word(dump, at + 8))
    {
        let start = at + RECORD_HEADER;
        let Some(frame) = dump.get(start..start + len as usize) else { break };
        let time = Duration::from_secs(seconds.into()) + Duration::from_micros(micros.into());
        // A frame that is none of what is counted here has nothing to tell.
        reader.frame(time, frame).unwrap_or_default();
        at = start + len as usize;
    }
    reader.traffic.connections = reader.opened.len();
    Ok(reader.traffic)
}

fn word(dump: &[u8], at: usize) -> Option<u32> {
    let octets = dump.get(at..at + 4)?;
    Some(u32::from_le_bytes(octets.try_into().ok()?))
}

#[derive(Default)]
struct Reader {
    nic: Mac,
    traffic: Traffic,
    /// Connections by the guest's port: its first sequence number.
    opened: HashMap<(u16, i32), ()>,
    /// The exchange under way by the guest's port: its place in the list, and when it was asked.
    asked: HashMap<u16, (usize, Duration)>,
}

impl Reader {
    fn frame(&mut self, time: Duration, octets: &[u8]) -> Option<()> {
        let octets = self.without_prefix(octets)?;
        let frame = EthernetFrame::new_checked(octets).ok()?;
        if frame.ethertype() != EthernetProtocol::Ipv4 {
            return None;
        }
        let packet = Ipv4Packet::new_checked(frame.payload()).ok()?;
        let (from, to) = (packet.src_addr(), packet.dst_addr());
        match packet.next_header() {
            IpProtocol::Udp => {
                let datagram = UdpPacket::new_checked(packet.payload()).ok()?;
                if datagram.src_port() == DHCP_SERVER || datagram.dst_port() == DHCP_SERVER {
                    self.traffic.dhcp += 1;
                }
            }
            IpProtocol::Tcp => {
                self.segment(time, (from, to), &TcpPacket::new_checked(packet.payload()).ok()?)
            }
            _ => {}
        }
        Some(())
    }

    fn segment(&mut self, time: Duration, (from, to): (Ipv4Addr, Ipv4Addr), segment: &TcpPacket<&[u8]>) {
        let first_line = || {
            let text = String::from_utf8_lossy(segment.payload());
            text.lines().next().unwrap_or_default().to_owned()
        };
        if to == METADATA && segment.dst_port() == HTTP {
            let port = segment.src_port();
            if segment.syn() && self.opened.insert((port, segment.seq_number().0), ()).is_some() {
                self.traffic.repeated_syns += 1;
            }
            let line = first_line();
            if line.ends_with(" HTTP/1.1") {
                self.asked.insert(port, (self.traffic.exchanges.len(), time));
                self.traffic.exchanges.push(Exchange { request: line, answer: None, took: Duration::ZERO });
            }
        } else if from == METADATA && segment.src_port() == HTTP {
            let line = first_line();
            if line.starts_with("HTTP/1.")
                && let Some((place, asked)) = self.asked.remove(&segment.dst_port())
            {
                let exchange = &mut self.traffic.exchanges[place];
                exchange.answer = Some(line);
                exchange.took = time.saturating_sub(asked);
            }
        }
    }

    fn without_prefix<'a>(&self, octets: &'a [u8]) -> Option<&'a [u8]> {
        PREFIXES.iter().find_map(|len| {
            let frame = octets.get(*len..)?;
            let own = frame.get(..6)? == self.nic.0 || frame.get(6..12)? == self.nic.0;
            let broadcast = frame.get(..6)? == [0xff; 6];
            (own || broadcast).then_some(frame)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Exchange, FILE_HEADER, MAGIC, read};
    use metadata_common::mac::Mac;
    use std::time::Duration;

    const NIC: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

    /// A TCP segment between guest and metadata address; no checksum, as with offloads.
    fn segment(to_server: bool, port: u16, flags: u8, payload: &str) -> Vec<u8> {
        let (guest, server) = ([10, 0, 2, 15], [169, 254, 169, 254]);
        let mut frame = if to_server { [[2; 6], NIC.0] } else { [NIC.0, [2; 6]] }.concat();
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend((40 + payload.len() as u16).to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, 6, 0, 0]);
        frame.extend(if to_server { [guest, server] } else { [server, guest] }.concat());
        let ports = if to_server { [port, 80] } else { [80, port] };
        frame.extend(ports.into_iter().flat_map(u16::to_be_bytes));
        frame.extend([0, 0, 0, 7, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(payload.bytes());
        frame
    }

    fn dump(prefix: usize, frames: &[Vec<u8>]) -> Vec<u8> {
        let mut file = MAGIC.to_le_bytes().to_vec();
        file.resize(FILE_HEADER, 0);
        for (number, frame) in (0u32..).zip(frames) {
            let len = (prefix + frame.len()) as u32;
            file.extend([1, number * 100, len, len].into_iter().flat_map(u32::to_le_bytes));
            file.extend(vec![0; prefix]);
            file.extend(frame);
        }
        file
    }

    #[test]
    fn requests_are_paired_with_their_answers_whatever_precedes_a_frame() {
        let frames = [
            segment(true, 4000, 0x02, ""),
            segment(true, 4000, 0x02, ""),
            segment(true, 4000, 0x18, "GET /v1/meta-data HTTP/1.1\r\nHost: x\r\n\r\n"),
            segment(false, 4000, 0x18, "HTTP/1.1 200 OK\r\n\r\n"),
            segment(true, 4001, 0x18, "GET /v1/user-data HTTP/1.1\r\n\r\n"),
        ];
        for prefix in [0, 10, 12] {
            let traffic = read(&dump(prefix, &frames), NIC).expect("a dump");
            let answered = Exchange {
                request: "GET /v1/meta-data HTTP/1.1".into(),
                answer: Some("HTTP/1.1 200 OK".into()),
                took: Duration::from_micros(100),
            };
            assert_eq!(traffic.exchanges[0], answered, "{prefix}");
            assert_eq!(traffic.exchanges[1].answer, None, "{prefix}");
            assert_eq!((traffic.connections, traffic.repeated_syns), (1, 1), "{prefix}");
        }
    }

    #[test]
    fn a_dump_cut_short_gives_what_is_whole() {
        let whole = dump(0, &[segment(true, 1, 0x18, "GET / HTTP/1.1\r\n"), segment(true, 2, 0x02, "")]);
        for len in FILE_HEADER..whole.len() {
            let traffic = read(&whole[..len], NIC).expect("a dump");
            assert_eq!(traffic.connections, 0, "{len}");
        }
        assert!(read(b"not a dump at all, whatever its length", NIC).is_err());
    }
}
