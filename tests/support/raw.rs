//! A guest that sends arbitrary segments, also segments that no TCP implementation would send.

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::stamp::stamp;
use metadata_datapath::stack::{AckLedger, NoLedger, Service, Stack};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpProtocol, IpRepr, Ipv4Packet, Ipv6Packet, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
};
use std::net::IpAddr;
use std::time::Duration;

use crate::wire::{CLIENT, SERVICE, Sent, at};

/// The MAC of a gateway between guest and service.
pub const GATEWAY: Mac = Mac([0x52, 0x54, 0, 0, 0, 1]);

/// A segment to send, with all fields that a sender can choose.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Ethernet destination.
    pub to: Mac,
    /// Source address and port.
    pub source: (IpAddr, u16),
    /// Destination address and port.
    pub destination: (IpAddr, u16),
    /// SYN, FIN, RST or none.
    pub control: TcpControl,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number; `None` clears the ACK flag.
    pub ack: Option<u32>,
    /// The window field.
    pub window: u16,
    /// The MSS option.
    pub mss: Option<u16>,
    /// The payload.
    pub payload: Vec<u8>,
}

impl Segment {
    /// A SYN from `port` to the service.
    #[must_use]
    pub fn syn(port: u16, seq: u32) -> Self {
        Self {
            to: Mac::SERVICE,
            source: (CLIENT.into(), port),
            destination: (SERVICE.into(), 80),
            control: TcpControl::Syn,
            seq,
            ack: None,
            window: 65_535,
            mss: Some(1460),
            payload: Vec::new(),
        }
    }

    /// An acknowledgement that follows a SYN numbered `seq - 1`.
    #[must_use]
    pub fn ack(port: u16, seq: u32, ack: u32) -> Self {
        Self { control: TcpControl::None, ack: Some(ack), mss: None, ..Self::syn(port, seq) }
    }

    /// The segment with a payload.
    #[must_use]
    pub fn with(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self
    }

    /// The segment with FIN, RST or SYN.
    #[must_use]
    pub fn control(mut self, control: TcpControl) -> Self {
        self.control = control;
        self
    }

    /// The Ethernet frame, with the TCP checksum complete.
    #[must_use]
    pub fn frame(&self, slot: Slot) -> Vec<u8> {
        let (source, destination) = (IpAddress::from(self.source.0), IpAddress::from(self.destination.0));
        let sums = ChecksumCapabilities::default();
        let tcp = TcpRepr {
            src_port: self.source.1,
            dst_port: self.destination.1,
            control: self.control,
            seq_number: TcpSeqNumber(self.seq as i32),
            ack_number: self.ack.map(|ack| TcpSeqNumber(ack as i32)),
            window_len: self.window,
            window_scale: None,
            max_seg_size: self.mss,
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &self.payload,
        };
        let ip = IpRepr::new(source, destination, IpProtocol::Tcp, tcp.buffer_len(), 64);
        let mut frame = vec![0; 14 + ip.buffer_len()];
        frame[..6].copy_from_slice(&self.to.0);
        frame[6..12].copy_from_slice(&stamp(slot).0);
        let ethertype: u16 = if self.source.0.is_ipv4() { 0x0800 } else { 0x86dd };
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
        ip.emit(&mut frame[14..], &sums);
        let at = 14 + ip.header_len();
        tcp.emit(&mut TcpPacket::new_unchecked(&mut frame[at..]), &source, &destination, &sums);
        frame
    }
}

/// A segment from the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Ethernet destination and source.
    pub macs: (Mac, Mac),
    /// IP source and destination.
    pub addresses: (IpAddr, IpAddr),
    /// TCP source and destination port.
    pub ports: (u16, u16),
    /// IP TTL or hop limit.
    pub ttl: u8,
    /// SYN, ACK, FIN, RST.
    pub flags: (bool, bool, bool, bool),
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// The window field.
    pub window: u16,
    /// The MSS option.
    pub mss: Option<u16>,
    /// The payload.
    pub payload: Vec<u8>,
}

/// SYN and ACK.
pub const SYN_ACK: (bool, bool, bool, bool) = (true, true, false, false);
/// ACK alone.
pub const ACK: (bool, bool, bool, bool) = (false, true, false, false);
/// FIN and ACK.
pub const FIN_ACK: (bool, bool, bool, bool) = (false, true, true, false);

impl Reply {
    /// Parses a frame of the service, and checks its checksums.
    #[must_use]
    pub fn read(frame: &[u8]) -> Self {
        let mac = |at: usize| Mac(frame[at..at + 6].try_into().expect("six bytes"));
        let packet = &frame[14..];
        let (source, destination, ttl, at): (IpAddr, IpAddr, u8, usize) = if packet[0] >> 4 == 4 {
            let ip = Ipv4Packet::new_checked(packet).expect("an IPv4 packet");
            assert!(ip.verify_checksum(), "IPv4 header checksum");
            (ip.src_addr().into(), ip.dst_addr().into(), ip.hop_limit(), usize::from(ip.header_len()))
        } else {
            let ip = Ipv6Packet::new_checked(packet).expect("an IPv6 packet");
            (ip.src_addr().into(), ip.dst_addr().into(), ip.hop_limit(), ip.header_len())
        };
        let tcp = TcpPacket::new_checked(&packet[at..]).expect("a TCP segment");
        let sums = ChecksumCapabilities::default();
        let repr =
            TcpRepr::parse(&tcp, &source.into(), &destination.into(), &sums).expect("a complete checksum");
        Self {
            macs: (mac(0), mac(6)),
            addresses: (source, destination),
            ports: (tcp.src_port(), tcp.dst_port()),
            ttl,
            flags: (tcp.syn(), tcp.ack(), tcp.fin(), tcp.rst()),
            seq: tcp.seq_number().0 as u32,
            ack: tcp.ack_number().0 as u32,
            window: tcp.window_len(),
            mss: repr.max_seg_size,
            payload: repr.payload.to_vec(),
        }
    }
}

/// A stack that receives single segments.
pub struct Raw<S: Service, L = NoLedger> {
    /// The stack under test.
    pub stack: Stack<S, L>,
    /// The slot of all segments.
    pub slot: Slot,
    /// Virtual time.
    pub now: Duration,
}

impl<S: Service, L: AckLedger> Raw<S, L> {
    /// Starts at time zero.
    pub fn new(stack: Stack<S, L>) -> Self {
        Self { stack, slot: 7, now: Duration::ZERO }
    }

    /// Passes a frame to the stack. Returns its immediate answers.
    pub fn frame(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let mut sent = Sent::default();
        self.stack.receive(at(self.now), self.slot, frame, &mut sent);
        sent.0
    }

    /// Passes a segment to the stack. Returns its immediate answers.
    pub fn send(&mut self, segment: &Segment) -> Vec<Reply> {
        let frame = segment.frame(self.slot);
        self.frame(&frame).iter().map(|frame| Reply::read(frame)).collect()
    }

    /// Wakes the slot. Returns the segments that the stack sends at once.
    pub fn wake(&mut self) -> Vec<Reply> {
        let mut sent = Sent::default();
        self.stack.wake(at(self.now), self.slot, &mut sent);
        sent.0.iter().map(|frame| Reply::read(frame)).collect()
    }

    /// Advances time, timer by timer. Returns the segments that the stack sends.
    pub fn wait(&mut self, time: Duration) -> Vec<Reply> {
        let end = self.now + time;
        let mut sent = Sent::default();
        loop {
            match self.stack.step(at(self.now), &mut sent) {
                Some(next) if next <= end => self.now = self.now.max(next),
                _ => break,
            }
        }
        self.now = end;
        self.stack.step(at(self.now), &mut sent);
        sent.0.iter().map(|frame| Reply::read(frame)).collect()
    }

    /// Completes a handshake from `port`. The stack keeps no state for it. Returns the service's next sequence number;
    /// the guest's is 1001.
    pub fn connect(&mut self, port: u16) -> u32 {
        let replies = self.send(&Segment::syn(port, 1000));
        assert_eq!(replies.len(), 1, "one answer to a SYN: {replies:?}");
        assert_eq!((replies[0].flags, replies[0].ack), (SYN_ACK, 1001));
        let next = replies[0].seq.wrapping_add(1);
        self.send(&Segment::ack(port, 1001, next));
        next
    }

    /// Opens a connection from `port` with a byte that the service ignores, because no request starts with it.
    /// Returns the service's next sequence number; the guest's is 1002.
    pub fn open(&mut self, port: u16) -> u32 {
        let next = self.connect(port);
        let replies = self.send(&Segment::ack(port, 1001, next).with(b"\n"));
        assert_eq!((replies.len(), replies[0].flags, replies[0].ack), (1, ACK, 1002), "{replies:?}");
        next
    }
}
