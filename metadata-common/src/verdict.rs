//! What becomes of a frame, and why: every verdict of the programs.
//!
//! A verdict's number is its index in the `COUNTERS` map and its name is its label in the metrics, so a
//! frame nobody expected is found by reading a counter.

/// What a verdict does to its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Left to the host's network, untouched.
    Pass,
    /// Sent on its way: to the hub, to the AF_XDP socket, or to the guest.
    Steer,
    /// Turned into its answer and sent back.
    Answer,
    /// Taken note of, and needing no answer.
    Absorb,
    /// Thrown away.
    Drop,
}

macro_rules! verdicts {
    ($($(#[doc = $doc:literal])+ $variant:ident => $fate:ident, $name:literal;)+) => {
        /// Why a frame passed, was steered, answered or dropped; its number indexes `COUNTERS`.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Verdict {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl Verdict {
            /// Every verdict, by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The label in the metrics: lower case, words joined by underscores.
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
    /// `port`: too short for what its type announces.
    PassTruncated => Pass, "pass_truncated";
    /// `port`: neither ARP nor IP.
    PassEthertype => Pass, "pass_ethertype";
    /// `port`: ARP for an address that is neither served nor the next hop of one, or for that on a closed port.
    PassArp => Pass, "pass_arp";
    /// `port`: ARP for something else than IPv4 over Ethernet, or over IEEE 802 networks.
    PassArpFormat => Pass, "pass_arp_format";
    /// `port`: IPv4 to an address that is not served.
    PassIpv4 => Pass, "pass_ipv4";
    /// `port`: IPv6 to, or a solicitation for, an address that is not served.
    PassIpv6 => Pass, "pass_ipv6";
    /// `port`: VLAN-tagged, for no served address.
    PassVlan => Pass, "pass_vlan";
    /// `port`: for a served address, on an interface that is not a registered port.
    PassForeignPort => Pass, "pass_foreign_port";

    /// `port`: ARP for a served address, or for the next hop of one.
    SteerArp => Steer, "steer_arp";
    /// `port`: TCP over IPv4.
    SteerIpv4Tcp => Steer, "steer_ipv4_tcp";
    /// `port`: ICMP.
    SteerIpv4Icmp => Steer, "steer_ipv4_icmp";
    /// `port`: a neighbour solicitation for a served address.
    SteerNeighbour => Steer, "steer_neighbour";
    /// `port`: TCP over IPv6.
    SteerIpv6Tcp => Steer, "steer_ipv6_tcp";
    /// `port`: ICMPv6 to a served address.
    SteerIpv6Icmp => Steer, "steer_ipv6_icmp";

    /// `port`: an ARP request, answered.
    AnswerArp => Answer, "answer_arp";
    /// `port`: a neighbour solicitation, answered.
    AnswerNeighbour => Answer, "answer_neighbour";
    /// `port`: a SYN, answered with a number that remembers it.
    AnswerSyn => Answer, "answer_syn";
    /// `port`: a guest's FIN on a connection that has ended, acknowledged.
    AnswerFin => Answer, "answer_fin";
    /// `port`: an acknowledgement that says nothing new.
    AbsorbAck => Absorb, "absorb_ack";

    /// `port`: VLAN-tagged, for a served address.
    DropVlan => Drop, "drop_vlan";
    /// `port`: more VLAN tags than are looked behind.
    DropVlanDepth => Drop, "drop_vlan_depth";
    /// `port`: for a served address, with its type behind LLC and SNAP, tagged or not.
    DropSnap => Drop, "drop_snap";
    /// `port`: ARP for a served address, for hardware of type IEEE 802.
    DropArpFormat => Drop, "drop_arp_format";
    /// `port`: ARP from a guest that says a served address is its own.
    DropArpClaim => Drop, "drop_arp_claim";
    /// `port`: a neighbour advertisement of a served address, or neighbour discovery from one.
    DropNeighbourClaim => Drop, "drop_neighbour_claim";
    /// `port`: IP from a served address.
    DropSourceClaim => Drop, "drop_source_claim";
    /// `port`: to a served address, but sent to a group of stations (RFC 1122 §3.3.6).
    DropGroupDestination => Drop, "drop_group_destination";
    /// `port`: to a served address, with a version or header length IPv4 does not have.
    DropIpv4Malformed => Drop, "drop_ipv4_malformed";
    /// `port`: to a served address, with IPv4 options.
    DropIpv4Options => Drop, "drop_ipv4_options";
    /// `port`: IPv4 to elsewhere, with a source route through a served address.
    DropIpv4SourceRoute => Drop, "drop_ipv4_source_route";
    /// `port`: a fragment to a served IPv4 address.
    DropIpv4Fragment => Drop, "drop_ipv4_fragment";
    /// `port`: UDP to a served IPv4 address.
    DropIpv4Udp => Drop, "drop_ipv4_udp";
    /// `port`: neither TCP, ICMP nor UDP, to a served IPv4 address.
    DropIpv4Protocol => Drop, "drop_ipv4_protocol";
    /// `port`: to a served address, with a version IPv6 does not have.
    DropIpv6Malformed => Drop, "drop_ipv6_malformed";
    /// `port`: IPv6 to elsewhere, with a routing header through a served address; or with two, or with more extension
    /// headers or addresses than are looked at.
    DropIpv6Routing => Drop, "drop_ipv6_routing";
    /// `port`: to an IPv6 address that is translated into a served IPv4 address.
    DropTranslated => Drop, "drop_translated";
    /// `port`: to, or a solicitation for, a served address, with an IPv6 extension header.
    DropIpv6Extension => Drop, "drop_ipv6_extension";
    /// `port`: a fragment to a served IPv6 address.
    DropIpv6Fragment => Drop, "drop_ipv6_fragment";
    /// `port`: UDP to a served IPv6 address.
    DropIpv6Udp => Drop, "drop_ipv6_udp";
    /// `port`: neither TCP, ICMPv6 nor UDP, to a served IPv6 address.
    DropIpv6Protocol => Drop, "drop_ipv6_protocol";
    /// `port`: a solicitation for a served address that has crossed a router or has a code (RFC 4861 §7.1.1).
    DropNeighbourInvalid => Drop, "drop_neighbour_invalid";
    /// `port`: from a MAC that is not registered on the port, or from a group address.
    DropUnknownMac => Drop, "drop_unknown_mac";
    /// `port`: for a served address, on a port that is closed because it has no record.
    DropGuarded => Drop, "drop_guarded";
    /// `port`: the port's bucket of frames is empty.
    DropOverLimit => Drop, "drop_over_limit";
    /// `port`: a SYN, and the port's bucket of new connections is empty.
    DropOverConnectionLimit => Drop, "drop_over_connection_limit";
    /// `port`: the identity names a hub without a device.
    DropNoHub => Drop, "drop_no_hub";
    /// `port`: the kernel refused a write the classifier had made sure of.
    DropUnwritable => Drop, "drop_unwritable";
    /// `port_tcx`: longer than the hub takes, or to be cut into more segments than a client's would be.
    DropOversize => Drop, "drop_oversize";

    /// `socket`: given to the AF_XDP socket of its queue.
    SocketDelivered => Steer, "socket_delivered";
    /// `socket`: no AF_XDP socket on that queue.
    SocketDropAbsent => Drop, "socket_drop_absent";

    /// `ring`: put into the ring of its hub.
    RingDelivered => Steer, "ring_delivered";
    /// `ring`: the ring is full, or half full and the port has sent much; or the kernel refused the copy.
    RingDropFull => Drop, "ring_drop_full";
    /// `port_tcx`, in another namespace than the hub: the hub has no ring.
    RingDropAbsent => Drop, "ring_drop_absent";

    /// `hub`, `hub_tcx`: sent to the guest's port.
    HubDelivered => Steer, "hub_delivered";
    /// `hub`, `hub_tcx`: shorter than an Ethernet header.
    HubDropTruncated => Drop, "hub_drop_truncated";
    /// `hub`, `hub_tcx`: the destination MAC is no stamp.
    HubDropUnstamped => Drop, "hub_drop_unstamped";
    /// `hub`, `hub_tcx`: the stamp names a slot nobody holds.
    HubDropNoGuest => Drop, "hub_drop_no_guest";
    /// `hub`: the guest's port is gone. `hub_tcx`: it has just begun to take redirected frames, too.
    HubDropNoDevice => Drop, "hub_drop_no_device";
}

impl Verdict {
    /// How many there are: the entries of `COUNTERS`.
    pub const COUNT: u32 = Self::ALL.len() as u32;

    /// The number, an index into `COUNTERS`.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self as u32
    }

    /// The verdict of a number, or `None` from [`Verdict::COUNT`] on.
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
    fn every_number_leads_back_to_its_verdict() {
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
    fn names_say_the_fate() {
        for verdict in Verdict::ALL {
            let said = match verdict.fate() {
                Fate::Pass => verdict.name().starts_with("pass_"),
                Fate::Steer => verdict.name().starts_with("steer_") || verdict.name().ends_with("_delivered"),
                Fate::Answer => verdict.name().starts_with("answer_"),
                Fate::Absorb => verdict.name().starts_with("absorb_"),
                Fate::Drop => verdict.name().contains("drop_"),
            };
            assert!(said, "{verdict:?} is called {}", verdict.name());
        }
    }
}
