//! Documents within their signature: PKCS#7, now CMS, `SignedData` (RFC 5652 section 5).
//!
//! The certificates are attached, and so is the document, unless the verifier has it from elsewhere. The signed attributes are the content's type and digest, and
//! the time of the signature. Verifiers of clouds know RSA with PKCS#1 v1.5 and SHA-256, and no newer form.

use cms::cert::{CertificateChoices, IssuerAndSerialNumber};
use cms::content_info::{CmsVersion, ContentInfo};
use cms::signed_data::{EncapsulatedContentInfo, SignedData, SignerIdentifier, SignerInfo};
use const_oid::ObjectIdentifier;
use const_oid::db::{rfc5911, rfc5912};
use der::asn1::{Null, OctetString, OctetStringRef, SetOfVec};
use der::{Any, Encode as _};
use x509_cert::attr::Attribute;
use x509_cert::spki::AlgorithmIdentifierOwned;
use x509_cert::time::Time;

use crate::certificate::Loaded;
use crate::key::KeyError;

/// Why a document is not signed.
#[derive(Debug, thiserror::Error)]
pub enum Pkcs7Error {
    /// The document cannot be written as ASN.1.
    #[error("cannot write the signature: {0}")]
    Form(#[from] der::Error),
    /// The key cannot sign.
    #[error(transparent)]
    Key(#[from] KeyError),
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
pub fn sign(with: &Loaded, document: &[u8], content: Content, now: Time) -> Result<Vec<u8>, Pkcs7Error> {
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
