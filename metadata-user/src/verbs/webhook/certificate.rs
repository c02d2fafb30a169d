//! The server's certificate, which is replaced while it serves.

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

/// Most octets of either file.
const FILE_MAX: u64 = 256 << 10;
/// Most certificates of a chain.
const CHAIN_MAX: usize = 16;

/// Why a certificate cannot be used. Says nothing of what the files hold.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is longer than any certificate or key.
    #[error("expected {} to have at most {FILE_MAX} octets, found {found}", path.display())]
    Long {
        /// The file.
        path: PathBuf,
        /// Its octets.
        found: u64,
    },
    /// No certificates in PEM.
    #[error("expected 1 to {CHAIN_MAX} certificates in PEM in {}, found {found}", path.display())]
    Chain {
        /// The file.
        path: PathBuf,
        /// What it has.
        found: String,
    },
    /// No private key in PEM.
    #[error("expected a private key in PEM (PKCS#8, PKCS#1 or SEC1) in {}, found none", path.display())]
    Key {
        /// The file.
        path: PathBuf,
    },
    /// The two do not belong together, or are of a kind that is not known.
    #[error("the key does not fit the certificate: {0}; both are read again when they change")]
    Mismatch(rustls::Error),
}

/// A certificate and its key, from two files.
#[derive(Debug)]
pub(super) struct Certificate {
    files: Files,
    seen: Vec<u8>,
    current: Arc<Current>,
}

#[derive(Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
}

/// What handshakes are made with.
#[derive(Debug)]
pub(super) struct Current(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for Current {
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
    ) -> Result<Self, CertificateError> {
        let files =
            Files { certificate: certificate.into(), key: key.into(), provider: Arc::clone(provider) };
        let seen = files.digest()?;
        let current = Arc::new(Current(ArcSwap::from_pointee(files.load()?)));
        Ok(Self { files, seen, current })
    }

    /// For handshakes: always the last good one.
    pub(super) fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current)
    }

    /// Takes up what is in the files by now; true if that is something new. What cannot be used is told once, and leaves
    /// the last good one in force.
    pub(super) fn look(&mut self) -> Result<bool, CertificateError> {
        let digest = self.files.digest()?;
        if digest == self.seen {
            return Ok(false);
        }
        // Between two changes of kubelet's the pair may not fit; the next look finds what does.
        self.seen = digest;
        self.current.0.store(Arc::new(self.files.load()?));
        Ok(true)
    }
}

impl Files {
    /// Changes with the files' content.
    fn digest(&self) -> Result<Vec<u8>, CertificateError> {
        use sha2::Digest as _;
        let mut hash = sha2::Sha256::new();
        for path in [&self.certificate, &self.key] {
            let text = read(path)?;
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text);
        }
        Ok(hash.finalize().to_vec())
    }

    fn load(&self) -> Result<CertifiedKey, CertificateError> {
        let chain = read(&self.certificate)?;
        let of_chain = |found: String| CertificateError::Chain { path: self.certificate.clone(), found };
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
        // The parser's own words may repeat a part of it.
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?)
            .map_err(|_| CertificateError::Key { path: self.key.clone() })?;
        CertifiedKey::from_der(chain, key, &self.provider).map_err(CertificateError::Mismatch)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    let error = |source| CertificateError::Read { path: path.into(), source };
    let found = fs::metadata(path).map_err(error)?.len();
    if found > FILE_MAX {
        return Err(CertificateError::Long { path: path.into(), found });
    }
    fs::read(path).map_err(error)
}

#[cfg(test)]
mod tests {
    use super::{Certificate, CertificateError, FILE_MAX};
    use std::fs;
    use std::sync::Arc;
    use tokio_rustls::rustls::crypto::ring::default_provider;

    fn pair(name: &str) -> (String, String) {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).expect("a certificate");
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn what_does_not_fit_leaves_the_last_good_one() {
        let room = tempfile::tempdir().expect("a directory");
        let [certificate, key] = ["tls.crt", "tls.key"].map(|name| room.path().join(name));
        let [(first, first_key), (second, second_key)] = ["a.svc", "b.svc"].map(pair);
        fs::write(&certificate, &first).expect("written");
        fs::write(&key, &first_key).expect("written");
        let mut read = Certificate::read(&certificate, &key, &Arc::new(default_provider())).expect("a pair");
        let served = |read: &Certificate| read.current.0.load().cert[0].clone();
        let before = served(&read);
        assert!(!read.look().expect("the same"), "nothing has changed");
        fs::write(&certificate, &second).expect("written");
        let refused = read.look().expect_err("the key of another");
        assert!(matches!(refused, CertificateError::Mismatch(_)), "{refused}");
        assert_eq!(served(&read), before);
        assert!(!read.look().expect("told already"), "once is enough");
        fs::write(&key, &second_key).expect("written");
        assert!(read.look().expect("a pair"), "both are new");
        assert_ne!(served(&read), before);
        fs::remove_file(&key).expect("removed");
        assert!(matches!(read.look(), Err(CertificateError::Read { .. })));
    }

    #[test]
    fn files_that_hold_something_else_are_refused_without_a_word_of_them() {
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
