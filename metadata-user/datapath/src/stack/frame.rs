//! Ethernet, ARP, neighbour discovery, and the IP headers that select a destination.
//!
//! Replies go back to the frame's source MAC, so the stack never resolves a guest's address.

use metadata_common::cookie::{CookieKey, Flow};
use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use smoltcp::phy::{Checksum, ChecksumCapabilities};
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, Icmpv6Packet, Icmpv6Repr, IpProtocol, IpRepr,
    Ipv4Packet, Ipv6Packet, NdiscNeighborFlags, NdiscRepr,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::send::{is_complete, is_sound, pseudo};

/// Bytes of an Ethernet header.
pub(super) const ETHERNET: usize = 14;
const ARP: u16 = 0x0806;
pub(super) const IPV4: u16 = 0x0800;
pub(super) const IPV6: u16 = 0x86dd;
const ICMP: u8 = 1;
pub(super) const TCP: u8 = 6;
const ICMPV6: u8 = 58;
const ECHO_REQUEST: u8 = 8;
const ECHO_REQUEST_V6: u8 = 128;
const NEIGHBOUR_SOLICITATION: u8 = 135;

/// The checksums that smoltcp computes for sent packets. Received checksums are verified where they are read: with
/// checksum offload a guest's kernel leaves only the pseudo-header's sum in the field, which smoltcp does not
/// support.
pub(super) fn checksums() -> ChecksumCapabilities {
    let mut sums = ChecksumCapabilities::default();
    sums.ipv4 = Checksum::Tx;
    sums.icmpv4 = Checksum::Tx;
    sums.icmpv6 = Checksum::Tx;
    sums
}

/// The Ethernet addresses of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EthernetAddresses {
    /// Destination: the source MAC of the guest's frame.
    pub to: Mac,
    /// Source: the destination MAC of the guest's frame, which both on-link and routed guests accept.
    pub from: Mac,
}

impl EthernetAddresses {
    /// Writes the Ethernet header of an answer.
    pub(super) fn emit(self, ethertype: u16, frame: &mut [u8]) {
        frame[..6].copy_from_slice(&self.to.0);
        frame[6..12].copy_from_slice(&self.from.0);
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
    }
}

/// Why a frame is dropped; each reason has a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DropReason {
    Malformed,
    Checksum,
    Address,
    Fragment,
    Protocol,
}

/// The content of a received frame.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Inbound<'a> {
    /// An ARP packet.
    Arp(&'a [u8]),
    /// `source` asks who has `target`.
    Solicitation { source: Ipv6Addr, target: Ipv6Addr },
    /// An echo request.
    Echo { source: IpAddr, destination: IpAddr, icmp: &'a [u8] },
    /// A TCP segment.
    Segment { source: IpAddr, destination: IpAddr, tcp: &'a [u8] },
}

/// Parses a frame into the return route and its content.
pub(super) fn parse<'a>(
    frame: &'a [u8],
    served: &[IpAddr],
) -> Result<(EthernetAddresses, Inbound<'a>), DropReason> {
    let (header, rest) = frame.split_at_checked(ETHERNET).ok_or(DropReason::Malformed)?;
    let mac = |at: usize| Mac(std::array::from_fn(|i| header[at + i]));
    let (destination, source) = (mac(0), mac(6));
    let from = if destination.is_group() { Mac::SERVICE } else { destination };
    let inbound = match u16::from_be_bytes([header[12], header[13]]) {
        ARP => Ok(Inbound::Arp(rest)),
        IPV4 => ipv4(rest, served),
        IPV6 => ipv6(rest, served),
        _ => Err(DropReason::Protocol),
    }?;
    Ok((EthernetAddresses { to: source, from }, inbound))
}

fn ipv4<'a>(bytes: &'a [u8], served: &[IpAddr]) -> Result<Inbound<'a>, DropReason> {
    let packet = Ipv4Packet::new_checked(bytes).map_err(|_| DropReason::Malformed)?;
    if packet.version() != 4 {
        return Err(DropReason::Malformed);
    }
    // RFC 1122 §3.2.1.2. The IPv4 header checksum is never offloaded.
    if !packet.verify_checksum() {
        return Err(DropReason::Checksum);
    }
    if packet.more_frags() || packet.frag_offset() != 0 {
        return Err(DropReason::Fragment);
    }
    let source = packet.src_addr();
    if source.is_unspecified() || source.is_multicast() || source.is_broadcast() {
        return Err(DropReason::Address);
    }
    let destination = IpAddr::V4(packet.dst_addr());
    if !served.contains(&destination) {
        return Err(DropReason::Address);
    }
    let payload = &bytes[usize::from(packet.header_len())..usize::from(packet.total_len())];
    let source = IpAddr::V4(source);
    match (u8::from(packet.next_header()), payload.first()) {
        (TCP, _) => Ok(Inbound::Segment { source, destination, tcp: payload }),
        // There is no pseudo-header, so offload cannot leave a partial checksum (RFC 792).
        (ICMP, Some(&ECHO_REQUEST)) if !is_complete(0, payload) => Err(DropReason::Checksum),
        (ICMP, Some(&ECHO_REQUEST)) => Ok(Inbound::Echo { source, destination, icmp: payload }),
        _ => Err(DropReason::Protocol),
    }
}

fn ipv6<'a>(bytes: &'a [u8], served: &[IpAddr]) -> Result<Inbound<'a>, DropReason> {
    let packet = Ipv6Packet::new_checked(bytes).map_err(|_| DropReason::Malformed)?;
    if packet.version() != 6 {
        return Err(DropReason::Malformed);
    }
    let payload = &bytes[packet.header_len()..packet.total_len()];
    let (source, destination) = (packet.src_addr(), IpAddr::V6(packet.dst_addr()));
    let protocol = u8::from(packet.next_header());
    if protocol == ICMPV6 && payload.first() == Some(&NEIGHBOUR_SOLICITATION) {
        return solicitation(source, packet.dst_addr(), packet.hop_limit(), payload);
    }
    if source.is_unspecified() || source.is_multicast() || !served.contains(&destination) {
        return Err(DropReason::Address);
    }
    let source = IpAddr::V6(source);
    match (protocol, payload.first()) {
        (TCP, _) => Ok(Inbound::Segment { source, destination, tcp: payload }),
        (ICMPV6, Some(&ECHO_REQUEST_V6)) if !is_message_sound(source, destination, payload) => {
            Err(DropReason::Checksum)
        }
        (ICMPV6, Some(&ECHO_REQUEST_V6)) => Ok(Inbound::Echo { source, destination, icmp: payload }),
        _ => Err(DropReason::Protocol),
    }
}

/// Whether the checksum of an ICMPv6 message is correct (RFC 4443 §2.3).
fn is_message_sound(source: IpAddr, destination: IpAddr, icmp: &[u8]) -> bool {
    let field = icmp.get(2..4).and_then(|field| field.try_into().ok());
    field.is_some_and(|field| is_sound(pseudo(source, destination, ICMPV6, icmp.len()), icmp, field))
}

/// RFC 4861 §7.1.1: hop limit 255 (no router forwarded it), code 0, at least 24 bytes, correct checksum.
fn solicitation<'a>(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    hop_limit: u8,
    icmp: &'a [u8],
) -> Result<Inbound<'a>, DropReason> {
    if hop_limit != 255 || icmp.len() < 24 || icmp[1] != 0 {
        return Err(DropReason::Malformed);
    }
    if !is_message_sound(source.into(), destination.into(), icmp) {
        return Err(DropReason::Checksum);
    }
    let target = Ipv6Addr::from(<[u8; 16]>::try_from(&icmp[8..24]).map_err(|_| DropReason::Malformed)?);
    Ok(Inbound::Solicitation { source, target })
}

/// The reply to an ARP request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArpAnswer(ArpRepr);

impl ArpAnswer {
    /// Builds the reply's frame; returns the length.
    pub(super) fn emit(self, to: Mac, frame: &mut [u8]) -> usize {
        let length = ETHERNET + self.0.buffer_len();
        EthernetAddresses { to, from: Mac::SERVICE }.emit(ARP, frame);
        self.0.emit(&mut ArpPacket::new_unchecked(&mut frame[ETHERNET..length]));
        length
    }
}

/// The reply to an ARP packet. There is one if the packet requests a served address (RFC 826), including for a probe
/// from
/// 0.0.0.0 (RFC 5227 §2.1.1).
pub(super) fn answer_arp(
    arp: &[u8],
    is_ours: impl Fn(Ipv4Addr) -> bool,
) -> Result<Option<ArpAnswer>, DropReason> {
    let packet = ArpPacket::new_checked(arp).map_err(|_| DropReason::Malformed)?;
    let ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr,
        source_protocol_addr,
        target_protocol_addr,
        ..
    } = ArpRepr::parse(&packet).map_err(|_| DropReason::Malformed)?
    else {
        return Err(DropReason::Protocol);
    };
    if operation != ArpOperation::Request {
        return Ok(None);
    }
    if !is_ours(target_protocol_addr) {
        return Err(DropReason::Address);
    }
    Ok(Some(ArpAnswer(ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(Mac::SERVICE.0),
        source_protocol_addr: target_protocol_addr,
        target_hardware_addr: source_hardware_addr,
        target_protocol_addr: source_protocol_addr,
    })))
}

/// Builds the answer to a neighbour solicitation (RFC 4861 §7.2.4), with hop limit 255. It goes to all nodes if the
/// source is unspecified (duplicate address detection). Returns the frame's length.
pub(super) fn answer_solicitation(source: Ipv6Addr, target: Ipv6Addr, to: Mac, frame: &mut [u8]) -> usize {
    let probe = source.is_unspecified();
    let destination = if probe { Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1) } else { source };
    let flags = if probe {
        NdiscNeighborFlags::OVERRIDE
    } else {
        NdiscNeighborFlags::SOLICITED | NdiscNeighborFlags::OVERRIDE
    };
    let advert = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
        flags,
        target_addr: target,
        lladdr: Some(EthernetAddress(Mac::SERVICE.0).into()),
    });
    let ip = IpRepr::new(target.into(), destination.into(), IpProtocol::Icmpv6, advert.buffer_len(), 255);
    let header = ETHERNET + ip.header_len();
    let length = header + advert.buffer_len();
    EthernetAddresses { to, from: Mac::SERVICE }.emit(IPV6, frame);
    ip.emit(&mut frame[ETHERNET..length], &checksums());
    advert.emit(
        &target,
        &destination,
        &mut Icmpv6Packet::new_unchecked(&mut frame[header..length]),
        &checksums(),
    );
    length
}

// Received TCP segments, and sequence number arithmetic.

/// Bytes of a TCP header without options.
pub(super) const HEADER: usize = 20;

/// The control bits (RFC 9293 §3.1).
pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;

/// Whether `a` is before `b` in the sequence space (RFC 9293 §3.4).
pub(super) fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// The four-tuple of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuple {
    pub(super) remote: (IpAddr, u16),
    pub(super) local: (IpAddr, u16),
}

impl Tuple {
    /// The key of this connection, with the slot included.
    pub(super) fn flow(&self, key: &CookieKey, slot: Slot) -> Flow {
        let [a, b] = self.remote.1.to_be_bytes();
        let [c, d] = self.local.1.to_be_bytes();
        let ports = [a, b, c, d];
        match (self.remote.0, self.local.0) {
            (IpAddr::V4(remote), IpAddr::V4(local)) => {
                Flow::v4(key, slot, remote.octets(), local.octets(), ports)
            }
            (remote, local) => Flow::v6(key, slot, sixteen(remote), sixteen(local), ports),
        }
    }
}

fn sixteen(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// A segment received from a guest.
#[derive(Clone, Copy)]
pub(super) struct Segment<'a> {
    pub(super) tuple: Tuple,
    pub(super) seq: u32,
    /// `None` if the ACK bit is clear.
    pub(super) ack: Option<u32>,
    /// As in the header, not scaled.
    pub(super) window: u16,
    pub(super) flags: u8,
    pub(super) options: &'a [u8],
    pub(super) payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// Parses a TCP header and its payload, if the checksum is correct.
    pub(super) fn read(source: IpAddr, destination: IpAddr, tcp: &'a [u8]) -> Result<Self, DropReason> {
        let (header, rest) = tcp.split_first_chunk::<HEADER>().ok_or(DropReason::Malformed)?;
        let options = (usize::from(header[12] >> 4) * 4).checked_sub(HEADER).ok_or(DropReason::Malformed)?;
        let (options, payload) = rest.split_at_checked(options).ok_or(DropReason::Malformed)?;
        let half = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let word = |at: usize| u32::from(half(at)) << 16 | u32::from(half(at + 2));
        if half(0) == 0 || half(2) == 0 {
            return Err(DropReason::Malformed);
        }
        if !is_sound(pseudo(source, destination, TCP, tcp.len()), tcp, [header[16], header[17]]) {
            return Err(DropReason::Checksum);
        }
        let flags = header[13];
        Ok(Self {
            tuple: Tuple { remote: (source, half(0)), local: (destination, half(2)) },
            seq: word(4),
            ack: (flags & ACK != 0).then(|| word(8)),
            window: half(14),
            flags,
            options,
            payload,
        })
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Whether the segment opens a connection: SYN without ACK, RST and FIN.
    pub(super) fn opens(&self) -> bool {
        self.flags & (SYN | ACK | RST | FIN) == SYN
    }

    /// Bytes that the segment takes in the sequence space (RFC 9293 §3.4).
    pub(super) fn length(&self) -> u32 {
        self.payload.len() as u32 + u32::from(self.has(FIN)) + u32::from(self.has(SYN))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::{Segment, TCP, before, pseudo};
    use crate::stack::send::finish;

    #[test]
    fn sequence_numbers_are_compared_around_the_wrap() {
        for (a, b, is) in
            [(1, 2, true), (2, 1, false), (5, 5, false), (u32::MAX, 0, true), (0, u32::MAX, false)]
        {
            assert_eq!(before(a, b), is, "{a} before {b}");
        }
    }

    #[test]
    fn a_header_that_contradicts_itself_is_refused() {
        let guest = IpAddr::from([10, 0, 0, 1]);
        let mut tcp = [0_u8; 24];
        tcp[1] = 1;
        tcp[3] = 80;
        for (offset, length, good) in
            [(5, 24, true), (6, 24, true), (4, 24, false), (7, 24, false), (5, 19, false)]
        {
            tcp[12] = offset << 4;
            // A partial checksum is correct whatever the rest is.
            let sum = finish(pseudo(guest, guest, TCP, length)).map(|byte| !byte);
            tcp[16..18].copy_from_slice(&sum);
            let read = Segment::read(guest, guest, &tcp[..length]);
            assert_eq!(read.is_ok(), good, "offset {offset} in {length} bytes");
        }
        tcp[12] = 5 << 4;
        tcp[3] = 0;
        assert!(Segment::read(guest, guest, &tcp).is_err(), "port 0");
    }
}
