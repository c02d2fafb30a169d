//! Reads the keys and the certificate of the issuer of identity tokens, as the signer does.

use std::time::SystemTime;

use metadata_signer::documents::OwnCertificate;
use metadata_signer::{KeyDirectory, Rotation};

use super::super::facts::{IdentityKeyFacts, IssuerFacts};
use crate::config::IdentityConfig;

/// Seconds of a day.
const DAY: u64 = 86_400;

pub(super) fn identity(config: &IdentityConfig) -> IssuerFacts {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let certificate = config.certificate.clone().map(|files| {
        let own = OwnCertificate::read(files).map_err(|error| error.to_string())?;
        Ok(own.loaded().until().saturating_sub(now) / DAY)
    });
    IssuerFacts {
        directory: config.keys.clone(),
        algorithm: config.algorithm,
        keys: keys(config),
        certificate,
    }
}

fn keys(config: &IdentityConfig) -> Result<IdentityKeyFacts, String> {
    let made_here = config.rotate_days > 0;
    if made_here && !config.keys.exists() {
        return Ok(IdentityKeyFacts { count: 0, skipped: Vec::new(), made_here });
    }
    // The ages of keys decide nothing here.
    let rotation = Rotation { publish_for: 0, after: None };
    let mut directory = KeyDirectory::new(config.keys.clone(), config.algorithm, rotation);
    let skipped = directory.look().map_err(|error| error.to_string())?;
    let skipped = skipped.iter().map(ToString::to_string).collect();
    Ok(IdentityKeyFacts { count: directory.keys().len(), skipped, made_here })
}
