//! What is wrong with a record, and where.

use std::fmt;

/// Where in a record something is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The record's source, such as its file name.
    pub source: String,
    /// Line and column, counted from 1, where they are known.
    pub position: Option<(usize, usize)>,
    /// The field, such as `network.nics[0].mac`; empty for the record itself.
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

/// Why a record is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// It is larger than is read.
    #[error(
        "{source_name}: expected at most {limit} octets, found {found}; keep large user-data in a file of its \
         own and name it by `source: {{file: …}}`"
    )]
    TooLarge {
        /// The record's source.
        source_name: String,
        /// Its size in octets.
        found: usize,
        /// The most that is read, in octets.
        limit: usize,
    },
    /// It is no YAML or JSON, or a value has the wrong form.
    #[error("{place}: {reason}")]
    Unreadable {
        /// Where.
        place: Box<Place>,
        /// The parser's words: what was expected and what came.
        reason: String,
    },
    /// Every value has its form, and they do not go together or exceed a limit.
    #[error("{place}: expected {expected}, found {found}; {remedy}")]
    Refused {
        /// Where.
        place: Box<Place>,
        /// What was expected.
        expected: String,
        /// What came.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// Something that is served, and probably not as its author wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Where.
    pub place: Place,
    /// What, and what to do.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}
