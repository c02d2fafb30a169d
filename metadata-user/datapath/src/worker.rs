//! One pinned thread per hub: wait, receive, step, send, reap. The only room with a clock and a poll.
//!
//! Every turn does every step, whether or not there was anything to receive: timers must fire in silence.
//!
//! ```text
//!  ┌─► read the clocks once
//!  │   forget slots the control side let go of      (≤ CONTROL_BATCH)
//!  │   wake slots whose answers may have changed    (≤ CONTROL_BATCH)
//!  │   drain, or go on as before                    (≤ ORDERS)
//!  │   lend received frames to the engine, each slot its share of the turn (`fair`)
//!  │   step the engine: timers, answers, reaping
//!  │   publish counters                             (every PUBLISH_EVERY, and before each sleep)
//!  │        │ there was work less than `spin` ago: again at once
//!  ├────────┤ many frames come: nap, and let them gather
//!  └────────┤ else
//!           └ poll(2) on [socket, bell] until a frame, a message or the engine's next deadline
//! ```
//!
//! In a storm frames come one after the other, and a worker that polls for each, or is woken for each, spends more
//! on that than on answering. So while it is busy it sleeps for [`NAP`] whenever it finds nothing, and takes what
//! has gathered at once. A lone request finds it in `poll`, from where the kernel wakes it at once; an idle node
//! costs nothing.
//!
//! The control side talks to the worker by bounded queues of slots to forget and to wake and a flag to stop,
//! all followed by the bell (an eventfd), and reads counters from a snapshot the worker refreshes. The worker
//! never waits for the control side: where the snapshot is being read it publishes the next time round.

mod beat;
mod bell;
mod engine;
mod fair;
mod run;
mod told;
/// What `told` is made of: a model of it is made of something else.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
}

use metadata_common::maps::{MAX_SLOTS, Slot};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::afxdp::SocketStats;
use crate::link::{FrameSource, HubTap, Link, LinkStats, TapStats};
use crate::sandbox::{Mode, SandboxError, Stage};
use crate::stack::{Claims, SlotStats, Transmit};
use beat::LastBeat;
pub use beat::{Heartbeat, SILENCE, Silence};
use bell::Bell;
pub use fair::{BATCH, FRESH_BURST, FRESH_EVERY, Fair, LOOK_AHEAD, QUANTUM, Turned, WAITING, WORK_PER_TURN};
use metadata_base::time::Now;
use told::Told;

/// Segments of answers that the stack sends for one frame, timer or wake; the rest waits for its slot's next visit.
pub const SEGMENTS_AT_ONCE: u32 = QUANTUM;
/// Slots forgotten, and slots woken, per turn at most: what may delay frames.
pub const CONTROL_BATCH: usize = 64;
/// Slots that may wait to be forgotten: a node that lets go of every guest at once still fits.
pub const CONTROL_QUEUE: usize = MAX_SLOTS as usize;
/// Slots that may wait to be woken: every guest of a node at once. A queue of its own, so that waking never
/// leaves a slot that must be forgotten without room.
pub const WAKE_QUEUE: usize = MAX_SLOTS as usize;
/// Orders to the engine as a whole that may wait.
pub const ORDERS: usize = 4;
/// How often a worker that drains says what is left. Finding out is a look at every connection.
pub const LEFT_EVERY: Duration = Duration::from_millis(5);
/// Slots that may wait to be looked at, all of them in one turn: an operator asks for a few.
pub const LOOK_QUEUE: usize = 16;
/// Age of the published counters under load, at most (plus one turn).
pub const PUBLISH_EVERY: Duration = Duration::from_millis(100);
/// Longest sleep: what may pass before counters the kernel moves by itself are read again.
pub const MAX_SLEEP: Duration = Duration::from_secs(1);

/// How long frames are counted to tell a busy worker from another.
pub const PACE: Duration = Duration::from_millis(1);
/// Frames of one [`PACE`] that make a worker busy.
pub const BUSY: usize = 16;
/// How long a busy worker with nothing to do lets frames gather: they wait as long at most, and neither waking
/// it for each nor polling in vain is paid for.
pub const NAP: Duration = Duration::from_micros(50);

/// What the worker drives: [`crate::stack`], or a pretended one in tests.
pub trait Engine: Send + 'static {
    /// Its counters.
    type Stats: Copy + Default + Send + 'static;
    /// Takes one frame of `slot`; answers go to `out`.
    fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit);
    /// A slot of which something was put off that could be sent at once; named once until [`go_on`](Self::go_on) has
    /// returned false for it. An engine that puts nothing off has nothing to do for this and the next.
    fn owing(&mut self) -> Option<Slot> {
        None
    }
    /// Sends some of what was put off of `slot`; true while there is more.
    fn go_on(&mut self, _now: Now, _slot: Slot, _out: &mut dyn Transmit) -> bool {
        false
    }
    /// Does what is due; returns when it wants to be called next at the latest, by [`Now::mono`].
    fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration>;
    /// Lets go of everything held for `slot`.
    fn forget(&mut self, slot: Slot);
    /// Looks again at whatever waits for something to change about `slot`; answers go to `out`.
    fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit);
    /// Begins to drain: gives all that is going on to `claims` before it returns, and brings it to an end within
    /// `limit`. An engine in which nothing lasts beyond a frame has nothing to do for this and the next three.
    fn drain(&mut self, _now: Now, _limit: Duration, _claims: Option<Box<dyn Claims + Send>>) {}
    /// Drains no more.
    fn resume(&mut self) {}
    /// Lets be (`true`) what it does not know, which may be another agent's.
    fn spare_unknown(&mut self, _spare: bool) {}
    /// What is going on still; asked while it drains, every [`LEFT_EVERY`].
    fn left(&self) -> usize {
        0
    }

    /// The turn that received frames and stepped is over, and took so long; zero where nothing came.
    fn turned(&mut self, _turn: Duration) {}
    /// What is held for `slot`.
    fn look(&self, _slot: Slot) -> SlotStats {
        SlotStats::default()
    }
    /// The counters now.
    fn stats(&self) -> Self::Stats;
}

/// How a worker runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The thread's name; the kernel shows the first 15 octets.
    pub name: String,
    /// The CPU to stay on, or `None` to go where the scheduler likes.
    pub cpu: Option<usize>,
    /// How long to stay awake after the last work; 0 sleeps at once.
    pub spin: Duration,
    /// Whether the thread gives up what a turn does not take.
    pub sandbox: Mode,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { name: "imds-hub-0".into(), cpu: None, spin: Duration::ZERO, sandbox: Mode::Off }
    }
}

/// Why a worker did not start, or ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The kernel gave no eventfd or no thread.
    #[error("cannot start worker {name}: {source}; check the limits on open files and threads")]
    Start {
        /// The worker.
        name: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The CPU does not exist, or is not ours to use.
    #[error("cannot pin worker {name} to CPU {cpu}: {source}; name a CPU this process may run on, or none")]
    Pin {
        /// The worker.
        name: String,
        /// The CPU asked for.
        cpu: usize,
        /// What the kernel said.
        source: Errno,
    },
    /// The thread cannot give up what a turn does not take.
    #[error("worker {name}: {source}")]
    Sandbox {
        /// The worker.
        name: String,
        /// Why.
        source: SandboxError,
    },
    /// Waiting failed, which leaves the worker deaf.
    #[error("worker's poll failed: {0}; restart the agent")]
    Poll(Errno),
    /// The source of frames is closed.
    #[error("the worker's source of frames is gone: restart the agent to make a new hub")]
    SourceGone,
    /// A fault of ours.
    #[error("the worker panicked (its message is in the log): restart the agent and report it")]
    Panicked,
}

/// Why a message did not reach a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// [`CONTROL_QUEUE`], [`WAKE_QUEUE`] or [`LOOK_QUEUE`] messages of the kind wait already.
    #[error("the worker's queue of such messages is full: try again later")]
    Full,
    /// The worker has ended; [`WorkerHandle::stop`] says why.
    #[error("the worker has ended")]
    Ended,
}

/// What a worker's loop did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoopStats {
    /// Turns, each with every step.
    pub turns: u64,
    /// Turns after which more was to be done at once: frames in the ring, or slots in line.
    pub full_batches: u64,
    /// Times it slept until something happened.
    pub sleeps: u64,
    /// Times it let frames gather.
    pub naps: u64,
    /// Time slept in all, either way.
    pub slept: Duration,
    /// Time since the thread started.
    pub elapsed: Duration,
    /// Slots forgotten.
    pub forgotten: u64,
    /// Slots woken.
    pub woken: u64,
}

/// Everything a worker counts, as of its last publishing; `T` is [`Engine::Stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats<T> {
    /// The loop.
    pub turns: LoopStats,
    /// The socket.
    pub socket: SocketStats,
    /// Received frames dropped before the engine.
    pub link: LinkStats,
    /// Frames sent.
    pub tap: TapStats,
    /// The engine.
    pub engine: T,
}

/// What the engine as a whole is to do.
enum Order {
    Drain(Duration, Option<Box<dyn Claims + Send>>),
    Resume,
    Spare(bool),
}

/// [`Shared::left`] while the worker does not drain.
const NOT_DRAINING: u64 = u64::MAX;

/// What both sides hold.
#[derive(Debug)]
struct Shared<T> {
    bell: Bell,
    stop: AtomicBool,
    /// A slot waits to be forgotten, woken or looked at, or an order to be obeyed.
    told: Told,
    /// What is left to drain, written after all of it was claimed; or [`NOT_DRAINING`].
    left: AtomicU64,
    stats: Mutex<WorkerStats<T>>,
    beat: Heartbeat,
}

/// A slot to look at, and where to say what is held for it.
type Look = (Slot, Box<dyn FnOnce(SlotStats) + Send>);

/// The worker's ends of its queues.
#[derive(Debug)]
struct Inbox {
    forgets: Receiver<Slot>,
    wakes: Receiver<Slot>,
    looks: Receiver<Look>,
    orders: Receiver<Order>,
}

/// Why a thread does not begin.
enum Refused {
    Pin(Errno),
    Sandbox(SandboxError),
}

/// Starts workers.
#[derive(Debug)]
pub struct Worker;

impl Worker {
    /// Starts a thread that drives `engine` with the frames of `source` and sends its answers by `tap`.
    ///
    /// # Errors
    /// [`WorkerError::Start`] or [`WorkerError::Pin`]; no thread is left then.
    pub fn spawn<S, E>(
        config: WorkerConfig,
        source: S,
        tap: HubTap,
        engine: E,
    ) -> Result<WorkerHandle<E::Stats>, WorkerError>
    where
        S: FrameSource + Send + 'static,
        E: Engine,
    {
        let WorkerConfig { name, cpu, spin, sandbox } = config;
        let start = |source| WorkerError::Start { name: name.clone(), source };
        let shared = Arc::new(Shared {
            bell: Bell::new().map_err(|errno| start(errno.into()))?,
            stop: AtomicBool::new(false),
            told: Told::new(),
            left: AtomicU64::new(NOT_DRAINING),
            stats: Mutex::default(),
            beat: Heartbeat::default(),
        });
        let (forget, forgets) = mpsc::sync_channel(CONTROL_QUEUE);
        let (wake, wakes) = mpsc::sync_channel(WAKE_QUEUE);
        let (look, looks) = mpsc::sync_channel(LOOK_QUEUE);
        let (order, orders) = mpsc::sync_channel(ORDERS);
        let inbox = Inbox { forgets, wakes, looks, orders };
        let (pinned, outcome) = mpsc::sync_channel(1);
        let its = Arc::clone(&shared);
        let body = move || {
            let _last = LastBeat(its.beat.clone());
            let pin = cpu.map_or(Ok(()), run::pin).map_err(Refused::Pin);
            let ready = pin.and_then(|()| sandbox.enter(Stage::Work).map_err(Refused::Sandbox));
            let refused = ready.is_err();
            // The other end waits for just this message, and gives up on hearing of a failure.
            if pinned.send(ready).is_err() || refused {
                return Ok(());
            }
            run::Run::new(Link::new(source), tap, engine, its, inbox, spin).run()
        };
        let thread = std::thread::Builder::new().name(name.clone()).spawn(body).map_err(start)?;
        let handle = WorkerHandle { shared, forget, wake, look, order, thread: Some(thread) };
        match (outcome.recv(), cpu) {
            (Ok(Ok(())), _) => Ok(handle),
            // Dropping the handle ends the thread.
            (Ok(Err(Refused::Pin(source))), Some(cpu)) => Err(WorkerError::Pin { name, cpu, source }),
            (Ok(Err(Refused::Sandbox(source))), _) => Err(WorkerError::Sandbox { name, source }),
            _ => Err(WorkerError::Panicked),
        }
    }
}

/// The control side's end of a worker. Dropping it stops the worker.
#[derive(Debug)]
pub struct WorkerHandle<T> {
    shared: Arc<Shared<T>>,
    forget: SyncSender<Slot>,
    wake: SyncSender<Slot>,
    order: SyncSender<Order>,
    look: SyncSender<Look>,
    thread: Option<JoinHandle<Result<(), WorkerError>>>,
}

impl<T: Copy> WorkerHandle<T> {
    /// Has the engine let go of `slot`. Frames the kernel queued before still carry the slot: unbind it in
    /// the kernel first.
    ///
    /// # Errors
    /// [`ControlError`]; the slot is not forgotten then.
    pub fn forget(&self, slot: Slot) -> Result<(), ControlError> {
        self.tell(&self.forget, slot)
    }

    /// Has the engine look again at whatever waits on `slot`: call it after the change itself, which the
    /// worker then sees. Never waits.
    ///
    /// # Errors
    /// [`ControlError`]; the slot is not woken then, and after [`ControlError::Full`] it is worth another try.
    pub fn wake(&self, slot: Slot) -> Result<(), ControlError> {
        self.tell(&self.wake, slot)
    }

    /// Has the engine drain: [`left`](Self::left) says when it has claimed all that is going on, and how much of
    /// it is left.
    ///
    /// # Errors
    /// [`ControlError`]; the engine does not drain then.
    pub fn drain(&self, limit: Duration, claims: Option<Box<dyn Claims + Send>>) -> Result<(), ControlError> {
        self.tell(&self.order, Order::Drain(limit, claims))
    }

    /// Has the engine go on as if there had been no drain.
    ///
    /// # Errors
    /// [`ControlError`]; it drains on then.
    pub fn resume(&self) -> Result<(), ControlError> {
        self.tell(&self.order, Order::Resume)
    }

    /// Has the engine let be what it does not know, because another agent may, or ends that.
    ///
    /// # Errors
    /// [`ControlError`]; nothing changes then.
    pub fn spare_unknown(&self, spare: bool) -> Result<(), ControlError> {
        self.tell(&self.order, Order::Spare(spare))
    }

    /// What a worker that drains has left; `None` until it has claimed all of it, and when it does not drain.
    /// At most [`LEFT_EVERY`] old.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        // Acquire: whoever sees a number sees the claims made before.
        Some(self.shared.left.load(Ordering::Acquire)).filter(|left| *left != NOT_DRAINING)
    }

    /// Asks what is held for `slot`. The worker calls `reply` after its next turn, and drops it uncalled if it has none:
    /// `reply` must not wait. Never waits.
    ///
    /// # Errors
    /// [`ControlError`]; `reply` is not called then.
    pub fn look(
        &self,
        slot: Slot,
        reply: impl FnOnce(SlotStats) + Send + 'static,
    ) -> Result<(), ControlError> {
        self.tell(&self.look, (slot, Box::new(reply)))
    }

    /// The counters as last published: at most [`PUBLISH_EVERY`] old under load, [`MAX_SLEEP`] when idle.
    #[must_use]
    pub fn stats(&self) -> WorkerStats<T> {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker's sign of life.
    #[must_use]
    pub fn heartbeat(&self) -> Heartbeat {
        self.shared.beat.clone()
    }

    /// True once the worker has ended, which before [`stop`](Self::stop) it does only by a fault.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the worker after its current turn and waits for it; socket and tap are closed then.
    ///
    /// # Errors
    /// Why it had ended before, if it had.
    pub fn stop(mut self) -> Result<(), WorkerError> {
        self.join()
    }
}

impl<T> WorkerHandle<T> {
    fn tell<M>(&self, queue: &SyncSender<M>, message: M) -> Result<(), ControlError> {
        queue.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => ControlError::Full,
            TrySendError::Disconnected(_) => ControlError::Ended,
        })?;
        self.shared.told.tell();
        self.shared.bell.ring();
        Ok(())
    }

    fn join(&mut self) -> Result<(), WorkerError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // Relaxed: the flag carries nothing but itself, and the bell after it is a system call.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
        thread.join().unwrap_or(Err(WorkerError::Panicked))
    }
}

impl<T> Drop for WorkerHandle<T> {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!(%error, "worker had ended");
        }
    }
}

#[cfg(test)]
mod tests;
