//! Parses a record's text, and maps a field back to its line and column.

use std::fmt;

use super::Record;
use super::{FieldPosition, RecordError};
pub use crate::parser::PathStep;
use crate::parser::{self, Syntax};

/// A record's text and its source.
#[derive(Clone, Copy)]
pub(super) struct RecordText<'a> {
    pub(super) source: &'a str,
    pub(super) text: &'a str,
}

/// Builds a path into a document from its steps.
macro_rules! way {
    ($($step:expr),* $(,)?) => { [$($crate::record::parse::PathStep::from($step)),*] };
}
pub(super) use way;

impl RecordText<'_> {
    fn syntax(&self) -> Syntax {
        let json =
            std::path::Path::new(self.source).extension().is_some_and(|ext| ext.eq_ignore_ascii_case("json"));
        if json { Syntax::Json } else { Syntax::Yaml }
    }

    /// Parses the record. Checks the form of each value, not whether values are consistent with each other.
    pub(super) fn read(&self) -> Result<Record, RecordError> {
        parser::parse(self.syntax(), self.text).map_err(|error| {
            let mut reason = bare(&error.reason, &error.field);
            if may_be_secret(&error.field) {
                reason = without_value(&reason);
            }
            let reason = parser::plain(&reason);
            RecordError::Unreadable { place: Box::new(self.place_at(error.position, error.field)), reason }
        })
    }

    fn place_at(&self, position: Option<(usize, usize)>, field: String) -> FieldPosition {
        FieldPosition { source: self.source.to_owned(), position, field }
    }

    /// Returns the place of a field without its line and column.
    pub(super) fn name(&self, path: &[PathStep]) -> FieldPosition {
        self.place_at(None, name(path))
    }

    /// Finds a field; returns the place of its nearest ancestor if it is absent.
    pub(super) fn place(&self, path: &[PathStep]) -> FieldPosition {
        self.place_at(parser::locate(self.syntax(), self.text, path), name(path))
    }
}

/// Formats a path, such as `network.nics[0].mac`.
fn name(path: &[PathStep]) -> String {
    use fmt::Write as _;
    let mut name = String::new();
    for step in path {
        let dot = if name.is_empty() { "" } else { "." };
        match step {
            PathStep::Key(key) => write!(name, "{dot}{}", super::values::excerpt(key)),
            PathStep::Index(index) => write!(name, "[{index}]"),
        }
        .expect("writing to a String cannot fail");
    }
    name
}

/// Fields that may contain secrets. Errors do not repeat their values or values below them.
const SECRET: [&str; 7] = [
    "admin",
    "credentials",
    "random_seed",
    "systemd_credentials",
    "user_data",
    "vendor_data",
    "vendor_data2",
];

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

/// Removes the field from a parser's message, because the [`FieldPosition`] has it.
fn bare(text: &str, field: &str) -> String {
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
