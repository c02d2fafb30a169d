//! The loop that runs on the worker's thread.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{
    BUSY, CONTROL_BATCH, Engine, FairScheduler, Inbox, LEFT_EVERY, LOOK_QUEUE, LoopStats, MAX_SLEEP, NAP,
    NOT_DRAINING, ORDERS, Order, PACE, PUBLISH_EVERY, Shared, TurnResult, WorkerError, WorkerStats,
};
use crate::link::{FrameSource, HubTap, LinkReceiver, LinkStats};
use metadata_common::time::Now;

/// Both clocks. The calendar clock is read once a second, because a read costs as much as a check for a frame and
/// the `Date` header needs no finer value.
#[derive(Debug)]
struct Clock {
    start: Instant,
    unix_seconds: u64,
    /// When to read `unix_seconds` again, by `Now::mono`.
    stale: Duration,
}

impl Clock {
    fn new(start: Instant) -> Self {
        Self { start, unix_seconds: 0, stale: Duration::ZERO }
    }

    fn now(&mut self) -> Now {
        let mono = self.start.elapsed();
        if mono >= self.stale {
            // A clock set before 1970 counts as unset.
            let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.unix_seconds = unix.as_secs();
            self.stale = mono + Duration::from_secs(1) - Duration::from_nanos(unix.subsec_nanos().into());
        }
        Now { mono, unix_seconds: self.unix_seconds }
    }
}

/// Measures the rate of received frames.
#[derive(Debug, Default)]
struct FrameRate {
    /// Start of the current period, by `Now::mono`.
    since: Duration,
    frames: usize,
    is_busy: bool,
}

impl FrameRate {
    fn count(&mut self, now: Duration, frames: usize) {
        self.frames += frames;
        if now >= self.since + PACE {
            self.is_busy = self.frames >= BUSY;
            (self.since, self.frames) = (now, 0);
        }
    }
}

/// The state of a running worker.
pub(super) struct Run<S, E: Engine> {
    link: LinkReceiver<S>,
    tap: HubTap,
    engine: E,
    fair: FairScheduler,
    shared: Arc<Shared<E::Stats>>,
    inbox: Inbox,
    /// When to count the remaining connections, by `Now::mono`; `None` while nothing drains.
    count_at: Option<Duration>,
    spin: Duration,
    clock: Clock,
    pace: FrameRate,
    stats: LoopStats,
    /// When there was work last, and when counters were last published, by `Now::mono`.
    worked: Duration,
    published: Option<Duration>,
}

impl<S: FrameSource, E: Engine> Run<S, E> {
    pub(super) fn new(
        link: LinkReceiver<S>,
        tap: HubTap,
        engine: E,
        shared: Arc<Shared<E::Stats>>,
        inbox: Inbox,
        spin: Duration,
    ) -> Self {
        let (clock, pace) = (Clock::new(shared.beat.start()), FrameRate::default());
        let (stats, worked) = (LoopStats::default(), Duration::ZERO);
        Self {
            link,
            tap,
            engine,
            fair: FairScheduler::default(),
            shared,
            inbox,
            count_at: None,
            spin,
            clock,
            pace,
            stats,
            worked,
            published: None,
        }
    }

    /// Runs turns until the stop flag is set, and ends the engine.
    pub(super) fn run(mut self) -> Result<(), WorkerError> {
        let ended = self.run_turns();
        self.engine.end();
        ended
    }

    fn run_turns(&mut self) -> Result<(), WorkerError> {
        // The default timer slack of 50 µs would double a nap. Naps are longer if it cannot be changed.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut now = self.clock.now();
        // Relaxed: the flag carries no other data, and the bell after it wakes the poll.
        while !self.shared.stop.load(Ordering::Relaxed) {
            let (deadline, after) = self.turn(now);
            let fresh = after.mono > now.mono;
            now = after;
            if self.published.is_none_or(|at| now.mono >= at + PUBLISH_EVERY) {
                self.publish(now);
            }
            let sleep = deadline.map_or(MAX_SLEEP, |at| at.saturating_sub(now.mono)).min(MAX_SLEEP);
            if sleep.is_zero() || now.mono < self.worked + self.spin {
                std::hint::spin_loop();
                if !fresh {
                    now = self.clock.now();
                }
                continue;
            }
            if self.pace.is_busy {
                now = self.nap(now, sleep.min(NAP));
                continue;
            }
            self.publish(now);
            let overdue = self.published.is_none();
            now = self.sleep(now, if overdue { sleep.min(PUBLISH_EVERY) } else { sleep })?;
        }
        self.publish(now);
        Ok(())
    }

    /// Runs every step once. Returns the engine's next deadline and, if there was work, the time after it.
    fn turn(&mut self, now: Now) -> (Option<Duration>, Now) {
        let (forgotten, woken) = self.listen(now);
        let Self { link, tap, engine, fair, .. } = self;
        let TurnResult { received, work, more, due: deadline } = fair.turn(now, link, engine, tap);
        self.pace.count(now.mono, received);
        self.stats.turns += 1;
        self.stats.forgotten += forgotten as u64;
        self.stats.woken += woken as u64;
        self.stats.full_batches += u64::from(more);
        let busy = received + woken > 0 || work > 0;
        // An idle turn does not justify reading the clock.
        let after = if busy { self.clock.now() } else { now };
        self.engine.turned(after.mono.saturating_sub(now.mono));
        if busy || forgotten > 0 {
            self.worked = now.mono;
        }
        // More may be waiting than one turn takes, so the worker does not sleep before a turn that found less.
        let more = more || forgotten == CONTROL_BATCH || woken == CONTROL_BATCH;
        if more {
            return (Some(now.mono), after);
        }
        let count_at = self.count(now);
        (deadline.into_iter().chain(count_at).min(), after)
    }

    /// Processes the requests of the control side; returns how many slots it forgot and how many it woke.
    fn listen(&mut self, now: Now) -> (usize, usize) {
        // A sender queues its message before it sets this flag, so the message is visible here.
        if !self.shared.pending.take() {
            return (0, 0);
        }
        for _ in 0..ORDERS {
            let Ok(order) = self.inbox.orders.try_recv() else { break };
            self.obey(now, order);
        }
        let Self { tap, engine, fair, inbox: Inbox { forgets, wakes, looks, .. }, .. } = self;
        let forget = |slot| {
            fair.forget(slot);
            engine.forget(slot);
        };
        let forgotten = forgets.try_iter().take(CONTROL_BATCH).map(forget).count();
        let woken = wakes.try_iter().take(CONTROL_BATCH).map(|slot| engine.wake(now, slot, tap)).count();
        for (slot, reply) in looks.try_iter().take(LOOK_QUEUE) {
            // The requester may have stopped waiting.
            reply(engine.look(slot));
        }
        if forgotten == CONTROL_BATCH || woken == CONTROL_BATCH {
            self.shared.pending.set_again();
        }
        (forgotten, woken)
    }

    fn obey(&mut self, now: Now, order: Order) {
        match order {
            Order::Drain(limit, claims) => {
                self.engine.drain(now, limit, claims);
                self.count_at = Some(now.mono);
                // All flows are claimed. The ring may still hold frames of more, so the count is at least 1.
                self.publish_left(self.engine.left().max(1));
            }
            Order::Resume => {
                self.engine.resume();
                self.count_at = None;
                self.shared.left.store(NOT_DRAINING, Ordering::Relaxed);
            }
            Order::Spare(spare) => self.engine.spare_unknown(spare),
        }
    }

    /// Publishes how many connections remain, if it is time. It runs after a turn that emptied the ring: earlier it
    /// could report zero while the ring holds the first frame of another. Returns the time of the next count.
    fn count(&mut self, now: Now) -> Option<Duration> {
        let at = self.count_at?;
        if at > now.mono {
            return Some(at);
        }
        self.publish_left(self.engine.left());
        self.count_at = Some(now.mono + LEFT_EVERY);
        self.count_at
    }

    fn publish_left(&self, left: usize) {
        // Release: a thread that reads the number also sees the claims.
        self.shared.left.store(left as u64, Ordering::Release);
    }

    /// Sleeps while frames gather, without polling for them; returns the time after.
    fn nap(&mut self, before: Now, long: Duration) -> Now {
        std::thread::sleep(long);
        let after = self.clock.now();
        self.stats.naps += 1;
        self.stats.slept += after.mono.saturating_sub(before.mono);
        after
    }

    /// Waits for a frame, the bell or the timeout; returns the time after.
    fn sleep(&mut self, before: Now, longest: Duration) -> Result<Now, WorkerError> {
        // `longest` is at most MAX_SLEEP, so the conversion cannot fail. If it did, not sleeping would be correct.
        let timeout = Timespec::try_from(longest).unwrap_or_default();
        let mut fds =
            [PollFd::new(self.link.source(), PollFlags::IN), PollFd::new(&self.shared.bell, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(WorkerError::Poll(errno)),
        }
        let [source, bell] = fds.map(|fd| fd.revents());
        if source.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            return Err(WorkerError::SourceGone);
        }
        if bell.contains(PollFlags::IN) {
            self.shared.bell.hear();
        }
        let after = self.clock.now();
        self.stats.sleeps += 1;
        self.stats.slept += after.mono.saturating_sub(before.mono);
        Ok(after)
    }

    /// Records the heartbeat and refreshes the snapshot. If the snapshot is being read, `published` becomes `None`
    /// and the refresh stays due.
    fn publish(&mut self, now: Now) {
        self.shared.beat.beat(now.mono);
        self.stats.elapsed = now.mono;
        let mut snapshot = match self.shared.stats.try_lock() {
            Ok(snapshot) => snapshot,
            // A reader panicked while it copied. That does not matter, since the snapshot is overwritten as a whole.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.published = None;
                return;
            }
        };
        // If the kernel's counters cannot be read, the last values stay.
        let socket = self.link.source().stats().unwrap_or(snapshot.socket);
        *snapshot = WorkerStats {
            turns: self.stats,
            socket,
            link: LinkStats { over_share: self.fair.dropped(), ..self.link.stats() },
            tap: self.tap.stats(),
            engine: self.engine.stats(),
        };
        self.published = Some(now.mono);
    }
}
