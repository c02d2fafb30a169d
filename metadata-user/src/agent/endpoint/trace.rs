//! `GET /v1/trace?target=PORT|MAC|VM`: the frames from and to one guest, while the client reads.
//!
//! One trace runs at a time, for at most [`TRACE_MOST`]. Nothing is queued for a slow client. The kernel's ring fills
//! then, and lost frames are counted and reported. The trace also ends when the client disconnects.

use std::collections::HashMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use metadata_common::mac::Mac;
use metadata_common::maps::PortKey;
use metadata_common::trace::{TO_GUEST, TraceEvent};
use metadata_common::verdict::Verdict;
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use super::{Agent, ControlLoopBusy, ControlRequest, JSON_LINES, LongLivedAnswer, Peer, TEXT};
use crate::agent::node::{StartedTrace, TraceRefusal, TraceTarget};
use crate::service::now_ns;
use metadata_common::printable::hex;
use metadata_control::trace::{SCHEMA, TraceLine, TracedFrame, frame_headers, frame_payload, message_line};

/// Limit on the duration of a trace.
const TRACE_MOST: Duration = Duration::from_secs(3_600);
/// Limit on frames written at once.
const AT_ONCE: usize = 64;
/// How often to read the ring. The ring holds the frames that a guest at the rate limit sends in four times this
/// period.
const READ_EVERY: Duration = Duration::from_millis(20);
/// How often to write an empty line if there are no frames, to detect that the client has disconnected.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// Limit on the name of the target, in bytes.
const TARGET_MOST: usize = 512;

/// The query of `/v1/trace`.
#[derive(Deserialize)]
pub(super) struct TraceQuery {
    /// A port, a MAC, or the name, UUID or record of a VM with one NIC.
    target: String,
    /// Include frames that do not concern the service.
    #[serde(default)]
    passing: bool,
    /// Include every captured byte of a frame, not only its headers.
    #[serde(default)]
    payload: bool,
}

impl IntoResponse for TraceRefusal {
    fn into_response(self) -> Response {
        (self.status, [(header::CONTENT_TYPE, TEXT)], format!("{}\n", self.text)).into_response()
    }
}

pub(super) async fn trace(
    State(agent): State<Agent>,
    axum::Extension(peer): axum::Extension<Peer>,
    Query(TraceQuery { target: name, passing, payload }): Query<TraceQuery>,
) -> Result<Response, ControlLoopBusy> {
    if payload && !peer.is_owner() {
        let text = "expected root or the agent's own user: payloads contain tokens and passwords".into();
        return Ok(TraceRefusal { status: StatusCode::FORBIDDEN, text }.into_response());
    }
    if name.len() > TARGET_MOST {
        let text = format!("expected a port, a MAC or a VM of at most {TARGET_MOST} bytes");
        return Ok(TraceRefusal { status: StatusCode::BAD_REQUEST, text }.into_response());
    }
    let target = TraceTarget { name, passing };
    Ok(match agent.ask(|reply| ControlRequest::Trace(target, reply)).await? {
        Ok(watched) => {
            let mut answer = Body::from_stream(lines(*watched, payload)).into_response();
            answer.headers_mut().insert(header::CONTENT_TYPE, JSON_LINES);
            answer.extensions_mut().insert(LongLivedAnswer);
            answer
        }
        Err(refusal) => refusal.into_response(),
    })
}

/// The next part of the answer.
enum NextPart {
    Begin,
    Events { until: Instant },
    Nothing,
}

fn lines(watched: StartedTrace, payload: bool) -> impl Stream<Item = Result<Bytes, Infallible>> {
    unfold((watched, NextPart::Begin), move |(watched, next)| write(watched, next, payload))
}

/// Writes the lines of one part. Returns them and the next part.
async fn write(
    mut watched: StartedTrace,
    next: NextPart,
    payload: bool,
) -> Option<(Result<Bytes, Infallible>, (StartedTrace, NextPart))> {
    let mut text = Vec::new();
    let next = match next {
        NextPart::Begin => {
            put(&mut text, &begin(&watched));
            NextPart::Events { until: Instant::now() + TRACE_MOST }
        }
        NextPart::Events { until } if Instant::now() >= until => {
            let reason = format!("a trace lasts at most {TRACE_MOST:?}; start another");
            put(&mut text, &TraceLine::End { reason });
            NextPart::Nothing
        }
        NextPart::Events { until } => {
            more(&mut watched, payload, &mut text).await;
            NextPart::Events { until }
        }
        NextPart::Nothing => return None,
    };
    Some((Ok(text.into()), (watched, next)))
}

fn begin(watched: &StartedTrace) -> TraceLine {
    let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    TraceLine::Begin {
        schema: SCHEMA.into(),
        who: watched.who.clone(),
        unseen: watched.unseen.clone(),
        problem: watched.problem.clone(),
        monotonic_ns: now_ns(),
        unix_ns: u64::try_from(unix.as_nanos()).unwrap_or_default(),
    }
}

/// Waits for frames for at most [`SIGN_OF_LIFE`], and writes some.
async fn more(watched: &mut StartedTrace, payload: bool, text: &mut Vec<u8>) {
    let until = Instant::now() + SIGN_OF_LIFE;
    let mut frames = take(watched, payload);
    while frames.is_empty() && Instant::now() < until {
        sleep(READ_EVERY).await;
        frames = take(watched, payload);
    }
    match watched.watch.newly_lost() {
        Ok(0) => {}
        Ok(frames) => put(text, &TraceLine::Lost { frames }),
        Err(error) => tracing::debug!("lost frames are not counted: {error}"),
    }
    for frame in frames {
        put(text, &TraceLine::Frame(frame));
    }
    if text.is_empty() {
        text.push(b'\n');
    }
}

fn take(watched: &mut StartedTrace, payload: bool) -> Vec<TracedFrame> {
    let mut frames = Vec::new();
    for _ in 0..AT_ONCE {
        let Some(event) = watched.watch.next_event() else { break };
        let from_hub = event.ifindex == 0;
        if !(from_hub && watched.others.contains(&event.slot)) {
            frames.push(frame(&event, &watched.ports, payload));
        }
    }
    frames
}

/// The line of an event. Without `payload` it has the headers and the first line of a message only.
fn frame(event: &TraceEvent, ports: &HashMap<PortKey, String>, payload: bool) -> TracedFrame {
    let captured = event.frame();
    let to_guest = event.direction == TO_GUEST;
    let headers = frame_headers(captured);
    let port = PortKey { netns: event.netns, ifindex: event.ifindex };
    let verdict = Verdict::from_index(event.verdict);
    TracedFrame {
        time_ns: event.time_ns,
        to_guest,
        verdict: verdict.map_or_else(|| event.verdict.to_string(), |verdict| verdict.name().into()),
        length: event.length,
        port: ports.get(&port).cloned(),
        mac: Mac(event.mac).to_string(),
        bytes: hex(if payload { captured } else { headers }),
        message: message_line(frame_payload(captured), to_guest),
    }
}

fn put(text: &mut Vec<u8>, line: &TraceLine) {
    // Strings and numbers always make JSON.
    if let Ok(line) = serde_json::to_vec(line) {
        text.extend(line);
        text.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::frame;
    use metadata_common::printable::hex;
    use metadata_common::trace::{BYTES, FROM_GUEST, TraceEvent};
    use std::collections::HashMap;

    /// A request in one segment, its token within what is captured.
    fn request() -> Vec<u8> {
        let text = b"GET /latest/user-data HTTP/1.1\r\nX-aws-ec2-metadata-token: SECRET\r\n\r\n";
        let mut bytes = Vec::new();
        let built = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 0, 0, 1], [169, 254, 169, 254], 64)
            .tcp(40_000, 80, 1, 1_000)
            .psh()
            .ack(2);
        built.write(&mut bytes, text).expect("a frame");
        bytes
    }

    #[test]
    fn a_trace_shows_a_token_only_with_payload() {
        let request = request();
        let mut bytes = [0; BYTES];
        bytes[..request.len()].copy_from_slice(&request);
        let length = request.len() as u32;
        let event = TraceEvent {
            time_ns: 1,
            netns: 1,
            ifindex: 2,
            verdict: 0,
            length,
            captured: length,
            direction: FROM_GUEST,
            slot: 0,
            mac: [4; 6],
            reserved: [0; 6],
            bytes,
        };
        let secret = hex(b"SECRET");
        let shown = frame(&event, &HashMap::new(), false);
        assert_eq!(shown.message.as_deref(), Some("GET /latest/user-data"));
        assert_eq!(shown.bytes.len(), 2 * 54, "Ethernet, IPv4 and TCP headers");
        assert!(!shown.bytes.contains(&secret));
        assert!(frame(&event, &HashMap::new(), true).bytes.contains(&secret));
    }
}
