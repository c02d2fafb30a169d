//! The task that delivers messages from guests to their sinks.

mod file;
#[cfg(test)]
mod queue_tests;
mod unix;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::task::{Id, JoinSet};

use metadata_content::record::Sink;
use metadata_content::sink::{Message, Outbox};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub use file::FILE_OCTETS as SINK_FILE_OCTETS;

/// How often a message is offered to a socket.
const TRIES: u32 = 2;
/// Maximum number of sinks served at once; each uses a file descriptor.
pub(super) const AT_ONCE: usize = 128;
/// Maximum number of sinks remembered as failing; failures of further sinks are only counted.
const FAILING: usize = 1_024;
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

/// The other end of an [`Outbox`]. For [`deliver()`].
#[derive(Debug)]
pub struct Deliveries {
    queue: UnboundedReceiver<Box<Message>>,
}

/// An outbox and its other end. The queue between them is bounded by [`WAITING`](metadata_content::sink::WAITING) and
/// [`WAITING_PER_VM`](metadata_content::sink::WAITING_PER_VM).
#[must_use]
pub fn outbox() -> (Outbox, Deliveries) {
    let (sender, queue) = unbounded_channel();
    (Outbox::new(move |message| sender.send(message).is_ok()), Deliveries { queue })
}

/// Delivers messages until every [`Outbox`] is dropped and the queue is empty.
///
/// Sinks are served concurrently. Each sink receives its messages in the order they were queued, so the messages of
/// one VM stay in order, and a receiver that hangs delays only its own messages.
pub async fn deliver(mut deliveries: Deliveries) {
    let mut lanes = Lanes::new(hand_over);
    let mut open = true;
    while open || !lanes.on_their_way.is_empty() {
        tokio::select! {
            next = deliveries.queue.recv(), if open => match next {
                Some(message) => lanes.push(message),
                None => open = false,
            },
            Some(done) = lanes.on_their_way.join_next_with_id() => {
                match done {
                    Ok((id, taken)) => lanes.next(id, Some(taken)),
                    Err(error) => lanes.next(error.id(), None),
                }
            }
        }
    }
}

/// Messages by sink, the first of each on its way. There are no more of them than wait in all.
struct Lanes<F> {
    /// What is behind the one on its way.
    behind: HashMap<Sink, VecDeque<Box<Message>>>,
    sinks: HashMap<Id, Sink>,
    on_their_way: JoinSet<Result<(), SinkError>>,
    /// Sinks that lost their last message.
    failing: HashSet<Sink>,
    at_once: Arc<Semaphore>,
    hand_over: F,
}

impl<F: Fn(Box<Message>) -> D, D: Future<Output = Result<(), SinkError>> + Send + 'static> Lanes<F> {
    fn new(hand_over: F) -> Self {
        let at_once = Arc::new(Semaphore::new(AT_ONCE));
        let (behind, sinks, failing) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { behind, sinks, on_their_way: JoinSet::new(), failing, at_once, hand_over }
    }

    fn push(&mut self, message: Box<Message>) {
        match self.behind.get_mut(message.sink()) {
            Some(behind) => behind.push_back(message),
            None => {
                self.behind.insert(message.sink().clone(), VecDeque::new());
                self.send(message);
            }
        }
    }

    /// The task `done` has ended, without an outcome by a panic: its sink takes the next message.
    fn next(&mut self, done: Id, taken: Option<Result<(), SinkError>>) {
        let Some(sink) = self.sinks.remove(&done) else { return };
        match taken {
            Some(Err(error)) => self.fails(&sink, &error),
            _ => drop(self.failing.remove(&sink)),
        }
        match self.behind.get_mut(&sink).and_then(VecDeque::pop_front) {
            Some(message) => self.send(message),
            None => drop(self.behind.remove(&sink)),
        }
    }

    /// Logs only the first of consecutive failures, so that guests cannot fill the log.
    fn fails(&mut self, sink: &Sink, error: &SinkError) {
        if self.failing.len() < FAILING && self.failing.insert(sink.clone()) {
            tracing::warn!(%sink, %error, "messages from guests are lost");
        }
    }

    fn send(&mut self, message: Box<Message>) {
        let (sink, at_once) = (message.sink().clone(), Arc::clone(&self.at_once));
        let way = (self.hand_over)(message);
        let task = self.on_their_way.spawn(async move {
            // Nobody closes the semaphore.
            let _turn = at_once.acquire_owned().await;
            way.await
        });
        self.sinks.insert(task.id(), sink);
    }
}

/// Delivers one message to its sink and counts the outcome.
async fn hand_over(message: Box<Message>) -> Result<(), SinkError> {
    let json = Bytes::from(message.json());
    let taken = match message.sink() {
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
    message.end(taken.is_ok());
    taken
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use metadata_content::mailbox::Mailbox;
    use metadata_content::record::Sink;
    use metadata_content::record::vm::Sinks;
    use metadata_content::sink::MessageKind;

    use super::{Lanes, Message, outbox};

    #[tokio::test]
    async fn a_fault_on_the_way_of_one_message_holds_up_none_behind_it() {
        let (outbox, mut deliveries) = outbox();
        let mailbox = Mailbox::new("", &outbox);
        let sinks = Sinks { events: Some(Sink::File("/sink".into())), ..Sinks::default() };
        let arrived = Arc::new(Mutex::new(Vec::new()));
        let arrivals = Arc::clone(&arrived);
        let mut lanes = Lanes::new(move |message: Box<Message>| {
            let arrivals = Arc::clone(&arrivals);
            async move {
                let json: serde_json::Value = serde_json::from_str(&message.json()).expect("JSON");
                assert_ne!(json["body"], "fault", "as meant");
                arrivals.lock().expect("sound").push(json["body"].clone());
                Ok(())
            }
        });
        for body in ["first", "fault", "last"] {
            mailbox.tell(&sinks, MessageKind::Event, body.as_bytes(), 0);
            lanes.push(deliveries.queue.try_recv().expect("a message"));
        }
        while let Some(done) = lanes.on_their_way.join_next_with_id().await {
            match done {
                Ok((id, taken)) => lanes.next(id, Some(taken)),
                Err(error) => lanes.next(error.id(), None),
            }
        }
        assert_eq!(*arrived.lock().expect("sound"), ["first", "last"]);
        assert_eq!(outbox.counts().waiting, 0, "a place is lost");
        assert!(lanes.behind.is_empty() && lanes.sinks.is_empty(), "an empty lane is kept");
    }
}
