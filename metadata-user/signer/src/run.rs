//! The process: reads keys, and signs what the agent asks for until the agent ends.

#[cfg(test)]
mod tests;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Map, Value};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tracing::{info, warn};

use crate::directory::{DirectoryError, KeyDirectory, Rotation};
use crate::documents::{CertificateError, LoadedCertificate, OwnCertificate};
use crate::documents::{Content, DocumentError};
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
            send_packet(socket, &SignerReply::Failed { reason: error.to_string() })?;
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
