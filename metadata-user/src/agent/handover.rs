//! One agent takes over the ports of another while guests are served: `xdp-imds serve --takeover`.
//!
//! ```text
//!  the previous agent (`give`)                           the next agent ([`Takeover`])
//!                                    ◀── hello ────────  makes hubs on the other side, reads all records,
//!  serves as before                  ─── welcome ──────▶ renders them under the slots in the pinned maps
//!  claims its connections,           ◀── drain ────────  is ready
//!  freezes and saves what guests
//!  wrote, changes no port any more   ─── draining ─────▶ reads what was saved
//!  promises not to continue          ◀── take ─────────
//!                                    ─── yours ────────▶ steers all frames to its hubs, except those of claimed
//!                                    ◀── serving ──────  connections, and replaces each port's program
//!  passes on questions of its guests ─── ask ──────────▶
//!                                    ◀── answer ───────
//!  ends, and its hubs with it        ─── done ─────────▶ forgets the claims
//! ```
//!
//! Until `yours`, the previous agent continues as before if either agent gives up or the next agent dies. After `yours`
//! the ports belong to the next agent. If it dies before it serves, the ports stay closed, and the next start adopts
//! what is pinned. If the previous agent dies at any point, the next agent takes over at once.
//!
//! Every wait has a limit. The socket is `<run>/takeover.sock`, mode 0600, and its peer must be root or the agent's own
//! user.

mod give;
mod wire;

pub(super) use give::{
    HandoverResult, HandoverState, TakeoverCall, TakeoverListener, TakeoverRequest, hand_over,
};

use anyhow::Context as _;
use give::connect;
use metadata_datapath::stack::{DRAIN_LIMIT, TIME_WAIT};
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;
use tracing::{info, warn};
use wire::{NextAgentMessage, OLDEST, PreviousAgentMessage, REMEDY, VERSION, Wire, WireError};

use crate::agent::node::Node;
use crate::agent::service_manager::Stop;
use crate::service::HandedRequest;

/// The socket's name in the run directory.
const SOCKET: &str = "takeover.sock";

/// Time limit from a connection to its first message, and from that message to the answer.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// Time limit from the welcome until the next agent has rendered every record and is ready.
const READY_WITHIN: Duration = Duration::from_secs(900);
/// Time limit for workers to claim their connections and for the agent to save what guests wrote.
const DRAINING_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for the next agent to read what was saved.
const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// Time limit for the next agent to take all ports.
const SERVING_WITHIN: Duration = Duration::from_secs(30);

// After this agent has taken the ports, the previous agent serves its connections until they end, and passes on
// questions that only this agent can answer.

/// The state of a takeover by this agent, from taking the ports to the end of the previous agent.
#[derive(Default)]
pub(crate) struct Succession {
    /// The connection to the previous agent, while that agent serves its connections.
    taking: Option<Takeover>,
    /// The kernel's tables still have the claims of the previous agent.
    unfinished: bool,
    /// When late segments of the previous agent's connections may be reset.
    spare_until: Option<Instant>,
}

impl Succession {
    /// Begins the succession, after the ports have been taken from the previous agent.
    pub(crate) fn begin(&mut self, taking: Takeover) {
        self.taking = Some(taking);
    }

    /// Waits for the next event of the previous agent; for ever if there is none.
    pub(crate) async fn recv(&mut self) -> PreviousEvent {
        match &mut self.taking {
            Some(taking) => taking.recv().await,
            None => std::future::pending().await,
        }
    }

    /// Answers a question, or ends the succession. Returns true like [`Succession::finish`].
    #[must_use]
    pub(crate) async fn on_event(&mut self, node: &mut Node, event: PreviousEvent) -> bool {
        let late = match event {
            PreviousEvent::Question(question) => {
                if let Some(taking) = &mut self.taking {
                    taking.answer(node, &question).await;
                }
                return false;
            }
            PreviousEvent::Done => TIME_WAIT,
            PreviousEvent::Died => Duration::ZERO,
        };
        *self = Self { taking: None, unfinished: true, spare_until: Some(Instant::now() + late) };
        self.finish(node)
    }

    /// Does the remaining work once the previous agent has ended. Returns true if this call completes the takeover, so
    /// that the next agent may take over.
    #[must_use]
    pub(crate) fn finish(&mut self, node: &mut Node) -> bool {
        let mut completed = false;
        if self.unfinished {
            match node.ports.finish_take_over() {
                Ok(()) => {
                    self.unfinished = false;
                    completed = true;
                }
                Err(error) => warn!("claims of the previous agent are not cleared yet: {error}"),
            }
        }
        if self.spare_until.is_some_and(|until| until <= Instant::now()) {
            match node.ports.workers().spare_unknown(false) {
                Ok(()) => self.spare_until = None,
                Err(error) => warn!("connections of the previous agent are not reset yet: {error}"),
            }
        }
        completed
    }
}

// The next agent's part of a takeover.

/// How long to wait for the previous agent after the limit of its drain.
const GRACE: Duration = Duration::from_secs(10);

/// Number of attempts to take the ports.
const ATTEMPTS: u32 = 5;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// An event of the previous agent.
#[derive(Debug)]
pub(crate) enum PreviousEvent {
    /// A guest of the previous agent has a question that only this agent can answer.
    Question(HandedRequest),
    /// The previous agent has ended after its connections. Late segments of these connections may still arrive.
    Done,
    /// The previous agent ended before its connections did, or does not end in time.
    Died,
}

/// The connection to the previous agent.
#[derive(Debug)]
pub(crate) struct Takeover {
    wire: Wire,
    side: u32,
    /// When the previous agent must have ended. Set once the ports are taken.
    gone_by: Option<Instant>,
}

impl Takeover {
    /// Asks the agent that runs with this run directory to hand over. Returns `None` if no agent runs.
    ///
    /// # Errors
    /// If that agent refuses, or the connection fails.
    pub(crate) async fn begin(run: &Path) -> anyhow::Result<Option<Self>> {
        let asking = || format!("asking the agent running with {} to hand over", run.display());
        let Some(stream) = connect(run).await.with_context(asking)? else { return Ok(None) };
        let mut wire = Wire::new(stream);
        let release = env!("CARGO_PKG_VERSION").to_owned();
        wire.send(&NextAgentMessage::Hello { oldest: OLDEST, newest: VERSION, release })
            .await
            .with_context(asking)?;
        loop {
            match wire.recv_within(HELLO_WITHIN).await.with_context(asking)? {
                PreviousAgentMessage::Welcome {
                    version: version @ OLDEST..=VERSION,
                    side: side @ 0..=1,
                    release,
                } => {
                    info!(release, "taking over from the running agent");
                    wire.set_version(version);
                    return Ok(Some(Self { wire, side, gone_by: None }));
                }
                PreviousAgentMessage::Welcome { version, side, .. } => anyhow::bail!(
                    "expected version {OLDEST} to {VERSION} of the takeover protocol and side 0 or 1, found version \
                     {version} and side {side}: {REMEDY}"
                ),
                PreviousAgentMessage::No { reason } => {
                    anyhow::bail!("the running agent does not hand over: {reason}")
                }
                PreviousAgentMessage::Unknown => {}
                message => {
                    anyhow::bail!("expected a welcome from the running agent, received {message:?}: {REMEDY}")
                }
            }
        }
    }

    /// The free side of hubs, 0 or 1.
    pub(crate) fn side(&self) -> u32 {
        1 - self.side
    }

    /// Takes the ports. Call it once every record is rendered. Returns the name of a signal that came before the previous
    /// agent has promised them: then it continues to serve.
    ///
    /// # Errors
    /// If the previous agent continues to serve, or the kernel refuses.
    pub(crate) async fn take(
        &mut self,
        node: &mut Node,
        stop: &mut Stop,
    ) -> anyhow::Result<Option<&'static str>> {
        let alive = match self.request_drain().await {
            Ok(()) => true,
            Err(Refused::Died) => false,
            Err(Refused::Not(reason)) => anyhow::bail!("the running agent continues: {reason}"),
        };
        if alive && let Some(name) = stop.pending().await {
            return Ok(Some(name));
        }
        node.ports.workers().spare_unknown(true)?;
        node.reload_state();
        if !(alive && self.request_promise().await?) {
            warn!("the previous agent has died: taking its ports without it");
        }
        let mut attempts = ATTEMPTS;
        while let Err(error) = node.take_over() {
            attempts -= 1;
            anyhow::ensure!(
                attempts > 0,
                "taking over the ports: {error}; they stay closed until the next start"
            );
            warn!("taking over the ports: {error}; trying again");
            tokio::time::sleep(PAUSE).await;
        }
        self.gone_by = Some(Instant::now() + DRAIN_LIMIT + GRACE);
        // If this fails, the previous agent has ended.
        let _gone = self.wire.send(&NextAgentMessage::Serving).await;
        Ok(None)
    }

    /// Makes the previous agent claim its connections and save what guests wrote.
    async fn request_drain(&mut self) -> Result<(), Refused> {
        self.wire.send(&NextAgentMessage::Drain).await?;
        loop {
            match self.wire.recv_within(DRAINING_WITHIN + HELLO_WITHIN).await? {
                PreviousAgentMessage::Draining { connections } => {
                    info!(connections, "the previous agent serves its connections until they end");
                    return Ok(());
                }
                PreviousAgentMessage::No { reason } => return Err(Refused::Not(reason)),
                PreviousAgentMessage::Unknown => {}
                message => return Err(Refused::Not(format!("it sent {message:?}"))),
            }
        }
    }

    /// Makes the previous agent promise not to continue. Returns false if it has died.
    async fn request_promise(&mut self) -> anyhow::Result<bool> {
        let promise = async {
            self.wire.send(&NextAgentMessage::Take).await?;
            loop {
                match self.wire.recv_within(TAKE_WITHIN).await? {
                    PreviousAgentMessage::Yours => return Ok(()),
                    PreviousAgentMessage::No { reason } => return Err(Refused::Not(reason)),
                    PreviousAgentMessage::Unknown => {}
                    message => return Err(Refused::Not(format!("it sent {message:?}"))),
                }
            }
        };
        match promise.await {
            Ok(()) => Ok(true),
            Err(Refused::Died) => Ok(false),
            Err(Refused::Not(reason)) => anyhow::bail!("the running agent continues: {reason}"),
        }
    }

    /// Waits for the next event of the previous agent.
    pub(crate) async fn recv(&mut self) -> PreviousEvent {
        loop {
            let by = self.gone_by.unwrap_or_else(|| Instant::now() + GRACE);
            match tokio::time::timeout_at(by, self.wire.recv()).await {
                Ok(Ok(PreviousAgentMessage::Ask(question))) => {
                    if let Some(question) = question.question() {
                        return PreviousEvent::Question(question);
                    }
                }
                Ok(Ok(PreviousAgentMessage::Done { cut })) => {
                    info!(cut, "the previous agent has ended");
                    return PreviousEvent::Done;
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    warn!("the previous agent ended before its connections did: {error}");
                    return PreviousEvent::Died;
                }
                Err(_) => {
                    warn!("the previous agent does not end: continuing without it");
                    return PreviousEvent::Died;
                }
            }
        }
    }

    /// Answers a question of the previous agent's guest.
    pub(crate) async fn answer(&mut self, node: &mut Node, question: &HandedRequest) {
        let response = node.ports.answer(question);
        if let Err(error) = self.wire.send_answer(question, response.as_ref()).await {
            warn!("a guest of the previous agent is not answered: {error}");
        }
    }
}

/// Why the previous agent does not hand over.
enum Refused {
    /// It has ended.
    Died,
    /// It continues, for this reason.
    Not(String),
}

impl From<WireError> for Refused {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Gone => Self::Died,
            error => Self::Not(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Conversations with previous agents, of this release and of earlier ones, as the bytes that they send.

    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
    use tokio::net::UnixListener;

    use super::{NextAgentMessage, OLDEST, PreviousAgentMessage, PreviousEvent, Takeover, VERSION};
    use crate::agent::handover::SOCKET;
    use crate::agent::handover::wire::{WireAnswer, WireRequest};
    use crate::service::HandedRequest;
    use metadata_common::addresses::Connection;
    use metadata_content::http::{Method, Response, StatusCode};

    /// What precedes a line of the next agent in a sample, and a line of the previous one.
    const NEXT: &str = "next ";
    const PREVIOUS: &str = "previous ";

    fn question() -> HandedRequest {
        let local = ("fe80::a9fe:a9fe".parse().expect("an address"), 80);
        HandedRequest {
            connection: Connection { slot: 7, local, remote: ([10, 0, 0, 1].into(), 40_000) },
            mark: 9,
            method: Method::Put,
            path: "/latest/api/token".into(),
            query: "a=b".into(),
            headers: vec![("X-Name".into(), b"\xff\x00".to_vec())],
            body: b"bytes\n".to_vec(),
        }
    }

    fn answer() -> WireAnswer {
        let response =
            Response::new(StatusCode(201), Some("x/y"), &[("ETag", "1")], "body").within(1).and_close();
        WireAnswer::new(&question(), Some(&response))
    }

    /// Every message of a takeover, as this release sends it. The name of a release is not part of the format.
    fn conversation() -> String {
        let release = || "0.1.0".to_owned();
        let json = |message: Result<String, serde_json::Error>| message.expect("JSON");
        let next = |message: &NextAgentMessage| format!("{NEXT}{}\n", json(serde_json::to_string(message)));
        let previous =
            |message: &PreviousAgentMessage| format!("{PREVIOUS}{}\n", json(serde_json::to_string(message)));
        [
            next(&NextAgentMessage::Hello { oldest: OLDEST, newest: VERSION, release: release() }),
            previous(&PreviousAgentMessage::Welcome { version: VERSION, side: 1, release: release() }),
            next(&NextAgentMessage::Drain),
            previous(&PreviousAgentMessage::Draining { connections: 2 }),
            next(&NextAgentMessage::Take),
            previous(&PreviousAgentMessage::Yours),
            next(&NextAgentMessage::Serving),
            previous(&PreviousAgentMessage::Ask(WireRequest::from(&question()))),
            next(&NextAgentMessage::Answer(answer())),
            previous(&PreviousAgentMessage::Done { cut: 0 }),
        ]
        .concat()
    }

    /// Plays the previous agent of a sample: sends its lines, and expects the messages of the next agent in between.
    async fn play(listener: UnixListener, sample: String) {
        let (stream, _) = listener.accept().await.expect("the next agent connects");
        let (read, mut write) = stream.into_split();
        let mut received = BufReader::new(read).lines();
        for line in sample.lines() {
            if let Some(message) = line.strip_prefix(PREVIOUS) {
                write.write_all(format!("{message}\n").as_bytes()).await.expect("sent");
            } else {
                let line = line.strip_prefix(NEXT).expect("a line of either agent");
                let expected: NextAgentMessage = serde_json::from_str(line).expect("a message");
                let found = received.next_line().await.expect("a line").expect("not the end");
                let found: NextAgentMessage = serde_json::from_str(&found).expect("a message");
                let kind = std::mem::discriminant;
                assert_eq!(kind(&found), kind(&expected), "{found:?}");
            }
        }
    }

    #[tokio::test]
    async fn formats_of_a_handover_by_every_release_are_understood() {
        golden::check("handover", VERSION, conversation().as_bytes());
        for sample in golden::all("handover") {
            let room = tempfile::tempdir().expect("a directory");
            let listener = UnixListener::bind(room.path().join(SOCKET)).expect("a socket");
            let previous = tokio::spawn(play(listener, String::from_utf8(sample.bytes).expect("text")));
            let mut taking = Takeover::begin(room.path()).await.expect("a welcome").expect("an agent runs");
            assert_eq!(taking.side(), 0, "{}", sample.release);
            assert!(taking.request_drain().await.is_ok(), "{}", sample.release);
            assert!(taking.request_promise().await.expect("a promise"), "{}", sample.release);
            taking.wire.send(&NextAgentMessage::Serving).await.expect("sent");
            let PreviousEvent::Question(asked) = taking.recv().await else { panic!("no question") };
            assert_eq!(asked, question(), "{}", sample.release);
            taking.wire.send(&NextAgentMessage::Answer(answer())).await.expect("sent");
            assert!(matches!(taking.recv().await, PreviousEvent::Done), "{}", sample.release);
            previous.await.expect("the previous agent received each message");
        }
    }

    #[tokio::test]
    async fn a_previous_agent_that_answers_in_another_version_is_left_alone_with_advice() {
        let refusal = r#"{"say":"no","reason":"the running agent supports versions 7 to 9"}"#;
        for (answer, parts) in [
            (
                r#"{"say":"welcome","version":7,"side":0}"#,
                ["found version 7", "version 1 to 2", "stop the running agent"],
            ),
            (r#"{"say":"welcome","version":1,"side":2}"#, ["side 2", "side 0 or 1", "start the new one"]),
            (r#"{"say":"yours"}"#, ["expected a welcome", "Yours", "stop the running agent"]),
            (refusal, ["does not hand over", "versions 7 to 9", "the running agent"]),
        ] {
            let room = tempfile::tempdir().expect("a directory");
            let listener = UnixListener::bind(room.path().join(SOCKET)).expect("a socket");
            let hello = r#"next {"say":"hello","oldest":1,"newest":1}"#;
            let previous = tokio::spawn(play(listener, format!("{hello}\n{PREVIOUS}{answer}\n")));
            let error = Takeover::begin(room.path()).await.expect_err("a refusal").to_string();
            for part in parts {
                assert!(error.contains(part), "no `{part}` in: {error}");
            }
            previous.await.expect("nothing but the hello was sent");
        }
    }
}
