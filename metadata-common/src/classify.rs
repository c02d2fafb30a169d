//! The steering policy: selects the frames of a guest that are for the metadata service.
//!
//! A frame is *for a served address* if it is one of these:
//!
//! - ARP or a neighbour solicitation for a served address, or ARP for a next hop towards one;
//! - IP to a served address, also through a source route, a routing header or address translation;
//! - a frame in which the guest claims a served address as its own.
//!
//! On a port of ours, such a frame is steered or dropped; it never leaves the node. The frames of an ordinary
//! client are steered: ARP, neighbour solicitation, TCP and ICMP, in whole datagrams without options or
//! extension headers. Every other frame for a served address is dropped, and each reason has its own verdict.
//! Frames for other addresses pass unchanged.
//!
//! The classifier parses Ethernet frames with up to [`ethernet::MAX_TAGS`] VLAN tags and with SNAP. It does
//! not parse tunnels (PPPoE, MPLS, IP in IP, VXLAN…), whose endpoints have their own addresses.
//!
//! A priority tag in front of all others is not part of the frame that is classified: it gives a priority, and no VLAN
//! ([`priority_tag`]). The XDP program removes it first, and puts it back if the frame passes.
//!
//! The classifier reads neither the sender ([`crate::decide`] does) nor the payload. The user-space stack
//! checks lengths and checksums.

mod v4;
mod v6;

use core::hint::black_box;

use crate::verdict::Verdict;
use crate::wire::{arp, ethernet, ipv4, snap};

/// Bounded reads from a frame.
pub trait Reader {
    /// The `N` bytes at `offset`; `None` if the frame ends before that.
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;

    /// Like [`read`](Self::read), for an offset known at run time only. An implementation must not reuse the
    /// bounds of earlier reads, because compilers combine comparisons with the end of the frame in ways the
    /// verifier does not recognise.
    #[inline(always)]
    fn read_afresh<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.read(offset)
    }

    /// True if the frame had a VLAN tag that was removed from its bytes. A priority tag does not count.
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

/// The addresses that the service answers for.
pub trait ServedAddresses {
    /// True if this IPv4 address (wire order) is served.
    fn serves_v4(&self, address: [u8; 4]) -> bool;
    /// True if this IPv6 address (wire order) is served.
    fn serves_v6(&self, address: [u8; 16]) -> bool;
    /// True if ARP for this IPv4 address (wire order) is answered: for a served address, and for a next hop
    /// that guests need towards one. Other traffic to such a next hop passes.
    fn answers_arp(&self, address: [u8; 4]) -> bool {
        self.serves_v4(address)
    }
}

/// The priority tag of a frame: type and content of a tag whose VLAN ID is 0, "the null VLAN ID" (IEEE 802.1Q-2022
/// table 9-2). Some operating systems send one with each frame. Only types that the kernel takes for a tag, too, count.
#[inline(always)]
pub fn priority_tag(frame: &(impl Reader + ?Sized)) -> Option<[u8; ethernet::TAG]> {
    let tag = frame.read::<{ ethernet::TAG }>(ethernet::TYPE)?;
    let [t0, t1, c0, c1] = tag;
    let is_tag = matches!(u16::from_be_bytes([t0, t1]), ethernet::CUSTOMER_TAG | ethernet::SERVICE_TAG);
    (is_tag && u16::from_be_bytes([c0, c1]) & ethernet::VLAN_ID == 0).then_some(tag)
}

/// Classifies a frame from a guest, without regard to its sender.
#[inline(always)]
pub fn classify(frame: &(impl Reader + ?Sized), served: &impl ServedAddresses) -> Verdict {
    let Some(ethertype) = read_u16(frame, ethernet::TYPE) else {
        return Verdict::PassTruncated;
    };
    let wrapped = frame.is_tagged() || ethernet::is_tag(ethertype) || ethertype <= ethernet::MAX_LENGTH;
    let outcome = match ethertype {
        _ if wrapped => Err(PassReason::LookBehind(0)),
        ethernet::ARP => classify_arp(frame, ethernet::HEADER, served, true),
        ethernet::IPV4 => v4::classify(frame, ethernet::HEADER, served),
        ethernet::IPV6 => v6::classify(frame, ethernet::HEADER, served),
        _ => Err(PassReason::Now(Verdict::PassEthertype)),
    };
    match outcome {
        Ok(verdict) | Err(PassReason::Now(verdict)) => verdict,
        Err(PassReason::LookBehind(_)) => look_behind(frame, served),
    }
}

/// True for most traffic of guests: IPv4 without tags and options whose source and destination do not end in
/// a byte for which `may_be_served` returns true. [`classify`] returns [`Verdict::PassIpv4`] for such a
/// frame, but needs a kernel call for each read if the frame is not linear in memory. This function reads
/// only `first`, the first bytes of the frame, and returns false if they end within the IPv4 header.
#[inline(always)]
pub fn is_ordinary(first: &(impl Reader + ?Sized), may_be_served: impl Fn(u8) -> bool) -> bool {
    const AT: usize = ethernet::HEADER;
    const LAST: usize = 3;
    let Some(start) = first.read::<{ AT + ipv4::HEADER }>(0) else {
        return false;
    };
    u16::from_be_bytes([start[ethernet::TYPE], start[ethernet::TYPE + 1]]) == ethernet::IPV4
        && start[AT] == ipv4::VERSION_IHL
        && !may_be_served(start[AT + ipv4::SOURCE + LAST])
        && !may_be_served(start[AT + ipv4::DESTINATION + LAST])
}

/// The rest of [`classify`], for rare frames: VLAN tags, a length in place of the type, IP options and
/// extension headers. It is never inlined, so the verifier follows it once and not once for each caller's
/// path.
#[inline(never)]
fn look_behind(frame: &(impl Reader + ?Sized), served: &impl ServedAddresses) -> Verdict {
    let Some(start) = frame.read::<{ ethernet::HEADER }>(0) else {
        return Verdict::PassTruncated;
    };
    let [s0, s1, s2, s3, _, _, _, _, _, _, _, _, t0, t1] = start;
    let salt = u32::from_be_bytes([s0, s1, s2, s3]);
    let mut ethertype = u16::from_be_bytes([t0, t1]);
    let mut at = ethernet::HEADER;
    let mut tagged = frame.is_tagged();
    // A removed tag counts as parsed.
    for _ in tagged as usize..ethernet::MAX_TAGS {
        if !ethernet::is_tag(ethertype) {
            break;
        }
        tagged = true;
        // The last two bytes of a tag are the next type.
        match frame.read_afresh(at + ethernet::TAG - 2) {
            Some(inner) => ethertype = u16::from_be_bytes(inner),
            None => return Verdict::PassTruncated,
        }
        at = forget(at + ethernet::TAG, salt, WRAPPED_MASK);
    }
    if ethernet::is_tag(ethertype) {
        return Verdict::DropVlanDepth;
    }
    let pass = if tagged { Verdict::PassVlan } else { Verdict::PassEthertype };
    let mut wrapping = if tagged { TAGGED } else { 0 };
    if ethertype <= ethernet::MAX_LENGTH {
        let Some(header) = frame.read_afresh::<{ snap::HEADER }>(at) else {
            return Verdict::PassTruncated;
        };
        let [l0, l1, l2, l3, l4, l5, t0, t1] = header;
        if !matches!([l0, l1, l2, l3, l4, l5], snap::RFC1042 | snap::BRIDGE_TUNNEL) {
            return pass;
        }
        ethertype = u16::from_be_bytes([t0, t1]);
        at = forget(at + snap::HEADER, salt, WRAPPED_MASK);
        wrapping |= IN_SNAP;
    }
    let at = forget(at, salt, WRAPPED_MASK);
    let wrapping = forget(wrapping, salt, TAGGED | IN_SNAP);
    let outcome = match ethertype {
        ethernet::ARP => classify_arp(frame, at, served, false),
        ethernet::IPV4 => v4::look_behind(frame, at, served),
        ethernet::IPV6 => v6::look_behind(frame, at, salt, served),
        _ => Err(PassReason::Now(Verdict::PassEthertype)),
    };
    match outcome {
        Ok(_) if wrapping & IN_SNAP != 0 => Verdict::DropSnap,
        Ok(_) if wrapping != 0 => Verdict::DropVlan,
        Err(TRUNCATED) => Verdict::PassTruncated,
        Err(_) if wrapping & TAGGED != 0 => Verdict::PassVlan,
        Err(_) if wrapping != 0 => Verdict::PassEthertype,
        Ok(verdict) | Err(PassReason::Now(verdict)) => verdict,
        Err(PassReason::LookBehind(_)) => Verdict::PassEthertype,
    }
}

/// A bit of `wrapping`: the frame has VLAN tags.
const TAGGED: usize = 1;
/// A bit of `wrapping`: the frame has LLC and SNAP headers.
const IN_SNAP: usize = 2;

/// No header after tags and SNAP starts beyond this offset, in bytes.
const WRAPPED_MASK: usize = 0x3f;

const _: () = assert!(ethernet::HEADER + ethernet::MAX_TAGS * ethernet::TAG + snap::HEADER <= WRAPPED_MASK);

/// Returns `at`, which must be within `mask`, and hides its exact value from the verifier. Otherwise the
/// verifier would follow the rest of the program once for each possible offset of a header. `salt` is any
/// value that the verifier does not know, for example from the frame.
#[inline(always)]
fn forget(at: usize, salt: u32, mask: usize) -> usize {
    let salt = black_box(salt as usize);
    black_box(at.wrapping_add(salt)).wrapping_sub(salt) & mask
}

/// `Ok` for a frame for a served address, which is steered or dropped; `Err` for a frame that passes.
type Outcome = Result<Verdict, PassReason>;

/// Why a frame passes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PassReason {
    Now(Verdict),
    /// The addresses are not served, but the frame has options or extension headers to parse. The byte is
    /// the version and header length (IPv4) or the next header (IPv6).
    LookBehind(u8),
}

const TRUNCATED: PassReason = PassReason::Now(Verdict::PassTruncated);

/// Classifies ARP. If `next_hops` is true, ARP for a next hop towards a served address is steered too.
#[inline(always)]
fn classify_arp(
    frame: &(impl Reader + ?Sized),
    at: usize,
    served: &impl ServedAddresses,
    next_hops: bool,
) -> Outcome {
    let format = frame.read_afresh::<6>(at).ok_or(TRUNCATED)?;
    if format != arp::ETHERNET_IPV4 && format != arp::IEEE802_IPV4 {
        return Err(PassReason::Now(Verdict::PassArpFormat));
    }
    let packet: [u8; arp::LEN] = frame.read_afresh(at).ok_or(TRUNCATED)?;
    let [_, hardware, _, _, _, _, _, _, _, _, _, _, _, _, s0, s1, s2, s3, _, _, _, _, _, _, target @ ..] =
        packet;
    let sender = [s0, s1, s2, s3];
    if served.serves_v4(sender) {
        return Ok(Verdict::DropArpClaim);
    }
    let plain = hardware == arp::ETHERNET_IPV4[1];
    let ours = if next_hops && plain { served.answers_arp(target) } else { served.serves_v4(target) };
    match (ours, plain) {
        (true, true) => Ok(Verdict::SteerArp),
        (true, false) => Ok(Verdict::DropArpFormat),
        (false, _) => Err(PassReason::Now(Verdict::PassArp)),
    }
}

/// True for a frame with a group MAC as destination, and for one that ends before it.
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
