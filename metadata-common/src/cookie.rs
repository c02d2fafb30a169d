//! SYN cookies: the sequence number of a SYN-ACK encodes everything the guest's SYN negotiated (RFC 4987
//! §3.6).
//!
//! The kernel or user space answers a SYN, and neither keeps state for it. The guest's first segment with
//! payload acknowledges the sequence number, from which we decode the abilities of the guest's TCP. A guest
//! that only opens connections therefore uses no memory.
//!
//! ```text
//!  31        24 23                7    4      0
//!  ┌─────────┬──┬────────────────┬────┬───────┐
//!  │ flow, 8 │ a│ flow + ISN, 16 │mss,│scale, │
//!  │         │ 1│                │  3 │     4 │
//!  └─────────┴──┴────────────────┴────┴───────┘
//! ```
//!
//! Bit a distinguishes a connection from the previous one with the same four-tuple and the same guest ISN
//! ([`again`]).
//!
//! The first part distinguishes our connections from others. The second part also covers the guest's initial
//! sequence number (ISN). It distinguishes the first segment of a connection from a later one that overtook
//! it, and one use of a four-tuple from the next. Neither part is a security boundary: only the guest itself
//! sends on its port, and it may open any connection. A fast hash is therefore enough, and the key only makes
//! the numbers hard to predict (RFC 6528).

use crate::maps::{ALL_SENT, Slot};

/// The key of all SYN cookies of an agent: two random words.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CookieKey(pub [u64; 2]);

/// Omits the words, because they suffice to predict the numbers.
impl core::fmt::Debug for CookieKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Key")
    }
}

/// A connection, by the keyed 64-bit hash of its slot, addresses and ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flow {
    number: u64,
    index: u32,
}

/// Entries of `ALL_SENT` that the connections of one slot may use, so that a guest cannot fill the table. Slots that follow
/// each other have different ones.
pub const ALL_SENT_OF_SLOT: u32 = 1 << 10;

/// The segment sizes that a number can encode, in bytes of TCP payload. A smaller size counts as the first,
/// which every host accepts (RFC 9293 §3.7.1). Otherwise one frame of a guest could cause many frames in
/// answer.
///
/// The sizes fit the common MTUs. MTUs of 1280, 1400, 1420 (WireGuard), 1442 (Geneve), 1450 (VXLAN) and 1500
/// bytes leave 1240, 1360, 1380, 1402, 1410 and 1460 bytes over IPv4, and 20 bytes less over IPv6. The
/// next lower size is at most 32 bytes less.
pub const SEGMENT_SIZES: [u16; 8] = [536, 1220, 1340, 1360, 1380, 1400, 1440, 1460];

/// The greatest window shift (RFC 7323 §2.3).
pub const SCALE_MAX: u8 = 14;

/// The TCP abilities that a guest announces in its SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// The most payload in bytes that the guest accepts in one segment. After decoding from a number it is
    /// one of [`SEGMENT_SIZES`].
    pub segment: u16,
    /// The guest's window shift, 0 to [`SCALE_MAX`]; `None` if it does not support the option.
    pub scale: Option<u8>,
}

/// What the numbers of a segment show about its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CookieCheck {
    /// The segment acknowledges our SYN-ACK and starts at the first byte of the connection.
    First(TcpOptions),
    /// The connection may be ours, but an earlier segment is missing.
    Later,
    /// The segment does not belong to any SYN-ACK of ours.
    Foreign,
}

const FLOW_SHIFT: u32 = 24;
const AGAIN: u32 = 1 << 23;
const FIRST_SHIFT: u32 = 7;
const FIRST_MASK: u32 = 0xffff;
const SIZE_SHIFT: u32 = 4;
const SIZE_MASK: u32 = 7;
const SCALE_MASK: u32 = 0xf;
const NO_SCALE: u32 = 0xf;

impl Flow {
    /// The flow of a connection over IPv4. `ports` are the guest's port and ours, in wire order.
    #[inline(always)]
    #[must_use]
    pub const fn v4(key: &CookieKey, slot: Slot, guest: [u8; 4], local: [u8; 4], ports: [u8; 4]) -> Self {
        let (guest, local) = (u32::from_be_bytes(guest), u32::from_be_bytes(local));
        Self::new(slot, mix(begin(key, slot, ports) ^ pair(guest, local)), guest ^ local, ports)
    }

    /// The flow of a connection over IPv6. `ports` are the guest's port and ours, in wire order.
    #[inline(always)]
    #[must_use]
    pub const fn v6(key: &CookieKey, slot: Slot, guest: [u8; 16], local: [u8; 16], ports: [u8; 4]) -> Self {
        let (guest, local) = (u128::from_be_bytes(guest), u128::from_be_bytes(local));
        let hash = mix(begin(key, slot, ports) ^ (guest >> 64) as u64);
        let hash = mix(hash ^ guest as u64);
        let hash = mix(hash ^ (local >> 64) as u64);
        Self::new(slot, mix(hash ^ local as u64), (guest ^ local) as u32, ports)
    }

    /// A guest takes one port after the other, so ports are not hashed: its connections have entries of their own.
    #[inline(always)]
    const fn new(slot: Slot, number: u64, addresses: u32, ports: [u8; 4]) -> Self {
        let [a, b, c, d] = ports;
        let ports = u16::from_be_bytes([a, b]) as u32 + u16::from_be_bytes([c, d]) as u32;
        // Slots with the same part of the table begin in different places of it.
        let turn = slot / (ALL_SENT / ALL_SENT_OF_SLOT) * 17;
        let own = addresses.wrapping_add(ports).wrapping_add(turn) & (ALL_SENT_OF_SLOT - 1);
        Self { number, index: (slot.wrapping_mul(ALL_SENT_OF_SLOT) & (ALL_SENT - 1)) | own }
    }

    /// The hash, which identifies the connection in `ALL_SENT`.
    #[inline(always)]
    #[must_use]
    pub const fn number(self) -> u64 {
        self.number
    }

    /// The value for [`AllSent::opened`](crate::maps::AllSent::opened): 16 bits of the hash, never 0.
    #[inline(always)]
    #[must_use]
    pub const fn mark(self) -> u16 {
        (self.number >> 32) as u16 | 1
    }

    /// The index of the flow's entry in `ALL_SENT`: one of [`ALL_SENT_OF_SLOT`].
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.index
    }
}

/// The sequence number of the SYN-ACK. A segment size between two classes is rounded down; a shift above
/// [`SCALE_MAX`] counts as [`SCALE_MAX`].
#[inline(always)]
#[must_use]
pub const fn issue(key: &CookieKey, flow: Flow, guest_isn: u32, abilities: TcpOptions) -> u32 {
    let scale = match abilities.scale {
        Some(shift) if shift > SCALE_MAX => SCALE_MAX as u32,
        Some(shift) => shift as u32,
        None => NO_SCALE,
    };
    marks(key, flow, guest_isn) | size_class(abilities.segment) << SIZE_SHIFT | scale
}

/// A different number with the same content. It is for a SYN whose number equals that of the connection the
/// guest has forgotten, so that the two connections differ.
#[inline(always)]
#[must_use]
pub const fn again(number: u32) -> u32 {
    number ^ AGAIN
}

/// Checks a segment of `flow` with this sequence number that acknowledges `ack`, for a connection without
/// state.
#[inline(always)]
#[must_use]
pub const fn check(key: &CookieKey, flow: Flow, seq: u32, ack: u32) -> CookieCheck {
    let number = ack.wrapping_sub(1);
    let differs = number ^ marks(key, flow, seq.wrapping_sub(1));
    if differs >> FLOW_SHIFT != 0 {
        return CookieCheck::Foreign;
    }
    if differs >> FIRST_SHIFT & FIRST_MASK != 0 {
        return CookieCheck::Later;
    }
    let segment = SEGMENT_SIZES[(number >> SIZE_SHIFT & SIZE_MASK) as usize];
    let scale = number & SCALE_MASK;
    CookieCheck::First(TcpOptions {
        segment,
        scale: if scale == NO_SCALE { None } else { Some(scale as u8) },
    })
}

/// Both hashes, at their positions in the number.
#[inline(always)]
const fn marks(key: &CookieKey, flow: Flow, guest_isn: u32) -> u32 {
    let first = mix(flow.number ^ key.0[1] ^ guest_isn as u64) >> 48;
    ((flow.number >> 56) as u32) << FLOW_SHIFT | (first as u32) << FIRST_SHIFT
}

/// The largest size class that does not exceed what the guest accepts.
#[inline(always)]
const fn size_class(segment: u16) -> u32 {
    // This is not a loop, because the verifier would follow each turn.
    (segment >= SEGMENT_SIZES[1]) as u32
        + (segment >= SEGMENT_SIZES[2]) as u32
        + (segment >= SEGMENT_SIZES[3]) as u32
        + (segment >= SEGMENT_SIZES[4]) as u32
        + (segment >= SEGMENT_SIZES[5]) as u32
        + (segment >= SEGMENT_SIZES[6]) as u32
        + (segment >= SEGMENT_SIZES[7]) as u32
}

#[inline(always)]
const fn begin(key: &CookieKey, slot: Slot, ports: [u8; 4]) -> u64 {
    mix(key.0[0] ^ pair(slot, u32::from_be_bytes(ports)))
}

#[inline(always)]
const fn pair(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// A permutation of 64 bits in which each input bit changes about half of the output bits (the finaliser of
/// MurmurHash3, with the constants of D. Stafford's variant 13).
#[inline(always)]
const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::{
        ALL_SENT_OF_SLOT, CookieCheck, CookieKey, Flow, SCALE_MAX, SEGMENT_SIZES, TcpOptions, again, check,
        issue,
    };
    use crate::maps::{ALL_SENT, MAX_SLOTS};
    use std::collections::HashSet;
    use std::vec::Vec;

    const KEY: CookieKey = CookieKey([0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]);
    const LOCAL: [u8; 4] = [169, 254, 169, 254];

    fn flow(slot: u32, port: u16) -> Flow {
        let [a, b] = port.to_be_bytes();
        Flow::v4(&KEY, slot, [10, 0, 0, 1], LOCAL, [a, b, 0, 80])
    }

    #[test]
    fn the_first_segment_returns_the_abilities_of_the_syn() {
        for segment in SEGMENT_SIZES {
            for scale in (0..=SCALE_MAX).map(Some).chain([None]) {
                let sent = TcpOptions { segment, scale };
                let number = issue(&KEY, flow(1, 40_000), 77, sent);
                let decoded = check(&KEY, flow(1, 40_000), 78, number.wrapping_add(1));
                assert_eq!(decoded, CookieCheck::First(sent));
            }
        }
    }

    #[test]
    fn a_number_issued_again_differs_and_has_the_same_content() {
        let sent = TcpOptions { segment: 1460, scale: Some(7) };
        let number = issue(&KEY, flow(1, 40_000), 77, sent);
        let other = again(number);
        assert_ne!(other, number);
        assert_eq!(again(other), number);
        assert_eq!(check(&KEY, flow(1, 40_000), 78, other.wrapping_add(1)), CookieCheck::First(sent));
    }

    #[test]
    fn a_segment_size_is_rounded_down_to_a_class_or_up_to_the_least() {
        for (sent, decoded) in
            [(0, 536), (64, 536), (1219, 536), (1220, 1220), (1459, 1440), (1461, 1460), (8960, 1460)]
        {
            let number = issue(&KEY, flow(1, 1), 5, TcpOptions { segment: sent, scale: None });
            let CookieCheck::First(back) = check(&KEY, flow(1, 1), 6, number + 1) else {
                panic!("it is ours")
            };
            assert_eq!(back.segment, decoded, "{sent}");
        }
    }

    #[test]
    fn every_common_mtu_has_a_class_within_32_bytes() {
        for (mtu, headers) in
            [1280, 1400, 1420, 1442, 1450, 1492, 1500].map(|mtu| [(mtu, 40), (mtu, 60)]).concat()
        {
            let class = SEGMENT_SIZES[super::size_class(mtu - headers) as usize];
            assert!((mtu - headers - 32..=mtu - headers).contains(&class), "{mtu} less {headers}: {class}");
        }
    }

    #[test]
    fn an_invalid_shift_counts_as_the_greatest() {
        let number = issue(&KEY, flow(1, 1), 5, TcpOptions { segment: 536, scale: Some(255) });
        let CookieCheck::First(back) = check(&KEY, flow(1, 1), 6, number + 1) else { panic!("it is ours") };
        assert_eq!(back.scale, Some(SCALE_MAX));
    }

    #[test]
    fn a_segment_that_overtook_the_first_is_recognised() {
        let number = issue(&KEY, flow(3, 50_000), 1_000, TcpOptions { segment: 1460, scale: Some(7) });
        let later = (1..=1_000).filter(|behind| {
            check(&KEY, flow(3, 50_000), 1_001 + behind * 1_460, number + 1) == CookieCheck::Later
        });
        assert!(later.count() >= 998, "a 16-bit hash rarely matches by chance");
    }

    #[test]
    fn other_slots_ports_and_keys_are_foreign() {
        let number = issue(&KEY, flow(3, 50_000), 9, TcpOptions { segment: 1460, scale: Some(7) });
        let other = CookieKey([1, 2]);
        let others: Vec<CookieCheck> = (0..1_000)
            .map(|n| check(&KEY, flow(4 + n, 50_000), 10, number + 1))
            .chain((0..1_000).map(|n| check(&KEY, flow(3, 50_001 + n), 10, number + 1)))
            .chain([check(&other, flow(3, 50_000), 10, number + 1)])
            .collect();
        let foreign = others.iter().filter(|check| **check == CookieCheck::Foreign).count();
        assert!(foreign >= others.len() - 20, "{foreign} of {}", others.len());
        assert!(!others.iter().any(|check| matches!(check, CookieCheck::First(_))));
    }

    #[test]
    fn flows_of_a_node_are_distinct_and_spread_over_the_table() {
        let v4 = (0..4_096).flat_map(|slot| (0..8).map(move |port| flow(slot, 32_768 + port)));
        let v6 = (0..4_096).map(|slot| Flow::v6(&KEY, slot, [0xfe; 16], [0xfd; 16], [1, 2, 0, 80]));
        let flows: Vec<Flow> = v4.chain(v6).collect();
        let numbers: HashSet<u64> = flows.iter().map(|flow| flow.number()).collect();
        assert_eq!(numbers.len(), flows.len());
        let places: HashSet<u32> = flows.iter().map(|flow| flow.index()).collect();
        // Of n balls in m = 65,536 boxes, m (1 - e^(-n/m)) boxes hold one: 28,100 for 36,864.
        assert!(places.len() > 28_100, "{}", places.len());
    }

    #[test]
    fn a_guest_with_any_number_of_connections_uses_its_part_of_the_table() {
        let of = |slot| -> HashSet<u32> {
            (0..8 * ALL_SENT_OF_SLOT).map(|port| flow(slot, port as u16).index()).collect()
        };
        let (first, next) = (of(3), of(4));
        assert_eq!(first.len(), ALL_SENT_OF_SLOT as usize);
        assert!(first.is_disjoint(&next), "slots that follow each other share nothing");
        assert!(of(MAX_SLOTS - 1).iter().all(|index| *index < ALL_SENT), "all lie in the table");
    }

    #[test]
    fn connections_of_a_guest_that_follow_each_other_have_entries_of_their_own() {
        for step in [1, 2] {
            let in_a_row = ALL_SENT_OF_SLOT as u16 / step;
            let ports = (0..in_a_row).map(|n| 65_000_u16.wrapping_add(n * step));
            let indices: HashSet<u32> = ports.map(|port| flow(3, port).index()).collect();
            assert_eq!(indices.len(), in_a_row.into(), "every {step}. port");
        }
    }
}
