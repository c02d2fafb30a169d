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
