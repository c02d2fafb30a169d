//! The previous agent's part of a takeover.

use metadata_datapath::stack::DRAIN_LIMIT;
use metadata_feed::listen::{ConnectionLimit, WhenFull};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use super::wire::{
    NextAgentMessage, OLDEST, PreviousAgentMessage, REMEDY, VERSION, Wire, WireError, WireRequest,
};
use super::{DRAINING_WITHIN, HELLO_WITHIN, READY_WITHIN, SERVING_WITHIN, SOCKET, TAKE_WITHIN};
use crate::agent::endpoint::{ControlSocket, SocketError, SocketListener};
use crate::agent::node::Node;
use crate::agent::service_manager;
use crate::agent::service_manager::Stop;
use crate::service::audit::COLLECT_EVERY;
use crate::service::{AnswerStage, HandedRequest, HandoverAnswers};

/// How often to check the progress of workers.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// How long frames steered to this agent may still arrive after the next agent has taken the ports.
const LAST_FRAMES: Duration = Duration::from_millis(100);

/// How long after [`DRAIN_LIMIT`] to wait for the workers.
const GRACE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoverResult {
    /// The handover failed, and this agent continues as before.
    Stays,
    /// The handover failed because a signal stops this agent.
    Stopped(&'static str),
    /// The next agent has the ports, and all connections here have ended or were cut off.
    TakenOver,
}

/// The state of a handover outside the node.
pub(crate) struct HandoverState {
    pub(crate) handing: Arc<HandoverAnswers>,
    pub(crate) questions: mpsc::Receiver<HandedRequest>,
}

/// Hands over to the agent at the other end, which is ready. Calls `close` before that agent listens on the addresses
/// of this one.
pub(crate) async fn hand_over(
    node: &mut Node,
    handover: &mut HandoverState,
    mut wire: Wire,
    stop: &mut Stop,
    close: impl AsyncFnOnce(),
) -> HandoverResult {
    // This comes first, so that no answer changes state here after workers have claimed their connections.
    handover.handing.set(AnswerStage::Frozen);
    let begun = Instant::now();
    let outcome = tokio::select! {
        outcome = promise(node, &mut wire, close) => outcome.map(|()| None),
        name = stop.recv() => Ok(Some(name)),
    };
    match outcome {
        Ok(None) => {}
        Ok(Some(name)) => {
            stay(node, handover, &mut wire, &format!("it received {name}")).await;
            return HandoverResult::Stopped(name);
        }
        Err(error) => {
            warn!("not handed over: {error:#}");
            stay(node, handover, &mut wire, &format!("{error:#}")).await;
            return HandoverResult::Stays;
        }
    }
    serve_out(node, handover, &mut wire, stop, begun + DRAIN_LIMIT + GRACE).await;
    HandoverResult::TakenOver
}

/// The steps before the point of no return.
async fn promise(node: &Node, wire: &mut Wire, close: impl AsyncFnOnce()) -> anyhow::Result<()> {
    node.ports.drain_and_claim(DRAIN_LIMIT)?;
    let end = Instant::now() + DRAINING_WITHIN;
    let connections = loop {
        if let Some(remaining) = node.ports.workers().remaining() {
            break remaining;
        }
        anyhow::ensure!(
            Instant::now() < end,
            "workers did not claim their connections within {DRAINING_WITHIN:?}"
        );
        tokio::time::sleep(CHECK_EVERY).await;
    };
    // No write is under way: each worker has had a turn since answers were frozen. The next agent reads what guests
    // wrote from the disk, so it would lose what is not there.
    if let Some(unsaved) = node.catalogue.save() {
        anyhow::bail!(
            "{unsaved}; then take over again, or stop the running agent to give up what is not on disk"
        );
    }
    close().await;
    info!(connections, "another agent takes over: serving the connections here until they end");
    wire.send(&PreviousAgentMessage::Draining { connections }).await?;
    loop {
        match wire.recv_within(TAKE_WITHIN).await? {
            NextAgentMessage::Take => break,
            NextAgentMessage::Unknown => {}
            message => anyhow::bail!("expected the next agent to take the ports, received {message:?}"),
        }
    }
    // The next agent does not take the ports before it has received this.
    wire.send(&PreviousAgentMessage::Yours).await?;
    Ok(())
}

/// Ends the handover; the agent continues as before.
async fn stay(node: &mut Node, handover: &HandoverState, wire: &mut Wire, reason: &str) {
    let _gone = wire.send(&PreviousAgentMessage::No { reason: reason.into() }).await;
    if let Err(error) = node.ports.resume() {
        warn!("a worker closes connections after their answer: {error}");
    }
    handover.handing.set(AnswerStage::Here);
    let end = Instant::now() + DRAINING_WITHIN;
    while !node.ports.workers().are_resumed() && Instant::now() < end {
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

/// Serves connections to their end, and passes on questions that only the next agent can answer.
async fn serve_out(
    node: &mut Node,
    handover: &mut HandoverState,
    wire: &mut Wire,
    stop: &mut Stop,
    end: Instant,
) {
    let mut departure =
        DepartingAgent { node, handover, wire, taken: None, is_connected: true, remaining: 0 };
    departure.serve(stop, end).await;
    let cut = departure.remaining;
    if cut > 0 {
        warn!(
            connections = cut,
            "connections cut off before they ended; a takeover waits for them for at most {DRAIN_LIMIT:?}"
        );
    }
    let _gone = wire.send(&PreviousAgentMessage::Done { cut }).await;
    info!("no longer serving connections: stopping");
}

/// The previous agent after it has given up its ports, until its connections have ended.
struct DepartingAgent<'a> {
    node: &'a mut Node,
    handover: &'a mut HandoverState,
    wire: &'a mut Wire,
    /// When the next agent took the ports.
    taken: Option<Instant>,
    /// The next agent is connected.
    is_connected: bool,
    /// Number of connections at the last check that found any; 0 once all have ended in time.
    remaining: u64,
}

impl DepartingAgent<'_> {
    /// Serves until all connections have ended, until `end`, or until a signal.
    async fn serve(&mut self, stop: &mut Stop, end: Instant) {
        let mut check = tokio::time::interval(CHECK_EVERY);
        let mut alive = tokio::time::interval(Duration::from_secs(1));
        let mut collect = tokio::time::interval(COLLECT_EVERY);
        let late = Instant::now() + SERVING_WITHIN;
        loop {
            let passes_on = self.is_connected && self.taken.is_some();
            tokio::select! {
                message = self.wire.recv::<NextAgentMessage>(), if self.is_connected => self.on_message(message),
                Some(question) = self.handover.questions.recv(), if passes_on => self.pass_on(&question).await,
                _ = alive.tick() => service_manager::alive(),
                _ = collect.tick() => self.node.collect(),
                name = stop.recv() => return warn!("{name}: not waiting until connections end"),
                now = check.tick() => if self.is_over(now, late, end) { return; },
            }
        }
    }

    fn on_message(&mut self, message: Result<NextAgentMessage, WireError>) {
        match message {
            Ok(NextAgentMessage::Serving) => {
                self.node.ports.on_handed_over();
                self.handover.handing.set(AnswerStage::Away);
                self.taken = Some(Instant::now());
            }
            Ok(NextAgentMessage::Answer(answer)) => {
                let (connection, mark, answer) = answer.answer();
                if let Some(slot) = self.handover.handing.answered(&connection, mark, answer) {
                    self.node.ports.wake(slot);
                }
            }
            Ok(message) => debug!("ignored: {message:?}"),
            Err(error) => {
                self.is_connected = false;
                warn!("the connection to the next agent is lost: {error}");
            }
        }
    }

    /// Passes a question on to the next agent. If that fails, the worker asks again.
    async fn pass_on(&mut self, question: &HandedRequest) {
        if let Err(error) = self.wire.send(&PreviousAgentMessage::Ask(WireRequest::from(question))).await {
            self.is_connected = !matches!(error, WireError::Gone);
            self.handover.handing.answered(&question.connection, question.mark, None);
            debug!("a request will be passed on again: {error}");
        }
    }

    /// Counts the remaining connections. Returns true if none remains and no more frames can arrive, or at `end`.
    fn is_over(&mut self, now: Instant, late: Instant, end: Instant) -> bool {
        let remaining = self.node.ports.workers().remaining().unwrap_or(0);
        if remaining == 0 && self.taken.unwrap_or(late) + LAST_FRAMES <= now {
            // At the limit the workers cut off what remains, so 0 at that time does not mean that all have ended.
            if now < end {
                self.remaining = 0;
            }
            return true;
        }
        if remaining > 0 {
            self.remaining = remaining;
        }
        now >= end
    }
}

// The takeover socket: the next agent connects here.

/// Limit on connections; further ones are closed. Only one may take over; the others get a refusal with the reason.
const CALLERS: usize = 4;

/// How long the next agent waits at most until every pin is there; shorter than [`HELLO_WITHIN`], its own limit.
const PREPARED_WITHIN: Duration = Duration::from_secs(2);

/// A connection of an agent that is ready to take over.
pub(crate) struct TakeoverRequest {
    pub(crate) wire: Wire,
    /// Other agents are refused until this is dropped.
    pub(crate) turn: TakeoverPermit,
}

/// What the control loop does for the next agent.
pub(crate) enum TakeoverCall {
    /// It is about to look for pins: make those that are missing, then reply.
    Prepare(oneshot::Sender<()>),
    /// It is ready.
    Ready(TakeoverRequest),
}

/// The listening socket, and the agent that is ready to take over.
pub(crate) struct TakeoverListener {
    calls: mpsc::Receiver<TakeoverCall>,
    /// A takeover by another agent or by this one is in progress.
    busy: Arc<AtomicBool>,
    socket: ControlSocket,
}

impl TakeoverListener {
    /// Listens in the run directory. Takeovers are refused before [`TakeoverListener::allow`]. With `succeeds` the
    /// socket of the previous agent is replaced.
    ///
    /// # Errors
    /// [`SocketError`]: the directory or the socket cannot be created.
    pub(crate) fn new(
        run: &Path,
        side: u32,
        succeeds: bool,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> Result<Self, SocketError> {
        let (socket, listener) = ControlSocket::listen_as(run, SOCKET, (0o600, None), succeeds)?;
        let (tx, calls) = mpsc::channel(1);
        let busy = Arc::new(AtomicBool::new(true));
        tasks.spawn(accept_loop(listener, Shared { side, busy: Arc::clone(&busy), calls: tx }));
        Ok(Self { calls, busy, socket })
    }

    /// Allows the next agent to take over.
    pub(crate) fn allow(&self) {
        self.busy.store(false, Ordering::Relaxed);
    }

    /// Makes the socket again if somebody removed it.
    pub(crate) fn restore(&mut self) {
        self.socket.restore();
    }

    /// Waits for the next step of an agent that takes over.
    pub(crate) async fn call(&mut self) -> TakeoverCall {
        match self.calls.recv().await {
            Some(call) => call,
            // The listening task has ended, which ends the agent.
            None => std::future::pending().await,
        }
    }
}

/// What all connections share.
#[derive(Clone)]
struct Shared {
    side: u32,
    busy: Arc<AtomicBool>,
    calls: mpsc::Sender<TakeoverCall>,
}

async fn accept_loop(listener: SocketListener, shared: Shared) -> anyhow::Result<()> {
    let places = ConnectionLimit { name: "the takeover socket", most: CALLERS, when_full: WhenFull::Refuse };
    let attend = |stream, _| attend(stream, shared.clone());
    match metadata_feed::listen::serve(&listener, places, attend).await {}
}

/// True if the peer is root or the agent's own user, by its credentials (unix(7), `SO_PEERCRED`).
fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let peer = stream.peer_cred().map(|peer| peer.uid());
    let trusted = peer.as_ref().is_ok_and(|uid| *uid == 0 || *uid == own);
    if !trusted {
        warn!(?peer, "refused to hand over to a process of a user other than root or the agent's own");
    }
    trusted
}

/// The right to take over. Only one agent has it at a time; dropping it frees it.
pub(crate) struct TakeoverPermit(Arc<AtomicBool>);

impl TakeoverPermit {
    fn take(busy: &Arc<AtomicBool>) -> Option<Self> {
        let free = busy.compare_exchange(false, true, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        free.then(|| Self(Arc::clone(busy)))
    }
}

impl Drop for TakeoverPermit {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

async fn attend(stream: UnixStream, shared: Shared) {
    if !is_trusted(&stream) {
        return;
    }
    let mut wire = Wire::new(stream);
    match greet(&mut wire, &shared).await {
        Ok(Ok(turn)) => {
            // This fails only if the agent is ending.
            let _ending = shared.calls.send(TakeoverCall::Ready(TakeoverRequest { wire, turn })).await;
        }
        Ok(Err(reason)) => {
            info!("refused to hand over: {reason}");
            let _gone = wire.send(&PreviousAgentMessage::No { reason }).await;
        }
        Err(error) => debug!("a takeover did not begin: {error}"),
    }
}

/// Exchanges messages with the next agent until it is ready. Returns its turn, or the reason for a refusal.
async fn greet(wire: &mut Wire, shared: &Shared) -> Result<Result<TakeoverPermit, String>, WireError> {
    let NextAgentMessage::Hello { oldest, newest, release } = wire.recv_within(HELLO_WITHIN).await? else {
        return Ok(Err("expected a hello first".into()));
    };
    let Some(version) = common_version(oldest, newest) else {
        return Ok(Err(format!(
            "the running agent supports versions {OLDEST} to {VERSION} of the takeover protocol, the new one {oldest} \
             to {newest}: {REMEDY}"
        )));
    };
    let Some(turn) = TakeoverPermit::take(&shared.busy) else {
        return Ok(Err("a takeover is already under way: wait for its end".into()));
    };
    let own = env!("CARGO_PKG_VERSION").to_owned();
    wire.set_version(version);
    // The next agent inherits what is pinned, and looks for it after the welcome.
    let (done, prepared) = oneshot::channel();
    let sent = shared.calls.send(TakeoverCall::Prepare(done)).await;
    if sent.is_err() || timeout(PREPARED_WITHIN, prepared).await.is_err() {
        warn!("the pins are not checked for the next agent: the control loop is busy");
    }
    wire.send(&PreviousAgentMessage::Welcome { version, side: shared.side, release: own }).await?;
    info!(release, "another agent prepares to take over");
    loop {
        match wire.recv_within(READY_WITHIN).await {
            Ok(NextAgentMessage::Drain) => return Ok(Ok(turn)),
            Ok(NextAgentMessage::Unknown) => {}
            Ok(message) => {
                return Ok(Err(format!("expected the next agent to get ready, received {message:?}")));
            }
            Err(error) => {
                info!("the takeover failed: {error}");
                return Err(error);
            }
        }
    }
}

/// Returns the newest version that both agents support.
fn common_version(oldest: u32, newest: u32) -> Option<u32> {
    let version = newest.min(VERSION);
    (version >= oldest.max(OLDEST)).then_some(version)
}

/// Connects to the running agent; `None` if there is none.
pub(super) async fn connect(run: &Path) -> io::Result<Option<UnixStream>> {
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
    use std::os::unix::fs::PermissionsExt as _;
    use tokio::sync::mpsc;
    use tokio::task::JoinSet;

    use super::{
        CALLERS, OLDEST, TakeoverCall, TakeoverListener, TakeoverRequest, VERSION, Wire, common_version,
        connect,
    };
    use crate::agent::handover::wire::{NextAgentMessage, PreviousAgentMessage, WireError};

    struct Bench {
        room: tempfile::TempDir,
        listener: TakeoverListener,
        ready: mpsc::Receiver<TakeoverRequest>,
        _tasks: JoinSet<anyhow::Result<()>>,
    }

    fn bench() -> Bench {
        let room = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(room.path(), std::fs::Permissions::from_mode(0o700)).expect("a mode");
        let mut tasks = JoinSet::new();
        let mut listener = TakeoverListener::new(room.path(), 1, false, &mut tasks).expect("a listener");
        let mut calls = std::mem::replace(&mut listener.calls, mpsc::channel(1).1);
        let (tx, ready) = mpsc::channel(1);
        tasks.spawn(async move {
            while let Some(call) = calls.recv().await {
                match call {
                    TakeoverCall::Prepare(done) => done.send(()).expect("it waits for the pins"),
                    TakeoverCall::Ready(call) => {
                        tx.send(call).await.map_err(|_| anyhow::anyhow!("closed"))?
                    }
                }
            }
            Ok(())
        });
        Bench { room, listener, ready, _tasks: tasks }
    }

    impl Bench {
        async fn connect(&self) -> Wire {
            Wire::new(connect(self.room.path()).await.expect("no error").expect("a socket"))
        }

        async fn hello(&self, oldest: u32, newest: u32) -> (Wire, PreviousAgentMessage) {
            let mut wire = self.connect().await;
            wire.send(&NextAgentMessage::Hello { oldest, newest, release: "x".into() }).await.expect("sent");
            let answer = wire.recv().await.expect("an answer");
            (wire, answer)
        }
    }

    fn is_no(answer: &PreviousAgentMessage, part: &str) -> bool {
        matches!(answer, PreviousAgentMessage::No { reason } if reason.contains(part))
    }

    #[tokio::test]
    async fn agents_that_are_ready_take_over_one_at_a_time() {
        let mut bench = bench();
        assert!(is_no(&bench.hello(VERSION, VERSION).await.1, "under way"), "not open yet");
        bench.listener.allow();
        let (mut wire, welcome) = bench.hello(VERSION, VERSION).await;
        assert!(
            matches!(welcome, PreviousAgentMessage::Welcome { version: VERSION, side: 1, .. }),
            "{welcome:?}"
        );
        assert!(is_no(&bench.hello(VERSION, VERSION).await.1, "under way"));
        wire.send(&NextAgentMessage::Drain).await.expect("sent");
        let call = bench.ready.recv().await.expect("a call");
        assert!(is_no(&bench.hello(VERSION, VERSION).await.1, "under way"), "until it failed");
        drop(call.turn);
        assert!(matches!(bench.hello(VERSION, VERSION).await.1, PreviousAgentMessage::Welcome { .. }));
    }

    #[tokio::test]
    async fn an_agent_that_disconnects_before_it_is_ready_frees_its_turn() {
        let bench = bench();
        bench.listener.allow();
        let (wire, _) = bench.hello(VERSION, VERSION).await;
        drop(wire);
        for _ in 0..1_000 {
            if matches!(bench.hello(VERSION, VERSION).await.1, PreviousAgentMessage::Welcome { .. }) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        panic!("the turn was never given back");
    }

    #[tokio::test]
    async fn unsupported_versions_are_refused_with_a_remedy() {
        let bench = bench();
        bench.listener.allow();
        for (oldest, newest) in [(VERSION + 1, VERSION + 2), (0, OLDEST - 1)] {
            let (_, answer) = bench.hello(oldest, newest).await;
            for part in [
                format!("versions {OLDEST} to {VERSION} of the takeover protocol"),
                format!("the new one {oldest} to {newest}"),
                "stop the running agent and start the new one".to_owned(),
            ] {
                assert!(is_no(&answer, &part), "{answer:?}");
            }
        }
        assert_eq!(common_version(1, VERSION + 5), Some(VERSION), "a newer one that speaks ours too");
        let mut wire = bench.connect().await;
        wire.send(&NextAgentMessage::Drain).await.expect("sent");
        assert!(is_no(&wire.recv().await.expect("an answer"), "hello"));
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_are_closed() {
        let bench = bench();
        let mut callers = Vec::new();
        for _ in 0..CALLERS {
            callers.push(bench.connect().await);
        }
        let mut one_more = bench.connect().await;
        assert!(matches!(
            one_more.recv::<PreviousAgentMessage>().await,
            Err(WireError::Gone | WireError::Io(_))
        ));
    }

    #[tokio::test]
    async fn connecting_without_a_running_agent_returns_none() {
        let room = tempfile::tempdir().expect("a directory");
        assert!(connect(room.path()).await.expect("no error").is_none());
        drop(std::os::unix::net::UnixListener::bind(room.path().join(super::SOCKET)).expect("a socket"));
        assert!(connect(room.path()).await.expect("no error").is_none(), "the socket of a dead agent");
    }
}
