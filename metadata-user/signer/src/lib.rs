//! The signer: a process of its own that holds the private keys of identity tokens.
//!
//! The agent starts the signer before it restricts itself, and is connected to it by a socket pair. The agent sends
//! claims, and gets tokens and public keys. The private keys are in no memory of the agent.
//!
//! ```text
//!  agent ── Setup, Request ──► signer ── reads ──► DIR/*.pem, the operator's certificate
//!        ◄── Reply ───────────
//! ```
//!
//! [`directory`] reads and rotates keys, [`key`] signs, [`jwt`] publishes, [`wire`] is the protocol, and [`mod@run`]
//! the process. With an operator's certificate the process also signs [`documents`] of clouds, by RSA and in the form of
//! PKCS #7.

pub mod directory;
pub mod documents;
pub mod jwt;
pub mod key;
pub mod run;
pub mod wire;

pub use directory::{DirectoryError, KeyDirectory, Rotation};
pub use documents::{CertificateError, CertificateFiles};
pub use key::{Algorithm, SigningKey, SigningKeyError};
pub use run::{SignerError, run};
pub use wire::{Setup, SignRequest, SignerReply};
