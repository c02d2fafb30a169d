//! Parses a record's text, and maps a field back to its line and column.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::Record;
use super::error::{Place, RecordError};

/// Syntax of a record's text.
///
/// JSON has its own parser, because YAML does not read JSON's surrogate pairs (`\ud83d\ude80`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Syntax {
    Yaml,
    Json,
}

/// A record's text and its source.
#[derive(Clone, Copy)]
pub(super) struct Text<'a> {
    pub(super) source: &'a str,
    pub(super) text: &'a str,
}

/// One step of a path into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The value of a key in a mapping.
    Key(String),
    /// A member of a list, counted from 0.
    Index(usize),
}

impl From<&str> for Step {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for Step {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// Builds a path into a document from its steps.
macro_rules! way {
    ($($step:expr),* $(,)?) => { [$($crate::record::parse::Step::from($step)),*] };
}
pub(super) use way;

impl Text<'_> {
    fn syntax(&self) -> Syntax {
        let json =
            std::path::Path::new(self.source).extension().is_some_and(|ext| ext.eq_ignore_ascii_case("json"));
        if json { Syntax::Json } else { Syntax::Yaml }
    }

    /// Parses the record. Checks the form of each value, not whether values are consistent with each other.
    pub(super) fn read(&self) -> Result<Record, RecordError> {
        match self.syntax() {
            Syntax::Yaml => serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(self.text))
                .map_err(|error| {
                    let at = error.inner().location().map(|l| (l.line(), l.column()));
                    self.unreadable(error.path(), at, error.inner())
                }),
            Syntax::Json => {
                let mut json = serde_json::Deserializer::from_str(self.text);
                let record: Record = serde_path_to_error::deserialize(&mut json).map_err(|error| {
                    let at = (error.inner().line(), error.inner().column());
                    self.unreadable(error.path(), Some(at), error.inner())
                })?;
                let rest = json.end();
                rest.map_err(|error| {
                    let place = Box::new(self.place_at(Some((error.line(), error.column())), String::new()));
                    RecordError::Unreadable { place, reason: bare(&error, "") }
                })?;
                Ok(record)
            }
        }
    }

    fn unreadable(
        &self,
        path: &serde_path_to_error::Path,
        at: Option<(usize, usize)>,
        error: &dyn fmt::Display,
    ) -> RecordError {
        let field = match path.to_string() {
            root if matches!(root.as_str(), "." | "?") => String::new(),
            field => field,
        };
        let mut reason = bare(error, &field);
        if may_be_secret(&field) {
            reason = without_value(&reason);
        }
        RecordError::Unreadable { place: Box::new(self.place_at(at, field)), reason }
    }

    fn place_at(&self, position: Option<(usize, usize)>, field: String) -> Place {
        Place { source: self.source.to_owned(), position, field }
    }

    /// Finds a field; returns the place of its nearest ancestor if it is absent.
    pub(super) fn place(&self, path: &[Step]) -> Place {
        let seek = Seek(path);
        let position = match self.syntax() {
            Syntax::Yaml => seek
                .deserialize(serde_yaml::Deserializer::from_str(self.text))
                .err()
                .and_then(|error| error.location().map(|l| (l.line(), l.column()))),
            Syntax::Json => seek
                .deserialize(&mut serde_json::Deserializer::from_str(self.text))
                .err()
                .map(|error| (error.line(), error.column())),
        };
        self.place_at(position, name(path))
    }
}

/// Formats a path, such as `network.nics[0].mac`.
fn name(path: &[Step]) -> String {
    use fmt::Write as _;
    let mut name = String::new();
    for step in path {
        let dot = if name.is_empty() { "" } else { "." };
        match step {
            Step::Key(key) => write!(name, "{dot}{}", super::values::excerpt(key)),
            Step::Index(index) => write!(name, "[{index}]"),
        }
        .expect("writing to a String cannot fail");
    }
    name
}

/// Fields that may contain secrets. Errors do not repeat their values or values below them.
const SECRET: [&str; 6] = ["admin", "credentials", "random_seed", "user_data", "vendor_data", "vendor_data2"];

/// Returns whether a field is in or below [`SECRET`]. An unknown field counts as secret.
fn may_be_secret(field: &str) -> bool {
    let first = field.split(['.', '[']).next().unwrap_or_default();
    first.is_empty() || SECRET.contains(&first)
}

/// Removes the value from serde's `invalid type: string "value", expected …`.
fn without_value(reason: &str) -> String {
    let found = ["invalid type: ", "invalid value: "].into_iter().find(|start| reason.starts_with(start));
    let end = reason.rfind(", expected ");
    let (Some(start), Some(end)) = (found, end.filter(|end| *end >= found.map_or(0, str::len))) else {
        return reason.to_owned();
    };
    let kind = reason[start.len()..end].split(['"', '`']).next().unwrap_or_default().trim_end();
    format!("{start}{kind}{}", &reason[end..])
}

/// Removes the field and the position from a parser's message, because the [`Place`] has both.
fn bare(error: &dyn fmt::Display, field: &str) -> String {
    let text = error.to_string();
    let text =
        text.rfind(" at line ").filter(|_| !text.contains(", while ")).map_or(&text[..], |at| &text[..at]);
    let mut outer = field;
    loop {
        if let Some(rest) = text.strip_prefix(outer).and_then(|rest| rest.strip_prefix(": ")) {
            return rest.to_owned();
        }
        match outer.rfind(['.', '[']) {
            Some(end) => outer = &outer[..end],
            None => return text.to_owned(),
        }
    }
}

/// Walks a document to a value and fails there on purpose: the parser adds the position to the error.
struct Seek<'p>(&'p [Step]);

const ARRIVED: &str = "arrived";

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a path into the document")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        if let [Step::Key(wanted), rest @ ..] = self.0 {
            while let Some(key) = map.next_key::<String>()? {
                if key == *wanted {
                    return map.next_value_seed(Seek(rest));
                }
                map.next_value::<IgnoredAny>()?;
            }
        }
        Err(serde::de::Error::custom(ARRIVED))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        if let [Step::Index(wanted), rest @ ..] = self.0 {
            for _ in 0..*wanted {
                seq.next_element::<IgnoredAny>()?;
            }
            seq.next_element_seed(Seek(rest))?;
        }
        Err(serde::de::Error::custom(ARRIVED))
    }
}
