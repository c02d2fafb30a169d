//! What is to be sent: a line of shared pieces, cut into segments wherever a segment ends.
//!
//! Nothing is copied before it goes into a frame, and to send something again is to cut again. A piece is
//! let go when its last octet has been acknowledged. An answer with a session token leaves with a small
//! hop limit, so that it dies at the first router behind the guest's own stack (a container's bridge, a
//! proxy): each piece has its limit, and a segment the smallest of those it carries any octet of.

use bytes::Bytes;
use std::collections::VecDeque;

use super::config::PIECES_PER_CONNECTION;
use super::emit::HOP_LIMIT;

struct Piece {
    bytes: Bytes,
    hop_limit: u8,
}

/// The pieces of one connection that are not acknowledged yet.
pub(super) struct Outbox {
    pieces: VecDeque<Piece>,
    /// Number of the first octet of the first piece.
    start: u32,
    /// The number after the last octet of the last piece.
    end: u32,
}

impl Outbox {
    /// An empty line whose first octet will be numbered `start`.
    pub(super) fn new(start: u32) -> Self {
        Self { pieces: VecDeque::new(), start, end: start }
    }

    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// True at [`PIECES_PER_CONNECTION`].
    pub(super) fn is_full(&self) -> bool {
        self.pieces.len() >= PIECES_PER_CONNECTION
    }

    /// Puts a piece at the end of the line; an empty one is none.
    pub(super) fn push(&mut self, bytes: Bytes, hop_limit: Option<u8>) {
        if !bytes.is_empty() {
            self.end = self.end.wrapping_add(bytes.len() as u32);
            let hop_limit = hop_limit.map_or(HOP_LIMIT, |limit| limit.clamp(1, HOP_LIMIT));
            self.pieces.push_back(Piece { bytes, hop_limit });
        }
    }

    /// Lets go of the pieces all of whose octets come before `una`.
    pub(super) fn acknowledged(&mut self, una: u32) {
        while let Some(piece) = self.pieces.front()
            && una.wrapping_sub(self.start) as usize >= piece.bytes.len()
        {
            self.start = self.start.wrapping_add(piece.bytes.len() as u32);
            self.pieces.pop_front();
        }
    }

    /// Copies octets from number `from` on, as many as `place` has room for, all of which are in line.
    /// Returns the hop limit of a segment that carries them.
    pub(super) fn copy(&self, from: u32, place: &mut [u8]) -> u8 {
        let mut skip = from.wrapping_sub(self.start) as usize;
        let mut hop_limit = HOP_LIMIT;
        let mut done = 0;
        for piece in &self.pieces {
            if done == place.len() {
                break;
            }
            if skip >= piece.bytes.len() {
                skip -= piece.bytes.len();
                continue;
            }
            let take = (piece.bytes.len() - skip).min(place.len() - done);
            place[done..done + take].copy_from_slice(&piece.bytes[skip..skip + take]);
            hop_limit = hop_limit.min(piece.hop_limit);
            done += take;
            skip = 0;
        }
        hop_limit
    }
}

#[cfg(test)]
mod tests {
    use super::Outbox;
    use bytes::Bytes;

    #[test]
    fn any_cut_carries_its_octets_and_the_smallest_limit_of_the_pieces_it_touches() {
        // Also where the sequence numbers start over.
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
