//! A check of what serving needs on this node, as `xdp-imds doctor` prints it.

use serde::Serialize;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::Path;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// No problem.
    Ok,
    /// Serving works with a restriction, or the result is unknown.
    Warn,
    /// Serving would fail, at startup or for one port.
    Fail,
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The stable name of the check, such as `port.xdp`.
    pub name: &'static str,
    /// The port, directory or address that was checked; `None` if the check has no such subject.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The result.
    pub status: CheckStatus,
    /// The state found.
    pub found: String,
    /// The state expected; `None` if there is no problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What the user should do; `None` if there is no problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Check {
    /// A check without a problem.
    #[must_use]
    pub fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            subject: None,
            status: CheckStatus::Ok,
            found: found.into(),
            expected: None,
            remedy: None,
        }
    }

    /// A restriction, or an unknown result.
    #[must_use]
    pub fn warn(
        name: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (expected, remedy) = (Some(expected.into()), Some(remedy.into()));
        Self { status: CheckStatus::Warn, expected, remedy, ..Self::ok(name, found) }
    }

    /// A reason why serving would fail.
    #[must_use]
    pub fn fail(
        name: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { status: CheckStatus::Fail, ..Self::warn(name, found, expected, remedy) }
    }

    /// Returns this check with a subject.
    #[must_use]
    pub fn of(self, subject: impl Display) -> Self {
        Self { subject: Some(subject.to_string()), ..self }
    }

    /// Checks that a directory exists. `otherwise` is the status if it does not.
    #[must_use]
    pub fn directory(
        name: &'static str,
        path: &Path,
        otherwise: CheckStatus,
        expected: &str,
        remedy: &str,
    ) -> Self {
        match directory_fault(path, std::fs::metadata(path).map(|found| found.is_dir())) {
            None => Self::ok(name, path.display().to_string()),
            Some(found) => Self { status: otherwise, ..Self::fail(name, found, expected, remedy) },
        }
    }
}

/// Why a path is not a directory that can be used; `None` if it is one. `found` says whether it is a directory.
#[must_use]
pub fn directory_fault(path: &Path, found: io::Result<bool>) -> Option<String> {
    let shown = path.display();
    match found {
        Ok(true) => None,
        Ok(false) => Some(format!("{shown} is not a directory")),
        Err(error) if error.kind() == ErrorKind::NotFound => Some(format!("{shown} does not exist")),
        Err(error) => Some(format!("{shown}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Check, CheckStatus};

    #[test]
    fn a_directory_is_there_or_the_check_says_what_is_in_its_place() {
        let room = tempfile::tempdir().expect("a directory");
        std::fs::write(room.path().join("file"), "").expect("written");
        for (name, status, found) in [
            ("", CheckStatus::Ok, ""),
            ("file", CheckStatus::Warn, " is not a directory"),
            ("nothing", CheckStatus::Warn, " does not exist"),
            ("file/below", CheckStatus::Warn, ": Not a directory (os error 20)"),
        ] {
            let path = room.path().join(name);
            let check = Check::directory("a.name", &path, CheckStatus::Warn, "a directory", "Make it");
            assert_eq!((check.status, check.found), (status, format!("{}{found}", path.display())), "{name}");
            assert_eq!(check.remedy.is_some(), status != CheckStatus::Ok, "{name}");
        }
    }
}
