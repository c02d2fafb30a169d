//! Where an agent that runs is asked to hand over.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

use super::wire::{Giver, Taker, VERSION, Wire, WireError};
use super::{HELLO_WITHIN, READY_WITHIN, SOCKET};
use crate::agent::endpoint::{ControlSocket, SocketError};

/// Conversations at a time; further connections are closed. One may be a takeover, the others hear that it is.
const CALLERS: usize = 4;

/// The oldest version of the protocol that is spoken here.
const OLDEST: u32 = VERSION;

/// Somebody who has everything ready to take over.
pub(in crate::agent) struct Call {
    pub(in crate::agent) wire: Wire,
    /// While it is there, others are refused.
    pub(in crate::agent) turn: Turn,
}

/// The socket, and whoever is ready to take over.
pub(in crate::agent) struct TakeoverListener {
    calls: mpsc::Receiver<Call>,
    /// Somebody is taking over, or we are.
    busy: Arc<AtomicBool>,
    /// Removed with this, unless another agent has put its own there.
    _socket: ControlSocket,
}

impl TakeoverListener {
    /// Listens in the run directory. Nobody is let in before [`TakeoverListener::allow`]. With `succeeds` the socket of the agent that is
    /// taken over from is replaced.
    ///
    /// # Errors
    /// [`SocketError`].
    pub(in crate::agent) fn new(
        run: &Path,
        side: u32,
        succeeds: bool,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Result<Self, SocketError> {
        let (socket, listener) = ControlSocket::listen_as(run, SOCKET, 0o600, succeeds)?;
        let (ready, calls) = mpsc::channel(1);
        let busy = Arc::new(AtomicBool::new(true));
        tasks.spawn(accept_loop(listener, Hall { side, busy: Arc::clone(&busy), ready }));
        Ok(Self { calls, busy, _socket: socket })
    }

    /// From now on somebody may take over.
    pub(in crate::agent) fn allow(&self) {
        self.busy.store(false, Ordering::Relaxed);
    }

    /// Somebody who has everything ready.
    pub(in crate::agent) async fn call(&mut self) -> Call {
        match self.calls.recv().await {
            Some(call) => call,
            // The task that listens has ended, and the agent ends with it.
            None => std::future::pending().await,
        }
    }
}

/// What conversations share.
#[derive(Clone)]
struct Hall {
    side: u32,
    busy: Arc<AtomicBool>,
    ready: mpsc::Sender<Call>,
}

async fn accept_loop(listener: UnixListener, hall: Hall) -> anyhow::Result<()> {
    let mut callers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) if callers.len() < CALLERS && is_trusted(&stream) => {
                    callers.spawn(attend(Wire::new(stream), hall.clone()));
                }
                Ok(_) => {}
                Err(error) => {
                    debug!("a connection to the takeover socket failed: {error}");
                    // Out of descriptors, most likely: not in a busy loop.
                    tokio::time::sleep(HELLO_WITHIN / 5).await;
                }
            },
            Some(_) = callers.join_next() => {}
        }
    }
}

/// True when the kernel says that root or our own user is at the other end.
fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let peer = stream.peer_cred().map(|peer| peer.uid());
    let trusted = peer.as_ref().is_ok_and(|uid| *uid == 0 || *uid == own);
    if !trusted {
        warn!(?peer, "somebody who is neither root nor this agent's user asks to take over: refused");
    }
    trusted
}

/// Held by whoever is let in; the next may come when it is dropped.
pub(in crate::agent) struct Turn(Arc<AtomicBool>);

impl Turn {
    fn take(busy: &Arc<AtomicBool>) -> Option<Self> {
        let free = busy.compare_exchange(false, true, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        free.then(|| Self(Arc::clone(busy)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

async fn attend(mut wire: Wire, hall: Hall) {
    match greet(&mut wire, &hall).await {
        Ok(Ok(turn)) => {
            // The agent may be ending, and then nobody takes it.
            let _ending = hall.ready.send(Call { wire, turn }).await;
        }
        Ok(Err(reason)) => {
            info!("refused to hand over: {reason}");
            let _gone = wire.say(&Giver::No { reason }).await;
        }
        Err(error) => debug!("a takeover did not begin: {error}"),
    }
}

/// The conversation up to the point where the other agent has everything ready; or why there is none.
async fn greet(wire: &mut Wire, hall: &Hall) -> Result<Result<Turn, String>, WireError> {
    let Taker::Hello { oldest, newest, release } = wire.hear_within(HELLO_WITHIN).await? else {
        return Ok(Err("expected a hello first".into()));
    };
    let Some(version) = common_version(oldest, newest) else {
        return Ok(Err(format!(
            "it speaks versions {OLDEST} to {VERSION} of the takeover protocol, the other {oldest} to {newest}: stop \
             it and start the other; with pins, ports stay closed in between and guests ask again"
        )));
    };
    let Some(turn) = Turn::take(&hall.busy) else {
        return Ok(Err("a takeover is under way already: wait for its end".into()));
    };
    let own = env!("CARGO_PKG_VERSION").to_owned();
    wire.say(&Giver::Welcome { version, side: hall.side, release: own }).await?;
    info!(release, "another agent gets ready to take over");
    loop {
        match wire.hear_within(READY_WITHIN).await {
            Ok(Taker::Drain) => return Ok(Ok(turn)),
            Ok(Taker::Unknown) => {}
            Ok(word) => return Ok(Err(format!("expected it to get ready, heard {word:?}"))),
            Err(error) => {
                info!("the takeover came to nothing: {error}");
                return Err(error);
            }
        }
    }
}

/// The newest version both speak.
fn common_version(oldest: u32, newest: u32) -> Option<u32> {
    let version = newest.min(VERSION);
    (version >= oldest.max(OLDEST)).then_some(version)
}

/// A connection to the agent that runs; `None` when there is none.
pub(super) async fn knock(run: &Path) -> io::Result<Option<UnixStream>> {
    match UnixStream::connect(run.join(SOCKET)).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::{CALLERS, TakeoverListener, VERSION, Wire, common_version, knock};
    use crate::agent::handover::wire::{Giver, Taker, WireError};
    use std::os::unix::fs::PermissionsExt as _;
    use tokio::task::JoinSet;

    struct Hall {
        room: tempfile::TempDir,
        door: TakeoverListener,
        _tasks: JoinSet<anyhow::Result<()>>,
    }

    fn hall() -> Hall {
        let room = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(room.path(), std::fs::Permissions::from_mode(0o700)).expect("a mode");
        let mut tasks = JoinSet::new();
        let door = TakeoverListener::new(room.path(), 1, false, &mut tasks).expect("a door");
        Hall { room, door, _tasks: tasks }
    }

    impl Hall {
        async fn knock(&self) -> Wire {
            Wire::new(knock(self.room.path()).await.expect("no error").expect("a socket"))
        }

        async fn hello(&self, oldest: u32, newest: u32) -> (Wire, Giver) {
            let mut wire = self.knock().await;
            wire.say(&Taker::Hello { oldest, newest, release: "x".into() }).await.expect("said");
            let answer = wire.hear().await.expect("an answer");
            (wire, answer)
        }
    }

    fn is_no(answer: &Giver, part: &str) -> bool {
        matches!(answer, Giver::No { reason } if reason.contains(part))
    }

    #[tokio::test]
    async fn whoever_is_ready_comes_through_one_at_a_time() {
        let mut hall = hall();
        assert!(is_no(&hall.hello(VERSION, VERSION).await.1, "under way"), "not open yet");
        hall.door.allow();
        let (mut wire, welcome) = hall.hello(VERSION, VERSION).await;
        assert!(matches!(welcome, Giver::Welcome { version: VERSION, side: 1, .. }), "{welcome:?}");
        assert!(is_no(&hall.hello(VERSION, VERSION).await.1, "under way"));
        wire.say(&Taker::Drain).await.expect("said");
        let call = hall.door.call().await;
        assert!(is_no(&hall.hello(VERSION, VERSION).await.1, "under way"), "until it came to nothing");
        drop(call.turn);
        assert!(matches!(hall.hello(VERSION, VERSION).await.1, Giver::Welcome { .. }));
    }

    #[tokio::test]
    async fn one_that_goes_before_it_is_ready_makes_room_for_the_next() {
        let hall = hall();
        hall.door.allow();
        let (wire, _) = hall.hello(VERSION, VERSION).await;
        drop(wire);
        for _ in 0..1_000 {
            if matches!(hall.hello(VERSION, VERSION).await.1, Giver::Welcome { .. }) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        panic!("the turn was never given back");
    }

    #[tokio::test]
    async fn versions_nobody_here_speaks_are_refused_with_what_to_do() {
        let hall = hall();
        hall.door.allow();
        for (oldest, newest) in [(VERSION + 1, VERSION + 2), (0, VERSION - 1)] {
            let (_, answer) = hall.hello(oldest, newest).await;
            assert!(is_no(&answer, "stop it and start the other"), "{answer:?}");
        }
        assert_eq!(common_version(1, VERSION + 5), Some(VERSION), "a newer one that speaks ours too");
        let mut wire = hall.knock().await;
        wire.say(&Taker::Drain).await.expect("said");
        assert!(is_no(&wire.hear().await.expect("an answer"), "hello"));
    }

    #[tokio::test]
    async fn callers_beyond_the_limit_are_closed() {
        let hall = hall();
        let mut callers = Vec::new();
        for _ in 0..CALLERS {
            callers.push(hall.knock().await);
        }
        let mut one_more = hall.knock().await;
        assert!(matches!(one_more.hear::<Giver>().await, Err(WireError::Gone | WireError::Io(_))));
    }

    #[tokio::test]
    async fn where_no_agent_runs_there_is_nobody_to_ask() {
        let room = tempfile::tempdir().expect("a directory");
        assert!(knock(room.path()).await.expect("no error").is_none());
        drop(std::os::unix::net::UnixListener::bind(room.path().join(super::SOCKET)).expect("a socket"));
        assert!(knock(room.path()).await.expect("no error").is_none(), "one left by a dead agent");
    }
}
