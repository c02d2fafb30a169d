//! The steering policy: which of a guest's frames are for the metadata service.
//!
//! A frame is *for a served address* when it is ARP or a neighbour solicitation asking for one (or ARP for
//! a next hop on the way to one), IP sent to one, by whatever detour, or when it says that one is the guest's own.
//! On a port we own such a frame never leaves: it is steered or dropped. Steered is what a
//! plain client sends: ARP, neighbour solicitation, TCP, ICMP, in whole datagrams without options or
//! extension headers. Everything else for a served address is dropped, each for its own reason, and
//! everything for other addresses passes untouched.
//!
//! Looked into are Ethernet frames and what [`ethernet::MAX_TAGS`] VLAN tags and SNAP put before them; not
//! tunnels (PPPoE, MPLS, IP in IP, VXLAN…), whose ends are addresses of their own.
//!
//! Nothing here looks at who sent the frame ([`crate::decide`] does) or at the payload: the user-space
//! stack checks lengths and checksums.

mod v4;
mod v6;

use core::hint::black_box;

use crate::verdict::Verdict;
use crate::wire::{arp, ethernet, ipv4, snap};

/// Bounded reads from a frame.
pub trait Reader {
    /// The `N` octets from `offset` on, or `None` if the frame ends before that.
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;

    /// The same at a place only known at run time, where a compiler combines comparisons with the end of the frame in
    /// ways a verifier does not recognise: knowing nothing of earlier reads.
    #[inline(always)]
    fn read_afresh<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.read(offset)
    }

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
    let Some(ethertype) = read_u16(frame, ethernet::TYPE) else {
        return Verdict::PassTruncated;
    };
    let wrapped = frame.is_tagged() || ethernet::is_tag(ethertype) || ethertype <= ethernet::MAX_LENGTH;
    let answer = match ethertype {
        _ if wrapped => Err(Pass::LookBehind(0)),
        ethernet::ARP => classify_arp(frame, ethernet::HEADER, served, true),
        ethernet::IPV4 => v4::classify(frame, ethernet::HEADER, served),
        ethernet::IPV6 => v6::classify(frame, ethernet::HEADER, served),
        _ => Err(Pass::Now(Verdict::PassEthertype)),
    };
    match answer {
        Ok(verdict) | Err(Pass::Now(verdict)) => verdict,
        Err(Pass::LookBehind(_)) => look_behind(frame, served),
    }
}

/// True for most of what guests send: IPv4 without tags and options, with neither address ending in an octet that
/// `may_be_served` names. [`classify`] returns [`Verdict::PassIpv4`] for it, at the cost of a call for each read where a
/// frame is in pieces. This reads only `first`, the first octets of the frame, and is false for what does not lie there.
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

/// The rest of [`classify`], for what is seldom met: VLAN tags, a length in place of the type, IP options and extension
/// headers. Never inlined, so that the verifier follows it once, and not on every way that leads here.
#[inline(never)]
fn look_behind(frame: &(impl Reader + ?Sized), served: &impl Served) -> Verdict {
    let Some(start) = frame.read::<{ ethernet::HEADER }>(0) else {
        return Verdict::PassTruncated;
    };
    let [s0, s1, s2, s3, _, _, _, _, _, _, _, _, t0, t1] = start;
    let salt = u32::from_be_bytes([s0, s1, s2, s3]);
    let mut ethertype = u16::from_be_bytes([t0, t1]);
    let mut at = ethernet::HEADER;
    let mut tagged = frame.is_tagged();
    // A tag taken off has been looked behind already.
    for _ in tagged as usize..ethernet::MAX_TAGS {
        if !ethernet::is_tag(ethertype) {
            break;
        }
        tagged = true;
        // The type behind a tag is its last two octets.
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
    let answer = match ethertype {
        ethernet::ARP => classify_arp(frame, at, served, false),
        ethernet::IPV4 => v4::look_behind(frame, at, served),
        ethernet::IPV6 => v6::look_behind(frame, at, salt, served),
        _ => Err(Pass::Now(Verdict::PassEthertype)),
    };
    match answer {
        Ok(_) if wrapping & IN_SNAP != 0 => Verdict::DropSnap,
        Ok(_) if wrapping != 0 => Verdict::DropVlan,
        Err(TRUNCATED) => Verdict::PassTruncated,
        Err(_) if wrapping & TAGGED != 0 => Verdict::PassVlan,
        Err(_) if wrapping != 0 => Verdict::PassEthertype,
        Ok(verdict) | Err(Pass::Now(verdict)) => verdict,
        Err(Pass::LookBehind(_)) => Verdict::PassEthertype,
    }
}

/// What a frame is wrapped in: VLAN tags.
const TAGGED: usize = 1;
/// LLC and SNAP.
const IN_SNAP: usize = 2;

/// No header behind tags and SNAP starts beyond this.
const WRAPPED_MASK: usize = 0x3f;

const _: () = assert!(ethernet::HEADER + ethernet::MAX_TAGS * ethernet::TAG + snap::HEADER <= WRAPPED_MASK);

/// `at` as it is, for all that lies within `mask`; but the verifier, which otherwise follows the rest of the program
/// once for each place a header may start, knows no more of it than the mask says. `salt` is any number it does not
/// know, from the frame say.
#[inline(always)]
fn forget(at: usize, salt: u32, mask: usize) -> usize {
    let salt = black_box(salt as usize);
    black_box(at.wrapping_add(salt)).wrapping_sub(salt) & mask
}

/// `Ok`: for a served address, steered or dropped. `Err`: not, so it passes.
type Answer = Result<Verdict, Pass>;

/// Why a frame is not for a served address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Now(Verdict),
    /// Not by its addresses, but there is more in it than a plain header: the octet that says so.
    LookBehind(u8),
}

const TRUNCATED: Pass = Pass::Now(Verdict::PassTruncated);

/// ARP; that for the next hop on the way to a served address is for us only if `next_hops`.
#[inline(always)]
fn classify_arp(frame: &(impl Reader + ?Sized), at: usize, served: &impl Served, next_hops: bool) -> Answer {
    let format = frame.read_afresh::<6>(at).ok_or(TRUNCATED)?;
    if format != arp::ETHERNET_IPV4 && format != arp::IEEE802_IPV4 {
        return Err(Pass::Now(Verdict::PassArpFormat));
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
        (false, _) => Err(Pass::Now(Verdict::PassArp)),
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
