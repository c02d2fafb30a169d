//! One thread per hub: wait, receive, step, send, reap. Only this module reads a clock and polls.
//!
//! Every turn runs every step, even if no frame arrived, because timers must fire on an idle hub.
//!
//! ```text
//!  ┌─► read the clocks once
//!  │   forget slots the control side released        (≤ CONTROL_BATCH)
//!  │   wake slots whose answers may have changed    (≤ CONTROL_BATCH)
//!  │   obey orders: drain, resume, spare            (≤ ORDERS)
//!  │   pass received frames to the engine, each slot its share of the turn (`fair`)
//!  │   step the engine: timers, answers, reaping
//!  │   publish counters                             (every PUBLISH_EVERY, and before each sleep)
//!  │        │ work within the last `spin`: next turn at once
//!  ├────────┤ busy: nap while frames gather
//!  └────────┤ otherwise
//!           └ poll(2) on [socket, bell] until a frame, a message or the engine's next deadline
//! ```
//!
//! Under load frames arrive one after another. Polling or waking up for each would cost more than answering it. A
//! busy worker therefore sleeps for [`NAP`] whenever it finds no frame, and then takes all frames that have arrived.
//! A single request finds the worker in `poll`, and the kernel wakes it at once. An idle worker uses almost no CPU
//! time.
//!
//! The control side sends slots to forget, slots to wake and orders through bounded queues, and requests the end with
//! a flag. It then rings the bell (an eventfd). It reads counters from a snapshot that the worker refreshes. The
//! worker never waits for the control side: if the snapshot is being read, the worker publishes on a later turn.

mod fair;
mod pending;
mod run;

#[cfg(test)]
mod tests;

pub use fair::{
    BATCH, FRESH_BURST, FRESH_EVERY, FairScheduler, LOOK_AHEAD, QUANTUM, TurnResult, WAITING, WORK_PER_TURN,
};

use metadata_common::maps::{MAX_SLOTS, Slot};
use metadata_common::time::Now;
use pending::Pending;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::afxdp::SocketStats;
use crate::link::{FrameSource, HubTap, LinkReceiver, LinkStats, TapStats};
use crate::sandbox::{SandboxError, SandboxMode, SandboxStage};
use crate::stack::{AckLedger, ServedFlows, Service, SlotStats, Stack, StackStats, Transmit};

/// The atomics that `pending` uses. A thread model replaces this module with its own types.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
}

/// Limit of answer segments that the stack sends for one frame, timer or wake. The rest waits for the slot's next
/// visit.
pub const SEGMENTS_AT_ONCE: u32 = QUANTUM;
/// Limit of slots forgotten, and of slots woken, per turn. It bounds the delay of received frames.
pub const CONTROL_BATCH: usize = 64;
/// Limit of slots that wait to be forgotten. A node that releases all guests at once still fits.
pub const CONTROL_QUEUE: usize = MAX_SLOTS as usize;
/// Limit of slots that wait to be woken: all guests of a node at once. The queue is separate so that wake requests
/// never take the room of slots to forget.
pub const WAKE_QUEUE: usize = MAX_SLOTS as usize;
/// Limit of waiting orders to the whole engine.
pub const ORDERS: usize = 4;
/// How often a draining worker publishes how many connections remain. The count visits every connection.
pub const LEFT_EVERY: Duration = Duration::from_millis(5);
/// Limit of slots that wait to be inspected. One turn serves all of them; an operator asks for only a few.
pub const LOOK_QUEUE: usize = 16;
/// Maximum age of the published counters under load, plus one turn.
pub const PUBLISH_EVERY: Duration = Duration::from_millis(100);
/// Longest sleep, so that counters which only the kernel updates are still read this often.
pub const MAX_SLEEP: Duration = Duration::from_secs(1);

/// The period over which received frames are counted to find out whether the worker is busy.
pub const PACE: Duration = Duration::from_millis(1);
/// The worker is busy from this many frames per [`PACE`].
pub const BUSY: usize = 16;
/// How long a busy worker sleeps if it finds no work. A frame waits at most this long, and many frames share one
/// wake-up.
pub const NAP: Duration = Duration::from_micros(50);

/// What the worker drives: [`crate::stack`], or a fake in tests.
pub trait Engine: Send + 'static {
    /// The engine's counters.
    type Stats: Copy + Default + Send + 'static;
    /// Reads ahead what the frames of a group will touch, so that the CPU waits for memory once for all of them.
    /// Changes nothing.
    fn read_ahead(&self, _group: &[(Slot, &[u8])]) {}
    /// Processes one frame of `slot` and sends answers to `out`.
    fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit);
    /// Returns a slot with deferred output that could be sent now. A slot is returned once, until
    /// [`go_on`](Self::go_on) returns false for it. Engines that defer nothing need neither this method nor `go_on`.
    fn next_pending_slot(&mut self) -> Option<Slot> {
        None
    }
    /// Sends some of the deferred output of `slot`; returns true while there is more.
    fn go_on(&mut self, _now: Now, _slot: Slot, _out: &mut dyn Transmit) -> bool {
        false
    }
    /// Runs what is due; returns the latest time of the next call, by [`Now::mono`].
    fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration>;
    /// Releases everything the engine holds for `slot`.
    fn forget(&mut self, slot: Slot);
    /// Retries whatever waits for a change of `slot`; sends answers to `out`.
    fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit);
    /// Starts to drain: hands all current flows to `claims` before it returns, and ends their connections within
    /// `limit`. Engines that keep no state between frames need neither this method nor the next three.
    fn drain(&mut self, _now: Now, _limit: Duration, _claims: Option<Box<dyn ServedFlows + Send>>) {}
    /// Stops draining and returns to normal service.
    fn resume(&mut self) {}
    /// Sets whether the engine leaves unknown connections alone, because they may belong to another agent.
    fn spare_unknown(&mut self, _spare: bool) {}
    /// How many connections remain. The worker asks every [`LEFT_EVERY`] while the engine drains.
    fn left(&self) -> usize {
        0
    }
    /// Called last, when the worker ends other than by a panic: gives up what other processes see of the engine's
    /// state.
    fn end(&mut self) {}

    /// Called after each turn with its duration; zero if the turn had no work.
    fn turned(&mut self, _turn: Duration) {}
    /// What the engine holds for `slot`.
    fn look(&self, _slot: Slot) -> SlotStats {
        SlotStats::default()
    }
    /// The current counters.
    fn stats(&self) -> Self::Stats;
}

/// Configuration of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The thread's name; the kernel shows the first 15 bytes.
    pub name: String,
    /// How long the thread polls after its last work before it sleeps; 0 sleeps at once.
    pub spin: Duration,
    /// How the thread drops the system calls and capabilities that a turn does not need.
    pub sandbox: SandboxMode,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { name: "imds-hub-0".into(), spin: Duration::ZERO, sandbox: SandboxMode::Off }
    }
}

/// Why a worker failed to start, or ended on its own.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The kernel provided no eventfd or no thread.
    #[error("cannot start worker {name}: {source}; check the limits on open files and threads")]
    Start {
        /// The worker's name.
        name: String,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The thread cannot drop the system calls and capabilities that a turn does not need.
    #[error("worker {name}: {source}")]
    Sandbox {
        /// The worker's name.
        name: String,
        /// The reason.
        source: SandboxError,
    },
    /// `poll(2)` failed, so the worker cannot wait for frames.
    #[error("worker's poll failed: {0}; restart the agent")]
    Poll(#[source] Errno),
    /// The frame source is closed.
    #[error("the worker's frame source is closed: restart the agent to make a new hub")]
    SourceGone,
    /// A bug in the worker or its engine.
    #[error("the worker panicked (its message is in the log): restart the agent and report it")]
    Panicked,
}

/// Why a message did not reach a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The queue already holds [`CONTROL_QUEUE`], [`WAKE_QUEUE`] or [`LOOK_QUEUE`] messages.
    #[error("the worker's queue for this message is full: try again later")]
    Full,
    /// The worker has ended; [`WorkerHandle::stop`] returns the reason.
    #[error("the worker has ended")]
    Ended,
}

/// Counters of a worker's loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoopStats {
    /// Turns; each runs every step.
    pub turns: u64,
    /// Turns that left work for the next turn: frames in the ring, or slots in line.
    pub full_batches: u64,
    /// Times the worker slept in `poll(2)`.
    pub sleeps: u64,
    /// Times the worker napped while frames gathered.
    pub naps: u64,
    /// Total time slept and napped.
    pub slept: Duration,
    /// Time since the thread started.
    pub elapsed: Duration,
    /// Slots forgotten on request of the control side.
    pub forgotten: u64,
    /// Slots woken on request of the control side.
    pub woken: u64,
}

/// All counters of a worker, as last published; `T` is [`Engine::Stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats<T> {
    /// Counters of the loop.
    pub turns: LoopStats,
    /// Counters of the socket.
    pub socket: SocketStats,
    /// Received frames that were dropped before the engine.
    pub link: LinkStats,
    /// Frames sent to guests, and frames lost.
    pub tap: TapStats,
    /// Counters of the engine.
    pub engine: T,
}

/// An order to the whole engine.
enum Order {
    Drain(Duration, Option<Box<dyn ServedFlows + Send>>),
    Resume,
    Spare(bool),
}

/// The value of [`Shared::left`] while the worker does not drain.
const NOT_DRAINING: u64 = u64::MAX;

/// State shared by the worker and its handle.
#[derive(Debug)]
struct Shared<T> {
    bell: WakeFlag,
    stop: AtomicBool,
    /// Set when a queue holds a message: a slot to forget, wake or inspect, or an order.
    pending: Pending,
    /// How many connections remain while draining, stored after all of them were claimed; or [`NOT_DRAINING`].
    left: AtomicU64,
    stats: Mutex<WorkerStats<T>>,
    beat: Heartbeat,
}

/// A slot to inspect, and the callback for the result.
type SlotInspection = (Slot, Box<dyn FnOnce(SlotStats) + Send>);

/// The worker's ends of the queues.
#[derive(Debug)]
struct Inbox {
    forgets: Receiver<Slot>,
    wakes: Receiver<Slot>,
    looks: Receiver<SlotInspection>,
    orders: Receiver<Order>,
}

/// Starts worker threads.
#[derive(Debug)]
pub struct WorkerLauncher;

impl WorkerLauncher {
    /// Starts a thread that passes the frames of `source` to `engine` and sends its answers through `tap`.
    ///
    /// # Errors
    /// [`WorkerError::Start`] or [`WorkerError::Sandbox`]. No thread remains.
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
        let WorkerConfig { name, spin, sandbox } = config;
        let start = |source| WorkerError::Start { name: name.clone(), source };
        let shared = Arc::new(Shared {
            bell: WakeFlag::new().map_err(|errno| start(errno.into()))?,
            stop: AtomicBool::new(false),
            pending: Pending::new(),
            left: AtomicU64::new(NOT_DRAINING),
            stats: Mutex::default(),
            beat: Heartbeat::default(),
        });
        let (forget, forgets) = mpsc::sync_channel(CONTROL_QUEUE);
        let (wake, wakes) = mpsc::sync_channel(WAKE_QUEUE);
        let (look, looks) = mpsc::sync_channel(LOOK_QUEUE);
        let (order, orders) = mpsc::sync_channel(ORDERS);
        let inbox = Inbox { forgets, wakes, looks, orders };
        let (entered, outcome) = mpsc::sync_channel(1);
        let its = Arc::clone(&shared);
        let body = move || {
            let _last = LastBeat(its.beat.clone());
            let ready = sandbox.enter(SandboxStage::Work);
            let refused = ready.is_err();
            // The spawning thread waits for this one message, and returns if it reports a failure.
            if entered.send(ready).is_err() || refused {
                return Ok(());
            }
            run::Run::new(LinkReceiver::new(source), tap, engine, its, inbox, spin).run()
        };
        let thread = std::thread::Builder::new().name(name.clone()).spawn(body).map_err(start)?;
        let handle = WorkerHandle { shared, forget, wake, look, order, thread: Some(thread) };
        match outcome.recv() {
            Ok(Ok(())) => Ok(handle),
            // Dropping the handle ends the thread.
            Ok(Err(source)) => Err(WorkerError::Sandbox { name, source }),
            Err(_) => Err(WorkerError::Panicked),
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
    look: SyncSender<SlotInspection>,
    thread: Option<JoinHandle<Result<(), WorkerError>>>,
}

impl<T: Copy> WorkerHandle<T> {
    /// Releases everything the engine holds for `slot`. Frames that the kernel queued earlier still carry the slot,
    /// so unbind it in the kernel first.
    ///
    /// # Errors
    /// [`ControlError`]; the slot is not forgotten.
    pub fn forget(&self, slot: Slot) -> Result<(), ControlError> {
        self.send(&self.forget, slot)
    }

    /// Retries whatever waits on `slot`. Call it after the change, so that the worker sees it. Never blocks.
    ///
    /// # Errors
    /// [`ControlError`]; the slot is not woken. After [`ControlError::Full`] another attempt may succeed.
    pub fn wake(&self, slot: Slot) -> Result<(), ControlError> {
        self.send(&self.wake, slot)
    }

    /// Starts to drain the engine. [`left`](Self::left) returns how many connections remain, once the engine has
    /// claimed all of them.
    ///
    /// # Errors
    /// [`ControlError`]; the engine does not drain.
    pub fn drain(
        &self,
        limit: Duration,
        claims: Option<Box<dyn ServedFlows + Send>>,
    ) -> Result<(), ControlError> {
        self.send(&self.order, Order::Drain(limit, claims))
    }

    /// Stops draining and returns the engine to normal service.
    ///
    /// # Errors
    /// [`ControlError`]; the engine continues to drain.
    pub fn resume(&self) -> Result<(), ControlError> {
        self.send(&self.order, Order::Resume)
    }

    /// Sets whether the engine leaves unknown connections alone, because they may belong to another agent.
    ///
    /// # Errors
    /// [`ControlError`]; nothing changes.
    pub fn spare_unknown(&self, spare: bool) -> Result<(), ControlError> {
        self.send(&self.order, Order::Spare(spare))
    }

    /// How many connections remain while the worker drains. `None` if it does not drain, or has not claimed all of
    /// them yet. At most [`LEFT_EVERY`] old.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        // Acquire: a thread that reads a number also sees the claims made before it was stored.
        Some(self.shared.left.load(Ordering::Acquire)).filter(|left| *left != NOT_DRAINING)
    }

    /// Asks what the engine holds for `slot`. The worker calls `reply` in its next turn, or drops it if the worker
    /// ends first. `reply` must not block. Never blocks.
    ///
    /// # Errors
    /// [`ControlError`]; `reply` is not called.
    pub fn look(
        &self,
        slot: Slot,
        reply: impl FnOnce(SlotStats) + Send + 'static,
    ) -> Result<(), ControlError> {
        self.send(&self.look, (slot, Box::new(reply)))
    }

    /// The last published counters: at most [`PUBLISH_EVERY`] old under load, [`MAX_SLEEP`] when idle.
    #[must_use]
    pub fn stats(&self) -> WorkerStats<T> {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker's heartbeat, for a liveness check.
    #[must_use]
    pub fn heartbeat(&self) -> Heartbeat {
        self.shared.beat.clone()
    }

    /// True once the worker has ended. Before [`stop`](Self::stop) it ends only after an error.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the worker after its current turn and waits for the thread. Socket and tap are then closed.
    ///
    /// # Errors
    /// Why the worker had ended before this call.
    pub fn stop(mut self) -> Result<(), WorkerError> {
        self.join()
    }
}

impl<T> WorkerHandle<T> {
    fn send<M>(&self, queue: &SyncSender<M>, message: M) -> Result<(), ControlError> {
        queue.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => ControlError::Full,
            TrySendError::Disconnected(_) => ControlError::Ended,
        })?;
        self.shared.pending.set();
        self.shared.bell.ring();
        Ok(())
    }

    fn join(&mut self) -> Result<(), WorkerError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // Relaxed: the flag carries no other data, and the bell after it is a system call.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
        thread.join().unwrap_or(Err(WorkerError::Panicked))
    }
}

impl<T> Drop for WorkerHandle<T> {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!(%error, "worker ended with an error");
        }
    }
}

// An eventfd that wakes a sleeping worker. It stays readable until the worker resets it.

/// The control side rings it; the worker resets it.
#[derive(Debug)]
struct WakeFlag(OwnedFd);

impl WakeFlag {
    fn new() -> Result<Self, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Makes the descriptor readable. The only possible failure, a full counter, means that it already is.
    fn ring(&self) {
        let rung = write(&self.0, &1_u64.to_ne_bytes());
        debug_assert!(matches!(rung, Ok(8) | Err(Errno::AGAIN)), "{rung:?}");
    }

    /// Makes the descriptor unreadable again. A sender queues its message before it rings, so read messages after
    /// this call.
    fn hear(&self) {
        let heard = read(&self.0, &mut [0_u8; 8]);
        debug_assert!(matches!(heard, Ok(8) | Err(Errno::AGAIN)), "{heard:?}");
    }
}

impl AsFd for WakeFlag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

// Implements the worker's engine with the stack.

impl<S, L> Engine for Stack<S, L>
where
    S: Service + Send + 'static,
    S::Exchange: Send,
    L: AckLedger + Send + 'static,
{
    type Stats = StackStats;

    fn read_ahead(&self, group: &[(Slot, &[u8])]) {
        Stack::read_ahead(self, group);
    }

    fn receive(&mut self, now: Now, slot: Slot, frame: &[u8], out: &mut dyn Transmit) {
        // A slot with deferred output sends only in its own visits. If each acknowledgement caused more output, the
        // last waiting acknowledgements would be read so late that the retransmission timer would send data the guest
        // already has.
        self.allow(if self.owes(slot) { 0 } else { SEGMENTS_AT_ONCE });
        Stack::receive(self, now, slot, frame, out);
    }

    fn next_pending_slot(&mut self) -> Option<Slot> {
        Stack::next_pending_slot(self)
    }

    fn go_on(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) -> bool {
        self.allow(SEGMENTS_AT_ONCE);
        Stack::go_on(self, now, slot, out)
    }

    fn step(&mut self, now: Now, out: &mut dyn Transmit) -> Option<Duration> {
        self.allow(SEGMENTS_AT_ONCE);
        Stack::step(self, now, out)
    }

    fn forget(&mut self, slot: Slot) {
        Stack::forget(self, slot);
    }

    fn wake(&mut self, now: Now, slot: Slot, out: &mut dyn Transmit) {
        self.allow(SEGMENTS_AT_ONCE);
        Stack::wake(self, now, slot, out);
    }

    fn drain(&mut self, now: Now, limit: Duration, claims: Option<Box<dyn ServedFlows + Send>>) {
        Stack::drain(self, now, limit, claims);
    }

    fn resume(&mut self) {
        Stack::resume(self);
    }

    fn spare_unknown(&mut self, spare: bool) {
        Stack::spare_unknown(self, spare);
    }

    fn left(&self) -> usize {
        Stack::left(self)
    }

    fn end(&mut self) {
        Stack::end(self);
    }

    fn turned(&mut self, turn: Duration) {
        Stack::turned(self, turn);
    }

    fn look(&self, slot: Slot) -> SlotStats {
        Stack::look(self, slot)
    }

    fn stats(&self) -> StackStats {
        Stack::stats(self)
    }
}

// The heartbeat of a worker.

/// A worker whose last heartbeat is older is stuck: it publishes at least every [`MAX_SLEEP`].
pub const SILENCE: Duration = Duration::from_secs(5);

/// Stored in place of a time once the worker's thread has ended.
const ENDED: u64 = u64::MAX;

/// The time of a worker's last heartbeat. Reading it neither blocks nor delays the worker.
#[derive(Clone, Debug)]
pub struct Heartbeat(Arc<HeartbeatState>);

#[derive(Debug)]
struct HeartbeatState {
    start: Instant,
    /// Milliseconds since `start`.
    at: AtomicU64,
}

/// Why a worker fails the liveness check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Silence {
    /// The worker's thread has ended.
    #[error("has ended")]
    Ended,
    /// The worker's thread has not completed a turn for this long.
    #[error("has not responded for {0:.1?}; at most {SILENCE:?} is normal")]
    Stuck(Duration),
}

impl Default for Heartbeat {
    /// The heartbeat of a worker that starts now.
    fn default() -> Self {
        Self(Arc::new(HeartbeatState { start: Instant::now(), at: AtomicU64::new(0) }))
    }
}

impl Heartbeat {
    /// Records that the worker is alive at `mono` after its start.
    fn beat(&self, mono: Duration) {
        // Relaxed: the time carries no other data.
        self.0.at.store(millis(mono), Ordering::Relaxed);
    }

    /// Records that the worker's thread has ended.
    pub fn end(&self) {
        self.0.at.store(ENDED, Ordering::Relaxed);
    }

    /// When the worker started.
    fn start(&self) -> Instant {
        self.0.start
    }

    /// The age of the last heartbeat; `None` if the thread has ended.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let at = self.0.at.load(Ordering::Relaxed);
        (at != ENDED).then(|| self.0.start.elapsed().saturating_sub(Duration::from_millis(at)))
    }

    /// Checks that the worker is alive.
    ///
    /// # Errors
    /// The worker has ended, or its last heartbeat is older than [`SILENCE`].
    pub fn check(&self) -> Result<(), Silence> {
        match self.age() {
            None => Err(Silence::Ended),
            Some(age) if age > SILENCE => Err(Silence::Stuck(age)),
            Some(_) => Ok(()),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(ENDED - 1)
}

/// Records on drop that the thread has ended, whatever the reason.
struct LastBeat(Heartbeat);

impl Drop for LastBeat {
    fn drop(&mut self) {
        self.0.end();
    }
}
