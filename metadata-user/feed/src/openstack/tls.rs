//! TLS towards OVN's southbound database and Nova.

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsConnector, rustls};

/// Where distributions keep the certificates of authorities.
const SYSTEM_ROOTS: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// The files of a TLS client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsFiles {
    /// CA certificates in PEM, against which the server's certificate is checked. Default: the system's.
    pub ca: Option<PathBuf>,
    /// The client's own certificate, in PEM. Default: none.
    pub certificate: Option<PathBuf>,
    /// The private key of `certificate`, in PEM.
    pub key: Option<PathBuf>,
}

/// The files of a TLS client cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}: expected {expected}, found: {found}", path.display())]
pub struct TlsError {
    path: PathBuf,
    expected: &'static str,
    found: String,
}

/// What a server's certificate must have besides an authority that is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerIdentity {
    /// The server's name.
    Name,
    /// Nothing: certificates of OVS name no host, and its own clients look at none.
    Authority,
}

impl TlsFiles {
    /// A client that trusts nobody, for connections without TLS.
    pub(super) fn unused() -> Result<ClientConfig, TlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(|error| TlsError {
            path: PathBuf::new(),
            expected: "protocols that TLS can use",
            found: error.to_string(),
        })?;
        Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
    }

    /// Reads the files.
    pub(super) fn read(&self, identity: ServerIdentity) -> Result<ClientConfig, TlsError> {
        let system = || SYSTEM_ROOTS.iter().map(Path::new).find(|path| path.exists());
        let ca = self.ca.as_deref().or_else(system).unwrap_or(SYSTEM_ROOTS[0].as_ref());
        let of = |path: &Path, expected| {
            let path = path.to_owned();
            move |found: String| TlsError { path, expected, found }
        };
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        let wrong = of(ca, "certificates of authorities in PEM");
        let (added, _) =
            roots.add_parsable_certificates(certificates(ca).map_err(|found| wrong.clone()(found))?);
        if added == 0 {
            return Err(wrong("none".into()));
        }
        let roots = Arc::new(roots);
        let unusable = of(ca, "protocols and authorities that TLS can use");
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable.clone()(error.to_string()))?;
        let builder = match identity {
            ServerIdentity::Name => builder.with_root_certificates(roots),
            ServerIdentity::Authority => {
                let inner = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
                let inner = inner.map_err(|error| unusable(error.to_string()))?;
                let verifier = Arc::new(AuthorityVerifier { inner, provider });
                builder.dangerous().with_custom_certificate_verifier(verifier)
            }
        };
        let (Some(certificate), Some(key)) = (&self.certificate, &self.key) else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = certificates(certificate).map_err(of(certificate, "a certificate in PEM"))?;
        let of_key = of(key, "the private key of the certificate, in PEM");
        let own = PrivateKeyDer::from_pem_file(key).map_err(|error| of_key.clone()(error.to_string()))?;
        builder.with_client_auth_cert(chain, own).map_err(|error| of_key(error.to_string()))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_file_iter(path).map_err(|error| error.to_string())?;
    found.collect::<Result<_, _>>().map_err(|error| error.to_string())
}

/// A TLS client of OVSDB.
pub(super) struct TlsClient(TlsConnector);

impl TlsClient {
    /// Reads the files.
    pub(super) fn new(files: &TlsFiles) -> Result<Self, TlsError> {
        Ok(Self(Arc::new(files.read(ServerIdentity::Authority)?).into()))
    }

    /// Begins TLS with the server at `HOST:PORT`.
    pub(super) async fn connect(
        &self,
        address: &str,
        stream: TcpStream,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(std::io::Error::other)?;
        self.0.connect(name, stream).await
    }
}

/// Checks the chain of a certificate, and no name in it.
#[derive(Debug)]
struct AuthorityVerifier {
    inner: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AuthorityVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The verifier looks at the name last, once the chain is good.
        match self.inner.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let schemes = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, schemes)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let schemes = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, schemes)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
