//! The server's certificate, which is reloaded while the server runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio_rustls::rustls;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

/// Maximum size of either file, in bytes.
const FILE_MAX: u64 = 256 << 10;
/// Maximum number of certificates in a chain.
const CHAIN_MAX: usize = 16;

/// The reason why a certificate cannot be used, without the content of its files.
#[derive(Debug, thiserror::Error)]
pub enum WebhookCertificateError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file is longer than any certificate or key.
    #[error("expected {} to have at most {FILE_MAX} bytes, found {found}", path.display())]
    Long {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
    },
    /// The file has no certificates in PEM, or too many.
    #[error("expected 1 to {CHAIN_MAX} certificates in PEM in {}, found {found}", path.display())]
    Chain {
        /// The file.
        path: PathBuf,
        /// The number of certificates found, or the error of the PEM parser.
        found: String,
    },
    /// The file has no private key in PEM.
    #[error("expected a private key in PEM (PKCS#8, PKCS#1 or SEC1) in {}, found none", path.display())]
    Key {
        /// The file.
        path: PathBuf,
    },
    /// Key and certificate do not match, or their type is not supported.
    #[error("the key does not fit the certificate: {0}; both are read again when they change")]
    Mismatch(rustls::Error),
}

/// A certificate and its key, from two files.
#[derive(Debug)]
pub(super) struct Certificate {
    files: Files,
    seen: Vec<u8>,
    current: Arc<CurrentCertificate>,
}

#[derive(Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
}

/// The certificate and key for new handshakes.
#[derive(Debug)]
pub(super) struct CurrentCertificate(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl Certificate {
    /// Reads both files.
    pub(super) fn read(
        certificate: &Path,
        key: &Path,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, WebhookCertificateError> {
        let files =
            Files { certificate: certificate.into(), key: key.into(), provider: Arc::clone(provider) };
        let seen = files.digest()?;
        let current = Arc::new(CurrentCertificate(ArcSwap::from_pointee(files.load()?)));
        Ok(Self { files, seen, current })
    }

    /// The certificate for handshakes: the most recent valid one.
    pub(super) fn current(&self) -> Arc<CurrentCertificate> {
        Arc::clone(&self.current)
    }

    /// Loads the files if they have changed; returns true if so. Invalid files are reported once, and the previous
    /// certificate stays in use.
    pub(super) fn reload(&mut self) -> Result<bool, WebhookCertificateError> {
        let digest = self.files.digest()?;
        if digest == self.seen {
            return Ok(false);
        }
        // While kubelet replaces both files, they may not match. The next call then loads the matching pair.
        self.seen = digest;
        self.current.0.store(Arc::new(self.files.load()?));
        Ok(true)
    }
}

impl Files {
    /// A digest of both files' content.
    fn digest(&self) -> Result<Vec<u8>, WebhookCertificateError> {
        use sha2::Digest as _;
        let mut hash = sha2::Sha256::new();
        for path in [&self.certificate, &self.key] {
            let text = read(path)?;
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
        Ok(hash.finalize().to_vec())
    }

    fn load(&self) -> Result<CertifiedKey, WebhookCertificateError> {
        let chain = read(&self.certificate)?;
        let of_chain =
            |found: String| WebhookCertificateError::Chain { path: self.certificate.clone(), found };
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&chain)
            .take(CHAIN_MAX + 1)
            .collect::<Result<_, _>>()
            .map_err(|error| of_chain(error.to_string()))?;
        if chain.is_empty() || chain.len() > CHAIN_MAX {
            return Err(of_chain(match chain.len() {
                0 => "none".into(),
                _ => format!("more than {CHAIN_MAX}"),
            }));
        }
        // The parser's error could contain a part of the key.
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| WebhookCertificateError::Key { path: self.key.clone() })?;
        CertifiedKey::from_der(chain, key, &self.provider).map_err(WebhookCertificateError::Mismatch)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, WebhookCertificateError> {
    let error = |source| WebhookCertificateError::Read { path: path.into(), source };
    let found = fs::metadata(path).map_err(error)?.len();
    if found > FILE_MAX {
        return Err(WebhookCertificateError::Long { path: path.into(), found });
    }
    fs::read(path).map_err(error)
}

#[cfg(test)]
mod tests {
    use super::{Certificate, FILE_MAX, WebhookCertificateError};
    use std::fs;
    use std::sync::Arc;
    use tokio_rustls::rustls::crypto::ring::default_provider;

    fn pair(name: &str) -> (String, String) {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).expect("a certificate");
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn a_mismatched_pair_leaves_the_previous_certificate_in_use() {
        let room = tempfile::tempdir().expect("a directory");
        let [certificate, key] = ["tls.crt", "tls.key"].map(|name| room.path().join(name));
        let [(first, first_key), (second, second_key)] = ["a.svc", "b.svc"].map(pair);
        fs::write(&certificate, &first).expect("written");
        fs::write(&key, &first_key).expect("written");
        let mut read = Certificate::read(&certificate, &key, &Arc::new(default_provider())).expect("a pair");
        let served = |read: &Certificate| read.current.0.load().cert[0].clone();
        let before = served(&read);
        assert!(!read.reload().expect("the same"), "nothing has changed");
        fs::write(&certificate, &second).expect("written");
        let refused = read.reload().expect_err("the key of another");
        assert!(matches!(refused, WebhookCertificateError::Mismatch(_)), "{refused}");
        assert_eq!(served(&read), before);
        assert!(!read.reload().expect("no second error"), "a failure is reported once");
        fs::write(&key, &second_key).expect("written");
        assert!(read.reload().expect("a pair"), "both are new");
        assert_ne!(served(&read), before);
        fs::remove_file(&key).expect("removed");
        assert!(matches!(read.reload(), Err(WebhookCertificateError::Read { .. })));
    }

    #[test]
    fn invalid_files_are_refused_without_their_content_in_the_error() {
        let room = tempfile::tempdir().expect("a directory");
        let [certificate, key] = ["tls.crt", "tls.key"].map(|name| room.path().join(name));
        let (good, good_key) = pair("a.svc");
        let long = "x".repeat(FILE_MAX as usize + 1);
        let chain = good.repeat(17);
        for (chain, key_text, expected) in [
            ("", &*good_key, "found none"),
            (&chain, &*good_key, "more than 16"),
            (&*good, "hunter2", "private key"),
            (&*long, &*good_key, "at most"),
        ] {
            fs::write(&certificate, chain).expect("written");
            fs::write(&key, key_text).expect("written");
            let provider = Arc::new(default_provider());
            let refused = Certificate::read(&certificate, &key, &provider).expect_err(expected).to_string();
            assert!(refused.contains(expected) && !refused.contains("hunter2"), "{refused}");
        }
    }
}
