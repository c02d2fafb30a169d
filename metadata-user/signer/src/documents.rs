//! What the operator's certificate signs: documents of clouds, and dated statements.

#[cfg(test)]
mod tests;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cms::cert::{CertificateChoices, IssuerAndSerialNumber};
use cms::content_info::{CmsVersion, ContentInfo};
use cms::signed_data::{EncapsulatedContentInfo, SignedData, SignerIdentifier, SignerInfo};
use const_oid::ObjectIdentifier;
use const_oid::db::{rfc5911, rfc5912};
use der::asn1::{GeneralizedTime, Null, OctetString, OctetStringRef, SetOfVec, UtcTime};
use der::{Any, DateTime, Encode as _};
use serde_json::{Map, Value, json};
use std::time::Duration;
use time::OffsetDateTime;
use x509_cert::attr::Attribute;
use x509_cert::spki::AlgorithmIdentifierOwned;
use x509_cert::time::Time;

use crate::certificate::LoadedCertificate;
use crate::key::SigningKeyError;

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
    /// The signature cannot be written.
    #[error(transparent)]
    Pkcs7(#[from] Pkcs7Error),
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

/// Why a document is not signed.
#[derive(Debug, thiserror::Error)]
pub enum Pkcs7Error {
    /// The document cannot be written as ASN.1.
    #[error("cannot write the signature: {0}")]
    Form(#[from] der::Error),
    /// The key cannot sign.
    #[error(transparent)]
    Key(#[from] SigningKeyError),
}

fn attribute(oid: ObjectIdentifier, value: Any) -> der::Result<Attribute> {
    Ok(Attribute { oid, values: SetOfVec::try_from(vec![value])? })
}

/// Returns the attributes that are signed, sorted as DER demands.
fn attributes(document: &[u8], now: Time) -> der::Result<SetOfVec<Attribute>> {
    let digest = ring::digest::digest(&ring::digest::SHA256, document);
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
///
/// # Errors
/// [`Pkcs7Error`].
pub fn sign(
    with: &LoadedCertificate,
    document: &[u8],
    content: Content,
    now: Time,
) -> Result<Vec<u8>, Pkcs7Error> {
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
