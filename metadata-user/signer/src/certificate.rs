//! The operator's certificate, whose RSA key signs the documents of clouds.
//!
//! The key signs JSON objects only. So the agent cannot have it sign a certificate, a token or a part of a TLS
//! handshake, which begin with other bytes.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use der::{Decode as _, Encode as _};
use ring::digest::{SHA256, digest};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use x509_cert::Certificate;

use crate::key::RsaKey;
use crate::key::SigningKeyError;

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
    /// PEM file with the RSA key (PKCS#8). Only its owner may read it.
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
    #[error("expected {} to be private, found mode {mode:o}; run: chmod 600 FILE", path.display())]
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
    /// [`CertificateError`]. The certificate then stays as it was, so that the files may be replaced one by one.
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

#[cfg(test)]
mod tests;
