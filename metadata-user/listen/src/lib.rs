//! The loop that accepts connections, with a limit on concurrent connections.
//!
//! The loop logs the first of consecutive errors of `accept`, pauses for [`PAUSE`] after each, and continues.
//! Without the pause it would use all CPU time while the process has no free file descriptor.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, warn};

/// Pause after an error that does not concern only one connection.
pub const PAUSE: Duration = Duration::from_millis(100);

/// A socket that accepts connections.
pub trait Listener: Send + Sync {
    /// The type of a connection.
    type Stream: Send + 'static;

    /// Waits for the next connection. Dropping the future loses no connection.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

/// What happens to a new connection beyond the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It stays in the kernel's queue until another connection ends.
    Wait,
    /// It is closed.
    Refuse,
    /// It replaces the oldest connection that is not [held](Stay::hold), which is closed. If all are held, the new one
    /// is closed.
    EndOldest,
}

/// The limit on concurrent connections of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The listener's name in the log.
    pub name: &'static str,
    /// Maximum number of connections.
    pub most: usize,
    /// What happens to further connections.
    pub when_full: WhenFull,
}

/// Protects a connection from being closed for a new one ([`WhenFull::EndOldest`]). The caller limits how many
/// connections it holds.
#[derive(Clone, Debug, Default)]
pub struct Stay(Arc<AtomicBool>);

impl Stay {
    /// Holds the connection until the result is dropped.
    #[must_use]
    pub fn hold(&self) -> Staying {
        self.keep();
        Staying(self.clone())
    }

    /// Holds the connection until it ends.
    pub fn keep(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the connection is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Holds a connection until it is dropped.
#[derive(Debug)]
pub struct Staying(Stay);

impl Drop for Staying {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Relaxed);
    }
}

/// Accepts connections and runs `attend` for each as a task. Dropping the future ends all tasks.
pub async fn serve<L, F>(
    listener: &L,
    places: Places,
    mut attend: impl FnMut(L::Stream, Stay) -> F,
) -> Infallible
where
    L: Listener,
    F: Future<Output = ()> + Send + 'static,
{
    let mut taken = Taken::default();
    let mut failing = false;
    loop {
        let waits = places.when_full == WhenFull::Wait && taken.count() >= places.most;
        tokio::select! {
            Some(_) = taken.tasks.join_next() => {}
            accepted = listener.accept(), if !waits => match accepted {
                Ok(stream) => {
                    failing = false;
                    if taken.make_room(places) {
                        let stay = Stay::default();
                        let task = taken.tasks.spawn(attend(stream, stay.clone()));
                        taken.oldest_first.push_back((task, stay));
                    }
                }
                Err(error) if is_of_one_connection(&error) => debug!("{}: {error}", places.name),
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        warn!("{}: cannot accept a connection: {error}", places.name);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

/// The open connections.
#[derive(Default)]
struct Taken {
    oldest_first: VecDeque<(AbortHandle, Stay)>,
    tasks: JoinSet<()>,
}

impl Taken {
    fn count(&mut self) -> usize {
        self.oldest_first.retain(|(task, _)| !task.is_finished());
        self.oldest_first.len()
    }

    /// Makes room for a new connection. Returns false if the new connection is to be closed instead.
    fn make_room(&mut self, places: Places) -> bool {
        if self.count() < places.most {
            return true;
        }
        let ends =
            |(_, stay): &(AbortHandle, Stay)| places.when_full == WhenFull::EndOldest && !stay.is_held();
        let oldest = self.oldest_first.iter().position(ends);
        let Some((task, _)) = oldest.and_then(|at| self.oldest_first.remove(at)) else {
            debug!("{}: refused a connection: {} are open", places.name, places.most);
            return false;
        };
        task.abort();
        true
    }
}

/// True if the client closed its connection before it was accepted (accept(2)). The next connection is not affected.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
