//! The process: reads keys, and signs what the agent asks for until the agent ends.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Map, Value};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tracing::{info, warn};

use crate::directory::{DirectoryError, KeyDirectory, Rotation};
use crate::documents::{CertificateError, Content, DocumentError, LoadedCertificate, OwnCertificate};
use crate::jwt::{LIFETIME_MOST, TokenTerms};
use crate::wire::{
    PACKET_BYTES, PublishedCertificate, PublishedKeys, Setup, SignOperation, SignRequest, SignerReply,
    receive_packet, send_packet,
};
use crate::{documents, jwt};

/// Interval at which the directory of keys is looked at.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Why the signer ends.
#[derive(Debug, thiserror::Error)]
pub enum SignerError {
    /// The socket to the agent fails.
    #[error("expected packets of the agent, found: {0}")]
    Socket(#[from] io::Error),
    /// There are no keys at startup.
    #[error(transparent)]
    Keys(#[from] DirectoryError),
    /// The operator's certificate cannot be used at startup.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

impl SignerError {
    /// True if the kernel denied access to a file.
    fn is_denied(&self) -> bool {
        let error = match self {
            Self::Keys(DirectoryError::Io { source, .. })
            | Self::Certificate(CertificateError::Io { source, .. }) => source,
            _ => return false,
        };
        error.kind() == io::ErrorKind::PermissionDenied
    }
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Serves the agent at the other end of the socket until it closes that.
///
/// # Errors
/// [`SignerError`]. The agent is told the reason if there is no key at the start.
pub fn run(socket: impl AsFd) -> Result<(), SignerError> {
    let socket = socket.as_fd();
    let mut buffer = vec![0; PACKET_BYTES];
    let Some(setup) = receive_packet::<Setup>(socket, &mut buffer)? else { return Ok(()) };
    let mut signer = match Signer::start(setup) {
        Ok(signer) => signer,
        Err(error) => {
            let failed = SignerReply::Failed { reason: error.to_string(), is_denied: error.is_denied() };
            send_packet(socket, &failed)?;
            return Err(error);
        }
    };
    signer.publish(socket)?;
    let mut look_at = Instant::now() + LOOK_EVERY;
    loop {
        if wait(socket, look_at)? {
            let Some(request) = receive_packet::<SignRequest>(socket, &mut buffer)? else { return Ok(()) };
            send_packet(socket, &signer.answer(request))?;
        }
        if Instant::now() >= look_at {
            look_at = Instant::now() + LOOK_EVERY;
            signer.look();
            signer.publish(socket)?;
        }
    }
}

/// Waits for a packet until a time; returns whether there is one.
fn wait(socket: BorrowedFd<'_>, until: Instant) -> io::Result<bool> {
    let left = until.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
    match poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], Some(&left)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

struct Signer {
    setup: Setup,
    keys: KeyDirectory,
    certificate: Option<OwnCertificate>,
    published: Option<PublishedKeys>,
    /// The last failure to read or rotate, to log each once.
    complaint: Option<String>,
    /// The same for the certificate.
    complaint_of_certificate: Option<String>,
}

impl Signer {
    fn start(setup: Setup) -> Result<Self, SignerError> {
        let rotation = Rotation { publish_for: setup.publish_for, after: setup.rotate_after };
        let mut keys = KeyDirectory::new(setup.keys.clone(), setup.algorithm, rotation);
        if rotation.after.is_none() {
            for reason in keys.look()? {
                warn!("a key is not used: {reason}");
            }
            keys.require_key()?;
        } else if !setup.keys.exists() {
            keys.rotate(unix_now())?;
        }
        let certificate = setup.certificate.clone().map(OwnCertificate::read).transpose()?;
        let mut signer = Self {
            setup,
            keys,
            certificate,
            published: None,
            complaint: None,
            complaint_of_certificate: None,
        };
        signer.follow()?;
        signer.keys.require_key()?;
        Ok(signer)
    }

    /// Reads and rotates keys. A failure leaves the keys as they are.
    fn look(&mut self) {
        let complaint = self.follow().err().map(|error| error.to_string());
        if let Some(reason) = complaint.as_ref().filter(|_| self.complaint != complaint) {
            warn!("identity keys stay unchanged: {reason}");
        }
        self.complaint = complaint;
        let looked = self.certificate.as_mut().map(OwnCertificate::look);
        let complaint = looked.and_then(Result::err).map(|error| error.to_string());
        if let Some(reason) = complaint.as_ref().filter(|_| self.complaint_of_certificate != complaint) {
            warn!("the operator's certificate stays unchanged: {reason}");
        }
        self.complaint_of_certificate = complaint;
    }

    fn follow(&mut self) -> Result<(), DirectoryError> {
        let mut skipped = self.keys.look()?;
        if self.keys.rotate(unix_now())? {
            skipped.extend(self.keys.look()?);
        }
        for reason in skipped {
            warn!("a key is not used: {reason}");
        }
        Ok(())
    }

    /// Sends the public keys if they have changed, or another key signs.
    fn publish(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let signs = self.keys.signing(unix_now()).map(|key| key.kid().to_owned());
        let certificate = self.certificate.as_ref().map(|own| PublishedCertificate {
            thumbprint: own.loaded().thumbprint().to_owned(),
            until: own.loaded().until(),
        });
        let now = PublishedKeys {
            jwks: jwt::of(self.keys.keys()),
            count: self.keys.keys().len(),
            signs,
            certificate,
        };
        if self.published.as_ref() == Some(&now) {
            return Ok(());
        }
        match &now.signs {
            Some(kid) => info!(kid, keys = now.count, "identity tokens are signed"),
            None => warn!("no identity key is left: no token is signed"),
        }
        send_packet(socket, &SignerReply::Keys(now.clone()))?;
        self.published = Some(now);
        Ok(())
    }

    fn answer(&self, SignRequest { id, operation }: SignRequest) -> SignerReply {
        let now_unix = unix_now();
        match operation {
            SignOperation::Jwt(claims) => self.token(id, claims, now_unix),
            SignOperation::Signature(document) => {
                self.document(id, now_unix, |with, _| documents::signature(with, &document))
            }
            SignOperation::Envelope(document) => self.document(id, now_unix, |with, _| {
                documents::envelope(with, &document, Content::Attached, now_unix)
            }),
            SignOperation::Detached(document) => self.document(id, now_unix, |with, _| {
                documents::envelope(with, &document, Content::Detached, now_unix)
            }),
            SignOperation::Attested(statement) => self.document(id, now_unix, |with, lifetime| {
                documents::attested(with, statement, now_unix, lifetime)
            }),
        }
    }

    fn token(&self, id: u64, claims: Map<String, Value>, now_unix: u64) -> SignerReply {
        let Some(key) = self.keys.signing(now_unix) else {
            return SignerReply::Refused { id, reason: "there is no key".into() };
        };
        let terms = TokenTerms { issuer: &self.setup.issuer, now_unix, lifetime: self.setup.lifetime };
        match jwt::sign(key, terms, claims) {
            Ok(jwt::SignedToken { token, id: jti, issued, expires }) => {
                SignerReply::Token { id, token, jti, kid: key.kid().to_owned(), issued, expires }
            }
            Err(error) => SignerReply::Refused { id, reason: error.to_string() },
        }
    }

    /// Signs by the certificate: `sign` gets it, and the lifetime of what is signed.
    fn document(
        &self,
        id: u64,
        now_unix: u64,
        sign: impl FnOnce(&LoadedCertificate, u32) -> Result<String, DocumentError>,
    ) -> SignerReply {
        let Some(own) = &self.certificate else {
            return SignerReply::Refused { id, reason: "there is no certificate".into() };
        };
        let (with, lifetime) = (own.loaded(), self.setup.lifetime.min(LIFETIME_MOST));
        match sign(with, lifetime) {
            Ok(text) => {
                let certificate = with.thumbprint().to_owned();
                let expires = now_unix.saturating_add(lifetime.into());
                SignerReply::Document { id, text, certificate, issued: now_unix, expires }
            }
            Err(error) => SignerReply::Refused { id, reason: error.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::run;
    use crate::directory::make;
    use crate::documents::CertificateFiles;
    use crate::documents::tests::Operator;
    use crate::key::Algorithm;
    use crate::wire::{
        PACKET_BYTES, Setup, SignOperation, SignRequest, SignerReply, receive_packet, send_packet,
    };
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use serde_json::{Value, json};
    use std::os::fd::OwnedFd;
    use std::path::Path;

    fn setup(keys: &Path, rotate_after: Option<u64>) -> Setup {
        let (issuer, algorithm) = ("https://issuer.example".into(), Algorithm::EdDsa);
        Setup {
            issuer,
            keys: keys.into(),
            algorithm,
            lifetime: 60,
            publish_for: 0,
            rotate_after,
            certificate: None,
        }
    }

    fn started(setup: &Setup) -> (OwnedFd, std::thread::JoinHandle<bool>) {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a pair");
        send_packet(&ours, setup).expect("sent");
        (ours, std::thread::spawn(move || run(theirs).is_ok()))
    }

    fn reply(socket: &OwnedFd) -> Option<SignerReply> {
        receive_packet(socket, &mut vec![0; PACKET_BYTES]).expect("a packet")
    }

    fn ask(socket: &OwnedFd, claims: Value) -> SignerReply {
        let operation = SignOperation::Jwt(claims.as_object().expect("claims").clone());
        send_packet(socket, &SignRequest { id: 7, operation }).expect("sent");
        reply(socket).expect("an answer")
    }

    #[test]
    fn the_signer_publishes_keys_then_signs_until_the_agent_ends() {
        let room = tempfile::tempdir().expect("a directory");
        make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
        let (socket, signer) = started(&setup(room.path(), None));
        let Some(SignerReply::Keys(published)) = reply(&socket) else { panic!("keys come first") };
        assert_eq!(published.signs.as_deref(), published.jwks["keys"][0]["kid"].as_str());
        assert!(!published.jwks.to_string().contains("\"d\""));
        let SignerReply::Token { id: 7, issued, expires, .. } =
            ask(&socket, json!({"sub": "vm:1", "aud": "a"}))
        else {
            panic!("a token")
        };
        assert_eq!(expires - issued, 60);
        let refused = ask(&socket, json!({"sub": "vm:1", "aud": "a", "exp": 9_999_999_999_u64}));
        assert!(matches!(refused, SignerReply::Refused { id: 7, .. }), "{refused:?}");
        drop(socket);
        assert!(signer.join().expect("no panic"));
    }

    #[test]
    fn a_directory_without_a_key_is_refused_unless_rotation_makes_one() {
        let room = tempfile::tempdir().expect("a directory");
        let (socket, signer) = started(&setup(room.path(), None));
        let Some(SignerReply::Failed { reason, .. }) = reply(&socket) else { panic!("a reason") };
        assert!(reason.contains("xdp-imds identity key"), "{reason}");
        assert!(!signer.join().expect("no panic"));
        for directory in [room.path().to_owned(), room.path().join("new")] {
            let (socket, _) = started(&setup(&directory, Some(3_600)));
            assert!(matches!(reply(&socket), Some(SignerReply::Keys(published)) if published.count == 1));
        }
    }

    #[test]
    fn documents_need_a_certificate_and_name_it() {
        let Some(operator) = Operator::or_skip() else { return };
        let room = tempfile::tempdir().expect("a directory");
        make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
        let text = r#"{"a":1}"#.to_owned();
        let operations = || {
            let statement = json!({"a": 1}).as_object().expect("an object").clone();
            [
                SignOperation::Signature(text.clone()),
                SignOperation::Envelope(text.clone()),
                SignOperation::Detached(text.clone()),
                SignOperation::Attested(statement),
            ]
        };
        for certificate in [None, Some(operator.files())] {
            let signs = certificate.is_some();
            let (socket, _) = started(&Setup { certificate, ..setup(room.path(), None) });
            let Some(SignerReply::Keys(published)) = reply(&socket) else { panic!("keys come first") };
            assert_eq!(published.certificate.is_some(), signs);
            for operation in operations() {
                send_packet(&socket, &SignRequest { id: 9, operation }).expect("sent");
                match reply(&socket) {
                    Some(SignerReply::Document { id: 9, certificate, issued, expires, .. }) if signs => {
                        assert_eq!(
                            published.certificate.as_ref().map(|own| &own.thumbprint),
                            Some(&certificate)
                        );
                        assert_eq!(expires - issued, 60);
                    }
                    Some(SignerReply::Refused { id: 9, .. }) if !signs => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_certificate_that_cannot_be_used_is_refused_at_the_start() {
        let room = tempfile::tempdir().expect("a directory");
        make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
        let files = CertificateFiles { chain: room.path().join("chain"), key: room.path().join("key") };
        let (socket, signer) = started(&Setup { certificate: Some(files), ..setup(room.path(), None) });
        let Some(SignerReply::Failed { reason, .. }) = reply(&socket) else { panic!("a reason") };
        assert!(reason.contains("chain"), "{reason}");
        assert!(!signer.join().expect("no panic"));
    }
}
