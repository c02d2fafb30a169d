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

use core::hint::black_box;

use crate::verdict::Verdict;
use crate::wire::{arp, ethernet, ipv4, ipv6, neighbour, protocol, snap};

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
        ethernet::IPV4 => classify_v4(frame, ethernet::HEADER, served),
        ethernet::IPV6 => classify_v6(frame, ethernet::HEADER, served),
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
        ethernet::IPV4 => look_behind_v4(frame, at, served),
        ethernet::IPV6 => look_behind_v6(frame, at, salt, served),
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

// Classifies IPv4 to, from or through a served address.

/// Classifies a datagram by its addresses, without its options.
#[inline(always)]
fn classify_v4(frame: &(impl Reader + ?Sized), at: usize, served: &impl ServedAddresses) -> Outcome {
    // The addresses are read one after the other, to use less stack.
    let source = frame.read_afresh(at + ipv4::SOURCE).ok_or(TRUNCATED)?;
    let destination = frame.read_afresh(at + ipv4::DESTINATION).ok_or(TRUNCATED)?;
    if served.serves_v4(source) {
        return Ok(Verdict::DropSourceClaim);
    }
    let serves = served.serves_v4(destination);
    let [version_ihl, _] = frame.read_afresh(at).ok_or(TRUNCATED)?;
    if !serves {
        let options = version_ihl > ipv4::VERSION_IHL && version_ihl >> 4 == ipv4::VERSION;
        return Err(if options {
            PassReason::LookBehind(version_ihl)
        } else {
            PassReason::Now(Verdict::PassIpv4)
        });
    }
    let fragment = frame.read_afresh(at + ipv4::FRAGMENT).map(u16::from_be_bytes).ok_or(TRUNCATED)?;
    let [_, protocol] = frame.read_afresh(at + ipv4::TTL).ok_or(TRUNCATED)?;
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

/// Like [`classify`], with options (RFC 791 §3.1). In a datagram to another address, it searches for a served
/// address after any byte that may begin a source route. It does not parse option by option, so malformed
/// options hide nothing.
#[inline(always)]
fn look_behind_v4(frame: &(impl Reader + ?Sized), at: usize, served: &impl ServedAddresses) -> Outcome {
    let version_ihl = match classify_v4(frame, at, served) {
        Err(PassReason::LookBehind(version_ihl)) => version_ihl,
        outcome => return outcome,
    };
    let header = (version_ihl & 0xf) as usize * 4;
    let mut routed = 0;
    let mut from = ipv4::HEADER;
    while from <= ipv4::MAX_HEADER - 4 {
        if from + 4 > header {
            break;
        }
        let bytes: [u8; 4] = frame.read_afresh(at + from).ok_or(TRUNCATED)?;
        if routed != 0 && served.serves_v4(bytes) {
            return Ok(Verdict::DropIpv4SourceRoute);
        }
        routed |= matches!(bytes[0], ipv4::LOOSE_ROUTE | ipv4::STRICT_ROUTE) as u32;
        // `black_box` keeps this a loop; unrolled, it would be most of the program.
        from = black_box(from + 1);
    }
    Err(PassReason::Now(Verdict::PassIpv4))
}

// Classifies IPv6 to, from or through a served address, or to one that translates to a served IPv4 address.

/// No parsed extension header starts beyond this offset, in bytes. Only jumbo frames are longer.
const REACH_MASK: usize = 0x3fff;

const ELSEWHERE: PassReason = PassReason::Now(Verdict::PassIpv6);

/// Classifies a datagram by its addresses and, for neighbour discovery, its target; without extension
/// headers.
#[inline(always)]
fn classify_v6(frame: &(impl Reader + ?Sized), at: usize, served: &impl ServedAddresses) -> Outcome {
    // The addresses are read one after the other, to use less stack.
    let message = at + ipv6::HEADER;
    let source = frame.read_afresh::<16>(at + ipv6::SOURCE).ok_or(TRUNCATED)?;
    let claims = served.serves_v6(source);
    let destination = frame.read_afresh::<16>(at + ipv6::DESTINATION).ok_or(TRUNCATED)?;
    let serves = served.serves_v6(destination);
    let [next_header, hop_limit] = frame.read_afresh(at + ipv6::NEXT_HEADER).ok_or(TRUNCATED)?;
    if claims {
        let kind = frame.read_afresh(message + neighbour::TYPE - 1).map(|[_, kind]| kind);
        let discovers = next_header == protocol::ICMPV6
            && kind.is_some_and(|kind| (neighbour::FIRST..=neighbour::LAST).contains(&kind));
        return Ok(if discovers { Verdict::DropNeighbourClaim } else { Verdict::DropSourceClaim });
    }
    if serves {
        let [first, _] = frame.read_afresh(at).ok_or(TRUNCATED)?;
        return Ok(to_served(frame, first, next_header));
    }
    let destination = frame.read_afresh::<16>(at + ipv6::DESTINATION).ok_or(TRUNCATED)?;
    if translated(destination).is_some_and(|v4| served.serves_v4(v4)) {
        return Ok(Verdict::DropTranslated);
    }
    match next_header {
        protocol::ICMPV6 => match discovery(frame, message, served)? {
            (neighbour::SOLICITATION, 0) if hop_limit == neighbour::HOP_LIMIT => Ok(Verdict::SteerNeighbour),
            (neighbour::SOLICITATION, _) => Ok(Verdict::DropNeighbourInvalid),
            _ => Ok(Verdict::DropNeighbourClaim),
        },
        protocol::HOP_BY_HOP
        | protocol::DESTINATION_OPTIONS
        | protocol::ROUTING
        | protocol::FRAGMENT
        | protocol::AH => Err(PassReason::LookBehind(next_header)),
        _ => Err(ELSEWHERE),
    }
}

/// Classifies a datagram to a served address.
#[inline(always)]
fn to_served(frame: &(impl Reader + ?Sized), first: u8, next_header: u8) -> Verdict {
    if first >> 4 != ipv6::VERSION {
        return Verdict::DropIpv6Malformed;
    }
    match next_header {
        protocol::FRAGMENT => Verdict::DropIpv6Fragment,
        extension if protocol::is_extension(extension) => Verdict::DropIpv6Extension,
        _ if sent_to_group(frame) => Verdict::DropGroupDestination,
        protocol::TCP => Verdict::SteerIpv6Tcp,
        protocol::ICMPV6 => Verdict::SteerIpv6Icmp,
        protocol::UDP => Verdict::DropIpv6Udp,
        _ => Verdict::DropIpv6Protocol,
    }
}

/// The type and code of a solicitation or advertisement for a served target; `Err` for any other message.
#[inline(always)]
fn discovery(
    frame: &(impl Reader + ?Sized),
    message: usize,
    served: &impl ServedAddresses,
) -> Result<(u8, u8), PassReason> {
    let [kind, code] = frame.read_afresh::<2>(message + neighbour::TYPE).ok_or(TRUNCATED)?;
    if kind != neighbour::SOLICITATION && kind != neighbour::ADVERTISEMENT {
        return Err(ELSEWHERE);
    }
    let whole: [u8; neighbour::LEN] = frame.read_afresh(message).ok_or(TRUNCATED)?;
    let [_, _, _, _, _, _, _, _, target @ ..] = whole;
    if served.serves_v6(target) { Ok((kind, code)) } else { Err(ELSEWHERE) }
}

/// The IPv4 address embedded in an IPv6 address: translated (64:ff9b::/96, RFC 6052 §2.1), mapped or
/// compatible (::ffff:0:0/96 and ::/96, RFC 4291 §2.5.5), or tunnelled (2002::/16, RFC 3056 §2). The prefix
/// of a local translator (RFC 6052 §2.2) is unknown here.
#[inline(always)]
fn translated(address: [u8; 16]) -> Option<[u8; 4]> {
    let [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, last @ ..] = address;
    let high = u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
    let middle = u32::from_be_bytes([a8, a9, a10, a11]);
    match (high, middle) {
        (0x0064_ff9b_0000_0000, 0) | (0, 0 | 0xffff) => Some(last),
        _ if high >> 48 == 0x2002 => Some([a2, a3, a4, a5]),
        _ => None,
    }
}

/// Like [`classify`], with extension headers. In a datagram to another address, it searches for a route
/// through a served address and for neighbour discovery about one.
#[inline(always)]
fn look_behind_v6(
    frame: &(impl Reader + ?Sized),
    at: usize,
    salt: u32,
    served: &impl ServedAddresses,
) -> Outcome {
    let mut kind = match classify_v6(frame, at, served) {
        Err(PassReason::LookBehind(next_header)) => next_header,
        outcome => return outcome,
    };
    let mut at = forget(at + ipv6::HEADER, salt, REACH_MASK);
    let mut route = None;
    for turn in 0..=ipv6::MAX_EXTENSIONS {
        let length = match kind {
            protocol::HOP_BY_HOP | protocol::DESTINATION_OPTIONS | protocol::ROUTING => 8,
            protocol::FRAGMENT => 0,
            protocol::AH => 4,
            _ => break,
        };
        if turn == ipv6::MAX_EXTENSIONS {
            return Ok(Verdict::DropIpv6Routing);
        }
        let [next, units, o0, o1] = frame.read_afresh::<4>(at).ok_or(TRUNCATED)?;
        if kind == protocol::FRAGMENT && u16::from_be_bytes([o0, o1]) & ipv6::FRAGMENT_OFFSET != 0 {
            // The payload is a later fragment, so it has no further header.
            return Err(ELSEWHERE);
        }
        if kind == protocol::ROUTING && route.replace((at, units)).is_some() {
            // No sender needs two (RFC 8200 §4.1).
            return Ok(Verdict::DropIpv6Routing);
        }
        kind = next;
        // A header's length does not count its first eight bytes. Its unit is eight bytes, for AH four (RFC
        // 4302 §2.2).
        at = forget(at + 8 + units as usize * length, salt, REACH_MASK);
    }
    if let Some((at, units)) = route
        && routes_through(frame, at, units as usize / 2, served)?
    {
        return Ok(Verdict::DropIpv6Routing);
    }
    if kind != protocol::ICMPV6 {
        return Err(ELSEWHERE);
    }
    match discovery(frame, at, served)? {
        (neighbour::SOLICITATION, _) => Ok(Verdict::DropIpv6Extension),
        _ => Ok(Verdict::DropNeighbourClaim),
    }
}

/// True if an address in the routing header is served, or if there are more than [`ipv6::MAX_SEGMENTS`].
#[inline(always)]
fn routes_through(
    frame: &(impl Reader + ?Sized),
    at: usize,
    segments: usize,
    served: &impl ServedAddresses,
) -> Result<bool, PassReason> {
    if segments > ipv6::MAX_SEGMENTS {
        return Ok(true);
    }
    let mut segment = 0;
    while segment < ipv6::MAX_SEGMENTS {
        if segment >= segments {
            break;
        }
        let address = frame.read_afresh::<16>(at + ipv6::SEGMENTS + 16 * segment).ok_or(TRUNCATED)?;
        if served.serves_v6(address) {
            return Ok(true);
        }
        // `black_box` keeps this a loop; unrolled, it would be too much code.
        segment = black_box(segment + 1);
    }
    Ok(false)
}

#[cfg(test)]
mod tests;
