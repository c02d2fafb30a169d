//! Tests the checks of what the issuer of identity tokens needs.

use super::super::super::CheckStatus::{Fail, Warn};
use super::super::super::facts::{Facts, IdentityKeyFacts, IssuerFacts};
use super::{all, healthy, judge, wrong};
use metadata_signer::Algorithm;

fn needs(facts: &mut Facts) -> &mut IssuerFacts {
    facts.identity.as_mut().expect("an issuer")
}

fn keys(facts: &mut Facts) -> &mut IdentityKeyFacts {
    needs(facts).keys.as_mut().expect("a directory")
}

#[test]
fn keys_and_certificate_of_identity_tokens_are_checked() {
    judge(&[
        (
            "no directory",
            |f| needs(f).keys = Err("cannot read /some/keys: no".into()),
            "identity.keys",
            Fail,
            &["cannot read /some/keys: no", "xdp-imds identity key /some/keys"],
        ),
        (
            "no key",
            |f| keys(f).count = 0,
            "identity.keys",
            Fail,
            &["/some/keys has none", "xdp-imds identity key /some/keys"],
        ),
        (
            "a key that others can read",
            |f| keys(f).skipped = vec!["/some/keys/a.pem is not private".into()],
            "identity.keys",
            Warn,
            &["/some/keys/a.pem is not private", "Mend or remove"],
        ),
        (
            "no key for the algorithm",
            |f| {
                needs(f).algorithm = Algorithm::Rs256;
                *keys(f) = IdentityKeyFacts {
                    count: 0,
                    skipped: vec!["/some/keys/a.pem: expected a key for RS256, found another".into()],
                    made_here: false,
                };
            },
            "identity.keys",
            Fail,
            &["/some/keys has none for RS256", "a.pem: expected", "openssl genpkey -algorithm RSA", "ES256"],
        ),
        (
            "a certificate of somebody else",
            |f| needs(f).certificate = Some(Err("found another".into())),
            "identity.certificate",
            Fail,
            &["found another", "identity.certificate"],
        ),
        (
            "the last days of the certificate",
            |f| needs(f).certificate = Some(Ok(13)),
            "identity.certificate",
            Warn,
            &["expires in 13 days", "Replace the files"],
        ),
    ]);
}

#[test]
fn a_signer_that_makes_its_keys_needs_none_at_the_start() {
    let mut facts = healthy();
    *keys(&mut facts) = IdentityKeyFacts { count: 0, skipped: Vec::new(), made_here: true };
    assert!(wrong(&all(&facts)).is_empty());
}
