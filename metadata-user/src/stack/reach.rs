//! Octets that may not travel far: which of those sent bear a hop limit of their own.
//!
//! An answer that carries a session token leaves with a small IP TTL, so that it dies at the first router
//! behind the guest's own stack (a container's bridge, a proxy). smoltcp has one hop limit per socket and
//! knows no boundaries in its send buffer, so each such stretch of the stream is remembered by sequence
//! number until the guest has acknowledged it, and the IP header of a segment that carries any of it is
//! rewritten on its way out, retransmissions included.

use smoltcp::wire::{Ipv4Packet, Ipv6Packet};

use super::config::STRETCHES_PER_CONNECTION;

/// Hop limit of everything else; smoltcp's default, and what Linux uses.
pub(super) const HOP_LIMIT: u8 = 64;

/// Octets `from..to` of the sequence space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    from: u32,
    to: u32,
    hop_limit: u8,
}

/// The unacknowledged stretches of one connection, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Reach(Vec<Stretch>);

/// True when `a` comes before `b` in the sequence space (RFC 9293 §3.4).
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Reach {
    /// True when one more stretch can be remembered.
    pub(super) fn has_room(&self) -> bool {
        self.0.len() < STRETCHES_PER_CONNECTION
    }

    /// Remembers that `octets` octets from `from` on have this hop limit. They follow all those before.
    pub(super) fn add(&mut self, from: u32, octets: usize, hop_limit: u8) {
        let to = from.wrapping_add(octets as u32);
        match self.0.last_mut() {
            Some(last) if last.to == from && last.hop_limit == hop_limit => last.to = to,
            _ => self.0.push(Stretch { from, to, hop_limit }),
        }
    }

    /// Forgets what the guest has acknowledged: everything before `next`.
    pub(super) fn acknowledged(&mut self, next: u32) {
        self.0.retain(|stretch| before(next, stretch.to));
    }

    /// The smallest hop limit of the octets `from..to`, of which there is at least one; `None` where all
    /// have the usual one.
    pub(super) fn limit(&self, from: u32, to: u32) -> Option<u8> {
        let touched = self.0.iter().filter(|stretch| before(from, stretch.to) && before(stretch.from, to));
        touched.map(|stretch| stretch.hop_limit).min()
    }
}

/// Sets the hop limit of a whole IP packet, and completes the IPv4 header's checksum.
pub(super) fn rewrite(packet: &mut [u8], hop_limit: u8) {
    if packet[0] >> 4 == 4 {
        let mut packet = Ipv4Packet::new_unchecked(packet);
        packet.set_hop_limit(hop_limit);
        packet.fill_checksum();
    } else {
        Ipv6Packet::new_unchecked(packet).set_hop_limit(hop_limit);
    }
}

#[cfg(test)]
mod tests {
    use super::Reach;

    #[test]
    fn a_segment_takes_the_smallest_limit_of_the_octets_it_carries() {
        // Also where the sequence numbers start over.
        for base in [0_u32, 1000, u32::MAX - 150] {
            let at = |offset: u32| base.wrapping_add(offset);
            let mut reach = Reach::default();
            reach.add(at(100), 50, 1);
            reach.add(at(150), 50, 1);
            reach.add(at(200), 50, 3);
            assert_eq!(reach.0.len(), 2);
            let cases = [
                (0, 100, None),
                (0, 101, Some(1)),
                (199, 200, Some(1)),
                (199, 201, Some(1)),
                (200, 201, Some(3)),
                (249, 400, Some(3)),
                (250, 400, None),
                (0, 400, Some(1)),
            ];
            for (from, to, limit) in cases {
                assert_eq!(reach.limit(at(from), at(to)), limit, "{from}..{to} from {base}");
            }
            reach.acknowledged(at(199));
            assert_eq!(reach.limit(at(0), at(400)), Some(1));
            reach.acknowledged(at(200));
            assert_eq!(reach.limit(at(0), at(400)), Some(3));
            reach.acknowledged(at(250));
            assert_eq!(reach.limit(at(0), at(400)), None);
        }
    }
}
