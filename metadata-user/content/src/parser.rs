//! The one way in for YAML and JSON that others wrote.
//!
//! A document costs what it weighs: its values are built under a budget of [`NODES`], of bytes that aliases add
//! ([`ALIAS_BYTES`]), and of [`DEPTH`]. So the memory and the time of a parse are bounded by the length of the text
//! plus a constant, whatever its author wrote. The test `house` forbids every other way in.
//!
//! Errors name a place. The reason of a [`ParseError`] may repeat a value; where the text may hold secrets, callers
//! show its [`line`](ParseError::line) instead.

mod error;

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_path_to_error::{Path, Segment, Track};
use serde_yaml::granit_parser::{Event, Parser};
use serde_yaml::localizer::Localizer;
use serde_yaml::{
    DefaultMessageFormatter, DuplicateKeyPolicy, Location, MergeKeyPolicy, NonFiniteFloatPolicy, Options,
};

pub use error::{ParseError, plain};

use error::repeated;

/// The byte order mark, which editors on Windows put in front of a text.
const BOM: char = '\u{feff}';

/// Most nodes of a document: scalars, keys, lists and mappings. A node that an alias repeats counts again. A record
/// with all that it may have needs less than a third.
pub const NODES: usize = 100_000;
/// Most nodes of a document that aliases may repeat, and most that may be kept for aliases.
pub const ALIAS_NODES: usize = 2_000;
/// Most bytes of scalars that aliases may add to those that the text has itself.
pub const ALIAS_BYTES: usize = 256 << 10;
/// Most lists and mappings inside each other. The parsers recurse once for each.
pub const DEPTH: usize = 64;

/// The four parser events that are not nodes: start and end of the stream, and of its one document.
const STREAM_EVENTS: usize = 8;

/// Syntax of a text.
///
/// JSON has its own parser, because YAML does not read JSON's surrogate pairs (`\ud83d\ude80`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    /// YAML 1.2. Merge keys (`<<`) are ordinary keys, and `yes` and `on` are text.
    Yaml,
    /// JSON (RFC 8259).
    Json,
}

/// One step of a path into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathStep {
    /// The value of a key in a mapping.
    Key(String),
    /// A member of a list, counted from 0.
    Index(usize),
}

impl From<&str> for PathStep {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for PathStep {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// Parses one document of YAML; an empty text is `null`.
///
/// # Errors
/// The text is not UTF-8 or not YAML, has a second document, exceeds the budget, or is no `T`.
pub fn yaml<T: DeserializeOwned>(text: impl AsRef<[u8]>) -> Result<T, ParseError> {
    parse(Syntax::Yaml, text)
}

/// Parses one document of JSON.
///
/// # Errors
/// The text is not UTF-8 or not JSON, exceeds the budget, or is no `T`.
pub fn json<T: DeserializeOwned>(text: impl AsRef<[u8]>) -> Result<T, ParseError> {
    parse(Syntax::Json, text)
}

/// Parses one document.
///
/// # Errors
/// The text is not UTF-8 or not of this syntax, exceeds the budget, or is no `T`.
pub fn parse<T: DeserializeOwned>(syntax: Syntax, text: impl AsRef<[u8]>) -> Result<T, ParseError> {
    let text = utf8(text.as_ref())?;
    let mut track = Track::new();
    match syntax {
        Syntax::Yaml => read_yaml(text, PhantomData::<T>, &mut track)
            .map_err(|error| explained::<T>(text, &error, &StopPosition::of(&track.path()))),
        Syntax::Json => {
            let read = check_json(text).and_then(|()| read_json(text, PhantomData::<T>, &mut track));
            read.map_err(|((line, column), reason)| {
                let way = StopPosition::of(&track.path());
                // The parser counts no column in a line that has no character.
                let position = Some((line, column.max(1)));
                given_twice(text, &way, &reason).unwrap_or(ParseError { position, field: way.name, reason })
            })
        }
    }
}

/// What is wrong with the syntax of a text of YAML that [`yaml`] refused with this error: words that repeat no value, and
/// the line. For texts that may hold secrets.
#[must_use]
pub fn fault_of_yaml(text: impl AsRef<[u8]>, error: &ParseError) -> String {
    let found = utf8(text.as_ref()).map_or_else(
        |error| Some((error.reason, error.position)),
        |text| {
            // The scanner shows at most one character.
            let fault = Parser::new_from_str(text).find_map(Result::err)?;
            Some((fault.info(), Some((fault.marker().line(), 0))))
        },
    );
    match found {
        Some((reason, Some((line, _)))) => format!("a syntax error at its line {line}: {reason}"),
        _ if error.line() == 0 => "something else".into(),
        _ => format!("something else, from its line {} on", error.line()),
    }
}

/// Finds a field; returns the place of its nearest ancestor if it is absent, and `None` if the text is malformed.
#[must_use]
pub fn locate(syntax: Syntax, text: &str, path: &[PathStep]) -> Option<(usize, usize)> {
    let text = text.strip_prefix(BOM).unwrap_or(text);
    match syntax {
        Syntax::Yaml => seek(&mut nodes(text), path, false),
        Syntax::Json => {
            read_json(text, PositionSeeker(path), &mut Track::new()).err().map(|(position, _)| position)
        }
    }
}

fn utf8(text: &[u8]) -> Result<&str, ParseError> {
    let text = std::str::from_utf8(text).map_err(|error| {
        let position = Some(place(&text[..error.valid_up_to()]));
        ParseError { position, field: String::new(), reason: "expected UTF-8, found another byte".into() }
    })?;
    Ok(text.strip_prefix(BOM).unwrap_or(text))
}

/// Where a parser stopped.
struct StopPosition {
    steps: Vec<PathStep>,
    name: String,
}

impl StopPosition {
    fn of(path: &Path) -> Self {
        let steps = path.iter().map_while(|segment| match segment {
            Segment::Seq { index } => Some(PathStep::Index(*index)),
            Segment::Map { key } => Some(PathStep::Key(key.clone())),
            Segment::Enum { .. } | Segment::Unknown => None,
        });
        let name = match path.to_string() {
            root if matches!(root.as_str(), "." | "?") => String::new(),
            // The fault is before the name of the field.
            name => name.strip_suffix(".?").map(str::to_owned).unwrap_or(name),
        };
        Self { steps: steps.collect(), name }
    }
}

fn read_yaml<'de, S: DeserializeSeed<'de>>(
    text: &'de str,
    seed: S,
    track: &mut Track,
) -> Result<S::Value, serde_yaml::Error> {
    serde_yaml::with_deserializer_from_str_with_options(text, options(text), |yaml| {
        seed.deserialize(serde_path_to_error::Deserializer::new(yaml, track))
    })
}

/// Says what is wrong with a text that is no `T`. The parser of YAML does not say what it found where a type does not
/// fit, and names the end of a mapping that lacks a field; so a well-formed text is read again as a plain value.
fn explained<T: DeserializeOwned>(text: &str, error: &serde_yaml::Error, way: &StopPosition) -> ParseError {
    let mut reason = error.render_with_formatter(&DefaultMessageFormatter.with_localizer(&BareMessage));
    let at =
        |error: &serde_yaml::Error| error.location().map(|at| (at.line() as usize, at.column() as usize));
    let Ok(value) = read_yaml(text, PhantomData::<Value>, &mut Track::new()) else {
        return ParseError { position: at(error), field: way.name.clone(), reason };
    };
    match error {
        // A visitor's own words.
        serde_yaml::Error::Message { .. } => {}
        serde_yaml::Error::Unexpected { expected: "mapping start", .. } => {
            let found = way.steps.iter().try_fold(&value, |value, step| match step {
                PathStep::Key(key) => value.get(key),
                PathStep::Index(index) => value.get(index),
            });
            reason = format!("invalid type: {}, expected a mapping", found.map_or("something else", kind));
            if way.steps.is_empty() && value.as_str().is_some_and(|text| text.contains(':')) {
                reason = "expected a mapping, found some text; write a space after each colon".into();
            }
        }
        _ => {
            if let Err(again) = serde_path_to_error::deserialize::<_, T>(value)
                && StopPosition::of(again.path()).name == way.name
            {
                reason = again.inner().to_string();
            }
        }
    }
    let at_key = reason.starts_with("unknown field");
    if let Some(error) = given_twice(text, way, &reason) {
        return error;
    }
    let position = seek(&mut nodes(text), &way.steps, at_key).or_else(|| at(error));
    ParseError { position, field: way.name.clone(), reason }
}

/// The error of a field that is there twice, at its second place; `None` for another reason. JSON is read as YAML.
fn given_twice(text: &str, way: &StopPosition, reason: &str) -> Option<ParseError> {
    let key = repeated(reason)?;
    let position = seek_repeated(text, &way.steps, key)?;
    let dot = if way.name.is_empty() { "" } else { "." };
    let field = format!("{}{dot}{key}", way.name);
    Some(ParseError { position: Some(position), field, reason: "given twice; keep one".into() })
}

/// The place of the second occurrence of a key in the mapping at a path.
fn seek_repeated(text: &str, path: &[PathStep], key: &str) -> Option<(usize, usize)> {
    let mut nodes = nodes(text);
    // One step at a time, so that the iterator stays at the mapping's first key.
    enter(&mut nodes, path)?;
    let mut times = 0;
    loop {
        let (node, at) = nodes.next()?;
        match node {
            Event::MappingEnd => return None,
            Event::Scalar(name, ..) if name == key => {
                times += 1;
                if times == 2 {
                    return Some(at);
                }
            }
            other => skip(&other, &mut nodes)?,
        }
        let (value, _) = nodes.next()?;
        skip(&value, &mut nodes)?;
    }
}

/// Goes to the first key of the mapping at a path.
fn enter<'a>(nodes: &mut dyn Iterator<Item = Node<'a>>, path: &[PathStep]) -> Option<()> {
    let (node, _) = nodes.next()?;
    match (node, path) {
        (Event::MappingStart(..), []) => Some(()),
        (Event::MappingStart(..), [PathStep::Key(wanted), rest @ ..]) => loop {
            match nodes.next()?.0 {
                Event::MappingEnd => return None,
                Event::Scalar(name, ..) if name == wanted.as_str() => return enter(nodes, rest),
                other => skip(&other, nodes)?,
            }
            let (value, _) = nodes.next()?;
            skip(&value, nodes)?;
        },
        (Event::SequenceStart(..), [PathStep::Index(wanted), rest @ ..]) => {
            for _ in 0..*wanted {
                let (value, _) = nodes.next()?;
                if value == Event::SequenceEnd {
                    return None;
                }
                skip(&value, nodes)?;
            }
            enter(nodes, rest)
        }
        _ => None,
    }
}

/// What serde calls a value.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "sequence",
        Value::Object(_) => "map",
    }
}

/// One node, or the end of one, with its place.
type Node<'a> = (Event<'a>, (usize, usize));

/// The nodes of a text until its first fault.
fn nodes(text: &str) -> impl Iterator<Item = Node<'_>> {
    let events = Parser::new_from_str(text).map_while(Result::ok);
    let is_node = |event: &Event<'_>| {
        matches!(
            event,
            Event::Scalar(..)
                | Event::Alias(_)
                | Event::SequenceStart(..)
                | Event::SequenceEnd
                | Event::MappingStart(..)
                | Event::MappingEnd
        )
    };
    events
        .filter(move |(event, _)| is_node(event))
        .map(|(event, span)| (event, (span.start.line(), span.start.col() + 1)))
}

/// Follows a path from the next node on, to its value or to its last key.
fn seek<'a>(
    nodes: &mut dyn Iterator<Item = Node<'a>>,
    path: &[PathStep],
    to_key: bool,
) -> Option<(usize, usize)> {
    let (node, here) = nodes.next()?;
    match (node, path) {
        (Event::MappingStart(..), [PathStep::Key(wanted), rest @ ..]) => loop {
            let (key, at) = nodes.next()?;
            match key {
                Event::MappingEnd => return Some(here),
                Event::Scalar(name, ..) if name == wanted.as_str() => {
                    return if to_key && rest.is_empty() { Some(at) } else { seek(nodes, rest, to_key) };
                }
                other => skip(&other, nodes)?,
            }
            let (value, _) = nodes.next()?;
            skip(&value, nodes)?;
        },
        (Event::SequenceStart(..), [PathStep::Index(wanted), rest @ ..]) => {
            let mut nodes = nodes.peekable();
            for _ in 0..*wanted {
                let (value, _) = nodes.next()?;
                if value == Event::SequenceEnd {
                    return Some(here);
                }
                skip(&value, &mut nodes)?;
            }
            match nodes.peek() {
                Some((Event::SequenceEnd, _)) | None => Some(here),
                Some(_) => seek(&mut nodes, rest, to_key),
            }
        }
        _ => Some(here),
    }
}

/// Skips the rest of a node.
fn skip<'a>(node: &Event<'a>, nodes: &mut dyn Iterator<Item = Node<'a>>) -> Option<()> {
    let mut depth = usize::from(matches!(node, Event::SequenceStart(..) | Event::MappingStart(..)));
    while depth > 0 {
        match nodes.next()?.0 {
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth -= 1,
            _ => {}
        }
    }
    Some(())
}

/// Walks JSON to a value and fails there on purpose: the parser adds the position to the error.
struct PositionSeeker<'p>(&'p [PathStep]);

const ARRIVED: &str = "arrived";

impl<'de> DeserializeSeed<'de> for PositionSeeker<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PositionSeeker<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a path into the document")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        if let [PathStep::Key(wanted), rest @ ..] = self.0 {
            while let Some(key) = map.next_key::<String>()? {
                if key == *wanted {
                    return map.next_value_seed(PositionSeeker(rest));
                }
                map.next_value::<IgnoredAny>()?;
            }
        }
        Err(serde::de::Error::custom(ARRIVED))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        if let [PathStep::Index(wanted), rest @ ..] = self.0 {
            for _ in 0..*wanted {
                seq.next_element::<IgnoredAny>()?;
            }
            seq.next_element_seed(PositionSeeker(rest))?;
        }
        Err(serde::de::Error::custom(ARRIVED))
    }
}

/// Leaves the position out of a message, because [`ParseError`] has it.
struct BareMessage;

impl Localizer for BareMessage {
    fn attach_location<'a>(&self, base: std::borrow::Cow<'a, str>, _: Location) -> std::borrow::Cow<'a, str> {
        base
    }
}

/// How YAML is read: under the budget, and with scalars and keys as the record's page in the book describes them.
fn options(text: &str) -> Options {
    let events = |nodes: usize| 2 * nodes + STREAM_EVENTS;
    serde_yaml::options! {
        budget: serde_yaml::budget! {
            max_depth: DEPTH,
            flow_nesting_limit: DEPTH,
            max_nodes: NODES,
            max_events: events(NODES),
            max_aliases: ALIAS_NODES,
            max_anchors: ALIAS_NODES,
            max_recorded_anchor_events: events(ALIAS_NODES),
            max_recorded_anchor_bytes: ALIAS_BYTES,
            // Aliases count with what they repeat.
            max_total_scalar_bytes: text.len() + ALIAS_BYTES,
            enforce_alias_anchor_ratio: false,
        },
        alias_limits: serde_yaml::alias_limits! {
            max_total_replayed_events: events(ALIAS_NODES),
            max_replay_stack_depth: DEPTH,
        },
        // The visitor decides: a record refuses a second field of one name.
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        merge_keys: MergeKeyPolicy::AsOrdinary,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        strict_booleans: true,
        ignore_binary_tag_for_string: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        // A snippet would repeat secrets.
        with_snippet: false,
    }
}

/// A position, and what is wrong there.
type Fault = ((usize, usize), String);

fn read_json<'de, S: DeserializeSeed<'de>>(
    text: &'de str,
    seed: S,
    track: &mut Track,
) -> Result<S::Value, Fault> {
    let mut json = serde_json::Deserializer::from_str(text);
    let read = seed.deserialize(serde_path_to_error::Deserializer::new(&mut json, track));
    read.and_then(|value| json.end().map(|()| value)).map_err(|error| {
        let message = error.to_string();
        let end = message.rfind(" at line ").unwrap_or(message.len());
        ((error.line(), error.column()), message[..end].to_owned())
    })
}

/// Counts the nodes and the depth of JSON before a value is built. JSON repeats nothing, so its bytes are those of the
/// text. `serde_json` itself has a limit on the depth, of 128.
fn check_json(text: &str) -> Result<(), Fault> {
    let (mut nodes, mut depth) = (1_usize, 0_usize);
    let (mut in_text, mut is_escaped) = (false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_text => is_escaped = true,
            b'"' => in_text = !in_text,
            _ if in_text => continue,
            b'[' | b'{' => (nodes, depth) = (nodes + 1, depth + 1),
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' | b':' => nodes += 1,
            _ => continue,
        }
        let exceeded = [(nodes, NODES, "nodes"), (depth, DEPTH, "levels of nesting")];
        if let Some((_, most, what)) = exceeded.into_iter().find(|(found, most, _)| found > most) {
            return Err((
                place(&text.as_bytes()[..at]),
                format!("expected at most {most} {what}, found more"),
            ));
        }
    }
    Ok(())
}

/// Line and column behind some text, counted from 1.
fn place(before: &[u8]) -> (usize, usize) {
    let lines = before.iter().filter(|byte| **byte == b'\n').count();
    let last = before.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    (lines + 1, String::from_utf8_lossy(last).chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::{ALIAS_NODES, DEPTH, NODES, json, plain, yaml};
    use serde_json::{Value, json as value};

    #[test]
    fn scalars_are_read_as_the_product_has_always_read_them() {
        for (text, expected) in [
            ("yes", value!("yes")),
            ("on", value!("on")),
            ("NO", value!("NO")),
            ("True", value!(true)),
            ("~", value!(null)),
            ("", value!(null)),
            ("null", value!(null)),
            ("007", value!("007")),
            ("000000000000", value!("000000000000")),
            ("1_000", value!("1_000")),
            ("0x1F", value!(31)),
            ("0o17", value!(15)),
            ("0b11", value!(3)),
            ("12e3", value!(12000.0)),
            ("-7", value!(-7)),
            ("+7", value!(7)),
            ("18446744073709551615", value!(18446744073709551615_u64)),
            (".inf", value!(null)),
            ("1:30", value!("1:30")),
            ("2026-11-25", value!("2026-11-25")),
            ("\"5\"", value!("5")),
            ("\u{feff}a: 1", value!({"a": 1})),
            ("{a: 1, a: 2}", value!({"a": 2})),
            ("{x: &x {a: 1}, y: {<<: *x}}", value!({"x": {"a": 1}, "y": {"<<": {"a": 1}}})),
            ("{x: &x [1], y: *x}", value!({"x": [1], "y": [1]})),
            ("{1: a, true: b}", value!({"1": "a", "true": "b"})),
        ] {
            assert_eq!(yaml::<Value>(text), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn a_text_of_a_type_keeps_its_spelling() {
        for text in ["123", "true", "1.50", "0x1F", "~x"] {
            assert_eq!(yaml::<String>(text).as_deref(), Ok(text));
        }
        yaml::<bool>("yes").expect_err("YAML 1.1");
        yaml::<Value>("a: 1\n---\nb: 2").expect_err("two documents");
    }

    #[test]
    fn each_budget_is_enforced_with_a_place() {
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        let wide = |n: usize| format!("[{}]", vec!["0"; n].join(","));
        for parse in [yaml::<Value>, json::<Value>] {
            parse(deep(DEPTH)).expect("as deep as may be");
            parse(wide(NODES - 2)).expect("as many nodes as may be");
            for text in [deep(DEPTH + 1), wide(NODES + 1), deep(100_000), "[".repeat(1_000_000)] {
                let error = parse(text).expect_err("more");
                assert!(error.position.is_some_and(|(line, _)| line == 1), "{error}");
            }
        }
        let repeated = |bytes: usize, times: usize| {
            format!("a: &a {}\nb: [{}]\n", "x".repeat(bytes), vec!["*a"; times].join(","))
        };
        yaml::<Value>(repeated(1 << 10, 250)).expect("250 times a KiB");
        for text in [repeated(1 << 10, 300), repeated(1, ALIAS_NODES * 2 + 20)] {
            assert_ne!(yaml::<Value>(text).expect_err("more").line(), 0);
        }
    }

    #[test]
    fn nodes_in_strings_of_json_do_not_count() {
        let text = format!(r#"{{"a": "{}", "b\"[": "\\"}}"#, "[,:{".repeat(NODES));
        json::<Value>(text).expect("one long string");
        assert_eq!(json::<Value>("\u{feff}[1]"), Ok(value!([1])));
    }

    #[test]
    fn a_fault_of_syntax_is_told_without_a_value_and_at_the_field_around_it() {
        let deep = format!("{}sesame{}", "[".repeat(DEPTH + 1), "]".repeat(DEPTH + 1));
        for (text, expected) in [
            ("placement: {region: sesame", "a syntax error at its line 1: unclosed bracket '{'"),
            ("a: 1\nb: [sesame\nc: 1\n", "a syntax error at its line 3: "),
            ("a: \"sesame\n", "a syntax error at its line "),
            (&deep, "something else, from its line 1 on"),
        ] {
            let error = yaml::<Value>(text).expect_err(text);
            let told = super::fault_of_yaml(text, &error);
            assert!(told.starts_with(expected) && !told.contains("sesame"), "{text}: {told}");
            assert!(!error.field.contains('?'), "{text}: {}", error.field);
        }
        let error = yaml::<Value>(b"a: \xff").expect_err("not UTF-8");
        assert!(
            super::fault_of_yaml(b"a: \xff", &error).ends_with("line 1: expected UTF-8, found another byte")
        );
    }

    #[test]
    fn an_error_has_a_place_and_a_field() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "only read by the parser")]
        struct Outer {
            a: Vec<u8>,
        }
        for (text, expected) in [
            ("a:\n- 1\n- 300", (Some((3, 3)), "a[1]")),
            ("a: [1]\nb: 1", (Some((2, 1)), "b")),
            ("a: [1\n", (Some((1, 4)), "a")),
            ("a: 1", (Some((1, 4)), "a")),
            ("x:\n  y: 1", (Some((1, 1)), "x")),
            ("# c\n{}", (Some((2, 1)), "")),
            ("a: [1]\n\"a\": [2]", (Some((2, 1)), "a")),
        ] {
            let error = yaml::<Outer>(text).expect_err(text);
            assert_eq!((error.position, &*error.field), expected, "{text:?}: {error}");
        }
        let error = json::<Outer>("{\"a\": [1,\n300]}").expect_err("too large");
        assert_eq!((error.line(), &*error.field), (2, "a[1]"));
        assert_eq!(yaml::<Outer>(b"a: [1]\nb: \xff").expect_err("no UTF-8").position, Some((2, 4)));
    }

    #[test]
    fn a_field_that_is_given_twice_is_found_at_its_second_place() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "only read by the parser")]
        struct Inner {
            x: u8,
            y: Option<u8>,
        }
        #[derive(Debug, serde::Deserialize)]
        #[expect(dead_code, reason = "only read by the parser")]
        struct Outer {
            a: Inner,
            b: Vec<Inner>,
        }
        for (text, expected) in [
            ("a: {x: 1}\nb: []\na: {x: 2}\n", ((3, 1), "a")),
            ("a:\n  x: 1\n  y: 2\n  x: 3\nb: []\n", ((4, 3), "a.x")),
            ("a: {x: 1}\nb:\n- {x: 1}\n- {x: 1, y: 1, y: 2}\n", ((4, 16), "b[1].y")),
        ] {
            let error = yaml::<Outer>(text).expect_err(text);
            assert_eq!((error.position, &*error.field), (Some(expected.0), expected.1), "{text:?}: {error}");
            assert!(error.to_string().contains("given twice"), "{error}");
        }
        for (text, expected) in [
            (r#"{"a": {"x": 1}, "b": [], "a": {"x": 2}}"#, ((1, 26), "a")),
            ("{\"a\": {\"x\": 1},\n  \"b\": [{\"x\": 1, \"x\": 2}]}", ((2, 18), "b[0].x")),
        ] {
            let error = json::<Outer>(text).expect_err(text);
            assert_eq!((error.position, &*error.field), (Some(expected.0), expected.1), "{text:?}: {error}");
            assert!(error.to_string().contains("given twice"), "{error}");
        }
    }

    #[test]
    fn a_slip_in_json_is_named_without_the_parsers_words() {
        #[derive(Debug, serde::Deserialize)]
        #[expect(dead_code, reason = "only read by the parser")]
        struct Outer {
            a: u8,
        }
        for (text, expected) in [
            ("", "the text ends too early; is the file whole? at line 1 column 1"),
            ("{\"a\": 1,\n", "the text ends too early; is the file whole? at line 2 column 1"),
        ] {
            assert_eq!(json::<Outer>(text).expect_err(text).to_string(), expected);
        }
        assert_eq!(plain("invalid length 0, expected a mapping"), "expected a mapping, found a list");
    }

    #[test]
    fn a_slip_in_yaml_is_named_with_what_to_write() {
        #[derive(Debug, serde::Deserialize)]
        #[expect(dead_code, reason = "only read by the parser")]
        struct Outer {
            a: u8,
        }
        for (text, expected) in [
            ("a: 1\n---\na: 2\n", "found a second one after `---`; remove it"),
            ("a:\n\tb: 1\n", "expected spaces, found a tab"),
            ("a:1\n", "found some text; write a space after each colon at line 1"),
            ("a\n", "expected a mapping, found some text at line 1"),
        ] {
            let error = yaml::<Outer>(text).expect_err(text).to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
