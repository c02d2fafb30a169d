//! Request bodies: their framing and how they are read (RFC 9112 §6, §7).

use super::{Headers, RequestError};

/// Maximum length of a request body, in bytes.
pub const BODY_MAX: usize = 64 * 1024;
/// Maximum number of digits of a chunk size, leading zeros included.
const SIZE_DIGITS_MAX: usize = 8;
/// Maximum bytes of chunk extensions and trailer fields of one body. The reader ignores their content.
const CHUNK_EXTRA_MAX: usize = 2048;

/// How the end of a body is determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// The request has no body.
    Absent,
    /// The body has this many bytes.
    Length(usize),
    /// The body ends with the last chunk.
    Chunked,
}

impl Framing {
    /// Determines the framing of a request (RFC 9112 §6.3).
    ///
    /// # Errors
    ///
    /// Refuses `Transfer-Encoding` beside `Content-Length` or in HTTP/1.0, which request smuggling uses (§6.1). Refuses
    /// several `Content-Length` fields that differ. Refuses chunked twice or before another coding, because the end of
    /// the body is then unknown (§6.3).
    pub fn of(headers: &Headers<'_>, is_1_1: bool) -> Result<Self, RequestError> {
        let mut length = None;
        for value in headers.all("content-length") {
            let one = length_of(value)?;
            if length.is_some_and(|other| other != one) {
                return Err(RequestError::Length);
            }
            length = Some(one);
        }
        let coding = headers.contains("transfer-encoding");
        match (coding, length) {
            (true, Some(_)) => Err(RequestError::Length),
            (true, None) if !is_1_1 => Err(RequestError::Length),
            (true, None) => Self::coded(headers),
            (false, None | Some(0)) => Ok(Self::Absent),
            (false, Some(length)) if length > BODY_MAX => Err(RequestError::BodyTooLarge),
            (false, Some(length)) => Ok(Self::Length(length)),
        }
    }

    /// Determines the framing from the transfer codings, a list over one or more fields (RFC 9110 §5.6.1).
    fn coded(headers: &Headers<'_>) -> Result<Self, RequestError> {
        let items = headers.all("transfer-encoding").flat_map(|value| value.split(|byte| *byte == b','));
        let (mut count, mut chunked, mut last) = (0, 0, false);
        for coding in items.map(<[u8]>::trim_ascii).filter(|coding| !coding.is_empty()) {
            last = coding.eq_ignore_ascii_case(b"chunked");
            chunked += usize::from(last);
            count += 1;
        }
        match (last && chunked == 1, count) {
            (true, 1) => Ok(Self::Chunked),
            (true, _) => Err(RequestError::Coding),
            (false, _) => Err(RequestError::Length),
        }
    }
}

/// Parses a decimal length. A number beyond `usize` also exceeds the body limit.
fn length_of(value: &[u8]) -> Result<usize, RequestError> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(RequestError::Length);
    }
    let text = std::str::from_utf8(value).map_err(|_| RequestError::Length)?;
    text.parse().map_err(|_| RequestError::BodyTooLarge)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// In a body of known length or in a chunk. This many bytes remain.
    Data(usize),
    Size {
        digits: usize,
        value: usize,
    },
    Extension {
        value: usize,
    },
    /// After the CR that follows a size; LF is next.
    SizeEnd {
        value: usize,
    },
    DataCr,
    DataLf,
    /// At the start of a trailer line.
    TrailerStart,
    Trailer,
    TrailerLf,
    /// After the CR of the final empty line.
    LastLf,
    Done,
}

/// Reads one body.
#[derive(Clone, Debug)]
pub struct BodyReader {
    stage: Stage,
    chunked: bool,
    total: usize,
    extra: usize,
    keep: bool,
}

impl BodyReader {
    /// Creates a reader. Without `keep` it counts the bytes and discards them.
    #[must_use]
    pub fn new(framing: Framing, keep: bool) -> Self {
        let stage = match framing {
            Framing::Absent => Stage::Done,
            Framing::Length(length) => Stage::Data(length),
            Framing::Chunked => Stage::Size { digits: 0, value: 0 },
        };
        Self { stage, chunked: framing == Framing::Chunked, total: 0, extra: 0, keep }
    }

    /// Returns whether the body is complete.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.stage == Stage::Done
    }

    /// Consumes bytes up to the end of the body and returns their number.
    ///
    /// # Errors
    ///
    /// Fails at the first byte that violates the chunked coding or a limit.
    pub fn take(&mut self, bytes: &[u8], body: &mut Vec<u8>) -> Result<usize, RequestError> {
        let mut at = 0;
        while at < bytes.len() && !self.is_done() {
            if let Stage::Data(remaining) = self.stage {
                let taken = remaining.min(bytes.len() - at);
                if self.keep {
                    body.extend_from_slice(&bytes[at..at + taken]);
                }
                at += taken;
                self.stage = match (remaining - taken, self.chunked) {
                    (0, true) => Stage::DataCr,
                    (0, false) => Stage::Done,
                    (remaining, _) => Stage::Data(remaining),
                };
            } else {
                self.stage = self.framing_byte(bytes[at])?;
                at += 1;
            }
        }
        Ok(at)
    }

    fn framing_byte(&mut self, byte: u8) -> Result<Stage, RequestError> {
        match (self.stage, byte) {
            (Stage::Size { digits, value }, _) if byte.is_ascii_hexdigit() && digits < SIZE_DIGITS_MAX => {
                let digit = char::from(byte).to_digit(16).unwrap_or(0) as usize;
                Ok(Stage::Size { digits: digits + 1, value: value << 4 | digit })
            }
            (Stage::Size { digits: 1.., value }, b';' | b' ' | b'\t') => Ok(Stage::Extension { value }),
            (Stage::Size { digits: 1.., value } | Stage::Extension { value }, b'\r') => {
                Ok(Stage::SizeEnd { value })
            }
            (Stage::Extension { value }, _) if byte != b'\n' => {
                self.ignore()?;
                Ok(Stage::Extension { value })
            }
            (Stage::SizeEnd { value: 0 }, b'\n') => Ok(Stage::TrailerStart),
            (Stage::SizeEnd { value }, b'\n') => {
                self.total += value;
                if self.total > BODY_MAX { Err(RequestError::BodyTooLarge) } else { Ok(Stage::Data(value)) }
            }
            (Stage::DataCr, b'\r') => Ok(Stage::DataLf),
            (Stage::DataLf, b'\n') => Ok(Stage::Size { digits: 0, value: 0 }),
            (Stage::TrailerStart, b'\r') => Ok(Stage::LastLf),
            (Stage::LastLf, b'\n') => Ok(Stage::Done),
            (Stage::Trailer, b'\r') => Ok(Stage::TrailerLf),
            (Stage::TrailerLf, b'\n') => Ok(Stage::TrailerStart),
            (Stage::TrailerStart | Stage::Trailer, _) if byte != b'\n' => {
                self.ignore()?;
                Ok(Stage::Trailer)
            }
            _ => Err(RequestError::Chunk),
        }
    }

    fn ignore(&mut self) -> Result<(), RequestError> {
        self.extra += 1;
        if self.extra > CHUNK_EXTRA_MAX { Err(RequestError::Chunk) } else { Ok(()) }
    }
}
