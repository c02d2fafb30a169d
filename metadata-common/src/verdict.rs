//! The outcome of each frame in the programs, with its reason.
//!
//! A verdict's number is its index in the `COUNTERS` map. Its name is its label in the metrics. Every frame
//! is counted, so unexpected frames show up in a counter.

/// What a verdict does to its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Leave the frame to the host's network, unchanged.
    Pass,
    /// Send the frame on: to the hub, to the AF_XDP socket, or to the guest.
    Steer,
    /// Turn the frame into its answer and send it back.
    Answer,
    /// Process the frame; no answer is needed.
    Absorb,
    /// Discard the frame.
    Drop,
}

macro_rules! verdicts {
    ($($(#[doc = $doc:literal])+ $variant:ident => $fate:ident, $name:literal;)+) => {
        /// The outcome of a frame with its reason; the number indexes `COUNTERS`.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Verdict {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Verdict {
            /// Every verdict, in the order of the numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The label in the metrics: lower-case words joined by underscores.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// What happens to the frame.
            #[inline(always)]
            #[must_use]
            pub const fn fate(self) -> Fate {
                match self { $(Self::$variant => Fate::$fate,)+ }
            }
        }
    };
}

verdicts! {
    /// `port`: the frame is shorter than its type requires.
    PassTruncated => Pass, "pass_truncated";
    /// `port`: the frame is neither ARP nor IP.
    PassEthertype => Pass, "pass_ethertype";
    /// `port`: ARP for an address that is neither served nor a next hop, or ARP for a next hop on a closed
    /// port.
    PassArp => Pass, "pass_arp";
    /// `port`: ARP for a protocol other than IPv4 or for hardware other than Ethernet or IEEE 802.
    PassArpFormat => Pass, "pass_arp_format";
    /// `port`: IPv4 to an address that is not served. Classifiers count only few of these frames: those with
    /// options or tags, those to or from an address whose last byte a served address has too, and those that a
    /// trace includes.
    PassIpv4 => Pass, "pass_ipv4";
    /// `port`: IPv6 to an address that is not served, or a solicitation for one.
    PassIpv6 => Pass, "pass_ipv6";
    /// `port`: a VLAN-tagged frame that is not for a served address.
    PassVlan => Pass, "pass_vlan";
    /// `port`: a frame for a served address on an interface that is not a registered port.
    PassForeignPort => Pass, "pass_foreign_port";

    /// `port`: ARP for a served address or for a next hop towards one.
    SteerArp => Steer, "steer_arp";
    /// `port`: TCP to a served IPv4 address.
    SteerIpv4Tcp => Steer, "steer_ipv4_tcp";
    /// `port`: ICMP to a served IPv4 address.
    SteerIpv4Icmp => Steer, "steer_ipv4_icmp";
    /// `port`: a neighbour solicitation for a served address.
    SteerNeighbour => Steer, "steer_neighbour";
    /// `port`: TCP to a served IPv6 address.
    SteerIpv6Tcp => Steer, "steer_ipv6_tcp";
    /// `port`: ICMPv6 to a served IPv6 address.
    SteerIpv6Icmp => Steer, "steer_ipv6_icmp";

    /// `port`: the kernel answered an ARP request.
    AnswerArp => Answer, "answer_arp";
    /// `port`: the kernel answered a neighbour solicitation.
    AnswerNeighbour => Answer, "answer_neighbour";
    /// `port`: the kernel answered a SYN with a SYN cookie.
    AnswerSyn => Answer, "answer_syn";
    /// `port`: the kernel answered a request with a published document.
    AnswerRequest => Answer, "answer_request";
    /// `port`: the kernel acknowledged a guest's FIN on a connection that has ended.
    AnswerFin => Answer, "answer_fin";
    /// `port`: the kernel consumed an acknowledgement that user space does not need.
    AbsorbAck => Absorb, "absorb_ack";

    /// `port`: a VLAN-tagged frame for a served address.
    DropVlan => Drop, "drop_vlan";
    /// `port`: more VLAN tags than the classifier parses.
    DropVlanDepth => Drop, "drop_vlan_depth";
    /// `port`: a frame for a served address with LLC and SNAP headers, VLAN-tagged or not.
    DropSnap => Drop, "drop_snap";
    /// `port`: ARP for a served address with hardware type IEEE 802.
    DropArpFormat => Drop, "drop_arp_format";
    /// `port`: ARP in which a guest claims a served address as its own.
    DropArpClaim => Drop, "drop_arp_claim";
    /// `port`: a neighbour advertisement for a served address, or neighbour discovery sent from one.
    DropNeighbourClaim => Drop, "drop_neighbour_claim";
    /// `port`: IP with a served address as source.
    DropSourceClaim => Drop, "drop_source_claim";
    /// `port`: IP to a served address in a frame with a group MAC as destination (RFC 1122 §3.3.6).
    DropGroupDestination => Drop, "drop_group_destination";
    /// `port`: a datagram to a served IPv4 address with an invalid version or header length.
    DropIpv4Malformed => Drop, "drop_ipv4_malformed";
    /// `port`: a datagram to a served IPv4 address with options.
    DropIpv4Options => Drop, "drop_ipv4_options";
    /// `port`: IPv4 to another address with a source route through a served address.
    DropIpv4SourceRoute => Drop, "drop_ipv4_source_route";
    /// `port`: a fragment to a served IPv4 address.
    DropIpv4Fragment => Drop, "drop_ipv4_fragment";
    /// `port`: UDP to a served IPv4 address.
    DropIpv4Udp => Drop, "drop_ipv4_udp";
    /// `port`: a protocol other than TCP, ICMP or UDP, to a served IPv4 address.
    DropIpv4Protocol => Drop, "drop_ipv4_protocol";
    /// `port`: a datagram to a served IPv6 address with an invalid version.
    DropIpv6Malformed => Drop, "drop_ipv6_malformed";
    /// `port`: IPv6 to another address with a routing header through a served address, with two routing
    /// headers, or with more extension headers or addresses than the classifier parses.
    DropIpv6Routing => Drop, "drop_ipv6_routing";
    /// `port`: IPv6 to an address that translates to a served IPv4 address.
    DropTranslated => Drop, "drop_translated";
    /// `port`: IPv6 with an extension header to a served address, or a solicitation for one.
    DropIpv6Extension => Drop, "drop_ipv6_extension";
    /// `port`: a fragment to a served IPv6 address.
    DropIpv6Fragment => Drop, "drop_ipv6_fragment";
    /// `port`: UDP to a served IPv6 address.
    DropIpv6Udp => Drop, "drop_ipv6_udp";
    /// `port`: a protocol other than TCP, ICMPv6 or UDP, to a served IPv6 address.
    DropIpv6Protocol => Drop, "drop_ipv6_protocol";
    /// `port`: a solicitation for a served address that has crossed a router or has a nonzero code (RFC 4861
    /// §7.1.1).
    DropNeighbourInvalid => Drop, "drop_neighbour_invalid";
    /// `port`: the source MAC is a group address or is not registered on the port.
    DropUnknownMac => Drop, "drop_unknown_mac";
    /// `port`: a frame for a served address on a port that is closed because it has no record.
    DropGuarded => Drop, "drop_guarded";
    /// `port`: the port's bucket of frames is empty.
    DropOverLimit => Drop, "drop_over_limit";
    /// `port`: a SYN for which the port's bucket of new connections is empty.
    DropOverConnectionLimit => Drop, "drop_over_connection_limit";
    /// `port`: the identity's hub has no device.
    DropNoHub => Drop, "drop_no_hub";
    /// `port`: the kernel refused a write that the classifier had checked. `request_tcx`: there is no memory to complete
    /// the answer, or the answer or its port is gone.
    DropUnwritable => Drop, "drop_unwritable";
    /// `port_tcx`: the frame is longer than the hub accepts, or its segments would be smaller than any
    /// client's.
    DropOversize => Drop, "drop_oversize";

    /// `socket`: delivered to the AF_XDP socket of its queue.
    SocketDelivered => Steer, "socket_delivered";
    /// `socket`: the queue has no AF_XDP socket.
    SocketDropAbsent => Drop, "socket_drop_absent";

    /// `ring`: written to the ring of its hub.
    RingDelivered => Steer, "ring_delivered";
    /// `ring`: the ring is full, or half full while the port is far beyond its rate, or the kernel refused
    /// the copy.
    RingDropFull => Drop, "ring_drop_full";
    /// `port_tcx`, in a namespace other than the hub's: the hub has no ring.
    RingDropAbsent => Drop, "ring_drop_absent";

    /// `hub`, `hub_tcx`: sent to the guest's port.
    HubDelivered => Steer, "hub_delivered";
    /// `hub`, `hub_tcx`: the frame is shorter than an Ethernet header.
    HubDropTruncated => Drop, "hub_drop_truncated";
    /// `hub`, `hub_tcx`: the destination MAC is not a stamp.
    HubDropUnstamped => Drop, "hub_drop_unstamped";
    /// `hub`, `hub_tcx`: the slot in the stamp is not in use.
    HubDropNoGuest => Drop, "hub_drop_no_guest";
    /// `hub`: the guest's port is gone. `hub_tcx`: the guest's port is gone or now accepts redirected frames.
    HubDropNoDevice => Drop, "hub_drop_no_device";
}

impl Verdict {
    /// The number of verdicts, which is the number of entries of `COUNTERS`.
    pub const COUNT: u32 = Self::ALL.len() as u32;

    /// The index in `COUNTERS`.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self as u32
    }

    /// The verdict with this number; `None` from [`Verdict::COUNT`] on.
    #[must_use]
    pub fn from_index(index: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::{Fate, Verdict};
    use std::collections::BTreeSet;

    #[test]
    fn a_verdict_is_found_by_its_number() {
        for (index, verdict) in (0..).zip(Verdict::ALL) {
            assert_eq!(verdict.index(), index, "{verdict:?}");
            assert_eq!(Verdict::from_index(index), Some(*verdict));
        }
        assert_eq!(Verdict::from_index(Verdict::COUNT), None);
    }

    #[test]
    fn names_are_distinct_lower_case_labels() {
        let names: BTreeSet<_> = Verdict::ALL.iter().map(|v| v.name()).collect();
        assert_eq!(names.len(), Verdict::ALL.len());
        for name in names {
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
        }
    }

    #[test]
    fn names_contain_the_fate() {
        for verdict in Verdict::ALL {
            let matches = match verdict.fate() {
                Fate::Pass => verdict.name().starts_with("pass_"),
                Fate::Steer => verdict.name().starts_with("steer_") || verdict.name().ends_with("_delivered"),
                Fate::Answer => verdict.name().starts_with("answer_"),
                Fate::Absorb => verdict.name().starts_with("absorb_"),
                Fate::Drop => verdict.name().contains("drop_"),
            };
            assert!(matches, "{verdict:?} is called {}", verdict.name());
        }
    }
}
