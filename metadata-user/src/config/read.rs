//! Reading the configuration file, and the values whose written form needs code.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use metadata_steer::HUBS_OF_A_SIDE;

use super::Config;

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be; the text names file, line and field.
    #[error("{}: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Field, line and reason.
        reason: String,
    },
    /// A value out of its range.
    #[error("{field}: expected {expected}, found {found}")]
    Value {
        /// The field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
}

impl Config {
    /// Reads a file and checks its values.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown field, or a value is out of range.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let config = Self::parse(&text).map_err(|reason| ConfigError::Parse { path: path.into(), reason })?;
        match config.validate() {
            Ok(()) => Ok(config),
            Err(error) => Err(ConfigError::Parse { path: path.into(), reason: error.to_string() }),
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        // An empty document is null to YAML, and "all defaults" to a person.
        if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        let yaml = serde_yaml::Deserializer::from_str(text);
        serde_path_to_error::deserialize(yaml).map_err(|error| format!("{}: {}", error.path(), error.inner()))
    }
}

/// Reads `workers`, a number from 1 to [`HUBS_OF_A_SIDE`].
///
/// # Errors
/// When it is anything else.
pub fn workers(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=HUBS_OF_A_SIDE).contains(number));
    number.ok_or_else(|| format!("expected a number of workers from 1 to {HUBS_OF_A_SIDE}, found `{text}`"))
}

/// Octets, as a number or with a unit: `KiB`, `MiB` or `GiB`.
fn octets(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].trim_start() {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        _ => None,
    };
    let number = text[..digits].parse::<usize>().ok();
    let octets = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    octets.ok_or_else(|| format!("expected octets such as 536870912 or `512MiB`, found `{text}`"))
}

pub(super) fn octets_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "octets such as 536870912 or `512MiB`")]
    enum Written {
        Number(usize),
        Text(String),
    }
    match Option::<Written>::deserialize(from)? {
        None => Ok(None),
        Some(Written::Number(number)) => Ok(Some(number)),
        Some(Written::Text(text)) => octets(&text).map(Some).map_err(serde::de::Error::custom),
    }
}

pub(super) fn workers_field<'de, D: serde::Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = i64::deserialize(from)?;
    workers(&number.to_string()).map_err(serde::de::Error::custom)
}
