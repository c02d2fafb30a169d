//! Requests as text with placeholders, which differ between guests only in a MAC and a token.

use super::super::peer::OWN_MAC;
use super::plan::TOKEN;
use metadata_common::mac::Mac;

/// Octets of a MAC in text.
const MAC_TEXT: usize = 17;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    Mac,
    Token,
}

/// The requests of a boot.
#[derive(Clone, Debug)]
pub(super) struct Requests(Vec<Vec<Piece>>);

impl Requests {
    pub(super) fn new(texts: &[String]) -> Self {
        Self(texts.iter().map(|text| pieces(text)).collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the octets of one request.
    pub(super) fn length(&self, request: usize, token: &[u8]) -> usize {
        let length = |piece: &Piece| match piece {
            Piece::Text(text) => text.len(),
            Piece::Mac => MAC_TEXT,
            Piece::Token => token.len(),
        };
        self.0[request].iter().map(length).sum()
    }

    /// Writes one request.
    pub(super) fn write(&self, out: &mut Vec<u8>, request: usize, mac: Mac, token: &[u8]) {
        for piece in &self.0[request] {
            match piece {
                Piece::Text(text) => out.extend_from_slice(text),
                Piece::Mac => write_mac(out, mac),
                Piece::Token => out.extend_from_slice(token),
            }
        }
    }
}

fn write_mac(out: &mut Vec<u8>, mac: Mac) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (n, octet) in mac.0.into_iter().enumerate() {
        if n > 0 {
            out.push(b':');
        }
        out.extend([DIGITS[usize::from(octet >> 4)], DIGITS[usize::from(octet & 15)]]);
    }
}

fn pieces(mut text: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    loop {
        let next = [(OWN_MAC, Piece::Mac), (TOKEN, Piece::Token)].into_iter();
        let next = next.filter_map(|(mark, piece)| Some((text.find(mark)?, mark, piece)));
        let Some((at, mark, piece)) = next.min_by_key(|(at, ..)| *at) else { break };
        pieces.extend([Piece::Text(text[..at].into()), piece]);
        text = &text[at + mark.len()..];
    }
    pieces.push(Piece::Text(text.into()));
    pieces
}

#[cfg(test)]
mod tests {
    use super::Requests;
    use metadata_common::mac::Mac;

    #[test]
    fn placeholders_are_filled_and_counted() {
        let requests = Requests::new(&["GET /{mac}/x?{mac} t: {token}".into(), "plain".into()]);
        let mac = Mac([0x52, 0x54, 0, 0x0a, 0xbc, 0xff]);
        for (number, expected) in [(0, "GET /52:54:00:0a:bc:ff/x?52:54:00:0a:bc:ff t: secret"), (1, "plain")]
        {
            let mut out = Vec::new();
            requests.write(&mut out, number, mac, b"secret");
            assert_eq!(String::from_utf8_lossy(&out), expected);
            assert_eq!(requests.length(number, b"secret"), expected.len());
        }
    }
}
