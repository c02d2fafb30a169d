//! The task that hands messages to their sinks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;

use super::message::Message;
use super::{Counters, Deliveries, file, unix};
use crate::record::Sink;

/// How often a message is offered to a socket.
const TRIES: u32 = 2;
/// Between two tries.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Why a sink did not take a message.
#[derive(Debug, thiserror::Error)]
pub(super) enum SinkError {
    #[error("expected to append to it, found: {0}; check the path and its rights")]
    File(std::io::Error),
    #[error("expected a regular file, found another kind; name a file, or `unix:` and a socket")]
    NotAFile,
    #[error("expected a file below {limit} octets, found it full; rotate it", limit = file::FILE_OCTETS)]
    Full,
    #[error("expected somebody to listen, found: {0}; start the receiver")]
    Socket(std::io::Error),
    #[error("expected an answer to a POST, found: {0}; check that the receiver speaks HTTP/1.1")]
    Http(hyper::Error),
    #[error("expected a request for its path, found: {0}; check the path")]
    Request(hyper::http::Error),
    #[error("expected a 2xx answer, found {0}; look into the receiver's log")]
    Status(hyper::StatusCode),
    #[error("expected an answer in {limit} s, found none; look into the receiver's log", limit = unix::TIMEOUT.as_secs())]
    Late,
}

/// Delivers messages until every [`super::Outbox`] is gone and all that waited is delivered.
///
/// Sinks are served side by side, and each in the order its messages were handed over: so what one VM says
/// stays in order, and a receiver that hangs holds up its own messages only.
pub async fn deliver(mut deliveries: Deliveries) {
    let counters = &deliveries.counters;
    // Messages behind the one that is on its way. There are no more lanes than messages that wait.
    let mut lanes: HashMap<Sink, VecDeque<Message>> = HashMap::new();
    let mut on_their_way = JoinSet::new();
    let mut open = true;
    while open || !on_their_way.is_empty() {
        tokio::select! {
            next = deliveries.queue.recv(), if open => match next {
                None => open = false,
                Some(message) => match lanes.get_mut(&message.sink) {
                    Some(lane) => lane.push_back(message),
                    None => {
                        lanes.insert(message.sink.clone(), VecDeque::new());
                        on_their_way.spawn(hand_over(message, Arc::clone(counters)));
                    }
                },
            },
            Some(done) = on_their_way.join_next() => {
                // A task that panicked would keep its lane shut: it cannot, short of a fault of ours.
                let Ok(sink) = done else { continue };
                match lanes.get_mut(&sink).and_then(VecDeque::pop_front) {
                    Some(message) => { on_their_way.spawn(hand_over(message, Arc::clone(counters))); }
                    None => { lanes.remove(&sink); }
                }
            },
        }
    }
}

/// Hands one message to its sink, counts what became of it, and names the sink, which is free again.
async fn hand_over(message: Message, counters: Arc<Counters>) -> Sink {
    let json = message.json();
    let taken = match &message.sink {
        Sink::File(path) => file::append(path, json).await,
        Sink::Unix { socket, path } => {
            let mut taken = unix::post(socket, path, json.clone()).await;
            for _ in 1..TRIES {
                if taken.is_ok() {
                    break;
                }
                tokio::time::sleep(RETRY_PAUSE).await;
                taken = unix::post(socket, path, json.clone()).await;
            }
            taken
        }
    };
    let counter = if taken.is_ok() { &counters.delivered } else { &counters.failed };
    counter.fetch_add(1, Ordering::Relaxed);
    if let Err(error) = taken {
        let (vm, kind, sink) = (&*message.vm, message.kind.name(), &message.sink);
        tracing::warn!(vm, kind, %sink, %error, "a message from the guest is lost");
    }
    let Message { sink, place, .. } = message;
    drop(place);
    sink
}
