//! Writes YAML that every parser reads as the same value.
//!
//! Guests use PyYAML (YAML 1.1), Go's and other parsers, which disagree on plain `no`, `12:30`, `1_000` or
//! `2030-01-01`. So a string is plain only if every parser reads it as that string, and double-quoted otherwise.
//! Characters that may not be literal are escaped by code point, because YAML has no surrogate pairs.

use std::fmt::Write as _;

use serde_json::{Number, Value};

/// Words that a YAML 1.1 parser reads as a boolean or null, in lower case.
const WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

/// Returns a document in block style with a final newline.
pub fn document(value: &Value) -> String {
    let mut text = String::new();
    node(value, 0, &mut text);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Returns a string as a scalar on one line, without the newline.
pub(super) fn scalar(value: &str) -> String {
    let mut text = String::new();
    string(value, &mut text);
    text
}

/// Writes a value. Non-empty collections start at `indent` on a new line.
fn node(value: &Value, indent: usize, text: &mut String) {
    match value {
        Value::Object(members) if !members.is_empty() => {
            for (key, value) in members {
                pad(indent, text);
                string(key, text);
                text.push(':');
                below(value, indent + 2, text);
            }
        }
        Value::Array(members) if !members.is_empty() => {
            for value in members {
                pad(indent, text);
                text.push('-');
                below(value, indent + 2, text);
            }
        }
        Value::Object(_) => text.push_str("{}"),
        Value::Array(_) => text.push_str("[]"),
        Value::Null => text.push_str("null"),
        Value::Bool(value) => text.push_str(if *value { "true" } else { "false" }),
        Value::Number(value) => number(value, text),
        Value::String(value) => string(value, text),
    }
}

/// Writes the value after `key:` or `-`.
fn below(value: &Value, indent: usize, text: &mut String) {
    let members = value.as_object().map_or(0, serde_json::Map::len) + value.as_array().map_or(0, Vec::len);
    if members > 0 {
        text.push('\n');
        node(value, indent, text);
    } else {
        text.push(' ');
        node(value, indent, text);
        text.push('\n');
    }
}

fn pad(indent: usize, text: &mut String) {
    text.extend(std::iter::repeat_n(' ', indent));
}

/// Writes a number so that YAML 1.1 reads a number: fractions have a point and no exponent.
fn number(value: &Number, text: &mut String) {
    let written = match value.as_f64() {
        Some(float) if value.is_f64() => format!("{float}"),
        _ => value.to_string(),
    };
    text.push_str(&written);
    if value.is_f64() && !written.contains('.') {
        text.push_str(".0");
    }
}

fn string(value: &str, text: &mut String) {
    if is_plain(value) {
        text.push_str(value);
        return;
    }
    text.push('"');
    let mut rest = value;
    while let Some(at) = rest.find(|c| matches!(c, '"' | '\\') || !is_literal(c)) {
        let (literal, other) = rest.split_at(at);
        text.push_str(literal);
        let mut others = other.chars();
        if let Some(c) = others.next() {
            escape(c, text);
        }
        rest = others.as_str();
    }
    text.push_str(rest);
    text.push('"');
}

fn escape(c: char, text: &mut String) {
    match u32::from(c) {
        0x22 | 0x5c => write!(text, "\\{c}"),
        0x09 => write!(text, "\\t"),
        0x0a => write!(text, "\\n"),
        0x0d => write!(text, "\\r"),
        code @ 0..=0xff => write!(text, "\\x{code:02x}"),
        code @ 0x100..=0xffff => write!(text, "\\u{code:04x}"),
        code => write!(text, "\\U{code:08x}"),
    }
    .expect("writing to a String cannot fail");
}

/// Returns whether a string is plain: it starts with a letter, has only letters, digits and `-_./`, and is not a
/// boolean or null in any version of YAML.
fn is_plain(value: &str) -> bool {
    value.starts_with(|c: char| c.is_ascii_alphabetic())
        && value.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/'))
        && !WORDS.iter().any(|word| value.eq_ignore_ascii_case(word))
}

/// Returns whether the character is printable in YAML 1.1 and 1.2 (section 5.1) and no line break (section 5.4) or byte
/// order mark.
fn is_literal(c: char) -> bool {
    matches!(c, ' '..='~' | '\u{a0}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
        && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::document;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn strings_are_plain_only_if_every_parser_reads_them_as_strings() {
        for (value, written) in [
            ("web-1.example", "web-1.example\n"),
            ("", "\"\"\n"),
            ("no", "\"no\"\n"),
            ("On", "\"On\"\n"),
            ("NULL", "\"NULL\"\n"),
            ("~", "\"~\"\n"),
            ("12:30:45", "\"12:30:45\"\n"),
            ("1_000", "\"1_000\"\n"),
            ("0x1f", "\"0x1f\"\n"),
            ("2030-01-01", "\"2030-01-01\"\n"),
            ("1e3", "\"1e3\"\n"),
            (".inf", "\".inf\"\n"),
            ("<<", "\"<<\"\n"),
            ("a: b", "\"a: b\"\n"),
            ("a\nb\tc\"\\", "\"a\\nb\\tc\\\"\\\\\"\n"),
            ("\0\u{85}\u{2028}\u{ffff}", "\"\\x00\\x85\\u2028\\uffff\"\n"),
            ("🚀", "\"🚀\"\n"),
        ] {
            assert_eq!(document(&value.into()), written);
        }
    }

    #[test]
    fn collections_are_written_in_block_style() {
        let value = json!({"a": {"b": [1, {"c": true, "d": null}, []], "e": {}}, "f": 1.5, "g": 1e20});
        let written = "a:\n  b:\n    - 1\n    -\n      c: true\n      d: null\n    - []\n  e: {}\nf: 1.5\n\
                       g: 100000000000000000000.0\n";
        assert_eq!(document(&value), written);
    }

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<String>().prop_map(Value::from),
            "[-+0-9a-fA-FxX:._~ #?&*!|>%@`'\"nyoNYO]{0,8}".prop_map(Value::from),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            Just(Value::Null),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec((any::<String>(), inner), 0..5).prop_map(Value::from_iter),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_written_value_reads_back_equal(value in values()) {
            let written = document(&value);
            let read: Value = serde_yaml::from_str(&written).expect(&written);
            prop_assert_eq!(read, value, "{}", written);
        }
    }
}
