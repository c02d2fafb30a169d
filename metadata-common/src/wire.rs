//! Offsets and values of the header fields that the classifier reads.
//!
//! Offsets are in bytes from the start of the header. Numbers are in host byte order.

/// Ethernet (IEEE 802.3-2022 §3.1.1) and its VLAN tags (IEEE 802.1Q-2022 §9).
pub mod ethernet {
    /// Length in bytes of an untagged header.
    pub const HEADER: usize = 14;
    /// Destination address, 6 bytes.
    pub const DESTINATION: usize = 0;
    /// Source address, 6 bytes.
    pub const SOURCE: usize = 6;
    /// Type, 2 bytes.
    pub const TYPE: usize = 12;
    /// Length in bytes of a VLAN tag.
    pub const TAG: usize = 4;
    /// Maximum number of VLAN tags the classifier parses. Bridges stack two. On our ports, a frame with more tags is
    /// dropped, whatever its payload.
    pub const MAX_TAGS: usize = 6;
    /// A value of at most this in the type field is a length, and LLC follows (IEEE 802.3-2022 §3.2.6).
    pub const MAX_LENGTH: u16 = 1500;

    /// IPv4 (RFC 894).
    pub const IPV4: u16 = 0x0800;
    /// ARP (RFC 826).
    pub const ARP: u16 = 0x0806;
    /// IPv6 (RFC 2464 §3).
    pub const IPV6: u16 = 0x86dd;
    /// A customer VLAN tag (IEEE 802.1Q-2022 table 9-1).
    pub const CUSTOMER_TAG: u16 = 0x8100;
    /// A service VLAN tag, formerly 802.1ad (IEEE 802.1Q-2022 table 9-1).
    pub const SERVICE_TAG: u16 = 0x88a8;
    /// A service VLAN tag of switches that predate the standard.
    pub const OLD_SERVICE_TAG: u16 = 0x9100;

    /// The bits of a tag's last two bytes that are the VLAN ID (IEEE 802.1Q-2022 §9.6).
    pub const VLAN_ID: u16 = 0x0fff;

    /// True for the type of a VLAN tag. Another type follows the tag.
    #[inline(always)]
    #[must_use]
    pub const fn is_tag(ethertype: u16) -> bool {
        matches!(ethertype, CUSTOMER_TAG | SERVICE_TAG | OLD_SERVICE_TAG)
    }
}

/// LLC with SNAP (IEEE 802-2014 §9.5): carries a type in a frame that has a length field.
pub mod snap {
    /// Length in bytes of both headers.
    pub const HEADER: usize = 8;
    /// Type, 2 bytes.
    pub const TYPE: usize = 6;
    /// The first bytes if a type follows (RFC 1042).
    pub const RFC1042: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0];
    /// The first bytes in the variant of bridges (IEEE 802.1H).
    pub const BRIDGE_TUNNEL: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0xf8];
}

/// ARP for IPv4 over Ethernet (RFC 826, "Packet format").
pub mod arp {
    /// Length in bytes of a packet.
    pub const LEN: usize = 28;
    /// The first bytes: hardware type Ethernet, protocol IPv4, address lengths 6 and 4.
    pub const ETHERNET_IPV4: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];
    /// The first bytes with hardware type IEEE 802, which Linux treats as Ethernet (RFC 1042; `arp_process`,
    /// net/ipv4/arp.c).
    pub const IEEE802_IPV4: [u8; 6] = [0, 6, 0x08, 0x00, 6, 4];
    /// Operation, 2 bytes: 1 is a request, 2 a reply.
    pub const OPERATION: usize = 6;
    /// Sender hardware address, 6 bytes.
    pub const SENDER_MAC: usize = 8;
    /// Sender protocol address, 4 bytes.
    pub const SENDER_IP: usize = 14;
    /// Target hardware address, 6 bytes.
    pub const TARGET_MAC: usize = 18;
    /// Target protocol address, 4 bytes.
    pub const TARGET_IP: usize = 24;
}

/// IPv4 (RFC 791 §3.1).
pub mod ipv4 {
    /// Length in bytes of a header without options.
    pub const HEADER: usize = 20;
    /// The first byte of a header without options: version and header length.
    pub const VERSION_IHL: u8 = 0x45;
    /// The version.
    pub const VERSION: u8 = 4;
    /// Least header length, in 32-bit words.
    pub const MIN_IHL: u8 = 5;
    /// Total length of the datagram, 2 bytes.
    pub const TOTAL_LENGTH: usize = 2;
    /// Flags and fragment offset, 2 bytes.
    pub const FRAGMENT: usize = 6;
    /// The bits of `FRAGMENT` for "more fragments" and the offset. Both are zero in an unfragmented datagram.
    pub const FRAGMENT_BITS: u16 = 0x3fff;
    /// The bit of `FRAGMENT` for "don't fragment".
    pub const DONT_FRAGMENT: u16 = 0x4000;
    /// Time to live, 1 byte.
    pub const TTL: usize = 8;
    /// Protocol, 1 byte.
    pub const PROTOCOL: usize = 9;
    /// Header checksum, 2 bytes.
    pub const CHECKSUM: usize = 10;
    /// Source address, 4 bytes.
    pub const SOURCE: usize = 12;
    /// Destination address, 4 bytes.
    pub const DESTINATION: usize = 16;
    /// Greatest header length, in bytes.
    pub const MAX_HEADER: usize = 60;
    /// Option kind: loose source and record route.
    pub const LOOSE_ROUTE: u8 = 131;
    /// Option kind: strict source and record route.
    pub const STRICT_ROUTE: u8 = 137;
}

/// IPv6 (RFC 8200 §3).
pub mod ipv6 {
    /// Length in bytes of the fixed header.
    pub const HEADER: usize = 40;
    /// The version.
    pub const VERSION: u8 = 6;
    /// Payload length, 2 bytes.
    pub const PAYLOAD_LENGTH: usize = 4;
    /// Next header, 1 byte.
    pub const NEXT_HEADER: usize = 6;
    /// Hop limit, 1 byte.
    pub const HOP_LIMIT: usize = 7;
    /// Source address, 16 bytes.
    pub const SOURCE: usize = 8;
    /// Destination address, 16 bytes.
    pub const DESTINATION: usize = 24;
    /// Maximum number of extension headers that the classifier parses in a datagram to another address. Senders need
    /// three. On our ports, a datagram with more is dropped.
    pub const MAX_EXTENSIONS: usize = 5;
    /// Offset of the addresses in a routing header (types 0, 2 and 4: RFC 5095, RFC 6275 §6.4, RFC 8754 §2).
    pub const SEGMENTS: usize = 8;
    /// Maximum number of addresses the classifier reads from a routing header. On our ports, a datagram with more is
    /// dropped.
    pub const MAX_SEGMENTS: usize = 16;
    /// The bits of the fragment offset in the third and fourth byte of a fragment header (RFC 8200 §4.5).
    pub const FRAGMENT_OFFSET: u16 = 0xfff8;
}

/// Protocol and next-header numbers (IANA "Assigned Internet Protocol Numbers").
pub mod protocol {
    /// IPv6 hop-by-hop options (RFC 8200 §4.3).
    pub const HOP_BY_HOP: u8 = 0;
    /// ICMP (RFC 792).
    pub const ICMP: u8 = 1;
    /// TCP (RFC 9293).
    pub const TCP: u8 = 6;
    /// UDP (RFC 768).
    pub const UDP: u8 = 17;
    /// IPv6 routing header (RFC 8200 §4.4).
    pub const ROUTING: u8 = 43;
    /// IPv6 fragment header (RFC 8200 §4.5).
    pub const FRAGMENT: u8 = 44;
    /// Encapsulating security payload (RFC 4303).
    pub const ESP: u8 = 50;
    /// Authentication header (RFC 4302).
    pub const AH: u8 = 51;
    /// ICMPv6 (RFC 4443).
    pub const ICMPV6: u8 = 58;
    /// IPv6 destination options (RFC 8200 §4.6).
    pub const DESTINATION_OPTIONS: u8 = 60;
    /// Mobility header (RFC 6275 §6.1).
    pub const MOBILITY: u8 = 135;
    /// Host identity protocol (RFC 7401 §5.1).
    pub const HIP: u8 = 139;
    /// Shim6 (RFC 5533 §5.1).
    pub const SHIM6: u8 = 140;
    /// The first number for experiments, also with extension headers (RFC 3692, RFC 7045 §4).
    pub const EXPERIMENT_1: u8 = 253;
    /// The second number for experiments.
    pub const EXPERIMENT_2: u8 = 254;

    /// True for the next-header value of an IPv6 extension header other than the fragment header (IANA "IPv6
    /// Extension Header Types", RFC 7045 §4).
    #[inline(always)]
    #[must_use]
    pub const fn is_extension(next_header: u8) -> bool {
        matches!(
            next_header,
            HOP_BY_HOP
                | ROUTING
                | ESP
                | AH
                | DESTINATION_OPTIONS
                | MOBILITY
                | HIP
                | SHIM6
                | EXPERIMENT_1
                | EXPERIMENT_2
        )
    }
}

/// Neighbour solicitation (RFC 4861 §4.3), an ICMPv6 message.
pub mod neighbour {
    /// The least ICMPv6 type of neighbour discovery: router solicitation (§4.1).
    pub const FIRST: u8 = 133;
    /// The greatest ICMPv6 type of neighbour discovery: redirect (§4.5).
    pub const LAST: u8 = 137;
    /// ICMPv6 type of a solicitation.
    pub const SOLICITATION: u8 = 135;
    /// Length in bytes of a message without options.
    pub const LEN: usize = 24;
    /// Type, 1 byte.
    pub const TYPE: usize = 0;
    /// Code, 1 byte; always 0.
    pub const CODE: usize = 1;
    /// Checksum, 2 bytes (RFC 4443 §2.3).
    pub const CHECKSUM: usize = 2;
    /// Target address, 16 bytes.
    pub const TARGET: usize = 8;
    /// The hop limit of a solicitation that has not crossed a router (RFC 4861 §7.1.1).
    pub const HOP_LIMIT: u8 = 255;
    /// ICMPv6 type of an advertisement (§4.4).
    pub const ADVERTISEMENT: u8 = 136;
    /// Flags of an advertisement: solicited and override.
    pub const SOLICITED_OVERRIDE: u32 = 0x6000_0000;
    /// Option type of the target's link-layer address (§4.6.1).
    pub const TARGET_LINK_ADDRESS: u8 = 2;
}

/// TCP (RFC 9293 §3.1).
pub mod tcp {
    /// Length in bytes of a header without options.
    pub const HEADER: usize = 20;
    /// Flags, 1 byte.
    pub const FLAGS: usize = 13;

    /// Sender has no more data.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// Push function.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer is valid.
    pub const URG: u8 = 0x20;

    /// Option kind: end of the list, 1 byte (§3.2).
    pub const END_OF_OPTIONS: u8 = 0;
    /// Option kind: padding, 1 byte.
    pub const NO_OPERATION: u8 = 1;
    /// Option kind: maximum segment size, 4 bytes.
    pub const SEGMENT_SIZE: u8 = 2;
    /// Option kind: window scale, 3 bytes (RFC 7323 §2.2).
    pub const WINDOW_SCALE: u8 = 3;
}
