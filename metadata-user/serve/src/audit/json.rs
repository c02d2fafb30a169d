//! JSON whose strings a terminal shows as they are.

use std::io;

use metadata_base::printable::{is_printable, json_units};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Appends a document on one line. Guests choose paths, and tenants names; serde_json escapes only what RFC 8259 §7
/// requires, which leaves the controls beyond ASCII that rewrite a terminal or reorder its text.
///
/// # Errors
/// The document cannot be serialized.
pub fn write(out: &mut Vec<u8>, document: &impl Serialize) -> serde_json::Result<()> {
    document.serialize(&mut Serializer::with_formatter(out, PrintableFormatter))
}

struct PrintableFormatter;

impl Formatter for PrintableFormatter {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some(at) = rest.find(|c| !is_printable(c)) {
            let (plain, escaped) = rest.split_at(at);
            out.write_all(plain.as_bytes())?;
            let mut chars = escaped.chars();
            for unit in chars.next().iter().flat_map(|c| json_units(*c)) {
                write!(out, "\\u{unit:04x}")?;
            }
            rest = chars.as_str();
        }
        out.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::write;

    #[test]
    fn unprintable_characters_are_escapes_and_the_value_stays() {
        let text = "/a\x1b[2J\u{9b}\u{202e}é\u{e0041}\"\n";
        let mut out = Vec::new();
        write(&mut out, &text).expect("JSON");
        let line = String::from_utf8(out).expect("text");
        assert_eq!(line, r#""/a\u001b[2J\u009b\u202eé\udb40\udc41\"\n""#);
        assert_eq!(serde_json::from_str::<String>(&line).expect("JSON"), text);
    }
}
