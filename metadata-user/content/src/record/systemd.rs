//! `systemd_credentials`: the document from which `systemd-imds` imports credentials (systemd 261 and later).
//!
//! The client reads GCE's attribute `systemd-userdata`, and user-data on other clouds. It takes user-data as its own if
//! that begins with [`MARK`] or is a JSON mapping.

use bytes::Bytes;
use serde::Serialize;

use super::Record;
use super::dialects::Dialect;
use super::parse::way;
use super::validate::{ValidationResult, Validator};
use super::vm::SystemdCredential;

/// The first line of user-data that is for systemd.
pub const MARK: &str = "#systemd-userdata\n";
/// GCE's attribute for systemd.
pub const ATTRIBUTE: &str = "systemd-userdata";
/// Maximum number of credentials of a record.
pub const SYSTEMD_CREDENTIALS: usize = 64;

/// The document that systemd's client reads.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(rename = "systemd.credentials")]
    credentials: &'a [SystemdCredential],
}

impl Record {
    /// Returns the document with the record's credentials; `None` without credentials.
    #[must_use]
    pub fn systemd_document(&self) -> Option<String> {
        let credentials = Some(&self.systemd_credentials).filter(|credentials| !credentials.is_empty())?;
        serde_json::to_string(&Document { credentials }).ok()
    }

    /// Returns the document as user-data.
    fn systemd_user_data(&self) -> Option<Bytes> {
        Some((MARK.to_owned() + &self.systemd_document()? + "\n").into())
    }

    /// Puts the credentials into user-data, unless the record has its own.
    pub(super) fn fill_user_data(&mut self) {
        if self.user_data.is_none() {
            self.user_data = self.systemd_user_data().map(Into::into);
        }
    }
}

impl Validator<'_> {
    pub(super) fn systemd(&mut self, record: &Record) -> ValidationResult {
        let credentials = &record.systemd_credentials;
        let here = way!["systemd_credentials"];
        self.at_most(&here, SYSTEMD_CREDENTIALS, credentials.len(), "credentials")?;
        for (n, credential) in credentials.iter().enumerate() {
            if credential.forms() != 1 {
                let expected = "exactly one of `text`, `data` and `encrypted`";
                let place = way!["systemd_credentials", n];
                return Err(self.refuse(&place, expected, credential.forms(), "keep one of them"));
            }
            if credential.is_void() {
                let place = way!["systemd_credentials", n];
                return Err(self.refuse(
                    &place,
                    "content in `data` or `encrypted`",
                    "none",
                    "use `text: \"\"`",
                ));
            }
            if credentials[..n].iter().any(|other| other.name == credential.name) {
                let place = way!["systemd_credentials", n, "name"];
                return Err(self.refuse(
                    &place,
                    "each name once",
                    "the same name twice",
                    "remove one of them",
                ));
            }
        }
        let Some(document) = record.systemd_user_data() else { return Ok(()) };
        let cap = record.serve.limits.user_data;
        if document.len() > usize::try_from(cap).unwrap_or(usize::MAX) {
            let expected = format!("a document of at most {cap} bytes");
            let remedy = "shorten the credentials, or raise serve.limits.user_data";
            return Err(self.refuse(&here, expected, document.len(), remedy));
        }
        let is_own =
            record.user_data.as_ref().is_some_and(|own| own.bytes().is_none_or(|own| own != document));
        if is_own {
            let others = match record.serve.serves(Dialect::Gce) {
                true => "only GCE's attribute `systemd-userdata` has them",
                false => "no dialect serves them",
            };
            let message = format!("the record has user_data of its own, so {others}; leave one of both out");
            self.warn(&here, message);
        }
        if record.metadata.0.contains_key(ATTRIBUTE) {
            self.warn(
                &way!["metadata", ATTRIBUTE],
                "left out of GCE's attributes: systemd_credentials are there",
            );
        }
        Ok(())
    }
}
