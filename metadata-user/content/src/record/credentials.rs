//! Credentials in files beside the record, and those for the guest's service manager. The agent reads a file again when
//! it changes, and errors about it never contain its content.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::dialects::Dialect;
use super::validate::{ValidationResult, Validator};
use super::values::{Line, Secret, TextForm as _, Timestamp};
use super::vm::{AccessToken, Credentials, FileSource, Iam, ManagedIdentity, SystemdCredential};
use super::{PathStep, Record, way};
use crate::parser;

/// Maximum size of a credential file, in bytes.
pub const CREDENTIAL_BYTES: usize = 65_536;

/// The content of a credential file has the wrong form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected}, found {found}")]
pub struct CredentialError {
    expected: &'static str,
    found: &'static str,
}

const KEYS: &str = "JSON with `AccessKeyId`, `SecretAccessKey`, `Token` and `Expiration` (RFC 3339)";
const TOKEN: &str = "a token on one line";
const IDENTITY: &str = "a JWT, or JSON with `access_token` and `expires_on` (Unix seconds)";
const EXPIRY: &str = "a JWT with an `exp` claim";

/// A credential that can have a source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// `credentials.iam`: keys as JSON, as AWS returns them.
    Iam,
    /// `credentials.service_account.token`: a token on one line.
    ServiceAccount,
    /// `credentials.managed_identity`: a JWT, or the JSON document that Azure returns.
    ManagedIdentity,
}

impl Credential {
    /// All variants.
    pub const ALL: [Self; 3] = [Self::Iam, Self::ServiceAccount, Self::ManagedIdentity];

    /// Returns the path of the record field that names the file.
    #[must_use]
    pub fn field(self) -> Vec<PathStep> {
        match self {
            Self::Iam => way!["credentials", "iam", "source", "file"].into(),
            Self::ServiceAccount => way!["credentials", "service_account", "token", "source", "file"].into(),
            Self::ManagedIdentity => way!["credentials", "managed_identity", "source", "file"].into(),
        }
    }
}

impl Credentials {
    /// Returns the source file of a credential; `None` if the record has none.
    #[must_use]
    pub fn source(&self, credential: Credential) -> Option<&FileSource> {
        match credential {
            Credential::Iam => self.iam.as_ref()?.source.as_ref(),
            Credential::ServiceAccount => self.service_account.as_ref()?.token.as_ref()?.source.as_ref(),
            Credential::ManagedIdentity => self.managed_identity.as_ref()?.source.as_ref(),
        }
    }

    /// Turns credentials read from source files into literal ones. The copy of the record then needs no files.
    pub(super) fn settle(&mut self) {
        if let Some(iam) = self.iam.as_mut().filter(|iam| iam.secret_access_key.is_some()) {
            iam.source = None;
        }
        let token = self.service_account.as_mut().and_then(|account| account.token.as_mut());
        if let Some(token) = token.filter(|token| token.text.is_some()) {
            token.source = None;
        }
        if let Some(identity) = self.managed_identity.as_mut().filter(|identity| identity.text.is_some()) {
            identity.source = None;
        }
    }

    /// Stores the content of a credential's source file.
    ///
    /// # Errors
    /// [`CredentialError`] if the content has the wrong form; the credential then does not change.
    pub fn resolve(&mut self, credential: Credential, bytes: &[u8]) -> Result<(), CredentialError> {
        let account = self.service_account.as_mut().and_then(|account| account.token.as_mut());
        match (credential, &mut self.iam, account, &mut self.managed_identity) {
            (Credential::Iam, Some(iam), _, _) => keys(iam, bytes),
            (Credential::ServiceAccount, _, Some(token), _) => service_account(token, bytes),
            (Credential::ManagedIdentity, _, _, Some(identity)) => managed_identity(identity, bytes),
            _ => Ok(()),
        }
    }
}

/// Credentials in the JSON form of AWS's metadata service, STS and `credential_process`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Keys {
    access_key_id: Line,
    secret_access_key: Secret,
    #[serde(alias = "SessionToken")]
    token: Option<Secret>,
    expiration: Option<Timestamp>,
    last_updated: Option<Timestamp>,
}

fn keys(iam: &mut Iam, bytes: &[u8]) -> Result<(), CredentialError> {
    let keys: Keys = json(bytes, KEYS)?;
    iam.access_key_id = Some(keys.access_key_id);
    iam.secret_access_key = Some(keys.secret_access_key);
    iam.session_token = keys.token;
    iam.expires = keys.expiration;
    iam.updated = keys.last_updated;
    Ok(())
}

fn service_account(token: &mut AccessToken, bytes: &[u8]) -> Result<(), CredentialError> {
    let text = line(bytes, TOKEN)?;
    let expires = token.expires.clone().or_else(|| expiry(text.expose()));
    token.expires =
        Some(expires.ok_or(CredentialError { expected: EXPIRY, found: "none, and no `expires`" })?);
    token.text = Some(text);
    Ok(())
}

/// Response of Azure's `identity/oauth2/token`, which encodes numbers as strings.
#[derive(Deserialize)]
struct Identity {
    access_token: Secret,
    expires_on: Option<Value>,
}

fn managed_identity(identity: &mut ManagedIdentity, bytes: &[u8]) -> Result<(), CredentialError> {
    let (text, expires) = if bytes.trim_ascii_start().starts_with(b"{") {
        let read: Identity = json(bytes, IDENTITY)?;
        let seconds = read.expires_on.as_ref().and_then(|value| match value {
            Value::String(digits) => digits.parse().ok(),
            number => number.as_i64(),
        });
        (read.access_token, seconds.and_then(Timestamp::at))
    } else {
        (line(bytes, IDENTITY)?, None)
    };
    let expires = expires.or_else(|| expiry(text.expose()));
    let expires = expires.ok_or(CredentialError { expected: EXPIRY, found: "none, and no `expires_on`" })?;
    (identity.text, identity.expires) = (Some(text), Some(expires));
    Ok(())
}

/// Parses JSON. Drops the parser's message, which would repeat secret content.
fn json<T: DeserializeOwned>(bytes: &[u8], expected: &'static str) -> Result<T, CredentialError> {
    parser::json(bytes).map_err(|_| CredentialError { expected, found: "something else" })
}

/// Parses one line of text and drops a final newline.
fn line(bytes: &[u8], expected: &'static str) -> Result<Secret, CredentialError> {
    let text = std::str::from_utf8(bytes.trim_ascii()).ok();
    let found = if bytes.trim_ascii().is_empty() { "nothing" } else { "something else" };
    text.and_then(Secret::read).ok_or(CredentialError { expected, found })
}

/// Returns `exp` of a JWT (RFC 7519 §4.1.4). Does not check the signature, which the token's recipients check.
fn expiry(jwt: &str) -> Option<Timestamp> {
    let mut parts = jwt.split('.');
    let (_, claims, _) = (parts.next()?, parts.next()?, parts.next()?);
    let claims = URL_SAFE_NO_PAD.decode(claims.trim_end_matches('=')).ok()?;
    let claims: Value = parser::json(&claims).ok()?;
    // A NumericDate may have a fraction; a `Timestamp` has whole seconds.
    let digits = claims.get("exp")?.to_string();
    Timestamp::at(digits.split('.').next()?.parse().ok()?)
}

// `systemd_credentials`: the document from which `systemd-imds` imports credentials (systemd 261 and later).
//
// The client reads GCE's attribute `systemd-userdata`, and user-data on other clouds. It takes user-data as its own if
// that begins with [`SYSTEMD_MARK`] or is a JSON mapping.

/// The first line of user-data that is for systemd.
pub(crate) const SYSTEMD_MARK: &str = "#systemd-userdata\n";
/// GCE's attribute for systemd.
pub(crate) const SYSTEMD_ATTRIBUTE: &str = "systemd-userdata";
/// Maximum number of credentials of a record.
pub(crate) const SYSTEMD_CREDENTIALS: usize = 64;

/// The document that systemd's client reads.
#[derive(Serialize)]
struct SystemdDocument<'a> {
    #[serde(rename = "systemd.credentials")]
    credentials: &'a [SystemdCredential],
}

impl Record {
    /// Returns the document with the record's credentials; `None` without credentials.
    #[must_use]
    pub fn systemd_document(&self) -> Option<String> {
        let credentials = Some(&self.systemd_credentials).filter(|credentials| !credentials.is_empty())?;
        serde_json::to_string(&SystemdDocument { credentials }).ok()
    }

    /// Returns the document as user-data.
    fn systemd_user_data(&self) -> Option<Bytes> {
        Some((SYSTEMD_MARK.to_owned() + &self.systemd_document()? + "\n").into())
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
                return self.refuse(&place, expected, credential.forms(), "keep one of them");
            }
            if credential.is_void() {
                let place = way!["systemd_credentials", n];
                return self.refuse(&place, "content in `data` or `encrypted`", "none", "use `text: \"\"`");
            }
            if credentials[..n].iter().any(|other| other.name == credential.name) {
                let place = way!["systemd_credentials", n, "name"];
                return self.refuse(&place, "each name once", "the same name twice", "remove one of them");
            }
        }
        let Some(document) = record.systemd_user_data() else { return Ok(()) };
        let cap = record.serve.limits.user_data;
        if document.len() > usize::try_from(cap).unwrap_or(usize::MAX) {
            let expected = format!("a document of at most {cap} bytes");
            let remedy = "shorten the credentials, or raise serve.limits.user_data";
            return self.refuse(&here, expected, document.len(), remedy);
        }
        let is_own =
            record.user_data.as_ref().is_some_and(|own| own.bytes().is_none_or(|own| own != document));
        if is_own {
            let others = if record.serve.serves(Dialect::Gce) {
                "only GCE's attribute `systemd-userdata` has them"
            } else {
                "no dialect serves them"
            };
            let message = format!("the record has user_data of its own, so {others}; leave one of them out");
            self.warn(&here, message);
        }
        if record.metadata.0.contains_key(SYSTEMD_ATTRIBUTE) {
            self.warn(
                &way!["metadata", SYSTEMD_ATTRIBUTE],
                "left out of GCE's attributes: systemd_credentials are there",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;

    use super::{Credential, Timestamp, URL_SAFE_NO_PAD, expiry};
    use crate::record::Record;
    use crate::record::vm::Credentials;

    const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");

    /// Credentials of the full record, each with a source file that is not read yet.
    fn sourced(expires: &str) -> Credentials {
        let mut record: serde_json::Value = serde_yaml::from_str(FULL).expect("YAML");
        let source = serde_json::json!({ "file": "secret" });
        record["credentials"] = serde_json::json!({
            "iam": { "role": "app", "source": source },
            "service_account": { "name": "web", "token": { "source": source } },
            "managed_identity": { "client_id": "c", "source": source },
        });
        if !expires.is_empty() {
            record["credentials"]["service_account"]["token"]["expires"] = expires.into();
        }
        Record::parse("r.json", &record.to_string()).expect("a good record").0.credentials
    }

    fn jwt(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[test]
    fn keys_are_accepted_in_each_form_that_aws_returns() {
        let mut credentials = sourced("");
        let forms = [
            r#"{"Code":"Success","LastUpdated":"2026-01-01T00:00:00Z","Type":"AWS-HMAC","AccessKeyId":"A",
                "SecretAccessKey":"s","Token":"t","Expiration":"2026-01-01T06:00:00Z"}"#,
            r#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"s","SessionToken":"t",
                "Expiration":"2026-01-01T06:00:00Z"}"#,
        ];
        for form in forms {
            credentials.resolve(Credential::Iam, form.as_bytes()).expect(form);
            let iam = credentials.iam.as_ref().expect("a role");
            assert_eq!(iam.access_key_id.as_ref().map(|id| id.as_str()), Some("A"));
            assert_eq!(iam.secret_access_key.as_ref().map(|key| key.expose()), Some("s"));
            assert_eq!(iam.session_token.as_ref().map(|token| token.expose()), Some("t"));
            assert_eq!(iam.expires.as_ref().map(Timestamp::as_str), Some("2026-01-01T06:00:00Z"));
        }
        assert!(credentials.iam.expect("a role").updated.is_none(), "a field of the earlier keys remains");
    }

    #[test]
    fn the_records_expiry_of_a_token_overrides_the_expiry_in_the_token() {
        let token = jwt(r#"{"exp":1767225600}"#);
        for (expires, text, ends) in [
            ("", token.as_str(), "2026-01-01T00:00:00Z"),
            ("2030-01-01T00:00:00Z", token.as_str(), "2030-01-01T00:00:00Z"),
            ("2030-01-01T00:00:00Z", "opaque", "2030-01-01T00:00:00Z"),
        ] {
            let mut credentials = sourced(expires);
            credentials.resolve(Credential::ServiceAccount, format!("{text}\n").as_bytes()).expect(text);
            let read = credentials.service_account.and_then(|account| account.token).expect("a token");
            assert_eq!(read.text.as_ref().map(|secret| secret.expose()), Some(text));
            assert_eq!(read.expires.as_ref().map(Timestamp::as_str), Some(ends));
        }
    }

    #[test]
    fn an_identity_is_a_jwt_or_azures_json() {
        let token = jwt(r#"{"exp":1767225600.75}"#);
        let forms = [
            format!(" {token}\n"),
            format!(r#"{{"access_token":"{token}"}}"#),
            r#"{"access_token":"opaque","expires_on":"1767225600","token_type":"Bearer"}"#.to_owned(),
            r#"{"access_token":"opaque","expires_on":1767225600}"#.to_owned(),
        ];
        for form in forms {
            let mut credentials = sourced("");
            credentials.resolve(Credential::ManagedIdentity, form.as_bytes()).expect(&form);
            let read = credentials.managed_identity.expect("an identity");
            assert_eq!(read.expires.as_ref().map(Timestamp::unix_seconds), Some(1_767_225_600));
            let text = read.text.expect("a text");
            assert!(text.expose() == "opaque" || text.expose() == token);
        }
    }

    #[test]
    fn a_malformed_credential_is_refused_without_repeating_it() {
        let secret = "hunter2";
        for (credential, text) in [
            (Credential::Iam, r#""hunter2""#),
            (Credential::Iam, r#"{"AccessKeyId":"hunter2"}"#),
            (Credential::Iam, r#"{"AccessKeyId":"A","SecretAccessKey":"s","Expiration":"hunter2"}"#),
            (Credential::ServiceAccount, ""),
            (Credential::ServiceAccount, "hunter2"),
            (Credential::ServiceAccount, "hunter2\nhunter2"),
            (Credential::ManagedIdentity, "hunter2"),
            (Credential::ManagedIdentity, r#"{"access_token":"hunter2"}"#),
        ] {
            let mut credentials = sourced("");
            let before = credentials.clone();
            let error = credentials.resolve(credential, text.as_bytes()).expect_err(text);
            assert_eq!(credentials, before, "{text}");
            assert!(!format!("{error} {error:?} {credentials:?}").contains(secret), "{text}: {error}");
        }
        for token in ["", "a.b.c", "..", "a.e30.c", &jwt(r#"{"exp":"soon"}"#), &jwt(r#"{"exp":1e300}"#)] {
            assert!(expiry(token).is_none(), "{token}");
        }
    }
}
