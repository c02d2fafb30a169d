//! The steering policy: which of a guest's frames are for the metadata service.
//!
//! A frame is *for a served address* when it is ARP or a neighbour solicitation asking for one (or ARP for
//! a next hop on the way to one), or IP sent to one. On a port we own such a frame never leaves: it is steered or dropped. Steered is what a
//! plain client sends: ARP, neighbour solicitation, TCP, ICMP, in whole datagrams without options or
//! extension headers. Everything else for a served address is dropped, each for its own reason, and
//! everything for other addresses passes untouched.
//!
//! Nothing here looks at who sent the frame ([`crate::decide`] does) or at the payload: the user-space
//! stack checks lengths and checksums.

use crate::verdict::Verdict;
use crate::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol};

/// Bounded reads from a frame.
pub trait Reader {
    /// The `N` octets from `offset` on, or `None` if the frame ends before that.
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;

    /// True if the frame had a VLAN tag that is no longer among its octets.
    #[inline(always)]
    fn is_tagged(&self) -> bool {
        false
    }
}

impl Reader for [u8] {
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk().copied()
    }
}

/// The addresses the service answers for.
pub trait Served {
    /// True if this IPv4 address (wire order) is served.
    fn serves_v4(&self, address: [u8; 4]) -> bool;
    /// True if this IPv6 address (wire order) is served.
    fn serves_v6(&self, address: [u8; 16]) -> bool;
    /// True if ARP for this IPv4 address (wire order) is answered: for every served one, and for those that
    /// guests need as next hop on the way to one. What is sent to such a next hop itself passes.
    fn answers_arp(&self, address: [u8; 4]) -> bool {
        self.serves_v4(address)
    }
}

/// What to do with a frame a guest sent, its sender aside.
#[inline(always)]
pub fn classify(frame: &(impl Reader + ?Sized), served: &impl Served) -> Verdict {
    let Some(mut ethertype) = read_u16(frame, ethernet::TYPE) else {
        return Verdict::PassTruncated;
    };
    let mut payload = ethernet::HEADER;
    let mut tagged = frame.is_tagged();
    for tag in 0..ethernet::MAX_TAGS {
        // A tag taken off has been looked behind already.
        let behind = tag == 0 && frame.is_tagged();
        if !behind && (ethertype == ethernet::CUSTOMER_TAG || ethertype == ethernet::SERVICE_TAG) {
            tagged = true;
            // The type behind a tag is its last two octets.
            match read_u16(frame, payload + ethernet::TAG - 2) {
                Some(inner) => ethertype = inner,
                None => return Verdict::PassTruncated,
            }
            payload += ethernet::TAG;
        }
    }
    let verdict = match ethertype {
        ethernet::ARP => classify_arp(frame, payload, served),
        ethernet::IPV4 => classify_ipv4(frame, payload, served),
        ethernet::IPV6 => classify_ipv6(frame, payload, served),
        ethernet::CUSTOMER_TAG | ethernet::SERVICE_TAG => return Verdict::PassVlanDepth,
        _ => Err(Verdict::PassEthertype),
    };
    match verdict {
        Ok(_) if tagged => Verdict::DropVlan,
        Ok(ours) => ours,
        Err(Verdict::PassTruncated) => Verdict::PassTruncated,
        Err(_) if tagged => Verdict::PassVlan,
        Err(pass) => pass,
    }
}

/// `Ok`: for a served address, steered or dropped. `Err`: not, so it passes.
type Answer = Result<Verdict, Verdict>;

#[inline(always)]
fn classify_arp(frame: &(impl Reader + ?Sized), at: usize, served: &impl Served) -> Answer {
    let format = frame.read::<6>(at).ok_or(Verdict::PassTruncated)?;
    if format != arp::ETHERNET_IPV4 {
        return Err(Verdict::PassArpFormat);
    }
    let target = frame.read::<4>(at + arp::TARGET_IP).ok_or(Verdict::PassTruncated)?;
    if served.answers_arp(target) { Ok(Verdict::SteerArp) } else { Err(Verdict::PassArp) }
}

#[inline(always)]
fn classify_ipv4(frame: &(impl Reader + ?Sized), at: usize, served: &impl Served) -> Answer {
    let destination = frame.read::<4>(at + ipv4::DESTINATION).ok_or(Verdict::PassTruncated)?;
    if !served.serves_v4(destination) {
        return Err(Verdict::PassIpv4);
    }
    let [version_ihl] = frame.read::<1>(at).ok_or(Verdict::PassTruncated)?;
    let fragment = read_u16(frame, at + ipv4::FRAGMENT).ok_or(Verdict::PassTruncated)?;
    let [protocol] = frame.read::<1>(at + ipv4::PROTOCOL).ok_or(Verdict::PassTruncated)?;
    Ok(if version_ihl >> 4 != ipv4::VERSION || version_ihl & 0xf < ipv4::MIN_IHL {
        Verdict::DropIpv4Malformed
    } else if version_ihl != ipv4::VERSION_IHL {
        Verdict::DropIpv4Options
    } else if fragment & ipv4::FRAGMENT_BITS != 0 {
        Verdict::DropIpv4Fragment
    } else if sent_to_group(frame) {
        Verdict::DropGroupDestination
    } else {
        match protocol {
            protocol::TCP => Verdict::SteerIpv4Tcp,
            protocol::ICMP => Verdict::SteerIpv4Icmp,
            protocol::UDP => Verdict::DropIpv4Udp,
            _ => Verdict::DropIpv4Protocol,
        }
    })
}

#[inline(always)]
fn classify_ipv6(frame: &(impl Reader + ?Sized), at: usize, served: &impl Served) -> Answer {
    let destination = frame.read::<16>(at + ipv6::DESTINATION).ok_or(Verdict::PassTruncated)?;
    let [next_header, hop_limit] = frame.read::<2>(at + ipv6::NEXT_HEADER).ok_or(Verdict::PassTruncated)?;
    if served.serves_v6(destination) {
        let [first] = frame.read::<1>(at).ok_or(Verdict::PassTruncated)?;
        return Ok(if first >> 4 != ipv6::VERSION {
            Verdict::DropIpv6Malformed
        } else {
            match next_header {
                protocol::FRAGMENT => Verdict::DropIpv6Fragment,
                extension if protocol::is_extension(extension) => Verdict::DropIpv6Extension,
                _ if sent_to_group(frame) => Verdict::DropGroupDestination,
                protocol::TCP => Verdict::SteerIpv6Tcp,
                protocol::ICMPV6 => Verdict::SteerIpv6Icmp,
                protocol::UDP => Verdict::DropIpv6Udp,
                _ => Verdict::DropIpv6Protocol,
            }
        });
    }
    if next_header != protocol::ICMPV6 {
        return Err(Verdict::PassIpv6);
    }
    let message = at + ipv6::HEADER;
    let [kind, code] = frame.read::<2>(message + neighbour::TYPE).ok_or(Verdict::PassTruncated)?;
    if kind != neighbour::SOLICITATION {
        return Err(Verdict::PassIpv6);
    }
    let target = frame.read::<16>(message + neighbour::TARGET).ok_or(Verdict::PassTruncated)?;
    if !served.serves_v6(target) {
        Err(Verdict::PassIpv6)
    } else if hop_limit == neighbour::HOP_LIMIT && code == 0 {
        Ok(Verdict::SteerNeighbour)
    } else {
        Ok(Verdict::DropNeighbourInvalid)
    }
}

/// True for a frame sent to more than one station.
#[inline(always)]
fn sent_to_group(frame: &(impl Reader + ?Sized)) -> bool {
    frame.read::<1>(ethernet::DESTINATION).is_none_or(|[first]| first & 1 == 1)
}

#[inline(always)]
fn read_u16(frame: &(impl Reader + ?Sized), offset: usize) -> Option<u16> {
    frame.read::<2>(offset).map(u16::from_be_bytes)
}

#[cfg(test)]
mod tests;
