//! Text that others wrote, made safe to print.
//!
//! A record's author, a guest or a server may put control characters into names and messages: escape sequences that
//! rewrite a terminal, line feeds that forge a line of output, bidirectional controls that reorder it, characters that
//! nobody sees. [`Printable`] shows each of them as `\u{1b}`, as Rust writes it. [`PrintableWriter`] escapes all
//! that is written to a terminal, so that a printer which forgets is safe except for line feeds.

use std::fmt::{self, Display, Write as _};
use std::io;

/// Characters that are shown as escapes: those of a terminal's protocol, those that change the order or position of
/// text, and those without a shape (Unicode's categories Cc, Cf, Zl and Zp, fillers and variation selectors).
const ESCAPED: [(char, char); 23] = [
    ('\0', '\u{1f}'),
    ('\u{7f}', '\u{9f}'),
    ('\u{ad}', '\u{ad}'),
    ('\u{600}', '\u{605}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{6dd}', '\u{6dd}'),
    ('\u{70f}', '\u{70f}'),
    ('\u{890}', '\u{891}'),
    ('\u{8e2}', '\u{8e2}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180b}', '\u{180f}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{fe00}', '\u{fe0f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{110bd}', '\u{110cd}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0000}', '\u{e0fff}'),
];

/// True if a terminal, a log or a page shows the character as itself, and in its place.
#[must_use]
pub fn is_printable(c: char) -> bool {
    matches!(c, ' '..='~') || !ESCAPED.iter().any(|(from, to)| (*from..=*to).contains(&c))
}

/// A value whose text others wrote. It is displayed on one line, in its order, with its unprintable characters as
/// escapes.
#[derive(Clone, Copy, Debug)]
pub struct Printable<T>(pub T);

impl<T: Display> Display for Printable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With a width, the escapes count.
        if f.width().is_some() || f.precision().is_some() {
            return f.pad(&printable(&self.0));
        }
        write!(Escaper { into: f, keeps: |_| false }, "{}", self.0)
    }
}

/// The text of a value as [`Printable`] shows it.
#[must_use]
pub fn printable(value: impl Display) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    _ = write!(Escaper { into: &mut text, keeps: |_| false }, "{value}");
    text
}

/// Text of several lines, each as [`Printable`] shows it.
#[must_use]
pub fn printable_lines(value: impl Display) -> String {
    let mut text = String::new();
    _ = write!(Escaper { into: &mut text, keeps: |c| matches!(c, '\n' | '\t') }, "{value}");
    text
}

struct Escaper<W> {
    into: W,
    keeps: fn(char) -> bool,
}

impl<W: fmt::Write> fmt::Write for Escaper<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(|c| !is_printable(c) && !(self.keeps)(c)) {
            let (plain, escaped) = rest.split_at(at);
            self.into.write_str(plain)?;
            let mut chars = escaped.chars();
            if let Some(c) = chars.next() {
                write!(self.into, "{}", c.escape_unicode())?;
            }
            rest = chars.as_str();
        }
        self.into.write_str(rest)
    }
}

/// The UTF-16 units of a character, as JSON's escapes name them.
pub fn json_units(c: char) -> impl Iterator<Item = u16> {
    let mut units = [0; 2];
    let length = c.encode_utf16(&mut units).len();
    units.into_iter().take(length)
}

/// Longest character of UTF-8, in bytes.
const CHAR_BYTES: usize = 4;

/// Writes text with its unprintable characters as escapes, except line feeds and tabs. The escapes are those of JSON
/// (RFC 8259 §7), which has these characters only in strings, so that a document keeps its meaning. Bytes that are not
/// UTF-8 become `\xff`. A character may come in several writes.
#[derive(Debug)]
pub struct PrintableWriter<W: io::Write> {
    into: W,
    /// The beginning of a character whose rest has not come.
    begun: Vec<u8>,
}

impl<W: io::Write> PrintableWriter<W> {
    /// Writes into `into`.
    pub fn new(into: W) -> Self {
        Self { into, begun: Vec::with_capacity(CHAR_BYTES) }
    }

    fn put(&mut self, text: &str) -> io::Result<()> {
        let mut rest = text;
        while let Some(at) = rest.find(|c| !is_printable(c) && !matches!(c, '\n' | '\t')) {
            let (plain, escaped) = rest.split_at(at);
            self.into.write_all(plain.as_bytes())?;
            let mut chars = escaped.chars();
            for unit in chars.next().iter().flat_map(|c| json_units(*c)) {
                write!(self.into, "\\u{unit:04x}")?;
            }
            rest = chars.as_str();
        }
        self.into.write_all(rest.as_bytes())
    }

    fn put_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        bytes.iter().try_for_each(|byte| write!(self.into, "\\x{byte:02x}"))
    }
}

impl<W: io::Write> io::Write for PrintableWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let whole = match self.begun.is_empty() {
            true => None,
            false => Some([&std::mem::take(&mut self.begun)[..], bytes].concat()),
        };
        let mut rest = whole.as_deref().unwrap_or(bytes);
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.put(text)?;
                    break;
                }
                Err(error) => {
                    let (valid, others) = rest.split_at(error.valid_up_to());
                    // It is valid as far as this.
                    self.put(&String::from_utf8_lossy(valid))?;
                    let Some(invalid) = error.error_len() else {
                        self.begun.extend_from_slice(others);
                        break;
                    };
                    let (invalid, others) = others.split_at(invalid);
                    self.put_bytes(invalid)?;
                    rest = others;
                }
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.into.flush()
    }
}

impl<W: io::Write> Drop for PrintableWriter<W> {
    fn drop(&mut self) {
        let begun = std::mem::take(&mut self.begun);
        // Nobody is left to hear of an error.
        _ = self.put_bytes(&begun);
    }
}

/// A number with its noun, which takes an `s` unless the number is 1.
#[must_use]
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Returns two lower-case digits for each byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a String cannot fail");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::{Printable, PrintableWriter, is_printable, printable_lines};
    use std::io::Write as _;

    #[test]
    fn unprintable_characters_are_shown_as_escapes() {
        for (text, expected) in [
            ("web-1 é 漢 😀", "web-1 é 漢 😀"),
            ("\x1b]0;x\x07", "\\u{1b}]0;x\\u{7}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("a\nb\tc\rd", "a\\u{a}b\\u{9}c\\u{d}d"),
            ("\u{202e}txt\u{2066}", "\\u{202e}txt\\u{2066}"),
            ("a\u{200b}\u{feff}\u{e0041}", "a\\u{200b}\\u{feff}\\u{e0041}"),
            ("\u{2028}\u{7f}\0", "\\u{2028}\\u{7f}\\u{0}"),
        ] {
            assert_eq!(Printable(text).to_string(), expected);
        }
        assert_eq!(format!("[{:8}]", Printable("a\n")), "[a\\u{a}  ]", "the escapes count");
        assert_eq!(printable_lines("a\n\x1bb"), "a\n\\u{1b}b");
    }

    #[test]
    fn every_control_of_unicode_is_unprintable() {
        assert!(('\0'..=char::MAX).filter(|c| c.is_control()).all(|c| !is_printable(c)));
    }

    #[test]
    fn a_writer_escapes_what_arrives_in_any_pieces() {
        let text = "a\u{1b}[2J\u{9b}é\u{202e}漢\n\u{e0041}".as_bytes();
        let bytes = [text, b"\xff\xc3"].concat();
        for size in 1..=bytes.len() {
            let expected = "a\\u001b[2J\\u009bé\\u202e漢\n\\udb40\\udc41\\xff\\xc3";
            let mut out = Vec::new();
            let mut writer = PrintableWriter::new(&mut out);
            bytes.chunks(size).for_each(|piece| writer.write_all(piece).expect("room"));
            drop(writer);
            assert_eq!(String::from_utf8(out).expect("text"), expected, "{size}");
        }
    }
}
