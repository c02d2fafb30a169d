//! JSON documents that share long strings and can be walked.
//!
//! A long string, such as user-data that a thousand VMs have, is stored once for all documents. The rest is the
//! skeleton, which has an empty string in place of each long one. So each VM stores only what differs, and a part can
//! be read without rendering the whole.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::route_builder::{JSON, TEXT};
use crate::http::{Body, Response, StatusCode};
use crate::store::{Interner, LiveOutcome, LiveRequest, LiveRoute, Notation};

/// Minimum length of a string that is stored outside the skeleton, in bytes.
const LONG: usize = 256;

/// Initial capacity of a skeleton, in bytes; most need no more.
const USUAL: usize = 2 << 10;

/// Placeholder of a long string.
const STAND_IN: &[u8] = b"\"\"";

/// A JSON document.
pub(super) struct JsonDocument {
    skeleton: Bytes,
    /// Long strings, in the order of their positions.
    long: Box<[Long]>,
}

/// A string stored outside the skeleton.
struct Long {
    /// Position of its placeholder.
    at: usize,
    /// Escaped, without quotation marks. Other responses share a string that needs no escapes, such as base64.
    escaped: Bytes,
}

impl std::fmt::Debug for JsonDocument {
    /// Prints only the length: the document may hold passwords and user-data.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Document({} bytes)", self.body().len())
    }
}

impl JsonDocument {
    /// Renders `value`, with the members of objects in alphabetical order.
    pub(super) fn new(value: &Value, interner: &mut Interner) -> Self {
        let (mut skeleton, mut long) = (Vec::with_capacity(USUAL), Vec::new());
        write(value, &mut skeleton, &mut |string, at| {
            let escaped = if string.bytes().any(is_escaped) {
                interner.written(Notation::Json, string, || {
                    let mut quoted = quoted(string);
                    quoted.pop();
                    quoted.split_off(1)
                })
            } else {
                interner.copy_of(string.as_bytes())
            };
            long.push(Long { at, escaped });
        });
        skeleton.shrink_to_fit();
        Self { skeleton: skeleton.into(), long: long.into() }
    }

    /// Returns the whole document.
    pub(super) fn body(&self) -> Body {
        self.expand(0..self.skeleton.len())
    }

    /// Returns the root.
    pub(super) fn root(&self) -> DocumentNode<'_> {
        let text = std::str::from_utf8(&self.skeleton).expect("the skeleton was rendered from text");
        DocumentNode { document: self, text }
    }

    /// Returns the part at a path below the root: empty, or `/a/b`.
    pub(super) fn at(&self, path: &str) -> Option<DocumentNode<'_>> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(self.root(), |node, name| node.member(|member| member == name))
    }

    /// Returns a part of the skeleton with the long strings filled in.
    fn expand(&self, part: Range<usize>) -> Body {
        let mut pieces = Vec::new();
        let mut copied = part.start;
        for Long { at, escaped } in self.long.iter().filter(|long| part.contains(&long.at)) {
            pieces.push(self.skeleton.slice(copied..at + 1));
            pieces.push(escaped.clone());
            copied = at + 1;
        }
        pieces.push(self.skeleton.slice(copied..part.end));
        Body::join(pieces)
    }
}

/// Writes a value. Strings too long for the skeleton go to `outside` with their positions.
fn write(value: &Value, text: &mut Vec<u8>, outside: &mut impl FnMut(&str, usize)) {
    match value {
        Value::Object(members) => {
            text.push(b'{');
            for (n, (key, value)) in members.iter().enumerate() {
                if n > 0 {
                    text.push(b',');
                }
                scalar(key, text);
                text.push(b':');
                write(value, text, outside);
            }
            text.push(b'}');
        }
        Value::Array(members) => {
            text.push(b'[');
            for (n, value) in members.iter().enumerate() {
                if n > 0 {
                    text.push(b',');
                }
                write(value, text, outside);
            }
            text.push(b']');
        }
        Value::String(string) if string.len() >= LONG => {
            outside(string, text.len());
            text.extend_from_slice(STAND_IN);
        }
        other => scalar(other, text),
    }
}

fn scalar<T: Serialize + ?Sized>(value: &T, text: &mut Vec<u8>) {
    serde_json::to_writer(text, value).expect("writing to a Vec cannot fail");
}

/// Returns whether JSON escapes the byte (RFC 8259 section 7).
fn is_escaped(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}

fn quoted(string: &str) -> Vec<u8> {
    let mut text = Vec::with_capacity(string.len() + string.len() / 8 + STAND_IN.len());
    scalar(string, &mut text);
    text
}

/// Part of a document.
#[derive(Clone, Copy)]
pub(super) struct DocumentNode<'a> {
    document: &'a JsonDocument,
    text: &'a str,
}

/// Kind of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartKind {
    Object,
    Array,
    /// String, number, boolean or null.
    Scalar,
}

impl<'a> DocumentNode<'a> {
    /// Returns the kind.
    pub(super) fn form(self) -> PartKind {
        match self.text.as_bytes().first() {
            Some(b'{') => PartKind::Object,
            Some(b'[') => PartKind::Array,
            _ => PartKind::Scalar,
        }
    }

    /// Returns names and members in order. The names of an array are its indices.
    pub(super) fn members(self) -> Vec<(Cow<'a, str>, Self)> {
        let node = |raw: &'a RawValue| Self { text: raw.get(), ..self };
        match self.form() {
            PartKind::Object => {
                let members: BTreeMap<Name<'a>, &'a RawValue> = parsed(self.text);
                members.into_iter().map(|(Name(name), raw)| (name, node(raw))).collect()
            }
            PartKind::Array => {
                let members: Vec<&'a RawValue> = parsed(self.text);
                let name = |n: usize| Cow::Owned(n.to_string());
                members.into_iter().enumerate().map(|(n, raw)| (name(n), node(raw))).collect()
            }
            PartKind::Scalar => Vec::new(),
        }
    }

    /// Returns the first member whose name satisfies `is`.
    pub(super) fn member(self, mut is: impl FnMut(&str) -> bool) -> Option<Self> {
        self.members().into_iter().find(|(name, _)| is(name)).map(|(_, node)| node)
    }

    /// Returns the part's range in the skeleton; no other part has the same range.
    pub(super) fn span(self) -> Range<usize> {
        let start = self.text.as_ptr().addr() - self.document.skeleton.as_ptr().addr();
        start..start + self.text.len()
    }

    /// Returns the part as JSON.
    pub(super) fn json(self) -> Body {
        self.document.expand(self.span())
    }

    /// Returns an object as JSON without one of its members.
    pub(super) fn json_without(self, name: &str) -> Body {
        let mut pieces = Vec::new();
        for (key, node) in self.members().into_iter().filter(|(key, _)| key != name) {
            let before = if pieces.is_empty() { "{" } else { "," };
            pieces.push([before.as_bytes(), &quoted(&key), b":"].concat().into());
            pieces.extend(node.json().pieces().iter().cloned());
        }
        let end = if pieces.is_empty() { "{}" } else { "}" };
        pieces.push(Bytes::from_static(end.as_bytes()));
        Body::join(pieces)
    }

    /// Returns a scalar as text: a string without quotation marks, null as empty text.
    pub(super) fn text(self) -> Body {
        let span = self.span();
        let long = self.document.long.iter().find(|long| long.at == span.start);
        if let Some(long) = long.filter(|long| !long.escaped.contains(&b'\\')) {
            return long.escaped.clone().into();
        }
        let json = self.json().to_bytes();
        match serde_json::from_slice(&json) {
            Ok(Value::String(string)) if string.len() + 2 == json.len() => {
                json.slice(1..json.len() - 1).into()
            }
            Ok(Value::String(string)) => string.into(),
            Ok(Value::Null) => Body::default(),
            _ => json.into(),
        }
    }

    /// Parses the part.
    #[cfg(test)]
    pub(super) fn value(self) -> Value {
        parsed(std::str::from_utf8(&self.json().to_bytes()).expect("JSON is text"))
    }
}

fn parsed<'a, T: serde::Deserialize<'a>>(text: &'a str) -> T {
    serde_json::from_str(text).expect("the document was rendered as JSON")
}

/// Parses a member's name; borrowed if it has no escapes.
#[derive(PartialEq, Eq, PartialOrd, Ord, serde::Deserialize)]
#[serde(transparent)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

// A document as a tree of routes.

/// Serves a document at its path and each part below it: objects and lists as JSON, scalars as text.
#[derive(Clone, Debug)]
pub(super) struct DocumentTree {
    /// The document, or the response to every request until it exists.
    document: Result<Arc<JsonDocument>, Response>,
    /// Response for the whole document, if it differs.
    whole: Option<Response>,
}

impl DocumentTree {
    /// Serves a document.
    pub(super) fn of(document: JsonDocument) -> Self {
        Self { document: Ok(Arc::new(document)), whole: None }
    }

    /// Serves a document that cannot be rendered yet.
    pub(super) fn unread(response: Response) -> Self {
        Self { document: Err(response), whole: None }
    }

    /// Sets another response for the whole document.
    pub(super) fn with_whole(self, response: Response) -> Self {
        Self { whole: Some(response), ..self }
    }

    fn response(&self, rest: &str) -> Response {
        let document = match (&self.document, &self.whole) {
            (_, Some(whole)) if rest.is_empty() => return whole.clone(),
            (Ok(document), _) => document,
            (Err(response), _) => return response.clone(),
        };
        match document.at(rest) {
            Some(node) if node.form() == PartKind::Scalar => {
                Response::new(StatusCode(200), Some(TEXT), &[], node.text())
            }
            Some(node) => Response::new(StatusCode(200), Some(JSON), &[], node.json()),
            None => Response::error(StatusCode(404), &[]),
        }
    }
}

impl LiveRoute for DocumentTree {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        self.response(call.rest).into()
    }

    fn is_lasting(&self) -> bool {
        true
    }

    fn about(&self) -> &'static str {
        "a JSON document or a part of it"
    }
}

#[cfg(test)]
mod tests {
    use super::{DocumentTree, JsonDocument, LONG, PartKind};
    use crate::store::Interner;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn a_document_equals_the_value_it_was_built_from() {
        let long = "é\"\\\n\0".repeat(LONG);
        for value in [
            json!({}),
            json!([]),
            json!({"a": [1, "x", null, true, 1.5], "b": {"c": ""}}),
            json!({"long": long, "again": [long, "short"], "last": 1}),
            json!({"nul": "\u{0}0", "inside": "x\"\u{0}0\"", "end": "\\"}),
            json!(long),
        ] {
            let document = JsonDocument::new(&value, &mut Interner::new());
            let body = document.body().to_bytes();
            assert_eq!(serde_json::from_slice::<Value>(&body).expect("JSON"), value);
            assert_eq!(body, value.to_string(), "as serde_json writes it");
            assert_eq!(document.root().value(), value);
        }
    }

    #[test]
    fn long_strings_of_many_documents_are_held_once() {
        let mut interner = Interner::new();
        let long = "v".repeat(LONG);
        let documents: Vec<JsonDocument> = (0..100)
            .map(|n| JsonDocument::new(&json!({ "id": n, "vendor": long, "z": n }), &mut interner))
            .collect();
        let shared = documents[0].body().pieces()[1].as_ptr();
        for document in &documents {
            let body = document.body();
            assert_eq!(body.pieces().len(), 3);
            assert_eq!(body.pieces()[1].as_ptr(), shared);
        }
    }

    #[test]
    fn an_object_can_be_rendered_without_one_member() {
        let value = json!({"a": [1], "b": "l".repeat(LONG), "c\"": null});
        let document = JsonDocument::new(&value, &mut Interner::new());
        for name in ["a", "b", "c\"", "d"] {
            let mut wanted = value.clone();
            wanted.as_object_mut().expect("an object").remove(name);
            assert_eq!(document.root().json_without(name).to_bytes(), wanted.to_string());
        }
        let one = JsonDocument::new(&json!({"a": 1}), &mut Interner::new());
        assert_eq!(one.root().json_without("a").to_bytes(), "{}");
    }

    #[test]
    fn every_part_can_be_read() {
        let long = "l".repeat(LONG);
        let value = json!({"a": {"b": [{"c": "x\ny"}, 7, null]}, "l": long});
        let document = JsonDocument::new(&value, &mut Interner::new());
        let a = document.root().member(|name| name == "a").expect("a");
        let b = a.member(|name| name == "b").expect("b");
        assert_eq!((a.form(), b.form()), (PartKind::Object, PartKind::Array));
        let c = b.member(|name| name == "0").and_then(|n| n.member(|name| name == "c")).expect("c");
        assert_eq!((c.form(), c.text().to_bytes().as_ref()), (PartKind::Scalar, &b"x\ny"[..]));
        assert_eq!(b.member(|name| name == "1").expect("1").text().to_bytes(), "7");
        assert!(b.member(|name| name == "2").expect("2").text().is_empty());
        assert!(b.member(|name| name == "3").is_none());
        assert_eq!(document.root().member(|name| name == "l").expect("l").text().to_bytes(), long);
        assert_eq!(a.json().to_bytes(), r#"{"b":[{"c":"x\ny"},7,null]}"#);
    }

    #[test]
    fn parts_are_json_or_text_and_absent_ones_are_404() {
        let value = json!({ "a": [{ "b": "x" }], "n": 7, "none": null, "k/k": "slash" });
        let walk = DocumentTree::of(JsonDocument::new(&value, &mut Interner::new()));
        for (rest, status, body) in [
            ("/a", 200, r#"[{"b":"x"}]"#),
            ("/a/0", 200, r#"{"b":"x"}"#),
            ("/a/0/b", 200, "x"),
            ("/n", 200, "7"),
            ("/none", 200, ""),
            ("/a/1", 404, "Not Found\n"),
            ("/a/00", 404, "Not Found\n"),
            ("/a/0/b/x", 404, "Not Found\n"),
            ("/k/k", 404, "Not Found\n"),
        ] {
            let response = walk.response(rest);
            assert_eq!((response.status().0, response.body().to_bytes().as_ref()), (status, body.as_bytes()));
        }
        assert_eq!(walk.response("").body().to_bytes(), value.to_string());
    }

    /// Any JSON a few levels deep, with short strings, long ones, and some that start with NUL.
    fn values() -> impl Strategy<Value = Value> {
        let string = prop_oneof![".{0,8}", "\u{0}.{0,4}", Just("s".repeat(LONG)), "[\"\\\\\u{0}0-9]{0,12}"];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            string.prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-z\"\\\\]{0,4}", inner, 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_document_of_any_value_equals_it(value in values()) {
            let document = JsonDocument::new(&value, &mut Interner::new());
            prop_assert_eq!(document.body().to_bytes(), value.to_string());
            prop_assert_eq!(document.root().value(), value);
        }
    }
}
