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

/// Number of attempts to deliver a message to a socket.
const TRIES: u32 = 2;
/// Maximum number of messages delivered at once, each to another sink. Each uses a file descriptor.
pub(super) const AT_ONCE: usize = 128;
/// Maximum number of sinks remembered as failing; failures of further sinks are only counted.
const FAILING: usize = 1_024;
/// Pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Why a message could not be delivered to its sink.
#[derive(Debug, thiserror::Error)]
pub(super) enum SinkError {
    #[error("expected a file to append to, found: {0}; check the path and its permissions")]
    File(std::io::Error),
    #[error("expected a regular file, found another kind; name a regular file, or a socket after `unix:`")]
    NotAFile,
    #[error("expected a file of at most {limit} octets, found no room in it; rotate it", limit = file::FILE_OCTETS)]
    Full,
    #[error("expected a receiver on the socket, found: {0}; start the receiver")]
    Socket(std::io::Error),
    #[error("expected an answer to a POST, found: {0}; check that the receiver speaks HTTP/1.1")]
    Http(hyper::Error),
    #[error("expected a path for an HTTP request, found: {0}; check the path")]
    Request(hyper::http::Error),
    #[error("expected a 2xx answer, found {0}; see the receiver's log")]
    Status(hyper::StatusCode),
    #[error("expected an answer in {limit} s, found none; see the receiver's log", limit = unix::TIMEOUT.as_secs())]
    Late,
}

/// The receiving end of an [`Outbox`]'s queue, for [`deliver()`].
#[derive(Debug)]
pub struct Deliveries {
    queue: UnboundedReceiver<Box<Message>>,
}

/// Returns an outbox and the receiving end of its queue. [`WAITING`](metadata_content::sink::WAITING) and
/// [`WAITING_PER_VM`](metadata_content::sink::WAITING_PER_VM) limit the queue.
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
    let mut queues = SinkQueues::new(deliver_one);
    let mut open = true;
    while open || !queues.tasks.is_empty() {
        tokio::select! {
            next = deliveries.queue.recv(), if open => match next {
                Some(message) => queues.push(message),
                None => open = false,
            },
            Some(done) = queues.tasks.join_next_with_id() => {
                match done {
                    Ok((id, taken)) => queues.on_done(id, Some(taken)),
                    Err(error) => queues.on_done(error.id(), None),
                }
            }
        }
    }
}

/// A queue of messages for each sink. A task delivers the first message of each queue; the others wait for it to end.
/// The outbox limits the number of messages.
struct SinkQueues<F> {
    /// Messages that wait for the task of their sink. A sink without a task has no entry.
    waiting: HashMap<Sink, VecDeque<Box<Message>>>,
    /// The sink of each task.
    sinks: HashMap<Id, Sink>,
    tasks: JoinSet<Result<(), SinkError>>,
    /// Sinks to which the last delivery failed, at most [`FAILING`].
    failing: HashSet<Sink>,
    at_once: Arc<Semaphore>,
    deliver_one: F,
}

impl<F: Fn(Box<Message>) -> D, D: Future<Output = Result<(), SinkError>> + Send + 'static> SinkQueues<F> {
    fn new(deliver_one: F) -> Self {
        let at_once = Arc::new(Semaphore::new(AT_ONCE));
        let (waiting, sinks, failing) = (HashMap::new(), HashMap::new(), HashSet::new());
        Self { waiting, sinks, tasks: JoinSet::new(), failing, at_once, deliver_one }
    }

    fn push(&mut self, message: Box<Message>) {
        match self.waiting.get_mut(message.sink()) {
            Some(waiting) => waiting.push_back(message),
            None => {
                self.waiting.insert(message.sink().clone(), VecDeque::new());
                self.send(message);
            }
        }
    }

    /// Handles the end of task `done` and delivers the next message to its sink. `taken` is `None` if the task
    /// panicked.
    fn on_done(&mut self, done: Id, taken: Option<Result<(), SinkError>>) {
        let Some(sink) = self.sinks.remove(&done) else { return };
        match taken {
            Some(Err(error)) => self.on_failure(&sink, &error),
            _ => drop(self.failing.remove(&sink)),
        }
        match self.waiting.get_mut(&sink).and_then(VecDeque::pop_front) {
            Some(message) => self.send(message),
            None => drop(self.waiting.remove(&sink)),
        }
    }

    /// Logs only the first of consecutive failures, so that guests cannot fill the log.
    fn on_failure(&mut self, sink: &Sink, error: &SinkError) {
        if self.failing.len() < FAILING && self.failing.insert(sink.clone()) {
            tracing::warn!(%sink, %error, "messages from guests are lost");
        }
    }

    fn send(&mut self, message: Box<Message>) {
        let (sink, at_once) = (message.sink().clone(), Arc::clone(&self.at_once));
        let way = (self.deliver_one)(message);
        let task = self.tasks.spawn(async move {
            // Never an error: the semaphore is not closed.
            let _turn = at_once.acquire_owned().await;
            way.await
        });
        self.sinks.insert(task.id(), sink);
    }
}

/// Delivers one message to its sink and counts the outcome.
async fn deliver_one(message: Box<Message>) -> Result<(), SinkError> {
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

    use super::{Message, SinkQueues, outbox};

    #[tokio::test]
    async fn a_panic_during_one_delivery_does_not_hold_up_later_messages() {
        let (outbox, mut deliveries) = outbox();
        let mailbox = Mailbox::new("", &outbox);
        let sinks = Sinks { events: Some(Sink::File("/sink".into())), ..Sinks::default() };
        let arrived = Arc::new(Mutex::new(Vec::new()));
        let arrivals = Arc::clone(&arrived);
        let mut queues = SinkQueues::new(move |message: Box<Message>| {
            let arrivals = Arc::clone(&arrivals);
            async move {
                let json: serde_json::Value = serde_json::from_str(&message.json()).expect("JSON");
                assert_ne!(json["body"], "fault", "intended panic");
                arrivals.lock().expect("sound").push(json["body"].clone());
                Ok(())
            }
        });
        for body in ["first", "fault", "last"] {
            mailbox.tell(&sinks, MessageKind::Event, body.as_bytes(), 0);
            queues.push(deliveries.queue.try_recv().expect("a message"));
        }
        while let Some(done) = queues.tasks.join_next_with_id().await {
            match done {
                Ok((id, taken)) => queues.on_done(id, Some(taken)),
                Err(error) => queues.on_done(error.id(), None),
            }
        }
        assert_eq!(*arrived.lock().expect("sound"), ["first", "last"]);
        assert_eq!(outbox.counts().waiting, 0, "a place in the queue is lost");
        assert!(queues.waiting.is_empty() && queues.sinks.is_empty(), "an empty queue is kept");
    }
}
