//! Reads the file, and parses values that have more than one written form.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use metadata_content::parser::{self, ParseError, PathStep, Syntax};
use metadata_steer::HUBS_OF_A_SIDE;

use super::Config;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is malformed or has an invalid value. The error text names the file and the field, and the line if it
    /// is known.
    #[error("{}{}: {reason}", path.display(), Position(*position))]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line and column, counted from 1, if they are known.
        position: Option<(usize, usize)>,
        /// The field and the reason.
        reason: String,
    },
    /// A value is out of range.
    #[error("{field}: expected {expected}, found {}", if found.is_empty() { "nothing" } else { found })]
    Value {
        /// The field, such as `limits.burst`.
        field: &'static str,
        /// The range of valid values.
        expected: String,
        /// The configured value.
        found: String,
    },
}

/// A position after a file's name.
struct Position(Option<(usize, usize)>);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |(line, column)| write!(f, ":{line}:{column}"))
    }
}

impl Config {
    /// Reads a file and validates its values.
    ///
    /// # Errors
    /// The file cannot be read or parsed, has an unknown field, or has a value out of range.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let config = Self::parse(&text).map_err(|error| {
            let position = error.position;
            let hint =
                if is_record(&text) { "; this is the record of a VM, not a configuration" } else { "" };
            let reason = format!("{}{hint}", ParseError { position: None, ..error });
            ConfigError::Parse { path: path.into(), position, reason }
        })?;
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error) => {
                let field = match &error {
                    ConfigError::Value { field, .. } => *field,
                    ConfigError::Read { .. } | ConfigError::Parse { .. } => "",
                };
                let steps: Vec<PathStep> = field.split('.').map(PathStep::from).collect();
                let position = parser::locate(Syntax::Yaml, &text, &steps);
                Err(ConfigError::Parse { path: path.into(), position, reason: error.to_string() })
            }
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, ParseError> {
        // YAML reads an empty document as null, but users expect it to mean "all defaults".
        if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        parser::yaml(text)
    }
}

/// True for a text that says of itself that it is a record.
fn is_record(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("schema: vmrecord/"))
}

/// Parses `workers`, a number from 1 to [`HUBS_OF_A_SIDE`].
///
/// # Errors
/// The text is not a number in this range.
pub fn workers(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=HUBS_OF_A_SIDE).contains(number));
    number.ok_or_else(|| format!("expected a number of workers from 1 to {HUBS_OF_A_SIDE}, found `{text}`"))
}

/// Parses bytes: a number, optionally with the unit `KiB`, `MiB` or `GiB`.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].trim_start() {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        _ => None,
    };
    let number = text[..digits].parse::<usize>().ok();
    let bytes = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| format!("expected bytes such as 536870912 or `512MiB`, found `{text}`"))
}

pub(super) fn bytes_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected bytes such as 536870912 or `512MiB`")]
    enum NumberOrText {
        Number(usize),
        Text(String),
    }
    match Option::<NumberOrText>::deserialize(from)? {
        None => Ok(None),
        Some(NumberOrText::Number(number)) => Ok(Some(number)),
        Some(NumberOrText::Text(text)) => bytes(&text).map(Some).map_err(serde::de::Error::custom),
    }
}

pub(super) fn workers_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(from)?;
    workers(&number.to_string()).map_err(serde::de::Error::custom)
}
