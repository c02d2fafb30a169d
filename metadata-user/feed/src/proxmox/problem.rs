//! Why a configuration, or a part of it, is not used.

use std::fmt::Display;

use crate::part::PartError;
use metadata_content::record::RecordError;
use metadata_content::record::values::excerpt;

/// A fault of a VM's configuration. No text repeats a secret.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Problem {
    /// The file as a whole.
    #[error("expected {expected}, found {found}")]
    File {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A setting of the file.
    #[error("`{key}`: expected {expected}, found {found}; change it by `qm set`")]
    Setting {
        /// The setting.
        key: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A file that `cicustom` names.
    #[error("`cicustom`, {part}: expected {expected}, found {found}")]
    Custom {
        /// Which document.
        part: &'static str,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The block in the description.
    #[error("the description's block ```imds: expected {expected}, found {found}")]
    Block {
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: String,
    },
    /// A file beside the configuration.
    #[error(transparent)]
    Part(#[from] PartError),
    /// The template of the subject lets a tenant choose another VM's subject.
    #[error(
        "identity.subject: expected `{{owner}}` beside `{value}`, which whoever may change a VM's options chooses; add it, or \
         leave `subject` out"
    )]
    Subject {
        /// The value in the template.
        value: &'static str,
    },
    /// The record that all of these make.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Problem {
    pub(super) fn file(expected: impl Display, found: impl Display) -> Self {
        Self::File { expected: expected.to_string(), found: found.to_string() }
    }

    pub(super) fn setting(key: impl Display, expected: impl Display, found: impl Display) -> Self {
        Self::Setting { key: key.to_string(), expected: expected.to_string(), found: found.to_string() }
    }

    /// A setting whose value is no secret, and is repeated.
    pub(super) fn value(key: impl Display, expected: impl Display, found: &str) -> Self {
        Self::setting(key, expected, format_args!("`{}`", excerpt(found)))
    }

    pub(super) fn custom(part: &'static str, expected: impl Display, found: impl Display) -> Self {
        Self::Custom { part, expected: expected.to_string(), found: found.to_string() }
    }
}
