//! Checks what the issuer of identity tokens needs: keys, and the certificate for documents.

use std::path::Path;

use super::super::facts::{IdentityKeyFacts, IssuerFacts};
use super::super::{Check, Facts};
use super::count;
use metadata_signer::Algorithm;
use metadata_signer::directory::how_to_make;

/// Days before the certificate expires at which the check asks for another.
const CERTIFICATE_DAYS: u64 = 14;

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let Some(IssuerFacts { directory, algorithm, keys, certificate }) = &facts.identity else {
        return Vec::new();
    };
    let certificate = certificate.as_ref().map(certificate_check);
    std::iter::once(keys_check(directory, *algorithm, keys)).chain(certificate).collect()
}

fn keys_check(directory: &Path, algorithm: Algorithm, keys: &Result<IdentityKeyFacts, String>) -> Check {
    let expected = format!("private keys for {algorithm} in files `*.pem` with mode 0600");
    let remedy = format!("As the user that runs the agent, {}", how_to_make(algorithm, directory));
    let directory = directory.display();
    match keys {
        // The agent does not start without a key.
        Ok(IdentityKeyFacts { count: 0, skipped, made_here: false }) if !skipped.is_empty() => Check::fail(
            "identity.keys",
            format!("{directory} has none for {algorithm}: {}", skipped.join("; ")),
            expected,
            remedy,
        ),
        Ok(IdentityKeyFacts { skipped, .. }) if !skipped.is_empty() => Check::warn(
            "identity.keys",
            skipped.join("; "),
            expected,
            "Mend or remove the files that are named",
        ),
        Ok(IdentityKeyFacts { count: 0, made_here: true, .. }) => {
            Check::ok("identity.keys", format!("{directory} is empty; the signer makes the first key"))
        }
        Ok(IdentityKeyFacts { count: 0, .. }) => {
            Check::fail("identity.keys", format!("{directory} has none"), expected, remedy)
        }
        Ok(keys) => Check::ok("identity.keys", format!("{} in {directory}", count(keys.count, "key"))),
        Err(reason) => Check::fail("identity.keys", reason.clone(), expected, remedy),
    }
}

fn certificate_check(certificate: &Result<u64, String>) -> Check {
    let name = "identity.certificate";
    match certificate {
        Ok(days) if *days >= CERTIFICATE_DAYS => Check::ok(name, format!("valid for {}", count_days(*days))),
        Ok(days) => Check::warn(
            name,
            format!("expires in {}", count_days(*days)),
            format!("a certificate that is valid for {CERTIFICATE_DAYS} days or longer"),
            "Replace the files of `identity.certificate`. A running signer reads them again",
        ),
        Err(reason) => Check::fail(
            name,
            reason.clone(),
            "a chain in PEM, and its RSA key of 2,048 to 4,096 bits with mode 0600",
            "Correct `identity.certificate`, or remove it: documents of EC2 and Azure are then not signed",
        ),
    }
}

fn count_days(days: u64) -> String {
    count(usize::try_from(days).unwrap_or(usize::MAX), "day")
}
