//! The process: reads keys, and signs what the agent asks for until the agent ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{info, warn};

use crate::directory::{DirectoryError, KeyDirectory, Rotation};
use crate::jwks;
use crate::jwt::{self, Terms};
use crate::wire::{Operation, PACKET_OCTETS, Published, Reply, Request, Setup, receive_packet, send_packet};

/// Interval at which the directory of keys is looked at.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Why the signer ends.
#[derive(Debug, thiserror::Error)]
pub enum SignerError {
    /// The socket to the agent fails.
    #[error("expected packets of the agent, found: {0}")]
    Socket(#[from] io::Error),
    /// There are no keys at the start.
    #[error(transparent)]
    Keys(#[from] DirectoryError),
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
    let mut buffer = vec![0; PACKET_OCTETS];
    let Some(setup) = receive_packet::<Setup>(socket, &mut buffer)? else { return Ok(()) };
    let mut signer = match Signer::start(setup) {
        Ok(signer) => signer,
        Err(error) => {
            send_packet(socket, &Reply::Failed { reason: error.to_string() })?;
            return Err(error.into());
        }
    };
    signer.publish(socket)?;
    let mut look_at = Instant::now() + LOOK_EVERY;
    loop {
        if wait(socket, look_at)? {
            let Some(request) = receive_packet::<Request>(socket, &mut buffer)? else { return Ok(()) };
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
    published: Option<Published>,
    /// The last failure to read or rotate, to log each once.
    complaint: Option<String>,
}

impl Signer {
    fn start(setup: Setup) -> Result<Self, DirectoryError> {
        let rotation = Rotation { publish_for: setup.publish_for, after: setup.rotate_after };
        let mut keys = KeyDirectory::new(setup.keys.clone(), setup.algorithm, rotation);
        if rotation.after.is_none() {
            keys.look()?.iter().for_each(|reason| warn!("a key is not used: {reason}"));
            keys.require_key()?;
        } else if !setup.keys.exists() {
            keys.rotate(unix_now())?;
        }
        let mut signer = Self { setup, keys, published: None, complaint: None };
        signer.follow()?;
        signer.keys.require_key()?;
        Ok(signer)
    }

    /// Reads and rotates keys. A failure leaves the keys as they are.
    fn look(&mut self) {
        let complaint = self.follow().err().map(|error| error.to_string());
        if let Some(reason) = complaint.as_ref().filter(|_| self.complaint != complaint) {
            warn!("identity keys stay as they are: {reason}");
        }
        self.complaint = complaint;
    }

    fn follow(&mut self) -> Result<(), DirectoryError> {
        let mut skipped = self.keys.look()?;
        if self.keys.rotate(unix_now())? {
            skipped.extend(self.keys.look()?);
        }
        skipped.iter().for_each(|reason| warn!("a key is not used: {reason}"));
        Ok(())
    }

    /// Sends the public keys if they have changed, or another key signs.
    fn publish(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let signs = self.keys.signing(unix_now()).map(|key| key.kid().to_owned());
        let now = Published { jwks: jwks::of(self.keys.keys()), count: self.keys.keys().len(), signs };
        if self.published.as_ref() == Some(&now) {
            return Ok(());
        }
        match &now.signs {
            Some(kid) => info!(kid, keys = now.count, "identity tokens are signed"),
            None => warn!("no identity key is left: no token is signed"),
        }
        send_packet(socket, &Reply::Keys(now.clone()))?;
        self.published = Some(now);
        Ok(())
    }

    fn answer(&self, Request { id, operation }: Request) -> Reply {
        let now_unix = unix_now();
        let Some(key) = self.keys.signing(now_unix) else {
            return Reply::Refused { id, reason: "there is no key".into() };
        };
        let Operation::Jwt(claims) = operation;
        let terms = Terms { issuer: &self.setup.issuer, now_unix, lifetime: self.setup.lifetime };
        match jwt::sign(key, terms, claims) {
            Ok(jwt::Signed { token, id: jti, issued, expires }) => {
                Reply::Token { id, token, jti, kid: key.kid().to_owned(), issued, expires }
            }
            Err(error) => Reply::Refused { id, reason: error.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::run;
    use crate::directory::make;
    use crate::key::Algorithm;
    use crate::wire::{Operation, PACKET_OCTETS, Reply, Request, Setup, receive_packet, send_packet};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use serde_json::{Value, json};
    use std::os::fd::OwnedFd;
    use std::path::Path;

    fn setup(keys: &Path, rotate_after: Option<u64>) -> Setup {
        let (issuer, algorithm) = ("https://issuer.example".into(), Algorithm::EdDsa);
        Setup { issuer, keys: keys.into(), algorithm, lifetime: 60, publish_for: 0, rotate_after }
    }

    fn started(setup: &Setup) -> (OwnedFd, std::thread::JoinHandle<bool>) {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a pair");
        send_packet(&ours, setup).expect("sent");
        (ours, std::thread::spawn(move || run(theirs).is_ok()))
    }

    fn reply(socket: &OwnedFd) -> Option<Reply> {
        receive_packet(socket, &mut vec![0; PACKET_OCTETS]).expect("a packet")
    }

    fn ask(socket: &OwnedFd, claims: Value) -> Reply {
        let operation = Operation::Jwt(claims.as_object().expect("claims").clone());
        send_packet(socket, &Request { id: 7, operation }).expect("sent");
        reply(socket).expect("an answer")
    }

    #[test]
    fn the_signer_publishes_keys_then_signs_until_the_agent_ends() {
        let room = tempfile::tempdir().expect("a directory");
        make(room.path(), Algorithm::EdDsa, 1_000).expect("made");
        let (socket, signer) = started(&setup(room.path(), None));
        let Some(Reply::Keys(published)) = reply(&socket) else { panic!("keys come first") };
        assert_eq!(published.signs.as_deref(), published.jwks["keys"][0]["kid"].as_str());
        assert!(!published.jwks.to_string().contains("\"d\""));
        let Reply::Token { id: 7, issued, expires, .. } = ask(&socket, json!({"sub": "vm:1", "aud": "a"}))
        else {
            panic!("a token")
        };
        assert_eq!(expires - issued, 60);
        let refused = ask(&socket, json!({"sub": "vm:1", "aud": "a", "exp": 9_999_999_999_u64}));
        assert!(matches!(refused, Reply::Refused { id: 7, .. }), "{refused:?}");
        drop(socket);
        assert!(signer.join().expect("no panic"));
    }

    #[test]
    fn a_directory_without_a_key_is_refused_unless_rotation_makes_one() {
        let room = tempfile::tempdir().expect("a directory");
        let (socket, signer) = started(&setup(room.path(), None));
        let Some(Reply::Failed { reason }) = reply(&socket) else { panic!("a reason") };
        assert!(reason.contains("xdp-imds identity key"), "{reason}");
        assert!(!signer.join().expect("no panic"));
        for directory in [room.path().to_owned(), room.path().join("new")] {
            let (socket, _) = started(&setup(&directory, Some(3_600)));
            assert!(matches!(reply(&socket), Some(Reply::Keys(published)) if published.count == 1));
        }
    }
}
