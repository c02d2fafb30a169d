use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use super::{CHAIN, CertificateError, OwnCertificate};
use crate::key::SigningKeyError;
use crate::openssl::Operator;

#[test]
fn a_chain_and_its_key_are_read_in_each_form() {
    let Some(operator) = Operator::or_skip() else { return };
    let own = operator.certificate();
    assert_eq!(own.loaded().chain.len(), 2);
    assert!(own.loaded().until() > 0);
    // The form of cert-manager's RSA keys.
    operator.run("rsa -in own.key -traditional -out own.key");
    operator.make_private("own.key");
    assert_eq!(operator.certificate().loaded().thumbprint(), own.loaded().thumbprint());
    assert!(!format!("{own:?}").contains("PRIVATE"));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let Some(operator) = Operator::or_skip() else { return };
    operator.issue("other");
    let curve = "-newkey ec -pkeyopt ec_paramgen_curve:P-256";
    operator.run(&format!("req -x509 {curve} -nodes -keyout ec.key -out ec.chain -subj /CN=ec"));
    operator.make_private("ec.key");
    let read_file = |file: &str| fs::read(operator.path(file)).expect("read");
    let (own, private) = (read_file("own.chain"), read_file("own.key"));
    operator.write("long.chain", own.repeat(CHAIN));
    operator.write("key.chain", [own.clone(), private.clone()].concat());
    operator.write("open.key", &private);
    fs::set_permissions(operator.path("open.key"), Permissions::from_mode(0o640)).expect("set");
    operator.write("big.chain", vec![b'#'; super::FILE_BYTES + 1]);
    let read = |chain: &str, key: &str| {
        let mut files = operator.files();
        (files.chain, files.key) = (operator.path(chain), operator.path(key));
        OwnCertificate::read(files).expect_err("refused")
    };
    type Check = fn(&CertificateError) -> bool;
    let cases: [(&str, &str, Check); 10] = [
        ("none", "own.key", |error| matches!(error, CertificateError::Io { .. })),
        ("own.chain", "none", |error| matches!(error, CertificateError::Io { .. })),
        (".", "own.key", |error| matches!(error, CertificateError::NotAFile { .. })),
        ("big.chain", "own.key", |error| matches!(error, CertificateError::NotAFile { .. })),
        ("long.chain", "own.key", |error| matches!(error, CertificateError::Chain { .. })),
        ("key.chain", "own.key", |error| matches!(error, CertificateError::Chain { .. })),
        ("own.chain", "open.key", |error| matches!(error, CertificateError::Exposed { mode: 0o640, .. })),
        ("own.chain", "other.key", |error| matches!(error, CertificateError::Others { .. })),
        ("ec.chain", "ec.key", |error| {
            matches!(error, CertificateError::Key { source: SigningKeyError::NotRsa, .. })
        }),
        ("root.pem", "own.key", |error| matches!(error, CertificateError::Others { .. })),
    ];
    for (chain, key, check) in cases {
        let error = read(chain, key);
        assert!(check(&error), "{chain} {key}: {error:?}");
        assert!(!error.to_string().contains("MII"), "{error}");
    }
}

#[test]
fn files_may_be_replaced_one_after_the_other() {
    let Some(operator) = Operator::or_skip() else { return };
    let mut own = operator.certificate();
    let first = own.loaded().thumbprint().to_owned();
    assert!(!own.look().expect("nothing has changed"));
    operator.issue("next");
    fs::rename(operator.path("next.chain"), operator.path("own.chain")).expect("moved");
    assert!(matches!(own.look(), Err(CertificateError::Others { .. })));
    assert_eq!(own.loaded().thumbprint(), first);
    fs::rename(operator.path("next.key"), operator.path("own.key")).expect("moved");
    assert!(own.look().expect("both fit"));
    assert_ne!(own.loaded().thumbprint(), first);
}
