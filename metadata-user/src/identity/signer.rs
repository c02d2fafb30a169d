//! Starts the signer as a process of its own.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::absolute;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use metadata_signer::wire::{PACKET_OCTETS, receive_packet, send_packet};
use metadata_signer::{CertificateFiles, Reply, Setup};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{Publication, Signing};
use crate::config::{IdentityConfig, Sandbox};
use crate::logging;

/// The program of this process, also after an upgrade has replaced its file.
const SELF: &str = "/proc/self/exe";
/// How long the signer may take to read its keys.
const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// Why the signer does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The process or its socket cannot be made.
    #[error("cannot start the signer of identity tokens: {0}")]
    Process(#[from] io::Error),
    /// The signer has no key.
    #[error("the signer of identity tokens does not start: {0}")]
    Keys(String),
    /// The signer says nothing.
    #[error("expected the keys of the signer in {} s, found none; read its lines in the log", STARTS_WITHIN.as_secs())]
    Silent,
}

/// Returns what the signer needs, with absolute paths: it does not run in the agent's directory.
fn setup(config: &IdentityConfig) -> io::Result<Setup> {
    let certificate = config.certificate.as_ref().map(|CertificateFiles { chain, key }| {
        Ok::<_, io::Error>(CertificateFiles { chain: absolute(chain)?, key: absolute(key)? })
    });
    Ok(Setup {
        issuer: config.issuer.clone(),
        keys: absolute(&config.keys)?,
        algorithm: config.algorithm,
        lifetime: config.lifetime_seconds,
        publish_for: u64::from(config.publish_hours) * 3_600,
        rotate_after: (config.rotate_days > 0).then(|| u64::from(config.rotate_days) * 86_400),
        certificate: certificate.transpose()?,
    })
}

/// Starts the signer and waits for its keys. Call it before the sandbox, which forbids to start processes, and on the
/// thread that lives as long as the agent: the signer ends with that.
///
/// # Errors
/// [`StartError`].
pub fn start(config: &IdentityConfig, sandbox: Sandbox) -> Result<Signing, StartError> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.map_err(io::Error::from)?;
    let mut command = Command::new(SELF);
    command.arg0("xdp-imds").args(["identity", "signer", "--sandbox", sandbox.name()]).env_clear();
    command.envs(logging::environment());
    command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).current_dir("/");
    command.spawn()?;
    // Otherwise this process would hold the signer's end open.
    drop(command);
    send_packet(&ours, &setup(config)?)?;
    let publication = Arc::new(Publication::new(config));
    match first(&ours)? {
        Some(Reply::Keys(published)) => _ = publication.set(published),
        Some(Reply::Failed { reason }) => return Err(StartError::Keys(reason)),
        _ => return Err(StartError::Silent),
    }
    fcntl_setfl(&ours, OFlags::NONBLOCK).map_err(io::Error::from)?;
    Ok(Signing::new(ours, config.trust_domain.as_deref(), publication))
}

/// Waits for the first packet; `None` if none comes.
fn first(socket: &OwnedFd) -> io::Result<Option<Reply>> {
    let limit = Timespec::try_from(STARTS_WITHIN).map_err(|_| io::ErrorKind::InvalidInput)?;
    let ready = poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)], Some(&limit))?;
    if ready == 0 {
        return Ok(None);
    }
    receive_packet(socket, &mut vec![0; PACKET_OCTETS])
}
