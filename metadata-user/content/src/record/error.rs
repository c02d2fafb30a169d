//! Errors and warnings about a record, with their place in its text.

use std::fmt;

/// Place of a field in a record's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Source of the record, such as its file name.
    pub source: String,
    /// Line and column, counted from 1; `None` if the parser reports none.
    pub position: Option<(usize, usize)>,
    /// Field path, such as `network.nics[0].mac`; empty for the whole record.
    pub field: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)?;
        if let Some((line, column)) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        Ok(())
    }
}

/// Why the parser refuses a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The text exceeds [`Limits::record_octets`](super::Limits::record_octets).
    #[error(
        "{source_name}: expected at most {limit} octets, found {found}; move large user-data to a separate file \
         and name that in `source: {{file: …}}`"
    )]
    TooLarge {
        /// Source of the record, such as its file name.
        source_name: String,
        /// Size of the text in octets.
        found: usize,
        /// Maximum size in octets.
        limit: usize,
    },
    /// The text is not YAML or JSON, or a value has the wrong form.
    #[error("{place}: {reason}")]
    Unreadable {
        /// Place of the problem.
        place: Box<Place>,
        /// The parser's message: what it expected and what it found.
        reason: String,
    },
    /// Each value has the right form, but it contradicts another value or exceeds a limit.
    #[error("{place}: expected {expected}, found {found}; {remedy}")]
    Refused {
        /// Place of the problem.
        place: Box<Place>,
        /// What the record should contain.
        expected: String,
        /// What it contains.
        found: String,
        /// How to correct it.
        remedy: &'static str,
    },
}

/// A probable mistake in a record that the agent serves nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Place of the problem.
    pub place: Place,
    /// What the agent does, and how to change it.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}
