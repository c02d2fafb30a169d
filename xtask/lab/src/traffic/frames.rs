//! The frames of a guest's ordinary traffic.

use support::tap::VNET_HDR_LEN;

/// A kind of frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The shortest frames, such as acknowledgements and DNS.
    Small,
    /// Frames of a full MTU.
    Full,
    /// Frames of 60 KB that the kernel or the NIC cuts into segments, as in every bulk transfer.
    Tso,
}

/// Octets of Ethernet, IPv4 and TCP headers without options.
const HEADERS: usize = 54;
/// Octets of payload in a segment with an MTU of 1,500.
const MSS: u16 = 1_460;

impl Kind {
    /// All kinds.
    pub(crate) const ALL: [Self; 3] = [Self::Small, Self::Full, Self::Tso];

    /// Returns the name of the kind in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Small => "64 B",
            Self::Full => "1514 B",
            Self::Tso => "60 KB TSO",
        }
    }

    /// Returns the octets of a frame without the virtio header.
    const fn len(self) -> usize {
        match self {
            Self::Small => 64,
            Self::Full => 1_514,
            Self::Tso => HEADERS + 41 * MSS as usize,
        }
    }

    /// Returns the number of frames of one measurement, which takes a few milliseconds.
    pub(crate) const fn frames(self) -> u32 {
        match self {
            Self::Small | Self::Full => 3_000,
            Self::Tso => 1_000,
        }
    }

    /// Returns a TCP segment to a neighbour behind its virtio header. The host computes the checksum, as for most
    /// guests.
    pub(crate) fn frame(self) -> Vec<u8> {
        const NEEDS_CHECKSUM: u8 = 1;
        const TCP_OVER_IPV4: u8 = 1;
        let (kind, segment) = if self == Self::Tso { (TCP_OVER_IPV4, MSS) } else { (0, 0) };
        let mut frame = Vec::with_capacity(VNET_HDR_LEN + self.len());
        frame.extend([NEEDS_CHECKSUM, kind]);
        // Length of the headers, octets of a segment, start and offset of the checksum (virtio 1.3 §5.1.6).
        for field in [HEADERS as u16, segment, 34, 16] {
            frame.extend(field.to_le_bytes());
        }
        frame.extend([0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 0x08, 0x00]);
        let datagram = (self.len() - 14) as u16;
        let mut words = [0x4500, datagram, 1, 0x4000, 0x4006, 0, 0x0a00, 0x020f, 0x0a00, 0x0210_u16];
        // A bridge that filters drops packets with a wrong header checksum (RFC 1071).
        let sum: u32 = words.iter().map(|word| u32::from(*word)).sum();
        words[5] = !((sum & 0xffff) + (sum >> 16)) as u16;
        frame.extend(words.iter().flat_map(|word| word.to_be_bytes()));
        // Ports 40000 to 5001, sequence and acknowledgement numbers, 20 octets of header, ACK.
        frame.extend([0x9c, 0x40, 0x13, 0x89, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        frame.resize(VNET_HDR_LEN + self.len(), 0x5a);
        frame
    }
}

#[cfg(test)]
mod tests {
    use super::Kind;
    use support::tap::VNET_HDR_LEN;

    #[test]
    fn a_frame_has_the_length_of_its_kind() {
        for (kind, len) in [(Kind::Small, 64), (Kind::Full, 1_514), (Kind::Tso, 59_914)] {
            assert_eq!(kind.frame().len(), VNET_HDR_LEN + len, "{kind:?}");
        }
    }
}
