//! Writes XML whose elements are closed by construction and whose text is escaped, so that pages and images are
//! well-formed for any results.

use std::fmt::{Display, Write as _};

/// An attribute and its value.
pub(crate) type Attribute<'a> = (&'a str, &'a dyn Display);

/// A document being written.
#[derive(Default)]
pub(crate) struct Xml {
    out: String,
}

impl Xml {
    /// Returns the document.
    pub(crate) fn finish(self) -> String {
        self.out
    }

    /// Writes an element with the content that `inside` writes.
    pub(crate) fn within(&mut self, tag: &str, attributes: &[Attribute<'_>], inside: impl FnOnce(&mut Self)) {
        self.start(tag, attributes);
        self.out.push('>');
        inside(self);
        let _ = write!(self.out, "</{tag}>");
    }

    /// Writes an element without content: a shape, or one of HTML's void elements.
    pub(crate) fn empty(&mut self, tag: &str, attributes: &[Attribute<'_>]) {
        self.start(tag, attributes);
        self.out.push_str("/>");
    }

    /// Writes an element with text, and a line end after it.
    pub(crate) fn line(&mut self, tag: &str, attributes: &[Attribute<'_>], text: impl Display) {
        self.within(tag, attributes, |xml| xml.text(text));
        self.out.push('\n');
    }

    /// Writes text, escaped.
    pub(crate) fn text(&mut self, text: impl Display) {
        let text = text.to_string();
        self.escape(&text);
    }

    /// Writes constant markup unchanged: a style sheet or a document type.
    pub(crate) fn verbatim(&mut self, text: &'static str) {
        self.out.push_str(text);
    }

    fn start(&mut self, tag: &str, attributes: &[Attribute<'_>]) {
        let _ = write!(self.out, "<{tag}");
        for (name, value) in attributes {
            let _ = write!(self.out, " {name}=\"");
            let value = value.to_string();
            self.escape(&value);
            self.out.push('"');
        }
    }

    fn escape(&mut self, text: &str) {
        for character in text.chars() {
            match character {
                '&' => self.out.push_str("&amp;"),
                '<' => self.out.push_str("&lt;"),
                '>' => self.out.push_str("&gt;"),
                '"' => self.out.push_str("&quot;"),
                // XML 1.0 §2.2 cannot express the other control characters.
                '\t' | '\n' | '\r' | ' '.. if !matches!(character, '\u{fffe}' | '\u{ffff}') => {
                    self.out.push(character)
                }
                _ => self.out.push('\u{fffd}'),
            }
        }
    }
}

/// A coordinate, rounded to a tenth of a unit. Values that are not finite become 0.
pub(crate) struct At(pub(crate) f64);

impl Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = if self.0.is_finite() { self.0 } else { 0.0 };
        write!(f, "{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::{At, Xml};

    #[test]
    fn text_and_attributes_are_escaped() {
        let mut xml = Xml::default();
        xml.within("p", &[("title", &"a\"b<c")], |xml| xml.text("1 < 2 & \u{1}3 > \"2\""));
        assert_eq!(
            xml.finish(),
            "<p title=\"a&quot;b&lt;c\">1 &lt; 2 &amp; \u{fffd}3 &gt; &quot;2&quot;</p>"
        );
    }

    #[test]
    fn a_coordinate_that_is_not_finite_becomes_zero() {
        assert_eq!(At(f64::NAN).to_string(), "0.0");
        assert_eq!(At(f64::INFINITY).to_string(), "0.0");
        assert_eq!(At(12.345).to_string(), "12.3");
    }
}
