//! Why a text cannot be parsed, in the words of whoever wrote it: the messages of the parsers name types of Rust, and
//! some do not say what to do.

use std::fmt;

/// Why a text cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line and column, counted from 1; `None` if unknown.
    pub position: Option<(usize, usize)>,
    /// The field, such as `network.nics[0].mac`; empty for the whole document.
    pub field: String,
    /// What is wrong. It may repeat a value of the text.
    pub reason: String,
}

impl ParseError {
    /// The line of the fault, counted from 1; 0 if unknown.
    #[must_use]
    pub fn line(&self) -> usize {
        self.position.map_or(0, |(line, _)| line)
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() && !self.reason.starts_with(&self.field) {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&plain(&self.reason))?;
        match self.position {
            Some((line, column)) => write!(f, " at line {line} column {column}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ParseError {}

/// The types of Rust and of its parsers, in the words of anyone who writes a document.
const TYPES: [(&str, &str); 22] = [
    ("u8", "a whole number from 0 to 255"),
    ("u16", "a whole number from 0 to 65535"),
    ("u32", "a whole number from 0 to 4294967295"),
    ("u64", "a whole number, 0 or more"),
    ("usize", "a whole number, 0 or more"),
    ("i8", "a whole number"),
    ("i16", "a whole number"),
    ("i32", "a whole number"),
    ("i64", "a whole number"),
    ("f32", "a number"),
    ("f64", "a number"),
    ("a string", "text"),
    ("string", "text"),
    ("string scalar", "text"),
    ("path string", "a path"),
    ("a sequence", "a list"),
    ("sequence", "a list"),
    ("sequence start", "a list"),
    ("a map", "a mapping"),
    ("map", "a mapping"),
    ("mapping start", "a mapping"),
    ("a boolean", "true or false"),
];
/// The words that serde puts before a value that it shows.
const KINDS: [&str; 5] = ["string ", "integer ", "floating point ", "boolean ", "character "];
/// Messages of the standard library's parsers, with an example of what they parse.
const SYNTAXES: [(&str, &str); 5] = [
    ("expected value", "expected a value of JSON, found something else"),
    ("invalid IP address syntax", "expected an IP address such as 192.0.2.1 or 2001:db8::1"),
    ("invalid IPv4 address syntax", "expected an IPv4 address such as 192.0.2.1"),
    ("invalid IPv6 address syntax", "expected an IPv6 address such as 2001:db8::1"),
    (
        "invalid socket address syntax",
        "expected an address and a port such as 127.0.0.1:9177 or \"[::1]:9177\"",
    ),
];

/// Beginnings of messages of the parsers that are for programmers, or do not say what to do.
const FAULTS: [(&str, &str); 3] = [
    ("EOF while parsing", "the text ends too early; is the file whole?"),
    (
        "multiple YAML documents",
        "expected one document, found a second one after `---`; remove it, or give it a file of its own",
    ),
    ("tabs disallowed", "expected spaces, found a tab, by which YAML does not indent"),
];
/// Length of the longest unknown field that is compared with the known ones, in bytes.
const COMPARED_MAX: usize = 64;
/// Most known fields that are listed where one of them is near.
const LISTED_MAX: usize = 12;

/// The known field that somebody who wrote `found` probably meant: at most every third character differs.
fn nearest<'a>(found: &str, fields: &'a str) -> Option<&'a str> {
    if found.len() > COMPARED_MAX {
        return None;
    }
    let known = fields.split(", ").flat_map(|some| some.split(" or ")).map(|field| field.trim_matches('`'));
    let far = |field: &str| strsim::osa_distance(found, field);
    known.min_by_key(|field| far(field)).filter(|field| 3 * far(field) <= found.chars().count())
}

/// The reason of a [`ParseError`] without the names of Rust's types. Other texts stay as they are.
#[must_use]
pub fn plain(reason: &str) -> String {
    let is_whole = SYNTAXES.iter().find(|(text, _)| *text == reason);
    if let Some((_, words)) = is_whole.or_else(|| FAULTS.iter().find(|(start, _)| reason.starts_with(start)))
    {
        return (*words).to_owned();
    }
    if let Some(rest) = reason.strip_prefix("unknown field `")
        && let Some((found, fields)) = rest.split_once("`, ")
    {
        let fields = fields.trim_start_matches("expected ").trim_start_matches("one of ");
        return match nearest(found, fields) {
            Some(near) if fields.split(", ").count() > LISTED_MAX => {
                format!("unknown field; did you mean `{near}`?")
            }
            Some(near) => format!("unknown field; did you mean `{near}`? The fields here are {fields}"),
            None => format!("unknown field; the fields here are {fields}"),
        };
    }
    if let Some(rest) = reason.strip_prefix("unknown variant `")
        && let Some((found, words)) = rest.split_once("`, expected ")
    {
        // A single word is no choice.
        let words = if words.contains(',') { words } else { words.trim_start_matches("one of ") };
        return format!("expected {words}, found `{found}`");
    }
    // A list that stands where a mapping is expected is read as one that has too few values.
    if reason.starts_with("invalid length ") && reason.ends_with(", expected a mapping") {
        return "expected a mapping, found a list".to_owned();
    }
    if let Some(field) = reason.strip_prefix("missing field ") {
        return format!("the field {field} is missing");
    }
    let typed = ["invalid type: ", "invalid value: "].iter().find_map(|start| reason.strip_prefix(start));
    // A value that is shown may contain these words too, so the last ones count.
    if let Some((found, expected)) = typed.and_then(|rest| rest.rsplit_once(", expected ")) {
        let expected = TYPES.iter().find(|(name, _)| *name == expected).map_or(expected, |(_, words)| words);
        let found = match KINDS.iter().find_map(|kind| found.strip_prefix(kind)) {
            Some(value) => value,
            None if found == "null" || found == "unit value" => "nothing (null)",
            None if found == "string" => "some text",
            None if found == "number" => "a number",
            None if found == "boolean" => "true or false",
            None => TYPES.iter().find(|(name, _)| *name == found).map_or(found, |(_, words)| words),
        };
        return format!("expected {expected}, found {found}");
    }
    match reason.strip_prefix("expected ").and_then(|name| TYPES.iter().find(|(known, _)| *known == name)) {
        Some((_, words)) => format!("expected {words}"),
        None => reason.to_owned(),
    }
}

/// The field that a reason says is there twice.
pub(super) fn repeated(reason: &str) -> Option<&str> {
    let starts = ["duplicate field `", "expected each key once, found `"];
    let rest = starts.iter().find_map(|start| reason.strip_prefix(start))?;
    rest.split('`').next()
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn reasons_are_in_the_words_of_whoever_writes_a_document() {
        for (reason, expected) in [
            (
                "invalid type: string \"x\", expected u32",
                "expected a whole number from 0 to 4294967295, found \"x\"",
            ),
            ("invalid value: integer `-7`, expected u64", "expected a whole number, 0 or more, found `-7`"),
            ("invalid type: null, expected path string", "expected a path, found nothing (null)"),
            ("invalid type: number, expected a mapping", "expected a mapping, found a number"),
            ("invalid type: map, expected a sequence", "expected a list, found a mapping"),
            (
                "invalid type: string \"a, expected b\", expected a boolean",
                "expected true or false, found \"a, expected b\"",
            ),
            ("unknown variant `x`, expected `all` or `none`", "expected `all` or `none`, found `x`"),
            ("unknown variant `x`, expected one of a", "expected a, found `x`"),
            ("unknown variant `x`, expected one of a, b", "expected one of a, b, found `x`"),
            ("unknown field `x`, expected one of `a`, `b`", "unknown field; the fields here are `a`, `b`"),
            ("unknown field `x`, expected `a`", "unknown field; the fields here are `a`"),
            (
                "unknown field `hsots`, expected one of hub, hosts",
                "unknown field; did you mean `hosts`? The fields here are hub, hosts",
            ),
            (
                "unknown field `groop`, expected `group` or `instances`",
                "unknown field; did you mean `group`? The fields here are `group` or `instances`",
            ),
            (
                "unknown field `z`, expected one of `a`, `b`, `c`, `d`, `e`, `f`, `g`, `h`, `i`, `j`, `k`, `l`, `m`",
                "unknown field; the fields here are `a`, `b`, `c`, `d`, `e`, `f`, `g`, `h`, `i`, `j`, `k`, `l`, `m`",
            ),
            (
                "unknown field `hsots`, expected one of a, b, c, d, e, f, g, h, i, j, k, l, hosts",
                "unknown field; did you mean `hosts`?",
            ),
            ("expected value", "expected a value of JSON, found something else"),
            ("missing field `keys`", "the field `keys` is missing"),
            ("expected string scalar", "expected text"),
            ("expected a mood", "expected a mood"),
        ] {
            assert_eq!(plain(reason), expected);
        }
    }
}
