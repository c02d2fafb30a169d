//! What the agent and the signer send to each other: one JSON object per packet of a `SOCK_SEQPACKET` pair.
//!
//! The first packet is a [`Setup`]. A reply has the number of its request, so that requests may overlap. An operation
//! that signs something else than a JWT is another variant of [`SignOperation`].

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::documents::CertificateFiles;
use crate::key::Algorithm;

/// Maximum size of a packet, in bytes: sixteen public RSA keys of 4,096 bits take 15 KiB.
pub const PACKET_BYTES: usize = 64 << 10;

/// What the signer signs, and with which keys. It accepts this once, before the agent reads anything of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// `iss` of tokens.
    pub issuer: String,
    /// Directory of keys.
    pub keys: PathBuf,
    /// Algorithm of the keys.
    pub algorithm: Algorithm,
    /// Lifetime of tokens, in seconds.
    pub lifetime: u32,
    /// Age at which a key begins to sign, in seconds.
    pub publish_for: u64,
    /// Age of the newest key at which another is made, in seconds; `None` leaves keys to others.
    pub rotate_after: Option<u64>,
    /// The operator's certificate; `None` if no documents are signed.
    #[serde(default)]
    pub certificate: Option<CertificateFiles>,
}

/// A request of the agent.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SignRequest {
    /// Number of the request.
    pub id: u64,
    /// What to sign.
    pub operation: SignOperation,
}

/// What to sign.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SignOperation {
    /// Claims of a JWT, without those that the signer sets.
    Jwt(Map<String, Value>),
    /// A JSON object, whose bytes are signed by the certificate's key.
    Signature(String),
    /// A JSON object, whose bytes are signed by the certificate's key and kept within the signature.
    Envelope(String),
    /// A JSON object, whose bytes are signed by the certificate's key in the same form, but not kept.
    Detached(String),
    /// Members of a statement, which the signer dates. Then as [`Envelope`](Self::Envelope).
    Attested(Map<String, Value>),
}

/// A packet of the signer.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SignerReply {
    /// The public keys, at startup and after each change.
    Keys(PublishedKeys),
    /// A signed token.
    Token {
        /// Number of the request.
        id: u64,
        /// The token.
        token: String,
        /// Its `jti`.
        jti: String,
        /// Its `kid`.
        kid: String,
        /// Its `iat`, in Unix seconds.
        issued: u64,
        /// Its `exp`, in Unix seconds.
        expires: u64,
    },
    /// A signed document.
    Document {
        /// Number of the request.
        id: u64,
        /// The signature in base64, on one line: that of PKCS#1, or PKCS#7 in its DER form.
        text: String,
        /// The thumbprint of the certificate (`x5t#S256` of RFC 7515 section 4.1.8).
        certificate: String,
        /// Time of the signature, in Unix seconds.
        issued: u64,
        /// Time until which it is handed out, in Unix seconds. An attested document states it.
        expires: u64,
    },
    /// The request is refused.
    Refused {
        /// Number of the request.
        id: u64,
        /// The reason.
        reason: String,
    },
    /// The signer cannot start, and ends.
    Failed {
        /// The reason, with a remedy.
        reason: String,
        /// Whether a permission is missing.
        is_denied: bool,
    },
}

/// The public keys.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct PublishedKeys {
    /// The JSON Web Key Set.
    pub jwks: Value,
    /// Number of keys in it.
    pub count: usize,
    /// The `kid` of the key that signs now; `None` without a key.
    pub signs: Option<String>,
    /// The operator's certificate; `None` without one.
    #[serde(default)]
    pub certificate: Option<PublishedCertificate>,
}

/// The operator's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct PublishedCertificate {
    /// The thumbprint of the certificate (`x5t#S256` of RFC 7515 section 4.1.8).
    pub thumbprint: String,
    /// Time when it expires, in Unix seconds.
    pub until: u64,
}

/// Encodes a packet.
///
/// # Errors
/// If the packet is longer than [`PACKET_BYTES`].
pub fn encode(packet: &impl Serialize) -> io::Result<Vec<u8>> {
    let bytes = serde_json::to_vec(packet)?;
    if bytes.len() > PACKET_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "packet too long"));
    }
    Ok(bytes)
}

/// Decodes a packet.
///
/// # Errors
/// If the packet is malformed. The error does not repeat the packet, which may have what a guest asked for.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    serde_json::from_slice(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Sends a packet.
///
/// # Errors
/// If the other end is closed, or the packet is too long.
pub fn send_packet(socket: impl AsFd, packet: &impl Serialize) -> io::Result<()> {
    let bytes = encode(packet)?;
    rustix::io::retry_on_intr(|| send(socket.as_fd(), &bytes, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives a packet; `None` once the other end is closed.
///
/// # Errors
/// If the socket fails or must not wait, or the packet is too long or malformed.
pub fn receive_packet<T: DeserializeOwned>(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<T>> {
    let received = rustix::io::retry_on_intr(|| recv(socket.as_fd(), &mut *buffer, RecvFlags::TRUNC));
    let length = match received {
        Ok((_, 0)) | Err(Errno::CONNRESET) => return Ok(None),
        Ok((_, length)) => length,
        Err(error) => return Err(error.into()),
    };
    let bytes = buffer.get(..length).ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
    decode(bytes).map(Some)
}
