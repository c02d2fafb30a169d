//! The operator's certificate, and what its RSA key signs: documents of clouds, and dated statements.
//!
//! The key signs JSON objects only. So the agent cannot have it sign a certificate, a token or a part of a TLS
//! handshake, which begin with other bytes.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use cms::cert::{CertificateChoices, IssuerAndSerialNumber};
use cms::content_info::{CmsVersion, ContentInfo};
use cms::signed_data::{EncapsulatedContentInfo, SignedData, SignerIdentifier, SignerInfo};
use const_oid::ObjectIdentifier;
use const_oid::db::{rfc5911, rfc5912};
use der::asn1::{GeneralizedTime, Null, OctetString, OctetStringRef, SetOfVec, UtcTime};
use der::{Any, DateTime, Decode as _, Encode as _};
use ring::digest::{SHA256, digest};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use time::OffsetDateTime;
use x509_cert::Certificate;
use x509_cert::attr::Attribute;
use x509_cert::spki::AlgorithmIdentifierOwned;
use x509_cert::time::Time;

use crate::key::{RsaKey, SigningKeyError};

/// Maximum number of certificates in a chain.
pub const CHAIN: usize = 8;
/// Maximum size of a chain's certificates, in bytes. Every PKCS#7 document has them.
pub const CHAIN_BYTES: usize = 12 << 10;
/// Maximum size of a file, in bytes: PEM takes a third more than the certificates, and may have comments.
const FILE_BYTES: usize = 64 << 10;
/// The label of a certificate in a PEM file (RFC 7468 section 5).
const LABEL: &str = "CERTIFICATE";

/// The files of an operator's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CertificateFiles {
    /// PEM file with the certificate, then those of its issuers.
    pub chain: PathBuf,
    /// PEM file with the RSA key (PKCS#8 or PKCS#1). Only its owner may read it.
    pub key: PathBuf,
}

/// Why a certificate cannot be used. No error repeats a part of a key.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The file system refuses.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is too long or not a file.
    #[error("expected a regular file of at most {FILE_BYTES} bytes at {}, found something else", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Other users can read the key.
    #[error("expected {} to be private, found mode {mode:o}; run: chmod 600 {}", path.display(), path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file has no chain.
    #[error(
        "expected 1 to {CHAIN} PEM blocks `{LABEL}` of at most {CHAIN_BYTES} bytes in {}, found something else",
        path.display()
    )]
    Chain {
        /// The file.
        path: PathBuf,
    },
    /// The key cannot be used.
    #[error("{}: {source}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: SigningKeyError,
    },
    /// Key and certificate do not belong together.
    #[error(
        "expected the first certificate of {} to be that of the RSA key in {}, found another", chain.display(),
        key.display()
    )]
    Others {
        /// The file of the chain.
        chain: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
}

/// A file as it was read: modification time, size, inode.
type FileIdentity = (i64, i64, u64, u64);

/// A certificate with its key and its issuers.
#[derive(Debug)]
pub struct LoadedCertificate {
    /// The key.
    pub key: RsaKey,
    /// The certificate, then its issuers.
    pub chain: Vec<Certificate>,
    thumbprint: String,
}

impl LoadedCertificate {
    /// Returns the thumbprint of the certificate (`x5t#S256` of RFC 7515 section 4.1.8).
    #[must_use]
    pub fn thumbprint(&self) -> &str {
        &self.thumbprint
    }

    /// Returns the time when the certificate expires, in Unix seconds.
    #[must_use]
    pub fn until(&self) -> u64 {
        self.chain[0].tbs_certificate.validity.not_after.to_unix_duration().as_secs()
    }
}

/// The certificate of some files, which may change.
#[derive(Debug)]
pub struct OwnCertificate {
    files: CertificateFiles,
    seen: [Option<FileIdentity>; 2],
    loaded: LoadedCertificate,
}

impl OwnCertificate {
    /// Reads the files.
    ///
    /// # Errors
    /// [`CertificateError`].
    pub fn read(files: CertificateFiles) -> Result<Self, CertificateError> {
        let seen = seen(&files);
        Ok(Self { loaded: load(&files)?, files, seen })
    }

    /// Reads the files again if one has changed. Returns whether the certificate is another.
    ///
    /// # Errors
    /// [`CertificateError`]. The certificate then stays unchanged, so that the files may be replaced one by one.
    pub fn look(&mut self) -> Result<bool, CertificateError> {
        let now = seen(&self.files);
        if now == self.seen {
            return Ok(false);
        }
        self.loaded = load(&self.files)?;
        self.seen = now;
        Ok(true)
    }

    /// Returns the certificate as it was read.
    #[must_use]
    pub fn loaded(&self) -> &LoadedCertificate {
        &self.loaded
    }
}

fn seen(files: &CertificateFiles) -> [Option<FileIdentity>; 2] {
    // Follows links, because kubelet mounts Secrets as links.
    [&files.chain, &files.key].map(|path| {
        let status = std::fs::metadata(path).ok()?;
        Some((status.mtime(), status.mtime_nsec(), status.size(), status.ino()))
    })
}

fn load(files: &CertificateFiles) -> Result<LoadedCertificate, CertificateError> {
    let (chain, thumbprint) = chain(&text(&files.chain, false)?)
        .ok_or_else(|| CertificateError::Chain { path: files.chain.clone() })?;
    let key = RsaKey::parse(&text(&files.key, true)?)
        .map_err(|source| CertificateError::Key { path: files.key.clone(), source })?;
    let public = &chain[0].tbs_certificate.subject_public_key_info.subject_public_key;
    if public.raw_bytes() != key.public() {
        return Err(CertificateError::Others { chain: files.chain.clone(), key: files.key.clone() });
    }
    Ok(LoadedCertificate { key, chain, thumbprint })
}

/// Returns the certificates of a PEM file, and the thumbprint of the first.
fn chain(text: &str) -> Option<(Vec<Certificate>, String)> {
    let blocks = pem::parse_many(text).ok()?;
    let bytes: usize = blocks.iter().map(|block| block.contents().len()).sum();
    let is_good = blocks.iter().all(|block| block.tag() == LABEL);
    if !(1..=CHAIN).contains(&blocks.len()) || bytes > CHAIN_BYTES || !is_good {
        return None;
    }
    let certificate = |block: &pem::Pem| {
        let certificate = Certificate::from_der(block.contents()).ok()?;
        // A certificate that is written differently would have no valid signature.
        (certificate.to_der().ok()? == block.contents()).then_some(certificate)
    };
    let thumbprint = URL_SAFE_NO_PAD.encode(digest(&SHA256, blocks[0].contents()));
    Some((blocks.iter().map(certificate).collect::<Option<_>>()?, thumbprint))
}

fn text(path: &Path, is_private: bool) -> Result<String, CertificateError> {
    let failed = |source| CertificateError::Io { path: path.to_owned(), source };
    // A FIFO must not block the signer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let status = file.metadata().map_err(failed)?;
    if !status.is_file() || status.size() > FILE_BYTES as u64 {
        return Err(CertificateError::NotAFile { path: path.to_owned() });
    }
    let mode = status.mode() & 0o7777;
    if is_private && mode & 0o077 != 0 {
        return Err(CertificateError::Exposed { path: path.to_owned(), mode });
    }
    let mut text = String::new();
    file.take(FILE_BYTES as u64).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

// Documents.

/// Maximum size of a document, in bytes. Documents of clouds have less than 2 KiB.
pub const DOCUMENT_BYTES: usize = 16 << 10;
/// The member of a statement that the signer sets.
pub const TIMES: &str = "timeStamp";
/// The member of a statement that makes it unique. The signer sets it to the time if the guest has not.
pub const NONCE: &str = "nonce";

/// Why a document is not signed.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The document has the wrong form.
    #[error("expected a JSON object of at most {DOCUMENT_BYTES} bytes, found something else")]
    Form,
    /// The statement has times.
    #[error("expected a statement without `{TIMES}`, which the signer sets, found it")]
    Times,
    /// The clock is beyond what the forms can state.
    #[error("expected a clock between the years 1970 and 9999, found another")]
    Clock,
    /// The key cannot sign.
    #[error(transparent)]
    Key(#[from] SigningKeyError),
    /// The document cannot be written as ASN.1.
    #[error("cannot write the signature: {0}")]
    Encoding(#[from] der::Error),
}

fn checked(document: &str) -> Result<&[u8], DocumentError> {
    let is_object = || serde_json::from_str::<Map<String, Value>>(document).is_ok();
    // White space before an object would be signed, too.
    let is_good = document.len() <= DOCUMENT_BYTES && document.starts_with('{') && is_object();
    if is_good { Ok(document.as_bytes()) } else { Err(DocumentError::Form) }
}

/// Signs the bytes of a document. Returns the signature in base64.
///
/// # Errors
/// [`DocumentError`].
pub fn signature(with: &LoadedCertificate, document: &str) -> Result<String, DocumentError> {
    Ok(STANDARD.encode(with.key.sign(checked(document)?)?))
}

/// Signs a document as PKCS#7, with or without the document. Returns the DER form in base64.
///
/// # Errors
/// [`DocumentError`].
pub fn envelope(
    with: &LoadedCertificate,
    document: &str,
    content: Content,
    now_unix: u64,
) -> Result<String, DocumentError> {
    let now = asn1_time(now_unix).ok_or(DocumentError::Clock)?;
    Ok(STANDARD.encode(sign(with, checked(document)?, content, now)?))
}

/// Dates a statement, then signs it as [`envelope`] does, with the statement within.
///
/// # Errors
/// [`DocumentError`].
pub fn attested(
    with: &LoadedCertificate,
    mut statement: Map<String, Value>,
    now_unix: u64,
    lifetime: u32,
) -> Result<String, DocumentError> {
    if statement.contains_key(TIMES) {
        return Err(DocumentError::Times);
    }
    let until = now_unix.saturating_add(lifetime.into());
    let (now, until) = (civil(now_unix)?, civil(until)?);
    statement.entry(NONCE).or_insert_with(|| now.nonce().into());
    statement.insert(TIMES.to_owned(), json!({ "createdOn": now.stated(), "expiresOn": until.stated() }));
    envelope(with, &Value::from(statement).to_string(), Content::Attached, now_unix)
}

fn asn1_time(unix: u64) -> Option<Time> {
    let time = DateTime::from_unix_duration(Duration::from_secs(unix)).ok()?;
    // Years from 2050 on have the longer form (RFC 5652 section 11.3).
    let short = UtcTime::from_date_time(time).map(Time::UtcTime).ok();
    Some(short.unwrap_or_else(|| Time::GeneralTime(GeneralizedTime::from_date_time(time))))
}

/// A time in UTC.
struct Civil(OffsetDateTime);

fn civil(unix: u64) -> Result<Civil, DocumentError> {
    let seconds = i64::try_from(unix).map_err(|_| DocumentError::Clock)?;
    OffsetDateTime::from_unix_timestamp(seconds).map(Civil).map_err(|_| DocumentError::Clock)
}

impl Civil {
    fn parts(&self) -> [u8; 5] {
        let (hour, minute, second) = self.0.to_hms();
        [u8::from(self.0.month()), self.0.day(), hour, minute, second]
    }

    /// Returns the form of Azure's statements: `11/28/26 00:16:17 -0000`.
    fn stated(&self) -> String {
        let ([month, day, hour, minute, second], year) = (self.parts(), self.0.year() % 100);
        format!("{month:02}/{day:02}/{year:02} {hour:02}:{minute:02}:{second:02} -0000")
    }

    /// Returns the form of Azure's nonces: `20261128-001617`.
    fn nonce(&self) -> String {
        let ([month, day, hour, minute, second], year) = (self.parts(), self.0.year());
        format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
    }
}

// Documents within their signature: PKCS#7, now CMS, `SignedData` (RFC 5652 section 5).
//
// The certificates are attached, and so is the document, unless the verifier has it from elsewhere. The signed
// attributes are the content's type and digest, and the time of the signature. Verifiers of clouds know RSA with PKCS#1
// v1.5 and SHA-256, and no newer form.

fn attribute(oid: ObjectIdentifier, value: Any) -> der::Result<Attribute> {
    Ok(Attribute { oid, values: SetOfVec::try_from(vec![value])? })
}

/// Returns the attributes that are signed, sorted as DER demands.
fn attributes(document: &[u8], now: Time) -> der::Result<SetOfVec<Attribute>> {
    let digest = digest(&SHA256, document);
    SetOfVec::try_from(vec![
        attribute(rfc5911::ID_CONTENT_TYPE, Any::encode_from(&rfc5911::ID_DATA)?)?,
        attribute(rfc5911::ID_MESSAGE_DIGEST, Any::encode_from(&OctetStringRef::new(digest.as_ref())?)?)?,
        attribute(rfc5911::ID_SIGNING_TIME, Any::encode_from(&now)?)?,
    ])
}

/// Whether the signature has the document within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// It has.
    Attached,
    /// The verifier needs the document as well.
    Detached,
}

/// Signs a document at a time. Returns the DER form.
fn sign(
    with: &LoadedCertificate,
    document: &[u8],
    content: Content,
    now: Time,
) -> Result<Vec<u8>, DocumentError> {
    let attached = match content {
        Content::Attached => Some(Any::encode_from(&OctetStringRef::new(document)?)?),
        Content::Detached => None,
    };
    let attributes = attributes(document, now)?;
    let signature = with.key.sign(&attributes.to_der()?)?;
    let own = &with.chain[0].tbs_certificate;
    let sha256 = AlgorithmIdentifierOwned { oid: rfc5912::ID_SHA_256, parameters: None };
    let rsa = AlgorithmIdentifierOwned { oid: rfc5912::RSA_ENCRYPTION, parameters: Some(Null.into()) };
    let signer = SignerInfo {
        version: CmsVersion::V1,
        sid: SignerIdentifier::IssuerAndSerialNumber(IssuerAndSerialNumber {
            issuer: own.issuer.clone(),
            serial_number: own.serial_number.clone(),
        }),
        digest_alg: sha256.clone(),
        signed_attrs: Some(attributes),
        signature_algorithm: rsa,
        signature: OctetString::new(signature)?,
        unsigned_attrs: None,
    };
    let certificates = with.chain.iter().cloned().map(CertificateChoices::Certificate);
    let signed = SignedData {
        version: CmsVersion::V1,
        digest_algorithms: SetOfVec::try_from(vec![sha256])?,
        encap_content_info: EncapsulatedContentInfo { econtent_type: rfc5911::ID_DATA, econtent: attached },
        certificates: Some(certificates.collect::<Vec<_>>().try_into()?),
        crls: None,
        signer_infos: vec![signer].try_into()?,
    };
    let content = ContentInfo { content_type: rfc5911::ID_SIGNED_DATA, content: Any::encode_from(&signed)? };
    Ok(content.to_der()?)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::{Map, Value, json};

    use super::{
        CHAIN, CertificateError, DOCUMENT_BYTES, DocumentError, OwnCertificate, attested, civil, envelope,
        signature,
    };
    use crate::documents::{CertificateFiles, Content};
    use crate::key::SigningKeyError;

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
            let times =
                json!({"createdOn": "11/28/26 00:16:17 -0000", "expiresOn": "11/28/26 01:16:17 -0000"});
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

    // The program `openssl` makes certificates for tests, and verifies what they sign. Tests skip without it.

    /// A directory with a root's certificate, and a key with a certificate that the root signed.
    pub(crate) struct Operator {
        room: tempfile::TempDir,
    }

    fn run(room: &Path, arguments: &str) -> Option<Vec<u8>> {
        let output = Command::new("openssl").args(arguments.split(' ')).current_dir(room).output().ok()?;
        output.status.success().then_some(output.stdout)
    }

    impl Operator {
        /// Makes the files; `None` without `openssl`.
        pub(crate) fn or_skip() -> Option<Self> {
            let room = tempfile::tempdir().expect("a directory");
            if run(room.path(), "version").is_none() {
                println!("skipped: there is no `openssl`");
                return None;
            }
            let operator = Self { room };
            operator.run(
                "req -x509 -newkey rsa:2048 -nodes -keyout root.key -out root.pem -subj /CN=root -days 2",
            );
            operator.issue("own");
            Some(operator)
        }

        /// Makes another key and certificate with this name.
        pub(crate) fn issue(&self, name: &str) {
            self.run(&format!(
                "req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}"
            ));
            let signed = "-CA root.pem -CAkey root.key -CAcreateserial -days 1";
            self.run(&format!("x509 -req -in {name}.csr {signed} -out {name}.pem"));
            let chain = [format!("{name}.pem"), "root.pem".to_owned()];
            let chain = chain.map(|file| fs::read_to_string(self.path(&file)).expect("read"));
            fs::write(self.path(&format!("{name}.chain")), chain.concat()).expect("written");
            self.make_private(&format!("{name}.key"));
        }

        pub(crate) fn make_private(&self, file: &str) {
            fs::set_permissions(self.path(file), Permissions::from_mode(0o600)).expect("private");
        }

        pub(crate) fn path(&self, file: &str) -> PathBuf {
            self.room.path().join(file)
        }

        pub(crate) fn files(&self) -> CertificateFiles {
            CertificateFiles { chain: self.path("own.chain"), key: self.path("own.key") }
        }

        pub(crate) fn certificate(&self) -> OwnCertificate {
            OwnCertificate::read(self.files()).expect("a certificate")
        }

        /// Runs a command that must succeed.
        pub(crate) fn run(&self, arguments: &str) -> Vec<u8> {
            self.verify(arguments).expect(arguments)
        }

        /// Runs a command; `None` if it fails.
        pub(crate) fn verify(&self, arguments: &str) -> Option<Vec<u8>> {
            run(self.room.path(), arguments)
        }

        pub(crate) fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
            fs::write(self.path(file), bytes).expect("written");
        }
    }
}
