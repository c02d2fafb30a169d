//! Validates `identity`.

use std::path::{Path, PathBuf};

use metadata_signer::jwt::{LIFETIME_LEAST, LIFETIME_MOST};
use metadata_signer::{Algorithm, CertificateFiles};

use super::{ConfigError, IdentityConfig};

/// Maximum length of an issuer or a URL of keys, in bytes.
const URL_BYTES: usize = 255;
/// Maximum length of a trust domain, in bytes (SPIFFE ID section 2.3).
const TRUST_DOMAIN_BYTES: usize = 255;
/// Longest time that a key may be published before it signs, in hours.
const PUBLISH_HOURS_MOST: u32 = 720;
/// Longest interval of rotation, in days.
const ROTATE_DAYS_MOST: u32 = 3_650;

/// Returns whether the text is an `https` URL without user, query and fragment (OpenID Connect Discovery 1.0 section
/// 3).
fn is_url(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("https://") else { return false };
    let host = rest.split('/').next().unwrap_or_default();
    let is_good = |byte: u8| byte.is_ascii_graphic() && !b"\"#<>?@\\^`{|}".contains(&byte);
    text.len() <= URL_BYTES && !host.is_empty() && text.bytes().all(is_good)
}

fn is_trust_domain(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-._".contains(&byte);
    (1..=TRUST_DOMAIN_BYTES).contains(&text.len()) && text.bytes().all(is_good)
}

impl IdentityConfig {
    /// Validates ranges and combinations of values.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let value = |field, expected: &str, found: String| {
            Err(ConfigError::Value { field, expected: expected.into(), found })
        };
        let url = "a URL of at most 255 characters that begins with https:// and has no query";
        if !is_url(&self.issuer) {
            return value("identity.issuer", url, format!("`{}`", self.issuer));
        }
        if let Some(found) = self.jwks_uri.as_ref().filter(|uri| !is_url(uri)) {
            return value("identity.jwks_uri", url, format!("`{found}`"));
        }
        if self.keys == Path::new("") {
            return value("identity.keys", "a directory", "an empty text".into());
        }
        if let Some(found) = self.trust_domain.as_ref().filter(|domain| !is_trust_domain(domain)) {
            let expected = "1 to 255 lower-case letters, digits, `-`, `.` and `_`";
            return value("identity.trust_domain", expected, format!("`{found}`"));
        }
        if let Some(CertificateFiles { chain, key }) = &self.certificate
            && [chain, key].contains(&&PathBuf::new())
        {
            return value(
                "identity.certificate",
                "`chain` and `key` with a file each",
                "an empty text".into(),
            );
        }
        if !(LIFETIME_LEAST..=LIFETIME_MOST).contains(&self.lifetime_seconds) {
            let expected = format!("{LIFETIME_LEAST} to {LIFETIME_MOST}");
            return value("identity.lifetime_seconds", &expected, self.lifetime_seconds.to_string());
        }
        if self.publish_hours > PUBLISH_HOURS_MOST {
            let expected = format!("at most {PUBLISH_HOURS_MOST}");
            return value("identity.publish_hours", &expected, self.publish_hours.to_string());
        }
        self.validate_rotation()
    }

    fn validate_rotation(&self) -> Result<(), ConfigError> {
        let value = |expected: String, found: String| {
            Err(ConfigError::Value { field: "identity.rotate_days", expected, found })
        };
        let days = self.rotate_days;
        if days == 0 {
            return Ok(());
        }
        if self.algorithm == Algorithm::Rs256 {
            let expected = "0 with RS256, whose keys others make";
            return value(expected.into(), days.to_string());
        }
        // The next key must sign for longer than a token of the last one lives.
        let least = (self.publish_hours + 1).div_ceil(24).max(1);
        if !(least..=ROTATE_DAYS_MOST).contains(&days) {
            let expected = format!("0, or {least} to {ROTATE_DAYS_MOST} with this `publish_hours`");
            return value(expected, days.to_string());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn read(more: &str) -> Result<Config, String> {
        let config =
            Config::parse(&format!("identity: {{keys: /keys, {more}}}\n")).map_err(|e| e.to_string())?;
        config.validate().map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn only_issuer_and_keys_are_required() {
        let config = read("issuer: 'https://imds.example/'").expect("valid");
        let identity = config.identity.expect("an issuer");
        assert_eq!((identity.lifetime_seconds, identity.publish_hours, identity.rotate_days), (3_600, 24, 0));
        assert_eq!(identity.jwks_uri(), "https://imds.example/.well-known/jwks.json");
        assert!(Config::parse("identity: {keys: /keys}\n").is_err());
        assert!(Config::parse("identity: {issuer: 'https://a'}\n").is_err());
    }

    #[test]
    fn values_out_of_range_are_refused_by_field() {
        let good = "issuer: 'https://a'";
        for (field, more) in [
            ("issuer", "issuer: 'http://a'"),
            ("issuer", "issuer: 'https://'"),
            ("issuer", "issuer: 'https://a?b'"),
            ("issuer", "issuer: 'https://user@a'"),
            ("jwks_uri", "issuer: 'https://a', jwks_uri: 'ftp://a'"),
            ("trust_domain", "issuer: 'https://a', trust_domain: 'Example.org'"),
            ("trust_domain", "issuer: 'https://a', trust_domain: ''"),
            ("trust_domain", "issuer: 'https://a', trust_domain: 'a/b'"),
            ("certificate", "issuer: 'https://a', certificate: {chain: c.pem, key: ''}"),
            ("lifetime_seconds", "issuer: 'https://a', lifetime_seconds: 3601"),
            ("lifetime_seconds", "issuer: 'https://a', lifetime_seconds: 9"),
            ("publish_hours", "issuer: 'https://a', publish_hours: 721"),
            ("rotate_days", "issuer: 'https://a', rotate_days: 1"),
            ("rotate_days", "issuer: 'https://a', rotate_days: 30, algorithm: RS256"),
        ] {
            let error = read(more).expect_err(more);
            assert!(error.starts_with(&format!("identity.{field}: expected")), "{more}: {error}");
        }
        for more in [
            "rotate_days: 2",
            "rotate_days: 1, publish_hours: 23",
            "algorithm: EdDSA",
            "trust_domain: a.b-c_d",
            "certificate: {chain: c.pem, key: k.pem}",
        ] {
            read(&format!("{good}, {more}")).expect(more);
        }
    }
}
