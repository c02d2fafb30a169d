//! What an exchange still has to pass to the stack.

use bytes::Bytes;

use metadata_content::http::Response;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The output of an exchange. The pieces of an answer stay where the response has them, so that an answer needs no
/// queue of its own.
#[derive(Default)]
pub(super) enum Sending {
    /// No output.
    #[default]
    Nothing,
    /// `100 Continue` (RFC 9110 §15.2.1).
    Continue,
    /// An answer of `count` pieces, of which `next` is the next: the head, its tail, and the pieces of the body.
    Answer { response: Response, tail: Bytes, next: usize, count: usize },
}

impl Sending {
    /// An answer, with the tail of its head.
    pub(super) fn answer(response: Response, tail: Bytes, without_body: bool) -> Self {
        let body = response.body();
        let pieces = if without_body || body.is_empty() { 0 } else { body.pieces().len() };
        Self::Answer { response, tail, next: 0, count: 2 + pieces }
    }

    /// Takes the next piece.
    pub(super) fn take(&mut self) -> Option<Bytes> {
        let (piece, is_last) = match self {
            Self::Nothing => return None,
            Self::Continue => (Bytes::from_static(CONTINUE), true),
            Self::Answer { response, tail, next, count } => {
                let piece = match *next {
                    0 => response.head().clone(),
                    1 => std::mem::take(tail),
                    at => response.body().pieces().get(at - 2).cloned().unwrap_or_default(),
                };
                *next += 1;
                (piece, next == count)
            }
        };
        if is_last {
            *self = Self::Nothing;
        }
        Some(piece)
    }

    /// Whether there is output.
    pub(super) fn is_some(&self) -> bool {
        !matches!(self, Self::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::{CONTINUE, Sending};
    use bytes::Bytes;
    use metadata_content::http::{Body, Response, Status};

    fn all(mut sending: Sending) -> Vec<Bytes> {
        let pieces = std::iter::from_fn(|| sending.take()).collect();
        assert!(!sending.is_some());
        pieces
    }

    #[test]
    fn an_answer_is_its_head_the_tail_and_the_pieces_of_its_body() {
        let tail = Bytes::from_static(b"tail");
        for (pieces, without_body, expected) in [
            (&["a", "b", "c"][..], false, &["a", "b", "c"][..]),
            (&["a"], false, &["a"]),
            (&["a", "b"], true, &[]),
            (&[], false, &[]),
        ] {
            let body = Body::join(pieces.iter().map(|piece| Bytes::from_static(piece.as_bytes())));
            let response = Response::new(Status(200), None, &[], body);
            let head = response.head().clone();
            let found = all(Sending::answer(response, tail.clone(), without_body));
            assert_eq!(found[..2], [head, tail.clone()]);
            assert_eq!(found[2..], *expected, "{pieces:?}, without body: {without_body}");
        }
    }

    #[test]
    fn a_continue_is_one_piece() {
        assert_eq!(all(Sending::Continue), [CONTINUE]);
        assert!(all(Sending::Nothing).is_empty());
    }
}
