use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use super::{
    CHAIN, CertificateError, DOCUMENT_BYTES, DocumentError, OwnCertificate, attested, civil, envelope,
    signature,
};
use crate::documents::Content;
use crate::key::SigningKeyError;
use crate::openssl::Operator;

/// 2026-11-28 00:16:17 UTC.
const NOW: u64 = 1_795_824_977;
const DOCUMENT: &str = r#"{"instanceId":"i-0123","region":"lab"}"#;

fn statement(value: Value) -> Map<String, Value> {
    value.as_object().expect("an object").clone()
}

/// Wraps base64 as PEM does.
fn pem(text: &str) -> String {
    let lines: Vec<_> =
        text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).expect("ASCII")).collect();
    format!("-----BEGIN PKCS7-----\n{}\n-----END PKCS7-----\n", lines.join("\n"))
}

#[test]
fn a_signature_is_that_of_the_bytes() {
    let Some(operator) = Operator::or_skip() else { return };
    let own = operator.certificate();
    let text = signature(own.loaded(), DOCUMENT).expect("signed");
    assert_eq!(signature(own.loaded(), DOCUMENT).expect("signed"), text, "PKCS#1 v1.5 has one signature");
    operator.write("signature", STANDARD.decode(text).expect("base64"));
    operator.run("x509 -in own.pem -pubkey -noout -out public");
    for (document, good) in [(DOCUMENT.to_owned(), true), (DOCUMENT.replace("0123", "0124"), false)] {
        operator.write("document", &document);
        let verified = operator.verify("dgst -sha256 -verify public -signature signature document");
        assert_eq!(verified.is_some(), good, "{document}");
    }
}

#[test]
fn an_envelope_is_verified_by_openssl_and_not_after_a_change() {
    let Some(operator) = Operator::or_skip() else { return };
    let own = operator.certificate();
    let text = envelope(own.loaded(), DOCUMENT, Content::Attached, NOW).expect("signed");
    operator.write("good", pem(&text));
    operator.issue("other");
    for (command, verified) in [
        // As AWS documents.
        ("smime -verify -in good -inform PEM -certfile own.pem -noverify", true),
        ("cms -verify -in good -inform PEM -certfile own.pem -noverify", true),
        // The certificate is attached, and its chain leads to the root.
        ("smime -verify -in good -inform PEM -noverify", true),
        ("cms -verify -in good -inform PEM -CAfile root.pem -purpose any", true),
        ("cms -verify -in good -inform PEM -CAfile other.pem -purpose any", false),
        ("smime -verify -in good -inform PEM -certfile other.pem -nointern -noverify", false),
    ] {
        let found = operator.verify(command);
        assert_eq!(found.as_deref(), verified.then_some(DOCUMENT.as_bytes()), "{command}");
    }
    let bytes = STANDARD.decode(&text).expect("base64");
    let at = bytes.windows(6).position(|part| part == b"i-0123").expect("the document is within");
    let end = bytes.len() - 1;
    for changed in [at, at + 5, end] {
        let mut bytes = bytes.clone();
        bytes[changed] ^= 1;
        operator.write("changed", pem(&STANDARD.encode(bytes)));
        let found = operator.verify("smime -verify -in changed -inform PEM -certfile own.pem -noverify");
        assert_eq!(found, None, "byte {changed}");
    }
    let printed = operator.run("cms -cmsout -print -in good -inform PEM -noout");
    let printed = String::from_utf8_lossy(&printed);
    for part in ["signingTime", "Nov 28 00:16:17 2026 GMT", "messageDigest", "rsaEncryption", "sha256"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
}

#[test]
fn a_statement_is_dated_and_verified_as_azure_documents() {
    let Some(operator) = Operator::or_skip() else { return };
    let own = operator.certificate();
    for (given, nonce) in [
        (json!({"vmId": "v", "nonce": "1234567890"}), "1234567890"),
        (json!({"vmId": "v"}), "20261128-001617"),
    ] {
        let text = attested(own.loaded(), statement(given), NOW, 3_600).expect("signed");
        operator.write("decoded", STANDARD.decode(text).expect("base64"));
        operator.run("pkcs7 -in decoded -inform DER -out sign.pk7");
        let found = operator.run("smime -verify -in sign.pk7 -inform pem -noverify");
        let times = json!({"createdOn": "11/28/26 00:16:17 -0000", "expiresOn": "11/28/26 01:16:17 -0000"});
        let expected = json!({"vmId": "v", "nonce": nonce, "timeStamp": times});
        assert_eq!(serde_json::from_slice::<Value>(&found).expect("JSON"), expected);
        let certificates = operator.run("pkcs7 -in decoded -inform DER -print_certs");
        assert_eq!(String::from_utf8_lossy(&certificates).matches("BEGIN CERTIFICATE").count(), 2);
    }
}

#[test]
fn a_detached_signature_verifies_with_the_document_only() {
    let Some(operator) = Operator::or_skip() else { return };
    let own = operator.certificate();
    let text = envelope(own.loaded(), DOCUMENT, Content::Detached, NOW).expect("signed");
    operator.write("signed", STANDARD.decode(text).expect("base64"));
    operator.write("document", DOCUMENT);
    let words = "smime -verify -in signed -inform DER -content document -noverify";
    assert_eq!(operator.run(words), DOCUMENT.as_bytes());
    operator.write("document", DOCUMENT.replacen('{', "{ ", 1).into_bytes());
    assert!(operator.verify(words).is_none(), "another document");
}

#[test]
fn the_key_signs_nothing_but_objects() {
    let Some(operator) = Operator::or_skip() else { return };
    let own = operator.certificate();
    let with = own.loaded();
    let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(DOCUMENT_BYTES));
    let longest = format!(r#"{{"a":"{}"}}"#, "x".repeat(DOCUMENT_BYTES - 8));
    assert_eq!(longest.len(), DOCUMENT_BYTES);
    assert!(signature(with, &longest).is_ok());
    for document in ["", "1", "[]", " {}", "{} {}", "{", "eyJhbGciOiJSUzI1NiJ9.e30", "0\u{82}", &long] {
        assert!(matches!(signature(with, document), Err(DocumentError::Form)), "{document}");
        assert!(
            matches!(envelope(with, document, Content::Detached, NOW), Err(DocumentError::Form)),
            "{document}"
        );
    }
    let dated = statement(json!({"timeStamp": {"expiresOn": "11/28/99 00:16:17 -0000"}}));
    assert!(matches!(attested(with, dated, NOW, 60), Err(DocumentError::Times)));
    let beyond = attested(with, Map::new(), u64::MAX, 60);
    assert!(matches!(beyond, Err(DocumentError::Clock)), "{beyond:?}");
}

#[test]
fn times_have_the_form_of_azure() {
    for (unix, stated, nonce) in [
        (0, "01/01/70 00:00:00 -0000", "19700101-000000"),
        (NOW, "11/28/26 00:16:17 -0000", "20261128-001617"),
        (2_524_608_000, "01/01/50 00:00:00 -0000", "20500101-000000"),
    ] {
        let time = civil(unix).expect("a time");
        assert_eq!((&*time.stated(), &*time.nonce()), (stated, nonce));
    }
}

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
