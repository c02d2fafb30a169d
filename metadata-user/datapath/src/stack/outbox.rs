//! The output queue: shared pieces, cut into segments at any octet.
//!
//! Data is copied only into frames, and a retransmission cuts the pieces again. A piece is dropped once its last
//! octet is acknowledged. An answer with a session token has a small hop limit, so that the first router behind the
//! guest's own stack (a container's bridge, a proxy) drops it. Each piece has a limit, and a segment uses the
//! smallest limit of the pieces it carries.

use bytes::Bytes;
use smallvec::SmallVec;
use std::io::IoSlice;

use super::config::PIECES_PER_CONNECTION;
use super::emit::HOP_LIMIT;

/// Pieces that a connection stores in itself: head, its tail, and body of an answer. More of them are on the heap.
const OWN_PIECES: usize = 3;

struct Piece {
    bytes: Bytes,
    hop_limit: u8,
}

/// The unacknowledged pieces of one connection.
pub(super) struct Outbox {
    pieces: SmallVec<[Piece; OWN_PIECES]>,
    /// The sequence number of the first octet of the first piece.
    start: u32,
    /// The sequence number after the last octet of the last piece.
    end: u32,
}

impl Outbox {
    /// Creates an empty queue whose first octet has the number `start`.
    pub(super) fn new(start: u32) -> Self {
        Self { pieces: SmallVec::new(), start, end: start }
    }

    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Reads the first piece and its reference count.
    pub(super) fn touch(&self) -> u64 {
        self.pieces.first().map_or(0, |piece| u64::from(piece.bytes.is_unique()))
    }

    /// Whether the queue holds [`PIECES_PER_CONNECTION`].
    pub(super) fn is_full(&self) -> bool {
        self.pieces.len() >= PIECES_PER_CONNECTION
    }

    /// Appends a piece; an empty one is ignored. The hop limit is clamped to 1 to 64.
    pub(super) fn push(&mut self, bytes: Bytes, hop_limit: Option<u8>) {
        if !bytes.is_empty() {
            self.end = self.end.wrapping_add(bytes.len() as u32);
            let hop_limit = hop_limit.map_or(HOP_LIMIT, |limit| limit.clamp(1, HOP_LIMIT));
            self.pieces.push(Piece { bytes, hop_limit });
        }
    }

    /// Drops the pieces that end at or before `una`.
    pub(super) fn acknowledged(&mut self, una: u32) {
        let mut done = 0;
        while let Some(piece) = self.pieces.get(done)
            && una.wrapping_sub(self.start) as usize >= piece.bytes.len()
        {
            self.start = self.start.wrapping_add(piece.bytes.len() as u32);
            done += 1;
        }
        self.pieces.drain(..done);
    }

    /// The octets from number `from` on, piece by piece, each with its hop limit.
    fn from(&self, from: u32) -> impl Iterator<Item = (&[u8], u8)> {
        let mut skip = from.wrapping_sub(self.start) as usize;
        self.pieces.iter().filter_map(move |Piece { bytes, hop_limit }| {
            if skip >= bytes.len() {
                skip -= bytes.len();
                return None;
            }
            Some((&bytes[std::mem::take(&mut skip)..], *hop_limit))
        })
    }

    /// The octets from number `from` on that one frame may carry: those of pieces with one hop limit.
    pub(super) fn run(&self, from: u32) -> u32 {
        let mut pieces = self.from(from).peekable();
        let limit = pieces.peek().map(|(_, limit)| *limit);
        pieces.take_while(|(_, other)| Some(*other) == limit).map(|(octets, _)| octets.len() as u32).sum()
    }

    /// Lends `octets` octets from number `from` on, all of which must be in one [`run`](Self::run), as pieces in
    /// `places`. Returns how many pieces, and their hop limit.
    pub(super) fn lend<'a>(
        &'a self,
        from: u32,
        octets: u32,
        places: &mut [IoSlice<'a>; PIECES_PER_CONNECTION + 1],
    ) -> (usize, u8) {
        let (mut left, mut count, mut smallest) = (octets as usize, 0, HOP_LIMIT);
        for (place, (piece, hop_limit)) in places.iter_mut().zip(self.from(from)) {
            if left == 0 {
                break;
            }
            let take = piece.len().min(left);
            *place = IoSlice::new(&piece[..take]);
            (left, count, smallest) = (left - take, count + 1, smallest.min(hop_limit));
        }
        (count, smallest)
    }

    /// Fills `place` with the octets from number `from` on, all of which must be queued. Returns the hop limit of a
    /// segment that carries them.
    pub(super) fn copy(&self, from: u32, place: &mut [u8]) -> u8 {
        let (mut done, mut smallest) = (0, HOP_LIMIT);
        for (piece, hop_limit) in self.from(from) {
            if done == place.len() {
                break;
            }
            let take = piece.len().min(place.len() - done);
            place[done..done + take].copy_from_slice(&piece[..take]);
            (done, smallest) = (done + take, smallest.min(hop_limit));
        }
        smallest
    }
}

#[cfg(test)]
mod tests {
    use super::{Outbox, PIECES_PER_CONNECTION};
    use bytes::Bytes;
    use std::io::IoSlice;

    #[test]
    fn a_run_ends_at_another_hop_limit_and_is_lent_without_a_copy() {
        let whole: Vec<u8> = (0..250).collect();
        let mut outbox = Outbox::new(u32::MAX - 100);
        for (range, limit) in [(0..100, None), (100..180, None), (180..200, Some(1)), (200..250, None)] {
            outbox.push(Bytes::copy_from_slice(&whole[range]), limit);
        }
        for (from, run, pieces, limit) in [
            (0, 180, 2, 64),
            (99, 81, 2, 64),
            (100, 80, 1, 64),
            (185, 15, 1, 1),
            (200, 50, 1, 64),
            (250, 0, 0, 64),
        ] {
            let number = (u32::MAX - 100).wrapping_add(from);
            assert_eq!(outbox.run(number), run, "from {from}");
            let mut places = [IoSlice::new(&[]); PIECES_PER_CONNECTION + 1];
            assert_eq!(outbox.lend(number, run, &mut places), (pieces, limit), "from {from}");
            let lent: Vec<u8> = places[..pieces].iter().flat_map(|piece| piece.iter().copied()).collect();
            assert_eq!(lent, whole[from as usize..(from + run) as usize], "from {from}");
        }
    }

    #[test]
    fn any_cut_has_its_octets_and_the_smallest_limit_of_its_pieces() {
        // Includes a base where the sequence numbers wrap.
        for base in [0_u32, 1000, u32::MAX - 150] {
            let at = |offset: usize| base.wrapping_add(offset as u32);
            let whole: Vec<u8> = (0..250).collect();
            let mut outbox = Outbox::new(base);
            let pieces = [(0..100, None), (100..150, Some(1)), (150..200, Some(3)), (200..250, Some(0))];
            for (range, limit) in pieces {
                outbox.push(Bytes::copy_from_slice(&whole[range]), limit);
                outbox.push(Bytes::new(), Some(1));
            }
            assert_eq!(outbox.end(), at(250));
            let cases = [
                (0, 100, 64),
                (0, 101, 1),
                (149, 150, 1),
                (149, 151, 1),
                (150, 151, 3),
                (150, 200, 3),
                (199, 250, 1),
                (0, 250, 1),
            ];
            for (from, to, limit) in cases {
                let mut cut = vec![0; to - from];
                assert_eq!(outbox.copy(at(from), &mut cut), limit, "{from}..{to} from {base}");
                assert_eq!(cut, whole[from..to]);
            }
            outbox.acknowledged(at(149));
            let mut cut = [0; 1];
            assert_eq!((outbox.copy(at(149), &mut cut), cut), (1, [149]));
            outbox.acknowledged(at(150));
            assert_eq!((outbox.copy(at(150), &mut cut), cut, outbox.pieces.len()), (3, [150], 2));
            outbox.acknowledged(at(250));
            assert_eq!((outbox.pieces.len(), outbox.start), (0, at(250)));
        }
    }
}
